"""What weights may be divided by, so that zeros stay zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import FLOATS
from moe_onnx.rewrite.fuse.graph import attribute, fixed, ints, is_op, producer, reads
from moe_onnx.rewrite.fuse.meaning import Meaning

if TYPE_CHECKING:
    from moe_onnx.rewrite.fuse.reading import Reader


def divides(reader: Reader, by: ir.Value | None, gate: Meaning) -> bool:
    """Whether zeros stay zeros: by what is not 0, or by the sum of the same weights (0 with all of them)."""
    for _ in range(8):
        node = producer(by, "Expand", "Identity", "Cast", "Unsqueeze", "Reshape", "Add", "Max", "Clip")
        if node is None or (node.op_type == "Cast" and attribute(node, "to", 0) not in FLOATS):
            break
        least = reads(node, 1)
        if node.op_type in ("Max", "Clip") and _is_positive(least):
            return True
        if node.op_type == "Add" and not _is_positive(least):
            return False
        by = node.inputs[0]
    total = producer(by, "ReduceSum")
    if total is not None and ints(reads(total, 1)) not in ([1], [-1]):
        return False  # of experts, whom nobody may have chosen
    if total is not None:
        top = gate.choice.ids.producer()
        summed = reader.meaning(total.inputs[0], "gate")
        is_top = is_op(top, "TopK") and top is not None and total.inputs[0] is top.outputs[0]
        return is_top or (summed is not None and summed.choice == gate.choice)
    tensor = fixed(by)
    return tensor is not None and tensor.size <= 1024 and bool((tensor.numpy() != 0).all())


def _is_positive(value: ir.Value | None) -> bool:
    node, tensor = producer(value, "Constant"), fixed(value)
    if node is not None:
        tensor = attribute(node, "value", None)
        if tensor is None:
            return bool(attribute(node, "value_float", 0.0) > 0)
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(-1)[0]) > 0
