"""Sizes and data of golden cases, reproducible by a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: tokens T, experts E, K of them a token, hidden size H, and those of some modes.

    Attributes:
        capacity: C, rows of an expert in drop/pad; at most ``tokens``.
        active: A, rows that the active mode keeps.
        width: F, hidden size of an expert, of the grouped products alone.
    """

    tokens: int = 24
    experts: int = 8
    top_k: int = 2
    hidden: int = 16
    capacity: int = 5
    active: int = 33
    width: int = 12


class Draw:
    """Data from a seed: the same bits in every version of numpy, which promises that of ``random_raw``."""

    def __init__(self, seed: int, *, exact: bool) -> None:
        self._bits = np.random.PCG64(seed)
        self._exact = exact

    def raw(self, *shape: int) -> Array:
        """Unsigned 64-bit integers."""
        return np.asarray(self._bits.random_raw(int(np.prod(shape))), np.uint64).reshape(shape)

    def floats(self, dtype: np.dtype[Any], *shape: int) -> Array:
        """In [-1, 1); exact: whole numbers from -8 to 7, whose sums are the same in every order."""
        raw = self.raw(*shape)
        if self._exact:
            return ((raw >> np.uint64(60)).astype(np.int64) - 8).astype(dtype)
        return ((raw >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0).astype(dtype)

    def weights(self, dtype: np.dtype[Any], *shape: int) -> Array:
        """In (0, 1]; exact: 1/8, 1/4, 1/2 or 1."""
        raw = self.raw(*shape)
        if self._exact:
            return (2.0 ** -(raw >> np.uint64(62)).astype(np.float64)).astype(dtype)
        return (((raw >> np.uint64(40)).astype(np.float64) + 1.0) / 2.0**24).astype(dtype)

    def gates(self, dtype: np.dtype[Any], *shape: int) -> Array:
        """In [-8, 8); exact: open, half open or closed, which exp tells without a rest."""
        if self._exact:
            return ((self.raw(*shape) % np.uint64(3)).astype(np.int64) * 128 - 128).astype(dtype)
        return np.asarray(self.floats(dtype, *shape) * np.asarray(8, dtype))

    def experts(self, sizes: Sizes) -> Array:
        """``[T, K]`` int32: distinct experts of each token, ascending."""
        order = np.argsort(self.raw(sizes.tokens, sizes.experts), axis=1, kind="stable")
        return np.sort(order[:, : sizes.top_k], axis=1).astype(np.int32)

    def group_sizes(self, rows: int, sizes: Sizes) -> Array:
        """``[E]`` int32 that sum to ``rows``; the second expert, if there is one, has none."""
        owners = (self.raw(rows) % np.uint64(sizes.experts)).astype(np.int64)
        if sizes.experts > 1:
            owners[owners == 1] = 0
        return np.bincount(owners, minlength=sizes.experts).astype(np.int32)


@dataclass(frozen=True)
class Making:
    """What a call is made of: where data comes from, its sizes, dtypes of rows and weights."""

    draw: Draw
    sizes: Sizes
    rows: np.dtype[Any]
    weights: np.dtype[Any]

    def floats(self, *shape: int) -> Array:
        """Rows of data."""
        return self.draw.floats(self.rows, *shape)

    def weighted(self, *shape: int) -> Array:
        """Weights."""
        return self.draw.weights(self.weights, *shape)
