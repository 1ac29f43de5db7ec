"""What must hold for any routing: adjoints, gradients, determinism, and what never leaks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from routes import KERNELS, NATIVE, ROUTES, has_route, make_model, run

import moe_onnx
from moe_onnx.kernels import _blocks

INIT, INIT_GRAD = "MoeInitRoutingV2", "MoeInitRoutingV2Grad"
PERMUTE, PERMUTE_GRAD = "MoeTokenPermuteWithRoutingMap", "MoeTokenPermuteWithRoutingMapGrad"
UN, UN_GRAD = "MoeTokenUnpermuteWithRoutingMap", "MoeTokenUnpermuteWithRoutingMapGrad"


@st.composite
def routings(draw: Any) -> dict[str, Any]:
    """A routing with integer data: tokens, experts, indices, and gradients that are exact."""
    tokens = draw(st.integers(0, 6))
    experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, experts))
    hidden = draw(st.integers(0, 4))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    expert_idx, routing_map, indices = oracles.random_routing(rng, tokens, experts, top_k)
    return {
        "tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "rng": rng,
        "expert_idx": expert_idx, "map": routing_map, "indices": indices,
    }  # fmt: skip


def ints(rng: np.random.Generator, *shape: int) -> Any:
    return rng.integers(-8, 9, shape).astype(np.float32)


def inner(a: Any, b: Any) -> float:
    return float((a.astype(np.float64) * b.astype(np.float64)).sum())


@given(routings(), st.integers(0, 2))
def test_init_routing_grad_is_the_adjoint_of_the_dispatch(r: dict[str, Any], mode: int) -> None:
    """<dispatch(x), g> = <x, grad(g)>, exactly, in every mode."""
    rng, tokens = r["rng"], r["tokens"]
    x = ints(rng, tokens, r["hidden"])
    forward: dict[str, Any] = {}
    backward: dict[str, Any] = {"top_k": r["top_k"]}
    if mode == 1:
        forward = {"active_num": int(rng.integers(1, tokens * r["top_k"] + 2))}
        backward["active_num"] = min(forward["active_num"], tokens * r["top_k"])
    elif mode == 2:
        if not tokens:
            return
        capacity = int(rng.integers(1, tokens + 1))
        forward = {"drop_pad_mode": 1, "expert_num": r["experts"], "expert_capacity": capacity}
        backward["drop_pad_mode"] = 1
    rows, index, _, _ = moe_onnx.moe_init_routing_v2(x, r["expert_idx"], **forward)
    g = ints(rng, *rows.shape)
    assert inner(rows, g) == inner(x, moe_onnx.moe_init_routing_v2_grad(g, index, **backward))


@given(routings(), st.booleans(), st.booleans())
def test_unpermute_grad_is_the_adjoint_of_the_combine(
    r: dict[str, Any], padded: bool, with_probs: bool
) -> None:
    """Linear in rows and in probs, so <combine(P), g> is both <P, G> and <probs, Q>."""
    rng, tokens = r["rng"], r["tokens"]
    indices = r["indices"]
    if padded:
        capacity = int(rng.integers(0, tokens + 1))
        indices, _, _ = oracles.padded_slots(r["map"], capacity)
    rows = ints(rng, len(indices), r["hidden"])
    probs = ints(rng, tokens, r["experts"]) if with_probs else None
    out, out_index, token, _ = moe_onnx.moe_token_unpermute_with_routing_map(
        rows, indices, r["map"], probs, drop_and_pad=padded
    )
    g = ints(rng, *out.shape)
    d_rows, d_probs = moe_onnx.moe_token_unpermute_with_routing_map_grad(
        g, out_index, token, r["map"], rows, probs, drop_and_pad=padded
    )
    assert inner(out, g) == inner(rows, d_rows)
    if probs is not None:
        assert inner(out, g) == inner(probs, d_probs)


@pytest.mark.parametrize("padded", [False, True])
def test_unpermute_grad_equals_finite_differences(padded: bool) -> None:
    """In float64, in random directions of rows and probs."""
    rng = np.random.default_rng(5)
    _, routing_map, indices = oracles.random_routing(rng, 8, 5, 2)
    if padded:
        indices, _, _ = oracles.padded_slots(routing_map, 3)
    rows, probs = rng.standard_normal((len(indices), 4)), rng.random((8, 5)) + 0.1
    g = rng.standard_normal((8, 4))

    def loss(rows: Any, probs: Any) -> float:
        out = moe_onnx.moe_token_unpermute_with_routing_map(
            rows, indices, routing_map, probs, drop_and_pad=padded
        )
        return float((np.tanh(out[0]) * g).sum())

    out, index, token, _ = moe_onnx.moe_token_unpermute_with_routing_map(
        rows, indices, routing_map, probs, drop_and_pad=padded
    )
    d_rows, d_probs = moe_onnx.moe_token_unpermute_with_routing_map_grad(
        g * (1 - np.tanh(out) ** 2), index, token, routing_map, rows, probs, drop_and_pad=padded
    )
    v, w = rng.standard_normal(rows.shape), rng.standard_normal(probs.shape)
    eps = 1e-6
    numeric = (loss(rows + eps * v, probs + eps * w) - loss(rows - eps * v, probs - eps * w)) / (2 * eps)
    np.testing.assert_allclose(inner(d_rows, v) + inner(d_probs, w), numeric, rtol=1e-8)


def test_init_routing_grad_equals_finite_differences() -> None:
    rng = np.random.default_rng(6)
    expert_idx, _, _ = oracles.random_routing(rng, 8, 5, 3)
    x, v = rng.standard_normal((2, 8, 4))
    rows, index, _, _ = moe_onnx.moe_init_routing_v2(x, expert_idx)
    g = rng.standard_normal(rows.shape)

    def loss(x: Any) -> float:
        return float((np.tanh(moe_onnx.moe_init_routing_v2(x, expert_idx)[0]) * g).sum())

    grad = moe_onnx.moe_init_routing_v2_grad(g * (1 - np.tanh(rows) ** 2), index, top_k=3)
    numeric = (loss(x + 1e-6 * v) - loss(x - 1e-6 * v)) / 2e-6
    np.testing.assert_allclose(inner(grad, v), numeric, rtol=1e-8)


@given(
    hnp.arrays(np.int32, st.integers(0, 12), elements=st.integers(-2, 14)),
    st.integers(1, 3),
    st.sampled_from([{}, {"active_num": 4}, {"drop_pad_mode": 1}]),
)
def test_any_index_gives_the_oracle_or_the_right_error(
    index: Any, top_k: int, attributes: dict[str, int]
) -> None:
    """Nothing out of range is read, nothing twice is taken: the rule said once more, by a loop."""
    padded = "drop_pad_mode" in attributes
    rows = 12 if padded else attributes.get("active_num", len(index))
    shape = (3, 4, 2) if padded else (rows, 2)
    grad = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    low, high = (-1, 12) if padded else (0, len(index))
    bad = None
    for at, value in enumerate(index.tolist()):
        if not low <= value < high:
            bad = at
            break
    if bad is None:
        for at, value in enumerate(index.tolist()):
            if value >= 0 and value in index[:at]:
                bad = at
                break
    call = {"top_k": top_k, **attributes}
    for function in (moe_onnx.moe_init_routing_v2_grad, KERNELS[INIT_GRAD]):
        if len(index) % top_k:
            with pytest.raises(moe_onnx.ShapeError):
                function(grad, index, **call)
        elif bad is not None:
            with pytest.raises(moe_onnx.IndexValueError) as caught:
                function(grad, index, **call)
            assert (caught.value.position, caught.value.value) == ((bad,), index[bad])
        else:
            want = oracles.init_routing_v2_grad(grad, index, **call)
            np.testing.assert_array_equal(function(grad, index, **call), want)


@pytest.mark.parametrize("route", [r for r in ROUTES if r != "evaluator"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_rows_that_nobody_names_never_leak(route: str, poison: float) -> None:
    grad = np.full((3, 4, 5), poison, np.float32)
    grad[0, 0], grad[2, 3] = 1, 2
    index = np.array([0, -1, -1, 11, -1, -1], np.int32)
    got = run(INIT_GRAD, route, [grad, index], {"top_k": 2, "drop_pad_mode": 1})[0]
    np.testing.assert_array_equal(got, np.repeat([[1], [2], [0]], 5, axis=1))
    # The combine: tokens without slots, rows without slots, probabilities of cells not selected.
    dy = np.array([[1, 2], [poison, poison], [3, 4]], np.float32)
    rows = np.full((6, 2), poison, np.float32)
    rows[1] = 5
    probs = np.full((3, 2), poison, np.float32)
    probs[0, 1] = 7
    routing_map = np.array([[False, True], [False, False], [False, False]])
    index = np.array([1, -1, -1, -1, 0, -1], np.int32)
    got = run(UN_GRAD, route, [dy, index, index, routing_map, rows, probs], {"drop_and_pad": 0})
    np.testing.assert_array_equal(got[0], [[0, 0], [7, 14], *[[0, 0]] * 4])
    np.testing.assert_array_equal(got[1], [[0, 15], [0, 0], [0, 0]])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize(("block_bytes", "thread_bytes"), [(64, 0), (1, 10**9), (10**9, 0)])
def test_bits_do_not_depend_on_blocks_or_threads(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, block_bytes: int, thread_bytes: int
) -> None:
    rng = np.random.default_rng(7)
    grad = rng.standard_normal((3 * 257, 33)).astype(dtype)
    index = rng.permutation(len(grad)).astype(np.int32)
    _, routing_map, indices = oracles.random_routing(rng, 257, 9, 3)
    dy, rows = rng.standard_normal((257, 33)).astype(dtype), rng.standard_normal((771, 33)).astype(dtype)
    probs = rng.random((257, 9)).astype(dtype)
    results = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(_blocks, "BLOCK_BYTES", block_bytes)
            monkeypatch.setattr(_blocks, "THREAD_BYTES", thread_bytes)
        results.append(
            [
                KERNELS[INIT_GRAD](grad, index, top_k=3),
                KERNELS[INIT_GRAD](grad[:500], index, top_k=3, active_num=500),
                *KERNELS[UN_GRAD](dy, indices, indices, routing_map, rows, probs),
            ]
        )
    for a, b in zip(*results, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("layout", ["C", "F", "strided"])
def test_long_dot_products_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """numpy's einsum sums a block of one row in another order than a larger one, from H > 8192 on."""
    rng = np.random.default_rng(11)
    _, routing_map, indices = oracles.random_routing(rng, 13, 3, 1)
    dy, rows = rng.standard_normal((2, 13, 9001)).astype(np.float32)
    rows = {"C": rows, "F": np.asfortranarray(rows), "strided": np.repeat(rows, 2, axis=1)[:, ::2]}[layout]
    probs = rng.random((13, 3), np.float32)
    seen = set()
    for block_bytes in (1, 9001 * 4 * 2, 9001 * 4 * 3, 10**9):
        for thread_bytes in (0, 10**12):
            monkeypatch.setattr(_blocks, "BLOCK_BYTES", block_bytes)
            monkeypatch.setattr(_blocks, "THREAD_BYTES", thread_bytes)
            result = KERNELS[UN_GRAD](dy, indices, indices, routing_map, rows, probs)
            seen.add(result[0].tobytes() + result[1].tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("op", [INIT_GRAD, UN_GRAD])
@pytest.mark.parametrize("route", ["python", "body", *NATIVE])
def test_sessions_are_deterministic_at_any_thread_count(op: str, route: str) -> None:
    import onnxruntime as ort

    rng = np.random.default_rng(8)
    _, routing_map, indices = oracles.random_routing(rng, 512, 16, 4)
    rows = rng.standard_normal((2048, 64)).astype(np.float32)
    dy, probs = rng.standard_normal((512, 64)).astype(np.float32), rng.random((512, 16), np.float32)
    inputs = [rows, indices] if op == INIT_GRAD else [dy, indices, indices, routing_map, rows, probs]
    attributes = {"top_k": 4} if op == INIT_GRAD else {"drop_and_pad": 0}
    model = make_model(op, inputs, attributes)
    seen = set()
    for threads in (1, 2, 4):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = moe_onnx.InferenceSession(model, options, kernels=route)
        names = [arg.name for arg in session.get_inputs()]
        for _ in range(5):
            outputs = session.run(None, dict(zip(names, inputs, strict=True)))
            seen.add(b"".join(out.tobytes() for out in outputs))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "op",
    [
        *(INIT, INIT_GRAD, PERMUTE, PERMUTE_GRAD, UN, UN_GRAD),
        *("MoeGroupedMatmul", "MoeGroupedMatmulWeightGrad", "MoeSwiGlu", "MoeSwiGluGrad"),
        *("MoeSquareSum", "MoeAdamW"),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_non_contiguous_inputs_work_and_stay_as_they_are(op: str, route: str) -> None:
    if not has_route(op, route):
        return
    rng = np.random.default_rng(9)
    expert_idx, routing_map, indices = oracles.random_routing(rng, 6, 4, 2)
    rows, dy, probs = ints(rng, 12, 3), ints(rng, 6, 3), ints(rng, 6, 4)
    inputs: dict[str, list[Any]] = {
        INIT: [dy, expert_idx],
        INIT_GRAD: [rows, indices],
        PERMUTE: [dy, routing_map, probs],
        PERMUTE_GRAD: [rows, ints(rng, 12), indices, routing_map],
        UN: [rows, indices, routing_map, probs],
        UN_GRAD: [dy, indices, indices, routing_map, rows, probs],
        "MoeGroupedMatmul": [rows, ints(rng, 4, 3, 2), np.array([5, 0, 3, 4], np.int32)],
        "MoeGroupedMatmulWeightGrad": [rows, ints(rng, 12, 2), np.array([5, 0, 3, 4], np.int32)],
        "MoeSwiGlu": [128 * ints(rng, 12, 6)],  # exp tells open and closed gates without a rest
        "MoeSwiGluGrad": [rows, 128 * ints(rng, 12, 6)],
        "MoeSquareSum": [rows],
        "MoeAdamW": [*(ints(rng, 6, 4, 3) for _ in range(3)), ints(rng, 6, 4, 3) ** 2, ints(rng, 7) ** 2 + 1],
    }
    attributes = {"top_k": 2} if op == INIT_GRAD else {}
    want = run(op, "reference", inputs[op], attributes)
    strided = [np.repeat(value, 2, axis=0)[::2] for value in inputs[op]]
    fortran = [np.asfortranarray(value) for value in inputs[op]]
    reverse = [np.ascontiguousarray(value[::-1])[::-1] for value in inputs[op]]
    for variant in (strided, fortran, reverse):
        before = [value.copy() for value in variant]
        for got, expected in zip(run(op, route, variant, attributes), want, strict=True):
            if expected is not None:
                np.testing.assert_array_equal(got, expected)
        for value, copy in zip(variant, before, strict=True):
            np.testing.assert_array_equal(value, copy)


def test_renumbering_experts_renumbers_probs_grad() -> None:
    """Experts have no order of their own: a permutation of columns permutes columns."""
    rng = np.random.default_rng(10)
    _, routing_map, _ = oracles.random_routing(rng, 9, 5, 2)
    probs, dy = ints(rng, 9, 5), ints(rng, 9, 3)
    outputs = {e: ints(rng, 9, 3) for e in range(5)}  # output of each expert for each token

    def grads(order: list[int]) -> Any:
        chosen = routing_map[:, order]
        pairs = [(e, t) for e in range(5) for t in range(9) if chosen[t, e]]
        rows = np.array([outputs[order[e]][t] for e, t in pairs], np.float32)
        index = np.array([pairs.index((e, t)) for t in range(9) for e in range(5) if chosen[t, e]], np.int32)
        _, q = moe_onnx.moe_token_unpermute_with_routing_map_grad(
            dy, index, index, chosen, rows, probs[:, order]
        )
        assert q is not None
        return q

    order = [3, 0, 4, 2, 1]
    np.testing.assert_array_equal(grads(order), grads([0, 1, 2, 3, 4])[:, order])
