"""Every gradient rule against finite differences in float64, whatever the graph says of its sizes."""

from __future__ import annotations

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

import moe_onnx
from moe_onnx.autodiff.registry import rules
from moe_onnx.spec import DOMAIN


def test_every_rule_has_cases() -> None:
    tested = {(case.domain, case.op) for case in CASES}
    standard = {key for key in rules() if key[0] == ""}
    assert not standard - tested, "these rules have no case in gradient_cases.py"
    assert {key[0] for key in rules()} <= {"", DOMAIN}, "rules of another domain need tests of their own"


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
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
    single = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in feed.items()}
    for name, value in gradients_of(case, "symbolic", single, np.float32)[1].items():
        scale = max(float(np.abs(gradients[name]).max(initial=0)), 1.0)
        assert np.abs(value - gradients[name]).max(initial=0) <= FLOAT32_TOLERANCE * scale


@pytest.mark.parametrize("case", [case for case in CASES if case.used == (0,)], ids=str)
def test_without_ranks(case: Case) -> None:
    """Right, or a refusal that says what is missing."""
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
        assert "rank" in message or "last size" in message
        assert "(node 'the_node')" in message and "Path from the loss: 'loss' <- Sum 'loss_node'" in message
