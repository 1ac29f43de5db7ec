"""``expand``: ``ascend.moe`` nodes become the standard operators that they are made of, inlined."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, helper

from moe_onnx.adapters.function_body import OLDEST_OPSET, function_body
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.nodes import (
    all_nodes,
    check_arity,
    check_domains,
    check_node,
    dtypes_of,
    fill_inputs,
    fresh,
    graphs,
    import_domains,
    names_of,
    opset_of,
    undo_session_domain,
    value_types,
)
from moe_onnx.rewrite.notes import EXACT, Notes, Pass, Scope, mark, scopes
from moe_onnx.spec import DOMAIN, OpSpec, TensorInfo

NAME = "expand"


def expand(model: ModelProto, notes: Notes) -> ModelProto:
    """Inline the bodies of all ``ascend.moe`` nodes, wherever they are; nothing of the domain is left.

    A name of a body is put behind the node's own (``node/name``), and made new where it is taken. Nodes that
    check a rule are called by it, as in function bodies, and by the node.
    """
    undo_session_domain(model)
    check_domains(model)
    import_domains(model)
    own = [f for f in model.functions if f.domain == DOMAIN and f.name in BY_NAME]
    opset = opset_of(model)
    foreign = {f.name for f in own if f.node != _body_nodes(f.name, opset)}
    every = list(scopes(model))  # kept: types go by the identity of its graphs
    types = _types(model)
    names = names_of(model)
    # Runtimes want nodes to have names of their own, too.
    names |= {node.name for scope in every for node in scope.owner.node}
    bodies: dict[tuple[str, int], FunctionProto] = {}
    for scope in reversed(every):  # inner ones first: nodes that are put back are copies
        if scope.function is not None and scope.function.domain == DOMAIN:
            continue
        version = _version(scope, opset)
        if not any(_is_ours(node) for node in scope.owner.node):
            continue
        if version < OLDEST_OPSET:
            for node in filter(_is_ours, scope.owner.node):
                why = f"bodies need ai.onnx opset >= {OLDEST_OPSET}, it is of {version}"
                notes.skipped(node, f"{why} (convert the model with onnx.version_converter)", scope.place)
            continue
        nodes = list(scope.owner.node)
        del scope.owner.node[:]
        for node in nodes:
            if not _is_ours(node):
                scope.owner.node.append(node)
                continue
            key = node.op_type, version
            if key not in bodies:
                bodies[key] = function_body(*key)
            made = _inlined(node, bodies[key], types.get(id(scope.owner), {}), names)
            for one in made:
                mark(one, NAME)
            was = "; the model's own function of that name meant something else" * (node.op_type in foreign)
            notes.applied(node, f"{len(made)} nodes of opset {version}{was}", scope.place)
            scope.owner.node.extend(made)
        _import_standard(scope, version)
    _leave_domain(model, own)
    order = {scope.place: number for number, scope in enumerate(every)}
    notes.done.sort(key=lambda note: order[note.place])
    return model


def _is_ours(node: NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type in BY_NAME


def _body_nodes(name: str, opset: int) -> object:
    return function_body(name, max(opset, OLDEST_OPSET)).node


def _version(scope: Scope, model_opset: int) -> int:
    if scope.function is None:
        return model_opset
    imports = scope.function.opset_import
    return next((e.version for e in imports if e.domain in ("", "ai.onnx")), model_opset)


def _import_standard(scope: Scope, version: int) -> None:
    function = scope.function
    if function is not None and not any(e.domain in ("", "ai.onnx") for e in function.opset_import):
        function.opset_import.append(helper.make_opsetid("", version))


def _types(model: ModelProto) -> dict[int, dict[str, TensorInfo]]:
    """What onnx can tell of the values of the main graph and its subgraphs, by the graph's id."""
    return dict(zip(map(id, graphs(model.graph)), value_types(model), strict=True))


def _inlined(
    node: NodeProto, body: FunctionProto, types: Mapping[str, TensorInfo], names: set[str]
) -> list[NodeProto]:
    """The nodes that a node is made of, under new names."""
    spec = BY_NAME[node.op_type]
    check_arity(spec, node)
    node.name = node.name or next((out for out in node.output if out), spec.name)
    attributes, first = _attributes(spec, node, types)
    if not any(node.output):
        return []  # nothing reads it
    made = fill_inputs(spec, node, first, names)  # also names outputs that nobody reads
    renamed = dict(zip(body.input, node.input, strict=True))
    renamed |= dict(zip(body.output, node.output, strict=True))
    for inner in body.node:
        made.append(_renamed(inner, node.name, spec, renamed, attributes, names))
    last = {name: one for one in made for name in one.output}
    for one in {id(last[name]): last[name] for name in node.output}.values():
        one.doc_string = one.doc_string or node.doc_string
        one.metadata_props.extend(node.metadata_props)
    return made


