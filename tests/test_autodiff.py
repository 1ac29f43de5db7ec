"""``differentiate``: what it refuses and how, how little it adds, whose names and models it leaves alone."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gradient_tools import run
from onnx import helper, numpy_helper, parser

import moe_onnx
from moe_onnx.autodiff import registry

IMPORTS = '"": 21'


def model_of(text: str, imports: str = IMPORTS, functions: str = "") -> onnx.ModelProto:
    return parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]>\n{text}\n{functions}")


def gradients(model: onnx.ModelProto, feed: dict[str, Any], *wrt: str, loss: str = "loss") -> list[Any]:
    """The gradients, of a model that is checked to be valid and to have no dead or doubled nodes."""
    done = moe_onnx.differentiate(model, loss=loss, wrt=wrt)
    check_minimal(done)
    return run(done, feed)[len(model.graph.output) :]


def check_minimal(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)
    alive = {value.name for value in model.graph.output}
    for node in reversed(model.graph.node):
        assert alive & set(node.output), f"nothing uses {node.name}"
        alive.update(node.input)
        for graph in (attr.g for attr in node.attribute if attr.HasField("g")):
            alive.update(name for inner in graph.node for name in inner.input)
            alive.update(value.name for value in graph.output)
    unused = {value.name for value in model.graph.initializer} - alive
    assert not unused
    expressions = [
        (node.op_type, node.domain, tuple(node.input), tuple(map(str, node.attribute)))
        for node in model.graph.node
    ]
    doubled = {e[0] for e in expressions if expressions.count(e) > 1}
    assert doubled <= {"Identity"}, doubled
    constants = [(c.data_type, tuple(c.dims), c.raw_data) for c in model.graph.initializer]
    assert len(constants) == len(set(constants))


def refused(model: onnx.ModelProto, *wrt: str, loss: str = "loss") -> str:
    with pytest.raises(moe_onnx.GradientError) as caught:
        moe_onnx.differentiate(model, loss=loss, wrt=wrt)
    return str(caught.value)


X = np.arange(6.0).reshape(2, 3) + 1


@pytest.mark.parametrize("product", ["Mul (x, s)", "Mul (s, x)"])
def test_silu_takes_few_passes(product: str) -> None:
    """Its two rules share what they can, whichever way round, and far out there is no NaN."""
    nodes = f"s = Sigmoid (x) y = {product} loss = ReduceSum <keepdims = 0> (y)"
    text = f"g (float[N] x) => (float loss) {{ {nodes} }}"
    x = np.array([-200, -30, -5, -1e-3, 0, 0.7, 12, 40, 3e38], np.float32)
    (found,) = gradients(model_of(text), {"x": x}, "x")
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(found, s + x * (s * (1 - s)), rtol=5e-6, atol=1e-6)
    if product == "Mul (x, s)":
        added = [n.op_type for n in moe_onnx.differentiate(model_of(text), loss="loss", wrt=["x"]).graph.node]
        assert sorted(added[3:]) == ["Add", "Expand", "Mul", "Mul", "Shape", "Sub"]


# Refusals


def test_an_operator_without_a_rule_is_named_with_its_path() -> None:
    model = model_of(
        """g (double[2,3] x) => (double loss) {
            [n1] a = Sigmoid (x)
            [n2] b = Round (a)
            [n3] c = Mul (b, b)
            [n4] loss = ReduceSum <keepdims = 0> (c) }"""
    )
    message = refused(model, "x")
    assert "ai.onnx::Round (node 'n2') has no gradient rule for opset 21" in message
    assert "Path from the loss: 'loss' <- ReduceSum 'n4' <- Mul 'n3' <- Round 'n2'." in message
    assert "register_gradient" in message


def test_an_operator_of_an_old_opset_has_no_rule() -> None:
    model = model_of("g (double[2,3] x) => (double[2,3] loss) { [n] loss = Softmax (x) }", '"": 12')
    assert "ai.onnx::Softmax (node 'n') has no gradient rule for opset 12" in refused(model, "x")


def test_long_paths_keep_both_ends() -> None:
    body = "\n".join(f"[n{i}] v{i + 1} = Neg (v{i})" for i in range(30))
    model = model_of(
        f"g (double v0) => (double v31) {{ [bad] v00 = Floor (v0)\n{body} \n [end] v31 = Neg (v30) }}"
    )
    model.graph.node[1].input[0] = "v00"
    message = refused(model, "v0", loss="v31")
    assert "'v31' <- Neg 'end' <- Neg 'n29'" in message and "(24 more)" in message
    assert message.index("Floor 'bad'") and "Neg 'n0' <- Floor 'bad'." in message


@pytest.mark.parametrize("wanted", ["x", "w"])
def test_a_subgraph_that_captures_what_is_wanted(wanted: str) -> None:
    model = model_of(
        """g (bool c, double[2] x, double[2] w) => (double[2] loss) {
            [scale] y = Mul (x, w)
            [branch] loss = If (c) <
                then_branch = t () => (double[2] a) { a = Neg (y) },
                else_branch = e () => (double[2] b) { b = Exp (y) }> }"""
    )
    slope = {"x": [3.0, 4.0], "w": [1.0, 2.0]}[wanted]
    feed = {"c": np.asarray(True), "x": np.asarray([1.0, 2.0]), "w": np.asarray([3.0, 4.0])}
    np.testing.assert_array_equal(gradients(model, feed, wanted)[0], [-s for s in slope])
    with pytest.raises(moe_onnx.OptionError, match="the model has no value 'a'"):
        moe_onnx.differentiate(model, loss="loss", wrt="a")


def test_a_subgraph_that_uses_nothing_wanted_is_no_obstacle() -> None:
    model = model_of(
        """g (bool c, double[2] x, double[2] w) => (double[2] loss) {
            y = If (c) <then_branch = t () => (double[2] a) { a = Neg (w) },
                        else_branch = e () => (double[2] b) { b = Exp (w) }>
            loss = Mul (x, y) }"""
    )
    feed = {"c": np.asarray(True), "x": np.ones(2), "w": np.asarray([2.0, 3.0])}
    np.testing.assert_array_equal(gradients(model, feed, "x")[0], [-2, -3])


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("i = Cast <to = 7> (x)  y = Cast <to = 11> (i)", "Cast"),
        ("i = ArgMax <axis = 1, keepdims = 1> (x)  y = Cast <to = 11> (i)", "ArgMax"),
        ("i = Greater (x, x)  y = Cast <to = 11> (i)", "Greater"),
        ("s = Shape (x)  i = ReduceProd (s)  y = Cast <to = 11> (i)", "Shape"),
    ],
)
def test_paths_that_end_in_integers_are_refused(body: str, end: str) -> None:
    model = model_of(f"g (double[2,3] x) => (double[a,b] loss) {{ {body}  loss = Neg (y) }}")
    message = refused(model, "x")
    assert "no differentiable path to 'x'" in message and f"ends in integers or booleans, at {end}" in message


def test_an_integer_path_beside_a_differentiable_one_is_cut() -> None:
    model = model_of(
        """g (double[2,3] x) => (double loss) {
            i = Cast <to = 7> (x)
            f = Cast <to = 11> (i)
            y = Mul (x, f)
            loss = ReduceSum <keepdims = 0> (y) }"""
    )
    np.testing.assert_array_equal(gradients(model, {"x": X}, "x")[0], X)


def test_a_loss_that_does_not_depend_on_it() -> None:
    model = model_of("g (double x, double w) => (double loss) { u = Neg (w)  loss = Exp (x) }")
    for name in ("w", "u"):
        assert f"no differentiable path to '{name}': the loss does not depend on it" in refused(model, name)


def test_an_input_that_a_rule_leaves_out() -> None:
    model = model_of("g (double x, double low) => (double loss) { [n] loss = Clip (x, low) }")
    message = refused(model, "low")
    assert (
        "Clip (node 'n') is not differentiable for its input 'low'" in message and "'loss' <- Clip" in message
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('loss = Einsum <equation = "ij,jj->ij"> (x, q)', "takes a diagonal"),
        ("r = Constant <value = double {0.5}> ()  loss = Dropout (x, r, t)", "training mode"),
    ],
)
def test_forms_without_a_rule_say_what_is_wrong(body: str, why: str) -> None:
    model = model_of(
        f"""g (double[2,3] x, double[3,3] q, int64[1] k, bool t) => (double[a,b] loss)
        {{ {body} }}"""
    )
    message = refused(model, "x")
    assert why in message and "Path from the loss: 'loss' <- " in message


def test_initializers_that_callers_may_replace_are_no_constants() -> None:
    model = model_of(
        """g (double[3,3] x, int64[1] axes) => (double[3] loss) <int64[1] axes = {1}> {
            loss = ReduceSum <keepdims = 0> (x, axes) }"""
    )
    assert [value.name for value in model.graph.input] == ["x", "axes"]
    assert "Equal" in {
        node.op_type for node in moe_onnx.differentiate(model, loss="loss", wrt="x").graph.node
    }


def test_names_that_are_not_there() -> None:
    model = model_of("g (double hidden) => (double loss) { loss = Exp (hidden) }")
    for loss, wrt, wrong in (("loss", "hiden", "wrt"), ("lose", "hidden", "loss")):
        with pytest.raises(moe_onnx.OptionError, match=f"{wrong}: .*no value.*Did you mean '(hidden|loss)'"):
            moe_onnx.differentiate(model, loss=loss, wrt=wrt)
    with pytest.raises(moe_onnx.OptionError, match="Give the name of a value"):
        moe_onnx.differentiate(model, loss="loss", wrt="q")
    with pytest.raises(moe_onnx.OptionError, match="twice: hidden, hidden"):
        moe_onnx.differentiate(model, loss="loss", wrt=["hidden", "hidden"])
    with pytest.raises(moe_onnx.OptionError, match="names nothing"):
        moe_onnx.differentiate(model, loss="loss", wrt=[])


def test_outputs_that_would_clash() -> None:
    model = model_of("g (double x) => (double loss) { u = Neg (x)  loss = Exp (u) }")
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "x.grad"
    with pytest.raises(moe_onnx.OptionError, match="value 'x.grad' already; give another suffix"):
        moe_onnx.differentiate(model, loss="loss", wrt="x")
    done = moe_onnx.differentiate(model, loss="loss", wrt="x", suffix="_d")
    assert [value.name for value in done.graph.output] == ["loss", "x_d"]
    with pytest.raises(moe_onnx.OptionError, match="already"):
        moe_onnx.differentiate(model, loss="loss", wrt="x", suffix="")


def test_integers_have_no_gradients() -> None:
    model = model_of("g (int64 n, double x) => (double loss, int64 m) { m = Neg (n)  loss = Exp (x) }")
    assert "'n' is INT64: only floating-point" in refused(model, "n")
    assert "'m' is INT64: only floating-point" in refused(model, "x", loss="m")


# Minimal graphs

MLP = """g (float[batch,8] x, float[batch,4] t, float[8,16] w1, float[16] b1, float[16,4] w2, float[4] b2)
    => (float loss) {
    h = Gemm (x, w1, b1)
    a = Relu (h)
    y = Gemm (a, w2, b2)
    e = Sub (y, t)
    loss = ReduceSumSquare <keepdims = 0> (e) }"""


def test_an_mlp_has_these_nodes_and_no_more() -> None:
    done = moe_onnx.differentiate(model_of(MLP), loss="loss", wrt=["w1", "b1", "w2", "b2"])
    check_minimal(done)
    names = [node.op_type for node in done.graph.node][5:]
    # 2 e; weights and input of the second layer; its bias; the mask; weights and bias of the first
    assert sorted(names) == sorted(
        ["Mul", "Mul", "Gemm", "Gemm", "ReduceSum", "Greater", "Where", "Gemm", "ReduceSum"]
    )
    only = moe_onnx.differentiate(model_of(MLP), loss="loss", wrt=["b2"])
    assert [node.op_type for node in only.graph.node][5:] == ["Mul", "Mul", "ReduceSum"]


def test_sizes_that_are_known_equal_are_not_undone() -> None:
    model = model_of(
        """g (double[n,3] x, double[n,3] y) => (double loss) {
            s = Add (x, y)
            p = Mul (s, x)
            loss = ReduceSum <keepdims = 0> (p) }"""
    )
    done = moe_onnx.differentiate(model, loss="loss", wrt=["x", "y"])
    check_minimal(done)
    types = [node.op_type for node in done.graph.node]
    assert types.count("ReduceSum") == 1 and "Reshape" not in types and "NonZero" not in types


def test_nothing_is_computed_for_what_needs_no_gradient() -> None:
    model = model_of(
        """g (double[2,3] x, double[3,4] w) => (double[2,4] loss) {
            u = Sin (x)
            loss = MatMul (u, w) }"""
    )
    done = moe_onnx.differentiate(model, loss="loss", wrt="w")
    assert "Cos" not in [node.op_type for node in done.graph.node]
    assert sum(node.op_type == "Gemm" for node in done.graph.node) == 1


def test_the_users_nodes_are_used_again() -> None:
    model = model_of("g (double x) => (double loss, double c) { c = Cos (x)  loss = Sin (x) }")
    done = moe_onnx.differentiate(model, loss="loss", wrt="x")
    assert [node.op_type for node in done.graph.node].count("Cos") == 1


def test_what_no_output_needs_is_gone() -> None:
    model = model_of("g (double x) => (double loss) { u = Sin (x)  loss = Exp (x) }")
    check_minimal(moe_onnx.differentiate(model, loss="loss", wrt="x"))


# Fan-out, several outputs, several wants


def test_gradients_of_all_uses_are_summed() -> None:
    model = model_of(
        """g (double[3] x) => (double loss, double[3] also) {
            a = Mul (x, x)
            b = Mul (a, x)
            also = Add (a, b)
            d = Sum (also, x, a)
            loss = ReduceSum <keepdims = 0> (d) }"""
    )
    x = np.asarray([1.0, -2.0, 0.5])
    da, dx = gradients(model, {"x": x}, "a", "x")
    np.testing.assert_allclose(da, 2 + x)
    np.testing.assert_allclose(dx, 4 * x + 3 * x**2 + 1)


def test_one_gradient_under_several_names() -> None:
    model = model_of(
        "g (double[2] x, double[2] y) => (double[2] loss) { z = Add (x, y)  loss = Identity (z) }"
    )
    feed = {"x": np.ones(2), "y": np.ones(2)}
    done = moe_onnx.differentiate(model, loss="loss", wrt=["x", "y", "z", "loss"])
    check_minimal(done)
    assert [v.name for v in done.graph.output] == ["loss", "x.grad", "y.grad", "z.grad", "loss.grad"]
    for value in run(done, feed)[1:]:
        np.testing.assert_array_equal(value, np.ones(2))


def test_initializers_and_both_outputs_of_a_node() -> None:
    model = model_of(
        """g (double[4] x) => (double[2] loss) <double[4] w = {1, 2, 3, 4}> {
            y = Mul (x, w)
            a, b = Split <num_outputs = 2> (y)
            loss = Mul (a, b) }"""
    )
    x = np.asarray([1.0, 2.0, 3.0, 4.0])
    (dw,) = gradients(model, {"x": x}, "w")
    np.testing.assert_allclose(dw, x * np.asarray([9, 16, 1, 4]))


def test_a_loss_that_is_wanted_and_an_input() -> None:
    model = model_of("g (double[2] x) => (double[2] y) { y = Exp (x) }")
    np.testing.assert_array_equal(gradients(model, {"x": np.ones(2)}, "x", loss="x")[0], [1, 1])


def test_second_derivatives() -> None:
    model = model_of("g (double[3] x) => (double[3] loss) { a = Tanh (x)  loss = Mul (a, x) }")
    once = moe_onnx.differentiate(model, loss="loss", wrt="x")
    twice = moe_onnx.differentiate(once, loss="x.grad", wrt="x", suffix=".grad2")
    x = np.asarray([0.3, -1.0, 2.0])
    t = np.tanh(x)
    np.testing.assert_allclose(run(twice, {"x": x})[2], (1 - t**2) * 2 * (1 - x * t), rtol=1e-12)


# The user's model


def test_the_users_model_is_not_touched_and_keeps_what_it_says() -> None:
    model = model_of(MLP, '"": 21, "my.domain": 3')
    model.doc_string, model.producer_name, model.model_version = "mine", "me", 7
    helper.set_model_props(model, {"key": "value"})
    model.graph.doc_string = "a graph"
    before = model.SerializeToString(deterministic=True)
    done = moe_onnx.differentiate(model, loss="loss", wrt="w1")
    assert model.SerializeToString(deterministic=True) == before
    assert (done.doc_string, done.producer_name, done.model_version) == ("mine", "me", 7)
    assert done.graph.doc_string == "a graph" and done.ir_version == 10
    assert {p.key: p.value for p in done.metadata_props} == {"key": "value"}
    assert {o.domain: o.version for o in done.opset_import} == {"": 21, "my.domain": 3}


def test_names_like_ours_do_not_clash() -> None:
    model = model_of(
        """g (double[3] x, double[3] float64_1, double[3] val_0) => (double loss) {
            [grad_y] grad = Mul (x, float64_1)
            [t] t = Tanh (grad)
            [loss_node] b = Mul (t, val_0)
            loss = ReduceSum <keepdims = 0> (b) }"""
    )
    renamed = {"grad": "grad/t/Mul", "t": "grad/t/Sub", "b": "int64_m1"}
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
        node.name = f"grad/{node.op_type}" + ("_2" if node.name == "loss_node" else "")
    x, one, val = np.ones(3), np.full(3, 2.0), np.full(3, 3.0)
    got = gradients(model, {"x": x, "float64_1": one, "val_0": val}, "x", "float64_1", "val_0")
    slope = (1 - np.tanh(2.0) ** 2) * 3
    np.testing.assert_allclose(got[0], slope * one)
    np.testing.assert_allclose(got[1], slope * x)
    np.testing.assert_allclose(got[2], np.tanh(2.0))


def test_nodes_without_names() -> None:
    model = model_of("g (double x) => (double loss) { a = Sin (x)  b = Sin (a)  loss = Sin (b) }")
    done = moe_onnx.differentiate(model, loss="loss", wrt="x")
    names = [node.name for node in done.graph.node if node.name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("opset", [13, 14, 15, 16, 17, 18, 20, 23])
def test_opsets(opset: int) -> None:
    model = model_of(
        """g (double[n,3] x, double[3,4] w, double[4] b) => (double[] loss) {
            m = MatMul (x, w)
            h = Add (m, b)
            s = Softmax <axis = -1> (h)
            l = Log (s)
            r = Relu (h)
            p = Mul (l, r)
            loss = ReduceSum <keepdims = 0> (p) }""",
        f'"": {opset}',
    )
    rng = np.random.default_rng(0)
    feed = {"x": rng.random((2, 3)), "w": rng.random((3, 4)), "b": rng.random(4)}
    reference = model_of("g (double a) => (double b) { b = Neg (a) }")
    reference.graph.CopyFrom(model.graph)
    for got, want in zip(gradients(model, feed, "w", "b"), gradients(reference, feed, "w", "b"), strict=True):
        np.testing.assert_allclose(got, want)


def test_what_an_old_opset_lacks_is_said() -> None:
    model = model_of(
        "g (double[4,2] x, int64[3] i) => (double[3,2] loss) { [look] loss = Gather (x, i) }", '"": 15'
    )
    message = refused(model, "x")
    assert "Gather (node 'look'): Opset 15 of ai.onnx has not the attribute reduction" in message
    assert "Convert the model to opset 18" in message
    up = onnx.version_converter.convert_version(model, 18)
    moe_onnx.differentiate(up, loss="loss", wrt="x")


def test_ai_onnx_may_be_spelt_out() -> None:
    model = model_of("g (double x) => (double loss) { loss = Exp (x) }")
    model.opset_import[0].domain = "ai.onnx"
    np.testing.assert_allclose(
        run(moe_onnx.differentiate(model, loss="loss", wrt="x"), {"x": np.ones(())})[1], np.e
    )


def test_large_initializers_are_copied_at_most_once() -> None:
    import tracemalloc

    weight = np.ones((4096, 1024), np.float32)  # 16 MiB
    model = model_of("g (float[n,4096] x) => (float[n,1024] loss) { loss = MatMul (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    tracemalloc.start()
    done = moe_onnx.differentiate(model, loss="loss", wrt="w")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * weight.nbytes, "Python copies of the weight (the copy in the model is protobuf's)"
    assert done.ByteSize() < 1.01 * weight.nbytes


# Functions of the model

SQUARES = """<domain: "my.domain", opset_import: ["": 21]>
    Scaled <factor: float = 3.0> (x) => (y) {
        f = Constant <value_float: float = @factor> ()
        k = Cast <to = 11> (f)
        s = Mul (x, x)
        y = Mul (s, k) }"""


def test_functions_are_inlined_with_their_defaults() -> None:
    for attrs, factor in (("", 3.0), ("<factor = 0.5>", 0.5)):
        model = model_of(
            f"g (double[2] x) => (double[2] loss) {{ s = Exp (x)  loss = my.domain.Scaled {attrs} (s) }}",
            '"": 21, "my.domain": 1',
            SQUARES,
        )
        x = np.asarray([0.5, 1.0])
        np.testing.assert_allclose(gradients(model, {"x": x}, "x")[0], 2 * factor * np.exp(2 * x))


def test_functions_of_other_opsets_are_refused() -> None:
    model = model_of(
        "g (double[2] x) => (double[2] loss) { loss = my.domain.Scaled (x) }",
        '"": 21, "my.domain": 1',
        SQUARES.replace("21", "17"),
    )
    with pytest.raises(moe_onnx.ModelError, match="'my.domain::Scaled' is .* opset 17 .* model for 21"):
        moe_onnx.differentiate(model, loss="loss", wrt="x")


def test_outputs_that_a_node_leaves_out() -> None:
    model = model_of("g (double[4] x) => (double[2] loss) { loss, b = Split <num_outputs = 2> (x) }")
    model.graph.node[0].output[1] = ""
    np.testing.assert_array_equal(gradients(model, {"x": np.ones(4)}, "x")[0], [1, 1, 0, 0])


PYTHON_OP = """
import numpy as np, onnxruntime as ort, onnxruntime_extensions as extensions
from onnx import parser
import moe_onnx

