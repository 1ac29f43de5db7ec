"""Rules of reductions and of what runs along an axis."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, constant_ints
from moe_onnx.autodiff.registry import register_gradient

Grads = list[ir.Value | None]


@register_gradient("ReduceSum")
def reduce_sum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Every summed element gets the gradient of its sum."""
    return _reduced(g, node, lambda x: g.op("Expand", _kept(g, node, d), g.op("Shape", x)))


@register_gradient("ReduceMean")
def reduce_mean(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As ReduceSum, divided by how many elements a mean is of."""

    def gradient(x: ir.Value) -> ir.Value:
        # Without elements there may be no means either, and integers must not be divided by 0.
        means = g.op("Max", g.op("Size", node.outputs[0]), g.constant(1))
        count = g.cast(g.div(g.op("Size", x), means), d)
        return g.op("Expand", g.div(_kept(g, node, d), count), g.op("Shape", x))

    return _reduced(g, node, gradient)


@register_gradient("ReduceSumSquare")
def reduce_sum_square(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``2 x d``."""
    return _reduced(g, node, lambda x: g.mul(x, g.mul(_kept(g, node, d), g.like(2.0, x))))


@register_gradient("ReduceLogSumExp")
def reduce_log_sum_exp(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``exp(x - y) d``, which is a softmax: no exponential overflows."""
    y = node.outputs[0]
    return _reduced(g, node, lambda x: g.mul(g.op("Exp", g.sub(x, _kept(g, node, y))), _kept(g, node, d)))


@register_gradient("ReduceL1")
def reduce_l1(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d sign(x)``, 0 at 0."""
    return _reduced(g, node, lambda x: g.mul(_kept(g, node, d), g.op("Sign", x)))


@register_gradient("ReduceL2")
def reduce_l2(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d x / y``, 0 where all elements are 0 (as PyTorch)."""

    def gradient(x: ir.Value) -> ir.Value:
        y = node.outputs[0]
        zero = g.like(0.0, y)
        slope = g.op("Where", g.op("Equal", y, zero), zero, g.div(d, y))
        return g.mul(x, _kept(g, node, slope))

    return _reduced(g, node, gradient)


@register_gradient("ReduceLogSum")
def reduce_log_sum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d / sum(x)``."""
    y = node.outputs[0]
    slope = g.div(d, g.op("Exp", y))
    return _reduced(g, node, lambda x: g.op("Expand", _kept(g, node, slope), g.op("Shape", x)))


@register_gradient("ReduceProd")
def reduce_prod(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``d`` times the product of all other elements, also where some are 0."""

    def gradient(x: ir.Value) -> ir.Value:
        zero, one = g.like(0.0, x), g.like(1.0, x)
        is_zero = g.op("Equal", x, zero)
        safe, zeros = g.op("Where", is_zero, one, x), g.cast(is_zero, x)
        product = _like_node(g, node, "ReduceProd", safe)
        count = _like_node(g, node, "ReduceSum", zeros)
        others = g.div(g.mul(_kept(g, node, d), product), safe)
        return g.op("Where", g.op("Equal", count, zeros), others, zero)

    return _reduced(g, node, gradient)


@register_gradient("ReduceMax")
@register_gradient("ReduceMin")
def reduce_extremum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Elements that are the extremum have equal parts of the gradient (as PyTorch's amax and amin)."""

    def gradient(x: ir.Value) -> ir.Value:
        hits = g.cast(g.op("Equal", x, _kept(g, node, node.outputs[0])), x)
        count = _like_node(g, node, "ReduceSum", hits)
        return g.mul(hits, g.div(_kept(g, node, d), count))

    return _reduced(g, node, gradient)


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


@register_gradient("CumSum", since=11)
def cum_sum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The sums of what comes after: the same, from the other end."""
    exclusive, reverse = attribute(node, "exclusive", 0), attribute(node, "reverse", 0)
    return [g.op("CumSum", d, node.inputs[1], exclusive=exclusive, reverse=1 - reverse), None]


def _reduced(g: Gradients, node: ir.Node, gradient: Callable[[ir.Value], ir.Value]) -> Grads:
    x = node.inputs[0]
    assert x is not None
    return [gradient(x), *[None] * (len(node.inputs) - 1)]


def _axes(g: Gradients, node: ir.Node) -> ir.Value | None:
    """The axes, an input of newer opsets and an attribute of older ones; None: there are none."""
    if "axes" in node.attributes:
        return g.constant(list(attribute(node, "axes")))
    return node.inputs[1] if len(node.inputs) > 1 else None


def _kept(g: Gradients, node: ir.Node, value: ir.Value) -> ir.Value:
    """``value``, in the shape of the output, as it broadcasts against x: reduced axes are kept as 1."""
    if attribute(node, "keepdims", 1):
        return value
    axes = _axes(g, node)
    known = constant_ints(axes)
    if axes is None or known == []:
        return value  # the same size, or a scalar
    if known is None:
        return g.op("Reshape", value, _kept_shape(g, node, axes), allowzero=1)
    return g.op("Unsqueeze", value, g.constant(known))


def _kept_shape(g: Gradients, node: ir.Node, axes: ir.Value) -> ir.Value:
    """The shape of x with 1 for reduced axes, which are known only when the graph runs."""
    shape, zero, one = g.op("Shape", node.inputs[0]), g.constant(0), g.constant(1)
    positive = g.op("Where", g.op("Less", axes, zero), g.add(axes, g.op("Shape", shape)), axes)
    kept = g.op("ScatterElements", shape, positive, g.op("Expand", one, g.op("Shape", axes)), axis=0)
    if attribute(node, "noop_with_empty_axes", 0):
        return kept
    return g.op("Where", g.op("Equal", g.op("Size", axes), zero), one, kept)  # none: all of them


def _like_node(g: Gradients, node: ir.Node, op_type: str, value: ir.Value) -> ir.Value:
    """Reduce ``value`` along the axes of the node, which are kept as 1."""
    axes = _axes(g, node)
    noop = attribute(node, "noop_with_empty_axes", 0)
    if op_type != "ReduceSum" and g.emitter.graph.opset_imports[""] < 18:  # axes are an attribute there
        return g.op(op_type, value, axes=None if axes is None else constant_ints(axes), keepdims=1)
    return g.op(op_type, value, *([] if axes is None else [axes]), keepdims=1, noop_with_empty_axes=noop)
