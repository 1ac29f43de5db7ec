"""A Loop over experts: one turn for each, or for each that anybody has chosen, weights cut from stacks.

Its body is one lane, see :mod:`moe_onnx.rewrite.fuse.lanes`: as in unrolled loops, or as in sums over all
experts; the expert is the number of the turn, or a counter, or what a NonZero of used experts says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import keeps_number
from moe_onnx.rewrite.fuse.dense import term_of
from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, detach, ints, is_op, producer, prune, put, rank
from moe_onnx.rewrite.fuse.layer import Layer, Weighted, build, check_tokens, told, weighted
from moe_onnx.rewrite.fuse.meaning import Choice
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.shapes import is_filled, number
from moe_onnx.rewrite.fuse.steps import Step, step_of
from moe_onnx.rewrite.fuse.unrolled import is_of, tokens_of
from moe_onnx.rewrite.fuse.views import scalar_of

IsStart = Callable[[int, ir.Value], bool]


@dataclass
class Turns:
    """A Loop, its body, and the one sum that it carries."""

    loop: ir.Node
    body: ir.Graph
    turn: ir.Value
    choice: Choice


def loops(graph: ir.Graph, reader: Reader) -> list[ir.Node]:
    """Loops in whose bodies something is of the expert of the turn."""
    found = []
    for node in graph:
        if is_op(node, "Loop") and not node.attributes["body"].is_ref() and _turn(node, reader) is not None:
            found.append(node)
    return found


def _turn(loop: ir.Node, reader: Reader) -> tuple[ir.Value, Choice] | None:
    """The expert of a turn, and the choice that it is looked for in."""
    for node in loop.attributes["body"].as_graph():
        for value in node.outputs:
            found = reader.meaning(value, "hot", "gate", "turn")
            if found is not None and found.what == "turn" and found.of is not None:
                return found.of, found.choice
            if found is not None and isinstance(found.expert, ir.Value):
                return found.expert, found.choice
    return None


def rewrite(graph: ir.Graph, loop: ir.Node, reader: Reader, names: set[str]) -> str:
    """Put ``ascend.moe`` nodes for a Loop; what was done, in words.

    Raises:
        NotThis: With the first condition that does not hold; the graph is as it was.
    """
    with Inserter(loop, names) as e:
        return _rewrite(graph, loop, reader, e)


def _rewrite(graph: ir.Graph, loop: ir.Node, reader: Reader, e: Inserter) -> str:
    found = _turn(loop, reader)
    assert found is not None
    turns = Turns(loop, loop.attributes["body"].as_graph(), *found)
    if turns.choice.experts is None:
        raise NotThis(loop, f"how many experts {turns.choice} choose from is not known")
    counter = _check_turns(turns, reader)
    place = _carried(turns, counter)
    before, after = loop.inputs[2 + place], turns.body.outputs[1 + place]
    inner = turns.body.inputs[2 + place]
    assert before is not None
    end, tokens, is_start, walked = _end(turns, reader, inner, after)
    for value in (turns.choice.ids, tokens, end.source.value):
        maker = value.producer()
        if maker is not None and maker.graph is turns.body:
            raise NotThis(maker, f"makes '{value.name}' in the Loop, where all turns need it before")
    check_tokens(tokens, turns.choice, loop)
    layer = Layer(turns.choice, turns.choice.experts, tokens, [turns.turn], [end], is_start, turns.body)
    y, lanes = build(e, reader, layer, end.node)
    lanes.check_unread(walked | {end.node})
    _check_rest(turns, walked | lanes.old | {end.node}, inner)
    out = loop.outputs[place]
    if out.dtype is not None and end.rows.dtype is not None and out.dtype != end.rows.dtype:
        y = e.op("Cast", y, to=int(out.dtype))
    if rank(before) != 2 or not same_rows(before, turns.choice.ids):
        raise NotThis(loop, f"'{before.name}' is not known to have a row for each token")
    if not is_filled(before, 0):
        y = e.op("Add", before, y, name="sum")
    put(graph, e, loop, [(out, y)], [])
    outer = [value.producer() for value in (*loop.inputs, *detach(turns.body)) if value is not None]
    prune([loop, *(node for node in outer if node is not None)])
    reader.moved(out, y)
    return told(layer, lanes, "Loop")


def _check_turns(turns: Turns, reader: Reader) -> int | None:
    """Every expert has one turn; the place of the counter among what is carried, if that counts.

    Raises:
        NotThis: If that is not known.
    """
    loop, body, count = turns.loop, turns.body, turns.choice.experts
    many, go_on = loop.inputs[0], loop.inputs[1]
    stop = body.outputs[0]
    if go_on is not None and not is_filled(go_on, 1):
        raise NotThis(loop, "may have no turn at all: its condition is no constant")
    same = producer(stop, "Identity")
    always = is_filled(stop, 1) or body.inputs[1] in (stop, None if same is None else same.inputs[0])
    if turns.turn is body.inputs[0]:
        if not always:
            raise NotThis(loop, "may stop before the last expert")
        if number(many) != count:
            raise NotThis(loop, f"has {number(many) or 'an unknown number of'} turns for {count} experts")
        return None
    if turns.turn in body.inputs[2:]:
        place = body.inputs.index(turns.turn) - 2
        return _check_counter(turns, place, many, always)
    hit = reader.meaning(turns.turn, "turn")
    if hit is None or hit.walk is None or hit.walk.order != "hit" or not always:
        raise NotThis(loop, "its expert is not known to be another one in every turn")
    source = turns.turn.producer()
    while source is not None and reader.meaning(source.inputs[0], "turn") is not None:
        inner = source.inputs[0]
        source = None if inner is None else inner.producer()
    rows = None if source is None else reader.meaning(source.inputs[0], "at")
    if source is None or rows is None or rows.walk != hit.walk or _counted(many) is not source.inputs[0]:
        raise NotThis(loop, "has another number of turns than experts were chosen")
    if scalar_of(source.inputs[1]) is not body.inputs[0]:
        raise NotThis(loop, "takes its expert by something else than the turn")
    return None


def _counted(many: ir.Value | None) -> ir.Value | None:
    """The value whose first axis a number is the size of."""
    node = producer(many, "Gather", "Squeeze", "Shape", "Cast")
    while node is not None and node.op_type != "Shape":
        if node.op_type == "Gather" and ints(node.inputs[1]) != [0]:
            return None
        if node.op_type == "Cast" and not keeps_number(node):
            return None
        node = producer(node.inputs[0], "Gather", "Squeeze", "Shape", "Cast")
    return None if node is None else node.inputs[0]


def _check_counter(turns: Turns, place: int, many: ir.Value | None, always: bool) -> int:
    loop, body, count = turns.loop, turns.body, turns.choice.experts
    following, stop = body.outputs[1 + place], body.outputs[0]
    plus = producer(following, "Add")
    other = None if plus is None else next((v for v in plus.inputs if v is not turns.turn), None)
    if (
        number(loop.inputs[2 + place]) != 0
        or plus is None
        or turns.turn not in plus.inputs
        or number(other) != 1
    ):
        raise NotThis(loop, "its counter does not count from 0 by 1")
    less = producer(stop, "Less")
    ends = less is not None and less.inputs[0] is following and number(less.inputs[1]) == count
    if not (ends and many is None) and not (always and number(many) == count):
        raise NotThis(loop, f"does not stop behind the last of {count} experts")
    return place


def _carried(turns: Turns, counter: int | None) -> int:
    """The place of the sum among what is carried; nothing else may come out.

    Raises:
        NotThis: If there is more.
    """
    loop = turns.loop
    used = [i for i, out in enumerate(loop.outputs) if (out.uses() or out.is_graph_output()) and i != counter]
    carried = [i for i in range(len(loop.inputs) - 2) if i != counter]
    if counter is not None and (loop.outputs[counter].uses() or loop.outputs[counter].is_graph_output()):
        raise NotThis(loop, "its counter is read behind it")
    if len(carried) != 1 or used != carried:
        raise NotThis(loop, "carries, or gives, something beside one sum")
    return carried[0]


def _end(
    turns: Turns, reader: Reader, before: ir.Value, after: ir.Value
) -> tuple[Weighted, ir.Value, IsStart, set[ir.Node]]:
    """The rows of a turn and their weights, tokens, how rows start, and the nodes that add them."""
    plus = producer(after, "Add", "Identity", "ScatterND", "ScatterElements")
    while plus is not None and plus.op_type == "Identity":
        after = plus.inputs[0]  # type: ignore[assignment]
        plus = producer(after, "Add", "Identity", "ScatterND", "ScatterElements")
    step: Step | None = None
    for node in turns.body:
        one = step_of(reader, node)
        if one is not None and one.after is after:
            step = one
    if step is not None:
        if step.before is not before or step.into != "tokens" or step.walk.expert is not turns.turn:
            raise NotThis(
                step.scatter, "does not add the rows of the turn's expert to the sum of those before"
            )
        end = weighted(reader, step.updates, is_of(step.walk), step.scatter)
        tokens, walk = tokens_of(reader, [end], [step.walk], step.scatter), step.walk

        def is_row(lane: int, value: ir.Value) -> bool:
            found = reader.meaning(value, "pick")
            return found is not None and found.axes == ("N", "H") and (found.of, found.walk) == (tokens, walk)

        return end, tokens, is_row, _with_casts(step)
    for i in (0, 1) if plus is not None and plus.op_type == "Add" else ():
        assert plus is not None
        product = producer(plus.inputs[1 - i], "Mul")
        term = None if product is None or plus.inputs[i] is not before else term_of(reader, product)
        if term is not None and term[1] is turns.turn and term[2].choice == turns.choice:
            tokens = _outer_tokens(turns, term[0])
            return term[0], tokens, _is(tokens), {plus}
    raise NotThis(turns.loop, "a turn does not add weighted rows of its expert to the sum of those before")


def _is(tokens: ir.Value) -> IsStart:
    return lambda lane, value: value is tokens


def _with_casts(step: Step) -> set[ir.Node]:
    found, node = set(step.nodes), step.updates.producer()
    while is_op(node, "Cast", "Identity"):
        assert node is not None
        found.add(node)
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return found


def _outer_tokens(turns: Turns, end: Weighted) -> ir.Value:
    """The one matrix of as many rows as ids that a body reads from outside on its way to rows."""
    found: dict[ir.Value, None] = {}
    waiting, seen = [end.rows], set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is not None and node.graph is turns.body:
            waiting += [one for one in node.inputs if one is not None]
            continue
        outer = rank(value) == 2 and value.graph is not turns.body and not value.is_initializer()
        if outer and same_rows(value, turns.choice.ids):
            found[value] = None
    if len(found) != 1:
        raise NotThis(end.node, f"its expert is known to read {len(found)} matrices of tokens, not one")
    return next(iter(found))


def _check_rest(turns: Turns, known: set[ir.Node], inner: ir.Value) -> None:
    """The sum is read by nothing else in a turn.

    Raises:
        NotThis: If it is.
    """
    for use in inner.uses():
        if use.node not in known and not is_op(use.node, "Shape", "Slice"):
            raise NotThis(use.node, f"reads the sum '{inner.name}' of the experts before")
