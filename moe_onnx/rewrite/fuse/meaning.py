"""What the values of a router mean, as far as matchers need it: each of their axes has a letter.

T tokens, K choices of a token, E experts, P pairs of token and choice (T*K in a row),
    A cells of token and expert (T*E in a row),
N found pairs (rows of an expert), 1 an axis of size 1, 2 the coordinates of a pair, C columns, all alike
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import onnx_ir as ir


@dataclass(frozen=True)
class Choice:
    """``ids`` ``[T, K]``, which a TopK made: no token has an expert twice."""

    ids: ir.Value
    top_k: int
    experts: int | None

    def __str__(self) -> str:
        return f"'{self.ids.name}'"


# A fixed expert: its number, or the value that counts the turns of a Loop.
Expert = int | ir.Value | None


class Walk(NamedTuple):
    """The order in which a NonZero finds the pairs of an expert, or of all of them (None)."""

    choice: Choice
    expert: Expert
    order: str  # "tokens": tokens ascend; "choices": choice by choice; "experts": expert by expert


class Source(NamedTuple):
    """Where weights come from: ``pairs`` ``[T, K]``, one a choice, or ``dense`` ``[T, E]``, 0 elsewhere."""

    kind: str
    value: ir.Value


@dataclass(frozen=True)
class Meaning:
    """What a value is.

    ids: the experts that tokens chose. hot: whether the choice is the expert; without K, whether any is.
    gate: the weight of the expert, 0 where it is not chosen. masked: likewise, but -inf there.
    at: where pairs were found, ``coords`` of each. pick: what ``of`` has for each found pair, or ``source``,
    ``cast`` to another dtype. turn: the expert that a Loop is at.
    count: how many pairs an expert has.
    """

    what: str
    axes: tuple[str, ...]
    choice: Choice
    expert: Expert = None
    walk: Walk | None = None
    coords: tuple[str, ...] = ()
    of: ir.Value | None = None
    source: Source | None = None
    cast: int | None = None

    def turned(self, axes: tuple[str, ...]) -> Meaning:
        """The same with other axes."""
        return replace(self, axes=axes)


@dataclass(frozen=True)
class Lost:
    """A value that depends on choices in a way that is not understood, from this node on.

    found: whether it has to do with the places of ids, not with ids and masks alone.
    """

    node: ir.Node
    reason: str
    found: bool


class View(NamedTuple):
    """A value as another one whose axes (numbers) were moved, merged, or joined by axes of size 1."""

    base: ir.Value
    axes: tuple[object, ...]  # 0, 1, ...; (0, 1) merged; "1"
