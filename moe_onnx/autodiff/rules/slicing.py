"""Rules of Slice, in every form, and of Pad, in every mode.

Where a form has no cheap inverse, the elements of x are numbered, the numbers go the way that the elements
went, and every gradient is added where its number says.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, constant_ints, sizes
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]
WIDE = 64  # of longer steps the zeros in between would be most of the memory
LEAST = -(2**62)  # anything below is "from the very start" in other words


@register_gradient("Slice", since=10)
def slice_(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Zeros where nothing was taken."""
    x, starts_value, _, axes_value, steps_value = [*node.inputs, None, None][:5]
    assert x is not None
    starts, rest = constant_ints(starts_value), [None] * (len(node.inputs) - 1)
    count = len(starts) if starts is not None else 0
    steps = [1] * count if steps_value is None else constant_ints(steps_value)
    axes = list(range(count)) if axes_value is None else constant_ints(axes_value)
    numbered = starts is None or axes is None or sizes(x) is None
    if numbered or steps is None or max(map(abs, steps), default=1) > WIDE:
        return [_by_numbers(g, x, d, lambda numbers: g.op("Slice", numbers, *node.inputs[1:])), *rest]
    assert starts is not None and axes is not None
    rank = g.rank(x)
    axes = [axis % rank for axis in axes]
    for axis, step in zip(axes, steps, strict=True):
        if step < 0:  # the other way round
            ends = (g.constant([-1]), g.constant([LEAST]), g.constant([axis]), g.constant([-1]))
            d = g.op("Slice", d, *ends)
    lengths = {axis: g.op("Shape", d, start=axis, end=axis + 1) for axis in axes}
    for axis, step in sorted(zip(axes, steps, strict=True)):
        if abs(step) > 1:
            d = _spread(g, d, axis, abs(step), rank)
    zero = g.constant([0])
    # Of all axes: onnxruntime's transpose optimiser takes the pads of some for those of all.
    before, after = [zero] * rank, [zero] * rank
    for start, axis, step in zip(starts, axes, steps, strict=True):
        size, length = g.op("Shape", x, start=axis, end=axis + 1), lengths[axis]
        if abs(step) > 1:
            length = g.mul(length, g.constant([abs(step)]))
        first = _first(g, start, size, step)
        if step < 0:  # the lowest of what was taken was taken last
            first = g.add(first, g.mul(g.sub(lengths[axis], g.constant([1])), g.constant([step])))
        before[axis] = first
        after[axis] = g.sub(g.sub(size, length), first) if first is not zero else g.sub(size, length)
    return [g.op("Pad", d, g.op("Concat", *before, *after, axis=0)), *rest]


def _first(g: Gradients, start: int, size: ir.Value, step: int) -> ir.Value:
    """Where a slice begins."""
    zero = g.constant([0])
    last = size if step > 0 else g.sub(size, g.constant([1]))
    if start >= 0:
        return (
            g.op("Min", g.constant([start]), last) if start else g.op("Min", zero, last) if step < 0 else zero
        )
    return g.op("Max", g.add(size, g.constant([max(start, LEAST)])), zero)


def _spread(g: Gradients, d: ir.Value, axis: int, step: int, rank: int) -> ir.Value:
    """``step - 1`` zeros behind every element along an axis."""
    shape = [g.op("Shape", d, start=i, end=i + 1) for i in range(rank)]
    shape[axis] = g.mul(shape[axis], g.constant([step]))
    columns = g.op("Unsqueeze", d, g.constant([axis + 1]))
    behind = [step - 1 if i == axis + 1 else 0 for i in range(rank + 1)]
    columns = g.op("Pad", columns, g.constant([0] * (rank + 1) + behind))
    return g.op("Reshape", columns, g.op("Concat", *shape, axis=0), allowzero=1)


@register_gradient("Pad", since=11)
def pad(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """What was added is cropped and what was cropped has gradient 0; copies are added to what they copy."""
    x, pads, fill, axes = [*node.inputs, None, None][:4]
    assert x is not None
    mode, behind = attribute(node, "mode", "constant"), [] if axes is None else [None, axes]
    rest: Grads = [None] * (len(node.inputs) - 1)
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise GradientError(f"mode='{mode}' has no gradient rule; constant, edge, reflect and wrap have.")
    if mode != "constant":
        return [_by_numbers(g, x, d, lambda n: g.op("Pad", n, pads, *behind, mode=mode)), *rest]
    if fill is not None and g.needs(fill):
        inner = g.op("Expand", g.constant(0), g.op("Shape", x))
        outer = g.op("Pad", inner, pads, g.constant(1), *behind[1:])
        added = g.op("Where", g.op("Equal", outer, g.constant(1)), d, g.like(0.0, d))
        rest[1] = g.reshape_like(g.op("ReduceSum", added, keepdims=0), fill)
    grad = g.op("Pad", d, g.op("Neg", pads), *behind) if g.needs(x) else None
    return [grad, *rest]


def _by_numbers(g: Gradients, x: ir.Value, d: ir.Value, move: Callable[[ir.Value], ir.Value]) -> ir.Value:
    shape = g.op("Shape", x)
    numbers = g.op("Range", g.constant(0), g.op("Size", x), g.constant(1))
    moved = g.op("Reshape", move(g.op("Reshape", numbers, shape, allowzero=1)), g.constant([-1]))
    flat = g.op("Reshape", d, g.constant([-1]))
    zeros = g.op("Reshape", g.zeros_like(x, d), g.constant([-1]))
    return g.op(
        "Reshape", g.op("ScatterElements", zeros, moved, flat, axis=0, reduction="add"), shape, allowzero=1
    )
