"""MoeAdamW: one update, by every route the bits of a scalar loop, also where outputs share inputs' memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from routes import NATIVE, ROUTES, all_of, has_route, make_model, run

import moe_onnx
from moe_onnx.spec import DOMAIN

OP = "MoeAdamW"
NAMES = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "factors")
# Of the third step with clipping; as a graph has them.
FACTORS = (0.9, 0.1 * 0.37, 0.999, 0.001 * 0.37**2, 1.3e-3, 5.5e-10, 1 - 1e-3 * 0.01)
SHAPES = [(), (0,), (1,), (5, 0), (17,), (64,), (3, 5), (2, 3, 4, 5), (1, 1031), (2051,)]
routes = pytest.mark.parametrize("route", [route for route in ROUTES if has_route(OP, route)])


def inputs_of(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[Any]:
    """As in training, with a few numbers that are none, very large or very small."""
    rng = np.random.default_rng([seed, *shape])
    tensors = [np.asarray(rng.standard_normal(shape) * scale, dtype) for scale in (1.0, 0.1, 0.01, 0.01)]
    tensors[3] = np.asarray(tensors[3] ** 2)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        if flat.size > 20:
            flat[rng.integers(flat.size, size=6)] = [np.nan, np.inf, -np.inf, 0, 1e-41, 3e38]
    return [*tensors, np.array(FACTORS, dtype)]


def assert_bits(got: Any, want: Any) -> None:
    """The same bits; which NaN it is does not matter."""
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        differ = one.reshape(-1).view(f"u{one.itemsize}") != other.reshape(-1).view(f"u{one.itemsize}")
        assert not (differ & ~np.isnan(other.reshape(-1))).any()
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))


@routes
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@all_of("shape", SHAPES)
def test_bits_are_those_of_a_scalar_loop(route: str, dtype: Any, shape: tuple[int, ...]) -> None:
    inputs = inputs_of(shape, dtype)
    assert_bits(run(OP, route, inputs, {}), oracles.adam_w(*inputs))


@given(st.integers(0, 2**31), st.booleans())
def test_any_bits(seed: int, in_double: bool) -> None:
    """Patterns of bits at random: every exponent, infinities, NaNs, subnormal numbers; factors too."""
    rng = np.random.default_rng(seed)
    words, dtype = (np.uint64, np.float64) if in_double else (np.uint32, np.float32)
    tensors = [rng.integers(0, np.iinfo(words).max, 99, words, True).view(dtype) for _ in range(4)]
    factors = rng.integers(0, np.iinfo(words).max, 7, words, True).view(dtype)
    want = oracles.adam_w(*tensors, factors)
    for route in ("reference", *NATIVE):
        assert_bits(run(OP, route, [*tensors, factors], {}), want)


def test_the_oracle_sees_a_fused_product() -> None:
    """And any other order of roundings: a few of a thousand elements differ in one bit."""
    p, g, m, v, by = inputs_of((1000,))
    beta1, weight1, *_ = by.astype(np.float64)
    fused = (m.astype(np.float64) * beta1 + g.astype(np.float64) * weight1).astype(np.float32)
    with pytest.raises(AssertionError):
        assert_bits([fused], oracles.adam_w(p, g, m, v, by)[1:2])


def in_place(session: Any, inputs: list[Any]) -> list[Any]:
    """The outputs, each bound to the memory of the input of its name."""
    values = [ort.OrtValue.ortvalue_from_numpy(value) for value in inputs]
    binding = session.io_binding()
    for name, value in zip(NAMES, values, strict=True):
        binding.bind_ortvalue_input(name, value)
    for at in (0, 2, 3):
        binding.bind_ortvalue_output(f"{NAMES[at]}_updated", values[at])
    ort.InferenceSession.run_with_iobinding(session, binding)
    assert values[1].numpy().tobytes() == inputs[1].tobytes()
    return [values[at].numpy().copy() for at in (0, 2, 3)]


@pytest.mark.parametrize("route", ["body", *NATIVE])
@all_of("threads", [1, 2, 3])
def test_outputs_may_share_the_memory_of_inputs(route: str, threads: int) -> None:
    """As a training session binds them, also where threads share the work: no element is read after it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    for shape in ((3, 5), (37, 1031), (300_007,)):
        inputs = inputs_of(shape)
        want = moe_onnx.moe_adam_w(*inputs)
        session = moe_onnx.InferenceSession(make_model(OP, inputs, {}), options, kernels=route)
        for _ in range(2):
            assert_bits(in_place(session, [value.copy() for value in inputs]), want)


@pytest.mark.parametrize("route", ["body", *NATIVE])
def test_outputs_may_be_left_out(route: str) -> None:
    inputs = inputs_of((7, 9))
    model = make_model(OP, inputs, {})
    for at in (1, 2):
        model.graph.node[0].output[at] = ""
    del model.graph.output[1:]
    (got,) = moe_onnx.InferenceSession(model, kernels=route).run(None, dict(zip(NAMES, inputs, strict=True)))
    assert_bits([got], oracles.adam_w(*inputs)[:1])


@pytest.mark.parametrize("route", ["body", "python", *NATIVE])
def test_a_rank_that_nobody_knows(route: str) -> None:
    """A shape may come out of a computation: one node takes all of them."""
    inputs = inputs_of((3, 5))
    names = [f"{name}_in" for name in NAMES[:-1]]
    reshapes = [helper.make_node("Reshape", [a, "shape"], [b], b) for a, b in zip(names, NAMES, strict=False)]
    node = helper.make_node(OP, NAMES, ["p", "m", "v"], "the_node", domain=DOMAIN)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [*reshapes, node],
        "graph",
        [
            *(value(name, TensorProto.FLOAT, ["n"]) for name in names),
            value("factors", TensorProto.FLOAT, [7]),
            value("shape", TensorProto.INT64, ["rank"]),
        ],
        [value(name, TensorProto.FLOAT, None) for name in "pmv"],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = moe_onnx.InferenceSession(model, kernels=route)
    for shape in ((15,), (3, 5), (5, 1, 3)):
        feed = {name: array.reshape(-1) for name, array in zip(names, inputs, strict=False)}
        got = session.run(None, {**feed, "factors": inputs[-1], "shape": np.array(shape, np.int64)})
        assert_bits(got, [array.reshape(shape) for array in oracles.adam_w(*inputs)])


def test_it_has_no_gradient() -> None:
    """An update ends training's graph; who differentiates through one is told at which node."""
    inputs = inputs_of((3,))
    model = make_model(OP, inputs, {})
    for value in model.graph.output:
        value.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, [3]))
    model.graph.node.append(
        helper.make_node("ReduceSum", ["parameter_updated"], ["loss"], "loss", keepdims=0)
    )
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    onnx.checker.check_model(model)
    with pytest.raises(moe_onnx.GradientError, match="the_node.*MoeAdamW|MoeAdamW.*the_node"):
        moe_onnx.differentiate(model, loss="loss", wrt=["parameter"])
