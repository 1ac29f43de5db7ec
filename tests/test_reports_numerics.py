"""What public bug reports teach on sums, sentinels, empty axes and companions: reports A1 to A10.

See ``report_tools.py`` for what all of them share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from report_tools import (
    BF16,
    COMBINE,
    EXACT,
    F16,
    F32,
    FEW,
    FINALIZE,
    GRAD,
    GROUPED,
    INDICES,
    INIT,
    INT_MAX,
    INT_MIN,
    MODES,
    PERMUTE,
    UNGRAD,
    V1,
    V1_GRAD,
    V1_INDEX,
    assert_rounded,
    assert_same,
    check,
    check_ungrad,
    child,
    each_dtype,
    everywhere,
    exact_grad,
    example,
    normals,
    options_of,
    oracle,
    poison,
    report,
    routes_of,
    with_index,
)
from routes import BODY_ROUTES, KERNELS, ROUTES, has_route, make_model, run

import moe_onnx
from moe_onnx.operators import BY_NAME

# A1 to A20: numbers.


@pytest.fixture(scope="module")
def full_size() -> Iterator[dict[str, Any]]:
    """T=8192, H=2048, E=16, K=4, integers up to 8: float32 sums are exact, so all must be equal."""
    rng = np.random.default_rng(1)
    tokens, experts, top_k, hidden = 8192, 16, 4, 2048
    ids = np.sort(np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k], axis=1)
    chosen = np.zeros((tokens, experts), np.bool_)
    np.put_along_axis(chosen, ids, True, axis=1)
    index = np.argsort(np.argsort(ids.reshape(-1), kind="stable")).astype(np.int32)
    permuted = rng.integers(-8, 9, (tokens * top_k, hidden), np.int8).astype(np.float32)
    dy = rng.integers(-8, 9, (tokens, hidden), np.int8).astype(np.float32)
    probs = rng.choice([0.25, 0.5, 1, 2], (tokens, experts)).astype(np.float32)
    every, rows = np.arange(tokens), index.reshape(-1, top_k).T
    grad, probs_grad = np.empty_like(permuted), np.zeros_like(probs)
    for row, expert in zip(rows, ids.T, strict=True):
        grad[row] = dy * probs[every, expert][:, None]
        # Integers below 2^24: float32 is exact in any order.
        probs_grad[every, expert] = np.einsum("th,th->t", dy, permuted[row])
    yield {
        "dispatch": [permuted, index],
        "grad_x": sum(permuted[row] for row in rows),
        "combine": [dy, index, index, chosen, permuted, probs],
        "grad": grad,
        "probs_grad": probs_grad,
    }


@pytest.mark.parametrize("route", FEW)
def test_a01_dispatch_gradient_at_full_size(route: str, full_size: dict[str, Any]) -> None:
    """TransformerEngine #1336: the gradient is the unfused sum, bit for bit where sums are exact."""
    (got,) = run(GRAD, route, full_size["dispatch"], {"top_k": 4})
    assert got.dtype == F32
    assert np.array_equal(got, full_size["grad_x"])


@pytest.mark.parametrize("route", FEW)
def test_a01_combine_gradient_at_full_size(route: str, full_size: dict[str, Any]) -> None:
    """TransformerEngine #1336: so is the gradient of the combine, and that of its weights."""
    grad, probs_grad = run(UNGRAD, route, full_size["combine"], {"drop_and_pad": 0})
    assert (grad.dtype, probs_grad.dtype) == (F32, F32)
    assert np.array_equal(grad, full_size["grad"])
    assert np.array_equal(probs_grad, full_size["probs_grad"])


