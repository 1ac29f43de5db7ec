"""Where commands write reports: looked at before the work, and never a file that they read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from moe_onnx.errors import ModelFileError
from moe_onnx.validation.rewriting.data import check_free, files_of
from moe_onnx.validation.subject import Options, open_subject

STDOUT = Path("-")
# What folders of graphs, checkpoints and dumps hold; reports may stand beside it.
_KINDS = (".onnx", ".data", ".safetensors", ".npy", ".npz", ".pt", ".bin", ".toml")
_NAMES = ("manifest.json", "config.json", "tokenizer.json")


def known_place(ctx: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    """What cannot be written is better known before the work than after it: a callback of options."""
    if value is not None and value != STDOUT and not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder '{value.parent}'.", ctx, option)
    return value


def spare_sources(written: Iterable[Path | None], read: Iterable[Path | None]) -> None:
    """See that no report replaces a file that the command reads.

    Args:
        written: Where reports go to; None and ``-`` are no files.
        read: Models, with the files of their external data, tensors, or folders of them.

    Raises:
        ModelFileError: If one does; names it.
    """
    for place in written:
        if place is None or place == STDOUT or not place.exists():
            continue
        for source in read:
            if source is not None:
                check_free(place, _files(source), f"a file of '{source}'")


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        return [one for one in source.iterdir() if one.suffix.lower() in _KINDS or one.name in _NAMES]
    try:
        return [source, *files_of(open_subject(source, Options()))]
    except ModelFileError:  # tensors, a recipe, or what the command itself is going to refuse
        return [source]
