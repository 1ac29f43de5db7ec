"""What onnx can tell of dtypes and shapes, without a copy of the weights."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.shape_inference
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from moe_onnx.adapters.schema import inference_goes_on

_SMALL = 1024  # elements; what inference may want to read: sizes, axes


def infer_types(model: ModelProto) -> tuple[ModelProto, str]:
    """A light copy with all types and shapes that onnx can tell, and what inference stopped at, or ``""``.

    It goes on past a node that an operator of this package refuses: the others have types all the same.
    """
    light = light_copy(model)
    try:
        with inference_goes_on():
            return onnx.shape_inference.infer_shapes(light, data_prop=True), ""
    except Exception as error:  # RuntimeError, TypeError, ValueError and classes of onnx's own
        return light, str(error)


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
            if attribute.type == AttributeProto.GRAPH:
                made.name, made.type = attribute.name, attribute.type
                _copy_graph(attribute.g, made.g)
            elif attribute.type == AttributeProto.TENSOR:
                made.name, made.type = attribute.name, attribute.type
                _copy_tensor(attribute.t, made.t)
            else:
                made.CopyFrom(attribute)


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
