"""What the numpy reference makes of a call, and whether a native kernel made the same."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
from native_driver import Case, Result

from moe_onnx.adapters.reference_evaluator import absent_output
from moe_onnx.errors import MoeOnnxError
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import TensorInfo

# Outputs that are sums without a promised order, and the axis letter that is summed over.
DOTS = {
    ("MoeTokenUnpermuteWithRoutingMapGrad", 1): lambda inputs: inputs[0].shape[1],
    ("MoeFinalizeRoutingV2Grad", 1): lambda inputs: inputs[0].shape[1],
    ("MoeGroupedMatmul", 0): lambda inputs: inputs[0].shape[1],
    ("MoeGroupedMatmulWeightGrad", 0): lambda inputs: len(inputs[0]),
    # In double precision, where that is more than the data's.
    ("MoeSquareSum", 0): lambda inputs: inputs[0].size if inputs[0].dtype == np.float64 else 1,
}
# Outputs whose exponentials' bits are not promised.
INEXACT = {*DOTS, ("MoeSwiGlu", 0), ("MoeSwiGluGrad", 0)}
LARGE = 2_000_000  # elements or rows: nothing that is larger is run


def text_of(error: MoeOnnxError) -> str:
    """What the native status says of an error."""
    return f"{type(error).__name__} (aclnn {error.aclnn_status}): {error}"


def expected(case: Case) -> tuple[str, list[Any]] | None:
    """The error's text or the outputs; None for a call that is too large to be made."""
    spec = BY_NAME[case.op]
    infos = [None if a is None else TensorInfo(a.dtype.name, a.shape) for a in case.inputs]
    try:
        _check_numbers(case)
        with contextlib.suppress(MoeOnnxError):  # the reference, which knows values, may say more
            if any(_largest(info) > LARGE for info in spec.check(infos, case.attributes)[1]):
                return None
        made = spec.reference(*case.inputs, **case.attributes)
    except MoeOnnxError as error:
        return text_of(error), []
    outputs = made if isinstance(made, tuple) else (made,)
    inputs = tuple(case.inputs)
    return "", [absent_output(spec, i, inputs) if value is None else value for i, value in enumerate(outputs)]


def _check_numbers(case: Case) -> None:
    # A session reads attributes when it is made, before there is any input; what is in lists is for the run.
    numbers = {name: value for name, value in case.attributes.items() if np.isscalar(value)}
    BY_NAME[case.op].check_attributes(numbers)


def _largest(info: TensorInfo | None) -> int:
    """The number of elements, or a size if that is larger."""
    shape = () if info is None or info.shape is None else info.shape
    sizes = [size for size in shape if isinstance(size, int)]
    return max(int(np.prod(sizes, dtype=object)), *sizes, 0)


def inferred(case: Case) -> tuple[str, list[TensorInfo | None]]:
    """What the Python spec infers from what is known; a scalar looks to a runtime like an unknown shape."""
    spec = BY_NAME[case.op]
    infos: list[TensorInfo | None] = []
    for value, known in zip(case.inputs, case.known, strict=True):
        infos.append(None if value is None else TensorInfo(value.dtype.name, known or None))
    try:
        _check_numbers(case)
        return "", spec.check(infos, case.attributes)[1]
    except MoeOnnxError as error:
        return text_of(error), []


