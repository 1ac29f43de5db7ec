"""``fuse``: layers in standard operators become ``ascend.moe``; what is almost one says why it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fuse_forms import BATCHED, TRANSPOSED, by_hand, changed, feeds, model_of, weights
from onnx import helper, numpy_helper

import moe_onnx
from moe_onnx.rewrite.notes import MARK
from moe_onnx.rewrite.passes import apply_passes

ASCEND = ["MoeInitRoutingV2", "MoeGroupedMatmul", "MoeGroupedMatmul", "MoeTokenUnpermuteWithRoutingMap"]
FORMS = {"batched": (BATCHED, False), "transposed": (changed(BATCHED, *TRANSPOSED), True)}


def runner(model: onnx.ModelProto, *, by_name: bool = False) -> Callable[..., list[Any]]:
    """By onnxruntime alone: function bodies are in the model."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    if by_name:
        return lambda **values: list(session.run(None, values))
    names = [arg.name for arg in session.get_inputs()]
    return lambda *values: list(session.run(None, dict(zip(names, values, strict=True))))


def run(model: onnx.ModelProto, *values: Any) -> list[Any]:
    return runner(model)(*values)


def ours(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == "ascend.moe"]


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with one layer fused; again there is nothing to do, and nothing to say."""
    done = apply_passes(model, ["fuse"])
    assert not done.report.skipped
    assert len(done.report.applied) == 1
    again = apply_passes(done.model, ["fuse"])
    assert again.model is done.model
    assert not again.report.skipped
    onnx.checker.check_model(done.model, full_check=True)
    return done.model


@pytest.mark.parametrize("form", FORMS)
def test_gathered_weights_become_grouped_products_of_the_same_values(form: str) -> None:
    text, transposed = FORMS[form]
    given = weights(transposed=transposed)
    before = model_of(text, given)
    before.graph.output[0].doc_string = "what is said of it"
    before.graph.output[0].metadata_props.add(key="unit", value="m")
    after = fused(before)
    assert ours(after) == ASCEND
    assert after.graph.output[0] == before.graph.output[0]
    kinds = [node.op_type for node in after.graph.node]
    assert "GatherND" not in kinds and "Softmax" in kinds and kinds.count("Sigmoid") == 1
    products = [node for node in after.graph.node if node.op_type == "MoeGroupedMatmul"]
    assert {helper.get_node_attr_value(node, "transpose_weight") for node in products} == {
        int(not transposed)
    }
    assert [node.input[1] for node in products] == ["up", "down"]
    assert len(moe_onnx.rewrite_model(before, ["fuse"]).report.verified) >= 6
    kept = {tensor.name: tensor.SerializeToString() for tensor in after.graph.initializer}
    assert all(kept[t.name] == t.SerializeToString() for t in before.graph.initializer if t.name in kept)
    assert all(name in kept for name in given)
    made = [node for node in after.graph.node if any(p.key == MARK for p in node.metadata_props)]
    assert {node.op_type for node in made} >= {*ASCEND, "TopK", "ScatterElements"}
    runs = [runner(model) for model in (before, after)]
    for name, x in feeds(given).items():
        want = by_hand(x, given, transposed=transposed)
        for one in runs:
            (got,) = one(x)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_ids_that_a_token_may_have_twice_and_from_behind_leave_the_sum_as_it_is() -> None:
    change = (
        "ids_flat = Reshape (ids, last)",
        "less = Mod (ids, two)\n    many = Sub (less, one)\n    ids_flat = Reshape (many, last)",
    )
    before = model_of(changed(BATCHED, change, ("int64[1] k =", "int64 two = {2}, int64[1] k =")), weights())
    after = fused(before)
    assert ours(after) == ASCEND[:-1]
    runs = [runner(model) for model in (before, after)]
    for name, x in feeds(weights()).items():
        np.testing.assert_allclose(runs[1](x)[0], runs[0](x)[0], rtol=1e-5, atol=1e-5, err_msg=name)


def test_weights_of_one_token_for_all() -> None:
    given = weights(transposed=True)
    changes = [("(float[T, 4] x)", "(float[T, 4] x, float[1, 2] w)"), ("(weights, last)", "(w, last)")]
    before = model_of(changed(changed(BATCHED, *TRANSPOSED), *changes), given)
    x, w = feeds(given)["random"], np.array([[0.3, 0.7]], np.float32)
    np.testing.assert_allclose(run(fused(before), x, w)[0], run(before, x, w)[0], rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_token_and_in_experts_that_nobody_asks() -> None:
    given = weights()
    given["gate"][0] = 0
    given["gate"][0, 0] = -1e6  # x[0] is positive: nobody asks expert 0
    given["up"][0], given["down"][0] = np.nan, np.nan
    x = np.abs(feeds(given)["random"]) + 1
    one = runner(fused(model_of(BATCHED, given)))
    y = one(x)[0]
    assert np.isfinite(y).all()
    x[2] = np.nan
    after = one(x)[0]
    assert np.isnan(after[2]).all()
    np.testing.assert_array_equal(np.delete(after, 2, 0), np.delete(y, 2, 0))


# What is changed, the node that the report names, and the beginning of what it says.
NEAR_MISSES: dict[str, tuple[list[tuple[str, str]], str, str]] = {
    "ids of no TopK": (
        [("(float[T, 4] x)", "(float[T, 4] x, int64[R] ids_flat)"),
         ("ids_flat = Reshape (ids, last)\n", "")], "ups", "ids 'ids_flat' are of no TopK",
    ),
    "K is given": (
        [("(float[T, 4] x)", "(float[T, 4] x, int64[1] k)"), (" int64[1] k = {2},", "")], "top", "K is not",
    ),
    "chooses among tokens": (
        [("TopK <axis = -1,", "TopK <axis = 0,")], "top", "does not choose along the last axis",
    ),
    "another number of repeats": (
        [("twice = {1, 2, 1}", "twice = {1, 3, 1}")], "x_twice", "does not repeat every token K = 2 times",
    ),
    "all tokens, then all again": (
        [("x_3d = Unsqueeze (x, one)",
          "nought = Constant <value_ints = [0]> ()\n x_3d = Unsqueeze (x, nought)"),
         ("twice = {1, 2, 1}", "twice = {2, 1, 1}")], "rows", "'rows' is not every token 2 times in a row",
    ),
    "Softmax over rows": (
        [("sigmoid = Sigmoid (left)", "sigmoid = Softmax <axis = 0> (left)")],
        "sigmoid", "works on another axis than the last",
    ),
    "sum over rows": (
        [("hidden = Mul (silu, right)", "nought = Constant <value_ints = [0]> ()\n"
          "total = ReduceSum (silu, nought)\n hidden = Mul (total, right)")],
        "total", "reduces another axis than the last",
    ),
    "sorted between": (
        [("hidden = Mul (silu, right)", "order = CumSum (silu, axis)\n hidden = Mul (order, right)"),
         ("int64[1] k = {2}", "int64[1] k = {2}, int64 axis = {0}")],
        "order", "CumSum is not known to work row",
    ),
    "a number for each row": (
        [("(float[T, 4] x)", "(float[T, 4] x, float[R, 3] noise)"),
         ("hidden = Mul (silu, right)", "hidden_0 = Mul (silu, right)\n hidden = Add (hidden_0, noise)")],
        "hidden", "reads 'noise', which is not known to be the same for all rows",
    ),
    "rows are an output": (
        [("=> (float[T, 4] y)", "=> (float[T, 4] y, float[R, 3] hidden)")],
        "hidden", "rows 'hidden' are an output",
    ),
    "matrices are read twice": (
        [("column = Unsqueeze (rows, last)", "column = Unsqueeze (rows, last)\n size = Shape (ups)")],
        "ups", "the weights of each pair are read by something else",
    ),
    "no weights": (
        [("weighted = Mul (done, weights_2d)", "weighted = Identity (done)")],
        "by_token", "rows are summed without",
    ),
    "sum over tokens": (
        [("y = ReduceSum <keepdims = 0> (by_token, one)", "nought = Constant <value_ints = [0]> ()\n"
          "y = ReduceSum <keepdims = 0> (by_token, nought)"), ("=> (float[T, 4] y)", "=> (float[2, 4] y)")],
        "y", "does not sum over K alone",
    ),
    "pairs of other tokens": (
        [("pairs = {-1, 2, 4}", "pairs = {2, -1, 4}"),
         ("y = ReduceSum <keepdims = 0> (by_token, one)", "nought = Constant <value_ints = [0]> ()\n"
          "y = ReduceSum <keepdims = 0> (by_token, nought)")], "by_token", "makes of the rows [2, -1, 4]",
    ),
    "unlike numbers of experts": (
        [("float[6, 4, 3] down", "float[7, 4, 3] down")], "downs", "'down' is not known to be of 6 experts",
    ),
    "experts unknown": (
        [("(float[T, 4] x)", "(float[T, 4] x, float[N, 6, 4] up)"), (" float[6, 6, 4] up,", "")],
        "ups", "the number of experts, first axis of 'up', is not known",
    ),
    "one choice for all tokens": (
        [("(float[T, 4] x)", "(float[T, 4] x, float[B, 4] p)"), ("(x, gate)", "(p, gate)"),
         ("int64[1] k = {2}", "int64[1] k = {1}"), ("twice = {1, 2, 1}", "twice = {1, 1, 1}"),
         ("{-1, 2, 4}", "{-1, 1, 4}")], "ups", "tokens 'x' are not known to be as many as those of 'ids'",
    ),
    "old operators": ([('"": 21', '"": 17'), ("Split <axis = 1, num_outputs = 2>", "Split <axis = 1>")],
                      "ups", "ai.onnx is of opset 17"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_almost_a_layer_says_why_it_is_none(name: str) -> None:
    changes, node, why = NEAR_MISSES[name]
    given = weights()
    if "down" in why:
        given["down"] = np.zeros((7, 4, 3), np.float32)
    text = changed(BATCHED, *changes)
    given = {key: value for key, value in given.items() if f"] {key}," in text.split(">", 2)[2][:200]}
    model = model_of(text, given)
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    assert not done.report.applied
    (note,) = done.report.skipped
    assert note.node == node
    assert note.text.startswith(why), note.text


def test_a_layer_in_a_branch_and_a_layer_in_a_function() -> None:
    given = weights()
    layer = model_of(BATCHED, given).graph
    x = feeds(given)["random"]
    want = by_hand(x, given)
    # The branch reads tokens and weights of the graph around it.
    inner = onnx.GraphProto(name="then", node=layer.node, output=layer.output)
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])],
        "else",
        [],
        [helper.make_value_info("z", layer.output[0].type)],
    )
    branch = helper.make_node("If", ["go"], ["out"], "if", then_branch=inner, else_branch=other)
    go = helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, [])
    out = helper.make_value_info("out", layer.output[0].type)
    graph = helper.make_graph([branch], "g", [go, layer.input[0]], [out], list(layer.initializer))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    after = fused(model)
    assert apply_passes(model, ["fuse"]).report.applied[0].place == "then_branch of node 'if' (If)"
    np.testing.assert_allclose(run(after, np.array(True), x)[0], want, rtol=1e-5, atol=1e-5)
    # The function has its weights inside; types of its values stand in it.
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in layer.initializer]
    typed = onnx.shape_inference.infer_shapes(model_of(BATCHED, given))
    function = helper.make_function(
        "local", "Layer", ["x"], ["y"], [*constants, *layer.node], [helper.make_opsetid("", 21)],
        value_info=[typed.graph.input[0], *typed.graph.value_info, typed.graph.output[0]],
    )  # fmt: skip
    call = helper.make_node("Layer", ["x"], ["y"], "call", domain="local")
    graph = helper.make_graph([call], "g", [layer.input[0]], [layer.output[0]])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=[function])
    after = fused(model)
    (mine,) = (f for f in after.functions if f.domain == "local")
    assert "ascend.moe" in {entry.domain for entry in mine.opset_import}
    np.testing.assert_allclose(run(after, x)[0], want, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_layer_before() -> None:
    given = weights()
    before = model_of(BATCHED, given)
    x, names = feeds(given)["many tokens"], ["x", *given]
    grads = []
    for model in (before, fused(before)):
        grads.append(run(moe_onnx.differentiate(model, loss="y", wrt=names), x))
    for name, old, new in zip(["y", *names], *grads, strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5 * max(1, float(np.abs(old).max())), err_msg=name)


def test_weights_on_disk_stay_there_and_are_not_read(tmp_path: Any) -> None:
    model = model_of(BATCHED, weights())
    onnx.save_model(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=100
    )
    light = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    (tmp_path / "m.data").rename(tmp_path / "elsewhere")
    after = apply_passes(light, ["fuse"]).model
    assert ours(after) == ASCEND
    kept = {tensor.name: tensor for tensor in after.graph.initializer}
    for tensor in light.graph.initializer:
        if tensor.external_data:
            assert kept[tensor.name] == tensor


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes(dtype: Any) -> None:
    name = "float16" if dtype is np.float16 else "double"
    given = {key: value.astype(dtype) for key, value in weights().items()}
    before = model_of(changed(BATCHED, ("float[", f"{name}[")), given)
    x = feeds(given)["random"].astype(dtype)
    want, got = run(before, x)[0], run(fused(before), x)[0]
    np.testing.assert_allclose(
        got, want, rtol=0, atol=4e-3 * np.abs(want).max() if dtype is np.float16 else 1e-13
    )
    assert numpy_helper.from_array(got).data_type == before.graph.output[0].type.tensor_type.elem_type


def microsoft(
    activation: str, *, bias: bool = False, shape: tuple[str | int, ...] = ("T", 4), **more: Any
) -> onnx.ModelProto:
    """``com.microsoft`` ``MoE`` of 5 experts, its weights inside."""
    rng, width = np.random.default_rng(3), 6 if activation == "swiglu" else 3
    tensors = {"up": (5, width, 4), "down": (5, 4, 3)} | ({"ub": (5, width), "db": (5, 4)} if bias else {})
    given = [
        numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), name)
        for name, s in tensors.items()
    ]
    inputs = ["x", "logits", "up", "ub" if bias else "", "down", "db" if bias else ""]
    node = helper.make_node(
        "MoE", inputs, ["y"], "moe", domain="com.microsoft", activation_type=activation, **{"k": 2} | more
    )
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)
        for name, dims in (("x", shape), ("logits", ("N", 5)), ("y", shape))
    ]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", values[:2], values[2:], given)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


OAI = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7}


@pytest.mark.parametrize(
    ("activation", "more"),
    [
        ("relu", {"normalize_routing_weights": 1}),
        ("gelu", {"k": 5}),
        ("silu", {"k": 1, "bias": True}),
        ("identity", {"shape": (2, "S", 4)}),
        ("swiglu", {**OAI, "bias": True, "normalize_routing_weights": 1, "shape": ("B", "S", 4)}),
    ],
)
def test_the_node_of_onnxruntime_becomes_one_that_trains(activation: str, more: dict[str, Any]) -> None:
    before = microsoft(activation, **more)
    after = fused(before)
    assert ours(after) == ASCEND
    assert "com.microsoft" not in {node.domain for node in after.graph.node}
    runs = [runner(model) for model in (before, after)]
    rng = np.random.default_rng(4)
    dims = (8, 4) if len(before.graph.input[0].type.tensor_type.shape.dim) == 2 else (2, 4, 4)
    some = rng.standard_normal((8, 5))
    tied = np.array([[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [1, 1, 2, 1, 1], [3, 1, 0, 3, 1]] * 2)
    one = np.array([[90, 0, 0, -90, 0]] * 8)
    for name, logits in {"random": some, "ties": tied, "all to one": one}.items():
        x = rng.standard_normal(dims).astype(np.float32)
        want, got = (one_run(x, logits.astype(np.float32))[0] for one_run in runs)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=name)
    if activation == "swiglu":
        names = ["x", "logits", "up", "down"]
        grads = run(moe_onnx.differentiate(after, loss="y", wrt=names), x, some.astype(np.float32))
        lifted = moe_onnx.rewrite.to_float64.to_float64(after)
        wide, step = runner(lifted), np.zeros(dims)
        step[..., 1] = 1e-6
        slope = (wide(x + step, some)[0] - wide(x - step, some)[0]).sum() / 2e-6
        np.testing.assert_allclose(grads[1][..., 1].sum(), slope, rtol=1e-4)


@pytest.mark.parametrize(
    ("activation", "more", "why"),
    [
        ("swiglu", {"swiglu_fusion": 2}, "the CPU kernel has only the interleaved SwiGLU"),
        ("geglu", {"swiglu_fusion": 1}, "activation_type='geglu' is none of the CPU kernel's"),
        ("relu", {"use_sparse_mixer": 1}, "use_sparse_mixer=1 is no rule of the CPU kernel"),
        (
            "swiglu",
            {"swiglu_fusion": 1, "swiglu_limit": -1.0},
            "the CPU kernel ends the process for a negative",
        ),
        ("relu", {"k": 6}, "k = 6 is not in 1 .. 5"),
    ],
)
def test_what_the_cpu_kernel_does_not_do_is_left(activation: str, more: dict[str, Any], why: str) -> None:
    model = microsoft(activation, **more)
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    assert [note.text[: len(why)] for note in done.report.skipped] == [why]
