"""Constant index inputs: values in the documents' ranges, and unique where they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moe_onnx.errors import ACLNN_ERR_INNER_TILING_ERROR
from moe_onnx.spec import MAX_ROWS
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.documents.moe_nodes import Array, MoeNode, moe_nodes, product
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

OUT_OF_RANGE = code(
    "MO503",
    "error",
    "A constant index names what is not there",
    why="The documents give a range for every index tensor, but the device does not look at the values: a "
    "value out of range is read or written out of bounds. `Gather` of ONNX takes -1 for the last row. "
    "This package checks values at run time and stops there (561002).",
    mend="Mend the constant, or compute the indices in the graph.",
)
DUPLICATE = code(
    "MO504",
    "error",
    "A constant index names one row twice",
    why="Every slot has a row of its own (values other than -1 are unique, says the document). Two slots "
    "that write one row leave the last writer's on a device, and which that is changes from run to run.",
    mend="Mend the constant: each row once, -1 for a slot without a row.",
)
GROUPS = code(
    "MO505",
    "error",
    "Constant group sizes do not add up to the rows",
    why="The rows of a grouped product are split by `group_sizes`; rows past the last group would belong "
    "to no expert, and their results would be what stood in memory.",
    mend="Let the sizes sum to the number of rows.",
)


@dataclass(frozen=True)
class Rule:
    """What the values of an index input must be: in ``[low, high)``, ``high`` None where it is not known.

    Elements outside ``read`` mean nothing.
    """

    argument: str
    low: int
    high: int | None
    mode: str
    unique: bool = False
    read: Array | None = None


@check("static", OUT_OF_RANGE, DUPLICATE, GROUPS)
def constant_indices(subject: Subject) -> Iterator[Outcome]:
    """Constant indices and group sizes of operators are in range and unique."""
    yield from collapsed(finding for node in moe_nodes(subject) for finding in _of_node(node))


def _of_node(node: MoeNode) -> Iterator[Finding]:
    if node.legal is None:
        return
    for rule in RULES[node.spec.name](node):
        index = node.constant(rule.argument)
        if index is not None and index.dtype == np.int32:
            yield from _check(node, rule, index)


def _check(node: MoeNode, rule: Rule, index: Array) -> Iterator[Finding]:
    tensor = f"constant {node.name(rule.argument)!r}"
    bad = index < rule.low
    if rule.high is not None:
        bad |= index >= rule.high
    if rule.read is not None and rule.read.shape == index.shape:
        bad &= rule.read
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), bad.shape)
        more = f" and {int(bad.sum()) - 1} more" if bad.sum() > 1 else ""
        high = "the number of rows" if rule.high is None else rule.high
        yield OUT_OF_RANGE(
            node.place,
            found=f"{tensor} ('{rule.argument}') has {index[at]} at position {[int(i) for i in at]}{more}",
            expected=f"in [{rule.low}, {high}) ({rule.mode})",
            aclnn=ACLNN_ERR_INNER_TILING_ERROR,
        )
        return
    if rule.unique:
        named, counts = np.unique(index[index >= 0], return_counts=True)
        if (counts > 1).any():
            value = int(named[counts > 1][0])
            places = np.flatnonzero(index.reshape(-1) == value)[:2].tolist()
            yield DUPLICATE(
                node.place,
                found=f"{tensor} ('{rule.argument}') has {value} at position {places[0]} and at {places[1]}",
                expected="unique values apart from -1" if rule.low < 0 else "unique values",
                aclnn=ACLNN_ERR_INNER_TILING_ERROR,
            )
    rows = node.dim("x", 0) if rule.argument == "group_sizes" else None
    if rows is not None and int(index.sum(dtype=np.int64)) != rows:
        yield GROUPS(
            node.place,
            found=f"{tensor} sums to {int(index.sum(dtype=np.int64))}",
            expected=f"{rows}, the rows of 'x'",
            aclnn=ACLNN_ERR_INNER_TILING_ERROR,
        )


def _dispatch(node: MoeNode) -> list[Rule]:
    experts = (node.legal or {})["expert_num"]
    return [Rule("expert_idx", 0, experts or MAX_ROWS + 1, "an expert, expert_num 0 is any")]


def _rows(node: MoeNode, argument: str, rows: int | None, slots: int | None) -> Rule:
    """The row of each slot of ``expanded_row_idx``: there are ``rows`` of them in drop/pad."""
    if node.is_padded:
        return Rule(argument, -1, rows, "drop/pad, -1 is a dropped slot", unique=True)
    return Rule(argument, 0, slots, "without drop/pad", unique=True)


def _dispatch_grad(node: MoeNode) -> list[Rule]:
    rows = product((node.shape("grad_expanded_x") or (None,))[:-1])
    return [_rows(node, "expanded_row_idx", rows, node.dim("expanded_row_idx", 0))]


def _finalize(node: MoeNode) -> list[Rule]:
    shape = node.shape("expanded_x")
    if node.spec.name.endswith("Grad"):
        checked = node.checked
        shape = checked[1][0].shape if isinstance(checked, tuple) and checked[1][0] is not None else None
    rows = product((shape or (None,))[:-1])
    rules = [_rows(node, "expanded_row_idx", rows, node.dim("expanded_row_idx", 0))]
    if node.name("bias") and node.info("bias") is not None:
        rules.append(
            Rule("expert_idx", 0, node.dim("bias", 0), "an expert of 'bias'", read=_live(node, rows))
        )
    return rules


def _live(node: MoeNode, rows: int | None) -> Array:
    """Which slots of ``[T, K]`` have a row; none where that is not known, so that none is checked."""
    experts, index = node.constant("expert_idx"), node.constant("expanded_row_idx")
    shape = (0, 0) if experts is None or experts.ndim != 2 else experts.shape
    everywhere = np.ones(shape, np.bool_)
    legal = node.legal or {}
    if not node.is_padded and not legal.get("active_num"):
        return everywhere
    if index is None or rows is None or index.size != everywhere.size:
        return ~everywhere
    by_column = node.spec.name == "MoeFinalizeRoutingV2" and legal["drop_pad_mode"] < 2
    slots = index.reshape(shape[::-1]).T if by_column else index.reshape(shape)
    live: Array = (slots >= 0) & (slots < rows)
    return live


def _tokens(node: MoeNode) -> int | None:
    """The number of tokens, by whatever tells it."""
    legal = node.legal or {}
    if node.spec.name == "MoeTokenUnpermuteWithRoutingMapGrad":
        return node.dim("unpermuted_tokens_grad", 0)
    known = node.dim("routing_map", 0)
    if known is None and node.spec.name == "MoeTokenUnpermuteWithRoutingMap":
        restore = legal.get("restore_shape") or (None,)
        known = node.dim("probs", 0) if node.info("probs") is not None else restore[0]
    return legal.get("tokens_num") or known


def _sorted_indices(node: MoeNode) -> list[Rule]:
    if node.is_padded:
        return [Rule("sorted_indices", 0, _tokens(node), "drop_and_pad, a token")]
    rows = (
        "permuted_tokens"
        if node.spec.name == "MoeTokenUnpermuteWithRoutingMap"
        else "permuted_token_output_grad"
    )
    return [Rule("sorted_indices", -1, node.dim(rows, 0), "-1 leaves the slot out", unique=True)]


def _combine_grad(node: MoeNode) -> list[Rule]:
    padded, out_index = node.is_padded, node.constant("out_index")
    slots, rows = node.dim("out_index", 0), node.dim("permuted_tokens", 0)
    low, mode = (0, "drop_and_pad") if padded else (-1, "-1 skips the slot")
    # 'permuted_tokens' may have fewer rows than there are slots, if none of the others is named.
    rules = [Rule("out_index", low, slots if rows is None else rows, mode, unique=True)]
    token = node.constant("permute_token_id")
    if token is None or (not padded and out_index is None):
        return rules  # without padding it may be out_index again, where it is not read
    if not padded and is_slot_form(node):
        return rules
    read = None if out_index is None else np.asarray(out_index >= 0)
    return [*rules, Rule("permute_token_id", 0, _tokens(node), "a token", read=read)]


def _groups(node: MoeNode) -> list[Rule]:
    rows = node.dim("x", 0)
    return [Rule("group_sizes", 0, None if rows is None else rows + 1, "rows of one expert")]


def _no_indices(node: MoeNode) -> list[Rule]:
    return []


RULES: dict[str, Callable[[MoeNode], list[Rule]]] = {
    "MoeInitRoutingV2": _dispatch,
    "MoeInitRoutingV2Grad": _dispatch_grad,
    "MoeTokenPermuteWithRoutingMap": _no_indices,
    "MoeTokenPermuteWithRoutingMapGrad": _sorted_indices,
    "MoeTokenUnpermuteWithRoutingMap": _sorted_indices,
    "MoeTokenUnpermuteWithRoutingMapGrad": _combine_grad,
    "MoeFinalizeRoutingV2": _finalize,
    "MoeFinalizeRoutingV2Grad": _finalize,
    "MoeGroupedMatmul": _groups,
    "MoeGroupedMatmulWeightGrad": _groups,
    "MoeSwiGlu": _no_indices,
    "MoeSwiGluGrad": _no_indices,
    "MoeSquareSum": _no_indices,
    "MoeAdamW": _no_indices,
}


def is_slot_form(node: MoeNode) -> bool:
    """Whether the gradient of the combine is surely told the same indices twice."""
    if node.name("out_index") == node.name("permute_token_id"):
        return True
    index, token = node.constant("out_index"), node.constant("permute_token_id")
    return index is not None and token is not None and np.array_equal(index, token)
