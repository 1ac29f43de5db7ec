"""``differentiate``: a model's gradients as further outputs of the model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from moe_onnx.autodiff.bodies import expand_bodies, inline_functions
from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.graphs import infer, to_model
from moe_onnx.autodiff.reverse import add_gradients
from moe_onnx.errors import OptionError


def differentiate(
    model: onnx.ModelProto, *, loss: str, wrt: str | Sequence[str], suffix: str = ".grad"
) -> onnx.ModelProto:
    """A copy of a model that also computes the gradient of ``loss`` for each value of ``wrt``.

    Works on every model whose operators, between ``wrt`` and ``loss``, have gradient rules: those of
    this package, and those given to :func:`moe_onnx.register_gradient`. Functions without a rule of
    their own are inlined, operators without a rule that onnx defines by a function body are replaced by it,
    and If, Loop and Scan are differentiated with the outer values they use. What no gradient needs is
    not computed for it, and integers end the paths that gradients take.

    Args:
        model: Any ONNX model, of opset 18 or newer for all rules to apply.
        loss: Name of a float value, usually a scalar; the sum of a larger tensor is differentiated.
        wrt: Names of float graph inputs, initializers or other values.
        suffix: Gradients are outputs by the name of their value and this.

    Returns:
        The model: its outputs, then the gradients, in the order of ``wrt``, in the shape and dtype of
        their values; with the function bodies of all ``ascend.moe`` operators it uses.

    Raises:
        OptionError: If a name is not in the model, or given twice, or taken by another value.
        ModelError: If a function of the model is written for another opset than the model.
        GradientError: If an operator on the way has no rule, or no differentiable path leads from the
            loss to something wanted; the message names the path.
    """
    wanted = [wrt] if isinstance(wrt, str) else list(wrt)
    if not wanted:
        raise OptionError("differentiate: wrt names nothing. Give the name of at least one value.")
    graph_model = ir.from_proto(model)
    version = graph_model.opset_imports
    if "ai.onnx" in version:  # the other name of the standard domain
        version[""] = version.pop("ai.onnx")
    inline_functions(graph_model)
    infer(graph_model)
    while expand_bodies(graph_model, loss, wanted):  # bodies use operators that have bodies
        infer(graph_model)
    graph = graph_model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    emitter = Emitter(graph)
    outputs = [_find(values, name, "wrt") for name in wanted]
    taken = {value.name for value in graph.outputs} | set(values)
    for name in wanted:
        if f"{name}{suffix}" in taken:
            raise OptionError(
                f"differentiate: the model has a value '{name}{suffix}' already; give another suffix."
            )
    if len(set(wanted)) < len(wanted):
        raise OptionError(f"differentiate: wrt names a value twice: {', '.join(wanted)}.")
    for name in wanted:
        emitter.reserve(f"{name}{suffix}")
    gradients = add_gradients(emitter, _find(values, loss, "loss"), outputs)
    for value, gradient in zip(outputs, gradients, strict=True):
        emitter.release(f"{value.name}{suffix}")
        emitter.output(gradient, f"{value.name}{suffix}", value.dtype, value.shape)
    return to_model(graph_model)


def _find(values: Mapping[str, ir.Value], name: str, option: str) -> ir.Value:
    if name not in values:
        close = difflib.get_close_matches(name, values, 1)
        hint = f"Did you mean '{close[0]}'?" if close else "Give the name of a value of the graph."
        raise OptionError(f"differentiate: {option}: the model has no value '{name}'. {hint}")
    return values[name]
