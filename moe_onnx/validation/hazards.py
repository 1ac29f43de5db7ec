"""Scatters that lose updates and gathers that read the wrong row: what runs, and is silently wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.distinct import repeated_element, repeated_rows, scatters_twice
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject
from moe_onnx.validation.values import (
    VIEWS,
    argument,
    attribute,
    collapsed,
    constant,
    constant_of,
    consumers,
    dims,
    foreign_nodes,
    integer,
    is_op,
    is_own_body,
    read,
    source,
)

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
PAD_READ = code(
    "MO407",
    "warning",
    "Indices that may hold the mark -1 are gathered or scattered by",
    why="-1 marks slots without a row (dropped tokens, padding). Gather and its relatives take it for "
    "the last row instead of refusing it: dropped tokens then read, or overwrite, another token's row. "
    "Multiplying what was read by 0 afterwards does not help where that row is not finite.",
    mend="Replace the -1 first (Max with 0, or Where), and select by Where what was read for them; or "
    "use the operators of ascend.moe, which leave them out.",
)
PAD_SIGN = code(
    "MO408",
    "warning",
    "The absolute value is taken of indices that may hold the mark -1",
    why="-1 marks slots without a row. Abs makes it 1, so that they read row 1 (vllm-ascend #10579: NaN).",
    mend="Compare with 0 and select by Where; leave the sign alone.",
)

_GATHERS = ("Gather", "GatherElements", "GatherND")
_SCATTERS = ("ScatterElements", "ScatterND")
_TWICE = "that no row is named twice, which cannot be shown here"


@check("static", LOST_UPDATES, LOST_FOR_SURE, OVERWRITTEN, INDEX_ADD)
def scatters(subject: Subject) -> Iterable[Outcome]:
    """No scatter loses an update of a row that is named twice."""
    yield from collapsed(_scatters(subject))


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
    yield from collapsed(_indices(subject))


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


@check("static", PAD_READ, PAD_SIGN)
def pads(subject: Subject) -> Iterable[Outcome]:
    """The mark -1 of slots without a row reaches no gather and no scatter."""
    yield from collapsed(_pads(subject))


def _pads(subject: Subject) -> Iterator[Outcome]:
    marked: dict[int, dict[str, Mark]] = {}
    for scope in subject.scopes:
        if is_own_body(subject, scope):
            continue
        outer = marked.get(id(scope.outer), {}) if scope.outer is not None else {}
        marks = marked[id(scope)] = dict(outer)
        for name, tensor in scope.initializers.items():
            if _is_padded(read(tensor)):
                marks[name] = Mark(f"constant {name!r} holds it more than once among others")
        for node in scope.nodes:
            yield from _follow(subject, scope, node, marks)


@dataclass(frozen=True)
class Mark:
    """Why a value may hold -1 for slots without a row; by choice where the model itself puts it there."""

    reason: str
    by_choice: bool = False


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


def _is_padded(value: np.ndarray | None) -> bool:
    """Whether integers look like indices with pads: -1 more than once, and others."""
    if value is None or value.dtype.kind != "i" or value.size < 3:
        return False
    return bool((value == -1).sum() > 1 and (value >= 0).any() and value.min() == -1)


def _is_mark(value: np.ndarray | None) -> bool:
    return value is not None and value.dtype.kind == "i" and value.size > 0 and bool((value == -1).all())


_MAY_HAVE_A_LAST_ROW = ("Concat", "Pad", "Scan", "Loop", "If", "Slice", *_SCATTERS)
# These hand on elements of the inputs named.
_HAND_ON = dict.fromkeys(
    (*VIEWS, "Slice", "Split", "Expand", "Tile", *_GATHERS, "Compress"), (0,)
) | dict.fromkeys(_SCATTERS, (0, 2))


def _follow(subject: Subject, scope: Scope, node: NodeProto, marks: dict[str, Mark]) -> Iterator[Outcome]:
    if (made := _new_mark(scope, node)) is not None:
        output, mark = made
        if output < len(node.output):
            marks[node.output[output]] = mark
        return
    index = argument(node, 1)
    if index in marks and _is_misread(subject, scope, node, marks[index]):
        yield PAD_READ(
            scope.place(node),
            found=f"index {index!r} may be -1: {marks[index].reason}",
            expected="-1 replaced before, and what it stands for selected by Where",
        )
    if is_op(node, "Abs") and argument(node, 0) in marks:
        reason = marks[node.input[0]].reason
        yield PAD_SIGN(scope.place(node), found=f"{node.input[0]!r} may be -1: {reason}")
        return
    taken: Iterable[int] = _HAND_ON.get(node.op_type, ()) if is_op(node, *_HAND_ON) else ()
    if is_op(node, "Concat"):
        taken = range(len(node.input))
    for position in taken:
        if argument(node, position) in marks:
            mark = marks[node.input[position]]
            marks.update((name, mark) for name in node.output if name)
            return


def _is_misread(subject: Subject, scope: Scope, node: NodeProto, mark: Mark) -> bool:
    if is_op(node, *_SCATTERS):
        return not mark.by_choice
    if not is_op(node, *_GATHERS) or _is_selected(subject, scope, node):
        return False
    if not mark.by_choice:
        return True
    # Who writes -1 may well have put a row for it behind the others.
    table = constant(scope, argument(node, 0))
    if table is not None and table.ndim < 2:
        return False
    made = source(scope, argument(node, 0))
    return made is None or not is_op(made[1], *_MAY_HAVE_A_LAST_ROW)


def _new_mark(scope: Scope, node: NodeProto) -> tuple[int, Mark] | None:
    """The output of a node that may hold -1 for slots without a row, and why."""
    if node.domain == DOMAIN:
        if node.op_type == "MoeInitRoutingV2" and integer(node, "drop_pad_mode", 0) == 1:
            return 1, Mark(f"{scope.place(node)} gives it to slots that are dropped")
        return None
    if is_op(node, "Where") and any(_is_mark(constant(scope, argument(node, i))) for i in (1, 2)):
        return 0, Mark(f"{scope.place(node)} chooses it", by_choice=True)
    if is_op(node, "ConstantOfShape"):
        value = attribute(node, "value")
        if isinstance(value, TensorProto) and _is_mark(read(value)):
            return 0, Mark(f"{scope.place(node)} fills with it", by_choice=True)
    if is_op(node, "Constant") and _is_padded(constant_of(node)):
        return 0, Mark(f"{scope.place(node)} holds it more than once among others")
    return None


def _is_selected(subject: Subject, scope: Scope, node: NodeProto) -> bool:
    """Whether all that takes what a node gives, views aside, is a Where."""
    readers = consumers(subject, scope)
    waiting, seen = [name for name in node.output if name], set()
    outputs = set(scope.outputs)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        takers = readers.get(name, [])
        if name in outputs or not takers or len(seen) > 32:
            return False
        for taker in takers:
            if is_op(taker, *VIEWS) and taker.input[0] == name:
                waiting += [output for output in taker.output if output]
            elif not is_op(taker, "Where"):
                return False
    return True
