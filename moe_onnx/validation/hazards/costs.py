"""What runs in onnxruntime, and costs memory, digits, or the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import NodeProto

from moe_onnx.spec import TensorInfo
from moe_onnx.validation.collapse import first_few
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.hazards.values import (
    argument,
    attribute,
    constant_of,
    dims,
    foreign_nodes,
    is_op,
    source,
)
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject, normal_domain

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


@check("static", NARROW_SUM)
def narrow_sums(subject: Subject) -> Iterable[Outcome]:
    """No scatter adds in 16 bits."""
    yield from first_few(_narrow_sums(subject))


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
    yield from first_few(_folded_constants(subject))


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
    yield from first_few(_softmaxes(subject))


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
