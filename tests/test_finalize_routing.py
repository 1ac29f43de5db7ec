"""The combine by index and its gradient: every route, dtype, size and mode against per-token loops.

Then what holds between the two and their neighbours: they are adjoint, what is dropped reaches
nothing, and MoeInitRoutingV2 -> MoeFinalizeRoutingV2 is a layer that differentiates. Tests named aNN
are of the kind of mistake in a public bug report, see ``report_tools.py``.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from gradient_tools import check_slopes, runner, slopes
from onnx import TensorProto, helper
from report_tools import each_dtype, poison
from routes import BODY_ROUTES, ROUTES, all_of, dtypes_of, has_route, make_model, run
from test_operators import (
    BEYOND,
    DTYPES,
    EPS,
    SIZES,
    active_rows,
    assert_same,
    assert_within,
    integers,
    rng_of,
)
from test_schema import Values, inferred

import moe_onnx
from moe_onnx.spec import DOMAIN

FORWARD, GRAD = "MoeFinalizeRoutingV2", "MoeFinalizeRoutingV2Grad"
BF16 = np.dtype(ml_dtypes.bfloat16)
ALL_ROUTES = [route for route in ROUTES if has_route(FORWARD, route)]
Call = tuple[list[Any], dict[str, Any]]

sizes = all_of("size", SIZES)
dtypes = dtypes_of(DTYPES)
routes = pytest.mark.parametrize("route", [route for route in ALL_ROUTES if route != "body_plain"])
all_routes = pytest.mark.parametrize("route", ALL_ROUTES)


def normals(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def slots_of(rng: Any, size: str, padded: bool, top_k: int | None = None) -> tuple[Any, Any, tuple[int, ...]]:
    """expert_idx, the row of each slot by token, and the leading sizes of the rows."""
    tokens, experts, given_k, _ = SIZES[size]
    top_k = top_k or given_k
    expert_idx, _, _ = oracles.random_routing(rng, tokens, experts, top_k)
    if not padded:
        return expert_idx, rng.permutation(tokens * top_k).astype(np.int32), (tokens * top_k,)
    capacity = max(1, tokens // 2)
    kwargs = {"expert_capacity": capacity, "expert_num": experts, "drop_pad_mode": 1}
    _, index, _, _ = oracles.init_routing_v2(np.zeros((tokens, 1)), expert_idx, **kwargs)
    return expert_idx, index, (experts, capacity)


# Which optional inputs there are.
KINDS = {
    "all": ("x1", "x2", "bias", "scales", "expert_idx"),
    "scales": ("scales",),
    "x1": ("x1", "scales", "expert_idx"),
    "bias": ("bias", "scales", "expert_idx"),
    "bare": (),
    "bias alone": ("x1", "bias", "expert_idx"),
}


def forward_call(size: str, dtype: str, mode: int, kind: str, draw: Any = integers) -> Call:
    tokens, experts, top_k, hidden = SIZES[size]
    rng, rows_dtype, scales_dtype = rng_of(size + kind), *DTYPES[dtype]
    top_k = top_k if "scales" in KINDS[kind] else 1
    expert_idx, index, leading = slots_of(rng, size, mode % 2 == 1, top_k)
    if mode < 2:
        index = np.ascontiguousarray(index.reshape(tokens, top_k).T).ravel()
    x1, x2 = (draw(rng, (tokens, hidden), rows_dtype) for _ in range(2))
    bias = draw(rng, (experts, hidden), rows_dtype)
    scales = draw(rng, (tokens, top_k), scales_dtype)
    found = {"x1": x1, "x2": x2, "bias": bias, "scales": scales, "expert_idx": expert_idx}
    optional = [value if name in KINDS[kind] else None for name, value in found.items()]
    return [draw(rng, (*leading, hidden), rows_dtype), index, *optional], {"drop_pad_mode": mode}


@dtypes
@routes
@pytest.mark.parametrize("mode", range(4))
@all_of("kind", KINDS)
@sizes
def test_forward(route: str, size: str, dtype: str, mode: int, kind: str) -> None:
    """Integers are exact; any data bit-equal in the order that is documented, a body within the bound."""
    inputs, attributes = forward_call(size, dtype, mode, kind)
    (got,) = run(FORWARD, route, inputs, attributes)
    assert_same(got, oracles.finalize(*inputs, **attributes))
    if kind not in ("all", "scales"):
        return
    inputs, attributes = forward_call(size, dtype, mode, kind, normals)
    (got,) = run(FORWARD, route, inputs, attributes)
    want = oracles.finalize(*inputs, **attributes)
    if route not in BODY_ROUTES:
        assert_same(got, want)
        return
    wide = [v if v is None or v.dtype == np.int32 else np.abs(v).astype(np.float64) for v in inputs]
    terms = SIZES[size][2] + 2
    bound = oracles.finalize(*wide, **attributes)
    assert_within(got, want, terms * EPS.get(got.dtype, 2.0**-23) * bound)


def grad_call(size: str, dtype: str, mode: str, kind: str, draw: Any = integers) -> Call:
    tokens, experts, top_k, hidden = SIZES[size]
    rng, rows_dtype, scales_dtype = rng_of(size + kind), *DTYPES[dtype]
    top_k = 1 if kind == "copy" else top_k
    expert_idx, index, leading = slots_of(rng, size, mode == "drop/pad", top_k)
    attributes = {"drop_pad_mode": int(mode == "drop/pad")}
    if mode.startswith("active"):
        leading = (active_rows(len(index)) if mode == "active" else BEYOND,)
        attributes["active_num"] = leading[0]
    grad = draw(rng, (tokens, hidden), rows_dtype)
    if kind == "copy":
        if mode == "drop/pad":
            attributes |= {"expert_num": leading[0], "expert_capacity": leading[1]}
        return [grad, index], attributes
    expanded = draw(rng, (*leading, hidden), rows_dtype)
    scales = draw(rng, (tokens, top_k), scales_dtype)
    bias = draw(rng, (experts, hidden), rows_dtype)
    rest = [expert_idx, bias] if kind == "bias" else [None, None]
    return [grad, index, expanded, scales, *rest], attributes


GRAD_MODES = ("dropless", "active", "active beyond", "drop/pad")


@dtypes
@routes
@pytest.mark.parametrize("mode", GRAD_MODES)
@all_of("kind", ["scales", "bias", "copy"])
@sizes
def test_gradient(route: str, size: str, dtype: str, mode: str, kind: str) -> None:
    inputs, attributes = grad_call(size, dtype, mode, kind)
    got = run(GRAD, route, inputs, attributes)
    for value, want in zip(got, oracles.finalize_grad(*inputs, **attributes), strict=True):
        assert_same(value, want)
    if kind == "copy":
        return
    # Rows are single products, so bit-equal everywhere; dots are within the contract's bound.
    inputs, attributes = grad_call(size, dtype, mode, kind, normals)
    got = run(GRAD, route, inputs, attributes)
    want = oracles.finalize_grad(*inputs, **attributes)
    assert_same(got[0], want[0])
    absolute = [v if v is None or v.dtype == np.int32 else np.abs(v).astype(np.float64) for v in inputs]
    bound = oracles.finalize_grad(*absolute, **attributes)[1]
    assert bound is not None
    terms = SIZES[size][3] + 1
    assert_within(got[1], want[1], terms * EPS.get(inputs[0].dtype, 2.0**-23) * bound)


@all_routes
@pytest.mark.parametrize("hidden", [511, 512, 700])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dots_of_long_rows(route: str, hidden: int, with_bias: bool) -> None:
    """Bodies make dots of long rows by matrices; the sums are the same."""
    rng = rng_of("long")
    index = np.array([3, -1, 0, 5], np.int32)
    inputs = [integers(rng, (2, hidden), np.float32), index, integers(rng, (2, 3, hidden), np.float32)]
    inputs += [integers(rng, (2, 2), np.float32)]
    if with_bias:
        inputs += [np.array([[1, 9], [0, 1]], np.int32), integers(rng, (2, hidden), np.float32)]
    got = run(GRAD, route, inputs, {"drop_pad_mode": 1})
    for value, want in zip(got, oracles.finalize_grad(*inputs, drop_pad_mode=1), strict=True):
        assert_same(value, want)


# Between the two.


@routes
@pytest.mark.parametrize("mode", [2, 3])
@sizes
def test_the_gradient_is_the_adjoint(route: str, size: str, mode: int) -> None:
    """<forward(x, s), g> = <x, dx> + s b-terms; linear in the scales too. Exact for integers."""
    inputs, attributes = forward_call(size, "fp64", mode, "bias")
    x, index, _, _, bias, scales, expert_idx = inputs
    g = integers(rng_of("g" + size), (len(scales), x.shape[-1]), np.float64)

    def product(a: Any, b: Any) -> float:
        return float((a * b).sum())

    backward = {"drop_pad_mode": mode - 2}
    plain = run(FORWARD, route, [x, index, None, None, None, scales], attributes)[0]
    dx, ds = run(GRAD, route, [g, index, x, scales], backward)
    assert product(plain, g) == product(x, dx) == product(scales, ds)
    biased = run(FORWARD, route, inputs, attributes)[0]
    dx_biased, ds_biased = run(GRAD, route, [g, index, x, scales, expert_idx, bias], backward)
    assert product(biased, g) == product(scales, ds_biased)
    np.testing.assert_array_equal(dx_biased, dx)


@routes
def test_the_active_gradient_is_the_adjoint(route: str) -> None:
    """The forward of the active mode is that of rows that are zero from A on."""
    rng = rng_of("active")
    index, x = rng.permutation(12).astype(np.int32), integers(rng, (12, 3), np.float64)
    scales, g = integers(rng, (6, 2), np.float64), integers(rng, (6, 3), np.float64)
    x[7:] = 0
    out = run(FORWARD, route, [x, index, None, None, None, scales], {"drop_pad_mode": 2})[0]
    dx, ds = run(GRAD, route, [g, index, x[:7], scales], {"active_num": 7})
    assert (out * g).sum() == (x[:7] * dx).sum() == (scales * ds).sum()


@all_routes
def test_columns_are_rows_turned(route: str) -> None:
    """Modes 0 and 2, 1 and 3 are one operator: bit-equal for any data."""
    for kind in ("all", "bias alone"):
        for column in (0, 1):
            inputs, _ = forward_call("odd", "fp32", column, kind, normals)
            top_k = 1 if inputs[5] is None else inputs[5].shape[1]
            turned = [inputs[0], inputs[1].reshape(top_k, -1).T.ravel(), *inputs[2:]]
            a = run(FORWARD, route, inputs, {"drop_pad_mode": column})[0]
            b = run(FORWARD, route, turned, {"drop_pad_mode": column + 2})[0]
            assert a.tobytes() == b.tobytes()


@routes
def test_copies_keep_every_bit(route: str) -> None:
    """Without scales rows are copies: payloads of NaN and the signs of zeros included."""
    for dtype, word in ((np.float32, np.uint32), (np.float16, np.uint16), (BF16, np.uint16)):
        bits = np.random.default_rng(3).integers(0, np.iinfo(word).max, (5, 4), dtype=word)
        bits[0] = np.iinfo(word).max  # NaNs
        grad, index = bits.view(dtype), np.array([3, 0, 4, 1, 2], np.int32)
        got = run(GRAD, route, [grad, index], {"drop_pad_mode": 0})[0]
        np.testing.assert_array_equal(got[index].view(word), bits)


@pytest.mark.parametrize("op", [FORWARD, GRAD])
@all_routes
def test_non_contiguous_inputs_work_and_stay_as_they_are(op: str, route: str) -> None:
    if op == FORWARD:
        inputs, attributes = forward_call("odd", "fp32", 3, "all")
    else:
        inputs, attributes = grad_call("odd", "fp32", "drop/pad", "bias")
    want = run(op, "reference", inputs, attributes)
    strided = [np.repeat(value, 2, axis=0)[::2] for value in inputs]
    fortran = [np.asfortranarray(value) for value in inputs]
    reverse = [np.ascontiguousarray(value[::-1])[::-1] for value in inputs]
    for variant in (strided, fortran, reverse):
        before = [value.copy() for value in variant]
        for got, expected in zip(run(op, route, variant, attributes), want, strict=True):
            np.testing.assert_array_equal(got, expected)
        for value, copy in zip(variant, before, strict=True):
            np.testing.assert_array_equal(value, copy)


@pytest.mark.parametrize("op", [FORWARD, GRAD])
def test_sessions_are_deterministic_at_any_thread_count(op: str) -> None:
    rng = np.random.default_rng(8)
    index, ids = rng.permutation(2048).astype(np.int32), rng.integers(0, 16, (512, 4)).astype(np.int32)
    dy, rows, bias = (normals(rng, (size, 64), np.float32) for size in (512, 2048, 16))
    scales = normals(rng, (512, 4), np.float32)
    inputs = (
        [rows, index, dy, dy, bias, scales, ids] if op == FORWARD else [dy, index, rows, scales, ids, bias]
    )
    model, seen = make_model(op, inputs, {"drop_pad_mode": 0}), set()
    for threads in (1, 2, 4):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = moe_onnx.InferenceSession(model, options, kernels="body")
        names = [arg.name for arg in session.get_inputs()]
        for _ in range(5):
            outputs = session.run(None, dict(zip(names, inputs, strict=True)))
            seen.add(b"".join(out.tobytes() for out in outputs))
    assert len(seen) == 1


# What public bug reports teach.


@each_dtype
@routes
def test_a6_all_slots_dropped(route: str, dtype: Any) -> None:
    """vllm #54747: with every index -1 the result is exactly 0, however memory was left."""
    index, nans = np.full(12, -1, np.int32), np.full((2, 3, 5), np.nan, dtype)
    scales, bias = np.full((6, 2), np.nan, dtype), np.full((2, 5), np.nan, dtype)
    ids = np.full((6, 2), 77, np.int32)
    x1 = integers(np.random.default_rng(0), (6, 5), dtype)
    for _ in range(100 if route == "body" else 3):
        poison(nans, x1, scales)
        (got,) = run(FORWARD, route, [nans, index, x1, None, bias, scales, ids], {"drop_pad_mode": 3})
        assert_same(got, x1)
        grad = np.full((6, 5), np.nan, dtype)
        got = run(GRAD, route, [grad, index, nans, scales, ids, bias], {"drop_pad_mode": 1})
        assert_same(got[0], np.zeros((2, 3, 5), dtype))
        assert_same(got[1], np.zeros((6, 2), dtype))