@extensions.onnx_op(op_type="my.domain::Cube", inputs=[extensions.PyCustomOpDef.dt_double],
                    outputs=[extensions.PyCustomOpDef.dt_double])
def cube(x):
    return x**3

@moe_onnx.register_gradient("Cube", "my.domain")
def cube_gradient(g, node, d):
    (x,) = node.inputs
    return [g.mul(d, g.mul(g.like(3.0, x), g.mul(x, x)))]

model = parser.parse_model('''<ir_version: 10, opset_import: ["": 21, "my.domain": 1]>
    g (double[n,3] x, double[3] w) => (double loss) {
        a = Mul (x, w)
        b = my.domain.Cube (a)
        c = Mul (b, w)
        loss = ReduceSum <keepdims = 0> (c) }''')
done = moe_onnx.differentiate(model, loss="loss", wrt=["x", "w"])
options = ort.SessionOptions()
options.register_custom_ops_library(extensions.get_library_path())
session = ort.InferenceSession(done.SerializeToString(), options, providers=["CPUExecutionProvider"])
x, w = np.arange(6.0).reshape(2, 3), np.asarray([0.5, -1.0, 2.0])
_, dx, dw = session.run(None, {"x": x, "w": w})
np.testing.assert_allclose(dx, 3 * x**2 * w**4)
np.testing.assert_allclose(dw, (4 * x**3 * w**3).sum(0))
"""


def test_a_python_operator_of_the_users_own() -> None:
    """In a process of its own: operators cannot be added once there was a session."""
    done = subprocess.run([sys.executable, "-c", PYTHON_OP], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules registered in a test end with it."""
    monkeypatch.setattr(registry, "_RULES", {key: list(entries) for key, entries in registry._RULES.items()})


