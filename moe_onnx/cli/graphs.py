"""The commands ``export`` and ``info`` on graphs: what was built, in tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
from rich.filesize import decimal
from rich.table import Column, Table

from moe_onnx.build.manifest import METADATA_KEY, Manifest
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.cli.options import CONSOLE
from moe_onnx.errors import ModelError
from moe_onnx.spec import DOMAIN


def operator_counts(model: onnx.ModelProto) -> Counter[tuple[str, str]]:
    """How often each operator stands in a model's graph, by domain and name; bodies are not looked into."""
    counts: Counter[tuple[str, str]] = Counter()
    graphs = [model.graph]
    while graphs:
        for node in graphs.pop().node:
            counts[node.domain or "ai.onnx", node.op_type] += 1
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    graphs.append(attribute.g)
                graphs.extend(attribute.graphs)
    return counts


def print_graphs(graph: TrainingGraph) -> None:
    """Print the manifest's summary and the operators of each model."""
    print_manifest(graph.manifest)
    print_operators(graph.models)


def print_manifest(manifest: Manifest) -> None:
    """Print config, optimizer and parameters."""
    table = Table(title="Model", show_header=False, title_justify="left")
    for name, value in manifest.config.items():
        table.add_row(name, str(value))
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


def print_operators(models: Mapping[str, onnx.ModelProto], *, short: bool = False) -> None:
    """Print how many nodes each model has of each operator; ``short``: standard ops in one row."""
    counts = {name: operator_counts(model) for name, model in models.items()}
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
    texts = [entry.value for entry in model.metadata_props if entry.key == METADATA_KEY]
    if texts:
        print_manifest(Manifest.from_json(texts[0]))
    else:
        CONSOLE.print(f"{path.name} carries no manifest of moe_onnx.")
    print_operators({path.stem: model})
