"""The model's functions: what they are called, what they call, and what of the model they rely on."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import FunctionProto

from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.legalize import BODY_DOMAIN
from moe_onnx.spec import DOMAIN, PACKAGE_VERSION
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.operators.known_ops import malformed
from moe_onnx.validation.operators.own_bodies import own_bodies
from moe_onnx.validation.operators.signatures import Known, runtime_schemas
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject, normal_domain, operator_name, subgraphs

FOREIGN_BODY = code(
    "MO341",
    "warning",
    "A function has the name of an ascend.moe operator but is not its body",
    why="What such a node computes depends on where it runs: onnxruntime takes the registered kernel "
    "where there is one, and the model's function elsewhere, both without a word (measured: 3.0 and 1.0 "
    "for one model). `moe_onnx.InferenceSession` puts this package's body in its place. A body that "
    "another build of moe_onnx has written is found as well, and said to be that: it computes what that "
    "build computed.",
    mend="Remove the function, and save what moe_onnx.add_function_bodies returns; or give it another name.",
)
SHADOWED = code(
    "MO342",
    "warning",
    "A function has the name of an operator that runtimes have themselves",
    why="onnxruntime and onnx's reference evaluator run their own operator and leave the function alone "
    "(measured: a function `Relu` that negates, called with 1, gives 1). A runtime without the operator "
    "runs the function: where the two differ, so do the results.",
    mend="Give the function a domain of its own, or remove it.",
)
RECURSION = code(
    "MO343",
    "error",
    "A function calls itself",
    why="Runtimes put the bodies of functions in the place of the calls, which would never end: "
    "onnxruntime and onnx.checker refuse the model.",
    mend="Use a Loop, or write the steps out.",
)
CUSTOM_INSIDE = code(
    "MO346",
    "warning",
    "A function holds a custom operator that is no function itself",
    why="onnxruntime knows the types of a custom operator's outputs only in the graph, not inside a "
    "function: where another node reads the call's output, the session is not made (`type inference "
    "failed`). `moe_onnx.InferenceSession` inlines such functions; other runtimes do not.",
    mend="Inline the function (onnx.inliner), or add the operator's body with moe_onnx.add_function_bodies.",
)
UNDECLARED = code(
    "MO347",
    "error",
    "An attribute refers to one that the function does not have",
    why="A body passes the attributes of its call on by name. A name that the function does not declare, "
    "or any in a graph, is never filled: onnxruntime and onnx.checker accept it, and the default is in "
    "force.",
    mend="Declare the attribute in the function, or write the value.",
)
UNNAMED = code(
    "MO349",
    "error",
    "A function, or an input or output of one, has no name",
    why="Nothing can call such a function, or reach such a value. onnxruntime refuses the model "
    "(`failed validating the check: !(it.GetName().empty())`).",
    mend="Name it, or leave it out.",
)


@check("static", FOREIGN_BODY, SHADOWED, UNNAMED)
def names(subject: Subject) -> Iterator[Outcome]:
    """Functions have names of their own, or are this package's bodies of its operators."""
    known = Known.of(subject)
    for function in subject.model.functions:
        domain, where = normal_domain(function.domain), _said(function)
        if not all((function.name, *function.input, *function.output)):
            yield UNNAMED(where, found=f"inputs {list(function.input)}, outputs {list(function.output)}")
        if function.name in BY_NAME and domain in (DOMAIN, BODY_DOMAIN):
            if id(function) not in own_bodies(subject):
                yield _another_body(subject, function, where)
            continue
        signature = known.signature(domain, function.name, None)
        if signature is not None and (domain, function.name) in runtime_schemas():
            yield SHADOWED(where, found=f"{signature.source} has an operator {function.name} there")


@check("static", RECURSION)
def recursion(subject: Subject) -> Iterator[Outcome]:
    """No function calls itself, directly or through others."""
    calls = {key: list(dict.fromkeys(_calls(subject, f))) for key, f in subject.functions.items()}
    done: set[tuple[str, str]] = set()
    for start in calls:
        path: list[tuple[str, str]] = []
        stack = [iter([start])]
        while stack:
            key = next(stack[-1], None)
            if key is None:
                stack.pop()
                if path:
                    done.add(path.pop())
            elif key in path:
                circle = [*path[path.index(key) :], key]
                shown = " -> ".join(name for _, name in (circle if len(circle) < 9 else circle[:8]))
                yield RECURSION(_said(subject.functions[key]), found=f"calls itself: {shown}")
            elif key not in done:
                path.append(key)
                stack.append(iter(calls[key]))


@check("static", CUSTOM_INSIDE)
def custom_operators(subject: Subject) -> Iterator[Outcome]:
    """Functions hold no custom operators, whose types are not known there."""
    yield from collapsed(_custom_inside(subject))


@check("static", UNDECLARED)
def attributes(subject: Subject) -> Iterator[Outcome]:
    """Attributes that a body passes on are attributes of its function."""
    for scope, node in subject.nodes():
        function = scope.function
        declared = set() if function is None else {*function.attribute}
        declared |= set() if function is None else {a.name for a in function.attribute_proto}
        for attribute in node.attribute:
            if attribute.ref_attr_name and attribute.ref_attr_name not in declared:
                legal = ", ".join(sorted(declared)) or "none"
                yield UNDECLARED(
                    scope.place(node),
                    found=f"'{attribute.name}' refers to '{attribute.ref_attr_name}'",
                    expected="a value, as a graph has no attributes"
                    if function is None
                    else f"an attribute of the function: {legal}",
                )


def _another_body(subject: Subject, function: FunctionProto, where: str) -> Finding:
    if not _is_of_moe_onnx(subject, function):
        return FOREIGN_BODY(where, found="its nodes are not those of this package's body")
    return FOREIGN_BODY(
        where,
        found="a body of another build of moe_onnx, or one that was changed since",
        expected=f"the body that moe_onnx {PACKAGE_VERSION} has here",
        mend="Save what moe_onnx.add_function_bodies returns: it replaces the body.",
    )


def _is_of_moe_onnx(subject: Subject, function: FunctionProto) -> bool:
    """Whether the model, the function's remark or the names of its nodes say that moe_onnx has made it."""
    if subject.model.producer_name == "moe_onnx":
        return True
    if function.doc_string.split("\n")[0] == BY_NAME[function.name].summary:
        return True
    named = [node.name.startswith((f"{function.name}/", f"{function.name}: ")) for node in function.node]
    return bool(named) and all(named)


def _said(function: FunctionProto) -> str:
    domain = normal_domain(function.domain)
    return f"function '{domain}.{function.name}'" if domain else f"function '{function.name}'"


def _calls(subject: Subject, function: FunctionProto) -> Iterator[tuple[str, str]]:
    stack = list(function.node)
    while stack:
        node = stack.pop()
        key = normal_domain(node.domain), node.op_type
        if key in subject.functions:
            yield key
        for _, graph in subgraphs(node):
            stack.extend(graph.node)


def _custom_inside(subject: Subject) -> Iterator[Finding]:
    for scope, node in subject.nodes():
        if scope.function is None or id(node) in malformed(subject):
            continue
        key = normal_domain(node.domain), node.op_type
        if key not in subject.functions and key not in runtime_schemas() and not _is_onnx(key[0]):
            yield CUSTOM_INSIDE(
                scope.place(node), found=f"{operator_name(node)} has no function in the model"
            )


def _is_onnx(domain: str) -> bool:
    return domain in ("", "ai.onnx.ml") or domain.startswith("ai.onnx.preview")
