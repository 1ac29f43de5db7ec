"""``moe_onnx.compare``: tensors of a device against ours, by the customary standards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_onnx.errors import OptionError
from moe_onnx.validation.device.measure import Errors, measure
from moe_onnx.validation.device.standards import LEVELS, MARE_FACTOR, STANDARDS, DtypeStandard, Ratios
from moe_onnx.validation.device.tensor_files import Reader, tensors
from moe_onnx.validation.findings import json_text, write_beside

Array = NDArray[Any]


@dataclass(frozen=True)
class Row:
    """One tensor: its errors, the limits it was held to, and what it failed, if anything."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    errors: Errors | None
    failures: tuple[str, ...] = ()
    ratios: tuple[float, float, float] | None = None  # MARE, MERE, RMSE to the benchmark's

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


@dataclass
class Comparison:
    """The outcome of :func:`compare`: a row for each tensor of either side, in the expected order."""

    standard: str
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every tensor is there and within its limits."""
        return all(row.ok for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if not row.ok]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        rows = [{**asdict(row), "ok": row.ok} for row in self.rows]
        return {"format": "moe_onnx.comparison", "format_version": 1, "standard": self.standard} | {
            "ok": self.ok,
            "rows": rows,
        }

    def save_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as JSON, beside its place first."""
        return write_beside(path, json_text(self.to_dict()))


