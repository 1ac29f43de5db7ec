"""MoeTokenPermuteWithRoutingMap: the dispatch by a routing map, tokens copied to rows in expert order.

Source: aclnnMoeTokenPermuteWithRoutingMap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.errors import AttributeValueError, LimitError
from moe_onnx.operators._arrays import Array, given, read
from moe_onnx.operators._body import (
    attribute,
    body,
    check,
    checks,
    count_up,
    flag_squared,
    is_not_float,
    is_not_map,
    is_outside,
    is_there,
    precision,
    rank_of,
    rows_or_zeros,
    run_time_zero,
    sizes_agree,
)
from moe_onnx.operators._routing_map import (
    BAD_PROBS_DTYPE,
    DROP_AND_PAD,
    NUM_SELECTED,
    ROW_CELLS,
    ROW_PROB,
    SELECTED,
    SIZES,
    TOP_K_LIMIT,
    check_limits,
    check_probs_dtype,
    padded_cells,
    row_cells,
    size_attribute,
    slot_cells,
)
from moe_onnx.spec import INDICES, MAPS, MAX_ROWS, Arg, Axes, Dim, OpSpec, TensorInfo, presence

NAME = "MoeTokenPermuteWithRoutingMap"


def moe_token_permute_with_routing_map(
    tokens: Any,
    routing_map: Any,
    probs: Any = None,
    *,
    num_out_tokens: int = 0,
    drop_and_pad: bool = False,
) -> tuple[Array, Array | None, Array]:
    """Copy each token to one row for each expert that the map selects, rows ordered by expert.

    Signature: [T H], [T E], [T E]? -> [N H], [N]?, [N] int32

    With L the pairs (expert e, token t) that the map selects, ordered by expert, then token:

        unpadded:  permute_tokens[j] = tokens[t], permute_probs[j] = probs[t, e]   for (e, t) = L[j];
                   sorted_indices[t*K + k] = j with L[j] = (e, t), e the k-th selected expert of t
        padded:    sorted_indices[e*C + s] = s-th of the tokens of e, selected ones ascending, then
                   others ascending; permute_tokens[i] = tokens[sorted_indices[i]],
                   permute_probs[i] = probs[sorted_indices[i], i // C]

    Unpadded, a token may have fewer than K experts: its last slots are -1, positions in L leave no
    gaps, and rows past the last pair are exactly 0, in permute_tokens and permute_probs.

    Args:
        tokens: float16, bfloat16, float32 (float64 for validation). Copied bit for bit.
        routing_map: bool or int8, non-zero selects.
        probs: Dtype of tokens, or float32 beside bfloat16. None or of shape (0, 0) is absent.
        num_out_tokens: N, at most T*E and below 2^31. Unpadded T*K, where 0 means that K, at most
            512, is the largest number of experts that a token has. Padded E*C; 0 only where T or E is.
        drop_and_pad: Whether every expert has exactly C rows.

    Returns:
        ``(permute_tokens, permute_probs, sorted_indices)``; permute_probs is None without probs.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, LimitError,
        RoutingMapError.
    """
    (rows, mask, weights), infos = read(SPEC, tokens, routing_map, probs)
    attrs, _ = SPEC.check(infos, {"num_out_tokens": num_out_tokens, "drop_and_pad": drop_and_pad})
    assert rows is not None and mask is not None
    num_tokens, experts = mask.shape
    slots, weights = attrs["num_out_tokens"], given(weights)
    if attrs["drop_and_pad"]:
        capacity = slots // max(experts, 1)
        first = np.argsort(mask == 0, axis=0, kind="stable")[:capacity].T.reshape(slots)
        index = first.astype(np.int32)
        cells = first * experts + np.arange(slots) // max(capacity, 1)
    else:
        top_k = slots // max(num_tokens, 1)
        if not slots:
            top_k = int(np.count_nonzero(mask, axis=1).max(initial=0))
            axes = Axes(NAME)
            axes.bind("K", top_k, "'routing_map'")
            check_limits(NAME, axes, padded=False)
            slots = top_k * num_tokens
        slot_cell = slot_cells(NAME, mask, top_k)
        cells = row_cells(NAME, mask, slots)
        row_of_cell = np.full(mask.size + 1, -1, np.int32)  # the last one stands for no cell
        row_of_cell[cells] = np.arange(len(cells))
        index = row_of_cell[slot_cell]
    moved = np.zeros((slots, rows.shape[1]), rows.dtype)
    moved[: len(cells)] = rows[cells // max(experts, 1)]
    if weights is None:
        return moved, None, index
    moved_weights = np.zeros(slots, weights.dtype)
    moved_weights[: len(cells)] = weights.reshape(-1)[cells]
    return moved, moved_weights, index


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    tokens, _, probs = inputs
    if tokens is not None and probs is not None and presence(probs) is not False:
        check_probs_dtype(NAME, "tokens", tokens, probs)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    tokens, routing_map, probs = inputs
    assert tokens is not None
    there = presence(probs)
    padded, slots = bool(attributes["drop_and_pad"]), attributes["num_out_tokens"]
    axes = Axes(NAME)
    axes.read(
        ("tokens", tokens, "T H"),
        ("routing_map", routing_map, "T E"),
        ("probs", None if there is False else probs, "T E"),
    )
    num_tokens, experts = axes["T"], axes["E"]
    cells = num_tokens * experts if isinstance(num_tokens, int) and isinstance(experts, int) else None
    if slots or padded:
        axes.bind("N", slots, "attribute 'num_out_tokens'")
        if padded and not slots and cells:
            raise AttributeValueError(
                f"{NAME}: attribute 'num_out_tokens' must be > 0 with drop_and_pad, got 0. Give E * C, "
                f"with E = {experts} and C rows for each expert.",
                op=NAME,
            )
        if padded:
            axes.bind("C", axes.divide("N", experts, "the number of experts"), "num_out_tokens / E")
        else:
            axes.bind("K", axes.divide("N", num_tokens, "the number of tokens"), "num_out_tokens / T")
        if cells is not None and slots > cells:
            raise LimitError(
                f"{NAME}: attribute 'num_out_tokens' must be at most T * E = {num_tokens} * {experts} = "
                f"{cells}, got {slots}.",
                op=NAME,
            )
        check_limits(NAME, axes, padded)
    elif num_tokens == 0 or experts == 0:
        axes.bind("N", 0, "'routing_map'")
    rows: Dim = axes["N"]
    return [
        TensorInfo(tokens.dtype, (rows, axes["H"])),
        TensorInfo(
            tokens.dtype if probs is None else probs.dtype,
            (rows if there else 0 if there is False else None,),
        ),
        TensorInfo("int32", (rows,)),
    ]


BODY = body(
    "MoeTokenPermuteWithRoutingMap <num_out_tokens: int = 0, drop_and_pad: int = 0>"
    " (tokens, routing_map, probs) => (permute_tokens, permute_probs, sorted_indices)",
    attribute("num_out_tokens"),
    attribute("drop_and_pad"),
    precision("precision", "tokens"),
    precision("probs_precision", "probs"),
    is_not_float("bad_tokens_dtype", "precision"),
    is_not_map("map_dtype", "routing_map"),
    BAD_PROBS_DTYPE,
    rank_of("tokens_rank", "tokens"),
    rank_of("map_rank", "routing_map"),
    rank_of("probs_rank", "probs"),
    flag_squared("drop_and_pad"),
    f"""
    size_end = Constant <value_ints = [{MAX_ROWS + 1}]> ()
    """,
    is_outside("bad_num_out", "num_out_tokens", "zero", "size_end"),
    checks(
        "passed",
        "zero",
        ("tokens must be float16, bfloat16, float32 or float64", "bad_tokens_dtype"),
        ("routing_map must be bool or int8", "map_dtype", "zero"),
        ("num_out_tokens must be in [0, 2^31)", "bad_num_out"),
        ("drop_and_pad must be 0 or 1", "drop_and_pad_squared", "drop_and_pad"),
        ("tokens must be 2-D", "tokens_rank", "two"),
        ("routing_map must be 2-D", "map_rank", "two"),
        ("probs must be 2-D", "probs_rank", "two"),
    ),
    """
    is_padded = Equal (drop_and_pad, one)
    not_padded = Not (is_padded)
    not_padded_size = Cast <to = 7> (not_padded)
    num_tokens = Shape <end = 1> (tokens)
    hidden = Shape <start = 1> (tokens)
    map_tokens = Shape <end = 1> (routing_map)
    num_experts = Shape <start = 1, end = 2> (routing_map)
    probs_tokens = Shape <end = 1> (probs)
    probs_experts = Shape <start = 1, end = 2> (probs)
    """,
    is_there("has_probs", "probs_tokens", "probs_experts"),
    SELECTED,
    NUM_SELECTED,
    """
    # Sizes are made of clamped values only: a runtime folds them before any check can fail.
    num_cells = Mul (num_tokens, num_experts)
    asked = Max (num_out_tokens, zero)
    asked_or_cells = Max (asked, num_cells)
    n_asked = Min (asked, num_cells)
    experts_of_token = ReduceSum <keepdims = 0> (selected, one)
    experts_of_token_or_none = Concat <axis = 0> (experts_of_token, zero)
    k_found = ReduceMax <keepdims = 1> (experts_of_token_or_none)
    n_found = Mul (k_found, map_tokens)
    is_asked = Greater (num_out_tokens, zero)
    takes_asked = Or (is_asked, is_padded)
    n = Where (takes_asked, n_asked, n_found)
    some_cells = Min (num_cells, one)
    some_asked = Min (asked, one)
    asked_if_padded = Mul (some_cells, drop_and_pad)
    probs_dtype = Cast <to = 7> (bad_probs_dtype)
    """,
    SIZES,
    TOP_K_LIMIT,
    sizes_agree(
        "passed_sizes",
        "passed",
        (
            "probs must have the dtype of tokens, or float32 beside bfloat16",
            "probs_dtype",
            "zero",
            "has_probs",
        ),
        ("routing_map must be [T, E]", "map_tokens", "num_tokens", "one"),
        ("probs must be [T, E]", "probs_tokens", "num_tokens", "has_probs"),
        ("probs must have the experts of routing_map", "probs_experts", "num_experts", "has_probs"),
        ("num_out_tokens must be positive when padded", "some_asked", "one", "asked_if_padded"),
        ("num_out_tokens must be at most T * E", "asked_or_cells", "num_cells", "one"),
        ("tokens must divide num_out_tokens", "token_rows", "n", "not_padded_size"),
        ("experts must divide num_out_tokens when padded", "expert_rows", "n", "drop_and_pad"),
        ("top_k must be at most 512 and the number of experts", "k_or_limit", "k_limit", "not_padded_size"),
    ),
    """
    has_more = Greater (k_found, k_free)
    has_too_many = And (has_more, not_padded)
    """,
    check(
        "routing_map must select at most top_k experts per token",
        "has_too_many",
        before="passed_sizes",
        after="passed_map_early",
    ),
    # Of the branch that is not taken too a runtime compares the sizes that it knows at load.
    run_time_zero("tokens"),
    """
    passed_map = Add (passed_map_early, late_zero)
    n_checked = Add (n, passed_map)
    token_of_row, row_cell_all, sorted_long = If (is_padded) <
        then_branch = padded () => (padded_token, padded_cell, padded_sorted) {
            # Equal ones by their position: selected tokens ascending, then the others ascending.
            capacity_checked = Add (capacity, passed_map)
            padded_selected = Transpose <perm = [1, 0]> (selected)
            padded_value, padded_token_2d = TopK <axis = 1> (padded_selected, capacity_checked)
            padded_token = Reshape (padded_token_2d, minus_one)
    """,
    padded_cells("padded_cell", "padded_token"),
    """
            padded_sorted = Identity (padded_token)
        },
        else_branch = unpadded () => (unpadded_token, unpadded_cell, unpadded_sorted) {
    """,
    ROW_CELLS,
    """
            # No pair is the cell behind the last, of the token behind the last.
            unpadded_cell = Slice (cell_of_row_or_none, zero, n_checked, zero)
            unpadded_token = Div (unpadded_cell, some_experts)
            rank_axis = Constant <value_int = 1> ()
            rank_2d = CumSum <exclusive = 1> (selected, rank_axis)
            rank_of_cell = Reshape (rank_2d, minus_one)
            rank = Gather <axis = 0> (rank_of_cell, cell_of_row_free)
            k_checked = Add (k_free, passed_map)
            first_slot = Mul (row_token, k_checked)
            slot_of_row = Add (first_slot, rank)
    """,
    count_up("place", "num_pairs"),
    """
            no_row = Expand (minus_one, n_checked)
            unpadded_sorted = ScatterElements <axis = 0> (no_row, slot_of_row, place)
        }
    >
    sorted_indices = Cast <to = 6> (sorted_long)
    has_unused = Less (num_selected, n_checked)
    some_unused = And (has_unused, not_padded)
    """,
    rows_or_zeros("permute_tokens", "tokens", "token_of_row", "some_unused"),
    ROW_PROB,
    """
    num_probs = Mul (n_checked, has_probs)
    permute_probs = Slice (row_prob, zero, num_probs, zero)
    """,
)

SPEC = OpSpec(
    name=NAME,
    summary="Dispatch: copies each token to a row for each expert that the map selects, in expert order.",
    formula="permute_tokens[j] = tokens[t] for (e, t) = L[j], the selected pairs by expert, then token",
    inputs=(
        Arg("tokens", "T H", "tokens", differentiable=True),
        Arg("routing_map", "T E", "non-zero selects", MAPS, "M"),
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
        Arg("permute_tokens", "N H", "rows by expert; 0 past the last pair", differentiable=True),
        Arg(
            "permute_probs",
            "N",
            "weight of each row; empty without probs",
            type_var="TP",
            optional=True,
            differentiable=True,
        ),
        Arg(
            "sorted_indices",
            "N",
            "row of each slot, token-major, -1 where a token has no k-th expert; padded: token of each row",
            INDICES,
            "I",
        ),
    ),
    attributes=(
        size_attribute("num_out_tokens", "N: T*K, 0 takes K from the map; padded E*C"),
        DROP_AND_PAD,
    ),
    shapes=_shapes,
    reference=moe_token_permute_with_routing_map,
    body=BODY,
    source="aclnnMoeTokenPermuteWithRoutingMap",
    gradient="MoeTokenPermuteWithRoutingMapGrad",
    mixes=_mixes,
)
