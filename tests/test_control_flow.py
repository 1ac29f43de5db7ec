"""If, Loop, Scan, functions and bodies: gradients against finite differences, and what is refused."""
# ruff: noqa: E501

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from gradient_tools import check_slopes, run, slopes
from onnx import parser

import moe_onnx


def model_of(text: str, imports: str = '"": 21', functions: str = "") -> onnx.ModelProto:
    return parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]>\n{text}\n{functions}")


def check(model: onnx.ModelProto, feed: dict[str, Any], *wrt: str) -> onnx.ModelProto:
    """The gradients are finite differences, and the outputs stay what they were."""
    done = moe_onnx.differentiate(model, loss="loss", wrt=wrt)
    onnx.checker.check_model(done, full_check=True)
    assert [value.name for value in done.graph.output[-len(wrt) :]] == [f"{name}.grad" for name in wrt]
    plain, found = run(model, feed), run(done, feed)
    for want, got in zip(plain, found, strict=False):
        np.testing.assert_allclose(got, want, rtol=1e-12)
    gradients = dict(zip(wrt, found[len(plain) :], strict=True))
    for name in wrt:
        assert gradients[name].shape == feed[name].shape
    check_slopes(gradients, slopes(model, feed, list(wrt), np.random.default_rng(1)))
    return done


def refused(model: onnx.ModelProto, *wrt: str) -> str:
    with pytest.raises(moe_onnx.GradientError) as caught:
        moe_onnx.differentiate(model, loss="loss", wrt=wrt)
    return str(caught.value)


X, W = np.asarray([0.4, -0.7]), np.asarray([1.3, 0.6])

BRANCHES = """g (bool c, double[2] x, double[2] w, double[2] u) => (double[2] loss) {
    [scale] y = Mul (x, w)
    [branch] loss = If (c) <
        then_branch = t () => (double[2] a) { k = Sin (y)  a = Mul (k, w) },
        else_branch = e () => (double[2] b) { b = Mul (u, y) }> }"""


@pytest.mark.parametrize("taken", [True, False])
def test_both_branches_of_an_if(taken: bool) -> None:
    feed = {"c": np.asarray(taken), "x": X, "w": W, "u": X + W}
    check(model_of(BRANCHES), feed, "x", "w", "u")
    check(model_of(BRANCHES), feed, "u")  # which one branch alone uses


def test_an_if_whose_branches_give_outer_values_or_integers() -> None:
    text = """g (bool c, double[2] x) => (double[2] loss) {
        y, n = If (c) <
            then_branch = t () => (double[2] a, int64 i) { a = Identity (x)  i = Constant <value_int = 2> () },
            else_branch = e () => (double[2] b, int64 j) { b = Neg (x)  j = Constant <value_int = 3> () }>
        k = Cast <to = 11> (n)
        s = Mul (y, x)
        loss = Mul (s, k) }"""
    for taken in (True, False):
        check(model_of(text), {"c": np.asarray(taken), "x": X}, "x")


def test_an_if_in_an_if() -> None:
    text = """g (bool c, bool b, double[2] x, double[2] w) => (double[2] loss) {
        loss = If (c) <
            then_branch = t () => (double[2] a) {
                p = Mul (x, w)
                a = If (b) <
                    then_branch = tt () => (double[2] q) { q = Mul (p, p) },
                    else_branch = te () => (double[2] r) { r = Exp (x) }> },
            else_branch = e () => (double[2] s) { s = Neg (w) }> }"""
    for taken in range(4):
        check(
            model_of(text),
            {"c": np.asarray(taken < 3), "b": np.asarray(taken % 2 == 0), "x": X, "w": W},
            "x",
            "w",
        )


