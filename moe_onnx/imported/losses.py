"""Losses that are attached to a model that has none: cross-entropy on logits, mean squared error."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.forward import Forward
from moe_onnx.build.imported import CROSS_ENTROPY, SQUARED_ERROR, ImportedModel
from moe_onnx.build.layers import exact_sum
from moe_onnx.build.losses import cross_entropy, mean_log_loss

MASK = "attention_mask"


def add_loss(
    e: Emitter, config: ImportedModel, values: Mapping[str, ir.Value], target: ir.Value | None
) -> Forward:
    """Emit the loss of a config.

    Args:
        e: Of the graph.
        config: Says which loss, of which output.
        values: The graph's values by name.
        target: The batch input for it; None for a loss of the model's own.
    """
    source = values[config.output or config.loss]
    if source.dtype != ir.DataType.FLOAT:
        source = e.op("Cast", source, to=ir.DataType.FLOAT)
        source.shape = values[config.output or config.loss].shape
    if config.loss == CROSS_ENTROPY:
        assert target is not None
        return _cross_entropy(e, config, source, target, values.get(MASK))
    if config.loss == SQUARED_ERROR:
        assert target is not None
        loss = _squared_error(e, source, target)
    else:
        loss = source
    return Forward(source, "", (), shaped(loss), {"loss": (loss, "float32", ())})


def _cross_entropy(
    e: Emitter, config: ImportedModel, logits: ir.Value, labels: ir.Value, mask: ir.Value | None
) -> Forward:
    ignored = config.ignore_index
    classes = e.op("Shape", logits, start=-1)
    # Rows of classes; the number of classes is known before the graph runs nearly always.
    flat = e.op("Reshape", logits, e.op("Concat", e.constant([-1]), classes, axis=0))
    assert logits.shape is not None
    last = logits.shape[-1]
    shaped(flat, "rows", last if isinstance(last, int) else "classes")
    if config.shift:
        is_mask = mask is not None and mask.is_graph_input() and mask.dtype is not None
        if mask is None or not is_mask or mask.shape is None or len(mask.shape) != 2:
            mask = e.op("Expand", e.constant(1), e.op("Shape", labels))
        loss, count = cross_entropy(e, flat, labels, mask, ignored)
    else:
        label = shaped(e.op("Reshape", labels, e.constant([-1, 1])), "rows", 1)
        counted = shaped(e.op("Not", e.op("Equal", label, e.constant(ignored))), "rows", 1)
        loss, count = mean_log_loss(e, flat, label, counted)
    metrics = {"loss": (loss, "float32", ()), "num_tokens": (count, "int64", ())}
    return Forward(logits, "", (), shaped(loss), metrics)  # type: ignore[arg-type]


def _squared_error(e: Emitter, output: ir.Value, target: ir.Value) -> ir.Value:
    """``mean((output - target)^2)`` over all elements."""
    squares = e.op("Sub", output, target)
    squares = e.op("Mul", squares, squares)
    if output.shape is not None and len(output.shape):
        squares = e.op("ReduceSum", squares, e.constant([-1]), keepdims=0)
    one = e.constant(1)
    count = e.op("Cast", e.op("Max", e.op("Size", output), one), to=ir.DataType.FLOAT)
    return e.op("Div", exact_sum(e, squares), count)


def is_builtin(loss: str) -> bool:
    """Whether a loss is one that is attached here."""
    return loss in (CROSS_ENTROPY, SQUARED_ERROR)
