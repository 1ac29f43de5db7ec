"""The routing operators of a training graph, and what the values that they read are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from onnx import NodeProto

from moe_onnx.validation.training.flow import MOVES, Flow
from moe_onnx.validation.training.nodes import is_op
from moe_onnx.validation.training.operators import OURS

INIT, PERMUTE = "MoeInitRoutingV2", "MoeTokenPermuteWithRoutingMap"
COMBINE, FINALIZE = "MoeTokenUnpermuteWithRoutingMap", "MoeFinalizeRoutingV2"
DISPATCHES, COMBINES = (INIT, PERMUTE), (COMBINE, FINALIZE)
GRADS = tuple(f"{name}Grad" for name in (*DISPATCHES, *COMBINES))
# Weights that a router reads its tokens with.
GATES = ("gate.weight", "gate.noise.weight")


@dataclass
class Origins:
    """What a value is made of, looking no further than routing operators and routers.

    Attributes:
        nodes: The routing operators, by their number.
        routers: Prefixes of the layers whose routers it comes from.
        inputs: Graph inputs.
    """

    nodes: set[int] = field(default_factory=set)
    routers: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)


@dataclass
class Layer:
    """Numbers of the nodes of one layer."""

    dispatch: int
    combine: int
    prefix: str | None  # of its parameters, None where that cannot be told


class Routes:
    """The routing operators of a graph and the ways between them."""

    def __init__(self, flow: Flow, parameters: Iterable[str]) -> None:
        self.flow = flow
        self.by_op: dict[str, list[int]] = {}
        for number in flow.order:
            node = flow.nodes[number]
            if node.domain in OURS:
                self.by_op.setdefault(node.op_type, []).append(number)
        self.stops = {n for name in (*DISPATCHES, *COMBINES, *GRADS) for n in self.of(name)}
        self.prefixes: dict[str, str] = {}
        for name in parameters:
            for gate in GATES:
                if name == gate or name.endswith(f".{gate}"):
                    self.prefixes[name] = name.removesuffix(gate)

    def of(self, *names: str) -> list[int]:
        """Nodes of these operators."""
        return [number for name in names for number in self.by_op.get(name, ())]

    def origins(self, name: str) -> Origins:
        """What a value is made of."""
        found, seen, left = Origins(), {name}, [name]
        while left:
            number = self.flow.maker.get(value := left.pop())
            if number is None:
                if value in self.flow.inputs:
                    found.inputs.add(value)
            elif number in self.stops:
                found.nodes.add(number)
            elif is_op(node := self.flow.nodes[number], ("Shape", "Size")):
                continue
            elif (router := self._router(node)) is not None:
                found.routers.add(router)
            else:
                new = [one for one in self.flow.reads[number] if one not in seen]
                seen.update(new)
                left += new
        return found

    def router_inputs(self, prefix: str) -> set[str]:
        """What the nodes that read a router's weight read besides."""
        gate = prefix + GATES[0]
        found: set[str] = set()
        seen, left = {gate}, [gate]
        while left:
            for number in self.flow.users.get(left.pop(), ()):
                node = self.flow.nodes[number]
                if is_op(node, MOVES):
                    new = [one for one in node.output if one and one not in seen]
                    seen.update(new)
                    left += new
                else:
                    found.update(self.flow.source(one) for one in self.flow.reads[number])
        return found

    def _router(self, node: NodeProto) -> str | None:
        if is_op(node, MOVES):
            return None
        sources = [self.flow.source(name) for name in node.input if name]
        return next((self.prefixes[name] for name in sources if name in self.prefixes), None)

    def place(self, number: int) -> str:
        """A node, for findings."""
        return self.flow.scope.place(self.flow.nodes[number])

    def places(self, numbers: Iterable[int]) -> str:
        """Nodes, for findings."""
        return " and ".join(self.place(number) for number in sorted(numbers)) or "no routing operator"
