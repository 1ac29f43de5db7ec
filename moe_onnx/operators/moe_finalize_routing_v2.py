"""MoeFinalizeRoutingV2: the combine by index, each token the scaled sum of its experts' rows.

Source: aclnnMoeFinalizeRoutingV2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.operators._arrays import Array, check_range, check_unique, given, read, wide_dtype
from moe_onnx.operators._body import (
    IN_FLOAT64,
    attribute,
    body,
    check,
    checks,
    integer_code,
    is_not,
    is_not_float,
    is_outside,
    is_there,
    per_precision,
    precision,
    rank_of,
    rows_or_zeros,
    sizes_agree,
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
from moe_onnx.spec import INDICES, Arg, Attr, Axes, OpSpec, TensorInfo, presence

NAME = "MoeFinalizeRoutingV2"


def moe_finalize_routing_v2(
    expanded_x: Any,
    expanded_row_idx: Any,
    x1: Any = None,
    x2: Any = None,
    bias: Any = None,
    scales: Any = None,
    expert_idx: Any = None,
    *,
    drop_pad_mode: int = 0,
) -> Array:
    """Sum the experts' rows of each token, each with its expert's bias, weighted by its scales.

    Signature: [N H] or [E C H], [N] int32, [T H]?, [T H]?, [E H]?, [T K]?, [T K] int32? -> [T H]

        out[i] = x1[i] + x2[i] + sum over k = 0 .. K-1 of scales[i, k] * (X[p] + bias[expert_idx[i, k]])

    where X is ``expanded_x`` with its leading axes flattened, p the row of slot (i, k), N = T*K, and
    what is absent is left out (scales: 1, K is 1 then). In drop/pad a slot of row -1 is dropped with
    its whole term: its scale, expert and bias are not read. Sums are made in float32 (float64 for
    float64), x1 + x2 first, then the slots in their order, and rounded once (nearest even).

    Args:
        expanded_x: Rows of the experts; float16, bfloat16, float32 (float64 for validation). ``[N, H]``,
            or ``[E, C, H]`` in drop/pad. Every row may be named once.
        expanded_row_idx: int32 ``[N]``, unique apart from -1: in ``[0, N)``, or in ``[-1, E*C)`` in
            drop/pad. The row of slot (i, k) stands at k*T + i in modes 0 and 1, at i*K + k in 2 and 3.
        x1: Added to the sums; dtype of expanded_x. None or of shape (0, 0) is absent, as for all below.
        x2: As x1, which it needs.
        bias: One row for each expert, dtype of expanded_x. Needs expert_idx.
        scales: Dtype of expanded_x, or float32 beside bfloat16.
        expert_idx: int32 in ``[0, E)``; read with bias only, and not where a slot is dropped.
        drop_pad_mode: 0 and 2 dropless, 1 and 3 drop/pad; 0 and 1 by column, 2 and 3 by row.

    Returns:
        ``out`` ``[T, H]`` in the dtype of ``expanded_x``.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, IndexValueError.
    """
    arrays, infos = read(SPEC, expanded_x, expanded_row_idx, x1, x2, bias, scales, expert_idx)
    attrs, outputs = SPEC.check(infos, {"drop_pad_mode": drop_pad_mode})
    expanded, index = arrays[:2]
    assert expanded is not None and index is not None and outputs[0] is not None and outputs[0].shape
    first, second, offsets, weights, experts = (given(array) for array in arrays[2:])
    tokens, hidden = (int(size or 0) for size in outputs[0].shape)
    rows = expanded.reshape(int(np.prod(expanded.shape[:-1])), hidden)
    padded, by_column = attrs["drop_pad_mode"] % 2 == 1, attrs["drop_pad_mode"] < 2
    mode = "drop/pad, -1 is a dropped slot" if padded else "dropless, drop_pad_mode 0 or 2"
    check_range(NAME, "expanded_row_idx", index, -1 if padded else 0, len(rows), mode)
    check_unique(NAME, "expanded_row_idx", index, "each slot has a row of its own")
    top_k = 1 if weights is None else weights.shape[1]
    slots = index.reshape(top_k, tokens).T if by_column else index.reshape(tokens, top_k)
    live = slots >= 0
    if offsets is not None and experts is not None:
        check_experts(NAME, experts, len(offsets), live)
    total = np.zeros((tokens, hidden), wide_dtype(rows.dtype))
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        for skip in (first, second):
            if skip is not None:
                total += skip.astype(total.dtype)
        for k in range(top_k):
            at = live[:, k]
            term = rows[slots[at, k]].astype(total.dtype)
            if offsets is not None and experts is not None:
                term += offsets[experts[at, k]].astype(total.dtype)
            if weights is not None:
                term *= weights[at, k, None].astype(total.dtype)
            total[at] += term
        return total.astype(rows.dtype)


def _missing(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> None:
    _, _, x1, x2, bias, _, expert_idx = inputs
    if presence(x2):
        require_companions(NAME, "x2", x1=presence(x1) is not False)
    if presence(bias):
        require_companions(NAME, "bias", expert_idx=presence(expert_idx) is not False)


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    rows, _, x1, x2, bias, scales, _ = inputs
    assert rows is not None
    check_dtypes(NAME, "expanded_x", rows, scales, x1=x1, x2=x2, bias=bias)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    rows, index, x1, x2, bias, scales, expert_idx = inputs
    assert rows is not None
    axes = Axes(NAME)
    axes.read(
        ("expanded_row_idx", index, "N"),
        ("expanded_x", rows, "E C H" if attributes["drop_pad_mode"] % 2 else "N H"),
        ("x1", there(x1), "T H"),
        ("x2", there(x2), "T H"),
        ("bias", there(bias), "E H"),
        ("scales", there(scales), "T K"),
        ("expert_idx", there(expert_idx), "T K"),
    )
    bind_slots(axes, scales)
    return [TensorInfo(rows.dtype, (axes["T"], axes["H"]))]


# The sum, once per precision. It is a product of matrices: a slot that is dropped has weight 0 and
# rows of zeros. x1 and x2 are stacked, whichever there are, and added up.
_SUM = """
    $rows = Cast <to = $DTYPE> (slot_rows)
    $weight = Cast <to = $DTYPE> (slot_weight_3d)
    $total = If (has_bias_now) <
        then_branch = $biased () => ($biased_total) {
            $bias = Cast <to = $DTYPE> (slot_bias)
            $biased_rows = Add ($rows, $bias)
            $biased_total = MatMul ($weight, $biased_rows)
        },
        else_branch = $unbiased () => ($rows_total) { $rows_total = MatMul ($weight, $rows) }
    >
    $total_2d = Reshape <allowzero = 1> ($total, out_shape)
    $skip = If (has_x1_now) <
        then_branch = $skips () => ($skip_sum) {
            $x1_flat = Reshape (x1, minus_one)
            $x2_flat = Reshape (x2, minus_one)
            $stack_flat = Concat <axis = 0> ($x1_flat, $x2_flat)
            $stack_given = Reshape <allowzero = 1> ($stack_flat, stack_shape)
            $stack = Cast <to = $DTYPE> ($stack_given)
            $skip_sum = ReduceSum <keepdims = 0> ($stack, zero)
        },
        else_branch = $no_skips () => ($no_skip) {
            $no_skip_shape = Concat <axis = 0> (one, one)
            $no_skip_f32 = ConstantOfShape ($no_skip_shape)
            $no_skip = Cast <to = $DTYPE> ($no_skip_f32)
        }
    >
    $sum = Add ($skip, $total_2d)
    $out = CastLike ($sum, expanded_x)
