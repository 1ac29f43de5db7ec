"""Models that a device does not take, although they are right, and those that do not fit its buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from broken_documents import (
    Break,
    Model,
    attribute,
    both,
    combine,
    combine_grad,
    combine_grad_padded,
    dispatch,
    dispatch_padded,
    dtype,
    finalize_grad,
    grad,
    grouped,
    permute,
    permute_grad,
    shape,
    text,
    without,
)
from broken_indices import constant, values
from broken_models import Mutation, plain_model

T = onnx.TensorProto
A2, A3, NEWEST = ({"target": name} for name in ("ascend910b", "ascend910_93", "ascend950"))


def another(model: Callable[[], Model]) -> Break:
    """Not the plain model but this one."""
    return lambda plain: model()


_ROWS = [0, 5, 1, 3, 4, 6, 2, 7]
_WHERE = "kept = Where (here, index, other) same = Identity (kept)"


def _where(other: int) -> Callable[[], Model]:
    """A combine and its gradient, whose row indices are chosen by a condition."""
    return text(
        "(float[8, 2] rows, bool[8] here, int32[8] index, bool[4, 3] map, float[4, 3] probs)"
        " => (float[t, h] y)",
        f"{_WHERE} [op] y, place, token, w = ascend.moe.MoeTokenUnpermuteWithRoutingMap <drop_and_pad = 0>"
        " (rows, same, map, probs)",
        f"<int32 other = {{{other}}}>",
    )


where, where_minus_one = _where(0), _where(-1)

_TARGETS: list[tuple[str, str, Callable[[], Model], Break, dict[str, Any]]] = [
    ("MO531", "operator of this package", plain_model, another(grouped), A2),
    ("MO532", "dispatch gradient on the newest", dispatch, another(grad), NEWEST),
    ("MO532", "combine gradient on the newest", dispatch, another(combine_grad), NEWEST),
    ("MO533", "float64 rows", grad, dtype(T.DOUBLE, "g", "dx"), A2),
    ("MO533", "float64 throughout", combine_grad, dtype(
        T.DOUBLE, "dy", "rows", "probs", "dr", "dp"), NEWEST),
    ("MO534", "float32 scales beside bfloat16 on A2", finalize_grad, dtype(
        T.BFLOAT16, "dy", "rows", "bias", "dr"), A2),
    ("MO534", "float32 scales beside bfloat16 on A3", finalize_grad, dtype(
        T.BFLOAT16, "dy", "rows", "bias", "dr"), A3),
    ("MO535", "float32 probs beside bfloat16", combine_grad, dtype(
        T.BFLOAT16, "dy", "rows", "dr"), A2),
    ("MO535", "float32 probs beside bfloat16 in the dispatch", permute, dtype(T.BFLOAT16, "x", "rows"), A3),
    ("MO536", "rows by the map", permute, attribute(num_out_tokens=0), A2),
    ("MO536", "tokens and experts by the map", permute_grad, attribute(num_experts=0, tokens_num=0), A2),
    ("MO536", "shape by the map", combine, without("probs"), A2),
    ("MO536", "experts and capacity by the rows", finalize_grad, both(
        attribute(drop_pad_mode=1), shape(rows=(3, 2, 2))), A2),
    ("MO537", "no hidden size", grad, shape(g=(8, 0)), A2),
    ("MO537", "no tokens", combine_grad, shape(
        dy=(0, 2), index=(0,), token=(0,), map=(0, 3), rows=(0, 2), probs=(0, 3)), A3),
    ("MO538", "512 experts of a token in the dispatch", permute, both(
        shape(map=(4, 600), probs=(4, 600)), attribute(num_out_tokens=2048)), A2),
    ("MO538", "512 experts of a token in the combine", combine, shape(
        index=(2048,), rows=(2048, 2), map=(4, 600), probs=(4, 600)), A2),
    ("MO538", "capacity of all tokens", dispatch_padded, attribute(expert_capacity=4), A2),
    ("MO539", "slot without a row in the combine", constant(combine, index=_ROWS),
     values(index=[*_ROWS[:7], -1]), A2),
    ("MO539", "slot without a row in its gradient", constant(combine_grad, index=_ROWS),
     values(index=[*_ROWS[:7], -1]), NEWEST),
    ("MO539", "slots of dropped rows", where, another(where_minus_one), A3),
    # By hand: float32, t = p = 4: (UB - 1024 - 2048 - 36) / 5 experts; (UB - 2080) / 24 * 512 elements.
    ("MO551", "38649 experts in float32", combine_grad, shape(map=(4, 38649), probs=(4, 38649)), A2),
    ("MO551", "more experts than a small buffer holds", combine_grad, shape(map=(4, 33), probs=(4, 33)),
     {"ub_size": 3108 + 5 * 32}),
    ("MO551", "hidden size of five million", combine_grad_padded, both(
        shape(dy=(4, 5_000_000), rows=(6, 5_000_000)), attribute(restore_shape=[4, 5_000_000])), A2),
    ("MO551", "hidden size past a small buffer", combine_grad_padded, both(
        shape(dy=(4, 513), rows=(6, 513)), attribute(restore_shape=[4, 513])), {"ub_size": 2080 + 24}),
    ("MO552", "experts rounded up do not fit", combine_grad, shape(map=(4, 33), probs=(4, 33)),
     {"ub_size": 3108 + 5 * 40}),
]  # fmt: skip
MUTATIONS = [
    Mutation(code, name, base, break_it, options=tuple(options.items()))
    for code, name, base, break_it, options in _TARGETS
]
