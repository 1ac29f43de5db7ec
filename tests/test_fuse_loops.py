"""``fuse`` on an ONNX Loop over experts, whose weights are cut from stacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fuse_experts import CUT, EXPERT, FOUND, PUT, ROUTER, ROWS, UP, WEIGHTS, by_loop, model_text, unrolled
from fuse_forms import changed, feeds, model_of, weights
from test_fuse import ASCEND, fused, ours, run, runner

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes

# The default lane has no time for all of them.
LONG = pytest.mark.parity
TURN = "\n".join(
    [
        FOUND.format(e="", mask="mask = Equal (ids, e)", first="token", second="choice"),
        ROWS["gather"].format(e=""), CUT.format(e=""), EXPERT.format(e="", up=UP["stacked"][0],
        down=UP["stacked"][1])
        .format(e=""), "token_1 = Unsqueeze (token, last)\n    choice_1 = Unsqueeze (choice, last)",
        WEIGHTS.format(e=""), PUT["add_nd"].format(e="", y="after", before="before"),
    ]
)  # fmt: skip
DENSE = "\n".join(
    [
        CUT.format(e=""), EXPERT.format(e="", up="MatMul (x, up_t)", down="MatMul (hidden, down_t)"),
        "g = Gather <axis = 1> (dense, e)\n    g_2d = Unsqueeze (g, last)\n    weighted = Mul (g_2d, done)",
        "after = Add (before, weighted)",
    ]
)  # fmt: skip
GATE = (
    "    logits_shape = Shape (logits)\n    zeros = Expand (nought, logits_shape)\n"
    "    dense = ScatterElements <axis = 1> (zeros, ids, weights)\n"
)
PLAIN = """
    y = Loop (depth, true, y_0) <body = turn (int64 e, bool go, float[T, 4] before)
        => (bool go_on, float[T, 4] after) {
    go_on = Identity (go)
{body}
}>
"""
COUNTED = """
    end, y = Loop (, true, first_e, y_0) <body = turn (int64 i, bool go, int64 e, float[T, 4] before)
        => (bool go_on, int64 following, float[T, 4] after) {
    following = Add (e, step)
    go_on = Less (following, depth)
{body}
}>
"""
USED = """
    hot = OneHot <axis = -1> (ids, depth, off_on)
    by_expert = Transpose <perm = [2, 1, 0]> (hot)
    many = ReduceSum <keepdims = 0> (by_expert, both)
    some = Greater (many, first_e)
    found_experts = NonZero (some)
    used = Transpose <perm = [1, 0]> (found_experts)
    sizes = Shape (used)
    turns = Gather <axis = 0> (sizes, first_e)
    y = Loop (turns, true, y_0) <body = turn (int64 j, bool go, float[T, 4] before)
        => (bool go_on, float[T, 4] after) {
    go_on = Identity (go)
    row_of_used = Gather <axis = 0> (used, j)
    e = Gather <axis = 0> (row_of_used, first_e)
{body}
}>
"""
CONSTANTS = "bool true = {1}, int64 first_e = {0}, int64 step = {1}, int64[2] both = {-1, -2}, int64 depth"
FORMS = {
    "turns": (PLAIN, TURN),
    "counter": (COUNTED, TURN),
    "used experts": (USED, TURN),
    "dense": (PLAIN, DENSE),
}


def text_of(form: str) -> str:
    loop, body = FORMS[form]
    text = ROUTER + (GATE if body is DENSE else "") + loop.replace("{body}", body)
    return model_text(text).replace("int64 depth", CONSTANTS)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=LONG if form in ("counter", "dense") else ()) for form in FORMS]
)
def test_loops_become_grouped_products_of_the_same_values(form: str) -> None:
    given = weights()
    before = model_of(text_of(form), given)
    after = fused(before)
    assert ours(after) == ASCEND
    assert "Loop" not in {node.op_type for node in after.graph.node}
    assert [node.input[1] for node in after.graph.node if node.op_type == "MoeGroupedMatmul"] == [
        "up",
        "down",
    ]
    runs = [runner(model) for model in (before, after)]
    for name, x in feeds(given).items():
        want = by_loop(x, given)
        for one in runs:
            np.testing.assert_allclose(one(x)[0], want, rtol=1e-5, atol=1e-5, err_msg=name)


@LONG
def test_gradients_of_a_loop_and_its_verification() -> None:
    given = weights()
    before = model_of(text_of("turns"), given)
    x, names = feeds(given)["random"], ["x", *given]
    # Beside the same experts one by one, as this Loop itself has no gradient: ranks in its body are unknown.
    apart = model_of(unrolled("equal", weights="stacked"), given)
    old, new = (run(moe_onnx.differentiate(m, loss="y", wrt=names), x) for m in (apart, fused(before)))
    for name, a, b in zip(["y", *names], old, new, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * max(1, float(np.abs(a).max())), err_msg=name)
    assert len(moe_onnx.rewrite_model(before, ["fuse"]).report.verified) >= 6


@LONG
def test_what_was_there_before_the_loop_is_added() -> None:
    given = weights()
    before = model_of(changed(text_of("turns"), ("y_0 = Expand (nought, shape)", "y_0 = Abs (x)")), given)
    x = feeds(given)["random"]
    want = by_loop(x, given) + np.abs(x)
    np.testing.assert_allclose(run(fused(before), x)[0], want, rtol=1e-5, atol=1e-5)


# The form, what is changed, the node, what the report says.
NEAR_MISSES: dict[str, tuple[str, list[tuple[str, str]], str, str]] = {
    "a turn less": ("turns", [("Loop (depth,", "Loop (five,")], "y", "has 5 turns for 6 experts"),
    "may stop early": (
        "turns", [("go_on = Identity (go)", "go_on = Less (e, step)")], "y",
        "may stop before the last expert",
    ),
    "counts from one": ("counter", [("true, first_e, y_0", "true, step, y_0")], "end",
    "its counter does not count"),
    "stops early": ("counter", [("Less (following, depth)", "Less (following, five)")], "end",
    "does not stop behind"),
    "the counter is read": (
        "counter", [("=> (float[T, 4] y)", "=> (float[T, 4] y, int64 end)")], "end",
        "its counter is read behind it",
    ),
    "experts from another place": (
        "used experts", [("row_of_used = Gather <axis = 0> (used, j)", "next = Mod (j, five)\n"
                          "    row_of_used = Gather <axis = 0> (used, next)")],
        "y", "takes its expert by something else",
    ),
    "another number of turns": (
        "used experts", [("Gather <axis = 0> (sizes, first_e)", "Gather <axis = 0> (sizes, step)")],
        "y", "has another number of turns than experts were chosen",
    ),
    "the sum goes into a turn": (
        "turns", [("rows = Gather <axis = 0> (x, token)", "rows = Gather <axis = 0> (before, token)")],
        "rows", "reads the sum 'before' of the experts before",
    ),
    "weights of the next expert": (
        "turns", [("up_e = Gather <axis = 0> (up, e)",
         "next = Mod (e, five)\n    up_e = Gather <axis = 0> (up, next)")],
        "raised", "'up_e' depends on the turn, and is not the part of a stack",
    ),
    "weights of one expert for all": (
        "turns", [("up_e = Gather <axis = 0> (up, e)", "up_e = Gather <axis = 0> (up, step)"),
                  ("down_e = Gather <axis = 0> (down, e)", "down_e = Gather <axis = 0> (down, step)")],
        "weighted", "no expert has a product with weights of its own",
    ),
    "weights of the first two experts": (
        "turns", [("up_e = Gather <axis = 0> (up, e)", "some = Cast <to = 9> (e)\n"
                   "    first_two = Cast <to = 7> (some)\n    up_e = Gather <axis = 0> (up, first_two)")],
        "raised", "'up_e' depends on the turn, and is not the part of a stack",
    ),
    "weights by a branch": (
        "dense", [("(float[T, 4] x)", "(float[T, 4] x, float[4, 4] w)"), ("raised = MatMul (x, up_t)",
         "one_of = If (true) <then_branch = a () => (float[4, 4] p) { p = Abs (w) }, "
         "else_branch = b () => (float[4, 4] q) { q = Neg (w) }>\n"
         "    other = MatMul (x, one_of)\n    raised = MatMul (other, up_t)")],
        "other", "'one_of' depends on the turn, and is not the part of a stack",
    ),
    "no weights": ("turns", [("weighted = Mul (done, w_2d)", "weighted = Neg (done)")], "weighted",
    "rows are summed without"),
    "replaces the sum": ("turns", [('<reduction = "add"> (before', "(before")], "after",
    "puts rows over those of other"),
    "adds to zeros": ("turns", [('ScatterND <reduction = "add"> (before',
     'ScatterND <reduction = "add"> (y_0')],
                      "after", "does not add the rows of the turn's expert to the sum"),
    "gates of one expert": ("dense", [("Gather <axis = 1> (dense, e)", "Gather <axis = 1> (dense, step)"),
                                      ("weighted = Mul",
                                      "dense_e = Gather <axis = 1> (dense, e)\n    weighted = Mul")],
                            "y", "a turn does not add weighted rows of its expert"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_almost_such_a_loop_says_why_it_is_none(name: str) -> None:
    form, changes, node, why = NEAR_MISSES[name]
    text: Any = changed(text_of(form), *changes, ("int64 step", "int64 five = {5}, int64 step"))
    model = model_of(text, weights())
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    notes = {note.node: note.text for note in done.report.skipped}
    assert node in notes, notes
    assert notes[node].startswith(why), notes[node]
