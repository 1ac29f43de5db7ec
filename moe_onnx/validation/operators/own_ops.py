"""Nodes of this package's operators, held to what the operators say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from onnx import NodeProto, helper

from moe_onnx.adapters.python_ops import SERVED, SESSION_DOMAIN
from moe_onnx.errors import (
    ACLNN_ERR_INNER_TILING_ERROR,
    ACLNN_ERR_PARAM_NULLPTR,
    AttributeValueError,
    DtypeError,
    LimitError,
    MissingInputError,
    MoeOnnxError,
)
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN, VERSION, Arg, OpSpec, TensorInfo
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.operators.known_ops import malformed, own_operator
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
from moe_onnx.validation.operators.signatures import Known
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject, normal_domain

VALUE = code(
    "MO312",
    "error",
    "An attribute of an ascend.moe operator is out of its range",
    why="The operators of the source documents return status 561002 for it. The kernels of this package "
    "refuse the node when it runs; a plain ONNX runtime that runs the function body stops in the middle "
    "of a step, in a node named after the rule.",
    mend="Give a value in the range; the operator's card in ops/ has them.",
)
COMPANION = code(
    "MO313",
    "error",
    "An ascend.moe operator lacks an input that goes with another",
    why="Optional inputs come together: a gradient of `probs` needs the routing map and the permuted "
    "tokens. The source documents' operators return 561002 (161001 for inputs that are never optional).",
    mend="Connect the input, or leave out the one that needs it.",
)
DTYPE = code(
    "MO314",
    "error",
    "An ascend.moe operator gets a dtype that it does not take",
    why="Indices are int32, also where ONNX's own operators before them make int64 (`TopK`, `NonZero`); "
    "companions have the dtype of what they go with. The source documents' operators return 161002, or "
    "561002 where each dtype is supported but not the mix.",
    mend="Put a Cast before the node.",
)
SHAPE = code(
    "MO315",
    "error",
    "An ascend.moe operator gets shapes that do not go together",
    why="One axis letter of the operator's signature is one size. The device kernels trust the sizes "
    "that they are given and read past the end of the smaller tensor; the kernels of this package refuse "
    "them when the node runs. The source documents' operators return 561002 for most of these.",
    mend="Follow the tensors back to where the sizes part.",
)
PYTHON_FORM = code(
    "MO316",
    "note",
    "A node is not in the form that the Python kernels need in a plain session",
    why="onnxruntime's Python operators know no defaults and no optional inputs: a plain session with "
    "onnxruntime-extensions registered refuses the model. `moe_onnx.InferenceSession` fills both in; the "
    "native kernels and the function bodies do without.",
    mend="Write all attributes out at their defaults, and pass an empty [0, 0] tensor for an absent input.",
)
NO_BODY = code(
    "MO317",
    "note",
    "The model has no function body of an ascend.moe operator",
    why="With the bodies in the model, any ONNX runtime in any language runs it with nothing registered. "
    "Without them it runs where kernels are registered, and in `moe_onnx.InferenceSession`, which adds "
    "them.",
    mend="Save what moe_onnx.add_function_bodies returns for the model.",
)

_SESSION = ("node", "session", "restore_shape")  # attributes that a session gives its Python ops


@check(
    "static",
    INPUTS,
    OUTPUTS,
    ATTRIBUTE_UNKNOWN,
    ATTRIBUTE_MISSING,
    ATTRIBUTE_KIND,
    ATTRIBUTE_TWICE,
    VALUE,
    COMPANION,
    DTYPE,
    SHAPE,
)
def nodes(subject: Subject) -> Iterator[Outcome]:
    """Each ascend.moe node has the inputs, attributes, dtypes and shapes that its operator demands."""
    found = []
    for scope, node in subject.nodes():
        if own_operator(node) and not in_own_body(subject, scope):
            found += check_node(scope, node, subject.types(scope), subject)
    yield from collapsed(found)


@check("static", PYTHON_FORM, NO_BODY)
def form(subject: Subject) -> Iterator[Outcome]:
    """The model carries the bodies of the ascend.moe operators it uses, in the form every route takes."""
    yield from collapsed(_forms(subject))
    used = {n.op_type for _, n in subject.nodes() if normal_domain(n.domain) == DOMAIN and own_operator(n)}
    lacking = sorted(op for op in used if (DOMAIN, op) not in subject.functions)
    if lacking:
        yield NO_BODY("the model", found=f"no function {', '.join(f'{DOMAIN}.{op}' for op in lacking)}")


def check_node(
    scope: Scope, node: NodeProto, types: Mapping[str, TensorInfo], subject: Subject
) -> list[Finding]:
    """All that is wrong with a node of ours, as far as the types of its inputs are known."""
    spec, where = BY_NAME[own_operator(node)], scope.place(node)
    if normal_domain(node.domain) == SESSION_DOMAIN:
        saved, node = node, NodeProto()
        node.CopyFrom(saved)
        del node.attribute[:]
        node.attribute.extend(a for a in saved.attribute if a.name not in _SESSION)
        # Sessions leave restore_shape out; every other attribute is there.
    signature = Known.of(subject).signature(DOMAIN, spec.name, VERSION)
    found = [] if signature is None else [_with_status(f) for f in shape_of_node(scope, node, signature)]
    if not found:
        found = list(_check_meaning(spec, node, where, types))
    if found:
        malformed(subject).add(id(node))
    return found


def _with_status(finding: Finding) -> Finding:
    """What the source documents' operators return for a node that does not look like one."""
    missing = finding.code == INPUTS.name and "left out" in finding.found
    if finding.code in (OUTPUTS.name, INPUTS.name) and not missing:
        return finding
    return replace(finding, aclnn_status=ACLNN_ERR_PARAM_NULLPTR if missing else ACLNN_ERR_INNER_TILING_ERROR)


