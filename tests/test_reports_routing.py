"""What public bug reports teach on dropped rows, routing and determinism: reports A11 to A20.

See ``report_tools.py`` for what all of them share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import oracles
import pytest
from report_tools import (
    BF16,
    COMBINE,
    DTYPES,
    EXACT,
    F32,
    FEW,
    GRAD,
    INDICES,
    INIT,
    MODES,
    UNGRAD,
    assert_rounded,
    assert_same,
    bits,
    check,
    check_ungrad,
    each_dtype,
    everywhere,
    exact_grad,
    example,
    integers,
    kernel_choices,
    model_of,
    node,
    normals,
    open_session,
    oracle,
    poison,
    routes_of,
    with_index,
)
from routes import NATIVE, ROUTES, has_route, run

import moe_onnx
from moe_onnx.spec import DOMAIN

ALL_BUT_ACTIVE = [(op, mode) for op in MODES for mode in MODES[op] if mode != "active"]


@pytest.mark.parametrize("experts_of_all", [[1], [0, 3]], ids=str)
@each_dtype
@kernel_choices
def test_a11_dropped_tokens_come_back_as_zero(kernels: str, dtype: Any, experts_of_all: list[int]) -> None:
    """prime-rl #2035: where the router drops half of the tokens, their layer output is exactly 0."""
    x = (integers(np.random.default_rng(0), (8, 5), dtype) + np.array(20, dtype)).astype(dtype)
    ids = np.tile(np.array(experts_of_all, np.int32), (8, 1))
    top_k = len(experts_of_all)
    # The dispatch's gradient is the combine with weights of 1.
    model = model_of(
        [
            node(INIT, ["x", "ids"], ["rows", "index"], drop_pad_mode=1, expert_num=4, expert_capacity=4),
            node(GRAD, ["rows", "index"], ["y"], top_k=top_k, drop_pad_mode=1),
        ],
        {"x": x, "ids": ids},
        {"y": x},
    )
    session = open_session(model, kernels)
    want = x.astype(np.float64) * top_k
    want[4:] = 0
    results = []
    for _ in range(2):
        poison(x, np.empty((4, 4, 5), dtype))
        (got,) = session.run(None, {"x": x, "ids": ids})
        np.testing.assert_array_equal(got.astype(np.float64), want)
        results.append(bits([got]))
    assert results[0] == results[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_dtype
@routes_of(GRAD, FEW)
@pytest.mark.parametrize("mode", MODES[GRAD])
def test_a12_a_bad_row_reaches_only_the_tokens_that_name_it(
    mode: str, route: str, dtype: Any, bad: float
) -> None:
    """vllm-ascend #10579: -1 is not made an index, so a NaN stays with the tokens of its row."""
    inputs, attributes = example(GRAD, mode, dtype, capacity=2)
    index = inputs[1].reshape(6, 2)
    assert mode != "padded" or (index == -1).any()
    for row in range(int(np.prod(inputs[0].shape[:-1]))):
        grad = inputs[0].copy()
        grad.reshape(-1, 5)[row] = bad
        (got,) = run(GRAD, route, [grad, inputs[1]], attributes)
        hit = ~np.isfinite(got.astype(np.float64)).all(axis=1)
        np.testing.assert_array_equal(hit, (index == row).any(axis=1))
        assert_same([got], oracle(GRAD, [grad, inputs[1]], attributes))


@each_dtype
@everywhere(COMBINE, UNGRAD, routes=FEW)
def test_a12_a_bad_row_stays_in_its_token_in_the_combine(op: str, mode: str, route: str, dtype: Any) -> None:
    """vllm-ascend #10579: the same of the combine and its gradient, with slots that are left out."""
    inputs, attributes = example(op, mode, dtype)
    if mode != "padded":
        for index in inputs[1:3] if op == UNGRAD and mode == "slot" else inputs[1:2]:
            index[[0, 5, 6]] = -1
    for row in range(len(inputs[0])):
        bad = [inputs[0].copy(), *inputs[1:]]
        bad[0][row] = np.nan
        got = run(op, route, bad, attributes)
        assert_same(got, oracle(op, bad, attributes))
        if op == COMBINE:
            slots = inputs[1] == row
            token = inputs[1][row] if mode == "padded" else slots.argmax() // 2
            hit = np.isnan(got[0].astype(np.float64)).any(axis=1)
            named = mode == "padded" or slots.any()
            np.testing.assert_array_equal(hit, named & (np.arange(6) == token))
        else:
            clean = oracle(op, inputs, attributes)[1].astype(np.float64)
            others = np.arange(6) != row
            np.testing.assert_array_equal(got[1].astype(np.float64)[others], clean[others])


def one_expert_holds_all(tokens: int, experts: int) -> tuple[Any, Any, Any]:
    ids = np.full((tokens, 1), experts - 1, np.int32)
    chosen = np.zeros((tokens, experts), np.bool_)
    chosen[:, -1] = True
    return ids, chosen, np.arange(tokens, dtype=np.int32)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@everywhere(*ALL_BUT_ACTIVE, routes=FEW)
def test_a13_the_last_expert_holds_all_tokens(op: str, mode: str, route: str, dtype: Any) -> None:
    """vllm-ascend #9170: empty experts and odd sizes leave nothing over from the call before."""
    sizes = {"experts": 5, "top_k": 1, "capacity": 1}
    large, attributes = example(op, mode, dtype, tokens=100, routing=one_expert_holds_all(100, 5), **sizes)
    large[0][...] = np.nan
    for tokens in (1, 2, 3, 8, 9, 31, 33):
        run(op, route, large, attributes)
        if op in (COMBINE, UNGRAD):  # of the dispatch capacity is an attribute, and so the session's
            sizes["capacity"] = (tokens + 1) // 2
        inputs, attributes = example(
            op, mode, dtype, tokens=tokens, routing=one_expert_holds_all(tokens, 5), **sizes
        )
        check(op, route, inputs, attributes)


@pytest.mark.parametrize("tokens", [1023, 1025])
@pytest.mark.parametrize("route", FEW)
def test_a13_no_remainder_of_a_split_is_lost(route: str, tokens: int) -> None:
    """vllm-ascend #9170: rows shared out by an integer division are all written."""
    routing = one_expert_holds_all(tokens, 3)
    sizes = {"tokens": tokens, "experts": 3, "top_k": 1, "hidden": 1100, "routing": routing}
    inputs, attributes = example(UNGRAD, "slot", **sizes)
    poison(inputs[0])
    check_ungrad(inputs, *run(UNGRAD, route, inputs, attributes))
    inputs, attributes = example(GRAD, "dropless", **sizes)
    inputs[1] = np.random.default_rng(0).permutation(tokens).astype(np.int32)
    poison(inputs[0])
    np.testing.assert_array_equal(run(GRAD, route, inputs, attributes)[0], inputs[0][inputs[1]])


@each_dtype
@pytest.mark.parametrize("capacity", [2, 3])
def test_a14_all_routes_drop_the_same_tokens(dtype: Any, capacity: int) -> None:
    """pytorch/ao #4825: past capacity two implementations agree, forward and backward."""
    skewed = np.array([[0, 1], [0, 1], [0, 3], [0, 1], [1, 2], [0, 1]], np.int32)
    inputs, attributes = example(INIT, "padded", dtype, capacity=capacity)
    inputs[1] = skewed
    want = oracle(INIT, inputs, attributes)
    assert (want[1] == -1).any()
    for route in ROUTES:
        if has_route(INIT, route):
            assert_same(run(INIT, route, inputs, attributes), want)
    back = [integers(np.random.default_rng(3), want[0].shape, dtype), want[1]]
    for route in ROUTES:
        check(GRAD, route, back, {"top_k": 2, "drop_pad_mode": 1, "active_num": 0})


@pytest.mark.parametrize(("op", "mode", "at", "low", "high"), INDICES)
def test_a14_all_routes_fail_alike(op: str, mode: str, at: tuple[int, ...], low: int, high: int) -> None:
    """pytorch/ao #4825: an index past capacity is one error, not garbage here and an error there."""
    inputs, attributes = example(op, mode)
    bad = with_index(inputs, at, high)
    messages = set()
    for route in ROUTES:
        if not has_route(op, route):
            continue
        with pytest.raises(moe_onnx.MoeOnnxError) as caught:
            run(op, route, bad, attributes)
        assert (caught.value.op, caught.value.aclnn_status) == (op, 561002)
        if route in EXACT:
            assert isinstance(caught.value, moe_onnx.IndexValueError)
            messages.add(str(caught.value).replace(" (node 'the_node')", ""))
        else:
            assert isinstance(caught.value, moe_onnx.BodyCheckError)
    assert len(messages) == 1


@functools.cache
def long_routing() -> tuple[Any, Any, Any]:
    return oracles.random_routing(np.random.default_rng(15), 1024, 8, 2)


@each_dtype
@everywhere((GRAD, "dropless"), (UNGRAD, "slot"), (UNGRAD, "row"), (COMBINE, "slot"), routes=FEW)
def test_a15_a_token_does_not_see_the_others(op: str, mode: str, route: str, dtype: Any) -> None:
    """Megatron-LM #1421: tokens 0 to 89 keep their bits whatever tokens 90 to 1023 hold."""
    inputs, attributes = example(
        op, mode, dtype, tokens=1024, experts=8, routing=long_routing(), draw=normals
    )
    mine = long_routing()[2].reshape(1024, 2)[:90]
    others = np.setdiff1d(np.arange(2048), mine)
    results = set()
    for fill in (None, 0, 30000, np.nan):
        changed = [value.copy() for value in inputs]
        if fill is not None:
            by_token = [0, 5] if op == UNGRAD else [3] if op == COMBINE else []
            by_row = [4] if op == UNGRAD else [0]
            for i in by_token:
                changed[i][90:] = fill
            for i in by_row:
                changed[i][others] = fill
        got = run(op, route, changed, attributes)
        if op == UNGRAD:
            results.add(bits([got[0][mine], got[1][:90]]))
        else:
            results.add(bits([got[0][:90]]))
    assert len(results) == 1


def any_route(op: str, route: str) -> str:
    """The route, or for forwards, which have no kernels, its like."""
    return route if has_route(op, route) else {"kernel": "reference", "python": "body"}[route]


@pytest.mark.parametrize("route", ROUTES)
def test_a16_the_numbering_of_experts_does_not_matter(route: str) -> None:
    """Megatron-LM #1327, #1603: renumbered experts give the same sums; the same seed the same bits."""
    rng = np.random.default_rng(16)
    tokens, experts, top_k, hidden = 40, 8, 3, 24
    ids, chosen, _ = oracles.random_routing(rng, tokens, experts, top_k)
    x, dy = (rng.standard_normal((tokens, hidden)).astype(np.float32) for _ in range(2))
    probs = rng.random((tokens, experts)).astype(np.float32)
    scale = rng.standard_normal(experts).astype(np.float32)  # what each expert does to a row

    def step(order: Any) -> list[Any]:
        """Outputs with expert e called order[e], probs_grad in the old numbering again."""
        new_ids = np.sort(order[ids], axis=1).astype(np.int32)
        old_of = np.argsort(order)
        new_chosen, new_probs = chosen[:, old_of], np.ascontiguousarray(probs[:, old_of])
        rows, index, *_ = run(INIT, any_route(INIT, route), [x, new_ids], {})
        factor = scale[old_of][np.sort(new_ids.reshape(-1))][:, None]
        permuted = rows * factor
        y, *_ = run(COMBINE, any_route(COMBINE, route), [permuted, index, new_chosen, new_probs], {})
        grads = [dy, index, index, new_chosen, permuted, new_probs]
        grad, probs_grad = run(UNGRAD, route, grads, {})
        (grad_x,) = run(GRAD, route, [grad * factor, index], {"top_k": top_k})
        return [y, probs_grad[:, order], grad_x]

    same = np.arange(experts)
    first = step(same)
    assert bits(step(same)) == bits(first)
    weight = np.where(chosen, probs, 0).astype(np.float64) * scale
    wide_x, wide_dy = x.astype(np.float64), dy.astype(np.float64)
    want = [
        wide_x * weight.sum(axis=1)[:, None],
        np.where(chosen, (wide_x * wide_dy).sum(axis=1)[:, None] * scale, 0),
        wide_dy * weight.sum(axis=1)[:, None],
    ]
    size = np.abs(weight).sum(axis=1)[:, None]
    bound = [
        np.abs(wide_x) * size,
        (np.abs(wide_x * wide_dy)).sum(axis=1)[:, None] * np.abs(scale),
        np.abs(wide_dy) * size,
    ]
    for order in (same, rng.permutation(experts), rng.permutation(experts)):
        for got, exact, once, most in zip(step(order), want, first, bound, strict=True):
            assert (np.abs(got - exact) <= 1e-6 * most).all()
            assert (np.abs(got.astype(np.float64) - once) <= 1e-6 * most).all()


@kernel_choices
def test_a17_forty_repeats_give_one_result(kernels: str) -> None:
    """unsloth-zoo #1258: no sum depends on the order in which threads arrive."""
    # Large enough for every route to share it out between threads.
    rng = np.random.default_rng(17)
    ids, chosen, index = oracles.random_routing(rng, 512, 16, 8)
    slots, _, _ = oracles.padded_slots(chosen, 64)
    feed = {
        "dy": rng.standard_normal((512, 260)).astype(np.float32),
        "index": index,
        "chosen": chosen,
        "permuted": rng.standard_normal((4096, 260)).astype(np.float32),
        "probs": rng.random((512, 16)).astype(np.float32),
        "slots": slots,
        "few": rng.standard_normal((1024, 260)).astype(np.float32),
    }
    model = model_of(
        [
            node(UNGRAD, ["dy", "index", "index", "chosen", "permuted", "probs"], ["rows", "weights"]),
            node(GRAD, ["permuted", "index"], ["sums"], top_k=8),
            node(COMBINE, ["few", "slots", "chosen", "probs"], ["combined"], drop_and_pad=1),
        ],
        feed,
        dict.fromkeys(("rows", "weights", "sums", "combined"), feed["dy"]),
    )
    results = set()
    for threads, repeats in ((1, 5), (2, 40)):
        session = open_session(model, kernels, intra_op_num_threads=threads)
        results |= {bits(session.run(None, feed)) for _ in range(repeats)}
    assert len(results) == 1


def grid(top_k: int) -> Iterator[dict[str, int]]:
    for hidden, tokens in ((1, 1), (7, 1), (64, 1), (7168, 1), (1, 2048), (7, 2048), (64, 500)):
        for experts in (1, 64, 65):
            # One call of the largest is enough; the report's own size is a test below.
            if top_k <= experts and (hidden * tokens <= 7 * 2048 or (top_k, experts) == (6, 65)):
                yield {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden}


@pytest.mark.parametrize("top_k", [1, 3, 6])
@pytest.mark.parametrize("route", ["kernel", "body"])
def test_a18_sizes_that_are_no_powers_of_two(route: str, top_k: int) -> None:
    """vLLM #14568: a grid of odd sizes against float64."""
    for sizes in grid(top_k):
        routing = grid_routing(sizes["tokens"], sizes["experts"], top_k)
        inputs, attributes = example(GRAD, "dropless", BF16, draw=normals, routing=routing, **sizes)
        assert_rounded(run(GRAD, route, inputs, attributes)[0], *exact_grad(*inputs, top_k))
        inputs, attributes = example(UNGRAD, "slot", BF16, draw=normals, routing=routing, **sizes)
        check_ungrad(inputs, *run(UNGRAD, route, inputs, attributes))


@functools.cache
def grid_routing(tokens: int, experts: int, top_k: int) -> tuple[Any, Any, Any]:
    return oracles.random_routing(np.random.default_rng(18), tokens, experts, top_k)


def test_a18_the_size_of_the_report() -> None:
    """vLLM #14568: T=2048, H=7168, E=64, K=6 in bfloat16."""
    _, _, index = grid_routing(2048, 64, 6)
    # Random fractions of numbers between 1 and 2, a third of them negative: most sums must round.
    raw = np.random.default_rng(0).integers(0, 128, (12288, 7168), np.uint16) | np.uint16(0x3F80)
    raw[::3] |= np.uint16(0x8000)
    # Six such numbers add up to 7 bits after the point and 4 before: float32 holds that exactly.
    sums = np.zeros((2048, 7168), np.float32)
    for slot in index.reshape(-1, 6).T:
        sums += (raw[slot].astype(np.uint32) << 16).view(np.float32)
    want = sums.astype(BF16).view(np.uint16)
    for route in ("kernel", "python", "body", *NATIVE):
        (got,) = run(GRAD, route, [raw.view(BF16), index], {"top_k": 6})
        assert got.dtype == BF16
        assert np.array_equal(got.view(np.uint16), want)


@pytest.mark.parametrize("probs_dtype", DTYPES.values(), ids=DTYPES)
@each_dtype
@everywhere((COMBINE, "slot"), (UNGRAD, "slot"))
def test_a19_outputs_have_the_documented_dtypes(
    op: str, mode: str, route: str, dtype: Any, probs_dtype: Any
) -> None:
    """xtuner #1121: rows keep the rows' dtype and weights their own, or the mix is refused."""
    inputs, attributes = example(op, mode, dtype, probs_dtype=probs_dtype)
    if dtype == probs_dtype or (dtype, probs_dtype) == (BF16, F32):
        got = run(op, route, inputs, attributes)
        assert (got[0].dtype, got[-1].dtype) == (dtype, probs_dtype)
        assert_same(got, oracle(op, inputs, attributes))
        return
    with pytest.raises(moe_onnx.DtypeError, match="probs") as caught:
        run(op, route, inputs, attributes)
    assert caught.value.aclnn_status == 561002


@pytest.mark.parametrize(("forward", "backward"), [(INIT, GRAD), (COMBINE, UNGRAD)])
def test_a20_the_backward_takes_what_the_forward_takes(forward: str, backward: str) -> None:
    """Primus-Turbo #328: no dtype passes the forward to be refused in the backward."""
    sets = [
        {
            c.type_param_str: set(c.allowed_type_strs)
            for c in onnx.defs.get_schema(op, DOMAIN).type_constraints
        }
        for op in (forward, backward)
    ]
    assert {"tensor(float)", "tensor(float16)", "tensor(bfloat16)"} <= sets[0]["T"]
    for variable, allowed in sets[0].items():
        assert allowed <= sets[1][variable]


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.dtype(np.float64)], ids=str)
@kernel_choices
def test_a20_every_dtype_goes_there_and_back(kernels: str, dtype: Any) -> None:
    """Primus-Turbo #328: dispatch, combine and both gradients in one session, in every dtype."""
    ids, chosen, index = oracles.random_routing(np.random.default_rng(20), 7, 5, 2)
    feed = {
        "x": integers(np.random.default_rng(1), (7, 6), dtype),
        "dy": integers(np.random.default_rng(2), (7, 6), dtype),
        "ids": ids,
        "chosen": chosen,
        "probs": np.random.default_rng(3).choice([0.5, 1, 2], (7, 5)).astype(dtype),
    }
    model = model_of(
        [
            node(INIT, ["x", "ids"], ["rows", "index"]),
            node(COMBINE, ["rows", "index", "chosen", "probs"], ["y", "out", "token"]),
            node(UNGRAD, ["dy", "out", "token", "chosen", "rows", "probs"], ["grad_rows", "grad_probs"]),
            node(GRAD, ["grad_rows", "index"], ["grad_x"], top_k=2),
        ],
        feed,
        dict.fromkeys(("y", "grad_probs", "grad_x"), feed["x"]),
    )
    got = open_session(model, kernels).run(None, feed)
    rows = oracles.init_routing_v2(feed["x"], ids)[0]
    y = oracles.unpermute(rows, index, chosen, feed["probs"])[0]
    back = oracles.unpermute_grad(feed["dy"], index, index, chosen, rows, feed["probs"])
    assert back[1] is not None
    assert_same(got, [y, back[1], oracles.init_routing_v2_grad(back[0], index, top_k=2)])