@pytest.mark.usefixtures("own_rules")
class TestRegister:
    def test_a_function_with_a_rule_stays_a_function(self) -> None:
        @moe_onnx.register_gradient("Scaled", "my.domain")
        def scaled(g: Any, node: Any, d: Any) -> Any:
            return [g.mul(d, g.like(42.0, node.inputs[0]))]

        model = model_of(
            "g (double[2] x) => (double[2] loss) { loss = my.domain.Scaled (x) }",
            '"": 21, "my.domain": 1',
            SQUARES,
        )
        done = moe_onnx.differentiate(model, loss="loss", wrt="x")
        assert [function.name for function in done.functions] == ["Scaled"]
        np.testing.assert_array_equal(run(done, {"x": np.ones(2)})[1], [42, 42])

    def test_versions_and_clashes(self) -> None:
        def first(*_: Any) -> Any: ...
        def second(*_: Any) -> Any: ...

        moe_onnx.register_gradient("Op", "d", since=1, until=4)(first)
        moe_onnx.register_gradient("Op", "d", since=5)(second)
        assert [registry.find_rule("d", "Op", v) for v in (1, 4, 5, 99)] == [first, first, second, second]
        for since, until in ((1, None), (4, 4), (9, None), (5, 5)):
            with pytest.raises(
                moe_onnx.OptionError, match=r"d::Op has a rule for versions (1-4|5\+) already"
            ):
                moe_onnx.register_gradient("Op", "d", since=since, until=until)(second)
        with pytest.raises(moe_onnx.OptionError, match="ai.onnx::Relu has a rule"):
            moe_onnx.register_gradient("Relu", "ai.onnx")(first)
        with pytest.raises(moe_onnx.OptionError, match=re.escape("until must be at least since (3), got 2")):
            moe_onnx.register_gradient("Op", "e", since=3, until=2)
        with pytest.raises(moe_onnx.OptionError, match="name of an operator"):
            moe_onnx.register_gradient(first)  # type: ignore[arg-type]

    def test_replacing_leaves_other_versions(self) -> None:
        def old(*_: Any) -> Any: ...
        def new(*_: Any) -> Any: ...

        moe_onnx.register_gradient("Op", "d", since=2)(old)
        moe_onnx.register_gradient("Op", "d", since=5, until=6, replace=True)(new)
        assert [registry.find_rule("d", "Op", v) for v in (1, 2, 4, 5, 6, 7)] == [
            None,
            old,
            old,
            new,
            new,
            old,
        ]
        assert registry.rules()["d", "Op"] == ["2-4", "5-6", "7+"]

    def test_a_namesake_in_another_domain_gets_nothing_of_the_standard(self) -> None:
        model = model_of(
            "g (double[2] x) => (double[2] loss) { [n] loss = my.domain.Relu (x) }", '"": 21, "my.domain": 1'
        )
        assert "my.domain::Relu (node 'n') has no gradient rule for opset 1" in refused(model, "x")

    def test_rules_that_return_too_little(self) -> None:
        moe_onnx.register_gradient("Op", "my.domain")(lambda g, node, d: [d])
        model = model_of(
            "g (double[2] x, double[2] y) => (double[2] loss) { [n] loss = my.domain.Op (x, y) }",
            '"": 21, "my.domain": 1',
        )
        assert "returned 1 values for 2 inputs" in refused(model, "x")

    def test_attributes_of_all_kinds(self) -> None:
        @moe_onnx.register_gradient("Op", "my.domain")
        def rule(g: Any, node: Any, d: Any) -> Any:
            more = {"a": [0.5, 1], "b": ["u", "v"], "c": np.asarray([1, 2]), "d": np.float32(0.5), "e": True}
            return [g.op("OpGrad", d, domain="my.domain", **more)]

        model = model_of(
            "g (double[2] x) => (double[2] loss) { loss = my.domain.Op (x) }", '"": 21, "my.domain": 1'
        )
        (node,) = [
            n for n in moe_onnx.differentiate(model, loss="loss", wrt="x").graph.node if n.op_type == "OpGrad"
        ]
        got = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert got == {"a": [0.5, 1.0], "b": [b"u", b"v"], "c": [1, 2], "d": 0.5, "e": 1}


