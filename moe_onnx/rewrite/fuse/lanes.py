"""One way from tokens to rows for each expert: all of them made one, for rows in the order of experts.

Lanes are walked from their ends to the tokens, all at once; their nodes must be of one kind at every step.
A Loop has a single lane, whose expert is the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, attribute, is_op, rank, reads
from moe_onnx.rewrite.fuse.params import Params
from moe_onnx.rewrite.fuse.rows import check_row_by_row, same_for_all_rows
from moe_onnx.rewrite.fuse.shapes import folded

_DEEP = 150
Values = tuple[ir.Value, ...]


@dataclass
class Rows:
    """What stands for the tokens of all lanes."""

    rows: ir.Value
    counts: ir.Value
    expert_of_row: Callable[[], ir.Value]


@dataclass
class Lanes:
    """Makes one way of several.

    Attributes:
        e: Where nodes are made.
        params: Weights of the lanes.
        is_start: Whether a value is the tokens of a lane, by the lane's number.
        new: What stands for those.
    """

    e: Inserter
    params: Params
    is_start: Callable[[int, ir.Value], bool]
    new: Rows
    products: int = 0
    old: set[ir.Node] = field(default_factory=set)
    _made: dict[Values, ir.Value] = field(default_factory=dict)
    _depends: dict[tuple[int, ir.Value], bool] = field(default_factory=dict)

    def merged(self, values: Values, at: ir.Node, depth: int = 0) -> ir.Value:
        """Rows of all lanes, for the rows that these are of each.

        Raises:
            NotThis: With the first condition that does not hold.
        """
        if values in self._made:
            return self._made[values]
        starts = [self.is_start(i, value) for i, value in enumerate(values)]
        if any(starts) and not all(starts):
            other = values[starts.index(False)]
            raise NotThis(
                other.producer() or at, f"'{other.name}' stands where another expert has its tokens"
            )
        if all(starts):
            self._made[values] = self.new.rows
            return self.new.rows
        nodes = [value.producer() for value in values]
        first = nodes[0]
        if first is None or depth > _DEEP:
            raise NotThis(at, f"reads '{values[0].name}', which is not made of the expert's tokens")
        for node, value in zip(nodes, values, strict=True):
            if node is None or not _alike(first, node) or value.index() != values[0].index():
                raise NotThis(
                    node or at,
                    f"stands where another expert has the {first.op_type} "
                    f"'{first.name or first.outputs[0].name}', and is not like it",
                )
        outs = self._node([node for node in nodes if node is not None], depth)
        for i, out in enumerate(outs):
            self._made[tuple(node.outputs[i] for node in nodes if node is not None)] = out
        self.old.update(node for node in nodes if node is not None)
        return self._made[values]

    def _node(self, nodes: list[ir.Node], depth: int) -> Sequence[ir.Value]:
        first = nodes[0]
        if is_op(first, "MatMul", "Gemm"):
            left = tuple(value for node in nodes if (value := node.inputs[0]) is not None)
            if self._all_depend(left, nodes):
                rows = self.merged(left, first, depth + 1)
                return [self._product(nodes, rows)]
            raise NotThis(first, "rows are not its first factor")
        check_row_by_row(first, {v for v in first.inputs if v is not None and self.depends(0, v)})
        given: list[ir.Value | None] = []
        for i, value in enumerate(first.inputs):
            row = [reads(node, i) for node in nodes]
            if value is None or None in row:
                if row.count(None) != len(row):
                    raise NotThis(first, f"has input {i} for some experts only")
                given.append(None)
                continue
            column = tuple(v for v in row if v is not None)
            numbers = [folded(v) for v in column] if i and is_op(first, "Slice", *_BY_NUMBERS) else [None]
            if None not in numbers:
                if any(one != numbers[0] for one in numbers) or None in (numbers[0] or ()):
                    raise NotThis(first, "works on other columns than it does for another expert")
                given.append(self.e.constant(numbers[0]))
            elif self._all_depend(column, nodes):
                given.append(self.merged(column, first, depth + 1))
            elif is_op(first, "PRelu", "Clip", *_BY_NUMBERS) and i:
                given.append(self._shared(column, first))
            else:
                given.append(self._beside(column, first))
        return self.e.like(first, given)

    def _product(self, nodes: list[ir.Node], rows: ir.Value) -> ir.Value:
        """Rows times the matrix of each expert, and its bias."""
        first = nodes[0]
        weights = tuple(value for node in nodes if (value := node.inputs[1]) is not None)
        if any(self.depends(i, value) for i, value in enumerate(weights)):
            raise NotThis(first, "multiplies rows with rows")
        is_gemm = is_op(first, "Gemm")
        if is_gemm and (attribute(first, "transA", 0) or attribute(first, "alpha", 1.0) != 1.0):
            raise NotThis(first, "a Gemm with transA or alpha")
        turned = bool(is_gemm and attribute(first, "transB", 0))
        shared = self.params.shared(weights)
        if shared is not None:
            if rank(weights[0]) != 2:  # a vector would make one number of each row: a vector of all rows
                raise NotThis(first, f"'{weights[0].name}' is not known to be a matrix")
            inputs = [rows, shared]
            if reads(first, 2) is not None:
                inputs.append(self._same(self._shared(_column(nodes, 2), first), first))
            return self.e.like(first, inputs)[0]
        weight, transposed = self.params.matrices(weights, turned, first)
        self.products += 1
        y = self.e.product(rows, weight, self.new.counts, transposed)
        if not is_gemm or reads(first, 2) is None:
            return y
        if attribute(first, "beta", 1.0) != 1.0:
            raise NotThis(first, "a Gemm with beta")
        return self.e.op("Add", y, self._beside(_column(nodes, 2), first), name="with_bias")

    def _beside(self, values: Values, at: ir.Node) -> ir.Value:
        """What an elementwise node reads beside rows: the same for all, or a vector of each expert."""
        shared = self.params.shared(values)
        if shared is not None:
            return self._same(shared, at)
        axes = {rank(value) for value in values}
        if len(axes) != 1 or not axes <= {0, 1}:
            raise NotThis(at, f"reads '{values[0].name}', which is no vector or number of each expert")
        stacked = self.params.stacked(values, at)
        if axes == {0}:
            stacked = self.e.op("Unsqueeze", stacked, self.e.constant([1]))
        return self.e.op("Gather", stacked, self.new.expert_of_row(), name="bias", axis=0)

    def _same(self, value: ir.Value, at: ir.Node) -> ir.Value:
        if not same_for_all_rows(value):
            raise NotThis(at, f"reads '{value.name}', which is not known to be the same for all rows")
        return value

    def _shared(self, values: Values, at: ir.Node) -> ir.Value:
        shared = self.params.shared(values)
        if shared is None:
            raise NotThis(at, f"reads '{values[0].name}', which is another one for other experts")
        return shared

    def _all_depend(self, values: Values, nodes: list[ir.Node]) -> bool:
        found = [self.depends(i, value) for i, value in enumerate(values)]
        if len(set(found)) > 1:
            lane = found.index(False)
            raise NotThis(
                nodes[lane], f"reads '{values[lane].name}', which is not made of its expert's tokens"
            )
        return found[0]

    def depends(self, lane: int, value: ir.Value) -> bool:
        """Whether a value is made of the tokens of a lane."""
        known = self._depends
        waiting = [value]
        while waiting:
            one = waiting[-1]
            if (lane, one) in known:
                waiting.pop()
                continue
            node = one.producer()
            if self.is_start(lane, one):
                known[lane, one] = True
            elif node is None or is_op(node, "Constant"):
                known[lane, one] = False
            else:
                inner = [v for v in node.inputs if v is not None]
                missing = [v for v in inner if (lane, v) not in known]
                if missing:
                    waiting += missing
                    continue
                known[lane, one] = any(known[lane, v] for v in inner)
            waiting.pop()
        return known[lane, value]

    def check_unread(self, ends: set[ir.Node]) -> None:
        """Nothing else may read what is between tokens and ends.

        Raises:
            NotThis: If something does.
        """
        for node in self.old:
            for out in node.outputs:
                if out.is_graph_output():
                    raise NotThis(node, f"rows '{out.name}' are an output of the graph")
                for use in out.uses():
                    if use.node not in self.old | ends and not is_op(use.node, "Shape"):
                        raise NotThis(use.node, f"reads rows '{out.name}' beside the layer")


_BY_NUMBERS = (
    "Slice", "Split", "Gather", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceSumSquare", "ReduceL2",
)  # fmt: skip


def _column(nodes: list[ir.Node], index: int) -> Values:
    found = tuple(value for node in nodes if (value := reads(node, index)) is not None)
    if len(found) != len(nodes):
        raise NotThis(nodes[0], f"has input {index} for some experts only")
    return found


def _alike(one: ir.Node, other: ir.Node) -> bool:
    if (one.domain, one.op_type, len(one.outputs)) != (other.domain, other.op_type, len(other.outputs)):
        return False
    if one.attributes.keys() != other.attributes.keys() or len(one.inputs) != len(other.inputs):
        return False
    return all(
        not attr.is_ref()
        and attr.type != ir.AttributeType.GRAPH
        and attr.value == other.attributes[key].value
        for key, attr in one.attributes.items()
    )
