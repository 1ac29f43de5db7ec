"""The grouped products: rows of each expert times its weight, and the gradient of that weight.

Small integers are exact in every order of a sum; any data is held to the contract's bound on a dot
product of L terms, L * 2^-23 * sum |xy| before the one rounding.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from routes import BODY_ROUTES, NATIVE, ROUTES, all_of, has_route, make_model, run, session_of
from test_operators import EPS, assert_same, assert_within, integers, rng_of

import moe_onnx
from moe_onnx.spec import DOMAIN

GMM, GRAD = "MoeGroupedMatmul", "MoeGroupedMatmulWeightGrad"
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": BF16, "fp64": np.float64}
# group sizes, hidden size, expert hidden size
SIZES: dict[str, tuple[list[int], int, int]] = {
    "no experts": ([], 3, 2),
    "no rows": ([0, 0, 0], 3, 2),
    "one row": ([0, 1, 0], 4, 3),
    "first group empty": ([0, 4, 3], 4, 5),
    "last group empty": ([5, 2, 0], 4, 5),
    "one expert": ([6], 3, 4),
    "one takes all": ([0, 0, 11, 0], 3, 4),
    "H=1": ([2, 3, 1], 1, 4),
    "F=1": ([2, 3, 1], 4, 1),
    "H=0": ([2, 0, 1], 0, 4),
    "F=0": ([2, 0, 1], 4, 0),
    "odd": ([7, 1, 0, 5, 3], 17, 13),
    "many experts, most empty": ([0] * 40 + [2] + [0] * 20 + [1, 0], 8, 5),
    "long": ([1, 2], 301, 3),
    "many rows": ([130, 3, 147], 70, 35),
    "few rows, several tiles": ([65, 2, 64], 37, 271),
}
OPS = (GMM, GRAD)
ALL_ROUTES = [route for route in ROUTES if has_route(GMM, route)]
FEW = [route for route in ALL_ROUTES if route != "body_plain"]

dtypes = pytest.mark.parametrize("dtype", DTYPES)
transposes = pytest.mark.parametrize("transposed", [0, 1])
few_routes = pytest.mark.parametrize("route", FEW)
all_routes = pytest.mark.parametrize("route", ALL_ROUTES)
each_op = pytest.mark.parametrize("op", OPS)


def inputs_of(
    op: str, groups: list[int], hidden: int, width: int, dtype: Any, transposed: int, rng: Any, draw: Any
) -> list[Any]:
    """Inputs of ``op``, values made by ``draw(rng, shape, dtype)``."""
    rows = sum(groups)
    weight = (len(groups), width, hidden) if transposed else (len(groups), hidden, width)
    second = weight if op == GMM else (rows, width)
    return [draw(rng, (rows, hidden), dtype), draw(rng, second, dtype), np.array(groups, np.int32)]


def normals(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def oracle(op: str, inputs: list[Any], transposed: int) -> Any:
    call = oracles.grouped_matmul if op == GMM else oracles.grouped_matmul_weight_grad
    return call(*inputs, transpose_weight=transposed)


def bound_of(op: str, inputs: list[Any], transposed: int) -> Any:
    """The contract's bound for each element: terms * eps * sum |xy|."""
    x, second, groups = inputs
    total = oracle(op, [np.abs(v).astype(np.float64) for v in (x, second)] + [groups], transposed)
    terms = np.array([x.shape[1]]) if op == GMM else groups.reshape(-1, 1, 1)
    return terms * EPS.get(x.dtype, 2.0**-23) * total


@transposes
@dtypes
@few_routes
@each_op
@all_of("size", SIZES)
def test_integers_are_exact(op: str, route: str, size: str, dtype: str, transposed: int) -> None:
    inputs = inputs_of(op, *SIZES[size], DTYPES[dtype], transposed, rng_of(size), integers)
    (got,) = run(op, route, inputs, {"transpose_weight": transposed})
    assert_same(got, oracle(op, inputs, transposed))


