"""``fuse`` on sums of each token's rows that stand alone: combines and gradients of dispatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from fuse_forms import changed
from test_fuse import fused, ours, run

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes

# The default lane has no time for all of them.
LONG = pytest.mark.parity

# Pairs sorted by their experts: order[j] is the pair of row j, back[pair] its row.
SORT = """
    many = Shape (keys)
    _, order = TopK <axis = 0, largest = 0> (keys, many)
    end = Squeeze (many)
    places = Range (start, end, step)
    back = ScatterElements <axis = 0> (order, order, places)
"""
GATHER = "    picked = Gather <axis = 0> (rows, back)\n"
PUT = (
    "    rows_shape = Shape (rows)\n    zeros = Expand (nought, rows_shape)\n"
    "    order_1 = Unsqueeze (order, last)\n    picked = ScatterND (zeros, order_1, rows)\n"
)
SUM = "    by_token = Reshape (picked, pairs)\n    y = ReduceSum <keepdims = 0> (by_token, middle)\n"
WEIGHTED = (
    "    by_token = Reshape (picked, pairs)\n    w_3d = Unsqueeze (w, last)\n"
    "    weighted = Mul (by_token, w_3d)\n    y = ReduceSum <keepdims = 0> (weighted, middle)\n"
)
FLAT = (
    "    w_flat = Reshape (w, last)\n    w_2d = Unsqueeze (w_flat, last)\n    scaled = Mul (picked, w_2d)\n"
    "    by_token = Reshape (scaled, pairs)\n    y = ReduceSum <keepdims = 0> (by_token, middle)\n"
)
ADDED = """
    keys = Reshape (ids, last)
    {sort}
    token = Div (order, two)
    rows = Gather <axis = 0> (x, token)
    token_1 = Unsqueeze (token, last)
    doubled = Add (rows, rows)
    x_shape = Shape (x)
    zeros = Expand (nought, x_shape)
    y = ScatterND <reduction = "add"> (zeros, token_1, doubled)
"""
FORMS = {
    "gather": (GATHER + SUM, "MoeInitRoutingV2Grad"),
    "put": (PUT + SUM, "MoeInitRoutingV2Grad"),
    "gather, weights": (GATHER + WEIGHTED, "MoeFinalizeRoutingV2"),
    "put, weights": (PUT + FLAT, "MoeFinalizeRoutingV2"),
}


# Weights must be known to be as many as the rows: sizes are fixed.
SIZED = "int64[{n}] keys, float[{n}, 4] rows, float[{t}, 2] w"


def text_of(body: str, inputs: str = "int64[N] keys, float[N, 4] rows, float[T, 2] w") -> str:
    return f"""
<ir_version: 10, opset_import: ["": 21]>
combine ({inputs}) => (float[S, 4] y)
<int64[1] last = {{-1}}, int64[1] middle = {{1}}, int64[3] pairs = {{-1, 2, 4}}, float nought = {{0}},
 int64 start = {{0}}, int64 step = {{1}}, int64 two = {{2}}>
{{{body}
}}
"""


def by_hand(keys: Any, rows: Any, w: Any) -> np.ndarray[Any, Any]:
    """Rows stand in the order of keys; pairs 2t and 2t+1 are those of token t."""
    y = np.zeros((len(keys) // 2, 4))
    for row, pair in enumerate(np.argsort(keys, kind="stable")):
        y[pair // 2] += rows[row].astype(np.float64) * (1 if w is None else w[pair // 2, pair % 2])
    return y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [5, pytest.param(1, marks=LONG), pytest.param(0, marks=LONG)])
def test_sums_become_one_node(form: str, tokens: int) -> None:
    body, operator = FORMS[form]
    sized = {"inputs": SIZED.format(n=2 * tokens, t=tokens)} if "weights" in form else {}
    before = onnx.parser.parse_model(text_of(SORT + body, **sized))
    after = fused(before)
    assert ours(after) == [operator]
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 3, 2 * tokens)  # many ties
    rows = rng.standard_normal((2 * tokens, 4)).astype(np.float32)
    w = rng.standard_normal((tokens, 2)).astype(np.float32)
    want = by_hand(keys, rows, w if "weights" in form else None)
    for model in (before, after):
        np.testing.assert_allclose(run(model, keys, rows, w)[0], want, rtol=1e-5, atol=1e-5)


def test_weights_of_one_token_for_all() -> None:
    text = text_of(SORT + FORMS["gather, weights"][0], "int64[N] keys, float[N, 4] rows, float[1, 2] w")
    before = onnx.parser.parse_model(text)
    rows = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    given = (np.array([2, 0, 1, 1, 0, 2, 0, 1]), rows, np.array([[0.3, 0.7]], np.float32))
    np.testing.assert_allclose(run(fused(before), *given)[0], run(before, *given)[0], rtol=1e-5, atol=1e-6)


@LONG
def test_rows_added_to_tokens() -> None:
    before = onnx.parser.parse_model(text_of(ADDED.format(sort=SORT), "int64[T, 2] ids, float[T, 4] x"))
    after = fused(before)
    assert ours(after) == ["MoeInitRoutingV2Grad"]
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    ids = np.array([[0, 2], [1, 0], [2, 1], [2, 2], [0, 0], [1, 2]])
    for model in (before, after):
        np.testing.assert_allclose(run(model, ids, x)[0], 4 * x, rtol=1e-6)
    assert moe_onnx.rewrite_model(before, ["fuse"]).report.verified


@LONG
def test_gradients_of_a_weighted_sum() -> None:
    before = onnx.parser.parse_model(text_of(SORT + FORMS["gather, weights"][0], SIZED.format(n=8, t=4)))
    rng = np.random.default_rng(1)
    given = (rng.integers(0, 3, 8), rng.standard_normal((8, 4)), rng.standard_normal((4, 2)))
    feeds = [value.astype(np.float32) if value.dtype == np.float64 else value for value in given]
    old, new = (
        run(moe_onnx.differentiate(model, loss="y", wrt=["rows", "w"]), *feeds)
        for model in (before, fused(before))
    )
    for a, b in zip(old, new, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_the_index_of_a_dispatch() -> None:
    body = """
    grads, back, counts, before = ascend.moe.MoeInitRoutingV2 <active_num = 0, drop_pad_mode = 0> (x, ids)
    picked = Gather <axis = 0> (grads, back)
