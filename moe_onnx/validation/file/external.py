"""External data: there, whole, inside the model's folder, and of this model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from moe_onnx.validation.file.external_files import (
    DataFile,
    Range,
    data_files,
    is_named_elsewhere,
    problem_of,
    sha1_of,
)
from moe_onnx.validation.file.tensor_data import Held, tensors
from moe_onnx.validation.findings import Outcome, Skipped, Table
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

MISSING = code(
    "MO101",
    "error",
    "External data is not there",
    why="Tensors of the model lie in a file of their own, and it is missing or cannot be read. `onnxruntime` "
    "and `onnx.load` refuse the model. Mostly only the `.onnx` file was copied or downloaded.",
    mend="Put the file beside the model, under the name that the model gives it.",
)
TRUNCATED = code(
    "MO102",
    "error",
    "External data ends before its tensors do",
    why="The file is shorter than the model says: a download or copy that broke off, or a file of another "
    "model. `onnxruntime` refuses it; `onnx.checker` (1.23) does not look, and `onnx.load` gives fewer bytes "
    "without a word where an entry has no length.",
    mend="Copy or download the file again, or export the model again.",
)
OUTSIDE = code(
    "MO103",
    "error",
    "External data is outside the model's folder",
    why="A location that is absolute, climbs out by `..`, or is a link to another folder: a model could name "
    "any file of its reader. `onnx` refuses it, `onnxruntime` too unless the `..` leads back into it, and "
    "such a model can be moved nowhere.",
    mend="Move the file into the model's folder and save the model with its plain name.",
)
LINK = code(
    "MO104",
    "note",
    "External data is a link",
    why="`onnxruntime` follows symbolic links that stay in the folder and knows hard links; `onnx.load` and "
    "`onnx.checker` refuse both (measured with 1.23). Caches of downloads are made of links.",
    mend="For onnx's own tools put a copy in the link's place.",
)
LENGTH = code(
    "MO105",
    "error",
    "An external tensor's length is not that of its dims and dtype",
    why="Data of another dtype or shape, such as float32 bytes labelled bfloat16. `onnxruntime` refuses the "
    "model, `onnx.checker` does not look, and `onnx.load` takes the wrong bytes.",
    mend="Export the model again; do not edit dims or dtypes of external tensors by hand.",
)
ENTRY = code(
    "MO106",
    "error",
    "An external tensor does not say where its data is",
    why="The entries `location`, `offset`, `length` and `checksum` say where an external tensor's bytes are. "
    "`onnxruntime` refuses a missing location, numbers that are none, and keys that it does not know; where "
    "data stands in the model as well, `onnx.checker` refuses it, and which of both counts is up to the "
    "reader.",
    mend="Save the model again with onnx.save(..., save_as_external_data=True).",
)
CHECKSUM = code(
    "MO107",
    "error",
    "External data is not the file that the model was saved with",
    why="The model names the SHA-1 of its data file, and the file has another. Neither `onnxruntime` nor "
    "`onnx` looks: the model runs with other weights.",
    mend="Put the file there that belongs to the model, or export the model again.",
)
UNNAMED = code(
    "MO108",
    "warning",
    "External data holds bytes that no tensor names",
    why="`onnx.save` appends to a data file that is there already: a model saved twice under one name has "
    "the older weights in front, for ever. It loads, and costs twice the room; a tool that takes the file "
    "from its start gets the old weights. Also what is left where a file belongs to another model.",
    mend="Delete the data file before saving, or save under a new name.",
)
OVERLAP = code(
    "MO109",
    "warning",
    "External tensors share some of their bytes",
    why="Tied weights name the very same range. Ranges that overlap in part are almost always wrong offsets: "
    "each tensor then holds a piece of the other, and everything loads.",
    mend="Export the model again, into a new data file.",
)


@check("static", ENTRY, LENGTH)
def entries(subject: Subject) -> Iterator[Outcome]:
    """External tensors say where their data is, and as many bytes as they need."""
    for held in tensors(subject):
        if not held.is_external:
            continue
        if problem := problem_of(held):
            yield ENTRY(held.where, found=problem, expected="location, and offset and length in bytes")
            continue
        given = Range.of(held)
        # onnxruntime takes a length of 0 for none.
        if given.length and held.bytes is not None and given.length != held.bytes:
            yield LENGTH(
                held.where,
                found=f"{given.length} bytes at offset {given.offset} of '{given.location}'",
                expected=f"{held.bytes} bytes for {held.kind}",
            )


@check("static", MISSING, TRUNCATED, OUTSIDE, LINK, CHECKSUM, UNNAMED, OVERLAP)
def files(subject: Subject) -> Iterable[Outcome]:
    """External data files are there, whole, in the model's folder, and hold what the model names."""
    external = [held for held in tensors(subject) if held.is_external and not problem_of(held)]
    if not external:
        return
    if subject.folder is None or subject.path is None:
        yield Skipped(
            f"{_count(external)} in external files were not looked at: a ModelProto does not say where "
            "they are. Give the model's path."
        )
        return
    rows = []
    for file in data_files(external, subject.path):
        yield from _file(file, subject)
        rows.append((file.location, len(file.ranges), file.named_bytes, file.size))
    yield Table("External data", ("file", "tensors", "bytes named", "bytes in the file"), tuple(rows))


