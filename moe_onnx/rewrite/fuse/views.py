"""Values that are others with their axes moved."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import keeps_number
from moe_onnx.rewrite.fuse.graph import attribute, ints, places, producer, rank, reads, size
from moe_onnx.rewrite.fuse.meaning import View
from moe_onnx.rewrite.fuse.shapes import wanted_shape

_DEEP = 30


def view(value: ir.Value | None, depth: int = 0) -> View | None:
    """What a value is a view of: the base is no Transpose, Unsqueeze ... itself."""
    if value is None:
        return None
    node = producer(value, "Identity", "Transpose", "Unsqueeze", "Squeeze", "Reshape", "Flatten")
    inner = None if node is None or depth > _DEEP else view(node.inputs[0], depth + 1)
    found = None if node is None or inner is None else _step(node, inner, value)
    if found is not None:
        return found
    axes = rank(value)
    return None if axes is None else View(value, tuple(range(axes)))


def _step(node: ir.Node, inner: View, value: ir.Value) -> View | None:
    axes = inner.axes
    if node.op_type == "Identity":
        return inner
    if node.op_type == "Transpose":
        perm = attribute(node, "perm", None) or range(len(axes))[::-1]
        if sorted(perm) != list(range(len(axes))):
            return None
        return View(inner.base, tuple(axes[i] for i in perm))
    if node.op_type == "Flatten":
        at = attribute(node, "axis", 1)
        at += len(axes) if at < 0 else 0
        return View(inner.base, (_merged(axes[:at]), _merged(axes[at:])))
    if node.op_type == "Reshape":
        return _reshaped(node, inner, value)
    numbers = ints(reads(node, 1))
    if numbers is None:
        return None
    if node.op_type == "Unsqueeze":
        many = len(axes) + len(numbers)
        new, old = places(numbers, many), iter(axes)
        if new is None:
            return None
        return View(inner.base, tuple("1" if i in new else next(old) for i in range(many)))
    gone = places(numbers, len(axes))
    if gone is None or any(axes[i] != "1" for i in gone):
        return None
    return View(inner.base, tuple(axis for i, axis in enumerate(axes) if i not in gone))


def _merged(axes: tuple[object, ...]) -> object:
    solid: list[object] = []
    for axis in axes:
        if axis != "1":
            solid += list(axis) if isinstance(axis, tuple) else [axis]
    return "1" if not solid else solid[0] if len(solid) == 1 else tuple(solid)


def _reshaped(node: ir.Node, inner: View, value: ir.Value) -> View | None:
    """Axes of size 1 come and go; all become one; the first two become one."""
    shape, axes = wanted_shape(node), rank(value)
    if axes is None and shape is None:
        return None
    sizes = shape if shape is not None else [None] * (axes or 0)
    solid = [axis for axis in inner.axes if axis != "1"]
    units = [i for i, many in enumerate(sizes) if many == 1]
    places = [i for i in range(len(sizes)) if i not in units]
    if len(places) == 1 and solid:
        solid = [_merged(tuple(solid))]
    elif len(solid) == 3 and len(places) == 2 and solid == [0, 1, 2]:
        width = size(inner.base, 2)
        if width is None or sizes[places[1]] != width:
            return None
        solid = [(0, 1), 2]
    elif len(solid) == len(places) > 1:
        last = solid[-1]
        width = size(inner.base, last) if isinstance(last, int) else None
        if width is None or sizes[places[-1]] != width or len(places) > 2:
            return None
    if len(solid) != len(places):
        return None
    letters = iter(solid)
    return View(inner.base, tuple("1" if i in units else next(letters) for i in range(len(sizes))))


def scalar_of(value: ir.Value | None) -> ir.Value | None:
    """The number that a value of one element is, behind nodes that reshape it, or keep it an integer."""
    for _ in range(_DEEP):
        node = producer(value, "Reshape", "Unsqueeze", "Squeeze", "Cast", "Identity")
        if node is None or (node.op_type == "Cast" and not keeps_number(node)):
            break
        value = node.inputs[0]
    return value


def repeated_tokens(data: ir.Value | None, top_k: int) -> ir.Value | None:
    """``x`` ``[T, H]`` of a matrix that has every row ``top_k`` times, one after the other."""
    flat = producer(data, "Reshape", "Flatten")
    wide = None if flat is None else producer(flat.inputs[0], "Expand", "Tile")
    lifted = None if wide is None else producer(wide.inputs[0], "Unsqueeze")
    if flat is None or wide is None or lifted is None or ints(reads(lifted, 1)) not in ([1], [-2]):
        return None
    tokens, times = lifted.inputs[0], ints(reads(wide, 1))
    if rank(tokens) != 2 or times is None or len(times) != 3 or times[1] != top_k:
        return None
    width = size(tokens, 1)
    if times[0] != 1 or times[2] not in ((1,) if wide.op_type == "Tile" else (1, width)):
        return None
    if flat.op_type == "Flatten":
        return tokens if attribute(flat, "axis", 1) == 2 else None
    shape = ints(reads(flat, 1))
    return (
        tokens if width is not None and shape is not None and len(shape) == 2 and shape[1] == width else None
    )
