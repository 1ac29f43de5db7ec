"""Between ModelProto and onnx-ir: types and shapes before differentiation, a clean model after it."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from moe_onnx.adapters.function_body import OLDEST_OPSET, missing_bodies
from moe_onnx.spec import DOMAIN


def infer(model: ir.Model) -> None:
    """Give every value the type and shape that onnx can tell; shapes given before are kept.

    Known shapes keep gradient graphs small: broadcasting is undone only where there was some.
    """
    given = {
        value: value.shape
        for graph in model.graphs()
        for node in graph
        for value in node.outputs
        if value.shape is not None
    }
    passes.ShapeInferencePass(strict_mode=False)(model)
    for value, shape in given.items():
        value.shape = shape


def to_model(model: ir.Model) -> onnx.ModelProto:
    """The ModelProto, without dead nodes and with the function bodies of the operators it uses."""
    passes.RemoveUnusedNodesPass()(model)
    proto = ir.to_proto(model)
    opset = model.graph.opset_imports.get("", OLDEST_OPSET)
    used = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    proto.functions.extend(missing_bodies(proto, used, opset))
    return proto
