"""Bodies of functions as models of their own, once for each set of types that they are called with."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, ValueInfoProto

from moe_onnx.validation.operators.node_types import Walk
from moe_onnx.validation.operators.own_bodies import own_bodies
from moe_onnx.validation.subject import Scope, Subject, normal_domain, subgraphs

_MOST_DEEP = 8  # functions in functions
_Key = tuple[str, str, tuple[bytes, ...]]


class Calls:
    """The calls of functions in a model, each a model with the types of the call; the found are followed.

    Attributes:
        left_out: Calls that were not followed, past the limit.
    """

    def __init__(self, subject: Subject, walk: Walk, most_nodes: int) -> None:
        self.left_out = 0
        self._functions = subject.functions
        self._seen: set[_Key] = set()
        self._waiting: list[tuple[Subject, str, int]] = []
        own = own_bodies(subject)
        self._own = {key for key, function in subject.functions.items() if id(function) in own}
        self._nodes_left = most_nodes
        self._depth = 0
        self._collect(subject, walk, "")

    def __iter__(self) -> Iterator[tuple[Subject, str]]:
        """The body of a call as a model, and how to say where that is."""
        while self._waiting:
            called, label, self._depth = self._waiting.pop(0)
            yield called, label

    def follow(self, called: Subject, walk: Walk, label: str) -> None:
        """Also go through the calls that a body holds."""
        self._collect(called, walk, label)

    def _collect(self, subject: Subject, walk: Walk, label: str) -> None:
        for scope in subject.scopes:
            if scope.function is not None:
                continue
            for node in scope.nodes:
                key = normal_domain(node.domain), node.op_type
                if key in self._functions and key not in self._own and not walk.has_schema(scope, node):
                    self._add(self._functions[key], scope, node, walk, subject, label)

    def _add(
        self, function: FunctionProto, scope: Scope, node: NodeProto, walk: Walk, subject: Subject, label: str
    ) -> None:
        types = [walk.type_of(scope, name) if name else None for name in node.input]
        key = (
            normal_domain(node.domain),
            node.op_type,
            tuple(b"" if t is None else t.SerializeToString(deterministic=True) for t in types)
            + tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute)),
        )
        if key in self._seen or not any(types):
            return
        self._seen.add(key)
        if self._depth >= _MOST_DEEP or self._nodes_left < len(function.node):
            self.left_out += 1
            return
        self._nodes_left -= len(function.node)
        model = ModelProto(ir_version=subject.model.ir_version)
        model.opset_import.extend(function.opset_import)
        model.graph.name = function.name
        for position, name in enumerate(function.input):
            value = ValueInfoProto(name=name)
            if position < len(types) and (known := types[position]) is not None:
                value.type.CopyFrom(known)
            model.graph.input.append(value)
        model.graph.output.extend(ValueInfoProto(name=name) for name in function.output)
        model.graph.node.extend(function.node)
        given = {a.name: a for a in function.attribute_proto} | {a.name: a for a in node.attribute}
        _fill(list(model.graph.node), given)
        model.functions.extend(self._callees(function))
        called = Subject(model, function.name)
        place = f"in function '{function.domain}.{function.name}' as {scope.place(node)} calls it"
        self._waiting.append((called, place + (f" {label}" if label else ""), self._depth + 1))

    def _callees(self, function: FunctionProto) -> list[FunctionProto]:
        found: dict[tuple[str, str], FunctionProto] = {}
        stack = list(function.node)
        while stack:
            node = stack.pop()
            key = normal_domain(node.domain), node.op_type
            if key in self._functions and key not in found:
                found[key] = self._functions[key]
                stack.extend(found[key].node)
            for _, graph in subgraphs(node):
                stack.extend(graph.node)
        return list(found.values())


def _fill(nodes: list[NodeProto], given: dict[str, AttributeProto]) -> None:
    """Put a call's attributes in the place of references; one that is not given leaves none behind."""
    for node in nodes:
        kept = []
        for attribute in node.attribute:
            value = given.get(attribute.ref_attr_name)
            if not attribute.ref_attr_name:
                kept.append(attribute)
            elif value is not None:
                filled = AttributeProto()
                filled.CopyFrom(value)
                filled.name = attribute.name
                kept.append(filled)
        if len(kept) != len(node.attribute) or any(a.ref_attr_name for a in node.attribute):
            copies = [AttributeProto.FromString(a.SerializeToString()) for a in kept]
            del node.attribute[:]
            node.attribute.extend(copies)
        for _, graph in subgraphs(node):
            _fill(list(graph.node), given)
