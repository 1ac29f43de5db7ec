"""Indices that name every row once: what sorts all pairs, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import keeps_number
from moe_onnx.rewrite.fuse.graph import Inserter, attribute, is_called, is_op, producer, rank, reads, size
from moe_onnx.rewrite.fuse.shapes import dims, number
from moe_onnx.spec import DOMAIN


@dataclass
class Order:
    """A permutation. ``like``: a value of as many rows; ``back``: its inverse, where that is in the graph."""

    index: ir.Value
    like: ir.Value
    back: ir.Value | None = None

    def is_as_long_as(self, rows: ir.Value | None) -> bool:
        """Whether a value is known to have as many rows."""
        other, known = dims(rows), [dims(self.like), dims(self.index), dims(self.back)]
        many = {sizes[0] for sizes in known if sizes} - {None}
        return rows is self.like or bool(other and other[0] in many)

    def inverse(self, e: Inserter) -> ir.Value:
        """The inverse of this permutation."""
        if self.back is not None:
            return self.back
        end = e.op("Squeeze", e.op("Shape", self.index), e.constant([0]))
        places = e.op("Range", e.constant(0), end, e.constant(1), name="places")
        index = self.index
        return e.op("ScatterElements", places, index, places, name="inverse", axis=0)


def order_of(value: ir.Value | None) -> Order | None:
    """The permutation that an index is, None if that is not known."""
    found = value
    while (node := producer(found, "Cast", "Identity", "Reshape")) is not None and rank(node.inputs[0]) == 1:
        if node.op_type == "Cast" and not keeps_number(node):
            return None
        found = node.inputs[0]
    node = None if found is None else found.producer()
    if node is None or found is None or value is None:
        return None
    if node.domain == DOMAIN and node.op_type == "MoeInitRoutingV2" and found is node.outputs[1]:
        plain = not attribute(node, "drop_pad_mode", 0) and not attribute(node, "active_num", 0)
        return Order(value, node.outputs[0]) if plain and not is_called(node) else None
    if is_op(node, "TopK") and found is node.outputs[1] and rank(node.inputs[0]) == 1:
        whole, many = node.inputs[0], reads(node, 1)
        assert whole is not None
        shape = producer(many, "Shape", "Reshape")
        while shape is not None and shape.op_type == "Reshape":
            shape = producer(shape.inputs[0], "Shape", "Reshape")
        everything = shape is not None and _as_long(shape.inputs[0], whole)
        return Order(value, whole) if everything or (number(many) == size(whole, 0) is not None) else None
    if is_op(node, "ScatterElements") and attribute(node, "reduction", "none") == "none":
        order, places = order_of(node.inputs[1]), producer(node.inputs[2], "Range")
        if order is None or places is None or node.inputs[1] is None:
            return None
        if number(places.inputs[0]) != 0 or number(places.inputs[2]) != 1 or rank(node.inputs[1]) != 1:
            return None
        return Order(value, order.like, node.inputs[1])
    return None


def _as_long(one: ir.Value | None, other: ir.Value) -> bool:
    left, right = dims(one), dims(other)
    return one is other or bool(
        left and right and left[0] is not None and left[:1] == right[:1] and len(left) == 1
    )


def pairs_of(order: Order) -> tuple[ir.Value, int] | None:
    """``[T, K]`` and K, whose elements an order sorts."""
    flat = producer(order.like, "Reshape", "Flatten")
    ids = None if flat is None else flat.inputs[0]
    top_k = size(ids, 1)
    if ids is None or rank(ids) != 2 or top_k is None or rank(order.like) != 1:
        return None
    return ids, top_k
