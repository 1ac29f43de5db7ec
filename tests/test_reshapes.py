"""Reshapes that this package writes: onnxruntime takes sizes that do not fit for others in none of them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, numpy_helper
from test_imported import attention, mlp

import moe_onnx
from moe_onnx.operators import ALL

CONFIG = moe_onnx.MoeLMConfig(
    vocab_size=16, hidden_size=8, moe_intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
Made = dict[str, NodeProto | onnx.TensorProto]


def guessed(owner: GraphProto | FunctionProto, outer: Made | None = None) -> Iterator[NodeProto]:
    """Reshapes whose sizes are constants but for one, which is computed.

    onnxruntime 1.32 optimizes that one to -1 if it is of the input's shape (and ``allowzero`` is not set), so
    that what has another number of elements is taken, where an error is meant.
    """
    made: Made = dict(outer or {}) | {tensor.name: tensor for tensor in getattr(owner, "initializer", ())}
    made |= {name: node for node in owner.node for name in node.output}
    for node in owner.node:
        for attr in node.attribute:
            yield from guessed(attr.g, made) if attr.HasField("g") else ()
        shape = made.get(node.input[1]) if node.op_type == "Reshape" else None
        is_strict = any(attr.name == "allowzero" and attr.i for attr in node.attribute)
        if not isinstance(shape, NodeProto) or shape.op_type != "Concat" or is_strict:
            continue
        known = [sizes(made.get(name)) for name in shape.input]
        if known.count(None) == 1 and [-1] not in known:
            yield node


def sizes(made: NodeProto | onnx.TensorProto | None) -> list[int] | None:
    """A constant's value; None where it is computed."""
    if isinstance(made, NodeProto):
        if made.op_type != "Constant":
            return None
        value = onnx.helper.get_attribute_value(made.attribute[0])
        if not isinstance(value, onnx.TensorProto):
            return [value] if isinstance(value, int) else list(value)
        made = value
    return None if made is None else [int(n) for n in numpy_helper.to_array(made).reshape(-1)]


@pytest.mark.parametrize("op", [spec.name for spec in ALL])
def test_bodies_have_none(op: str) -> None:
    assert not list(guessed(moe_onnx.function_body(op, 21)))


@pytest.mark.parametrize("kind", ["built", "native", "imported", "network"])
def test_training_graphs_have_none(kind: str) -> None:
    if kind in ("built", "native"):
        form = "native" if kind == "native" else "body"
        graph = moe_onnx.build_training_graph(CONFIG, assembly="grad+eval+forward", optimize_for=form)
    elif kind == "imported":
        graph = moe_onnx.training_graph_from(attention(), loss="cross-entropy")
    else:
        graph = moe_onnx.training_graph_from(mlp(), loss="mean-squared-error")
    for model in graph.models.values():
        assert not list(guessed(model.graph))


def test_one_is_found() -> None:
    text = """m (float[T, 6] z) => (float[A, B, C] y) <int64[2] tail = {2, 3}> {
      rows = Shape <end = 1> (z)
      shape = Concat <axis = 0> (rows, tail)
      y = Reshape (z, shape)
    }"""
    model: ModelProto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    assert [node.output[0] for node in guessed(model.graph)] == ["y"]
    model.graph.node[2].attribute.append(onnx.helper.make_attribute("allowzero", 1))
    assert not list(guessed(model.graph))