LOOP = """g (int64 n, double[2] x, double[2] w) => (double[2] loss) {
    y = Mul (x, w)
    [lp] v, s = Loop (n, , y) <body = b (int64 i, bool c, double[2] v) => (bool d, double[2] next, double[2] z) {
        d = Identity (c)
        f = Cast <to = 11> (i)
        p = Mul (v, w)
        z = Sin (p)
        q = Add (z, x)
        next = Mul (q, f) }>
    sums = ReduceSum <keepdims = 0> (s, axes)
    loss = Add (v, sums) }"""


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_loop_of_any_number_of_iterations(count: int) -> None:
    text = LOOP.replace("(double[2] loss) {", "(double[2] loss) <int64[1] axes = {0}> {")
    check(model_of(text), {"n": np.asarray(count), "x": X, "w": W}, "x", "w")


def test_a_loop_that_ends_when_its_values_say() -> None:
    text = """g (double x, double w, bool go) => (double loss) {
        top = Constant <value = double {5.0}> ()
        [lp] loss = Loop (, go, x) <body = b (int64 i, bool c, double v) => (bool d, double next) {
            p = Mul (v, w)
            next = Add (p, x)
            d = Less (next, top) }> }"""
    for go in (True, False):
        check(model_of(text), {"x": np.asarray(0.7), "w": np.asarray(1.1), "go": np.asarray(go)}, "x", "w")


def test_a_loop_over_rows() -> None:
    """As exports unroll experts: the row of an iteration, by its number."""
    text = """g (double[3,2] x, double[2] w) => (double[2] loss) {
        n = Constant <value_int = 3> ()
        start = Mul (w, w)
        [lp] loss = Loop (n, , start) <body = b (int64 i, bool c, double[2] v) => (bool d, double[2] next) {
            d = Identity (c)
            row = Gather <axis = 0> (x, i)
            p = Mul (row, v)
            next = Tanh (p) }> }"""
    check(model_of(text), {"x": np.random.default_rng(0).standard_normal((3, 2)), "w": W}, "x", "w")


def test_loops_in_branches_and_branches_in_loops() -> None:
    text = """g (bool c, double[2] x, double[2] w) => (double[2] loss) {
        n = Constant <value_int = 3> ()
        loss = If (c) <
            then_branch = t () => (double[2] a) {
                a = Loop (n, , x) <body = b (int64 i, bool k, double[2] v) => (bool d, double[2] next) {
                    d = Identity (k)
                    one = Constant <value_int = 1> ()
                    odd = Equal (i, one)
                    next = If (odd) <
                        then_branch = bt () => (double[2] p) { p = Mul (v, w) },
                        else_branch = be () => (double[2] q) { q = Mul (v, v) }> }> },
            else_branch = e () => (double[2] z) { z = Mul (x, w) }> }"""
    for taken in (True, False):
        check(model_of(text), {"c": np.asarray(taken), "x": X, "w": W}, "x", "w")


@pytest.mark.parametrize(
    ("attributes", "xs", "stack"),
    [
        ("", "3,2", "3,2"),
        (", scan_input_directions = [1, 0], scan_output_directions = [1]", "3,2", "3,2"),
        (", scan_input_directions = [0, 1]", "3,2", "3,2"),
        (", scan_input_axes = [1, 0], scan_output_axes = [1]", "2,3", "2,3"),
        (", scan_input_axes = [-1, 0], scan_input_directions = [1, 1]", "2,3", "3,2"),
    ],
)
def test_scan(attributes: str, xs: str, stack: str) -> None:
    text = f"""g (double[{xs}] xs, double[3,2] zs, double[2] w, double[{stack}] m) => (double loss) {{
        v, s = Scan (w, xs, zs) <num_scan_inputs = 2 {attributes},
            body = b (double[2] v, double[2] x, double[2] z) => (double[2] next, double[2] s) {{
                a = Mul (v, x)
                t = Sin (a)
                s = Mul (t, w)
                next = Add (s, z) }}>
        p = Mul (s, m)
        q = ReduceSum <keepdims = 0> (p)
        r = ReduceSum <keepdims = 0> (v)
        loss = Add (q, r) }}"""
    rng = np.random.default_rng(2)
    feed = {
        name: rng.standard_normal([int(n) for n in dims.split(",")]) * 0.5
        for name, dims in (("xs", xs), ("m", stack))
    }
    feed |= {"zs": rng.standard_normal((3, 2)), "w": W}
    check(model_of(text), feed, "xs", "zs", "w", "m")
    check(model_of(text), feed, "zs")