@transposes
@dtypes
@few_routes
@each_op
@all_of("size", ["one takes all", "odd", "long", "many experts, most empty"])
def test_any_data_is_within_the_bound(op: str, route: str, size: str, dtype: str, transposed: int) -> None:
    inputs = inputs_of(op, *SIZES[size], DTYPES[dtype], transposed, rng_of(size), normals)
    (got,) = run(op, route, inputs, {"transpose_weight": transposed})
    assert_within(got, oracle(op, inputs, transposed), bound_of(op, inputs, transposed))


@transposes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("route", NATIVE)
def test_more_columns_than_one_part(route: str, dtype: str, transposed: int) -> None:
    """Few rows are multiplied by 512 columns at a time, by 4096 where there are more groups."""
    inputs = inputs_of(
        GMM, [3, 0, 5, 1, 64], 17, 2 * 4096 + 19, DTYPES[dtype], transposed, rng_of("wide"), integers
    )
    x, weight, sizes = (value.astype(np.float64) for value in inputs)
    want = np.empty((73, weight.shape[1 if transposed else 2]))
    for matrix, end, size in zip(weight, np.cumsum(sizes).astype(int), sizes.astype(int), strict=True):
        want[end - size : end] = x[end - size : end] @ (matrix.T if transposed else matrix)
    (got,) = run(GMM, route, inputs, {"transpose_weight": transposed})
    assert_same(got, want.astype(DTYPES[dtype]))


def test_the_bound_can_fail() -> None:
    """A sum in float16 is out of it, and so is a product with the neighbour's weight."""
    inputs = inputs_of(GMM, [4, 4], 300, 3, np.float16, 0, rng_of("bound"), normals)
    want, bound = oracle(GMM, inputs, 0), bound_of(GMM, inputs, 0)
    low = np.zeros_like(want)
    for h in range(300):
        for i in range(8):
            low[i] += inputs[0][i, h] * inputs[1][i // 4, h]
    shifted = oracle(GMM, [inputs[0], inputs[1], np.array([3, 5], np.int32)], 0)
    for wrong in (low, shifted):
        with pytest.raises(AssertionError):
            assert_within(wrong, want, bound)


@st.composite
def splits(draw: Any) -> list[int]:
    """Group sizes: none, all empty, one that takes all, or any."""
    return draw(  # type: ignore[no-any-return]
        st.one_of(
            st.lists(st.integers(0, 5), max_size=7),
            st.integers(0, 5).map(lambda n: [0] * n),
            st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 3)).map(
                lambda t: [0] * t[0] + [t[1]] + [0] * t[2]
            ),
        )
    )


def inner(a: Any, b: Any) -> float:
    return float((a.astype(np.float64) * b.astype(np.float64)).sum())


@given(splits(), st.integers(0, 4), st.integers(0, 4), st.integers(0, 1), st.integers(0, 2**31))
def test_both_gradients_are_adjoints(
    groups: list[int], hidden: int, width: int, transposed: int, seed: int
) -> None:
    """Bilinear: <y, g> is both <x, grad_x> and <weight, grad_weight>, exactly."""
    rng = np.random.default_rng(seed)
    x, weight, group_sizes = inputs_of(GMM, groups, hidden, width, np.float32, transposed, rng, integers)
    y = moe_onnx.moe_grouped_matmul(x, weight, group_sizes, transpose_weight=transposed)
    g = integers(rng, y.shape, np.float32)
    grad_x = moe_onnx.moe_grouped_matmul(g, weight, group_sizes, transpose_weight=1 - transposed)
    grad_w = moe_onnx.moe_grouped_matmul_weight_grad(x, g, group_sizes, transpose_weight=transposed)
    assert (grad_x.shape, grad_w.shape) == (x.shape, weight.shape)
    assert inner(y, g) == inner(x, grad_x) == inner(weight, grad_w)


@given(splits(), st.integers(0, 3), st.integers(0, 1), st.sampled_from(OPS))
def test_any_split_by_the_body(groups: list[int], hidden: int, transposed: int, op: str) -> None:
    inputs = inputs_of(op, groups, hidden, 3, np.float32, transposed, np.random.default_rng(0), integers)
    (got,) = run(op, "body", inputs, {"transpose_weight": transposed})
    assert_same(got, oracle(op, inputs, transposed))


