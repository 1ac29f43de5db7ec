"""An inspection as plain text, the same on every terminal: what the shelf keeps of a large model."""

from __future__ import annotations

from collections.abc import Sequence

from moe_onnx.inspection.inspection import Inspection
from moe_onnx.inspection.places import PHASES
from moe_onnx.spec import DOMAIN

Row = Sequence[str]


def summary_text(done: Inspection) -> str:
    """Parameters by module, operations of the step, memory, and the nodes of each graph."""
    sizes = ", ".join(f"{name} {value}" for name, value in done.sizes.items())
    blocks = [
        [f"{done.parameters:,} parameters, {done.active:,} of them active for a token; {sizes}"],
        _aligned([("module", "tensors", "elements", "active"), *_parameters(done)]),
        _aligned([("module", *(f"{phase} FLOPs" for phase in PHASES), "nodes"), *_modules(done)]),
        _aligned([("graph", "nodes", "matrix FLOPs", "other FLOPs", "bytes moved", "peak"), *_graphs(done)]),
        _aligned([("operator", *done.graphs), *_operators(done)]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _parameters(done: Inspection) -> list[Row]:
    return [(g.module, str(g.tensors), f"{g.elements:,}", f"{g.active:,}") for g in done.groups]


def _modules(done: Inspection) -> list[Row]:
    names = dict.fromkeys(part.part for graph in done.step for part in graph.parts)
    parts = [part for graph in done.step for part in graph.parts]
    rows: list[Row] = []
    for name in names:
        mine = [part for part in parts if part.part == name]
        flops = (sum(part.cost.flops for part in mine if part.phase == phase) for phase in PHASES)
        rows.append((name, *(f"{number:,}" for number in flops), f"{sum(part.nodes for part in mine):,}"))
    return rows


def _graphs(done: Inspection) -> list[Row]:
    rows: list[Row] = []
    for name, graph in done.graphs.items():
        cost = graph.cost()
        numbers = (graph.nodes, cost.matrix, cost.other, cost.moved, graph.peak.activations)
        rows.append((name, *(f"{number:,}" for number in numbers)))
    return rows


def _operators(done: Inspection) -> list[Row]:
    names = dict.fromkeys(key for graph in done.graphs.values() for key in graph.operators)
    rows: list[Row] = []
    for domain, name in sorted(names, key=lambda key: (key[0] != DOMAIN, key)):
        counts = (graph.operators.get((domain, name), 0) for graph in done.graphs.values())
        rows.append((f"{domain}.{name}" if domain == DOMAIN else name, *(str(n or "-") for n in counts)))
    return rows


def _aligned(rows: Sequence[Row]) -> list[str]:
    """Columns: the first to the left, numbers to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
