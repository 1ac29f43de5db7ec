"""MoeTokenUnpermuteWithRoutingMap: the combine, each token the weighted sum of its experts' rows.

Source: aclnnMoeTokenUnpermuteWithRoutingMap, the forward of source document 000.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.errors import MissingInputError, ShapeError
from moe_onnx.operators._arrays import Array, check_range, check_unique, given, read, wide_dtype
from moe_onnx.operators._body import (
    IN_FLOAT64,
    attribute,
    body,
    check,
    checks,
    flag_squared,
    integer_code,
    is_not_float,
    is_not_map,
    is_outside,
    is_there,
    per_precision,
    precision,
    rank_of,
    rows_or_zeros,
    run_time_zero,
    sizes_agree,
)
from moe_onnx.operators._routing_map import (
    ADD_TO_TOKENS,
    BAD_PROBS_DTYPE,
    CAPACITY_LIMIT,
    DROP_AND_PAD,
    NUM_SELECTED,
    RESTORE_SHAPE,
    ROW_PROB,
    SELECTED,
    SIZES,
    SLOT_EXPERTS,
    TOKEN_ROWS,
    TOP_K_LIMIT,
    check_limits,
    check_probs_dtype,
    check_restore_shape,
    padded_cells,
    require_companions,
    slot_cells,
)
from moe_onnx.spec import INDICES, MAPS, Arg, Attr, Axes, OpSpec, TensorInfo, presence

NAME = "MoeTokenUnpermuteWithRoutingMap"


def moe_token_unpermute_with_routing_map(
    permuted_tokens: Any,
    sorted_indices: Any,
    routing_map: Any = None,
    probs: Any = None,
    *,
    drop_and_pad: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Sum the experts' rows of each token, weighted by its probabilities.

    Signature: [N H], [N] int32, [T E]?, [T E]? -> [T H], [N] int32, [N] int32, [N]?

        unpadded:  out[t] = sum over k = 0 .. K-1 of w[t, k] * P[sorted_indices[t*K + k]]
        padded:    out[sorted_indices[i]] += w[i] * P[i]      for i = 0 .. N-1 in turn

    Unpadded, K = N // T and w[t, k] is the probability of the k-th selected expert of t, ascending
    (1 without probs); a slot is left out where its index is -1, where t has no k-th expert, and
    where the probability is exactly 0. Padded, w[i] = probs[sorted_indices[i], i // C] with
    C = N // E (1 without probs). Sums are made in float32 (float64 for float64), rounded once.

    Args:
        permuted_tokens: P; float16, bfloat16, float32 (float64 for validation). Unpadded with a map
            it may hold only as many rows as the map selects.
        sorted_indices: int32. Unpadded: the row of each slot, token-major, unique apart from -1,
            which leaves the slot out. Padded: the token of each row, in ``[0, T)``.
        routing_map: bool or int8, non-zero selects. Needed with probs unless padded.
        probs: Dtype of permuted_tokens, or float32 beside bfloat16. None or (0, 0) is absent.
        drop_and_pad: Whether every expert has exactly C rows.
        restore_shape: ``[T, H]``; needed where neither map nor probs give T.

    Returns:
        ``(unpermuted_tokens, out_index, permute_token_id, permute_probs)``: the sum; the two index
        tensors that the gradient takes (unpadded: sorted_indices twice; padded: positions and
        values of its stable sort); w for each row (padded) or slot (unpadded, 0 where t has no k-th
        expert), None without probs.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, LimitError,
        IndexValueError, RoutingMapError.
    """
    (rows, index, mask, weights), infos = read(SPEC, permuted_tokens, sorted_indices, routing_map, probs)
    attrs, shapes = SPEC.check(infos, {"drop_and_pad": drop_and_pad, "restore_shape": restore_shape})
    assert rows is not None and index is not None and shapes[0] is not None and shapes[0].shape
    tokens, experts = int(shapes[0].shape[0] or 0), 0
    mask, weights = given(mask), given(weights)
    if weights is not None:
        experts = weights.shape[1]
    total = np.zeros((tokens, rows.shape[1]), wide_dtype(rows.dtype))
    used = None if weights is None else np.zeros(len(index), weights.dtype)
    if attrs["drop_and_pad"]:
        check_range(NAME, "sorted_indices", index, 0, tokens, "drop_and_pad, a token")
        if weights is not None:
            used = weights[index, np.arange(len(index)) // max(len(index) // max(experts, 1), 1)]
        order = np.argsort(index, kind="stable").astype(np.int32)
        with np.errstate(all="ignore"):
            for i, token in enumerate(index):
                weight = total.dtype.type(1) if used is None else used[i].astype(total.dtype)
                total[token] += rows[i].astype(total.dtype) * weight
            return total.astype(rows.dtype), order, index[order], used
    _check_rows(rows, index, mask)
    check_range(NAME, "sorted_indices", index, -1, len(rows), "-1 leaves the slot out")
    check_unique(NAME, "sorted_indices", index, "each slot has a row of its own")
    top_k = len(index) // max(tokens, 1)
    live = index >= 0
    if weights is not None and used is not None:
        assert mask is not None
        cell = slot_cells(NAME, mask, top_k)
        used[cell >= 0] = weights.reshape(-1)[cell[cell >= 0]]
        # Left out, not multiplied by 0: a NaN in the row of an expert without weight stays there.
        live = live & (cell >= 0) & (used != 0)
    slots = index.reshape(tokens, top_k)
    with np.errstate(all="ignore"):
        for k in range(top_k):
            at = live.reshape(tokens, top_k)[:, k]
            term = rows[slots[at, k]].astype(total.dtype)
            if used is not None:
                term *= used.reshape(tokens, top_k)[at, k, None].astype(total.dtype)
            total[at] += term
        return total.astype(rows.dtype), index.copy(), index.copy(), used


def _check_rows(rows: Array, index: Array, mask: Array | None) -> None:
    selected = len(index) if mask is None else int(np.count_nonzero(mask))
    if len(rows) not in (len(index), selected):
        raise ShapeError(
            f"{NAME}: 'permuted_tokens' must have N = {len(index)} rows, or as many as 'routing_map' "
            f"selects ({selected}), got shape {list(rows.shape)}.",
            op=NAME,
        )


def _missing(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> None:
    _, _, mask, probs = inputs
    # What is neither false nor left out is refused, or padded, later on.
    padded = attributes.get("drop_and_pad")
    if presence(probs) and (padded is None or (isinstance(padded, (int, np.bool_)) and not padded)):
        require_companions(NAME, routing_map=presence(mask) is not False)


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    rows, _, _, probs = inputs
    if rows is not None and probs is not None and presence(probs) is not False:
        check_probs_dtype(NAME, "permuted_tokens", rows, probs)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    rows, index, mask, probs = (None if i > 1 and presence(t) is False else t for i, t in enumerate(inputs))
    assert rows is not None and index is not None
    padded, restore = bool(attributes["drop_and_pad"]), attributes["restore_shape"]
    axes = Axes(NAME)
    axes.read(
        ("permuted_tokens", rows, "N H" if padded else "P H"),
        ("sorted_indices", index, "N"),
        ("routing_map", mask, "T E"),
        ("probs", probs, "T E"),
    )
    if probs is None and mask is None:
        if not restore:
            raise MissingInputError(
                f"{NAME}: 'routing_map', 'probs' and attribute 'restore_shape' are all missing, so the "
                "number of tokens is unknown. Give restore_shape = [T, H].",
                op=NAME,
            )
        axes.bind("T", restore[0], "attribute 'restore_shape'")
        if axes["H"] is None and len(restore) == 2:
            axes.bind("H", restore[1], "attribute 'restore_shape'")
    check_restore_shape(NAME, restore, "unpermuted_tokens", (axes["T"], axes["H"]))
    if padded:
        if probs is not None:
            axes.bind("C", axes.divide("N", axes["E"], "the number of experts"), "N / E")
    else:
        axes.bind("K", axes.divide("N", axes["T"], "the number of tokens"), "N / T")
    if probs is not None:
        check_limits(NAME, axes, padded)
    dtype = rows.dtype if inputs[3] is None else inputs[3].dtype
    return [
        TensorInfo(rows.dtype, (axes["T"], axes["H"])),
        TensorInfo("int32", (axes["N"],)),
        TensorInfo("int32", (axes["N"],)),
        TensorInfo(dtype, (axes["N"] if probs is not None else 0,)),
    ]


# The sums, once per precision. Unpadded they are products of matrices: a slot that is left out has
# weight 0 and a row of zeros.
_SLOT_SUM = """
    $rows = Cast <to = $DTYPE> (slot_rows)
    $weight = Cast <to = $DTYPE> (slot_weight_3d)
    $total = MatMul ($weight, $rows)
    $total_2d = Reshape <allowzero = 1> ($total, restored)
    $summed = CastLike ($total_2d, permuted_tokens)
"""
_ROW_SUM = (
    """
    $added_rows = Cast <to = $DTYPE> (padded_rows)
    $added_weight = Cast <to = $DTYPE> (row_weight_2d)
    $added = Mul ($added_rows, $added_weight)
"""
    + ADD_TO_TOKENS
    + """
    $scattered = CastLike ($sum, permuted_tokens)
"""
)

BODY = body(
    "MoeTokenUnpermuteWithRoutingMap <drop_and_pad: int = 0, restore_shape: ints = []>"
    " (permuted_tokens, sorted_indices, routing_map, probs)"
    " => (unpermuted_tokens, out_index, permute_token_id, permute_probs)",
    attribute("drop_and_pad"),
    precision("precision", "permuted_tokens"),
    IN_FLOAT64,
    is_not_float("bad_rows_dtype", "precision"),
    integer_code("index_dtype", "sorted_indices"),
    is_not_map("map_dtype", "routing_map"),
    precision("probs_precision", "probs"),
    BAD_PROBS_DTYPE,
    rank_of("rows_rank", "permuted_tokens"),
    rank_of("index_rank", "sorted_indices"),
    rank_of("map_rank", "routing_map"),
    rank_of("probs_rank", "probs"),
    flag_squared("drop_and_pad"),
    """
    is_padded = Equal (drop_and_pad, one)
    not_padded = Not (is_padded)
    not_padded_size = Cast <to = 7> (not_padded)
    restore = Constant <value_ints: ints = @restore_shape> ()
    """,
    RESTORE_SHAPE,
    """
    map_tokens = Shape <end = 1> (routing_map)
    map_experts = Shape <start = 1, end = 2> (routing_map)
    probs_tokens = Shape <end = 1> (probs)
    probs_experts = Shape <start = 1, end = 2> (probs)
    num_tokens = Max (map_tokens, probs_tokens, restore_tokens)
    num_experts = Max (map_experts, probs_experts)
    hidden = Shape <start = 1> (permuted_tokens)
    n = Shape <end = 1> (sorted_indices)
    num_rows = Shape <end = 1> (permuted_tokens)
    restored = Concat <axis = 0> (num_tokens, hidden)
    """,
    checks(
        "passed",
        "zero",
        ("permuted_tokens must be float16, bfloat16, float32 or float64", "bad_rows_dtype"),
        ("sorted_indices must be int32", "index_dtype", "int32_code"),
        ("drop_and_pad must be 0 or 1", "drop_and_pad_squared", "drop_and_pad"),
        ("permuted_tokens must be 2-D", "rows_rank", "two"),
        ("sorted_indices must be 1-D", "index_rank", "one"),
        ("routing_map must be 2-D", "map_rank", "two"),
        ("probs must be 2-D", "probs_rank", "two"),
        ("restore_shape must be the shape of unpermuted_tokens", "bad_restore"),
    ),
    is_there("has_map", "map_tokens", "map_experts"),
    is_there("has_probs", "probs_tokens", "probs_experts"),
    """
    has_any = Max (has_map, has_probs, has_restore)
    probs_if_padded = Mul (has_probs, drop_and_pad)
    probs_if_unpadded = Mul (has_probs, not_padded_size)
    probs_dtype = Cast <to = 7> (bad_probs_dtype)
    """,
    SIZES,
    TOP_K_LIMIT,
    CAPACITY_LIMIT,
    SELECTED,
    NUM_SELECTED,
    """
    rows_beside_n = BitwiseXor (num_rows, n)
    rows_beside_selected = BitwiseXor (num_rows, num_selected)
    no_map = Sub (one, has_map)
    rows_beside_head = Max (rows_beside_selected, no_map, drop_and_pad)
    rows_beside = Min (rows_beside_n, rows_beside_head)
    """,
    sizes_agree(
        "passed_sizes",
        "passed",
        ("routing_map is missing although probs is given", "has_map", "one", "probs_if_unpadded"),
        ("routing_map, probs and restore_shape are all missing", "has_any", "one", "one"),
        ("routing_map must be bool or int8", "map_dtype", "zero", "has_map"),
        (
            "probs must have the dtype of permuted_tokens, or float32 beside bfloat16",
            "probs_dtype",
            "zero",
            "has_probs",
        ),
        ("routing_map must be [T, E]", "map_tokens", "num_tokens", "has_map"),
        ("probs must be [T, E]", "probs_tokens", "num_tokens", "has_probs"),
        ("routing_map must have the experts of probs", "map_experts", "num_experts", "has_map"),
        ("probs must have the experts of routing_map", "probs_experts", "num_experts", "has_probs"),
        (
            "restore_shape must have the tokens of unpermuted_tokens",
            "restore_tokens",
            "num_tokens",
            "has_restore",
        ),
        (
            "restore_shape must have the hidden size of unpermuted_tokens",
            "restore_hidden",
            "hidden",
            "has_restore",
        ),
        ("tokens must divide the length of sorted_indices", "token_rows", "n", "not_padded_size"),
        (
            "experts must divide the length of sorted_indices when padded",
            "expert_rows",
            "n",
            "probs_if_padded",
        ),
        (
            "permuted_tokens must have a row for every slot or every selected pair",
            "rows_beside",
            "zero",
            "one",
        ),
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
    index_given = Cast <to = 7> (sorted_indices)
    low = Sub (drop_and_pad, one)
    high = Where (is_padded, num_tokens, num_rows)
    """,
    is_outside("bad_index", "index_given", "low", "high"),
    check("sorted_indices must be in range", "bad_index", before="passed_sizes", after="passed_index"),
    """
    index = Add (index_given, passed_index)
    """,
    run_time_zero("permuted_tokens"),
    """
    unit = Constant <value = double {1.0}> ()
    no_weight = Constant <value = double {0.0}> ()
    unpermuted_tokens, out_index, permute_token_id, permute_probs = If (is_padded) <
        then_branch = padded () => (padded_sum, padded_out_index, padded_token_id, padded_probs) {
    """,
    padded_cells("row_cell_all", "index"),
    ROW_PROB,
    """
            row_prob_long = Cast <to = 11> (row_prob)
            row_weight = Where (is_weighted, row_prob_long, unit)
            row_weight_2d = Unsqueeze (row_weight, one)
    """,
    TOKEN_ROWS,
    """
            rows_shape = Concat <axis = 0> (n_late, hidden)
            padded_rows = Reshape <allowzero = 1> (permuted_tokens, rows_shape)
    """,
    per_precision(("scattered",), _ROW_SUM),
    """
            padded_sum = Identity (scattered)
            padded_out_index = Cast <to = 6> (order)
            padded_token_id = Cast <to = 6> (sorted_token)
            padded_count = Mul (n, has_probs)
            padded_probs = Slice (row_prob, zero, padded_count, zero)
        },
        else_branch = unpadded () => (unpadded_sum, unpadded_out_index, unpadded_token_id, unpadded_probs) {
            slots_shape = Concat <axis = 0> (num_tokens, k)
            slot_index = Reshape <allowzero = 1> (index, slots_shape)
            is_named_flat = GreaterOrEqual (index, zero)
            is_named = Reshape <allowzero = 1> (is_named_flat, slots_shape)
            has_probs_late = Add (has_probs, late_zero)
            has_probs_now = Cast <to = 9> (has_probs_late)
            slot_row, slot_weight, unpadded_probs = If (has_probs_now) <
                then_branch = weighted () => (weighted_row, weighted_weight, weighted_probs) {
    """,
    SLOT_EXPERTS,
    """
                    expert_prob = GatherElements <axis = 1> (probs, expert)
                    is_selected = Cast <to = 9> (has_expert)
                    expert_prob_long = Cast <to = 11> (expert_prob)
                    slot_prob = Where (is_selected, expert_prob_long, no_weight)
                    # Left out, not multiplied by 0: a NaN in the row of an expert without weight
                    # stays there.
                    has_weight = Cast <to = 9> (slot_prob)
                    is_live = And (has_weight, is_named)
                    weighted_row_free = Where (is_live, slot_index, minus_one)
                    weighted_row = Add (weighted_row_free, passed_experts)
                    weighted_weight = Where (is_live, slot_prob, no_weight)
                    slot_prob_flat = Reshape (slot_prob, minus_one)
                    weighted_probs = CastLike (slot_prob_flat, probs)
                },
                else_branch = unweighted () => (unweighted_row, unweighted_weight, unweighted_probs) {
                    unweighted_row = Identity (slot_index)
                    unweighted_weight = Expand (unit, slots_shape)
                    unweighted_probs = Reshape (probs, minus_one)
                }
            >
            slot_weight_3d = Unsqueeze (slot_weight, one)
            is_left_out = Less (slot_row, zero)
            left_out_long = Cast <to = 7> (is_left_out)
            num_left_out = ReduceSum <keepdims = 0> (left_out_long)
            some_left_out = Cast <to = 9> (num_left_out)
    """,
    rows_or_zeros("slot_rows", "permuted_tokens", "slot_row", "some_left_out"),
    per_precision(("summed",), _SLOT_SUM),
    """
            unpadded_sum = Identity (summed)
            unpadded_out_index = Identity (sorted_indices)
            unpadded_token_id = Identity (sorted_indices)
        }
    >
    """,
)

SPEC = OpSpec(
    name=NAME,
    summary="Combine: sums the rows of each token's experts, weighted by its probabilities.",
    formula="out[t] = sum over k of probs[t, e(t, k)] * P[sorted_indices[t*K + k]]",
    inputs=(
        Arg("permuted_tokens", "N H", "P, rows of the experts", differentiable=True),
        Arg(
            "sorted_indices",
            "N",
            "row of each slot, -1 leaves it out; padded: token of each row",
            INDICES,
            "I",
        ),
        Arg(
            "routing_map",
            "T E",
            "non-zero selects; needed with probs unless padded",
            MAPS,
            "M",
            optional=True,
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
        Arg("unpermuted_tokens", "T H", "the sums", differentiable=True),
        Arg(
            "out_index",
            "N",
            "for the gradient: sorted_indices, or positions of its sort when padded",
            INDICES,
            "I",
        ),
        Arg(
            "permute_token_id",
            "N",
            "for the gradient: sorted_indices, or its sorted values",
            INDICES,
            "I",
        ),
        Arg(
            "permute_probs",
            "N",
            "weight of each slot or row; empty without probs",
            type_var="TP",
            optional=True,
        ),
    ),
    attributes=(
        DROP_AND_PAD,
        Attr(
            "restore_shape",
            "ints",
            "[T, H]; needed without map and probs",
            "integers >= 0",
            lambda v: min(v, default=0) >= 0,
        ),
    ),
    shapes=_shapes,
    reference=moe_token_unpermute_with_routing_map,
    body=BODY,
    source="aclnnMoeTokenUnpermuteWithRoutingMap",
    gradient="MoeTokenUnpermuteWithRoutingMapGrad",
    missing=_missing,
    mixes=_mixes,
)
