"""Einsums in models that are rewritten: what ends onnxruntime is not run, what picks weights is noted."""

from __future__ import annotations

import onnx
import pytest
from test_imported import model_of, normal

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes
from moe_onnx.validation.run.aborting import turning_einsum

ROUTER = """m (float[T, 4] x) => (float[T, 4] y)
<int64[1] two = {2}, int64[1] last = {-1}, int64 four = {4}, float[2] off_on = {0, 1}> {
    scores = MatMul (x, router)
    probs = Softmax (scores)
    top, ids = TopK (probs, two)
    hot = OneHot (ids, four, off_on)
"""


@pytest.mark.parametrize("pick", ['Einsum <equation = "tke,ehf->tkhf"> (hot, w)', "MatMul (hot, w_2d)"])
def test_weights_picked_by_a_map_of_choices_are_noted(pick: str) -> None:
    text = f"""{ROUTER}
    given = {pick}
    shape = Constant <value_ints = [-1, 2, 4, 4]> ()
    chosen = Reshape (given, shape)
    done = Einsum <equation = "th,tkhf->tkf"> (x, chosen)
    y = Einsum <equation = "tk,tkf->tf"> (top, done)
}}"""
    w = normal(4, 4, 4)
    model = model_of(text, router=normal(4, 4), **({"w": w} if "ehf" in pick else {"w_2d": w.reshape(4, 16)}))
    done = apply_passes(model, ["fuse"])
    (note,) = done.report.skipped
    assert "picks experts' weights 'w" in note.text and note.text.endswith("index them by the ids")


def test_an_einsum_that_turns_what_may_be_empty_is_not_run_with_nothing() -> None:
    """onnxruntime 1.32 ends the process there, by a division by 0."""
    text = """m (float[t, e] gate, float[e, t, h] rows) => (float[t, h] y) {
      y = Einsum <equation = "te,eth->th"> (gate, rows)
    }"""
    model = model_of(text)
    model.doc_string = "to be taken away"
    lines = moe_onnx.rewrite_model(model, ["strip:docs"]).report.verified
    (left,) = [line for line in lines if line.startswith("none of each: empty")]
    assert "left out: onnxruntime may end the process" in left and "Einsum 'y'" in left
    assert sum("same to the bit" in line for line in lines) > 3
    ordered = model_of(text.replace("te,eth", "te,teh").replace("[e, t, h]", "[t, e, h]"))
    ordered.doc_string = "to be taken away"
    lines = moe_onnx.rewrite_model(ordered, ["strip:docs"]).report.verified
    assert "none of each: empty: 1 output the same to the bit" in lines


@pytest.mark.parametrize(
    ("equation", "turns"),
    [
        ("th,ehf->tef", True), ("eth,ehf->etf", False), ("tk,tkh->th", False), ("ti, tji -> tj", True),
        ("...ij,...jk->...ik", False), ("bhqd,bhkd", True), ("ij->ji", False), ("ab,bc,ca->abc", True),
    ],
)  # fmt: skip
def test_which_einsums_turn_an_operand(equation: str, turns: bool) -> None:
    node = onnx.helper.make_node("Einsum", ["x"] * (equation.count(",") + 1), ["y"], equation=equation)
    branch = onnx.helper.make_graph([node], "b", [], [])
    outer = onnx.helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
    for nodes in ([node], [outer]):
        model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], []))
        assert turning_einsum(model) == ("y" if turns else "")
