"""How a node must look: inputs, outputs and attributes, held to the signature of its operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import AttributeProto, NodeProto

from moe_onnx.validation.findings import Finding
from moe_onnx.validation.operators.signatures import Signature, Slots, close_to
from moe_onnx.validation.registry import code
from moe_onnx.validation.subject import Scope, normal_domain, subgraphs

INPUTS = code(
    "MO305",
    "error",
    "A node has too many inputs, or lacks one",
    why='Required inputs are neither left out nor named `""`. onnxruntime refuses such a node, except '
    "that a Python custom operator is found missing only when the session is made.",
    mend="Connect the inputs that the operator has.",
)
OUTPUTS = code(
    "MO306",
    "error",
    "A node has too many outputs, or none",
    why="Outputs that an operator does not have are never written. onnxruntime refuses such nodes; one "
    "more output of a Python custom operator is dropped silently.",
    mend="Name the outputs that the operator has.",
)
ATTRIBUTE_UNKNOWN = code(
    "MO307",
    "error",
    "An operator has no attribute of this name",
    why="onnxruntime refuses unknown attributes of operators that have schemas. A custom operator "
    "ignores them: a misspelt `drop_pad_mode` then leaves the default in force, without a word.",
    mend="Correct the name, or leave the attribute out.",
)
ATTRIBUTE_MISSING = code(
    "MO308",
    "error",
    "A required attribute is missing",
    why="There is no value that could be meant. onnxruntime refuses the model; a missing attribute of a "
    "custom operator in C++ has ended processes (onnxruntime #5909).",
    mend="Write the attribute out.",
)
ATTRIBUTE_KIND = code(
    "MO309",
    "error",
    "An attribute is of the wrong kind",
    why='An attribute says its kind and holds its value in the field of that kind. `top_k = 2.0`, `"2"` '
    "or a list is not `top_k = 2`, and an attribute without a kind, as hand-made protobufs have it, is "
    "none at all.",
    mend="Make the attribute with onnx.helper.make_attribute, of the kind that the operator wants.",
)
ATTRIBUTE_TWICE = code(
    "MO310",
    "error",
    "A node has an attribute twice",
    why="Which of the values counts is left to the reader. onnxruntime and onnx.checker refuse it.",
    mend="Keep one of them.",
)

_FIELDS = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}
_KINDS: dict[int, str] = {number: name for name, number in AttributeProto.AttributeType.items()}


def shape_of_node(scope: Scope, node: NodeProto, signature: Signature) -> Iterator[Finding]:
    """Hold inputs, outputs and attributes of a node to a signature."""
    where = scope.place(node)
    if said := _slots(node.input, signature.inputs, "inputs"):
        yield INPUTS(where, found=said[0], expected=said[1])
    if said := _slots(node.output, signature.outputs, "outputs") or _outputs_of_body(node):
        yield OUTPUTS(where, found=said[0], expected=said[1])
    yield from attributes_of_node(where, node, signature)


def _slots(given: Sequence[str], slots: Slots, what: str) -> tuple[str, str] | None:
    most = "" if slots.most is None else f" to {slots.most}"
    expected = f"{slots.least}{most or ' or more'} {what}: {', '.join(slots.names)}"
    if slots.most == slots.least:
        expected = f"{slots.least} {what}: {', '.join(slots.names)}"
    if len(given) < slots.least or (slots.most is not None and len(given) > slots.most):
        lost = slots.names[len(given) : slots.least]
        return f"{len(given)} {what}" + (f", '{lost[0]}' is left out" if lost else ""), expected
    for name, needed, formal in zip(given, slots.needed, slots.names, strict=False):
        if needed and not name:
            return f"'{formal}' is left out", expected
    return None


def _outputs_of_body(node: NodeProto) -> tuple[str, str] | None:
    """Loop and Scan have the outputs of their body; onnx's inference lets too few of them pass."""
    if node.op_type not in ("Loop", "Scan") or normal_domain(node.domain):
        return None
    body = next((graph for name, graph in subgraphs(node) if name == "body"), None)
    if body is None:
        return None
    wanted = len(body.output) - (node.op_type == "Loop")
    if wanted == len(node.output):
        return None
    return f"{len(node.output)} outputs", f"{wanted}, as many as the body gives"


def attributes_of_node(where: str, node: NodeProto, signature: Signature) -> Iterator[Finding]:
    """Hold the attributes of a node to a signature."""
    seen: set[str] = set()
    for attribute in node.attribute:
        name = attribute.name
        if name in seen:
            yield ATTRIBUTE_TWICE(where, found=f"attribute '{name}' stands there twice")
        seen.add(name)
        wanted = signature.attributes.get(name)
        if wanted is None:
            if name.startswith("__"):
                continue  # names that ONNX leaves to tools
            close = close_to(name, signature.attributes)
            legal = ", ".join(signature.attributes) or "no attributes"
            yield ATTRIBUTE_UNKNOWN(
                where,
                found=f"attribute '{name}'",
                expected=f"'{close}'" if close else legal,
            )
        elif said := _kind(attribute, wanted):
            yield ATTRIBUTE_KIND(where, found=f"attribute '{name}' {said[0]}", expected=said[1])
    for name in sorted(signature.required - seen):
        kind = _KINDS.get(signature.attributes[name], "?")
        yield ATTRIBUTE_MISSING(where, found=f"no attribute '{name}'", expected=f"'{name}', of kind {kind}")


def _kind(attribute: AttributeProto, wanted: int) -> tuple[str, str] | None:
    """What is wrong with the kind of an attribute, and what should be. A wanted kind of 0 is any."""
    expected = _KINDS.get(wanted, "a kind") if wanted else "a kind"
    if not attribute.type:
        return "says no kind", expected
    if wanted and attribute.type != wanted:
        return f"is of kind {_KINDS.get(attribute.type, attribute.type)}", expected
    if attribute.ref_attr_name:
        return None
    field = _FIELDS.get(attribute.type)
    if field is None:
        return f"is of kind {attribute.type}, which is none", expected
    full = {d.name for d, _ in attribute.ListFields()} & set(_FIELDS.values())
    # A scalar that is 0 or empty may be written as nothing at all.
    if full - {field}:
        return f"says kind {_KINDS[attribute.type]} but holds '{min(full - {field})}'", expected
    if not full and field in ("t", "g", "sparse_tensor", "tp"):
        return f"says kind {_KINDS[attribute.type]} but holds nothing", expected
    return None
