"""How the modules and parameters of transformers map to pieces of the graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto

from moe_onnx.build.manifest import Manifest, ParameterInfo
from moe_onnx.errors import ModelError
from moe_onnx.inspection.places import folded

# What only looks at a parameter or cuts it up, on the way to the node that computes with it.
_PASSES_ON = {"Split", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Gather"}
_UPDATE = re.compile(r"^update/([^/]+)/")


@dataclass(frozen=True)
class Mapped:
    """A parameter of all layers alike, and what the graphs do with it.

    Attributes:
        parameter: The name in transformers and in the graphs, ``*`` for the layer.
        layers: Which layers have it, as ``"0-31"``; empty where there are none.
        shape: Of each.
        scope: What the names of its forward nodes begin with, in the first layer that has it.
        forward: Operators that take it in the forward pass, with their number.
        backward: Operators that make or sum up its gradient.
        gradient: Name of the output, or the node that makes it, in the graph ``grad`` or ``step``.
        optimizer: How many nodes update it, and which operators they are.
        states: Names of its optimizer states.
    """

    parameter: str
    layers: str
    shape: tuple[int, ...]
    scope: str
    forward: dict[str, int]
    backward: dict[str, int]
    gradient: str
    optimizer: dict[str, int]
    states: tuple[str, ...]


def explain(models: Mapping[str, ModelProto], manifest: Manifest | None) -> list[Mapped]:
    """The parameters in their order, layers that are alike in one line.

    Raises:
        ModelError: If the model carries no manifest, which says what its inputs are.
    """
    if manifest is None:
        raise ModelError(
            "The model carries no manifest of moe_onnx, which says what its inputs are for. Give a graph "
            "that moe-onnx export wrote."
        )
    graphs = [models[name].graph for name in ("step", "grad", "eval", "forward", "apply") if name in models]
    forward = graphs[0]
    takers = _takers(forward)
    makers = {output: node for graph in graphs for node in graph.node for output in node.output}
    updates = _updates(graphs)
    first: dict[tuple[str, tuple[int, ...]], list[ParameterInfo]] = {}
    for parameter in manifest.parameters:
        first.setdefault((folded(parameter.name), parameter.shape), []).append(parameter)
    done = []
    for (name, shape), alike in first.items():
        one = alike[0]
        nodes = list(_uses(one.name, takers))
        ahead = [node for node in nodes if not _is_backward(node)]
        maker = makers.get(one.gradient) or _fed(one.name, graphs[0], makers)
        done.append(
            Mapped(
                name,
                _ranges([int(found) for p in alike if (found := _layer(p.name))]),
                shape,
                _scope(ahead),
                _count(node for node in ahead if not node.name.startswith("update/")),
                _count(_gradient_nodes(maker, makers)),
                maker.name if maker is not None else "",
                dict(updates.get(one.name, Counter())),
                tuple(one.state),
            )
        )
    return done


def _takers(graph: GraphProto) -> dict[str, list[NodeProto]]:
    takers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            takers.setdefault(name, []).append(node)
    return takers


def _uses(name: str, takers: Mapping[str, list[NodeProto]]) -> Iterable[NodeProto]:
    """The nodes that compute with a parameter, also with parts and views of it."""
    waiting = [name]
    while waiting:
        for node in takers.get(waiting.pop(), ()):
            if node.name.startswith(("update/", "grad_norm/")):
                continue
            yield node
            if node.op_type in _PASSES_ON and not _is_backward(node) and node.op_type != "Gather":
                waiting += node.output


def _is_backward(node: NodeProto) -> bool:
    return node.name.startswith("grad/")


def _gradient_nodes(maker: NodeProto | None, makers: Mapping[str, NodeProto]) -> list[NodeProto]:
    """What a gradient is put together of: its products, and what joins them."""
    if maker is None:
        return []
    found, waiting = {maker.name: maker}, [maker]
    while waiting:
        node = waiting.pop()
        if node.op_type not in ("Concat", "Reshape", "Sum", "Add", "Identity", "Unsqueeze", "Squeeze"):
            continue
        for name in node.input:
            below = makers.get(name)
            if below is not None and below.name not in found and not below.name.startswith("update/"):
                found[below.name] = below
                waiting.append(below)
    return list(found.values())


def _fed(name: str, graph: GraphProto, makers: Mapping[str, NodeProto]) -> NodeProto | None:
    """The node whose gradient an update takes, where no output gives it."""
    for node in graph.node:
        if node.name.startswith(f"update/{name}/"):
            for value in node.input:
                maker = makers.get(value)
                if maker is not None and (_is_backward(maker) or maker.name == f"{name}.grad"):
                    return maker
    return None


def _updates(graphs: Iterable[GraphProto]) -> dict[str, Counter[str]]:
    """Operators of the optimizer by the parameter they update; what a Scan holds counts too."""
    updates: dict[str, Counter[str]] = {}
    for graph in graphs:
        found: dict[str, Counter[str]] = {}
        for node in graph.node:
            if owner := _UPDATE.match(node.name):
                counts = found.setdefault(owner[1], Counter())
                counts[node.op_type] += 1
                for attribute in node.attribute:
                    counts.update(inner.op_type for inner in attribute.g.node)
        updates = {**found, **updates}
    return updates


def _scope(nodes: list[NodeProto]) -> str:
    """What the names of nodes begin with; outermost scopes only."""
    names = dict.fromkeys(node.name.rsplit("/", 1)[0] if "/" in node.name else node.name for node in nodes)
    return ", ".join(n for n in names if not any(n.startswith(f"{other}/") for other in names))


def _count(nodes: Iterable[NodeProto]) -> dict[str, int]:
    counts = Counter(f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in nodes)
    return dict(sorted(counts.items()))


def _layer(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    return found[1] if found else ""


def _ranges(layers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
