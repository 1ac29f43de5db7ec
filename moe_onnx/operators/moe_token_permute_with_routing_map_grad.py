"""MoeTokenPermuteWithRoutingMapGrad: the gradient of the dispatch by a routing map.

Source: aclnnMoeTokenPermuteWithRoutingMapGrad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moe_onnx.errors import MissingInputError
from moe_onnx.operators._arrays import (
    Array,
    check_range,
    check_unique,
    given,
    read,
    sum_of_slots,
    wide_dtype,
)
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
    DROP_AND_PAD,
    LAST_SLOT,
    ROW_CELLS,
    SELECTED,
    SIZES,
    TOKEN_ROWS,
    check_probs_dtype,
    padded_cells,
    row_cells,
    size_attribute,
)
from moe_onnx.spec import INDICES, MAPS, MAX_ROWS, Arg, Axes, OpSpec, TensorInfo, presence

NAME = "MoeTokenPermuteWithRoutingMapGrad"
ROWS, PROBS = "permuted_token_output_grad", "permuted_probs_output_grad"


def moe_token_permute_with_routing_map_grad(
    permuted_token_output_grad: Any,
    permuted_probs_output_grad: Any,
    sorted_indices: Any,
    routing_map: Any = None,
    *,
    num_experts: int = 0,
    tokens_num: int = 0,
    drop_and_pad: bool = False,
) -> tuple[Array, Array | None]:
    """Gradient of MoeTokenPermuteWithRoutingMap with respect to tokens and probabilities.

    Signature: [N H], [N]?, [N] int32, [T E]? -> [T H], [T E]?

        unpadded:  tokens_grad[t] = sum over k = 0 .. K-1 of g[sorted_indices[t*K + k]]
                   probs_grad[t, e] = g_probs[j] for the pair (e, t) = L[j]
        padded:    tokens_grad[sorted_indices[i]] += g[i]     for i = 0 .. N-1 in turn
                   probs_grad[sorted_indices[i], i // C] = g_probs[i]

    Unpadded, K = N // T, a slot of -1 adds nothing, and L are the pairs that the map selects,
    ordered by expert, then token. Padded, C = N // E, and if two rows of an expert have one token,
    the last one gives probs_grad. Sums are made in float32 (float64 for float64), rounded once;
    probs_grad is copied, and 0 in all other cells. NaN in rows that no slot names stays there.

    Args:
        permuted_token_output_grad: g; float16, bfloat16, float32 (float64 for validation).
        permuted_probs_output_grad: g_probs; dtype of g, or float32 beside bfloat16. None or of shape
            (0, 0) is absent.
        sorted_indices: int32, as the forward gives it. Unpadded: the row of each slot, token-major,
            in ``[-1, N)``, unique apart from -1. Padded: the token of each row, in ``[0, T)``.
        routing_map: bool or int8, non-zero selects; its values are read only where permuted_probs_output_grad
            is given and nothing is padded, and there it is needed.
        num_experts: E; 0 takes it from routing_map. Needed with permuted_probs_output_grad.
        tokens_num: T; 0 takes it from routing_map.
        drop_and_pad: Whether every expert has exactly C rows.

    Returns:
        ``(tokens_grad, probs_grad)``; probs_grad in the dtype of permuted_probs_output_grad, None
        without it.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, IndexValueError,
        RoutingMapError.
    """
    (grad, probs, index, mask), infos = read(
        SPEC, permuted_token_output_grad, permuted_probs_output_grad, sorted_indices, routing_map
    )
    attributes = {"num_experts": num_experts, "tokens_num": tokens_num, "drop_and_pad": drop_and_pad}
    attrs, shapes = SPEC.check(infos, attributes)
    assert grad is not None and index is not None and shapes[0] is not None and shapes[0].shape
    rows, tokens, probs = len(index), int(shapes[0].shape[0] or 0), given(probs)
    if attrs["drop_and_pad"]:
        check_range(NAME, "sorted_indices", index, 0, tokens, "drop_and_pad, a token")
        total = np.zeros((tokens, grad.shape[1]), wide_dtype(grad.dtype))
        with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
            np.add.at(total, index, grad.astype(total.dtype))  # one row after the other
            tokens_grad = total.astype(grad.dtype)
    else:
        check_range(NAME, "sorted_indices", index, -1, rows, "-1 leaves the slot out")
        check_unique(NAME, "sorted_indices", index, "each slot has a row of its own")
        tokens_grad = sum_of_slots(grad, index.reshape(tokens, rows // max(tokens, 1)))
    if probs is None:
        return tokens_grad, None
    assert shapes[1] is not None and shapes[1].shape
    experts = int(shapes[1].shape[1] or 0)
    if attrs["drop_and_pad"]:
        capacity = rows // max(experts, 1)
        cells = index.astype(np.int64) * experts + np.arange(rows) // max(capacity, 1)
    else:
        assert mask is not None
        cells = row_cells(NAME, mask, rows)
    probs_grad = np.zeros((tokens, experts), probs.dtype)
    # Numpy keeps the last of several values for one place, as the contract wants it.
    probs_grad.reshape(-1)[cells] = probs[: len(cells)]
    return tokens_grad, probs_grad


def _is_of_nothing(routing_map: TensorInfo | None, index: TensorInfo | None) -> bool:
    """Whether a map of shape (0, 0), which is absent, may be the map of no tokens: there are no rows."""
    return routing_map is not None and index is not None and index.shape == (0,)


def _missing(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> None:
    _, probs, index, routing_map = inputs
    # What is neither false nor left out is refused, or padded, later on.
    padded = attributes.get("drop_and_pad")
    is_unpadded = padded is None or (isinstance(padded, (int, np.bool_)) and not padded)
    is_missing = presence(routing_map) is False and not _is_of_nothing(routing_map, index)
    if is_unpadded and presence(probs) and is_missing:
        raise MissingInputError(
            f"{NAME}: 'routing_map' is missing although '{PROBS}' is given. Pass it, or leave out '{PROBS}'.",
            op=NAME,
        )


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    rows, probs, _, _ = inputs
    if rows is not None and probs is not None and presence(probs) is not False:
        check_probs_dtype(NAME, ROWS, rows, probs, PROBS)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    rows, probs, index, routing_map = inputs
    assert rows is not None and index is not None
    there, has_map = presence(probs), presence(routing_map)
    axes = Axes(NAME)
    axes.read(
        (ROWS, rows, "N H"),
        (PROBS, probs if there else None, "N"),
        ("sorted_indices", index, "N"),
        ("routing_map", _known(routing_map, has_map), "T E"),
    )
    for letter, name in (("T", "tokens_num"), ("E", "num_experts")):
        if attributes[name]:
            axes.bind(letter, attributes[name], f"attribute '{name}'")
        elif has_map is False and _is_of_nothing(routing_map, index):
            axes.bind(letter, 0, "'routing_map', of shape [0, 0]")
        elif has_map is False and (letter == "T" or there):
            what = "tokens" if letter == "T" else "experts"
            raise MissingInputError(
                f"{NAME}: 'routing_map' and attribute '{name}' are both missing, so the number of {what} is "
                f"unknown. Give {name}.",
                op=NAME,
            )
    if attributes["drop_and_pad"]:
        axes.bind("C", axes.divide("N", axes["E"], "the number of experts"), "N / E")
    else:
        axes.bind("K", axes.divide("N", axes["T"], "the number of tokens"), "N / T")
    tokens_grad = TensorInfo(rows.dtype, (axes["T"], axes["H"]))
    if probs is None:
        return [tokens_grad, None]
    shape = (axes["T"], axes["E"]) if there else (0, 0) if there is False else (None, None)
    return [tokens_grad, TensorInfo(probs.dtype, shape)]


def _known(routing_map: TensorInfo | None, has_map: bool | None) -> TensorInfo | None:
    if has_map is None and routing_map is not None and routing_map.shape is not None:
        # [0, ?] may be [0, 0] and so absent: its 0 is not yet the number of tokens.
        return replace(routing_map, shape=tuple(dim or None for dim in routing_map.shape))
    return None if has_map is False else routing_map


# The sums over the rows of a token, once per precision.
_SLOT_SUM = """
    $rows = Cast <to = $DTYPE> (slot_rows)
    $total = ReduceSum <keepdims = 0> ($rows, one)
    $summed = CastLike ($total, permuted_token_output_grad)
"""
_ROW_SUM = (
    """
    $added = Cast <to = $DTYPE> (permuted_token_output_grad)
"""
    + ADD_TO_TOKENS
    + """
    $scattered = CastLike ($sum, permuted_token_output_grad)
"""
)

BODY = body(
    "MoeTokenPermuteWithRoutingMapGrad <num_experts: int = 0, tokens_num: int = 0, drop_and_pad: int = 0>"
    " (permuted_token_output_grad, permuted_probs_output_grad, sorted_indices, routing_map)"
    " => (tokens_grad, probs_grad)",
    attribute("num_experts", "experts_given"),
    attribute("tokens_num", "tokens_given"),
    attribute("drop_and_pad"),
    precision("precision", ROWS),
    IN_FLOAT64,
    precision("probs_precision", PROBS),
    is_not_float("bad_rows_dtype", "precision"),
    integer_code("index_dtype", "sorted_indices"),
    is_not_map("map_dtype", "routing_map"),
    BAD_PROBS_DTYPE,
    rank_of("rows_rank", ROWS),
    rank_of("index_rank", "sorted_indices"),
    rank_of("map_rank", "routing_map"),
    """
    # Absent is of shape [0, 0], not [0]: the rank tells it.
    probs_dims = Shape (permuted_probs_output_grad)
    probs_rank = Shape (probs_dims)
    probs_are_1d = Equal (probs_rank, one)
    has_no_probs = Not (probs_are_1d)
    probs_dims_and_zero = Concat <axis = 0> (probs_dims, zero)
    probs_largest = ReduceMax <keepdims = 1> (probs_dims_and_zero)
    probs_not_empty = Greater (probs_largest, zero)
    probs_not_2d = BitwiseXor (probs_rank, two)
    probs_not_2d_bool = Cast <to = 9> (probs_not_2d)
    probs_not_absent = Or (probs_not_empty, probs_not_2d_bool)
    bad_probs_rank = And (has_no_probs, probs_not_absent)
    """,
    flag_squared("drop_and_pad"),
    f"""
    max_size = Constant <value_ints = [{MAX_ROWS}]> ()
    size_end = Add (max_size, one)
    """,
    is_outside("bad_experts", "experts_given", "zero", "size_end"),
    is_outside("bad_tokens", "tokens_given", "zero", "size_end"),
    checks(
        "passed",
        "zero",
        ("permuted_token_output_grad must be float16, bfloat16, float32 or float64", "bad_rows_dtype"),
        ("sorted_indices must be int32", "index_dtype", "int32_code"),
        ("num_experts must be in [0, 2^31)", "bad_experts"),
        ("tokens_num must be in [0, 2^31)", "bad_tokens"),
        ("drop_and_pad must be 0 or 1", "drop_and_pad_squared", "drop_and_pad"),
        ("permuted_token_output_grad must be 2-D", "rows_rank", "two"),
        ("permuted_probs_output_grad must be 1-D", "bad_probs_rank"),
        ("sorted_indices must be 1-D", "index_rank", "one"),
        ("routing_map must be 2-D", "map_rank", "two"),
    ),
    """
    is_padded = Equal (drop_and_pad, one)
    not_padded = Not (is_padded)
    not_padded_size = Cast <to = 7> (not_padded)
    is_probs = Not (has_no_probs)
    has_probs = Cast <to = 7> (is_probs)
    n = Shape <end = 1> (permuted_token_output_grad)
    hidden = Shape <start = 1> (permuted_token_output_grad)
    n_index = Shape <end = 1> (sorted_indices)
    n_probs = Shape <end = 1> (permuted_probs_output_grad)
    map_tokens = Shape <end = 1> (routing_map)
    map_experts = Shape <start = 1, end = 2> (routing_map)
    """,
    is_there("has_map", "map_tokens", "map_experts"),
    is_there("has_rows", "n"),
    """
    # Sizes are made of clamped values only: a runtime folds them before any check can fail.
    experts_not_negative = Max (experts_given, zero)
    experts_asked = Min (experts_not_negative, max_size)
    tokens_not_negative = Max (tokens_given, zero)
    tokens_asked = Min (tokens_not_negative, max_size)
    is_map = Cast <to = 9> (has_map)
    num_experts = Where (is_map, map_experts, experts_asked)
    num_tokens = Where (is_map, map_tokens, tokens_asked)
    has_experts_asked = Min (experts_asked, one)
    has_tokens_asked = Min (tokens_asked, one)
    has_experts = Max (has_experts_asked, has_map)
    has_tokens = Max (has_tokens_asked, has_map)
    both_experts = Mul (has_experts_asked, has_map)
    both_tokens = Mul (has_tokens_asked, has_map)
    probs_and_rows = Mul (has_probs, has_rows)
    probs_and_rows_unpadded = Mul (probs_and_rows, not_padded_size)
    experts_if_padded = Mul (has_experts, drop_and_pad)
    probs_dtype = Cast <to = 7> (bad_probs_dtype)
    """,
    SIZES,
    SELECTED,
    sizes_agree(
        "passed_sizes",
        "passed",
        (
            "routing_map is missing although permuted_probs_output_grad is given",
            "has_map",
            "one",
            "probs_and_rows_unpadded",
        ),
        ("routing_map and tokens_num are both missing", "has_tokens", "one", "has_rows"),
        ("routing_map and num_experts are both missing", "has_experts", "one", "probs_and_rows"),
        ("routing_map must be bool or int8", "map_dtype", "zero", "has_map"),
        (
            "permuted_probs_output_grad must have the dtype of permuted_token_output_grad, or float32 beside "
            "bfloat16",
            "probs_dtype",
            "zero",
            "has_probs",
        ),
        ("sorted_indices must be as long as permuted_token_output_grad", "n_index", "n", "one"),
        (
            "permuted_probs_output_grad must be as long as permuted_token_output_grad",
            "n_probs",
            "n",
            "has_probs",
        ),
        ("routing_map must have tokens_num tokens", "map_tokens", "tokens_asked", "both_tokens"),
        ("routing_map must have num_experts experts", "map_experts", "experts_asked", "both_experts"),
        ("tokens must divide the length of sorted_indices", "token_rows", "n", "not_padded_size"),
        (
            "experts must divide the length of sorted_indices when padded",
            "expert_rows",
            "n",
            "experts_if_padded",
        ),
    ),
    """
    # An index is looked up only after its range was checked: Gather wraps -1 to the last row.
    index_given = Cast <to = 7> (sorted_indices)
    low = Sub (drop_and_pad, one)
    high = Where (is_padded, num_tokens, n)
    """,
    is_outside("bad_index", "index_given", "low", "high"),
    check("sorted_indices must be in range", "bad_index", before="passed_sizes", after="passed_index"),
    """
    index = Add (index_given, passed_index)
    """,
    run_time_zero("permuted_token_output_grad"),
    """
    num_tokens_late = Add (num_tokens, late_zero)
    num_experts_late = Add (num_experts, late_zero)
    tokens_grad = If (is_padded) <
        then_branch = padded () => (padded_sum) {
    """,
    TOKEN_ROWS,
    per_precision(("scattered",), _ROW_SUM),
    """
            padded_sum = Identity (scattered)
        },
        else_branch = unpadded () => (unpadded_sum) {
            slots_shape = Concat <axis = 0> (num_tokens_late, k_free)
            slot_row = Reshape <allowzero = 1> (index, slots_shape)
            is_named_flat = GreaterOrEqual (index, zero)
            named_long = Cast <to = 7> (is_named_flat)
            num_named = ReduceSum <keepdims = 1> (named_long)
            some_left_out = Less (num_named, n)
    """,
    rows_or_zeros("slot_rows", ROWS, "slot_row", "some_left_out"),
    per_precision(("summed",), _SLOT_SUM),
    """
            unpadded_sum = Identity (summed)
        }
    >
    has_probs_late = Add (has_probs, late_zero)
    has_probs_now = Cast <to = 9> (has_probs_late)
    cells_shape = Concat <axis = 0> (num_tokens_late, num_experts_late)
    num_cells = Mul (num_tokens_late, num_experts_late)
    probs_grad = If (has_probs_now) <
        then_branch = with_probs () => (given_probs_grad) {
    """,
    padded_cells("padded_cell", "index"),
    ROW_CELLS,
    """
            unpadded_cell = Slice (cell_of_row_or_none, zero, n, zero)
            cell = Where (is_padded, padded_cell, unpadded_cell)
    """,
    LAST_SLOT,
    """
            probs_given = Reshape (permuted_probs_output_grad, minus_one)
            no_prob_f32 = ConstantOfShape (one)
            no_prob = CastLike (no_prob_f32, permuted_probs_output_grad)
            probs_and_none = Concat <axis = 0> (probs_given, no_prob)
            probs_grad_flat = Gather <axis = 0> (probs_and_none, last_slot)
            given_probs_grad = Reshape <allowzero = 1> (probs_grad_flat, cells_shape)
        },
        else_branch = without_probs () => (absent_probs_grad) {
            absent_shape = Concat <axis = 0> (zero, zero)
            absent_f32 = ConstantOfShape (absent_shape)
            absent_probs_grad = CastLike (absent_f32, permuted_probs_output_grad)
        }
    >
    """,
)

SPEC = OpSpec(
    name=NAME,
    summary="Gradient of MoeTokenPermuteWithRoutingMap for tokens and probabilities.",
    formula="tokens_grad[t] = sum over k of g[sorted_indices[t*K + k]];  probs_grad[t, e] = g_probs[j], "
    "(e, t) = L[j]",
    inputs=(
        Arg(ROWS, "N H", "g, gradient of the rows", differentiable=True),
        Arg(
            PROBS,
            "N",
            "g_probs, gradient of the rows' weights; shape (0, 0) is absent",
            type_var="TP",
            optional=True,
            differentiable=True,
        ),
        Arg(
            "sorted_indices",
            "N",
            "row of each slot, in [-1, N), unique apart from -1; padded: token of each row",
            INDICES,
            "I",
        ),
        Arg(
            "routing_map",
            "T E",
            "non-zero selects; needed with g_probs unless padded",
            MAPS,
            "M",
            optional=True,
        ),
    ),
    outputs=(
        Arg("tokens_grad", "T H", "the sums; 0 for a token without rows"),
        Arg("probs_grad", "T E", "0 in cells without a row", type_var="TP", optional=True),
    ),
    attributes=(
        size_attribute("num_experts", "E; 0 takes it from routing_map"),
        size_attribute("tokens_num", "T; 0 takes it from routing_map"),
        DROP_AND_PAD,
    ),
    shapes=_shapes,
    reference=moe_token_permute_with_routing_map_grad,
    body=BODY,
    source="aclnnMoeTokenPermuteWithRoutingMapGrad",
    missing=_missing,
    mixes=_mixes,
)
