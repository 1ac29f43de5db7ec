"""The dispatch by a routing map and its gradient: what holds for any map, and what public reports teach."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from report_tools import model_of, node, poison, std
from routes import BODY_ROUTES, ROUTES, feed_of, has_route, make_model, run, session_of

import moe_onnx
from moe_onnx import (
    moe_token_permute_with_routing_map,
    moe_token_permute_with_routing_map_grad,
    moe_token_unpermute_with_routing_map,
)

PERMUTE, GRAD = "MoeTokenPermuteWithRoutingMap", "MoeTokenPermuteWithRoutingMapGrad"
UN = "MoeTokenUnpermuteWithRoutingMap"
MAP = np.array([[1, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 1]], np.bool_)  # token 1 has one expert
SLOTS = np.array([0, 4, 2, -1, 3, 5, 1, 6], np.int32)

routes = pytest.mark.parametrize("route", [r for r in ROUTES if has_route(PERMUTE, r)])


def ints(rng: np.random.Generator, *shape: int) -> Any:
    return rng.integers(-8, 9, shape).astype(np.float32)


def inner(a: Any, b: Any) -> float:
    return float((a.astype(np.float64) * b.astype(np.float64)).sum())


@st.composite
def calls(draw: Any) -> tuple[np.random.Generator, Any, dict[str, Any]]:
    """A random map, of any number of experts a token, and attributes that fit it."""
    tokens, experts = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    chosen = rng.random((tokens, experts)) < draw(st.sampled_from([0, 0.3, 0.7, 1]))
    most = int(chosen.sum(axis=1).max(initial=0))
    mode = draw(st.sampled_from(["from map", "given", "padded"]))
    if mode == "padded" and tokens:
        return rng, chosen, {"num_out_tokens": experts * int(rng.integers(1, tokens + 1)), "drop_and_pad": 1}
    num = tokens * int(rng.integers(most, experts + 1)) if mode == "given" else 0
    return rng, chosen, {"num_out_tokens": num, "drop_and_pad": 0}


@given(calls(), st.booleans())
def test_the_gradient_is_the_adjoint(call: Any, with_probs: bool) -> None:
    """<permute(x), g> = <x, grad(g)>, and so for the weights, exactly."""
    rng, chosen, attributes = call
    x = ints(rng, len(chosen), 3)
    probs = ints(rng, *chosen.shape) if with_probs else None
    rows, weights, index = moe_token_permute_with_routing_map(x, chosen, probs, **attributes)
    g = ints(rng, *rows.shape)
    g_probs = None if weights is None else ints(rng, len(weights))
    d_x, d_probs = moe_token_permute_with_routing_map_grad(
        g, g_probs, index, chosen, drop_and_pad=attributes["drop_and_pad"]
    )
    assert inner(rows, g) == inner(x, d_x)
    if weights is not None and g_probs is not None:
        assert probs is not None and d_probs is not None
        assert inner(weights, g_probs) == inner(probs, d_probs)


@given(calls())
def test_what_the_combine_makes_of_it(call: Any) -> None:
    """Dispatched and combined, a token comes back as often as its weights say."""
    rng, chosen, attributes = call
    padded = attributes["drop_and_pad"]
    x, probs = ints(rng, len(chosen), 3), ints(rng, *chosen.shape)
    rows, weights, index = moe_token_permute_with_routing_map(x, chosen, probs, **attributes)
    back, _, _, used = moe_token_unpermute_with_routing_map(
        rows, index, chosen, probs, drop_and_pad=padded, restore_shape=x.shape
    )
    taken = chosen
    if padded:
        capacity = attributes["num_out_tokens"] // max(chosen.shape[1], 1)
        taken = np.zeros_like(chosen)
        taken[index, np.arange(len(index)) // max(capacity, 1)] = True
    np.testing.assert_array_equal(back, x * np.where(taken, probs, 0).sum(axis=1, keepdims=True))
    if weights is not None and used is not None:  # they are, but for weights of shape [0, 0]
        assert sorted(weights) == sorted(used)  # by rows here, by slots there


@routes
def test_the_chain_in_one_model(route: str) -> None:
    """In a model of free sizes: several batches, several numbers of experts a token."""
    names = {"x": np.zeros((2, 3), np.float32), "map": MAP, "probs": np.zeros((2, 3), np.float32)}
    model = model_of(
        [
            node(PERMUTE, ["x", "map", "probs"], ["rows", "weights", "index"]),
            node(UN, ["rows", "index", "map", "probs"], ["y", "i", "j", "w"]),
        ],
        names,
        {"y": names["x"], "weights": np.zeros(2, np.float32)},
    )
    if route in ("reference", "evaluator"):
        return
    session, rng = session_of(model, route), np.random.default_rng(3)
    for tokens, experts, share in ((5, 3, 0.5), (0, 3, 1), (9, 4, 0), (7, 6, 0.9)):
        chosen = rng.random((tokens, experts)) < share
        x, probs = ints(rng, tokens, 3), ints(rng, tokens, experts)
        got, weights = session.run(None, {"x": x, "map": chosen, "probs": probs})
        np.testing.assert_array_equal(got, x * np.where(chosen, probs, 0).sum(axis=1, keepdims=True))
        assert len(weights) == tokens * chosen.sum(axis=1).max(initial=0)


@pytest.mark.parametrize("padded", [0, 1])
@pytest.mark.parametrize("used", ["y", "weights", "both"])
def test_the_gradient_of_a_chain_equals_finite_differences(padded: int, used: str) -> None:
    """Permute, a nonlinear expert, combine; in float64, through differentiate, of free sizes."""
    rng = np.random.default_rng(5)
    _, chosen, _ = oracles.random_routing(rng, 7, 4, 2)
    feed = {"x": rng.standard_normal((7, 3)), "map": chosen, "probs": rng.random((7, 4)) + 0.1}
    num = 12 if padded else 0
    scalar = np.zeros((), np.float64)
    nodes = [
        node(
            PERMUTE,
            ["x", "map", "probs"],
            ["rows", "weights", "index"],
            num_out_tokens=num,
            drop_and_pad=padded,
        ),
        std("Tanh", ["rows"], ["out"]),
        node(UN, ["out", "index", "map", "probs"], ["y", "i", "j", "w"], drop_and_pad=padded),
        std("Sin", ["y"], ["sin"]),
        std("ReduceSum", ["sin"], ["sum_y"], keepdims=0),
        std("Exp", ["weights"], ["exp"]),
        std("ReduceSum", ["exp"], ["sum_w"], keepdims=0),
        std("Add", ["sum_y", "sum_w"], ["sum_both"]),
    ]
    loss = {"y": "sum_y", "weights": "sum_w", "both": "sum_both"}[used]
    model = model_of(nodes, feed, {loss: scalar})
    wrt = ["x", "probs"]  # of what the loss does not use the gradient is 0
    whole = moe_onnx.InferenceSession(moe_onnx.differentiate(model, loss=loss, wrt=wrt), kernels="body")
    _, *gradients = whole.run(None, feed)
    plain, step = moe_onnx.InferenceSession(model, kernels="body"), 1e-6
    for name, gradient in zip(wrt, gradients, strict=True):
        u = rng.standard_normal(feed[name].shape)
        up, down = (plain.run([loss], {**feed, name: feed[name] + s * step * u})[0] for s in (1, -1))
        np.testing.assert_allclose(inner(gradient, u), (up - down) / (2 * step), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("padded", [0, 1])
@pytest.mark.parametrize("op", [PERMUTE, GRAD])
def test_bodies_are_deterministic_at_any_thread_count(op: str, padded: int) -> None:
    import onnxruntime as ort

    rng = np.random.default_rng(8)
    _, chosen, _ = oracles.random_routing(rng, 512, 16, 4)
    x, probs = rng.standard_normal((512, 64)).astype(np.float32), rng.random((512, 16), np.float32)
    attributes: dict[str, Any] = {"num_out_tokens": 2048, "drop_and_pad": padded}
    inputs: list[Any] = [x, chosen, probs]
    if op == GRAD:
        rows, _, index = moe_token_permute_with_routing_map(*inputs, **attributes)
        rows = rng.standard_normal(rows.shape).astype(np.float32)
        inputs, attributes = [rows, rng.random(2048, np.float32), index, chosen], {"drop_and_pad": padded}
    outputs = [arg.name for arg in moe_onnx.operators.BY_NAME[op].outputs]
    want = run(op, "reference", inputs, attributes)
    feed = {f"in{i}": value for i, value in enumerate(inputs)}
    model = model_of(
        [node(op, list(feed), outputs, **attributes)], feed, dict(zip(outputs, want, strict=True))
    )
    seen = set()
    for threads in (1, 2, 4):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = moe_onnx.InferenceSession(model, options, kernels="body")
        for _ in range(5):
            seen.add(b"".join(out.tobytes() for out in session.run(None, feed)))
    assert len(seen) == 1


RULES = [
    (PERMUTE, {"num_out_tokens": 4}, "at most top_k experts per token"),
    (PERMUTE, {"num_out_tokens": 7}, "tokens must divide num_out_tokens"),
    (PERMUTE, {"num_out_tokens": 16}, r"at most T \* E"),
    (PERMUTE, {"drop_and_pad": 1}, "must be positive when padded"),
    (PERMUTE, {"drop_and_pad": 1, "num_out_tokens": 7}, "experts must divide num_out_tokens"),
    (GRAD, {"tokens_num": 5}, "must have tokens_num tokens"),
    (GRAD, {"num_experts": 5}, "must have num_experts experts"),
    (GRAD, {"drop_and_pad": 1}, "experts must divide"),
]


@pytest.mark.parametrize("route", BODY_ROUTES)
@pytest.mark.parametrize(("op", "attributes", "rule"), RULES)
def test_bodies_name_the_rule(op: str, attributes: dict[str, int], rule: str, route: str) -> None:
    rng = np.random.default_rng(0)
    inputs = [ints(rng, 4, 2), MAP, ints(rng, 4, 3)]
    if op == GRAD:
        inputs = [ints(rng, 8, 2), ints(rng, 8), np.abs(SLOTS) % 4 if attributes == RULES[-1][1] else SLOTS]
        inputs.append(MAP)
    with pytest.raises(moe_onnx.BodyCheckError, match=rule):
        run(op, route, inputs, attributes)


@pytest.mark.parametrize("route", BODY_ROUTES)
@pytest.mark.parametrize(
    ("pairs", "gives", "rule"),
    [
        ([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1]], "map", "at most N pairs"),
        (None, "nothing", "routing_map and tokens_num are both missing"),
        (None, "tokens", "routing_map is missing"),
    ],
)
def test_bodies_name_the_rule_of_the_map(pairs: Any, gives: str, rule: str, route: str) -> None:
    """Where shapes are known only when the model runs; without a map it is of shape [0, 0]."""
    chosen = np.zeros((0, 0), np.bool_) if pairs is None else np.array(pairs, np.bool_)
    inputs = [np.ones((8, 2), np.float32), np.ones(8, np.float32), SLOTS, chosen]
    attributes = {"tokens_num": 4, "num_experts": 3} if gives == "tokens" else {}
    if gives == "nothing":
        inputs[1] = np.zeros((0, 0), np.float32)
    with pytest.raises(moe_onnx.BodyCheckError, match=rule):
        run(GRAD, route, inputs, attributes)


def say_sizes(model: onnx.ModelProto, inputs: list[Any]) -> onnx.ModelProto:
    """Inputs get the sizes of these arrays, which a runtime then works with when it loads the model."""
    for value, array in zip(model.graph.input, inputs, strict=True):
        kind = helper.make_tensor_type_proto(value.type.tensor_type.elem_type, array.shape)
        value.type.CopyFrom(kind)
    return model


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        (PERMUTE, {"num_out_tokens": 2**31 - 1}),
        (PERMUTE, {"num_out_tokens": 2**31 - 2, "drop_and_pad": 1}),
        (PERMUTE, {"num_out_tokens": 2**62}),
        (PERMUTE, {"num_out_tokens": -(2**63)}),
        (GRAD, {"tokens_num": 2**31 - 1}),
        (GRAD, {"tokens_num": 2**31 - 1, "num_experts": 2**31 - 1, "drop_and_pad": 1}),
        (GRAD, {"tokens_num": -1, "num_experts": 2**62}),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_make_no_tensors(op: str, attributes: dict[str, int], static: bool) -> None:
    """A plain runtime makes tensors of folded sizes while it loads a model, before any check has run."""
    import onnxruntime as ort

    rng = np.random.default_rng(0)
    inputs = [ints(rng, 4, 2), MAP, ints(rng, 4, 3)]
    if op == GRAD:
        inputs = [ints(rng, 8, 2), ints(rng, 8), SLOTS, MAP]
    feed = {f"in{i}": value for i, value in enumerate(inputs)}
    outputs = [arg.name for arg in moe_onnx.operators.BY_NAME[op].outputs]
    made = node(op, list(feed), outputs, **{"num_out_tokens": 0} if op == PERMUTE else {}, drop_and_pad=0)
    like: list[Any] = [inputs[0], inputs[1].astype(np.float32), SLOTS]
    if op == GRAD:
        like = [inputs[0], inputs[0]]
    model = moe_onnx.add_function_bodies(model_of([made], feed, dict(zip(outputs, like, strict=True))))
    (call,) = model.graph.node  # attributes that the package itself would refuse
    for attr in call.attribute:
        attr.i = attributes.get(attr.name, attr.i)
    if static:
        say_sizes(model, inputs)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=f"{op}: "):
        ort.InferenceSession(model.SerializeToString(), options).run(None, feed)


# What public reports teach, as far as it touches these operators.


@routes
def test_a04_more_pairs_than_rows_are_refused(route: str) -> None:
    """TransformerEngine #3346: nothing is written past num_out_tokens; excess pairs are an error."""
    x, full = np.ones((4, 2), np.float32), np.ones((4, 3), np.bool_)
    with pytest.raises((moe_onnx.RoutingMapError, moe_onnx.BodyCheckError), match="at most top_k"):
        run(PERMUTE, route, [x, full], {"num_out_tokens": 8})
    # As many pairs as rows, but unevenly: a token's third expert has no slot.
    uneven = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]], np.bool_)
    with pytest.raises((moe_onnx.RoutingMapError, moe_onnx.BodyCheckError), match="at most top_k"):
        run(PERMUTE, route, [x, uneven], {"num_out_tokens": 8})


