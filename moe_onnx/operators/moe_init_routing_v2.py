"""MoeInitRoutingV2: the dispatch, tokens copied to the rows of their experts in expert order.

Source: aclnnMoeInitRoutingV2, the forward of source document 003.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.errors import AttributeValueError, LimitError
from moe_onnx.operators._arrays import Array, check_range, read
from moe_onnx.operators._body import (
    attribute,
    body,
    check,
    checks,
    count_up,
    flag_squared,
    integer_code,
    is_not_float,
    is_outside,
    precision,
    rank_of,
    sizes_agree,
    with_zero_row,
)
from moe_onnx.spec import INDICES, MAX_ROWS, Arg, Attr, Axes, Dim, OpSpec, TensorInfo

NAME = "MoeInitRoutingV2"


def moe_init_routing_v2(
    x: Any,
    expert_idx: Any,
    *,
    active_num: int = 0,
    expert_capacity: int = 0,
    expert_num: int = 0,
    drop_pad_mode: int = 0,
    expert_tokens_count_or_cumsum_flag: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Copy each token to one row for each of its K experts, rows ordered by expert.

    Signature: [T H], [T K] int32 -> [R H] or [E C H], [T*K] int32, [E] int32?, [E] int32?

    The T*K slots are sorted by expert, stably, so that slots of one expert stay in token order.
    With r the place of slot i*K + k in that order and s its place among the slots of its expert e:

        dropless, active:  expanded_row_idx[i*K + k] = r;  expanded_x[r] = x[i]  for r < R
        drop/pad:          expanded_row_idx[i*K + k] = e*C + s, expanded_x[e, s] = x[i]  for s < C,
                           otherwise -1: the slot is dropped

    Rows of ``expanded_x`` that no slot names are 0.

    Args:
        x: Tokens; float16, bfloat16, float32 (float64 for validation). Copied bit for bit.
        expert_idx: Expert of each slot, int32, >= 0, and < ``expert_num`` where that is given. For
            use with MoeTokenUnpermuteWithRoutingMap a token's experts must ascend.
        active_num: Keep only the first min(active_num, T*K) rows; 0 keeps all. Not in drop/pad.
        expert_capacity: C, rows per expert in drop/pad, 1 <= C <= T (any C >= 1 if T is 0).
        expert_num: E; needed in drop/pad and for the counts.
        drop_pad_mode: 0 dropless or active, 1 drop/pad.
        expert_tokens_count_or_cumsum_flag: 0 none, 1 running sum of slots per expert, 2 slots per
            expert. Dropless and active only.
        expert_tokens_before_capacity_flag: Whether to count slots per expert before any is dropped.
            Drop/pad only.

    Returns:
        ``(expanded_x, expanded_row_idx, expert_tokens_count_or_cumsum,
        expert_tokens_before_capacity)``; the counts are None unless their flag asks for them.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, LimitError,
        IndexValueError.
    """
    (tokens, experts), infos = read(SPEC, x, expert_idx)
    attrs, _ = SPEC.check(
        infos,
        {
            "active_num": active_num,
            "expert_capacity": expert_capacity,
            "expert_num": expert_num,
            "drop_pad_mode": drop_pad_mode,
            "expert_tokens_count_or_cumsum_flag": expert_tokens_count_or_cumsum_flag,
            "expert_tokens_before_capacity_flag": expert_tokens_before_capacity_flag,
        },
    )
    assert tokens is not None and experts is not None
    num_experts, top_k = attrs["expert_num"], experts.shape[1]
    top = num_experts or MAX_ROWS + 1
    check_range(NAME, "expert_idx", experts, 0, top, "an expert, expert_num 0 is any")
    flat = experts.reshape(-1)
    order = np.argsort(flat, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    if not attrs["drop_pad_mode"]:
        rows = min(attrs["active_num"], len(flat)) if attrs["active_num"] else len(flat)
        expanded = tokens[order[:rows] // max(top_k, 1)]
        flag = attrs["expert_tokens_count_or_cumsum_flag"]
        if not flag:
            return expanded, place.astype(np.int32), None, None
        counts: Array = np.bincount(flat, minlength=num_experts)
        asked = np.cumsum(counts) if flag == 1 else counts
        return expanded, place.astype(np.int32), asked.astype(np.int32), None
    capacity = attrs["expert_capacity"]
    counts = np.bincount(flat, minlength=num_experts)
    first = np.cumsum(counts) - counts
    rank = place - first[flat]
    index = np.where(rank < capacity, flat * capacity + rank, -1).astype(np.int32)
    expanded = np.zeros((num_experts * capacity, tokens.shape[1]), tokens.dtype)
    kept = index >= 0
    expanded[index[kept]] = tokens[np.flatnonzero(kept) // max(top_k, 1)]
    before = counts.astype(np.int32) if attrs["expert_tokens_before_capacity_flag"] else None
    return (
        expanded.reshape(num_experts, capacity, -1 if tokens.shape[1] else 0),
        index,
        None,
        before,
    )


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    x, expert_idx = inputs
    assert x is not None and expert_idx is not None
    experts, capacity = attributes["expert_num"], attributes["expert_capacity"]
    padded, flag = (
        attributes["drop_pad_mode"] == 1,
        attributes["expert_tokens_count_or_cumsum_flag"],
    )
    for name, needed in (("expert_num", padded or flag > 0), ("expert_capacity", padded)):
        if needed and attributes[name] < 1:
            why = "with drop_pad_mode 1" if padded else "with expert_tokens_count_or_cumsum_flag > 0"
            raise AttributeValueError(
                f"{NAME}: attribute '{name}' must be > 0 {why}, got {attributes[name]}.", op=NAME
            )
    axes = Axes(NAME)
    axes.read(("x", x, "T H"), ("expert_idx", expert_idx, "T K"))
    tokens, hidden, top_k = axes["T"], axes["H"], axes["K"]
    if padded and isinstance(tokens, int) and capacity > tokens > 0:
        raise LimitError(
            f"{NAME}: expert_capacity must be at most the number of tokens, "
            f"got expert_capacity = {capacity} and T = {tokens}.",
            op=NAME,
        )
    if padded and experts * capacity > MAX_ROWS:
        raise LimitError(
            f"{NAME}: expert_num * expert_capacity must be at most {MAX_ROWS}, as rows are named by int32, "
            f"got {experts} * {capacity}.",
            op=NAME,
        )
    slots: Dim = tokens * top_k if isinstance(tokens, int) and isinstance(top_k, int) else None
    rows: Dim = slots
    if attributes["active_num"]:
        rows = min(attributes["active_num"], slots) if isinstance(slots, int) else None
    shape = (experts, capacity, hidden) if padded else (rows, hidden)
    counts = experts if flag and not padded else 0
    before = experts if padded and attributes["expert_tokens_before_capacity_flag"] else 0
    return [
        TensorInfo(x.dtype, shape),
        TensorInfo("int32", (slots,)),
        TensorInfo("int32", (counts,)),
        TensorInfo("int32", (before,)),
    ]


BODY = body(
    "MoeInitRoutingV2 <active_num: int = 0, expert_capacity: int = 0, expert_num: int = 0,"
    " drop_pad_mode: int = 0, expert_tokens_count_or_cumsum_flag: int = 0,"
    " expert_tokens_before_capacity_flag: int = 0> (x, expert_idx) =>"
    " (expanded_x, expanded_row_idx, expert_tokens_count_or_cumsum, expert_tokens_before_capacity)",
    attribute("active_num"),
    attribute("expert_capacity"),
    attribute("expert_num"),
    attribute("drop_pad_mode"),
    attribute("expert_tokens_count_or_cumsum_flag"),
    attribute("expert_tokens_before_capacity_flag"),
    precision("precision", "x"),
    is_not_float("bad_x_dtype", "precision"),
    integer_code("idx_dtype", "expert_idx"),
    rank_of("x_rank", "x"),
    rank_of("idx_rank", "expert_idx"),
    """
    max_rows = Constant <value_ints = [2147483647]> ()
    bad_active = Less (active_num, zero)
    is_active = Greater (active_num, zero)
    active_end = Where (is_active, active_num, max_rows)
    bad_capacity = Less (expert_capacity, zero)
    experts_below = Less (expert_num, zero)
    experts_above = Greater (expert_num, max_rows)
    bad_experts = Or (experts_below, experts_above)
    # Sizes are made of clamped values only: a runtime folds them before any check can fail.
    experts_not_negative = Max (expert_num, zero)
    experts = Min (experts_not_negative, max_rows)
    capacity_not_negative = Max (expert_capacity, zero)
    capacity = Min (capacity_not_negative, max_rows)
    expert_rows = Mul (experts, capacity)
    rows_above = Greater (expert_rows, max_rows)
    num_rows = Where (rows_above, zero, expert_rows)
    """,
    flag_squared("drop_pad_mode"),
    """
    flag_below = Less (expert_tokens_count_or_cumsum_flag, zero)
    flag_above = Greater (expert_tokens_count_or_cumsum_flag, two)
    bad_flag = Or (flag_below, flag_above)
    """,
    flag_squared("expert_tokens_before_capacity_flag"),
    """
    is_padded = Equal (drop_pad_mode, one)
    not_padded = Not (is_padded)
    has_flag = Greater (expert_tokens_count_or_cumsum_flag, zero)
    needs_experts = Or (is_padded, has_flag)
    no_experts = Less (expert_num, one)
    bad_no_experts = And (needs_experts, no_experts)
    no_capacity = Less (expert_capacity, one)
    bad_no_capacity = And (is_padded, no_capacity)
    num_tokens = Shape <end = 1> (x)
    num_idx = Shape <end = 1> (expert_idx)
    k_or_empty = Shape <start = 1, end = 2> (expert_idx)
    hidden = Shape <start = 1> (x)
    bad_product = And (is_padded, rows_above)
    padded = Cast <to = 7> (is_padded)
    # Without tokens any capacity will do.
    some_tokens = Min (num_tokens, one)
    needed_capacity = Mul (capacity, some_tokens)
    capacity_or_tokens = Max (needed_capacity, num_tokens)
    """,
    checks(
        "passed",
        "zero",
        ("x must be float16, bfloat16, float32 or float64", "bad_x_dtype"),
        ("expert_idx must be int32", "idx_dtype", "int32_code"),
        ("active_num must not be negative", "bad_active"),
        ("expert_capacity must not be negative", "bad_capacity"),
        ("expert_num must be in [0, 2^31)", "bad_experts"),
        ("expert_num * expert_capacity must be below 2^31", "bad_product"),
        ("drop_pad_mode must be 0 or 1", "drop_pad_mode_squared", "drop_pad_mode"),
        ("expert_tokens_count_or_cumsum_flag must be 0, 1 or 2", "bad_flag"),
        (
            "expert_tokens_before_capacity_flag must be 0 or 1",
            "expert_tokens_before_capacity_flag_squared",
            "expert_tokens_before_capacity_flag",
        ),
        ("expert_num must be positive in drop_pad mode and for counts", "bad_no_experts"),
        ("expert_capacity must be positive in drop_pad mode", "bad_no_capacity"),
        ("x must be 2-D", "x_rank", "two"),
        ("expert_idx must be 2-D", "idx_rank", "two"),
    ),
    sizes_agree(
        "passed_sizes",
        "passed",
        ("x and expert_idx must have the same number of tokens", "num_tokens", "num_idx", "one"),
        (
            "expert_capacity must be at most the number of tokens",
            "capacity_or_tokens",
            "num_tokens",
            "padded",
        ),
    ),
    """
    expert_2d = Cast <to = 7> (expert_idx)
    expert_given = Reshape (expert_2d, minus_one)
    has_expert_num = Greater (expert_num, zero)
    no_end = Constant <value_ints = [2147483648]> ()
    expert_end = Where (has_expert_num, expert_num, no_end)
    """,
    is_outside("bad_expert", "expert_given", "zero", "expert_end"),
    check("expert_idx must be in range", "bad_expert", before="passed_sizes", after="passed_expert"),
    """
    expert = Add (expert_given, passed_expert)
    n = Shape (expert)
    # A stable ascending sort: ties go to the lower index.
    sorted_expert, order = TopK <largest = 0> (expert, n)
    """,
    count_up("range", "n"),
    """
    k_and_one = Concat <axis = 0> (k_or_empty, one)
    k = ReduceMax <keepdims = 1> (k_and_one)
    # A size that hangs on the checks: a runtime would make a tensor of it before any of them fails.
    bins_shape = Add (experts, passed_sizes)
    counts = If (needs_experts) <
        then_branch = some_experts () => (bins) {
            empty_bins = Expand (zero, bins_shape)
            ones = Expand (one, n)
            bins = ScatterElements <axis = 0, reduction = "add"> (empty_bins, expert, ones)
        },
        else_branch = any_experts () => (no_bins) { no_bins = Expand (zero, zero) }
    >
    counts_int = Cast <to = 6> (counts)
    expanded_x, expanded_row_idx_long = If (is_padded) <
        then_branch = padded () => (padded_x, padded_index) {
            axis_0 = Constant <value_int = 0> ()
            first = CumSum <exclusive = 1> (counts, axis_0)
            first_of_slot = Gather <axis = 0> (first, sorted_expert)
            rank = Sub (range, first_of_slot)
            is_kept = Less (rank, capacity)
            expert_start = Mul (sorted_expert, capacity)
            row = Add (expert_start, rank)
            row_or_none = Where (is_kept, row, num_rows)
            index_or_dropped = Where (is_kept, row, minus_one)
            no_index = Expand (minus_one, n)
            padded_index = ScatterElements <axis = 0> (no_index, order, index_or_dropped)
            rows_and_none = Add (num_rows, one)
            no_token = Expand (num_tokens, rows_and_none)
            token_of_slot = Div (order, k)
            token_and_none = ScatterElements <axis = 0> (no_token, row_or_none, token_of_slot)
            token_of_row = Slice (token_and_none, zero, num_rows, zero)
            # Unfilled rows copy a row of zeros that stands behind the last token.
    """,
    with_zero_row("x_and_zero", "x", "x"),
    """
            padded_2d = Gather <axis = 0> (x_and_zero, token_of_row)
            padded_shape = Concat <axis = 0> (experts, capacity, hidden)
            padded_x = Reshape <allowzero = 1> (padded_2d, padded_shape)
        },
        else_branch = dropless () => (dropless_x, dropless_index) {
            kept_order = Slice (order, zero, active_end, zero)
            kept_token = Div (kept_order, k)
            dropless_x = Gather <axis = 0> (x, kept_token)
            no_place = Expand (zero, n)
            dropless_index = ScatterElements <axis = 0> (no_place, order, range)
        }
    >
    expanded_row_idx = Cast <to = 6> (expanded_row_idx_long)
    wants_count = And (has_flag, not_padded)
    expert_tokens_count_or_cumsum = If (wants_count) <
        then_branch = count () => (some_counts) {
            is_cumsum = Equal (expert_tokens_count_or_cumsum_flag, one)
            sum_axis = Constant <value_int = 0> ()
            summed = CumSum (counts_int, sum_axis)
            some_counts = Where (is_cumsum, summed, counts_int)
        },
        else_branch = no_count () => (no_counts) { no_counts = Slice (counts_int, zero, zero, zero) }
    >
    has_before = Equal (expert_tokens_before_capacity_flag, one)
    wants_before = And (has_before, is_padded)
    expert_tokens_before_capacity = If (wants_before) <
        then_branch = before () => (some_before) { some_before = Identity (counts_int) },
        else_branch = no_before () => (no_befores) { no_befores = Slice (counts_int, zero, zero, zero) }
    >
    """,
)

_OPTIONAL = "empty, or None in Python, unless its flag asks for it in its mode"

SPEC = OpSpec(
    name=NAME,
    summary="Dispatch: copies each token to a row for each of its K experts, in expert order.",
    formula="expanded_x[expanded_row_idx[i*K + k]] = x[i]",
    inputs=(
        Arg("x", "T H", "tokens", differentiable=True),
        Arg("expert_idx", "T K", "expert of each slot, in [0, expert_num)", INDICES, "I"),
    ),
    outputs=(
        Arg(
            "expanded_x",
            "R H | E C H",
            "rows by expert; 0 where no slot fills a row",
            differentiable=True,
        ),
        Arg("expanded_row_idx", "N", "row of each slot, token-major; -1 is dropped", INDICES, "I"),
        Arg(
            "expert_tokens_count_or_cumsum",
            "E",
            f"slots per expert; {_OPTIONAL}",
            INDICES,
            "I",
            optional=True,
        ),
        Arg(
            "expert_tokens_before_capacity",
            "E",
            f"slots per expert; {_OPTIONAL}",
            INDICES,
            "I",
            optional=True,
        ),
    ),
    attributes=(
        Attr(
            "active_num",
            "int",
            "rows to keep, 0 keeps all; not in drop/pad",
            ">= 0",
            lambda v: v >= 0,
            0,
        ),
        Attr("expert_capacity", "int", "C, rows per expert in drop/pad", ">= 0", lambda v: v >= 0, 0),
        Attr(
            "expert_num",
            "int",
            "E; needed in drop/pad and for counts",
            "in [0, 2^31)",
            lambda v: 0 <= v <= MAX_ROWS,
            0,
        ),
        Attr("drop_pad_mode", "int", "1 for drop/pad", "0 or 1", lambda v: v in (0, 1), 0),
        Attr(
            "expert_tokens_count_or_cumsum_flag",
            "int",
            "1 running sum, 2 counts; not in drop/pad",
            "0, 1 or 2",
            lambda v: v in (0, 1, 2),
            0,
        ),
        Attr(
            "expert_tokens_before_capacity_flag",
            "bool",
            "whether to count slots per expert; drop/pad only",
            "0 or 1",
            lambda v: v in (0, 1),
            0,
        ),
    ),
    shapes=_shapes,
    reference=moe_init_routing_v2,
    body=BODY,
    source="aclnnMoeInitRoutingV2",
    gradient="MoeInitRoutingV2Grad",
)
