"""What depends on what in a graph: by values, not by shapes, in time linear in the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from moe_onnx.validation.subject import Scope, Subject
from moe_onnx.validation.training.elements import by_element
from moe_onnx.validation.training.nodes import is_op, subgraphs_of

# Their outputs say nothing of an input's values.
_SIZES = frozenset({"Shape", "Size"})
ELEMENTWISE = {
    *("Abs", "Add", "Cast", "Clip", "Div", "Identity", "Max", "Min", "Mul"),
    *("Neg", "Pow", "Reciprocal", "Sign", "Sqrt", "Sub", "Sum", "Where"),
}
# They hand values on as they are, in another order or shape.
MOVES = frozenset(("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "Flatten"))


@dataclass
class Spread:
    """What a value is made of by elementwise operators alone.

    Attributes:
        inputs: Graph inputs that are reached so.
        leaves: Values that other operators make.
        beside: Graph inputs that the operators of the leaves read.
        constants: Initializers and outputs of Constant nodes.
    """

    inputs: set[str] = field(default_factory=set)
    leaves: set[str] = field(default_factory=set)
    beside: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)


class Flow:
    """The values of a graph and the nodes between them."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.nodes = by_element(scope)
        self.inputs = frozenset(scope.inputs)
        self.maker: dict[str, int] = {}
        self.users: dict[str, list[int]] = {}
        self.reads: list[tuple[str, ...]] = []
        for number, node in enumerate(self.nodes):
            for name in node.output:
                if name:
                    self.maker.setdefault(name, number)
            names = tuple(dict.fromkeys(name for name in (*node.input, *_outer_names(node)) if name))
            self.reads.append(names)
            for name in names:
                self.users.setdefault(name, []).append(number)
        self.order = self._sorted()

    def node(self, name: str) -> NodeProto | None:
        """The node that makes a value."""
        number = self.maker.get(name)
        return None if number is None else self.nodes[number]

    def ancestors(self, names: Iterable[str]) -> set[str]:
        """All values that these depend on, themselves included."""
        found, left = set(names), list(names)
        while left:
            number = self.maker.get(left.pop())
            if number is None or is_op(self.nodes[number], _SIZES):
                continue
            for name in self.reads[number]:
                if name not in found:
                    found.add(name)
                    left.append(name)
        return found

    def dependence(self, sources: Collection[str]) -> Mapping[str, int]:
        """For every value that depends on a source: the sources, as the bits of a number."""
        bits = {name: 1 << position for position, name in enumerate(sources)}
        found = dict(bits)
        for number in self.order:
            node = self.nodes[number]
            if is_op(node, _SIZES):
                continue
            on = 0
            for name in self.reads[number]:
                on |= found.get(name, 0)
            if on:
                for name in node.output:
                    if name:
                        found[name] = found.get(name, 0) | on if name in bits else on
        return found

    def spread(self, name: str, stop: Collection[str] = ()) -> Spread:
        """What ``name`` is made of by elementwise operators, not looking behind the values ``stop``.

        Another shape of the same elements changes nothing.
        """
        result, seen, left = Spread(), {name}, [name]
        while left:
            value = left.pop()
            if value in stop:
                result.inputs.add(value)
                continue
            number = self.maker.get(value)
            if number is None:
                (result.inputs if value in self.inputs else result.constants).add(value)
                continue
            if is_op(self.nodes[number], ("Constant",)):
                result.constants.add(value)
                continue
            if not is_op(self.nodes[number], ELEMENTWISE | MOVES):
                result.leaves.add(value)
                result.beside.update(one for one in self.reads[number] if one in self.inputs)
                continue
            for one in self.reads[number]:
                if one not in seen:
                    seen.add(one)
                    left.append(one)
        return result

    def source(self, name: str) -> str:
        """The value that ``name`` is, but for its shape."""
        for _ in range(len(self.nodes)):
            node = self.node(name)
            if node is None or not node.input or not is_op(node, MOVES):
                return name
            name = node.input[0]
        return name

    def _sorted(self) -> list[int]:
        """The nodes, each after those it reads; what stands in a cycle is left out."""
        waits = [
            len({self.maker[name] for name in names if self.maker.get(name, number) != number})
            for number, names in enumerate(self.reads)
        ]
        ready = [number for number, count in enumerate(waits) if count == 0]
        order: list[int] = []
        for number in ready:  # grows while it is walked
            order.append(number)
            after = {
                user
                for name in self.nodes[number].output
                if name and self.maker[name] == number
                for user in self.users.get(name, ())
                if user != number
            }
            for user in sorted(after):
                waits[user] -= 1
                if waits[user] == 0:
                    ready.append(user)
        return order


def scalar(flow: Flow, name: str) -> float | None:
    """The value of a constant of one element, None where it is none or cannot be read."""
    tensor = flow.scope.initializers.get(name)
    if tensor is None and (node := flow.node(name)) is not None:
        for attribute in node.attribute:
            if attribute.name == "value_float":
                return float(attribute.f)
            if attribute.name == "value":
                tensor = attribute.t
    if tensor is None or any(dim != 1 for dim in tensor.dims) or uses_external_data(tensor):
        return None
    try:
        return float(numpy_helper.to_array(tensor).reshape(()))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        return None


def flow_of(subject: Subject) -> Flow:
    """The flow of the main graph, made once."""
    return subject.once(_flow)


def _flow(subject: Subject) -> Flow:
    return Flow(subject.main)


def _outer_names(node: NodeProto) -> list[str]:
    """Names that the subgraphs of a node read from outside."""
    graphs = subgraphs_of(node)
    read: list[str] = []
    own: set[str] = set()
    while graphs:
        graph = graphs.pop()
        own.update(one.name for one in (*graph.input, *graph.initializer))
        read += [value.name for value in graph.output]
        for inner in graph.node:
            read += inner.input
            own.update(inner.output)
            graphs += subgraphs_of(inner)
    return [name for name in read if name not in own]
