"""Where commands write reports: looked at before the work, and never a file that they read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from moe_onnx.errors import ModelFileError
from moe_onnx.huggingface.origin import CARRIED, TENSORS
from moe_onnx.runtime.checkpoint import LATEST, TRAINER
from moe_onnx.validation.rewriting.data import check_free, files_of
from moe_onnx.validation.subject import Options, open_subject

STDOUT = Path("-")
# What is read of folders: of graphs, checkpoints, dumps and tokenizers. All else in them may be a report.
_KINDS = (".onnx", ".data", ".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin", ".toml", ".index.json")
_NAMES = (*CARRIED, TENSORS, "manifest.json", TRAINER, LATEST)


def known_place(ctx: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    """What cannot be written is better known before the work than after it: a callback of options."""
    if value is not None and value != STDOUT and not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder '{value.parent}'.", ctx, option)
    return value


def file_of(place: Path | None) -> Path | None:
    """The file that an option names which takes ``-`` for stdout."""
    return None if place == STDOUT else place


def spare_sources(written: Iterable[Path | None], read: Iterable[Path | None]) -> None:
    """See that no report replaces a file that the command reads, or another report.

    Args:
        written: The files that reports go to; None are left out.
        read: Models, with what belongs to them, tensors, or folders of either; None are left out.

    Raises:
        ModelFileError: If one does; names it.
    """
    places = [place for place in written if place is not None]
    for number, place in enumerate(places):
        check_free(place, places[:number], "the file of another report")
    replaced = [place for place in places if place.exists()]
    sources = [source for source in read if source is not None] if replaced else []
    for source in sources:
        taken = _files(source)
        for place in replaced:
            check_free(place, taken, f"a file of '{source}'")


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        return [
            Path(folder, name) for folder, _, names in os.walk(source) for name in names if _is_read(name)
        ]
    beside = source.parent / "manifest.json"
    around = [one for one in source.parent.iterdir() if _is_read(one.name)] if beside.exists() else []
    try:
        return [source, *around, *files_of(open_subject(source, Options()))]
    except ModelFileError:  # tensors, a text, a recipe, or what the command itself is going to refuse
        return [source, *around]


def _is_read(name: str) -> bool:
    return name.lower().endswith(_KINDS) or name in _NAMES
