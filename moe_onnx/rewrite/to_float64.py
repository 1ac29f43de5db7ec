"""``to_float64``: a float32 model lifted to double precision, for finite differences.

In float32 a finite difference of a deep graph says little; lifted, it is right to 1e-7 and better.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from moe_onnx.errors import ModelError
from moe_onnx.spec import DOMAIN

_FLOAT, _DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
# Attributes that name a dtype.
_TYPE_ATTRIBUTES = ("to", "dtype")


def to_float64(model: ModelProto) -> ModelProto:
    """A copy of a model with double precision wherever it had float32.

    Inputs, outputs, constants and casts change their type; float32 constants keep their values.
    Function bodies of ``ascend.moe`` operators serve every float type and stay as they are.

    Raises:
        ModelError: If the model holds 16-bit floats, whose rounding a lifted graph would not have, or
            float32 data outside the model file.
    """
    lifted = ModelProto()
    lifted.CopyFrom(model)
    _lift_graph(lifted.graph)
    for function in lifted.functions:
        if function.domain != DOMAIN:
            _lift_nodes(function.node)
            for value in function.value_info:
                _lift_type(value.type, value.name)
    return lifted


def _lift_graph(graph: GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        _lift_type(value.type, value.name)
    for tensor in graph.initializer:
        _lift_tensor(tensor)
    for sparse in graph.sparse_initializer:
        _lift_tensor(sparse.values)
    _lift_nodes(graph.node)


def _lift_nodes(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        for attr in node.attribute:
            _lift_attribute(node, attr)


def _lift_attribute(node: NodeProto, attr: AttributeProto) -> None:
    if attr.type == AttributeProto.GRAPH:
        _lift_graph(attr.g)
    elif attr.type == AttributeProto.GRAPHS:
        for graph in attr.graphs:
            _lift_graph(graph)
    elif attr.type == AttributeProto.TENSOR:
        _lift_tensor(attr.t)
    elif attr.name in _TYPE_ATTRIBUTES and attr.type == AttributeProto.INT and attr.i == _FLOAT:
        attr.i = _DOUBLE
    elif node.op_type == "Constant" and attr.name in ("value_float", "value_floats"):
        values = attr.f if attr.name == "value_float" else list(attr.floats)
        tensor = numpy_helper.from_array(np.asarray(values, np.float64))
        attr.CopyFrom(helper.make_attribute("value", tensor))


def _lift_tensor(tensor: TensorProto) -> None:
    _refuse_16_bits(tensor.data_type, tensor.name)
    if tensor.data_type != _FLOAT:
        return
    if onnx.external_data_helper.uses_external_data(tensor):
        raise ModelError(
            f"to_float64: tensor '{tensor.name}' has its data in another file. Load the model with its data."
        )
    values = numpy_helper.to_array(tensor).astype(np.float64)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _lift_type(proto: TypeProto, name: str) -> None:
    kind = proto.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        _lift_type(getattr(proto, kind).elem_type, name)
    elif kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(proto, kind)
        _refuse_16_bits(tensor.elem_type, name)
        if tensor.elem_type == _FLOAT:
            tensor.elem_type = _DOUBLE


def _refuse_16_bits(elem_type: int, name: str) -> None:
    if elem_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        raise ModelError(
            f"to_float64: '{name}' is {TensorProto.DataType.Name(elem_type)}; only float32 models can be "
            "lifted."
        )
