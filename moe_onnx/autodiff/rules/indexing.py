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


@register_gradient("GatherND", since=11)
def gather_nd(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As Gather, of the rows that are left when the indexed axes are made one."""
    x, index = node.inputs
    assert x is not None and index is not None
    row, depth = rows_of(g, x, index, attribute(node, "batch_dims", 0))
    flat = g.op("Flatten", g.zeros_like(x, d), axis=depth)
    whole = g.op("Concat", g.op("Shape", row, end=1), g.op("Shape", flat, start=1), axis=0)
    grads = g.op("Reshape", d, whole, allowzero=1)
    summed = g.op("ScatterElements", flat, g.op("Expand", row, whole), grads, axis=0, reduction="add")
    return [g.reshape_like(summed, x), None]


def rows_of(g: Gradients, x: ir.Value, index: ir.Value, batch_dims: int) -> tuple[ir.Value, int]:
    """Which row of x each index means, (N, 1), and how many axes of x make a row's number.

    Raises:
        GradientError: If the rank of the indices, or how long they are, is not known.
    """
    g.rank(index)
    length = (sizes(index) or (None,))[-1]
    if not isinstance(length, int):
        raise GradientError(f"the last size of '{index.name}' must be known.")
    dims = [g.size(x, axis) for axis in range(batch_dims, batch_dims + length)]
    strides = [g.constant([1])]
    for dim in dims[:0:-1]:
        strides.insert(0, g.mul(strides[0], dim))
    limits = g.op("Concat", *dims, axis=0)
    positive = g.op("Where", g.op("Less", index, g.constant(0)), g.add(index, limits), index)
    row = g.sum(g.mul(positive, g.op("Concat", *strides, axis=0)), [-1], keepdims=False)
    if batch_dims:
        row = g.op("Flatten", row, axis=batch_dims)
        count = g.op("Shape", row, start=0, end=1)
        batch = g.op("Range", g.constant(0), g.op("Reshape", count, g.constant([])), g.constant(1))
        each = g.mul(strides[0], dims[0])
        row = g.add(row, g.mul(g.op("Unsqueeze", batch, g.constant([1])), each))
    return g.op("Reshape", row, g.constant([-1, 1])), batch_dims + length


@register_gradient("TopK", since=11)
def top_k(g: Gradients, node: ir.Node, d: ir.Value | None, _: ir.Value | None) -> Grads:
    """The values' gradients go to where they were found."""
    x, index = node.inputs[0], node.outputs[1]
    assert x is not None and d is not None
    axis = attribute(node, "axis", -1)
    return [g.op("ScatterElements", g.zeros_like(x, d), index, d, axis=axis), None]
