"""Whether the indices of a scatter can name one place twice.

A value *determines* an axis when two equal elements of it cannot differ in their place along that axis:
``Range`` determines its only one, ``NonZero`` of a vector its second, the indices of ``TopK`` their axis
among places equal in all others. Indices are distinct where their parts together determine all axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.hazards.values import (
    argument,
    attribute,
    constant,
    dims,
    integer,
    integers,
    is_op,
    source,
)
from moe_onnx.validation.subject import Scope, Subject

_DEEP = 24  # nodes that a proof goes back at most
_SAME = frozenset({"Cast", "Identity"})
_Dims = list[int | str | None]


@dataclass(frozen=True)
class Known:
    """Of a value: its rank, the axes of length 1, and ``(given, determined)`` sets of axes."""

    rank: int
    ones: frozenset[int]
    facts: tuple[tuple[frozenset[int], frozenset[int]], ...] = ()

    @staticmethod
    def distinct(rank: int, ones: frozenset[int] = frozenset()) -> Known:
        """All elements differ."""
        return Known(rank, ones, ((frozenset(), frozenset(range(rank))),))

    @property
    def is_distinct(self) -> bool:
        """Whether all elements are known to differ."""
        return self.closure(self.ones) == set(range(self.rank))

    def closure(self, start: frozenset[int] | set[int]) -> set[int]:
        """The axes determined where those of ``start`` are."""
        return _closure(self.facts, set(start))


def scatters_twice(subject: Subject, scope: Scope, node: NodeProto) -> str:
    """Why the indices of a ScatterND or ScatterElements may name a place twice, ``""`` where they cannot."""
    name = argument(node, 1)
    shape = dims(subject.types(scope), name)
    if is_op(node, "ScatterND"):
        proven = _rows_differ(subject, scope, name)
    else:
        rank = None if shape is None else len(shape)
        known = _known(subject, scope, name, _DEEP)
        rank = rank if known is None else known.rank
        if rank is None:
            return "not even the rank of its indices is known"
        axis = integer(node, "axis", 0) % rank if rank else 0
        one_at_most = shape is not None and axis < rank and shape[axis] == 1
        proven = one_at_most or (known is not None and axis in known.closure(set(range(rank)) - {axis}))
    if proven:
        return ""
    made = source(scope, name)
    if made is None:
        return f"its indices {name!r} are an input, which may hold a row twice"
    return f"its indices come from {made[0].place(made[1])}, which does not show that they differ"


def repeated_rows(index: np.ndarray) -> list[int] | None:
    """The first row of constant ScatterND indices that stands there twice, None where all differ."""
    if not index.ndim or not index.size:
        return None
    rows, counts = np.unique(index.reshape(-1, index.shape[-1]), axis=0, return_counts=True)
    return None if counts.max() == 1 else [int(one) for one in rows[counts.argmax()]]


def repeated_element(index: np.ndarray, axis: int) -> int | None:
    """The first index of constant ScatterElements indices that names one place twice."""
    if not index.ndim or not index.size or index.shape[axis] < 2:
        return None
    ordered = np.sort(index, axis=axis)
    same = np.diff(ordered, axis=axis) == 0
    if not same.any():
        return None
    return int(np.take(ordered, range(index.shape[axis] - 1), axis=axis)[same][0])


def _closure(facts: tuple[tuple[frozenset[int], frozenset[int]], ...], known: set[int]) -> set[int]:
    grown = True
    while grown:
        grown = False
        for given, determined in facts:
            if given <= known and not determined <= known:
                known |= determined
                grown = True
    return known


def _rows_differ(subject: Subject, scope: Scope, name: str) -> bool:
    shape = dims(subject.types(scope), name)
    if shape is not None and all(dim == 1 for dim in shape[:-1]):
        return True
    made = source(scope, name, _SAME)
    parts = [(scope, name)]
    rank = None if shape is None else len(shape)
    if made is not None and is_op(made[1], "Concat"):
        axis = integer(made[1], "axis", -1)
        if axis == -1 or (rank is not None and axis == rank - 1):
            parts = [(made[0], part) for part in made[1].input]
    known = [_known(subject, where, part, _DEEP) for where, part in parts]
    ranks = {one.rank for one in known if one is not None} | ({rank} if rank is not None else set())
    if not known or len(ranks) != 1:
        return False
    rank = ranks.pop()
    # Rows are compared element by element: the place in a row is equal.
    start = {rank - 1}
    if shape is not None:
        start |= {axis for axis, dim in enumerate(shape) if dim == 1}
    if _is_whole_nonzero(subject, parts):
        start |= {0}
    facts = tuple(fact for one in known if one is not None for fact in one.facts)
    return _closure(facts, start) >= set(range(rank))


def _is_whole_nonzero(subject: Subject, parts: list[tuple[Scope, str]]) -> bool:
    """Whether the parts of rows are, together, all that a NonZero gives."""
    found: dict[str, set[int]] = {}
    ranks: dict[str, int] = {}
    for scope, name in parts:
        made = source(scope, name)
        if made is None:
            continue
        where, node, number = made
        if is_op(node, "NonZero"):  # rows of it, transposed
            inner = dims(subject.types(where), argument(node, 0))
            return True if len(parts) == 1 or inner is None else len(inner) <= len(parts)
        position = number
        if is_op(node, "Gather"):
            chosen = integers(where, argument(node, 1))
            if chosen is None or len(chosen) != 1:
                continue
            position = chosen[0]
        elif not is_op(node, "Split"):
            continue
        behind = source(where, argument(node, 0))
        if behind is None or not is_op(behind[1], "NonZero"):
            continue
        key = behind[1].output[0]
        inner = dims(subject.types(behind[0]), argument(behind[1], 0))
        ranks[key] = len(inner) if inner is not None else len(node.output)
        found.setdefault(key, set()).add(position % ranks[key] if ranks[key] else position)
    return any(len(components) == ranks[key] for key, components in found.items())


def _known(subject: Subject, scope: Scope, name: str, deep: int) -> Known | None:
    """What is known of a value, None where nothing."""
    if not name or deep <= 0:
        return None
    value = constant(scope, name)
    shape = dims(subject.types(scope), name)
    if value is not None:
        ones = frozenset(axis for axis, size in enumerate(value.shape) if size == 1)
        if np.unique(value).size == value.size:
            return Known.distinct(value.ndim, ones)
        return Known(value.ndim, ones)
    made = scope.producer(name)
    if made is None:
        return None if shape is None else Known(len(shape), _ones(shape))
    where, node = made
    found = _by_node(subject, where, node, list(node.output).index(name), shape, deep)
    if found is None:
        return None if shape is None else Known(len(shape), _ones(shape))
    if shape is not None and len(shape) == found.rank:
        return Known(found.rank, found.ones | _ones(shape), found.facts)
    return found


def _ones(shape: _Dims) -> frozenset[int]:
    return frozenset(axis for axis, dim in enumerate(shape) if dim == 1)


def _by_node(
    subject: Subject, scope: Scope, node: NodeProto, output: int, shape: _Dims | None, deep: int
) -> Known | None:
    if node.domain == DOMAIN:
        # A permutation of the rows, where nothing is dropped.
        is_index = (node.op_type, output) == ("MoeInitRoutingV2", 1)
        return Known.distinct(1) if is_index and not integer(node, "drop_pad_mode", 0) else None
    if is_op(node, "Range"):
        return Known.distinct(1)
    if is_op(node, "Unique"):
        return Known.distinct(1) if output == 0 and attribute(node, "axis") is None else None
    if is_op(node, "TopK"):
        if output != 1 or not shape:
            return None
        axis = integer(node, "axis", -1) % len(shape)
        others = frozenset(range(len(shape))) - {axis}
        return Known(len(shape), _ones(shape), ((others, frozenset({axis})),))
    if is_op(node, "NonZero"):
        inner = dims(subject.types(scope), argument(node, 0))
        return Known.distinct(2, frozenset({0})) if inner is not None and len(inner) == 1 else None
    if not is_op(node, *_HANDED_ON):
        return None
    if is_op(node, "Add", "Sub"):
        return _shifted(subject, scope, node, shape, deep)
    known = _known(subject, scope, argument(node, 0), deep - 1)
    return None if known is None else _moved(scope, node, known, shape)


_HANDED_ON = (
    "Cast",
    "Identity",
    "Transpose",
    "Unsqueeze",
    "Squeeze",
    "Expand",
    "Reshape",
    "Flatten",
    "Slice",
    "Split",
    "Gather",
    "Add",
    "Sub",
)


def _shifted(subject: Subject, scope: Scope, node: NodeProto, shape: _Dims | None, deep: int) -> Known | None:
    for one, other in ((0, 1), (1, 0)):
        offset = constant(scope, argument(node, other))
        if offset is not None and offset.size == 1:
            known = _known(subject, scope, argument(node, one), deep - 1)
            return known if known is not None and offset.ndim <= known.rank else None
    return None


def _moved(scope: Scope, node: NodeProto, known: Known, shape: _Dims | None) -> Known | None:
    rank = known.rank
    if is_op(node, "Cast", "Identity", "Slice", "Split"):
        return known
    if is_op(node, "Transpose"):
        order = attribute(node, "perm", list(range(rank))[::-1])
        if not isinstance(order, list) or sorted(order) != list(range(rank)):
            return None
        return _renamed(known, {old: new for new, old in enumerate(order)}, rank)
    if is_op(node, "Unsqueeze", "Squeeze"):
        axes = attribute(node, "axes") or integers(scope, argument(node, 1))
        if not isinstance(axes, list):
            return None
        is_more = node.op_type == "Unsqueeze"
        after = rank + len(axes) if is_more else rank - len(axes)
        longer = max(rank, after)
        gone = {axis % longer for axis in axes} if longer else set()
        kept = [axis for axis in range(longer) if axis not in gone]
        if len(gone) != len(axes) or after < 0:
            return None
        if is_more:
            return _renamed(known, dict(enumerate(kept)), after, frozenset(gone))
        return _renamed(known, {old: new for new, old in enumerate(kept)}, after)
    if is_op(node, "Gather"):
        index = constant(scope, argument(node, 1))
        axis = integer(node, "axis", 0)
        if index is None or index.ndim or not rank:
            return None
        kept = [one for one in range(rank) if one != axis % rank]
        return _renamed(known, {old: new for new, old in enumerate(kept)}, rank - 1)
    if is_op(node, "Expand"):
        if shape is None or len(shape) < rank:
            return None
        ahead = len(shape) - rank
        stretched = {axis for axis in known.ones if shape[axis + ahead] != 1}
        named = {axis: axis + ahead for axis in range(rank) if axis not in stretched}
        return _renamed(known, named, len(shape))
    # Reshape, Flatten: no axis is what it was, unless all elements differ.
    if not known.is_distinct:
        return None
    if shape is None:
        target = constant(scope, argument(node, 1)) if is_op(node, "Reshape") else np.zeros(2)
        return None if target is None or target.ndim != 1 else Known.distinct(int(target.size))
    return Known.distinct(len(shape))


def _renamed(known: Known, names: dict[int, int], rank: int, more: frozenset[int] = frozenset()) -> Known:
    """``known`` with axes renamed; those without a name are gone, in all elements at the same place."""

    def move(axes: frozenset[int]) -> frozenset[int]:
        return frozenset(names[axis] for axis in axes if axis in names)

    facts = tuple((move(given), move(determined)) for given, determined in known.facts)
    return Known(rank, move(known.ones) | more, facts)
