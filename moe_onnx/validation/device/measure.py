"""How far a tensor is from the expected one: sums over it, in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_onnx.validation.device.standards import EPSILON, DtypeStandard

Array = NDArray[Any]
_PIECE = 1 << 21  # elements that are looked at at a time
WORST = 5  # positions that are kept
DECADES = tuple(range(-12, 3))  # of the histogram of relative errors


@dataclass(frozen=True)
class Errors:
    """How far one tensor is from the expected one.

    Attributes:
        size: Elements.
        mere, mare, rmse: Mean and maximum of the relative error, root mean square of the absolute one;
            over the elements that are finite on both sides.
        max_abs: Largest absolute error.
        cosine: Of the angle between the two; 1 where both are zero.
        exceeding: Share of elements whose relative error is at or above the threshold.
        small_wrong: Small elements that err by more than the small error.
        non_finite: Elements that are NaN or infinite on one side only, or differently.
        histogram: Elements by decade of their relative error: 0 exactly, below 1e-12, ..., 1e2 and more.
        worst: Positions of the largest relative errors, with expected and actual value, the worst first.
    """

    size: int
    mere: float
    mare: float
    rmse: float
    max_abs: float
    cosine: float
    exceeding: float
    small_wrong: int
    non_finite: int
    histogram: tuple[int, ...]
    worst: tuple[tuple[tuple[int, ...], float, float], ...]
    normal: tuple[float, float, float] = (0.0, 0.0, 0.0)  # MERE, MARE, RMSE without small elements


def measure(expected: Array, actual: Array, standard: DtypeStandard) -> Errors:
    """The errors of ``actual``, in double precision and by pieces, so that large tensors fit."""
    sums = _Sums(standard)
    flat_e, flat_a = expected.reshape(-1), actual.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, flat_e.size, _PIECE):
            part = slice(start, start + _PIECE)
            sums.add(start, flat_e[part].astype(np.float64), flat_a[part].astype(np.float64))
        return sums.errors(expected.shape)


class _Sums:
    """What is summed up, and kept, over the pieces of one tensor."""

    def __init__(self, standard: DtypeStandard) -> None:
        self.standard = standard
        self.relative, self.squared, self.largest = (np.zeros(2) for _ in range(3))  # all, and not small ones
        self.count = np.zeros(2, np.int64)
        self.products = np.zeros(3)
        self.max_abs = 0.0
        self.exceeding = self.small_wrong = self.non_finite = 0
        self.histogram = np.zeros(len(DECADES) + 2, np.int64)
        self.worst: list[tuple[float, int, float, float]] = []

    def add(self, start: int, e: Array, a: Array) -> None:
        finite = np.isfinite(e) & np.isfinite(a)
        odd = ~finite & (e != a) & ~(np.isnan(e) & np.isnan(a))
        self.non_finite += int(np.count_nonzero(odd))
        self._keep(start + np.flatnonzero(odd)[:WORST], np.full(WORST, np.inf), e[odd], a[odd])
        position = start + np.flatnonzero(finite)
        e, a = e[finite], a[finite]
        absolute = np.abs(a - e)
        relative = absolute / (np.abs(e) + EPSILON)
        small = np.abs(e) < self.standard.small
        for i, chosen in enumerate((slice(None), ~small)):
            self.relative[i] += relative[chosen].sum()
            self.squared[i] += np.square(absolute[chosen]).sum()
            self.largest[i] = relative[chosen].max(initial=self.largest[i])
            self.count[i] += relative[chosen].size
        self.products += (a @ e, a @ a, e @ e)
        self.max_abs = absolute.max(initial=self.max_abs)
        self.exceeding += int(np.count_nonzero((relative >= self.standard.threshold) & (relative > 0)))
        self.small_wrong += int(np.count_nonzero(small & (absolute > self.standard.small_error)))
        self.histogram += _histogram(relative)
        order = np.argsort(-relative, kind="stable")[:WORST]
        order = order[relative[order] > 0]
        self._keep(position[order], relative[order], e[order], a[order])

    def _keep(self, positions: Array, relative: Array, e: Array, a: Array) -> None:
        found = zip(relative.tolist(), positions.tolist(), e.tolist(), a.tolist(), strict=False)
        self.worst = sorted([*self.worst, *found], key=lambda one: (-one[0], one[1]))[:WORST]

    def errors(self, shape: tuple[int, ...]) -> Errors:
        count = np.maximum(self.count, 1)
        mere, rmse = self.relative / count, np.sqrt(self.squared / count)
        dot, aa, ee = self.products
        norm = math.sqrt(aa) * math.sqrt(ee)
        worst = (
            (tuple(int(i) for i in np.unravel_index(position, shape)), e, a)
            for _, position, e, a in self.worst
        )
        return Errors(
            size=math.prod(shape),
            mere=float(mere[0]),
            mare=float(self.largest[0]),
            rmse=float(rmse[0]),
            max_abs=float(self.max_abs),
            cosine=float(dot / norm) if norm else float(aa == ee),
            exceeding=self.exceeding / int(count[0]),
            small_wrong=self.small_wrong,
            non_finite=self.non_finite,
            histogram=tuple(self.histogram.tolist()),
            worst=tuple(worst),
            normal=(float(mere[1]), float(self.largest[1]), float(rmse[1])),
        )


def histogram_labels() -> tuple[str, ...]:
    """What the counts of :attr:`Errors.histogram` are of."""
    between = [f"1e{low} to 1e{low + 1}" for low in DECADES[:-1]]
    return ("equal", f"below 1e{DECADES[0]}", *between, f"1e{DECADES[-1]} and more")


def _histogram(relative: Array) -> Array:
    equal = int(np.count_nonzero(relative == 0))
    edges = [0.0, *(10.0**decade for decade in DECADES), math.inf]
    counts, _ = np.histogram(relative[relative > 0], bins=edges)
    return np.array([equal, *counts], np.int64)