@given(st.lists(st.integers(-2, 7), max_size=5), st.integers(0, 9), st.sampled_from(OPS))
def test_any_sizes_give_the_oracle_or_the_right_error(groups: list[int], rows: int, op: str) -> None:
    """What is no split of the rows is refused, by the first group that is wrong: said again, by a loop."""
    x, group_sizes = np.ones((rows, 2), np.float32), np.array(groups, np.int32)
    second = np.ones((len(groups), 2, 3) if op == GMM else (rows, 3), np.float32)
    wrong, left = None, rows
    for at, size in enumerate(groups):
        if wrong is None and not 0 <= size <= rows:
            wrong = at
    for at, size in enumerate(groups):
        if wrong is None and (size > left or (at + 1 == len(groups) and size != left)):
            wrong = at
        left -= size
    inputs = [x, second, group_sizes]
    if not groups and rows:
        with pytest.raises(moe_onnx.ShapeError, match="axis N"):
            run(op, "reference", inputs, {})
        with pytest.raises(moe_onnx.BodyCheckError, match="sum to the number of rows"):
            run(op, "body", inputs, {})
    elif wrong is not None:
        with pytest.raises(moe_onnx.IndexValueError) as caught:
            run(op, "reference", inputs, {})
        error = caught.value
        assert (error.position, error.value, error.input_name) == ((wrong,), groups[wrong], "group_sizes")
        assert f"got {groups[wrong]} at position [{wrong}]" in str(error)
        with pytest.raises(moe_onnx.BodyCheckError, match="group_sizes"):
            run(op, "body", inputs, {})
    else:
        for route in ("reference", "body"):
            assert_same(run(op, route, inputs, {})[0], oracle(op, inputs, 0))


@transposes
def test_gradients_equal_finite_differences(transposed: int) -> None:
    """In float64, in random directions of rows and weight."""
    rng = rng_of("differences")
    x, weight, groups = inputs_of(GMM, [3, 0, 5, 1], 4, 3, np.float64, transposed, rng, normals)
    g, v, w = (rng.standard_normal(shape) for shape in ((9, 3), x.shape, weight.shape))

    def loss(x: Any, weight: Any) -> float:
        y = moe_onnx.moe_grouped_matmul(x, weight, groups, transpose_weight=transposed)
        return float((np.tanh(y) * g).sum())

    y = moe_onnx.moe_grouped_matmul(x, weight, groups, transpose_weight=transposed)
    back = g * (1 - np.tanh(y) ** 2)
    grad_x = moe_onnx.moe_grouped_matmul(back, weight, groups, transpose_weight=1 - transposed)
    grad_w = moe_onnx.moe_grouped_matmul_weight_grad(x, back, groups, transpose_weight=transposed)
    eps = 1e-6
    numeric = (loss(x + eps * v, weight + eps * w) - loss(x - eps * v, weight - eps * w)) / (2 * eps)
    np.testing.assert_allclose(inner(grad_x, v) + inner(grad_w, w), numeric, rtol=1e-8)


