"""Nodes that work row by row: they may be given the rows in any order."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import NotThis, attribute, ints, is_axis, is_op, rank, reads, size

ELEMENTWISE = (
    "Abs", "Add", "And", "Cast", "CastLike", "Celu", "Ceil", "Clip", "Cos", "Div", "Elu", "Equal", "Erf",
    "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Not", "Or", "Pow",
    "PRelu", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign",
    "Sqrt", "Sub", "Swish", "Tanh", "ThresholdedRelu", "Where", "Xor",
)  # fmt: skip
_BY_AXIS = {"Softmax": -1, "LogSoftmax": -1, "LayerNormalization": -1, "RMSNormalization": -1, "Split": 0}
_REDUCE = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceSumSquare", "ReduceL2")


def check_row_by_row(node: ir.Node, rows: set[ir.Value]) -> None:
    """``node`` reads matrices of rows; its outputs must be such, each row of the same rows only.

    Raises:
        NotThis: If that is not so, or cannot be told.
    """
    others = [value for value in node.inputs if value is not None and value not in rows]
    if is_op(node, *ELEMENTWISE):
        pass
    elif is_op(node, *_BY_AXIS):
        if not is_axis(attribute(node, "axis", _BY_AXIS[node.op_type]), 1, 2):
            raise NotThis(node, "works on another axis than the last, across rows")
        if node.op_type == "Split":
            return
    elif is_op(node, "Concat"):
        if others or not is_axis(attribute(node, "axis", 0), 1, 2):
            raise NotThis(node, "puts rows behind each other, or beside values that are not rows")
    elif is_op(node, "Slice"):
        axes = ints(reads(node, 3))
        if node.inputs[0] not in rows or axes is None or not all(is_axis(axis, 1, 2) for axis in axes):
            raise NotThis(node, "slices another axis than the last")
        return
    elif is_op(node, "Gather"):
        index = ints(node.inputs[1])
        last = is_axis(attribute(node, "axis", 0), 1, 2)
        if node.inputs[0] not in rows or index is None or rank(node.inputs[1]) != 1 or not last:
            raise NotThis(node, "gathers by no constant list of columns")
        return
    elif is_op(node, *_REDUCE):
        axes = ints(reads(node, 1))
        if not axes or not all(is_axis(axis, 1, 2) for axis in axes) or not attribute(node, "keepdims", 1):
            raise NotThis(node, "reduces another axis than the last, or does not keep it")
        return
    else:
        domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
        raise NotThis(node, f"{domain}{node.op_type} is not known to work row by row")
    for value in others:
        if not same_for_all_rows(value):
            raise NotThis(node, f"reads '{value.name}', which is not known to be the same for all rows")


def same_for_all_rows(value: ir.Value) -> bool:
    """Whether a value, broadcast to a matrix, has equal rows."""
    axes = rank(value)
    return axes is not None and (axes < 2 or (axes == 2 and size(value, 0) == 1))