def _check_meaning(
    spec: OpSpec, node: NodeProto, where: str, types: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    passed_on = {a.name for a in node.attribute if a.ref_attr_name}  # known where the function is called
    settled = replace(spec, attributes=tuple(a for a in spec.attributes if a.name not in passed_on))
    try:
        if passed_on:
            settled.check_attributes(given)
        else:  # in the contract's order
            infos = [types.get(name, TensorInfo("", None)) if name else None for name in node.input]
            spec.check(infos, given)
    except LimitError:
        return  # a limit of the documents, which has codes of its own
    except MoeOnnxError as error:
        kinds = {AttributeValueError: VALUE, MissingInputError: COMPANION, DtypeError: DTYPE}
        kind = kinds.get(type(error), SHAPE)
        said, _, advice = str(error).removeprefix(f"{spec.name}: ").partition(". ")
        mend = {COMPANION: advice, SHAPE: f"{advice} {SHAPE.mend}".strip()}.get(kind, "")
        yield kind(where, found=said.rstrip("."), mend=mend, aclnn=error.aclnn_status)


def _forms(subject: Subject) -> Iterator[Finding]:
    for scope, node in subject.nodes():
        op = own_operator(node)
        if op not in SERVED or normal_domain(node.domain) != DOMAIN or id(node) in malformed(subject):
            continue
        spec = BY_NAME[op]
        named = {attribute.name for attribute in node.attribute}
        lacking = [a.name for a in spec.attributes if a.kind != "ints" and a.name not in named]
        inputs = [a.name for a, name in _pairs(spec.inputs, node.input) if not name]
        outputs = [a.name for a, name in _pairs(spec.outputs, node.output) if not name]
        said = [
            f"{what} {', '.join(map(repr, names))} left out"
            for what, names in (("attributes", lacking), ("inputs", inputs), ("outputs", outputs))
            if names
        ]
        if said:
            yield PYTHON_FORM(scope.place(node), found="; ".join(said))


def _pairs(args: Sequence[Arg], given: Sequence[str]) -> Iterator[tuple[Arg, str]]:
    yield from zip(args, [*given, *[""] * (len(args) - len(given))], strict=False)
