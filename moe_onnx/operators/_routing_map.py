"""What the routing-map operators share: which cell of ``[T, E]`` each slot and each row stands for.

A *cell* is ``t*E + e``, the flat position of token t and expert e in the map and in ``probs``.
"""

from __future__ import annotations

import numpy as np

from moe_onnx.errors import LimitError, MissingInputError, RoutingMapError, ShapeError
from moe_onnx.operators._arrays import Array
from moe_onnx.operators._body import check, coordinates, count_up, lookup
from moe_onnx.spec import MAX_ROWS, MAX_TOP_K, Attr, Axes, Shape, TensorInfo, require_same_dtype, show

DROP_AND_PAD = Attr(
    "drop_and_pad", "bool", "whether every expert has exactly C rows", "0 or 1", lambda v: v in (0, 1), 0
)


def size_attribute(name: str, doc: str) -> Attr:
    """An attribute that is a size, where 0 means that it is told by other sizes."""
    return Attr(name, "int", doc, "in [0, 2^31)", lambda v: 0 <= v <= MAX_ROWS, 0)


def require_companions(op: str, beside: str = "probs", **companions: bool) -> None:
    """With ``beside``, the named inputs must be there too (561002 in the source documents)."""
    for name, is_there in companions.items():
        if not is_there:
            raise MissingInputError(
                f"{op}: '{name}' is missing although '{beside}' is given. Pass it, or leave out '{beside}'.",
                op=op,
                aclnn_status=561002,
            )


def check_probs_dtype(
    op: str, tokens: str, tokens_info: TensorInfo, probs: TensorInfo, name: str = "probs"
) -> None:
    """``probs`` (called ``name``) has the dtype of the tokens, or is float32 beside bfloat16 tokens."""
    if (tokens_info.dtype, probs.dtype) != ("bfloat16", "float32"):
        also = ", or be float32 beside bfloat16"
        require_same_dtype(op, tokens, tokens_info.dtype, name, probs.dtype, also)


def check_limits(op: str, axes: Axes, padded: bool) -> None:
    """``top_k <= 512`` and ``top_k <= E`` without padding, ``C <= T`` with it."""
    top_k, capacity, experts, tokens = axes["K"], axes["C"], axes["E"], axes["T"]
    if padded:
        if isinstance(capacity, int) and isinstance(tokens, int) and capacity > tokens:
            raise LimitError(
                f"{op}: expert capacity C = N / E must be at most the number of tokens, "
                f"got C = {capacity} and T = {tokens}.",
                op=op,
            )
        return
    if isinstance(top_k, int):
        if top_k > MAX_TOP_K:
            raise LimitError(f"{op}: top_k = N / T must be at most {MAX_TOP_K}, got {top_k}.", op=op)
        if isinstance(experts, int) and top_k > experts:
            raise LimitError(
                f"{op}: top_k = N / T must be at most the number of experts, "
                f"got top_k = {top_k} and E = {experts}.",
                op=op,
            )


def slot_cells(op: str, routing_map: Array, top_k: int) -> Array:
    """Cell of each slot, ``[T*top_k]``: slot (t, k) stands for the k-th selected expert of t.

    Experts ascend. -1 where a token has no k-th expert.
    """
    selected = routing_map != 0
    counts = selected.sum(axis=1)
    if (counts > top_k).any():
        token = int((counts > top_k).argmax())
        raise RoutingMapError(
            f"{op}: 'routing_map' may select at most top_k = N / T = {top_k} experts per token, "
            f"got {int(counts[token])} for token {token}.",
            op=op,
        )
    tokens, experts = np.nonzero(selected)  # token by token, experts ascending
    rank = np.cumsum(selected, axis=1)[tokens, experts] - 1
    cells = np.full(len(selected) * top_k, -1, np.int64)
    cells[tokens * top_k + rank] = tokens * selected.shape[1] + experts
    return cells


def row_cells(op: str, routing_map: Array, num_rows: int) -> Array:
    """Cells in the order of rows: selected (expert, token) pairs by expert, then token."""
    experts, tokens = np.nonzero((routing_map != 0).T)
    if len(experts) > num_rows:
        raise RoutingMapError(
            f"{op}: 'routing_map' may select at most N = {num_rows} (expert, token) pairs, "
            f"got {len(experts)}.",
            op=op,
        )
    cells: Array = tokens * routing_map.shape[1] + experts
    return cells


def check_restore_shape(op: str, restore: tuple[int, ...] | None, name: str, shape: Shape) -> None:
    """``restore_shape``, where given, is the shape of the unpermuted tensor."""
    if not restore or shape is None:
        return
    known = [a for a in zip(restore, shape, strict=False) if isinstance(a[1], int)]
    if len(restore) != len(shape) or any(a != b for a, b in known):
        raise ShapeError(
            f"{op}: attribute 'restore_shape' must be the shape of '{name}', {show(shape)}, "
            f"got {list(restore)}.",
            op=op,
        )


