"""A model with one thing changed, in many ways: what a rewrite must tell from the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from mutant_edges import Scope, of_edges, of_outputs
from mutant_nodes import Change, of_attributes, of_constant, of_operator
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

import moe_onnx
from moe_onnx.rewrite.passes import DEFECT, apply_passes


def rewritten(model: ModelProto, name: str) -> ModelProto | str:
    """What a pass makes of a mutant; ``"left"`` where that is nothing, ``"invalid"`` where it is refused."""
    try:
        done = apply_passes(model, [name])
    except moe_onnx.MoeOnnxError as error:
        if DEFECT in str(error):
            raise
        return "invalid"
    return "left" if done.model is model else done.model


def mutants(model: ModelProto) -> Iterator[tuple[str, Callable[[], ModelProto]]]:
    """All changes of a model: a label, and a function of no arguments that makes the mutant."""
    for version in (13, 17, 18, 20, 23):
        yield f"opset {version}", _of_opset(model, version)
    for scope in _scopes(model):
        for at, node in enumerate(scope.graph.node):
            where = f"{node.op_type} {node.output[0]}"
            for what, change in _changes(scope, at, node):
                yield f"{where}: {what}", _made(model, scope.path, at, change)


def _of_opset(model: ModelProto, version: int) -> Callable[[], ModelProto]:
    def make() -> ModelProto:
        copy = ModelProto()
        copy.CopyFrom(model)
        for one in copy.opset_import:
            one.version = version if not one.domain else one.version
        return copy

    return make


def _made(
    model: ModelProto, path: tuple[tuple[int, str], ...], at: int, change: Change
) -> Callable[[], ModelProto]:
    def make() -> ModelProto:
        copy = ModelProto()
        copy.CopyFrom(model)
        graph = copy.graph
        for number, name in path:
            graph = next(a.g for a in graph.node[number].attribute if a.name == name)
        change(copy, graph, graph.node[at])
        return copy

    return make


def _scopes(model: ModelProto) -> Iterator[Scope]:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    waiting = [Scope(inferred.graph, {}, {})]
    while waiting:
        scope = waiting.pop(0)
        graph = scope.graph
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            dims = ",".join(d.dim_param or str(d.dim_value) for d in tensor.shape.dim)
            scope.types[value.name] = (tensor.elem_type, dims if tensor.HasField("shape") else "?")
        for tensor in graph.initializer:
            scope.types[tensor.name] = (tensor.data_type, ",".join(map(str, tensor.dims)))
            scope.constants[tensor.name] = numpy_helper.to_array(tensor)
        for node in graph.node:
            if node.op_type == "Constant":
                value = helper.get_node_attr_value(node, node.attribute[0].name)
                array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.array(value)
                scope.constants[node.output[0]] = array
        yield scope
        for number, node in enumerate(graph.node):
            seen = [*scope.outer, *(v.name for v in graph.input), *(t.name for t in graph.initializer)]
            seen += [out for one in graph.node[:number] for out in one.output]
            for attr in node.attribute:
                if attr.type == AttributeProto.GRAPH:
                    path = (*scope.path, (number, attr.name))
                    inner = Scope(attr.g, dict(scope.types), dict(scope.constants), path, seen)
                    waiting.append(inner)


def _changes(scope: Scope, at: int, node: NodeProto) -> Iterator[tuple[str, Change]]:
    yield from of_attributes(node)
    yield from of_operator(node)
    for place, name in enumerate(node.input):
        if name in scope.constants and scope.constants[name].size <= 16:
            yield from of_constant(place, scope.constants[name])
    yield from of_edges(scope, at, node)
    yield from of_outputs(scope, node)
