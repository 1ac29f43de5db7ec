"""16-bit compute: what is rounded and what is not, by hand and on whole graphs; scales of float16."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto
from routes import one_thread

import moe_onnx
from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.graphs import infer, to_model
from moe_onnx.autodiff.reverse import add_gradients
from moe_onnx.build.layers import linear
from moe_onnx.build.precision import TYPES, wide
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.errors import CheckpointError, ConfigError, NonFiniteError, OptionError

DTYPES = ("bfloat16", "float16")
ELEMS = {"bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16}
BOTH = pytest.mark.parametrize("dtype", DTYPES)
LM = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_key_value_heads": 1,
}
SIZES = {**LM, "moe_intermediate_size": 8, "num_hidden_layers": 1, "initializer_range": 0.3}


@cache
def graph_of(dtype: str, assembly: str = "grad+apply", **options: Any) -> TrainingGraph:
    config = moe_onnx.MoeLMConfig(**{**SIZES, "dtype": dtype, **options})
    return moe_onnx.build_training_graph(config, assembly=assembly, optimizer=moe_onnx.AdamW(eps=1e-4))


def model(dtype: str, **options: Any) -> moe_onnx.TrainingSession:
    return moe_onnx.TrainingSession(graph_of(dtype), **{"lr": 1e-2, "sess_options": one_thread(), **options})


def tokens(seed: int = 0) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(0, 13, (2, 9))
    return {"input_ids": ids, "attention_mask": (np.arange(9) < [[9], [5]]).astype(np.int64)}


@cache
def layer_graph(dtype: str) -> TrainingGraph:
    config = moe_onnx.MoeLayerConfig(
        hidden_size=12, num_experts=4, moe_intermediate_size=8, initializer_range=0.4, dtype=dtype
    )
    return moe_onnx.build_training_graph(config, assembly="grad+apply", optimizer=moe_onnx.AdamW(eps=1e-4))


def session(dtype: str, **options: Any) -> moe_onnx.TrainingSession:
    """Of a layer, whose graphs load quickly."""
    options = {"lr": 1e-2, "sess_options": one_thread(), **options}
    return moe_onnx.TrainingSession(layer_graph(dtype), **options)


def batch(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((20, 12), np.float32) for name in ("hidden_states", "target")}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(v, other[k]) for k, v in one.items())


# --- By hand --------------------------------------------------------------------------------------


@BOTH
def test_a_product_by_hand(dtype: str) -> None:
    """y = x W^T with the first integer that a type cannot hold: L + 1 for L = 2^8 or 2^11.

    Operands and results are rounded, sums and the gradient of W are not; that of x is.
    """
    limit = {"bfloat16": 2.0**8, "float16": 2.0**11}[dtype]
    e = Emitter(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="by_hand"))
    x, w = e.input("x", ir.DataType.FLOAT, ["n", 2]), e.input("w", ir.DataType.FLOAT, [2, 2])
    d = e.input("d", ir.DataType.FLOAT, ["n", 2])
    inner = e.op("Add", x, x)  # an activation, unlike an input
    y = wide(e, linear(e, inner, w, half=TYPES[dtype]))
    loss = e.op("ReduceSum", e.op("Mul", y, d), keepdims=0)
    model = ir.Model(e.graph, ir_version=10)
    infer(model)
    gradients = add_gradients(e, loss, [inner, w])
    for value, name in zip((y, *gradients), ("y", "dx", "dw"), strict=True):
        e.output(value, name, ir.DataType.FLOAT, None)
    run = moe_onnx.InferenceSession(to_model(model)).run
    x_, w_ = np.array([[limit, 1], [1, 0]]) / 2, np.array([[1, 1], [1 + 1 / limit, 3]])
    d_ = np.array([[1, 0], [1, 0.5 * limit + 0.5]])  # the last is rounded to 0.5 limit, to even
    names = ["y", "dx", "dw"]
    y_, dx, dw = run(
        names, {"x": x_.astype(np.float32), "w": w_.astype(np.float32), "d": d_.astype(np.float32)}
    )
    # The next numbers after limit are two away; of a tie the even one wins. 1 + 1 / limit is 1.
    np.testing.assert_array_equal(y_, [[limit, limit + 4], [1, 1]])
    np.testing.assert_array_equal(dx, [[1, 1], [0.5 * limit + 1, 1.5 * limit]])  # 1.5 limit + 1, rounded
    # d^T x: the sum limit + 1 stays what it is, in a float32 gradient.
    np.testing.assert_array_equal(dw, [[limit + 1, 1], [0.5 * limit, 0]])


# --- Of whole graphs ------------------------------------------------------------------------------

MOVES = ("Reshape", "Transpose", "Split", "Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Identity")


@BOTH
@pytest.mark.parametrize("unroll", [16, 0])
def test_products_are_of_16_bit_values(dtype: str, unroll: int) -> None:
    """By inferred types: each product's operands were 16-bit, and all read of its result is, too."""
    model = graph_of(dtype, assembly="eval", unroll_experts=unroll).model
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, data_prop=False).graph
    elem = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    made = {name: node for node in graph.node for name in node.output}
    half, found = ELEMS[dtype], 0

    def was_half(name: str) -> bool:
        """A float32 value that holds 16-bit numbers: they were only moved since the Cast."""
        if elem.get(name) == half:
            return True
        node = made.get(name)
        if node is None or node.op_type not in ("Cast", *MOVES):
            return False
        return was_half(node.input[0]) if node.op_type != "Concat" else all(map(was_half, node.input))

    def becomes_half(name: str) -> bool:
        readers = [node for node in graph.node if name in node.input]
        moved = [out for node in readers if node.op_type in MOVES for out in node.output]
        rest = [node for node in readers if node.op_type not in MOVES]
        return all(elem[node.output[0]] == half for node in rest) and all(map(becomes_half, moved))

    for node in graph.node:
        if node.op_type in ("Gemm", "MatMul") and "/router/" not in node.name:
            assert all(map(was_half, node.input)) and becomes_half(node.output[0]), node.name
            found += 1
        elif node.op_type in ("Gemm", "TopK"):  # experts are chosen in float32, of values never rounded
            assert not any(map(was_half, node.input)), node.name
        elif node.domain == "ascend.moe":
            assert elem[node.input[0]] == half, node.name
            found += 1
        elif node.op_type in ("Softmax", "LogSoftmax", "ReduceSumSquare", "Sigmoid", "Add", "Mul"):
            assert all(elem.get(name) != half for name in node.input), node.name
    assert found == 3 + 1 + 2 + 1 + 2 + (
        8 if unroll else 2
    )  # qkv, o, scores and mixing, logits, moving, experts


