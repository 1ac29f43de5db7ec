"""What no error comes of in onnxruntime, but the end of the process: seen before it is tried."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

from moe_onnx.errors import ModelError
from moe_onnx.validation.subject import subgraphs


def turning_einsum(model: ModelProto) -> str:
    """The first Einsum that turns an operand: onnxruntime 1.32 ends the process if that is empty.

    It brings the axes of each operand into the order in which their letters come first in the equation.
    """
    waiting = [owner.node for owner in (model.graph, *model.functions)]
    while waiting:
        for node in waiting.pop():
            waiting += [graph.node for _, graph in subgraphs(node)]
            for attr in node.attribute:
                if (node.op_type, attr.name) != ("Einsum", "equation") or node.domain not in ("", "ai.onnx"):
                    continue
                terms = attr.s.decode("utf-8", "replace").partition("->")[0].replace(" ", "").split(",")
                order = "".join(terms)
                if any(list(term) != sorted(term, key=order.index) for term in terms):
                    return str(node.name or node.output[0])
    return ""


def has_nested_if(model: ModelProto) -> bool:
    """Whether a branch of an If has one inside.

    Where the outer condition is a constant, as it may become, onnxruntime 1.32 folds it, and may end the
    process by that.
    """
    waiting = [(owner.node, False) for owner in (model.graph, *model.functions)]
    while waiting:
        nodes, is_inside = waiting.pop()
        for node in nodes:
            is_if = node.op_type == "If" and node.domain in ("", "ai.onnx")
            if is_if and is_inside:
                return True
            waiting += [(graph.node, is_inside or is_if) for _, graph in subgraphs(node)]
    return False


def refuse_aborting(model: ModelProto) -> None:
    """Refuse what no error comes of, but the end of the process.

    Raises:
        ModelError: If a node clamps to nothing, which onnxruntime's CPU kernel asserts that none does; in a
            function, if a caller gives such a limit.
    """
    functions = {(one.domain, one.name, one.overload): one for one in model.functions}
    waiting: list[tuple[GraphProto | FunctionProto, dict[str, AttributeProto]]] = [(model.graph, {})]
    seen: set[tuple[int, tuple[bytes, ...]]] = set()
    while waiting:
        owner, given = waiting.pop()
        key = (id(owner), tuple(attr.SerializeToString(deterministic=True) for attr in given.values()))
        if key in seen:
            continue
        seen.add(key)
        for node in owner.node:
            attrs = [
                (attr, given.get(attr.ref_attr_name) if attr.ref_attr_name else attr)
                for attr in node.attribute
            ]
            known = {attr.name: value for attr, value in attrs if value is not None}
            _refuse_limit(node, known)
            for value in known.values():
                inner = [value.g] if value.type == AttributeProto.GRAPH else value.graphs
                waiting += [(graph, given) for graph in inner]
            called = functions.get((node.domain, node.op_type, node.overload))
            if called is not None:
                defaults = {attr.name: attr for attr in called.attribute_proto}
                named = {*called.attribute, *defaults}
                own = {name: known[name] for name in sorted(named & known.keys())}
                waiting.append((called, defaults | own))


def _refuse_limit(node: NodeProto, known: Mapping[str, AttributeProto]) -> None:
    if node.domain != "com.microsoft" or node.op_type not in ("MoE", "QMoE"):
        return
    kind = known["activation_type"].s if "activation_type" in known else b""
    limit = known["swiglu_limit"].f if "swiglu_limit" in known else 0.0
    if kind == b"swiglu" and not limit >= 0:
        raise ModelError(
            f"Node '{node.name or node.output[0]}' ({node.op_type}): swiglu_limit={limit:g} is "
            "negative. It is not run, as onnxruntime's CPU kernel ends the process for such a limit."
        )
