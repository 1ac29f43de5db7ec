"""Legalize: what a route cannot take, said in a way it can. Checks every ``ascend.moe`` node first.

For every route attributes are written out, and functions that hold ``ascend.moe`` nodes are inlined.
The native route needs no more, not even function bodies. For the others absent inputs become empty
constants. For the Python route nodes move to the session's domain, with exact Casts to float32 round
those of 16-bit dtype (the float32 op and one Cast are bit-equal to the 16-bit op). 16-bit nodes that
copy bits stay: Casts change NaNs. Nodes that stay get function bodies.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx.inliner
import onnx.shape_inference
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
)

from moe_onnx.adapters.function_body import OLDEST_OPSET, function_body
from moe_onnx.adapters.python_ops import SERVED, SESSION_DOMAIN
from moe_onnx.adapters.schema import ELEM_TYPES, tensor_info
from moe_onnx.errors import AttributeValueError, ModelError, MoeOnnxError
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN, FLOATS, VERSION, OpSpec, TensorInfo, is_absent

BODY_DOMAIN = "moe_onnx.body"
_SIXTEEN_BIT = ("float16", "bfloat16")


@dataclass
class Legalized:
    """A legalized model, the nodes each route serves, and the reasons for what was done."""

    model: ModelProto
    native_nodes: int = 0
    python_nodes: int = 0
    body_nodes: int = 0
    notes: list[str] = field(default_factory=list)


def uses_domain(model: ModelProto) -> bool:
    """Whether any node, or any operator of ours under another domain, is in the model."""
    return any(n.domain == DOMAIN or n.op_type in BY_NAME for n in _all_nodes(model))


def legalize(model: ModelProto, *, route: str, session: int = 0, body_domain: str = DOMAIN) -> Legalized:
    """A copy of ``model`` that ``route`` (``"native"``, ``"python"`` or ``"body"``) can run.

    ``session`` is what the Python ops park their errors under. Bodies go by ``body_domain``: where
    kernels are registered, they would shadow a body in ``ascend.moe``.

    Raises:
        ModelError, AttributeValueError: If an ``ascend.moe`` node is wrong; the message names it.
    """
    if route == "python":
        body_domain = BODY_DOMAIN
    model = _copy(model)
    _undo_session_domain(model)
    _check_domains(model)
    _import_domains(model)
    model = _inline_callers(model)
    done = Legalized(model)
    _replace_bodies(model, done, keep=route != "native" and body_domain == DOMAIN)
    scopes = list(_value_types(model))
    names = _names(model)
    for graph, types in zip(list(_graphs(model.graph)), scopes, strict=True):
        nodes = list(graph.node)
        del graph.node[:]
        for node in nodes:
            if node.domain != DOMAIN or node.op_type not in BY_NAME:
                graph.node.append(node)
                continue
            spec = BY_NAME[node.op_type]
            _check_arity(spec, node)
            given = _check_node(spec, node, types)
            if route == "native":
                graph.node.append(_to_native(spec, node, names))
                done.native_nodes += 1
                continue
            dtypes = _dtypes(spec, given)
            graph.node.extend(_fill_inputs(spec, node, dtypes[0], names))
            served = spec.name in SERVED
            why_not = _why_not_python(spec, dtypes)
            if route == "python" and served and not why_not:
                graph.node.extend(_to_python(spec, node, given, session, names, done))
            else:
                if route == "python" and served:
                    done.notes.append(f"node '{node.name}' runs its function body: {why_not}")
                _to_body(spec, node, body_domain)
                graph.node.append(node)
                done.body_nodes += 1
    _finish(model, bodies=route != "native")
    return done


def add_function_bodies(model: ModelProto) -> ModelProto:
    """A copy of ``model`` that runs in any ONNX runtime with nothing registered.

    Its ``ascend.moe`` nodes get their attributes and inputs written out, and the model the function
    bodies that it lacks.

    Raises:
        ModelError, AttributeValueError: If an ``ascend.moe`` node is wrong; the message names it.
    """
    return legalize(model, route="body").model


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and its subgraphs, innermost first."""
    for inner in _subgraphs(graph):
        yield from _graphs(inner)
    yield graph


def _subgraphs(graph: GraphProto) -> Iterator[GraphProto]:
    for node in graph.node:
        for attr in node.attribute:
            yield from [attr.g] if attr.type == AttributeProto.GRAPH else attr.graphs


def _all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    for graph in _graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        if function.domain != DOMAIN:
            yield from _function_nodes(function)


def _function_nodes(function: FunctionProto) -> Iterator[NodeProto]:
    for graph in _graphs(GraphProto(node=function.node)):
        yield from graph.node


def _check_domains(model: ModelProto) -> None:
    """Refuse operators of ours that are misspelt or in a wrong domain, and foreign versions."""
    for entry in model.opset_import:
        if entry.domain == DOMAIN and entry.version != VERSION:
            raise ModelError(
                f"The model imports {DOMAIN} version {entry.version}; this package has version "
                f"{VERSION}. Export the model again with it."
            )
    own = {f.name for f in model.functions if f.domain == DOMAIN}
    foreign = {(f.domain, f.name) for f in model.functions if f.domain != DOMAIN}
    for node in _all_nodes(model):
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


