"""MoeGroupedMatmul: the experts' linear layer, the rows of each expert times its own weight.

The rows are those of MoeInitRoutingV2, the group sizes its ``expert_tokens_count_or_cumsum`` (counts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.operators._arrays import Array, read, wide_dtype
from moe_onnx.operators._body import (
    IN_FLOAT64,
    body,
    checks,
    integer_code,
    is_not,
    is_not_float,
    per_precision,
    precision,
    rank_of,
)
from moe_onnx.operators._groups import (
    ARGUMENTS,
    BAD_SIZES_DTYPE,
    BAD_SIZES_RANK,
    BAD_TRANSPOSE,
    GROUP_SIZES,
    GROUPS,
    TRANSPOSE_WEIGHT,
    check_no_rows_without_groups,
    group_starts,
)
from moe_onnx.spec import Arg, Axes, OpSpec, TensorInfo, require_same_dtype

NAME = "MoeGroupedMatmul"


def moe_grouped_matmul(x: Any, weight: Any, group_sizes: Any, *, transpose_weight: bool | int = 0) -> Array:
    """Multiply the rows of each expert with the expert's weight.

    Signature: [N H], [E H F] or [E F H], [E] int32 -> [N F]

        y[i] = x[i] @ weight[e]      for the rows i of expert e

    The first ``group_sizes[0]`` rows are those of expert 0, the next ``group_sizes[1]`` those of expert
    1, and so on. 16-bit data is widened to float32, summed there, rounded once (nearest even). The order
    of a sum over H is not promised: within H * 2^-23 * sum |x*w| of the exact one. A NaN in a row or in a
    weight stays in the rows of its expert; the weight of an expert without rows is not looked at.

    The gradient with respect to ``x`` is ``moe_grouped_matmul(grad_y, weight, group_sizes,
    transpose_weight=1 - transpose_weight)``, that with respect to ``weight`` is
    :func:`moe_grouped_matmul_weight_grad`.

    Args:
        x: Rows in expert order; float16, bfloat16, float32 (float64 for validation).
        weight: Weights in the dtype of ``x``: ``[E, H, F]``, or ``[E, F, H]`` where transposed.
        group_sizes: int32 ``[E]``, rows of each expert, >= 0; they sum to N.
        transpose_weight: 1 for a weight ``[E, F, H]``, which multiplies as its transpose.

    Returns:
        ``y`` ``[N, F]`` in the dtype of ``x``; zeros where H is 0.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, IndexValueError.
    """
    (rows, weights, sizes), infos = read(SPEC, x, weight, group_sizes)
    attrs, _ = SPEC.check(infos, {"transpose_weight": transpose_weight})
    assert rows is not None and weights is not None and sizes is not None
    bounds = group_starts(NAME, sizes, len(rows))
    wide = wide_dtype(rows.dtype)
    y = np.zeros((len(rows), weights.shape[1 if attrs["transpose_weight"] else 2]), rows.dtype)
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        for expert, (start, end) in enumerate(bounds):
            if start == end:
                continue
            right = weights[expert].astype(wide)
            product = rows[start:end].astype(wide) @ (right.T if attrs["transpose_weight"] else right)
            y[start:end] = product.astype(rows.dtype)
    return y


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    x, weight, _ = inputs
    assert x is not None and weight is not None
    require_same_dtype(NAME, "x", x.dtype, "weight", weight.dtype)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    x, weight, sizes = inputs
    assert x is not None and weight is not None
    axes = Axes(NAME)
    axes.read(
        ("x", x, "N H"),
        ("weight", weight, "E F H" if attributes["transpose_weight"] else "E H F"),
        ("group_sizes", sizes, "E"),
    )
    check_no_rows_without_groups(NAME, axes)
    return [TensorInfo(x.dtype or weight.dtype, (axes["N"], axes["F"]))]


# The experts' numbers of rows differ, so that their products cannot be a scan output of the loop, and
# adding them to one tensor would copy it once for each expert. A sequence holds them until all are there,
# not yet rounded: ONNX has no sequences of bfloat16.
_PRODUCTS = """
    $no_rows_shape = Concat <axis = 0> (zero, width)
    $no_rows_f32 = ConstantOfShape ($no_rows_shape)
    $no_rows = Cast <to = $DTYPE> ($no_rows_f32)
    $nothing = SequenceConstruct ($no_rows)
    $all = Loop (num_busy, go_on, $nothing) <body = $one_expert (int64 $turn, bool $go, $before)
        => (bool $go_next, $after) {
            $go_next = Identity ($go)
            $expert = Gather <axis = 0> (busy, $turn)
            $expert_1 = Reshape ($expert, one)
            $start = Gather <axis = 0> (starts, $expert_1)
            $end = Gather <axis = 0> (ends, $expert_1)
            $rows = Slice (x, $start, $end, zero)
            $rows_wide = Cast <to = $DTYPE> ($rows)
            $matrix = Gather <axis = 0> (weight, $expert)
            $matrix_wide = Cast <to = $DTYPE> ($matrix)
            $product = Gemm <transB: int = @transpose_weight> ($rows_wide, $matrix_wide)
            $after = SequenceInsert ($before, $product)
        }>
    $y_wide = ConcatFromSequence <axis = 0> ($all)
    $y = CastLike ($y_wide, x)
