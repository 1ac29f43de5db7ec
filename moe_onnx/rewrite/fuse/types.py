"""Types and shapes of values, in subgraphs and functions too, while matchers look at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import onnx.shape_inference
import onnx_ir as ir
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from moe_onnx.adapters.light import light_copy
from moe_onnx.rewrite.nodes import graphs
from moe_onnx.spec import DOMAIN

Types = dict[str, ValueInfoProto | None]
Key = tuple[str, str, str]
MAIN: Key = ("", "", "")


def homes_of(model: ir.Model, opset: int) -> list[tuple[Key, ir.Graph, int]]:
    """Graph and functions, with the opset of each, ``opset`` for none. Our bodies are what they are."""
    main = model.opset_imports.get("", opset)
    homes = [(MAIN, model.graph, main)]
    for key, function in model.functions.items():
        if function.domain != DOMAIN:
            homes.append((key, function.graph, function.opset_imports.get("", main)))
    return homes


def values_of(graph: ir.Graph) -> list[ir.Value]:
    """Inputs, initializers and outputs of nodes, without those of subgraphs."""
    return [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]


def inferred(model: ModelProto) -> dict[tuple[str, str, str], Types]:
    """What onnx can tell, by function (:data:`MAIN`: none) and name; None for a name of two types.

    No weight is read. Functions are looked at by themselves: their inputs are known by their value_info.
    """
    light = light_copy(model)
    found = {MAIN: _types(light)}
    for function in light.functions:
        have = {value.name: value for value in function.value_info}
        inputs = [have.get(name, ValueInfoProto(name=name)) for name in function.input]
        outputs = [have.get(name, ValueInfoProto(name=name)) for name in function.output]
        alone = GraphProto(name="function", node=function.node, input=inputs, output=outputs)
        alone.value_info.extend(value for name, value in have.items() if name not in function.input)
        whole = ModelProto(ir_version=light.ir_version, graph=alone, opset_import=function.opset_import)
        found[function.domain, function.name, function.overload] = _types(whole)
    return found


def _types(model: ModelProto) -> Types:
    model = _inferred(model)
    types: Types = {}
    for graph in graphs(model.graph):
        _add(types, graph)
    outer = {tensor.name: tensor for tensor in model.graph.initializer}
    for number, graph in enumerate(graphs(model.graph)):
        if graph is not model.graph:
            before = _alone(model, graph, types, outer)
            alone = _inferred(before)
            _rename(alone.graph, _names(before.graph.input), f"@{number}")
            better: Types = {}
            _add(better, alone.graph)
            for name, value in better.items():
                if name in types and value is not None and not _has_shape(types[name]):
                    types[name] = value
    return types


def _inferred(model: ModelProto) -> ModelProto:
    with suppress(Exception):  # a help: what it cannot tell is not known
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model


def _add(types: Types, graph: GraphProto) -> None:
    for value in (*graph.input, *graph.value_info, *graph.output):
        other = types.get(value.name, value)
        same = other is not None and other.type == value.type
        types[value.name] = value if same and value.type.HasField("tensor_type") else None


def _names(values: Iterable[ValueInfoProto]) -> set[str]:
    return {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim}


def _rename(graph: GraphProto, known: set[str], suffix: str) -> None:
    """Sizes that inference named in one body are others than those it gave the same name elsewhere."""
    for inner in graphs(graph):
        for value in (*inner.value_info, *inner.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param.startswith("unk__") and dim.dim_param not in known:
                    dim.dim_param += suffix


def _has_shape(value: ValueInfoProto | None) -> bool:
    """Whether a shape is known, and every axis by a number or the name of the model's own."""
    if value is None:
        return True  # of two types: stays unknown
    tensor = value.type.tensor_type
    return tensor.HasField("shape") and not any(d.dim_param.startswith("unk__") for d in tensor.shape.dim)


def _alone(model: ModelProto, graph: GraphProto, types: Types, outer: dict[str, TensorProto]) -> ModelProto:
    """A body as a model of its own: it sees numbers of the graph around it, as inference in it does not."""
    made = {out for node in graph.node for out in node.output} | {value.name for value in graph.input}
    read = {name for node in graph.node for name in node.input} - made - {t.name for t in graph.initializer}
    given = [value for name in sorted(read - outer.keys()) if (value := types.get(name)) is not None]
    alone = GraphProto(name="body", node=graph.node, input=[*graph.input, *given], output=graph.output)
    alone.initializer.extend([*graph.initializer, *(outer[name] for name in sorted(read & outer.keys()))])
    return ModelProto(ir_version=model.ir_version, graph=alone, opset_import=model.opset_import)


@contextmanager
def typed(values: Iterable[ir.Value], types: Types) -> Iterator[None]:
    """Values without a shape have the inferred one inside; it is taken away again at the end."""
    given = []
    for value in values:
        proto = types.get(value.name or "")
        if value.shape is None and proto is not None:
            known = ir.serde.deserialize_value_info_proto(proto, None)
            given.append((value, value.type))
            value.shape, value.type = known.shape, value.type or known.type
    try:
        yield
    finally:
        for value, before in given:
            value.shape, value.type = None, before
