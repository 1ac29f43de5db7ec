"""Rules of operators that look elements up by indices. Indices have no gradient.

Gradients of lookups are sums by ScatterElements, which is right for indices that occur twice;
ScatterND with reduction="add" loses updates at two threads.
"""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, sizes
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("Gather", since=1)
def gather(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Every element of x gets the sum of the gradients of where it was looked up."""
    x, index = node.inputs
    assert x is not None and index is not None
    rank = g.rank(x)
    axis = attribute(node, "axis", 0) % rank
    before, after = list(range(axis)), list(range(axis + 1, rank))
    flat = g.op("Reshape", index, g.constant([1] * axis + [-1] + [1] * len(after)))
    count = g.op("Reshape", g.op("Size", index), g.constant([1]))
    shape = [*(g.op("Shape", x, start=i, end=i + 1) for i in before), count]
    shape += [g.op("Shape", x, start=i, end=i + 1) for i in after]
    whole = g.op("Concat", *shape, axis=0) if len(shape) > 1 else shape[0]
    rows = g.op("Reshape", d, whole, allowzero=1) if sizes(index) is None or g.rank(index) != 1 else d
    indices = g.op("Expand", flat, whole)
    zeros = g.zeros_like(x, d)
    return [g.op("ScatterElements", zeros, indices, rows, axis=axis, reduction="add"), None]


@register_gradient("GatherElements", since=11)
def gather_elements(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As Gather, element by element."""
    x, index = node.inputs
    assert x is not None and index is not None
    axis = attribute(node, "axis", 0)
    return [g.op("ScatterElements", g.zeros_like(x, d), index, d, axis=axis, reduction="add"), None]


@register_gradient("ScatterElements", since=11)
def scatter_elements(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Elements that were overwritten have gradient 0; updates get that of where they went."""
    x, index, updates = node.inputs
    axis, reduction = attribute(node, "axis", 0), attribute(node, "reduction", "none")
    if reduction not in ("none", "add"):
        raise GradientError(f"reduction='{reduction}' has no gradient rule.")
    taken = g.op("GatherElements", d, index, axis=axis)
    if reduction == "add" or not g.needs(x):
        return [d, None, taken]
    assert updates is not None
    zeros = g.zeros_like(updates, d)
    return [g.op("ScatterElements", d, index, zeros, axis=axis), None, taken]


@register_gradient("GatherND", since=11)
def gather_nd(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As Gather, of the rows that are left when the indexed axes are made one."""
    x, index = node.inputs
    assert x is not None and index is not None
    if attribute(node, "batch_dims", 0):
        raise GradientError("only batch_dims=0 has a gradient rule.")
    g.rank(index)
    depth = (sizes(index) or (None,))[-1]
    if not isinstance(depth, int):
        raise GradientError(f"the last size of '{index.name}' must be known.")
    dims = [g.size(x, axis) for axis in range(depth)]
    strides = [g.constant([1])]
    for dim in dims[:0:-1]:
        strides.insert(0, g.mul(strides[0], dim))
    limits = g.op("Concat", *dims, axis=0)
    positive = g.op("Where", g.op("Less", index, g.constant(0)), g.add(index, limits), index)
    row = g.sum(g.mul(positive, g.op("Concat", *strides, axis=0)), [-1], keepdims=False)
    row = g.op("Reshape", row, g.constant([-1, 1]))
    flat = g.op("Flatten", g.zeros_like(x, d), axis=depth)
    whole = g.op("Concat", g.op("Shape", row, end=1), g.op("Shape", flat, start=1), axis=0)
    grads = g.op("Reshape", d, whole, allowzero=1)
    summed = g.op("ScatterElements", flat, g.op("Expand", row, whole), grads, axis=0, reduction="add")
    return [g.reshape_like(summed, x), None]


@register_gradient("TopK", since=11)
def top_k(g: Gradients, node: ir.Node, d: ir.Value | None, _: ir.Value | None) -> Grads:
    """The values' gradients go to where they were found."""
    x, index = node.inputs[0], node.outputs[1]
    assert x is not None and d is not None
    axis = attribute(node, "axis", -1)
    return [g.op("ScatterElements", g.zeros_like(x, d), index, d, axis=axis), None]
