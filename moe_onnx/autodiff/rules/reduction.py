"""Rules of reductions and of what normalises along an axis."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, constant_ints
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("ReduceSum", since=13)
def reduce_sum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Every summed element gets the gradient of its sum."""
    x = node.inputs[0]
    return _reduced(g, node, lambda: g.op("Expand", _kept(g, node, d), g.op("Shape", x)))


@register_gradient("ReduceMean", since=18)
def reduce_mean(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As ReduceSum, divided by how many elements a mean is of."""
    x, y = node.inputs[0], node.outputs[0]

    def gradient() -> ir.Value:
        count = g.div(_size(g, x), _size(g, y))
        return g.op("Expand", g.div(_kept(g, node, d), g.op("CastLike", count, d)), g.op("Shape", x))

    return _reduced(g, node, gradient)


@register_gradient("ReduceSumSquare", since=18)
def reduce_sum_square(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``2 x d``."""
    x = node.inputs[0]
    assert x is not None
    return _reduced(g, node, lambda: g.mul(x, g.mul(_kept(g, node, d), g.like(2.0, x))))


@register_gradient("ReduceLogSumExp", since=18)
def reduce_log_sum_exp(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``exp(x - y) d``, which is a softmax: no exponential overflows."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    return _reduced(
        g, node, lambda: g.mul(g.op("Exp", g.sub(x, _kept(g, node, y))), _kept(g, node, d))
    )


@register_gradient("Softmax", since=13)
def softmax(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y (d - sum(y d))`` along the axis."""
    y, axis = node.outputs[0], attribute(node, "axis", -1)
    return [g.mul(y, g.sub(d, g.sum(g.mul(d, y), [axis], keepdims=True)))]


@register_gradient("LogSoftmax", since=13)
def log_softmax(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d - exp(y) sum(d)`` along the axis."""
    y, axis = node.outputs[0], attribute(node, "axis", -1)
    return [g.sub(d, g.mul(g.op("Exp", y), g.sum(d, [axis], keepdims=True)))]


def _reduced(g: Gradients, node: ir.Node, gradient: Callable[[], ir.Value]) -> Grads:
    return [gradient() if g.needs(node.inputs[0]) else None, *[None] * (len(node.inputs) - 1)]


def _kept(g: Gradients, node: ir.Node, value: ir.Value) -> ir.Value:
    """``value``, in the shape of the output, with the reduced axes kept as 1."""
    if attribute(node, "keepdims", 1):
        return value
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    known = constant_ints(axes)
    if axes is None or known == []:
        if attribute(node, "noop_with_empty_axes", 0):
            return value
        x = node.inputs[0]
        assert x is not None
        known = list(range(g.rank(x)))
    elif known is None:
        raise GradientError("keepdims=0 with axes that are computed in the graph has no gradient rule.")
    return g.op("Unsqueeze", value, g.constant(known)) if known else value


def _size(g: Gradients, value: ir.Value | None) -> ir.Value:
    return g.op("Size", value)
