"""The folder ``huggingface/`` of an exported graph, and of its runs: which checkpoint it came from.

It holds ``config.json``, the files of the tokenizer, and :data:`TENSORS`: the files of the checkpoint, and
of each tensor its dtype, shape and place in a parameter of the graph.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_onnx.build.weights import ORIGIN
from moe_onnx.errors import CheckpointError
from moe_onnx.huggingface.architectures.description import Architecture
from moe_onnx.huggingface.fields import CONFIG
from moe_onnx.huggingface.layout import Layout
from moe_onnx.huggingface.shards import Shards

TENSORS = "tensors.json"
FORMAT, FORMAT_VERSION = "moe_onnx.huggingface", 1
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
CARRIED = (CONFIG, "generation_config.json", *TOKENIZER_FILES)
_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True)
class Tensor:
    """A tensor as the checkpoint had it, and where its values are in a parameter of the graph."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parameter: str
    start: int


@dataclass(frozen=True)
class File:
    """A safetensors file of the checkpoint, its tensors in the order of their data."""

    name: str
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Origin:
    """What :data:`TENSORS` says, and the folder with the files that have no weights."""

    folder: Path
    index_metadata: dict[str, Any] | None  # None: there was no index
    files: tuple[File, ...]


def carry(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint that have no weights."""
    for name in CARRIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    for name in _FOLDERS:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)


def origin_of(folder: Path, shards: Shards, layout: Layout) -> Origin:
    """What a checkpoint's tensors are, and where they go."""
    places = {name: (parameter, start) for name, parameter, start in layout.places()}
    files = []
    for file in shards.files:
        tensors = (
            Tensor(entry.name, entry.dtype, entry.shape, *places[entry.name])
            for entry in file.entries.values()
            if entry.name in places
        )
        files.append(File(file.path.name, file.metadata, tuple(tensors)))
    metadata = None if shards.index is None else shards.index.get("metadata", {})
    return Origin(folder, metadata, tuple(files))


def write_origin(target: Path, origin: Origin, architecture: Architecture) -> None:
    """Write the folder for a checkpoint."""
    target.mkdir()
    carry(origin.folder, target)
    about = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "architecture": architecture.model_type,
        "index": origin.index_metadata,
        "files": [asdict(file) for file in origin.files],
    }
    (target / TENSORS).write_text(json.dumps(about, indent=1), "utf-8")


def read_origin(folder: Path) -> Origin:
    """Read :data:`TENSORS` of a folder.

    Raises:
        CheckpointError: If it is not there, or not what :func:`write_origin` wrote.
    """
    path = folder / TENSORS
    try:
        about = json.loads(path.read_text("utf-8"))
        if about["format"] != FORMAT or about["format_version"] != FORMAT_VERSION:
            found = f"{about['format']!r} {about['format_version']!r}"
            raise CheckpointError(f"{path}: expected '{FORMAT}' {FORMAT_VERSION}, found {found}.")
        files = tuple(
            File(
                _plain(path, file["name"]),
                file["metadata"],
                tuple(
                    Tensor(t["name"], t["dtype"], tuple(t["shape"]), t["parameter"], t["start"])
                    for t in file["tensors"]
                ),
            )
            for file in about["files"]
        )
        return Origin(folder, about["index"], files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {error!r}.") from error


def _plain(path: Path, name: str) -> str:
    if Path(name).name != name:
        raise CheckpointError(f"{path}: expected the name of a file, found {name!r}.")
    return name


def find_origin(start: Path, holding: str = TENSORS) -> Path | None:
    """The folder ``huggingface/`` in a folder or one of the three above it, such as a run's; None: none.

    Only one with the file ``holding``: without a checkpoint of its own it may have a tokenizer.
    """
    resolved = start.resolve()
    for folder in (resolved, *list(resolved.parents)[:3]):
        if (folder / ORIGIN / holding).is_file():
            return folder / ORIGIN
    return None