def _file(file: DataFile, subject: Subject) -> Iterator[Outcome]:
    where = f"external data '{file.location}'"
    if file.outside:
        yield OUTSIDE(
            where,
            found=f"{file.outside} ({_named(file.ranges)})",
            expected="a file in the folder",
            places=_places(file.ranges),
        )
        return
    if file.unreadable:
        needed = max(one.end for one in file.ranges)
        yield MISSING(
            where,
            found=f"'{file.path}' {file.unreadable} ({_named(file.ranges)})",
            expected=f"a file of {needed} bytes",
            places=_places(file.ranges),
        )
        return
    if file.link:
        yield LINK(where, found=f"'{file.path}' is {file.link}")
    if beyond := [one for one in file.ranges if one.end > file.size]:
        yield TRUNCATED(
            where,
            found=f"{file.size} bytes in '{file.path}', which {_named(beyond)} reach beyond",
            expected=f"{max(one.end for one in beyond)} bytes",
            places=_places(beyond),
        )
        return
    yield from _checksum(file, where, subject.options.max_bytes)
    first, second, pairs = file.overlap
    if first is not None and second is not None:
        more = f", and {pairs - 1} more pairs" if pairs > 1 else ""
        yield OVERLAP(
            where, found=f"{first} and {second} overlap{more}", expected="one range for each tensor"
        )
    start, stop, unnamed = file.unnamed
    if unnamed and subject.path is not None and not is_named_elsewhere(file.location, subject.path):
        yield UNNAMED(
            where,
            found=f"{unnamed} of its {file.size} bytes belong to no tensor, the first from {start} to {stop}",
            expected=f"{file.named_bytes} bytes",
        )


def _checksum(file: DataFile, where: str, most: int) -> Iterator[Outcome]:
    named = {one.checksum.lower(): one for one in file.ranges if one.checksum}
    if not named:
        return
    if file.size > most:
        yield Skipped(f"the checksum of '{file.location}' was not computed: {file.size} bytes")
        return
    try:
        actual = sha1_of(file.path)
    except OSError as error:
        yield MISSING(where, found=f"'{file.path}' cannot be read: {error.strerror or error}")
        return
    for checksum, one in named.items():
        if len(checksum) != len(actual):
            yield Skipped(f"the checksum {checksum[:60]!r} of {one.held.where} is no SHA-1")
        elif checksum != actual:
            yield CHECKSUM(
                where,
                found=f"SHA-1 {actual} of '{os.path.basename(file.path)}'",
                expected=f"{checksum}, by {one.held.where}",
            )


def _named(ranges: list[Range]) -> str:
    said = ", ".join(_places(ranges[:3]))
    return f"{said} and {len(ranges) - 3} more tensors" if len(ranges) > 3 else said


def _places(ranges: list[Range]) -> list[str]:
    return [one.held.where for one in ranges]


def _count(external: list[Held]) -> str:
    return f"{len(external)} tensor{'s' * (len(external) > 1)}"
