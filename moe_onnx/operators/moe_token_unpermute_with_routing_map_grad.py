"""MoeTokenUnpermuteWithRoutingMapGrad: the gradient of the combine, for rows and for probabilities.

Source: aclnnMoeTokenUnpermuteWithRoutingMapGrad (source document 000).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_onnx.errors import ShapeError
from moe_onnx.operators._arrays import Array, check_range, check_unique, given, read, wide_dtype
from moe_onnx.operators._body import (
    attribute,
    body,
    check,
    checks,
    count_up,
    is_not,
    is_not_float,
    is_not_int32,
    is_not_map,
    is_not_rank,
    is_outside,
    per_precision,
    precision,
    with_zero_row,
)
from moe_onnx.operators._routing_map import (
    BAD_PROBS_DTYPE,
    DROP_AND_PAD,
    RESTORE_SHAPE,
    ROW_CELLS,
    SLOT_CELLS,
    check_limits,
    check_probs_dtype,
    check_restore_shape,
    require_companions,
    row_cells,
    slot_cells,
)
from moe_onnx.spec import (
    INDICES,
    MAPS,
    Arg,
    Attr,
    Axes,
    OpSpec,
    TensorInfo,
    presence,
    require_same_dtype,
    show,
)

NAME = "MoeTokenUnpermuteWithRoutingMapGrad"


@dataclass(frozen=True)
class Plan:
    """A checked call: in slot order, ``row[j]`` of the result is ``grad[token[j]]``.

    With probs, times ``probs.flat[cell[j]]``; ``cell`` and ``permuted_tokens`` are None without.
    Slots that move nothing are left out, so rows that are not in ``row`` are 0.
    """

    grad: Array
    num_rows: int
    row: Array
    token: Array
    cell: Array | None
    permuted_tokens: Array | None
    probs: Array | None


def moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Any,
    out_index: Any,
    permute_token_id: Any,
    routing_map: Any = None,
    permuted_tokens: Any = None,
    probs: Any = None,
    *,
    drop_and_pad: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Array, Array | None]:
    """Gradient of MoeTokenUnpermuteWithRoutingMap with respect to rows and probabilities.

    Signature: [T H], [N], [N], [T E]?, [N H]?, [T E]? -> [N H], [T E]?

        G[p] = dY[t] * probs[t, e]          (dY[t] without probs, bit for bit)
        Q[t, e] = sum over h of P[p, h] * dY[t, h]

    for every slot i with p = out_index[i] that is not -1. Which (t, e) a slot stands for:

    * ``drop_and_pad``: t = permute_token_id[i], e = p // C with C = N // E. If two slots name one
      (t, e), the last one gives Q.
    * otherwise, *slot form*, iff permute_token_id equals out_index element for element (both are the
      forward's sorted indices): t = i // K, e the (i % K)-th selected expert of t, ascending, with
      K = N // T.
    * otherwise, *row form*: t = permute_token_id[i], and (t', e) the p-th of the pairs that the map
      selects, ordered by expert, then token.

    Rows that no slot names, slots without an expert and rows past the selected pairs are exactly 0,
    as are cells of Q that no slot stands for. Products and sums are made in float32 (float64 for
    float64) and rounded once.

    Args:
        unpermuted_tokens_grad: dY; float16, bfloat16, float32 (float64 for validation).
        out_index: int32, unique apart from -1, in ``[-1, N)``; a permutation when padded.
        permute_token_id: int32 in ``[0, T)``; not read where out_index is -1.
        routing_map: bool or int8, non-zero selects. Needed with probs.
        permuted_tokens: P, dtype of dY. Needed with probs. Without padding it may hold only as many
            rows as the map selects, if no slot names a later one.
        probs: Dtype of dY, or float32 beside bfloat16. None or of shape (0, 0) is absent.
        drop_and_pad: Whether every expert has exactly C rows.
        restore_shape: The shape of dY; checked when padded, otherwise unused.

    Returns:
        ``(permuted_tokens_grad, probs_grad)``, G and Q; Q in the dtype of probs, None without.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, LimitError,
        IndexValueError, RoutingMapError.
    """
    plan = prepare(
        unpermuted_tokens_grad,
        out_index,
        permute_token_id,
        routing_map,
        permuted_tokens,
        probs,
        drop_and_pad=drop_and_pad,
        restore_shape=restore_shape,
    )
    grad = np.zeros((plan.num_rows, plan.grad.shape[1]), plan.grad.dtype)
    if plan.probs is None or plan.permuted_tokens is None:
        grad[plan.row] = plan.grad[plan.token]
        return grad, None
    wide = wide_dtype(plan.grad.dtype)
    probs_grad = np.zeros(plan.probs.shape, plan.probs.dtype)
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        moved = plan.grad[plan.token].astype(wide)
        weight = plan.probs.reshape(-1)[plan.cell].astype(wide)
        grad[plan.row] = (moved * weight[:, None]).astype(grad.dtype)
        dots = (moved * plan.permuted_tokens[plan.row].astype(wide)).sum(axis=1)
        # Numpy keeps the last of several values for one place, as the contract wants it.
        probs_grad.reshape(-1)[plan.cell] = dots.astype(probs_grad.dtype)
    return grad, probs_grad


def prepare(*inputs: Any, **attributes: Any) -> Plan:
    """Check a call completely and give it in the form that kernels work on."""
    arrays, infos = read(SPEC, *inputs)
    if (routing_map := arrays[3]) is not None and routing_map.dtype in (np.bool_, np.int8):
        selected = int(np.count_nonzero(routing_map))
        infos[3] = TensorInfo(routing_map.dtype.name, routing_map.shape, selected)
    attrs, _ = SPEC.check(infos, attributes)
    grad, index, token, routing_map, permuted, probs = arrays
    assert grad is not None and index is not None and token is not None
    tokens, rows, padded = len(grad), len(index), bool(attrs["drop_and_pad"])
    probs = given(probs)
    if probs is None:
        permuted = given(permuted)  # beside probs (0, 0) may be its required shape
    mode = "drop_and_pad" if padded else "-1 skips the slot"
    check_range(NAME, "out_index", index, 0 if padded else -1, rows, mode)
    check_unique(NAME, "out_index", index, "two slots cannot write one row")
    named = index >= 0
    slot_form = not padded and np.array_equal(index, token)
    if slot_form:
        token = np.arange(rows) // max(rows // max(tokens, 1), 1)
    else:
        # A skipped slot's token is not read, so whatever stands there is right.
        check_range(NAME, "permute_token_id", np.where(named, token, 0), 0, max(tokens, 1), "a token")
    if permuted is not None and not padded and (index >= len(permuted)).any():
        raise ShapeError(
            f"{NAME}: 'permuted_tokens' must have N = {rows} rows, or as many as 'routing_map' selects "
            f"when 'out_index' names no later one, got shape {list(permuted.shape)} and row "
            f"{int(index.max())}.",
            op=NAME,
        )
    if probs is None:
        return Plan(grad, rows, index[named], token[named], None, None, None)
    assert routing_map is not None and permuted is not None
    experts = probs.shape[1]
    if padded:
        cell = token.astype(np.int64) * experts + index // max(rows // max(experts, 1), 1)
    elif slot_form:
        cell = slot_cells(NAME, routing_map, rows // max(tokens, 1))
    else:
        cells = row_cells(NAME, routing_map, rows)
        cell = np.append(cells, np.full(rows - len(cells), -1))[index]
    live = named & (cell >= 0)
    return Plan(grad, rows, index[live], token[live], cell[live], permuted, probs)


def _check_rows(axes: Axes, permuted: TensorInfo | None, routing_map: TensorInfo | None) -> None:
    """Unpadded, P has a row for every slot, or one for every pair that the map selects."""
    rows, slots = axes["P"], axes["N"]
    if permuted is None or not (isinstance(rows, int) and isinstance(slots, int)) or rows == slots:
        return
    # Fewer rows can be told to be wrong only where the map's values are known, or there is no map.
    if routing_map is None or (routing_map.shape == (0, 0) and axes["T"] != 0):
        selected: int | None = slots
    else:
        selected = routing_map.selected
    if rows > slots or selected not in (None, rows):
        raise ShapeError(
            f"{NAME}: 'permuted_tokens' must have N = {slots} rows, or as many as 'routing_map' selects "
            f"({'unknown' if selected is None else selected}) when 'out_index' names no later one, "
            f"got shape {show(permuted.shape or ())}.",
            op=NAME,
        )


def _missing(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> None:
    grad, _, _, routing_map, permuted, probs = inputs
    there = presence(probs)
    if grad is None or there is False:
        return
    hidden = None if grad.shape is None or not grad.shape else grad.shape[-1]
    # A map of shape (0, 0) beside present probs is never the required [T, E]; P may be, if H is 0.
    # Where it is not known whether probs is empty, only inputs that are not even named are missing.
    empty_map = there and routing_map is not None and routing_map.shape == (0, 0)
    empty_rows = there and permuted is not None and permuted.shape == (0, 0) and hidden != 0
    require_companions(
        NAME,
        routing_map=routing_map is not None and not empty_map,
        permuted_tokens=permuted is not None and not empty_rows,
    )


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    grad, _, _, _, permuted, probs = inputs
    assert grad is not None
    if permuted is not None and presence(permuted) is not False:
        require_same_dtype(NAME, "unpermuted_tokens_grad", grad.dtype, "permuted_tokens", permuted.dtype)
    if probs is not None and presence(probs) is not False:
        check_probs_dtype(NAME, "unpermuted_tokens_grad", grad, probs)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    grad, index, token, routing_map, permuted, probs = inputs
    assert grad is not None and index is not None
    present = presence(probs) is not False
    padded = bool(attributes["drop_and_pad"])
    axes = Axes(NAME)
    axes.read(
        ("unpermuted_tokens_grad", grad, "T H"),
        ("out_index", index, "N"),
        ("permute_token_id", token, "N"),
        ("routing_map", _given(routing_map, present), "T E"),
        ("permuted_tokens", _given(permuted, present), "N H" if padded else "P H"),
        ("probs", probs if present else None, "T E"),
    )
    if padded:
        check_restore_shape(NAME, attributes["restore_shape"], "unpermuted_tokens_grad", grad.shape)
        slots = axes["N"]
        if axes["T"] == 0 and isinstance(slots, int) and slots:
            raise ShapeError(f"{NAME}: without tokens 'out_index' must be empty, got {slots} slots.", op=NAME)
        if present:
            axes.bind("C", axes.divide("N", axes["E"], "the number of experts"), "N / E")
    else:
        axes.bind("K", axes.divide("N", axes["T"], "the number of tokens"), "N / T")
        _check_rows(axes, _given(permuted, present), routing_map)
    if present:
        check_limits(NAME, axes, padded)
    rows_grad = TensorInfo(grad.dtype, (axes["N"], axes["H"]))
    if probs is None:
        return [rows_grad, None]
    shape = (axes["T"], axes["E"]) if presence(probs) else probs.shape
    return [rows_grad, TensorInfo(probs.dtype, shape)]


def _given(info: TensorInfo | None, present: bool) -> TensorInfo | None:
    # The six-input form has empty constants where companions are absent.
    return info if present or presence(info) is not False else None


# The part that touches whole rows, once per precision.
_ROWS = """
    $grad = Cast <to = $DTYPE> (moved)
    $weight = Cast <to = $DTYPE> (weight)
    $product = Mul ($grad, $weight)
    $rows_out = CastLike ($product, unpermuted_tokens_grad)
    $permuted = Cast <to = $DTYPE> (permuted_rows)
    $head = Slice ($grad, zero, num_permuted, zero)
    $pairs = Mul ($head, $permuted)
    $dots = ReduceSum <keepdims = 0> ($pairs, one)
    $zero_f32 = ConstantOfShape (one)
    $zero_dot = Cast <to = $DTYPE> ($zero_f32)
    $dots_zero = Concat <axis = 0> ($dots, $zero_dot)
    $cells = Gather <axis = 0> ($dots_zero, cell_row)
    $cells_out = CastLike ($cells, probs)
"""

_WITH_PROBS = (
    is_not("bad_probs_tokens", "probs_tokens", "num_tokens"),
    is_not("bad_map_experts", "map_experts", "num_experts"),
    """
    cells_shape = Concat <axis = 0> (num_tokens, num_experts)
    some_experts = Max (num_experts, one)
    capacity = Div (n, some_experts)
    expert_rows = Mul (capacity, num_experts)
    """,
    is_not("uneven_experts", "expert_rows", "n"),
    """
    bad_experts = And (is_padded, uneven_experts)
    capacity_above = Greater (capacity, num_tokens)
    bad_capacity = And (is_padded, capacity_above)
    max_top_k = Constant <value_ints = [512]> ()
    k_above = Greater (k, max_top_k)
    bad_k = And (not_padded, k_above)
    k_many = Greater (k, num_experts)
    bad_k_experts = And (not_padded, k_many)
    """,
    checks(
        "passed_sizes",
        "passed",
        ("probs must be [T, E]", "bad_probs_tokens"),
        ("routing_map must be [T, E]", "bad_map_experts"),
        ("experts must divide the length of out_index when padded", "bad_experts"),
        ("top_k must be at most 512", "bad_k"),
        ("top_k must be at most the number of experts", "bad_k_experts"),
        ("capacity must be at most the number of tokens", "bad_capacity"),
    ),
    """
    num_cells_free = ReduceProd <keepdims = 1> (cells_shape)
    num_cells = Add (num_cells_free, passed_sizes)
    some_capacity = Max (capacity, one)
    slot_expert = Div (index, some_capacity)
    token_start = Mul (token, num_experts)
    padded_cell = Add (token_start, slot_expert)
    not_slot_form = Not (is_slot_form)
    is_row_form = And (not_padded, not_slot_form)
    """
    + SLOT_CELLS
    + ROW_CELLS
    + """
    # All three forms are made, and one is taken: runtimes stumble over branches in branches.
    row_form_cell = Gather <axis = 0> (cell_of_row_or_none, row)
    unpadded_cell = Where (is_slot_form, slot_cell_of_slot, row_form_cell)
    slot_cell = Where (is_padded, padded_cell, unpadded_cell)
    # Slots without a cell name no row: that row stays zero even where dY is NaN.
    has_cell = Less (slot_cell, num_cells)
    live_row = Where (has_cell, row, n)
    is_live = Less (live_row, n)
    live_cell = Where (is_live, slot_cell, num_cells)
    rows_and_none = Add (n, one)
    all_none_token = Expand (num_tokens, rows_and_none)
    token_of_row_and_none = ScatterElements <axis = 0> (all_none_token, live_row, token)
    token_of_row = Slice (token_of_row_and_none, zero, n, zero)
    all_none_cell = Expand (num_cells, rows_and_none)
    cell_of_row_and_none = ScatterElements <axis = 0> (all_none_cell, live_row, live_cell)
    cell_of_row = Slice (cell_of_row_and_none, zero, n, zero)
    # If two slots stand for one cell, the last one counts.
    cells_and_none = Add (num_cells, one)
    no_slot = Expand (minus_one, cells_and_none)
    last_slot = ScatterElements <axis = 0, reduction = "max"> (no_slot, live_cell, slot)
    is_untouched = Less (last_slot, zero)
    last_slot_or_n = Where (is_untouched, n, last_slot)
    row_of_slot_and_none = Concat <axis = 0> (live_row, n)
    cell_row_wide = Gather <axis = 0> (row_of_slot_and_none, last_slot_or_n)
    cell_row_all = Min (cell_row_wide, num_permuted)
    cell_row = Slice (cell_row_all, zero, num_cells, zero)
    probs_flat = Reshape (probs, minus_one)
    probs_none_f32 = ConstantOfShape (one)
    probs_none = CastLike (probs_none_f32, probs)
    probs_and_none = Concat <axis = 0> (probs_flat, probs_none)
    weight_flat = Gather <axis = 0> (probs_and_none, cell_of_row)
    weight = Unsqueeze (weight_flat, one)
    moved = Gather <axis = 0> (grad_and_zero, token_of_row)
    # No change where probs are given. Where they are not, this branch is dead, but its static shapes
    # are compared all the same when a runtime loads it.
    permuted_shape = Concat <axis = 0> (num_permuted, hidden)
    permuted_rows = Reshape <allowzero = 1> (permuted_tokens, permuted_shape)
    """,
    per_precision(("rows_out", "cells_out"), "precision", _ROWS),
    """
    with_rows = Identity (rows_out)
    with_probs_grad = Reshape <allowzero = 1> (cells_out, cells_shape)
    """,
)

BODY = body(
    "MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad: int = 0, restore_shape: ints = []>"
    " (unpermuted_tokens_grad, out_index, permute_token_id, routing_map, permuted_tokens, probs)"
    " => (permuted_tokens_grad, probs_grad)",
    attribute("drop_and_pad"),
    precision("precision", "unpermuted_tokens_grad"),
    precision("permuted_precision", "permuted_tokens"),
    precision("probs_precision", "probs"),
    is_not_float("bad_grad_dtype", "precision"),
    is_not_int32("bad_index_dtype", "out_index"),
    is_not_int32("bad_token_dtype", "permute_token_id"),
    is_not_map("bad_map_dtype", "routing_map"),
    is_not("bad_permuted_dtype", "precision", "permuted_precision"),
    BAD_PROBS_DTYPE,
    is_not_rank("bad_probs_rank", "probs", "two"),
    is_not_rank("bad_map_rank", "routing_map", "two"),
    is_not_rank("bad_permuted_rank", "permuted_tokens", "two"),
    is_not_rank("bad_grad_rank", "unpermuted_tokens_grad", "two"),
    is_not_rank("bad_index_rank", "out_index", "one"),
    is_not_rank("bad_token_rank", "permute_token_id", "one"),
    is_outside("bad_pad", "drop_and_pad", "zero", "two"),
    """
    is_padded = Equal (drop_and_pad, one)
    not_padded = Not (is_padded)
    num_tokens = Shape <end = 1> (unpermuted_tokens_grad)
    hidden = Shape <start = 1> (unpermuted_tokens_grad)
    n = Shape <end = 1> (out_index)
    n_token = Shape <end = 1> (permute_token_id)
    some_tokens = Max (num_tokens, one)
    k = Div (n, some_tokens)
    token_rows = Mul (k, num_tokens)
    num_experts = Shape <start = 1, end = 2> (probs)
    probs_tokens = Shape <end = 1> (probs)
    probs_sizes = Add (probs_tokens, num_experts)
    has_probs = Greater (probs_sizes, zero)
    map_tokens = Shape <end = 1> (routing_map)
    map_experts = Shape <start = 1, end = 2> (routing_map)
    map_sizes = Add (map_tokens, map_experts)
    has_map_sizes = Greater (map_sizes, zero)
    has_map = Or (has_map_sizes, has_probs)
    permuted_hidden = Shape <start = 1> (permuted_tokens)
    num_permuted = Shape <end = 1> (permuted_tokens)
    permuted_sizes = Add (num_permuted, permuted_hidden)
    has_permuted_sizes = Greater (permuted_sizes, zero)
    has_permuted = Or (has_permuted_sizes, has_probs)
    bad_map_dtype_given = And (bad_map_dtype, has_map)
    bad_permuted_dtype_given = And (bad_permuted_dtype, has_permuted)
    bad_probs_dtype_given = And (bad_probs_dtype, has_probs)
    """,
    is_not("other_map_tokens", "map_tokens", "num_tokens"),
    is_not("other_permuted_hidden", "permuted_hidden", "hidden"),
    """
    bad_map_tokens = And (other_map_tokens, has_map)
    bad_permuted_hidden = And (other_permuted_hidden, has_permuted)
    all_rows = Equal (num_permuted, n)
    selected = Cast <to = 9> (routing_map)
    selected_long = Cast <to = 7> (selected)
    num_selected = ReduceSum <keepdims = 1> (selected_long)
    num_selected_1 = Reshape (num_selected, one)
    is_head = Equal (num_permuted, num_selected_1)
    is_head_unpadded = And (is_head, not_padded)
    good_permuted_rows = Or (all_rows, is_head_unpadded)
    other_permuted_rows = Not (good_permuted_rows)
    bad_permuted_rows = And (other_permuted_rows, has_permuted)
    """,
    is_not("bad_lengths", "n", "n_token"),
    is_not("uneven_tokens", "token_rows", "n"),
    """
    bad_tokens = And (not_padded, uneven_tokens)
    restore = Constant <value_ints: ints = @restore_shape> ()
    restored = Shape (unpermuted_tokens_grad)
    """,
    RESTORE_SHAPE,
    """
    bad_padded_restore = And (bad_restore, is_padded)
    """,
    checks(
        "passed",
        "zero",
        ("unpermuted_tokens_grad must be float16, bfloat16, float32 or float64", "bad_grad_dtype"),
        ("out_index must be int32", "bad_index_dtype"),
        ("permute_token_id must be int32", "bad_token_dtype"),
        ("routing_map must be bool or int8", "bad_map_dtype_given"),
        (
            "permuted_tokens must have the dtype of unpermuted_tokens_grad",
            "bad_permuted_dtype_given",
        ),
        (
            "probs must have the dtype of unpermuted_tokens_grad, or float32 beside bfloat16",
            "bad_probs_dtype_given",
        ),
        ("drop_and_pad must be 0 or 1", "bad_pad"),
        ("unpermuted_tokens_grad must be 2-D", "bad_grad_rank"),
        ("out_index must be 1-D", "bad_index_rank"),
        ("permute_token_id must be 1-D", "bad_token_rank"),
        ("probs must be 2-D", "bad_probs_rank"),
        ("routing_map must be 2-D", "bad_map_rank"),
        ("permuted_tokens must be 2-D", "bad_permuted_rank"),
        ("out_index and permute_token_id must be equally long", "bad_lengths"),
        ("routing_map must be [T, E]", "bad_map_tokens"),
        (
            "permuted_tokens must have the hidden size of unpermuted_tokens_grad",
            "bad_permuted_hidden",
        ),
        (
            "permuted_tokens must have a row for every slot or every selected pair",
            "bad_permuted_rows",
        ),
        ("restore_shape must be the shape of unpermuted_tokens_grad", "bad_padded_restore"),
        ("tokens must divide the length of out_index", "bad_tokens"),
    ),
    """
    # An index is looked up only after its range was checked: Gather wraps -1 to the last row.
    index = Cast <to = 7> (out_index)
    low = Sub (drop_and_pad, one)
    """,
    is_outside("bad_index", "index", "low", "n"),
    check("out_index must be in range", "bad_index", before="passed", after="passed_index"),
    """
    given_token = Cast <to = 7> (permute_token_id)
    is_equal = Equal (index, given_token)
    is_different = Not (is_equal)
    different_long = Cast <to = 7> (is_different)
    num_different = ReduceSum <keepdims = 1> (different_long)
    num_different_1 = Reshape (num_different, one)
    is_same = Equal (num_different_1, zero)
    is_slot_form = And (is_same, not_padded)
    """,
    count_up("slot", "n"),
    """
    some_k = Max (k, one)
    slot_token = Div (slot, some_k)
    token = Where (is_slot_form, slot_token, given_token)
    is_named = GreaterOrEqual (index, zero)
    """,
    is_outside("token_outside", "token", "zero", "num_tokens"),
    """
    bad_token = And (is_named, token_outside)
    """,
    check("permute_token_id must be in range", "bad_token", before="zero", after="passed_token"),
    """
    # Row n is where skipped slots go; token num_tokens is a row of zeros behind dY.
    row_or_n = Where (is_named, index, n)
    row_free = Add (row_or_n, passed_index)
    row_in_range = Add (row_free, passed_token)
    slot_named = Less (row_in_range, n)
    slot_beyond = GreaterOrEqual (row_in_range, num_permuted)
    slot_without_row = And (slot_named, slot_beyond)
    bad_slot_row = And (slot_without_row, has_permuted)
    """,
    check("out_index must name rows of permuted_tokens", "bad_slot_row", before="zero", after="passed_rows"),
    """
    row = Add (row_in_range, passed_rows)
    """,
    with_zero_row("grad_and_zero", "unpermuted_tokens_grad", "unpermuted_tokens_grad"),
    """
    permuted_tokens_grad, probs_grad = If (has_probs) <
        then_branch = with_probs () => (with_rows, with_probs_grad) {""",
    *_WITH_PROBS,
    """
        },
        else_branch = without_probs () => (copied_rows, absent_probs_grad) {
            copy_rows_and_none = Add (n, one)
            copy_none = Expand (num_tokens, copy_rows_and_none)
            copy_token_and_none = ScatterElements <axis = 0> (copy_none, row, token)
            copy_token = Slice (copy_token_and_none, zero, n, zero)
            copied_rows = Gather <axis = 0> (grad_and_zero, copy_token)
            absent_probs_grad = Identity (probs)
        }
    >
    """,
)

SPEC = OpSpec(
    name=NAME,
    summary="Gradient of MoeTokenUnpermuteWithRoutingMap for rows and probabilities.",
    formula="G[out_index[i]] = dY[t] * probs[t, e];  Q[t, e] = sum over h of P[out_index[i], h] * dY[t, h]",
    inputs=(
        Arg(
            "unpermuted_tokens_grad",
            "T H",
            "dY, gradient of the combined tokens",
            differentiable=True,
        ),
        Arg("out_index", "N", "row of each slot, in [-1, N), unique apart from -1", INDICES, "I"),
        Arg(
            "permute_token_id",
            "N",
            "token of each slot, or out_index again (slot form)",
            INDICES,
            "I",
        ),
        Arg("routing_map", "T E", "non-zero selects; needed with probs", MAPS, "M", optional=True),
        Arg(
            "permuted_tokens",
            "N H",
            "P, the rows that were combined; needed with probs",
            optional=True,
            differentiable=True,
        ),
        Arg(
            "probs",
            "T E",
            "weights; shape (0, 0) is absent",
            type_var="TP",
            optional=True,
            differentiable=True,
        ),
    ),
    outputs=(
        Arg("permuted_tokens_grad", "N H", "G, 0 in rows that no slot stands for"),
        Arg(
            "probs_grad",
            "T E",
            "Q, 0 in cells that no slot stands for",
            type_var="TP",
            optional=True,
        ),
    ),
    attributes=(
        DROP_AND_PAD,
        Attr("restore_shape", "ints", "shape of dY, checked when padded", "integers", lambda v: True),
    ),
    shapes=_shapes,
    reference=moe_token_unpermute_with_routing_map_grad,
    body=BODY,
    source="aclnnMoeTokenUnpermuteWithRoutingMapGrad",
    missing=_missing,
    mixes=_mixes,
    copies_without="probs",
)
