"""Legalize: what a route cannot take, said in a way it can. Checks every ``ascend.moe`` node first.

For every route attributes are written out, and functions that hold ``ascend.moe`` nodes are inlined.
The native route needs no more, not even function bodies. For the others absent inputs become empty
constants. For the Python route nodes move to the session's domain, with exact Casts to float32 round
those of 16-bit dtype (the float32 op and one Cast are bit-equal to the 16-bit op). 16-bit nodes that
copy bits stay: Casts change NaNs. Nodes that stay get function bodies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx
import onnx.inliner
import onnx.shape_inference
from onnx import (
    AttributeProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
)

from moe_onnx.adapters.function_body import OLDEST_OPSET, function_body
from moe_onnx.adapters.python_ops import SERVED, SESSION_DOMAIN
from moe_onnx.adapters.schema import ELEM_TYPES
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.nodes import (
    all_nodes,
    check_arity,
    check_domains,
    check_node,
    copied,
    dtypes_of,
    fill_inputs,
    fresh,
    function_nodes,
    graphs,
    import_domains,
    names_of,
    opset_of,
    undo_session_domain,
    value_types,
)
from moe_onnx.spec import DOMAIN, VERSION, OpSpec, TensorInfo

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
    return any(n.domain == DOMAIN or n.op_type in BY_NAME for n in all_nodes(model))


def legalize(model: ModelProto, *, route: str, session: int = 0, body_domain: str = DOMAIN) -> Legalized:
    """A copy of ``model`` that ``route`` (``"native"``, ``"python"`` or ``"body"``) can run.

    ``session`` is what the Python ops park their errors under. Bodies go by ``body_domain``: where
    kernels are registered, they would shadow a body in ``ascend.moe``.

    Raises:
        ModelError, AttributeValueError: If an ``ascend.moe`` node is wrong; the message names it.
    """
    if route == "python":
        body_domain = BODY_DOMAIN
    model = copied(model)
    undo_session_domain(model)
    check_domains(model)
    import_domains(model)
    model = _inline_callers(model)
    done = Legalized(model)
    _replace_bodies(model, done, keep=route != "native" and body_domain == DOMAIN)
    scopes = list(value_types(model))
    names = names_of(model)
    for graph, types in zip(list(graphs(model.graph)), scopes, strict=True):
        nodes = list(graph.node)
        del graph.node[:]
        for node in nodes:
            if node.domain != DOMAIN or node.op_type not in BY_NAME:
                graph.node.append(node)
                continue
            spec = BY_NAME[node.op_type]
            check_arity(spec, node)
            given = check_node(spec, node, types)
            if route == "native":
                graph.node.append(_to_native(spec, node, names))
                done.native_nodes += 1
                continue
            dtypes = dtypes_of(spec, given)
            graph.node.extend(fill_inputs(spec, node, dtypes[0], names))
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


def _replace_bodies(model: ModelProto, done: Legalized, *, keep: bool) -> None:
    """A function by the name of an operator means that operator, whatever it was made of."""
    opset = opset_of(model)
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


def _write_out_defaults(model: ModelProto) -> None:
    """Calls get default attributes written out: the inliner of onnx does not know them."""
    defaults = {(f.domain, f.name): list(f.attribute_proto) for f in model.functions}
    for node in all_nodes(model):
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
        if f.domain != DOMAIN and any(n.domain == DOMAIN for n in function_nodes(f))
    ]


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
    node.output[0] = node.output[0] or fresh(f"{node.name or spec.name}/{spec.outputs[0].name}", names)
    node.name = node.name or node.output[0]  # what an error names
    return node


def _to_body(spec: OpSpec, node: NodeProto, domain: str) -> None:
    node.domain = domain
    given = {attr.name for attr in node.attribute}
    for attr in spec.attributes:
        # Not every runtime knows default attributes of functions (onnx's own evaluator does not).
        if attr.kind == "ints" and attr.name not in given:
            node.attribute.append(AttributeProto(name=attr.name, type=AttributeProto.INTS))


def _to_python(
    spec: OpSpec,
    node: NodeProto,
    infos: list[TensorInfo | None],
    session: int,
    names: set[str],
    done: Legalized,
) -> list[NodeProto]:
    dtypes = dtypes_of(spec, infos)
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
    before += fill_inputs(spec, node, dtype, names)
    wide = dtype
    if dtype in _SIXTEEN_BIT:
        done.notes.append(f"node '{node.name}' runs in float32 between Casts from and to {dtype}")
        wide = "float32"
        for i, arg in enumerate(spec.inputs):
            if arg.type_var in ("T", "TP"):
                name = fresh(f"{node.output[0]}/{arg.name}/{wide}", names)
                before.append(_cast(node.input[i], name, wide))
                node.input[i] = name
    # The first input of a kind gives an output's dtype, an absent one too; without it the rows do.
    kinds = zip(reversed(spec.inputs), reversed(infos), strict=True)
    like = {arg.type_var: info.dtype for arg, info in kinds if info is not None and info.dtype}
    for i, arg in enumerate(spec.outputs):
        narrow = like.get(arg.type_var, dtype)
        if narrow != wide:
            name = node.output[i]
            node.output[i] = fresh(f"{name}/{wide}", names)
            after.append(_cast(node.output[i], name, narrow))
    return [*before, node, *after]


def _cast(source: str, target: str, dtype: str) -> NodeProto:
    elem = ELEM_TYPES.get(dtype) or TensorProto.DataType.Value(dtype.upper())
    # Not the target's name alone, which is that of the node whose output it was, where nodes are named so.
    return helper.make_node("Cast", [source], [target], name=f"{target}/Cast", to=elem)


def _finish(model: ModelProto, *, bodies: bool) -> None:
    """Add the function bodies that are needed and missing, and the opset imports."""
    used = {(n.domain, n.op_type) for g in graphs(model.graph) for n in g.node}
    opset = opset_of(model)
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
