"""What public bug reports on MoE operators and their runtimes teach, as tests of this package.

``aNN`` is an entry of a collection of such reports; the docstring names the report and its kind of
mistake. The test is of the kind: every route, dtype and mode in which it could happen here. Expected
numbers are counted by hand, by float64 numpy, or by the per-token oracles.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from routes import BODY_ROUTES, ELEMS, KERNELS, ROUTES, feed_of, has_route, make_model, run, session_of

import moe_onnx
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN

TESTS = Path(__file__).parent
INIT, GRAD = "MoeInitRoutingV2", "MoeInitRoutingV2Grad"
COMBINE, UNGRAD = "MoeTokenUnpermuteWithRoutingMap", "MoeTokenUnpermuteWithRoutingMapGrad"
MODES = {
    INIT: ("dropless", "active", "padded"),
    GRAD: ("dropless", "active", "padded"),
    COMBINE: ("slot", "padded"),
    UNGRAD: ("slot", "row", "padded"),
}
ALL_BUT_ACTIVE = [(op, mode) for op in MODES for mode in MODES[op] if mode != "active"]
ORACLES: dict[str, Callable[..., Any]] = {
    INIT: oracles.init_routing_v2,
    GRAD: oracles.init_routing_v2_grad,
    COMBINE: oracles.unpermute,
    UNGRAD: oracles.unpermute_grad,
}
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float32": F32, "float16": F16, "bfloat16": BF16}
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
# Without the evaluator, which is the reference again, and the body once more unoptimised: for kinds of
# mistake in which these two are not apart from the others.
FEW = ("reference", "kernel", "python", "body")
EXACT = tuple(route for route in ROUTES if route not in BODY_ROUTES)
KERNEL_CHOICES = ("python", "body")

V1 = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
V1_INDEX = np.array([4, 1, 5, 3, 0, 2], np.int32)
V1_GRAD = np.array([[12, 14], [18, 20], [6, 8]], np.float32)

kernel_choices = pytest.mark.parametrize("kernels", KERNEL_CHOICES)


def each_dtype(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in every dtype, as one test: as three they would take longer to set up than to run."""

    @functools.wraps(test)
    def in_each(**arguments: Any) -> None:
        for name, dtype in DTYPES.items():
            try:
                test(dtype=dtype, **arguments)
            except BaseException as error:
                error.add_note(f"dtype {name}")
                raise

    signature = inspect.signature(test)
    others = [p for p in signature.parameters.values() if p.name != "dtype"]
    in_each.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return in_each


def everywhere(*cases: str | tuple[str, str], routes: Sequence[str] = ROUTES) -> Any:
    """Parametrise over (op, mode, route): of operators, of (op, mode) pairs, by default of all."""
    pairs = [
        (case, mode) if isinstance(case, str) else case
        for case in cases or MODES
        for mode in (MODES[case] if isinstance(case, str) else case[1:])
    ]
    return pytest.mark.parametrize(
        ("op", "mode", "route"),
        [
            pytest.param(op, mode, route, id=f"{op}-{mode}-{route}")
            for op, mode in pairs
            for route in routes
            if has_route(op, route)
        ],
    )


def routes_of(op: str, routes: Sequence[str] = ROUTES) -> Any:
    return pytest.mark.parametrize("route", [r for r in routes if has_route(op, r)])


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Small integers, whose sums and products are exact in every dtype and order."""
    return rng.integers(-8, 9, shape).astype(dtype)


def normals(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def example(
    op: str,
    mode: str,
    dtype: Any = F32,
    *,
    tokens: int = 6,
    experts: int = 4,
    top_k: int = 2,
    hidden: int = 5,
    capacity: int = 3,
    active: int = 7,
    probs_dtype: Any = None,
    routing: tuple[Any, Any, Any] | None = None,
    draw: Callable[..., Any] = integers,
    seed: int = 0,
) -> tuple[list[Any], dict[str, Any]]:
    """A legal call of ``op`` in ``mode``: inputs and attributes."""
    rng = np.random.default_rng(seed)
    ids, chosen, rows = routing or oracles.random_routing(rng, tokens, experts, top_k)
    if op in (INIT, GRAD):
        attributes = {"drop_pad_mode": int(mode == "padded"), "active_num": 0}
        if mode == "active":
            attributes["active_num"] = active
        if op == INIT:
            if mode == "padded":
                attributes |= {"expert_num": experts, "expert_capacity": capacity}
            return [draw(rng, (tokens, hidden), dtype), ids], attributes
        attributes["top_k"] = top_k
        if mode == "padded":
            rows = padded_index(ids, experts, capacity)
            return [draw(rng, (experts, capacity, hidden), dtype), rows], attributes
        num_rows = active if mode == "active" else len(rows)
        return [draw(rng, (num_rows, hidden), dtype), rows], attributes
    # Powers of two as weights keep sums of integers exact.
    weights = rng.choice([0.25, 0.5, 1, 2], (tokens, experts)).astype(probs_dtype or dtype)
    out_index, token_id = rows, rows.copy()
    slots = rows
    if mode == "padded":
        slots, out_index, token_id = oracles.padded_slots(chosen, capacity)
    elif mode == "row":
        token_id = np.repeat(np.arange(tokens, dtype=np.int32), top_k)
    permuted = draw(rng, (len(slots), hidden), dtype)
    attributes = {"drop_and_pad": int(mode == "padded")}
    if op == COMBINE:
        return [permuted, slots, chosen, weights], attributes
    grad = draw(rng, (tokens, hidden), dtype)
    return [grad, out_index, token_id, chosen, permuted, weights], attributes


def padded_index(ids: Any, experts: int, capacity: int) -> Any:
    tokens = np.zeros((len(ids), 1), np.float32)
    return oracles.init_routing_v2(
        tokens, ids, drop_pad_mode=1, expert_num=experts, expert_capacity=capacity
    )[1]


def oracle(op: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Any]:
    result = ORACLES[op](*inputs, **attributes)
    return list(result) if isinstance(result, tuple) else [result]


def assert_same(got: list[Any], want: list[Any]) -> None:
    """Same number of outputs, same dtypes and shapes, same bits up to the sign of zero."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def check(op: str, route: str, inputs: list[Any], attributes: dict[str, Any]) -> None:
    assert_same(run(op, route, inputs, attributes), oracle(op, inputs, attributes))


def assert_rounded(got: Any, exact: Any, slack: Any) -> None:
    """``got`` is what something within ``slack`` of the float64 ``exact`` rounds to."""
    low, high = (exact - slack).astype(got.dtype), (exact + slack).astype(got.dtype)
    assert got.shape == exact.shape
    wide = got.astype(np.float64)
    assert ((low.astype(np.float64) <= wide) & (wide <= high.astype(np.float64))).all()


