"""External data of a model that is written to another folder: copied there, piece by piece."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from onnx import ModelProto

from moe_onnx.errors import ModelFileError
from moe_onnx.validation.file.tensor_data import tensors
from moe_onnx.validation.subject import Subject


def locations(model: ModelProto) -> list[str]:
    """The files that external tensors of a model name, relative to the model's folder."""
    found: dict[str, None] = {}
    for held in tensors(Subject(model, "")):
        if held.is_external:
            for entry in held.tensor.external_data:
                if entry.key == "location":
                    found[entry.value] = None
    return list(found)


def files_of(subject: Subject) -> tuple[Path, ...]:
    """The file a model was read from, and those of its external data."""
    own = () if subject.path is None else (subject.path,)
    folder = subject.folder
    return own if folder is None else (*own, *(folder / name for name in locations(subject.model)))


def check_free(path: Path, taken: Iterable[Path], what: str) -> None:
    """See that writing a file overwrites none of ``taken``.

    Raises:
        ModelFileError: If it does; ``what`` says what those are.
    """
    if os.path.realpath(path) in {os.path.realpath(one) for one in taken}:
        raise ModelFileError(f"'{path}' is {what}, and would be overwritten. Write to another file.")


def bring_data(model: ModelProto, source: Path | None, target: Path) -> list[Path]:
    """See that the data of a model is beside it in ``target``: names in the model stay as they are.

    A location that climbs out of its folder is refused by onnx and onnxruntime, and links are by onnx: so
    what the model names is copied, by the system, whatever its size. A file that is there already stays if
    it is the same.

    Args:
        model: What is going to be written.
        source: The folder that its data is in, None where nothing says.
        target: The folder that it is written to.

    Returns:
        The files that were copied.

    Raises:
        ModelFileError: If data is not there, lies outside the folder, or another file has its name.
    """
    named = locations(model)
    if not named or (source is not None and _same_folder(source, target)):
        return []
    if source is None:
        raise ModelFileError(
            f"the model names external data ({', '.join(named[:3])}), and a ModelProto does not say where it "
            "is. Give the model's path."
        )
    copied = []
    for location in named:
        if os.path.isabs(location) or os.path.normpath(location).split(os.sep)[0] == os.pardir:
            raise ModelFileError(
                f"external data '{location}' is outside the model's folder, and stays right only there. "
                f"Write the model to '{source}', or move the data into that folder first."
            )
        here, there = source / location, target / location
        if not here.is_file():
            raise ModelFileError(f"external data '{here}' is not there. Put it beside the model.")
        if there.exists():
            if filecmp.cmp(here, there, shallow=False):
                continue
            raise ModelFileError(
                f"'{there}' is another file than the model's external data '{here}'. Write the model to "
                "another folder, or move that file away."
            )
        there.parent.mkdir(parents=True, exist_ok=True)
        beside = there.with_name(there.name + ".new")
        try:
            shutil.copyfile(here, beside)
            os.replace(beside, there)
        finally:
            beside.unlink(missing_ok=True)
        copied.append(there)
    return copied


def _same_folder(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
