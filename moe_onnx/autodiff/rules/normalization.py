"""Rules of normalizations and of the cross entropy."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("LayerNormalization", since=17)
def layer_normalization(
    g: Gradients,
    node: ir.Node,
    d: ir.Value | None,
    d_mean: ir.Value | None = None,
    d_inverse: ir.Value | None = None,
) -> Grads:
    """With ``n = (x - mean) r``: ``r (e - mean(e) - n mean(e n))`` for ``e = d scale``; and of Mean and r."""
    x, scale, bias = [*node.inputs, None][:3]
    assert x is not None and scale is not None
    axes = list(range(attribute(node, "axis", -1) % g.rank(x), g.rank(x)))
    centred = g.sub(g.wide(x), _mean(g, g.wide(x), axes))
    norm, root = _normed(g, node, centred, axes)
    parts: Grads = []
    dscale = dbias = None
    if d is not None:
        dx, dscale = _scaled(g, node, d, norm, root, axes, centre=True)
        parts = [] if dx is None else [dx]
        dbias = g.unbroadcast(d, bias, node.outputs[0]) if bias is not None and g.needs(bias) else None
    elif g.needs(scale) or (bias is not None and g.needs(bias)):
        alive = d_inverse if d_mean is None else d_mean
        assert alive is not None
        dscale = g.zeros_like(scale, alive)
        dbias = None if bias is None else g.zeros_like(bias, alive)
    if g.needs(x):
        for grad, slope in ((d_mean, None), (d_inverse, g.neg(g.mul(g.mul(root, root), norm)))):
            if grad is not None:
                each = g.div(g.cast(grad, norm), _count(g, x, root, norm))
                each = g.op("Expand", each, g.op("Shape", x)) if slope is None else g.mul(each, slope)
                parts.append(g.cast(each, x))
    total = None
    for part in parts:
        total = part if total is None or part is None else g.add(total, part)
    return [total, dscale, dbias][: len(node.inputs)]


def _count(g: Gradients, x: ir.Value, root: ir.Value, like: ir.Value) -> ir.Value:
    """How many elements a mean is of; 1 where there is nothing."""
    means = g.op("Max", g.op("Size", root), g.constant(1))
    return g.cast(g.div(g.op("Size", x), means), like)


@register_gradient("RMSNormalization", since=23)
def rms_normalization(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """With ``n = x r``: ``r (e - n mean(e n))`` for ``e = d scale``."""
    x, scale = node.inputs
    assert x is not None and scale is not None
    axes = list(range(attribute(node, "axis", -1) % g.rank(x), g.rank(x)))
    norm, root = _normed(g, node, g.wide(x), axes)
    return list(_scaled(g, node, d, norm, root, axes, centre=False))


@register_gradient("InstanceNormalization", since=6)
def instance_normalization(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As LayerNormalization, over the axes behind the channels, with one scale a channel."""
    x, scale, bias = node.inputs
    assert x is not None and scale is not None and bias is not None
    rank = g.rank(x)
    axes, others = list(range(2, rank)), [0, *range(2, rank)]
    wide, wide_d = g.wide(x), g.wide(d)
    norm, root = _normed(g, node, g.sub(wide, _mean(g, wide, axes)), axes)
    dx = dscale = dbias = None
    if g.needs(x):
        channels = g.op("Unsqueeze", g.wide(scale), g.constant(list(range(1, rank - 1))))
        e = g.mul(wide_d, channels)
        across = g.mul(norm, _mean(g, g.mul(e, norm), axes))
        dx = g.cast(g.mul(g.sub(g.sub(e, _mean(g, e, axes)), across), root), x)
    if g.needs(scale):
        dscale = g.cast(g.sum(g.mul(wide_d, norm), others, keepdims=False), scale)
    if g.needs(bias):
        dbias = g.cast(g.sum(wide_d, others, keepdims=False), bias)
    return [dx, dscale, dbias]


@register_gradient("BatchNormalization", since=15)
def batch_normalization(g: Gradients, node: ir.Node, d: ir.Value | None, *others: ir.Value | None) -> Grads:
    """With running statistics: ``y = (x - mean) scale / sqrt(var + epsilon) + bias`` by channel."""
    if attribute(node, "training_mode", 0):
        raise GradientError("training_mode=1 has no gradient rule; training_mode=0 has.")
    x, scale, bias, mean, var = node.inputs
    assert d is not None and x and scale and bias and mean and var
    rank = g.rank(x)
    axes = [axis for axis in range(rank) if axis != 1]

    def channels(value: ir.Value) -> ir.Value:
        value = g.cast(value, x)
        return g.op("Unsqueeze", value, g.constant(list(range(1, rank - 1)))) if rank > 2 else value

    epsilon = g.like(float(attribute(node, "epsilon", 1e-5)), var)
    root = g.op("Reciprocal", g.op("Sqrt", g.add(var, epsilon)))
    gain = g.mul(scale, g.cast(root, scale))
    dbias = g.sum(d, axes, keepdims=False)
    centred = g.sub(x, channels(mean))
    against = g.sum(g.mul(d, centred), axes, keepdims=False)  # d loss / d gain
    dscale = g.mul(g.cast(against, scale), g.cast(root, scale))
    dmean = g.neg(g.mul(g.cast(dbias, mean), g.cast(gain, mean)))
    cube = g.mul(g.mul(root, root), g.mul(root, g.like(-0.5, var)))
    dvar = g.mul(g.mul(g.cast(against, var), g.cast(scale, var)), cube)
    return [g.mul(d, channels(gain)), dscale, g.cast(dbias, bias), dmean, dvar]


