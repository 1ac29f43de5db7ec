"""MoeFinalizeRoutingV2Grad: the gradient of the combine by index, for rows and for scales.

Source: aclnnMoeFinalizeRoutingV2Grad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.errors import AttributeValueError, LimitError
from moe_onnx.operators._arrays import Array, check_range, check_unique, given, read, wide_dtype
from moe_onnx.operators._body import (
    IN_FLOAT64,
    LONG_ROWS,
    attribute,
    body,
    check,
    checks,
    count_up,
    flag_squared,
    in_row_order,
    integer_code,
    is_not,
    is_not_float,
    is_outside,
    per_precision,
    precision,
    rank_of,
    row_dots,
    sizes_agree,
    with_zero_row,
)
from moe_onnx.operators._routing_map import require_companions
from moe_onnx.operators._slots import (
    BIAS,
    EXPERT_IDX,
    SCALES,
    biases,
    bind_slots,
    check_dtypes,
    check_experts,
    late_sizes,
    sizes_of_slots,
    slot_rules,
    there,
)
from moe_onnx.spec import INDICES, MAX_ROWS, Arg, Attr, Axes, Dim, OpSpec, TensorInfo, presence

NAME = "MoeFinalizeRoutingV2Grad"


def moe_finalize_routing_v2_grad(
    grad_y: Any,
    expanded_row_idx: Any,
    expanded_x: Any = None,
    scales: Any = None,
    expert_idx: Any = None,
    bias: Any = None,
    *,
    drop_pad_mode: int = 0,
    active_num: int = 0,
    expert_num: int = 0,
    expert_capacity: int = 0,
) -> tuple[Array, Array | None]:
    """Gradient of MoeFinalizeRoutingV2 with respect to rows and scales.

    Signature: [T H], [N] int32, [N H], [A H] or [E C H]?, [T K]?, [T K] int32?, [E H]?
        -> [N H], [A H] or [E C H]; [T K]?

        grad_X[p] = grad_y[i] * scales[i, k]             (grad_y[i] without scales, bit for bit)
        grad_scales[i, k] = sum over h of (X[p, h] + bias[expert_idx[i, k], h]) * grad_y[i, h]

    where p = expanded_row_idx[i*K + k], N = T*K, and X is ``expanded_x`` with its leading axes
    flattened. A slot without a row (-1 in drop/pad, p >= active_num in the active mode) adds to
    nothing: its scale, expert and bias are not read and its grad_scales is exactly 0, as are the rows
    that no slot names. Products and sums are made in float32 (float64 for float64), rounded once.

    Args:
        grad_y: Gradient of the combined tokens; float16, bfloat16, float32 (float64 for validation).
        expanded_row_idx: int32 ``[N]``, token-major, unique apart from -1: in ``[0, N)``, or in
            ``[-1, E*C)`` in drop/pad.
        expanded_x: The rows that were combined, dtype of grad_y; needed with scales, otherwise only
            its sizes count. None or of shape (0, 0) is absent, as for all below.
        scales: Dtype of grad_y, or float32 beside bfloat16. K is 1 without.
        expert_idx: int32 in ``[0, E)``; read with bias and scales only.
        bias: One row for each expert, dtype of grad_y. Needs expert_idx.
        drop_pad_mode: 0 dropless or active, 1 drop/pad.
        active_num: A, >= 0, the rows in the active mode; 0 is dropless. Without effect in drop/pad.
        expert_num: E in drop/pad, >= 0; 0 takes it from expanded_x. Without effect otherwise.
        expert_capacity: C, likewise.

    Returns:
        ``(grad_expanded_x, grad_scales)``: ``[N, H]``, ``[A, H]`` or ``[E, C, H]`` in the dtype of
        ``grad_y``, and ``[T, K]`` in the dtype of ``scales``, None without.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, LimitError,
        IndexValueError.
    """
    arrays, infos = read(SPEC, grad_y, expanded_row_idx, expanded_x, scales, expert_idx, bias)
    attributes = {"drop_pad_mode": drop_pad_mode, "active_num": active_num}
    attributes |= {"expert_num": expert_num, "expert_capacity": expert_capacity}
    attrs, outputs = SPEC.check(infos, attributes)
    grad, index, expanded, *_ = arrays
    assert grad is not None and index is not None and outputs[0] is not None and outputs[0].shape
    weights, experts, offsets = (given(array) for array in arrays[3:])
    shape = tuple(int(size or 0) for size in outputs[0].shape)
    rows, padded = int(np.prod(shape[:-1])), attrs["drop_pad_mode"] == 1
    if padded:
        check_range(NAME, "expanded_row_idx", index, -1, rows, "drop/pad, -1 is a dropped slot")
    else:
        mode = "active" if attrs["active_num"] else "dropless"
        check_range(NAME, "expanded_row_idx", index, 0, len(index), f"{mode}, drop_pad_mode 0")
    check_unique(NAME, "expanded_row_idx", index, "each slot has a row of its own")
    slots = index.reshape(len(grad), 1 if weights is None else weights.shape[1])
    live = (slots >= 0) & (slots < rows)
    result = np.zeros((rows, shape[-1]), grad.dtype)
    if weights is None:
        result[slots[live]] = grad[live[:, 0]]
        return result.reshape(shape), None
    assert expanded is not None
    if offsets is not None and experts is not None:
        check_experts(NAME, experts, len(offsets), live)
    flat, wide = expanded.reshape(result.shape), wide_dtype(grad.dtype)
    grad_scales = np.zeros(weights.shape, weights.dtype)
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        for k in range(weights.shape[1]):
            at = live[:, k]
            row, moved = slots[at, k], grad[at].astype(wide)
            result[row] = (moved * weights[at, k, None].astype(wide)).astype(grad.dtype)
            term = flat[row].astype(wide)
            if offsets is not None and experts is not None:
                term += offsets[experts[at, k]].astype(wide)
            grad_scales[at, k] = (term * moved).sum(axis=1).astype(weights.dtype)
    return result.reshape(shape), grad_scales


def _missing(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> None:
    grad, _, expanded, scales, expert_idx, bias = inputs
    if grad is not None and presence(scales):
        # (0, 0) may be the shape that expanded_x must have, if there are no rows and H is 0.
        hidden = None if not grad.shape else grad.shape[-1]
        empty = expanded is not None and expanded.shape == (0, 0) and hidden != 0
        require_companions(NAME, "scales", expanded_x=expanded is not None and not empty)
    if presence(bias):
        require_companions(NAME, "bias", expert_idx=presence(expert_idx) is not False)


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    grad, _, expanded, scales, _, bias = inputs
    assert grad is not None
    check_dtypes(NAME, "grad_y", grad, scales, expanded_x=expanded, bias=bias)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    grad, index, expanded, scales, expert_idx, bias = inputs
    assert grad is not None
    padded, active = attributes["drop_pad_mode"] == 1, attributes["active_num"]
    sizes = {"E": "expert_num", "C": "expert_capacity"} if padded else {"A": "active_num"} if active else {}
    for name in sizes.values():
        if attributes[name] < 1 and presence(expanded) is False:
            raise AttributeValueError(
                f"{NAME}: attribute '{name}' must be > 0 with drop_pad_mode 1 and without 'expanded_x', "
                f"got {attributes[name]}.",
                op=NAME,
            )
    letters = " ".join([*(sizes or "N"), "H"])
    axes = Axes(NAME)
    axes.read(
        ("grad_y", grad, "T H"),
        ("expanded_row_idx", index, "N"),
        # Beside scales (0, 0) is no absent input: it is right, or an error.
        ("expanded_x", expanded if presence(scales) else there(expanded), letters),
        ("scales", there(scales), "T K"),
        ("expert_idx", there(expert_idx), "T K"),
        ("bias", there(bias), "E H"),
    )
    for letter, name in sizes.items():
        axes.bind(letter, attributes[name] or None, f"attribute '{name}'")
    bind_slots(axes, scales)
    rows: Dim = 1
    for letter in sizes:
        size = axes[letter]
        rows = rows * size if isinstance(rows, int) and isinstance(size, int) else None
    if isinstance(rows, int) and rows > MAX_ROWS:
        raise LimitError(
            f"{NAME}: {' * '.join(sizes.values())} must be at most {MAX_ROWS}, as rows are named by int32, "
            f"got {' * '.join(str(axes[letter]) for letter in sizes)}.",
            op=NAME,
        )
    grad_rows = TensorInfo(grad.dtype, tuple(axes[letter] for letter in letters.split()))
    if scales is None:
        return [grad_rows, None]
    shape = (axes["T"], axes["K"]) if presence(scales) else scales.shape
    return [grad_rows, TensorInfo(scales.dtype, shape)]


# The part that touches whole rows, once per precision.
_ROWS = """
    $grad = Cast <to = $DTYPE> (moved)
    $weight = Cast <to = $DTYPE> (weight)
    $product = Mul ($grad, $weight)
    $scaled_rows = CastLike ($product, grad_y)
    $grad_2d = Reshape <allowzero = 1> ($grad, rows_2d)
    $rows = Cast <to = $DTYPE> (rows_given)
