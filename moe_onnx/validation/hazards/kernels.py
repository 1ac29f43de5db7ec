"""What stock onnxruntime has no kernel for on a CPU, or pays for dearly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import onnx
import onnx.helper
import onnxruntime.capi.onnxruntime_pybind11_state as onnxruntime_state
from onnx import NodeProto

from moe_onnx.spec import TensorInfo
from moe_onnx.validation.collapse import first_few
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.hazards.values import (
    foreign_nodes,
)
from moe_onnx.validation.operators.own_bodies import in_own_body
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject, normal_domain
from moe_onnx.validation.types import infer_types

NO_KERNEL = code(
    "MO421",
    "warning",
    "onnxruntime has no CPU kernel for this operator in bfloat16",
    why="onnxruntime refuses the model when the session is made (`NOT_IMPLEMENTED: Could not find an "
    "implementation`). It has bfloat16 kernels for what moves data (Cast, Gather, the scatters, "
    "Transpose, Reshape) and for few that compute; for float16 it puts Casts to float32 round such "
    "nodes, for bfloat16 it does not. Nodes inside functions count too. A device may well have the "
    "kernel: hence a warning.",
    mend="Put a Cast to float32 before and one to bfloat16 behind it, or run the model on a device that "
    "has it.",
)


TRAINING_OPERATOR = code(
    "MO422",
    "error",
    "A training operator that onnxruntime does not have",
    why="ai.onnx.preview.training (Gradient, Adam, Adagrad, Momentum) and com.microsoft's gradient and "
    "optimizer operators were registered in onnxruntime-training only, whose last release is 1.19.2. "
    "Stock onnxruntime says `is not a registered function/op`; onnx.checker accepts them.",
    mend="Write gradients and updates in standard operators: moe_onnx.differentiate, "
    "moe_onnx.build_training_graph.",
)


_TRAINING = re.compile(
    r"(Grad(ient)?(V\d+)?|Gradient\w*|\w*Optimizer(V\d+)?|InPlaceAccumulator(V\d+)?|ReduceAllL2|SGDOptimizerV2)$"
)


# These are functions of others: measured one by one with onnxruntime 1.32, all of them in bfloat16.
_NO_BODY_EITHER = frozenset(
    {
        "Softmax",
        "LogSoftmax",
        "Gelu",
        "RMSNormalization",
        "Swish",
        "Mish",
        "Softplus",
        "Attention",
        "Relu",
        "LeakyRelu",
    }
    | {"PRelu", "Elu", "Selu", "ThresholdedRelu", "Softsign", "HardSigmoid", "HardSwish", "GreaterOrEqual"}
    | {"LessOrEqual", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"}
    | {"MeanVarianceNormalization"}
)


@check("static", NO_KERNEL)
def bfloat16(subject: Subject) -> Iterable[Outcome]:
    """All that the model computes in bfloat16 has a CPU kernel in onnxruntime."""
    yield from first_few(_bfloat16(subject))


def _bfloat16(subject: Subject) -> Iterator[Outcome]:
    seen: set[tuple[str, ...]] = set()
    for scope, node in foreign_nodes(subject):
        types = subject.types(scope)
        if scope.function is None and _lacks_kernel(node, scope.opsets, types):
            yield NO_KERNEL(scope.place(node), found="computes in bfloat16")
        elif scope.function is None:
            yield from _inside(subject, scope.place(node), node, types, seen, 0)


@check("static", TRAINING_OPERATOR)
def training_operators(subject: Subject) -> Iterable[Outcome]:
    """No operator is one of onnxruntime-training's."""
    yield from first_few(_training_operators(subject))


def _training_operators(subject: Subject) -> Iterator[Outcome]:
    for scope, node in subject.nodes():
        domain = normal_domain(node.domain)
        if (domain, node.op_type) in subject.functions:
            continue
        is_contrib = domain == "com.microsoft" and _TRAINING.search(node.op_type) is not None
        if domain == "ai.onnx.preview.training" or (is_contrib and node.op_type not in _contrib_operators()):
            yield TRAINING_OPERATOR(scope.place(node), found=f"operator {domain}.{node.op_type}")


@cache
def _contrib_operators() -> frozenset[str]:
    return frozenset(
        schema.name
        for schema in onnxruntime_state.get_all_operator_schema()
        if schema.domain == "com.microsoft"
    )


