"""safetensors files by ranges: headers are checked whole, tensors are read and written piece by piece.

A file is 8 bytes (length of the header, little-endian), the header (JSON: dtype, shape and place of each
tensor) and the tensors, one after the other. Nothing is mapped: mapped pages of a file count as memory of
the process, and a checkpoint may be larger than that. No piece is larger than :data:`PIECE`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moe_onnx.errors import CheckpointError

Array = np.ndarray[Any, Any]
PIECE = 1 << 23  # bytes
FLOATS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype.name: name for name, dtype in FLOATS.items()}
# Bytes of an element, also of those that are only recognised here.
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "BOOL": 1}
_SIZES |= {f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (8, 16, 32, 64)}
_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}
_LONGEST_HEADER = 100_000_000  # what the safetensors library reads, too


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its dtype as safetensors calls it, its shape, and where its bytes start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * _SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class TensorFile:
    """A safetensors file whose header has been checked against its size.

    Args:
        path: The file.

    Raises:
        CheckpointError: If the file is not there, cut off or too long, its header no JSON of the right form,
            a name twice in it, a dtype unknown, or a tensor's place not its dtype and shape; names file,
            tensor, expected and found.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.file_size = self.path.stat().st_size
            with self.path.open("rb") as file:
                header, data_start = self._header(file)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}.") from error
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise self._broken(f"'__metadata__' must be an object, found {metadata!r:.60}")
        self.metadata: dict[str, Any] = metadata
        self.entries = self._checked(header, data_start)

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}. The file is damaged, or no safetensors file.")

    def _header(self, file: Any) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(file.read(8), "little")
        if self.file_size < 8 or length > min(self.file_size - 8, _LONGEST_HEADER):
            raise self._broken(
                f"expected 8 bytes and a header of {length} (at most {_LONGEST_HEADER}), "
                f"found {self.file_size} bytes in all"
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=self._once)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"expected a header in JSON, found: {error}") from error
        if not isinstance(header, dict):
            raise self._broken(f"the header must be an object, found {header!r:.60}")
        return header, 8 + length

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        done = dict(pairs)
        if len(done) < len(pairs):
            names = [name for name, _ in pairs]
            double = next(name for name in names if names.count(name) > 1)
            raise self._broken(f"'{double}' stands twice in the header")
        return done

    def _checked(self, header: dict[str, Any], data_start: int) -> dict[str, Entry]:
        entries = []
        for name, item in header.items():
            if not isinstance(item, dict) or not {"dtype", "shape", "data_offsets"} <= item.keys():
                raise self._broken(
                    f"tensor '{name}' must have dtype, shape and data_offsets, found {item!r:.80}"
                )
            dtype, shape, place = item["dtype"], item["shape"], item["data_offsets"]
            if not isinstance(dtype, str) or dtype not in _SIZES:
                known = ", ".join(_SIZES)
                raise CheckpointError(
                    f"{self.path}: tensor '{name}' has the unknown dtype {dtype!r}. Known: {known}."
                )
            for what, value in (("shape", shape), ("data_offsets", place)):
                if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
                    raise self._broken(
                        f"tensor '{name}': '{what}' must hold integers >= 0, found {value!r:.60}"
                    )
            entry = Entry(name, dtype, tuple(shape), data_start + (place or [0])[0])
            if len(place) != 2 or place[1] - place[0] != entry.nbytes:
                raise self._broken(
                    f"tensor '{name}' expected {entry.nbytes} bytes, as it is {entry}, found the offsets "
                    f"{place}"
                )
            entries.append(entry)
        entries.sort(key=lambda entry: (entry.start, entry.nbytes))
        at = data_start
        for entry in entries:
            if entry.start != at:
                raise self._broken(
                    f"tensor '{entry.name}' expected to start at byte {at}, where the one before it ends, "
                    f"found {entry.start}"
                )
            at += entry.nbytes
            if at > self.file_size:
                raise self._broken(
                    f"tensor '{entry.name}' {entry} expected to end at byte {at}, found only "
                    f"{self.file_size} bytes"
                )
        if at != self.file_size:
            raise self._broken(f"expected {at} bytes by the header, found {self.file_size}")
        return {entry.name: entry for entry in entries}

    def pieces(self, name: str, start: int = 0, count: int | None = None) -> Iterator[Array]:
        """Elements ``start`` to ``start + count`` of a tensor of floats, flat, piece by piece.

        A piece may be overwritten by the next one.

        Raises:
            CheckpointError: If the file cannot be read, or has become shorter.
        """
        entry = self.entries[name]
        dtype = FLOATS[entry.dtype]
        count = entry.size - start if count is None else count
        buffer = np.empty(min(count, PIECE // dtype.itemsize), dtype)
        raw = buffer.view(np.uint8).data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start + start * dtype.itemsize)
                while count:
                    size = min(count, buffer.size)
                    _fill(file, raw[: size * dtype.itemsize])
                    yield buffer[:size]
                    count -= size
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path}: tensor '{name}' cannot be read: {error}.") from error

    def read(self, name: str) -> Array:
        """A whole tensor of floats, in its own dtype."""
        entry = self.entries[name]
        whole = np.empty(entry.size, FLOATS[entry.dtype])
        fill(whole, self.pieces(name))
        return whole.reshape(entry.shape)


def fill(target: Array, pieces: Iterable[Array]) -> None:
    """Write pieces, one after the other, into a flat array, in its dtype."""
    at = 0
    for piece in pieces:
        target[at : at + piece.size] = piece
        at += piece.size
    assert at == target.size, f"{at} elements of {target.size}"


def write_tensors(
    path: Path,
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    pieces: Callable[[str], Iterable[Array]],
    metadata: Mapping[str, Any],
) -> None:
    """Write a safetensors file, piece by piece, and see it on the disk.

    Args:
        path: Written to directly: whoever calls moves it to its place when it is whole.
        tensors: Name, dtype (as safetensors calls it) and shape of each, in the order of their data.
        pieces: Gives the elements of a tensor, in its dtype, in order.
        metadata: Strings by name; what libraries put there says ``{"format": "pt"}``.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in tensors:
            left = math.prod(shape)
            for piece in pieces(name):
                assert piece.dtype == FLOATS[dtype], f"{name}: {piece.dtype}, not {dtype}"
                file.write(np.ascontiguousarray(piece).view(np.uint8).data)
                left -= piece.size
            assert not left, f"{name}: {left} elements are missing"
        file.flush()
        os.fsync(file.fileno())


def _fill(file: Any, raw: memoryview) -> None:
    while raw:
        got = file.readinto(raw)
        if not got:
            raise EOFError("the file ends too early")
        raw = raw[got:]
