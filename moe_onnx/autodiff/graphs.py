"""Between ModelProto and onnx-ir: types and shapes before differentiation, a clean model after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from moe_onnx.adapters.function_body import OLDEST_OPSET, missing_bodies
from moe_onnx.spec import DOMAIN

_LOG = logging.getLogger(passes.ShapeInferencePass.__module__)
_OF_SEQUENCES = ("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap",
                 "SplitToSequence")  # fmt: skip


def infer(model: ir.Model) -> str:
    """Give every value the type and shape that onnx can tell; shapes given before are kept.

    Known shapes keep gradient graphs small: broadcasting is undone only where there was some.

    Returns:
        Why nothing could be told, such as types that contradict each other; empty where something was.
    """
    given = {
        value: value.shape
        for graph in model.graphs()
        for node in graph
        for value in node.outputs
        if value.shape is not None
    }
    with _failures() as failed:
        passes.ShapeInferencePass(strict_mode=False)(model)
    for value, shape in given.items():
        value.shape = shape
    for graph in model.graphs():
        for node in graph:
            if node.op_type in _OF_SEQUENCES and not node.domain:  # onnx-ir takes it for a tensor
                node.outputs[0].type = node.outputs[0].shape = None
    return failed[0] if failed else ""


@contextmanager
def _failures() -> Iterator[list[str]]:
    """What onnx-ir logs, with a traceback, where inference fails: for whoever asked, not for the screen."""
    found: list[str] = []

    def take(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        found.append(str(error or record.getMessage()).strip())
        return False

    _LOG.addFilter(take)
    try:
        yield found
    finally:
        _LOG.removeFilter(take)


def to_model(model: ir.Model) -> onnx.ModelProto:
    """The ModelProto, without dead nodes and with the function bodies of the operators it uses."""
    passes.RemoveUnusedNodesPass()(model)
    proto = ir.to_proto(model)
    opset = model.graph.opset_imports.get("", OLDEST_OPSET)
    used = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    proto.functions.extend(missing_bodies(proto, used, opset))
    return proto
