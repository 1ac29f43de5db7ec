"""Types and shapes of values, in subgraphs and functions too, while matchers look at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import onnx.shape_inference
import onnx_ir as ir
from onnx import GraphProto, ModelProto, ValueInfoProto

from moe_onnx.adapters.light import light_copy
from moe_onnx.rewrite.nodes import graphs

Types = dict[str, ValueInfoProto | None]
MAIN = ("", "", "")


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
    with suppress(Exception):  # a help: what it cannot tell is not known
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    types: Types = {}
    for graph in graphs(model.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            other = types.get(value.name, value)
            same = other is not None and other.type == value.type
            types[value.name] = value if same and value.type.HasField("tensor_type") else None
    return types


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
