"""Which values have equally many rows, and how many columns they have."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import attribute, ints, is_op, producer, rank, reads, size
from moe_onnx.rewrite.fuse.shapes import dims, folded

_KEEP_ROWS = (
    "Gemm", "MatMul", "Softmax", "LogSoftmax", "Sigmoid", "Cast", "Identity", "TopK", "LayerNormalization",
    "RMSNormalization", "Relu", "Tanh", "Neg", "ArgMax",
)  # fmt: skip
_KEEP_COLUMNS = (
    "Softmax", "LogSoftmax", "Sigmoid", "Cast", "Identity", "ScatterElements", "ScatterND", "Relu", "Tanh",
    "Neg",
)  # fmt: skip
_DEEP = 60
_LONG = 1024  # nodes, one behind the other


def same_rows(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two values are known to have first axes of one size."""
    left, right = dims(one), dims(other)
    if left and right and left[0] is not None and left[0] == right[0]:
        return True
    return bool(_sources(one) & _sources(other))


def columns(value: ir.Value | None) -> int | None:
    """The size of a matrix's second axis, also where inference does not say: TorchScript's shapes."""
    for _ in range(_LONG):
        found, node = size(value, 1), None if value is None else value.producer()
        if found is not None or node is None or value is None:
            return found
        if is_op(node, "Gemm"):
            return size(node.inputs[1], 0 if attribute(node, "transB", 0) else 1)
        if is_op(node, "MatMul"):
            return size(node.inputs[1], 1) if rank(node.inputs[1]) == 2 else None
        if is_op(node, "Expand"):
            asked = folded(node.inputs[1])
            like = producer(node.inputs[1], "Shape")
            if asked is not None and len(asked) == 2 and (asked[1] or 0) > 1:
                return asked[1]
            value = like.inputs[0] if like is not None and not like.attributes else None
        elif is_op(node, *_KEEP_COLUMNS):
            value = node.inputs[0]
        elif is_op(node, "Add", "Mul", "Div", "Sub", "Where"):
            known = {columns_of for one in node.inputs if (columns_of := size(one, 1)) is not None} - {1}
            if known:
                return known.pop() if len(known) == 1 else None
            value = next((one for one in node.inputs if one is not None and rank(one) == 2), None)
        else:
            return None
    return None


def _sources(value: ir.Value | None) -> set[tuple[object, ...]]:
    """Where a value has its rows from: values, and flattened ones by their source and width."""
    found: set[tuple[object, ...]] = set()
    for _ in range(_DEEP):
        if value is None:
            break
        found.add((value,))
        node = value.producer()
        if node is not None and is_op(node, "Reshape"):
            shape, width = folded(reads(node, 1)), size(node.inputs[0], -1)
            if shape is not None and len(shape) == 2 and width is not None and shape[1] == width:
                inner: ir.Value | None = node.inputs[0]
                found.add((inner, "flat"))
                if rank(inner) == 2:
                    value = inner
                    continue
            break
        if node is None or not is_op(
            node, *_KEEP_ROWS, "Add", "Mul", "Div", "Sub", "Expand", "ConstantOfShape"
        ):
            break
        if node.op_type in ("Expand", "ConstantOfShape"):
            shaped = reads(node, 1 if node.op_type == "Expand" else 0)
            value = _shaped_like(shaped)
        elif node.op_type == "Gemm" and attribute(node, "transA", 0):
            break
        elif node.op_type in ("Add", "Mul", "Div", "Sub"):
            # The operand of as many axes that is not broadcast.
            axes = rank(value)
            rows = [v for v in node.inputs if axes is not None and rank(v) == axes and size(v, 0) != 1]
            named = {sizes[0] for one in rows if (sizes := dims(one)) is not None} - {None}
            value = rows[0] if rows and len(named) < 2 else None  # one of two may be a single row as it runs
        elif rank(node.inputs[0]) != 2 or not _keeps_rows(node):
            break
        else:
            value = node.inputs[0]
    return found


def _keeps_rows(node: ir.Node) -> bool:
    """Whether what works along an axis, or by matrices, does not do so along or beside the rows."""
    axis = attribute(node, "axis", 0 if node.op_type == "ArgMax" else -1)
    return axis not in (0, -2) and not (node.op_type == "MatMul" and rank(node.inputs[1]) not in (1, 2))


def _shaped_like(shape: ir.Value | None) -> ir.Value | None:
    """The value whose rows a shape counts first."""
    node = producer(shape, "Shape", "Concat")
    while node is not None and node.op_type == "Concat":
        node = producer(node.inputs[0], "Shape", "Unsqueeze", "Gather", "Slice", "Reshape")
        while node is not None and node.op_type != "Shape":
            if node.op_type == "Gather" and ints(reads(node, 1)) != [0]:
                return None
            if node.op_type == "Slice" and ints(reads(node, 1)) != [0]:
                return None
            node = producer(node.inputs[0], "Shape", "Unsqueeze", "Gather", "Slice", "Reshape")
    if node is None or attribute(node, "start", 0) != 0:
        return None
    return node.inputs[0]
