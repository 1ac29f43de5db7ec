"""Subgraphs in reverse mode: what they use of the graphs around them, copies of them, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs in a node's attributes."""
    found: list[ir.Graph] = []
    for attr in node.attributes.values():
        if attr.type == ir.AttributeType.GRAPH:
            found.append(attr.as_graph())
        elif attr.type == ir.AttributeType.GRAPHS:
            found.extend(attr.as_graphs())
    return found


def captured(node: ir.Node) -> Iterable[ir.Value]:
    """Values of outer graphs that a node's subgraphs use, each once."""
    seen: set[ir.Value] = set()
    for graph in subgraphs(node):
        inside = {graph, *graph.subgraphs()}
        used = [value for inner in graph.all_nodes() for value in inner.inputs]
        used += [value for inner in inside for value in inner.outputs]
        for value in used:
            if value is not None and value not in seen and value.graph not in inside:
                seen.add(value)
                yield value


def copy_into(
    emitter: Emitter, graph: ir.Graph, inputs: Mapping[ir.Value, ir.Value]
) -> tuple[Emitter, list[ir.Value]]:
    """A copy of a subgraph to add to, with names of its own, and the copies of its outputs.

    Args:
        emitter: Of the graph that the copy will be a part of.
        graph: The subgraph.
        inputs: What takes the place of each of its inputs.
    """
    copy = graph.clone(allow_outer_scope_values=True)

    outputs = list(copy.outputs)
    for own, original in zip(copy.inputs, graph.inputs, strict=True):
        outputs = [inputs[original] if out is own else out for out in outputs]
        ir.convenience.replace_all_uses_with(own, inputs[original], replace_graph_outputs=True)
    copy.inputs.clear()
    copy.outputs.clear()
    inner = emitter.adopt(copy, rename=True)
    return inner, outputs


# Inputs of which only the type or the shape counts: all of a node, or from the second on.
_ONLY_LIKE = {"EyeLike": 0, "RandomNormalLike": 0, "RandomUniformLike": 0, "CastLike": 1}


def flowing(node: ir.Node) -> Iterable[ir.Value]:
    """The values that the outputs of a node depend on: its inputs and what its subgraphs use."""
    last = _ONLY_LIKE.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    yield from (value for value in node.inputs[:last] if value is not None)
    yield from captured(node)


def needed_in(graph: ir.Graph | Iterable[ir.Node], wanted: Iterable[ir.Value]) -> set[ir.Value]:
    """Values on a differentiable path from something wanted; integers end such paths."""
    needed = set(wanted)
    for node in graph:
        if any(value in needed for value in flowing(node)):
            needed.update(out for out in node.outputs if is_float(out))
    return needed


def is_float(value: ir.Value) -> bool:
    """Whether a value can carry a gradient; one of unknown type might."""
    return value.dtype is None or value.dtype.is_floating_point()


def prune(graph: ir.Graph, keep: ir.Node | None = None) -> None:
    """Remove what no output of a subgraph needs."""
    for node in reversed(list(graph)):
        if node is keep or any(out.uses() or out.is_graph_output() for out in node.outputs):
            for inner in subgraphs(node):
                prune(inner)
        else:
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def move_to_front(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Put nodes, in their order, before all others."""
    chosen = set(nodes)
    first = next((node for node in graph if node not in chosen), None)
    if first is not None:
        for node in nodes:
            graph.remove(node)
        graph.insert_before(first, nodes)
