"""MoeSwiGlu: the experts' gated activation, which standard ops take five passes for, as one operator.

The rows are those of the first MoeGroupedMatmul, gate and up side by side as in ``gate_up_proj``.
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
    is_not_float,
    lookup,
    per_precision,
    precision,
    rank_of,
)
from moe_onnx.spec import Arg, Axes, OpSpec, TensorInfo

NAME = "MoeSwiGlu"
GATE_UP = Arg("x", "N G", "gate and up of each row, side by side: G = 2 F", differentiable=True)


def moe_swi_glu(x: Any) -> Array:
    """Weigh the second half of each row by the SiLU of the first.

    Signature: [N 2F] -> [N F]

        y[i, f] = gate / (1 + exp(-gate)) * up      for gate = x[i, f], up = x[i, F + f]

    16-bit data is widened to float32 and rounded once (nearest even). Within 4 units in the last place
    (ulp) of the wide type of the exact value, where that and the gate's SiLU are normal numbers; the bits of
    ``exp`` are not promised. Where it overflows (gates below -88.7; -709.7 in float64) a gate is closed and
    gives 0; -inf gives NaN (-inf / inf). Both are as in PyTorch.

    CANN has the operator as ``SwiGlu``, of any axis; in ONNX the name is taken.

    Args:
        x: ``[N, 2F]``: float16, bfloat16, float32 (float64 for validation).

    Returns:
        ``y`` ``[N, F]`` in the dtype of ``x``.

    Raises:
        MissingInputError, DtypeError, RankError, ShapeError.
    """
    (rows,), infos = read(SPEC, x)
    SPEC.check(infos, {})
    assert rows is not None
    gate, up = halves(rows)
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        return np.asarray(gate / (1 + np.exp(-gate)) * up).astype(rows.dtype)


def halves(rows: Array) -> tuple[Array, Array]:
    """Gate and up of rows, widened."""
    wide, width = rows.astype(wide_dtype(rows.dtype)), rows.shape[1] // 2
    return wide[:, :width], wide[:, width:]


def half_of_rows(axes: Axes) -> None:
    """Axis F is half of axis G, which has been read from 'x'."""
    axes.bind("F", axes.divide("G", 2, "2"), "half of axis G of 'x'")


def _shapes(inputs: Sequence[TensorInfo | None], _: Mapping[str, Any]) -> list[TensorInfo | None]:
    (x,) = inputs
    assert x is not None
    axes = Axes(NAME)
    axes.read(("x", x, "N G"))
    half_of_rows(axes)
    return [TensorInfo(x.dtype, (axes["N"], axes["F"]))]


def even_rows(before: str, after: str) -> str:
    """``both``, the columns of x, in whose halves gate and up stand; its rank must have been checked."""
    return """
    both = Shape <start = 1, end = 2> (x)
    odd = BitwiseAnd (both, one)
""" + lookup("x must have an even number of columns, gate and up", "odd", before, after)


# For per_precision: the halves, which end at `width` and `both`, and 1 + exp(-gate). No Sigmoid: that of
# onnxruntime is cut off at -18, where the derivative of SiLU is still 1e-7 in float32.
GATE = """
    $both = Cast <to = $DTYPE> (x)
    $gate = Slice ($both, passed, width, one)
    $up = Slice ($both, width, both, one)
    $one = CastLike (one, $gate)
    $less = Neg ($gate)
    $power = Exp ($less)
    $under = Add ($power, $one)
"""

BODY = body(
    "MoeSwiGlu (x) => (y)",
    precision("precision", "x"),
    IN_FLOAT64,
    is_not_float("bad_x_dtype", "precision"),
    rank_of("x_rank", "x"),
    checks(
        "passed_ranks",
        "zero",
        ("x must be float16, bfloat16, float32 or float64", "bad_x_dtype"),
        ("x must be 2-D", "x_rank", "two"),
    ),
    even_rows("passed_ranks", "passed"),
    """
    width = Div (both, two)
    """,
    per_precision(
        ("y",),
        GATE
        + """
    $swish = Div ($gate, $under)
    $y_wide = Mul ($swish, $up)
    $y = CastLike ($y_wide, x)
""",
    ),
)

SPEC = OpSpec(
    name=NAME,
    summary="Experts' gated activation: SiLU of the first half of a row times the second.",
    formula="y[i, f] = gate / (1 + exp(-gate)) * up   for gate = x[i, f], up = x[i, F + f]",
    inputs=(GATE_UP,),
    outputs=(Arg("y", "N F", "what the experts' last product is given", differentiable=True),),
    attributes=(),
    shapes=_shapes,
    reference=moe_swi_glu,
    body=BODY,
    source="CANN aclnnSwiGlu (dim = -1), in two axes",
    gradient="MoeSwiGluGrad",
)