def test_second_derivatives_of_a_loop() -> None:
    text = """g (double x) => (double loss) {
        n = Constant <value_int = 3> ()
        loss = Loop (n, , x) <body = b (int64 i, bool c, double v) => (bool d, double next) {
            d = Identity (c)
            next = Mul (v, x) }> }"""
    once = moe_onnx.differentiate(model_of(text), loss="loss", wrt="x")
    twice = moe_onnx.differentiate(once, loss="x.grad", wrt="x", suffix=".grad2")
    found = run(twice, {"x": np.asarray(1.5)})
    np.testing.assert_allclose(found, [1.5**4, 4 * 1.5**3, 12 * 1.5**2])


def test_a_state_that_grows_is_refused() -> None:
    text = """g (double[2] x) => (double[n] loss) {
        n = Constant <value_int = 2> ()
        s = Mul (x, x)
        [grow] loss = Loop (n, , s) <body = b (int64 i, bool c, double[2] v) => (bool d, double[4] next) {
            d = Identity (c)
            e = Mul (v, v)
            next = Concat <axis = 0> (e, e) }> }"""
    message = refused(model_of(text), "x")
    assert "Loop (node 'grow')" in message and "changes its shape from [2] to [4]" in message


def test_what_blocks_inside_a_branch_is_named() -> None:
    message = refused(model_of(BRANCHES.replace("Sin (y)", "Round (y)")), "x")
    assert "If (node 'branch')" in message and "Round" in message and "'loss' <- If 'branch'" in message


@pytest.mark.parametrize(
    ("body", "op", "advice"),
    [
        (
            "s = SequenceConstruct (x, x)  i = Constant <value_int = 0> ()  loss = SequenceAt (s, i)",
            "SequenceAt",
            "Sequences",
        ),
        (
            "s = SplitToSequence <axis = 0> (x)  loss = ConcatFromSequence <axis = 0> (s)",
            "ConcatFromSequence",
            "Sequences",
        ),
        ("o = Optional (x)  loss = OptionalGetElement (o)", "OptionalGetElement", "optionals"),
        ("loss = Round (x)", "Round", "straight-through"),
        ("loss = Bernoulli (x)", "Bernoulli", "drawn at random"),
    ],
)
def test_what_has_no_gradient_is_refused_with_the_nearest_form(body: str, op: str, advice: str) -> None:
    """Also beside a path that has one: nothing is left out in silence."""
    body = body.replace("loss =", "y =") + " loss = Add (x, y)"
    message = refused(model_of(f"g (double[2] x) => (double[2] loss) {{ {body} }}"), "x")
    assert f"::{op} (node" in message and advice in message and "Path from the loss: 'loss' <- " in message


def test_places_that_constant_indices_name_twice_are_refused() -> None:
    for op, index in (("ScatterElements", "int64[2] i = {1, -2}"), ("ScatterND", "int64[2,1] i = {1, 1}")):
        text = f"g (double[3] x, double[2] u) => (double[3] loss) <{index}> {{ loss = {op} (x, i, u) }}"
        assert "hold a place twice" in refused(model_of(text), "u")


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_of_computed_indices_the_update_that_stays_has_the_gradient(op: str) -> None:
    more = ",1" if op == "ScatterND" else ""
    text = f"g (double[3] x, int64[3{more}] i, double[3] u, double[3] v) => (double loss) {{ s = {op} (x, i, u)  p = Mul (s, v)  loss = ReduceSum <keepdims = 0> (p) }}"
    index = np.asarray([1, 0, -2]).reshape(3, *([1] if more else []))
    feed = {"x": np.ones(3), "i": index, "u": np.asarray([4.0, 5.0, 6.0]), "v": np.asarray([2.0, 3.0, 7.0])}
    done = moe_onnx.differentiate(model_of(text), loss="loss", wrt=["x", "u"])
    loss, dx, du = run(done, feed)
    assert loss == 10 + 18 + 7 and dx.tolist() == [0, 0, 7] and du.tolist() == [0, 2, 3]


