"""Reads what values of a router mean, node by node: see :mod:`moe_onnx.rewrite.fuse.meaning`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from moe_onnx.rewrite.fuse import reading_axes, reading_gates, reading_pairs
from moe_onnx.rewrite.fuse.casts import keeps_number
from moe_onnx.rewrite.fuse.graph import (
    NotThis,
    attribute,
    ints,
    is_called,
    is_op,
    producer,
    rank,
    reads,
    size,
)
from moe_onnx.rewrite.fuse.meaning import Choice, Lost, Meaning, Walk
from moe_onnx.rewrite.fuse.row_counts import columns

Seen = Meaning | Lost | None


class Reader:
    """What values mean; None for those that have nothing to do with choices of experts."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, Seen] = {}
        self._moved: dict[ir.Value, ir.Value] = {}
        self.turns: dict[tuple[Walk | None, ir.Value], ir.Value] = {}

    def scan(self, graph: ir.Graph) -> None:
        """Read a graph, and those inside it: by a list, depth is up to the model."""
        waiting = [graph]
        while waiting:
            for node in waiting.pop():
                for value in node.outputs:
                    self._known[value] = self._made(node, value)
                for attr in node.attributes.values():
                    if attr.type == ir.AttributeType.GRAPH and not attr.is_ref():
                        waiting.append(attr.as_graph())

    def read(self, value: ir.Value | None) -> Seen:
        """What a value means."""
        return None if value is None else self._known.get(value)

    def meaning(self, value: ir.Value | None, *what: str) -> Meaning | None:
        """What a value means, if that is one of these."""
        found = self.read(value)
        return found if isinstance(found, Meaning) and found.what in what else None

    def moved(self, old: ir.Value, new: ir.Value) -> None:
        """A value stands for another one now."""
        self._moved[old] = new

    def now(self, value: ir.Value) -> ir.Value:
        """What stands for a value that was read."""
        while value in self._moved:
            value = self._moved[value]
        return value

    def _made(self, node: ir.Node, value: ir.Value) -> Seen:
        if is_op(node, "TopK", "ArgMax"):
            choice = _choice(node, value)
            return None if choice is None else Meaning("ids", ("T", "K")[: rank(value) or 1], choice)
        flat = _flattened(node, value)
        if flat is not None or node.domain not in ("", "ai.onnx") or is_op(node, "Shape", "Size"):
            return flat
        given = [self.read(one) for one in node.inputs]
        lost = next((one for one in given if isinstance(one, Lost)), None)
        first = next((one for one in given if isinstance(one, Meaning)), None)
        if lost is not None:
            return replace(lost, found=True) if is_op(node, "NonZero") else lost
        if first is None:
            return None
        rule, why = None if is_called(node) else _RULES.get(node.op_type), "is no step that is known"
        try:
            found = None if rule is None else rule(self, node, value)
        except NotThis as no:
            found, why = None, no.reason
        if found is not None or first.what in ("pick", "gate") or _is_other(self, node):
            return found  # weights and rows are computed with: a matter of the experts
        text = f"{node.op_type} of {_NAMES[first.what]} {first.choice} {why}"
        return Lost(node, text, first.what == "at" or is_op(node, "NonZero"))


def _is_other(reader: Reader, node: ir.Node) -> bool:
    """Whether a node makes rows of tokens, or looks something up by ids: a matter of the experts, too."""
    if is_op(node, "Gather", "GatherElements", "GatherND"):
        return reader.read(node.inputs[0]) is None and reader.meaning(node.inputs[1], "ids", "at") is not None
    return is_op(node, "ScatterND", "ScatterElements") and reader.meaning(node.inputs[1], "at") is not None


_NAMES = {
    "ids": "expert ids", "hot": "a mask of the expert ids", "at": "the places of the expert ids",
    "masked": "scores masked by the expert ids", "turn": "an expert chosen in",
    "count": "the number of tokens of an expert in",
}  # fmt: skip


def _choice(node: ir.Node, value: ir.Value) -> Choice | None:
    """The choice that a TopK, or an ArgMax, makes."""
    scores = node.inputs[0]
    axes = rank(scores)
    axis = attribute(node, "axis", -1 if node.op_type == "TopK" else 0)
    if axes is None or axis not in (-1, axes - 1):
        return None
    if node.op_type == "ArgMax":
        if axes != 2:
            return None
        return Choice(value, 1, columns(scores))
    found = ints(reads(node, 1))
    if value is not node.outputs[1] or not found or len(found) != 1 or found[0] < 1 or axes != 2:
        return None
    return Choice(value, found[0], columns(scores))


def _flattened(node: ir.Node, value: ir.Value) -> Meaning | None:
    """``[B, S, K]`` of a TopK made ``[B*S, K]``."""
    if not is_op(node, "Reshape") or rank(value) != 2:
        return None
    inner: ir.Value | None = node.inputs[0]
    while (cast := producer(inner, "Cast", "Identity")) is not None:
        if cast.op_type == "Cast" and not keeps_number(cast):
            return None
        inner = cast.inputs[0]
    top = producer(inner, "TopK")
    if top is None or inner is not top.outputs[1] or (rank(inner) or 0) < 3:
        return None
    found, shape = ints(reads(top, 1)), ints(reads(node, 1))
    if (
        not found
        or len(found) != 1
        or found[0] < 1
        or attribute(top, "axis", -1) not in (-1, (rank(inner) or 0) - 1)
    ):
        return None
    if (shape is None or shape[-1] != found[0]) and size(value, 1) != found[0]:
        return None
    return Meaning("ids", ("T", "K"), Choice(value, found[0], size(top.inputs[0], -1)))


Rule = Callable[[Reader, ir.Node, ir.Value], Meaning | None]
_RULES: dict[str, Rule] = {**reading_axes.RULES, **reading_gates.RULES, **reading_pairs.RULES}
