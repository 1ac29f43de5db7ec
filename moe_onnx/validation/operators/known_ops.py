"""Every node is of an operator that something knows, and looks as that operator demands."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto

from moe_onnx.adapters.python_ops import SERVED, SESSION_DOMAIN
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.legalize import BODY_DOMAIN
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.operators.node_form import (
    ATTRIBUTE_KIND,
    ATTRIBUTE_MISSING,
    ATTRIBUTE_TWICE,
    ATTRIBUTE_UNKNOWN,
    INPUTS,
    OUTPUTS,
    shape_of_node,
)
from moe_onnx.validation.operators.own_bodies import in_own_body
from moe_onnx.validation.operators.signatures import (
    EXTENSIONS,
    Known,
    Signature,
    close_to,
    is_served,
    of_function,
)
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject, normal_domain, operator_name

UNKNOWN_OPERATOR = code(
    "MO301",
    "error",
    "A domain has no operator of this name",
    why="A misspelt operator is found by no runtime. onnxruntime refuses the model (`is not a registered "
    "function/op`, `No Op registered`), but `onnx.checker` accepts any name in a domain that it has no "
    "schemas of, `ascend.moe` and `com.microsoft` among them. Operators of onnxruntime's training build "
    "(`ReluGrad`, `AdamWOptimizer`, ...) are not in the onnxruntime that pip installs either.",
    mend="Correct the name, or add the operator to the model as a function.",
)
WRONG_DOMAIN = code(
    "MO302",
    "error",
    "An operator stands in a domain that does not have it",
    why="An operator is found by domain and name together; the domain of a node is empty unless somebody "
    "sets it, and then a custom operator is looked for among ONNX's own. onnxruntime refuses the model, "
    "`onnx.checker` only where the domain is ONNX's.",
    mend="Set the node's domain, and import it.",
)
UNKNOWN_DOMAIN = code(
    "MO303",
    "error",
    "Nothing provides an operator",
    why="Neither onnx nor onnxruntime nor onnxruntime-extensions nor this package has operators in the "
    "node's domain, and the model has no function of that name. `onnx.checker` accepts the model; "
    "onnxruntime refuses it unless the library that has the operator is registered on the session options.",
    mend="Add the operator to the model as a function, or, if a library of custom operators has it, "
    "register a schema (onnx.defs.register_schema) before the validation, and the library before each "
    "session.",
)
NOT_IN_OPSET = code(
    "MO304",
    "error",
    "The imported opset does not have an operator",
    why="Operators come and go with opset versions. A node that needs a newer version than the model "
    "imports, or one that the imported version has withdrawn (`Upsample` since 10, `Scatter` since 11), "
    "is refused by onnxruntime and onnx.checker.",
    mend="Import the version that has the operator, after onnx.version_converter has converted the other "
    "nodes.",
)
ATTRIBUTE_IGNORED = code(
    "MO311",
    "warning",
    "A call gives an attribute that the function does not have",
    why="onnxruntime accepts it and does not use it: a misspelt name leaves the default in force.",
    mend="Correct the name, or leave the attribute out.",
)


@check(
    "static",
    UNKNOWN_OPERATOR,
    WRONG_DOMAIN,
    UNKNOWN_DOMAIN,
    NOT_IN_OPSET,
    INPUTS,
    OUTPUTS,
    ATTRIBUTE_UNKNOWN,
    ATTRIBUTE_MISSING,
    ATTRIBUTE_KIND,
    ATTRIBUTE_TWICE,
    ATTRIBUTE_IGNORED,
)
def operators(subject: Subject) -> Iterator[Outcome]:
    """Each node is of an operator that is known, with the inputs, outputs and attributes that it has."""
    yield from collapsed(_all_nodes(subject))


def own_operator(node: NodeProto) -> str:
    """The operator of this package that a node is of, in any of the domains they go by; or ``""``."""
    domain = normal_domain(node.domain)
    own = domain == DOMAIN or (domain in (BODY_DOMAIN, SESSION_DOMAIN) and node.op_type in SERVED)
    return node.op_type if own and node.op_type in BY_NAME else ""


def malformed(subject: Subject) -> set[int]:
    """``id`` of the nodes that no operator takes as they are; inference leaves them out."""
    return subject.once(_malformed)


def _malformed(subject: Subject) -> set[int]:
    return set()  # the checks of this family fill it


def _all_nodes(subject: Subject) -> Iterator[Finding]:
    known, wrong = Known.of(subject), malformed(subject)
    overloads = {(normal_domain(f.domain), f.name, f.overload) for f in subject.model.functions}
    for scope, node in subject.nodes():
        if own_operator(node) or in_own_body(subject, scope):
            continue  # the first are looked at in own_ops
        domain = normal_domain(node.domain)
        signature = known.signature(domain, node.op_type, scope.opsets.get(domain))
        function = subject.functions.get((domain, node.op_type))
        # Where both are, onnxruntime takes the operator: see functions.SHADOWED.
        if signature is not None and not signature.deprecated:
            found = list(shape_of_node(scope, node, signature))
        elif function is not None and (domain, node.op_type, node.overload) in overloads:
            found = list(_call(scope, node, of_function(function)))
        elif is_served(domain, node.op_type):
            continue
        else:
            found = [_unknown(scope, node, subject, known)]
        if any(finding.severity == "error" for finding in found):
            wrong.add(id(node))
        yield from found


def _unknown(scope: Scope, node: NodeProto, subject: Subject, known: Known) -> Finding:
    domain, op, where = normal_domain(node.domain), node.op_type, scope.place(node)
    said = f"domain '{domain}'" if domain else "ONNX's own domain"
    if not op:
        return UNKNOWN_OPERATOR(where, found="the node names no operator", expected="an op_type")
    if op in known.names.get(domain, ()):
        return _version(where, scope, node, known)
    if node.overload and (domain, op) in subject.functions:
        return UNKNOWN_OPERATOR(where, found=f"no function '{op}' has the overload '{node.overload}'")
    homes = [home for home in known.homes(op) if home != domain]
    functions = [d for d, name in subject.functions if name == op]
    spelled = f"there is no '{op}' in {said}"
    if (op in BY_NAME or domain in known.names) and (homes or functions):
        home = (homes or functions)[0]
        return WRONG_DOMAIN(
            where,
            found=spelled,
            expected=f"'{op}' is in {_name(home)}",
            mend=f"Set the node's domain to '{home}', and import it."
            if home
            else "Clear the node's domain, and import ONNX's own.",
        )
    ours = close_to(op, BY_NAME)
    if domain in known.names:
        names = known.names[domain] | {name for d, name in subject.functions if d == domain}
        close = close_to(op, names)
        if not close and ours:
            return WRONG_DOMAIN(where, found=spelled, expected=f"'{ours}' of domain '{DOMAIN}'")
        training = domain == "com.microsoft" and op.endswith(("Grad", "Optimizer"))
        return UNKNOWN_OPERATOR(
            where,
            found=spelled,
            expected=f"'{close}'" if close else "",
            mend=f"Did you mean '{close}'?"
            if close
            else "Make the gradient of standard operators: moe_onnx.differentiate does."
            if training
            else "",
        )
    local = close_to(op, [name for d, name in subject.functions if d == domain])
    if local:
        mend = f"Did you mean '{local}'? The model has that function."
        return UNKNOWN_OPERATOR(where, found=spelled, expected=f"'{local}'", mend=mend)
    close_domain = close_to(domain, known.names)
    if ours and (close_domain == DOMAIN or ours == op):
        return WRONG_DOMAIN(where, found=spelled, expected=f"'{ours}' of domain '{DOMAIN}'")
    if close_domain and op in known.names[close_domain]:
        return WRONG_DOMAIN(where, found=spelled, expected=f"'{op}' of domain '{close_domain}'")
    if domain in EXTENSIONS:
        return UNKNOWN_OPERATOR(where, found=f"{spelled} of the installed onnxruntime-extensions")
    return UNKNOWN_DOMAIN(
        where,
        found=f"nothing that is known has operator '{operator_name(node)}'",
        expected=f"'{op}' of {_name(homes[0])}, if that is meant" if homes else "",
    )


def _name(domain: str) -> str:
    return f"domain '{domain}'" if domain else "ONNX's own domain"


def _version(where: str, scope: Scope, node: NodeProto, known: Known) -> Finding:
    domain = normal_domain(node.domain)
    version = scope.opsets.get(domain)
    newer = known.first.get((domain, node.op_type), 1)
    if version is not None and version < newer:
        return NOT_IN_OPSET(
            where, found=f"{_name(domain)} is imported in version {version}", expected=f"at least {newer}"
        )
    signature = known.signature(domain, node.op_type, version)
    since = "" if signature is None else f" {signature.since}"
    return NOT_IN_OPSET(
        where,
        found=f"version {version} of {_name(domain)} has no '{node.op_type}' any more",
        expected=f"an operator that took its place, or an import older than{since}",
    )


def _call(scope: Scope, node: NodeProto, signature: Signature) -> Iterator[Finding]:
    for finding in shape_of_node(scope, node, signature):
        if finding.code == ATTRIBUTE_UNKNOWN.name:
            yield ATTRIBUTE_IGNORED(finding.where, found=finding.found, expected=finding.expected)
        else:
            yield finding
