"""How nodes that move axes, or change nothing, change what a value means."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import FLOATS, is_one_cast
from moe_onnx.rewrite.fuse.graph import NotThis, attribute, ints, places, producer, rank, reads, size
from moe_onnx.rewrite.fuse.grids import grid
from moe_onnx.rewrite.fuse.meaning import Meaning, Source
from moe_onnx.rewrite.fuse.row_counts import columns
from moe_onnx.rewrite.fuse.shapes import asked_dims, dims, folded, wanted_shape

if TYPE_CHECKING:
    from moe_onnx.rewrite.fuse.reading import Reader


def _first(reader: Reader, node: ir.Node) -> Meaning | None:
    found = reader.read(node.inputs[0])
    return found if isinstance(found, Meaning) else None


def _identity(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    return _first(reader, node)


def _cast(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    one, to = _first(reader, node), attribute(node, "to", 0)
    if one is None or one.what == "hot":
        return one
    given = None if node.inputs[0] is None else node.inputs[0].dtype
    if one.what in ("gate", "pick"):
        if to == given:
            return one
        if one.source is None or not {to, given} <= FLOATS:
            return None  # rows, or truncated, or whether there is one: weights no more
        if one.cast is not None and not is_one_cast(one.source.value.dtype, one.cast, to):
            return None  # rounded twice
        return dense(one, value) if one.axes == ("T", "E") else replace(one, cast=to)
    # Numbers of experts and tokens stay what they are.
    if to not in (ir.DataType.INT32, ir.DataType.INT64):
        raise NotThis(node, "makes of them what may not hold them")
    return one


def dense(one: Meaning, value: ir.Value) -> Meaning | None:
    """Weights that were changed, zeros staying zeros: those are the weights now."""
    if one.what in ("gate", "masked") and one.axes == ("T", "E"):
        return replace(one, what="gate", source=Source("dense", value))
    return None


def _transpose(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    one = _first(reader, node)
    if one is None:
        return None
    perm = attribute(node, "perm", None) or range(len(one.axes))[::-1]
    if sorted(perm) != list(range(len(one.axes))):
        return None
    return one.turned(tuple(one.axes[i] for i in perm))


def _unsqueeze(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    one, axes = _first(reader, node), ints(reads(node, 1))
    if one is None:
        return None
    many = len(one.axes) + len(axes or ())
    new = None if axes is None else places(axes, many)
    if new is None:
        raise NotThis(node, "adds axes that are not known")
    old = iter(one.axes)
    return one.turned(tuple("1" if i in new else next(old) for i in range(many)))


def _squeeze(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    one = _first(reader, node)
    if one is None:
        return None
    axes = ints(reads(node, 1))
    gone = None if axes is None else places(axes, len(one.axes))
    if gone is None:
        raise NotThis(node, "takes away axes that are not known")
    for axis in gone:
        letter = one.axes[axis]
        if letter != "1" and not (letter == "K" and one.choice.top_k == 1):
            raise NotThis(node, f"takes away axis {axis}, which is not of size 1")
    return one.turned(tuple(letter for i, letter in enumerate(one.axes) if i not in gone))


def _reshape(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    one = _first(reader, node)
    if one is None:
        return None
    wide = size(node.inputs[0], one.axes.index("E")) if "E" in one.axes else None
    if wide is None and one.axes == ("T", "E"):
        wide = columns(node.inputs[0])
    if node.op_type == "Flatten":
        # Before the axis, and behind it: all of what is behind it may be of size 1.
        axis = attribute(node, "axis", 1)
        axis += len(one.axes) if axis < 0 else 0
        before, behind = one.axes[:axis], one.axes[axis:]
        shape: list[int | None] | None = [1 if set(part) <= {"1"} else None for part in (before, behind)]
        return None if shape is None else _reshaped(one, shape, None, None, wide)
    else:
        shape = wanted_shape(node)
    if shape is None:
        axes = rank(value)
        shape = None if axes is None else [None] * axes
    found = None if shape is None else _reshaped(one, shape, dims(node.inputs[0]), dims(value), wide)
    if found is None:
        raise NotThis(node, f"makes {shape or 'an unknown shape'} of {list(one.axes)}: none of its axes")
    return found


Sizes = list[int | str | None]


def _reshaped(
    one: Meaning, shape: list[int | None], given: Sizes | None, made: Sizes | None, wide: int | None
) -> Meaning | None:
    """Axes of size 1 may come and go; T and K become P, and P becomes T and K.

    Given and made sizes are those of a Reshape; a Flatten keeps the axes that it does not merge.
    ``wide``: of how many experts a token has a cell.
    """
    solid = [letter for letter in one.axes if letter != "1"]
    old = [i for i, letter in enumerate(one.axes) if letter != "1"]
    units = [i for i, many in enumerate(shape) if many == 1]
    places = [i for i in range(len(shape)) if i not in units]
    k = one.choice.top_k
    if solid == ["T", "K"] and len(places) == 1:
        solid = ["P"]
    elif solid == ["T", "E"] and len(places) == 1:
        if one.choice.experts is None or wide != one.choice.experts:
            return None
        solid = ["A"]
    elif solid == ["P"] and len(places) == 2 and shape[places[1]] == k:
        solid = ["T", "K"]
    elif len(solid) == len(places) > 1 and made is not None:
        # All axes but one must be known to stay: then the last one does.
        sizes = given if given is not None and len(given) == len(one.axes) else [None] * len(one.axes)
        after = made if len(made) == len(shape) else [None] * len(shape)
        stay = [_stays(one, i, sizes[i], (shape[p], after[p])) for i, p in zip(old, places, strict=True)]
        if stay.count(False) > 1:
            return None
    if len(solid) != len(places):
        return None
    if "K" in solid and shape[places[solid.index("K")]] not in (k, None):
        return None
    if solid[:2] == ["K", "T"] or ("C" in solid and len(solid) > 1 and shape[places[-1]] is None):
        return None
    letters = iter(solid)
    return one.turned(tuple("1" if i in units else next(letters) for i in range(len(shape))))


def _stays(one: Meaning, axis: int, given: int | str | None, made: tuple[int | str | None, ...]) -> bool:
    """Whether an axis is known to have the size that it had."""
    letter = one.axes[axis]
    known = {"K": one.choice.top_k, "2": len(one.coords)}.get(letter, given)
    return known is not None and known in made


def _expand(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """A last axis of size 1 may become columns, all alike; the others must stay as they are."""
    one, given = _first(reader, node), dims(node.inputs[0])
    like = producer(node.inputs[1], "Shape")
    if one is None or (like is not None and reader.read(like.inputs[0]) == one):
        return one
    if one.axes == ("E", "T") and like is not None and grid(like.inputs[0], one.choice) is not None:
        return one
    asked = asked_dims(node.inputs[1], value)
    if len(asked) != len(one.axes):
        return None
    letters = list(one.axes)
    columns = one.what in ("at", "hot") and letters[-1] == "1" and asked[-1] != 1
    if columns:
        letters[-1] = "C"
    for i, letter in enumerate(letters[: -1 if columns else None]):
        if asked[i] == 1 or (given is not None and asked[i] is not None and asked[i] == given[i]):
            continue
        # Rows of another number are refused where they meet what they belong to.
        if not columns or letter == "1" or isinstance(asked[i], int):
            return None
    return one.turned(tuple(letters))


def _only_one(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    return _first(reader, node) if len(node.inputs) == 1 else None


def _pieces(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """Split and Slice: single coordinates, single experts."""
    one = _first(reader, node)
    if one is None:
        return None
    many = len(one.axes)
    if node.op_type == "Split":
        axis = attribute(node, "axis", 0)
        if not -many <= axis < many:
            return None
        axis %= many
        parts = ints(reads(node, 1))
        length = sum(parts) if parts else size(node.inputs[0], axis)
        if length != len(node.outputs) or (parts and set(parts) != {1}):
            raise NotThis(node, f"is not known to cut axis {axis} into parts of size 1")
        return taken(one, axis, node.outputs.index(value), keep=True)
    starts, ends, axes, steps = (folded(reads(node, i)) for i in (1, 2, 3, 4))
    if starts is None or ends is None or (len(node.inputs) > 4 and set(steps or [0]) != {1}):
        raise NotThis(node, "has bounds or steps that are not known, or steps that are not 1")
    axes = list(range(len(starts))) if axes is None else axes
    left = one
    for start, end, at in zip(starts, ends, axes, strict=True):
        if at is None or start is None or end is None or not -many <= at < many:
            return None
        at %= many
        length = size(node.inputs[0], at)
        if start == 0 and (end >= 2**31 - 1 or (length is not None and end >= length)):
            continue
        length = len(left.coords) if left.axes[at] == "2" else length
        if start < 0 and length is not None:
            start, end = start + length, end + length if end < 0 else end
        if start >= 0 and length is not None:
            end = min(end, length)
        if end != start + 1:
            raise NotThis(node, f"takes some places of axis {at}, not one")
        found = taken(left, at, start, keep=True)
        if found is None:
            return None
        left = found
    return left


def taken(one: Meaning, axis: int, index: int, *, keep: bool) -> Meaning | None:
    """One place of an axis: an expert's part, or one coordinate."""
    letter = one.axes[axis]
    rest = [*one.axes[:axis], *(["1"] if keep else []), *one.axes[axis + 1 :]]
    if letter == "E" and one.expert is None and index >= 0:
        return replace(one, axes=tuple(rest), expert=index)
    if letter == "2" and -len(one.coords) <= index < len(one.coords):
        return replace(one, axes=tuple(rest), coords=(one.coords[index],))
    if letter == "1" and index in (0, -1):
        return one.turned(tuple(rest))
    return None


RULES = {
    "Identity": _identity, "Cast": _cast, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze, "Reshape": _reshape, "Flatten": _reshape, "Expand": _expand, "Split": _pieces,
    "Slice": _pieces, "Max": _only_one,
}  # fmt: skip
