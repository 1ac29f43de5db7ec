"""Scatters that lose updates and gathers that read the wrong row: what runs, and is silently wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from moe_onnx.validation.collapse import first_few
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.hazards.distinct import repeated_element, repeated_rows, scatters_twice
from moe_onnx.validation.hazards.values import (
    argument,
    attribute,
    constant,
    consumers,
    dims,
    foreign_nodes,
    integer,
    is_op,
    read,
)
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject
from moe_onnx.validation.types import has_other_outputs

LOST_UPDATES = code(
    "MO401",
    "warning",
    "A ScatterND with a reduction may name a row twice",
    why="onnxruntime's CPU kernel of ScatterND reduces without a lock: with two threads, updates of one "
    "row get lost (1.32, 20,000 updates of 8 rows: 128 of 128 sums wrong in every run, also `mul`, `max` "
    "and `min`; right with one thread). torch.onnx.export writes `index_add` and "
    "`index_put(accumulate=True)` so, which is how many MoE layers combine their experts. This finding "
    "is there wherever the indices are not shown to differ: by coming from Range, NonZero, TopK or a "
    "constant, through Cast, Reshape, Concat and the like.",
    mend='Use ScatterElements(reduction="add"), which is right at any number of threads, with the '
    "indices expanded to the updates' shape; or the combine of ascend.moe; or one intra-op thread.",
)


LOST_FOR_SURE = code(
    "MO402",
    "error",
    "A ScatterND with a reduction names a row twice",
    why="As MO401, and the indices are constants in which a row stands twice: updates do get lost in "
    "onnxruntime at more than one thread.",
    mend='Use ScatterElements(reduction="add"), or add up the updates of a row beforehand.',
)


OVERWRITTEN = code(
    "MO403",
    "warning",
    "A scatter without reduction names a place twice",
    why="ONNX leaves open which of two updates of one place is kept, and runtimes differ.",
    mend="Make the constant indices unique, or say what is to be done with both by `reduction`.",
)


INDEX_ADD = code(
    "MO404",
    "warning",
    "What looks like an addition by index keeps only one update of a row",
    why="torch.onnx.export(dynamo=False) writes `index_add` and `index_put(accumulate=True)` as a "
    "scatter without reduction into zeros and an Add (measured with torch 2.13: two updates of 1 for one "
    "row give 1). It is right only where no row is named twice, which these indices do not show.",
    mend='Give the scatter reduction="add" (ScatterElements rather than ScatterND: see MO401), or export '
    "with dynamo=True and see MO401.",
)


INDEX_TYPE = code(
    "MO405",
    "error",
    "Indices that must be int64 are not",
    why="GatherND and ScatterND take int64 indices only, unlike Gather, GatherElements and "
    "ScatterElements; onnxruntime refuses to load others. The row indices of the ascend.moe operators "
    "are int32.",
    mend="Put a Cast to int64 in front.",
)


OUTSIDE = code(
    "MO406",
    "error",
    "A constant index is outside the axis it points into",
    why="The node fails in every run, or reads memory that is not its own.",
    mend="Legal are -d to d-1 for an axis of length d.",
)


SPLIT_OUTPUTS = code(
    "MO409",
    "error",
    "A Split has another number of outputs than its num_outputs",
    why="onnx 1.23.2's shape inference ends the whole process where there are more outputs than num_outputs, "
    "and takes memory without end where num_outputs is huge: tools that infer shapes die on the model.",
    mend="Set num_outputs to the number of outputs.",
)


_GATHERS = ("Gather", "GatherElements", "GatherND")


_SCATTERS = ("ScatterElements", "ScatterND")


_TWICE = "that no row is named twice, which cannot be shown here"


@check("static", LOST_UPDATES, LOST_FOR_SURE, OVERWRITTEN, INDEX_ADD)
def scatters(subject: Subject) -> Iterable[Outcome]:
    """No scatter loses an update of a row that is named twice."""
    yield from first_few(_scatters(subject))


def _scatters(subject: Subject) -> Iterator[Outcome]:
    for scope, node in foreign_nodes(subject):
        if not is_op(node, *_SCATTERS):
            continue
        reduction = str(attribute(node, "reduction", "none"))
        index = constant(scope, argument(node, 1))
        if index is not None and index.dtype.kind in "iu":
            yield from _constant_scatter(scope, node, reduction, index)
        elif node.op_type == "ScatterND" and reduction != "none":
            if doubt := scatters_twice(subject, scope, node):
                yield LOST_UPDATES(
                    scope.place(node), found=f"reduction {reduction!r}; {doubt}", expected=_TWICE
                )
        elif reduction == "none" and _adds_to_zeros(subject, scope, node):
            doubt = scatters_twice(subject, scope, node)
            if doubt:
                found = f"scatters into zeros that an Add takes; {doubt}"
                yield INDEX_ADD(scope.place(node), found=found, expected=_TWICE)


@check("static", INDEX_TYPE, OUTSIDE)
def indices(subject: Subject) -> Iterable[Outcome]:
    """Indices are of the right type, and constant ones inside their axes."""
    yield from first_few(_indices(subject))


def _indices(subject: Subject) -> Iterator[Outcome]:
    for scope, node in foreign_nodes(subject):
        if not is_op(node, *_GATHERS, *_SCATTERS):
            continue
        types = subject.types(scope)
        info = types.get(argument(node, 1))
        if is_op(node, "GatherND", "ScatterND") and info is not None and info.dtype not in ("", "int64"):
            yield INDEX_TYPE(
                scope.place(node), found=f"indices {node.input[1]!r} are {info.dtype}", expected="int64"
            )
        # A branch may be one that is never taken.
        if scope is subject.main:
            yield from _ranges(subject, scope, node)


@check("static", SPLIT_OUTPUTS)
def splits(subject: Subject) -> Iterable[Outcome]:
    """Every Split has the outputs that it says it has."""
    for scope, node in subject.nodes():
        if has_other_outputs(node):
            count = integer(node, "num_outputs", 0)
            found = f"num_outputs is {count}, outputs are {len(node.output)}"
            yield SPLIT_OUTPUTS(scope.place(node), found=found)


def _constant_scatter(scope: Scope, node: NodeProto, reduction: str, index: np.ndarray) -> Iterator[Outcome]:
    if node.op_type == "ScatterND":
        row = repeated_rows(index)
        if row is not None and reduction != "none":
            yield LOST_FOR_SURE(
                scope.place(node), found=f"reduction {reduction!r}; row {row} stands twice in the indices"
            )
        elif row is not None:
            yield OVERWRITTEN(scope.place(node), found=f"row {row} stands twice in the indices")
    elif index.ndim and reduction == "none":
        element = repeated_element(index, integer(node, "axis", 0) % index.ndim)
        if element is not None:
            yield OVERWRITTEN(scope.place(node), found=f"index {element} stands twice along the axis")


def _adds_to_zeros(subject: Subject, scope: Scope, node: NodeProto) -> bool:
    """Whether a scatter writes into zeros, and nothing but an Add takes the outcome."""
    filled = constant(scope, argument(node, 0))
    if filled is None:
        made = scope.producer(argument(node, 0))
        if made is None or not is_op(made[1], "ConstantOfShape"):
            return False
        value = attribute(made[1], "value")
        filled = read(value) if isinstance(value, TensorProto) else None
    if filled is not None and filled.any():
        return False
    takers = consumers(subject, scope).get(next(iter(node.output), ""), [])
    return bool(takers) and all(is_op(taker, "Add") for taker in takers)


def _ranges(subject: Subject, scope: Scope, node: NodeProto) -> Iterator[Outcome]:
    index = constant(scope, argument(node, 1))
    shape = dims(subject.types(scope), argument(node, 0))
    if index is None or shape is None or not shape or not index.size or index.dtype.kind not in "iu":
        return
    if is_op(node, "GatherND", "ScatterND"):
        first = integer(node, "batch_dims", 0) if is_op(node, "GatherND") else 0
        width = index.shape[-1] if index.ndim else 0
        columns = [(first + axis, index[..., axis]) for axis in range(width)]
    else:
        columns = [(integer(node, "axis", 0) % len(shape), index)]
    for axis, column in columns:
        size = shape[axis] if 0 <= axis < len(shape) else None
        if not isinstance(size, int):
            continue
        wrong = column[(column < -size) | (column >= size)]
        if wrong.size:
            yield OUTSIDE(
                scope.place(node),
                found=f"index {int(wrong.reshape(-1)[0])} into axis {axis} of {node.input[0]!r}, {size} long",
                expected=f"{-size} to {size - 1}",
            )
            return