"""

BODY = body(
    "MoeGroupedMatmul <transpose_weight: int = 0> (x, weight, group_sizes) => (y)",
    ARGUMENTS,
    precision("precision", "x"),
    IN_FLOAT64,
    is_not_float("bad_x_dtype", "precision"),
    precision("weight_precision", "weight"),
    is_not("bad_weight_dtype", "weight_precision", "precision"),
    integer_code("sizes_dtype", "group_sizes"),
    rank_of("weight_rank", "weight"),
    """
    hidden_at = Add (one, transpose_weight)
    width_at = Sub (two, transpose_weight)
    behind_hidden = Add (hidden_at, one)
    behind_width = Add (width_at, one)
    weight_shape = Shape (weight)
    weight_experts = Shape <end = 1> (weight)
    weight_hidden = Slice (weight_shape, hidden_at, behind_hidden, zero)
    width = Slice (weight_shape, width_at, behind_width, zero)
    """,
    checks(
        "passed_ranks",
        "zero",
        ("x must be float16, bfloat16, float32 or float64", "bad_x_dtype"),
        BAD_SIZES_DTYPE,
        ("weight must have the dtype of x", "bad_weight_dtype"),
        BAD_TRANSPOSE,
        ("x must be 2-D", "x_rank", "two"),
        ("weight must be 3-D", "weight_rank", "three"),
        BAD_SIZES_RANK,
    ),
    # One by one: where a rank is wrong, a size may be none or several.
    checks(
        "passed_experts",
        "passed_ranks",
        ("weight must have as many experts as group_sizes", "weight_experts", "num_experts"),
    ),
    checks("passed", "passed_experts", ("weight must have the hidden size of x", "weight_hidden", "hidden")),
    GROUPS,
    """
    # Only experts that have rows: the weight of the others is not even copied.
    busy_2d = NonZero (sizes)
    busy = Reshape (busy_2d, minus_one)
    num_busy_1 = Shape (busy)
    num_busy = Squeeze (num_busy_1)
    go_on = Constant <value = bool {1}> ()
    """,
    per_precision(("y",), _PRODUCTS),
)

SPEC = OpSpec(
    name=NAME,
    summary="Experts' linear layer: the rows of each expert times the expert's weight.",
    formula="y[i] = x[i] @ weight[e]   for the rows i of expert e",
    inputs=(
        Arg("x", "N H", "rows in expert order", differentiable=True),
        Arg("weight", "E H F | E F H", "weights; [E F H] where transpose_weight is 1", differentiable=True),
        GROUP_SIZES,
    ),
    outputs=(Arg("y", "N F", "the products; 0 where H is 0", differentiable=True),),
    attributes=(TRANSPOSE_WEIGHT,),
    shapes=_shapes,
    reference=moe_grouped_matmul,
    body=BODY,
    source="this project (beside the family)",
    gradient="MoeGroupedMatmulWeightGrad",
    mixes=_mixes,
)
