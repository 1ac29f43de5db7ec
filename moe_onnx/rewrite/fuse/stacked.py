"""Experts of all tokens as batched products, ``[E, T, F]`` or ``[T, E, F]``: as rows of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import (
    Inserter,
    NotThis,
    attribute,
    ints,
    is_op,
    producer,
    rank,
    reads,
    size,
    terms,
)
from moe_onnx.rewrite.fuse.lanes import Rows
from moe_onnx.rewrite.fuse.layer import check_tokens, dispatched, weighted_sum
from moe_onnx.rewrite.fuse.meaning import Meaning
from moe_onnx.rewrite.fuse.products import plain
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.rows import ELEMENTWISE
from moe_onnx.rewrite.fuse.shapes import dims, folded

_DEEP = 150


@dataclass
class Stacked:
    """Rows in the order of experts for values whose experts are along ``axis``, tokens along the other."""

    e: Inserter
    tokens: ir.Value
    axis: int
    count: int
    new: Rows
    products: int = 0
    old: set[ir.Node] = field(default_factory=set)
    _made: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def merged(self, value: ir.Value, at: ir.Node, depth: int = 0) -> ir.Value:
        """The rows of a value.

        Raises:
            NotThis: If it is not known to be made of each expert's rows alone.
        """
        if value in self._made:
            return self._made[value]
        if spread(value, self.axis, self.count) is self.tokens:
            return self.new.rows
        node = value.producer()
        if node is None or depth > _DEEP:
            raise NotThis(at, f"reads '{value.name}', which is not made of the tokens '{self.tokens.name}'")
        if is_op(node, "MatMul", "Einsum"):
            outs: Sequence[ir.Value] = [self._product(node, depth)]
        else:
            outs = self._by_row(node, depth)
        self.old.add(node)
        self._made.update(zip(node.outputs, outs, strict=True))
        return self._made[value]

    def _product(self, node: ir.Node, depth: int) -> ir.Value:
        rows, weight, transposed = operands(node, self.axis)
        inner = self.new.rows if rows is self.tokens else self.merged(rows, node, depth + 1)
        if size(weight, 0) != self.count:
            raise NotThis(node, f"'{weight.name}' is not known to be of {self.count} experts")
        self.products += 1
        return self.e.product(inner, weight, self.new.counts, transposed)

    def _by_row(self, node: ir.Node, depth: int) -> Sequence[ir.Value]:
        first = node.inputs[0]
        if is_op(node, "Split", "Softmax", "LogSoftmax"):
            axis = attribute(node, "axis", -1 if node.op_type != "Split" else 0)
            if axis not in (2, -1) or first is None:
                raise NotThis(node, "works on another axis than the last, across rows")
            outs = self.e.like(node, [self.merged(first, node, depth + 1), *node.inputs[1:]])
            self.e.nodes[-1].attributes.add(ir.AttrInt64("axis", 1))
            return outs
        if is_op(node, "Slice"):
            numbers = [folded(reads(node, i)) for i in (1, 2, 3, 4)]
            if (
                first is None
                or numbers[2] not in ([2], [-1])
                or any(None in (part or [None]) for part in numbers[:2])
            ):
                raise NotThis(node, "slices another axis than the last")
            numbers[2] = [1]
            given = [self.e.constant(part) for part in numbers if part is not None]
            return self.e.like(node, [self.merged(first, node, depth + 1), *given])
        if not is_op(node, *ELEMENTWISE):
            raise NotThis(node, f"{node.op_type} is not known to work row by row")
        return self.e.like(node, [None if v is None else self._operand(v, node, depth) for v in node.inputs])

    def _operand(self, value: ir.Value, node: ir.Node, depth: int) -> ir.Value:
        """Rows, or what stands beside them: the same for all, or a vector of each expert."""
        sizes = dims(value)
        if sizes is None:
            raise NotThis(node, f"reads '{value.name}', whose shape is not known")
        if len(sizes) < 2:
            return value
        lead = ([1] * (3 - len(sizes)) + list(sizes))[:2]
        if lead == [1, 1]:
            return self.e.op("Reshape", value, self.e.constant([1, -1]), name="row")
        experts = [1, 1]
        experts[self.axis] = self.count
        if lead == experts and (value.is_initializer() or not same_rows(value, self.tokens)):
            flat = self.e.op("Reshape", value, self.e.constant([self.count, -1]), name="biases")
            return self.e.op("Gather", flat, self.new.expert_of_row(), name="bias", axis=0)
        return self.merged(value, node, depth + 1)


def spread(value: ir.Value | None, axis: int, count: int) -> ir.Value | None:
    """``x`` of ``x[None]`` or ``x[:, None]``, as it is or for each of ``count`` experts."""
    node = producer(value, "Expand", "Tile")
    if node is not None:
        times, repeats = folded(reads(node, 1)), [1, 1, 1]
        repeats[axis] = count
        width = size(node.inputs[0], 2)
        if times is None or len(times) != 3 or times[axis] != count or times[1 - axis] not in (1, None):
            return None
        if (node.op_type == "Tile" and times != repeats) or times[2] not in (1, width):
            return None
        value = node.inputs[0]
    lifted = producer(value, "Unsqueeze")
    if (
        lifted is None
        or rank(lifted.inputs[0]) != 2
        or [n % 3 for n in ints(reads(lifted, 1)) or []] != [axis]
    ):
        return None
    return lifted.inputs[0]


def operands(node: ir.Node, axis: int) -> tuple[ir.Value, ir.Value, bool]:
    """Rows, weights, and whether these are ``[E, out, in]``.

    Raises:
        NotThis: If a product is not of rows with the matrix of their expert.
    """
    left, right = node.inputs[0], node.inputs[1]
    assert left is not None and right is not None
    if is_op(node, "MatMul"):
        if axis != 0 or rank(right) != 3 or rank(left) not in (2, 3):
            raise NotThis(
                node, "is not known to multiply the rows of each expert, [E, T, in], with [E, in, out]"
            )
        weight, turned = plain(right)
        return left, weight, turned
    letters, out = terms(node) or ([], "")
    if len(node.inputs) == 2 and len(out) == 3:
        e, t, f = out[axis], out[1 - axis], out[2]
        for i in (0, 1):
            rows, weights = letters[i], letters[1 - i]
            inner = [letter for letter in rows if letter not in (e, t)]
            if len(inner) != 1 or rows not in (f"{t}{inner[0]}", _placed(e, t, inner[0], axis)):
                continue
            if weights in (f"{e}{inner[0]}{f}", f"{e}{f}{inner[0]}"):
                found, turned = plain(right if i == 0 else left)
                return (left, right)[i], found, turned != (weights[1] == f)
    raise NotThis(node, f"'{attribute(node, 'equation', '')}' is no product of each expert's rows")


def _placed(e: str, t: str, inner: str, axis: int) -> str:
    return f"{e}{t}{inner}" if axis == 0 else f"{t}{e}{inner}"


def build_stacked(
    e: Inserter, reader: Reader, gate: Meaning, stack: ir.Value, axis: int, at: ir.Node
) -> tuple[ir.Value, str, set[ir.Node]]:
    """The weighted sum of a stack, what was done, and the nodes that it stands for.

    Raises:
        NotThis: With the first condition that does not hold.
    """
    choice, count = gate.choice, gate.choice.experts
    if count is None:
        raise NotThis(at, f"how many experts {choice} choose from is not known")
    tokens = _tokens(stack, axis, count, at)
    check_tokens(tokens, choice, at)
    assert gate.source is not None
    pairs, index, new = dispatched(e, reader, choice, count, tokens, gate.source)
    if not same_rows(pairs.weights, choice.ids):
        raise NotThis(at, f"weights '{pairs.weights.name}' are not known to be as many as {choice}")
    made = Stacked(e, tokens, axis, count, new)
    last = made.merged(stack, at)
    if not made.products:
        raise NotThis(at, "no expert has a product with weights of its own")
    y = weighted_sum(e, pairs, gate.source, gate.cast, stack.dtype, last, index, at)
    return (
        y,
        (
            f"sum over a stack of {count} experts, {choice.top_k} a token: {made.products} products are "
            "MoeGroupedMatmul, after MoeInitRoutingV2, before MoeTokenUnpermuteWithRoutingMap"
        ),
        made.old,
    )


def _tokens(stack: ir.Value, axis: int, count: int, at: ir.Node) -> ir.Value:
    """What the first product of a stack reads."""
    seen: set[ir.Value] = set()
    waiting = [stack]
    while waiting:
        value = waiting.pop(0)
        if value in seen:
            continue
        seen.add(value)
        found = spread(value, axis, count)
        if found is not None:
            return found
        node = value.producer()
        if node is None:
            continue
        if is_op(node, "MatMul", "Einsum"):
            rows, _, _ = operands(node, axis)
            if rank(rows) == 2:
                return rows
            waiting.append(rows)
        else:
            waiting += [one for one in node.inputs if one is not None and rank(one) == 3]
    raise NotThis(at, "its experts are not known to read one matrix of tokens")
