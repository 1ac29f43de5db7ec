"""Dtypes and shapes: each node against its inputs', and what the model declares against what comes out.

onnx's own inference over a whole model is lenient: it passes over a node that contradicts itself, in
subgraphs also where it is asked to be strict. Here every node is inferred by itself, with the types that
its inputs are known to have; bodies of functions once for each set of types they are called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onnx import TypeProto

from moe_onnx.adapters.schema import elem_name
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.operators.function_calls import Calls
from moe_onnx.validation.operators.known_ops import malformed
from moe_onnx.validation.operators.node_types import Problem, Walk, whole_model_problem
from moe_onnx.validation.operators.own_ops import check_node
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

CONTRADICTION = code(
    "MO321",
    "error",
    "The dtypes or shapes of a node's inputs do not go together",
    why="The node cannot run, or not with these inputs. onnxruntime refuses the model when the session "
    "is made (`ShapeInferenceError`, `Type Error`). onnx's strict inference and `onnx.checker` pass over "
    "such nodes inside subgraphs (onnx #5463).",
    mend="Follow the inputs back to where the shapes part.",
)
DECLARED_DTYPE = code(
    "MO322",
    "error",
    "A value is declared with another dtype than it has",
    why="onnxruntime refuses the model: `Type Error: Type (tensor(int64)) of output arg (y) ... does not "
    "match expected type (tensor(float))`.",
    mend="Correct the declaration, or put a Cast before it.",
)
DECLARED_SHAPE = code(
    "MO323",
    "warning",
    "A value is declared with another shape than it has",
    why="onnxruntime logs a warning (`MergeShapeInfo`, `VerifyOutputSizes`) and runs the model by the "
    "shape that comes out; onnx.checker refuses it. Tools and runtimes that plan memory by what is "
    "declared go wrong.",
    mend="Correct the declaration, or make the size symbolic where it varies.",
)
UNTYPED = code(
    "MO324",
    "error",
    "An input or output of the graph has no element type, or none that exists",
    why="onnxruntime refuses inputs without a type and any element type that it does not know.",
    mend="Give the element type, and the shape where it is known.",
)

_MOST_NODES = 30_000  # of function bodies, each counted for every set of types that it is inferred with


@check("static", CONTRADICTION, DECLARED_DTYPE, DECLARED_SHAPE)
def types(subject: Subject) -> Iterator[Outcome]:
    """Each node takes the dtypes and shapes it gets, and gives those that the model declares."""
    walk = Walk(subject)
    found = [_finding(problem) for problem in walk.run()]
    calls = Calls(subject, walk, _MOST_NODES)
    for called, label in calls:
        inner = Walk(called)
        for problem in inner.run():
            found.append(_inside(_finding(problem), label))
        for scope, node in called.nodes():
            if inner.is_own(node):
                found += [_inside(f, label) for f in check_node(scope, node, called.types(scope), called)]
        calls.follow(called, inner, label)
    if not found and not malformed(subject) and (whole := whole_model_problem(subject)) is not None:
        found.append(_finding(whole))
    yield from collapsed(dict.fromkeys(found))
    if walk.stopped:
        yield Skipped(f"onnx's inference over the whole model stopped: {walk.stopped[:200]}")
    if walk.blind:
        names = ", ".join(sorted(walk.blind)[:5]) + (", ..." if len(walk.blind) > 5 else "")
        yield Skipped(f"onnx knows no types behind {names}: what follows was checked only where declared")
    if calls.left_out:
        yield Skipped(f"{calls.left_out} calls of functions were not looked into: too many, or too deep")


@check("static", UNTYPED)
def typed(subject: Subject) -> Iterator[Outcome]:
    """The graph's inputs and outputs have types that exist."""
    graph = subject.model.graph
    for value, what in [(v, "input") for v in graph.input] + [(v, "output") for v in graph.output]:
        if elem := _unknown_elem(value.type):
            yield UNTYPED(f"{what} {value.name!r}", found=elem, expected="an element type of ONNX")


def _unknown_elem(proto: TypeProto) -> str:
    """What is wrong with the element type of a tensor type, ``""`` for none and for other types."""
    if not proto.HasField("tensor_type"):
        return ""
    elem = proto.tensor_type.elem_type
    if not elem:
        return "no element type is given"
    name = elem_name(elem)
    return f"element type {elem} does not exist" if name.startswith("ELEM_TYPE") else ""


def _finding(problem: Problem) -> Finding:
    kinds = {"node": CONTRADICTION, "dtype": DECLARED_DTYPE, "shape": DECLARED_SHAPE}
    return kinds[problem.kind](problem.where, found=problem.found, expected=problem.expected)


def _inside(finding: Finding, label: str) -> Finding:
    return replace(finding, where=f"{finding.where} {label}")