def compare(
    expected: str | os.PathLike[str] | Mapping[str, Any],
    actual: str | os.PathLike[str] | Mapping[str, Any],
    *,
    benchmark: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    level: str = "L1",
    threshold: float | None = None,
    max_exceeding: float | None = None,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Hold the tensors of a device to those expected.

    Args:
        expected: A file or folder of tensors, or arrays by name: the reference, best in a higher
            precision than the device's.
        actual: Likewise, what the device gave. The limits are those of its dtypes; integers and booleans
            must be equal.
        benchmark: Likewise, what a second implementation of the same dtype gave. With it the double
            benchmark is applied, without it the single one.
        level: Of the double benchmark: ``"L0"``, ``"L1"`` or ``"L2"``.
        threshold: Of the single benchmark, for all dtypes, instead of the standard's; beside a benchmark
            only for ``max_exceeding``.
        max_exceeding: Share of elements that may be at or above the threshold, if that is to be judged as
            well (0.001 with a threshold of 0.001 is the older "double thousandth").
        names: Actual names by expected ones, where they differ.

    Returns:
        A row for each tensor. A tensor that is missing on one side, or has another shape, is a failure.

    Raises:
        DataError: If a file cannot be read.
        OptionError: If an option is none of the legal ones.
    """
    if level not in LEVELS:
        raise OptionError(f"level must be one of {', '.join(LEVELS)}, got {level!r}.")
    for name, value in (("threshold", threshold), ("max_exceeding", max_exceeding)):
        if value is not None and not value >= 0:
            raise OptionError(f"{name} must be >= 0, got {value}.")
    if benchmark is not None and threshold is not None and max_exceeding is None:
        raise OptionError(
            "threshold is one of the single benchmark; beside a benchmark it takes max_exceeding as well."
        )
    ours, theirs = tensors(expected), tensors(actual)
    seconds = None if benchmark is None else tensors(benchmark)
    names = dict(names or {})
    if unknown := [name for name in names if name not in ours]:
        raise OptionError(f"names: {', '.join(unknown[:5])} are not among the expected tensors.")
    if len(ours) == len(theirs) == 1 and not names:
        names = {next(iter(ours)): next(iter(theirs))}  # two files of one tensor each: its name says nothing
    done = Comparison("double benchmark " + level if seconds is not None else "single benchmark")
    judge = _Judge(LEVELS[level], threshold, max_exceeding)
    for name, read in ours.items():
        its = names.get(name, name)
        shown = name if its == name else f"{name} = {its}"
        other = theirs.pop(its, None)
        if other is None:
            done.rows.append(Row(shown, "", (), None, ("missing in the actual tensors",)))
            continue
        second = None
        if seconds is not None:
            second = seconds.get(name) or seconds.get(its)
            if second is None and len(seconds) == len(ours) == 1:
                second = next(iter(seconds.values()))
        done.rows.append(_row(shown, read, other, second, judge, wanted=seconds is not None))
    done.rows += [Row(name, "", (), None, ("not among the expected tensors",)) for name in theirs]
    return done


@dataclass(frozen=True)
class _Judge:
    ratios: Ratios
    threshold: float | None
    max_exceeding: float | None

    def standard(self, dtype: str) -> DtypeStandard:
        standard = STANDARDS[dtype]
        return standard if self.threshold is None else replace(standard, threshold=self.threshold)


def _row(
    name: str, read: Reader, other: Reader, second: Reader | None, judge: _Judge, *, wanted: bool
) -> Row:
    expected, actual = read(), other()
    dtype, shape = actual.dtype.name, actual.shape
    if expected.shape != actual.shape:
        return Row(name, dtype, shape, None, (f"shape {list(shape)}, expected {list(expected.shape)}",))
    if dtype not in STANDARDS:
        return _exact(name, expected, actual)
    if expected.dtype.name not in STANDARDS:
        return Row(name, dtype, shape, None, (f"dtype {dtype}, expected {expected.dtype.name}",))
    standard = judge.standard(dtype)
    errors = measure(expected, actual, standard)
    failures = [f"{errors.non_finite} elements NaN or infinite on one side"] if errors.non_finite else []
    if judge.max_exceeding is not None and errors.exceeding > judge.max_exceeding:
        failures.append(f"{errors.exceeding:.2%} exceed {standard.threshold:.2g}")
    if second is None:
        if wanted:
            failures.append("missing in the benchmark")
        most = standard.threshold
        single = (("MERE", errors.mere, most), ("MARE", errors.mare, MARE_FACTOR * most))
        failures += [
            f"{what} {value:.3g}, limit {limit:.3g}"
            for what, value, limit in single
            if not (value < limit or value == 0)
        ]
        return Row(name, dtype, shape, errors, tuple(failures))
    bench = second()
    if bench.shape != expected.shape or bench.dtype.name not in STANDARDS:
        failures.append(f"the benchmark is {bench.dtype.name} {list(bench.shape)}")
        return Row(name, dtype, shape, errors, tuple(failures))
    theirs = measure(expected, bench, standard)
    if theirs.non_finite:
        failures.append(f"the benchmark has {theirs.non_finite} elements NaN or infinite on one side")
    ratios = _ratios(errors, theirs, standard)
    limits = (("MARE", judge.ratios.mare), ("MERE", judge.ratios.mere), ("RMSE", judge.ratios.rmse))
    failures += [
        f"{what} {ratio:.3g} times the benchmark's, limit {limit:g}"
        for ratio, (what, limit) in zip(ratios, limits, strict=True)
        if not ratio <= limit
    ]
    if errors.small_wrong > judge.ratios.small * max(theirs.small_wrong, 1):
        failures.append(f"{errors.small_wrong} small elements wrong, the benchmark has {theirs.small_wrong}")
    return Row(name, dtype, shape, errors, tuple(failures), ratios)


def _ratios(ours: Errors, theirs: Errors, standard: DtypeStandard) -> tuple[float, float, float]:
    """MARE, MERE and RMSE to the benchmark's, which is taken to err a little at least."""
    mere, mare, rmse = (
        own / max(other, standard.small_error) for own, other in zip(ours.normal, theirs.normal, strict=True)
    )
    return mare, mere, rmse


def _exact(name: str, expected: Array, actual: Array) -> Row:
    """Integers and booleans: equal, or wrong."""
    dtype, shape = actual.dtype.name, actual.shape
    if actual.dtype.kind not in "biu" and dtype == expected.dtype.name:
        return Row(name, dtype, shape, None, (f"there are no limits for {dtype}: convert both to float32",))
    if expected.dtype.kind not in "biu" or actual.dtype.kind not in "biu":
        return Row(name, dtype, shape, None, (f"dtype {dtype}, expected {expected.dtype.name}",))
    wrong = np.flatnonzero(np.asarray(expected != actual).ravel())
    failures: tuple[str, ...] = ()
    if wrong.size:
        first = np.unravel_index(int(wrong[0]), shape)
        at = [int(i) for i in first]
        values = f"{actual[first]}, expected {expected[first]}"
        failures = (f"{wrong.size} of {actual.size} differ, the first at {at}: {values}",)
    return Row(name, dtype, shape, None, failures)
