"""The command ``train-graph``: from an ONNX model to a folder of training graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from moe_onnx.build.imported import ImportedModel
from moe_onnx.build.moe_options import FORMS
from moe_onnx.build.training_graph import ASSEMBLIES
from moe_onnx.cli import graphs
from moe_onnx.cli.options import CONSOLE, ERRORS, OPTIMIZERS
from moe_onnx.imported.training import training_graph_from


@click.command("train-graph")
@click.argument("model", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--loss",
    required=True,
    metavar="NAME|cross-entropy|mean-squared-error",
    help="A scalar of the model, or a loss to attach to an output.",
)
@click.option(
    "--params",
    multiple=True,
    metavar="PATTERN",
    help="What to train, by name; with ! in front, what not. Default: all weights that the loss depends on.",
)
@click.option("--output", "of", metavar="NAME", help="What an attached loss is of. Default: logits.")
@click.option("--ignore-index", type=int, default=-100, show_default=True, help="Label that is left out.")
@click.option(
    "--shift/--no-shift",
    default=None,
    help="Whether a position is held against the next label. Default: where logits have three axes.",
)
@click.option(
    "--assembly", help=f"Some of {', '.join(ASSEMBLIES)}. Default: all but step that the model has."
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option("--weight-decay", type=float, help="Of the optimizer.")
@click.option("--optimize-for", type=click.Choice(list(FORMS)), default="body", show_default=True)
@click.option(
    "--fuse/--no-fuse",
    default=True,
    show_default=True,
    help="Whether MoE layers of standard operators become ascend.moe nodes, if the same values come out.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder for the graphs, manifest.json and model.safetensors.",
)
def train_graph(
    model: Path,
    loss: str,
    params: tuple[str, ...],
    of: str | None,
    assembly: str | None,
    optimizer: str,
    weight_decay: float | None,
    out: Path,
    **rest: Any,
) -> None:
    """Write the training graphs of any ONNX MODEL, such as an export of PyTorch.

    \b
    Examples:
      moe-onnx train-graph lm.onnx --loss cross-entropy -o model
      moe-onnx train-graph lm.onnx --loss cross-entropy --params '*.experts.*' -o model
      moe-onnx train-graph lm.onnx --loss cross-entropy --params '!*embed*' --optimizer sgd -o model
      moe-onnx train-graph net.onnx --loss mean-squared-error --output y -o model
      moe-onnx train-graph net.onnx --loss total_loss -o model
      moe-onnx train-graph lm.onnx --loss cross-entropy --no-fuse -o model

    MoE layers are fused first (passes fold and fuse of moe-onnx rewrite), and the model is run before and
    after. What was fused, what was left and why is printed, and stands in manifest.json; where an output
    differs, all stays as it was.

    Weights stay in the model's files until model.safetensors is written, one after the other. What becomes of
    merged, renamed and tied weights is said here and stands in manifest.json.
    """  # noqa: D301
    decay: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
    with _warnings_printed():
        graph = training_graph_from(
            model,
            loss=loss,
            params=list(params) or None,
            assembly=assembly,
            optimizer=OPTIMIZERS[optimizer](**decay),
            output=of,
            **rest,
        )
    graph.save(out)
    graphs.print_graphs(graph)
    _print_layers(ImportedModel.from_dict(graph.manifest.config))
    _print_changes(ImportedModel.from_dict(graph.manifest.config))
    CONSOLE.print(f"written to {out}", markup=False)


@contextmanager
def _warnings_printed() -> Iterator[None]:
    """Print warnings of what is done inside, also of what fails: they may say why."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for one in said:
                ERRORS.print("[bold yellow]warning:[/] ", end="")
                ERRORS.print(str(one.message), markup=False)


def _print_layers(config: ImportedModel) -> None:
    """MoE layers that were fused and not, and how that was verified."""
    for node, text in config.fused.items():
        CONSOLE.print(f"fused    {node}: {text}", markup=False, soft_wrap=True)
    for node, text in config.not_fused.items():
        CONSOLE.print(f"left     {node}: {text}", markup=False, soft_wrap=True)
    for line in config.verified:
        CONSOLE.print(f"verified {line}", markup=False, soft_wrap=True)


def _print_changes(config: ImportedModel) -> None:
    for new, old in config.renamed.items():
        CONSOLE.print(f"renamed  {old} -> {new}", markup=False)
    for new, old in config.split.items():
        CONSOLE.print(f"split    {new}, which the model had merged into {old}", markup=False)
    for name in config.tied:
        CONSOLE.print(f"tied     {name}, which is read in several places", markup=False)
