"""``fuse`` on tokens that are permuted by a routing map and put back, as Megatron-Core does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fuse_experts import ROUTER, by_loop, model_text
from fuse_forms import changed, feeds, model_of, weights
from test_fuse import fused, ours, run, runner

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes

# The default lane has no time for all of them.
LONG = pytest.mark.parity
BODY = """
    logits_shape = Shape (logits)
    ids_shape = Shape (ids)
    zeros = Expand (nought, logits_shape)
    dense = ScatterElements <axis = 1> (zeros, ids, weights)
    mark = Expand (true, ids_shape)
    no_mark = Expand (false, logits_shape)
    map = ScatterElements <axis = 1> (no_mark, ids, mark)
    by_expert = Transpose <perm = [1, 0]> (map)
    found = NonZero (by_expert)
    expert_2d, token_2d = Split <axis = 0, num_outputs = 2> (found)
    expert = Squeeze (expert_2d, first)
    token = Squeeze (token_2d, first)
    rows = Gather <axis = 0> (x, token)
    token_1 = Unsqueeze (token, last)
    expert_1 = Unsqueeze (expert, last)
    pair = Concat <axis = -1> (token_1, expert_1)
    w = GatherND (dense, pair)
    w_2d = Unsqueeze (w, last)
    ups = Gather <axis = 0> (up, expert)
    column = Unsqueeze (rows, last)
    raised_3d = MatMul (ups, column)
    raised = Squeeze (raised_3d, last)
    left, right = Split <axis = 1, num_outputs = 2> (raised)
    sigmoid = Sigmoid (left)
    silu = Mul (left, sigmoid)
    hidden = Mul (silu, right)
    downs = Gather <axis = 0> (down, expert)
    hidden_3d = Unsqueeze (hidden, last)
    done_3d = MatMul (downs, hidden_3d)
    done = Squeeze (done_3d, last)
    weighted = Mul (done, w_2d)
    wide = Expand (token_1, row)
    y = ScatterElements <axis = 0, reduction = "add"> (y_0, wide, weighted)