def exact_grad(grad: Any, index: Any, top_k: int) -> tuple[Any, Any]:
    """Dropless gradient of the dispatch in float64, and the contract's bound on a body's sum."""
    exact = np.zeros((len(index) // top_k, grad.shape[1]))
    size = np.zeros_like(exact)
    for slot in index.reshape(-1, top_k).T:
        rows = grad[slot].astype(np.float64)
        exact += rows
        size += np.abs(rows)
    return exact, size * top_k * 2.0**-23


def check_ungrad(inputs: list[Any], grad: Any, probs_grad: Any) -> None:
    """The slot form of the gradient of the combine, every token with K experts, in float64."""
    dy, index, _, chosen, permuted, probs = inputs
    tokens, hidden = dy.shape
    rows = index.reshape(tokens, -1)
    experts = np.nonzero(chosen)[1].reshape(rows.shape)
    wide = dy.astype(np.float64)
    exact = np.zeros(probs.shape)
    slack = np.zeros(probs.shape)
    every = np.arange(tokens)
    for row, expert in zip(rows.T, experts.T, strict=True):
        # One product, exact in float64, and so rounded once in every dtype.
        want = (wide * probs[every, expert].astype(np.float64)[:, None]).astype(grad.dtype)
        np.testing.assert_array_equal(grad[row].astype(np.float64), want.astype(np.float64))
        products = wide * permuted[row].astype(np.float64)
        exact[every, expert] = products.sum(axis=1)
        slack[every, expert] = np.abs(products).sum(axis=1) * hidden * 2.0**-23
    assert_rounded(probs_grad, exact, slack)


def poison(*arrays: Any) -> None:
    """Leave NaNs in freed memory of these sizes, which the next allocations get."""
    held = [np.full(a.shape, np.nan, a.dtype) for a in arrays if a.dtype.kind != "i" for _ in range(4)]
    del held


def bits(values: Iterable[Any]) -> bytes:
    return b"".join(v.tobytes() for v in values if v is not None)


# Models of several nodes.


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain=DOMAIN, name=f"node_{outputs[0]}", **attributes)


def std(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=f"std_{outputs[0]}", **attributes)


def info(name: str, like: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMS[like.dtype.name], [None] * like.ndim)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    *,
    functions: Sequence[onnx.FunctionProto] = (),
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = 21,
    domains: Sequence[str] = (DOMAIN,),
) -> onnx.ModelProto:
    """A model; arrays stand for the dtypes and ranks of its inputs and outputs."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(name, like) for name, like in inputs.items()],
        [info(name, like) for name, like in outputs.items()],
        initializer=list(initializers),
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(functions)
    return model


def grad_model(dtype: Any = F32, domain: str = DOMAIN) -> onnx.ModelProto:
    """V1 as a model: ``g``, ``index`` -> ``y``."""
    dispatch_grad = node(GRAD, ["g", "index"], ["y"], top_k=2)
    dispatch_grad.domain = domain
    example_of = V1.astype(dtype)
    return model_of([dispatch_grad], {"g": example_of, "index": V1_INDEX}, {"y": example_of})


def v1_feed(dtype: Any = F32) -> dict[str, Any]:
    return {"g": V1.astype(dtype), "index": V1_INDEX}


def options_of(**settings: Any) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def open_session(model: Any, kernels: str, **settings: Any) -> moe_onnx.InferenceSession:
    return moe_onnx.InferenceSession(model, options_of(**settings), kernels=kernels)


# Processes. A scenario is a function ``child_...`` of this module, or code that imports in its own
# order; it reports by a last line of JSON.


def in_new_process(code: str, *args: str, timeout: float = 40) -> tuple[Any, str]:
    """Run code in a fresh interpreter that must end by itself; its report, and its stderr."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def child(scenario: Callable[..., None], *args: str, timeout: float = 40) -> tuple[Any, str]:
    code = "import sys, test_public_reports as t; getattr(t, sys.argv[1])(*sys.argv[2:])"
    return in_new_process(code, scenario.__name__, *args, timeout=timeout)


def report(value: Any) -> None:
    print(json.dumps(value), flush=True)


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


# op, mode, inputs that hold the bad value, lowest legal value, first value past the legal ones
INDICES: list[tuple[str, str, tuple[int, ...], int, int]] = [
    (GRAD, "dropless", (1,), 0, 12),
    (GRAD, "active", (1,), 0, 12),
    (GRAD, "padded", (1,), -1, 12),
    (INIT, "padded", (1,), 0, 4),
    (COMBINE, "slot", (1,), -1, 12),
    (COMBINE, "padded", (1,), 0, 6),
    (UNGRAD, "slot", (1, 2), -1, 12),
    (UNGRAD, "row", (1,), -1, 12),
    (UNGRAD, "row", (2,), 0, 6),
    (UNGRAD, "padded", (1,), 0, 12),
    (UNGRAD, "padded", (2,), 0, 6),
]
index_routes = pytest.mark.parametrize(
    ("op", "mode", "at", "low", "high", "route"),
    [
        pytest.param(*case, route, id=f"{case[0]}-{case[1]}-{case[2]}-{route}")
        for case in INDICES
        for route in ROUTES
        if has_route(case[0], route)
    ],
)


def with_index(inputs: list[Any], at: tuple[int, ...], value: int) -> list[Any]:
    """The inputs with ``value`` at flat position 7 of the index inputs ``at``."""
    changed = list(inputs)
    for i in at:
        changed[i] = changed[i].copy()
        changed[i].flat[7] = value
    return changed


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
    options = moe_onnx.register(options_of())
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
    for route in ("kernel", "python", "body"):
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


# A21 to A37: runtime.

V5 = {
    "unpermuted_tokens_grad": [[1, 2], [3, 4], [5, 6]],
    "permuted_tokens": [[1, 0], [0, 1], [1, 1], [2, 0], [0, 2], [1, -1]],
    "probs": [[0.5, 9, 0.25], [0.125, 0.75, 9], [9, 1, 2]],
}
V5_INDEX = np.array([0, 4, 1, 2, 3, 5], np.int32)
V5_MAP = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]], np.bool_)
V5_GRAD = [[0.5, 1], [0.375, 0.5], [2.25, 3], [5, 6], [0.25, 0.5], [10, 12]]
V5_PROBS_GRAD = [[1, 0, 4], [4, 7, 0], [0, 10, -1]]


def v5_inputs(dtype: Any) -> list[Any]:
    dy, permuted, probs = (np.array(value, dtype) for value in V5.values())
    return [dy, V5_INDEX, V5_INDEX, V5_MAP, permuted, probs]


def child_a21() -> None:
    results: dict[str, Any] = {}
    for name, dtype in (("float16", F16), ("bfloat16", BF16)):
        for kernels in ("auto", "python", "body"):
            got = open_session(grad_model(dtype), kernels).run(None, v1_feed(dtype))
            model = make_model(UNGRAD, v5_inputs(dtype), {})
            got += open_session(model, kernels).run(None, feed_of(UNGRAD, v5_inputs(dtype)))
            assert all(value.dtype == dtype for value in got)
            results[f"{name} {kernels}"] = [value.astype(np.float64).tolist() for value in got]
        # A plain session with the Python ops on it cannot run 16 bits: it can only refuse, at load.
        model = moe_onnx.add_function_bodies(grad_model(dtype))
        try:
            ort.InferenceSession(model.SerializeToString(), moe_onnx.register(options_of()))
            results[f"{name} plain"] = "loaded"
        except Exception:
            results[f"{name} plain"] = "refused"
    report(results)


def test_a21_sixteen_bits_do_not_end_the_process() -> None:
    """onnxruntime-extensions #812: 16-bit tensors, which abort a Python op, run with right numbers."""
    results, _ = child(child_a21)
    for name in ("float16", "bfloat16"):
        assert results.pop(f"{name} plain") == "refused"
    want = [V1_GRAD.tolist(), V5_GRAD, V5_PROBS_GRAD]
    assert results == dict.fromkeys(results, want)
    assert len(results) == 6


FORMS = {
    "three inputs": ("dy index index", "rows probs_grad"),
    "trailing blanks": ("dy index index _ _ _", "rows probs_grad"),
    "a map alone": ("dy index index chosen", "rows probs_grad"),
    "rows alone": ("dy index index _ permuted", "rows probs_grad"),
    "map and rows": ("dy index index chosen permuted", "rows probs_grad"),
    "all": ("dy index index chosen permuted probs", "rows probs_grad"),
    "no second output": ("dy index index chosen permuted probs", "rows"),
    "no second output, no probs": ("dy index index", "rows"),
    "blank first output": ("dy index index chosen permuted probs", "_ probs_grad"),
}


def form_model(inputs: str, outputs: str, sizes_known: bool = False) -> onnx.ModelProto:
    ins, outs = ([("" if n == "_" else n) for n in text.split()] for text in (inputs, outputs))
    values = v5_values()
    unpermute = helper.make_node(UNGRAD, ins, outs, domain=DOMAIN, name="the_node")
    model = model_of(
        [unpermute],
        {name: values[name] for name in ins if name},
        {name: values["dy"] for name in outs if name},
    )
    if sizes_known:
        for value in model.graph.input:
            elem = value.type.tensor_type.elem_type
            shape = values[value.name].shape
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem, shape))
    return model


def run_form(model: onnx.ModelProto, kernels: str) -> dict[str, Any]:
    session = open_session(model, kernels)
    feed = {i.name: v5_values()[i.name] for i in session.get_inputs()}
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feed), strict=True))


def v5_values() -> dict[str, Any]:
    return dict(zip(("dy", "index", "_", "chosen", "permuted", "probs"), v5_inputs(F32), strict=True))


@pytest.mark.parametrize(("inputs", "outputs"), FORMS.values(), ids=FORMS)
@kernel_choices
def test_a22_optional_inputs_and_outputs_may_be_absent(kernels: str, inputs: str, outputs: str) -> None:
    """onnxruntime-extensions #923, #283: every legal form of a node loads and runs."""
    got = run_form(form_model(inputs, outputs), kernels)
    assert list(got) == [name for name in outputs.split() if name != "_"]
    has_probs = "probs" in inputs.split()
    if "rows" in got:
        copies = [[1, 2], [3, 4], [3, 4], [5, 6], [1, 2], [5, 6]]  # dY by V5_INDEX
        np.testing.assert_array_equal(got["rows"], V5_GRAD if has_probs else copies)
    if has_probs and "probs_grad" in got:
        np.testing.assert_array_equal(got["probs_grad"], V5_PROBS_GRAD)
    elif "probs_grad" in got:
        assert got["probs_grad"].size == 0