@BOTH
def test_rounding_takes_place_and_is_of_the_size_of_the_dtype(dtype: str) -> None:
    """Loss and gradients differ from float32's by some epsilons, not by none and not by many."""
    eps = float(ml_dtypes.finfo(dtype).eps)
    one, other = model(dtype), model("float32")
    got, want = one.step(tokens()), other.step(tokens())
    assert 0 < abs(got["loss"] - want["loss"]) < eps * want["loss"]
    np.testing.assert_array_equal(got["expert_load"], want["expert_load"])
    gaps = []
    for name, cell in one._state.shared.items():
        if name.endswith(".grad"):
            reference = other._state.shared[name].array
            gaps.append(np.abs(cell.array - reference).max() / np.abs(reference).max())
            assert cell.array.dtype == np.float32
    assert eps / 16 < np.median(gaps) < max(gaps) < 16 * eps, gaps


@BOTH
def test_optimisation_drops_no_rounding(dtype: str) -> None:
    """onnxruntime's optimisers know of pairs of Casts: those that round have to stay."""
    losses = []
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = one_thread()
        options.graph_optimization_level = level
        losses.append(session(dtype, sess_options=options, kernels="body").step(batch())["loss"])
    apart = abs(session("float32").step(batch())["loss"] - losses[1])
    assert abs(losses[0] - losses[1]) < 0.1 * apart > 0


