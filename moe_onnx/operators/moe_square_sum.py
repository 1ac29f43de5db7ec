"""MoeSquareSum: the sum of the squares of a tensor, of which the norm of a step's gradients is made.

onnxruntime's own ReduceSumSquare adds up one element after the other: a fifth of what memory can give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.operators._arrays import Array, read
from moe_onnx.operators._body import body, checks, precision
from moe_onnx.spec import ANY, MASTERS, Arg, Axes, OpSpec, TensorInfo

NAME = "MoeSquareSum"


def moe_square_sum(x: Any) -> Array:
    """Add up the squares of all elements.

    Signature: [...] -> []

    Squares and sums are made in double precision and rounded once; only the function body adds up the
    elements of the last axis, L of them, in the precision of ``x``: all routes are within L * 2^-23 of the
    exact sum (2^-52 in float64), relative to it.

    CANN has the operator as ``SquareSumV1``, of any axes.

    Args:
        x: Of any shape; float32 (float64 for validation).

    Returns:
        ``y``, without axes, in the dtype of ``x``; 0 for a tensor without elements.

    Raises:
        MissingInputError, DtypeError.
    """
    (values,), infos = read(SPEC, x)
    SPEC.check(infos, {})
    assert values is not None
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        return np.asarray(np.sum(np.square(values, dtype=np.float64))).astype(values.dtype)


def _shapes(inputs: Sequence[TensorInfo | None], _: Mapping[str, Any]) -> list[TensorInfo | None]:
    (x,) = inputs
    assert x is not None
    Axes(NAME).read(("x", x, ANY))
    return [TensorInfo(x.dtype, ())]


BODY = body(
    "MoeSquareSum (x) => (y)",
    precision("precision", "x"),
    """
    bad_dtype = Less (precision, float32_code)
    """,
    checks("passed", "zero", ("x must be float32 or float64", "bad_dtype")),
    # As rows of the last axis, whose sums stay small; a tensor without axes is a row of one.
    """
    shape = Shape (x)
    longer = Concat <axis = 0> (one, one, shape)
    heads = Slice (longer, passed, minus_one)
    num_rows = ReduceProd <keepdims = 1> (heads)
    length = Gather <axis = 0> (longer, minus_one)
    rows_shape = Concat <axis = 0> (num_rows, length)
    rows = Reshape <allowzero = 1> (x, rows_shape)
    squares = ReduceSumSquare <keepdims = 0> (rows, one)
    squares_wide = Cast <to = 11> (squares)
    total = ReduceSum <keepdims = 0> (squares_wide, zero)
    y = CastLike (total, x)
    """,
)

SPEC = OpSpec(
    name=NAME,
    summary="The sum of the squares of all elements.",
    formula="y = sum of x[i]^2 over all i",
    inputs=(Arg("x", ANY, "a gradient", MASTERS, differentiable=True),),
    outputs=(Arg("y", "", "the sum, without axes", MASTERS, differentiable=True),),
    attributes=(),
    shapes=_shapes,
    reference=moe_square_sum,
    body=BODY,
    source="CANN SquareSumV1, over all axes",
)
