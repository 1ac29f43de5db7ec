"""The model's functions: what they are called, what they call, and what of the model they rely on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import AttributeProto, FunctionProto, NodeProto

from moe_onnx.adapters.function_body import OLDEST_OPSET, function_body
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.legalize import BODY_DOMAIN
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.known_ops import malformed, shape_of_node
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.signatures import Known, runtime_schemas
from moe_onnx.validation.subject import Subject, normal_domain, operator_name, subgraphs

FOREIGN_BODY = code(
    "MO341",
    "warning",
    "A function has the name of an ascend.moe operator but is not its body",
    why="What such a node computes depends on where it runs: onnxruntime takes the registered kernel "
    "where there is one, and the model's function elsewhere, both without a word (measured: 3.0 and 1.0 "
    "for one model). `moe_onnx.InferenceSession` puts this package's body in its place. An older "
    "release's body is found as well.",
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
OPSET_BREAKS = code(
    "MO344",
    "error",
    "A function is written for another opset than the model imports",
    why="onnxruntime reads the nodes of a function by the opset of the model, whatever the function "
    "imports, and refuses those that do not fit it (`Unrecognized attribute: axes for operator "
    "ReduceMax`).",
    mend="Convert the function's nodes to the model's opset, and import that one in both.",
)
OPSET_DIFFERS = code(
    "MO345",
    "warning",
    "A function imports another opset than the model, in which its operators differ",
    why="onnxruntime reads the nodes of a function by the opset of the model. Operators whose definition "
    "has changed in between may then mean something else. onnx.checker refuses the model.",
    mend="Convert the function's nodes to the model's opset, and import that one in both.",
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
DOUBLE = code(
    "MO348",
    "error",
    "Two functions have one name",
    why="Which of them a node calls is not said. onnxruntime and onnx.checker refuse the model.",
    mend="Remove one, or tell them apart by their overload.",
)


@check("static", FOREIGN_BODY, SHADOWED, DOUBLE)
def names(subject: Subject) -> Iterator[Outcome]:
    """Functions have names of their own, or are this package's bodies of its operators."""
    known, seen = Known.of(subject), set()
    for function in subject.model.functions:
        domain, where = normal_domain(function.domain), _said(function)
        key = domain, function.name, function.overload
        if key in seen:
            yield DOUBLE(where, found="the model has another function of this domain, name and overload")
        seen.add(key)
        if function.name in BY_NAME and domain in (DOMAIN, BODY_DOMAIN):
            if not is_own_body(function):
                yield FOREIGN_BODY(where, found="its nodes are not those of this package's body")
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


@check("static", OPSET_BREAKS, OPSET_DIFFERS)
def opsets(subject: Subject) -> Iterator[Outcome]:
    """The nodes of functions mean the same in the opset that the model imports."""
    yield from collapsed(_opset_differences(subject))


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


def is_own_body(function: FunctionProto) -> bool:
    """Whether a function is this package's body of an operator, names of nodes and remarks aside."""
    opset = next((e.version for e in function.opset_import if not normal_domain(e.domain)), 0)
    if function.name not in BY_NAME or not OLDEST_OPSET <= opset < 2**30:
        return False
    body = function_body(function.name, opset)
    return _skeleton(function) == _skeleton(body)


def _skeleton(function: FunctionProto) -> FunctionProto:
    bare = FunctionProto()
    for field in ("input", "output", "attribute", "attribute_proto", "node"):
        getattr(bare, field).extend(getattr(function, field))
    _strip(bare.node)
    return bare


def _strip(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        for field in ("name", "doc_string", "metadata_props"):
            node.ClearField(field)
        for attribute in node.attribute:
            attribute.ClearField("doc_string")
            if attribute.type == AttributeProto.GRAPH:
                for field in ("name", "doc_string", "value_info", "metadata_props"):
                    attribute.g.ClearField(field)
                _strip(attribute.g.node)


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


def _opset_differences(subject: Subject) -> Iterator[Finding]:
    known, main = Known.of(subject), subject.main.opsets
    for scope, node in subject.nodes():
        domain = normal_domain(node.domain)
        own, outer = scope.opsets.get(domain), main.get(domain)
        if (
            scope.function is None
            or own is None
            or outer is None
            or own == outer
            or id(node) in malformed(subject)
        ):
            continue
        there, here = known.signature(domain, node.op_type, own), known.signature(domain, node.op_type, outer)
        if there is None or there == here:
            continue
        said = f"{operator_name(node)} of opset {own}"
        if here is None or here.deprecated or any(shape_of_node(scope, node, here)):
            yield OPSET_BREAKS(scope.place(node), found=said, expected=f"one of opset {outer}, the model's")
        else:
            yield OPSET_DIFFERS(
                scope.place(node), found=said, expected=f"opset {outer}, the model's, where it is another"
            )


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