# Routing


@pytest.mark.parametrize("active_num", [4, 10, 50])
def test_active_rows_of_any_number_of_tokens(active_num: int) -> None:
    model = model_of(
        f"""g (double[tokens,3] x, int32[tokens,2] expert_idx) => (double[rows,3] loss) {{
            loss, index, counts, before = ascend.moe.MoeInitRoutingV2
                <active_num = {active_num}, expert_num = 4, drop_pad_mode = 0> (x, expert_idx) }}""",
        '"": 21, "ascend.moe": 1',
    )
    expert_idx = np.asarray([[0, 1], [0, 2], [1, 3], [2, 3], [0, 3]], np.int32)
    (got,) = gradients(model, {"x": np.ones((5, 3)), "expert_idx": expert_idx}, "x")
    order = np.argsort(expert_idx.ravel(), kind="stable")[:active_num]
    np.testing.assert_array_equal(got[:, 0], np.bincount(order // 2, minlength=5))


def test_top_k_must_be_known() -> None:
    model = model_of(
        """g (double[t,3] x, int32[t,k] expert_idx) => (double[r,3] loss) {
            [dispatch] loss, i, c, b = ascend.moe.MoeInitRoutingV2 <expert_num = 4> (x, expert_idx) }""",
        '"": 21, "ascend.moe": 1',
    )
    message = refused(model, "x")
    assert "ascend.moe::MoeInitRoutingV2 (node 'dispatch')" in message and "top_k, must be known" in message


def test_probabilities_of_rows_have_no_gradient() -> None:
    model = model_of(
        """g (double[n,3] x, int32[n] i, bool[t,e] m, double[t,e] p) => (double[n] loss) {
            [combine] y, j, l, loss = ascend.moe.MoeTokenUnpermuteWithRoutingMap (x, i, m, p) }""",
        '"": 21, "ascend.moe": 1',
    )
    assert "the loss uses 'permute_probs'" in refused(model, "p")


@pytest.mark.parametrize("constant", [False, True])
def test_no_zeros_as_large_as_a_weight_in_the_loaded_graph(tmp_path: Any, constant: bool) -> None:
    model = model_of(
        """g (float[1000,64] w, int64[3] i, float[3,64] v) => (float loss) {
            rows = Gather (w, i)
            y = Mul (rows, v)
            loss = ReduceSum <keepdims = 0> (y) }"""
    )
    if constant:
        del model.graph.input[1]
        model.graph.initializer.append(numpy_helper.from_array(np.asarray([1, 5, 1]), "i"))
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.log_severity_level = 4
    done = moe_onnx.differentiate(model, loss="loss", wrt="w")
    ort.InferenceSession(done.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert (tmp_path / "loaded.onnx").stat().st_size < 10_000
