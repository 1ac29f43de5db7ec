"""Every gradient rule against finite differences in float64, whatever the graph says of its sizes."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from gradient_cases import CASES
from gradient_tools import (
    FLOAT32_TOLERANCE,
    Array,
    Case,
    check_slopes,
    feed_of,
    make_model,
    run,
    slopes,
    weights_of,
)
from routes import try_all

import moe_onnx
from moe_onnx.autodiff.registry import rules


def test_every_rule_has_cases() -> None:
    tested = {(case.domain, case.op) for case in CASES}
    tested |= {("", "If"), ("", "Loop"), ("", "Scan")}  # in test_control_flow.py
    assert not set(rules()) - tested, "these rules have no case in gradient_cases.py"


def gradients_of(
    case: Case, shapes: str, feed: dict[str, Array], dtype: type = np.float64
) -> tuple[Array, dict[str, Array]]:
    names = [f"x{i}" for i in case.varied]
    model = moe_onnx.differentiate(make_model(case, shapes, dtype), loss="loss", wrt=names)
    if shapes != "unranked":  # onnx does not accept outputs without a rank
        onnx.checker.check_model(model, full_check=True)
    loss, *found = run(model, feed)
    for i, value in zip(case.varied, found, strict=True):
        assert value.shape == case.inputs[i].shape and value.dtype == dtype
    return loss, dict(zip(names, found, strict=True))


BY_OP = {op: [case for case in CASES if case.op == op] for op in dict.fromkeys(case.op for case in CASES)}


@pytest.mark.parametrize("op", BY_OP)
def test_rule(op: str) -> None:
    try_all(BY_OP[op], check_rule, str)


def check_rule(case: Case) -> None:
    rng = np.random.default_rng(7)
    feed = {**feed_of(case), **weights_of(case, rng)}
    plain = make_model(case)
    names = [f"x{i}" for i in case.varied if i not in case.constant]
    directions = slopes(plain, feed, names, rng)
    expected = run(plain, feed)[0]
    for shapes in ("static", "free"):
        loss, gradients = gradients_of(case, shapes, feed)
        np.testing.assert_allclose(loss, expected, rtol=1e-12, err_msg=shapes)
        check_slopes(gradients, directions)
    if case.domain and CASES.index(case) % 3:
        return  # sessions of bodies take long to make
    single = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in feed.items()}
    for name, value in gradients_of(case, "symbolic", single, np.float32)[1].items():
        scale = max(float(np.abs(gradients[name]).max(initial=0)), 1.0)
        assert np.abs(value - gradients[name]).max(initial=0) <= FLOAT32_TOLERANCE * scale


@pytest.mark.parametrize("op", BY_OP)
def test_without_ranks(op: str) -> None:
    """Right, or a refusal that says what is missing."""
    try_all([case for case in BY_OP[op] if case.used == (0,)], check_without_ranks, str)


def check_without_ranks(case: Case) -> None:
    feed = feed_of(case)
    try:
        _, gradients = gradients_of(case, "unranked", feed)
    except moe_onnx.GradientError as error:
        message = str(error)
    else:
        message = ""
        names = [f"x{i}" for i in case.varied if i not in case.constant]
        plain = make_model(case, "unranked")
        check_slopes(gradients, slopes(plain, feed, names, np.random.default_rng(7)))
    if message:
        assert re.search("rank|must be known|Opset 13", message)
        assert "(node 'the_node')" in message and "Path from the loss: 'loss' <- Sum 'loss_node'" in message


# At kinks, where finite differences say nothing: the convention of each rule.

INF = np.inf


def at(op: str, x: list[float], *more: list[float], wrt: int = 0, **attributes: float) -> list[float]:
    inputs = tuple(np.asarray(v, np.float64) for v in (x, *more))
    case = Case(op, inputs, attributes, wrt=(wrt,))
    (value,) = gradients_of(case, "unranked", feed_of(case))[1].values()
    return value.tolist()


def test_conventions_at_kinks() -> None:
    assert at("Relu", [-1, -0.0, 0, 1]) == [0, 0, 0, 1]
    assert at("LeakyRelu", [-1, 0, 1], alpha=0.5) == [0.5, 0.5, 1]
    assert at("Elu", [0, 1]) == [1, 1]
    assert at("Abs", [-2, 0, 3]) == [-1, 0, 1]
    assert at("Clip", [-2, -1, 0, 1, 2], [-1], [1]) == [0, 1, 1, 1, 0]
    assert at("Max", [1, 2, 3], [2, 2, 2]) == [0, 0.5, 1]
    assert at("Min", [1, 2, 3], [2, 2, 2], wrt=1) == [0, 0.5, 1]
    assert at("ReduceMax", [3, 1, 3, 3]) == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert at("ReduceMin", [3, 1, 1, 3]) == [0, 0.5, 0.5, 0]
    assert at("ReduceL1", [-1, 0, 1]) == [-1, 0, 1]
    assert at("ReduceL2", [0, 0]) == [0, 0]
    assert at("Pow", [0, 2], [0, 0]) == [0, 0]
    assert at("Pow", [0, 0, 0, 2], [1, 2, 0, 1]) == [1, 0, 0, 1]
    assert at("Pow", [0, 0], [0, 2], wrt=1) == [0, 0]
    assert at("Sqrt", [0, 4]) == [INF, 0.25]


def test_nan_stays_where_it_is() -> None:
    """What Where and Relu do not select is never multiplied by 0."""
    chosen = Case("Where", (np.asarray([True, False]), np.asarray([1.0, 2.0]), np.asarray([INF, np.nan])))
    _, gradients = gradients_of(chosen, "static", {**feed_of(chosen), "v0": np.asarray([np.nan, 1.0])})
    np.testing.assert_array_equal(gradients["x2"], [0, 1])
    relu = Case("Relu", (np.asarray([-1.0, 1.0]),))
    _, gradients = gradients_of(relu, "static", {**feed_of(relu), "v0": np.asarray([np.nan, 1.0])})
    np.testing.assert_array_equal(gradients["x0"], [0, 1])


def test_the_check_can_fail() -> None:
    with pytest.raises(AssertionError, match="along a direction of x0"):
        check_slopes({"x0": np.asarray([1.0])}, [("x0", np.asarray([1.0]), 1.000001)])