@BOTH
def test_training_by_every_route(dtype: str) -> None:
    routes = ["body", "python", *(["native"] if not moe_onnx.kernels.native.unavailable() else [])]
    losses = []
    for route in routes:
        train = session(dtype, kernels=route)
        losses.append([train.step(batch())["loss"] for _ in range(40 if route == routes[-1] else 2)])
    assert all(found[0] == losses[0][0] for found in losses)  # rows are moved and summed up to the same bits
    assert all(found[1] == pytest.approx(losses[0][1], abs=1e-3) for found in losses)
    assert losses[-1][-1] < 0.8 * losses[-1][0] and np.isfinite(losses[-1]).all()
    assert {value.dtype for value in train.parameters().values()} == {np.dtype(np.float32)}


def test_a_checkpoint_of_one_dtype_goes_on_in_another(tmp_path: Path) -> None:
    first = session("float32")
    first.step(batch())
    first.save_checkpoint(tmp_path)
    for dtype in DTYPES:
        train = session(dtype, seed=3)
        train.load_checkpoint(tmp_path)
        assert train.global_step == 1 and same(train.parameters(), first.parameters())
        train.step(batch())
    train.save_checkpoint(tmp_path)
    first.load_checkpoint(tmp_path)  # of float16: what float32 has no use for is left out
    assert same(first.parameters(), train.parameters())


def test_dtypes_that_are_none() -> None:
    with pytest.raises(
        ConfigError, match="'dtype' must be one of 'float32', 'bfloat16', 'float16', got 'half'"
    ):
        moe_onnx.MoeLMConfig(dtype="half")
    assert moe_onnx.MoeLayerConfig.from_dict({"hidden_size": 8}).dtype == "float32"  # of older manifests


# --- The loss scale of float16 --------------------------------------------------------------------


def test_the_scale_changes_nothing_but_what_float16_can_hold() -> None:
    """Powers of 2 cancel but for gradients below 2^-24, which are lost at a small scale."""
    found = {}
    for scale in (1.0, 2.0**8, 2.0**14):
        train = session("float16", loss_scale=moe_onnx.LossScale(init_scale=scale))
        assert train.step(batch())["loss_scale"] == scale
        found[scale] = {n: c.array.copy() for n, c in train._state.shared.items() if n.endswith(".grad")}
    for name, value in found[2.0**14].items():
        largest = np.abs(value).max()
        assert np.abs(found[2.0**8][name] - value).max() <= 2e-3 * largest, name
    lost = [
        sum(np.abs(found[scale][name] - value).sum() for name, value in found[2.0**14].items())
        for scale in (1.0, 2.0**8)
    ]
    assert lost[0] > 10 * lost[1]


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    options = moe_onnx.LossScale(init_scale=2.0**27, backoff_factor=0.25, growth_interval=3)
    train = session("float16", loss_scale=options)
    before, rows = train.parameters(), []
    while train.global_step < 7:
        rows.append(train.step(batch(len(rows))))
        if train.global_step == 0:
            assert same(train.parameters(), before)
    overflows = [row["overflow"] for row in rows]
    assert overflows[0] and not overflows[-1] and np.isfinite(rows[0]["loss"])
    assert [row["skipped"] for row in rows] == overflows
    assert [row["overflows"] for row in rows] == np.cumsum(overflows).tolist()
    scale, held = 2.0**27, 0
    for row in rows:
        assert row["loss_scale"] == scale
        held = 0 if row["overflow"] else held + 1
        scale *= 0.25 if row["overflow"] else 2.0 if held == 3 else 1.0
        held %= 3
    assert train.state_dict()["loss_scale"].tolist() == [scale, held, sum(overflows)]


def test_a_scale_that_gets_too_small_is_an_error() -> None:
    options = moe_onnx.LossScale(init_scale=2.0**30, min_scale=2.0**29)
    train = session("float16", loss_scale=options, non_finite="skip")
    assert train.step(batch())["overflow"] is True
    before = train.state_dict()
    with pytest.raises(NonFiniteError, match=r"Update 1: the gradient norm is .* loss scale of 5.36871e\+08"):
        train.step(batch())
    assert same(train.state_dict(), before)


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    train = session("float16")
    state = train.state_dict()
    state["experts.down_proj"][0, 0] = 1e6  # infinite in float16
    train.load_state_dict(state)
    with pytest.raises(NonFiniteError, match="Update 1: the loss is (nan|inf)"):
        train.step(batch())
    assert train.state_dict()["loss_scale"].tolist() == [2.0**16, 0, 0]