def test_extrema_and_sums_share_at_ties() -> None:
    text = 'g (double[2] x, int64[3] i, double[3] u) => (double[2] loss) { loss = ScatterElements <reduction = "max"> (x, i, u) }'
    done = moe_onnx.differentiate(model_of(text), loss="loss", wrt=["x", "u"])
    _, dx, du = run(
        done, {"x": np.asarray([2.0, 1.0]), "i": np.asarray([0, 0, 1]), "u": np.asarray([2.0, 2.0, 5.0])}
    )
    np.testing.assert_allclose(dx, [1 / 3, 0])
    np.testing.assert_allclose(du, [1 / 3, 1 / 3, 1])


def test_a_diagonal_is_refused() -> None:
    text = 'g (double[2,2] x) => (double[2] loss) { [e] loss = Einsum <equation = "ii->i"> (x) }'
    assert re.search(r"Einsum \(node 'e'\).*takes a diagonal", refused(model_of(text), "x"))


# Functions of onnx and of the model


@pytest.mark.parametrize(
    ("op", "opset"),
    [
        *((op, 22) for op in ("Mish", "HardSwish", "Selu", "Softsign", "ThresholdedRelu", "HardSigmoid")),
        # Before that the body is one for float32 alone; the oldest onnx does not know the version.
        *([("Celu <alpha = 0.7>", 28)] if onnx.defs.onnx_opset_version() >= 28 else []),
        ("Swish <alpha = 1.5>", 24),
        ("Selu", 18),
    ],
)
def test_onnx_function_bodies(op: str, opset: int) -> None:
    name, _, attributes = op.partition(" ")
    text = f"g (double[4] x) => (double[4] loss) {{ a = {name} {attributes} (x)  loss = Mul (a, x) }}"
    done = check(model_of(text, f'"": {opset}'), {"x": np.asarray([-3.6, -0.4, 0.3, 2.2])}, "x")
    assert name not in {node.op_type for node in done.graph.node} and not done.functions


FUNCTION = """<domain: "my.domain", opset_import: ["": 20]>
    Gated <factor: float = 3.0> (x, c) => (y) {
        y = If (c) <
            then_branch = t () => (p) { k = Constant <value_float: float = @factor> ()
                w = CastLike (k, x)  p = Mul (x, w) },
            else_branch = e () => (q) { q = Mul (x, x) }> }"""


@pytest.mark.parametrize("attributes", ["", "<factor = 0.5>"])
def test_functions_with_branches_and_attributes(attributes: str) -> None:
    text = f"g (double[2] x, bool c) => (double[2] loss) {{ s = Exp (x)  loss = my.domain.Gated {attributes} (s, c) }}"
    function = FUNCTION.replace('"": 20', '"": 21')
    for taken in (True, False):
        check(model_of(text, '"": 21, "my.domain": 1', function), {"x": X, "c": np.asarray(taken)}, "x")


def test_functions_of_opsets_that_agree() -> None:
    function = (
        '<domain: "my.domain", opset_import: ["": 18]>\nTwice (x) => (y) { s = Sin (x)  y = Add (s, s) }'
    )
    text = "g (double[2] x) => (double[2] loss) { loss = my.domain.Twice (x) }"
    model = model_of(text, '"": 21, "my.domain": 1', function)
    found = moe_onnx.differentiate(model, loss="loss", wrt="x")
    np.testing.assert_allclose(run(found, {"x": X})[1], 2 * np.cos(X))
