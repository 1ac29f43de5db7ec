"""Checkpoints of Hugging Face on the command line: ``export --from-hf``, ``train --tokenizer``, ``to-hf``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
import numpy as np

from moe_onnx.build.optimizers import SGD, AdamW
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.build.weights import ORIGIN, StoredWeights
from moe_onnx.cli.options import CONSOLE, imply_mode, said_of, set_of
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
        kind = SGD() if optimizer == "sgd" else AdamW()
        return pretrained.training_graph(assembly=assembly, optimizer=kind)


def origin_folder(graph: TrainingGraph) -> Path | None:
    """The folder ``huggingface/`` of a graph that was exported from a checkpoint."""
    return find_origin(graph.weights.folder) if isinstance(graph.weights, StoredWeights) else None


def carry_origin(graph: TrainingGraph, run: Path) -> None:
    """Take ``huggingface/`` along into the folder of a run, for ``to-hf``."""
    origin = origin_folder(graph)
    if origin is not None and not (run / ORIGIN).exists():
        run.mkdir(parents=True, exist_ok=True)
        shutil.copytree(origin, run / ORIGIN)


def tokens_of(
    text: Path, tokenizer: Path | None, graph: TrainingGraph, run: Path
) -> Path | np.ndarray[Any, Any]:
    """The text, for its bytes to be the tokens; or its token ids, by the model's tokenizer or another one."""
    origin = origin_folder(graph)
    if tokenizer is None and origin is None:
        return text
    if tokenizer is None and not (origin / FILE).exists():  # type: ignore[operator]  # it is a folder here
        raise OptionError(
            f"The model comes from a checkpoint without '{FILE}', and its tokens are no bytes. Give its "
            "--tokenizer, or token ids (--tokens)."
        )
    reader = Tokenizer(tokenizer or origin)  # type: ignore[arg-type]  # one of them is given
    with CONSOLE.status(f"tokenising {text} ..."):
        tokens = reader.encode_file(text, graph.manifest.config["vocab_size"])
    CONSOLE.print(f"{text}: {len(tokens):,} tokens by {reader.path}", markup=False, soft_wrap=True)
    carry_tokenizer(reader, run / ORIGIN)
    return tokens


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
