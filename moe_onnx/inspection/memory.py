"""How much memory the values between inputs and outputs take at their peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import GraphProto, NodeProto

from moe_onnx.inspection.cost import ONE_EACH, VIEWS
from moe_onnx.inspection.shapes import Bound
from moe_onnx.inspection.tensors import Tensor
from moe_onnx.validation.subject import subgraphs

_IN_PLACE = ONE_EACH | {"Softmax", "LogSoftmax", "Not", "Where"}


@dataclass(frozen=True)
class Peak:
    """Bytes, and at which node they are reached.

    Attributes:
        activations: The most that values between inputs and outputs take at once.
        node: The node that runs then.
        outputs: Bytes of the graph's outputs, gradients among them, which are kept to the end; not among
            ``activations``.
        inputs: Bytes of the graph's inputs, parameters among them.
    """

    activations: int
    node: str
    outputs: int
    inputs: int


def peak_of(bound: Bound) -> Peak:
    """The peak of a graph whose nodes run one after the other in the order they stand in.

    A value lives from the node that makes it to the last that reads it. ``Reshape`` and its like make
    none: they look at the memory of their input, which then lives as long as they do. An elementwise
    node writes over an input of the same bytes that nobody reads afterwards. Nothing is counted for what
    a node needs while it runs, for values inside of subgraphs and bodies, for what an allocator rounds up
    or keeps, and for values of unknown size. onnxruntime runs nodes in an order of its own, so that its
    peak is another, mostly one of the same size: README has measured figures beside this.
    """
    graph, tensors = bound.graph, bound.tensors
    owner = _owners(graph)
    last = _last_uses(graph, owner)
    kept = {owner.get(value.name, value.name) for value in graph.output}
    given = {value.name for value in graph.input} | bound.constants
    alive: dict[str, int] = {}
    now = most = 0
    where = ""
    for at, node in enumerate(graph.node):
        dying = [
            name
            for name in dict.fromkeys(owner.get(n, n) for n in node.input)
            if last.get(name) == at and name in alive
        ]
        made = [n for n in node.output if n and n not in owner and n not in kept and n not in given]
        for name in made:
            size = tensors[name].nbytes if name in tensors else 0
            taken = _overwritten(node, size, dying, alive)
            if taken is not None:
                now -= alive.pop(taken)
                dying.remove(taken)
            alive[name] = size
            now += size
        if now > most:
            most, where = now, node.name or next(iter(node.output), "")
        for name in (*dying, *(n for n in made if n not in last)):
            now -= alive.pop(name)
    return Peak(most, where, _total(graph.output, tensors), _total(graph.input, tensors))


def _overwritten(node: NodeProto, size: int, dying: list[str], alive: Mapping[str, int]) -> str | None:
    if node.op_type not in _IN_PLACE or node.domain:
        return None
    return next((name for name in dying if alive[name] == size), None)


def _owners(graph: GraphProto) -> dict[str, str]:
    """Whose memory a view looks at."""
    owner: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in VIEWS and not node.domain and node.input:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
    return owner


def _last_uses(graph: GraphProto, owner: Mapping[str, str]) -> dict[str, int]:
    last: dict[str, int] = {}
    for at, node in enumerate(graph.node):
        for name in _reads(node):
            last[owner.get(name, name)] = at
    return last


def _reads(node: NodeProto) -> list[str]:
    """Inputs, and what subgraphs take from outside."""
    names = list(node.input)
    waiting = [graph for _, graph in subgraphs(node)]
    while waiting:
        graph = waiting.pop()
        for inner in graph.node:
            names += inner.input
            waiting += [one for _, one in subgraphs(inner)]
    return names


def _total(values: object, tensors: Mapping[str, Tensor]) -> int:
    names = Counter(value.name for value in values)  # type: ignore[attr-defined]
    return sum(tensors[name].nbytes for name in names if name in tensors)
