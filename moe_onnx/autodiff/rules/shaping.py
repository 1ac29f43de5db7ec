"""Rules of operators that move elements without changing them."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, sizes
from moe_onnx.autodiff.registry import register_gradient

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
