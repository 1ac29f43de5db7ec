"""What all forms of a layer are made: dispatch, products by groups, weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import FLOATS, is_one_cast
from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, attribute, producer, rank
from moe_onnx.rewrite.fuse.lanes import Lanes, Rows
from moe_onnx.rewrite.fuse.meaning import Choice, Expert, Meaning, Source
from moe_onnx.rewrite.fuse.pairs import Pairs, combine, dispatch, expert_of_row
from moe_onnx.rewrite.fuse.params import Params
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.row_counts import columns, same_rows


@dataclass
class Weighted:
    """The rows of one expert, and their weights."""

    rows: ir.Value
    source: Source
    cast: int | None
    node: ir.Node


@dataclass
class Layer:
    """A layer that was found: its lanes, in the order of experts."""

    choice: Choice
    count: int
    tokens: ir.Value
    experts: Sequence[Expert]
    ends: list[Weighted]
    is_start: Callable[[int, ir.Value], bool]
    body: ir.Graph | None = None

    @property
    def source(self) -> Source:
        """Where all weights come from."""
        return self.ends[0].source


def check_experts(numbers: Sequence[Expert], choice: Choice, nodes: Sequence[ir.Node]) -> int:
    """The number of experts, each of which has one lane.

    Raises:
        NotThis: If one has none, or two.
    """
    seen: dict[object, ir.Node] = {}
    for number, node in zip(numbers, nodes, strict=True):
        if number in seen:
            raise NotThis(node, f"expert {number} comes a second time")
        seen[number] = node
    if choice.experts is None:
        raise NotThis(nodes[-1], f"how many experts {choice} choose from is not known")
    missing = [n for n in range(choice.experts) if n not in seen]
    if missing or len(seen) != choice.experts:
        which = ", ".join(map(str, missing[:4])) or "of higher numbers"
        raise NotThis(nodes[-1], f"{choice} choose from {choice.experts} experts: {which} are not computed")
    return choice.experts


def check_tokens(tokens: ir.Value, choice: Choice, at: ir.Node) -> None:
    """Tokens are a matrix with as many rows as there are choices.

    Raises:
        NotThis: If that is not known.
    """
    if rank(tokens) != 2:
        raise NotThis(at, f"tokens '{tokens.name}' are not known to be a matrix")
    if not same_rows(tokens, choice.ids):
        raise NotThis(at, f"tokens '{tokens.name}' are not known to be as many as those of {choice}")


def weighted(
    reader: Reader, value: ir.Value | None, is_weight: Callable[[Meaning], bool], at: ir.Node
) -> Weighted:
    """``rows * weight`` behind casts.

    Raises:
        NotThis: If rows have no weight of their own.
    """
    node = producer(value, "Mul", "Cast", "Identity")
    casts: list[ir.Node] = []
    last = None if value is None else value.dtype
    while node is not None and node.op_type != "Mul":
        if node.op_type == "Cast":
            casts.append(node)
            if attribute(node, "to", 0) not in FLOATS:
                raise NotThis(node, "casts weighted rows to what is no float")
        value = node.inputs[0]
        node = producer(value, "Mul", "Cast", "Identity")
    if node is None:
        raise NotThis(
            (value.producer() if value is not None else None) or at, "rows are summed without weights"
        )
    for cast in casts:
        if not is_one_cast(node.outputs[0].dtype, attribute(cast, "to", 0), last):
            raise NotThis(cast, "rounds weighted rows to fewer digits than are summed")
    for i in (0, 1):
        found = reader.meaning(node.inputs[1 - i], "pick", "gate")
        rows = node.inputs[i]
        if found is not None and found.source is not None and is_weight(found) and rows is not None:
            return Weighted(rows, found.source, found.cast, node)
    raise NotThis(node, "neither of its factors is known to be the weights of the expert's tokens")


def build(e: Inserter, reader: Reader, layer: Layer, at: ir.Node) -> tuple[ir.Value, Lanes]:
    """The weighted sum ``[T, H]`` of a layer.

    Raises:
        NotThis: With the first condition that does not hold.
    """
    first = layer.ends[0]
    for end in layer.ends:
        if end.source != first.source or end.cast != first.cast:
            raise NotThis(end.node, "takes its weights from another place than another expert does")
    pairs, index, new = dispatched(e, reader, layer.choice, layer.count, layer.tokens, first.source)
    if not same_rows(pairs.weights, layer.choice.ids):
        raise NotThis(
            first.node, f"weights '{pairs.weights.name}' are not known to be as many as {layer.choice}"
        )
    params = Params(e, reader, layer.experts, layer.count, layer.body)
    lanes = Lanes(e, params, layer.is_start, new)
    last = lanes.merged(tuple(end.rows for end in layer.ends), at)
    if not lanes.products:
        raise NotThis(first.node, "no expert has a product with weights of its own")
    y = weighted_sum(e, pairs, first.source, first.cast, first.rows.dtype, last, index, first.node)
    return y, lanes


def dispatched(
    e: Inserter, reader: Reader, choice: Choice, count: int, tokens: ir.Value, source: Source
) -> tuple[Pairs, ir.Value, Rows]:
    """Rows of the tokens in the order of experts; their index; what stands for the tokens of all lanes."""
    pairs = Pairs(choice.ids, reader.now(source.value), choice.top_k, count, reader.now(tokens))
    rows, index, counts, chosen = dispatch(e, pairs)
    made: list[ir.Value] = []

    def of_rows() -> ir.Value:
        if not made:
            made.append(expert_of_row(e, index, chosen))
        return made[0]

    return pairs, index, Rows(rows, counts, of_rows)


def weighted_sum(
    e: Inserter, pairs: Pairs, source: Source, cast: int | None, dtype: ir.DataType | None, last: ir.Value,
    index: ir.Value, at: ir.Node,
) -> ir.Value:  # fmt: skip
    """The sum of each token's rows, times its weights.

    Raises:
        NotThis: If rows and weights are of different dtypes.
    """
    weights = pairs.weights
    if cast is not None:
        weights = e.op("Cast", weights, name="weights_cast", to=cast)
        weights.dtype, weights.shape = ir.DataType(cast), pairs.weights.shape
    if weights.dtype is None or weights.dtype != dtype:
        raise NotThis(at, f"rows and weights are not known to have one dtype: {dtype} and {weights.dtype}")
    pairs.weights = weights
    is_dense = source.kind == "dense"
    if is_dense and columns(weights) != pairs.experts:
        raise NotThis(at, f"weights '{weights.name}' are not known to be of {pairs.experts} experts")
    return combine(e, pairs, last, index, weights if is_dense else None)


def told(layer: Layer, lanes: Lanes, form: str) -> str:
    """What was done."""
    return (
        f"{form} of {layer.count} experts, {layer.choice.top_k} a token: {lanes.products} products are "
        "MoeGroupedMatmul, after MoeInitRoutingV2, before MoeTokenUnpermuteWithRoutingMap"
    )