@pytest.mark.parametrize(
    ("inputs", "missing"),
    [
        ("dy index index _ permuted probs", "routing_map"),
        ("dy index index chosen _ probs", "permuted_tokens"),
        ("dy index _ chosen permuted probs", "permute_token_id"),
        ("dy", "out_index"),
    ],
)
@kernel_choices
def test_a22_illegal_forms_are_refused_by_name(kernels: str, inputs: str, missing: str) -> None:
    """onnxruntime-extensions #923: a form that cannot run is refused when the session is made."""
    with pytest.raises(moe_onnx.MissingInputError, match=missing) as caught:
        open_session(form_model(inputs, "rows probs_grad", sizes_known=True), kernels)
    assert "the_node" in str(caught.value)
    # Where sizes are not known, probs may turn out to be empty, which is absent: then the run refuses.
    with pytest.raises(moe_onnx.MoeOnnxError, match=missing):
        run_form(form_model(inputs, "rows probs_grad"), kernels)


@kernel_choices
def test_a22_forward_outputs_may_be_absent(kernels: str) -> None:
    """onnxruntime-extensions #283: the same of the dispatch, whose counts are in the middle."""
    inputs, _ = example(INIT, "padded")
    feed = {"x": inputs[0], "ids": inputs[1]}
    attributes = {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 3}
    want = oracles.init_routing_v2(*inputs, **attributes, expert_tokens_before_capacity_flag=True)
    for outputs, flag in (("rows", 0), ("rows index", 0), ("_ index", 0), ("rows _ _ before", 1)):
        names = [("" if n == "_" else n) for n in outputs.split()]
        dispatch = helper.make_node(
            INIT, ["x", "ids"], names, domain=DOMAIN, expert_tokens_before_capacity_flag=flag, **attributes
        )
        shown = {n: v for n, v in zip(names, want, strict=False) if n}
        got = open_session(model_of([dispatch], feed, shown), kernels).run(None, feed)
        assert_same(got, list(shown.values()))


ATTRIBUTES = {
    GRAD: ("top_k", "drop_pad_mode", "active_num"),
    INIT: (
        "active_num",
        "expert_capacity",
        "expert_num",
        "drop_pad_mode",
        "expert_tokens_count_or_cumsum_flag",
        "expert_tokens_before_capacity_flag",
    ),
    COMBINE: ("drop_and_pad", "restore_shape"),
    UNGRAD: ("drop_and_pad", "restore_shape"),
}


def with_attribute(op: str, name: str, value: Any) -> onnx.ModelProto:
    model = make_model(op, *example(op, MODES[op][0]))
    attributes = model.graph.node[0].attribute
    kept = [attr for attr in attributes if attr.name != name]
    del attributes[:]
    attributes.extend(kept)
    if value is not None:
        attributes.append(helper.make_attribute(name, value))
    return model


@pytest.mark.parametrize(
    ("op", "name"), [pytest.param(op, n, id=f"{op}-{n}") for op in ATTRIBUTES for n in ATTRIBUTES[op]]
)
@kernel_choices
def test_a23_attributes_of_a_wrong_type_are_named(kernels: str, op: str, name: str) -> None:
    """onnxruntime-extensions #74: the message names operator, attribute and expected type."""
    wanted = AttributeProto.INTS if name == "restore_shape" else AttributeProto.INT
    for value in (2.0, "2", [2.0], [2] if wanted == AttributeProto.INT else 2):
        with pytest.raises(moe_onnx.AttributeValueError) as caught:
            open_session(with_attribute(op, name, value), kernels)
        assert (caught.value.op, caught.value.aclnn_status) == (op, 561002)
        for part in (op, f"'{name}'", AttributeProto.AttributeType.Name(wanted)):
            assert part in str(caught.value)


@kernel_choices
def test_a23_missing_and_unknown_attributes(kernels: str) -> None:
    """onnxruntime-extensions #74: defaults are filled in, required and unknown ones are named."""
    session = open_session(with_attribute(GRAD, "active_num", None), kernels)
    inputs, attributes = example(GRAD, "dropless")
    got = session.run(None, feed_of(GRAD, inputs))
    assert_same(got, oracle(GRAD, inputs, attributes))
    with pytest.raises(moe_onnx.AttributeValueError, match=f"{GRAD}.*'top_k'.*missing"):
        open_session(with_attribute(GRAD, "top_k", None), kernels)
    for op in ATTRIBUTES:
        with pytest.raises(moe_onnx.AttributeValueError, match=f"{op}.*'not_known'"):
            open_session(with_attribute(op, "not_known", 1), kernels)
    with pytest.raises(moe_onnx.AttributeValueError, match="drop_and_pad'?\\?"):
        open_session(with_attribute(UNGRAD, "drop_and_padd", 1), kernels)


@pytest.mark.parametrize("kernels", ["auto", *KERNEL_CHOICES])
def test_a24_one_session_holds_an_operator_in_every_dtype(kernels: str) -> None:
    """onnxruntime-extensions #451: one name with two element types is no conflict."""
    nodes, feed, want = [], {}, {}
    for i, dtype in enumerate([*DTYPES.values(), np.dtype(np.float64)]):
        grads, attributes = example(GRAD, "padded", dtype, seed=i)
        feed |= {f"g{i}": grads[0], f"i{i}": grads[1]}
        nodes.append(node(GRAD, [f"g{i}", f"i{i}"], [f"y{i}"], **attributes))
        want[f"y{i}"] = oracle(GRAD, grads, attributes)[0]
        inputs, attributes = example(UNGRAD, "slot", dtype, seed=i)
        if i % 2:
            inputs[3] = inputs[3].astype(np.int8) * np.int8(-3)
        names = [f"{name}{i}" for name in ("dy", "o", "o", "m", "p", "w")]
        feed |= dict(zip(names, inputs, strict=True))
        nodes.append(node(UNGRAD, names, [f"r{i}", f"q{i}"], **attributes))
        want[f"r{i}"], want[f"q{i}"] = oracle(UNGRAD, inputs, attributes)
    got = open_session(model_of(nodes, feed, want), kernels).run(None, feed)
    assert_same(got, list(want.values()))


FRESH = """
import sys, json
import numpy as np
import onnxruntime as ort
how, path = sys.argv[1:]
if how == "late":
    import onnxruntime_extensions
    every = [ort.SessionOptions() for _ in range(3)]
    for options in every:
        options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    import moe_onnx
else:
    every = [None] * 3
    import moe_onnx
feed = {"g": np.arange(1, 13, dtype=np.float32).reshape(6, 2)}
feed["index"] = np.array([4, 1, 5, 3, 0, 2], np.int32)
results = {}
for kernels, options in zip(("body", "python", "auto"), every):
    try:
        session = moe_onnx.InferenceSession(path, options, kernels=kernels)
        results[kernels] = session.run(None, feed)[0].tolist()
    except moe_onnx.MoeOnnxError as error:
        results[kernels] = str(error)
    except Exception as error:
        results[kernels] = f"{type(error).__name__}, not an error of this package: {error}"
print(json.dumps(results))
"""


@pytest.fixture
def v1_path(tmp_path: Path) -> str:
    path = tmp_path / "model.onnx"
    onnx.save(grad_model(), path)
    return str(path)


def test_a25_the_first_session_of_a_process_works(v1_path: str) -> None:
    """onnxruntime-extensions #964: import and session are all it takes."""
    results, _ = in_new_process(FRESH, "fresh", v1_path)
    assert results == dict.fromkeys(("body", "python", "auto"), V1_GRAD.tolist())


def test_a25_options_registered_before_the_import(v1_path: str) -> None:
    """onnxruntime-extensions #188: options that cannot see the operators work, or are named."""
    results, _ = in_new_process(FRESH, "late", v1_path)
    assert results.pop("body") == V1_GRAD.tolist()
    for result in results.values():
        if result != V1_GRAD.tolist():
            assert "not an error of this package" not in result
            assert "import moe_onnx" in result.lower()


