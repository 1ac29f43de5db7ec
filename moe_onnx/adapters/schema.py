"""OpSpec -> ONNX schema with documentation, type constraints and shape inference."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import onnx
import onnx.defs
import onnx.helper
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext, InferenceError

from moe_onnx.errors import MoeOnnxError
from moe_onnx.operators import ALL
from moe_onnx.spec import DOMAIN, VERSION, Arg, Attr, OpSpec, Shape, TensorInfo

# Names of element types: numpy's here, ONNX's in schemas and TensorProto.
TYPE_STRINGS = {
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "float32": "tensor(float)",
    "float64": "tensor(double)",
    "int32": "tensor(int32)",
    "bool": "tensor(bool)",
    "int8": "tensor(int8)",
}
ELEM_TYPES = {
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float32": onnx.TensorProto.FLOAT,
    "float64": onnx.TensorProto.DOUBLE,
    "int32": onnx.TensorProto.INT32,
    "bool": onnx.TensorProto.BOOL,
    "int8": onnx.TensorProto.INT8,
}
DTYPES: dict[int, str] = {int(elem): name for name, elem in ELEM_TYPES.items()}
_ELEM_NAMES: dict[int, str] = {number: name for name, number in onnx.TensorProto.DataType.items()}
# Whether inference goes on past a node that its operator refuses, see `inference_goes_on`.
_GOES_ON: ContextVar[bool] = ContextVar("moe_onnx_inference_goes_on", default=False)
_KINDS = {
    "int": OpSchema.AttrType.INT,
    "bool": OpSchema.AttrType.INT,
    "ints": OpSchema.AttrType.INTS,
}


def register_schemas() -> None:
    """Register the schemas of all operators with onnx; those there already are left alone."""
    for spec in ALL:
        if not onnx.defs.has(spec.name, DOMAIN):
            onnx.defs.register_schema(make_schema(spec))
            # onnx destroys its registry after Python has ended. Destroying a Python callback then
            # waits for ever for an interpreter that is gone (seen with onnx 1.19.0).
            atexit.register(onnx.defs.deregister_schema, spec.name, VERSION, DOMAIN)


def make_schema(spec: OpSpec) -> OpSchema:
    """The ONNX schema of an operator."""
    variables = {arg.type_var: arg for arg in (*spec.outputs, *spec.inputs)}
    schema = OpSchema(
        spec.name,
        DOMAIN,
        VERSION,
        f"{spec.summary}\n\n{spec.formula}\n\nSource: {spec.source}.",
        inputs=[_parameter(arg) for arg in spec.inputs],
        outputs=[_parameter(arg) for arg in spec.outputs],
        type_constraints=[
            (
                var,
                [TYPE_STRINGS[name] for name in arg.dtypes],
                f"dtypes of '{arg.name}' and its like",
            )
            for var, arg in variables.items()
        ],
        attributes=[_attribute(attr) for attr in spec.attributes],
    )
    schema.set_type_and_shape_inference_function(_inference(spec))
    return schema


def _parameter(arg: Arg) -> OpSchema.FormalParameter:
    option = OpSchema.FormalParameterOption
    category = OpSchema.DifferentiationCategory
    return OpSchema.FormalParameter(
        arg.name,
        arg.type_var,
        f"[{arg.axes}] {arg.doc}",
        param_option=option.Optional if arg.optional else option.Single,
        differentiation_category=category.Differentiable
        if arg.differentiable
        else category.NonDifferentiable,
    )


def _attribute(attr: Attr) -> OpSchema.Attribute:
    doc = f"{attr.doc} ({attr.rule})"
    if attr.default is None:
        return OpSchema.Attribute(attr.name, _KINDS[attr.kind], doc, required=attr.required)
    return OpSchema.Attribute(attr.name, onnx.helper.make_attribute(attr.name, attr.default), doc)


def _inference(spec: OpSpec) -> Callable[[InferenceContext], None]:
    def infer(context: InferenceContext) -> None:
        inputs = [_input_info(context, i) for i in range(len(spec.inputs))]
        attributes = {}
        for attr in spec.attributes:
            proto = context.get_attribute(attr.name)
            if proto is not None and proto.name:
                attributes[attr.name] = onnx.helper.get_attribute_value(proto)
        try:
            _, outputs = spec.check(inputs, attributes)
        except MoeOnnxError as error:
            if _GOES_ON.get():
                return
            raise InferenceError(str(error)) from error
        for i, info in enumerate(outputs[: context.get_num_outputs()]):
            if info is not None and info.dtype:
                context.set_output_type(i, _type_proto(info))

    return infer


@contextmanager
def inference_goes_on() -> Iterator[None]:
    """Within, a node that its operator refuses has outputs of unknown type, and what follows is inferred.

    Otherwise one such node ends the inference of the whole model, with its operator's message.
    """
    token = _GOES_ON.set(True)
    try:
        yield
    finally:
        _GOES_ON.reset(token)


def _input_info(context: InferenceContext, index: int) -> TensorInfo | None:
    if index >= context.get_num_inputs() or not context.has_input(index):
        return None
    proto = context.get_input_type(index)
    if proto is None or not proto.HasField("tensor_type"):
        return TensorInfo("", None)
    return tensor_info(proto)


def tensor_info(proto: onnx.TypeProto) -> TensorInfo:
    """What a TypeProto says of a tensor; an unsupported dtype keeps its ONNX name, lower case."""
    tensor = proto.tensor_type
    elem = tensor.elem_type
    dtype = DTYPES.get(elem) or (elem_name(elem).lower() if elem else "")
    if not tensor.HasField("shape"):
        return TensorInfo(dtype, None)
    shape: Shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim
    )
    return TensorInfo(dtype, shape)


def elem_name(elem: int) -> str:
    """``FLOAT``; files may also hold numbers that no element type has."""
    return _ELEM_NAMES.get(elem, f"ELEM_TYPE_{elem}")


def _type_proto(info: TensorInfo) -> onnx.TypeProto:
    shape: Any = info.shape
    return onnx.helper.make_tensor_type_proto(ELEM_TYPES[info.dtype], shape)
