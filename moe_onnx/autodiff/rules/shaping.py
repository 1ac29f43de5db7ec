"""Rules of operators that move elements without changing them."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, constant_ints, sizes
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("Reshape", since=5)
@register_gradient("Squeeze", since=13)
@register_gradient("Unsqueeze", since=13)
@register_gradient("Flatten", since=1)
def reshape(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The gradient takes the shape that the input had."""
    x = node.inputs[0]
    assert x is not None
    return [g.reshape_like(d, x), *[None] * (len(node.inputs) - 1)]


@register_gradient("Transpose")
def transpose(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The inverse permutation."""
    (x,) = node.inputs
    assert x is not None
    perm = attribute(node, "perm") or list(range(g.rank(x)))[::-1]
    return [g.op("Transpose", d, perm=[list(perm).index(i) for i in range(len(perm))])]


@register_gradient("Expand", since=8)
def expand(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Sums over the axes along which x was repeated."""
    x = node.inputs[0]
    assert x is not None
    return [g.unbroadcast(d, x, node.outputs[0]), None]


@register_gradient("Concat", since=4)
def concat(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Split again."""
    axis = attribute(node, "axis")
    if len(node.inputs) == 1:
        return [d]
    return list(g.ops("Split", d, _lengths(g, node, axis), outputs=len(node.inputs), axis=axis))


@register_gradient("Split", since=13)
def split(g: Gradients, node: ir.Node, *d: ir.Value | None) -> Grads:
    """Put together again; a part that the loss does not use has gradient 0."""
    alive = next(grad for grad in d if grad is not None)
    parts = [
        g.zeros_like(out, alive) if grad is None else grad for out, grad in zip(node.outputs, d, strict=True)
    ]
    whole = parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis=attribute(node, "axis", 0))
    return [whole, *[None] * (len(node.inputs) - 1)]


@register_gradient("Slice", since=10)
def slice_(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Zeros where nothing was taken. Steps must be 1, starts and axes constants."""
    x, starts_value, _, axes_value, steps_value = [*node.inputs, None, None][:5]
    assert x is not None
    starts, steps = constant_ints(starts_value), constant_ints(steps_value)
    if starts is None or (steps_value is not None and set(steps or [0]) != {1}):
        raise GradientError("only a Slice with constant starts and steps of 1 has a gradient rule.")
    rank = g.rank(x)
    axes = list(range(len(starts))) if axes_value is None else constant_ints(axes_value)
    if axes is None:
        raise GradientError("only a Slice with constant axes has a gradient rule.")
    axes = [axis % rank for axis in axes]
    zero = g.constant([0])
    before, after = [], []
    for start, axis in zip(starts, axes, strict=True):
        size = g.op("Shape", x, start=axis, end=axis + 1)
        length = g.op("Shape", d, start=axis, end=axis + 1)
        if start < 0:
            first = g.op("Max", g.op("Add", size, g.constant([start])), zero)
        else:
            first = g.op("Min", g.constant([start]), size) if start else zero
        before.append(first)
        after.append(g.op("Sub", g.op("Sub", size, length), first))
    pads = g.op("Concat", *before, *after, axis=0)
    grad = g.op("Pad", d, pads, None, g.constant(axes))
    return [grad, *[None] * (len(node.inputs) - 1)]


@register_gradient("Pad", since=11)
def pad(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Pads of the other sign: what was added is cropped, what was cropped has gradient 0."""
    if attribute(node, "mode", "constant") != "constant":
        raise GradientError("only mode='constant' has a gradient rule.")
    pads, axes = node.inputs[1], node.inputs[3] if len(node.inputs) > 3 else None
    grad = g.op("Pad", d, g.op("Neg", pads), *([] if axes is None else [None, axes]))
    return [grad, *[None] * (len(node.inputs) - 1)]


@register_gradient("Tile", since=6)
def tile(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The sum over all copies."""
    x, repeats = node.inputs
    assert x is not None and repeats is not None
    rank, column = g.rank(x), g.constant([1])
    pairs = [g.op("Unsqueeze", value, column) for value in (repeats, g.shape(x))]
    split = g.op("Reshape", g.op("Concat", *pairs, axis=1), g.constant([-1]))
    copies = g.op("Reshape", d, split, allowzero=1)
    return [g.sum(copies, range(0, 2 * rank, 2), keepdims=False), None]


@register_gradient("Trilu", since=14)
def trilu(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The same triangle."""
    rest = node.inputs[1:]
    return [g.op("Trilu", d, *rest, upper=attribute(node, "upper", 1)), *[None] * len(rest)]


def _lengths(g: Gradients, node: ir.Node, axis: int) -> ir.Value:
    """How long each input of a Concat is along the axis: known, or as it was split before, or read."""
    lengths = []
    for value in node.inputs:
        dims = sizes(value) if value is not None else None
        lengths.append(None if dims is None else dims[axis])
    if all(isinstance(length, int) for length in lengths):
        return g.constant(lengths)
    found = g.split_into(lengths)
    if found is not None:
        return found
    parts = []
    for value in node.inputs:
        assert value is not None
        start = axis % g.rank(value)
        parts.append(g.op("Shape", value, start=start, end=start + 1))
    return g.op("Concat", *parts, axis=0)
