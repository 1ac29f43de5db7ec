"""What every rewrite asks of a model: its graphs and nodes, names, types, what a node of ours may be."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import onnx
import onnx.shape_inference
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from moe_onnx.adapters.function_body import OLDEST_OPSET
from moe_onnx.adapters.python_ops import SESSION_DOMAIN
from moe_onnx.adapters.schema import ELEM_TYPES, tensor_info
from moe_onnx.errors import AttributeValueError, ModelError, MoeOnnxError
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN, FLOATS, VERSION, OpSpec, TensorInfo, is_absent


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and its subgraphs, innermost first."""
    for inner in subgraphs(graph):
        yield from graphs(inner)
    yield graph


def subgraphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graphs in the attributes of a graph's nodes."""
    for node in graph.node:
        for attr in node.attribute:
            yield from [attr.g] if attr.type == AttributeProto.GRAPH else attr.graphs


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Every node, those of subgraphs and of functions too, but not of bodies in our domain."""
    for graph in graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        if function.domain != DOMAIN:
            yield from function_nodes(function)


def function_nodes(function: FunctionProto) -> Iterator[NodeProto]:
    """Every node of a function, those of subgraphs too."""
    for graph in graphs(GraphProto(node=function.node)):
        yield from graph.node


def check_domains(model: ModelProto) -> None:
    """Refuse operators of ours that are misspelt or in a wrong domain, and foreign versions."""
    for entry in model.opset_import:
        if entry.domain == DOMAIN and entry.version != VERSION:
            raise ModelError(
                f"The model imports {DOMAIN} version {entry.version}; this package has version "
                f"{VERSION}. Export the model again with it."
            )
    own = {f.name for f in model.functions if f.domain == DOMAIN}
    foreign = {(f.domain, f.name) for f in model.functions if f.domain != DOMAIN}
    for node in all_nodes(model):
        if (node.domain, node.op_type) in foreign:
            continue
        if node.domain == DOMAIN and node.op_type not in (*BY_NAME, *own):
            close = difflib.get_close_matches(node.op_type, BY_NAME, 1)
            hint = f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(BY_NAME)}."
            raise ModelError(
                f"Node '{node.name}': there is no operator '{node.op_type}' in domain {DOMAIN}. {hint}"
            )
        if node.domain != DOMAIN and node.op_type in BY_NAME:
            raise ModelError(
                f"Node '{node.name}': operator '{node.op_type}' is in domain '{node.domain}', where no "
                f"such operator is registered. Set the node's domain to '{DOMAIN}' and import it.",
                op=node.op_type,
            )


def undo_session_domain(model: ModelProto) -> None:
    """Nodes that an onnxruntime session saved as ``moe_onnx.session`` are ours again."""
    for node in all_nodes(model):
        if node.domain == SESSION_DOMAIN:
            shape = next((a.s.decode() for a in node.attribute if a.name == "restore_shape"), "")
            kept = [a for a in node.attribute if a.name not in ("node", "session", "restore_shape")]
            del node.attribute[:]
            node.attribute.extend(kept)
            if shape:
                sizes = [int(size) for size in shape.split(",")]
                node.attribute.append(helper.make_attribute("restore_shape", sizes))
            node.domain = DOMAIN


def import_domains(model: ModelProto) -> None:
    """Models run in onnxruntime without their opset imports, but onnx's tools then know no types."""
    imported = {entry.domain for entry in model.opset_import}
    if not imported & {"", "ai.onnx"}:
        model.opset_import.append(helper.make_opsetid("", OLDEST_OPSET))
    if DOMAIN not in imported:
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def opset_of(model: ModelProto) -> int:
    """The version of ONNX's own operators that a model imports; the oldest of the bodies without one."""
    return next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), OLDEST_OPSET)


def value_types(model: ModelProto) -> Iterator[dict[str, TensorInfo]]:
    """What onnx can tell of the values that each graph sees, in the order of ``graphs``."""
    # Inference is a help here; nodes whose types it cannot tell run by their function bodies.
    with suppress(Exception):
        model = onnx.shape_inference.infer_shapes(model)
    return _scopes(model.graph, {})


