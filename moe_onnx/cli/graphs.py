"""The commands ``export`` and ``info`` on graphs: what was built, in tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
from rich.filesize import decimal
from rich.table import Column, Table

from moe_onnx.build.manifest import Manifest
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.cli.options import CONSOLE
from moe_onnx.errors import ModelError
from moe_onnx.inspection.inspection import operators
from moe_onnx.spec import DOMAIN


def print_graphs(graph: TrainingGraph) -> None:
    """Print the manifest's summary and the operators of each model."""
    print_manifest(graph.manifest)
    print_operators(graph.models)


def print_manifest(manifest: Manifest) -> None:
    """Print config, optimizer and parameters."""
    table = Table(title="Model", show_header=False, title_justify="left")
    for name, value in manifest.config.items():
        table.add_row(name, _FEW_WORDS.get(name, str)(value))
    table.add_row("optimizer", ", ".join(f"{k}={v}" for k, v in (manifest.optimizer or {}).items()))
    state = sum(p.size * len(p.state) for p in manifest.parameters)
    table.add_row("parameters", f"{manifest.num_parameters:,} in {len(manifest.parameters)} tensors")
    table.add_row("optimizer state", f"{state:,} elements")
    table.add_row(
        "memory", f"{decimal(4 * (manifest.num_parameters + state))} for parameters and optimizer state"
    )
    if manifest.dispatch.get("expert_capacity"):
        table.add_row("capacity", f"{manifest.dispatch['expert_capacity']} rows of each expert")
    table.add_row("graphs", f"{', '.join(manifest.graphs)}; optimized for {manifest.optimize_for}")
    CONSOLE.print(table)


# Of what is long: train-graph prints it in full, and it stands in manifest.json.
_FEW_WORDS: dict[str, Callable[[Any], str]] = {
    "fused": lambda layers: ", ".join(layers) or "none",
    "not_fused": lambda layers: "\n".join(f"{name}: {why}" for name, why in layers.items()) or "none",
    "verified": lambda lines: f"with {len(lines)} sets of inputs" if lines else "nothing was fused",
}


def print_operators(models: Mapping[str, onnx.ModelProto], *, short: bool = False) -> None:
    """Print how many nodes each model has of each operator; ``short``: standard ops in one row."""
    counts = {name: operators(model) for name, model in models.items()}
    if short:
        for name, found in counts.items():
            counts[name] = Counter({key: n for key, n in found.items() if key[0] == DOMAIN})
            counts[name]["ai.onnx", "(all)"] = found.total() - counts[name].total()
    table = Table("domain", Column("operator", overflow="fold"), *counts, title="Nodes", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    totals: dict[tuple[str, str], list[int]] = {}
    for i, found in enumerate(counts.values()):
        for key, number in found.items():
            totals.setdefault(key, [0] * len(counts))[i] = number
    ours = [key for key in totals if key[0] == DOMAIN]
    for key in [*sorted(ours), *sorted(set(totals) - set(ours), key=lambda key: (-sum(totals[key]), key))]:
        table.add_row(*key, *(str(n) if n else "-" for n in totals[key]), style="bold" if key in ours else "")
    table.add_section()
    table.add_row("all", "", *(str(sum(found.values())) for found in counts.values()))
    CONSOLE.print(table)


def print_path(path: Path) -> None:
    """Print what a folder of graphs or a single model holds.

    Raises:
        ModelError: If it is neither.
    """
    if path.is_dir():
        print_graphs(TrainingGraph.load(path))
        return
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's errors have no common base worth naming
        raise ModelError(f"{path}: is no ONNX model: {error}.") from error
    manifest = Manifest.of_model(model)
    if manifest is not None:
        print_manifest(manifest)
    else:
        CONSOLE.print(f"{path.name} carries no manifest of moe_onnx.")
    print_operators({path.stem: model})
