"""MoeGroupedMatmulWeightGrad: the gradient of MoeGroupedMatmul with respect to the weight."""

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

NAME = "MoeGroupedMatmulWeightGrad"


def moe_grouped_matmul_weight_grad(
    x: Any, grad_y: Any, group_sizes: Any, *, transpose_weight: bool | int = 0
) -> Array:
    """Sum the outer products of the rows of each expert: the gradient of its weight.

    Signature: [N H], [N F], [E] int32 -> [E H F] or [E F H]

        grad_weight[e] = sum over the rows i of expert e of outer(x[i], grad_y[i])

    16-bit data is widened to float32, summed there, rounded once (nearest even). The order of the sum is
    not promised: within n_e * 2^-23 * sum |x*g| of the exact one, n_e the rows of expert e. A NaN in a
    row stays in its expert's gradient.

    Args:
        x: Rows that MoeGroupedMatmul was given; float16, bfloat16, float32 (float64 for validation).
        grad_y: Gradient of its output, in the dtype of ``x``.
        group_sizes: int32 ``[E]``, rows of each expert, >= 0; they sum to N.
        transpose_weight: 1 for the gradient of a weight ``[E, F, H]``.

    Returns:
        ``grad_weight`` ``[E, H, F]``, or ``[E, F, H]`` where transposed; exactly 0 for an expert
        without rows.

    Raises:
        MissingInputError, DtypeError, AttributeValueError, RankError, ShapeError, IndexValueError.
    """
    (rows, grads, sizes), infos = read(SPEC, x, grad_y, group_sizes)
    attrs, _ = SPEC.check(infos, {"transpose_weight": transpose_weight})
    assert rows is not None and grads is not None and sizes is not None
    bounds = group_starts(NAME, sizes, len(rows))
    wide = wide_dtype(rows.dtype)
    left, right = (grads, rows) if attrs["transpose_weight"] else (rows, grads)
    grad_weight = np.zeros((len(sizes), left.shape[1], right.shape[1]), rows.dtype)
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        for expert, (start, end) in enumerate(bounds):
            product = left[start:end].T.astype(wide) @ right[start:end].astype(wide)
            grad_weight[expert] = product.astype(rows.dtype)
    return grad_weight


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    x, grad_y, _ = inputs
    assert x is not None and grad_y is not None
    require_same_dtype(NAME, "x", x.dtype, "grad_y", grad_y.dtype)


def _shapes(inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]) -> list[TensorInfo | None]:
    x, grad_y, sizes = inputs
    assert x is not None and grad_y is not None
    axes = Axes(NAME)
    axes.read(("x", x, "N H"), ("grad_y", grad_y, "N F"), ("group_sizes", sizes, "E"))
    check_no_rows_without_groups(NAME, axes)
    last = ("F", "H") if attributes["transpose_weight"] else ("H", "F")
    return [TensorInfo(x.dtype or grad_y.dtype, (axes["E"], axes[last[0]], axes[last[1]]))]


# Scan writes each expert's product to its place in one tensor, where Loop collects the products and copies
# them at the end. But Scan refuses to do nothing: without experts it takes one turn, whose product has no
# lines. The Reshape, needed for that case alone, makes the copy again (145 MB beyond the inputs become 280
# at E=64 H=512 F=1024): still to be avoided.
_PRODUCTS = """
    $products = Scan (first_rows, end_rows) <num_scan_inputs = 2, body = $one_expert ($start, $end)
        => ($narrow) {
            $left_from = Concat <axis = 0> ($start, zero)
            $left_to = Concat <axis = 0> ($end, num_lines)
            $left_rows = Slice (left, $left_from, $left_to, both_axes)
            $right_rows = Slice (right, $start, $end, zero)
            $left_wide = Cast <to = $DTYPE> ($left_rows)
            $right_wide = Cast <to = $DTYPE> ($right_rows)
            $product = Gemm <transA = 1> ($left_wide, $right_wide)
            $narrow = CastLike ($product, left)
        }>
    $grad_weight = Reshape <allowzero = 1> ($products, grad_shape)
"""

BODY = body(
    "MoeGroupedMatmulWeightGrad <transpose_weight: int = 0> (x, grad_y, group_sizes) => (grad_weight)",
    ARGUMENTS,
    precision("precision", "x"),
    IN_FLOAT64,
    is_not_float("bad_x_dtype", "precision"),
    precision("grad_precision", "grad_y"),
    is_not("bad_grad_dtype", "grad_precision", "precision"),
    integer_code("sizes_dtype", "group_sizes"),
    rank_of("grad_rank", "grad_y"),
    """
    grad_rows = Shape <end = 1> (grad_y)
    width = Shape <start = 1, end = 2> (grad_y)
    """,
    checks(
        "passed_ranks",
        "zero",
        ("x must be float16, bfloat16, float32 or float64", "bad_x_dtype"),
        BAD_SIZES_DTYPE,
        ("grad_y must have the dtype of x", "bad_grad_dtype"),
        BAD_TRANSPOSE,
        ("x must be 2-D", "x_rank", "two"),
        ("grad_y must be 2-D", "grad_rank", "two"),
        BAD_SIZES_RANK,
    ),
    # By itself: where a rank is wrong, a size may be none or several.
    checks("passed", "passed_ranks", ("grad_y must have as many rows as x", "grad_rows", "n")),
    GROUPS,
    """
    # The transpose of a product is the product of the other two, so nothing is transposed.
    is_transposed = Equal (transpose_weight, one)
    left, right = If (is_transposed) <
        then_branch = swapped () => (s_left, s_right) { s_left = Identity (grad_y) s_right = Identity (x) },
        else_branch = straight () => (t_left, t_right) { t_left = Identity (x) t_right = Identity (grad_y) }
    >
    lines = Where (is_transposed, width, hidden)
    columns = Where (is_transposed, hidden, width)
    grad_shape = Concat <axis = 0> (num_experts, lines, columns)
    no_expert = Equal (num_experts, zero)
    num_lines = Where (no_expert, zero, lines)
    both_axes = Constant <value_ints = [0, 1]> ()
    turns = Max (num_experts, one)
    starts_and_one = Concat <axis = 0> (starts, zero)
    ends_and_one = Concat <axis = 0> (ends, zero)
    first_row = Slice (starts_and_one, zero, turns, zero)
    end_row = Slice (ends_and_one, zero, turns, zero)
    first_rows = Unsqueeze (first_row, one)
    end_rows = Unsqueeze (end_row, one)
    """,
    per_precision(("grad_weight",), _PRODUCTS),
)

SPEC = OpSpec(
    name=NAME,
    summary="Gradient of MoeGroupedMatmul: for each expert, the sum of its rows' outer products.",
    formula="grad_weight[e] = sum over the rows i of expert e of outer(x[i], grad_y[i])",
    inputs=(
        Arg("x", "N H", "rows in expert order", differentiable=True),
        Arg("grad_y", "N F", "gradient of the products", differentiable=True),
        GROUP_SIZES,
    ),
    outputs=(
        Arg(
            "grad_weight",
            "E H F | E F H",
            "gradient of the weight, [E F H] where transpose_weight is 1; 0 for an expert without rows",
            differentiable=True,
        ),
    ),
    attributes=(TRANSPOSE_WEIGHT,),
    shapes=_shapes,
    reference=moe_grouped_matmul_weight_grad,
    body=BODY,
    source="this project (beside the family)",
    mixes=_mixes,
)
