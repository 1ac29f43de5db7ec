"""Inputs that a rewrite is proved with: drawn ones, and those on which mistakes show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.run.agreement import is_float
from moe_onnx.validation.run.drawing import Array
from moe_onnx.validation.run.feeds import Feeds, draw_feeds, free_sizes, manifest_of
from moe_onnx.validation.run.uses import Uses
from moe_onnx.validation.subject import Subject

_LARGE = 1000.0
# Sizes tried for the free axes of a model whose author nobody can ask; 0: those of free_sizes.
TRIED = (0, 1, 2, 3, 8, 16)
MORE = 3  # times the sizes of free axes


@dataclass(frozen=True)
class Case:
    """Inputs, and what they are called."""

    name: str
    values: Mapping[str, Array]

    def __str__(self) -> str:
        shown = [f"{name} {value.dtype}{list(value.shape)}" for name, value in self.values.items()]
        more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        return f"{self.name} ({', '.join(shown[:6])}{more})" if shown else self.name


def drawn(subject: Subject, seed: int, size: int = 0) -> Case | str:
    """Legal random inputs with free axes of one size, or why there are none."""
    free = free_sizes(subject)
    found = _draw(subject, seed, dict.fromkeys(free, size) if size else free)
    return found.reason if isinstance(found, Skipped) else Case(f"random inputs, seed {seed}", found.values)


def adversarial(subject: Subject, base: Case, seed: int, *, exact: bool) -> Iterator[Case]:
    """Other inputs of the same model: a model may refuse some of them.

    Parameters and state of a training graph stay as they were drawn, but for one case.

    Args:
        subject: The model.
        base: Inputs that it runs with.
        seed: Of what is drawn.
        exact: Whether NaN and infinities are among them: only what keeps every bit keeps these.
    """
    roles = _roles(subject)
    fixed = {name for name, role in roles.items() if role in ("parameter", "state")} | {"lr", "step"}
    own = [name for name, value in base.values.items() if name not in fixed and value.size]
    floats = [name for name in own if is_float(base.values[name])]
    if floats:
        yield _with(base, "zeros", {name: np.zeros_like(base.values[name]) for name in floats})
        yield _with(base, "ones: all scores tie", {name: np.ones_like(base.values[name]) for name in floats})
        yield _with(base, "equal rows", {name: _first_row(base.values[name]) for name in floats})
        large = {name: _scaled(base.values[name]) for name in floats}
        yield _with(base, "large values", large)
        quarters = {name: _rounded(base.values[name]) for name in floats}
        yield _with(base, "values of few digits: some scores tie", quarters)
        if exact:
            yield _with(base, "NaN and infinity", {name: _broken(base.values[name]) for name in floats})
    if parameters := [name for name, role in roles.items() if role == "parameter" and name in base.values]:
        zeros = {name: np.zeros_like(base.values[name]) for name in parameters}
        yield _with(base, "parameters of zero: all scores tie", zeros)
    routed = _routed(subject)
    free = [name for name in own if name not in routed]
    if free != floats:
        yield _with(base, "all rows alike", {name: _first_row(base.values[name]) for name in free})
    sizes = free_sizes(subject)
    for name, many in (("one of each", 1), ("none of each: empty", 0), ("more of each", MORE)):
        if not sizes:
            return
        wanted = {axis: size * MORE if many == MORE else many for axis, size in sizes.items()}
        found = _draw(subject, seed + 1, wanted)
        if isinstance(found, Feeds):
            yield Case(name, found.values)
    for axis in sizes if len(sizes) > 1 else ():
        found = _draw(subject, seed + 1, {**sizes, axis: 0})
        if isinstance(found, Feeds):
            yield Case(f"empty axis '{axis}'", found.values)


def _draw(subject: Subject, seed: int, sizes: Mapping[str, int]) -> Feeds | Skipped:
    return draw_feeds(subject, np.random.default_rng(seed), sizes)


def _roles(subject: Subject) -> dict[str, str]:
    """What the inputs of a training graph are."""
    manifest = manifest_of(subject)
    graphs = {} if manifest is None else manifest.graphs
    return {info.name: info.role for graph in graphs.values() for info in graph.inputs}


def _routed(subject: Subject) -> set[str]:
    """Inputs that are indices of ``ascend.moe`` nodes: bodies cannot see it where one stands twice."""
    uses = Uses(subject)
    integers = [
        info.name
        for info in subject.model.graph.input
        if info.type.tensor_type.elem_type in (TensorProto.INT32, TensorProto.INT64)
    ]
    return {name for name in integers if any(use.node.domain == DOMAIN for use in uses.of(name))}


def _with(base: Case, name: str, values: Mapping[str, Array]) -> Case:
    return Case(name, {**base.values, **{k: np.ascontiguousarray(v) for k, v in values.items()}})


def _first_row(value: Array) -> Array:
    return np.broadcast_to(value[:1], value.shape) if value.ndim else value


def _scaled(value: Array) -> Array:
    top = 100.0 if value.dtype.itemsize == 2 else _LARGE
    return (value.astype(np.float64) * top).astype(value.dtype)


def _rounded(value: Array) -> Array:
    return (np.round(value.astype(np.float64) * 2) / 2).astype(value.dtype)


def _broken(value: Array) -> Array:
    broken = value.copy()
    flat = broken.reshape(-1)
    flat[0] = np.nan
    flat[-1] = np.inf
    return broken
