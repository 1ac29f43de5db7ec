"""Dispatch, combine and gradients that belong together are of one mode, K and order of rows."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.documents.moe_nodes import MoeNode, moe_nodes
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject

ORDER = code(
    "MO507",
    "error",
    "A combine reads the dispatch's rows in another order",
    why="MoeInitRoutingV2 names the rows token by token. MoeFinalizeRoutingV2 reads them so in its modes "
    "2 and 3; modes 0 and 1, and 0 is the default, are for the first version of the dispatch, which went "
    "choice by choice. All sizes agree and nothing complains: tokens get other tokens' rows.",
    mend="Set drop_pad_mode to 2 (dropless) or 3 (drop/pad).",
)
MODE = code(
    "MO508",
    "error",
    "Two operators share indices but not their mode",
    why="A row index has a meaning only in the mode in which it was made: without drop/pad it is a row, "
    "with it a row of `[E, C]` or -1, and the padded `sorted_indices` are tokens. The device reads what "
    "it is told.",
    mend="Give both operators the same drop_pad_mode, drop_and_pad and top_k.",
)
_INDEX_OF = {  # input that names rows: which of the operator's inputs it is
    "MoeInitRoutingV2Grad": "expanded_row_idx",
    "MoeFinalizeRoutingV2": "expanded_row_idx",
    "MoeFinalizeRoutingV2Grad": "expanded_row_idx",
    "MoeTokenUnpermuteWithRoutingMap": "sorted_indices",
    "MoeTokenPermuteWithRoutingMapGrad": "sorted_indices",
    "MoeTokenUnpermuteWithRoutingMapGrad": "out_index",
}


@check("static", ORDER, MODE)
def modes_agree(subject: Subject) -> Iterator[Outcome]:
    """Operators that take their row indices from another one are of its mode, K and order."""
    nodes = {id(node.node): node for node in moe_nodes(subject)}
    yield from collapsed(finding for node in nodes.values() for finding in _of_node(node, nodes))


def _of_node(node: MoeNode, nodes: dict[int, MoeNode]) -> Iterator[Finding]:
    argument = _INDEX_OF.get(node.spec.name)
    if argument is None or node.settings is None:
        return
    made = _maker(node.scope, node.name(argument))
    source = None if made is None else nodes.get(id(made[0]))
    if made is None or source is None or source.settings is None:
        return
    output = made[1]
    here, there = node.is_padded, source.is_padded
    if source.spec.name == "MoeInitRoutingV2" and output == 1:
        top_k = source.dim("expert_idx", 1)
        if node.spec.name == "MoeFinalizeRoutingV2" and node.settings["drop_pad_mode"] < 2:
            # With one slot a token, or one token, both orders are the same.
            if top_k is not None and top_k > 1 and source.dim("expert_idx", 0) != 1:
                mode = node.settings["drop_pad_mode"]
                yield ORDER(
                    node.place,
                    found=f"drop_pad_mode {mode} reads by column; {source.place} goes by row",
                    expected=f"drop_pad_mode {3 if there else 2}",
                )
            return
        if node.spec.name == "MoeInitRoutingV2Grad" and top_k not in (None, node.settings["top_k"]):
            yield MODE(
                node.place,
                found=f"top_k is {node.settings['top_k']}; {source.place} has {top_k} experts a token",
                expected=f"top_k {top_k}",
            )
        # The combine by map would read tokens where it is padded; without, a row or -1 is a row or -1.
        if node.spec.name in ("MoeTokenUnpermuteWithRoutingMap", "MoeTokenUnpermuteWithRoutingMapGrad"):
            there = False
    elif source.spec.name == "MoeTokenPermuteWithRoutingMap" and output == 2:
        if node.spec.name == "MoeTokenUnpermuteWithRoutingMapGrad" and here and there:
            yield MODE(
                node.place,
                found=f"with drop_and_pad 'out_index' is sorted_indices of {source.place}, which are tokens",
                expected="out_index of MoeTokenUnpermuteWithRoutingMap, the places of their sort",
            )
    elif source.spec.name != "MoeTokenUnpermuteWithRoutingMap" or output not in (1, 2):
        return
    if here != there:
        yield MODE(
            node.place,
            found=f"{_said(node)} beside {_said(source)} of {source.place}",
            expected="the mode in which the indices were made",
        )


def _maker(scope: Scope, name: str) -> tuple[NodeProto, int] | None:
    """The operator of this package that made an index, and which output it is; through Identity alone."""
    for _ in range(64):  # a cycle is the business of other checks
        found = scope.producer(name)
        if found is None:
            return None
        scope, node = found
        if node.domain == DOMAIN:
            return node, list(node.output).index(name)
        if node.op_type != "Identity" or len(node.input) != 1:
            return None
        name = node.input[0]
    return None


def _said(node: MoeNode) -> str:
    name = "drop_pad_mode" if "drop_pad_mode" in (node.settings or {}) else "drop_and_pad"
    return f"{name} {(node.settings or {})[name]}"
