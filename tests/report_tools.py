"""What the tests of public bug reports share: example calls, comparisons, models, processes.

``aNN`` is an entry of a collection of such reports; the docstring names the report and its kind of
mistake. The test is of the kind: every route, dtype and mode in which it could happen here. Expected
numbers are counted by hand, by float64 numpy, or by the per-token oracles.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from onnx import AttributeProto, TensorProto, helper
from routes import BODY_ROUTES, ELEMS, NATIVE, ROUTES, has_route, run

import moe_onnx
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN

TESTS = Path(__file__).parent
INIT, GRAD = "MoeInitRoutingV2", "MoeInitRoutingV2Grad"
COMBINE, UNGRAD = "MoeTokenUnpermuteWithRoutingMap", "MoeTokenUnpermuteWithRoutingMapGrad"
GROUPED = ("MoeGroupedMatmul", "MoeGroupedMatmulWeightGrad")
FINALIZE = ("MoeFinalizeRoutingV2", "MoeFinalizeRoutingV2Grad")
PERMUTE = ("MoeTokenPermuteWithRoutingMap", "MoeTokenPermuteWithRoutingMapGrad")
MODES = {
    INIT: ("dropless", "active", "padded"),
    GRAD: ("dropless", "active", "padded"),
    COMBINE: ("slot", "padded"),
    UNGRAD: ("slot", "row", "padded"),
}
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
FEW = ("reference", "kernel", "python", "body", *NATIVE)
EXACT = tuple(route for route in ROUTES if route not in BODY_ROUTES)
KERNEL_CHOICES = ("python", "body", *NATIVE)

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


def v1_feed(dtype: Any = F32) -> dict[str, Any]:
    return {"g": V1.astype(dtype), "index": V1_INDEX}


def options_of(**settings: Any) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for name, value in {"intra_op_num_threads": 1, **settings}.items():
        setattr(options, name, value)
    return options


def open_session(model: Any, kernels: str, **settings: Any) -> moe_onnx.InferenceSession:
    return moe_onnx.InferenceSession(model, options_of(**settings), kernels=kernels)


# Processes. A scenario is a function ``child_...`` of a test module, or code that imports in its own
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
    code = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])"
    return in_new_process(code, scenario.__module__, scenario.__name__, *args, timeout=timeout)


def report(value: Any) -> None:
    print(json.dumps(value), flush=True)


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


def with_index(inputs: list[Any], at: tuple[int, ...], value: int) -> list[Any]:
    """The inputs with ``value`` at flat position 7 of the index inputs ``at``."""
    changed = list(inputs)
    for i in at:
        changed[i] = changed[i].copy()
        changed[i].flat[7] = value
    return changed


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