@pytest.mark.parametrize("domain", ["", "ascend_moe", "Ascend.Moe", "ai.onnx.contrib", "com.microsoft"])
@pytest.mark.parametrize("kernels", ["auto", *KERNEL_CHOICES])
def test_a25_a_mistyped_domain_is_named(kernels: str, domain: str) -> None:
    """onnxruntime #8635: an operator in a wrong domain is an error that says which is right."""
    with pytest.raises(moe_onnx.ModelError, match=rf"{GRAD}.*'{DOMAIN}'"):
        open_session(grad_model(domain=domain), kernels)


def test_a25_what_a_plain_session_needs() -> None:
    """onnxruntime #23566: a plain session needs registered ops or function bodies, and either do."""
    model = grad_model()
    model.graph.node[0].attribute.extend(
        helper.make_attribute(name, 0) for name in ("drop_pad_mode", "active_num")
    )
    with pytest.raises(Exception, match=GRAD):
        ort.InferenceSession(model.SerializeToString(), options_of())
    registered = ort.InferenceSession(model.SerializeToString(), moe_onnx.register(options_of()))
    body = moe_onnx.add_function_bodies(model)
    for session in (registered, ort.InferenceSession(body.SerializeToString(), options_of())):
        np.testing.assert_array_equal(session.run(None, v1_feed())[0], V1_GRAD)


LOAD_PLAIN = """
import sys, json
import numpy as np
import onnxruntime as ort
feed = {"g": np.arange(1, 13, dtype=np.float32).reshape(6, 2)}
feed["index"] = np.array([4, 1, 5, 3, 0, 2], np.int32)
try:
    session = ort.InferenceSession(sys.argv[1])
    print(json.dumps(session.run(None, feed)[0].tolist()))
except Exception as error:
    print(json.dumps(str(error)))
"""


@kernel_choices
def test_a26_an_optimised_model_can_be_saved_and_read_again(kernels: str, tmp_path: Path) -> None:
    """onnxruntime-extensions #868: what onnxruntime saves after registration is no foreign model."""
    path = str(tmp_path / "optimised.onnx")
    open_session(grad_model(), kernels, optimized_model_filepath=path)
    onnx.checker.check_model(path)
    plain, _ = in_new_process(LOAD_PLAIN, path)
    if kernels == "body":
        assert plain == V1_GRAD.tolist()
    else:
        assert GRAD in plain  # a clear error: which operator is missing
    for again in ("auto", *KERNEL_CHOICES):
        got = open_session(path, again).run(None, v1_feed())
        np.testing.assert_array_equal(got[0], V1_GRAD)


@each_dtype
@everywhere(GRAD, UNGRAD, routes=("reference", "kernel", "python"))
def test_a27_outputs_are_what_was_declared(op: str, mode: str, route: str, dtype: Any) -> None:
    """onnxruntime-extensions #922: number, dtype, shape and layout of what an op's body returns."""
    inputs, attributes = example(op, mode, dtype)
    got = run(op, route, inputs, attributes)
    assert [type(value) for value in got] == [np.ndarray] * (2 if op == UNGRAD else 1)
    assert all(value.flags.c_contiguous and value.flags.writeable for value in got)
    assert_same(got, oracle(op, inputs, attributes))
    if op == UNGRAD:
        got = run(op, route, inputs[:3], attributes)
        assert len(got) == 2 and got[0].dtype == dtype and got[1] is None


@pytest.mark.parametrize("op", [GRAD, UNGRAD])
def test_a27_a_registered_op_never_raises_nor_changes_its_outputs(op: str) -> None:
    """onnxruntime-extensions #922: whatever goes wrong, a Python op returns what it declared."""
    from onnxruntime_extensions._ocos import Opdef

    bodies = [d.body for d in Opdef._odlist.values() if d.op_type == f"{DOMAIN}::{op}"]
    inputs, attributes = example(op, MODES[op][0])
    want = oracle(op, inputs, attributes)
    wrong = [with_index(inputs, (1,), 99), inputs, [value[:0] for value in inputs]]
    assert bodies
    for body in bodies:
        for values, attrs in zip((inputs, *wrong), (attributes, attributes, {}, {"a": 1}), strict=True):
            result = body(*values, **attrs)
            results = result if isinstance(result, tuple) else (result,)
            assert len(results) == len(want)
            for value, right in zip(results, want, strict=True):
                array = np.asarray(value.flatten().tolist())
                assert array.dtype in (np.float32, np.float64)
                assert array.flags.c_contiguous and len(value.shape) == right.ndim
                assert array.size == np.prod(value.shape)
                if values is inputs and attrs is attributes:
                    np.testing.assert_array_equal(array.reshape(right.shape), right)


def symbolic_model(op: str, mode: str, outputs: Sequence[Sequence[Any]]) -> onnx.ModelProto:
    model = make_model(op, *example(op, mode))
    for value, shape in zip(model.graph.output, outputs, strict=True):
        elem = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, elem, shape))
    return model


@kernel_choices
@pytest.mark.parametrize(
    ("op", "mode", "outputs"),
    [
        (GRAD, "dropless", [["T", "H"]]),
        (GRAD, "padded", [["T", 5]]),
        (UNGRAD, "slot", [["N", "H"], ["T", 4]]),
        (UNGRAD, "padded", [["N", 5], ["T", "E"]]),
    ],
)
def test_a28_declared_shapes_are_those_of_the_run(
    kernels: str, op: str, mode: str, outputs: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime #14683: symbolic shapes hold at three batch sizes, without a warning."""
    session = open_session(symbolic_model(op, mode, outputs), kernels, log_severity_level=2)
    for tokens in (6, 3, 11):
        inputs, attributes = example(op, mode, tokens=tokens)
        assert_same(session.run(None, feed_of(op, inputs)), oracle(op, inputs, attributes))
    assert "VerifyOutputSizes" not in capfd.readouterr().err
    # That the warning would be seen: a wrong rank or size gives it.
    wrong = [[9, 9]] * len(outputs)
    session = open_session(symbolic_model(op, mode, wrong), kernels, log_severity_level=2)
    session.run(None, feed_of(op, inputs))
    assert "VerifyOutputSizes" in capfd.readouterr().err


@pytest.mark.parametrize(("op", "mode"), [(op, mode) for op in MODES for mode in MODES[op]])
def test_a28_inferred_shapes_are_those_of_the_run(op: str, mode: str) -> None:
    """onnxruntime #14683: what the schema infers is what every size gives."""
    for tokens in (6, 3, 11):
        inputs, attributes = example(op, mode, tokens=tokens)
        model = make_model(op, inputs, attributes)
        for value, array in zip(model.graph.input, inputs, strict=True):
            elem = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem, array.shape))
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        shapes = [
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            for value in inferred.graph.output
        ]
        want = [(0,) if v is None else v.shape for v in oracle(op, inputs, attributes)]
        assert shapes == want


@kernel_choices
def test_a29_bfloat16_goes_in_and_comes_out(kernels: str) -> None:
    """onnxruntime #20578, #24106: ml_dtypes arrays and OrtValues both work, and outlive the session."""
    session = open_session(grad_model(BF16), kernels)
    (first,) = session.run(None, v1_feed(BF16))
    raw = np.ascontiguousarray(V1.astype(BF16)).view(np.uint16)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.BFLOAT16)
    index = ort.OrtValue.ortvalue_from_numpy(V1_INDEX)
    (second,) = session.run(["y"], {"g": value, "index": V1_INDEX})
    (third,) = session.run_with_ort_values(["y"], {"g": value, "index": index})
    assert (third.data_type(), third.shape()) == ("tensor(bfloat16)", [3, 2])
    (empty,) = session.run(None, {"g": np.zeros((0, 2), BF16), "index": np.zeros(0, np.int32)})
    del session, third
    poison(first)
    for got in (first, second):
        assert_same([got], [V1_GRAD.astype(BF16)])
    assert (empty.dtype, empty.shape) == (BF16, (0, 2))


@pytest.mark.parametrize("fed", [np.uint16, np.float32, np.float16, np.int16])
@kernel_choices
def test_a29_other_arrays_for_bfloat16_get_advice(kernels: str, fed: Any) -> None:
    """onnxruntime #13001: an array of another dtype is refused with the input's name and the cure."""
    session = open_session(grad_model(BF16), kernels)
    with pytest.raises(moe_onnx.DtypeError) as caught:
        session.run(None, {"g": V1.astype(fed), "index": V1_INDEX})
    for part in ("'g'", "bfloat16", np.dtype(fed).name, "astype"):
        assert part in str(caught.value)


