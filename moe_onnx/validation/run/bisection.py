"""Which node goes wrong first: narrowed down by looking at intermediate values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onnx import NodeProto

from moe_onnx.validation.run.limits import TooLong
from moe_onnx.validation.run.sessions import ERRORS
from moe_onnx.validation.subject import Subject, subgraphs

Bad = Callable[[Sequence[str]], set[str]]

_AT_ONCE = 48  # values looked at in one run
_ROUNDS = 24


def first_bad_node(
    subject: Subject, outputs: Iterable[str], bad: Bad, *, always: bool = True
) -> NodeProto | None:
    """The first node of the main graph that makes a bad value out of good ones.

    Args:
        subject: The model.
        outputs: Values that are bad.
        bad: Runs the model with these values as outputs and tells which of them are bad.
        always: Whether a bad value is bad in every run.

    Returns:
        The node, or None where it could not be found: no value is bad when looked at (what is wrong came
        of fusing nodes), or the model does not run with such outputs.
    """
    target = next((name for name in outputs if name in subject.main.producers), None)
    good: set[str] = set()
    for _ in range(_ROUNDS):
        if target is None:
            return None
        order = _cone(subject, target, good)
        values = [name for node in order[:-1] for name in node.output if name and name not in good]
        if not values:
            return subject.main.producers[target]
        step = max(1, -(-len(values) // _AT_ONCE))
        picked = values[::step]
        try:
            found = bad([*picked, target])
        except TooLong:
            return None
        except ERRORS:
            return None
        if always and target not in found:
            return None
        good.update(set(picked) - found)
        target = next((name for name in picked if name in found), target)
    return None


def _cone(subject: Subject, target: str, good: set[str]) -> list[NodeProto]:
    """The nodes that ``target`` comes from through values not known to be good, inputs first."""
    producers = subject.main.producers
    order: list[NodeProto] = []
    seen: set[int] = set()
    stack: list[tuple[NodeProto, bool]] = [(producers[target], False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.append((node, True))
        for name in reads(node):
            if name in producers and name not in good:
                stack.append((producers[name], False))
    return order


def reads(node: NodeProto) -> list[str]:
    """The values that a node reads, those that its subgraphs read from outside included."""
    names = [name for name in node.input if name]
    for _, graph in subgraphs(node):
        inside = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            names += [name for name in reads(inner) if name not in inside]
            inside.update(inner.output)
    return names