@routes
def test_a04_the_gradient_reads_nothing_past_the_rows(route: str) -> None:
    """TransformerEngine #3346: what lies behind the rows is NaN, and an index there is an error."""
    buffer = np.full((20, 2), np.nan, np.float32)
    buffer[:8] = 1
    got = run(GRAD, route, [buffer[:8], None, SLOTS, MAP], {})[0]
    np.testing.assert_array_equal(got, [[2, 2], [1, 1], [2, 2], [2, 2]])
    for value in (8, 19, 2**31 - 1, -2):
        index = SLOTS.copy()
        index[5] = value
        with pytest.raises((moe_onnx.IndexValueError, moe_onnx.BodyCheckError), match="sorted_indices"):
            run(GRAD, route, [buffer[:8], None, index, MAP], {})


@routes
def test_a06_unused_slots_are_exactly_zero(route: str) -> None:
    """vLLM #54747: on a heap dirtied with NaN, rows of no pair and tokens of no row are exactly 0."""
    nobody, x = np.zeros((6, 4), np.bool_), np.full((6, 33), np.nan, np.float32)
    probs = np.full((6, 4), np.inf, np.float32)
    index = np.full(12, -1, np.int32)
    for _ in range(100):
        poison(np.empty((12, 33), np.float32), np.empty((6, 33), np.float32), np.empty((6, 4), np.float32))
        rows, weights, slots = run(PERMUTE, route, [x, nobody, probs], {"num_out_tokens": 12})
        assert not rows.any() and not weights.any() and rows.shape == (12, 33) and (slots == -1).all()
        d_x, d_probs = run(
            GRAD, route, [np.full_like(rows, np.nan), np.full(12, np.nan, np.float32), index, nobody], {}
        )
        assert not d_x.any() and not d_probs.any() and d_x.shape == (6, 33) and d_probs.shape == (6, 4)