@pytest.mark.parametrize("opset", [18, 26])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "mode"), [(INIT, "padded"), (GRAD, "padded"), (COMBINE, "slot"), (UNGRAD, "slot")]
)
def test_a30_bodies_use_only_what_the_cpu_has(op: str, mode: str, dtype: Any, opset: int) -> None:
    """onnxruntime #26311: bodies load in 16 bits in a plain session, which lacks bf16 MatMul and more."""
    inputs, attributes = example(op, mode, dtype)
    session = ort.InferenceSession(wide_model(op, inputs, attributes, opset), options_of())
    got = session.run(None, {f"in{i}": widened(v) for i, v in enumerate(inputs)})
    want = [widened(v) for v in oracle(op, inputs, attributes) if v is not None]
    assert_same(got, want)


def widened(value: Any) -> Any:
    return value if value.dtype in (np.int32, np.bool_) else value.astype(np.float32)


def wide_model(op: str, inputs: list[Any], attributes: dict[str, Any], opset: int = 21) -> bytes:
    """A model with bodies that is fed and fetched in float32 and runs ``op`` in another dtype."""
    nodes, names = [], []
    for i, value in enumerate(inputs):
        names.append(f"in{i}")
        if value.dtype in (F16, BF16):
            names[i] = f"narrow{i}"
            nodes.append(std("Cast", [f"in{i}"], [names[i]], to=ELEMS[value.dtype.name]))
    want = {i: v for i, v in enumerate(oracle(op, inputs, attributes)) if v is not None}
    outs = [f"made{i}" if i in want else "" for i in range(len(BY_NAME[op].outputs))]
    while not outs[-1]:
        outs.pop()
    nodes.append(node(op, names, outs, **attributes))
    shown = {i: f"out{i}" for i in want}
    for i, v in want.items():
        to = TensorProto.INT32 if v.dtype == np.int32 else TensorProto.FLOAT
        nodes.append(std("Cast", [f"made{i}"], [shown[i]], to=to))
    model = model_of(
        nodes,
        {f"in{i}": widened(v) for i, v in enumerate(inputs)},
        {shown[i]: widened(v) for i, v in want.items()},
        opset=opset,
    )
    data: bytes = moe_onnx.add_function_bodies(model).SerializeToString()
    return data


