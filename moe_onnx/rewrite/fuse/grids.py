"""Grids of numbers that a masked_select is taken of: the token, or the expert, of each cell ``[E, T]``."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import keeps_number
from moe_onnx.rewrite.fuse.graph import ints, is_op, producer, rank, reads
from moe_onnx.rewrite.fuse.meaning import Choice
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.shapes import dims, folded, number


def grid(value: ir.Value | None, choice: Choice) -> str | None:
    """``"T"`` or ``"E"``, what the cells of ``[E, T]`` count; None if a value is no such grid."""
    node = producer(value, "Expand")
    if node is None or choice.experts is None:
        return None
    base, shape = node.inputs[0], folded(reads(node, 1))
    sizes = dims(base)
    if sizes == [choice.experts, 1] and ints(base) == list(range(choice.experts)):
        rows = shape is not None and len(shape) == 2 and shape[0] in (1, choice.experts)
        return "E" if rows and asks_rows(node.inputs[1], choice.ids) else None
    lifted = producer(base, "Unsqueeze")
    counted = None if lifted is None else producer(lifted.inputs[0], "Range")
    if lifted is None or counted is None or ints(reads(lifted, 1)) not in ([0], [-2]):
        return None
    if shape != [choice.experts, 1] or number(counted.inputs[0]) != 0 or number(counted.inputs[2]) != 1:
        return None
    return "T" if asks_rows(counted.inputs[1], choice.ids) else None


def asks_rows(shape: ir.Value | None, ids: ir.Value) -> bool:
    """Whether all sizes in a shape that are not known are the number of tokens."""
    return _asks(shape, ids, {}, 0)


def _asks(shape: ir.Value | None, ids: ir.Value, seen: dict[ir.Value, bool], depth: int) -> bool:
    if shape is None:
        return False
    if shape not in seen:
        seen[shape] = _ask(shape, ids, seen, depth)
    return seen[shape]


def _ask(shape: ir.Value, ids: ir.Value, seen: dict[ir.Value, bool], depth: int) -> bool:
    known = folded(shape)
    if known is not None and None not in known:
        return True
    node = shape.producer()
    if node is None or depth > 20:
        return False
    if is_op(node, "Gather"):
        whole = producer(node.inputs[0], "Shape")
        return whole is not None and ints(reads(node, 1)) == [0] and same_rows(whole.inputs[0], ids)
    if is_op(node, "Shape"):
        return rank(node.inputs[0]) == 1 and same_rows(node.inputs[0], ids)
    given = node.inputs[1:] if is_op(node, "Where") else node.inputs
    if not is_op(node, "Where", "Concat", "Reshape", "Unsqueeze", "Squeeze", "Cast", "Identity"):
        return False
    if node.op_type == "Cast" and not keeps_number(node):
        return False
    return all(_asks(value, ids, seen, depth + 1) for value in given if value is not None)
