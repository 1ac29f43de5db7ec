"""``moe_onnx.TokenDataset``: token files, memory-mapped, as batches of random crops."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_onnx.errors import CheckpointError, DataError, OptionError

Array = np.ndarray[Any, Any]
BIN_DTYPES = ("uint16", "uint32", "int32")
_CHUNK = 1 << 22


class TokenDataset:
    """Tokens as batches ``{"input_ids": int64 [batch_size, sequence_length]}``.

    Training batches are crops at random places of the first part of the tokens, drawn by a generator
    whose state can be saved; evaluation batches are evenly spaced crops of the last part, which
    training never sees, and the same at every call.

    Args:
        source: A ``.npy`` file of integers (1-D), a ``.bin`` file of raw integers, any other file,
            whose bytes are the tokens, or an array. Files are memory-mapped.
        batch_size: Sequences in a batch.
        sequence_length: Tokens of a sequence.
        vocab_size: Token ids are in ``[0, vocab_size)``.
        dtype: Of a ``.bin`` file: ``"uint16"`` (the default), ``"uint32"`` or ``"int32"``, little-endian.
        seed: Of the generator.
        eval_fraction: Part of the tokens held out, in [0, 1); at least a sequence, unless 0.

    Raises:
        DataError: If the file is missing, empty, too short, of another kind, or has a token id out of
            range; names file, position, value and legal range.
        OptionError: If an option is none of these.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Array,
        *,
        batch_size: int,
        sequence_length: int,
        vocab_size: int = 256,
        dtype: str | None = None,
        seed: int = 0,
        eval_fraction: float = 0.05,
    ) -> None:
        for name, value, low in (("batch_size", batch_size, 1), ("sequence_length", sequence_length, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise OptionError(f"{name} must be an integer >= {low}, got {value!r}.")
        if not 0 <= eval_fraction < 1:
            raise OptionError(f"eval_fraction must be in [0, 1), got {eval_fraction!r}.")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.name, self.tokens = read_tokens(source, vocab_size, dtype)
        held_out = max(round(len(self.tokens) * eval_fraction), sequence_length) if eval_fraction else 0
        self.num_train = len(self.tokens) - held_out
        if self.num_train < sequence_length:
            kept = f" beside {held_out} held out for evaluation" if held_out else ""
            raise DataError(
                f"{self.name}: its {len(self.tokens)} tokens are too few for a sequence of "
                f"{sequence_length}{kept}. Give more text or a smaller sequence length (in Python also "
                "eval_fraction=0)."
            )
        self._identity = self._identify()
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def __len__(self) -> int:
        """Number of tokens, those held out included."""
        return len(self.tokens)

    def next_batch(self) -> dict[str, Array]:
        """The next training batch; moves the generator on."""
        starts = self._generator.integers(0, self.num_train - self.sequence_length + 1, self.batch_size)
        return self._crops(starts)

    def eval_batches(self, count: int) -> Iterator[dict[str, Array]]:
        """At most ``count`` batches that cover the held-out part evenly; always the same."""
        last = len(self.tokens) - self.sequence_length
        if self.num_train > last:
            raise DataError(f"{self.name}: nothing is held out for evaluation. Give an eval_fraction > 0.")
        starts = np.unique(np.linspace(self.num_train, last, count * self.batch_size).astype(np.int64))
        for at in range(0, len(starts), self.batch_size):
            yield self._crops(starts[at : at + self.batch_size])

    def state_dict(self) -> dict[str, Any]:
        """The generator's state, and what it is the state of, as plain data for JSON."""
        return {"generator": self._generator.bit_generator.state, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            CheckpointError: If the state is of other tokens or another batch shape.
        """
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"{self.name}: the data order was saved with another '{key}': here it is {value!r}, "
                    f"there it was {state.get(key)!r}. Give the tokens and sizes that the run began with."
                )
        before = self._generator.bit_generator.state
        try:
            self._generator.bit_generator.state = dict(state["generator"])
        except (KeyError, TypeError, ValueError) as error:
            self._generator.bit_generator.state = before
            raise CheckpointError(f"The data order's generator state is broken: {error!r}.") from error

    def _crops(self, starts: Array) -> dict[str, Array]:
        n = self.sequence_length
        return {"input_ids": np.stack([self.tokens[start : start + n] for start in starts]).astype(np.int64)}

    def _identify(self) -> dict[str, Any]:
        ends = hashlib.sha256(self.tokens[:_CHUNK].tobytes())
        ends.update(self.tokens[-_CHUNK:].tobytes())
        return {
            "num_tokens": len(self.tokens),
            "num_train": self.num_train,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "sha256_of_ends": ends.hexdigest(),
        }


def read_tokens(
    source: str | os.PathLike[str] | Array, vocab_size: int, dtype: str | None = None
) -> tuple[str, Array]:
    """Name and tokens of a source, as :class:`TokenDataset` takes it, memory-mapped and checked.

    Raises:
        DataError, OptionError: As in :class:`TokenDataset`.
    """
    name, tokens = _opened(source, dtype)
    _check_range(tokens, vocab_size, name)
    return name, tokens


def _opened(source: Any, dtype: str | None) -> tuple[str, Array]:
    if isinstance(source, np.ndarray):
        return "tokens", _flat(source, "tokens")
    path = Path(source)
    suffix = path.suffix.lower()
    if dtype is not None and suffix != ".bin":
        raise OptionError(f"dtype is for .bin files only, got dtype={dtype!r} with '{path}'.")
    if dtype is not None and dtype not in BIN_DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(BIN_DTYPES)}, got {dtype!r}.")
    try:
        size = path.stat().st_size
        if not size:
            raise DataError(f"{path}: is empty.")
        if suffix == ".npy":
            return str(path), _flat(np.load(path, mmap_mode="r", allow_pickle=False), str(path))
        kind = np.dtype(dtype or "uint16").newbyteorder("<") if suffix == ".bin" else np.dtype(np.uint8)
        if size % kind.itemsize:
            raise DataError(
                f"{path}: its {size} bytes are no whole number of {kind.name} tokens. Give its dtype."
            )
        return str(path), np.memmap(path, kind, "r")
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read: {error}.") from error


def _flat(array: Array, name: str) -> Array:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{name}: must hold integers in one dimension, found {array.dtype} {list(array.shape)}."
        )
    if not len(array):
        raise DataError(f"{name}: is empty.")
    return array


def _check_range(tokens: Array, vocab_size: int, name: str) -> None:
    for at in range(0, len(tokens), _CHUNK):
        chunk = tokens[at : at + _CHUNK]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            position = int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
            raise DataError(
                f"{name}: token ids must be in [0, {vocab_size}), got {int(chunk[position])} at position "
                f"{at + position}."
            )
