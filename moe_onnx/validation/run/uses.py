"""What a model does with its inputs: which values are legal ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto

from moe_onnx.validation.subject import Scope, Subject, normal_domain

Place = tuple[tuple[str, str], str]  # function, or ("", ""), and the value's name

# Operators that hand on the values of an input: which inputs.
MOVERS: dict[str, tuple[int, ...]] = {
    "Identity": (0,),
    "Cast": (0,),
    "CastLike": (0,),
    "Reshape": (0,),
    "Squeeze": (0,),
    "Unsqueeze": (0,),
    "Flatten": (0,),
    "Transpose": (0,),
    "Expand": (0,),
    "Tile": (0,),
    "Slice": (0,),
    "Split": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Where": (1, 2),
    "Concat": tuple(range(64)),
}


@dataclass(frozen=True)
class Use:
    """An input of a node."""

    scope: Scope
    node: NodeProto
    index: int

    @property
    def op(self) -> str:
        """The operator's name if it is ONNX's own, else ``domain.name``."""
        domain = normal_domain(self.node.domain)
        return f"{domain}.{self.node.op_type}" if domain else self.node.op_type

    @property
    def moves(self) -> bool:
        """Whether the node hands the values on as they are."""
        return self.index in MOVERS.get(self.op, ())

    def attribute(self, name: str, default: int) -> int:
        """An integer attribute of the node."""
        return next((a.i for a in self.node.attribute if a.name == name), default)


class Uses:
    """Where the values of a model are used, also in subgraphs and, through calls, in functions."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._direct: dict[Place, list[Use]] = defaultdict(list)
        for scope, node in subject.nodes():
            function = _key(scope)
            for index, name in enumerate(node.input):
                if name:
                    self._direct[function, name].append(Use(scope, node, index))

    def of(self, name: str) -> Iterator[Use]:
        """Uses of a value of the main graph, and of what hands it on unchanged (such uses included)."""
        seen: set[Place] = set()
        todo: list[Place] = [(("", ""), name)]
        while todo:
            place = todo.pop(0)
            if place in seen:
                continue
            seen.add(place)
            for use in self._direct.get(place, ()):
                function = self._subject.functions.get((normal_domain(use.node.domain), use.node.op_type))
                # Our own bodies are known by their operators.
                if function is not None and normal_domain(function.domain) != "ascend.moe":
                    if use.index < len(function.input):
                        inside = (normal_domain(function.domain), function.name)
                        todo.append((inside, function.input[use.index]))
                    continue
                yield use
                if use.moves:
                    todo += [(place[0], output) for output in use.node.output if output]


def _key(scope: Scope) -> tuple[str, str]:
    function = scope.function
    return ("", "") if function is None else (normal_domain(function.domain), function.name)