@pytest.mark.parametrize("top_k", [1, 2, 8, 16])
@each_dtype
@routes_of(GRAD, FEW)
def test_a01_dispatch_gradient_of_any_data(route: str, dtype: Any, top_k: int) -> None:
    """TransformerEngine #1336: the error does not grow with K past the stated bound."""
    inputs, attributes = example(
        GRAD, "dropless", dtype, tokens=33, experts=16, top_k=top_k, hidden=40, draw=normals
    )
    (got,) = run(GRAD, route, inputs, attributes)
    assert_rounded(got, *exact_grad(*inputs, top_k))
    if route in EXACT:
        assert_same([got], oracle(GRAD, inputs, attributes))


@pytest.mark.parametrize("top_k", [1, 2, 8, 16])
@each_dtype
@routes_of(UNGRAD, FEW)
def test_a01_combine_gradient_of_any_data(route: str, dtype: Any, top_k: int) -> None:
    """TransformerEngine #1336: rows are one product rounded once, weights a bounded dot product."""
    inputs, attributes = example(
        UNGRAD, "slot", dtype, tokens=33, experts=16, top_k=top_k, hidden=40, draw=normals
    )
    inputs[5] = normals(np.random.default_rng(5), inputs[5].shape, dtype)
    check_ungrad(inputs, *run(UNGRAD, route, inputs, attributes))