@dtypes
@all_routes
def test_nothing_leaks_between_groups(route: str, dtype: str) -> None:
    """NaN and infinity of one expert's rows and weight stay there; what is empty is exactly 0."""
    poison = np.array([np.nan, np.inf, -np.inf])
    groups = [2, 0, 3, 0]
    for transposed in (0, 1):
        x, weight, group_sizes = inputs_of(
            GMM, groups, 3, 3, DTYPES[dtype], transposed, rng_of("leak"), integers
        )
        grad_y = integers(rng_of("leak"), (5, 3), DTYPES[dtype])
        x[:2] = grad_y[:2] = poison
        weight[[0, 1, 3]] = poison
        clean = [v.copy() for v in (x, weight, grad_y)]
        for value in clean:
            value[~np.isfinite(value.astype(np.float64))] = 0
        attributes = {"transpose_weight": transposed}
        y = run(GMM, route, [x, weight, group_sizes], attributes)[0]
        want = oracles.grouped_matmul(clean[0], clean[1], group_sizes, **attributes)
        assert_same(y[2:], want[2:])
        assert not np.isfinite(y[:2].astype(np.float64)).any()
        # Freed memory of the result's size that holds NaNs must not be taken for a sum of nothing.
        held = [np.full((4, 3, 3), np.nan, DTYPES[dtype]) for _ in range(4)]
        del held
        grad = run(GRAD, route, [x, grad_y, group_sizes], attributes)[0]
        assert_same(
            grad[2],
            oracles.grouped_matmul_weight_grad(clean[0], clean[2], group_sizes)[2].T
            if transposed
            else oracles.grouped_matmul_weight_grad(clean[0], clean[2], group_sizes)[2],
        )
        assert not grad[[1, 3]].astype(np.float64).any()
        assert not np.isfinite(grad[0].astype(np.float64)).any()


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@transposes
@each_op
def test_memory_of_an_earlier_run_is_never_a_result(op: str, transposed: int, level: str) -> None:
    """Products of no terms (no rows in a group, H = 0) in a session whose arena is full of NaNs."""
    model = make_model(op, inputs_of(op, [1], 1, 1, np.float32, 0, rng_of("a"), integers),
                       {"transpose_weight": transposed})  # fmt: skip
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = moe_onnx.InferenceSession(model, options, kernels="body")

    def call(groups: list[int], hidden: int, make: Any) -> Any:
        inputs = inputs_of(op, groups, hidden, 6, np.float32, transposed, rng_of("a"), make)
        names = [arg.name for arg in session.get_inputs()]
        return inputs, session.run(None, dict(zip(names, inputs, strict=True)))[0]

    for hidden in (5, 0):
        for _ in range(3):
            call([3, 4, 5], 5, lambda rng, shape, dtype: np.full(shape, np.nan, dtype))
        inputs, got = call([0, 12, 0], hidden, integers)
        assert_same(got, oracle(op, inputs, transposed))


@dtypes
@transposes
@each_op
def test_sessions_are_deterministic(op: str, transposed: int, dtype: str) -> None:
    """The same bits run after run; over thread counts the bound holds, bits are not promised."""
    groups = [60, 0, 1, 131, 64]
    inputs = inputs_of(op, groups, 72, 40, DTYPES[dtype], transposed, rng_of("bits"), normals)
    model = make_model(op, inputs, {"transpose_weight": transposed})
    wide = [v.astype(np.float64) for v in inputs[:2]]
    exact = run(op, "reference", [*wide, inputs[2]], {"transpose_weight": transposed})[0]
    total = run(op, "reference", [*map(np.abs, wide), inputs[2]], {"transpose_weight": transposed})[0]
    terms = np.array([72]) if op == GMM else inputs[2].reshape(-1, 1, 1)
    for threads in (1, 2):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = moe_onnx.InferenceSession(model, options, kernels="body")
        names = [arg.name for arg in session.get_inputs()]
        feed = dict(zip(names, inputs, strict=True))
        seen = [session.run(None, feed)[0] for _ in range(4)]
        assert len({value.tobytes() for value in seen}) == 1
        bound = terms * EPS.get(inputs[0].dtype, 2.0**-23) * total
        assert_within(seen[0], exact.astype(inputs[0].dtype), bound)


def model_of(nodes: list[Any], feed: dict[str, Any], outputs: list[str], *, static: bool) -> Any:
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "layers",
        [
            value(n, kinds[v.dtype], v.shape if static else [f"{n}_{i}" for i in range(v.ndim)])
            for n, v in feed.items()
        ],
        [value(name, TensorProto.FLOAT, None) for name in outputs],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def node(op: str, inputs: list[str], output: str, **attributes: int) -> Any:
    domain = DOMAIN if op.startswith("Moe") else ""
    return helper.make_node(op, inputs, [output], output, domain=domain, **attributes)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("static", [False, True], ids=["symbolic", "static"])