@register_gradient("SoftmaxCrossEntropyLoss", since=12)
def cross_entropy(g: Gradients, node: ir.Node, d: ir.Value | None, d_log: ir.Value | None = None) -> Grads:
    """``softmax - 1 at the label``, times the gradient of a position's loss; ignored ones have none."""
    scores, labels, weights = [*node.inputs, None][:3]
    assert scores is not None and labels is not None
    if weights is not None:
        raise GradientError("class weights have no gradient rule.")
    log_probs = node.outputs[1] if len(node.outputs) > 1 and node.outputs[1].name else None
    if log_probs is None:
        log_probs = g.op("LogSoftmax", scores, axis=1)
    probs, grad = g.op("Exp", log_probs), None
    if d is not None:
        each, safe = _positions(g, node, d, labels)
        pull = g.mul(probs, each)
        grad = g.op("ScatterElements", pull, safe, g.neg(each), axis=1, reduction="add")
    if d_log is not None:
        through = g.sub(d_log, g.mul(probs, g.sum(d_log, [1], keepdims=True)))
        grad = through if grad is None else g.add(grad, through)
    return [grad, *[None] * (len(node.inputs) - 1)]


def _positions(g: Gradients, node: ir.Node, d: ir.Value, labels: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The gradient of every position's loss and its label, with an axis for the classes."""
    reduction, ignored = attribute(node, "reduction", "mean"), attribute(node, "ignore_index")
    classes, zero = g.constant([1]), g.like(0.0, d)
    counted: ir.Value | None = None
    if ignored is not None:
        ignored_label = g.like(ignored, labels)
        counted = g.op("Not", g.op("Equal", labels, ignored_label))
        labels = g.op("Where", counted, labels, g.like(0, labels))
    if reduction == "mean" and counted is None:
        d = g.div(d, g.cast(g.op("Size", labels), d))
    elif reduction == "mean" and counted is not None:
        d = g.div(d, g.op("ReduceSum", g.cast(counted, d), keepdims=0))
    if counted is not None:
        d = g.op("Where", counted, d, zero)
    elif reduction != "none":
        d = g.op("Expand", d, g.op("Shape", labels))
    return g.op("Unsqueeze", d, classes), g.op("Unsqueeze", labels, classes)


def _mean(g: Gradients, value: ir.Value, axes: list[int]) -> ir.Value:
    if g.emitter.graph.opset_imports[""] < 18:
        return g.op("ReduceMean", value, axes=axes, keepdims=1)
    return g.op("ReduceMean", value, g.constant(axes), keepdims=1)


def _normed(g: Gradients, node: ir.Node, x: ir.Value, axes: list[int]) -> tuple[ir.Value, ir.Value]:
    """``x`` over its root mean square, and one over that."""
    mean = _mean(g, g.mul(x, x), axes)
    root = g.op("Sqrt", g.add(mean, g.like(float(attribute(node, "epsilon", 1e-5)), x)))
    inverse = g.op("Reciprocal", root)
    return g.mul(x, inverse), inverse


def _scaled(
    g: Gradients,
    node: ir.Node,
    d: ir.Value,
    norm: ir.Value,
    inverse: ir.Value,
    axes: list[int],
    *,
    centre: bool,
) -> tuple[ir.Value | None, ir.Value | None]:
    """The gradients of x and of scale."""
    x, scale = node.inputs[:2]
    assert x is not None and scale is not None
    wide, dx, dscale = g.wide(d), None, None
    if g.needs(scale):
        dscale = g.cast(g.unbroadcast(g.mul(wide, norm), scale, node.outputs[0]), scale)
    if g.needs(x):
        e = g.mul(wide, g.wide(scale))
        across = g.mul(norm, _mean(g, g.mul(e, norm), axes))
        rest = g.sub(g.sub(e, _mean(g, e, axes)), across) if centre else g.sub(e, across)
        dx = g.cast(g.mul(rest, inverse), x)
    return dx, dscale
