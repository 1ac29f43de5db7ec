"""``moe-onnx eval`` and ``generate``: what a trained language model is worth, and what it says."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from moe_onnx.build.imported import missing_of_a_text
from moe_onnx.build.manifest import Manifest
from moe_onnx.cli import huggingface
from moe_onnx.cli.heatmap import write_heatmap
from moe_onnx.cli.options import CONSOLE, WORK_FAILED
from moe_onnx.cli.places import known_place, spare_sources
from moe_onnx.errors import ModelError, OptionError
from moe_onnx.runtime.checkpoint import has_checkpoint
from moe_onnx.runtime.codec import ByteCodec, Codec
from moe_onnx.runtime.data import BIN_DTYPES, read_tokens
from moe_onnx.runtime.evaluation import Evaluation, evaluate_tokens
from moe_onnx.runtime.generate import generate as generate_tokens
from moe_onnx.runtime.routes import KERNELS
from moe_onnx.runtime.training_session import TrainingSession, default_options
from moe_onnx.validation.findings import json_text

FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
TOKENIZER = click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True),
    help="Folder with tokenizer.json. Default: that of the run, or of the checkpoint the model comes from.",
)
CHECKPOINT_HELP = "A run, or a checkpoint in one; default: that of a run, else the graph's first weights."


@click.command(name="eval")
@click.argument("graph", type=FOLDER)
@click.option("--text", type=FILE, help="Evaluate on this file: its bytes, or its tokens by a tokenizer.")
@TOKENIZER
@click.option("--tokens", type=FILE, help="Evaluate on the token ids of a .npy or .bin file.")
@click.option("--dtype", type=click.Choice(BIN_DTYPES), help="Of a .bin file; default: uint16.")
@click.option("--checkpoint", type=FOLDER, help=CHECKPOINT_HELP)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--sequence-length", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--batches", type=click.IntRange(min=1), help="So many, evenly spread; default: all.")
@click.option(
    "--load-svg",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=known_place,
    help="Draw the load of the experts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--kernels", type=click.Choice(KERNELS), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of onnxruntime; default: its own choice.")
def evaluate(
    graph: Path,
    text: Path | None,
    tokenizer: Path | None,
    tokens: Path | None,
    dtype: str | None,
    checkpoint: Path | None,
    batch_size: int,
    sequence_length: int,
    batches: int | None,
    load_svg: Path | None,
    as_json: bool,
    kernels: str,
    threads: int | None,
) -> None:
    """Loss, perplexity and expert load of a language model: of the graphs in GRAPH, or of a run.

    The text is cut into sequences that follow each other; the model predicts all but the first token of each
    and sees nothing of the sequence before.

    \b
    Examples:
      moe-onnx eval model --checkpoint run --text book.txt
      moe-onnx eval model --checkpoint run/checkpoint/step-00001000 --tokens ids.bin --dtype uint32
      moe-onnx eval model --checkpoint run --text book.txt --batches 20 --load-svg load.svg

    Exit codes: 0 done, 1 the loss is not finite, 2 wrong usage or input, 130 interrupted.
    """  # noqa: D301
    if (text is None) == (tokens is None):
        raise click.UsageError("Give either --text or --tokens.")
    spare_sources([load_svg], (graph, checkpoint, text, tokens, tokenizer))
    session, said = opened(graph, checkpoint, "eval", kernels, threads)
    reader = None
    if text is not None:
        reader = huggingface.tokenizer_of(tokenizer, session.graph, checkpoint or graph)
    elif tokenizer is not None:
        raise click.UsageError("--tokenizer is for --text.")
    source: Any = text if text is not None else tokens
    if reader is not None:
        source = huggingface.tokens_of(reader, source, session.graph)
    _, ids = read_tokens(source, session.manifest.config["vocab_size"], dtype)
    bar = Progress(
        TextColumn("batch"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=CONSOLE,
        disable=as_json or not CONSOLE.is_terminal,
    )
    start = time.perf_counter()
    with bar:
        task = bar.add_task("", note="")

        def on_batch(sums: Evaluation, total: int) -> None:
            bar.update(task, completed=sums.batches, total=total, note=f"loss {sums.loss:.4f}")

        done = evaluate_tokens(
            session,
            ids,
            batch_size=batch_size,
            sequence_length=sequence_length,
            batches=batches,
            on_batch=on_batch,
        )
    seconds = time.perf_counter() - start
    if load_svg is not None:
        if not done.loads:
            raise OptionError("--load-svg needs a model with experts; this one has none.")
        write_heatmap(load_svg, list(enumerate([load.tolist() for load in done.loads], 1)), "batch")
    if as_json:
        click.echo(json_text(_plain(done, said)), nl=False)
    else:
        _print(done, said, seconds, is_bytes=text is not None and reader is None)
        if load_svg is not None:
            CONSOLE.print(f"written: {load_svg}", markup=False, soft_wrap=True)
    sys.exit(0 if math.isfinite(done.loss) else WORK_FAILED)


@click.command()
@click.argument("graph", type=FOLDER)
@click.option("--prompt", help="Text to go on with: its bytes, or its tokens by a tokenizer.")
@click.option("--prompt-ids", help="Token ids to go on with, such as 1,15,27; ids are printed as well.")
@TOKENIZER
@click.option("--checkpoint", type=FOLDER, help=CHECKPOINT_HELP)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--temperature", type=float, default=1.0, show_default=True, help="0: the most likely token.")
@click.option("--top-k", type=click.IntRange(min=1), help="Draw from so many of the most likely.")
@click.option("--top-p", type=float, help="Draw from the most likely that add up to this probability.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
@click.option(
    "--context", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens the model sees."
)
@click.option("--kernels", type=click.Choice(KERNELS), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of onnxruntime; default: its own choice.")
def generate(
    graph: Path,
    prompt: str | None,
    prompt_ids: str | None,
    tokenizer: Path | None,
    checkpoint: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    context: int,
    kernels: str,
    threads: int | None,
) -> None:
    """Let a language model go on with a prompt: the graphs in GRAPH with a checkpoint, or a run.

    The same seed gives the same text. Each token costs a whole forward pass: this is for looking at a model,
    not for serving it. The prompt and what follows go to stdout, everything else to stderr.

    \b
    Examples:
      moe-onnx generate model --checkpoint run --prompt "The "
      moe-onnx generate run --prompt "The " --temperature 0.7 --top-p 0.9 --seed 1
      moe-onnx generate model --checkpoint run --prompt-ids 1,15,27 --temperature 0

    Exit codes: 0 done, 1 the model gives no finite logits, 2 wrong usage or input, 130 interrupted.
    """  # noqa: D301
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("Give either --prompt or --prompt-ids.")
    session, said = opened(graph, checkpoint, "forward", kernels, threads)
    vocabulary = session.manifest.config["vocab_size"]
    if prompt_ids is not None:
        if tokenizer is not None:
            raise click.UsageError("--tokenizer is for --prompt.")
        codec, ids = None, _ids(prompt_ids, vocabulary)
    else:
        codec = _codec(tokenizer, session, checkpoint or graph)
        ids = codec.encode(prompt or "")
        if isinstance(codec, ByteCodec) and vocabulary != 256:
            said += f"; the prompt is taken as {codec.name}, and the model knows {vocabulary} tokens"
    click.echo(said, err=True)
    done = generate_tokens(
        session,
        ids,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        context=context,
    )
    click.echo(",".join(map(str, done)) if codec is None else codec.decode(done))


def _codec(tokenizer: Path | None, session: TrainingSession, run: Path) -> Codec:
    """What makes token ids of a prompt: a tokenizer, or bytes where there is none."""
    vocabulary = session.manifest.config["vocab_size"]
    reader = huggingface.tokenizer_of(tokenizer, session.graph, run)
    if reader is None:
        return ByteCodec(vocabulary)
    reader.check_fits(vocabulary)
    return reader


def opened(
    folder: Path, checkpoint: Path | None, assembly: str, kernels: str, threads: int | None
) -> tuple[TrainingSession, str]:
    """A session that only evaluates, and what its weights are.

    Raises:
        ModelError: If ``folder`` holds no graphs, or not this one, or those of no language model.
        CheckpointError: If the checkpoint is not there, or another model's.
    """
    graphs, found = folder, checkpoint
    if not (folder / "manifest.json").exists():
        graphs = folder / "model"
        if not (graphs / "manifest.json").exists():
            has_run = has_checkpoint(folder / "checkpoint") or has_checkpoint(folder)
            raise ModelError(
                f"'{folder}' must be a folder of graphs (with a manifest.json) or a run that built its own "
                f"(with one in model/), got {'a run of other graphs' if has_run else 'neither'}."
                + (f" Give the folder of its graphs, and --checkpoint {folder}." if has_run else "")
            )
        found = checkpoint or folder
    with CONSOLE.status(f"loading {graphs} ..."):
        manifest = Manifest.from_json((graphs / "manifest.json").read_bytes())
        manifest.graph(assembly)
        if missing := missing_of_a_text(manifest.config):
            raise ModelError(f"'{graphs}' must hold the graphs of a language model: {missing}.")
        options = default_options(threads)
        session = TrainingSession(graphs, kernels=kernels, sess_options=options, assembly="")
        if found is None:
            came = session.graph.weights is not None
            which = "those that came with the graph" if came else "the first ones"
            return session, f"weights: {which}, nothing was trained (give --checkpoint)"
        place = found / "checkpoint" if has_checkpoint(found / "checkpoint") else found
        session.load_checkpoint(place)
    return session, f"weights: step {session.global_step} of {place}"


def _ids(text: str, vocabulary: int) -> list[int]:
    words = [word for word in text.replace(",", " ").split() if word]
    for position, word in enumerate(words):
        if not word.isdigit() or int(word) >= vocabulary:
            raise OptionError(
                f"--prompt-ids must be integers in [0, {vocabulary}), got {word!r} at position {position}."
            )
    return [int(word) for word in words]


def _plain(done: Evaluation, said: str) -> dict[str, Any]:
    load = done.expert_load
    return {
        "weights": said.removeprefix("weights: "),
        "loss": done.loss,
        "perplexity": done.perplexity,
        "tokens": done.tokens,
        "batches": done.batches,
        **done.other_losses,
        "expert_load": None if load is None else load.tolist(),
        "dropped": None if done.dropped is None else done.dropped.tolist(),
    }


def _print(done: Evaluation, said: str, seconds: float, *, is_bytes: bool) -> None:
    CONSOLE.print(said, markup=False, soft_wrap=True)
    table = Table(show_header=False)
    table.add_row("loss", f"{done.loss:.6f} nats per token")
    table.add_row("perplexity", f"{done.perplexity:.4f}")
    if is_bytes:
        table.add_row("bits per byte", f"{done.loss / math.log(2):.4f}")
    for name, value in done.other_losses.items():
        table.add_row(name, f"{value:.6f}")
    table.add_row("tokens predicted", f"{done.tokens:,} in {done.batches:,} batches")
    table.add_row("time", f"{seconds:.1f} s, {done.tokens / max(seconds, 1e-9):,.0f} tokens/s")
    CONSOLE.print(table)
    if (load := done.expert_load) is not None:
        CONSOLE.print(load_table(load, done.dropped))


def load_table(load: np.ndarray[Any, Any], dropped: np.ndarray[Any, Any] | None = None) -> Table:
    """How evenly the experts of each layer are used.

    The effective number is the exponential of the entropy of the shares: E where all have equally many, 1
    where one has all.
    """
    names = ["layer", "choices", "busiest", "of the mean", "least", "of the mean", "idle", "effective"]
    names += ["dropped"] if dropped is not None else []
    columns = [Column(name, justify="right") for name in names]
    table = Table(*columns, title=f"Load of {load.shape[1]} experts", title_justify="left")
    for layer, row in enumerate(load):
        total = int(row.sum())
        mean = total / len(row)
        share = row[row > 0] / max(total, 1)
        most, least = int(row.argmax()), int(row.argmin())
        cells = [str(layer), f"{total:,}", str(most), f"{row[most] / mean:.2f}" if total else "-"]
        cells += [str(least), f"{row[least] / mean:.2f}" if total else "-", str(int((row == 0).sum()))]
        cells.append(f"{math.exp(-float((share * np.log(share)).sum())):.1f}" if total else "-")
        cells += [f"{int(dropped[layer]):,}"] if dropped is not None else []
        table.add_row(*cells)
    return table


COMMANDS = (evaluate, generate)
