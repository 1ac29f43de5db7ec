"""The mark -1 of slots without a row, and what reads the last row for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.collapse import first_few
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.hazards.values import (
    VIEWS,
    argument,
    attribute,
    constant,
    constant_of,
    consumers,
    integer,
    is_op,
    read,
    source,
)
from moe_onnx.validation.operators.own_bodies import in_own_body
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject

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


@check("static", PAD_READ, PAD_SIGN)
def pads(subject: Subject) -> Iterable[Outcome]:
    """The mark -1 of slots without a row reaches no gather and no scatter."""
    yield from first_few(_pads(subject))


def _pads(subject: Subject) -> Iterator[Outcome]:
    marked: dict[int, dict[str, Mark]] = {}
    for scope in subject.scopes:
        if in_own_body(subject, scope):
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


def _is_padded(value: np.ndarray | None) -> bool:
    """Whether integers look like indices with pads: -1 more than once, and others."""
    if value is None or value.dtype.kind != "i" or value.size < 3:
        return False
    return bool((value == -1).sum() > 1 and (value >= 0).any() and value.min() == -1)


def _is_mark(value: np.ndarray | None) -> bool:
    return value is not None and value.dtype.kind == "i" and value.size > 0 and bool((value == -1).all())


_GATHERS = ("Gather", "GatherElements", "GatherND")
_SCATTERS = ("ScatterElements", "ScatterND")
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