""" + row_dots(
    "some_grad_scales",
    "scales",
    "row_of_slot",
    "grad_2d",
    "rows",
    """
            $bias = Cast <to = $DTYPE> (row_bias)
            $biased = Add ($rows, $bias)
            $pairs = Mul ($grad_2d, $biased)""",
)

BODY = body(
    "MoeFinalizeRoutingV2Grad <drop_pad_mode: int = 0, active_num: int = 0, expert_num: int = 0,"
    " expert_capacity: int = 0> (grad_y, expanded_row_idx, expanded_x, scales, expert_idx, bias)"
    " => (grad_expanded_x, grad_scales)",
    attribute("drop_pad_mode"),
    attribute("active_num"),
    attribute("expert_num"),
    attribute("expert_capacity"),
    precision("precision", "grad_y"),
    IN_FLOAT64,
    precision("expanded_precision", "expanded_x"),
    is_not_float("bad_grad_dtype", "precision"),
    integer_code("index_dtype", "expanded_row_idx"),
    integer_code("expert_dtype", "expert_idx"),
    is_not("bad_expanded_dtype", "precision", "expanded_precision"),
    flag_squared("drop_pad_mode"),
    """
    is_padded = Equal (drop_pad_mode, one)
    not_padded = Not (is_padded)
    # Sizes are made of clamped values only: a runtime folds them before any check can fail.
    max_rows = Constant <value_ints = [2147483647]> ()
    active_below = Less (active_num, zero)
    active_above_free = Greater (active_num, max_rows)
    active_above = And (active_above_free, not_padded)
    is_limited = Greater (active_num, zero)
    is_active = And (not_padded, is_limited)
    bad_experts = Less (expert_num, zero)
    bad_capacity = Less (expert_capacity, zero)
    active_clamped = Min (active_num, max_rows)
    experts_not_negative = Max (expert_num, zero)
    experts_clamped = Min (experts_not_negative, max_rows)
    capacity_not_negative = Max (expert_capacity, zero)
    capacity_clamped = Min (capacity_not_negative, max_rows)
    # expanded_x is absent if it is 2-D and both its sizes are 0.
    expanded_shape = Shape (expanded_x)
    expanded_rank = Shape (expanded_shape)
    expanded_sizes = Concat <axis = 0> (expanded_shape, zero)
    expanded_largest = ReduceMax <keepdims = 1> (expanded_sizes)
    expanded_is_2d = Equal (expanded_rank, two)
    expanded_is_empty = Equal (expanded_largest, zero)
    no_expanded = And (expanded_is_2d, expanded_is_empty)
    is_expanded = Not (no_expanded)
    has_expanded = Cast <to = 7> (is_expanded)
    padded = Cast <to = 7> (is_padded)
    want_rank = Add (two, padded)
    wrong_rank = BitwiseXor (expanded_rank, want_rank)
    wrong_rank_if_there = Mul (wrong_rank, has_expanded)
    bad_expanded_rank = Greater (wrong_rank_if_there, zero)
    expanded_first = Shape <end = 1> (expanded_x)
    expanded_second = Shape <start = 1, end = 2> (expanded_x)
    expanded_hidden = Shape <start = -1> (expanded_x)
    experts = Where (is_expanded, expanded_first, experts_clamped)
    capacity = Where (is_expanded, expanded_second, capacity_clamped)
    no_experts = Less (expert_num, one)
    no_capacity = Less (expert_capacity, one)
    needs_sizes = And (is_padded, no_expanded)
    bad_no_experts = And (needs_sizes, no_experts)
    bad_no_capacity = And (needs_sizes, no_capacity)
    expert_rows = Mul (experts, capacity)
    rows_above = Greater (expert_rows, max_rows)
    bad_product = And (is_padded, rows_above)
    padded_rows = Where (rows_above, zero, expert_rows)
    """,
    rank_of("grad_rank", "grad_y"),
    rank_of("index_rank", "expanded_row_idx"),
    rank_of("scales_rank", "scales"),
    rank_of("expert_rank", "expert_idx"),
    rank_of("bias_rank", "bias"),
    checks(
        "passed",
        "zero",
        ("grad_y must be float16, bfloat16, float32 or float64", "bad_grad_dtype"),
        ("expanded_row_idx must be int32", "index_dtype", "int32_code"),
        ("expert_idx must be int32", "expert_dtype", "int32_code"),
        ("drop_pad_mode must be 0 or 1", "drop_pad_mode_squared", "drop_pad_mode"),
        ("active_num must not be negative", "active_below"),
        ("expert_num must not be negative", "bad_experts"),
        ("expert_capacity must not be negative", "bad_capacity"),
        ("expert_num must be positive in drop_pad mode without expanded_x", "bad_no_experts"),
        ("expert_capacity must be positive in drop_pad mode without expanded_x", "bad_no_capacity"),
        ("grad_y must be 2-D", "grad_rank", "two"),
        ("expanded_row_idx must be 1-D", "index_rank", "one"),
        ("expanded_x must be 2-D, or 3-D in drop_pad mode", "bad_expanded_rank"),
        ("scales must be 2-D", "scales_rank", "two"),
        ("expert_idx must be 2-D", "expert_rank", "two"),
        ("bias must be 2-D", "bias_rank", "two"),
        ("active_num must be below 2^31", "active_above"),
        ("expert_num * expert_capacity must be below 2^31", "bad_product"),
    ),
    """
    n = Shape <end = 1> (expanded_row_idx)
    hidden = Shape <start = -1> (grad_y)
    grad_tokens = Shape <end = 1> (grad_y)
    rows_if_2d = Where (is_active, active_clamped, n)
    num_rows = Where (is_padded, padded_rows, rows_if_2d)
    """,
    sizes_of_slots(),
    """
    expanded_dtype = Cast <to = 7> (bad_expanded_dtype)
    # Beside scales an empty expanded_x is no absent one: it is right, or a fault.
    uses_expanded = Max (has_expanded, has_scales)
    some_hidden = Min (hidden, one)
    needs_2d = Max (some_hidden, padded)
    needs_expanded = Mul (has_scales, needs_2d)
    not_padded_size = Sub (one, padded)
    if_2d = Mul (uses_expanded, not_padded_size)
    expert_num_given = Min (experts_not_negative, one)
    capacity_given = Min (capacity_not_negative, one)
    expanded_if_padded = Mul (has_expanded, padded)
    if_experts = Mul (expanded_if_padded, expert_num_given)
    if_capacity = Mul (expanded_if_padded, capacity_given)
    bias_if_padded = Mul (has_bias, padded)
    """,
    sizes_agree(
        "passed_sizes",
        "passed",
        ("expanded_x is missing although scales is given", "has_expanded", "one", "needs_expanded"),
        ("expanded_x must have the dtype of grad_y", "expanded_dtype", "zero", "has_expanded"),
        *slot_rules("grad_y"),
        ("grad_y must have the tokens of the slots", "grad_tokens", "num_tokens", "one"),
        ("expanded_x must have the hidden size of grad_y", "expanded_hidden", "hidden", "uses_expanded"),
        ("expanded_x must have a row for every slot, or active_num", "expanded_first", "num_rows", "if_2d"),
        ("expert_num must be that of expanded_x", "expanded_first", "experts_not_negative", "if_experts"),
        (
            "expert_capacity must be that of expanded_x",
            "expanded_second",
            "capacity_not_negative",
            "if_capacity",
        ),
        ("bias must have the experts of the rows", "num_experts", "experts", "bias_if_padded"),
    ),
    """
    # An index is looked up only after its range was checked: Gather wraps -1 to the last row.
    index_free = Cast <to = 7> (expanded_row_idx)
    low = Sub (zero, padded)
    high = Where (is_padded, num_rows, n)
    """,
    is_outside("bad_index", "index_free", "low", "high"),
    check("expanded_row_idx must be in range", "bad_index", before="passed_sizes", after="passed_index"),
    """
    index = Add (index_free, passed_index)
    is_beyond = GreaterOrEqual (index, num_rows)
    row = Where (is_beyond, minus_one, index)
    is_live = GreaterOrEqual (row, zero)
    live_long = Cast <to = 7> (is_live)
    num_live = ReduceSum <keepdims = 1> (live_long)
    """,
    late_sizes("num_live"),
    """
    num_rows_late = Add (num_rows, late_zero)
    rows_and_none = Add (num_rows_late, one)
    n_late = Add (n, late_zero)
    rows_2d = Concat <axis = 0> (num_rows_late, hidden)
    rows_shape = Concat <axis = 0> (num_rows_late, one, hidden)
    """,
    count_up("slot", "n"),
    in_row_order("slot_of_row", "minus_one", "row", "slot", n="num_rows"),
    """
    # Rows that no slot names copy a row of zeros that stands behind the last token.
    some_k = Max (k, one)
    has_no_slot = Less (slot_of_row, zero)
    token_or_none = Div (slot_of_row, some_k)
    token_of_row = Where (has_no_slot, num_tokens, token_or_none)
    # Looked up in the shape of the result, E x C in drop/pad: to reshape the result would copy it.
    experts_capacity_rows = Concat <axis = 0> (experts, capacity, num_rows)
    leading_start = Where (is_padded, zero, two)
    leading_end = Where (is_padded, two, three)
    leading = Slice (experts_capacity_rows, leading_start, leading_end, zero)
    token_of_place = Reshape <allowzero = 1> (token_of_row, leading)
    """,
    with_zero_row("grad_and_zero", "grad_y", "grad_y"),
    """
    grad_expanded_x, grad_scales = If (has_scales_now) <
        then_branch = with_scales () => (scaled_rows, some_grad_scales) {
            row_of_slot = Reshape <allowzero = 1> (row, slots_shape)
            moved = Gather <axis = 0> (grad_and_zero, token_of_place)
            scale = Reshape (scales, minus_one)
            no_scale_f32 = ConstantOfShape (one)
            no_scale = CastLike (no_scale_f32, scales)
            scale_and_none = Concat <axis = 0> (scale, no_scale)
            slot_of_place = Reshape <allowzero = 1> (slot_of_row, leading)
            weight_of_place = Gather <axis = 0> (scale_and_none, slot_of_place)
            weight = Unsqueeze (weight_of_place, minus_one)
            rows_given = Reshape <allowzero = 1> (expanded_x, rows_2d)
            without_bias = Sub (one, has_bias)
            is_unbiased = Cast <to = 9> (without_bias)
    """,
    LONG_ROWS,
    """
            by_matrices = And (is_unbiased, has_long_rows)
    """,
    biases(
        "row_bias",
        "n_late",
        "is_live",
        """
            slot_expert_and_none = Concat <axis = 0> (slot_expert, minus_one)
            bias_at = Gather <axis = 0> (slot_expert_and_none, slot_of_row)""",
    ),
    per_precision(("scaled_rows", "some_grad_scales"), _ROWS),
    """
        },
        else_branch = without_scales () => (copied_rows, absent_grad_scales) {
            copied_rows = Gather <axis = 0> (grad_and_zero, token_of_place)
            absent_grad_scales = Identity (scales)
        }
    >
    """,
)

SPEC = OpSpec(
    name=NAME,
    summary="Gradient of MoeFinalizeRoutingV2 for rows and scales.",
    formula="grad_X[p] = grad_y[i] * scales[i, k];  grad_scales[i, k] = sum over h of "
    "(X[p, h] + bias[expert_idx[i, k], h]) * grad_y[i, h],  p = expanded_row_idx[i*K + k]",
    inputs=(
        Arg("grad_y", "T H", "gradient of the combined tokens", differentiable=True),
        Arg(
            "expanded_row_idx",
            "N",
            "row of each slot, token-major, unique apart from -1: in [0, N), or in [-1, E*C) in drop/pad, "
            "where -1 is a dropped slot; values >= active_num are dropped when active",
            INDICES,
            "I",
        ),
        Arg(
            "expanded_x",
            "N H | A H | E C H",
            "the rows that were combined: dropless, active (active_num > 0), or drop/pad; needed with scales",
            optional=True,
            differentiable=True,
        ),
        SCALES,
        EXPERT_IDX,
        BIAS,
    ),
    outputs=(
        Arg("grad_expanded_x", "N H | A H | E C H", "0 in rows that no slot names"),
        Arg("grad_scales", "T K", "0 for dropped slots", type_var="TP", optional=True),
    ),
    attributes=(
        Attr("drop_pad_mode", "int", "1 for drop/pad", "0 or 1", lambda v: v in (0, 1), 0),
        Attr(
            "active_num",
            "int",
            "rows A when active; 0 is dropless; unused in drop/pad",
            ">= 0",
            lambda v: v >= 0,
            0,
        ),
        Attr(
            "expert_num",
            "int",
            "E in drop/pad; 0 takes it from expanded_x; unused otherwise",
            ">= 0",
            lambda v: v >= 0,
            0,
        ),
        Attr(
            "expert_capacity",
            "int",
            "C in drop/pad; 0 takes it from expanded_x; unused otherwise",
            ">= 0",
            lambda v: v >= 0,
            0,
        ),
    ),
    shapes=_shapes,
    reference=moe_finalize_routing_v2_grad,
    body=BODY,
    source="aclnnMoeFinalizeRoutingV2Grad",
    missing=_missing,
    mixes=_mixes,
    copies_without="scales",
)
