"""Updates as the elementwise operators that they are made of, whatever form a graph gives them."""

from __future__ import annotations

from onnx import NodeProto, helper

from moe_onnx.operators.moe_adam_w import FACTORS, NAME
from moe_onnx.rewrite.legalize import BODY_DOMAIN
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.documents.moe_nodes import constant
from moe_onnx.validation.subject import Scope
from moe_onnx.validation.training.nodes import int_attribute, is_op, subgraphs_of


def by_element(scope: Scope) -> list[NodeProto]:
    """The nodes, and in the place of an update over slices, or by MoeAdamW, what it does to an element.

    Factors are read where they are made: MoeAdamW's stand in one tensor, of which its function body takes
    one after the other.
    """
    joined = {node.output[0]: node for node in scope.nodes if _joins_factors(node, scope)}
    found: list[NodeProto] = []
    for node in scope.nodes:
        if _is_update(node):
            found += _update(node, joined)
        elif (factor := _factor(node, joined, scope)) is not None:
            found.append(helper.make_node("Identity", [factor], list(node.output), node.name))
        else:
            found += _slices(node)
    return found


def _joins_factors(node: NodeProto, scope: Scope) -> bool:
    if not is_op(node, ("Concat",)) or len(node.input) != len(FACTORS) or not node.output:
        return False
    makers = [scope.producer(name) for name in node.input]
    return all(made is None or is_op(made[1], ("Unsqueeze", "Constant")) for made in makers)


def _factor(node: NodeProto, joined: dict[str, NodeProto], scope: Scope) -> str | None:
    """The one of the factors that a Gather takes, None where it is another Gather."""
    if not is_op(node, ("Gather",)) or len(node.input) != 2 or node.input[0] not in joined:
        return None
    at = constant(scope, node.input[1])
    if at is None or at.dtype.kind not in "iu" or at.size != 1 or int_attribute(node, "axis", 0) != 0:
        return None
    number = int(at.reshape(()))
    return joined[node.input[0]].input[number] if 0 <= number < len(FACTORS) else None


def _is_update(node: NodeProto) -> bool:
    ours = node.op_type == NAME and node.domain in (DOMAIN, BODY_DOMAIN)
    return ours and len(node.input) == 5 and 1 <= len(node.output) <= 3


def _update(node: NodeProto, joined: dict[str, NodeProto]) -> list[NodeProto]:
    """MoeAdamW as operators of one output, each with the factors that it uses."""
    parameter, gradient, avg, avg_sq, factors = node.input
    base = node.name or next(filter(None, node.output), NAME)
    made = joined.get(factors)
    given = (
        list(made.input) if made is not None and len(made.input) == len(FACTORS) else [factors] * len(FACTORS)
    )
    by = dict(zip(FACTORS, given, strict=True))
    outputs = [*node.output, "", ""]
    new, new_avg, new_sq = (name or f"{base}/{i}" for i, name in enumerate(outputs[:3]))

    def part(op: str, out: str, *inputs: str) -> NodeProto:
        return helper.make_node(op, inputs, [out], f"{base}/{out}")

    def inner(name: str) -> str:
        return f"{base}/{name}"

    return [
        part("Mul", inner("old_avg"), avg, by["beta1"]),
        part("Mul", inner("weighed"), gradient, by["weight1"]),
        part("Add", new_avg, inner("old_avg"), inner("weighed")),
        part("Mul", inner("old_avg_sq"), avg_sq, by["beta2"]),
        part("Mul", inner("square"), gradient, gradient),
        part("Mul", inner("weighed_square"), inner("square"), by["weight2"]),
        part("Add", new_sq, inner("old_avg_sq"), inner("weighed_square")),
        part("Mul", inner("step"), new_avg, by["rate"]),
        part("Sqrt", inner("root"), new_sq),
        part("Add", inner("root_and_eps"), inner("root"), by["eps"]),
        part("Div", inner("change"), inner("step"), inner("root_and_eps")),
        part("Mul", inner("kept"), parameter, by["kept"]),
        part("Sub", new, inner("kept"), inner("change")),
    ]


def _slices(node: NodeProto) -> list[NodeProto]:
    """The node itself; of a Scan that takes slices and hands nothing on to the next, the nodes of its body.

    An optimizer updates large weights so, one slice after the other: what a slice depends on, all do.
    """
    attributes = {attribute.name: attribute for attribute in node.attribute}
    body = attributes.get("body")
    if (
        not is_op(node, ("Scan",))
        or body is None
        or int_attribute(node, "num_scan_inputs", 0) != len(node.input)
    ):
        return [node]
    graph = body.g
    if len(graph.input) != len(node.input) or len(graph.output) != len(node.output):
        return [node]
    if not node.output or len(attributes) > 2 or any(subgraphs_of(inner) for inner in graph.node):
        return [node]  # directions and axes of its own
    own = {value.name for value in graph.input} | {name for inner in graph.node for name in inner.output}
    inside = {name: f"{node.output[0]}/{name}" for name in own if name}
    parts = [
        helper.make_node("Identity", [given], [inside.get(value.name, "")], f"{node.name}/{value.name}")
        for given, value in zip(node.input, graph.input, strict=True)
    ]
    for inner in graph.node:
        part = NodeProto()
        part.CopyFrom(inner)
        for names in (part.input, part.output):
            names[:] = [inside.get(name, name) for name in names]
        parts.append(part)
    return parts + [
        helper.make_node("Identity", [inside.get(value.name, value.name)], [made], f"{node.name}/{made}")
        for value, made in zip(graph.output, node.output, strict=True)
    ]
