"""MoeSwiGluGrad: the gradient of MoeSwiGlu, of both halves at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.operators._arrays import Array, read
from moe_onnx.operators._body import (
    IN_FLOAT64,
    body,
    checks,
    is_not,
    is_not_float,
    per_precision,
    precision,
    rank_of,
)
from moe_onnx.operators.moe_swi_glu import GATE, GATE_UP, even_rows, half_of_rows, halves
from moe_onnx.spec import Arg, Axes, OpSpec, TensorInfo, require_same_dtype

NAME = "MoeSwiGluGrad"


def moe_swi_glu_grad(grad_y: Any, x: Any) -> Array:
    """Give the gradient of gate and up from that of their product.

    Signature: [N F], [N 2F] -> [N 2F]

        s = 1 / (1 + exp(-gate)), t = 1 / (1 + exp(gate))     for gate = x[i, f], up = x[i, F + f]
        grad_x[i, f]     = grad_y[i, f] * up * (s * (1 + gate * t))
        grad_x[i, F + f] = grad_y[i, f] * (gate * s)

    16-bit data is widened to float32 and rounded once (nearest even). The second half is within 4 units in
    the last place (ulp) of the wide type of the exact value; so is the first, but for what cancels where
    the derivative of SiLU crosses 0 (at gate = -1.278): it is within 4 ulp of ``grad_y * up`` at least;
    t is not made as 1 - s, which is a few digits short where s is nearly 1. Both are within 6 ulp for gates
    below -87.3 (-708.3 in float64), where s is no normal number; ``gate * s`` and the
    derivative must be. A gate that is closed (see :func:`moe_swi_glu`) gives 0 in both, an infinite one NaN
    where infinity meets 0, as in PyTorch.

    CANN has the operator as ``SwiGluGrad``, of any axis.

    Args:
        grad_y: ``[N, F]``, gradient of the output of MoeSwiGlu, in the dtype of ``x``.
        x: ``[N, 2F]``, what MoeSwiGlu was given: float16, bfloat16, float32 (float64 for validation).

    Returns:
        ``grad_x`` ``[N, 2F]`` in the dtype of ``x``.

    Raises:
        MissingInputError, DtypeError, RankError, ShapeError.
    """
    (given, rows), infos = read(SPEC, grad_y, x)
    SPEC.check(infos, {})
    assert given is not None and rows is not None
    gate, up = halves(rows)
    d = given.astype(gate.dtype)
    grad_x = np.empty_like(rows)
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        s = 1 / (1 + np.exp(-gate))
        grad_x[:, : gate.shape[1]] = d * up * (s * (1 + gate / (1 + np.exp(gate))))
        grad_x[:, gate.shape[1] :] = d * (gate * s)
    return grad_x


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    grad_y, x = inputs
    assert grad_y is not None and x is not None
    require_same_dtype(NAME, "grad_y", grad_y.dtype, "x", x.dtype)


def _shapes(inputs: Sequence[TensorInfo | None], _: Mapping[str, Any]) -> list[TensorInfo | None]:
    grad_y, x = inputs
    assert grad_y is not None and x is not None
    axes = Axes(NAME)
    axes.read(("grad_y", grad_y, "N F"), ("x", x, "N G"))
    half_of_rows(axes)
    both = axes["G"]
    if both is None and isinstance(axes["F"], int):
        both = 2 * axes["F"]
    return [TensorInfo(x.dtype or grad_y.dtype, (axes["N"], both))]


BODY = body(
    "MoeSwiGluGrad (grad_y, x) => (grad_x)",
    precision("precision", "grad_y"),
    IN_FLOAT64,
    is_not_float("bad_grad_y_dtype", "precision"),
    precision("x_precision", "x"),
    is_not("bad_x_dtype", "x_precision", "precision"),
    rank_of("grad_y_rank", "grad_y"),
    rank_of("x_rank", "x"),
    """
    num_rows = Shape <end = 1> (grad_y)
    x_rows = Shape <end = 1> (x)
    width = Shape <start = 1, end = 2> (grad_y)
    """,
    checks(
        "passed_ranks",
        "zero",
        ("grad_y must be float16, bfloat16, float32 or float64", "bad_grad_y_dtype"),
        ("x must have the dtype of grad_y", "bad_x_dtype"),
        ("grad_y must be 2-D", "grad_y_rank", "two"),
        ("x must be 2-D", "x_rank", "two"),
    ),
    checks("passed_rows", "passed_ranks", ("x must have as many rows as grad_y", "x_rows", "num_rows")),
    even_rows("passed_rows", "passed_even"),
    """
    half = Div (both, two)
    """,
    checks("passed", "passed_even", ("x must be twice as wide as grad_y", "half", "width")),
    per_precision(
        ("grad_x",),
        GATE
        + """
    $d = Cast <to = $DTYPE> (grad_y)
    $s = Reciprocal ($under)
    $other_power = Exp ($gate)
    $other_under = Add ($other_power, $one)
    $bent = Div ($gate, $other_under)
    $slope = Add ($bent, $one)
    $by_gate = Mul ($s, $slope)
    $d_up = Mul ($d, $up)
    $of_gate = Mul ($d_up, $by_gate)
    $swish = Mul ($gate, $s)
    $of_up = Mul ($d, $swish)
    $grad_wide = Concat <axis = 1> ($of_gate, $of_up)
    $grad_x = CastLike ($grad_wide, x)
""",
    ),
)

SPEC = OpSpec(
    name=NAME,
    summary="Gradient of MoeSwiGlu with respect to gate and up.",
    formula="s = 1 / (1 + exp(-gate)), t = 1 / (1 + exp(gate))   for gate = x[i, f], up = x[i, F + f]\n"
    "grad_x[i, f]     = grad_y[i, f] * up * (s * (1 + gate * t))\n"
    "grad_x[i, F + f] = grad_y[i, f] * (gate * s)",
    inputs=(Arg("grad_y", "N F", "gradient of the output of MoeSwiGlu"), GATE_UP),
    outputs=(Arg("grad_x", "N G", "gradient of gate and up, side by side"),),
    attributes=(),
    shapes=_shapes,
    reference=moe_swi_glu_grad,
    body=BODY,
    source="CANN aclnnSwiGluGrad (dim = -1), in two axes",
    mixes=_mixes,
)
