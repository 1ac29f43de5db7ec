"""``fuse`` on layers that compute all experts for all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fuse_dense import dense
from fuse_experts import by_loop, weights_of
from fuse_forms import E, F, changed, feeds, model_of, weights
from test_fuse import ASCEND, fused, ours, run, runner

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes

LOW = {"low": np.array(-np.inf, np.float32)}
# The default lane has no time for all of them.
LONG = pytest.mark.parity
FORMS = [
    pytest.param("scatter", "add"),
    pytest.param("one_hot", "reduce", marks=LONG),
    pytest.param("where", "einsum", marks=LONG),
    pytest.param("softmax", "matmul", marks=LONG),
]


def check(before: Any, given: Any, w: Any) -> None:
    after = fused(before)
    assert ours(after) == ASCEND
    assert [node.op_type for node in after.graph.node].count("Sigmoid") == 1
    runs = [runner(model) for model in (before, after)]
    for name, x in feeds(given).items():
        want = by_loop(x, w)
        for one in runs:
            np.testing.assert_allclose(one(x)[0], want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("gate", "total"), FORMS)
def test_sums_over_all_experts_become_products_of_the_chosen_ones(gate: str, total: str) -> None:
    given = weights_of("separate", weights())
    check(model_of(dense(gate, total), given | LOW), given, given)


@LONG
@pytest.mark.parametrize("batched", ["matmul", "einsum"])
def test_batched_products_of_all_experts(batched: str) -> None:
    given = weights()
    more = {"up_bias": np.zeros((E, 1, 2 * F), np.float32)} if batched == "matmul" else {}
    before = model_of(dense("scatter", batched=batched), given | LOW | more)
    check(before, given, given)
    assert len(moe_onnx.rewrite_model(before, ["fuse"]).report.verified) >= 6


@LONG
def test_ids_made_flat_before_their_last_axis_stay_what_they_are() -> None:
    text = changed(dense("one_hot"), ("(ids, depth", "(same, depth"), ("    hot = OneHot",
                   "    same = Flatten <axis = -1> (ids)\n    hot = OneHot"))  # fmt: skip
    given = weights_of("separate", weights())
    check(model_of(text, given | LOW), given, given)


@LONG
def test_biases_of_batched_experts_and_gradients() -> None:
    rng = np.random.default_rng(5)
    given = weights() | {"up_bias": rng.standard_normal((E, 1, 2 * F)).astype(np.float32)}
    before = model_of(dense(batched="matmul"), given | LOW)
    x, names = feeds(given)["random"], ["x", *given]
    old, new = (run(moe_onnx.differentiate(m, loss="y", wrt=names), x) for m in (before, fused(before)))
    for name, a, b in zip(["y", *names], old, new, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * max(1, float(np.abs(a).max())), err_msg=name)


# What is changed (of the form by Add, or by the one named), the node, what the report says.
NEAR_MISSES: dict[str, tuple[str, list[tuple[str, str]], str, str]] = {
    "a threshold, which ties pass": (
        "scatter",
        [("dense = ScatterElements <axis = 1> (zeros, ids, weights)",
          "least = ReduceMin <keepdims = 1> (top, last)\n    map = GreaterOrEqual (probs, least)\n"
          "    dense = Where (map, probs, zeros)")],
        "weighted0", "weights 'dense' are not known to be 0 but at the K experts",
    ),
    "weights beside zeros that are none": (
        "scatter", [("zeros = Expand (nought,",
         "half_1 = Add (nought, nought)\n    zeros = Expand (half_1,")],
        "weighted0", "weights 'dense' are not known",
    ),
    "ids along the tokens": (
        "scatter", [("ScatterElements <axis = 1> (zeros", "ScatterElements <axis = 0> (zeros")],
        "weighted0", "weights 'dense' are not known to be 0 but at the K experts that a TopK chose: "
        "at 'dense', ScatterElements of expert ids 'ids' puts along another axis than that of experts",
    ),
    "divided by sums over tokens, who may all have left an expert": (
        "where", [("ReduceSum <keepdims = 1> (kept, last)", "ReduceSum <keepdims = 1> (kept, first)")],
        "weighted0", "weights 'dense' are not known",
    ),
    "an expert twice": ("scatter", [("(dense, e5)", "(dense, e4)")], "weighted4",
    "expert 4 comes a second time"),
    "an expert less": (
        "scatter", [("y = Add (y_5, weighted5)", "y = Neg (y_5)")], "weighted0",
        "'ids' choose from 6 experts: 5 are",
    ),
    "a part of the sum is read": (
        "scatter", [("g5 =", "half_sum = Neg (y_3)\n    g5 ="), ("(float[T, 4] y)",
         "(float[T, 4] y, float[T, 4] half_sum)")],
        "weighted3", "'ids' choose from 6 experts: 0, 1, 2 are not computed",
    ),
    "rows are read beside": (
        "scatter", [("g5 =", "some = Neg (silu2)\n    g5 ="), ("(float[T, 4] y)",
         "(float[T, 4] y, float[T, 3] some)")],
        "some", "reads rows 'silu2' beside the layer",
    ),
    "other tokens for one": (
        "scatter", [("MatMul (x, up3)", "MatMul (z, up3)"), ("nought, shape)",
         "nought, shape)\n    z = Neg (x)")],
        "z", "'z' stands where another expert has its tokens",
    ),
    "another activation for one": (
        "scatter", [("sigmoid4 = Sigmoid", "sigmoid4 = Tanh")], "sigmoid4", "stands where another expert has",
    ),
    "ids of all tokens in a row": (
        "one_hot", [("hot = OneHot <axis = -1> (ids,",
         "row_of_all = Flatten <axis = 0> (ids)\n    hot = OneHot <axis = -1> (row_of_all,"),
         ("    weights_3d = Unsqueeze (weights, last)\n    pairs = Mul (hot_f, weights_3d)\n"
          "    dense = ReduceSum <keepdims = 0> (pairs, axis_1)",
          "    any = ReduceMax <keepdims = 0> (hot_f, axis_1)\n    dense = Mul (probs, any)")],
        "weighted0", "weights 'dense' are not known",
    ),
    "ids of all tokens in a row, from behind": (
        "one_hot", [("hot = OneHot <axis = -1> (ids,",
         "row_of_all = Flatten <axis = -2> (ids)\n    hot = OneHot <axis = -1> (row_of_all,"),
         ("    weights_3d = Unsqueeze (weights, last)\n    pairs = Mul (hot_f, weights_3d)\n"
          "    dense = ReduceSum <keepdims = 0> (pairs, axis_1)",
          "    any = ReduceMax <keepdims = 0> (hot_f, axis_1)\n    dense = Mul (probs, any)")],
        "weighted0", "weights 'dense' are not known",
    ),
    "ids in rows of a given shape": (
        "one_hot", [("(float[T, 4] x)", "(float[T, 4] x, int64[2] given)"), ("hot = OneHot <axis = -1> (ids,",
         "rows_of = Reshape (ids, given)\n    hot = OneHot <axis = -1> (rows_of,"),
         ("    weights_3d = Unsqueeze (weights, last)\n    pairs = Mul (hot_f, weights_3d)\n"
          "    dense = ReduceSum <keepdims = 0> (pairs, axis_1)",
          "    any = ReduceMax <keepdims = 0> (hot_f, axis_1)\n    dense = Mul (probs, any)")],
        "weighted0", "weights 'dense' are not known",
    ),
    "divided by what may be zero": (
        "scatter", [("dense = ScatterElements <axis = 1> (zeros, ids, weights)",
         "put = ScatterElements <axis = 1> (zeros, ids, weights)\n    dense = Div (put, logits)")],
        "weighted0", "weights 'dense' are not known",
    ),
    "another number for what is chosen": (
        "one_hot", [("(float[T, 4] x)", "(float[T, 4] x, int64[2] off_on)")], "weighted0",
        "weights 'dense' are not known",
    ),
    "a bias of each token": (
        "scatter", [("(float[T, 4] x)", "(float[T, 4] x, float[S, 4] more)"), ("int64[1] k = {2}",
         "int64[1] k = {1}"), *[(f"down{e}, down_bias{e})", f"down{e}, more)") for e in range(E)]],
        "done0", "reads 'more', which is not known to be the same for all rows",
    ),
    "a bias of each token before": (
        "scatter", [("(float[T, 4] x)", "(float[T, 4] x, float[S, 4] more, float[4, 4] w)"),
         ("int64[1] k = {2}", "int64[1] k = {1}"), *[(f"raised{e} = MatMul (x,",
         f"other{e} = Gemm (x, w, more)\n    raised{e} = MatMul (other{e},") for e in range(E)]],
        "other0", "reads 'more', which is not known to be the same for all rows",
    ),
    "a vector for a matrix": (
        "scatter", [("(float[T, 4] x)", "(float[T, 4] x, float[3] vector)"), ("float[T, 4]", "float[3, 4]"),
         *[(f"hidden{e} = Mul (silu{e},", f"dot{e} = MatMul (silu{e}, vector)\n    hidden{e} = Mul (dot{e},")
           for e in range(E)]],
        "dot0", "'vector' is not known to be a matrix",
    ),
    "across tokens": (
        "scatter", [("Sigmoid (left", "Softmax <axis = 0> (left")], "sigmoid0",
        "works on another axis than the last",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_almost_such_a_sum_says_why_it_is_none(name: str) -> None:
    gate, changes, node, why = NEAR_MISSES[name]
    model = model_of(changed(dense(gate), *changes), weights_of("separate", weights()) | LOW)
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    notes = {note.node: note.text for note in done.report.skipped}
    assert node in notes, notes
    assert notes[node].startswith(why), notes[node]


# Of which form, what is changed.
NONE: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "diagonals": (
        "scatter", "", "einsum",
        [('"tef,ehf->teh"> (hidden', '"tef,eff->tef"> (hidden'), ("(float[T, 4] y)", "(float[T, 3] y)")],
    ),
    "no sum": (
        "scatter", "", "einsum", [('"teh,te->th"', '"tee,te->te"'), ("(float[T, 4] y)", "(float[T, 6] y)")],
    ),
    "no output": (
        "scatter", "einsum", "", [('"eth,te->th"', '"eth,te"'), ("(float[T, 4] y)", "(float[4] y)")],
    ),
    "weights of one token": (
        "one_hot", "", "matmul",
        [("(float[T, 4] x)", "(float[T, 4] x, float[S, 2] w)"), ("Unsqueeze (weights, last)",
         "Unsqueeze (w, last)")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_such_sum_is_left(name: str) -> None:
    gate, total, batched, changes = NONE[name]
    given = weights() if batched else weights_of("separate", weights())
    if name == "diagonals":
        given["down"] = np.zeros((E, F, F), np.float32)
    if name == "no sum":
        given["down"] = np.zeros((E, E, F), np.float32)
    more = {"up_bias": np.zeros((E, 1, 2 * F), np.float32)} if batched == "matmul" else {}
    model = model_of(changed(dense(gate, total, batched=batched), *changes), given | LOW | more)
    assert apply_passes(model, ["fuse"]).model is model


BATCHED_MISSES: dict[str, tuple[list[tuple[str, str]], str, str]] = {
    "across experts": (
        [("sigmoid = Sigmoid (left)", "sigmoid = Softmax <axis = 0> (left)")], "sigmoid",
        "works on another axis",
    ),
    "across tokens": (
        [("sigmoid = Sigmoid (left)", "axis = Constant <value_int = 1> ()\n sigmoid = CumSum (left, axis)")],
        "sigmoid", "CumSum is not known to work row by row",
    ),
    "a number of each token": (
        [("(float[T, 4] x)", "(float[T, 4] x, float[T, 3] noise)"), ("hidden = Mul (silu, right)",
         "hidden = Mul (silu, noise)")],
        "hidden", "reads 'noise', which is not made of the tokens",
    ),
    "rows are an output": (
        [("(float[T, 4] y)", "(float[T, 4] y, float[6, T, 3] hidden)")], "hidden",
        "rows 'hidden' are an output",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED_MISSES)
def test_what_is_almost_such_a_batch_says_why_it_is_none(name: str) -> None:
    changes, node, why = BATCHED_MISSES[name]
    given = weights() | LOW | {"up_bias": np.zeros((E, 1, 2 * F), np.float32)}
    model = model_of(changed(dense(batched="matmul"), *changes), given)
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    notes = {note.node: note.text for note in done.report.skipped}
    assert node in notes, notes
    assert notes[node].startswith(why), notes[node]