def sum_by(place: str, values: Sequence[float], dtype: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """A call whose only number is the sum of ``values``: each place where an operator sums."""
    num = len(values)
    column = np.array(values, dtype).reshape(num, 1)
    index = np.arange(num, dtype=np.int32)
    ones, one = np.ones((1, num), dtype), np.ones((1, 1), np.bool_)
    everyone = np.ones((1, num), np.bool_)
    if place == "dispatch gradient":
        return GRAD, [column, index], {"top_k": num}
    if place == "combine":
        return COMBINE, [column, index, everyone, ones], {"drop_and_pad": 0}
    if place == "combine without probs":
        return COMBINE, [column, index, everyone], {"drop_and_pad": 0}
    if place == "padded combine":  # every expert one row, of token 0
        return COMBINE, [column, index * 0, everyone, ones], {"drop_and_pad": 1}
    zero = np.zeros(1, np.int32)
    dy = np.ascontiguousarray(column.T)
    return UNGRAD, [dy, zero, zero, one, np.ones_like(dy), np.ones((1, 1), dtype)], {"drop_and_pad": 0}


PLACES = [
    pytest.param(place, route, id=f"{place}-{route}")
    for place in ("dispatch gradient", "combine", "combine without probs", "padded combine", "probs")
    for route in ROUTES
    if has_route(sum_by(place, [1], F32)[0], route)
]


def check_sum(place: str, route: str, values: Sequence[float], dtype: Any, want: float) -> None:
    op, inputs, attributes = sum_by(place, values, dtype)
    got = run(op, route, inputs, attributes)[1 if place == "probs" else 0]
    assert (got.dtype, got.shape, float(got[0, 0])) == (dtype, (1, 1), want)


@pytest.mark.parametrize(
    ("dtype", "values", "want"),
    [
        pytest.param(BF16, [256, *[1] * 7], 264, id="bf16 ones"),
        pytest.param(F16, [2048, 1, 1], 2050, id="fp16 ones"),
        pytest.param(F16, [-2048, -1, -1], -2050, id="fp16 minus ones"),
        pytest.param(F16, [60000, 60000, -60000], 60000, id="fp16 no overflow on the way"),
    ],
)
@pytest.mark.parametrize(("place", "route"), PLACES)
def test_a02_sums_are_made_in_float32(
    place: str, route: str, dtype: Any, values: list[float], want: float
) -> None:
    """ROCm/TransformerEngine #320: a sum in the dtype of its inputs loses what one rounding keeps."""
    check_sum(place, route, values, dtype, want)


@pytest.mark.parametrize(
    ("dtype", "values", "want"),
    [
        # A running bf16 sum stalls at 1, a running fp16 sum at 8.
        pytest.param(BF16, [1 / 256] * 512, 2.0, id="bf16"),
        pytest.param(F16, [8, *[1 / 256] * 510, 0], 9.9921875, id="fp16"),
    ],
)
@pytest.mark.parametrize(("place", "route"), PLACES)
def test_a03_long_sums_do_not_stall(
    place: str, route: str, dtype: Any, values: list[float], want: float
) -> None:
    """FlagGems #4295: 512 small terms, the documented limit of K, still add up."""
    check_sum(place, route, values, dtype, want)


@pytest.mark.parametrize("active", [1, 7, 15])
@each_dtype
@routes_of(GRAD, FEW)
def test_a04_rows_past_the_active_ones_add_nothing(route: str, dtype: Any, active: int) -> None:
    """TransformerEngine #3346: entries past the buffer are dropped, and nothing behind it is read."""
    inputs, attributes = example(GRAD, "active", dtype, active=active)
    buffer = np.full((active + 12, 5), np.nan, dtype)  # what a read past the end would find
    buffer[:active] = inputs[0]
    check(GRAD, route, [buffer[:active], inputs[1]], attributes)


@pytest.mark.parametrize("active", [1, 7, 15])
@routes_of(INIT)
def test_a04_the_dispatch_writes_only_the_active_rows(route: str, active: int) -> None:
    """TransformerEngine #3346: the forward cuts the rows and keeps the whole permutation."""
    inputs, attributes = example(INIT, "active", active=active)
    check(INIT, route, inputs, attributes)


@pytest.mark.parametrize("rows", [6, 8, 12])
@routes_of(GRAD)
def test_a04_another_number_of_rows_is_refused(route: str, rows: int) -> None:
    """TransformerEngine #3346: rows that are not active_num are an error that names both numbers."""
    inputs, attributes = example(GRAD, "active")
    inputs[0] = np.ones((rows, 5), np.float32)
    if route in BODY_ROUTES:
        with pytest.raises(moe_onnx.BodyCheckError, match="active_num"):
            run(GRAD, route, inputs, attributes)
        return
    with pytest.raises(moe_onnx.ShapeError, match=rf"\b7\b.*\b{rows}\b|\b{rows}\b.*\b7\b"):
        run(GRAD, route, inputs, attributes)


def test_a05_the_sentinel_of_the_report() -> None:
    """vLLM #45492: N itself, the sentinel 1032 of 129 tokens and 8 experts, is no index."""
    good = np.arange(1032, dtype=np.int32)
    grad = np.ones((1032, 3), np.float32)
    for route in EXACT:
        for value in (1032, -2, INT_MAX):
            index = good.copy()
            index[1000] = value
            with pytest.raises(moe_onnx.IndexValueError) as caught:
                run(GRAD, route, [grad, index], {"top_k": 8})
            assert (caught.value.position, caught.value.value) == ((1000,), value)
            assert "[0, 1032)" in str(caught.value)
        np.testing.assert_array_equal(run(GRAD, route, [grad, good], {"top_k": 8})[0], 8)


index_routes = pytest.mark.parametrize(
    ("op", "mode", "at", "low", "high", "route"),
    [
        pytest.param(*case, route, id=f"{case[0]}-{case[1]}-{case[2]}-{route}")
        for case in INDICES
        for route in ROUTES
        if has_route(case[0], route)
    ],
)


@index_routes
def test_a05_indices_out_of_range_are_named(
    op: str, mode: str, at: tuple[int, ...], low: int, high: int, route: str
) -> None:
    """vLLM #45492: every index input of every mode is checked, and the session lives on."""
    inputs, attributes = example(op, mode)
    for value in (low - 1, high, INT_MIN, INT_MAX):
        bad = with_index(inputs, at, value)
        if route in BODY_ROUTES:
            with pytest.raises(moe_onnx.BodyCheckError, match="in range"):
                run(op, route, bad, attributes)
            continue
        with pytest.raises(moe_onnx.IndexValueError) as caught:
            run(op, route, bad, attributes)
        error, name = caught.value, BY_NAME[op].inputs[at[0]].name
        where = np.unravel_index(7, inputs[at[0]].shape)
        assert (error.input_name, error.position, error.value) == (name, where, value)
        for part in (op, name, str(value), str([int(i) for i in where]), f"[{low}, {high})"):
            assert part in str(error)
    check(op, route, inputs, attributes)


def child_a05() -> None:
    options = moe_onnx.register(options_of(), "python")
    session = ort.InferenceSession(
        make_model(
            GRAD, [V1, V1_INDEX], {"top_k": 2, "drop_pad_mode": 0, "active_num": 0}
        ).SerializeToString(),
        options,
    )
    results = []
    for value in (6, -2, INT_MAX, 2):
        index = np.array([4, 1, 5, 3, 0, value], np.int32)
        (got,) = session.run(None, {"grad_expanded_x": V1, "expanded_row_idx": index})
        results.append([got.shape, bool(np.isnan(got).all()), np.nan_to_num(got).tolist()])
    report(results)


def test_a05_a_plain_session_survives_bad_indices() -> None:
    """vLLM #45492: in a plain session the process lives, the output is NaN and the log says why."""
    results, log = child(child_a05)
    zeros = np.zeros((3, 2)).tolist()
    assert results == [[[3, 2], True, zeros]] * 3 + [[[3, 2], False, V1_GRAD.tolist()]]
    assert "expanded_row_idx" in log and str(INT_MAX) in log


@each_dtype
@everywhere((GRAD, "padded"), (UNGRAD, "slot"), (UNGRAD, "row"), (COMBINE, "slot"), routes=FEW)
def test_a06_nothing_but_sentinels_is_nothing_but_zeros(op: str, mode: str, route: str, dtype: Any) -> None:
    """vLLM #54747: where every slot is -1 all outputs are written, whatever memory held before."""
    inputs, attributes = example(op, mode, dtype, tokens=32, hidden=33, capacity=20)
    inputs[1] = np.full_like(inputs[1], -1)
    if mode == "slot" and op == UNGRAD:
        inputs[2] = inputs[1].copy()
    for _ in range(34):  # a hundred times over the three dtypes
        poison(*inputs, np.empty((32, 33), dtype))
        got = run(op, route, inputs, attributes)
        sums = [v for v in got if v is not None and v.dtype == dtype][: 2 if op == UNGRAD else 1]
        assert sums[0].shape[1] == 33
        assert not any(v.astype(np.float64).any() for v in sums)


def empty_sizes(op: str, mode: str) -> Iterator[dict[str, int]]:
    yield {"tokens": 12, "hidden": 0}
    yield {"experts": 1, "top_k": 1}
    if (op, mode) != (INIT, "padded"):  # the dispatch wants 1 <= C <= T
        yield {"tokens": 0, "capacity": 3 if op == GRAD else 0}
    if (op, mode) == (GRAD, "padded"):
        yield {"capacity": 0}
    if op in (COMBINE, UNGRAD):
        yield {"experts": 0, "top_k": 0, "capacity": 0}


@each_dtype
@everywhere(routes=FEW)
def test_a07_empty_axes_leave_no_output_unwritten(op: str, mode: str, route: str, dtype: Any) -> None:
    """Paddle #79470: an early exit on an empty axis still owes the zeros of the other outputs."""
    for sizes in empty_sizes(op, mode):
        inputs, attributes = example(op, mode, dtype, **sizes)
        poison(*inputs)
        check(op, route, inputs, attributes)


def test_a07_the_sizes_of_the_report() -> None:
    """Paddle #79470: hidden size 0 with 12 tokens, 4 experts and weights gives zero weights' grads."""
    inputs, attributes = example(UNGRAD, "slot", tokens=12, hidden=0)
    for route in ROUTES:
        grad, probs_grad = run(UNGRAD, route, inputs, attributes)
        assert grad.shape == (24, 0)
        np.testing.assert_array_equal(probs_grad, np.zeros((12, 4)))


# op, mode, input, its wrong shape, the error, what the message names
COMPANIONS: dict[str, tuple[str, str, int, tuple[int, ...], type[Exception], tuple[str, ...]]] = {
    "probs one token short": (UNGRAD, "slot", 5, (5, 4), moe_onnx.ShapeError, ("probs", "5", "6")),
    "probs one expert more": (UNGRAD, "slot", 5, (6, 5), moe_onnx.ShapeError, ("probs", "4", "5")),
    "probs of no tokens": (UNGRAD, "slot", 5, (0, 4), moe_onnx.ShapeError, ("probs", "0", "6")),
    "probs of rank 1": (UNGRAD, "slot", 5, (24,), moe_onnx.RankError, ("probs", "1-D")),
    "map of rank 1": (UNGRAD, "slot", 3, (24,), moe_onnx.RankError, ("routing_map", "1-D")),
    "map one token more": (UNGRAD, "slot", 3, (7, 4), moe_onnx.ShapeError, ("routing_map", "7")),
    "rows missing": (UNGRAD, "slot", 4, (11, 5), moe_onnx.ShapeError, ("permuted_tokens", "11", "12")),
    "rows of another H": (UNGRAD, "slot", 4, (12, 4), moe_onnx.ShapeError, ("permuted_tokens", "4")),
    "index short": (UNGRAD, "row", 1, (10,), moe_onnx.ShapeError, ("out_index", "10", "12")),
    "token ids short": (UNGRAD, "row", 2, (11,), moe_onnx.ShapeError, ("permute_token_id", "11")),
    "row form, rows missing": (UNGRAD, "row", 4, (8, 5), moe_onnx.ShapeError, ("permuted_tokens",)),
    "padded probs short": (UNGRAD, "padded", 5, (5, 4), moe_onnx.ShapeError, ("probs", "5", "6")),
    "padded probs wide": (UNGRAD, "padded", 5, (6, 6), moe_onnx.ShapeError, ("probs", "6", "4")),
    "padded rows missing": (UNGRAD, "padded", 4, (11, 5), moe_onnx.ShapeError, ("permuted_tokens",)),
    "forward, probs short": (COMBINE, "slot", 3, (5, 4), moe_onnx.ShapeError, ("probs", "5", "6")),
    "forward, probs wide": (COMBINE, "slot", 3, (6, 5), moe_onnx.ShapeError, ("probs", "4", "5")),
    "forward, no tokens": (COMBINE, "slot", 3, (0, 4), moe_onnx.ShapeError, ("probs", "0", "6")),
    "forward, map of rank 1": (COMBINE, "slot", 2, (24,), moe_onnx.RankError, ("routing_map",)),
    "forward, rows missing": (COMBINE, "slot", 0, (11, 5), moe_onnx.ShapeError, ("permuted_tokens",)),
    "forward padded, rows": (COMBINE, "padded", 0, (11, 5), moe_onnx.ShapeError, ("sorted_indices",)),
}


@pytest.mark.parametrize(
    ("case", "route"),
    [(case, route) for case in COMPANIONS for route in ROUTES if has_route(COMPANIONS[case][0], route)],
)
def test_a08_companions_of_a_wrong_shape_are_named(case: str, route: str) -> None:
    """Paddle #79211: a companion that is too small is an error of its own, not a read past its end."""
    op, mode, at, shape, error, mentions = COMPANIONS[case]
    inputs, attributes = example(op, mode)
    inputs[at] = np.ones(shape, inputs[at].dtype)
    if inputs[at].dtype == np.int32:
        inputs[at] = example(op, mode)[0][at][: shape[0]]
    if route in BODY_ROUTES:
        # The runtime may find it before the body's own check does; it must not give numbers.
        with pytest.raises(Exception, match=r"(?i)must|indices|shape|dimension"):
            run(op, route, inputs, attributes)
        return
    with pytest.raises(error) as caught:
        run(op, route, inputs, attributes)
    for mention in (op, *mentions):
        assert mention in str(caught.value)


@each_dtype
@everywhere()
def test_a09_empty_inputs_change_no_output_but_in_size(op: str, mode: str, route: str, dtype: Any) -> None:
    """TransformerEngine #1468: with zero rows the outputs keep their number, ranks and dtypes."""
    usual = run(op, route, *example(op, mode, dtype))
    if op == INIT and mode == "padded":  # C <= T needs a token; nothing is empty but the rows
        empty = run(op, route, *example(op, mode, dtype, tokens=3, hidden=0))
    else:
        empty = run(op, route, *example(op, mode, dtype, tokens=0, capacity=0))
    assert [v is None for v in usual] == [v is None for v in empty]
    kinds = [[(v.dtype, v.ndim) for v in values if v is not None] for values in (usual, empty)]
    assert kinds[0] == kinds[1]


@each_dtype
@routes_of(UNGRAD, FEW)
@pytest.mark.parametrize("mode", MODES[UNGRAD])
def test_a10_what_no_slot_names_is_exactly_zero(mode: str, route: str, dtype: Any) -> None:
    """Primus-Turbo #345: rows and cells without a slot are 0, though NaN and inf stand all round."""
    inputs, attributes = example(UNGRAD, mode, dtype, tokens=9, experts=6, top_k=2, capacity=2)
    dy, out_index, token_id, chosen, permuted, probs = inputs
    named = np.zeros(probs.shape, np.bool_)
    if mode == "padded":
        named[token_id, out_index // 2] = True
        unnamed_rows = []
    else:
        experts = np.nonzero(chosen)[1]
        tokens = np.repeat(np.arange(9), 2)
        skipped = np.arange(18) % 3 == 0
        named[tokens[~skipped], experts[~skipped]] = True
        unnamed_rows = out_index[skipped]
        out_index[skipped] = -1
        if mode == "slot":
            token_id[skipped] = -1
    probs[~named] = np.resize([np.nan, np.inf, -np.inf], (~named).sum()).astype(dtype)
    permuted[unnamed_rows] = np.nan
    dy[[0, -1]] = np.nan  # the tokens that a row without one would copy by mistake
    for present in (inputs, inputs[:3]):
        poison(dy, permuted, probs)
        grad, probs_grad = run(UNGRAD, route, present, attributes)
        assert not grad[unnamed_rows].astype(np.float64).any()
        assert probs_grad is None or not probs_grad[~named].astype(np.float64).any()
        assert_same([grad, probs_grad], oracle(UNGRAD, present, attributes))


@each_dtype
@routes_of(INIT, FEW)
def test_a10_rows_that_no_token_fills_are_exactly_zero(route: str, dtype: Any) -> None:
    """Primus-Turbo #345: the unfilled rows of an expert are written, not left as memory was."""
    inputs, attributes = example(INIT, "padded", dtype)
    inputs[1] = np.tile(np.array([0, 1], np.int32), (6, 1))  # experts 2 and 3 get nothing
    inputs[0] += np.array(20, dtype)
    poison(inputs[0], np.empty((4, 3, 5), dtype))
    expanded = run(INIT, route, inputs, attributes)[0].astype(np.float64)
    assert expanded[:2].all() and not expanded[2:].any()


def test_every_kernel_is_under_test() -> None:
    """The routes of this module are those of the package: a new operator must be added above."""
    assert set(KERNELS) == {GRAD, UNGRAD}
    # The grouped products, the activation, the sum and the update route nothing: test_grouped_matmul.py,
    # test_swi_glu.py, test_square_sum.py and test_adam_w.py are about them. The reports that touch the
    # dispatch by map and the combine by index are in test_permute.py and test_finalize_routing.py.
    others = {"MoeSwiGlu", "MoeSwiGluGrad", "MoeSquareSum", "MoeAdamW"}
    assert {*MODES, *GROUPED, *FINALIZE, *PERMUTE, *others} == set(BY_NAME)
