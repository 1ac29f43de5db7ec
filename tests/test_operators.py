"""Every operator, by every route, in every dtype and size, against the per-token oracles."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from routes import BODY_ROUTES, ROUTES, all_of, dtypes_of, has_route, run

BF16 = np.dtype(ml_dtypes.bfloat16)
# dtype of rows, dtype of probs
DTYPES = {
    "fp32": (np.float32, np.float32),
    "fp16": (np.float16, np.float16),
    "bf16": (BF16, BF16),
    "bf16+fp32": (BF16, np.float32),
    "fp64": (np.float64, np.float64),
}
# tokens, experts, top_k, hidden
SIZES = {
    "no tokens": (0, 4, 2, 3),
    "one token": (1, 4, 2, 3),
    "K=1": (7, 4, 1, 5),
    "K=E": (6, 3, 3, 4),
    "one expert": (5, 1, 1, 4),
    "H=1": (9, 5, 2, 1),
    "H=0": (4, 3, 2, 0),
    "odd": (17, 7, 3, 13),
    "many experts, most empty": (4, 65, 2, 8),
    "K=6": (33, 64, 6, 7),
}
EPS = {np.dtype(np.float64): 2.0**-52, np.dtype(np.float32): 2.0**-23}

BEYOND = max(tokens * top_k for tokens, _, top_k, _ in SIZES.values()) + 3  # rows, more than slots


def active_rows(slots: int) -> int:
    """Half of the slots or fewer. Of few numbers: it is an attribute, and each makes a session."""
    return max(number for number in (1, 4, 16) if number <= max(slots // 2, 1))


sizes = all_of("size", SIZES)
dtypes = dtypes_of(DTYPES)


def routes_of(op: str) -> Any:
    # Unoptimised bodies run all hand cases; making their sessions is what takes time.
    routes = [r for r in ROUTES if has_route(op, r) and r != "body_plain"]
    return pytest.mark.parametrize("route", routes)


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Small integers: sums and products of them are exact in every dtype, in any order."""
    return rng.integers(-4, 5, shape).astype(dtype)


def assert_same(got: Any, want: Any, what: str = "") -> None:
    """Equal bits up to the sign of zero; absent is absent."""
    if want is None:
        assert got is None, what
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), what)


