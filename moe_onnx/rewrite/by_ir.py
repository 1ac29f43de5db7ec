"""Passes over onnx-ir, where values know their uses: what it drops is put back."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx import GraphProto, ModelProto, TensorProto

from moe_onnx.rewrite.nodes import graphs, subgraphs
from moe_onnx.rewrite.notes import MAIN, Apply, Notes


def by_ir(apply: Callable[[ir.Model, Notes], None]) -> Apply:
    """A pass's ``apply`` made of a function that changes an ``onnx_ir.Model`` in place.

    Tensors keep the bytes and entries that they had (checksums of external data among them), and the model
    its ``training_info`` and sparse initializers. Notes know the place of every node by themselves.
    """

    def applied(model: ModelProto, notes: Notes) -> ModelProto:
        inside = (one for graph in _graphs(model) for one in graph.sparse_initializer)
        lost = next(inside, None)
        if lost is not None:
            notes.skipped(lost.values.name, "sparse initializers of subgraphs would be lost")
            return model
        inner = ir.from_proto(model)
        notes.places.update(_places(inner))
        apply(inner, notes)
        if not notes.done:
            return model
        made: ModelProto = ir.to_proto(inner)
        _keep_tensors(model.graph, made.graph)
        made.training_info.extend(model.training_info)
        made.graph.sparse_initializer.extend(model.graph.sparse_initializer)
        return made

    return applied


def _graphs(model: ModelProto) -> list[GraphProto]:
    """Those in attributes of nodes."""
    homes = [model.graph, *(GraphProto(node=function.node) for function in model.functions)]
    return [one for home in homes for inner in subgraphs(home) for one in graphs(inner)]


def _keep_tensors(before: GraphProto, after: GraphProto) -> None:
    """External tensors that are still the same are the same to the last entry."""
    external = {t.name: t for t in before.initializer if t.data_location == TensorProto.EXTERNAL}
    for tensor in after.initializer:
        old = external.get(tensor.name)
        if old is not None and tensor.data_location == TensorProto.EXTERNAL and _where(old) == _where(tensor):
            tensor.CopyFrom(old)


def _where(tensor: TensorProto) -> tuple[str, int, tuple[int, ...], int]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset = int(entries.get("offset") or 0)
    return entries.get("location", ""), offset, tuple(tensor.dims), tensor.data_type


def _places(model: ir.Model) -> dict[int, str]:
    found: dict[int, str] = {}
    waiting: list[tuple[ir.Graph, str]] = [(model.graph, MAIN)]
    for function in model.functions.values():
        place = f"function '{function.domain}.{function.name}'"
        found[id(function)] = place
        waiting.append((function.graph, place))
    while waiting:
        graph, place = waiting.pop()
        found[id(graph)] = place
        suffix = "" if place == MAIN else f" in {place}"
        for node in graph:
            for attr in node.attributes.values():
                graphs = []
                if attr.type == ir.AttributeType.GRAPH:
                    graphs = [attr.as_graph()]
                elif attr.type == ir.AttributeType.GRAPHS:
                    graphs = list(attr.as_graphs())
                name = node.name or next((out.name for out in node.outputs), "")
                inside = f"{attr.name} of node '{name}' ({node.op_type}){suffix}"
                waiting += [(inner, inside) for inner in graphs]
    return found