def test_overflow_in_a_micro_batch() -> None:
    train = session("float16", loss_scale=moe_onnx.LossScale(init_scale=2.0**27))
    before = train.parameters()
    metrics = train.step([batch(), batch(1)])
    assert metrics["overflow"] and metrics["overflows"] == 1  # the second has not run
    assert same(train.parameters(), before)
    while train.step([batch(), batch(1)])["overflow"]:
        pass
    assert train.global_step == 1


def test_resumed_float16_is_bit_equal(tmp_path: Path) -> None:
    """With the scale, how long it has held, and what was skipped."""
    ids = np.random.default_rng(0).integers(0, 13, 500)

    def start(seed: int = 0) -> tuple[moe_onnx.TrainingSession, moe_onnx.TokenDataset]:
        scale = moe_onnx.LossScale(init_scale=2.0**24, growth_interval=3)
        data = moe_onnx.TokenDataset(ids, batch_size=2, sequence_length=9, vocab_size=13)
        return model("float16", seed=seed, loss_scale=scale), data

    whole, data = start()
    history = moe_onnx.train(whole, data, 8)
    assert history[-1]["overflows"] > 1 and len(history) == 8 + history[-1]["overflows"]
    first, data = start()
    found = moe_onnx.train(first, data, 4, checkpoint=tmp_path)
    again, data = start(seed=5)
    data.load_state_dict(again.load_checkpoint(tmp_path)["data"])
    assert same(again.state_dict(), first.state_dict())
    found += moe_onnx.train(again, data, 8)
    keys = ("loss", "loss_scale", "overflows", "step")
    assert [[m[k] for k in keys] for m in found] == [[m[k] for k in keys] for m in history]
    assert same(again.state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_factor": 1.0}, r"'growth_factor' must be a finite number in \(1"),
        ({"backoff_factor": 1.0}, r"'backoff_factor' must be .* in \(0, 1\)"),
        ({"growth_interval": 0}, "'growth_interval' must be an integer >= 1"),
        ({"init_scale": 1e-9}, "'init_scale' must be at least min_scale"),
    ],
)
def test_scales_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        moe_onnx.LossScale(**options)


def test_states_that_are_none() -> None:
    with pytest.raises(OptionError, match="loss_scale is for graphs that compute in float16.*in bfloat16"):
        session("bfloat16", loss_scale=moe_onnx.LossScale())
    train = session("float16")
    for bad in ([0.0, 0, 0], [1.0, -1, 0], [1.0, 0.5, 0], [np.nan, 0, 0], [1.0]):
        with pytest.raises(CheckpointError, match="'loss_scale' must be a positive scale and two counts"):
            train.load_state_dict({**train.state_dict(), "loss_scale": np.array(bad)})


@BOTH
@pytest.mark.parametrize("tokens_of_batch", [0, 1])
def test_hardly_any_tokens(dtype: str, tokens_of_batch: int) -> None:
    """Experts without rows, and no rows at all: gradients are exact zeros, the loss is a number."""
    graph = layer_graph(dtype)
    shape = (tokens_of_batch, 12)
    feed: dict[str, Any] = {name: np.ones(shape, np.float32) for name in ("hidden_states", "target")}
    feed |= graph.init_parameters(0)
    if dtype == "float16":
        feed["loss_scale"] = np.array(1024, np.float32)
    run = moe_onnx.InferenceSession(graph.models["grad"], one_thread(), kernels="body").run
    names = ["loss", "expert_load", "experts.gate_up_proj.grad", "experts.down_proj.grad"]
    loss, load, *grads = run(names, feed)
    assert np.isfinite(loss) and load.sum() == 2 * tokens_of_batch
    for grad in grads:
        assert np.isfinite(grad).all() and not grad[load[0] == 0].any()
        assert grad[load[0] > 0].any() == bool(tokens_of_batch)
