"""A model without the data of its large tensors."""

from __future__ import annotations

from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

_SMALL = 1024  # elements; what inference may want to read: sizes, axes


def light_copy(model: ModelProto) -> ModelProto:
    """A copy that shares nothing, in which tensors of more than 1024 elements have no data."""
    copy = ModelProto()
    for descriptor, value in model.ListFields():
        if descriptor.name == "graph":
            _copy_graph(value, copy.graph)
        else:
            _copy_field(value, copy, descriptor.name)
    return copy


def _copy_graph(graph: GraphProto, copy: GraphProto) -> None:
    copy.SetInParent()
    for descriptor, value in graph.ListFields():
        if descriptor.name == "node":
            for node in value:
                _copy_node(node, copy.node.add())
        elif descriptor.name == "initializer":
            for tensor in value:
                _copy_tensor(tensor, copy.initializer.add())
        else:
            _copy_field(value, copy, descriptor.name)


def _copy_node(node: NodeProto, copy: NodeProto) -> None:
    for descriptor, value in node.ListFields():
        if descriptor.name != "attribute":
            _copy_field(value, copy, descriptor.name)
            continue
        for attribute in value:
            made = copy.attribute.add()
            if attribute.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS, AttributeProto.TENSOR):
                made.CopyFrom(attribute)
                continue
            made.name, made.type = attribute.name, attribute.type
            if attribute.type == AttributeProto.GRAPH:
                _copy_graph(attribute.g, made.g)
            if attribute.type == AttributeProto.TENSOR:
                _copy_tensor(attribute.t, made.t)
            for graph in attribute.graphs:
                _copy_graph(graph, made.graphs.add())


def _copy_tensor(tensor: TensorProto, copy: TensorProto) -> None:
    copy.SetInParent()
    size = 1
    for dim in tensor.dims:
        size *= dim
    if size <= _SMALL:
        copy.CopyFrom(tensor)
    else:
        copy.dims.extend(tensor.dims)
        copy.data_type, copy.name = tensor.data_type, tensor.name


def _copy_field(value: Any, copy: Any, name: str) -> None:
    if isinstance(value, (bool, int, float, str, bytes)):
        setattr(copy, name, value)
    else:
        getattr(copy, name).extend(value)
