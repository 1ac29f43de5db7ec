"""Layers that compute all experts for all tokens, in standard operators, summed by a gate ``[T, E]``."""

from __future__ import annotations

from fuse_experts import ROUTER, model_text
from fuse_forms import E

GATES = {
    "scatter": "zeros = Expand (nought, logits_shape)\n"
    "    dense = ScatterElements <axis = 1> (zeros, ids, weights)",
    "one_hot": "hot = OneHot <axis = -1> (ids, depth, off_on)\n    hot_f = Cast <to = 1> (hot)\n"
    "    weights_3d = Unsqueeze (weights, last)\n    pairs = Mul (hot_f, weights_3d)\n"
    "    dense = ReduceSum <keepdims = 0> (pairs, axis_1)",
    "where": "zeros = Expand (nought, logits_shape)\n    mark = Expand (true, ids_shape)\n"
    "    no_mark = Expand (false, logits_shape)\n    map = ScatterElements <axis = 1> (no_mark, ids, mark)\n"
    "    kept = Where (map, probs, nought)\n    total = ReduceSum <keepdims = 1> (kept, last)\n"
    "    dense = Div (kept, total)",
    "softmax": "lows = Expand (low, logits_shape)\n    chosen = GatherElements <axis = 1> (logits, ids)\n"
    "    masked = ScatterElements <axis = 1> (lows, ids, chosen)\n    dense = Softmax <axis = -1> (masked)",
}  # fmt: skip
EXPERT = """
    raised{e} = MatMul (x, up{e})
    left{e}, right{e} = Split <axis = 1, num_outputs = 2> (raised{e})
    sigmoid{e} = Sigmoid (left{e})
    silu{e} = Mul (left{e}, sigmoid{e})
    hidden{e} = Mul (silu{e}, right{e})
    done{e} = Gemm <transB = 1> (hidden{e}, down{e}, down_bias{e})
"""
TERM = """
    g{e} = Gather <axis = 1> (dense, e{e})
    g_2d{e} = Unsqueeze (g{e}, last)
    weighted{e} = Mul (done{e}, g_2d{e})
    {y} = Add ({before}, weighted{e})
"""
STACKS = {
    "reduce": (1, "dense_3d = Unsqueeze (dense, last)\n    all = Mul (stack, dense_3d)\n"
               "    y = ReduceSum <keepdims = 0> (all, axis_1)"),
    "einsum": (0, 'y = Einsum <equation = "eth,te->th"> (stack, dense)'),
    "matmul": (1, "dense_row = Unsqueeze (dense, axis_1)\n    all = MatMul (dense_row, stack)\n"
               "    y = Squeeze (all, axis_1)"),
}  # fmt: skip
BATCHED = {
    # Experts first, by MatMul, a bias of each.
    "matmul": """
    x_3d = Unsqueeze (x, first)
    x_all = Expand (x_3d, all_experts)
    up_t = Transpose <perm = [0, 2, 1]> (up)
    product = MatMul (x_all, up_t)
    raised = Add (product, up_bias)
    left, right = Split <axis = 2, num_outputs = 2> (raised)
    sigmoid = Sigmoid (left)
    silu = Mul (left, sigmoid)
    hidden = Mul (silu, right)
    down_t = Transpose <perm = [0, 2, 1]> (down)
    done = MatMul (hidden, down_t)
    dense_t = Transpose <perm = [1, 0]> (dense)
    dense_3d = Unsqueeze (dense_t, last)
    all = Mul (dense_3d, done)
    y = ReduceSum <keepdims = 0> (all, first)
""",
    # Tokens first, by Einsum.
    "einsum": """
    raised = Einsum <equation = "th,efh->tef"> (x, up)
    left = Slice (raised, first, half, last)
    right = Slice (raised, half, far, last)
    sigmoid = Sigmoid (left)
    silu = Mul (left, sigmoid)
    hidden = Mul (silu, right)
    done = Einsum <equation = "tef,ehf->teh"> (hidden, down)
    y = Einsum <equation = "teh,te->th"> (done, dense)
""",
}
CONSTANTS = (
    "bool true = {1}, bool false = {0}, float low, int64[1] axis_1 = {1}, int64[3] all_experts = {6, 1, 1}, "
    "int64[1] half = {3}, int64[1] far = {100}, "
)


def dense(gate: str = "scatter", total: str = "add", *, batched: str = "") -> str:
    """The text of a model."""
    parts = [ROUTER, "    logits_shape = Shape (logits)\n    ids_shape = Shape (ids)", "    " + GATES[gate]]
    if batched:
        parts.append(BATCHED[batched])
    else:
        parts += [EXPERT.format(e=e) for e in range(E)]
        if total == "add":
            for e in range(E):
                y, before = "y" if e == E - 1 else f"y_{e + 1}", f"y_{e}"
                parts.append(TERM.format(e=e, y=y, before=before))
        else:
            axis, end = STACKS[total]
            place = "axis_1" if axis else "first"
            parts += [f"    done_3d{e} = Unsqueeze (done{e}, {place})" for e in range(E)]
            names = ", ".join(f"done_3d{e}" for e in range(E))
            parts += [f"    stack = Concat <axis = {axis}> ({names})", "    " + end]
    return model_text("\n".join(parts)).replace("int64 depth", CONSTANTS + "int64 depth")
