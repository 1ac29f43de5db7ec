"""All forms that ``fuse`` knows, with inputs for which something is special."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from fuse_dense import dense
from fuse_experts import unrolled, weights_of
from fuse_forms import BATCHED, TRANSPOSED, changed, feeds, model_of, weights
from test_fuse import OAI, microsoft
from test_fuse_loops import FORMS as LOOPS
from test_fuse_loops import text_of as loop_text
from test_fuse_permute import TEXT as PERMUTED
from test_fuse_sums import ADDED, SIZED, SORT
from test_fuse_sums import FORMS as SUMS
from test_fuse_sums import text_of as sum_text

Feeds = list[dict[str, np.ndarray[Any, Any]]]
LOW = {"low": np.array(-np.inf, np.float32)}


def forms() -> dict[str, Any]:
    """Functions that make a model and its inputs, by name."""
    found: dict[str, Any] = {
        "batched": lambda: (model_of(BATCHED, weights()), tokens()),
        "batched, transposed": lambda: (
            model_of(changed(BATCHED, *TRANSPOSED), weights(transposed=True)), tokens(),
        ),
        "permuted": lambda: (model_of(PERMUTED, weights()), tokens()),
        "sum, added": lambda: (
            onnx.parser.parse_model(ADDED_TEXT), pairs(),
        ),
    }  # fmt: skip
    for mask, rows, form, put in (
        ("one_hot", "gather", "separate", "add_nd"), ("equal", "gather_nd", "stacked", "add_elements"),
        ("arange", "gather", "stacked", "add_behind"), ("equal", "gather", "separate", "assign"),
    ):  # fmt: skip
        found[f"unrolled, {mask}, {put}"] = lambda m=mask, r=rows, f=form, p=put: (
            model_of(unrolled(m, r, f, p), weights_of(f, weights())), tokens(),
        )  # fmt: skip
    for gate, total in (
        ("scatter", "add"),
        ("one_hot", "reduce"),
        ("where", "einsum"),
        ("softmax", "matmul"),
    ):
        found[f"dense, {gate}, {total}"] = lambda g=gate, t=total: (
            model_of(dense(g, t), weights_of("separate", weights()) | LOW), tokens(),
        )  # fmt: skip
    for batched in ("matmul", "einsum"):
        bias = {"up_bias": np.random.default_rng(5).standard_normal((6, 1, 6)).astype(np.float32)}
        more = bias if batched == "matmul" else {}
        found[f"dense, batched {batched}"] = lambda b=batched, m=more: (
            model_of(dense("scatter", batched=b), weights() | LOW | m), tokens(),
        )  # fmt: skip
    for form in LOOPS:
        found[f"loop, {form}"] = lambda f=form: (model_of(loop_text(f), weights()), tokens())
    for form, (body, _) in SUMS.items():
        many = (
            SIZED.format(n=10, t=5) if "weights" in form else "int64[N] keys, float[N, 4] rows, float[T, 2] w"
        )
        found[f"sum, {form}"] = lambda b=body, m=many: (
            onnx.parser.parse_model(sum_text(SORT + b, m)),
            keys(),
        )
    found["microsoft, relu"] = lambda: (microsoft("relu", normalize_routing_weights=1), logits())
    found["microsoft, swiglu"] = lambda: (microsoft("swiglu", bias=True, **OAI), logits())
    return found


ADDED_TEXT = sum_text(ADDED.format(sort=SORT), "int64[T, 2] ids, float[T, 4] x")


def tokens() -> Feeds:
    return [{"x": x} for x in feeds(weights()).values()]


def pairs() -> Feeds:
    rng = np.random.default_rng(0)
    return [
        {"ids": rng.integers(0, 3, (many, 2)), "x": rng.standard_normal((many, 4)).astype(np.float32)}
        for many in (6, 1, 0, 9)
    ]


def keys() -> Feeds:
    rng = np.random.default_rng(0)
    found: Feeds = []
    for many in (5, 1, 0, 8):
        rows, w = rng.standard_normal((2 * many, 4)), rng.standard_normal((many, 2))
        found.append(
            {"keys": rng.integers(0, 3, 2 * many), "rows": rows.astype(np.float32), "w": w.astype(np.float32)}
        )
    return found


def logits() -> Feeds:
    rng = np.random.default_rng(4)
    tied = np.array([[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [1, 1, 2, 1, 1], [3, 1, 0, 3, 1]], np.float32)
    some = [rng.standard_normal((many, 5)).astype(np.float32) for many in (8, 1)]
    return [
        {"x": rng.standard_normal((len(one), 4)).astype(np.float32), "logits": one} for one in (*some, tied)
    ]