def layer_function(outer: str = "", opset: int = 21) -> onnx.FunctionProto:
    """``my.layers::Back (dy, index, chosen, permuted, probs) <k> => (grad_x, probs_grad)``."""
    nodes = [
        node(UNGRAD, ["dy", "index", "index", "chosen", "permuted", "probs"], ["rows", "probs_grad"]),
        node(GRAD, ["rows", "index"], ["grad_x"]),
    ]
    nodes[1].attribute.append(AttributeProto(name="top_k", type=AttributeProto.INT, ref_attr_name="k"))
    return helper.make_function(
        "my.layers",
        f"Back{outer}",
        ["dy", "index", "chosen", "permuted", "probs"],
        ["grad_x", "probs_grad"],
        nodes,
        [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        ["k"],
    )


def layer_feed(dtype: Any) -> tuple[dict[str, Any], list[Any]]:
    inputs, attributes = example(UNGRAD, "slot", dtype)
    grad, probs_grad = oracle(UNGRAD, inputs, attributes)
    want = [oracles.init_routing_v2_grad(grad, inputs[1], top_k=2), probs_grad]
    names = ("dy", "index", "_", "chosen", "permuted", "probs")
    feed = {n: v for n, v in zip(names, inputs, strict=True) if n != "_"}
    return feed, want


@each_dtype
@kernel_choices
def test_a31_a_layer_as_a_function_runs_like_its_nodes(kernels: str, dtype: Any) -> None:
    """onnxruntime #27873: the same layer, twice as a function and once flat, in every dtype."""
    feed, want = layer_feed(dtype)
    called = [
        helper.make_node("Back", list(feed), [f"x{i}", f"q{i}"], domain="my.layers", k=2) for i in range(2)
    ]
    flat = [
        node(UNGRAD, ["dy", "index", "index", "chosen", "permuted", "probs"], ["rows", "q2"]),
        node(GRAD, ["rows", "index"], ["x2"], top_k=2),
    ]
    shown = {f"{name}{i}": feed["dy"] for i in range(3) for name in "xq"}
    model = model_of(
        [*called, *flat], feed, shown, functions=[layer_function()], domains=(DOMAIN, "my.layers")
    )
    assert_same(open_session(model, kernels).run(None, feed), want * 3)


def other_function(domain: str) -> onnx.FunctionProto:
    """A function of an operator's name that does something else: the last two rows, negated."""
    return onnx.parser.parse_function(
        f'<domain: "{domain}", opset_import: ["": 21]>\n'
        f"{GRAD} <top_k: int = 1, drop_pad_mode: int = 0, active_num: int = 0>"
        " (grad_expanded_x, expanded_row_idx) => (grad_x) {"
        " start = Constant <value_ints = [-2]> ()"
        " end = Constant <value_ints = [9]> ()"
        " last = Slice (grad_expanded_x, start, end)"
        " grad_x = Neg (last) }"
    )


def test_a32_a_function_of_an_operators_name_is_noticed() -> None:
    """onnxruntime #10075: a body that means another thing is refused, noted or not used at all."""
    model = grad_model()
    model.functions.append(other_function(DOMAIN))
    silent, refusals = {}, []
    for kernels in ("auto", *KERNEL_CHOICES):
        try:
            session = open_session(model, kernels)
        except moe_onnx.ModelError as error:
            refusals.append(str(error))
            continue
        if not any("function" in text and GRAD in text for text in session.moe_notes):
            silent[kernels] = session.run(None, v1_feed())[0].tolist()
    assert all(GRAD in refusal for refusal in refusals)
    assert silent == {kernels: V1_GRAD.tolist() for kernels in silent}


@pytest.mark.parametrize("kernels", ["auto", *KERNEL_CHOICES])
def test_a32_a_function_of_that_name_elsewhere_is_left_alone(kernels: str) -> None:
    """onnxruntime #10075: in a domain of its own such a function is the model's affair."""
    own = node(GRAD, ["g", "index"], ["own"], top_k=2)
    own.domain = "my.ops"
    ours = node(GRAD, ["g", "index"], ["y"], top_k=2)
    model = model_of(
        [own, ours],
        v1_feed(),
        {"own": V1, "y": V1},
        functions=[other_function("my.ops")],
        domains=(DOMAIN, "my.ops"),
    )
    got = open_session(model, kernels).run(None, v1_feed())
    assert_same(got, [np.array([[-9, -10], [-11, -12]], np.float32), V1_GRAD])


def back_model(pairs: int) -> tuple[onnx.ModelProto, Callable[[int], tuple[dict[str, Any], list[Any]]]]:
    """Pairs of Python-op nodes side by side, and calls of them in any number of tokens."""
    nodes, names = [], ["dy", "index", "chosen", "permuted", "probs"]
    for i in range(pairs):
        nodes.append(
            node(
                UNGRAD,
                ["dy", "index", "index", "chosen", "permuted", "probs"],
                [f"rows{i}", f"probs_grad{i}"],
            )
        )
        nodes.append(node(GRAD, [f"rows{i}", "index"], [f"grad_x{i}"], top_k=2))

    def call(tokens: int) -> tuple[dict[str, Any], list[Any]]:
        inputs, attributes = example(UNGRAD, "slot", tokens=tokens, seed=tokens)
        grad, probs_grad = oracle(UNGRAD, inputs, attributes)
        grad_x = oracles.init_routing_v2_grad(grad, inputs[1], top_k=2)
        feed = dict(zip(names, [*inputs[:2], *inputs[3:]], strict=True))
        return feed, [probs_grad, grad_x] * pairs

    shown = [f"{name}{i}" for i in range(pairs) for name in ("probs_grad", "grad_x")]
    feed, want = call(4)
    return model_of(nodes, feed, dict(zip(shown, want, strict=True))), call


def child_a33() -> None:
    model, call = back_model(1)
    # One thread each: pools of eight callers would only spin against one another.
    shared = open_session(model, "python", intra_op_num_threads=1)
    parallel = open_session(
        back_model(3)[0],
        "python",
        execution_mode=ort.ExecutionMode.ORT_PARALLEL,
        inter_op_num_threads=3,
    )
    wrong: list[str] = []
    counts = dict.fromkeys(("runs", "errors"), 0)

    def worker(number: int) -> None:
        feed, want = call(1 + 3 * number)
        if number == 7:  # this one is always wrong, and must be the only one to hear of it
            feed["index"] = feed["index"].copy()
            feed["index"][0] = 1000
        for i in range(200):
            try:
                if i % 20 == 19:  # six nodes in one run, spread over a pool's threads
                    assert_same(parallel.run(None, feed), want * 3)
                else:
                    assert all(map(np.array_equal, shared.run(None, feed), want))
                counts["runs"] += 1
                if number == 7:
                    wrong.append("no error")
            except moe_onnx.IndexValueError as error:
                counts["errors"] += 1
                if number != 7 or error.value != 1000:
                    wrong.append(f"thread {number}: {error}")
            except BaseException as error:
                wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=worker, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    binding = shared.io_binding()
    for tokens in (5, 9, 2):
        feed, want = call(tokens)
        for name, value in feed.items():
            binding.bind_cpu_input(name, value)
        for output in shared.get_outputs():
            binding.bind_output(output.name)
        shared.run_with_iobinding(binding)
        assert_same(binding.copy_outputs_to_cpu(), want)
    report([counts["runs"], counts["errors"], wrong[:5]])


def test_a33_threads_share_a_session() -> None:
    """onnxruntime #3280, #4600: eight threads, parallel execution and IO binding, right numbers."""
    (runs, errors, wrong), _ = child(child_a33, timeout=50)
    assert wrong == []
    assert (runs, errors) == (1400, 200)


def call_kernels(_: int = 0) -> list[list[float]]:
    """Both kernels on enough rows to start threads, then a session; for child processes."""
    ones = np.ones((2100, 1000), np.float32)
    (sums,) = run(GRAD, "kernel", [ones, np.arange(2100, dtype=np.int32)], {"top_k": 2})
    assert (sums == 2).all() and len(sums) == 1050
    inputs, attributes = example(UNGRAD, "slot")
    check(UNGRAD, "kernel", inputs, attributes)
    return open_session(grad_model(), "python", intra_op_num_threads=1).run(None, v1_feed())[0].tolist()


def run_path(path: str) -> list[list[float]]:
    return open_session(path, "auto").run(None, v1_feed())[0].tolist()


def child_a34(path: str) -> None:
    session = open_session(grad_model(), "python")
    session.run(None, v1_feed())
    call_kernels()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        forked = pool.map_async(call_kernels, range(4)).get(timeout=15)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map_async(run_path, [path]).get(timeout=25)
    report([*forked, *spawned, session.run(None, v1_feed())[0].tolist()])


def test_a34_processes_fork_and_spawn(v1_path: str) -> None:
    """onnxruntime #31961, #7846: after a fork kernels and new sessions run; spawned ones take a path."""
    results, log = child(child_a34, v1_path, timeout=50)
    assert results == [V1_GRAD.tolist()] * 6
    assert "SIGSEGV" not in log


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a34_a_session_says_that_it_cannot_be_pickled(duplicate: Callable[[Any], Any]) -> None:
    """onnxruntime #5093: pickling is a TypeError that says what to do instead."""
    session = open_session(grad_model(), "body")
    with pytest.raises(TypeError, match=r"InferenceSession.*pickled.*model"):
        duplicate(session)


def strided(value: Any, way: str) -> Any:
    """An equal array with other strides."""
    if way == "every other row":
        return np.repeat(value, 2, axis=0)[::2]
    if way == "backwards":
        flipped = np.ascontiguousarray(value[..., ::-1])
        return flipped[..., ::-1]
    if way == "transposed" and value.ndim > 1:
        return np.ascontiguousarray(value.T).T
    wide = np.zeros((*value.shape[:-1], value.shape[-1] * 3 + 1), value.dtype)
    wide[..., 1::3] = value
    return wide[..., 1::3]


WAYS = ("every other row", "backwards", "transposed", "every third column")


@each_dtype
@everywhere(routes=FEW)
def test_a35_strides_are_respected(op: str, mode: str, route: str, dtype: Any) -> None:
    """onnxruntime #13548: views give what contiguous copies give, and are left as they are."""
    inputs, attributes = example(op, mode, dtype)
    want = oracle(op, inputs, attributes)
    for way in WAYS:
        views = [strided(value, way) for value in inputs]
        assert not any(view.flags.c_contiguous for view in views)
        for view in views:
            view.flags.writeable = False
        assert_same(run(op, route, views, attributes), want)
        assert_same(views, inputs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", [GRAD, UNGRAD])
@kernel_choices
def test_a35_strides_of_ort_values_are_respected(kernels: str, op: str, way: str) -> None:
    """onnxruntime #13548: an OrtValue of a view holds the view's numbers."""
    inputs, attributes = example(op, MODES[op][0])
    session = session_of(make_model(op, inputs, attributes), kernels)
    feed = {
        name: ort.OrtValue.ortvalue_from_numpy(strided(value, way))
        for name, value in feed_of(op, inputs).items()
    }
    got = session.run_with_ort_values([a.name for a in BY_NAME[op].outputs], feed)
    assert_same([value.numpy() for value in got], oracle(op, inputs, attributes))


@each_dtype
@everywhere(routes=FEW)
def test_a35_outputs_do_not_change_with_a_reused_buffer(op: str, mode: str, route: str, dtype: Any) -> None:
    """onnxruntime #13548: a loop that writes its next batch into the same arrays keeps old results."""
    top_k = {"experts": 3, "top_k": 1, "capacity": 2}  # K=1, where an output could be its input
    inputs, attributes = example(op, mode, dtype, **top_k)
    want = oracle(op, inputs, attributes)
    first = run(op, route, inputs, attributes)
    other, _ = example(op, mode, dtype, seed=1, **top_k)
    for value, new in zip(inputs, other, strict=True):
        value[...] = new
    second = run(op, route, inputs, attributes)
    assert_same(first, want)
    assert_same(second, oracle(op, other, attributes))


@each_dtype
@kernel_choices
def test_a36_outputs_rebound_as_inputs(kernels: str, dtype: Any) -> None:
    """onnxruntime #21888, #8144: a state handed on by IO binding, T changing, equals plain runs."""
    state = np.zeros((1, 5), dtype)
    inputs, attributes = example(GRAD, "dropless", dtype)
    last = [np.arange(1, dtype=np.int32), np.zeros((1, 5), dtype)]
    # state' = state + the first token's gradient, by an operator, as 16 bits have no Add.
    model = model_of(
        [
            node(GRAD, ["g", "index"], ["y"], top_k=2),
            std("Gather", ["y", "first"], ["token"]),
            std("Concat", ["state", "token"], ["two"], axis=0),
            node(GRAD, ["two", "both"], ["new_state"], top_k=2),
        ],
        {"g": inputs[0], "index": inputs[1], "first": last[0], "state": state, "both": last[0]},
        {"new_state": state, "y": inputs[0]},
    )
    session = open_session(model, kernels)
    fixed = {"first": np.zeros(1, np.int32), "both": np.array([0, 1], np.int32)}
    binding = session.io_binding()
    bound: Any = None
    plain, exact = state, state.astype(np.float64)
    for step, tokens in enumerate((6, 9, 1, 4)):
        (grad, index), attributes = example(GRAD, "dropless", dtype, tokens=tokens, seed=step)
        feed = {"g": grad, "index": index, **fixed}
        plain, y = session.run(None, {**feed, "state": plain})
        want = oracles.init_routing_v2_grad(grad, index, top_k=2)
        exact = exact + want[:1].astype(np.float64)
        for name, value in feed.items():
            binding.bind_ortvalue_input(name, ort_value(value))
        binding.bind_ortvalue_input("state", ort_value(state) if bound is None else bound)
        for name in ("new_state", "y"):
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        bound, bound_y = binding.get_outputs()
        for got in (plain, from_ort_value(bound, dtype)):
            np.testing.assert_array_equal(got.astype(np.float64), exact)
        assert_same([y, from_ort_value(bound_y, dtype)], [want, want])


def ort_value(value: Any) -> ort.OrtValue:
    if value.dtype != BF16:
        return ort.OrtValue.ortvalue_from_numpy(value)
    raw = np.ascontiguousarray(value).view(np.uint16)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.BFLOAT16)


def from_ort_value(value: ort.OrtValue, dtype: Any) -> Any:
    if dtype != BF16:
        return value.numpy()
    # onnxruntime gives no bfloat16 to numpy: a Cast in a session of its own does.
    cast = model_of(
        [std("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], {"x": np.zeros((1, 1), BF16)}, {"y": V1}
    )
    session = ort.InferenceSession(cast.SerializeToString(), options_of())
    return session.run_with_ort_values(["y"], {"x": value})[0].numpy().astype(BF16)


@kernel_choices
def test_a37_external_data_is_found_from_anywhere(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime #6696: weights beside the model file are found by path, relative path and bytes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    weights = [numpy_helper.from_array(V1, "g"), numpy_helper.from_array(V1_INDEX, "index")]
    grad = node(GRAD, ["g", "index"], ["sums"], top_k=2)
    add = std("Add", ["sums", "x"], ["y"])
    model = model_of([grad, add], {"x": V1}, {"y": V1}, initializers=weights)
    path = tmp_path / "a" / "m.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert (tmp_path / "a" / "m.data").stat().st_size >= V1.nbytes
    monkeypatch.chdir(tmp_path / "elsewhere")
    x = np.ones((3, 2), np.float32)
    folder = options_of()
    folder.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(tmp_path / "a")
    )
    sources: list[tuple[Any, ort.SessionOptions]] = [
        (str(path), options_of()),
        (path, options_of()),
        (os.path.join("..", "a", "m.onnx"), options_of()),
        (path.read_bytes(), folder),
        (onnx.load(path, load_external_data=False), folder),
        (onnx.load(path), options_of()),
    ]
    for source, options in sources:
        session = moe_onnx.InferenceSession(source, options, kernels=kernels)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], V1_GRAD + 1)
    monkeypatch.chdir(tmp_path / "a")
    session = moe_onnx.InferenceSession("m.onnx", options_of(), kernels=kernels)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], V1_GRAD + 1)


