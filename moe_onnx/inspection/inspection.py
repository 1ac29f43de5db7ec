"""``moe_onnx.inspect``: sizes, operators, parameters, operations, bytes and memory of graphs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto

from moe_onnx.build.manifest import Manifest
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.errors import BatchError, OptionError
from moe_onnx.inspection.cost import Cost, cost_of
from moe_onnx.inspection.memory import Peak, peak_of
from moe_onnx.inspection.parameters import Group, parameter_groups
from moe_onnx.inspection.places import PHASES, Place, place_of
from moe_onnx.inspection.shapes import Bound, bind, free_sizes
from moe_onnx.validation.reading import read_model
from moe_onnx.validation.subject import normal_domain, subgraphs

BATCH_SIZE, SEQUENCE_LENGTH = 1, 2048
FORMAT, FORMAT_VERSION = "moe_onnx.inspection", 1


@dataclass(frozen=True)
class Part:
    """What a module does in a phase, over all layers: nodes and their cost."""

    phase: str
    part: str
    nodes: int
    cost: Cost


@dataclass(frozen=True)
class GraphReport:
    """One graph.

    Attributes:
        name: The assembly, or the file's name.
        nodes: Of the graph itself.
        nbytes: Of the model, as it would be in a file.
        operators: How often each operator stands in it, subgraphs included, by domain and name.
        parts: What each module does in each phase.
        peak: Memory between inputs and outputs.
        unknown: How many values have a size that nothing tells; they cost nothing here.
        balanced: How many splits by data were taken as equal.
    """

    name: str
    nodes: int
    nbytes: int
    operators: dict[tuple[str, str], int]
    parts: tuple[Part, ...]
    peak: Peak
    unknown: int
    balanced: int

    def cost(self, phase: str = "") -> Cost:
        """Of a phase, or of all."""
        return sum((part.cost for part in self.parts if phase in ("", part.phase)), Cost())


@dataclass(frozen=True)
class Inspection:
    """What ``inspect`` found.

    Attributes:
        subject: What was inspected.
        sizes: The free sizes and their values.
        tokens: Of a batch, 0 where nothing tells.
        groups: Parameters by module.
        graphs: By name.
        manifest: Of a training graph, None for any other model.
        models: The models themselves.
    """

    subject: str
    sizes: dict[str, int]
    tokens: int
    groups: tuple[Group, ...]
    graphs: dict[str, GraphReport]
    manifest: Manifest | None
    models: Mapping[str, ModelProto] = field(repr=False)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(group.elements for group in self.groups)

    @property
    def active(self) -> int:
        """Elements of the parameters that one token meets."""
        return sum(group.active for group in self.groups)

    @property
    def step(self) -> tuple[GraphReport, ...]:
        """The graphs that make up an update: ``step``, or ``grad`` and ``apply``; else all there are."""
        for names in (("step",), ("grad", "apply"), ("grad",)):
            if all(name in self.graphs for name in names):
                return tuple(self.graphs[name] for name in names)
        return tuple(self.graphs.values())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "subject": self.subject,
            "sizes": self.sizes,
            "tokens": self.tokens,
            "parameters": {
                "total": self.parameters,
                "active": self.active,
                "modules": [asdict(group) for group in self.groups],
            },
            "step": [graph.name for graph in self.step],
            "graphs": {name: _plain(graph) for name, graph in self.graphs.items()},
        }


def inspect(
    source: TrainingGraph | ModelProto | str | os.PathLike[str],
    *,
    batch_size: int = BATCH_SIZE,
    sequence_length: int = SEQUENCE_LENGTH,
    sizes: Mapping[str, int] | None = None,
) -> Inspection:
    """What graphs cost, without running them and without weights.

    Operations and bytes are summed up node by node from the shapes of a batch (formulas in
    ``moe_onnx/inspection/cost.py``), memory is the largest sum of values alive at once
    (``moe_onnx/inspection/memory.py``). Experts are taken to have equally many rows, and no token is padding.

    Args:
        source: A :class:`TrainingGraph`, the folder it was saved to, a model or the path of one.
        batch_size: Value of the size ``batch``.
        sequence_length: Value of the size ``sequence``; a layer's ``tokens`` are the product of both.
        sizes: Values of other free sizes by name, for models that are not this package's.

    Returns:
        An :class:`Inspection`.

    Raises:
        OptionError: If a size is not an integer >= 1, or is none of the graph, or a free size is not given.
        BatchError: If the batch has fewer tokens than the graph's expert capacity.
        ModelError, ModelFileError: If there is no such file, or shapes in it contradict each other.
    """
    given = {"batch": batch_size, "sequence": sequence_length, **(sizes or {})}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"size '{name}' must be an integer >= 1, got {value!r}.")
    subject, models, manifest = _opened(source)
    tokens = 0
    derived: dict[str, int] = {}
    if manifest is not None:
        tokens = given["batch"] * given["sequence"]
        given.setdefault("tokens", tokens)
        derived = _derived(manifest, given["tokens"])
    used = dict.fromkeys(name for model in models.values() for name in free_sizes(model))
    for name in sizes or {}:
        if name not in used:
            raise OptionError(f"There is no free size '{name}'. There are: {', '.join(used) or 'none'}.")
    bounds = {name: bind(model, given, derived=derived) for name, model in models.items()}
    return Inspection(
        subject,
        {name: given[name] for name in used if name in given},
        tokens,
        tuple(parameter_groups(manifest, next(iter(models.values())))),
        {name: report(name, models[name], bound, manifest) for name, bound in bounds.items()},
        manifest,
        models,
    )


def report(name: str, model: ModelProto, bound: Bound, manifest: Manifest | None) -> GraphReport:
    """Add up a graph."""
    parameters = set() if manifest is None else set(manifest.parameter_names)
    totals: dict[tuple[str, str], tuple[int, Cost]] = {}
    for node, place in places(bound, parameters):
        nodes, cost = totals.get((place.phase, place.part), (0, Cost()))
        totals[place.phase, place.part] = nodes + 1, cost + cost_of(node, bound.tensors)
    order = sorted(totals, key=lambda key: PHASES.index(key[0]))
    return GraphReport(
        name,
        len(model.graph.node),
        model.ByteSize(),
        dict(operators(model)),
        tuple(Part(*key, *totals[key]) for key in order),
        peak_of(bound),
        len(bound.unknown),
        bound.balanced,
    )


def places(bound: Bound, parameters: set[str]) -> list[tuple[Any, Place]]:
    """Every node of the main graph with its place."""
    uses = {}
    for node in bound.graph.node:
        taken = next((name for name in node.input if name in parameters), None)
        if taken is not None:
            uses[node.name] = taken
    if not parameters:
        return [
            (n, Place("backward" if n.name.startswith("grad/") else "forward", "other"))
            for n in bound.graph.node
        ]
    return [(node, place_of(node, parameters, uses)) for node in bound.graph.node]


def operators(model: ModelProto) -> Counter[tuple[str, str]]:
    """How often each operator stands in a model's graph and its subgraphs; functions are not looked into."""
    counts: Counter[tuple[str, str]] = Counter()
    waiting = [model.graph]
    while waiting:
        for node in waiting.pop().node:
            counts[normal_domain(node.domain) or "ai.onnx", node.op_type] += 1
            waiting += [graph for _, graph in subgraphs(node)]
    return counts


