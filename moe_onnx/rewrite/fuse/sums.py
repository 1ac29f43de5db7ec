"""Sums of each token's rows that stand alone: combines, and gradients of dispatches.

    rows[index] -> [T, K, H] -> sum over K                 -> MoeInitRoutingV2Grad
    rows[index] -> [T, K, H] -> * w [T, K, 1] -> sum       -> MoeFinalizeRoutingV2
    y[order // K] += rows                                  -> MoeInitRoutingV2Grad, by the inverse of order

Rows put to ``y[order]`` are as good as those gathered by its inverse. That an index names every row once is
proved from how it is made, as both operators refuse others: by sorting all pairs, its inverse, or
MoeInitRoutingV2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.rewrite.fuse.block import Block
from moe_onnx.rewrite.fuse.graph import (
    Inserter,
    NotThis,
    attribute,
    ints,
    is_op,
    only_user,
    producer,
    put,
    rank,
    reads,
    size,
)
from moe_onnx.rewrite.fuse.orders import Order, order_of, pairs_of
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.shapes import folded, is_filled, number
from moe_onnx.rewrite.fuse.steps import whole_rows
from moe_onnx.rewrite.fuse.walk import finish
from moe_onnx.rewrite.notes import MARK


@dataclass
class Sum:
    """``rows`` by ``index`` in the order of pairs; ``moved`` is that; or ``end`` adds them to tokens."""

    node: ir.Node
    rows: ir.Value
    index: ir.Value
    inverse: bool  # the index says where each row goes, not where it comes from
    adds: bool = False


def sums(graph: ir.Graph) -> list[Sum]:
    """What may be one in a graph."""
    found = []
    for node in graph:
        if MARK in node.metadata_props or node.inputs[:1] == [None]:
            continue
        one = _sum_of(node)
        if one is not None:
            found.append(one)
    return found


def _sum_of(node: ir.Node) -> Sum | None:
    if is_op(node, "Gather", "GatherND"):
        data, index = node.inputs[0], _vector(node)
        if data is None or index is None or rank(data) != 2 or data.is_initializer() or not _is_summed(node):
            return None
        return Sum(node, data, index, inverse=False)
    if not is_op(node, "ScatterND", "ScatterElements"):
        return None
    rows, index, kind = node.inputs[2], _vector(node), attribute(node, "reduction", "none")
    if rows is None or index is None or rank(rows) != 2 or attribute(node, "axis", 0) not in (0, -2):
        return None
    if kind == "none" and _is_summed(node):
        return Sum(node, rows, index, inverse=True)
    token = producer(index, "Div")
    if kind == "add" and token is not None and token.inputs[0] is not None:
        return Sum(node, rows, token.inputs[0], inverse=True, adds=True)
    return None


def _vector(node: ir.Node) -> ir.Value | None:
    """The index of whole rows."""
    index = node.inputs[1]
    if is_op(node, "Gather"):
        return index if attribute(node, "axis", 0) == 0 and rank(index) == 1 else None
    if is_op(node, "ScatterElements"):
        wide = producer(index, "Expand")
        shape = None if wide is None else folded(reads(wide, 1))
        if wide is None or shape is None or len(shape) != 2 or shape[0] not in (1, None):
            return None
        if not whole_rows(node):
            return None
        index = wide.inputs[0]
    lifted = producer(index, "Unsqueeze")
    if lifted is None or rank(lifted.inputs[0]) != 1 or ints(reads(lifted, 1)) not in ([1], [-1]):
        return None
    return lifted.inputs[0]


def _is_summed(node: ir.Node) -> bool:
    """Whether rows go to ``[T, K, H]`` and a sum over its middle axis."""
    value = node.outputs[0]
    for kinds in (("Reshape", "Mul"), ("ReduceSum", "Mul", "Reshape"), ("ReduceSum", "Mul")):
        user = only_user(value)
        if not is_op(user, *kinds):
            return False
        assert user is not None
        if user.op_type == "ReduceSum":
            return ints(reads(user, 1)) in ([1], [-2]) and rank(user.inputs[0]) == 3
        value = user.outputs[0]
    return is_op(only_user(value), "ReduceSum")


def rewrite(graph: ir.Graph, one: Sum, names: set[str]) -> str:
    """Put one node for a sum; what was done, in words.

    Raises:
        NotThis: With the first condition that does not hold; the graph is as it was.
    """
    with Inserter(one.node, names) as e:
        return _rewrite(graph, one, e)


def _rewrite(graph: ir.Graph, one: Sum, e: Inserter) -> str:
    order = order_of(one.index)
    if order is None:
        raise NotThis(one.node, f"index '{one.index.name}' is not known to name each of all rows once")
    if not order.is_as_long_as(one.rows):
        raise NotThis(
            one.node, f"'{one.rows.name}' is not known to have as many rows as '{one.index.name}' names"
        )
    if one.adds:
        return _added(graph, one, e, order)
    if one.inverse and not order.is_as_long_as(one.node.inputs[0]):
        raise NotThis(one.node, "puts rows among others that are not replaced")
    shaped = only_user(one.node.outputs[0])
    while is_op(shaped, "Mul"):
        assert shaped is not None
        shaped = only_user(shaped.outputs[0])
    shape = None if shaped is None or not is_op(shaped, "Reshape") else folded(reads(shaped, 1))
    if shaped is None or shape is None or len(shape) != 3 or not shape[1] or shape[1] < 1:
        raise NotThis(shaped or one.node, "does not make [T, K, H] of the rows, of a known K")
    top_k, total = shape[1], only_user(shaped.outputs[0])
    index = e.op(
        "Cast", order.inverse(e) if one.inverse else one.index, name="row_idx", to=int(ir.DataType.INT32)
    )
    plain = total is not None and is_op(total, "ReduceSum") and shaped.inputs[0] is one.node.outputs[0]
    if plain and total is not None:
        if (
            attribute(total, "keepdims", 1)
            or shape[2] not in (size(one.rows, 1), -1)
            or shape[0] not in (-1, None)
        ):
            raise NotThis(total, "does not sum rows of their own width over K alone, or keeps its axis")
        if shape[2] == -1:
            raise NotThis(shaped, "makes rows of another width")
        y = e.op(
            "MoeInitRoutingV2Grad", one.rows, index, name="sum", top_k=top_k, drop_pad_mode=0, active_num=0
        )
        put(graph, e, total, [(total.outputs[0], y)], [total])
        return f"sum of {top_k} rows a token is MoeInitRoutingV2Grad"
    first = only_user(one.node.outputs[0])
    assert first is not None
    sorted_pairs = pairs_of(order)
    ids = one.index if sorted_pairs is None or sorted_pairs[1] != top_k else sorted_pairs[0]
    block = Block(order.like, ids, top_k, 0, True)
    block.tokens = one.rows
    finish(block, one.node.outputs[0], first)
    weights, total = block.weights, block.total
    assert weights is not None and total is not None and one.rows.dtype is not None
    scales = weights if rank(weights) == 2 else e.op("Reshape", weights, e.constant([-1, top_k]))
    if not same_rows(weights, shaped.outputs[0]):
        # A Mul takes the weights of one token for all.
        pairs = e.op("Reshape", index, e.constant([-1, top_k]))
        scales = e.op("Expand", scales, e.op("Shape", pairs), name="scales")
    nothing = e.constant(np.zeros((0, 0)), one.rows.dtype.numpy())
    no_expert = e.constant(np.zeros((0, 0)), np.int32)
    y = e.op(
        "MoeFinalizeRoutingV2", one.rows, index, nothing, nothing, nothing, scales, no_expert, name="combine",
        drop_pad_mode=2,
    )  # fmt: skip
    put(graph, e, total, [(total.outputs[0], y)], [total])
    return f"weighted sum of {top_k} rows a token is MoeFinalizeRoutingV2"


def _added(graph: ir.Graph, one: Sum, e: Inserter, order: Order) -> str:
    """Rows added to the tokens of their pairs."""
    token, before = producer(_vector(one.node), "Div"), one.node.inputs[0]
    assert token is not None and before is not None
    top_k, pairs = number(reads(token, 1)), pairs_of(order)
    if not top_k or top_k < 1:
        raise NotThis(token, "divides by no known number of choices")
    if pairs is None or pairs[1] != top_k or rank(before) != 2 or not same_rows(before, pairs[0]):
        raise NotThis(one.node, f"'{before.name}' is not known to have a row for every {top_k} pairs")
    index = e.op("Cast", order.inverse(e), name="row_idx", to=int(ir.DataType.INT32))
    y = e.op("MoeInitRoutingV2Grad", one.rows, index, name="sum", top_k=top_k, drop_pad_mode=0, active_num=0)
    if not is_filled(before, 0):
        y = e.op("Add", before, y, name="with_before")
    put(graph, e, one.node, [(one.node.outputs[0], y)], [one.node])
    return f"rows added to tokens, {top_k} to each, are MoeInitRoutingV2Grad"