@each_dtype
@routes
@pytest.mark.parametrize("mode", ["active", "drop/pad"])
def test_a10_what_no_slot_names_is_exactly_zero(mode: str, route: str, dtype: Any) -> None:
    """Primus-Turbo #345: rows and scales without a slot are 0, though NaN and inf stand all round."""
    inputs, attributes = grad_call("odd", "fp32", mode, "bias")
    inputs = [v if v.dtype == np.int32 else v.astype(dtype) for v in inputs]
    grad, index, expanded, scales, ids, _ = inputs
    rows = expanded.reshape(-1, expanded.shape[-1])
    live = (index >= 0) & (index < len(rows))
    unnamed = np.setdiff1d(np.arange(len(rows)), index[live])
    assert not live.all()
    scales.reshape(-1)[~live] = np.resize([np.nan, np.inf, -np.inf], (~live).sum()).astype(dtype)
    ids.reshape(-1)[~live] = -9
    rows[unnamed] = np.nan
    grad[~live.reshape(scales.shape).any(axis=1)] = np.nan
    poison(*inputs)
    got_rows, got_scales = run(GRAD, route, inputs, attributes)
    assert not got_rows.reshape(rows.shape)[unnamed].astype(np.float64).any()
    assert not got_scales.reshape(-1)[~live].astype(np.float64).any()
    for value, want in zip((got_rows, got_scales), oracles.finalize_grad(*inputs, **attributes), strict=True):
        assert_same(value, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@each_dtype
@routes
def test_a12_a_bad_row_reaches_only_the_token_that_names_it(route: str, dtype: Any, bad: float) -> None:
    """vllm-ascend #10579: -1 is not made an index, so a NaN stays with the token of its row."""
    inputs, attributes = forward_call("odd", "fp32", 3, "bias")
    inputs = [None if v is None else v if v.dtype == np.int32 else v.astype(dtype) for v in inputs]
    scales = inputs[5]
    scales[scales == 0] = 1
    index = inputs[1].reshape(scales.shape)
    assert (index == -1).any()
    for row in range(0, int(np.prod(inputs[0].shape[:-1])), 5):
        rows = inputs[0].copy()
        rows.reshape(-1, rows.shape[-1])[row] = bad
        (got,) = run(FORWARD, route, [rows, *inputs[1:]], attributes)
        hit = ~np.isfinite(got.astype(np.float64)).all(axis=1)
        np.testing.assert_array_equal(hit, (index == row).any(axis=1))
        grad_inputs = [got, inputs[1], rows, scales, inputs[6], inputs[4]]
        _, d_scales = run(GRAD, route, [np.ones_like(got), *grad_inputs[1:]], {"drop_pad_mode": 1})
        hit = ~np.isfinite(d_scales.astype(np.float64))
        np.testing.assert_array_equal(hit, index == row)


@each_dtype
@routes
def test_a53_a_dropped_token_is_zero_not_itself(route: str, dtype: Any) -> None:
    """transformers #37123: a token without rows gets 0, and gives its router no gradient."""
    inputs, attributes = forward_call("odd", "fp32", 3, "bias")
    inputs = [None if v is None else v if v.dtype == np.int32 else v.astype(dtype) for v in inputs]
    x, index, _, _, bias, scales, ids = inputs
    index.reshape(scales.shape)[2] = -1
    (got,) = run(FORWARD, route, inputs, attributes)
    assert not got[2].astype(np.float64).any()
    grad = np.ones_like(got)
    _, d_scales = run(GRAD, route, [grad, index, x, scales, ids, bias], {"drop_pad_mode": 1})
    assert not d_scales[2].astype(np.float64).any()
    assert_same(got, oracles.finalize(*inputs, **attributes))


# With the dispatch: a layer.


def layer(dtype: Any, *, sized: bool, mode: int) -> onnx.ModelProto:
    """x -> drop/pad or dropless dispatch -> times a matrix -> combine; loss = sum(out * v)."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"x": [7, 3], "w": [3, 3], "skip": [7, 3], "bias": [4, 3], "scales": [7, 2], "v": [7, 3]}
    infos = []
    for name, shape in {**shapes, "ids": [7, 2]}.items():
        dims: Any = shape if sized or name == "ids" else [f"{name}_{i}" for i in range(2)]
        kind = TensorProto.INT32 if name == "ids" else elem
        infos.append(helper.make_tensor_value_info(name, kind, dims))
    padded = mode % 2
    sizes = {"expert_num": 4, "expert_capacity": 3} if padded else {}
    nodes = [
        helper.make_node(
            "MoeInitRoutingV2",
            ["x", "ids"],
            ["rows", "index"],
            "dispatch",
            domain=DOMAIN,
            drop_pad_mode=padded,
            **sizes,
        ),
        helper.make_node("MatMul", ["rows", "w"], ["experts"], "experts"),
        helper.make_node(
            FORWARD,
            ["experts", "index", "skip", "", "bias", "scales", "ids"],
            ["out"],
            "combine",
            domain=DOMAIN,
            drop_pad_mode=mode,
        ),
        helper.make_node("Mul", ["out", "v"], ["weighed"], "weigh"),
        helper.make_node("ReduceSum", ["weighed"], ["loss"], "total", keepdims=0),
    ]
    outputs = [helper.make_tensor_value_info("loss", elem, [])]
    graph = helper.make_graph(nodes, "layer", infos, outputs)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def layer_feed(draw: Any = normals) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {"x": (7, 3), "w": (3, 3), "skip": (7, 3), "bias": (4, 3), "scales": (7, 2), "v": (7, 3)}
    feed = {name: draw(rng, shape, np.float64) for name, shape in shapes.items()}
    # Expert 0 is chosen by everyone and takes three of seven.
    ids = np.stack([np.zeros(7, np.int32), rng.integers(1, 4, 7).astype(np.int32)], axis=1)
    return {**feed, "ids": ids}


def layer_by_hand(feed: dict[str, Any], capacity: int | None) -> Any:
    taken = [0] * 4
    rows: dict[tuple[int, int], bool] = {}
    for e in range(4):
        for t in range(7):
            for k in range(2):
                if feed["ids"][t, k] == e:
                    rows[t, k] = capacity is None or taken[e] < capacity
                    taken[e] += 1
    out = feed["skip"].copy()
    for (t, k), kept in sorted(rows.items()):
        if kept:
            y = feed["x"][t] @ feed["w"] + feed["bias"][feed["ids"][t, k]]
            out[t] += feed["scales"][t, k] * y
    return out, [slot for slot, kept in rows.items() if not kept]


NAMES = ["x", "w", "skip", "bias", "scales"]


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "free"])
@pytest.mark.parametrize("mode", [2, 3])
def test_dispatch_and_combine_are_a_layer(mode: int, sized: bool) -> None:
    """Forward by a loop over tokens, backward by finite differences in float64."""
    model, feed = layer(np.float64, sized=sized, mode=mode), layer_feed()
    out, dropped = layer_by_hand(feed, 3 if mode == 3 else None)
    assert bool(dropped) == (mode == 3)
    both = moe_onnx.differentiate(model, loss="loss", wrt=NAMES)
    loss, *found = runner(both)(feed)
    assert loss == pytest.approx((out * feed["v"]).sum(), rel=1e-12)
    directions = slopes(model, feed, NAMES, np.random.default_rng(1))
    gradients = dict(zip(NAMES, found, strict=True))
    check_slopes(gradients, directions)
    for t, k in dropped:
        assert gradients["scales"][t, k] == 0


def test_the_layer_is_adjoint_exactly() -> None:
    """In integers: the layer is linear in the rows' weights and biases, so <y, v> is <w, dw> + <b, db>."""
    feed = layer_feed(integers)
    feed["skip"] = np.zeros_like(feed["skip"])
    for mode in (2, 3):
        both = moe_onnx.differentiate(layer(np.float64, sized=True, mode=mode), loss="loss", wrt=NAMES)
        loss, _, dw, _, db, ds = runner(both)(feed)
        assert loss == (feed["w"] * dw).sum() + (feed["bias"] * db).sum() == (feed["scales"] * ds).sum()


def differentiated(inputs: dict[str, Any], wrt: list[str], mode: int, dtypes_of_casts: str = "") -> Any:
    """Gradients of sum(combine) for inputs that are cast to a 16-bit dtype first, if one is given."""
    names = [arg.name for arg in moe_onnx.operators.BY_NAME[FORWARD].inputs]
    infos, nodes, used = [], [], []
    for name in names:
        if name not in inputs:
            used.append("")
            continue
        value = inputs[name]
        elem = helper.np_dtype_to_tensor_dtype(value.dtype)
        infos.append(helper.make_tensor_value_info(name, elem, [None] * value.ndim))
        low = dtypes_of_casts and value.dtype == np.float32 and not name.endswith("scales")
        used.append(f"{name}_low" if low else name)
        if low:
            to = getattr(TensorProto, dtypes_of_casts)
            nodes.append(helper.make_node("Cast", [name], [f"{name}_low"], to=to))
    while not used[-1]:
        used.pop()
    nodes += [
        helper.make_node(FORWARD, used, ["out"], "combine", domain=DOMAIN, drop_pad_mode=mode),
        helper.make_node("Cast", ["out"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["wide"], ["loss"], keepdims=0),
    ]
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "low", infos, [loss])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    both = moe_onnx.differentiate(model, loss="loss", wrt=wrt)
    onnx.checker.check_model(both, full_check=True)
    return both, runner(both)(inputs)[1:]


def test_biases_are_summed_in_float32() -> None:
    """600 slots of one expert: a sum in bfloat16 stops at 256. Scales stay float32 beside bfloat16."""
    tokens = 300
    inputs = {
        "expanded_x": np.ones((2 * tokens, 2), np.float32),
        "expanded_row_idx": np.arange(2 * tokens, dtype=np.int32),
        "bias": np.zeros((2, 2), np.float32),
        "scales": np.ones((tokens, 2), np.float32),
        "expert_idx": np.zeros((tokens, 2), np.int32),
    }
    for mode in (0, 2):
        _, (d_bias, d_scales) = differentiated(inputs, ["bias", "scales"], mode, "BFLOAT16")
        assert d_bias.tolist() == [[600, 600], [0, 0]]
        assert d_scales.dtype == np.float32 and (d_scales == 2).all()


def test_a_dropped_slot_gives_its_bias_nothing() -> None:
    """NaN scales of dropped slots, and experts that there are not: chosen, not multiplied."""
    inputs = {
        "expanded_x": np.ones((2, 2, 2), np.float32),
        "expanded_row_idx": np.array([-1, 3, 0, -1], np.int32),
        "bias": np.ones((2, 2), np.float32),
        "scales": np.array([[np.nan, 2], [3, np.inf]], np.float32),
        "expert_idx": np.array([[0, 1], [0, 1]], np.int32),
    }
    _, (d_rows, d_bias, d_scales) = differentiated(inputs, ["expanded_x", "bias", "scales"], 3)
    assert d_rows.tolist() == [[[3, 3], [0, 0]], [[0, 0], [2, 2]]]
    assert d_bias.tolist() == [[3, 3], [2, 2]]
    assert d_scales.tolist() == [[0, 4], [4, 0]]


def test_rows_are_kept_only_where_the_gradient_wants_them() -> None:
    """Without scales, and with sizes that are known, the backward pass does not hold on to the rows."""

    def rows_input(shape: list[int] | None, mode: int) -> tuple[str, list[int]]:
        info = helper.make_tensor_value_info
        size = 4 if shape is None else int(np.prod(shape[:-1]))
        dims: Any = shape or [None] * (2 + mode % 2)
        graph = helper.make_graph(
            [
                helper.make_node("Identity", ["x"], ["rows"], "make"),
                helper.make_node(FORWARD, ["rows", "i"], ["y"], "combine", domain=DOMAIN, drop_pad_mode=mode),
                helper.make_node("ReduceSum", ["y"], ["loss"], "sum", keepdims=0),
            ],
            "bare",
            [info("x", TensorProto.FLOAT, dims), info("i", TensorProto.INT32, [size])],
            [info("loss", TensorProto.FLOAT, [])],
        )
        imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        both = moe_onnx.differentiate(model, loss="loss", wrt=["x"])
        feed = {"x": np.ones(shape or [2, 2, 3][-2 - mode % 2 :], np.float32)}
        feed["i"] = np.array([1, 0] + [-1] * (size - 2), np.int32) if mode % 2 else np.arange(size)[::-1]
        feed["i"] = feed["i"].astype(np.int32)
        (got,) = runner(both)(feed)[1:]
        flat = np.zeros(got.shape).reshape(-1, got.shape[-1])
        flat[feed["i"][feed["i"] >= 0]] = 1
        np.testing.assert_array_equal(got.reshape(flat.shape), flat)
        (node,) = [node for node in both.graph.node if node.op_type == GRAD]
        values = {attr.name: attr.i for attr in node.attribute}
        assert set(values) == {"drop_pad_mode", "active_num", "expert_num", "expert_capacity"}
        assert len(node.input) == 6 and all(node.input)
        return node.input[2], [values["expert_num"], values["expert_capacity"]]

    name, sizes_given = rows_input([2, 2, 3], 3)
    assert name != "rows" and sizes_given == [2, 2]
    assert rows_input(None, 3) == ("rows", [0, 0])
    name, sizes_given = rows_input([4, 3], 0)
    assert name != "rows" and sizes_given == [0, 0]


# What the schemas infer.

FORWARD_VALUES: Values = {
    "expanded_x": ("bfloat16", [12, 16]),
    "expanded_row_idx": ("int32", [12]),
    "x1": ("bfloat16", [6, 16]),
    "x2": ("bfloat16", [6, 16]),
    "bias": ("bfloat16", [4, 16]),
    "scales": ("float32", [6, 2]),
    "expert_idx": ("int32", [6, 2]),
}
GRAD_VALUES: Values = {
    "grad_y": ("bfloat16", ["T", 16]),
    "expanded_row_idx": ("int32", ["N"]),
    "expanded_x": ("bfloat16", ["N", 16]),
    "scales": ("float32", ["T", 2]),
}


def test_shapes_that_are_inferred() -> None:
    assert inferred(FORWARD, FORWARD_VALUES) == [("BFLOAT16", [6, 16])]
    short = dict(list(FORWARD_VALUES.items())[:2])
    assert inferred(FORWARD, short) == [("BFLOAT16", [12, 16])]
    padded: Values = {**FORWARD_VALUES, "expanded_x": ("bfloat16", [4, "C", 16])}
    assert inferred(FORWARD, padded, drop_pad_mode=3) == [("BFLOAT16", [6, 16])]
    free: Values = {name: (dtype, None) for name, (dtype, _) in FORWARD_VALUES.items()}
    assert inferred(FORWARD, free) == [("BFLOAT16", [None, None])]
    assert inferred(GRAD, GRAD_VALUES) == [("BFLOAT16", ["N", 16]), ("FLOAT", ["T", 2])]
    active: Values = {**GRAD_VALUES, "expanded_x": ("bfloat16", [None, 16])}
    assert inferred(GRAD, active, active_num=5) == [("BFLOAT16", [5, 16]), ("FLOAT", ["T", 2])]
    rows: Values = {**GRAD_VALUES, "expanded_x": ("bfloat16", [4, "C", 16])}
    assert inferred(GRAD, rows, drop_pad_mode=1) == [("BFLOAT16", [4, "C", 16]), ("FLOAT", ["T", 2])]
    bare = {**dict(list(GRAD_VALUES.items())[:2]), "expanded_x": ("bfloat16", [0, 0])}
    bare["scales"] = ("float32", [0, 0])
    sized = {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 3}
    assert inferred(GRAD, bare, **sized) == [("BFLOAT16", [4, 3, 16]), ("FLOAT", [0, 0])]


@pytest.mark.parametrize(
    ("op", "values", "attributes", "match"),
    [
        (FORWARD, FORWARD_VALUES, {"drop_pad_mode": 4}, "got 4"),
        (FORWARD, FORWARD_VALUES, {"drop_pad_mode": 1}, "3-D"),
        (FORWARD, {**FORWARD_VALUES, "scales": ("float16", [6, 2])}, {}, "scales"),
        (FORWARD, {**FORWARD_VALUES, "scales": ("float32", [6, 3])}, {}, "axis K|12 and 3"),
        (FORWARD, {**FORWARD_VALUES, "x2": ("bfloat16", [5, 16])}, {}, "axis T.*6.*5"),
        (FORWARD, {**FORWARD_VALUES, "expert_idx": ("int64", [6, 2])}, {}, "int64"),
        (FORWARD, {k: v for k, v in FORWARD_VALUES.items() if k != "expert_idx"}, {}, "expert_idx"),
        (GRAD, GRAD_VALUES, {"drop_pad_mode": 1}, "3-D"),
        (GRAD, GRAD_VALUES, {"drop_pad_mod": 1}, "drop_pad_mod"),
        (GRAD, dict(list(GRAD_VALUES.items())[:2]), {"drop_pad_mode": 1}, "expert_num"),
        (GRAD, {**GRAD_VALUES, "expanded_x": ("bfloat16", [4, 16])}, {"active_num": 5}, "axis A.*4.*5"),
    ],
)
def test_wrong_models_are_refused(op: str, values: Values, attributes: dict[str, Any], match: str) -> None:
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError), match=match):
        inferred(op, values, **attributes)
