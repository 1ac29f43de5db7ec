"""numpy arrays, bfloat16 included, to and from OrtValues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BFLOAT16_TENSOR = "tensor(bfloat16)"

# What an input of an onnxruntime type may be fed with.
NUMPY_DTYPES: dict[str, tuple[np.dtype[Any], ...]] = {
    "tensor(float)": (np.dtype(np.float32),),
    "tensor(double)": (np.dtype(np.float64),),
    "tensor(float16)": (np.dtype(np.float16),),
    BFLOAT16_TENSOR: (BFLOAT16,),
    "tensor(int32)": (np.dtype(np.int32),),
    "tensor(int64)": (np.dtype(np.int64),),
    "tensor(int8)": (np.dtype(np.int8),),
    "tensor(uint8)": (np.dtype(np.uint8),),
    "tensor(bool)": (np.dtype(np.bool_),),
}


def to_ort_value(value: Any, kind: str = "") -> onnxruntime.OrtValue:
    """An OrtValue of an array; OrtValues pass through, other values go by the input's type."""
    if isinstance(value, onnxruntime.OrtValue):
        return value
    dtypes = NUMPY_DTYPES.get(kind)
    array = np.ascontiguousarray(value, None if dtypes is None or hasattr(value, "dtype") else dtypes[0])
    array = array.reshape(np.shape(value))  # ascontiguousarray makes scalars 1-D
    if array.dtype == BFLOAT16:
        bits = array.view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


class _Memory:
    """The memory of an OrtValue for numpy, which keeps this, and so the memory, as long as it looks there."""

    def __init__(self, value: onnxruntime.OrtValue, shape: tuple[int, ...], typestr: str) -> None:
        # A value of a list of outputs keeps the whole list; what it gives to others is this tensor's alone.
        self.capsule = value.__dlpack__()
        place = (value.data_ptr(), False)
        self.__array_interface__ = {"version": 3, "data": place, "shape": shape, "typestr": typestr}


def to_numpy(value: onnxruntime.OrtValue) -> Any:
    """The array in an OrtValue, which is not copied; onnxruntime itself does not give out bfloat16."""
    if "bfloat16" not in value.data_type():
        return value.numpy()
    shape = tuple(value.shape())
    if 0 in shape:  # whose place may be no place
        return np.zeros(shape, BFLOAT16)
    return np.asarray(_Memory(value, shape, np.dtype(np.uint16).str)).view(BFLOAT16)


def arrays_of(
    names: Sequence[str], values: Iterable[onnxruntime.OrtValue], feed: Mapping[str, Any]
) -> list[Any]:
    """The outputs of a run; what a graph passes on as it came is the feed's memory, and is copied."""
    return [
        to_numpy(value).copy() if name in feed else to_numpy(value)
        for name, value in zip(names, values, strict=True)
    ]
