"""Weights of experts, each for itself or cut from a stack: as one stack."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import (
    Inserter,
    NotThis,
    attribute,
    fixed,
    ints,
    is_called,
    is_op,
    producer,
    rank,
    reads,
    size,
)
from moe_onnx.rewrite.fuse.meaning import Expert
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.reading_gates import expert_at
from moe_onnx.rewrite.fuse.shapes import dims, folded

Values = tuple[ir.Value, ...]


class Params:
    """The weights of lanes, whose experts are ``experts``: numbers, or the one turn of a Loop in ``body``."""

    def __init__(
        self, e: Inserter, reader: Reader, experts: Sequence[Expert], count: int, body: ir.Graph | None = None
    ) -> None:
        self.e, self.reader, self.experts, self.count, self.body = e, reader, experts, count, body
        self._stacks: dict[Values, ir.Value] = {}
        self._outside: dict[ir.Value, ir.Value] = {}

    def shared(self, values: Values) -> ir.Value | None:
        """The one value that all lanes read, where that is so."""
        first = values[0]
        if self.body is not None:
            return None if self._is_of_turn(first) else self.outside(first)
        if all(value is first for value in values):
            return first
        numbers = [_small(value) for value in values]
        return first if numbers[0] is not None and all(one == numbers[0] for one in numbers) else None

    def matrices(self, values: Values, turned: bool, at: ir.Node) -> tuple[ir.Value, bool]:
        """``[E, in, out]``, or ``[E, out, in]`` and True, of a matrix of each lane."""
        plain = []
        for value in values:
            node = producer(value, "Transpose")
            swap = node is not None and list(attribute(node, "perm", None) or [1, 0]) == [1, 0]
            plain.append(node.inputs[0] if swap and node is not None else None)
        if all(value is not None for value in plain):
            values, turned = tuple(value for value in plain if value is not None), not turned
        if any(rank(value) != 2 for value in values):
            raise NotThis(at, f"'{values[0].name}' is not known to be a matrix")
        return self.stacked(values, at), turned

    def stacked(self, values: Values, at: ir.Node) -> ir.Value:
        """What the lanes read, one behind the other, in the order of experts."""
        if values not in self._stacks:
            self._stacks[values] = self._stack(values, at)
        return self._stacks[values]

    def _stack(self, values: Values, at: ir.Node) -> ir.Value:
        cuts = [self.cut(value) for value in values]
        found = [cut for cut in cuts if cut is not None]
        if len(found) == len(cuts) and all(cut[0] is found[0][0] for cut in found):
            stack, order = self.outside(found[0][0]), [cut[1] for cut in found]
            if self.body is None and order != list(range(self.count)):
                picked = self.e.constant(order)
                return self.e.op("Gather", stack, picked, name="experts", axis=0)
            have = size(stack, 0)
            if have is None or have < self.count:
                raise NotThis(at, f"'{stack.name}' is not known to be of {self.count} experts")
            if have > self.count:
                ends = [self.e.constant([n]) for n in (0, self.count, 0)]
                return self.e.op("Slice", stack, *ends, name="experts")
            return stack
        if self.body is not None:
            raise NotThis(at, f"'{values[0].name}' depends on the turn, and is not the part of a stack")
        shapes = {tuple(dims(value) or ["?"]) for value in values}
        if len(shapes) != 1 or not all(isinstance(n, int) for n in next(iter(shapes))):
            raise NotThis(
                at, f"weights of experts are not known to be of one shape: {sorted(map(str, shapes))}"
            )
        if len({value.dtype for value in values}) != 1:
            raise NotThis(at, "weights of experts are of different dtypes")
        axis = self.e.constant([0])
        single = [self.e.op("Unsqueeze", value, axis, name="expert") for value in values]
        return self.e.op("Concat", *single, name="experts", axis=0)

    def cut(self, value: ir.Value) -> tuple[ir.Value, Expert] | None:
        """A stack and the expert whose part a value is."""
        node = producer(value, "Gather", "Squeeze", "Reshape")
        if node is None:
            return None
        if node.op_type == "Gather":
            expert = self._expert(node) if rank(node.inputs[1]) == 0 else None
            return None if expert is None or node.inputs[0] is None else (node.inputs[0], expert)
        if node.op_type == "Squeeze" and ints(reads(node, 1)) != [0]:
            return None
        if node.op_type == "Reshape" and (rank(value) or 0) + 1 != rank(node.inputs[0]):
            return None
        inner = producer(node.inputs[0], "Gather", "Slice", "Split")
        if inner is None or inner.inputs[0] is None or size(node.inputs[0], 0) not in (1, None):
            return None
        if inner.op_type == "Gather":
            expert = self._expert(inner) if size(inner.inputs[1], 0) == 1 else None
        elif inner.op_type == "Split":
            many = size(inner.inputs[0], 0)
            plain = attribute(inner, "axis", 0) == 0 and many == len(inner.outputs)
            expert = inner.outputs.index(node.inputs[0]) if plain and node.inputs[0] is not None else None
        else:
            start, end, axes, steps = (folded(reads(inner, i)) for i in (1, 2, 3, 4))
            plain = start is not None and end is not None and len(start) == 1 and axes in ([0], None)
            expert = None
            if plain and start and end and start[0] is not None and steps in ([1], None):
                expert = start[0] if end[0] == start[0] + 1 and start[0] >= 0 else None
        return None if expert is None else (inner.inputs[0], expert)

    def _expert(self, node: ir.Node) -> Expert:
        """The expert that a Gather takes, if it is one number, or the turn."""
        if attribute(node, "axis", 0) != 0:
            return None
        expert = expert_at(self.reader, node.inputs[1])
        if self.body is not None:
            return expert if expert is self.experts[0] else None
        return expert if isinstance(expert, int) else None

    def _is_of_turn(self, value: ir.Value) -> bool:
        """Whether a value of a body is another one in another turn."""
        seen: set[ir.Value] = set()
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            node = one.producer()
            if node is None:
                if one.is_graph_input() and one.graph is self.body:
                    return True
            elif node.graph is self.body:
                if _has_graphs(node):
                    return True  # which may read anything
                waiting += [v for v in node.inputs if v is not None]
        return False

    def outside(self, value: ir.Value) -> ir.Value:
        """A value of a body that is the same in all turns, made before the Loop."""
        node = value.producer()
        if self.body is None or value in self._outside:
            return self._outside.get(value, value)
        if node is None:
            if value.graph is not self.body:
                return value
            if fixed(value) is None:
                raise NotThis(next(iter(self.body)), f"'{value.name}' is known in the Loop only")
            made = self.e.op("Constant", value=value.const_value)
        elif node.graph is not self.body:
            return value
        elif _has_graphs(node) or is_called(node):
            raise NotThis(node, f"makes '{value.name}' in the Loop by what cannot be put before it")
        else:
            given = [None if one is None else self.outside(one) for one in node.inputs]
            made = self.e.like(node, given)[value.index() or 0]
        made.shape, made.type = value.shape, value.type
        self._outside[value] = made
        return made


def _has_graphs(node: ir.Node) -> bool:
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attr.type in kinds for attr in node.attributes.values())


def _small(value: ir.Value) -> tuple[object, ...] | None:
    """The elements of a small constant."""
    tensor = fixed(value)
    node = producer(value, "Constant")
    if node is not None and "value" in node.attributes and not node.attributes["value"].is_ref():
        tensor = node.attributes["value"].as_tensor()
    if tensor is None or tensor.size > 64 or is_op(node, "Identity"):
        return None
    if value.is_initializer() and tensor.dtype.is_floating_point():
        return None  # may be weights, which are equal by chance
    return (tensor.dtype, tuple(tensor.shape), *tensor.numpy().reshape(-1).tolist())