def _scopes(graph: GraphProto, outer: dict[str, TensorInfo]) -> Iterator[dict[str, TensorInfo]]:
    # Branches beside each other may use one name for values of different types.
    types = dict(outer)
    for tensor in graph.initializer:
        types[tensor.name] = tensor_info(helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.HasField("tensor_type"):
            types[value.name] = tensor_info(value.type)
    for inner in subgraphs(graph):
        yield from _scopes(inner, types)
    yield types


def names_of(model: ModelProto) -> set[str]:
    """All names of values, whatever graph they are in."""
    names = {v.name for g in graphs(model.graph) for v in (*g.input, *g.initializer)}
    names.update(name for n in all_nodes(model) for name in (*n.input, *n.output))
    return names


def fresh(base: str, names: set[str]) -> str:
    """A name that is not in ``names`` yet: it is then."""
    name, number = base, 0
    while name in names:
        number += 1
        name = f"{base}_{number}"
    names.add(name)
    return name


def check_arity(spec: OpSpec, node: NodeProto) -> None:
    """Refuse a node with more inputs or outputs than its operator has."""
    for what, given, args in (
        ("inputs", node.input, spec.inputs),
        ("outputs", node.output, spec.outputs),
    ):
        if len(given) > len(args):
            raise ModelError(
                f"{spec.name}: node '{node.name}' has {len(given)} {what}, the operator has at most "
                f"{len(args)}: {', '.join(a.name for a in args)}.",
                op=spec.name,
            )


def check_node(spec: OpSpec, node: NodeProto, types: dict[str, TensorInfo]) -> list[TensorInfo | None]:
    """Check all that is known of a node before any kernel sees it, and write out its attributes.

    Returns:
        What is known of each input of the operator, None where the node names none.
    """
    infos = [types.get(name, TensorInfo("", None)) if name else None for name in node.input]
    try:
        legal, _ = spec.check(infos, attributes_of(spec, node))
    except MoeOnnxError as error:
        message = f"{error} (node '{node.name}')"
        named = type(error)(message, op=spec.name, aclnn_status=error.aclnn_status)
        named.node = node.name or None
        raise named from error
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(k, v) for k, v in legal.items() if v not in (None, ()))
    return infos + [None] * (len(spec.inputs) - len(infos))


def dtypes_of(spec: OpSpec, infos: list[TensorInfo | None]) -> list[str]:
    """The dtypes of a node's inputs, ``""`` where unknown and ``"absent"`` where there is none."""
    pairs = zip(spec.inputs, infos, strict=True)
    return ["absent" if i is None or is_absent(arg, i) else i.dtype for arg, i in pairs]


def attributes_of(spec: OpSpec, node: NodeProto) -> dict[str, Any]:
    """A node's attributes by name; those of another kind than the operator's are refused."""
    kinds = {a.name: AttributeProto.INTS if a.kind == "ints" else AttributeProto.INT for a in spec.attributes}
    for attr in node.attribute:
        kind = kinds.get(attr.name, attr.type)  # unknown names are found by the spec
        if attr.type != kind:
            raise AttributeValueError(
                f"{spec.name}: attribute '{attr.name}' must be {AttributeProto.AttributeType.Name(kind)}, "
                f"got {AttributeProto.AttributeType.Name(attr.type)} {helper.get_attribute_value(attr)!r}.",
                op=spec.name,
            )
    return {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}


def fill_inputs(spec: OpSpec, node: NodeProto, dtype: str, names: set[str]) -> list[NodeProto]:
    """Absent optional inputs become empty constants of shape [0, 0] in the right dtype."""
    inputs = [*node.input, *[""] * (len(spec.inputs) - len(node.input))]
    added: list[NodeProto] = []
    for i, arg in enumerate(spec.inputs):
        if inputs[i]:
            continue
        is_float = arg.dtypes == FLOATS
        known = dtype if is_float else arg.dtypes[0]
        elem = ELEM_TYPES.get(known, TensorProto.FLOAT)
        empty = helper.make_tensor(arg.name, elem, [0, 0], [])
        inputs[i] = fresh(f"{node.output[0]}/{arg.name}", names)
        added.append(helper.make_node("Constant", [], [inputs[i]], name=inputs[i], value=empty))
        if is_float and dtype not in ELEM_TYPES:
            typed = fresh(f"{inputs[i]}/typed", names)
            added.append(helper.make_node("CastLike", [inputs[i], inputs[0]], [typed], name=typed))
            inputs[i] = typed
    outputs = [*node.output, *[""] * (len(spec.outputs) - len(node.output))]
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(
        name or fresh(f"{outputs[0]}/{arg.name}", names)
        for name, arg in zip(outputs, spec.outputs, strict=True)
    )
    return added


def copied(model: ModelProto) -> ModelProto:
    """A copy, which a rewrite may change."""
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy
