"""Experts one after the other, each for the tokens that a NonZero finds, as exported loops are.

    where = NonZero(ids == e)                     tokens of expert e, and which of their choices it is
    rows = x[tokens]                              whatever the expert does to them
    y[tokens] += weights[tokens, choices] * rows

As ScatterND or ScatterElements that add, or put what was gathered and added before; or all rows are put
into ``[T*K, H]``, and summed with their weights behind the last expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from moe_onnx.rewrite.fuse.block import Block
from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, is_op, put, rank
from moe_onnx.rewrite.fuse.layer import Layer, Weighted, build, check_experts, check_tokens, told, weighted
from moe_onnx.rewrite.fuse.meaning import Lost, Meaning, Source, Walk
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.shapes import is_filled
from moe_onnx.rewrite.fuse.steps import Step, step_of
from moe_onnx.rewrite.fuse.walk import finish


@dataclass
class Chain:
    """The steps of one layer, in their order."""

    steps: list[Step]

    @property
    def last(self) -> ir.Node:
        """The node behind which all experts are done."""
        node = self.steps[-1].after.producer()
        assert node is not None
        return node


def chains(graph: ir.Graph, reader: Reader) -> tuple[list[Chain], list[NotThis]]:
    """All of a graph, and what is almost a step of one."""
    by_after: dict[ir.Value, Step] = {}
    misses: dict[ir.Node, NotThis] = {}
    for node in graph:
        try:
            step = step_of(reader, node)
        except NotThis as why:
            misses.setdefault(why.node, why)
            continue
        if step is not None and isinstance(step.walk.expert, int):
            by_after[step.after] = step
        elif step is None and is_op(node, "ScatterND", "ScatterElements"):
            lost = reader.read(node.inputs[1])
            if isinstance(lost, Lost) and lost.found:
                misses.setdefault(lost.node, NotThis(lost.node, lost.reason))
    befores = {step.before for step in by_after.values()}
    found = []
    for after, step in by_after.items():
        if after in befores:
            continue
        steps = [step]
        while (previous := by_after.get(steps[-1].before)) is not None:
            steps.append(previous)
        found.append(Chain(steps[::-1]))
    return found, list(misses.values())


def rewrite(graph: ir.Graph, chain: Chain, reader: Reader, names: set[str]) -> str:
    """Put ``ascend.moe`` nodes for a chain; what was done, in words.

    Raises:
        NotThis: With the first condition that does not hold; the graph is as it was.
    """
    with Inserter(chain.last, names) as e:
        return _rewrite(graph, chain, reader, e)


def _rewrite(graph: ir.Graph, chain: Chain, reader: Reader, e: Inserter) -> str:
    steps = chain.steps
    choice, into = steps[0].walk.choice, steps[0].into
    for step in steps:
        if step.walk.choice != choice:
            raise NotThis(step.scatter, "sums rows of one layer and of another")
        if step.into != into:
            raise NotThis(step.scatter, "puts rows where another expert adds them")
    count = check_experts([step.walk.expert for step in steps], choice, [step.scatter for step in steps])
    _check_between(steps)
    ordered = sorted(steps, key=lambda step: int(step.walk.expert))  # type: ignore[arg-type]
    walks = [step.walk for step in ordered]
    if into in ("tokens", "covered"):
        ends = [weighted(reader, step.updates, is_of(step.walk), step.scatter) for step in ordered]
        out, gone = steps[-1].after, chain.last
    else:
        if into == "added pairs":
            raise NotThis(steps[0].scatter, "adds to pairs that are not known to be zeros")
        block = _summed(steps[-1], choice.top_k, reader)
        assert block.weights is not None and block.total is not None and block.end is not None
        source = Source("pairs", block.weights)
        ends = [Weighted(step.updates, source, None, block.end) for step in ordered]
        out, gone = block.total.outputs[0], block.total
    tokens = tokens_of(reader, ends, walks, steps[0].scatter)
    check_tokens(tokens, choice, steps[0].scatter)

    def is_start(lane: int, value: ir.Value) -> bool:
        found = reader.meaning(value, "pick")
        return (
            found is not None and found.axes == ("N", "H") and (found.of, found.walk) == (tokens, walks[lane])
        )

    layer = Layer(choice, count, tokens, list(range(count)), ends, is_start)
    y, lanes = build(e, reader, layer, steps[0].scatter)
    inner = {node for step in steps for node in step.nodes} | {end.node for end in ends}
    lanes.check_unread(inner | _casts(ends, steps))
    if into in ("tokens", "covered"):
        y = _behind(e, steps[0], y, out)
    put(graph, e, gone, [(out, y)], [gone])
    reader.moved(out, y)
    return told(layer, lanes, "loop")


def is_of(walk: Walk) -> Callable[[Meaning], bool]:
    """Whether something is a number for each row of a walk."""
    return lambda found: found.what == "pick" and found.walk == walk and found.axes == ("N", "1")


def tokens_of(reader: Reader, ends: list[Weighted], walks: list[Walk], at: ir.Node) -> ir.Value:
    """What the rows of the first expert are rows of.

    Raises:
        NotThis: If they are rows of no tokens that it has chosen.
    """
    seen: set[ir.Value] = set()
    waiting = [ends[0].rows]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        found = reader.meaning(value, "pick")
        if isinstance(found, Meaning) and found.of is not None and found.axes == ("N", "H"):
            if found.walk != walks[0]:
                raise NotThis(value.producer() or at, "reads tokens of another expert")
            return found.of
        node = value.producer()
        if node is not None:
            waiting += [one for one in node.inputs if one is not None]
    raise NotThis(at, f"its rows are made of no tokens of expert {walks[0].expert}")


def _check_between(steps: list[Step]) -> None:
    """What stands between steps is read by the next one alone.

    Raises:
        NotThis: If it is not.
    """
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        values = {step.after, step.scatter.outputs[0]} - ({step.after} if following is None else set())
        mine = step.nodes | (following.nodes if following is not None else set())
        for value in values:
            if value.is_graph_output():
                raise NotThis(step.scatter, f"'{value.name}', without the experts behind it, is an output")
            for use in value.uses():
                if use.node not in mine and not _only_sizes(use.node):
                    raise NotThis(use.node, f"reads '{value.name}', without the experts behind it")


def _only_sizes(node: ir.Node) -> bool:
    """Whether a node is read for its shape alone, or fills one."""
    if is_op(node, "Shape"):
        return True
    return is_op(node, "Slice") and all(is_op(use.node, "Shape") for use in node.outputs[0].uses())


def _casts(ends: list[Weighted], steps: list[Step]) -> set[ir.Node]:
    """Casts between weighted rows and their scatter."""
    found: set[ir.Node] = set()
    for step in steps:
        node = step.updates.producer()
        while is_op(node, "Cast", "Identity"):
            assert node is not None
            found.add(node)
            node = None if node.inputs[0] is None else node.inputs[0].producer()
    return found


def _summed(last: Step, top_k: int, reader: Reader) -> Block:
    """The weighted sum over K of rows in the order of pairs."""
    uses = {use.node for use in last.after.uses() if not is_op(use.node, "Shape")}
    if len(uses) != 1:
        raise NotThis(last.scatter, f"the rows of all pairs are read by {len(uses)} nodes, not by their sum")
    block = Block(last.after, last.walk.choice.ids, top_k, last.walk.choice.experts or 0, True)
    block.tokens = last.walk.choice.ids
    finish(block, last.after, next(iter(uses)))
    return block


def _behind(e: Inserter, first: Step, y: ir.Value, out: ir.Value) -> ir.Value:
    """The sum, added to what there was before the first expert, in its dtype."""
    before = first.before
    if out.dtype is not None and first.updates.dtype is not None and out.dtype != first.updates.dtype:
        y = e.op("Cast", y, to=int(out.dtype))
    if rank(before) != 2 or not same_rows(before, first.walk.choice.ids):
        raise NotThis(first.scatter, f"'{before.name}' is not known to have a row for each token")
    if first.into == "covered" or is_filled(before, 0):
        return y
    return e.op("Add", before, y, name="sum")