# ONNX text for check_probs_dtype: bad_probs_dtype, from two precisions (0 is bfloat16, 2 float32).
BAD_PROBS_DTYPE = """
    probs_same = Equal (precision, probs_precision)
    rows_bfloat16 = Equal (precision, bfloat16_code)
    probs_float32 = Equal (probs_precision, float32_code)
    probs_mixed = And (rows_bfloat16, probs_float32)
    good_probs_dtype = Or (probs_same, probs_mixed)
    bad_probs_dtype = Not (good_probs_dtype)
"""

# ONNX text for check_restore_shape, from restore (any number of sizes): bad_restore, for lengths other than 0
# and 2 and sizes below 0; has_restore, restore_tokens and restore_hidden, for sizes_agree.
RESTORE_SHAPE = """
    restore_len = Shape (restore)
    restore_padded = Concat <axis = 0> (restore, zero, zero)
    restore_head = Slice (restore_padded, zero, two, zero)
    restore_sizes = Max (restore_head, zero)
    restore_least = ReduceMin <keepdims = 1> (restore_head)
    restore_negative = Less (restore_least, zero)
    restore_wrong = BitwiseXor (restore_len, two)
    restore_misfit = Min (restore_len, restore_wrong)
    restore_bad_len = Greater (restore_misfit, zero)
    bad_restore = Or (restore_bad_len, restore_negative)
    has_restore = Min (restore_len, one)
    restore_tokens = Slice (restore_sizes, zero, one, zero)
    restore_hidden = Slice (restore_sizes, one, two, zero)
"""

# ONNX text for slot_cells, by [T, K] instead of by cell. It reads selected [T, E] as 0 and 1, their sum
# num_selected, k, which must have been checked, and late_zero, because runtimes hold a k known at load
# against the experts even where probs are absent. TopK takes equal ones by their position, so expert
# holds the selected experts of each token, ascending, then others, for which has_expert is 0.
SLOT_EXPERTS = """
    k_late = Add (k, late_zero)
    has_expert, expert = TopK <axis = 1> (selected, k_late)
    num_found = ReduceSum <keepdims = 0> (has_expert)
    not_found = BitwiseXor (num_selected, num_found)
""" + lookup("routing_map must select at most top_k experts per token", "not_found", "zero", "passed_experts")

# ONNX text for row_cells: cell_of_row_or_none, at least n cells and behind them num_cells = T*E for none.
# It reads selected, num_experts, num_cells and not_padded; padded rows do not ask the map.
ROW_CELLS = (
    """
    selected_by_expert = Transpose <perm = [1, 0]> (selected)
"""
    + coordinates("row_expert", "row_token", "selected_by_expert")
    + """
    row_start = Mul (row_token, num_experts)
    cell_of_row_free = Add (row_start, row_expert)
    num_pairs = Shape (cell_of_row_free)
    above_n = Greater (num_pairs, n)
    too_many_pairs = And (above_n, not_padded)
"""
    + check("routing_map must select at most N pairs", "too_many_pairs", before="zero", after="passed_pairs")
    + """
    num_left = Sub (n, num_pairs)
    num_without = Max (num_left, zero)
    num_without_and_none = Add (num_without, one)
    without_pair_free = Add (num_cells, passed_pairs)
    without_pair = Expand (without_pair_free, num_without_and_none)
    cell_of_row_or_none = Concat <axis = 0> (cell_of_row_free, without_pair)
"""
)

# What the rules on sizes compare.
SIZES = """
    some_tokens = Max (num_tokens, one)
    k_free = Div (n, some_tokens)
    token_rows = Mul (k_free, num_tokens)
    some_experts = Max (num_experts, one)
    capacity = Div (n, some_experts)
    expert_rows = Mul (capacity, num_experts)
"""

# The rule on top_k: k_or_limit is k_limit where it holds.
TOP_K_LIMIT = """
    max_top_k = Constant <value_ints = [512]> ()
    k_limit = Min (num_experts, max_top_k)
    k_or_limit = Max (k_free, k_limit)
"""

# The rule on the capacity: capacity_or_tokens is num_tokens where it holds.
CAPACITY_LIMIT = """
    capacity_or_tokens = Max (capacity, num_tokens)
"""

# The map as 0 and 1.
SELECTED = """
    selected_bool = Cast <to = 9> (routing_map)
    selected = Cast <to = 7> (selected_bool)
"""

# How many experts the map selects for each token.
NUM_SELECTED = """
    num_selected = ReduceSum <keepdims = 0> (selected)
"""


def padded_cells(out: str, token: str) -> str:
    """``out`` is the cell of each padded row, of expert i / C and the token that ``token`` says."""
    return (
        count_up("slot", "n")
        + f"""
    some_capacity = Max (capacity, one)
    {out}_expert = Div (slot, some_capacity)
    {out}_start = Mul ({token}, num_experts)
    {out} = Add ({out}_start, {out}_expert)
"""
    )