def _undo_session_domain(model: ModelProto) -> None:
    """Nodes that an onnxruntime session saved as ``moe_onnx.session`` are ours again."""
    for node in _all_nodes(model):
        if node.domain == SESSION_DOMAIN:
            shape = next((a.s.decode() for a in node.attribute if a.name == "restore_shape"), "")
            kept = [a for a in node.attribute if a.name not in ("node", "session", "restore_shape")]
            del node.attribute[:]
            node.attribute.extend(kept)
            if shape:
                sizes = [int(size) for size in shape.split(",")]
                node.attribute.append(helper.make_attribute("restore_shape", sizes))
            node.domain = DOMAIN


def _import_domains(model: ModelProto) -> None:
    """Models run in onnxruntime without their opset imports, but onnx's tools then know no types."""
    imported = {entry.domain for entry in model.opset_import}
    if not imported & {"", "ai.onnx"}:
        model.opset_import.append(helper.make_opsetid("", OLDEST_OPSET))
    if DOMAIN not in imported:
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def _replace_bodies(model: ModelProto, done: Legalized, *, keep: bool) -> None:
    """A function by the name of an operator means that operator, whatever it was made of."""
    opset = _opset(model)
    for function in list(model.functions):
        if function.domain == DOMAIN and function.name in BY_NAME:
            own = opset >= OLDEST_OPSET and function.node == function_body(function.name, opset).node
            if own and keep:
                continue
            model.functions.remove(function)
            if function.node and not own:
                done.notes.append(
                    f"function {DOMAIN}::{function.name} of the model is not this package's body and "
                    "was replaced by it"
                )


def _opset(model: ModelProto) -> int:
    return next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), OLDEST_OPSET)


def _write_out_defaults(model: ModelProto) -> None:
    """Calls get default attributes written out: the inliner of onnx does not know them."""
    defaults = {(f.domain, f.name): list(f.attribute_proto) for f in model.functions}
    for node in _all_nodes(model):
        given = {attr.name for attr in node.attribute}
        for attr in defaults.get((node.domain, node.op_type), []):
            if attr.name not in given:
                node.attribute.append(attr)


def _inline_callers(model: ModelProto) -> ModelProto:
    """Inline functions that call ``ascend.moe``: custom ops inside functions do not load."""
    callers = _callers(model)
    if callers:
        _write_out_defaults(model)
    # A caller of a caller is one only after the inner one was inlined.
    while callers:
        model = onnx.inliner.inline_selected_functions(model, callers)
        callers = [caller for caller in _callers(model) if caller not in callers]
    return model


def _callers(model: ModelProto) -> list[tuple[str, str]]:
    return [
        (f.domain, f.name)
        for f in model.functions
        if f.domain != DOMAIN and any(n.domain == DOMAIN for n in _function_nodes(f))
    ]


def _value_types(model: ModelProto) -> Iterator[dict[str, TensorInfo]]:
    """What onnx can tell of the values that each graph sees, in the order of ``_graphs``."""
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
    for inner in _subgraphs(graph):
        yield from _scopes(inner, types)
    yield types


def _names(model: ModelProto) -> set[str]:
    names = {v.name for g in _graphs(model.graph) for v in (*g.input, *g.initializer)}
    names.update(name for n in _all_nodes(model) for name in (*n.input, *n.output))
    return names


def _fresh(base: str, names: set[str]) -> str:
    name, number = base, 0
    while name in names:
        number += 1
        name = f"{base}_{number}"
    names.add(name)
    return name


def _check_arity(spec: OpSpec, node: NodeProto) -> None:
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


def _check_node(spec: OpSpec, node: NodeProto, types: dict[str, TensorInfo]) -> list[TensorInfo | None]:
    """Check all that is known of a node before any kernel sees it, and write out its attributes.

    Returns:
        What is known of each input of the operator, None where the node names none.
    """
    infos = [types.get(name, TensorInfo("", None)) if name else None for name in node.input]
    try:
        legal, _ = spec.check(infos, _attributes(spec, node))
    except MoeOnnxError as error:
        message = f"{error} (node '{node.name}')"
        named = type(error)(message, op=spec.name, aclnn_status=error.aclnn_status)
        named.node = node.name or None
        raise named from error
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(k, v) for k, v in legal.items() if v not in (None, ()))
    return infos + [None] * (len(spec.inputs) - len(infos))


def _dtypes(spec: OpSpec, infos: list[TensorInfo | None]) -> list[str]:
    """The dtypes of a node's inputs, ``""`` where unknown and ``"absent"`` where there is none."""
    pairs = zip(spec.inputs, infos, strict=True)
    return ["absent" if i is None or is_absent(arg, i) else i.dtype for arg, i in pairs]


def _why_not_python(spec: OpSpec, dtypes: list[str]) -> str:
    """Why a node cannot have its Python kernel, ``""`` if it can."""
    if "" in dtypes:
        return "the dtype of an input is not known"
    absent = [arg.name for arg, dtype in zip(spec.inputs, dtypes, strict=True) if dtype == "absent"]
    if dtypes[0] in _SIXTEEN_BIT and spec.copies_without in absent:
        return f"without '{spec.copies_without}' it copies bits, and Casts lose the payload of NaNs"
    return ""


