"""Layers of experts one by one, in standard operators as exporters write them, of any number of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fuse_forms import E, F, H, K

Weights = dict[str, np.ndarray[Any, Any]]

ROUTER = """
    logits = Gemm <transB = 1> (x, gate)
    probs = Softmax <axis = -1> (logits)
    top, ids = TopK <axis = -1, largest = 1, sorted = 1> (probs, k)
    sum = ReduceSum <keepdims = 1> (top, last)
    weights = Div (top, sum)
    shape = Shape (x)
    y_0 = Expand (nought, shape)
"""

# How a mask of the ids is made, once; the mask of expert {e}; what its axes are.
MASKS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "one_hot": (
        "hot = OneHot <axis = -1> (ids, depth, off_on)\n    hot_t = Transpose <perm = [2, 1, 0]> (hot)",
        "mask{e} = Gather <axis = 0> (hot_t, e{e})", ("choice", "token"),
    ),
    "equal": ("", "mask{e} = Equal (ids, e{e})", ("token", "choice")),
    "arange": (
        "ids_3d = Unsqueeze (ids, last)\n    hot_b = Equal (ids_3d, experts)\n"
        "    hot = Cast <to = 7> (hot_b)\n"
        "    hot_t = Transpose <perm = [2, 0, 1]> (hot)",
        "mask{e} = Gather <axis = 0> (hot_t, e{e})", ("token", "choice"),
    ),
}  # fmt: skip
FOUND = """
    {mask}
    found{e} = NonZero (mask{e})
    {first}_2d{e}, {second}_2d{e} = Split <axis = 0, num_outputs = 2> (found{e})
    {first}{e} = Squeeze ({first}_2d{e}, first)
    {second}{e} = Squeeze ({second}_2d{e}, first)
"""
ROWS = {
    "gather": "rows{e} = Gather <axis = 0> (x, token{e})",
    "gather_nd": "at{e} = Unsqueeze (token{e}, last)\n    rows{e} = GatherND (x, at{e})",
}
EXPERT = """
    raised{e} = {up}
    left{e}, right{e} = Split <axis = 1, num_outputs = 2> (raised{e})
    sigmoid{e} = Sigmoid (left{e})
    silu{e} = Mul (left{e}, sigmoid{e})
    hidden{e} = Mul (silu{e}, right{e})
    done{e} = {down}
"""
UP = {
    "separate": ("MatMul (rows{e}, up{e})", "Gemm <transB = 1> (hidden{e}, down{e}, down_bias{e})"),
    "stacked": ("MatMul (rows{e}, up_t{e})", "MatMul (hidden{e}, down_t{e})"),
}
CUT = """
    up_e{e} = Gather <axis = 0> (up, e{e})
    up_t{e} = Transpose <perm = [1, 0]> (up_e{e})
    down_e{e} = Gather <axis = 0> (down, e{e})
    down_t{e} = Transpose <perm = [1, 0]> (down_e{e})
"""
WEIGHTS = """
    pair{e} = Concat <axis = -1> (token_1{e}, choice_1{e})
    w{e} = GatherND (weights, pair{e})
    w_2d{e} = Unsqueeze (w{e}, last)
    weighted{e} = Mul (done{e}, w_2d{e})
"""
PUT = {
    "add_nd": "{y} = ScatterND <reduction = \"add\"> ({before}, token_1{e}, weighted{e})",
    "add_elements": "wide{e} = Expand (token_1{e}, row)\n"
    "    {y} = ScatterElements <axis = 0, reduction = \"add\"> ({before}, wide{e}, weighted{e})",
    "add_behind": "wide{e} = Expand (token_1{e}, row)\n"
    "    part{e} = ScatterElements <axis = 0> (y_0, wide{e}, weighted{e})\n    {y} = Add ({before}, part{e})",
    "assign": "old{e} = Gather <axis = 0> ({before}, token{e})\n    new{e} = Add (old{e}, weighted{e})\n"
    "    {y} = ScatterND ({before}, token_1{e}, new{e})",
}  # fmt: skip


def unrolled(
    mask: str = "one_hot", rows: str = "gather", weights: str = "separate", put: str = "add_nd",
    order: Sequence[int] = tuple(range(E)),
) -> str:  # fmt: skip
    """The text of a model, experts in this order."""
    once, masked, (first, second) = MASKS[mask]
    parts = [ROUTER, "    " + once]
    before = "y_0"
    for place, e in enumerate(order):
        y = "y" if place == len(order) - 1 else f"y_{e + 1}"
        up, down = UP[weights]
        parts += [
            FOUND.format(e=e, mask=masked.format(e=e), first=first, second=second),
            "    " + ROWS[rows].format(e=e),
            CUT.format(e=e) if weights == "stacked" else "",
            EXPERT.format(e=e, up=up.format(e=e), down=down.format(e=e)),
            f"    token_1{e} = Unsqueeze (token{e}, last)",
            f"    choice_1{e} = Unsqueeze (choice{e}, last)",
            WEIGHTS.format(e=e),
            "    " + PUT[put].format(e=e, y=y, before=before),
        ]
        before = y
    return model_text("\n".join(parts))


def model_text(body: str) -> str:
    """A text with the constants that bodies read."""
    numbers = ", ".join(f"int64 e{e} = {{{e}}}" for e in range(E))
    return f"""
<ir_version: 10, opset_import: ["": 21]>
layer (float[T, 4] x) => (float[T, 4] y)
<float[6, 4] gate, int64[1] last = {{-1}}, int64[1] first = {{0}}, int64[1] k = {{2}}, float nought = {{0}},
 int64 depth = {{6}}, int64[2] off_on = {{0, 1}}, int64[2] row = {{1, 4}},
 int64[6] experts = {{0, 1, 2, 3, 4, 5}}, {numbers}>
{{{body}
}}
"""


def weights_of(form: str, given: Weights, seed: int = 7) -> Weights:
    """The initializers of a form: ``given`` as a stack, or apart, with biases."""
    if form == "stacked":
        return given
    rng = np.random.default_rng(seed)
    made = {"gate": given["gate"]}
    for e in range(E):
        made[f"up{e}"] = np.ascontiguousarray(given["up"][e].T)
        made[f"down{e}"] = given["down"][e]
        made[f"down_bias{e}"] = rng.standard_normal(H).astype(np.float32)
    return made


def by_loop(x: Any, w: Weights, top_k: int = K) -> np.ndarray[Any, Any]:
    """One token and one expert at a time, in float64: weights as a stack, or apart."""
    y = np.zeros(x.shape)
    for t, token in enumerate(x):
        # In float32, as in the graph: which experts tie is a matter of rounding.
        logits = (token @ w["gate"].T).astype(np.float64)
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs, kind="stable")[:top_k]
        for e in chosen:
            up = w["up"][e] if "up" in w else w[f"up{e}"].T
            down = w["down"][e] if "down" in w else w[f"down{e}"]
            raised = up.astype(np.float64) @ token.astype(np.float64)
            left, right = raised[:F], raised[F:]
            out = down.astype(np.float64) @ (left / (1 + np.exp(-left)) * right) + w.get(f"down_bias{e}", 0)
            y[t] += probs[e] / probs[chosen].sum() * out
    return y