@cache
def _kernels() -> dict[str, list[tuple[int, int, dict[str, list[str]]]]]:
    """The CPU kernels of ONNX's own operators: first and last version, and types by variable."""
    found: dict[str, list[tuple[int, int, dict[str, list[str]]]]] = {}
    for kernel in onnxruntime_state.get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider" and not normal_domain(kernel.domain):
            first, last = kernel.version_range
            found.setdefault(kernel.op_name, []).append((first, last, dict(kernel.type_constraints)))
    return found


@cache
def _schema(op: str, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None


def _lacks_kernel(node: NodeProto, opsets: dict[str, int], types: dict[str, TensorInfo]) -> bool:
    if normal_domain(node.domain):
        return False
    narrow = [position for position, name in enumerate(node.input) if _dtype(types, name) == "bfloat16"]
    made = [position for position, name in enumerate(node.output) if _dtype(types, name) == "bfloat16"]
    if not narrow and not made:
        return False
    schema = _schema(node.op_type, opsets.get("", 0))
    if schema is None:
        return False
    is_function = schema.has_function or schema.has_context_dependent_function
    if is_function and node.op_type not in _NO_BODY_EITHER:
        return False
    if not is_function and node.op_type not in _kernels():
        return False  # not onnxruntime's at all: another check's matter
    variables = {_variable(schema.inputs, position) for position in narrow}
    variables |= {_variable(schema.outputs, position) for position in made}
    for first, last, allowed in _kernels().get(node.op_type, []):
        if first <= schema.since_version <= last and all(
            "tensor(bfloat16)" in allowed[name] for one in variables for name in one if name in allowed
        ):
            return False
    return True


def _variable(arguments: Any, position: int) -> tuple[str, ...]:
    """The names under which kernels may limit the types of an argument; the last one may repeat."""
    if not arguments:
        return ()
    argument_of = arguments[min(position, len(arguments) - 1)]
    return (argument_of.type_str, argument_of.name)


def _dtype(types: dict[str, TensorInfo], name: str) -> str:
    return types[name].dtype if name in types else ""


def _inside(
    subject: Subject,
    place: str,
    node: NodeProto,
    types: dict[str, TensorInfo],
    seen: set[tuple[str, ...]],
    deep: int,
) -> Iterator[Outcome]:
    """What a call's function, and those it calls, compute in bfloat16 when given these inputs."""
    name = (normal_domain(node.domain), node.op_type)
    kinds = tuple(_dtype(types, given) for given in node.input)
    if name not in subject.functions or deep > 8 or (*name, *kinds) in seen or "bfloat16" not in kinds:
        return
    seen.add((*name, *kinds))
    scope = _bodies(subject)[name]
    if in_own_body(subject, scope):
        return
    inner = _types_inside(subject, scope, types, node)
    for one in scope.nodes:
        if _lacks_kernel(one, scope.opsets, inner):
            yield NO_KERNEL(scope.place(one), found=f"computes in bfloat16 when called by {place}")
        else:
            yield from _inside(subject, scope.place(one), one, inner, seen, deep + 1)


def _bodies(subject: Subject) -> dict[tuple[str, str], Scope]:
    return {
        (normal_domain(scope.function.domain), scope.function.name): scope
        for scope in subject.scopes
        if scope.function is not None and scope.graph is None
    }


def _types_inside(
    subject: Subject, scope: Scope, types: dict[str, TensorInfo], node: NodeProto
) -> dict[str, TensorInfo]:
    """The types of a function's values when called so."""
    model = onnx.ModelProto(ir_version=10)
    model.opset_import.extend(
        onnx.helper.make_opsetid(name, version) for name, version in scope.opsets.items()
    )
    model.graph.name = scope.where
    model.graph.node.extend(scope.nodes)
    if any((normal_domain(one.domain), one.op_type) in subject.functions for one in scope.nodes):
        model.functions.extend(subject.model.functions)
    for name, given in zip(scope.inputs, node.input, strict=False):
        info = types.get(given)
        kind = _ELEMENTS.get(info.dtype) if info is not None else None
        if info is not None and kind is not None:
            model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, info.shape))
    light, _ = infer_types(model)
    inferred = Subject(light, scope.where)
    return inferred.types(inferred.main)


_ELEMENTS = {
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float32": onnx.TensorProto.FLOAT,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
    "bool": onnx.TensorProto.BOOL,
}