def test_a_stack_of_expert_layers_runs_anywhere(static: bool, level: str) -> None:
    """Many nodes, each fed by and feeding others, forward and backward, in plain onnxruntime."""
    layers, rng = 6, rng_of("stack")
    groups = np.array([3, 0, 4, 2], np.int32)
    feed: dict[str, Any] = {"sizes": groups, "x0": integers(rng, (9, 4), np.float32)}
    nodes, outputs = [], []
    value: dict[str, Any] = {"x0": feed["x0"]}
    for i in range(layers):
        up, down = f"up{i}", f"down{i}"
        feed[up] = rng.choice([-1, 0, 0, 1], (4, 4, 5)).astype(np.float32)
        feed[down] = rng.choice([-1, 0, 0, 1], (4, 4, 5)).astype(np.float32)
        nodes += [
            node(GMM, [f"x{i}", up, "sizes"], f"h{i}"),
            node("Relu", [f"h{i}"], f"r{i}"),
            node("Clip", [f"r{i}", "", "seven"], f"c{i}"),
            node(GMM, [f"c{i}", down, "sizes"], f"y{i}", transpose_weight=1),
            node("Clip", [f"y{i}", "minus_seven", "seven"], f"x{i + 1}"),
            node(GRAD, [f"c{i}", f"x{i + 1}", "sizes"], f"d{i}", transpose_weight=1),
        ]
        h = np.clip(oracles.grouped_matmul(value[f"x{i}"], feed[up], groups), 0, 7)
        y = np.clip(oracles.grouped_matmul(h, feed[down], groups, transpose_weight=1), -7, 7)
        value[f"x{i + 1}"] = y
        value[f"d{i}"] = oracles.grouped_matmul_weight_grad(h, y, groups, transpose_weight=1)
        outputs += [f"x{i + 1}", f"d{i}"]
    constants = [
        helper.make_node("Constant", [], [name], name, value_float=float(v))
        for name, v in (("seven", 7), ("minus_seven", -7))
    ]
    model = model_of(constants + nodes, feed, outputs, static=static)
    model = moe_onnx.add_function_bodies(model)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(model, strict_mode=True), full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model.SerializeToString(), options)
    for name, got in zip(outputs, session.run(None, feed), strict=True):
        assert_same(got, value[name], name)


@each_op
def test_python_sessions_run_the_body(op: str) -> None:
    inputs = inputs_of(op, [2, 1], 3, 4, np.float32, 0, rng_of("python"), integers)
    session = session_of(make_model(op, inputs, {}), "python")
    assert session.moe_kernels == {"native": 0, "python": 0, "body": 1}
    names = [arg.name for arg in session.get_inputs()]
    got = session.run(None, dict(zip(names, inputs, strict=True)))[0]
    assert_same(got, oracle(op, inputs, 0))


@each_op
def test_the_number_of_nodes_does_not_depend_on_the_experts(op: str) -> None:
    """One body for any number of experts, and one loop in it for each precision."""

    def count(nodes: Any) -> list[str]:
        return [n.op_type for n in nodes] + [
            name for n in nodes for a in n.attribute for name in count(a.g.node)
        ]

    ops = count(moe_onnx.function_body(op).node)
    assert len(ops) < 150
    assert ops.count("Loop") + ops.count("Scan") == 2
    assert ops.count("Transpose") == 0


@pytest.mark.parametrize("flag", [1.0, "1", [True], 2, -1, 2**40])
@pytest.mark.parametrize("function", [moe_onnx.moe_grouped_matmul, moe_onnx.moe_grouped_matmul_weight_grad])
def test_what_is_no_flag_is_refused(function: Any, flag: Any) -> None:
    second = np.ones((1, 2, 2) if function is moe_onnx.moe_grouped_matmul else (3, 2), np.float32)
    with pytest.raises(moe_onnx.AttributeValueError, match="transpose_weight"):
        function(np.ones((3, 2), np.float32), second, np.array([3], np.int32), transpose_weight=flag)


@each_op
@pytest.mark.parametrize("route", BODY_ROUTES)
def test_many_experts(op: str, route: str) -> None:
    """E far above the rows: each row finds its own of a thousand weights."""
    groups = np.zeros(1000, int)
    groups[[3, 500, 999]] = (2, 1, 3)
    inputs = inputs_of(op, groups.tolist(), 2, 3, np.float32, 1, rng_of("many"), integers)
    assert_same(run(op, route, inputs, {"transpose_weight": 1})[0], oracle(op, inputs, 1))