# A40 and on: what reports on graphs say about operators and sessions.


BF16_VALUES, BF16_BITS = [1.0, 0.1, -3.3], [0x3F80, 0x3DCD, 0xC053]
INITIALIZERS = {
    "make_tensor": lambda: helper.make_tensor("g", TensorProto.BFLOAT16, [3, 1], BF16_VALUES),
    "raw": lambda: helper.make_tensor(
        "g", TensorProto.BFLOAT16, [3, 1], np.array(BF16_BITS, np.uint16).tobytes(), raw=True
    ),
    "from_array": lambda: numpy_helper.from_array(
        np.array(BF16_VALUES, np.float32).astype(BF16).reshape(3, 1), "g"
    ),
    "fed": None,
}


@pytest.mark.parametrize("make", INITIALIZERS.values(), ids=INITIALIZERS)
@kernel_choices
def test_a40_bfloat16_constants_keep_their_bits(kernels: str, make: Any) -> None:
    """onnx #4189, #6604: a bfloat16 constant is neither fp16 bits nor empty, however it was made."""
    index = np.array([2, 0, 1], np.int32)
    like = np.array(BF16_VALUES, np.float32).astype(BF16).reshape(3, 1)
    feed = {"index": index} if make else {"g": like, "index": index}
    model = model_of(
        [node(GRAD, ["g", "index"], ["y"], top_k=1)],
        feed,
        {"y": like},
        initializers=[make()] if make else (),
    )
    (got,) = open_session(model, kernels).run(None, feed)
    assert got.dtype == BF16
    assert got.view(np.uint16)[:, 0].tolist() == [BF16_BITS[i] for i in index]
    assert got.astype(np.float64)[:, 0].tolist() == [-3.296875, 1, 0.10009765625]