def _attributes(
    spec: OpSpec, node: NodeProto, types: Mapping[str, TensorInfo]
) -> tuple[dict[str, AttributeProto], str]:
    """What the body's references to attributes stand for, and the dtype of the first input, if known."""
    given = {attr.name: attr for attr in node.attribute}
    if any(attr.ref_attr_name for attr in node.attribute):
        # In a function, whose callers give them: what their values are cannot be checked here.
        first = ""
    else:
        first = dtypes_of(spec, check_node(spec, node, dict(types)))[0]
        given = {attr.name: attr for attr in node.attribute}
    for attr in spec.attributes:
        if attr.name not in given and attr.kind == "ints":
            given[attr.name] = AttributeProto(name=attr.name, type=AttributeProto.INTS)
        elif attr.name not in given and attr.default is not None:
            given[attr.name] = helper.make_attribute(attr.name, attr.default)
    return given, first


def _renamed(
    inner: NodeProto,
    prefix: str,
    spec: OpSpec,
    renamed: dict[str, str],
    attributes: Mapping[str, AttributeProto],
    names: set[str],
) -> NodeProto:
    node = NodeProto()
    node.CopyFrom(inner)
    rule = inner.name.partition(": ")[2]
    plain = prefix.replace("'", "")  # a runtime's message quotes the name
    name = f"{spec.name}: {rule} [{plain}]" if rule else inner.name.replace(spec.name, prefix, 1)
    node.name = fresh(f"{name}/{inner.op_type}" if not rule else name, names)
    for i, name in enumerate(node.input):
        node.input[i] = renamed[name] if name else ""
    for i, name in enumerate(node.output):
        if name and name not in renamed:
            renamed[name] = fresh(f"{prefix}/{name}", names)
        node.output[i] = renamed.get(name, "")
    for attr in node.attribute:
        if attr.ref_attr_name:
            _fill(attr, attributes[attr.ref_attr_name])
        elif attr.type == AttributeProto.GRAPH:
            _rename_graph(attr.g, prefix, spec, renamed, attributes, names)
    return node


def _fill(attr: AttributeProto, given: AttributeProto) -> None:
    name = attr.name
    attr.CopyFrom(given)
    attr.name = name


def _rename_graph(
    graph: GraphProto,
    prefix: str,
    spec: OpSpec,
    renamed: dict[str, str],
    attributes: Mapping[str, AttributeProto],
    names: set[str],
) -> None:
    for value in graph.input:
        renamed[value.name] = value.name = fresh(f"{prefix}/{value.name}", names)
    for tensor in graph.initializer:
        renamed[tensor.name] = tensor.name = fresh(f"{prefix}/{tensor.name}", names)
    made = [_renamed(node, prefix, spec, renamed, attributes, names) for node in graph.node]
    del graph.node[:]
    for node in made:
        mark(node, NAME)
    graph.node.extend(made)
    for value in graph.output:
        value.name = renamed[value.name]


def _leave_domain(model: ModelProto, own: list[FunctionProto]) -> None:
    """Bodies and imports that nothing needs any more go."""
    used = {(node.domain, node.op_type) for node in all_nodes(model)}
    for function in own:
        if (DOMAIN, function.name) not in used:
            model.functions.remove(function)
    if not any(domain == DOMAIN for domain, _ in used):
        for owner in (model, *(f for f in model.functions if f.domain != DOMAIN)):
            for entry in list(owner.opset_import):
                if entry.domain == DOMAIN:
                    owner.opset_import.remove(entry)


EXPAND = Pass(
    NAME,
    summary="ascend.moe nodes become the standard operators that they are made of.",
    needs=f"ascend.moe nodes, in a model or function of ai.onnx opset >= {OLDEST_OPSET}",
    leaves="standard operators only, inlined: no function, node or opset import of ascend.moe",
    apply=expand,
    tolerance=EXACT,
)
