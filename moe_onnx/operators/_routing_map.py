"""What the routing-map operators share: which cell of ``[T, E]`` each slot and each row stands for.

A *cell* is ``t*E + e``, the flat position of token t and expert e in the map and in ``probs``.
"""

from __future__ import annotations

import numpy as np

from moe_onnx.errors import LimitError, MissingInputError, RoutingMapError, ShapeError
from moe_onnx.operators._arrays import Array
from moe_onnx.operators._body import check, coordinates
from moe_onnx.spec import Attr, Axes, Shape, TensorInfo, require_same_dtype, show

MAX_TOP_K = 512  # both source documents' limit on experts per token
DROP_AND_PAD = Attr(
    "drop_and_pad", "bool", "whether every expert has exactly C rows", "0 or 1", lambda v: v in (0, 1), 0
)


def require_companions(op: str, **companions: bool) -> None:
    """With probs, the named inputs must be there too (561002 in the source document)."""
    for name, is_there in companions.items():
        if not is_there:
            raise MissingInputError(
                f"{op}: '{name}' is missing although 'probs' is given. Pass it, or leave out 'probs'.",
                op=op,
                aclnn_status=561002,
            )


def check_probs_dtype(op: str, tokens: str, tokens_info: TensorInfo, probs: TensorInfo) -> None:
    """``probs`` has the dtype of the tokens, or is float32 beside bfloat16 tokens."""
    if (tokens_info.dtype, probs.dtype) != ("bfloat16", "float32"):
        also = ", or be float32 beside bfloat16"
        require_same_dtype(op, tokens, tokens_info.dtype, "probs", probs.dtype, also)


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
    rows_bfloat16 = Equal (precision, zero)
    probs_float32 = Equal (probs_precision, two)
    probs_mixed = And (rows_bfloat16, probs_float32)
    good_probs_dtype = Or (probs_same, probs_mixed)
    bad_probs_dtype = Not (good_probs_dtype)
"""

# ONNX text for check_restore_shape: bad_restore, from the sizes restore (any number) and restored (two).
RESTORE_SHAPE = """
    restore_len = Shape (restore)
    no_restore = Equal (restore_len, zero)
    good_len = Equal (restore_len, two)
    restore_long = Concat <axis = 0> (restore, restored, restored)
    restore_head = Slice (restore_long, zero, two, zero)
    restored_head = Slice (restored, zero, two, zero)
    equal_sizes = Equal (restore_head, restored_head)
    equal_long = Cast <to = 7> (equal_sizes)
    all_equal = ReduceMin <keepdims = 1> (equal_long)
    good_sizes = Equal (all_equal, one)
    good_restore = And (good_len, good_sizes)
    right_restore = Or (no_restore, good_restore)
    bad_restore = Not (right_restore)
"""

# ONNX text for slot_cells and row_cells. They read selected [T, E], num_experts, num_cells and
# whether their form is asked for (is_slot_form, is_row_form); a slot
# or row without a pair has the cell num_cells = T*E, one past the last.
SLOT_CELLS = (
    """
    axis_1 = Constant <value_int = 1> ()
    selected_int = Cast <to = 6> (selected)
    running_int = CumSum (selected_int, axis_1)
    running = Cast <to = 7> (running_int)
"""
    + coordinates("pair_token", "pair_expert", "selected")
    + """
    pair_start = Mul (pair_token, num_experts)
    pair_cell = Add (pair_start, pair_expert)
    running_flat = Reshape (running, minus_one)
    pair_count = Gather <axis = 0> (running_flat, pair_cell)
    above_k = Greater (pair_count, k)
    too_many_experts = And (above_k, is_slot_form)
"""
    + check(
        "routing_map must select at most top_k experts per token",
        "too_many_experts",
        before="zero",
        after="passed_counts",
    )
    + """
    pair_rank = Sub (pair_count, one)
    pair_slot_start = Mul (pair_token, k)
    pair_slot_free = Add (pair_slot_start, pair_rank)
    pair_slot_checked = Add (pair_slot_free, passed_counts)
    pair_slot = Where (above_k, n, pair_slot_checked)
    slots_and_none = Add (n, one)
    no_slot_cell = Expand (num_cells, slots_and_none)
    slot_cell_and_none = ScatterElements <axis = 0> (no_slot_cell, pair_slot, pair_cell)
    slot_cell_of_slot = Slice (slot_cell_and_none, zero, n, zero)
"""
)
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
    too_many_pairs = And (above_n, is_row_form)
"""
    + check(
        "routing_map must select at most N pairs",
        "too_many_pairs",
        before="zero",
        after="passed_pairs",
    )
    + """
    num_left = Sub (n, num_pairs)
    num_without = Max (num_left, zero)
    num_without_and_none = Add (num_without, one)
    without_pair_free = Add (num_cells, passed_pairs)
    without_pair = Expand (without_pair_free, num_without_and_none)
    cell_of_row_or_none = Concat <axis = 0> (cell_of_row_free, without_pair)
"""
)
