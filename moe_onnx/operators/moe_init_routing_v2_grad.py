"""MoeInitRoutingV2Grad: the gradient of the dispatch, each token the sum of its K rows.

Source: aclnnMoeInitRoutingV2Grad (source document 003).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_onnx.operators._arrays import Array, check_range, check_unique, read, sum_of_slots
from moe_onnx.operators._body import (
    IN_FLOAT64,
    attribute,
    body,
    check,
    checks,
    flag_squared,
    integer_code,
    is_not_float,
    is_outside,
    per_precision,
    precision,
    rank_of,
    sizes_agree,
    with_zero_row,
)
from moe_onnx.spec import INDICES, Arg, Attr, Axes, Dim, OpSpec, TensorInfo

NAME = "MoeInitRoutingV2Grad"


@dataclass(frozen=True)
class Plan:
    """A checked call: ``rows[p]`` is a row of the gradient, ``slots[i, t]`` the row of slot t of token i.

    ``masked`` says that slots may name no row: -1, or a value of at least ``len(rows)``.
    """

    rows: Array
    slots: Array
    masked: bool


def moe_init_routing_v2_grad(
    grad_expanded_x: Any,
    expanded_row_idx: Any,
    *,
    top_k: int,
    drop_pad_mode: int = 0,
    active_num: int = 0,
) -> Array:
    """Sum the gradients of the K expanded rows of each token.

    Signature: [T*K H], [A H] or [E C H]; [T*K] int32 -> [T H]

        grad_x[i] = sum over t = 0 .. K-1 of X[expanded_row_idx[i*K + t]]

    where X is ``grad_expanded_x`` with its leading axes flattened, and a slot that names no row
    adds nothing. 16-bit inputs are widened to float32, summed in slot order, rounded once (nearest
    even). NaN and infinity in rows that no slot names never reach the result.

    Args:
        grad_expanded_x: Gradient of the dispatched rows; float16, bfloat16, float32 (float64 for
            validation). ``[T*K, H]`` dropless, ``[active_num, H]`` active, ``[E, C, H]`` drop/pad.
        expanded_row_idx: int32 ``[T*K]``, token-major; values other than -1 are unique. In
            ``[0, T*K)``, or ``[-1, E*C)`` in drop/pad, where -1 is a dropped slot. In the active
            mode values of at least ``active_num`` are dropped slots.
        top_k: Experts per token K, > 0; divides the length of ``expanded_row_idx``.
        drop_pad_mode: 0 dropless or active, 1 drop/pad.
        active_num: A, >= 0; 0 is dropless. Without effect in drop/pad.

    Returns:
        ``grad_x`` ``[T, H]`` in the dtype of ``grad_expanded_x``; a token without rows is exactly 0.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, IndexValueError.
    """
    plan = prepare(
        grad_expanded_x,
        expanded_row_idx,
        top_k=top_k,
        drop_pad_mode=drop_pad_mode,
        active_num=active_num,
    )
    return sum_of_slots(plan.rows, plan.slots)


def prepare(grad_expanded_x: Any, expanded_row_idx: Any, **attributes: Any) -> Plan:
    """Check a call completely and give it in the form that kernels work on."""
    (grad, index), infos = read(SPEC, grad_expanded_x, expanded_row_idx)
    attrs, _ = SPEC.check(infos, attributes)
    assert grad is not None and index is not None
    rows = grad.reshape(int(np.prod(grad.shape[:-1])), grad.shape[-1])
    padded, active = bool(attrs["drop_pad_mode"]), attrs["active_num"] > 0
    if padded:
        check_range(NAME, "expanded_row_idx", index, -1, len(rows), "drop/pad, -1 is a dropped slot")
    else:
        mode = "active" if active else "dropless"
        check_range(NAME, "expanded_row_idx", index, 0, len(index), f"{mode}, drop_pad_mode 0")
    check_unique(NAME, "expanded_row_idx", index, "each slot has a row of its own")
    tokens = len(index) // attrs["top_k"]
    # Without tokens top_k may be anything, also what no array can have for an axis.
    return Plan(rows, index.reshape(tokens, attrs["top_k"] if tokens else 0), padded or active)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    grad, index = inputs
    assert grad is not None and index is not None
    axes = Axes(NAME)
    padded, active = attributes["drop_pad_mode"] == 1, attributes["active_num"]
    rows = "E C H" if padded else "A H" if active else "N H"
    axes.read(("expanded_row_idx", index, "N"), ("grad_expanded_x", grad, rows))
    if active and not padded:
        axes.bind("A", active, "attribute 'active_num'")
    tokens: Dim = axes.divide("N", attributes["top_k"], "top_k")
    return [TensorInfo(grad.dtype, (tokens, axes["H"]))]


BODY = body(
    "MoeInitRoutingV2Grad <top_k, drop_pad_mode: int = 0, active_num: int = 0>"
    " (grad_expanded_x, expanded_row_idx) => (grad_x)",
    attribute("top_k"),
    attribute("drop_pad_mode"),
    attribute("active_num"),
    precision("precision", "grad_expanded_x"),
    IN_FLOAT64,
    is_not_float("bad_grad_dtype", "precision"),
    integer_code("idx_dtype", "expanded_row_idx"),
    rank_of("idx_rank", "expanded_row_idx"),
    """
    want_rank = Add (two, drop_pad_mode)
    """,
    rank_of("grad_rank", "grad_expanded_x"),
    """
    bad_top_k = Less (top_k, one)
    """,
    flag_squared("drop_pad_mode"),
    """
    bad_active = Less (active_num, zero)
    is_padded = Equal (drop_pad_mode, one)
    not_padded = Not (is_padded)
    is_limited = Greater (active_num, zero)
    is_active = And (not_padded, is_limited)
    is_masked = Or (is_padded, is_active)
    not_masked = Not (is_masked)
    active = Cast <to = 7> (is_active)
    dropless = Cast <to = 7> (not_masked)
    # A size that is compared is not negative; whether it was is checked first.
    num_active = Max (active_num, zero)
    """,
    checks(
        "passed",
        "zero",
        ("grad_expanded_x must be float16, bfloat16, float32 or float64", "bad_grad_dtype"),
        ("expanded_row_idx must be int32", "idx_dtype", "int32_code"),
        ("top_k must be positive", "bad_top_k"),
        ("drop_pad_mode must be 0 or 1", "drop_pad_mode_squared", "drop_pad_mode"),
        ("active_num must not be negative", "bad_active"),
        ("grad_expanded_x must be 2-D, or 3-D in drop_pad mode", "grad_rank", "want_rank"),
        ("expanded_row_idx must be 1-D", "idx_rank", "one"),
    ),
    """
    n = Shape <end = 1> (expanded_row_idx)
    k = Max (top_k, one)
    tokens = Div (n, k)
    token_rows = Mul (tokens, k)
    leading = Shape <end = -1> (grad_expanded_x)
    num_rows = ReduceProd <keepdims = 1> (leading)
    """,
    sizes_agree(
        "passed_sizes",
        "passed",
        ("grad_expanded_x must have as many rows as expanded_row_idx", "num_rows", "n", "dropless"),
        ("grad_expanded_x must have active_num rows", "num_rows", "num_active", "active"),
        ("top_k must divide the length of expanded_row_idx", "token_rows", "n", "one"),
    ),
    """
    # An index is looked up only after its range was checked: Gather wraps -1 to the last row.
    index = Cast <to = 7> (expanded_row_idx)
    low = Where (is_padded, minus_one, zero)
    high = Where (is_padded, num_rows, n)
    """,
    is_outside("bad_index", "index", "low", "high"),
    check("expanded_row_idx must be in range", "bad_index", before="passed_sizes", after="offset"),
    """
    checked = Add (index, offset)
    slots_shape = Concat <axis = 0> (tokens, k)
    slots = Reshape <allowzero = 1> (checked, slots_shape)
    hidden = Shape <start = -1> (grad_expanded_x)
    flat_shape = Concat <axis = 0> (num_rows, hidden)
    flat = Reshape <allowzero = 1> (grad_expanded_x, flat_shape)
    # Dropped slots look up a row of zeros behind the last one: chosen, not multiplied, so that a
    # NaN stays where it is. -1 is that row by itself.
    gathered = If (is_masked) <
        then_branch = with_zero_row () => (masked_rows) {
    """,
    with_zero_row("rows_and_zero", "flat", "grad_expanded_x"),
    """
            named = Min (slots, num_rows)
            masked_rows = Gather <axis = 0> (rows_and_zero, named)
        },
        else_branch = as_they_are () => (all_rows) { all_rows = Gather <axis = 0> (flat, slots) }
    >
    """,
    per_precision(
        ("grad_x",),
        """
        $wide = Cast <to = $DTYPE> (gathered)
        $sum = ReduceSum <keepdims = 0> ($wide, one)
        $grad_x = CastLike ($sum, grad_expanded_x)
        """,
    ),
)

SPEC = OpSpec(
    name=NAME,
    summary="Gradient of MoeInitRoutingV2: sums the rows of each token's K experts.",
    formula="grad_x[i] = sum over t = 0 .. K-1 of X[expanded_row_idx[i*K + t]]",
    inputs=(
        Arg(
            "grad_expanded_x",
            "N H | A H | E C H",
            "gradient of the dispatched rows: dropless, active (active_num > 0), or drop/pad",
            differentiable=True,
        ),
        Arg(
            "expanded_row_idx",
            "N",
            "row of each slot, token-major, unique apart from -1: in [0, T*K), or in [-1, E*C) in "
            "drop/pad, where -1 is a dropped slot; values >= active_num are dropped when active",
            INDICES,
            "I",
        ),
    ),
    outputs=(Arg("grad_x", "T H", "gradient of the tokens; 0 for a token without rows"),),
    attributes=(
        Attr("top_k", "int", "experts per token K; divides N", "> 0", lambda v: v > 0, required=True),
        Attr("drop_pad_mode", "int", "1 for drop/pad", "0 or 1", lambda v: v in (0, 1), 0),
        Attr(
            "active_num",
            "int",
            "rows A when active; 0 is dropless; unused in drop/pad",
            ">= 0",
            lambda v: v >= 0,
            0,
        ),
    ),
    shapes=_shapes,
    reference=moe_init_routing_v2_grad,
    body=BODY,
    source="aclnnMoeInitRoutingV2Grad",
)
