"""MoeAdamW: an update of one parameter by AdamW, which standard ops take a dozen passes for, as one operator.

Clipping, bias correction and decay are in the factors, which a graph makes once for all its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.operators._arrays import Array, read
from moe_onnx.operators._body import body, checks, is_not, precision, rank_of
from moe_onnx.spec import ANY, MASTERS, Arg, Axes, OpSpec, TensorInfo, require_same_dtype

NAME = "MoeAdamW"
FACTORS = ("beta1", "weight1", "beta2", "weight2", "rate", "eps", "kept")
_TENSORS = ("parameter", "gradient", "exp_avg", "exp_avg_sq")


def moe_adam_w(
    parameter: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any, factors: Any
) -> tuple[Array, Array, Array]:
    """Update a parameter and its two moments.

    Signature: [...], [...], [...], [...], [7] -> [...], [...], [...]

        exp_avg_updated    = exp_avg * beta1 + gradient * weight1
        exp_avg_sq_updated = exp_avg_sq * beta2 + (gradient * gradient) * weight2
        parameter_updated  = parameter * kept - (exp_avg_updated * rate) / (sqrt(exp_avg_sq_updated) + eps)

    Every operation is rounded once, in this order, to the dtype of the parameter: no two are contracted, so
    that all routes give the same bits, those of the same operations as nodes of a graph.

    For ``torch.optim.AdamW`` of learning rate lr, with gradients scaled by clip, at step s, with
    ``root = sqrt(1 - beta2^s)``: ``weight1 = (1 - beta1) clip``, ``weight2 = (1 - beta2) clip^2``,
    ``rate = lr root / (1 - beta1^s)``, ``eps = eps root``, ``kept = 1 - lr weight_decay``.

    Args:
        parameter: Of any shape; float32 (float64 for validation).
        gradient: Of the parameter; as all others in its shape and dtype.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        factors: ``[7]``: beta1, weight1, beta2, weight2, rate, eps, kept.

    Returns:
        ``parameter_updated``, ``exp_avg_updated``, ``exp_avg_sq_updated``, new arrays. In a session each may
        be bound to the memory of the input of its name.

    Raises:
        MissingInputError, DtypeError, RankError, ShapeError.
    """
    arrays, infos = read(SPEC, parameter, gradient, exp_avg, exp_avg_sq, factors)
    SPEC.check(infos, {})
    p, g, m, v, by = (np.asarray(array) for array in arrays)
    beta1, weight1, beta2, weight2, rate, eps, kept = by
    with np.errstate(all="ignore"):  # infinities and NaNs are data here, not accidents
        m = m * beta1 + g * weight1
        v = v * beta2 + (g * g) * weight2
        p = p * kept - (m * rate) / (np.sqrt(v) + eps)
    return np.asarray(p), np.asarray(m), np.asarray(v)  # numpy makes scalars of what has no axes


def _mixes(inputs: Sequence[TensorInfo | None]) -> None:
    parameter = inputs[0]
    assert parameter is not None
    for name, info in zip((*_TENSORS[1:], "factors"), inputs[1:], strict=True):
        assert info is not None
        require_same_dtype(NAME, "parameter", parameter.dtype, name, info.dtype)


def _shapes(inputs: Sequence[TensorInfo | None], _: Mapping[str, Any]) -> list[TensorInfo | None]:
    axes = Axes(NAME)
    axes.bind("S", len(FACTORS), f"the operator: {', '.join(FACTORS)}")
    tensors = [(name, info, ANY) for name, info in zip(_TENSORS, inputs, strict=False)]
    axes.read(*tensors, ("factors", inputs[-1], "S"))
    dtype = next((info.dtype for info in inputs if info is not None and info.dtype), "")
    return [TensorInfo(dtype, axes.any_shape)] * 3


def _like_the_parameter(name: str) -> str:
    """Whether a tensor has another dtype or rank than the parameter."""
    return (
        precision(f"{name}_precision", name)
        + is_not(f"bad_{name}_dtype", f"{name}_precision", "precision")
        + rank_of(f"{name}_rank", name)
    )


def _shape_check(name: str, before: str, after: str) -> str:
    """Fail where a tensor has not the shape of the parameter; with a size more, as there may be no axes."""
    return f"""
    {name}_sizes = Concat <axis = 0> ({name}_rank_shape, one)
    {name}_same = Equal (sizes, {name}_sizes)
    {name}_all = Cast <to = 7> ({name}_same)
    {name}_agree = ReduceMin <keepdims = 1> ({name}_all)
    {name}_differ = Sub (one, {name}_agree)
    {after} = Gather <axis = 0> ({before}, {name}_differ)  # check: {name} must have the shape of parameter
