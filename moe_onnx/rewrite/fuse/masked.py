"""Tokens permuted by a routing map, expert by expert, and their rows put back: as Megatron-Core does it.

token = NonZero(map transposed)               or masked_select: by expert, then by token
rows = x[token]                               -> MoeTokenPermuteWithRoutingMap
W[expert] @ rows                              -> MoeGroupedMatmul; everything else stays as it is
y[token] += rows                              -> MoeTokenUnpermuteWithRoutingMap, with weights
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, attribute, is_op, producer, put, rank, size
from moe_onnx.rewrite.fuse.layer import check_tokens
from moe_onnx.rewrite.fuse.meaning import Choice, Meaning, Walk
from moe_onnx.rewrite.fuse.products import product_of
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.row_counts import columns, same_rows
from moe_onnx.rewrite.fuse.rows import check_row_by_row
from moe_onnx.rewrite.fuse.shapes import is_filled
from moe_onnx.rewrite.fuse.steps import updates_of

_DEEP = 100


@dataclass
class Permuted:
    """Rows of tokens in the order of a map, and what is done by that order."""

    walk: Walk
    tokens: ir.Value
    rows: list[ir.Node] = field(default_factory=list)
    weights: list[ir.Value] = field(default_factory=list)  # of each row, [N]
    matrices: list[ir.Node] = field(default_factory=list)
    sums: list[ir.Node] = field(default_factory=list)


def permutations(graph: ir.Graph, reader: Reader) -> list[Permuted]:
    """All of a graph."""
    found: dict[tuple[Walk, ir.Value], Permuted] = {}
    by_walk: dict[Walk, Permuted] = {}
    for node in graph:
        if not is_op(node, "Gather", "GatherND", "ScatterND", "ScatterElements"):
            continue
        at, out = reader.meaning(node.inputs[1], "at"), reader.meaning(node.outputs[0], "pick")
        if at is None or at.walk is None or at.walk.expert is not None or at.walk.order != "experts":
            continue
        walk = at.walk
        if out is not None and out.of is not None and out.axes == ("N", "H"):
            one = found.setdefault((walk, out.of), Permuted(walk, out.of))
            one.rows.append(node)
            by_walk.setdefault(walk, one)  # what else is done by the order goes with the first tensor
            continue
        mine = by_walk.get(walk)
        if mine is None:
            continue
        if out is not None and out.source is not None and out.source.kind == "dense" and out.axes == ("N",):
            mine.weights.append(node.outputs[0])
        elif is_op(node, "Gather", "GatherND") and at.coords == ("E",) and rank(node.inputs[0]) == 3:
            mine.matrices.append(node)
        elif is_op(node, "ScatterND", "ScatterElements") and at.coords == ("T",):
            mine.sums.append(node)
    return list(found.values())


def unproved(graph: ir.Graph, reader: Reader) -> list[NotThis]:
    """Maps that tokens are permuted by, of which nothing tells how many experts they select."""
    found = []
    for node in graph:
        turned = producer(node.inputs[0], "Transpose") if is_op(node, "NonZero") else None
        if turned is None or turned.inputs[0] is None or reader.read(turned.inputs[0]) is not None:
            continue
        chosen = turned.inputs[0]
        if rank(chosen) == 2 and chosen.dtype == ir.DataType.BOOL:
            why = f"map '{chosen.name}' is of no TopK: it may select more experts for one token than another"
            found.append(NotThis(node, why))
    return found


def rewrite(graph: ir.Graph, one: Permuted, reader: Reader, names: set[str]) -> str:
    """Put ``ascend.moe`` nodes for permuted tokens; what was done, in words.

    Raises:
        NotThis: With the first condition that does not hold; the graph is as it was.
    """
    with Inserter(one.rows[0], names) as e:
        return _rewrite(graph, one, reader, e)


def _rewrite(graph: ir.Graph, one: Permuted, reader: Reader, e: Inserter) -> str:
    first, choice = one.rows[0], one.walk.choice
    tokens = reader.now(one.tokens)
    check_tokens(tokens, choice, first)
    if choice.experts is None:
        raise NotThis(first, f"how many experts {choice} choose from is not known")
    sources = {meaning.source for out in one.weights if (meaning := reader.meaning(out, "pick")) is not None}
    source = next(iter(sources)) if len(sources) == 1 else None
    gate = None if source is None else reader.now(source.value)
    if gate is not None and gate.dtype != tokens.dtype:
        gate = None
    if gate is not None:
        _check_gate(gate, choice, first)
    chosen = _map(e, choice.ids, choice.experts)
    rows, weights, index = e.ops(
        "MoeTokenPermuteWithRoutingMap",
        tokens,
        chosen,
        gate or _absent(e, tokens),
        outputs=3,
        name="permute",
        num_out_tokens=0,
        drop_and_pad=0,
    )
    instead = [(node.outputs[0], rows) for node in one.rows]
    if gate is not None:
        instead += [(out, weights) for out in one.weights]
    gone = [old.producer() for old, _ in instead]
    done = ["MoeTokenPermuteWithRoutingMap"]
    counts: ir.Value | None = None
    for gather in one.matrices:
        product = product_of(gather)
        if size(product.weight, 0) != choice.experts:
            raise NotThis(gather, f"weights '{product.weight.name}' are not of {choice.experts} experts")
        if counts is None:
            as_integers = e.op("Cast", chosen, to=int(ir.DataType.INT32))
            counts = e.op("ReduceSum", as_integers, e.constant([0]), keepdims=0)
        given = product.rows
        if given in [old for old, _ in instead]:
            given = rows
        elif not _is_of_rows(reader, one.walk, given, gather.inputs[1], dict(instead)):
            raise NotThis(
                gather, f"rows '{given.name}' are not known to be as many as it looks up weights for"
            )
        y = e.product(given, product.weight, counts, product.transposed)
        instead.append((product.squeeze.outputs[0], y))
        gone.append(product.squeeze)
        done.append("MoeGroupedMatmul")
    for node in one.sums:
        y, out = _sum(e, reader, one, node, (rows, index, chosen), dict(instead))
        instead.append((out, y))
        gone.append(node)
        done.append("MoeTokenUnpermuteWithRoutingMap")
    put(graph, e, first, instead, [node for node in gone if node is not None])
    for old, new in instead:
        reader.moved(old, new)
    return f"tokens permuted by a map of {choice.experts} experts, {choice.top_k} a token: {', '.join(done)}"


def _check_gate(gate: ir.Value, choice: Choice, at: ir.Node) -> None:
    if columns(gate) != choice.experts or not same_rows(gate, choice.ids):
        raise NotThis(at, f"weights '{gate.name}' are not known to be [T, {choice.experts}], as {choice} are")


def _is_of_rows(
    reader: Reader, walk: Walk, value: ir.Value, index: ir.Value | None, known: dict[ir.Value, ir.Value]
) -> bool:
    """Whether a value has a row for each place of an index: by its size, or by how it is made."""
    seen: dict[ir.Value, bool] = {}

    def made(one: ir.Value | None, depth: int) -> bool:
        if one is None or depth > _DEEP:
            return False
        if one not in seen:
            seen[one] = make(one, depth)
        return seen[one]

    def make(one: ir.Value, depth: int) -> bool:
        pick, node = reader.meaning(one, "pick"), one.producer()
        if one in known or same_rows(one, index):
            return True
        if pick is not None and pick.walk == walk and pick.axes[0] == "N":
            return True
        if is_op(node, "Gather") and node is not None and attribute(node, "axis", 0) == 0:
            at = reader.meaning(node.inputs[1], "at")
            return at is not None and at.walk == walk and at.axes == ("N",)
        if node is None or rank(one) != 2:
            return False
        given = {v for v in node.inputs if v is not None and made(v, depth + 1)}
        try:
            check_row_by_row(node, given)
        except NotThis:
            return False
        return bool(given)

    return made(value, 0)


def _map(e: Inserter, ids: ir.Value, experts: int) -> ir.Value:
    shape = e.op("Concat", e.op("Shape", ids, start=0, end=1), e.constant([experts]), axis=0)
    nowhere = e.op("Expand", e.constant(False, np.bool_), shape)
    here = e.op("Expand", e.constant(True, np.bool_), e.op("Shape", ids))
    return e.op("ScatterElements", nowhere, ids, here, name="routing_map", axis=1)


def _sum(
    e: Inserter, reader: Reader, one: Permuted, node: ir.Node, made: tuple[ir.Value, ir.Value, ir.Value],
    instead: dict[ir.Value, ir.Value],
) -> tuple[ir.Value, ir.Value]:  # fmt: skip
    """Rows added to the tokens that they are of, by their weights if they have some."""
    at, updates, before = reader.meaning(node.inputs[1], "at"), node.inputs[2], node.inputs[0]
    assert at is not None and updates is not None and before is not None
    if attribute(node, "reduction", "none") != "add":
        raise NotThis(node, f"puts rows over each other: a token has {one.walk.choice.top_k} of them")
    updates, _ = updates_of(reader, node, at, updates)
    if rank(before) != 2 or not same_rows(before, one.walk.choice.ids):
        raise NotThis(node, f"'{before.name}' is not known to have a row for each token")
    if rank(updates) != 2:
        raise NotThis(node, f"rows '{updates.name}' are not known to be a matrix")
    _, index, chosen = made
    product, gate = producer(updates, "Mul"), None
    for i in (0, 1) if product is not None else ():
        assert product is not None
        found, inner = reader.meaning(product.inputs[1 - i], "pick"), product.inputs[i]
        if inner is not None and _is_weight(found, one.walk, inner):
            assert found is not None and found.source is not None
            updates, gate = inner, reader.now(found.source.value)
            _check_gate(gate, one.walk.choice, node)
            break
    if updates not in instead and not _is_of_rows(reader, one.walk, updates, node.inputs[1], instead):
        raise NotThis(node, f"rows '{updates.name}' are not known to be as many as their tokens")
    updates = instead.get(updates, updates)
    y = e.ops(
        "MoeTokenUnpermuteWithRoutingMap",
        updates,
        index,
        chosen,
        gate or _absent(e, updates),
        outputs=4,
        name="unpermute",
        drop_and_pad=0,
    )[0]
    if not is_filled(before, 0):
        y = e.op("Add", before, y, name="sum")
    return y, node.outputs[0]


def _is_weight(found: Meaning | None, walk: Walk, rows: ir.Value) -> bool:
    """Whether something is the weights of all rows by ``[T, E]``, in their dtype."""
    if found is None or found.source is None or found.source.kind != "dense" or found.cast is not None:
        return False
    return found.axes == ("N", "1") and found.walk == walk and found.source.value.dtype == rows.dtype


def _absent(e: Inserter, like: ir.Value) -> ir.Value:
    """Weights that are not there: bodies of functions want a typed input."""
    if like.dtype is None:
        return e.op("CastLike", e.constant(np.zeros((0, 0)), np.float32), like, name="no_weights")
    return e.constant(np.zeros((0, 0)), like.dtype.numpy())
