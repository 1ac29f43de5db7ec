"""Rows of an expert put, or added, to where its tokens are: one step of a chain over the experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import (
    NotThis,
    attribute,
    ints,
    is_op,
    only_user,
    producer,
    rank,
    reads,
    size,
)
from moe_onnx.rewrite.fuse.meaning import Meaning, Walk
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.row_counts import columns
from moe_onnx.rewrite.fuse.shapes import folded, is_filled


@dataclass
class Step:
    """``after`` is ``before`` with the ``updates`` of one expert.

    ``into``: "tokens", ``[T, H]``, to which rows are added; "pairs", ``[T*K, H]``, into which they are put;
    "covered", tokens of one choice each, into which they are put.
    """

    scatter: ir.Node
    before: ir.Value
    updates: ir.Value
    after: ir.Value
    walk: Walk
    into: str
    nodes: set[ir.Node] = field(default_factory=set)


def step_of(reader: Reader, node: ir.Node) -> Step | None:
    """The step that a scatter is, None if it is of no expert.

    Raises:
        NotThis: If it is almost one.
    """
    if not is_op(node, "ScatterND", "ScatterElements"):
        return None
    at = reader.meaning(node.inputs[1], "at")
    if at is None or at.walk is None or at.walk.expert is None:
        return None
    data, updates, after = node.inputs[0], node.inputs[2], node.outputs[0]
    assert data is not None and updates is not None
    kind = attribute(node, "reduction", "none")
    if kind not in ("none", "add"):
        raise NotThis(node, f"combines rows by reduction={kind!r}")
    updates, nodes = updates_of(reader, node, at, updates)
    into = "tokens" if at.coords[0] == "T" else "pairs"
    step = Step(node, data, updates, after, at.walk, into, {node, *nodes})
    if kind == "add":
        if into == "pairs" and not is_filled(data, 0):
            step.into = "added pairs"
        return step
    if into == "pairs":
        return step
    if is_filled(data, 0) and (user := only_user(after)) is not None and is_op(user, "Add"):
        other = user.inputs[1] if user.inputs[0] is after else user.inputs[0]
        if other is not None and other is not after:
            step.before, step.after = other, user.outputs[0]
            step.nodes.add(user)
            return step
    total = producer(updates, "Add")
    for i in (0, 1) if total is not None else ():
        assert total is not None
        old = reader.meaning(total.inputs[i], "pick")
        fresh = total.inputs[1 - i]
        if old is not None and old.of is data and old.walk == at.walk and fresh is not None:
            maker = total.inputs[i].producer()  # type: ignore[union-attr]
            step.updates = fresh
            step.nodes |= {total, *([maker] if maker is not None else [])}
            return step
    if at.choice.top_k == 1:
        step.into = "covered"
        return step
    raise NotThis(
        node,
        f"puts rows over those of other experts (reduction='none'): a token has {at.choice.top_k} of them",
    )


def updates_of(
    reader: Reader, node: ir.Node, at: Meaning, updates: ir.Value
) -> tuple[ir.Value, list[ir.Node]]:
    """The rows that a scatter puts, behind what only spells out their shape.

    Raises:
        NotThis: If they are put along another axis than the first.
    """
    used: list[ir.Node] = []
    whole = attribute(node, "axis", 0) in (0, -2) and at.axes == ("N", "C") and len(at.coords) == 1
    if is_op(node, "ScatterElements") and not whole:
        raise NotThis(node, "puts rows along another axis than the first")
    if is_op(node, "ScatterElements") and not whole_rows(node):
        raise NotThis(node, "is not known to put all columns of its rows")
    by_row = at.coords in (("T",), ("P",), ("P", "C"), ("T", "C"))
    if not by_row or at.axes not in (("N", "C"), ("N", "1"), ("N", "2")):
        raise NotThis(node, f"puts rows by {' and '.join(at.coords)} of the pairs, not by their tokens")
    flat = len(at.coords) == 2
    for _ in range(8):
        maker = producer(updates, "Reshape", "Expand", "Slice")
        if maker is None or not _keeps(reader, maker, at, flat):
            break
        used.append(maker)
        flat = flat and not (maker.op_type == "Reshape" and rank(maker.inputs[0]) == 2)
        assert maker.inputs[0] is not None
        updates = maker.inputs[0]
    if flat:
        raise NotThis(node, "puts elements that are no rows, one after the other")
    return updates, used


def whole_rows(node: ir.Node) -> bool:
    """Whether a ScatterElements puts all columns: its index has the shape of its updates."""
    data, index, updates = node.inputs[:3]
    put = {columns(value) for value in (index, updates)} - {None}
    return len(put) == 1 and put == {columns(data)}


def _keeps(reader: Reader, node: ir.Node, at: Meaning, flat: bool) -> bool:
    """Whether a node on the way to a scatter keeps all elements and their order.

    What has the wrong number of rows, or columns, is refused by the scatter as it runs.
    """
    given = node.inputs[0]
    if node.op_type == "Slice":
        return (
            set(ints(reads(node, 1)) or [1]) == {0}
            and producer(node.inputs[2], "Shape", "Unsqueeze") is not None
        )
    shape = folded(reads(node, 1))
    if node.op_type == "Reshape":
        if rank(given) == 2 and flat:
            return shape == [-1] or rank(node.outputs[0]) == 1
        width = size(given, 1)
        return (
            rank(given) == 2
            and width is not None
            and shape is not None
            and len(shape) == 2
            and shape[1] == width
        )
    last = shape[-1] if shape else size(node.outputs[0], 1)
    if rank(given) != 2 or rank(node.outputs[0]) != 2 or last not in (1, size(given, 1)):
        return False
    return (shape is not None and shape[0] == 1) or _is_first_row(reader, node.inputs[1], at)


def _is_first_row(reader: Reader, shape: ir.Value | None, at: Meaning) -> bool:
    """Whether the first size of an Expand's shape is 1 or nothing, or the number of its own rows."""
    node = producer(shape, "Shape", "Concat")
    if node is None:
        return False
    if node.op_type == "Concat":
        count = reader.meaning(node.inputs[0], "count")
        return (
            count is not None
            and at.walk is not None
            and count.expert == at.walk.expert
            and count.choice == at.choice
        )
    cut = producer(node.inputs[0], "Slice")
    starts, ends = (None, None) if cut is None else (ints(reads(cut, 1)), ints(reads(cut, 2)))
    return bool(starts and ends and starts[0] == 0 and ends[0] == 1)
