"""Equations of Einsum that onnx and onnxruntime never come to the end of."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import AttributeProto, NodeProto

from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject, normal_domain
from moe_onnx.validation.types import bad_equations

EQUATION = code(
    "MO410",
    "error",
    "The equation of an Einsum is none",
    why="Legal are letters, `...`, commas between the inputs, one `->` before the output, and spaces. At "
    "most other characters (`i.j->i`, or an arrow of Unicode) the shape inference of onnx 1.23.2 and the "
    "loading of onnxruntime 1.32 do not come to an end: whoever opens the model hangs. No session is made "
    "of it here.",
    mend="Write the equation in letters, such as 'ij,jk->ik'.",
)


@check("static", EQUATION)
def equations(subject: Subject) -> Iterator[Outcome]:
    """Equations of Einsum can be read."""
    for place, equation in _bad(subject):
        yield EQUATION(place, found=f"equation {equation[:80]!r}", expected="letters, '...', ',' and '->'")


def unreadable_equation(subject: Subject) -> str:
    """Where an equation stands that makes onnxruntime hang, or ``""``."""
    return next((place for place, _ in _bad(subject)), "")


def _bad(subject: Subject) -> Iterator[tuple[str, str]]:
    for scope, node in subject.nodes():
        for equation in bad_equations(node):
            yield scope.place(node), equation
        if node.op_type != "Einsum" or scope.function is None:
            continue
        for given in node.attribute:
            if given.name == "equation" and given.ref_attr_name:
                yield from _by_calls(subject, scope, node, given.ref_attr_name)


def _by_calls(subject: Subject, scope: Scope, node: NodeProto, name: str) -> Iterator[tuple[str, str]]:
    """The equations that a node in a function gets from its calls, and by default, where they are none."""
    function = scope.function
    waiting, seen = [(function, name)], set()
    while waiting:
        function, name = waiting.pop()
        if function is None or (id(function), name) in seen:
            continue
        seen.add((id(function), name))
        given = [(scope.place(node), default) for default in function.attribute_proto]
        for outer, call in subject.nodes():
            if (normal_domain(call.domain), call.op_type) == (normal_domain(function.domain), function.name):
                given += [(outer.place(call), attribute) for attribute in call.attribute]
                waiting += [(outer.function, a.ref_attr_name) for a in call.attribute if a.name == name]
        for place, attribute in given:
            if attribute.name == name and not attribute.ref_attr_name:
                for equation in bad_equations(_einsum(attribute)):
                    yield place, equation


def _einsum(value: AttributeProto) -> NodeProto:
    return NodeProto(op_type="Einsum", attribute=[AttributeProto(name="equation", s=value.s)])
