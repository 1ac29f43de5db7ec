"""``fuse`` on experts that stand one by one: loops as exporters unroll them, and what is almost one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from fuse_experts import by_loop, unrolled, weights_of
from fuse_forms import changed, feeds, model_of, weights
from onnx import helper
from test_fuse import ASCEND, fused, ours, run, runner

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes

# The default lane has no time for all of them.
LONG = pytest.mark.parity

# Masks, rows, weights, how rows are put: each once.
LOOPS = [
    pytest.param("one_hot", "gather", "separate", "add_nd"),
    pytest.param("equal", "gather_nd", "stacked", "add_elements", marks=LONG),
    pytest.param("arange", "gather", "stacked", "add_behind", marks=LONG),
    pytest.param("equal", "gather", "separate", "assign", marks=LONG),
]


def check_values(before: Any, after: Any, given: Any) -> None:
    """Both give what the loop over tokens gives, for all special tokens."""
    runs = [runner(model) for model in (before, after)]
    for name, x in feeds(given).items():
        want = by_loop(x, given)
        for one in runs:
            np.testing.assert_allclose(one(x)[0], want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("mask", "rows", "form", "put"), LOOPS)
def test_unrolled_loops_become_grouped_products_of_the_same_values(
    mask: str, rows: str, form: str, put: str
) -> None:
    given = weights_of(form, weights())
    # The order in which experts come does not matter: each has its own weights.
    before = model_of(unrolled(mask, rows, form, put, order=(0, 4, 1, 5, 3, 2)), given)
    after = fused(before)
    assert ours(after) == ASCEND
    kinds = [node.op_type for node in after.graph.node]
    assert "NonZero" not in kinds and kinds.count("Sigmoid") == 1
    kept = {tensor.name: tensor.SerializeToString() for tensor in after.graph.initializer}
    assert all(kept[t.name] == t.SerializeToString() for t in before.graph.initializer if t.name in given)
    products = [node.input[1] for node in after.graph.node if node.op_type == "MoeGroupedMatmul"]
    assert (products == ["up", "down"]) == (form == "stacked")
    check_values(before, after, given)


@LONG
def test_a_rewritten_loop_is_verified() -> None:
    before = model_of(unrolled(), weights_of("separate", weights()))
    assert len(moe_onnx.rewrite_model(before, ["fuse"]).report.verified) >= 6


@LONG
def test_gradients_flow_to_the_weights_of_each_expert() -> None:
    given = weights_of("separate", weights())
    before = model_of(unrolled(put="add_elements"), given)
    x, names = feeds(given)["many tokens"], ["x", *given]
    old, new = (
        run(moe_onnx.differentiate(model, loss="y", wrt=names), x) for model in (before, fused(before))
    )
    for name, a, b in zip(["y", *names], old, new, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * max(1, float(np.abs(a).max())), err_msg=name)


@LONG
def test_weights_of_experts_in_another_order_in_their_stack() -> None:
    given = weights()
    one = ("up_e1 = Gather <axis = 0> (up, e1)", "up_e1 = Gather <axis = 0> (up, e4)")
    other = ("up_e4 = Gather <axis = 0> (up, e4)", "up_e4 = Gather <axis = 0> (up, e1)")
    before = model_of(changed(unrolled(weights="stacked"), other, one), given)
    order = [0, 4, 2, 3, 1, 5]
    check_values(before, fused(before), given | {"up": given["up"][order]})


@LONG
def test_what_was_there_before_the_first_expert_is_added() -> None:
    given = weights_of("stacked", weights())
    before = model_of(
        changed(unrolled(weights="stacked"), ("y_0 = Expand (nought, shape)", "y_0 = Abs (x)")), given
    )
    after, x = fused(before), feeds(given)["random"]
    np.testing.assert_allclose(run(after, x)[0], by_loop(x, given) + np.abs(x), rtol=1e-5, atol=1e-5)


@LONG
def test_one_choice_a_token_may_put_rows_without_adding() -> None:
    given = weights_of("stacked", weights())
    put = ('ScatterND <reduction = "add">', "ScatterND")
    text = changed(unrolled(weights="stacked"), put, ("int64[1] k = {2}", "int64[1] k = {1}"))
    before = model_of(changed(text, ("y_0 = Expand (nought, shape)", "y_0 = Abs (x)")), given)
    after = fused(before)
    x = feeds(given)["many tokens"]
    np.testing.assert_allclose(run(after, x)[0], by_loop(x, given, 1), rtol=1e-5, atol=1e-5)


@LONG
@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_dtypes(dtype: Any) -> None:
    name = {np.float16: "float16", np.float64: "double"}.get(dtype, "bfloat16")
    given = {key: value.astype(dtype) for key, value in weights_of("separate", weights()).items()}
    text = changed(unrolled(), ("float[", f"{name}["), ("float nought", f"{name} nought"))
    after = apply_passes(model_of(text, given), ["fuse"]).model
    assert ours(after) == ASCEND
    if name == "bfloat16":
        return  # neither onnxruntime's CPU kernels nor onnx's TopK know it: recognised, no more
    x = feeds(given)["random"].astype(dtype)
    want = by_loop(x.astype(np.float64), {key: value.astype(np.float64) for key, value in given.items()})
    (got,) = run(after, x)
    assert got.dtype == dtype
    limit = 4e-3 if dtype is np.float16 else 1e-13
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=limit * np.abs(want).max())


@LONG
@pytest.mark.parametrize("where", ["branch", "function"])
def test_a_loop_in_a_branch_and_in_a_function(where: str) -> None:
    given = weights_of("separate", weights())
    layer = model_of(unrolled("equal", put="add_elements"), given)
    x, imports = feeds(given)["random"], [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    if where == "branch":  # which reads tokens and weights of the graph around it
        inner = onnx.GraphProto(name="then", node=layer.graph.node, output=layer.graph.output)
        z = helper.make_value_info("z", layer.graph.output[0].type)
        other = helper.make_graph([helper.make_node("Identity", ["x"], ["z"])], "else", [], [z])
        node = helper.make_node("If", ["go"], ["out"], "if", then_branch=inner, else_branch=other)
        go = helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, [])
        out = helper.make_value_info("out", layer.graph.output[0].type)
        graph = helper.make_graph(
            [node], "g", [go, layer.graph.input[0]], [out], list(layer.graph.initializer)
        )
        model = helper.make_model(graph, opset_imports=imports[:1], ir_version=10)
        (got,) = run(fused(model), np.array(True), x)
    else:
        known = onnx.shape_inference.infer_shapes(layer).graph
        values = [known.input[0], *known.value_info, known.output[0]]
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in layer.graph.initializer]
        function = helper.make_function(
            "local", "Layer", ["x"], ["y"], [*nodes, *layer.graph.node], imports[:1], value_info=values
        )
        call = helper.make_node("Layer", ["x"], ["y"], "call", domain="local")
        graph = helper.make_graph([call], "g", [layer.graph.input[0]], [layer.graph.output[0]])
        model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=[function])
        (got,) = run(fused(model), x)
    np.testing.assert_allclose(got, by_loop(x, given), rtol=1e-5, atol=1e-5)


NEAR_MISSES: dict[str, tuple[list[tuple[str, str]], str, str]] = {
    "masks of choices": (
        [("perm = [2, 1, 0]", "perm = [1, 2, 0]")], "mask0",
        "Gather of a mask of the expert ids 'ids' is no step",
    ),
    "ids that a token may have twice": (
        [("hot = OneHot <axis = -1> (ids,", "twice = Mod (ids, depth)\n hot = OneHot <axis = -1> (twice,")],
        "twice", "Mod of expert ids 'ids' is no step that is known",
    ),
    "an expert twice": ([("(hot_t, e5)", "(hot_t, e4)")], "y", "expert 4 comes a second time"),
    "an expert without a loop": (
        [("mask3 = Gather <axis = 0> (hot_t, e3)", "mask3 = Gather <axis = 0> (hot_t, e6)"),
         ("int64 e0 = {0}", "int64 e6 = {6}, int64 e0 = {0}"), ("int64 depth = {6}", "int64 depth = {7}")],
        "y", "'ids' choose from 6 experts: 3 are not computed",
    ),
    "weights without renormalisation for one": (
        [("w3 = GatherND (weights, pair3)", "w3 = GatherND (top, pair3)")],
        "weighted3", "takes its weights from another place",
    ),
    "weights of choices by tokens": (
        [("pair2 = Concat <axis = -1> (token_12, choice_12)",
         "pair2 = Concat <axis = -1> (choice_12, token_12)")],
        "weighted2", "neither of its factors is known to be the weights",
    ),
    "no weights": (
        [("weighted1 = Mul (done1, w_2d1)", "weighted1 = Identity (done1)")], "done1",
        "rows are summed without weights",
    ),
    "tokens of another expert": (
        [("rows3 = Gather <axis = 0> (x, token3)", "rows3 = Gather <axis = 0> (x, token2)")],
        "done3", "reads 'hidden3', which is not made of its expert's tokens",
    ),
    "rows to the tokens of another expert": (
        [("ScatterND <reduction = \"add\"> (y_2, token_12",
         "ScatterND <reduction = \"add\"> (y_2, token_11")],
        "y_3", "expert 1 comes a second time",
    ),
    "rows over each other": (
        [('y_2 = ScatterND <reduction = "add">', "y_2 = ScatterND")],
        "y_2", "puts rows over those of other experts (reduction='none')",
    ),
    "products of rows": ([('reduction = "add"', 'reduction = "mul"')], "y_1",
    "combines rows by reduction='mul'"),
    "rows by choice": (
        [('y_1 = ScatterND <reduction = "add"> (y_0, token_10',
         'y_1 = ScatterND <reduction = "add"> (y_0, choice_10')],
        "y_1", "puts rows by K of the pairs",
    ),
    "rows are an output": (
        [("=> (float[T, 4] y)", "=> (float[T, 4] y, float[N, 3] hidden2)")], "hidden2",
        "rows 'hidden2' are an output",
    ),
    "a sum of some experts is read": (
        [("=> (float[T, 4] y)", "=> (float[T, 4] y, float[T, 4] some)"), ("raised5 =",
         "some = Neg (y_3)\n    raised5 =")], "some", "reads 'y_3', without the experts behind it",
    ),
    "rows are read beside": (
        [("=> (float[T, 4] y)", "=> (float[T, 4] y, float[N, 3] some)"), ("raised5 =",
         "some = Neg (silu2)\n    raised5 =")],
        "some", "reads rows 'silu2' beside the layer",
    ),
    "another activation for one": ([("sigmoid4 = Sigmoid", "sigmoid4 = Tanh")], "sigmoid4",
    "stands where another"),
    "across rows": (
        [("Sigmoid (left", "Softmax <axis = 0> (left")], "sigmoid0", "works on another axis than the last",
    ),
    "other tokens": (
        [("(float[T, 4] x)", "(float[T, 4] x, float[S, 4] z)"), ("Gather <axis = 0> (x,",
         "Gather <axis = 0> (z,")],
        "y_1", "tokens 'z' are not known to be as many",
    ),
    "weights cut to integers": (
        [("w_2d2 = Unsqueeze (w2, last)",
         "cut = Cast <to = 7> (w2)\n    back = Cast <to = 1> (cut)\n    w_2d2 = Unsqueeze (back, last)")],
        "weighted2", "neither of its factors is known to be the weights",
    ),
    "some columns": (
        [('y_1 = ScatterND <reduction = "add"> (y_0, token_10, weighted0)',
          'three = Constant <value_ints = [3]> ()\n    one_row = Constant <value_ints = [1, 3]> ()\n'
          "    wide = Expand (token_10, one_row)\n    some = Slice (weighted0, first, three, last)\n"
          '    y_1 = ScatterElements <axis = 0, reduction = "add"> (y_0, wide, some)')],
        "y_1", "is not known to put all columns of its rows",
    ),
    "a sum of other rows": (
        [("y_0 = Expand (nought, shape)",
         "many = Constant <value_ints = [9, 4]> ()\n    y_0 = Expand (nought, many)")],
        "y_1", "'y_0' is not known to have a row for each token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_almost_a_loop_says_why_it_is_none(name: str) -> None:
    changes, node, why = NEAR_MISSES[name]
    text = unrolled()
    for old, new in changes:
        text = changed(text, (old, new))
    model = model_of(text, weights_of("separate", weights()))
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    notes = {note.node: note.text for note in done.report.skipped}
    assert node in notes, notes
    assert notes[node].startswith(why), notes[node]


def test_weights_of_unlike_shapes() -> None:
    given = weights_of("separate", weights())
    given["up3"] = np.zeros((4, 8), np.float32)
    given["down3"] = np.zeros((4, 4), np.float32)
    (note,) = apply_passes(model_of(unrolled(), given), ["fuse"]).report.skipped
    assert note.text.startswith("weights of experts are not known to be of one shape")
