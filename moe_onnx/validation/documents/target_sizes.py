"""What the target must be told or cannot take, although the operators of this package can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe_onnx.errors import (
    ACLNN_ERR_INNER_TILING_ERROR,
    ACLNN_ERR_PARAM_INVALID,
    ACLNN_ERR_PARAM_NULLPTR,
)
from moe_onnx.spec import MAX_TOP_K
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.documents.moe_nodes import MoeNode, constant, moe_nodes
from moe_onnx.validation.documents.targets import DEVICES
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

WRITTEN_OUT = code(
    "MO536",
    "note",
    "The device must be told a size that stands in the shapes here",
    why="So that one graph serves batches of any size, `num_out_tokens`, `tokens_num`, `num_experts` and "
    "`restore_shape` may be 0 or absent in this package, and are then read from the shapes. The device "
    "takes 0 at its word: no rows, or an error.",
    mend="Fill in the size when the operator is called, or where the model is converted.",
)
EMPTY = code(
    "MO537",
    "warning",
    "The device refuses an empty tensor here",
    why="The documents allow empty tensors in places where the kernels' tiling refuses any size of 0 "
    "(561002); MoeInitRoutingV2Grad returns at once since 2026-05 where its result is empty. Here they "
    "are defined: no rows in, no rows or zeros out.",
    mend="Skip the operator for empty batches on the device.",
)
AT_THE_LIMIT = code(
    "MO538",
    "warning",
    "A size is exactly at a limit that not every document allows",
    why="The kernels refuse more than 512 experts per token and let 512 pass; the documents of the "
    "dispatch and the combine by map ask for less than 512 in one place and at most 512 in another. So it "
    "is with a capacity of as many rows as there are tokens in MoeInitRoutingV2.",
    mend="Stay below the limit.",
)
SKIPPED_SLOTS = code(
    "MO539",
    "note",
    "The combine leaves out slots, which older kernels cannot",
    why="In the active mode the combine by map is given -1 for slots without a row. The kernels skip -1 "
    "since 2026-06-09 (MoeTokenUnpermuteWithRoutingMap) and 2026-05-18 (its gradient); before, they read "
    "and write out of bounds. So they do for tokens with fewer experts than slots.",
    mend="See which release of CANN the device has, or use the dropless or drop/pad mode there.",
)


@check("static", WRITTEN_OUT, EMPTY, AT_THE_LIMIT, SKIPPED_SLOTS)
def target_sizes(subject: Subject) -> Iterator[Outcome]:
    """The target is told all sizes, and gets none that its kernels do not take."""
    if subject.options.target not in DEVICES:
        yield Skipped("no target was given")
        return
    rules = (_sizes_to_write_out, _empty, _at_the_limit, _skipped_slots)
    nodes = moe_nodes(subject)
    yield from collapsed(finding for node in nodes for rule in rules for finding in rule(node))


def _sizes_to_write_out(node: MoeNode) -> Iterator[Finding]:
    legal, op = node.legal, node.spec.name
    if legal is None:
        return
    wanted: list[tuple[str, str, int]] = []
    if op == "MoeTokenPermuteWithRoutingMap" and not legal["num_out_tokens"]:
        wanted.append(("num_out_tokens", "T*K", ACLNN_ERR_PARAM_INVALID))
    elif op == "MoeTokenPermuteWithRoutingMapGrad":
        sizes = (("tokens_num", "T"), ("num_experts", "E"))
        wanted += [(name, size, ACLNN_ERR_PARAM_INVALID) for name, size in sizes if not legal[name]]
    elif op == "MoeTokenUnpermuteWithRoutingMap" and not legal["restore_shape"]:
        if node.info("probs") is None:
            wanted.append(("restore_shape", "[T, H]", ACLNN_ERR_PARAM_NULLPTR))
    elif op == "MoeFinalizeRoutingV2Grad" and legal["drop_pad_mode"] == 1:
        sizes = (("expert_num", "E"), ("expert_capacity", "C"))
        wanted += [(name, size, ACLNN_ERR_INNER_TILING_ERROR) for name, size in sizes if not legal[name]]
    for name, size, status in wanted:
        said = "absent" if name == "restore_shape" else "0"
        yield WRITTEN_OUT(node.place, found=f"'{name}' is {said}", expected=f"{name} = {size}", aclnn=status)


def _empty(node: MoeNode) -> Iterator[Finding]:
    if node.spec.name not in _NOT_EMPTY or node.legal is None:
        return
    for argument in _NOT_EMPTY[node.spec.name](node):
        shape = node.shape(argument)
        if shape is not None and 0 in shape:
            yield EMPTY(
                node.place,
                found=f"'{argument}' has shape {list(shape)}",
                expected="no size of 0",
                aclnn=ACLNN_ERR_INNER_TILING_ERROR,
            )
            return


def _dispatch_grad(node: MoeNode) -> tuple[str, ...]:
    # In drop/pad there may be no rows at all: every index is -1 then.
    padded = node.legal is not None and node.legal["drop_pad_mode"] == 1
    return ("expanded_row_idx",) if padded else ("expanded_row_idx", "grad_expanded_x")


_NOT_EMPTY: dict[str, Callable[[MoeNode], tuple[str, ...]]] = {
    "MoeInitRoutingV2Grad": _dispatch_grad,
    "MoeTokenPermuteWithRoutingMapGrad": lambda node: ("permuted_token_output_grad",),
    "MoeTokenUnpermuteWithRoutingMapGrad": lambda node: (
        ("unpermuted_tokens_grad",)
        if node.info("probs") is not None and not node.attributes.get("drop_and_pad")
        else ()
    ),
    "MoeFinalizeRoutingV2": lambda node: ("expanded_x", "expanded_row_idx"),
    "MoeFinalizeRoutingV2Grad": lambda node: ("grad_y", "expanded_row_idx"),
}


def _at_the_limit(node: MoeNode) -> Iterator[Finding]:
    legal, op = node.legal, node.spec.name
    if legal is None:
        return
    if op == "MoeInitRoutingV2" and legal["drop_pad_mode"] == 1:
        if legal["expert_capacity"] == node.dim("x", 0):
            rows = legal["expert_capacity"]
            yield AT_THE_LIMIT(
                node.place, found=f"capacity {rows} for {rows} tokens", expected="a smaller one"
            )
        return
    slots: int | None = None
    if op == "MoeTokenPermuteWithRoutingMap":
        slots = legal["num_out_tokens"]
    elif op == "MoeTokenUnpermuteWithRoutingMap":
        slots = node.dim("sorted_indices", 0)
    tokens = node.dim("routing_map", 0) if slots else None
    if slots and tokens and not node.is_padded and slots == MAX_TOP_K * tokens:
        yield AT_THE_LIMIT(node.place, found=f"{slots} rows for {tokens} tokens", expected="fewer than 512")


_SKIPS = {
    "MoeTokenUnpermuteWithRoutingMap": ("sorted_indices", "2026-06-09"),
    "MoeTokenUnpermuteWithRoutingMapGrad": ("out_index", "2026-05-18"),
}


# Operators that an index comes through as it is, and by which input.
_FOLLOWED = {"Identity": 0, "Cast": 0, "Reshape": 0, "MoeTokenUnpermuteWithRoutingMap": 1}


def _skipped_slots(node: MoeNode) -> Iterator[Finding]:
    """A constant index with -1, or one that a Where sets to -1."""
    argument, since = _SKIPS.get(node.spec.name, ("", ""))
    if not argument or node.legal is None or node.is_padded:
        return
    scope, name = node.scope, node.name(argument)
    indices = [constant(scope, name)]
    for _ in range(64):  # a cycle is the business of other checks
        made = scope.producer(name)
        if made is None:
            break
        scope, maker = made
        if maker.op_type == "Where":
            indices += [constant(scope, choice) for choice in maker.input[1:]]
        at = _FOLLOWED.get(maker.op_type, len(maker.input))
        if at >= len(maker.input):
            break
        name = maker.input[at]
    if any(index is not None and index.size and (index == -1).any() for index in indices):
        yield SKIPPED_SLOTS(node.place, found=f"'{argument}' is -1 for some slots; skipped since {since}")
