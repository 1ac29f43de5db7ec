"""``moe-onnx inspect``: what graphs cost, in tables, as a picture, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Column, Table

from moe_onnx.build.presets import PRESETS
from moe_onnx.build.recipe import recipe_from_dict, recipe_tables
from moe_onnx.cli import units
from moe_onnx.cli.options import ASSEMBLY, CONSOLE, build
from moe_onnx.cli.places import STDOUT, file_of, known_place, spare_sources
from moe_onnx.cli.step_drawing import draw_step
from moe_onnx.errors import OptionError
from moe_onnx.inspection.explain import Mapped, explain
from moe_onnx.inspection.inspection import BATCH_SIZE, SEQUENCE_LENGTH, Inspection
from moe_onnx.inspection.inspection import inspect as inspect_graphs
from moe_onnx.inspection.places import PHASES
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.findings import json_text, write_beside

FILE = click.Path(path_type=Path, dir_okay=False, writable=True)


@click.command()
@click.argument("source")
@click.option("--assembly", default=ASSEMBLY, show_default=True, help="Graphs to build of a recipe.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Default: the recipe's, or 1.")
@click.option("--sequence-length", type=click.IntRange(min=1), help="Default: the recipe's, or 2048.")
@click.option(
    "--size", "named", multiple=True, metavar="NAME=VALUE", help="A free size of another model; repeatable."
)
@click.option("--graph", "picture", type=FILE, callback=known_place, help="Draw the training step as SVG.")
@click.option(
    "--explain", "explained", is_flag=True, help="Print how transformers' modules map to the graphs."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True, allow_dash=True),
    callback=known_place,
    help="Write everything as JSON; - to stdout, alone.",
)
def inspect(
    source: str,
    assembly: str,
    batch_size: int | None,
    sequence_length: int | None,
    named: tuple[str, ...],
    picture: Path | None,
    explained: bool,
    json_file: Path | None,
) -> None:
    """Show what SOURCE costs: a folder of graphs, a model, a recipe or the name of a preset.

    Parameters by module, and those that a token meets; operators; operations and bytes of a step, forward,
    backward and optimizer, added up from the graph; an estimate of the peak of memory. Nothing runs and no
    weights are needed. Experts are taken to have equally many rows.

    \b
    Examples:
      moe-onnx inspect model
      moe-onnx inspect mixtral-8x7b --batch-size 1 --sequence-length 4096
      moe-onnx inspect qwen3-30b-a3b --graph step.svg --explain
      moe-onnx inspect model/grad.onnx --json - | jq .parameters
      moe-onnx inspect other.onnx --size N=8 --size L=128

    Exit codes: 0 done, 2 SOURCE could not be read, a free size has no value, or wrong usage.
    """  # noqa: D301
    schedule: dict[str, Any] = {}
    if source in PRESETS or source.lower().endswith((".toml", ".json")):
        tables = recipe_tables(source)
        schedule = tables.get("training", {})
        graph: Any = build(recipe_from_dict(tables, source), assembly)
        name = source
    else:
        if not Path(source).exists():
            raise OptionError(
                f"SOURCE must be a folder of graphs, a model, a recipe or one of {', '.join(PRESETS)}, "
                f"got '{source}', which is not there."
            )
        graph, name = Path(source), source
    spare_sources((file_of(json_file), picture), [Path(source)])
    with CONSOLE.status(f"inspecting {source} ..."):
        done = inspect_graphs(
            graph,
            batch_size=batch_size or schedule.get("batch_size", BATCH_SIZE),
            sequence_length=sequence_length or schedule.get("sequence_length", SEQUENCE_LENGTH),
            sizes=_sizes(named),
        )
        done = replace(done, subject=name)
        mapped = explain(done.models, done.manifest) if explained else []
    if json_file is not None:
        data = done.to_dict() | ({"explain": [vars(one) for one in mapped]} if explained else {})
        if json_file == STDOUT:
            click.echo(json_text(data), nl=False)
        else:
            write_beside(json_file, json_text(data))
    if picture is not None:
        draw_step(picture, done)
    if json_file == STDOUT:
        return
    print_inspection(done)
    if explained:
        print_explanation(mapped)
    for path in (picture, json_file):
        if path is not None:
            CONSOLE.print(f"written: {path}", markup=False, soft_wrap=True)


def _sizes(named: Sequence[str]) -> dict[str, int]:
    sizes = {}
    for one in named:
        name, equals, text = one.partition("=")
        if not equals or not text.strip().isdigit():
            raise click.UsageError(f"--size takes NAME=VALUE with a whole number, got {one!r}.")
        sizes[name.strip()] = int(text)
    return sizes


def print_inspection(done: Inspection) -> None:
    """All tables."""
    for table in tables_of(done):
        CONSOLE.print(table)


def tables_of(done: Inspection) -> list[Table]:
    """Sizes, parameters, the step, the modules in it, operators."""
    found = [_summary(done)]
    if done.groups:
        found.append(_parameters(done))
    return [*found, _costs(done), _modules(done), _operators(done)]


def _summary(done: Inspection) -> Table:
    table = Table(title=done.subject, show_header=False, title_justify="left")
    for name, value in done.sizes.items():
        table.add_row(name, f"{value:,}")
    if done.tokens:
        table.add_row("tokens", f"{done.tokens:,}")
    if done.manifest is not None:
        config = done.manifest.config
        for name in ("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok"):
            if name in config:
                table.add_row(name, f"{config[name]:,}")
        states = sum(p.size * len(p.state) for p in done.manifest.parameters)
        # Masters, gradients and states are float32.
        table.add_row("parameters", f"{done.parameters:,} ({units.size(4 * done.parameters)})")
        table.add_row("active per token", f"{done.active:,} ({done.active / max(done.parameters, 1):.1%})")
        table.add_row("gradients", units.size(4 * sum(p.size for p in done.manifest.parameters if p.trained)))
        table.add_row("optimizer state", units.size(4 * states))
    return table


def _numbers(title: str, *names: str) -> Table:
    columns = [Column(name, justify="right") for name in names[1:]]
    return Table(Column(names[0], overflow="fold"), *columns, title=title, title_justify="left")


def _parameters(done: Inspection) -> Table:
    table = _numbers("Parameters", "module", "tensors", "elements", "active per token")
    for group in done.groups:
        table.add_row(group.module, str(group.tensors), f"{group.elements:,}", f"{group.active:,}")
    table.add_section()
    tensors = sum(group.tensors for group in done.groups)
    table.add_row("all", str(tensors), f"{done.parameters:,}", f"{done.active:,}")
    return table


def _costs(done: Inspection) -> Table:
    names = (
        "graph, phase",
        "nodes",
        "matrix products",
        "other",
        "bytes moved",
        "peak activations",
        "outputs",
    )
    table = _numbers("Cost of each graph", *names)
    for name, graph in done.graphs.items():
        for phase in PHASES:
            parts = [part for part in graph.parts if part.phase == phase]
            if not parts:
                continue
            cost = graph.cost(phase)
            nodes = sum(part.nodes for part in parts)
            table.add_row(
                f"{name}, {phase}",
                f"{nodes:,}",
                units.flops(cost.matrix),
                units.flops(cost.other),
                units.size(cost.moved),
            )
        table.add_row(
            f"{name}",
            f"{graph.nodes:,}",
            units.flops(graph.cost().matrix),
            units.flops(graph.cost().other),
            units.size(graph.cost().moved),
            units.size(graph.peak.activations),
            units.size(graph.peak.outputs),
            style="bold",
        )
        table.add_section()
    products = sum(g.cost(phase).matrix for g in done.step for phase in ("forward", "backward"))
    if done.tokens and done.active and any(part.phase == "backward" for g in done.step for part in g.parts):
        ratio = products / (6 * done.active * done.tokens)
        table.caption = f"matrix products of a step are {ratio:.3f} times 6 x active parameters x tokens"
    return table


def _modules(done: Inspection) -> Table:
    """Operations of the step by module."""
    table = _numbers("The step by module", "module", *(f"{phase} FLOPs" for phase in PHASES), "nodes")
    totals: dict[str, Counter[str]] = {}
    nodes: Counter[str] = Counter()
    for graph in done.step:
        for part in graph.parts:
            totals.setdefault(part.part, Counter())[part.phase] += part.cost.flops
            nodes[part.part] += part.nodes
    for name, found in totals.items():
        table.add_row(name, *(units.flops(found[phase]) for phase in PHASES), f"{nodes[name]:,}")
    return table


def _operators(done: Inspection) -> Table:
    table = _numbers("Nodes", "operator", *done.graphs)
    rows: dict[tuple[str, str], list[int]] = {}
    for at, graph in enumerate(done.graphs.values()):
        for key, number in graph.operators.items():
            rows.setdefault(key, [0] * len(done.graphs))[at] = number
    ours = sorted(key for key in rows if key[0] == DOMAIN)
    rest = sorted(set(rows) - set(ours), key=lambda key: (key[0] != "ai.onnx", -sum(rows[key]), key))
    for domain, name in [*ours, *rest]:
        label = name if domain == "ai.onnx" else f"{domain}.{name}"
        table.add_row(label, *(f"{n:,}" if n else "-" for n in rows[domain, name]))
    return table


def print_explanation(mapped: Sequence[Mapped]) -> None:
    """A paragraph for each parameter of transformers."""
    CONSOLE.print("\nFrom transformers to the graph (layers that are alike in one entry)", style="bold")
    for one in mapped:
        layers = f"  (layers {one.layers})" if one.layers else ""
        lines = [f"{one.parameter} {list(one.shape)}{layers}"]
        if one.scope:
            lines.append(f"  forward    {one.scope}: {_said(one.forward)}")
        if one.gradient:
            lines.append(f"  gradient   {one.gradient}: {_said(one.backward)}")
        if one.optimizer:
            states = f"; states {', '.join(one.states)}" if one.states else ""
            lines.append(f"  optimizer  {_said(one.optimizer)}{states}")
        CONSOLE.print("\n".join(lines), markup=False, soft_wrap=True)


def _said(found: dict[str, int]) -> str:
    return (
        ", ".join(name if number == 1 else f"{number} {name}" for name, number in found.items()) or "nothing"
    )


COMMANDS = (inspect,)
