"""Tensors in the model itself: their data is what their dims and dtype say, and there is room for it."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from moe_onnx.validation.file.tensor_data import BITS, NAMES, Held, tensors
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.reading import PROTOBUF_LIMIT
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

SIZE = code(
    "MO221",
    "error",
    "A tensor's data is not what its dims and dtype ask for",
    why="Bytes of another dtype or shape, such as float32 bytes labelled bfloat16, or no data at all. "
    "`onnxruntime` refuses such an initializer when it reads it; `onnx.checker` (1.23) takes data that is "
    "too long, and a `Constant` may give its first bytes as the wrong values.",
    mend="Make the tensor with onnx.numpy_helper.from_array.",
)
KIND = code(
    "MO222",
    "error",
    "A tensor has no legal dtype or dims",
    why="The dtype is none, or one that the installed onnx does not know; or a dim is negative. "
    "`onnxruntime` and `onnx.checker` refuse the model.",
    mend="Set data_type and dims; for a dtype of a newer onnx install that.",
)
FIELD = code(
    "MO223",
    "error",
    "A tensor's data is in the wrong field, or in two",
    why="Each dtype has one typed field; `raw_data` serves all but strings. `onnx.checker` refuses other "
    "fields and more than one; `onnxruntime` takes one of the two without a word.",
    mend="Make the tensor with onnx.numpy_helper.from_array.",
)
TOO_LARGE = code(
    "MO224",
    "error",
    "The model is too large for one file",
    why="protobuf writes and reads no message of 2 GiB or more: the model cannot be saved, nor be given to "
    "`onnxruntime`, `onnx.checker` or shape inference.",
    mend="Save it with onnx.save(..., save_as_external_data=True); parameters of training graphs belong "
    "beside them.",
)
NEARLY_TOO_LARGE = code(
    "MO225",
    "warning",
    "The model is almost too large for one file",
    why="protobuf's limit is 2 GiB. What adds a little, such as types, an optimised save, or one more layer, "
    "makes the model one that cannot be saved.",
    mend="Save it with onnx.save(..., save_as_external_data=True).",
)

_NEAR = 0.9  # of the limit

# Which typed field holds which dtypes, by the file format's numbers.
_FIELDS: dict[str, tuple[int, ...]] = {
    "float_data": (1, 14),
    "int32_data": (2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26),
    "string_data": (8,),
    "int64_data": (7,),
    "double_data": (11, 15),
    "uint64_data": (12, 13),
}
_FIELD_OF = {dtype: field for field, dtypes in _FIELDS.items() for dtype in dtypes}


@check("static", SIZE, KIND, FIELD)
def data(subject: Subject) -> Iterator[Outcome]:
    """Tensors in the model hold as much data, of the kind, as their dims and dtype ask for."""
    for held in tensors(subject):
        if problem := _no_kind(held):
            yield KIND(held.where, found=problem, expected="a dtype of onnx.TensorProto, and dims >= 0")
        elif not held.is_external:
            yield from _inline(held)


def _no_kind(held: Held) -> str:
    dtype = held.tensor.data_type
    if held.size is None:
        return f"dims {list(held.tensor.dims)}"
    if dtype not in NAMES and dtype not in BITS:
        return "no dtype" if not dtype else f"dtype {dtype}"
    return ""


def _inline(held: Held) -> Iterator[Outcome]:
    tensor = held.tensor
    given = [field for field in ("raw_data", *_FIELDS) if len(getattr(tensor, field))]
    if len(given) > 1:
        yield FIELD(held.where, found=f"data in {' and '.join(given)}", expected="data in one of them")
        return
    if not given:
        if held.size:
            yield SIZE(held.where, found="no data", expected=_expected(held))
        return
    field = given[0]
    if field == "raw_data":
        if tensor.data_type == TensorProto.STRING:
            yield FIELD(held.where, found="strings in raw_data", expected="string_data")
        elif held.bytes is not None and len(tensor.raw_data) != held.bytes:
            yield SIZE(held.where, found=_bytes(held), expected=_expected(held))
        return
    right = _FIELD_OF.get(tensor.data_type, field)
    if field != right:
        yield FIELD(held.where, found=f"data of {held.kind} in {field}", expected=right)
        return
    number, legal = len(getattr(tensor, field)), _numbers(held)
    if number not in legal:
        yield SIZE(
            held.where, found=f"{number} values in {field}", expected=f"{min(legal)} values for {held.kind}"
        )


def _numbers(held: Held) -> set[int]:
    """How many entries a typed field may have."""
    size, bits = held.size or 0, BITS.get(held.tensor.data_type, 8)
    if held.tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return {2 * size}
    # Elements of less than a byte are packed by bytes; some writers give each an entry of its own.
    return {(size * bits + 7) // 8, size} if bits < 8 else {size}


def _bytes(held: Held) -> str:
    """What is there, and which dtype it would fit."""
    given, size = len(held.tensor.raw_data), held.size or 0
    fitting = [
        NAMES[dtype]
        for dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT8)
        if size and BITS[dtype] * size == 8 * given
    ]
    return f"{given} bytes{f', as {fitting[0]} would have' if fitting else ''}"


def _expected(held: Held) -> str:
    return f"{held.size} strings" if held.bytes is None else f"{held.bytes} bytes for {held.kind}"


@check("static", TOO_LARGE, NEARLY_TOO_LARGE)
def room(subject: Subject) -> Iterator[Outcome]:
    """What stands in the model itself fits into one protobuf file."""
    inline = [held for held in tensors(subject) if not held.is_external]
    size = sum(_inline_bytes(held.tensor) for held in inline)
    if size < _NEAR * PROTOBUF_LIMIT:
        return
    largest = max(inline, key=lambda held: _inline_bytes(held.tensor))
    found = f"{size} bytes of tensors in it, most in {largest.where} ({_inline_bytes(largest.tensor)})"
    made = TOO_LARGE if size > PROTOBUF_LIMIT else NEARLY_TOO_LARGE
    yield made("model", found=found, expected=f"fewer than {PROTOBUF_LIMIT} bytes in all")


def _inline_bytes(tensor: TensorProto) -> int:
    """At least so many bytes: one for each entry of a field of varying width."""
    return (
        len(tensor.raw_data)
        + 4 * len(tensor.float_data)
        + 8 * len(tensor.double_data)
        + len(tensor.int32_data)
        + len(tensor.int64_data)
        + len(tensor.uint64_data)
        + sum(map(len, tensor.string_data))
    )
