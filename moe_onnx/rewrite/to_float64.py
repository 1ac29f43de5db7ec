"""``to_float64``: a float32 model lifted to double precision, for finite differences.

In float32 a finite difference of a deep graph says little; lifted, it is right to 1e-7 and better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from moe_onnx.errors import ModelError
from moe_onnx.rewrite.nodes import fresh, names_of
from moe_onnx.spec import DOMAIN

_FLOAT, _DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
# Attributes that name a dtype.
_TYPE_ATTRIBUTES = ("to", "dtype")


def to_float64(model: ModelProto) -> ModelProto:
    """A copy of a model with double precision wherever it had float32.

    Inputs, outputs, constants and casts change their type; float32 constants keep their values.
    Function bodies of ``ascend.moe`` operators serve every float type and stay as they are. ``Erf``,
    ``Gelu`` and ``Softplus``, of which onnxruntime has no double kernels, become functions of the model,
    right to 1e-14. Initializers with external data stay float32 on disk, and a Cast makes doubles of them.

    Raises:
        ModelError: If the model holds 16-bit floats, whose rounding a lifted graph would not have, or
            float32 data outside the model file that a Cast cannot follow: of a Constant, or of an input's
            default or an output.
    """
    lifted = ModelProto()
    lifted.CopyFrom(model)
    names = names_of(lifted)
    _lift_graph(lifted.graph, names)
    for function in lifted.functions:
        if function.domain != DOMAIN:
            _lift_nodes(function.node, names)
            for value in function.value_info:
                _lift_type(value.type, value.name)
    _replace_missing(lifted)
    return lifted


def _lift_graph(graph: GraphProto, names: set[str]) -> None:
    fixed = {value.name for value in (*graph.input, *graph.output)}
    outside = [t.name for t in graph.initializer if _is_outside(t) and t.name not in fixed]
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name not in outside:
            _lift_type(value.type, value.name)
    for tensor in graph.initializer:
        if tensor.name not in outside:
            _lift_tensor(tensor)
    for sparse in graph.sparse_initializer:
        _lift_tensor(sparse.values)
    _lift_nodes(graph.node, names)
    read = _read_as_floats(graph.node)
    _cast(graph, {name: fresh(f"{name}/float64", names) for name in outside if name in read})


def _is_outside(tensor: TensorProto) -> bool:
    return tensor.data_type == _FLOAT and onnx.external_data_helper.uses_external_data(tensor)


def _read_as_floats(nodes: Iterable[NodeProto]) -> set[str]:
    """All that nodes read, those of subgraphs too, but for what Casts make doubles of."""
    found: set[str] = set()
    for node in nodes:
        if node.op_type != "Cast" or not any(a.name == "to" and a.i == _DOUBLE for a in node.attribute):
            found.update(node.input)
        for attr in node.attribute:
            for graph in [attr.g] if attr.type == AttributeProto.GRAPH else attr.graphs:
                inside = _read_as_floats(graph.node) | {value.name for value in graph.output}
                found |= inside - _own_names(graph)
    return found


def _cast(graph: GraphProto, renamed: dict[str, str]) -> None:
    """Have nodes read doubles that Casts make of tensors which stay float32."""
    if renamed:
        _rename(graph.node, renamed)
        nodes = [
            helper.make_node("Cast", [name], [new], name=new, to=_DOUBLE) for name, new in renamed.items()
        ]
        nodes += graph.node
        del graph.node[:]
        graph.node.extend(nodes)


def _own_names(graph: GraphProto) -> set[str]:
    named = {value.name for value in (*graph.input, *graph.initializer)}
    return named | {name for node in graph.node for name in node.output}


def _rename(nodes: Iterable[NodeProto], renamed: dict[str, str]) -> None:
    for node in nodes:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
        for attr in node.attribute:
            for graph in [attr.g] if attr.type == AttributeProto.GRAPH else attr.graphs:
                own = _own_names(graph)
                inside = {name: new for name, new in renamed.items() if name not in own}
                _rename(graph.node, inside)
                for value in graph.output:
                    value.name = inside.get(value.name, value.name)


# Attributes that make floats of 32 bits where they are not given.
_DEFAULTS = {
    "ConstantOfShape": ("value", helper.make_tensor("value", _DOUBLE, [1], [0.0])),
    "RandomNormal": ("dtype", _DOUBLE),
    "RandomUniform": ("dtype", _DOUBLE),
    "BlackmanWindow": ("output_datatype", _DOUBLE),
    "HammingWindow": ("output_datatype", _DOUBLE),
    "HannWindow": ("output_datatype", _DOUBLE),
}


def _lift_nodes(nodes: Iterable[NodeProto], names: set[str]) -> None:
    for node in nodes:
        for attr in node.attribute:
            _lift_attribute(node, attr, names)
        if node.domain in ("", "ai.onnx") and node.op_type in _DEFAULTS:
            name, value = _DEFAULTS[node.op_type]
            if not any(attr.name == name for attr in node.attribute):
                node.attribute.append(helper.make_attribute(name, value))


def _lift_attribute(node: NodeProto, attr: AttributeProto, names: set[str]) -> None:
    if attr.type == AttributeProto.GRAPH:
        _lift_graph(attr.g, names)
    elif attr.type == AttributeProto.GRAPHS:
        for graph in attr.graphs:
            _lift_graph(graph, names)
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
    if _is_outside(tensor):
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


# erf(x) = 2 / sqrt(pi) * integral from 0 to 1 of x exp(-(x u)^2) du, by Gauss and Legendre. Beyond 6 it is
# 1 in double precision.
_OWN, _ERF_POINTS = "moe_onnx.float64", 24
_MISSING = ("Erf", "Gelu", "Softplus")


def _replace_missing(model: ModelProto) -> None:
    opset = next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), 0)
    found = _move_missing(model.graph.node)
    for function in model.functions:
        if function.domain != DOMAIN and _move_missing(function.node):
            found = True
            function.opset_import.append(helper.make_opsetid(_OWN, 1))
    if found:
        model.opset_import.append(helper.make_opsetid(_OWN, 1))
        model.functions.extend([_erf(opset), _gelu(opset), _softplus(opset)])
        model.ir_version = max(model.ir_version, 8)  # the first with functions


def _move_missing(nodes: Iterable[NodeProto]) -> bool:
    found = False
    for node in nodes:
        by_tanh = any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)
        if node.domain in ("", "ai.onnx") and node.op_type in _MISSING and not by_tanh:
            node.domain = _OWN
            del node.attribute[:]
            found = True
        for attr in node.attribute:
            for graph in [attr.g] if attr.type == AttributeProto.GRAPH else attr.graphs:
                found = _move_missing(graph.node) or found
    return found


def _gelu(opset: int) -> FunctionProto:
    nodes = _constants(scale=np.float64(math.sqrt(0.5)), half=np.float64(0.5), one=np.float64(1))
    nodes += _steps(("Mul", ["x", "scale"], "scaled"))
    nodes.append(helper.make_node("Erf", ["scaled"], ["erf"], domain=_OWN))
    nodes += _steps(
        ("Add", ["erf", "one"], "raised"), ("Mul", ["x", "half"], "part"), ("Mul", ["part", "raised"], "y")
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(_OWN, 1)]
    return helper.make_function(_OWN, "Gelu", ["x"], ["y"], nodes, imports)


def _softplus(opset: int) -> FunctionProto:
    nodes = _constants(zero=np.float64(0), one=np.float64(1))
    nodes += _steps(
        ("Max", ["x", "zero"], "positive"),
        ("Abs", ["x"], "size"),
        ("Neg", ["size"], "power"),
        ("Exp", ["power"], "small"),
        ("Add", ["small", "one"], "sum"),
        ("Log", ["sum"], "rest"),
        ("Add", ["positive", "rest"], "y"),
    )
    return helper.make_function(_OWN, "Softplus", ["x"], ["y"], nodes, [helper.make_opsetid("", opset)])


def _erf(opset: int) -> FunctionProto:
    points, weights = np.polynomial.legendre.leggauss(_ERF_POINTS)
    nodes = _constants(
        points=-(((points + 1) / 2) ** 2),
        weights=weights / math.sqrt(math.pi),
        low=np.float64(-6),
        high=np.float64(6),
        one=np.array([1]),
    )
    nodes += _steps(
        ("Max", ["x", "low"], "raised"),
        ("Min", ["raised", "high"], "bounded"),
        ("Mul", ["bounded", "bounded"], "square"),
        ("Shape", ["square"], "shape"),
    )
    nodes.append(helper.make_node("Concat", ["shape", "one"], ["wide_shape"], axis=0))
    nodes += _steps(
        ("Reshape", ["square", "wide_shape"], "wide"),
        ("Mul", ["wide", "points"], "power"),
        ("Exp", ["power"], "height"),
        ("MatMul", ["height", "weights"], "mean"),
        ("Mul", ["bounded", "mean"], "y"),
    )
    return helper.make_function(_OWN, "Erf", ["x"], ["y"], nodes, [helper.make_opsetid("", opset)])


def _constants(**values: np.ndarray[Any, Any] | np.float64) -> list[NodeProto]:
    return [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value)))
        for name, value in values.items()
    ]


def _steps(*steps: tuple[str, list[str], str]) -> list[NodeProto]:
    return [helper.make_node(op, inputs, [output]) for op, inputs, output in steps]
