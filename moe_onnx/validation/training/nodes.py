"""What a node of a training graph is, and the graphs in it."""

from __future__ import annotations

from collections.abc import Collection

from onnx import AttributeProto, GraphProto, NodeProto

from moe_onnx.validation.subject import normal_domain


def is_op(node: NodeProto, names: Collection[str]) -> bool:
    """Whether a node is one of ONNX's own operators of these names."""
    return node.op_type in names and normal_domain(node.domain) == ""


def int_attribute(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute."""
    for attribute in node.attribute:
        if attribute.name == name:
            return int(attribute.i)
    return default


def subgraphs_of(node: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    graphs: list[GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            graphs.append(attribute.g)
        graphs.extend(attribute.graphs)
    return graphs