def _to_native(spec: OpSpec, node: NodeProto, names: set[str]) -> NodeProto:
    # onnxruntime lets all outputs of a custom op be blank but the first.
    node.output[0] = node.output[0] or _fresh(f"{node.name or spec.name}/{spec.outputs[0].name}", names)
    node.name = node.name or node.output[0]  # what an error names
    return node


def _to_body(spec: OpSpec, node: NodeProto, domain: str) -> None:
    node.domain = domain
    given = {attr.name for attr in node.attribute}
    for attr in spec.attributes:
        # Not every runtime knows default attributes of functions (onnx's own evaluator does not).
        if attr.kind == "ints" and attr.name not in given:
            node.attribute.append(AttributeProto(name=attr.name, type=AttributeProto.INTS))


def _attributes(spec: OpSpec, node: NodeProto) -> dict[str, Any]:
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


def _fill_inputs(spec: OpSpec, node: NodeProto, dtype: str, names: set[str]) -> list[NodeProto]:
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
        inputs[i] = _fresh(f"{node.output[0]}/{arg.name}", names)
        added.append(helper.make_node("Constant", [], [inputs[i]], name=inputs[i], value=empty))
        if is_float and dtype not in ELEM_TYPES:
            typed = _fresh(f"{inputs[i]}/typed", names)
            added.append(helper.make_node("CastLike", [inputs[i], inputs[0]], [typed], name=typed))
            inputs[i] = typed
    outputs = [*node.output, *[""] * (len(spec.outputs) - len(node.output))]
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(
        name or _fresh(f"{outputs[0]}/{arg.name}", names)
        for name, arg in zip(outputs, spec.outputs, strict=True)
    )
    return added


def _to_python(
    spec: OpSpec,
    node: NodeProto,
    infos: list[TensorInfo | None],
    session: int,
    names: set[str],
    done: Legalized,
) -> list[NodeProto]:
    dtypes = _dtypes(spec, infos)
    dtype = dtypes[0]
    done.python_nodes += 1
    restore = next((a for a in node.attribute if a.name == "restore_shape"), None)
    shape = ",".join(str(size) for size in restore.ints) if restore else ""
    if restore is not None:
        node.attribute.remove(restore)
    node.domain = SESSION_DOMAIN
    node.attribute.append(helper.make_attribute("node", node.name or node.output[0]))
    node.attribute.append(helper.make_attribute("session", session))
    node.attribute.append(helper.make_attribute("restore_shape", shape))
    before, after = [], []
    # An absent input may have any dtype, but a kernel is looked up by the dtypes of all inputs.
    for i, info in enumerate(infos):
        if info is not None and dtypes[i] == "absent":
            node.input[i] = ""
    before += _fill_inputs(spec, node, dtype, names)
    wide = dtype
    if dtype in _SIXTEEN_BIT:
        done.notes.append(f"node '{node.name}' runs in float32 between Casts from and to {dtype}")
        wide = "float32"
        for i, arg in enumerate(spec.inputs):
            if arg.type_var in ("T", "TP"):
                name = _fresh(f"{node.output[0]}/{arg.name}/{wide}", names)
                before.append(_cast(node.input[i], name, wide))
                node.input[i] = name
    # The first input of a kind gives an output's dtype, an absent one too; without it the rows do.
    kinds = zip(reversed(spec.inputs), reversed(infos), strict=True)
    like = {arg.type_var: info.dtype for arg, info in kinds if info is not None and info.dtype}
    for i, arg in enumerate(spec.outputs):
        narrow = like.get(arg.type_var, dtype)
        if narrow != wide:
            name = node.output[i]
            node.output[i] = _fresh(f"{name}/{wide}", names)
            after.append(_cast(node.output[i], name, narrow))
    return [*before, node, *after]


def _cast(source: str, target: str, dtype: str) -> NodeProto:
    elem = ELEM_TYPES.get(dtype) or TensorProto.DataType.Value(dtype.upper())
    # Not the target's name alone, which is that of the node whose output it was, where nodes are named so.
    return helper.make_node("Cast", [source], [target], name=f"{target}/Cast", to=elem)


def _finish(model: ModelProto, *, bodies: bool) -> None:
    """Add the function bodies that are needed and missing, and the opset imports."""
    used = {(n.domain, n.op_type) for g in _graphs(model.graph) for n in g.node}
    opset = _opset(model)
    present = {(f.domain, f.name) for f in model.functions}
    for domain, name in sorted(used - present):
        if bodies and domain in (DOMAIN, BODY_DOMAIN) and name in BY_NAME:
            function = function_body(name, opset)
            function.domain = domain
            model.functions.append(function)
    imported = {entry.domain for entry in model.opset_import}
    for domain in sorted({d for d, _ in used} - imported - {"", "ai.onnx"}):
        model.opset_import.append(helper.make_opsetid(domain, VERSION))
    model.ir_version = max(model.ir_version, 8)  # the first with functions
