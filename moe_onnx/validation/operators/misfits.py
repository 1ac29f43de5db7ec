"""Sizes that do not go together where onnx's own inference does not look."""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, numpy_helper

from moe_onnx.validation.operators.type_protos import sizes
from moe_onnx.validation.subject import normal_domain


def misfit(node: NodeProto, given: dict[str, TypeProto], constants: dict[str, TensorProto]) -> str:
    """Why the inputs of a Reshape or a Conv do not go together whatever they hold, or ``""``."""
    if normal_domain(node.domain) or len(node.input) < 2:
        return ""
    if node.op_type == "Reshape":
        return _reshape(node, _dims(given, node.input[0]), constants.get(node.input[1]))
    if node.op_type == "Conv":
        return _conv(node, _dims(given, node.input[0]), _dims(given, node.input[1]))
    return ""


def _dims(given: dict[str, TypeProto], name: str) -> list[int | None] | None:
    proto = given.get(name)
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    return [dim if isinstance(dim, int) and dim >= 0 else None for dim in sizes(proto.tensor_type)]


def _integer(node: NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name and not a.ref_attr_name), default)


def _reshape(node: NodeProto, dims: list[int | None] | None, shape: TensorProto | None) -> str:
    known = [dim for dim in dims or () if dim is not None]
    if dims is None or len(known) < len(dims) or shape is None or shape.data_type != TensorProto.INT64:
        return ""
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return ""
    try:
        asked = [int(size) for size in np.asarray(numpy_helper.to_array(shape)).reshape(-1)]
    except (ValueError, TypeError):
        return ""  # bytes that do not fit: another check says so
    if not _integer(node, "allowzero", 0):
        if any(size == 0 and place >= len(known) for place, size in enumerate(asked)):
            return ""  # of which onnx speaks
        asked = [known[place] if size == 0 else size for place, size in enumerate(asked)]
    if any(size < -1 for size in asked) or asked.count(-1) > 1:
        return ""
    have, made = math.prod(known), math.prod(size for size in asked if size != -1)
    fits = have == made if -1 not in asked else made == 0 or have % made == 0
    return "" if fits else f"an input of shape {known} has {have} elements, asked is for {asked}"


def _conv(node: NodeProto, data: list[int | None] | None, weight: list[int | None] | None) -> str:
    group = _integer(node, "group", 1)
    if data is None or weight is None or len(data) < 2 or len(weight) < 2 or group < 1:
        return ""
    if any(attribute.name == "group" and attribute.ref_attr_name for attribute in node.attribute):
        return ""
    channels, taken, made = data[1], weight[1], weight[0]
    if channels is not None and taken is not None and channels != taken * group:
        return f"the input has {channels} channels, the weight takes {taken} in each of {group} groups"
    if made is not None and made % group:
        return f"the weight makes {made} channels, which {group} groups do not divide"
    return ""