# ONNX text for the probability of each row, row_prob, from row_cell_all, where num_cells is none: 0 for none,
# and for all without probs.
ROW_PROB = """
    is_weighted = Cast <to = 9> (has_probs)
    probs_flat = Reshape (probs, minus_one)
    no_prob_f32 = ConstantOfShape (one)
    no_prob = CastLike (no_prob_f32, probs)
    probs_and_none = Concat <axis = 0> (probs_flat, no_prob)
    row_cell = Where (is_weighted, row_cell_all, minus_one)
    row_prob = Gather <axis = 0> (probs_and_none, row_cell)
"""

# ONNX text for last_slot, the last of the slots that stand for each cell, -1 for none. It reads cell, one for
# each slot, where num_cells is none.
LAST_SLOT = """
    cells_and_none = Add (num_cells, one)
    no_slot = Expand (minus_one, cells_and_none)
    last_slot_and_none = ScatterElements <axis = 0, reduction = "max"> (no_slot, cell, slot)
    last_slot = Slice (last_slot_and_none, zero, num_cells, zero)
"""

# ONNX text for padded rows that are added to their tokens. TOKEN_ROWS reads index, n, num_tokens and
# late_zero: sorted_token and order are its stable sort, in which the rows of a token lie side by side.
# ADD_TO_TOKENS, for per_precision, adds to each of the $added rows the one behind it, then the sum two places
# on, then four, as long as that is of the same token: the first of a token's rows then holds their sum,
# $sum. There are as many turns as the logarithm of the most rows of a token. (ScatterElements goes element
# by element and takes several times as long.) Sizes are known late: an Expand to a known size of 0 is taken
# for one that does nothing, and left out. The loop is handed what it reads: where a runtime inlines the
# branch round it, it renames what is in the branch, but not what a loop in it names.
TOKEN_ROWS = (
    """
    n_late = Add (n, late_zero)
    tokens_late = Add (num_tokens, late_zero)
    sorted_token, order = TopK <largest = 0> (index, n_late)
    one_each = Expand (one, n_late)
    none_yet = Expand (zero, tokens_late)
    rows_of_token = ScatterElements <axis = 0, reduction = "add"> (none_yet, index, one_each)
    token_axis = Constant <value_int = 0> ()
    token_end = CumSum (rows_of_token, token_axis)
    token_start = Sub (token_end, rows_of_token)
    has_no_row = Equal (rows_of_token, zero)
    first_or_none = Where (has_no_row, minus_one, token_start)
    end_of_place = Gather <axis = 0> (token_end, sorted_token)
    end_or_none = Concat <axis = 0> (end_of_place, zero)
    num_places = Add (n_late, one)
    most_turns = Constant <value_int = 63> ()
"""
    + count_up("place", "num_places")
    + """
    next_place = Add (place, one)
    is_next_own = Less (next_place, end_or_none)
    next_own_long = Cast <to = 7> (is_next_own)
    any_next_long = ReduceMax <keepdims = 0> (next_own_long)
    any_next = Cast <to = 9> (any_next_long)
"""
)
ADD_TO_TOKENS = """
    $in_order = Gather <axis = 0> ($added, order)
    $zero_shape = Concat <axis = 0> (one, hidden)
    $zero_f32 = ConstantOfShape ($zero_shape)
    $zero_row = Cast <to = $DTYPE> ($zero_f32)
    $start = Concat <axis = 0> ($in_order, $zero_row)
    $stride, $places, $ends, $sums = Loop (most_turns, any_next, one, place, end_or_none, $start) <
        body = $double (int64 $turn, bool $go, $far, $here, $end, $partial)
            => (bool $go_on, $farther, $same_here, $same_end, $more) {
            $unit = Constant <value_ints = [1]> ()
            $other = Add ($here, $far)
            $is_own = Less ($other, $end)
            $own_long = Cast <to = 7> ($is_own)
            # -1, the row of zeros, where the place that far on is of another token.
            $other_plus_one = Add ($other, $unit)
            $own_plus_one = Mul ($other_plus_one, $own_long)
            $other_or_none = Sub ($own_plus_one, $unit)
            $moved = Gather <axis = 0> ($partial, $other_or_none)
            $more = Add ($partial, $moved)
            $farther = Add ($far, $far)
            $same_here = Identity ($here)
            $same_end = Identity ($end)
            $next = Add ($here, $farther)
            $is_next_own = Less ($next, $end)
            $next_own_long = Cast <to = 7> ($is_next_own)
            $any_next_own = ReduceMax <keepdims = 0> ($next_own_long)
            $go_on = Cast <to = 9> ($any_next_own)
        }>
    $sum = Gather <axis = 0> ($sums, first_or_none)
"""