def assert_within(got: Any, want: Any, bound: Any) -> None:
    """Within ``bound`` before the rounding to the output dtype, so within it and half an ulp after."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    wide = want.astype(np.float64)
    ulp = np.zeros(wide.shape)
    if got.dtype.itemsize == 2:
        ulp = np.abs(wide) * float(ml_dtypes.finfo(got.dtype).eps) + float(ml_dtypes.finfo(got.dtype).tiny)
    assert (np.abs(got.astype(np.float64) - wide) <= bound + ulp).all()


def routing(size: str) -> tuple[Any, ...]:
    """Drawn once, by loops; the generator goes on where they left it."""
    state, hidden, *arrays = _routing(size)
    rng = np.random.default_rng()
    rng.bit_generator.state = state
    return rng, hidden, *(array.copy() for array in arrays)


@functools.cache
def _routing(size: str) -> tuple[Any, ...]:
    tokens, experts, top_k, hidden = SIZES[size]
    rng = rng_of(size)
    expert_idx, routing_map, indices = oracles.random_routing(rng, tokens, experts, top_k)
    if size == "odd":  # one expert takes every token
        for experts_of_token in expert_idx:
            if 3 not in experts_of_token:
                experts_of_token[0] = 3
        expert_idx.sort(axis=1)
        routing_map[:] = False
        np.put_along_axis(routing_map, expert_idx, True, axis=1)
        pairs = [(e, t) for e in range(experts) for t in range(tokens) if routing_map[t, e]]
        indices = np.array([pairs.index((e, t)) for t in range(tokens) for e in expert_idx[t]], np.int32)
    return rng.bit_generator.state, hidden, expert_idx, routing_map, indices


@dtypes
@sizes
@routes_of("MoeInitRoutingV2Grad")
@pytest.mark.parametrize("mode", ["dropless", "active", "active beyond", "drop/pad"])
def test_init_routing_grad(route: str, size: str, dtype: str, mode: str) -> None:
    rng, hidden, expert_idx, _, _ = routing(size)
    tokens, experts, top_k, _ = SIZES[size]
    attributes: dict[str, Any] = {"top_k": top_k}
    num = tokens * top_k
    index = rng.permutation(num).astype(np.int32)
    shape: tuple[int, ...] = (num, hidden)
    if mode.startswith("active"):
        attributes["active_num"] = active_rows(num) if mode == "active" else BEYOND
        shape = (attributes["active_num"], hidden)
    elif mode == "drop/pad":
        capacity = max(1, tokens // 2)
        kwargs = {"expert_capacity": capacity, "expert_num": experts, "drop_pad_mode": 1}
        x = integers(rng, (tokens, hidden), np.float32)
        if tokens:
            _, index, _, _ = oracles.init_routing_v2(x, expert_idx, **kwargs)
        attributes["drop_pad_mode"] = 1
        shape = (experts, capacity, hidden)
    grad = integers(rng, shape, DTYPES[dtype][0])
    want = oracles.init_routing_v2_grad(grad, index, **attributes)
    assert_same(run("MoeInitRoutingV2Grad", route, [grad, index], attributes)[0], want, mode)
    # Sums of any data: bit-equal in slot order, and within the contract's bound in a body's order.
    grad = rng.standard_normal(shape).astype(DTYPES[dtype][0])
    got = run("MoeInitRoutingV2Grad", route, [grad, index], attributes)[0]
    want = oracles.init_routing_v2_grad(grad, index, **attributes)
    if route in BODY_ROUTES:
        absolute = oracles.init_routing_v2_grad(np.abs(grad).astype(np.float64), index, **attributes)
        assert_within(got, want, top_k * EPS.get(grad.dtype, 2.0**-23) * absolute)
    else:
        assert_same(got, want, mode)


def unpermute_arguments(size: str, dtype: str, mode: str, *, exact: bool = True) -> tuple[list[Any], bool]:
    rng, hidden, _, routing_map, indices = routing(size)
    tokens, experts, top_k, _ = SIZES[size]
    padded = "padded" in mode
    token = np.repeat(np.arange(tokens), top_k).astype(np.int32) if "row" in mode else indices
    index = indices
    if "shuffled" in mode:
        order = rng.permutation(len(index))
        index = index[order]
        token = token[order] if "row" in mode else index
    if padded:
        _, index, token = oracles.padded_slots(routing_map, max(tokens // 2, 1) if tokens else 0)
    if "dropped" in mode and len(index):
        index = index.copy()
        index[rng.integers(0, len(index), 3)] = -1
        token = token if "row" in mode else index
        routing_map = routing_map.copy()
        routing_map[rng.integers(0, tokens)] = False
    make = integers if exact else lambda r, s, d: r.standard_normal(s).astype(d)
    rows_dtype, probs_dtype = DTYPES[dtype]
    dy = make(rng, (tokens, hidden), rows_dtype)
    rows = make(rng, (len(index), hidden), rows_dtype)
    probs = make(rng, (tokens, experts), probs_dtype)
    if "copy" in mode:
        return [dy, index, token], padded
    return [
        dy,
        index,
        token,
        routing_map if size != "K=E" else routing_map.astype(np.int8),
        rows,
        probs,
    ], padded


MODES = [
    "slot", "slot dropped", "slot shuffled", "slot copy", "row", "row dropped", "row shuffled",
    "row copy", "row shuffled copy", "padded", "padded copy",
]  # fmt: skip


@dtypes
@sizes
@routes_of("MoeTokenUnpermuteWithRoutingMapGrad")
@pytest.mark.parametrize("mode", MODES)
def test_unpermute_grad(route: str, size: str, dtype: str, mode: str) -> None:
    inputs, padded = unpermute_arguments(size, dtype, mode)
    got = run("MoeTokenUnpermuteWithRoutingMapGrad", route, inputs, {"drop_and_pad": int(padded)})
    want = oracles.unpermute_grad(*inputs, drop_and_pad=padded)
    assert_same(got[0], want[0], mode)
    assert_same(got[1], want[1], mode)


@dtypes
@sizes
@routes_of("MoeTokenUnpermuteWithRoutingMapGrad")
@pytest.mark.parametrize("mode", ["slot", "row shuffled", "padded"])
def test_unpermute_grad_of_any_data(route: str, size: str, dtype: str, mode: str) -> None:
    """Rows are single products, so bit-equal everywhere; dots are within the contract's bound."""
    inputs, padded = unpermute_arguments(size, dtype, mode, exact=False)
    got = run("MoeTokenUnpermuteWithRoutingMapGrad", route, inputs, {"drop_and_pad": int(padded)})
    want = oracles.unpermute_grad(*inputs, drop_and_pad=padded)
    assert_same(got[0], want[0], mode)
    absolute = [np.abs(v).astype(np.float64) if v.dtype.kind in "fV" else v for v in inputs]
    bound = oracles.unpermute_grad(*absolute, drop_and_pad=padded)[1]
    assert bound is not None
    eps = EPS.get(inputs[0].dtype, 2.0**-23)
    assert_within(got[1], want[1], max(SIZES[size][3], 1) * eps * bound)


