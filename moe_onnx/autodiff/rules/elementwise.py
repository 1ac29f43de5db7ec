"""Rules of elementwise operators. ``d`` is the gradient of the output."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.autodiff.gradients import HALVES, Gradients
from moe_onnx.autodiff.registry import register_gradient

Grads = list[ir.Value | None]


@register_gradient("Identity")
def identity(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = x``."""
    return [d]


@register_gradient("Cast", since=9)
def cast(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = x`` in another float type: the gradient goes back to the type of x.

    Where x is 16-bit, its rounding is left to the sum of all gradients of x. Where y is, d may be such a
    sum and is rounded here; but not for an input of the graph: the gradient of a float32 master weight
    is not to be known less well than that of a copy of it.
    """
    (x,), y = node.inputs, node.outputs[0]
    assert x is not None
    if x.dtype in HALVES and y.dtype not in HALVES:
        return [d]
    if y.dtype in HALVES and not (x.is_graph_input() or x.is_initializer()):
        d = g.cast(d, y)
    return [g.cast(d, x)]


@register_gradient("CastLike", since=15)
def cast_like(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As Cast; the second input gives only its type."""
    return [g.op("CastLike", d, node.inputs[0]), None]


@register_gradient("Add", since=7)
def add(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = a + b``."""
    return [_undo(g, node, 0, d), _undo(g, node, 1, d)]


@register_gradient("Sum", since=8)
def sum_(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = a + b + ..``."""
    if len(node.inputs) == 1:
        return [d]
    return [_undo(g, node, i, d) for i in range(len(node.inputs))]


@register_gradient("Sub", since=7)
def sub(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = a - b``."""
    b = _undo(g, node, 1, d)
    return [_undo(g, node, 0, d), None if b is None else g.neg(b)]


@register_gradient("Mul", since=7)
def mul(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = a b``."""
    a, b = node.inputs
    assert a is not None and b is not None
    da = _undo(g, node, 0, g.mul(d, b)) if g.needs(a) else None
    return [da, _undo(g, node, 1, g.mul(d, a)) if g.needs(b) else None]


@register_gradient("Div", since=7)
def div(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = a / b``: ``d / b`` and ``-d y / b``."""
    a, b = node.inputs
    assert a is not None and b is not None
    over = g.div(d, b)
    db = _undo(g, node, 1, g.mul(over, node.outputs[0])) if g.needs(b) else None
    return [_undo(g, node, 0, over), None if db is None else g.neg(db)]


@register_gradient("Neg", since=6)
def neg(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = -x``."""
    return [g.neg(d)]


@register_gradient("Abs", since=6)
def abs_(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d sign(x)``, 0 at 0."""
    return [g.mul(d, g.op("Sign", node.inputs[0]))]


@register_gradient("Sqrt", since=6)
def sqrt(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d / (2 y)``."""
    y = node.outputs[0]
    return [g.div(g.mul(d, g.like(0.5, y)), y)]


@register_gradient("Reciprocal", since=6)
def reciprocal(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``-d y^2``."""
    y = node.outputs[0]
    return [g.neg(g.mul(d, g.mul(y, y)))]


@register_gradient("Exp", since=6)
def exp(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d y``."""
    return [g.mul(d, node.outputs[0])]


@register_gradient("Log", since=6)
def log(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d / x``."""
    assert node.inputs[0] is not None
    return [g.div(d, node.inputs[0])]


@register_gradient("Sin", since=7)
def sin(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d cos x``."""
    return [g.mul(d, g.op("Cos", node.inputs[0]))]


@register_gradient("Cos", since=7)
def cos(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``-d sin x``."""
    return [g.neg(g.mul(d, g.op("Sin", node.inputs[0])))]


@register_gradient("Pow", since=7)
def pow_(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d b a^(b-1)``, 0 where b is 0; and ``d y log a``, 0 where a is 0 and b is not negative."""
    a, b = node.inputs
    assert a is not None and b is not None
    power, zero = g.cast(b, a), g.like(0.0, a)
    da = db = None
    if g.needs(a):
        slope = g.mul(power, g.op("Pow", a, g.sub(power, g.like(1.0, a))))
        flat = g.op("Equal", power, zero)  # 0 a^-1 would be NaN at 0
        da = _undo(g, node, 0, g.mul(d, g.op("Where", flat, zero, slope)))
    if g.needs(b):
        slope = g.mul(node.outputs[0], g.op("Log", a))
        flat = g.op("And", g.op("Equal", a, zero), g.op("GreaterOrEqual", power, zero))
        db = _undo(g, node, 1, g.cast(g.mul(d, g.op("Where", flat, zero, slope)), b))
    return [da, db]


@register_gradient("Max", since=8)
@register_gradient("Min", since=8)
def extremum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d`` where an input is the extremum; those that tie have equal parts of it (as PyTorch)."""
    y = node.outputs[0]
    if len(node.inputs) == 1:
        return [d]
    hits = [g.cast(g.op("Equal", x, y), y) for x in node.inputs]
    share = g.div(d, g.op("Sum", *hits))
    return [_undo(g, node, i, g.mul(share, hit)) for i, hit in enumerate(hits)]


@register_gradient("Where", since=9)
def where(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The gradient goes where the value came from; the other side gets exact zeros."""
    condition, a, b = node.inputs
    zero = g.like(0.0, node.outputs[0])
    da = _undo(g, node, 1, g.op("Where", condition, d, zero)) if g.needs(a) else None
    return [None, da, _undo(g, node, 2, g.op("Where", condition, zero, d)) if g.needs(b) else None]


@register_gradient("Clip", since=11)
def clip(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d`` where x is within the bounds, ends included (as PyTorch), else 0."""
    x, low, high = [*node.inputs, None, None][:3]
    zero = g.like(0.0, node.outputs[0])
    for bound, outside in ((low, "Less"), (high, "Greater")):
        if bound is not None:
            d = g.op("Where", g.op(outside, x, bound), zero, d)
    return [d, *[None] * (len(node.inputs) - 1)]


def _undo(g: Gradients, node: ir.Node, index: int, grad: ir.Value) -> ir.Value | None:
    """``grad`` in the shape of an input that may have been broadcast."""
    value = node.inputs[index]
    return g.unbroadcast(grad, value, node.outputs[0]) if value is not None and g.needs(value) else None