"""


BODY = body(
    "MoeAdamW (parameter, gradient, exp_avg, exp_avg_sq, factors)"
    " => (parameter_updated, exp_avg_updated, exp_avg_sq_updated)",
    precision("precision", "parameter"),
    """
    bad_dtype = Less (precision, float32_code)
    shape = Shape (parameter)
    rank = Shape (shape)
    num_factors = Shape <end = 1> (factors)
    seven = Constant <value_ints = [7]> ()
    """,
    *map(_like_the_parameter, _TENSORS[1:]),
    precision("factors_precision", "factors"),
    is_not("bad_factors_dtype", "factors_precision", "precision"),
    rank_of("factors_rank", "factors"),
    checks(
        "passed_ranks",
        "zero",
        ("parameter must be float32 or float64", "bad_dtype"),
        *[
            (f"{name} must have the dtype of parameter", f"bad_{name}_dtype")
            for name in (*_TENSORS[1:], "factors")
        ],
        *[(f"{name} must have the rank of parameter", f"{name}_rank", "rank") for name in _TENSORS[1:]],
        ("factors must be 1-D", "factors_rank", "one"),
    ),
    """
    # Shapes of other ranks cannot be compared: only after the ranks.
    shape_and_one = Concat <axis = 0> (shape, one)
    sizes = Add (shape_and_one, passed_ranks)
    """,
    _shape_check("gradient", "passed_ranks", "passed_gradient"),
    _shape_check("exp_avg", "passed_gradient", "passed_exp_avg"),
    _shape_check("exp_avg_sq", "passed_exp_avg", "passed_shapes"),
    checks("passed", "passed_shapes", ("factors must be 7", "num_factors", "seven")),
    # Each factor from where the checks say that the tensor begins: at 0.
    "    begin = Squeeze (passed)",
    *[
        f"""
    number_of_{factor} = Constant <value_int = {number}> ()
    at_{factor} = Add (begin, number_of_{factor})
    {factor} = Gather <axis = 0> (factors, at_{factor})"""
        for number, factor in enumerate(FACTORS)
    ],
    # Elementwise, and each output after the last use of the input of its name, so that they may share memory.
    """
    kept_avg = Mul (exp_avg, beta1)
    new_avg = Mul (gradient, weight1)
    exp_avg_updated = Add (kept_avg, new_avg)
    kept_avg_sq = Mul (exp_avg_sq, beta2)
    square = Mul (gradient, gradient)
    new_avg_sq = Mul (square, weight2)
    exp_avg_sq_updated = Add (kept_avg_sq, new_avg_sq)
    step = Mul (exp_avg_updated, rate)
    root = Sqrt (exp_avg_sq_updated)
    root_and_eps = Add (root, eps)
    change = Div (step, root_and_eps)
    kept_parameter = Mul (parameter, kept)
    parameter_updated = Sub (kept_parameter, change)
    """,
)


def _arg(name: str, doc: str, axes: str = ANY) -> Arg:
    return Arg(name, axes, doc, MASTERS)


SPEC = OpSpec(
    name=NAME,
    summary="An update by AdamW: parameter and moments in one pass.",
    formula="exp_avg_updated    = exp_avg * beta1 + gradient * weight1\n"
    "exp_avg_sq_updated = exp_avg_sq * beta2 + (gradient * gradient) * weight2\n"
    "parameter_updated  = parameter * kept - (exp_avg_updated * rate) / (sqrt(exp_avg_sq_updated) + eps)",
    inputs=(
        _arg("parameter", "what is trained"),
        _arg("gradient", "its gradient, before clipping"),
        _arg("exp_avg", "its first moment"),
        _arg("exp_avg_sq", "its second moment"),
        _arg(
            "factors",
            "beta1, weight1 = (1 - beta1) clip, beta2, weight2 = (1 - beta2) clip^2, rate, eps, "
            "kept = 1 - lr weight_decay; rate and eps with the bias corrections of the step",
            "S",
        ),
    ),
    outputs=(
        _arg("parameter_updated", "the parameter after the step; may share the memory of `parameter`"),
        _arg("exp_avg_updated", "the first moment; may share the memory of `exp_avg`"),
        _arg("exp_avg_sq_updated", "the second moment; may share the memory of `exp_avg_sq`"),
    ),
    attributes=(),
    shapes=_shapes,
    reference=moe_adam_w,
    body=BODY,
    source="this project (beside the family)",
    mixes=_mixes,
)
