"""Checkpoints of Hugging Face on the command line: ``export --from-hf``, ``train --tokenizer``, ``to-hf``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
import numpy as np

from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.build.weights import ORIGIN, StoredWeights
from moe_onnx.cli.options import CONSOLE, OPTIMIZERS, imply_mode, said_of, set_of
from moe_onnx.errors import OptionError
from moe_onnx.huggingface.origin import find_origin
from moe_onnx.huggingface.pretrained import from_pretrained
from moe_onnx.huggingface.saving import DTYPES, save_pretrained
from moe_onnx.huggingface.tokenizer import FILE, Tokenizer, carry_tokenizer

FOLDER = click.Path(path_type=Path, file_okay=False)


def graph_of(
    folder: Path,
    assembly: str,
    *,
    optimize_for: str,
    config: str | None,
    settings: tuple[str, ...],
    optimizer: str | None,
    **given: int | float | str | None,
) -> TrainingGraph:
    """The graphs that train a checkpoint; options may change what it leaves open."""
    if config is not None:
        raise click.UsageError("Give either --from-hf or --config, not both.")
    changes = said_of(given) | set_of(settings)
    imply_mode(changes)
    pretrained = from_pretrained(folder, **changes)
    CONSOLE.print(repr(pretrained).strip("<>"), markup=False, soft_wrap=True)
    with CONSOLE.status(f"building {assembly} ..."):
        kind = OPTIMIZERS[optimizer or "adamw"]
        return pretrained.training_graph(assembly=assembly, optimizer=kind(), optimize_for=optimize_for)


def origin_folder(graph: TrainingGraph) -> Path | None:
    """The folder ``huggingface/`` of a graph that was exported from a checkpoint."""
    return find_origin(graph.weights.folder) if isinstance(graph.weights, StoredWeights) else None


def tokenizer_of(given: Path | None, graph: TrainingGraph, run: Path | None = None) -> Tokenizer | None:
    """The tokenizer that is given, or a run's, or the model's own; None: bytes are the tokens."""
    if given is not None:
        return Tokenizer(given)
    own = None if run is None else find_origin(run, FILE)
    if own is not None:
        return Tokenizer(own)
    origin = origin_folder(graph)
    if origin is None:
        return None
    if not (origin / FILE).exists():
        raise OptionError(
            f"The model comes from a checkpoint without '{FILE}', and its tokens are no bytes. Give its "
            "--tokenizer, or token ids."
        )
    return Tokenizer(origin)


def tokens_of(reader: Tokenizer, text: Path, graph: TrainingGraph) -> np.ndarray[Any, Any]:
    """The token ids of a text."""
    with CONSOLE.status(f"tokenising {text} ..."):
        tokens = reader.encode_file(text, graph.manifest.config["vocab_size"])
    CONSOLE.print(f"{text}: {len(tokens):,} tokens by {reader.path}", markup=False, soft_wrap=True)
    return tokens


def carry_origin(graph: TrainingGraph, reader: Tokenizer | None, run: Path, *, resume: bool) -> None:
    """Take ``huggingface/`` along into a run's folder, for ``to-hf``, with the tokenizer that is used."""
    origin = origin_folder(graph)
    if not resume:
        shutil.rmtree(run / ORIGIN, ignore_errors=True)  # of a run that did not start
        if origin is not None:
            shutil.copytree(origin, run / ORIGIN)
    if reader is not None:
        carry_tokenizer(reader, run / ORIGIN)


@click.command(name="to-hf")
@click.argument("checkpoint", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("folder", type=FOLDER)
@click.option("--origin", type=FOLDER, help="Folder that export --from-hf wrote, where it is not found.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of all tensors; default: as each was.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is in FOLDER.")
def to_hf(checkpoint: Path, folder: Path, origin: Path | None, dtype: str | None, overwrite: bool) -> None:
    """Write CHECKPOINT to FOLDER in the form of Hugging Face, as the one it was exported from.

    \b
    Examples:
      moe-onnx to-hf run trained                     what training gave
      moe-onnx to-hf run/checkpoint/step-00000100 at-100
      moe-onnx to-hf model back                      what was exported, untrained

    Names, dtypes, files, config and tokenizer are those of the checkpoint that export --from-hf read.
    """  # noqa: D301
    save_pretrained(checkpoint, folder, origin=origin, dtype=dtype, overwrite=overwrite)
    CONSOLE.print(f"written to {folder}", markup=False)


COMMANDS = (to_hf,)