"""

BODY = body(
    "MoeFinalizeRoutingV2 <drop_pad_mode: int = 0>"
    " (expanded_x, expanded_row_idx, x1, x2, bias, scales, expert_idx) => (out)",
    attribute("drop_pad_mode"),
    precision("precision", "expanded_x"),
    IN_FLOAT64,
    precision("x1_precision", "x1"),
    precision("x2_precision", "x2"),
    is_not_float("bad_rows_dtype", "precision"),
    integer_code("index_dtype", "expanded_row_idx"),
    integer_code("expert_dtype", "expert_idx"),
    is_not("bad_x1_dtype", "precision", "x1_precision"),
    is_not("bad_x2_dtype", "precision", "x2_precision"),
    """
    padded = Mod (drop_pad_mode, two)
    not_padded = Sub (one, padded)
    want_rank = Add (two, padded)
    four = Add (two, two)
    is_column = Less (drop_pad_mode, two)
    """,
    is_outside("bad_mode", "drop_pad_mode", "zero", "four"),
    rank_of("rows_rank", "expanded_x"),
    rank_of("index_rank", "expanded_row_idx"),
    rank_of("x1_rank", "x1"),
    rank_of("x2_rank", "x2"),
    rank_of("bias_rank", "bias"),
    rank_of("scales_rank", "scales"),
    rank_of("expert_rank", "expert_idx"),
    checks(
        "passed",
        "zero",
        ("expanded_x must be float16, bfloat16, float32 or float64", "bad_rows_dtype"),
        ("expanded_row_idx must be int32", "index_dtype", "int32_code"),
        ("expert_idx must be int32", "expert_dtype", "int32_code"),
        ("drop_pad_mode must be 0, 1, 2 or 3", "bad_mode"),
        ("expanded_x must be 2-D, or 3-D in drop/pad", "rows_rank", "want_rank"),
        ("expanded_row_idx must be 1-D", "index_rank", "one"),
        ("x1 must be 2-D", "x1_rank", "two"),
        ("x2 must be 2-D", "x2_rank", "two"),
        ("bias must be 2-D", "bias_rank", "two"),
        ("scales must be 2-D", "scales_rank", "two"),
        ("expert_idx must be 2-D", "expert_rank", "two"),
    ),
    """
    n = Shape <end = 1> (expanded_row_idx)
    hidden = Shape <start = -1> (expanded_x)
    leading = Shape <end = -1> (expanded_x)
    num_rows = ReduceProd <keepdims = 1> (leading)
    expanded_experts = Shape <end = 1> (expanded_x)
    x1_tokens = Shape <end = 1> (x1)
    x1_hidden = Shape <start = 1, end = 2> (x1)
    x2_tokens = Shape <end = 1> (x2)
    x2_hidden = Shape <start = 1, end = 2> (x2)
    """,
    is_there("has_x1", "x1_tokens", "x1_hidden"),
    is_there("has_x2", "x2_tokens", "x2_hidden"),
    sizes_of_slots(),
    """
    x1_dtype = Cast <to = 7> (bad_x1_dtype)
    x2_dtype = Cast <to = 7> (bad_x2_dtype)
    bias_if_padded = Mul (has_bias, padded)
    """,
    sizes_agree(
        "passed_sizes",
        "passed",
        ("x1 is missing although x2 is given", "has_x1", "one", "has_x2"),
        ("x1 must have the dtype of expanded_x", "x1_dtype", "zero", "has_x1"),
        ("x2 must have the dtype of expanded_x", "x2_dtype", "zero", "has_x2"),
        *slot_rules("expanded_x"),
        ("expanded_x must have a row for every slot", "num_rows", "n", "not_padded"),
        ("x1 must have the tokens of the slots", "x1_tokens", "num_tokens", "has_x1"),
        ("x1 must have the hidden size of expanded_x", "x1_hidden", "hidden", "has_x1"),
        ("x2 must have the tokens of the slots", "x2_tokens", "num_tokens", "has_x2"),
        ("x2 must have the hidden size of expanded_x", "x2_hidden", "hidden", "has_x2"),
        ("bias must have the experts of expanded_x", "num_experts", "expanded_experts", "bias_if_padded"),
    ),
    """
    # An index is looked up only after its range was checked: Gather wraps -1 to the last row.
    index_free = Cast <to = 7> (expanded_row_idx)
    low = Sub (zero, padded)
    """,
    is_outside("bad_index", "index_free", "low", "num_rows"),
    check("expanded_row_idx must be in range", "bad_index", before="passed_sizes", after="passed_index"),
    """
    index = Add (index_free, passed_index)
    is_dropped_flat = Less (index, zero)
    dropped_long = Cast <to = 7> (is_dropped_flat)
    num_dropped = ReduceSum <keepdims = 1> (dropped_long)
    """,
    late_sizes("num_dropped"),
    """
    has_x1_late = Add (has_x1, late_zero)
    has_x1_now = Cast <to = 9> (has_x1_late)
    slot_row = If (is_column) <
        then_branch = by_column () => (turned_index) {
            columns_shape = Concat <axis = 0> (k_late, tokens_late)
            columns = Reshape <allowzero = 1> (index, columns_shape)
            turned_index = Transpose <perm = [1, 0]> (columns)
        },
        else_branch = by_row () => (index_2d) {
            index_2d = Reshape <allowzero = 1> (index, slots_shape)
        }
    >
    is_live = GreaterOrEqual (slot_row, zero)
    unit = Constant <value = double {1.0}> ()
    no_weight = Constant <value = double {0.0}> ()
    slot_scale = If (has_scales_now) <
        then_branch = scaled () => (some_scale) {
            scales_2d = Reshape <allowzero = 1> (scales, slots_shape)
            some_scale = Cast <to = 11> (scales_2d)
        },
        else_branch = unscaled () => (no_scale) { no_scale = Expand (unit, slots_shape) }
    >
    slot_weight = Where (is_live, slot_scale, no_weight)
    slot_weight_3d = Unsqueeze (slot_weight, one)
    """,
    biases("slot_bias", "slots_shape", "is_live", "bias_at = Identity (slot_expert)"),
    """
    rows_shape = Concat <axis = 0> (num_rows, hidden)
    rows = Reshape <allowzero = 1> (expanded_x, rows_shape)
    some_dropped = Cast <to = 9> (num_dropped)
    """,
    rows_or_zeros("slot_rows", "rows", "slot_row", "some_dropped"),
    """
    out_shape = Concat <axis = 0> (num_tokens, hidden)
    num_skips = Add (has_x1, has_x2)
    stack_shape = Concat <axis = 0> (num_skips, tokens_late, hidden)
    """,
    per_precision(("out",), _SUM),
)

SPEC = OpSpec(
    name=NAME,
    summary="Combine by index: sums the rows of each token's experts, with biases, weighted by scales.",
    formula="out[i] = x1[i] + x2[i] + sum over k of scales[i, k] * (X[p] + bias[expert_idx[i, k]]), "
    "p = expanded_row_idx[k*T + i] (modes 0, 1) or [i*K + k] (2, 3)",
    inputs=(
        Arg("expanded_x", "N H | E C H", "rows of the experts: dropless, or drop/pad", differentiable=True),
        Arg(
            "expanded_row_idx",
            "N",
            "row of each slot, unique apart from -1: in [0, N), or in [-1, E*C) in drop/pad, where -1 "
            "is a dropped slot",
            INDICES,
            "I",
        ),
        Arg("x1", "T H", "added to the sums; shape (0, 0) is absent", optional=True, differentiable=True),
        Arg("x2", "T H", "as x1, which it needs", optional=True, differentiable=True),
        BIAS,
        SCALES,
        EXPERT_IDX,
    ),
    outputs=(Arg("out", "T H", "the sums", differentiable=True),),
    attributes=(
        Attr(
            "drop_pad_mode",
            "int",
            "0, 2: dropless, 1, 3: drop/pad; 0, 1: expanded_row_idx by column, 2, 3: by row",
            "0, 1, 2 or 3",
            lambda v: v in (0, 1, 2, 3),
            0,
        ),
    ),
    shapes=_shapes,
    reference=moe_finalize_routing_v2,
    body=BODY,
    source="aclnnMoeFinalizeRoutingV2",
    gradient="MoeFinalizeRoutingV2Grad",
    missing=_missing,
    mixes=_mixes,
)