"""
TEXT = model_text(ROUTER + BODY).replace("int64 depth", "bool true = {1}, bool false = {0}, int64 depth")
PERMUTED = [
    "MoeTokenPermuteWithRoutingMap", "MoeGroupedMatmul", "MoeGroupedMatmul",
    "MoeTokenUnpermuteWithRoutingMap",
]  # fmt: skip


@pytest.mark.parametrize(
    "form",
    ["weights", *(pytest.param(x, marks=LONG) for x in ("sum by ScatterND", "weights before the experts"))],
)
def test_permuted_tokens_become_our_operators(form: str) -> None:
    changes = {
        "weights": [],
        "sum by ScatterND": [
            ("wide = Expand (token_1, row)\n", ""),
            (
                'ScatterElements <axis = 0, reduction = "add"> (y_0, wide',
                'ScatterND <reduction = "add"> (y_0, token_1',
            ),
        ],
        # Weights multiply what goes into the last product: rows are added as they are.
        "weights before the experts": [
            ("hidden = Mul (silu, right)", "hidden_0 = Mul (silu, right)\n    hidden = Mul (hidden_0, w_2d)"),
            ("weighted = Mul (done, w_2d)", "weighted = Identity (done)"),
        ],
    }[form]
    given = weights()
    before = model_of(changed(TEXT, *changes), given)
    after = fused(before)
    assert ours(after) == PERMUTED
    assert "NonZero" not in {node.op_type for node in after.graph.node}
    unpermute = next(node for node in after.graph.node if node.op_type == PERMUTED[-1])
    assert (unpermute.input[3] == "dense") == (form != "weights before the experts")
    runs = [runner(model) for model in (before, after)]
    for name, x in feeds(given).items():
        want = by_loop(x, given)
        for one in runs:
            np.testing.assert_allclose(one(x)[0], want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_rows_of_two_tensors_and_two_outputs_of_the_same_rows() -> None:
    """Each tensor has rows of its own, and each output its name."""
    lines = [f"{name} = Gather <axis = 0> ({of}, token)" for name, of in (("rows", "x"), ("more", "z"))]
    changes = [
        (lines[0], "z = Neg (x)\n    " + "\n    ".join([*lines, lines[0].replace("rows", "again")])),
        ("(float[T, 4] y)", "(float[T, 4] y, float[R, 4] rows, float[R, 4] again, float[R, 4] more)"),
    ]
    before = model_of(changed(TEXT, *changes), weights())
    after = apply_passes(before, ["fuse"]).model
    assert ours(after).count("MoeTokenPermuteWithRoutingMap") == 2
    x = feeds(weights())["random"]
    for want, got in zip(run(before, x), run(after, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@LONG
def test_gradients_and_verification() -> None:
    given = weights()
    before = model_of(TEXT, given)
    x, names = feeds(given)["random"], ["x", *given]
    old, new = (run(moe_onnx.differentiate(m, loss="y", wrt=names), x) for m in (before, fused(before)))
    for name, a, b in zip(["y", *names], old, new, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * max(1, float(np.abs(a).max())), err_msg=name)
    assert len(moe_onnx.rewrite_model(before, ["fuse"]).report.verified) >= 6


NEAR_MISSES: dict[str, tuple[list[tuple[str, str]], str, str]] = {
    "by token, then by expert": (
        [("found = NonZero (by_expert)", "found = NonZero (map)")], "found",
        "NonZero of a mask of the expert ids",
    ),
    "a map of anything": (
        [("(float[T, 4] x)", "(float[T, 4] x, bool[T, 6] map)"),
         ("map = ScatterElements <axis = 1> (no_mark, ids, mark)\n", "")],
        "found", "map 'map' is of no TopK",
    ),
    "rows over each other": (
        [('<axis = 0, reduction = "add">', "<axis = 0>")], "y",
        "puts rows over each other: a token has 2 of them",
    ),
    "along another axis": (
        [("ScatterElements <axis = 0, reduction", "ScatterElements <axis = 1, reduction")], "y",
        "puts rows along another",
    ),
    "other tokens": (
        [("(float[T, 4] x)", "(float[T, 4] x, float[S, 4] z)"), ("Gather <axis = 0> (x, token)",
         "Gather <axis = 0> (z, token)")],
        "rows", "tokens 'z' are not known to be as many",
    ),
    "a sum of other rows": (
        [("y_0 = Expand (nought, shape)",
         "many = Constant <value_ints = [9, 4]> ()\n    y_0 = Expand (nought, many)")],
        "y", "'y_0' is not known to have a row for each token",
    ),
    "some experts": (
        [("    no_mark = Expand (false, logits_shape)\n", ""),
         ("mark = Expand (true, ids_shape)", "four = Constant <value_ints = [0, 1, 2, 3]> ()"),
         ("map = ScatterElements <axis = 1> (no_mark, ids, mark)",
          "ids_3d = Unsqueeze (ids, last)\n    hot_b = Equal (ids_3d, four)\n"
          "    hot = Cast <to = 1> (hot_b)\n"
          "    axis_1 = Constant <value_ints = [1]> ()\n    map = ReduceMax <keepdims = 0> (hot, axis_1)")],
        "hot_b", "Equal of expert ids 'ids' compares them with 4 numbers, not with all 6 experts",
    ),
    "weights of more experts": (
        [("ups = Gather <axis = 0> (up,", "twice = Concat <axis = 0> (up, up)\n"
          "    ups = Gather <axis = 0> (twice,")],
        "ups", "weights 'twice' are not of 6 experts",
    ),
    "matrices are read twice": (
        [("column = Unsqueeze (rows, last)", "column = Unsqueeze (rows, last)\n    size = Neg (ups)")],
        "ups", "the weights of each pair are read by something else",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_almost_such_a_permutation_says_why_it_is_none(name: str) -> None:
    changes, node, why = NEAR_MISSES[name]
    model: Any = model_of(changed(TEXT, *changes), weights())
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    notes = {note.node: note.text for note in done.report.skipped}
    assert node in notes, notes
    assert notes[node].startswith(why), notes[node]
