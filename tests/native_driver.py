"""Calls of native kernels in the runtime that ``native/driver.cpp`` makes up: written, made, read."""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# The element types of the C ABI.
TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "bfloat16": 16,
}
NAMES = {number: name for name, number in TYPES.items()}


@dataclass
class Case:
    """A call. ``known`` are the inputs' shapes as inference sees them: numbers, names, None for unknown."""

    op: str
    inputs: list[Any]
    attributes: dict[str, Any]
    known: list[tuple[Any, ...]] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)  # which outputs the node has
    number: int = 0

    def __str__(self) -> str:
        shapes = ["None" if a is None else f"{a.dtype.name}{list(a.shape)}" for a in self.inputs]
        left_out = "" if all(self.wanted) else f", outputs {self.wanted}"
        return f"case {self.number}: {self.op}({', '.join(shapes)}) {self.attributes}{left_out}"


@dataclass
class Result:
    """What came of a call: ``error`` and ``inferred_error`` are empty where nothing was refused."""

    inferred_error: str
    inferred: list[tuple[str, tuple[int, ...]]]
    error: str
    outputs: list[Any]


class Stopped(Exception):
    """The driver did not come to its end. ``args``: results so far, what it wrote."""


def run(driver: Path, cases: list[Case], threads: tuple[int, ...], vectors: str = "") -> list[Result]:
    """Make all calls in one process, with the named vector table."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "cases"), Path(folder, "results")
        given.write_bytes(_number(len(cases)) + b"".join(map(_written, cases)))
        command = [str(driver), str(given), str(made), *map(str, threads)]
        try:
            ended = subprocess.run(
                command,
                env={**os.environ, "ASCEND_MOE_VECTORS": vectors},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=300,
            )
            code, words = ended.returncode, ended.stderr
        except subprocess.TimeoutExpired:
            code, words = "none after 300 s", ""
        results = _read(made.read_bytes() if made.exists() else b"")
        if code != 0 or len(results) != len(cases):
            raise Stopped(results, f"exit code {code}\n{words}")
        return results


def _number(value: int) -> bytes:
    return struct.pack("<q", value)


def _text(value: bytes) -> bytes:
    return _number(len(value)) + value


def _numbers(values: Any) -> bytes:
    return _number(len(values)) + b"".join(map(_number, values))


def _written(case: Case) -> bytes:
    parts = [_text(case.op.encode()), _number(case.number % 2), _number(len(case.attributes))]
    for name, value in case.attributes.items():
        is_list = not np.isscalar(value)
        parts += [_text(name.encode()), _number(is_list), _numbers(value if is_list else [value])]
    count = max((i + 1 for i, value in enumerate(case.inputs) if value is not None), default=0)
    parts.append(_number(count))
    for value, known in zip(case.inputs[:count], case.known, strict=False):
        parts.append(_number(value is not None))
        if value is None:
            continue
        parts += [_number(TYPES[value.dtype.name]), _numbers(value.shape), _text(value.tobytes())]
        parts.append(_numbers([dim if isinstance(dim, int) else -1 for dim in known]))
        parts += [_text(dim.encode() if isinstance(dim, str) else b"") for dim in known]
    count = max((i + 1 for i, one in enumerate(case.wanted) if one), default=0)
    parts.append(_numbers(case.wanted[:count]))
    return b"".join(parts)


def _read(data: bytes) -> list[Result]:
    at = 0

    def number() -> int:
        nonlocal at
        at += 8
        return int(struct.unpack_from("<q", data, at - 8)[0])

    def text() -> bytes:
        nonlocal at
        size = number()
        at += size
        return data[at - size : at]

    def info() -> tuple[str, tuple[int, ...]]:
        kind = NAMES.get(number(), "")
        return kind, tuple(number() for _ in range(number()))

    def output() -> Any:
        if not number():
            return None
        dtype, shape = info()
        return np.frombuffer(text(), np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape)

    results = []
    while at < len(data):
        try:
            inferred_error = text().decode()
            inferred = [info() for _ in range(number())]
            error, outputs = text().decode(), [output() for _ in range(number())]
            results.append(Result(inferred_error, inferred, error, outputs))
        except (struct.error, ValueError):  # the last one, cut off
            break
    return results
