"""Rules of activations. ``d`` is the gradient of the output."""

from __future__ import annotations

import math

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, constant_number
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("Sigmoid", since=6)
def sigmoid(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d y (1 - y)``."""
    (x,), y = node.inputs, node.outputs[0]
    assert x is not None
    behind, silu = d.producer(), _product(x, y)
    if silu is not None and behind is not None and behind.op_type == "Mul" and behind.inputs[1] is x:
        # Below x y, whose rule gave d = c x and c y: c x y (1 - y) = c y (x - x y) are two passes less.
        c = behind.inputs[0]
        assert c is not None
        return [g.mul(g.mul(c, y), g.sub(x, silu))]
    return [g.mul(d, g.mul(y, g.sub(g.like(1.0, y), y)))]


def _product(x: ir.Value, y: ir.Value) -> ir.Value | None:
    """``x y``, if the graph has it."""
    nodes = (node for node, _ in y.uses() if node.op_type == "Mul" and set(node.inputs) == {x, y})
    return next((node.outputs[0] for node in nodes), None)


@register_gradient("Tanh", since=6)
def tanh(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d (1 - y^2)``."""
    y = node.outputs[0]
    return [g.mul(d, g.sub(g.like(1.0, y), g.mul(y, y)))]


@register_gradient("Erf", since=9)
def erf(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d 2/sqrt(pi) exp(-x^2)``."""
    (x,) = node.inputs
    assert x is not None
    bell = g.op("Exp", g.neg(g.mul(x, x)))
    return [g.mul(d, g.mul(bell, g.like(2 / math.sqrt(math.pi), x)))]


@register_gradient("Softplus", since=1)
def softplus(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d sigmoid(x)``."""
    return [g.mul(d, g.op("Sigmoid", node.inputs[0]))]


@register_gradient("Relu", since=6)
def relu(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d`` where y > 0, else 0, also at 0 (as PyTorch); selected, so that no NaN leaks."""
    y = node.outputs[0]
    zero = g.like(0.0, y)
    return [g.op("Where", g.op("Greater", y, zero), d, zero)]


@register_gradient("Gelu", since=20)
def gelu(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d (Phi(x) + x phi(x))``, with the normal distribution's Phi and density phi; or its tanh form."""
    (x,) = node.inputs
    assert x is not None
    half, one = g.like(0.5, x), g.like(1.0, x)
    if attribute(node, "approximate", "none") == "tanh":
        return [g.mul(d, _gelu_tanh(g, x))]
    error = g.op("Erf", g.mul(x, g.like(math.sqrt(0.5), x)))
    below = g.mul(half, g.add(one, error))
    bell = g.op("Exp", g.mul(g.mul(x, x), g.like(-0.5, x)))
    density = g.mul(bell, g.like(1 / math.sqrt(2 * math.pi), x))
    return [g.mul(d, g.add(below, g.mul(x, density)))]


def _gelu_tanh(g: Gradients, x: ir.Value) -> ir.Value:
    """``(1 + t) / 2 + x (1 - t^2) u' / 2`` for ``t = tanh u``, ``u = sqrt(2/pi) (x + 0.044715 x^3)``."""
    half, one, root = g.like(0.5, x), g.like(1.0, x), math.sqrt(2 / math.pi)
    square = g.mul(x, x)
    inner = g.add(g.like(root, x), g.mul(square, g.like(root * 0.044715, x)))  # u / x
    slope = g.add(g.like(root, x), g.mul(square, g.like(3 * root * 0.044715, x)))  # u'
    t = g.op("Tanh", g.mul(x, inner))
    rise = g.mul(g.mul(x, g.sub(one, g.mul(t, t))), slope)
    return g.mul(half, g.add(g.add(one, t), rise))


@register_gradient("LeakyRelu", since=6)
def leaky_relu(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d`` where x > 0, else ``d alpha``, also at 0 (as PyTorch)."""
    (x,) = node.inputs
    assert x is not None
    slope = g.like(float(attribute(node, "alpha", 0.01)), x)
    return [g.op("Where", g.op("Greater", x, g.like(0.0, x)), d, g.mul(d, slope))]


@register_gradient("Elu", since=6)
def elu(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d`` where x > 0, else ``d alpha exp(x)``, also at 0 (as PyTorch)."""
    (x,) = node.inputs
    assert x is not None
    slope = g.add(node.outputs[0], g.like(float(attribute(node, "alpha", 1.0)), x))
    return [g.op("Where", g.op("Greater", x, g.like(0.0, x)), d, g.mul(d, slope))]


@register_gradient("Dropout", since=12)
def dropout(g: Gradients, node: ir.Node, d: ir.Value | None, *_: None) -> Grads:
    """The identity, where nothing is dropped; a graph that drops at random has no gradient rule."""
    _x, ratio, training = [*node.inputs, None, None][:3]
    if (training is not None and constant_number(training) != 0) and constant_number(ratio) != 0:
        raise GradientError(
            "Dropout in training mode has no gradient rule. Make training_mode or ratio a constant 0."
        )
    return [d, *[None] * (len(node.inputs) - 1)]
