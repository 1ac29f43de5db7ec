"""Every gradient rule against finite differences in float64, whatever the graph says of its sizes."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from gradient_cases import CASES
from gradient_tools import (
    FLOAT32_TOLERANCE,
    LOSS,
    Array,
    Case,
    check_slopes,
    feed_of,
    forward_all,
    joint_feed,
    joint_slopes,
    make_joint_model,
    make_model,
    prefix_of,
    run,
    runner,
    side_by_side,
    weights_of,
)
from routes import FAST, try_all

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


def by_opset(cases: list[Case]) -> list[list[Case]]:
    return [[case for case in cases if case.opset == opset] for opset in {case.opset: 0 for case in cases}]


@pytest.mark.parametrize("op", BY_OP)
def test_rule(op: str) -> None:
    for cases in by_opset(BY_OP[op]):
        check_rule(cases)


def check_rule(cases: list[Case]) -> None:
    rng = np.random.default_rng(7)
    forward_all(cases, FAST)
    feed = joint_feed(cases)
    for case in cases:
        feed |= weights_of(case, rng, prefix_of(case, cases))
    call = runner(make_joint_model(cases, "static"), plain=True, kernels=FAST)
    expected = call(feed)[1:]
    varied = [[f"{prefix_of(case, cases)}x{i}" for i in case.varied] for case in cases]
    moving = moving_of(cases)
    directions = joint_slopes(lambda moved: call(moved)[1:], feed, moving, rng)
    single = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in feed.items()}

    def gradients(shapes: str, kernels: str, feed: dict[str, Array], dtype: type) -> dict[str, Array]:
        model = make_joint_model(cases, shapes, dtype)
        model = moe_onnx.differentiate(model, loss=LOSS, wrt=[name for names in varied for name in names])
        onnx.checker.check_model(model, full_check=True)
        return by_name(model, feed, kernels, dtype)

    static = gradients("static", "body", feed, np.float64)
    free = gradients("free", FAST, feed, np.float64)
    symbolic = gradients("symbolic", FAST, single, np.float32)

    def check(case: Case) -> None:
        i = cases.index(case)
        mine = [direction for direction in directions if direction[0] in moving[i]]
        for shapes, found in (("static", static), ("free", free)):
            loss = found[f"{prefix_of(case, cases)}{LOSS}"]
            np.testing.assert_allclose(loss, expected[i], rtol=1e-12, err_msg=shapes)
            check_slopes(found, mine)
        for j, name in zip(case.varied, varied[i], strict=True):
            assert static[name].shape == free[name].shape == symbolic[name].shape == case.inputs[j].shape
            scale = max(float(np.abs(free[name]).max(initial=0)), 1.0)
            assert np.abs(symbolic[name] - free[name]).max(initial=0) <= FLOAT32_TOLERANCE * scale

    try_all(cases, check, str)


def moving_of(cases: list[Case]) -> list[list[str]]:
    """Of each case what finite differences can move."""
    return [
        [f"{prefix_of(case, cases)}x{i}" for i in case.varied if i not in case.constant] for case in cases
    ]


def by_name(
    model: onnx.ModelProto, feed: dict[str, Array], kernels: str, dtype: type = np.float64
) -> dict[str, Array]:
    """Losses and gradients, these by the names of what they are for."""
    values = runner(model, kernels=kernels)({value.name: feed[value.name] for value in model.graph.input})
    assert all(value.dtype == dtype for value in values)
    names = [output.name.removesuffix(".grad") for output in model.graph.output]
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("op", BY_OP)
def test_without_ranks(op: str) -> None:
    """Right, or a refusal that says what is missing."""
    for cases in by_opset([case for case in BY_OP[op] if case.used == (0,)]):
        check_without_ranks(cases)


def check_without_ranks(cases: list[Case]) -> None:
    done: dict[Case, onnx.ModelProto] = {}

    def check_refusal(case: Case) -> None:
        model = make_model(case, "unranked")
        try:
            done[case] = moe_onnx.differentiate(model, loss=LOSS, wrt=[f"x{i}" for i in case.varied])
        except moe_onnx.GradientError as error:
            message = str(error)
            assert re.search("rank|must be known|Opset 13", message)
            assert "(node 'the_node')" in message
            assert "Path from the loss: 'loss' <- Sum 'loss_node'" in message

    try_all(cases, check_refusal, str)
    cases = list(done)
    if not cases:
        return
    prefixes = [prefix_of(case, cases) for case in cases]
    feed = joint_feed(cases)
    found: dict[str, Array] = {}
    for kernels, thirds in (("body", [0]), (FAST, [1, 2])):
        chosen = [i for i in range(len(cases)) if i % 3 in thirds]
        if chosen:
            joint = side_by_side([done[cases[i]] for i in chosen], [prefixes[i] for i in chosen])
            found |= by_name(joint, feed, kernels)
    plain = side_by_side([make_model(case, "unranked") for case in cases], prefixes)
    call = runner(plain, plain=True, kernels=FAST)
    directions = joint_slopes(call, feed, moving_of(cases), np.random.default_rng(7))

    def check(case: Case) -> None:
        prefix = prefix_of(case, cases)
        for i in case.varied:
            assert found[f"{prefix}x{i}"].shape == case.inputs[i].shape
        check_slopes(found, [direction for direction in directions if direction[0].startswith(prefix)])

    try_all(cases, check, str)


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
