"""Whether two runs gave the same: to the bit, or within the tolerance of the dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moe_onnx.validation.run.sessions import Array, Outputs

# Of the largest value of a tensor. Sums of a route may be in another order; half precision rounds after each.
ROUTES = {"float64": 1e-11, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
# A sum of 100,000 products differs by 3e-6 between one thread and two (measured with onnxruntime 1.32).
THREADS = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
_OF_ITS_KIND = 0.01


def is_float(array: Array) -> bool:
    """Whether values are floats of any width."""
    return bool(array.dtype.kind == "f" or array.dtype.name == "bfloat16")


def same_bits(first: Array, second: Array) -> bool:
    """Whether shape, dtype and all bits agree."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.dtype.kind == "O":
        return bool((first == second).all())
    return first.tobytes() == second.tobytes()


def difference(expected: Array, found: Array, least: float = 0.0) -> float:
    """The largest difference as a share of the largest expected value, infinite where nothing compares.

    Args:
        expected: NaN and infinities must stand in the same places.
        found: Of the same shape and dtype.
        least: The difference is no share of anything smaller than this. Where both are 0, it is itself given.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if not is_float(expected):
        return 0.0 if same_bits(expected, found) else float("inf")
    if not expected.size:
        return 0.0
    one, two = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], two[~finite], equal_nan=True) or not np.isfinite(two[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    gap = float(np.abs(one[finite] - two[finite]).max())
    scale = max(float(np.abs(one[finite]).max()), least)
    return gap / scale if gap and scale else gap


def differing(
    expected: Outputs,
    found: Outputs,
    tolerance: Mapping[str, float],
    kind: Callable[[str], str] = str,
) -> dict[str, float]:
    """The outputs that differ by more than the tolerance of their dtype, and by how much.

    ``kind`` gives outputs that are of one kind the same name. What should be 0 is noise, which nobody
    computes the same twice: it is held to a hundredth of the largest value of its kind.
    """
    largest: dict[str, float] = {}
    for name, value in expected.items():
        if is_float(value) and value.size:
            top = float(np.nan_to_num(np.abs(value.astype(np.float64)), posinf=0.0).max())
            largest[kind(name)] = max(largest.get(kind(name), 0.0), top)
    wrong = {name: float("inf") for name in expected.keys() ^ found.keys()}
    for name in expected.keys() & found.keys():
        gap = difference(expected[name], found[name], largest.get(kind(name), 0.0) * _OF_ITS_KIND)
        if gap > tolerance.get(expected[name].dtype.name, 0.0):
            wrong[name] = gap
    return {name: wrong[name] for name in (*expected, *found) if name in wrong}