def _opened(source: Any) -> tuple[str, Mapping[str, ModelProto], Manifest | None]:
    if isinstance(source, TrainingGraph):
        return "training graph", source.models, source.manifest
    if isinstance(source, ModelProto):
        return source.graph.name or "model", {"model": source}, Manifest.of_model(source)
    path = Path(source)
    if path.is_dir():
        graph = TrainingGraph.load(path)
        return str(path), graph.models, graph.manifest
    model = read_model(path)
    return str(path), {path.stem: model}, Manifest.of_model(model)


def _derived(manifest: Manifest, tokens: int) -> dict[str, int]:
    """Sizes of values in between: what the dispatch makes of the tokens."""
    slots = tokens * int(manifest.config.get("num_experts_per_tok", 1))
    capacity = int(manifest.dispatch.get("expert_capacity", 0))
    active = int(manifest.dispatch.get("active_num", 0))
    if tokens < capacity:
        raise BatchError(
            f"The batch has {tokens} tokens, fewer than the expert capacity {capacity}, which every expert "
            "has rows for. Give a larger batch_size or sequence_length."
        )
    rows = capacity * int(manifest.config["num_experts"]) if capacity else min(active or slots, slots)
    return {"slots": slots, "rows": rows}


def _plain(graph: GraphReport) -> dict[str, Any]:
    return {
        "nodes": graph.nodes,
        "bytes": graph.nbytes,
        "operators": [
            {"domain": domain, "operator": name, "nodes": number}
            for (domain, name), number in sorted(graph.operators.items())
        ],
        "parts": [
            {"phase": part.phase, "module": part.part, "nodes": part.nodes, **asdict(part.cost)}
            for part in graph.parts
        ],
        "peak": asdict(graph.peak),
        "values_of_unknown_size": graph.unknown,
        "splits_taken_as_balanced": graph.balanced,
    }