"""
    text = changed(
        text_of(body + SUM, "int32[T, 2] ids, float[T, 4] x"),
        ('["": 21]', '["": 21, "ascend.moe": 1]'),
        ("int64 two = {2}", "int64 two = {2}, float[N, 4] grads, int32[N] back"),
    )
    model = onnx.parser.parse_model(text)
    assert "MoeInitRoutingV2Grad" in ours(apply_passes(model, ["fuse"]).model)


# The form, what is changed, the node, what the report says.
NEAR_MISSES: dict[str, tuple[str, list[tuple[str, str]], str, str]] = {
    "an index from outside": (
        "gather", [("(rows, back)", "(rows, keys)")], "picked",
        "index 'keys' is not known to name each of all rows once",
    ),
    "some of the rows": (
        "gather", [("many = Shape (keys)", "many = Constant <value_ints = [4]> ()")], "picked",
        "index 'back' is not",
    ),
    "other places": (
        "gather", [("Range (start, end, step)", "Range (step, end, step)")], "picked",
        "index 'back' is not known",
    ),
    "more rows than are named": (
        "gather", [("float[N, 4] rows", "float[M, 4] rows")], "picked",
        "'rows' is not known to have as many rows",
    ),
    "rows that stay": (
        "put", [("zeros = Expand (nought, rows_shape)", "zeros = Neg (z)"), ("float[T, 2] w",
         "float[M, 4] z")],
        "picked", "puts rows among others",
    ),
    "keeps its axis": ("gather", [("<keepdims = 0>", "<keepdims = 1>"), ("float[S, 4] y",
     "float[S, 1, 4] y")],
                       "y", "does not sum rows of their own width over K alone"),
    "halves of rows": ("gather", [("{-1, 2, 4}", "{-1, 2, 2}"), ("float[S, 4] y", "float[S, 2] y")],
                       "y", "does not sum rows of their own width over K alone"),
    "weights of any number of tokens": (
        "gather, weights", [], "y", "weights 'w' are not known to be as many as the rows",
    ),
    "weights of one choice": ("gather, weights", [("float[T, 2] w", "float[T, 1] w")], "weighted",
    "weights are not known"),
    "another number of choices": (
        "added", [("int64 two = {2}", "int64 two = {4}")], "y",
        "'zeros' is not known to have a row for every 4 pairs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_almost_such_a_sum_says_why_it_is_none(name: str) -> None:
    form, changes, node, why = NEAR_MISSES[name]
    text = text_of(ADDED.format(sort=SORT), "int64[T, 2] ids, float[T, 4] x")
    if form != "added":
        text = text_of(SORT + FORMS[form][0])
    model = onnx.parser.parse_model(changed(text, *changes))
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    notes = {note.node: note.text for note in done.report.skipped}
    assert node in notes, notes
    assert notes[node].startswith(why), notes[node]
