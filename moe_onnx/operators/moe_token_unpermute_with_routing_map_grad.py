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
    is_not_map,
    is_outside,
    is_there,
    per_precision,
    precision,
    rank_of,
    row_dots,
    run_time_zero,
    sizes_agree,
    with_zero_row,
)
from moe_onnx.operators._routing_map import (
    BAD_PROBS_DTYPE,
    CAPACITY_LIMIT,
    DROP_AND_PAD,
    LAST_SLOT,
    NUM_SELECTED,
    RESTORE_SHAPE,
    ROW_CELLS,
    SELECTED,
    SIZES,
    SLOT_EXPERTS,
    TOP_K_LIMIT,
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


# The part that touches whole rows, once per precision. The short form of the dots does without copying
# the head of the rows where permuted_tokens has fewer.
_ROWS = """
    $grad = Cast <to = $DTYPE> (moved)
    $weight = Cast <to = $DTYPE> (weight)
    $product = Mul ($grad, $weight)
    $with_rows = CastLike ($product, unpermuted_tokens_grad)
    $permuted_given = Reshape <allowzero = 1> (permuted_tokens, permuted_shape)
    $permuted = Cast <to = $DTYPE> ($permuted_given)
""" + row_dots(
    "with_probs_grad",
    "probs",
    "row_of_cell",
    "grad",
    "permuted",
    """
            $head = Slice ($grad, zero, num_permuted_late, zero)
            $pairs = Mul ($head, $permuted)""",
)


def _given_token(prefix: str) -> str:
    """The token that permute_token_id names for each slot, 0 for skipped slots; checked."""
    return (
        f"""
    {prefix}_is_named = GreaterOrEqual (index, zero)
    {prefix}_named = Where ({prefix}_is_named, given_token, zero)
    """
        + is_outside(f"{prefix}_outside", f"{prefix}_named", "zero", "num_tokens")
        + f"""
    {prefix}_bad = And ({prefix}_is_named, {prefix}_outside)
    """
        + check("permute_token_id must be in range", f"{prefix}_bad", before="zero", after=f"{prefix}_passed")
        + f"""
    {prefix} = Add ({prefix}_named, {prefix}_passed)
    """
    )


# Each form says which token every row copies (num_tokens for none), with which weight, and which row
# every cell of probs_grad takes its sum from (-1 for none). Slots that stand for no cell name no row:
# that row stays zero even where dY is NaN.
_SLOT_FORM = (
    SLOT_EXPERTS,
    """
    slots_shape = Concat <axis = 0> (num_tokens, k)
    slot_index = Reshape <allowzero = 1> (index, slots_shape)
    index_plus_one = Add (slot_index, one)
    row_plus_one = Mul (index_plus_one, has_expert)
    row_free = Sub (row_plus_one, one)
    row_2d = Add (row_free, passed_experts)
    row = Reshape (row_2d, minus_one)
    """,
    in_row_order("slot_of_row", "n", "row", "slot"),
    """
    # No slot is slot n, of token n / k, the row of zeros behind dY.
    slot_token = Div (slot_of_row, some_k)
    slot_prob_2d = GatherElements <axis = 1> (probs, expert)
    slot_prob = Reshape (slot_prob_2d, minus_one)
    slot_prob_and_none = Concat <axis = 0> (slot_prob, no_prob)
    slot_weight = Gather <axis = 0> (slot_prob_and_none, slot_of_row)
    slot_no_row = Expand (minus_one, cells_shape)
    slot_row_of_cell = ScatterElements <axis = 1> (slot_no_row, expert, row_2d)
    """,
)
_OTHER_FORMS = (
    _given_token("token"),
    ROW_CELLS,
    """
    row_form_cell = Gather <axis = 0> (cell_of_row_or_none, index)
    index_expert = Div (index, some_capacity)
    token_start = Mul (token, num_experts)
    padded_cell = Add (token_start, index_expert)
    cell = Where (is_padded, padded_cell, row_form_cell)
    has_cell = Less (cell, num_cells)
    live_row = Where (has_cell, index, minus_one)
    """,
    in_row_order("given_token_of_row", "num_tokens", "live_row", "token"),
    in_row_order("cell_of_row", "num_cells", "live_row", "cell"),
    """
    prob = Reshape (probs, minus_one)
    prob_and_none = Concat <axis = 0> (prob, no_prob)
    given_weight = Gather <axis = 0> (prob_and_none, cell_of_row)
    # If two slots stand for one cell, the last one counts.
    """,
    LAST_SLOT,
    """
    live_row_and_none = Concat <axis = 0> (live_row, minus_one)
    row_of_cell_flat = Gather <axis = 0> (live_row_and_none, last_slot)
    given_row_of_cell = Reshape <allowzero = 1> (row_of_cell_flat, cells_shape)
    """,
)

_WITH_PROBS = (
    """
    num_cells = Mul (num_tokens, num_experts)
    cells_shape = Concat <axis = 0> (num_tokens, num_experts)
    no_prob_f32 = ConstantOfShape (one)
    no_prob = CastLike (no_prob_f32, probs)
    token_of_row, weight_flat, row_of_cell = If (is_slot_form) <
        then_branch = slot_form () => (slot_token, slot_weight, slot_row_of_cell) {""",
    *_SLOT_FORM,
    """
        },
        else_branch = other_forms () => (given_token_of_row, given_weight, given_row_of_cell) {""",
    *_OTHER_FORMS,
    """
        }
    >
    weight = Unsqueeze (weight_flat, one)
    moved = Gather <axis = 0> (grad_and_zero, token_of_row)
    """,
    # The reshape changes nothing where probs are given. Where they are not, this branch is dead, but
    # its static shapes are compared all the same when a runtime loads it.
    per_precision(("with_rows", "with_probs_grad"), _ROWS),
)

BODY = body(
    "MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad: int = 0, restore_shape: ints = []>"
    " (unpermuted_tokens_grad, out_index, permute_token_id, routing_map, permuted_tokens, probs)"
    " => (permuted_tokens_grad, probs_grad)",
    attribute("drop_and_pad"),
    precision("precision", "unpermuted_tokens_grad"),
    IN_FLOAT64,
    precision("permuted_precision", "permuted_tokens"),
    precision("probs_precision", "probs"),
    is_not_float("bad_grad_dtype", "precision"),
    integer_code("index_dtype", "out_index"),
    integer_code("token_dtype", "permute_token_id"),
    is_not_map("map_dtype", "routing_map"),
    is_not("bad_permuted_dtype", "precision", "permuted_precision"),
    BAD_PROBS_DTYPE,
    rank_of("probs_rank", "probs"),
    rank_of("map_rank", "routing_map"),
    rank_of("permuted_rank", "permuted_tokens"),
    rank_of("grad_rank", "unpermuted_tokens_grad"),
    rank_of("index_rank", "out_index"),
    rank_of("token_rank", "permute_token_id"),
    flag_squared("drop_and_pad"),
    """
    is_padded = Equal (drop_and_pad, one)
    not_padded = Not (is_padded)
    not_padded_size = Cast <to = 7> (not_padded)
    restore = Constant <value_ints: ints = @restore_shape> ()
    """,
    RESTORE_SHAPE,
    """
    bad_padded_restore = And (bad_restore, is_padded)
    padded_restore = Mul (has_restore, drop_and_pad)
    """,
    checks(
        "passed",
        "zero",
        ("unpermuted_tokens_grad must be float16, bfloat16, float32 or float64", "bad_grad_dtype"),
        ("out_index must be int32", "index_dtype", "int32_code"),
        ("permute_token_id must be int32", "token_dtype", "int32_code"),
        ("drop_and_pad must be 0 or 1", "drop_and_pad_squared", "drop_and_pad"),
        ("unpermuted_tokens_grad must be 2-D", "grad_rank", "two"),
        ("out_index must be 1-D", "index_rank", "one"),
        ("permute_token_id must be 1-D", "token_rank", "one"),
        ("probs must be 2-D", "probs_rank", "two"),
        ("routing_map must be 2-D", "map_rank", "two"),
        ("permuted_tokens must be 2-D", "permuted_rank", "two"),
        ("restore_shape must be the shape of unpermuted_tokens_grad", "bad_padded_restore"),
    ),
    """
    num_tokens = Shape <end = 1> (unpermuted_tokens_grad)
    hidden = Shape <start = 1> (unpermuted_tokens_grad)
    n = Shape <end = 1> (out_index)
    n_token = Shape <end = 1> (permute_token_id)
    map_tokens = Shape <end = 1> (routing_map)
    map_experts = Shape <start = 1, end = 2> (routing_map)
    num_permuted = Shape <end = 1> (permuted_tokens)
    permuted_hidden = Shape <start = 1> (permuted_tokens)
    probs_tokens = Shape <end = 1> (probs)
    num_experts = Shape <start = 1, end = 2> (probs)
    """,
    is_there("has_probs", "probs_tokens", "num_experts"),
    is_there("has_map", "map_tokens", "map_experts", "has_probs"),
    is_there("has_permuted", "num_permuted", "permuted_hidden", "has_probs"),
    """
    probs_if_padded = Mul (has_probs, drop_and_pad)
    probs_if_unpadded = Mul (has_probs, not_padded_size)
    permuted_dtype = Cast <to = 7> (bad_permuted_dtype)
    probs_dtype = Cast <to = 7> (bad_probs_dtype)
    """,
    SIZES,
    TOP_K_LIMIT,
    CAPACITY_LIMIT,
    SELECTED,
    NUM_SELECTED,
    """
    rows_beside_n = BitwiseXor (num_permuted, n)
    rows_beside_selected = BitwiseXor (num_permuted, num_selected)
    rows_beside_head = Max (rows_beside_selected, drop_and_pad)
    rows_beside = Min (rows_beside_n, rows_beside_head)
    """,
    sizes_agree(
        "passed_sizes",
        "passed",
        ("routing_map must be bool or int8", "map_dtype", "zero", "has_map"),
        (
            "permuted_tokens must have the dtype of unpermuted_tokens_grad",
            "permuted_dtype",
            "zero",
            "has_permuted",
        ),
        (
            "probs must have the dtype of unpermuted_tokens_grad, or float32 beside bfloat16",
            "probs_dtype",
            "zero",
            "has_probs",
        ),
        ("out_index and permute_token_id must be equally long", "n", "n_token", "one"),
        ("routing_map must be [T, E]", "map_tokens", "num_tokens", "has_map"),
        ("probs must be [T, E]", "probs_tokens", "num_tokens", "has_probs"),
        ("routing_map and probs must have the same experts", "map_experts", "num_experts", "has_probs"),
        (
            "permuted_tokens must have the hidden size of unpermuted_tokens_grad",
            "permuted_hidden",
            "hidden",
            "has_permuted",
        ),
        (
            "permuted_tokens must have a row for every slot or every selected pair",
            "rows_beside",
            "zero",
            "has_permuted",
        ),
        (
            "restore_shape must have the tokens of unpermuted_tokens_grad",
            "restore_tokens",
            "num_tokens",
            "padded_restore",
        ),
        (
            "restore_shape must have the hidden size of unpermuted_tokens_grad",
            "restore_hidden",
            "hidden",
            "padded_restore",
        ),
        ("tokens must divide the length of out_index", "token_rows", "n", "not_padded_size"),
        ("experts must divide the length of out_index when padded", "expert_rows", "n", "probs_if_padded"),
        ("top_k must be at most 512 and the number of experts", "k_or_limit", "k_limit", "probs_if_unpadded"),
        (
            "capacity must be at most the number of tokens",
            "capacity_or_tokens",
            "num_tokens",
            "probs_if_padded",
        ),
    ),
    """
    # An index is looked up only after its range was checked: Gather wraps -1 to the last row.
    k = Add (k_free, passed_sizes)
    some_k = Max (k, one)
    # Not where it is read: a runtime warns of a division by a known 1 that a branch looks at from inside.
    some_capacity = Max (capacity, one)
    index_free = Cast <to = 7> (out_index)
    low = Sub (drop_and_pad, one)
    without_permuted = Sub (one, has_permuted)
    n_if_without = Mul (n, without_permuted)
    permuted_or_n = Max (num_permuted, n_if_without)
    high = Min (permuted_or_n, n)
    """,
    is_outside("bad_index", "index_free", "low", "high"),
    check(
        "out_index must be in range, also that of permuted_tokens",
        "bad_index",
        before="passed_sizes",
        after="passed_index",
    ),
    """
    index = Add (index_free, passed_index)
    given_token = Cast <to = 7> (permute_token_id)
    is_equal = Equal (index, given_token)
    same_long = Cast <to = 7> (is_equal)
    num_equal = ReduceSum <keepdims = 1> (same_long)
    is_same = Equal (num_equal, n)
    is_slot_form = And (is_same, not_padded)
    # Branches hang on a zero that is known at run time only: of a branch that a runtime inlines it
    # forgets the names of the nodes, which are the rules, and branches in branches have crashed it.
    """,
    run_time_zero("unpermuted_tokens_grad"),
    """
    has_probs_late = Add (has_probs, late_zero)
    has_probs_now = Cast <to = 9> (has_probs_late)
    num_permuted_late = Add (num_permuted, late_zero)
    all_rows = Equal (num_permuted_late, n)
    """,
    LONG_ROWS,
    """
    by_matrices = And (all_rows, has_long_rows)
    rows_shape = Concat <axis = 0> (num_permuted_late, one, hidden)
    permuted_shape = Concat <axis = 0> (num_permuted_late, hidden)
    rows_and_none = Add (n, one)
    """,
    count_up("slot", "n"),
    with_zero_row("grad_and_zero", "unpermuted_tokens_grad", "unpermuted_tokens_grad"),
    """
    permuted_tokens_grad, probs_grad = If (has_probs_now) <
        then_branch = with_probs () => (with_rows, with_probs_grad) {""",
    *_WITH_PROBS,
    """
        },
        else_branch = without_probs () => (copied_rows, absent_probs_grad) {
            copied_token = If (is_slot_form) <
                then_branch = copied_slots () => (copied_slot_token) {
                    copied_slot_token = Div (slot, some_k)
                },
                else_branch = copied_given () => (copied_given_token) {
    """,
    _given_token("copied_given_token"),
    """
                }
            >
    """,
    in_row_order("copy_token", "num_tokens", "index", "copied_token"),
    """
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