@dtypes
@sizes
@routes_of("MoeInitRoutingV2")
@pytest.mark.parametrize("mode", ["dropless", "cumsum", "counts", "active", "drop/pad", "before"])
def test_init_routing(route: str, size: str, dtype: str, mode: str) -> None:
    rng, hidden, expert_idx, _, _ = routing(size)
    tokens, experts, top_k, _ = SIZES[size]
    attributes: dict[str, Any] = {}
    if mode in ("cumsum", "counts"):
        attributes = {"expert_num": experts, "expert_tokens_count_or_cumsum_flag": 1 + (mode == "counts")}
    elif mode == "active":
        attributes = {"active_num": active_rows(tokens * top_k)}
    elif mode in ("drop/pad", "before"):
        attributes = {"drop_pad_mode": 1, "expert_num": experts, "expert_capacity": max(1, tokens // 2)}
        attributes["expert_tokens_before_capacity_flag"] = mode == "before"
    x = rng.standard_normal((tokens, hidden)).astype(DTYPES[dtype][0])
    rng.shuffle(expert_idx, axis=0)
    got = run("MoeInitRoutingV2", route, [x, expert_idx], attributes)
    for value, want in zip(got, oracles.init_routing_v2(x, expert_idx, **attributes), strict=True):
        assert_same(value, want, mode)


@dtypes
@sizes
@routes_of("MoeTokenUnpermuteWithRoutingMap")
@pytest.mark.parametrize("mode", ["slot", "slot dropped", "slot shuffled", "copy", "padded", "padded copy"])
def test_unpermute(route: str, size: str, dtype: str, mode: str) -> None:
    (dy, index, token, *rest), padded = unpermute_arguments(size, dtype, mode.replace("copy", "slot"))
    routing_map, rows, probs = rest
    tokens = token if padded else index
    if padded:  # the token of each row, in row order
        tokens = np.empty_like(token)
        tokens[index] = token
    inputs = [rows, tokens, routing_map, None if "copy" in mode else probs]
    got = run("MoeTokenUnpermuteWithRoutingMap", route, inputs, {"drop_and_pad": int(padded)})
    want = oracles.unpermute(*inputs, drop_and_pad=padded, restore_shape=list(dy.shape))
    for value, expected in zip(got, want, strict=True):
        assert_same(value, expected, mode)


PERMUTE, PERMUTE_GRAD = "MoeTokenPermuteWithRoutingMap", "MoeTokenPermuteWithRoutingMapGrad"
PERMUTE_MODES = ["given", "from map", "fewer", "spare", "copy", "padded", "padded copy"]


def permute_arguments(size: str, dtype: str, mode: str) -> tuple[list[Any], dict[str, Any]]:
    rng, hidden, _, routing_map, _ = routing(size)
    tokens, experts, top_k, _ = SIZES[size]
    rows_dtype, probs_dtype = DTYPES[dtype]
    if mode == "fewer" and tokens > 1:
        routing_map = routing_map & (rng.random(routing_map.shape) < 0.6)
        routing_map[-1] = False
    num = tokens * top_k
    if mode == "spare":
        num = tokens * min(top_k + 1, experts)
    padded = "padded" in mode
    if padded:
        num = experts * (max(tokens // 2, 1) if tokens else 0)
    attributes = {"num_out_tokens": 0 if mode == "from map" else num, "drop_and_pad": int(padded)}
    chosen = (routing_map * rng.choice([-1, 1, 2], routing_map.shape)).astype(np.int8)
    inputs = [
        rng.standard_normal((tokens, hidden)).astype(rows_dtype),
        chosen if size in ("K=E", "K=6") else routing_map,
        None if "copy" in mode else rng.standard_normal((tokens, experts)).astype(probs_dtype),
    ]
    return inputs, attributes


@dtypes
@sizes
@routes_of(PERMUTE)
@pytest.mark.parametrize("mode", PERMUTE_MODES)
def test_permute(route: str, size: str, dtype: str, mode: str) -> None:
    """Copies: bit-equal everywhere."""
    inputs, attributes = permute_arguments(size, dtype, mode)
    got = run(PERMUTE, route, inputs, attributes)
    for value, want in zip(got, oracles.permute(*inputs, **attributes), strict=True):
        assert_same(value, want, mode)


def permute_grad_arguments(size: str, dtype: str, mode: str, make: Any) -> tuple[list[Any], dict[str, Any]]:
    (tokens, routing_map, probs), attributes = permute_arguments(size, dtype, mode)
    rng, padded = rng_of(size), bool(attributes["drop_and_pad"])
    rows, weights, index = oracles.permute(tokens, routing_map, probs, **attributes)
    if "shuffled" in mode:
        order = rng.permutation(len(rows)).astype(np.int32)
        index = rng.integers(0, len(tokens), len(rows)).astype(np.int32) if padded else order[index]
    inputs = [make(rng, rows.shape, rows.dtype), None, index, routing_map]
    if weights is not None:
        inputs[1] = make(rng, weights.shape, weights.dtype)
    sizes_given = {"num_experts": routing_map.shape[1], "tokens_num": len(tokens)}
    if "without map" in mode and len(tokens):
        inputs[3] = None
    elif mode != "given":
        sizes_given = {}
    return inputs, {**sizes_given, "drop_and_pad": int(padded)}


GRAD_MODES = [*PERMUTE_MODES, "copy without map", "padded without map"]


@dtypes
@sizes
@routes_of(PERMUTE_GRAD)
@pytest.mark.parametrize("mode", [*GRAD_MODES, "padded shuffled"])
def test_permute_grad(route: str, size: str, dtype: str, mode: str) -> None:
    if "shuffled" in mode and not SIZES[size][0]:
        return
    inputs, attributes = permute_grad_arguments(size, dtype, mode, integers)
    got = run(PERMUTE_GRAD, route, inputs, attributes)
    want = oracles.permute_grad(*inputs, **attributes)
    assert_same(got[0], want[0], mode)
    assert_same(got[1], want[1], mode)


@dtypes
@sizes
@routes_of(PERMUTE_GRAD)
@pytest.mark.parametrize("mode", ["given", "fewer", "padded"])
def test_permute_grad_of_any_data(route: str, size: str, dtype: str, mode: str) -> None:
    """Sums of a token's rows: bit-equal in order, and within the contract's bound in a body's order."""
    inputs, attributes = permute_grad_arguments(
        size, dtype, mode, lambda rng, shape, kind: rng.standard_normal(shape).astype(kind)
    )
    got = run(PERMUTE_GRAD, route, inputs, attributes)
    want = oracles.permute_grad(*inputs, **attributes)
    assert_same(got[1], want[1], mode)
    if route in BODY_ROUTES:
        absolute = [np.abs(inputs[0]).astype(np.float64), None, *inputs[2:]]
        bound = oracles.permute_grad(*absolute, **attributes)[0]
        most = SIZES[size][1 if mode == "padded" else 2]  # rows of a token
        assert_within(got[0], want[0], most * EPS.get(inputs[0].dtype, 2.0**-23) * bound)
    else:
        assert_same(got[0], want[0], mode)
