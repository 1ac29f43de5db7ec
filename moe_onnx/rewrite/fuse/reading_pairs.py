"""Where the pairs of an expert are, and what is looked up there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import NotThis, attribute, rank, size
from moe_onnx.rewrite.fuse.grids import grid
from moe_onnx.rewrite.fuse.meaning import Meaning, Source, Walk
from moe_onnx.rewrite.fuse.reading_axes import taken
from moe_onnx.rewrite.fuse.reading_gates import expert_at
from moe_onnx.rewrite.fuse.shapes import folded
from moe_onnx.rewrite.fuse.views import repeated_tokens, scalar_of, view

if TYPE_CHECKING:
    from moe_onnx.rewrite.fuse.reading import Reader


def _non_zero(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    hot = reader.meaning(node.inputs[0], "hot")
    if hot is None:
        return None
    letters = [letter for letter in hot.axes if letter not in ("1", "C")]
    if "C" in hot.axes and hot.axes[-1] != "C":
        return None
    if hot.expert is None:
        order = {"ET": "experts", "ETK": "experts", "E": "hit"}.get("".join(letters))
    else:
        order = {"T": "tokens", "TK": "tokens", "P": "tokens", "KT": "choices"}.get("".join(letters))
    if order is None:
        raise NotThis(node, f"finds places by {list(hot.axes)}, in no order that is known")
    walk = Walk(hot.choice, hot.expert, order)
    axes = ("2", "N") if len(hot.axes) > 1 else ("1", "N")
    return Meaning("at", axes, hot.choice, walk=walk, coords=hot.axes)


def _concat(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """Coordinates beside each other: ``[N, 1]`` and ``[N, 1]`` become ``[N, 2]``."""
    parts = [reader.meaning(one, "at") for one in node.inputs]
    first = parts[0]
    if first is None or not 1 <= len(first.axes) <= 2 or attribute(node, "axis", 0) not in (1, -1):
        return None
    coords: list[str] = []
    for part in parts:
        if part is None or part.walk != first.walk or part.axes not in (("N", "1"), ("N", "2")):
            return None
        coords += part.coords
    return replace(first, axes=("N", "2" if len(coords) > 1 else "1"), coords=tuple(coords))


def _added(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """``token * K + choice``, the index of a pair."""
    left, right = (reader.meaning(one, "at") for one in node.inputs)
    if left is None or right is None or left.walk != right.walk or left.axes != right.axes:
        return None
    choice, both = left.choice, {left.coords, right.coords}
    if both == {(f"T*{choice.top_k}",), ("K",)}:
        return replace(left, coords=("P",))
    return replace(left, coords=("A",)) if both == {(f"T*{choice.experts}",), ("E",)} else None


def _gather(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """One place of an axis, or a row for each pair that was found."""
    data, index = node.inputs[:2]
    one, at = reader.read(data), reader.read(index)
    axis = attribute(node, "axis", 0)
    if isinstance(at, Meaning) and at.what != "turn":
        if at.what != "at" or at.axes != ("N",) or len(at.coords) != 1 or data is None:
            return None
        return _picked(reader, data, at, axis % (rank(data) or 1))
    if not isinstance(one, Meaning) or index is None:
        return None
    if not -len(one.axes) <= axis < len(one.axes):
        return None
    axis %= len(one.axes)
    flat = rank(index)
    known = folded(index)
    if known is not None and len(known) == 1 and known[0] is not None:
        return taken(one, axis, known[0], keep=flat == 1)
    if one.axes[axis] == "E" and one.expert is None and known is None:
        expert = expert_at(reader, index)
        if expert is not None and (flat == 0 or size(index, 0) == 1):
            rest = (*one.axes[:axis], *(("1",) if flat else ()), *one.axes[axis + 1 :])
            return replace(one, axes=rest, expert=expert)
    if one.what == "at" and one.coords == ("E",) and one.axes[axis] == "N" and known is None and flat == 0:
        # The expert of a turn, of those that anybody has chosen.
        turn = scalar_of(index)
        assert turn is not None
        same = reader.turns.setdefault((one.walk, turn), value)
        rest = (*one.axes[:axis], *one.axes[axis + 1 :])
        return Meaning("turn", rest, one.choice, walk=one.walk, of=same)
    return None


def _gather_nd(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    at, data = reader.meaning(node.inputs[1], "at"), node.inputs[0]
    if at is None or data is None or attribute(node, "batch_dims", 0):
        return None
    if at.axes not in (("N", "1"), ("N", "2")):
        return None
    return _picked(reader, data, at, 0)


def _picked(reader: Reader, data: ir.Value, at: Meaning, axis: int) -> Meaning | None:
    """``data`` at coordinates, along axes from ``axis`` on: rows of tokens, or weights of pairs."""
    walk, coords, many = at.walk, at.coords, len(at.coords)
    assert walk is not None
    gate = reader.read(data)
    if isinstance(gate, Meaning):
        if gate.what != "gate" or gate.choice != at.choice or gate.source is None:
            return None
        letters = gate.axes[axis : axis + many]
        rest = (*gate.axes[:axis], "N", *gate.axes[axis + many :])
        if not set(rest) <= {"N", "1"}:
            return None
        fixed = gate.expert is not None and gate.expert == walk.expert and letters == coords == ("T",)
        full = gate.expert is None and letters == coords and set(coords) in ({"T", "E"}, {"A"})
        if not (fixed or full):
            return None
        return Meaning("pick", rest, at.choice, walk=walk, source=gate.source, cast=gate.cast)
    if coords == ("P",) and axis == 0 and (tokens := repeated_tokens(data, at.choice.top_k)) is not None:
        return Meaning("pick", ("N", "H"), at.choice, walk=walk, of=tokens)
    if coords == ("E", "T") and axis == 0 and (counted := grid(data, at.choice)) is not None:
        return replace(at, axes=("N",), coords=(counted,))
    found = view(data)
    if found is None:
        return None
    taken_axes, base = found.axes[axis : axis + many], found.base
    rest_axes = (*found.axes[:axis], "N", *found.axes[axis + many :])
    kept = tuple(str(a) if a in ("1", "N") else "H" for a in rest_axes)
    columns = size(base, 1)
    if coords == ("T",) and taken_axes == (0,) and rank(base) == 2 and kept.count("H") == 1:
        return Meaning("pick", kept, at.choice, walk=walk, of=base)
    pairs = rank(base) == 2 and columns in (at.choice.top_k, None) and kept.count("H") == 0
    if pairs and (
        (coords == ("T", "K") and taken_axes == (0, 1)) or (coords == ("P",) and taken_axes == ((0, 1),))
    ):
        return Meaning("pick", kept, at.choice, walk=walk, source=Source("pairs", base))
    return None


RULES = {
    "NonZero": _non_zero, "Concat": _concat, "Add": _added, "Gather": _gather, "GatherND": _gather_nd,
}  # fmt: skip
