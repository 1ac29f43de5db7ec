"""Models with tensors whose data is not what they say it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np
from broken_models import Mutation, parse, plain_model
from onnx import ModelProto, TensorProto

from moe_onnx.validation.file import tensors

Edit = Callable[[TensorProto], None]
RAW = np.arange(12, dtype=np.float32).tobytes()


def constant_model() -> ModelProto:
    """A Constant node, a sparse initializer and a function with a constant."""
    model = parse(
        """
        holds (float[2] x) => (float[2] y) {
            [two] c = Constant <value = float[2] {1, 2}> ()
            [call] d = local.Shift (x)
            [sum] e = Add (c, d)
            [all] y = Add (e, sparse)
        }
        <domain: "local", opset_import: ["" : 21]>
        Shift (a) => (b) { [one] s = Constant <value = float[1] {1}> () [shift] b = Add (a, s) }
        """,
        imports=', "local" : 1',
    )
    sparse = model.graph.sparse_initializer.add(dims=[2])
    sparse.values.CopyFrom(TensorProto(name="sparse", data_type=1, dims=[1], float_data=[5]))
    sparse.indices.CopyFrom(TensorProto(data_type=7, dims=[1], int64_data=[1]))
    return model


def weight(**fields: object) -> Callable[[ModelProto], None]:
    """Replace the fields of a weight of 4 x 3 floats."""

    def change(model: ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.CopyFrom(TensorProto(**({"name": "weight", "data_type": 1, "dims": [4, 3]} | fields)))

    return change


def _constant(model: ModelProto) -> None:
    model.graph.node[0].attribute[0].t.float_data.append(3)


def _sparse(model: ModelProto) -> None:
    model.graph.sparse_initializer[0].indices.int64_data.append(1)


def _function(model: ModelProto) -> None:
    model.functions[0].node[0].attribute[0].t.ClearField("float_data")


def _nothing(model: ModelProto) -> None:
    model.graph.initializer[0].ClearField("float_data")


def small_limit() -> AbstractContextManager[object]:
    """As if protobuf took no more than 200 bytes."""
    return patch.object(tensors, "PROTOBUF_LIMIT", 200)


def _bias(size: int) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        model.graph.initializer.add(name="more", data_type=1, dims=[size], raw_data=bytes(4 * size))
        node = model.graph.node.add(name="use", op_type="Identity", input=["more"], output=["more.out"])
        model.graph.output.add(name=node.output[0]).type.tensor_type.elem_type = 1

    return change


SIZES: dict[str, Callable[[ModelProto], None]] = {
    "float32 bytes labelled bfloat16": weight(data_type=16, raw_data=RAW),
    "bytes too few": weight(raw_data=RAW[:-4]),
    "bytes too many": weight(raw_data=RAW + RAW),
    "values too few": weight(float_data=[1, 2]),
    "values too many": weight(float_data=[1] * 13),
    "half of a complex number": weight(data_type=14, float_data=[1] * 12),
    "int4 values too few": weight(data_type=22, int32_data=[1] * 5),
    "no data": _nothing,
    "dims of another tensor": weight(dims=[3, 3], raw_data=RAW),
    "dims beyond 64 bits": weight(dims=[2**40, 2**40], raw_data=RAW),
    "strings too few": weight(data_type=8, string_data=[b"a"]),
}

MUTATIONS = [
    *(
        # Other checks may see that the dtype is not what the nodes take.
        Mutation("MO221", name, plain_model, break_it, also=("MO306", "MO321", "MO322"))
        for name, break_it in SIZES.items()
    ),
    Mutation("MO221", "a constant with a value too many", constant_model, _constant),
    Mutation("MO221", "a sparse initializer with an index too many", constant_model, _sparse),
    Mutation("MO221", "a constant in a function without data", constant_model, _function),
    Mutation("MO222", "no dtype", plain_model, weight(data_type=0, raw_data=RAW)),
    Mutation("MO222", "dtype 99", plain_model, weight(data_type=99, raw_data=RAW)),
    Mutation("MO222", "dtype -1", plain_model, weight(data_type=-1, raw_data=RAW)),
    Mutation("MO222", "a negative dim", plain_model, weight(dims=[-4, 3], raw_data=RAW)),
    Mutation("MO223", "floats in int64_data", plain_model, weight(int64_data=[1] * 12)),
    Mutation("MO223", "data twice", plain_model, weight(raw_data=RAW, float_data=[1] * 12)),
    Mutation(
        "MO223", "strings as bytes", plain_model, weight(data_type=8, raw_data=RAW), also=("MO306", "MO321")
    ),
    Mutation("MO224", "more than fits into a file", plain_model, _bias(40), around=small_limit),
    Mutation("MO225", "nearly more than fits into a file", plain_model, _bias(31), around=small_limit),
]