@routes
@pytest.mark.parametrize("padded", [0, 1])
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(12, 4, 0), (0, 4, 3), (12, 1, 3), (0, 1, 0)])
def test_a07_empty_sizes_leave_nothing_unwritten(
    route: str, padded: int, tokens: int, experts: int, hidden: int
) -> None:
    """Paddle #79470: no early exit skips the other outputs."""
    rng = np.random.default_rng(0)
    _, chosen, _ = oracles.random_routing(rng, tokens, experts, 1)
    inputs: list[Any] = [ints(rng, tokens, hidden), chosen, ints(rng, tokens, experts)]
    attributes = {"num_out_tokens": experts * tokens // 2 if padded else tokens, "drop_and_pad": padded}
    want = oracles.permute(*inputs, **attributes)
    for got, expected in zip(run(PERMUTE, route, inputs, attributes), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    rows, weights, index = want
    assert weights is not None
    inputs = [ints(rng, *rows.shape), ints(rng, *weights.shape), index, chosen]
    want_grad = oracles.permute_grad(*inputs, drop_and_pad=bool(padded))
    if route in BODY_ROUTES:  # and where the sizes are known when the model is loaded
        model = say_sizes(make_model(GRAD, inputs, {"drop_and_pad": padded}), inputs)
        results = session_of(model, route).run(None, feed_of(GRAD, inputs))
        for got, expected in zip(results, want_grad, strict=True):
            np.testing.assert_array_equal(got, expected)
    for got, expected in zip(run(GRAD, route, inputs, {"drop_and_pad": padded}), want_grad, strict=True):
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)


@routes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a10_what_nobody_names_never_leaks(route: str, bad: float) -> None:
    """Primus-Turbo #345: cells not selected and rows past the dispatched ones are exactly 0."""
    chosen = np.array([[1, 0], [0, 0], [0, 1]], np.bool_)
    x = np.array([[1, 2], [bad, bad], [3, 4]], np.float32)
    probs = np.where(chosen, 5, bad).astype(np.float32)
    rows, weights, index = run(PERMUTE, route, [x, chosen, probs], {"num_out_tokens": 6})
    np.testing.assert_array_equal(rows, [[1, 2], [3, 4], *[[0, 0]] * 4])
    np.testing.assert_array_equal(weights, [5, 5, 0, 0, 0, 0])
    np.testing.assert_array_equal(index, [0, -1, -1, -1, 1, -1])
    g, g_probs = np.full((6, 2), bad, np.float32), np.full(6, bad, np.float32)
    g[:2], g_probs[:2] = [[1, 2], [3, 4]], [6, 7]
    d_x, d_probs = run(GRAD, route, [g, g_probs, index, chosen], {})
    np.testing.assert_array_equal(d_x, [[1, 2], [0, 0], [3, 4]])
    np.testing.assert_array_equal(d_probs, [[6, 0], [0, 0], [0, 7]])
    # Padded: token 1 is in no row, and its weights are asked for nowhere.
    attributes = {"num_out_tokens": 2, "drop_and_pad": 1}
    rows, weights, index = run(PERMUTE, route, [x, chosen, probs], attributes)
    np.testing.assert_array_equal(rows, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(weights, [5, 5])
    d_x, d_probs = run(GRAD, route, [g[:2], g_probs[:2], index, chosen], {"drop_and_pad": 1})
    np.testing.assert_array_equal(d_x, [[1, 2], [0, 0], [3, 4]])
    np.testing.assert_array_equal(d_probs, [[6, 0], [0, 0], [0, 7]])