def as_set(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    """What a kernel says of an output."""
    return info.dtype, tuple(size if isinstance(size, int) else -1 for size in info.shape or ())


def agree(info: TensorInfo, found: tuple[str, tuple[int, ...]]) -> bool:
    """A type without a rank cannot be said in the ABI: a kernel may leave it to the runtime's guess."""
    return found == as_set(info) or (info.shape is None and found == ("", ()))


def difference(case: Case, index: int, want: Any, got: Any) -> str:
    """What is wrong with an output, empty if it is right."""
    name = BY_NAME[case.op].outputs[index].name
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{name}: {got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
    if got.tobytes() == want.tobytes():
        return ""
    wrong = wrong_bits(got, want)
    a, b = got.reshape(-1).astype(np.float64), want.reshape(-1).astype(np.float64)
    if (case.op, index) in DOTS:
        wrong &= ~_within_bound(case, index, want, a, b)
    elif (case.op, index) in INEXACT:
        wrong &= ~_same_activation(case, want, a, b)
    if not wrong.any():
        return ""
    at = int(wrong.argmax())
    where = [int(i) for i in np.unravel_index(at, want.shape)]
    return f"{name}{where}: {a[at]!r} for {b[at]!r}, {int(wrong.sum())} of {wrong.size} wrong"


def wrong_bits(got: Any, want: Any) -> Any:
    """Where bits differ; which NaN it is does not matter."""
    differ = got.reshape(-1).view(f"u{got.itemsize}") != want.reshape(-1).view(f"u{want.itemsize}")
    with np.errstate(all="ignore"):
        return differ & ~(np.isnan(got.reshape(-1)) & np.isnan(want.reshape(-1)))


def _within_bound(case: Case, index: int, want: Any, a: Any, b: Any) -> Any:
    # The sum of the products' magnitudes is what the reference makes of magnitudes.
    spec = BY_NAME[case.op]
    is_float = [x is not None and "float" in x.dtype.name for x in case.inputs]
    inputs = [np.abs(x.astype(np.float64)) if f else x for x, f in zip(case.inputs, is_float, strict=True)]
    magnitudes = spec.reference(*inputs, **case.attributes)
    magnitudes = (magnitudes if isinstance(magnitudes, tuple) else (magnitudes,))[index].reshape(-1)
    wide = 2.0**-52 if case.inputs[0].dtype == np.float64 else 2.0**-23
    info = ml_dtypes.finfo(want.dtype)
    most = min(float(info.max), float(np.finfo(np.float32 if wide > 1e-10 else np.float64).max))
    with np.errstate(all="ignore"):
        # Both have the bound's error and round once more; small products may be lost.
        terms = DOTS[case.op, index](case.inputs)
        bound = 2 * terms * (wide * magnitudes + 1e-44) + float(info.eps) * np.abs(b) + 2 * float(info.tiny)
        # Where a partial sum may overflow, the order decides between infinity, NaN and a number.
        return (np.abs(a - b) <= bound) | ~(magnitudes < 0.4 * most)


def _same_activation(case: Case, want: Any, a: Any, b: Any) -> Any:
    """Both are within 4 units of the wide type, of what is added up where the derivative crosses 0."""
    x = case.inputs[-1].astype(np.float64)
    width = x.shape[1] // 2
    gate, up = x[:, :width], x[:, width:]
    in_double = want.dtype == np.float64
    info = ml_dtypes.finfo(want.dtype)
    with np.errstate(all="ignore"):
        scale = np.abs(b)
        if case.op == "MoeSwiGluGrad":
            d_up = np.abs(case.inputs[0].astype(np.float64) * up)
            scale = np.maximum(scale, np.concatenate([d_up, np.zeros_like(d_up)], 1).reshape(-1))
        unit = 2.0**-52 if in_double else 2.0**-23
        bound = 8 * unit * scale + float(info.eps) * np.abs(b) + 64 * float(info.tiny)
        most = 0.4 * float(info.max)
        near = (np.abs(a - b) <= bound) | ((np.abs(a) >= most) & (np.abs(b) >= most) & (a * b > 0))
    # Here exp is about to be infinite: in one the gate may be closed that is not yet in the other.
    closing = np.abs(gate + (709.7828 if in_double else 88.7229)) < 0.01
    return near | np.tile(closing, (1, want.shape[1] // max(width, 1))).reshape(-1)


def problem(case: Case, want: tuple[str, list[Any]], result: Result) -> str:
    """What is wrong with a result, empty if nothing is."""
    error, infos = inferred(case)
    if error != result.inferred_error:
        return f"inferred: {result.inferred_error!r}\n      for: {error!r}"
    for at, (info, found) in enumerate(zip(infos, result.inferred, strict=False)):
        if info is None:
            continue
        if not agree(info, found) and not error:
            return f"inferred output {at}: {found} for {as_set(info)}"
    if want[0] != result.error:
        return f"says {result.error!r}\n for {want[0]!r}"
    for at, (wanted, value) in enumerate(zip(case.wanted, want[1], strict=False)):
        found = result.outputs[at] if at < len(result.outputs) else None
        if wanted != (found is not None):
            return f"output {at} {'is missing' if wanted else 'was not asked for'}"
        if wanted and (text := difference(case, at, value, found)):
            return text
    return ""
