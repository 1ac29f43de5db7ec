"""Values with which a node cannot run, whatever its inputs: attributes that are none, constants of 0."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import AttributeProto

from moe_onnx.validation.collapse import first_few
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.hazards.values import argument, constant_of, foreign_nodes, is_op, read
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject

UNKNOWN_VALUE = code(
    "MO318",
    "error",
    "A text attribute has a value that its operator does not know",
    why="onnx.checker does not look. onnxruntime refuses some when it loads the model (`auto_pad`, the "
    "`mode` of Pad and Resize), some when it runs the node (`approximate` of Gelu), and takes others for the "
    "default without a word (`reduction` of ScatterND: updates overwrite where they were to be added).",
    mend="Write one of the values that the operator knows, in this spelling.",
)
ZERO_DIVISOR = code(
    "MO325",
    "error",
    "Integers are divided by a constant 0",
    why="There is no such quotient: onnxruntime refuses to load the model (`Integer division by zero`), and "
    "elsewhere the process may end.",
    mend="Correct the divisor, or put a Max with 1 before it.",
)

_PADS = ("", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_REDUCTIONS = ("none", "add", "mul", "max", "min")
_DIRECTIONS = ("forward", "reverse", "bidirectional")
_LOSSES = ("none", "sum", "mean")
_KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    **{key: {"auto_pad": _PADS} for key in ("Conv", "ConvInteger", "ConvTranspose", "QLinearConv")},
    **{key: {"auto_pad": _PADS} for key in ("AveragePool", "LpPool", "MaxPool")},
    **{key: {"direction": _DIRECTIONS} for key in ("GRU", "LSTM", "RNN")},
    **{key: {"reduction": _REDUCTIONS} for key in ("ScatterElements", "ScatterND")},
    **{key: {"reduction": _LOSSES} for key in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")},
    "BitShift": {"direction": ("LEFT", "RIGHT")},
    "DepthToSpace": {"mode": ("DCR", "CRD")},
    "Gelu": {"approximate": ("none", "tanh")},
    "Pad": {"mode": ("constant", "reflect", "edge", "wrap")},
    "Resize": {"mode": ("nearest", "linear", "cubic")},
}


@check("static", UNKNOWN_VALUE)
def texts(subject: Subject) -> Iterator[Outcome]:
    """Text attributes have values that their operators know."""
    for scope, node in foreign_nodes(subject):
        known = _KNOWN.get(node.op_type, {}) if is_op(node, node.op_type) else {}
        for given in node.attribute:
            if given.name not in known or given.type != AttributeProto.STRING or given.ref_attr_name:
                continue
            value, legal = given.s.decode("utf-8", "replace"), known[given.name]
            if value not in legal:
                expected = " or ".join(repr(one) for one in legal if one)
                yield UNKNOWN_VALUE(
                    scope.place(node), found=f"{given.name} is {value[:80]!r}", expected=expected
                )


@check("static", ZERO_DIVISOR)
def divisors(subject: Subject) -> Iterator[Outcome]:
    """No integer is divided by a constant 0."""
    yield from first_few(_divisors(subject))


def _divisors(subject: Subject) -> Iterator[Outcome]:
    for scope, node in foreign_nodes(subject):
        if is_op(node, "Div", "Mod") and _has_zero(scope, argument(node, 1)):
            yield ZERO_DIVISOR(scope.place(node), found=f"the divisor {node.input[1]!r} has a 0")


def _has_zero(scope: Scope, name: str) -> bool:
    """Whether ``name`` is an initializer or a Constant of integers with a 0; a Cast might make floats."""
    if not name:
        return False
    tensor, made = scope.initializer(name), scope.producer(name)
    value = read(tensor) if tensor is not None else constant_of(made[1]) if made is not None else None
    return value is not None and value.dtype.kind in "iu" and value.size > 0 and not value.all()
