"""What is in a model and does nothing there."""

from __future__ import annotations

import math
from collections.abc import Iterator

from onnx import TensorProto

from moe_onnx.validation.collapse import few
from moe_onnx.validation.file.names import Names, names_of
from moe_onnx.validation.file.tensor_data import Held
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject, normal_domain

# Operators that only move data.
_MOVING = {
    "Cast",
    "Concat",
    "Constant",
    "ConstantOfShape",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Range",
    "Reshape",
    "Shape",
    "Size",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}

_FLAGS = 1024  # bytes that axes, sizes and flags may have
_WEIGHTS = {
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.DOUBLE,
    TensorProto.STRING,
}

DEAD_NODE = code(
    "MO206",
    "note",
    "Nodes that no output depends on",
    why="`onnxruntime` removes them at load. Where they were meant to do something, an output or an edge is "
    "missing: a loss that was not added, a branch that a rewrite left behind.",
    mend="Remove them, or read what they make.",
)
UNREAD_INITIALIZER = code(
    "MO207",
    "warning",
    "Initializers that no output depends on",
    why="Weights that are stored, copied and downloaded for nothing, or that a rewrite or a tracing has cut "
    "off from the graph: then the model computes without them.",
    mend="Remove them, or find out what should read them.",
)
UNREAD_INPUT = code(
    "MO208",
    "note",
    "A graph input that no output depends on",
    why="It must be fed and changes nothing. Exporters keep inputs of a fixed interface; otherwise an edge "
    "is missing.",
    mend="Remove it, or find out what should read it.",
)
UNUSED_FUNCTION = code(
    "MO209",
    "note",
    "A function that nothing calls",
    why="It costs room only; or its caller names another domain or operator than it meant.",
    mend="Remove it, or correct its caller.",
)


@check("static", DEAD_NODE, UNREAD_INITIALIZER, UNREAD_INPUT)
def values(subject: Subject) -> Iterator[Outcome]:
    """Every node, initializer and input serves an output."""
    for here in names_of(subject):
        if not here.scope.outputs:
            continue  # another check says so
        needed = _needed(here)
        yield from _nodes(here, needed)
        yield from _initializers(here, needed)
        if here.scope is subject.main:
            for name in here.scope.inputs:
                if name and name not in needed:
                    yield UNREAD_INPUT(f"graph input {name!r}", found="no output depends on it")


def _nodes(here: Names, needed: set[str]) -> Iterator[Outcome]:
    nodes = here.scope.nodes
    dead = [number for number, node in enumerate(nodes) if not needed.intersection(node.output)]
    # Leftovers that only move data are usual, in what onnxruntime saves among others.
    computing = [number for number in dead if nodes[number].op_type not in _MOVING]
    if not computing:
        return
    read = {name for number in dead for name in here.reads(number)}
    ends = [number for number in computing if not read.intersection(nodes[number].output)] or computing
    shown = [here.scope.place(nodes[number]) for number in ends[:3]]
    if len(ends) > 3:
        shown.append(f"{len(ends) - 3} more")
    others = len(dead) - len(ends)
    more = f", and of {others} more nodes before or after these" if others else ""
    yield DEAD_NODE(
        shown[0],
        found=f"no output depends on {', '.join(shown)}{more}",
        places=[here.scope.place(nodes[number]) for number in dict.fromkeys([*ends, *dead])],
    )


def _initializers(here: Names, needed: set[str]) -> Iterator[Outcome]:
    if here.scope.graph is None:
        return
    unread = [
        Held(tensor, here.scope)
        for tensor in here.scope.graph.initializer
        if tensor.name and tensor.name not in needed and tensor.name not in here.inputs
    ]
    unread = [held for held in unread if _is_weight(held)]
    if unread:
        size = sum(held.bytes or 0 for held in unread)
        shown = few(repr(held.tensor.name) for held in unread)
        yield UNREAD_INITIALIZER(
            unread[0].where,
            found=f"no output depends on {shown}: {size} bytes",
            places=[held.where for held in unread],
        )


def _is_weight(held: Held) -> bool:
    """Whether more than a scalar, axes, sizes or flags, which are left over as nodes that move data are."""
    several = math.prod(held.tensor.dims) != 1
    return (several and held.tensor.data_type in _WEIGHTS) or (held.bytes or 0) > _FLAGS


def _needed(here: Names) -> set[str]:
    """What the outputs of a scope depend on."""
    needed: set[str] = set()
    waiting = list(here.scope.outputs)
    walked: set[int] = set()
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        number = here.position.get(name, -1)
        if number >= 0 and number not in walked:
            walked.add(number)
            waiting.extend(here.reads(number))
    return needed


@check("static", UNUSED_FUNCTION)
def functions(subject: Subject) -> Iterator[Outcome]:
    """Every function is called."""
    called = {(normal_domain(node.domain), node.op_type) for _, node in subject.nodes()}
    idle = [f"'{domain}.{name}'" for domain, name in subject.functions if (domain, name) not in called]
    if idle:
        yield UNUSED_FUNCTION(
            f"function {idle[0]}",
            found=f"no node calls {few(idle)}",
            places=[f"function {name}" for name in idle],
        )
