"""The node that gives experts their rows, and what else says which rows are whose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import NotThis, attribute, ints, is_axis, producer, reads, size
from moe_onnx.spec import DOMAIN

_SAME = ("Identity", "Reshape", "Unsqueeze")
_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
BY_INDEX, BY_MAP = "MoeInitRoutingV2", "MoeTokenPermuteWithRoutingMap"


@dataclass(frozen=True)
class Dispatch:
    """A dispatch that drops no rows: tokens in, ``rows`` by expert out, ``index`` the row of each pair."""

    node: ir.Node
    tokens: ir.Value
    rows: ir.Value
    index: ir.Value
    experts: int
    top_k: int

    def is_counts(self, value: ir.Value | None) -> bool:
        """Whether a value is the number of rows of each expert."""
        value = _counted(value)
        if self.node.op_type == BY_INDEX:
            flag = attribute(self.node, "expert_tokens_count_or_cumsum_flag", 0)
            return value is self.node.outputs[2] and flag == 2
        total = producer(value, "ReduceSum")
        chosen = _counted(total.inputs[0]) if total is not None else None
        return (
            total is not None
            and ints(reads(total, 1)) in ([0], [-2])
            and not attribute(total, "keepdims", 1)
            and chosen is self.node.inputs[1]
        )

    def is_expert_of_row(self, value: ir.Value | None) -> bool:
        """Whether a value is the expert of each row, in one of the two ways that this package writes."""
        scatter = producer(value, "ScatterElements")
        if scatter is not None:  # what fuse leaves: ids put where their rows are
            flat = producer(scatter.inputs[0], "Reshape")
            return (
                flat is not None
                and self.node.op_type == BY_INDEX
                and flat.inputs[0] is self.node.inputs[1]
                and scatter.inputs[2] is scatter.inputs[0]
                and scatter.inputs[1] is self.index
                and attribute(scatter, "reduction", "none") == "none"
            )
        # What the builder writes: how many experts' rows have ended before it.
        total = producer(value, "ReduceSum")
        cast = producer(total.inputs[0], "Cast") if total is not None else None
        ended = producer(cast.inputs[0], "GreaterOrEqual") if cast is not None else None
        if ended is None:
            return False
        row, end = producer(ended.inputs[0], "Unsqueeze"), producer(ended.inputs[1], "CumSum")
        numbers = producer(row.inputs[0], "Range") if row is not None else None
        return (
            numbers is not None
            and ints(numbers.inputs[0]) == [0]
            and ints(numbers.inputs[2]) == [1]
            and end is not None
            and self.is_counts(end.inputs[0])
            and not attribute(end, "exclusive", 0)
            and not attribute(end, "reverse", 0)
        )


def is_same_type(node: ir.Node) -> bool:
    """Whether a node casts to the type that there is already, so that it changes nothing."""
    if producer(node.outputs[0], "Cast", "CastLike") is None:
        return False
    given, made = node.inputs[0], _type_of(node)
    return given is not None and given.dtype is not None and given.dtype == made


def _type_of(cast: ir.Node) -> ir.DataType | None:
    """What a Cast or CastLike makes of its input, if that is known."""
    if cast.op_type == "CastLike":
        like = reads(cast, 1)
        return None if like is None else like.dtype
    to = cast.attributes.get("to")
    return None if to is None or to.is_ref() else ir.DataType(to.as_int())


def _counted(value: ir.Value | None) -> ir.Value | None:
    """What a small whole number is made of: a Cast to a wide integer keeps it, one to bool does not."""
    while (node := producer(value, "Cast", "Identity")) is not None:
        if node.op_type == "Cast" and _type_of(node) not in _INTEGERS:
            break
        value = node.inputs[0]
    return value


def number(value: ir.Value | None) -> float | None:
    """A constant of one element, as the Casts behind it leave it."""
    casts: list[ir.DataType | None] = []
    while (node := producer(value, *_SAME, "Cast", "CastLike")) is not None:
        if node.op_type not in _SAME:
            casts.append(_type_of(node))
        value = node.inputs[0]
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or isinstance(tensor, ir.ExternalTensor):
        return None
    found = float(tensor.numpy().reshape(-1)[0])
    for kind in reversed(casts):
        if kind in _FLOATS:
            found = float(np.asarray(found).astype(kind.numpy()))
        elif kind not in _INTEGERS or not found.is_integer():
            return None
    return found


def dispatch_of(combine: ir.Node) -> Dispatch:
    """The dispatch whose rows a node combines.

    Raises:
        NotThis: If there is none, or it may drop rows.
    """
    index, chosen = reads(combine, 1), reads(combine, 2)
    node = None if index is None else index.producer()
    if node is None or node.domain != DOMAIN or node.op_type not in (BY_INDEX, BY_MAP):
        made = "no node" if node is None else node.op_type
        raise NotThis(combine, f"its sorted_indices are made by {made}, not by {BY_INDEX} or {BY_MAP}")
    dropping = ("drop_pad_mode", "active_num", "drop_and_pad", "num_out_tokens")
    if any(attribute(node, name, 0) for name in dropping):
        raise NotThis(node, "may drop rows; MoE drops none")
    place = 1 if node.op_type == BY_INDEX else 2
    if index is not node.outputs[place]:
        raise NotThis(combine, f"its sorted_indices are not output {place} of {node.op_type}")
    ids = _ids_of_map(chosen)
    top_k = size(ids, 1)
    if node.op_type == BY_INDEX:
        experts, given = attribute(node, "expert_num", 0), node.inputs[1]
        known = ids is not None and size(given, 1) == top_k and _is_sorted(given, ids, top_k)
    else:
        experts, known = size(chosen, 1), ids is not None and chosen is node.inputs[1]
    if not known:
        raise NotThis(combine, "its routing_map is not known to be that of the dispatch, its ids ascending")
    if not experts or not top_k:
        raise NotThis(node, "the number of experts, or of those a token has, is not known")
    tokens = node.inputs[0]
    assert tokens is not None and index is not None
    return Dispatch(node, tokens, node.outputs[0], index, experts, top_k)


def _ids_of_map(chosen: ir.Value | None) -> ir.Value | None:
    """``ids`` of a map that is True at them: ``ScatterElements(False, ids, True)`` along the last axis."""
    node = producer(chosen, "ScatterElements")
    if node is None or not is_axis(attribute(node, "axis", 0), 1, 2):
        return None
    for place, wanted in ((0, 0), (2, 1)):
        filled = producer(node.inputs[place], "Expand")
        if filled is None or number(filled.inputs[0]) != wanted:
            return None
    return node.inputs[1]


def _is_sorted(given: ir.Value | None, ids: ir.Value, top_k: int | None) -> bool:
    """Whether a value is these ids, ascending in each token."""
    given = _counted(given)
    top = producer(given, "TopK")
    if top is None or given is not top.outputs[0] or attribute(top, "largest", 1):
        return given is ids and top_k == 1
    return top.inputs[0] is ids