@pytest.mark.parametrize("nans", [False, True], ids=["numbers", "NaNs"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
@everywhere((INIT, "dropless"), (UNGRAD, "slot"), (UNGRAD, "row"))
def test_a40_copies_keep_every_bit_pattern(op: str, mode: str, route: str, dtype: Any, nans: bool) -> None:
    """onnx #6646, #4618: what the contract calls a copy is one, of all patterns of 16 bits."""
    every = np.arange(65536, dtype=np.uint16)
    every = every[np.isnan(every.view(dtype).astype(np.float32)) == nans]
    x = every[: len(every) // 6 * 6].reshape(-1, 6).view(dtype)
    order = np.random.default_rng(0).permutation(len(x)).astype(np.int32)
    if op == INIT:
        inputs = [x, order[:, None].copy()]
        places = np.argsort(np.argsort(order))
    else:
        token = order if mode == "slot" else np.arange(len(x), dtype=np.int32)
        inputs = [x, order, token]
        places = order
    got = run(op, route, inputs, {})[0]
    want = np.empty(x.shape, np.uint16)
    want[places] = x.view(np.uint16)
    if nans and op == UNGRAD and route == "python":
        # Its float32 kernel stands between Casts, which keep a NaN but not its payload (README).
        assert np.isnan(got.astype(np.float32)).all()
        return
    np.testing.assert_array_equal(got.view(np.uint16), want)


@routes_of(INIT)
def test_a43_ties_keep_their_order_at_any_length(route: str) -> None:
    """onnx #3501: equal experts keep the order of tokens, however a runtime sorts long inputs."""
    for tokens in (1, 2, 100, 5000):
        ids = np.tile(np.array([1, 1], np.int32), (tokens, 1))
        ids[tokens // 2 :, 0] = 0
        x = np.arange(tokens, dtype=np.float32).reshape(tokens, 1)
        rows, index, *_ = run(INIT, route, [x, ids], {})
        order = np.argsort(ids.reshape(-1), kind="stable")
        np.testing.assert_array_equal(index[order], np.arange(2 * tokens))
        np.testing.assert_array_equal(rows[:, 0], order // 2)


@each_dtype
@pytest.mark.parametrize("mode", MODES[INIT])
def test_a44_an_expert_named_twice_counts_twice(mode: str, dtype: Any) -> None:
    """vLLM #39391, SGLang #30079: a duplicated expert id has two rows and both come back."""
    ids = np.array([[1, 1], [0, 0], [2, 1], [3, 3], [0, 1], [1, 1]], np.int32)
    inputs, attributes = example(INIT, mode, dtype, capacity=6)
    inputs[1] = ids
    rows, index, *_ = want = oracle(INIT, inputs, attributes)
    named = index[(index >= 0) & (index < rows.size // 5)]
    assert len(named) == len(set(named.tolist()))
    kept = (index.reshape(6, 2) >= 0) & (index.reshape(6, 2) < rows.size // 5)
    sums = inputs[0].astype(np.float64) * kept.sum(axis=1)[:, None]
    back = {"top_k": 2, "drop_pad_mode": int(mode == "padded"), "active_num": attributes["active_num"]}
    for route in ROUTES:
        if has_route(INIT, route):
            assert_same(run(INIT, route, inputs, attributes), want)
        (got,) = run(GRAD, route, [rows, index], back)
        np.testing.assert_array_equal(got.astype(np.float64), sums)


@pytest.mark.parametrize("bad", [4, -1, INT_MIN, INT_MAX])
@routes_of(INIT)
def test_a44_expert_ids_out_of_range_are_refused(route: str, bad: int) -> None:
    """vLLM #39391: an id that NaN logits gave is an error, wherever the number of experts is known."""
    for mode, sizes in (("padded", {}), ("dropless", {"expert_num": 4}), ("active", {"expert_num": 4})):
        inputs, attributes = example(INIT, mode)
        inputs[1][3, 1] = bad
        error = moe_onnx.BodyCheckError if route in BODY_ROUTES else moe_onnx.IndexValueError
        with pytest.raises(error, match="expert_idx"):
            run(INIT, route, inputs, attributes | sizes)


LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "eps"), [(F16, 2.0**-10), (BF16, 2.0**-7)], ids=["fp16", "bf16"])
@kernel_choices
def test_a45_no_optimiser_drops_a_rounding(kernels: str, dtype: Any, eps: float, level: str) -> None:
    """onnxruntime #17565, #29235: casts between 16-bit operators round at every optimisation level."""
    # Rows (1 + eps)^2, rounded to 1 + 2 eps, and -(1 + eps): unrounded they would sum to eps + eps^2.
    feed = {
        "dy": np.array([[1 + eps]], dtype),
        "index": np.arange(2, dtype=np.int32),
        "chosen": np.ones((1, 2), np.bool_),
        "permuted": np.array([[1], [1]], dtype),
        "probs": np.array([[1 + eps, -1]], dtype),
    }
    model = model_of(
        [
            node(UNGRAD, ["dy", "index", "index", "chosen", "permuted", "probs"], ["rows", "probs_grad"]),
            node(GRAD, ["rows", "index"], ["y"], top_k=2),
        ],
        feed,
        {"y": feed["dy"]},
    )
    session = open_session(
        model, kernels, graph_optimization_level=getattr(ort.GraphOptimizationLevel, level)
    )
    (got,) = session.run(None, feed)
    assert (got.dtype, float(got[0, 0])) == (dtype, eps)


def branch(name: str, nodes: list[onnx.NodeProto], like: Any) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [info(nodes[-1].output[0], like)])


@each_dtype
@kernel_choices
def test_a47_nodes_in_the_branches_of_an_if(kernels: str, dtype: Any) -> None:
    """onnx #5701: an operator inside a subgraph runs there, with values of the graph round it."""
    inputs, attributes = example(GRAD, "dropless", dtype)
    by_two = node(GRAD, ["g", "index"], ["by_two"], top_k=2)
    by_three = node(GRAD, ["g", "index"], ["by_three"], top_k=3)
    choose = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        then_branch=branch("then", [by_two], inputs[0]),
        else_branch=branch("else", [by_three], inputs[0]),
    )
    feed = {"g": inputs[0], "index": inputs[1], "flag": np.array(True)}
    model = model_of([choose], feed, {"y": inputs[0]})
    session = open_session(model, kernels)
    for flag, top_k in ((True, 2), (False, 3)):
        got = session.run(None, {**feed, "flag": np.array(flag)})
        assert_same(got, [oracles.init_routing_v2_grad(*inputs, top_k=top_k)])
        with pytest.raises(moe_onnx.MoeOnnxError, match=GRAD):
            session.run(None, {**feed, "flag": np.array(flag), "index": inputs[1] + np.int32(1)})


@kernel_choices
def test_a47_nodes_in_the_body_of_a_loop(kernels: str) -> None:
    """onnx #5701: the same in a Loop, whose state goes through the operator three times."""
    state = np.array([[1, 2], [3, 4]], np.float32)
    body = helper.make_graph(
        [
            std("Concat", ["before", "before"], ["twice"], axis=0),
            node(GRAD, ["twice", "index"], ["after"], top_k=2),
            std("Identity", ["go"], ["still"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            info("before", state),
        ],
        [helper.make_tensor_value_info("still", TensorProto.BOOL, []), info("after", state)],
    )
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], body=body)
    feed = {"x": state, "index": np.array([0, 2, 1, 3], np.int32), "times": np.array(3, np.int64)}
    (got,) = open_session(model_of([loop], feed, {"y": state}), kernels).run(None, feed)
    np.testing.assert_array_equal(got, state * 8)


@each_dtype
@kernel_choices
def test_a47_nodes_in_functions_in_functions(kernels: str, dtype: Any) -> None:
    """onnxscript #1451: an operator two functions deep, with an attribute handed through."""
    feed, want = layer_feed(dtype)
    inner = helper.make_node("Back", list(feed), ["grad_x", "probs_grad"], domain="my.layers")
    inner.attribute.append(AttributeProto(name="k", type=AttributeProto.INT, ref_attr_name="k"))
    outer = helper.make_function(
        "my.layers",
        "Outer",
        list(feed),
        ["grad_x", "probs_grad"],
        [inner],
        [helper.make_opsetid("my.layers", 1), helper.make_opsetid("", 21)],
        ["k"],
    )
    call = helper.make_node("Outer", list(feed), ["x", "q"], domain="my.layers", k=2)
    model = model_of(
        [call],
        feed,
        {"x": feed["dy"], "q": feed["dy"]},
        functions=[layer_function(), outer],
        domains=(DOMAIN, "my.layers"),
    )
    assert_same(open_session(model, kernels).run(None, feed), want)
    if dtype == F32:
        portable = moe_onnx.add_function_bodies(model)
        onnx.checker.check_model(portable, full_check=True)
        for function in portable.functions:
            used = {n.domain for n in function.node}
            assert used <= {entry.domain for entry in function.opset_import}
        session = ort.InferenceSession(portable.SerializeToString(), options_of())
        assert_same(session.run(None, feed), want)


@kernel_choices
def test_a48_many_nodes_keep_unique_names(kernels: str, tmp_path: Path) -> None:
    """onnxruntime #20354: inlined bodies get names of their own, and the optimised model is valid."""
    nodes = [node(GRAD, ["g", "index"], ["y0"], top_k=1)]
    nodes += [node(GRAD, [f"y{i}", "index"], [f"y{i + 1}"], top_k=1) for i in range(23)]
    model = model_of(nodes, v1_feed(), {"y23": V1})
    path = tmp_path / "optimised.onnx"
    session = open_session(model, kernels, optimized_model_filepath=str(path))
    want = V1
    for _ in range(24):
        want = want[V1_INDEX]
    np.testing.assert_array_equal(session.run(None, v1_feed())[0], want)
    names = [n.name for n in onnx.load(path).graph.node if n.name]
    assert len(names) == len(set(names)) > 0
    onnx.checker.check_model(str(path))


RUN_PLAIN = """
import sys, json
import numpy as np
import onnxruntime as ort
arrays = np.load(sys.argv[2])
session = ort.InferenceSession(sys.argv[1])
got = session.run(None, {name: arrays[name] for name in arrays.files})
assert not [name for name in sys.modules if "moe" in name or "extensions" in name]
print(json.dumps([value.tolist() for value in got]))
"""


def test_a49_a_model_with_bodies_runs_on_stock_onnxruntime(tmp_path: Path) -> None:
    """onnx #4536, onnxruntime #13057: exported gradients need no training op and nothing of ours."""
    inputs, attributes = example(UNGRAD, "slot", BF16)
    (tmp_path / "m.onnx").write_bytes(wide_model(UNGRAD, inputs, attributes))
    np.savez(tmp_path / "in.npz", **{f"in{i}": widened(v) for i, v in enumerate(inputs)})
    got, _ = in_new_process(RUN_PLAIN, str(tmp_path / "m.onnx"), str(tmp_path / "in.npz"))
    want = oracle(UNGRAD, inputs, attributes)
    assert got == [value.astype(np.float64).tolist() for value in want]


@each_dtype
@everywhere((GRAD, "active"), (GRAD, "padded"), UNGRAD, COMBINE, routes=FEW)
def test_a53_a_dropped_token_is_zero_not_itself(op: str, mode: str, route: str, dtype: Any) -> None:
    """transformers #37123: a token without rows gets 0, and gives its router no gradient."""
    inputs, attributes = example(op, mode, dtype)
    if op == GRAD:
        index = inputs[1].reshape(6, 2)
        # Token 2 swaps its rows for dropped ones; the others keep theirs.
        if mode == "padded":
            index[2] = -1
        else:
            for slot in range(2):
                spare = 10 + slot
                index[index == spare] = index[2, slot]
                index[2, slot] = spare
        assert not run(op, route, inputs, attributes)[0][2].astype(np.float64).any()
    elif mode == "padded":
        # A token that no padded slot names: the next token stands in its slots.
        at = 1 if op == COMBINE else 2
        inputs[at] = np.where(inputs[at] == 2, 3, inputs[at]).astype(np.int32)
        dropped = run(op, route, inputs, attributes)[1 if op == UNGRAD else 0]
        assert not dropped[2].astype(np.float64).any()
    else:
        for i in (1, 2) if op == UNGRAD and mode == "slot" else (1,):
            inputs[i][4:6] = -1
        dropped = run(op, route, inputs, attributes)[1 if op == UNGRAD else 0]
        assert not dropped[2].astype(np.float64).any()
    check(op, route, inputs, attributes)


@each_dtype
@everywhere(COMBINE, UNGRAD, routes=FEW)
def test_a54_a_map_that_selects_nothing_runs(op: str, mode: str, route: str, dtype: Any) -> None:
    """transformers #40114: NonZero with no hits is no special case; every routing runs one graph."""
    inputs, attributes = example(op, mode, dtype)
    inputs[2 if op == COMBINE else 3][...] = False
    got = run(op, route, inputs, attributes)
    assert_same(got, oracle(op, inputs, attributes))
    if mode != "padded":
        assert not got[0].astype(np.float64).any()


@each_dtype
@routes_of(GRAD)
def test_a55_minus_one_is_not_the_last_row(route: str, dtype: Any) -> None:
    """onnxruntime #1533, #28311: Gather wraps -1 to the last row; a dropped slot must not."""
    grad = V1.astype(dtype).reshape(2, 3, 2)
    grad[1, 2] = 60000
    index = np.array([4, -1, -1, -1, 0, 2], np.int32)
    got = run(GRAD, route, [grad, index], {"top_k": 2, "drop_pad_mode": 1, "active_num": 0})
    assert_same(got, [np.array([[9, 10], [0, 0], [6, 8]], dtype)])


def test_every_kernel_is_under_test() -> None:
    """The routes of this module are those of the package: a new operator must be added above."""
    assert set(KERNELS) == {GRAD, UNGRAD}
    assert set(MODES) == set(BY_NAME)
