"""Numpy helpers shared by the operators: reading arguments, checking index values, widening."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_onnx.errors import DtypeError, IndexValueError
from moe_onnx.spec import OpSpec, TensorInfo

Array = NDArray[Any]


def read(spec: OpSpec, *values: Any) -> tuple[list[Array | None], list[TensorInfo | None]]:
    """Arguments as arrays (never copied when they are native arrays) and what is known of them."""
    spec.check_required([*values, *[None] * (len(spec.inputs) - len(values))])
    arrays = [
        None if value is None else _as_array(spec.name, arg.name, value)
        for arg, value in zip(spec.inputs, values, strict=False)
    ]
    infos = [None if a is None else TensorInfo(a.dtype.name, a.shape) for a in arrays]
    return arrays, infos


def _as_array(op: str, name: str, value: Any) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{op}: '{name}' is a masked array, whose mask would be lost. Fill it first.", op=op)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(
            f"{op}: '{name}' must be an array, got {type(value).__name__}: {error}", op=op
        ) from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def given(array: Array | None) -> Array | None:
    """An optional input, or None where it is absent: None itself, or of shape exactly (0, 0)."""
    return None if array is None or array.shape == (0, 0) else array


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype in which sums are made: float32 for float32 and all 16-bit types, float64 for itself."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def sum_of_slots(rows: Array, slots: Array) -> Array:
    """``total[i]`` is the sum of the rows that ``slots[i]`` names, in slot order, rounded once.

    What is not in ``[0, len(rows))`` names no row and adds nothing.
    """
    total = np.zeros((len(slots), rows.shape[1]), wide_dtype(rows.dtype))
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        for slot in slots.T:
            named = (slot >= 0) & (slot < len(rows))
            total[named] += rows[slot[named]].astype(total.dtype)
        return total.astype(rows.dtype)


def check_range(
    op: str, name: str, index: Array, low: int, high: int, mode: str, read: Array | None = None
) -> None:
    """Refuse the first element of ``index`` outside ``[low, high)``, naming where and what it is.

    Where ``read``, booleans in the shape of ``index``, is false, anything may stand.
    """
    flat = index.reshape(-1)
    bad = (flat < low) | (flat >= high)
    if read is not None:
        bad &= read.reshape(-1)
    if bad.any():
        at = int(bad.argmax())
        where = tuple(int(i) for i in np.unravel_index(at, index.shape))
        legal = f"in [{low}, {high})" if high > low else "absent: the legal range is empty"
        raise IndexValueError(
            f"{op}: '{name}' values must be {legal} ({mode}), got {int(flat[at])} at position "
            f"{list(where)}. Check how the indices were made.",
            op=op,
            input_name=name,
            position=where,
            value=int(flat[at]),
        )


def check_unique(op: str, name: str, index: Array, why: str) -> None:
    """Refuse a value other than -1 that occurs twice in the 1-D ``index``."""
    named = index[index >= 0]
    # Counting is fast where values are small, as they are once their range was checked.
    if named.size == 0 or (int(named.max()) <= 8 * index.size and np.bincount(named).max() <= 1):
        return
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if twice.any():
        # The stable sort keeps positions ascending within one value, so this is a second occurrence.
        second = order[1:][twice]
        at = int(second.min())
        first = int(np.flatnonzero(index == index[at])[0])
        raise IndexValueError(
            f"{op}: '{name}' values must be unique apart from -1 ({why}), got {int(index[at])} at "
            f"position [{first}] and again at position [{at}].",
            op=op,
            input_name=name,
            position=(at,),
            value=int(index[at]),
        )
