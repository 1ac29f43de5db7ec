"""Data files of external tensors: what the model says of them and what is there. Weights are not read."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnx import TensorProto

from moe_onnx.validation.file.tensor_data import Held
from moe_onnx.validation.reading import PROTOBUF_LIMIT

# Writers start tensors at multiples of up to 64 KiB (Windows maps files so): room that is no leftover.
_PADDING = 65536
_KEYS = ("location", "offset", "length", "checksum")
_MOST = 2**63 - 1


def problem_of(held: Held) -> str:
    """Why an external tensor's entries do not say where its data is, or ``""``."""
    tensor = held.tensor
    given = {entry.key: entry.value for entry in tensor.external_data}
    if not given.get("location"):
        return "no location"
    for key in ("offset", "length"):
        value = given.get(key, "0")
        # Python's int() would take more than onnxruntime does: "+1", " 1", "1_0".
        if not re.fullmatch(r"-?[0-9]{1,19}", value) or not 0 <= int(value) <= _MOST:
            return f"{key} {value[:40]!r} is no number of bytes"
    unknown = [key for key in given if key not in _KEYS and not key.startswith("prepacked")]
    if unknown:
        return f"an entry {unknown[0][:40]!r}, which onnxruntime refuses"
    if tensor.data_type == TensorProto.STRING:
        return "strings, which only stand in the model itself"
    inline = [field.name for field, _ in tensor.ListFields() if field.name.endswith("_data")]
    inline.remove("external_data")
    return f"data in '{inline[0]}' of the model as well" if inline else ""


@dataclass
class Range:
    """Where one tensor's bytes are."""

    held: Held
    location: str
    offset: int
    length: int
    checksum: str

    @classmethod
    def of(cls, held: Held) -> Range:
        """The range of a tensor whose entries are in order."""
        given = {entry.key: entry.value for entry in held.tensor.external_data}
        return cls(
            held,
            given["location"],
            int(given.get("offset", 0)),
            int(given.get("length", 0)),
            given.get("checksum", ""),
        )

    @property
    def end(self) -> int:
        """The first byte after it, by the dims where they say, as onnxruntime reads."""
        needed = self.held.bytes
        return self.offset + (self.length if needed is None else needed)

    def __str__(self) -> str:
        return f"{self.held.where} (bytes {self.offset} to {self.end})"


@dataclass
class DataFile:
    """A file by the location that tensors give, and whether it can be used.

    Attributes:
        location: As the model has it.
        path: Where that is.
        ranges: Of the tensors in it.
        outside: How it is outside the model's folder, or ``""``.
        unreadable: Why it cannot be read, or ``""``.
        link: Which kind of link it is, or ``""``.
        size: Its bytes.
    """

    location: str
    path: str
    ranges: list[Range]
    outside: str = ""
    unreadable: str = ""
    link: str = ""
    size: int = 0

    @cached_property
    def _spans(self) -> list[Range]:
        """Non-empty ranges by their place, tied ones once."""
        distinct = {(one.offset, one.end): one for one in reversed(self.ranges) if one.end > one.offset}
        return [distinct[key] for key in sorted(distinct)]

    @cached_property
    def named_bytes(self) -> int:
        """Bytes that some tensor names."""
        total, reached = 0, 0
        for one in self._spans:
            total += max(0, one.end - max(one.offset, reached))
            reached = max(reached, one.end)
        return total

    @cached_property
    def overlap(self) -> tuple[Range | None, Range | None, int]:
        """The first two ranges that overlap in part, and how often that is."""
        first = second = furthest = None
        pairs = 0
        for one in self._spans:
            if furthest is not None and one.offset < furthest.end:
                pairs += 1
                if first is None:
                    first, second = furthest, one
            if furthest is None or one.end > furthest.end:
                furthest = one
        return first, second, pairs

    @cached_property
    def unnamed(self) -> tuple[int, int, int]:
        """Start and end of the first leftover, and the bytes of all: more than writers leave as room."""
        gaps, reached = [], 0
        for one in self._spans:
            # Nothing makes room before the first tensor.
            if one.offset - reached >= (_PADDING if reached else 1):
                gaps.append((reached, one.offset))
            reached = max(reached, one.end)
        if self.size - reached >= _PADDING:
            gaps.append((reached, self.size))
        start, stop = gaps[0] if gaps else (0, 0)
        return start, stop, sum(stop - start for start, stop in gaps)


def data_files(external: list[Held], model: Path) -> list[DataFile]:
    """The data files of external tensors, in the order they are first named."""
    by_location: dict[str, list[Range]] = {}
    for held in external:
        one = Range.of(held)
        # "./weights" and "weights" are one file.
        by_location.setdefault(os.path.normpath(one.location), []).append(one)
    return [_look(ranges[0].location, ranges, model) for ranges in by_location.values()]


def _look(location: str, ranges: list[Range], model: Path) -> DataFile:
    folder = os.path.dirname(os.path.abspath(model))
    file = DataFile(location, os.path.join(folder, location), ranges)
    if os.path.isabs(location):
        file.outside = "an absolute path"
        return file
    # Also where it leads back in: onnx goes by the text, and the folder may be called otherwise elsewhere.
    if os.path.normpath(location).split(os.sep)[0] == os.pardir:
        file.outside = "climbs out of the folder by '..'"
        return file
    try:
        # As onnxruntime: inside by what links lead to, of the file and of the model itself.
        real = os.path.realpath(file.path)
        allowed = {os.path.realpath(folder), os.path.dirname(os.path.realpath(model))}
        if not any(os.path.commonpath([real, inside]) == inside for inside in allowed):
            file.outside = f"leads to '{real}'"
            return file
        found = os.stat(file.path)
    except FileNotFoundError:
        hint = ", and backslashes separate no folders here" if "\\" in location else ""
        file.unreadable = f"is not there{hint}"
        return file
    except (OSError, ValueError) as error:
        file.unreadable = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        return file
    file.size = found.st_size
    if stat.S_ISDIR(found.st_mode):
        file.unreadable = "is a folder"
    elif not stat.S_ISREG(found.st_mode):
        file.unreadable = "is no regular file"
    elif not os.access(file.path, os.R_OK):
        file.unreadable = "cannot be read: Permission denied"
    elif real != os.path.join(os.path.realpath(folder), os.path.normpath(location)):
        file.link = f"a symbolic link, or in a linked folder, to '{real}'"
    elif found.st_nlink > 1:
        file.link = f"one of {found.st_nlink} hard links to one file"
    return file


def sha1_of(path: str) -> str:
    """SHA-1 of a file, read in pieces: what the ``checksum`` entry holds."""
    digest = hashlib.sha1(usedforsecurity=False)
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def is_named_elsewhere(location: str, model: Path) -> bool:
    """Whether another model in the folder names the file too: then it is not a leftover of this one."""
    for other in sorted(model.parent.glob("*.onnx"))[:64]:
        try:
            if os.path.samefile(other, model) or not 0 < other.stat().st_size <= PROTOBUF_LIMIT:
                continue
            with other.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(location.encode()) >= 0:
                    return True
        except (OSError, ValueError):
            continue
    return False
