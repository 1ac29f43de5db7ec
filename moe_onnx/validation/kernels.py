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
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject, normal_domain
from moe_onnx.validation.types import infer_types
from moe_onnx.validation.values import (
    argument,
    attribute,
    collapsed,
    constant_of,
    dims,
    foreign_nodes,
    is_op,
    is_own_body,
    source,
)

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
NARROW_SUM = code(
    "MO423",
    "note",
    "A scatter adds up in 16 bits",
    why="It rounds after every addition: in bfloat16 a sum of 512 equal terms stalls at half its value, "
    "in float16 2048 + 1 + 1 is 2048. The operators of ascend.moe add in float32 and round once.",
    mend="Cast data and updates to float32 before the scatter, and back behind it.",
)
FOLDED = code(
    "MO424",
    "warning",
    "onnxruntime makes a big constant of this when it loads the model",
    why="Its inputs are constants, so that the node is computed at load and its output kept as long as "
    "the session lives (measured: 510 MB more for the zeros of one embedding's gradient, from "
    "ConstantOfShape(Shape(x)) with x of static shape).",
    mend="Let the shape come from a value that is known only in a run, such as the gradient's own.",
)
TWICE_SOFTMAX = code(
    "MO425",
    "warning",
    "A softmax is taken of probabilities",
    why="Softmax of what a Softmax gave flattens it, and its gradients: a load-balancing loss or a cross "
    "entropy that takes logits was given probabilities (transformers #45120).",
    mend="Give it the logits, or leave out one of the two.",
)

BIG = 16 << 20  # bytes
_GROWS = 4  # times the bytes of what it is made from
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
    yield from collapsed(_bfloat16(subject))


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
    yield from collapsed(_training_operators(subject))


def _training_operators(subject: Subject) -> Iterator[Outcome]:
    for scope, node in subject.nodes():
        domain = normal_domain(node.domain)
        if (domain, node.op_type) in subject.functions:
            continue
        is_contrib = domain == "com.microsoft" and _TRAINING.search(node.op_type) is not None
        if domain == "ai.onnx.preview.training" or (is_contrib and node.op_type not in _contrib_operators()):
            yield TRAINING_OPERATOR(scope.place(node), found=f"operator {domain}.{node.op_type}")


@check("static", NARROW_SUM)
def narrow_sums(subject: Subject) -> Iterable[Outcome]:
    """No scatter adds in 16 bits."""
    yield from collapsed(_narrow_sums(subject))


def _narrow_sums(subject: Subject) -> Iterator[Outcome]:
    for scope, node in foreign_nodes(subject):
        if not is_op(node, "ScatterElements", "ScatterND") or attribute(node, "reduction", "none") != "add":
            continue
        info = subject.types(scope).get(argument(node, 0))
        if info is not None and info.dtype in ("float16", "bfloat16"):
            yield NARROW_SUM(scope.place(node), found=f"adds in {info.dtype}", expected="sums in float32")


@check("static", FOLDED)
def folded_constants(subject: Subject) -> Iterable[Outcome]:
    """Nothing of constants alone becomes a big constant at load."""
    yield from collapsed(_folded_constants(subject))


def _folded_constants(subject: Subject) -> Iterator[Outcome]:
    scope = subject.main
    types = subject.types(scope)
    given = set(scope.inputs)
    fixed = {name for name in scope.initializers if name not in given} | {""}
    grown: set[str] = set()
    for node in scope.nodes:
        shape = dims(types, argument(node, 0)) if is_op(node, "Shape") else None
        known = shape is not None and all(isinstance(dim, int) for dim in shape)
        if not (known or _is_foldable(node, fixed)):
            continue
        fixed |= set(node.output)
        sizes = [_bytes(types.get(name)) for name in node.output]
        before = sum(_bytes(types.get(name)) for name in node.input) if not known else 0
        if any(name in grown for name in node.input):
            grown |= set(node.output)  # a chain is one finding
        elif node.input and max(sizes, default=0) >= max(BIG, _GROWS * before):
            grown |= set(node.output)
            yield FOLDED(
                scope.place(node), found=f"{max(sizes) / 2**20:.0f} MB from {before} bytes of constants"
            )


@check("static", TWICE_SOFTMAX)
def softmaxes(subject: Subject) -> Iterable[Outcome]:
    """No softmax is taken of a softmax."""
    yield from collapsed(_softmaxes(subject))


def _softmaxes(subject: Subject) -> Iterator[Outcome]:
    for scope, node in foreign_nodes(subject):
        if not is_op(node, "Softmax", "LogSoftmax", "SoftmaxCrossEntropyLoss"):
            continue
        made = source(scope, argument(node, 0))
        if made is not None and is_op(made[1], "Softmax"):
            yield TWICE_SOFTMAX(
                scope.place(node),
                found=f"takes the probabilities of {made[0].place(made[1])}",
                expected="logits",
            )


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
    if is_own_body(subject, scope):
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


def _is_foldable(node: NodeProto, fixed: set[str]) -> bool:
    if constant_of(node) is not None or is_op(node, "Constant"):
        return True
    if (
        normal_domain(node.domain)
        or node.op_type.startswith("Random")
        or is_op(node, "Bernoulli", "Multinomial")
    ):
        return False
    if any(given.type in (5, 10) for given in node.attribute):  # subgraphs
        return False
    return bool(node.input) and all(name in fixed for name in node.input)


def _bytes(info: TensorInfo | None) -> int:
    if info is None or info.shape is None:
        return 0
    size = {"bool": 1, "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8}.get(
        info.dtype, 4
    )
    for dim in info.shape:
        if not isinstance(dim, int) or dim < 0:
            return 0
        size *= dim
    return size
