"""Operators without a rule, in the words of onnx itself: its function bodies, which rules differentiate.

Also the functions of a model: their nodes take the place of their calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from moe_onnx.autodiff.emitter import signature
from moe_onnx.autodiff.registry import find_rule
from moe_onnx.autodiff.subgraphs import flowing, is_float, needed_in, subgraphs
from moe_onnx.errors import ModelError
from moe_onnx.spec import DOMAIN

_BODIES = "moe_onnx.bodies"  # of the functions that calls are put through, none of which stays
_RANDOM = ("Bernoulli",)  # its body compares with numbers drawn at random
# What means another thing in a newer opset, though it looks the same; of all other operators opset 18 and
# newer only take more types and have more attributes.
_CHANGED = ("GroupNormalization", "DFT", "Attention", "Resize", "TopK", "Scan", "Loop", "If")
_ALIKE_SINCE = 18


def inline_functions(model: ir.Model) -> None:
    """Put the nodes of functions that have no rule of their own in the place of their calls.

    Raises:
        ModelError: If a function is written for another opset than the model, and an operator in it
            differs between the two.
    """
    imports = model.graph.opset_imports

    def chosen(function: ir.Function) -> bool:
        rule = find_rule(function.domain, function.name, imports.get(function.domain))
        return function.domain != DOMAIN and rule is None

    for function in model.functions.values():
        if not chosen(function):
            continue
        for domain, version in function.opset_imports.items():
            if domain == "ai.onnx":
                domain = ""
            here = imports.setdefault(domain, version)
            if here != version:
                differs = _differing(function, domain, version, here)
                if differs:
                    raise ModelError(
                        f"Function '{function.domain}::{function.name}' is written for opset "
                        f"{version} of {domain or 'ai.onnx'}, the model for {here}, and {differs} differs "
                        "between the two. Make them the same."
                    )
        for domain in list(function.opset_imports):
            function.opset_imports[domain] = imports[domain if domain != "ai.onnx" else ""]
    passes.InlinePass(chosen)(model)


def _differing(function: ir.Function, domain: str, old: int, new: int) -> str:
    """An operator of a function that is not the same in two opsets, or ""."""
    for node in function.all_nodes():
        if node.domain not in (domain, "ai.onnx" if domain == "" else domain):
            continue
        versions = []
        for version in (old, new):
            try:
                versions.append(onnx.defs.get_schema(node.op_type, version, domain).since_version)
            except onnx.defs.SchemaError:
                versions.append(-version)
        alike = domain == "" and min(old, new) >= _ALIKE_SINCE and node.op_type not in _CHANGED
        if versions[0] != versions[1] and not (alike and min(versions) > 0):
            return node.op_type
    return ""


def expand_bodies(model: ir.Model, loss: str, wrt: Collection[str]) -> bool:
    """Replace nodes between ``wrt`` and ``loss`` that have no rule but a body; whether there were any."""
    imports = model.graph.opset_imports
    version = imports.get("", 1)
    found = 0
    for node in _between(model.graph, loss, wrt):
        rule = find_rule("", node.op_type, version)
        if node.domain not in ("", "ai.onnx") or node.op_type in _RANDOM:
            continue
        if rule is not None and not _leaves_out(node):
            continue
        function = _body(node, version)
        if function is None:
            continue
        name = f"{node.op_type}_{found}"
        function.domain, function.name, found = _BODIES, name, found + 1
        _give_defaults(node, version)
        node.domain, node.op_type = _BODIES, name
        local = ir.serde.deserialize_function(function)
        local.opset_imports.clear()
        local.opset_imports.update({"": version})
        model.functions[local.identifier()] = local
    if not found:
        return False
    imports[_BODIES] = 1
    passes.InlinePass(lambda function: function.domain == _BODIES)(model)
    del imports[_BODIES]
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in reversed(list(graph)):
            if all(not out.name and not out.uses() for out in node.outputs):
                graph.remove(node, safe=True)  # for an output that the call left out
    return True


def _leaves_out(node: ir.Node) -> bool:
    """Whether a node is of a form that its own rule refuses and its body does not."""
    return node.op_type == "SoftmaxCrossEntropyLoss" and len(node.inputs) > 2 and node.inputs[2] is not None


def _between(graph: ir.Graph, loss: str, wrt: Collection[str]) -> list[ir.Node]:
    """Nodes on a differentiable path; of subgraphs on it, all."""
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    needed = needed_in(graph, (values[name] for name in wrt if name in values))
    used = {values[loss]} if loss in values else set()
    found: list[ir.Node] = []
    for node in reversed(list(graph)):
        if not any(out in used for out in node.outputs):
            continue
        used.update(flowing(node))
        if any(value in needed for value in flowing(node)) and any(is_float(out) for out in node.outputs):
            found.append(node)
            found.extend(_all(subgraphs(node)))
    return found


def _all(graphs: Iterable[ir.Graph]) -> Iterable[ir.Node]:
    for graph in graphs:
        yield from graph.all_nodes()


def _body(node: ir.Node, version: int) -> onnx.FunctionProto | None:
    """The function body of a node's operator, of an opset that is not newer than the model's."""
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return None
    found = None
    if any(value is not None and value.type is None for value in node.inputs):
        types = None
    else:
        types = [_type(value) for value in node.inputs]
    proto = ir.to_proto(node)
    if schema.has_function:
        wanted = [v for v in schema.function_opset_versions if v <= version]
        if wanted:
            found = schema.get_function_with_opset_version(max(wanted))
    elif schema.has_context_dependent_function and types is not None:
        wanted = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        if wanted:
            found = schema.get_context_dependent_function_with_opset_version(
                max(wanted), proto.SerializeToString(), types
            )
    if not found:
        return None
    function = onnx.FunctionProto()
    function.ParseFromString(found)
    _complete(function, node)
    return function if all(_valid(inner, version) for inner in function.node) else None


def _complete(function: onnx.FunctionProto, node: ir.Node) -> None:
    """Only the outputs that the node has; a body leaves out what the node does not name."""
    del function.output[len(node.outputs) :]
    made = {name for inner in function.node for name in inner.output} | set(function.input)
    for name in function.output:
        if name not in made:
            function.node.add(op_type="Identity", input=[function.input[0]], output=[name])


def _type(value: ir.Value | None) -> bytes:
    if value is None:
        return b""
    proto = ir.serde.serialize_value(value).type
    return bytes(proto.SerializeToString())


def _valid(node: onnx.NodeProto, version: int) -> bool:
    """Whether a node of a body, which may be written for an older opset, is one of the model's."""
    found = signature(node.op_type, version)
    if found is None or len(node.input) > found[0]:
        return False
    if node.op_type == "Split" and version >= 18 and len(node.input) < 2:
        return any(attr.name == "num_outputs" for attr in node.attribute)
    return all(attr.name in found[1] for attr in node.attribute)


def _give_defaults(node: ir.Node, version: int) -> None:
    """Attributes that a body refers to, where the node leaves them to their defaults."""
    for name, attr in onnx.defs.get_schema(node.op_type, version, "").attributes.items():
        if name not in node.attributes and attr.default_value.type:
            value = ir.serde.deserialize_attribute(attr.default_value)
            node.attributes[name] = ir.Attr(name, value.type, value.value)
