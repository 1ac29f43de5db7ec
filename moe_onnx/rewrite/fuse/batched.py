"""Weights gathered for each pair of token and expert: ``"batched_mm"`` of transformers.

    ids = TopK(...)[1]                           [T, K]
    rows = every token K times                   [T*K, H]
    Gather(W, flat ids) @ row                    [T*K, F], and whatever is row by row between products
    sum over K of weights[t, k] * row            [T, H]

The router and what stands between the products stays; rows come in the order of experts now.
"""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.block import Block
from moe_onnx.rewrite.fuse.graph import (
    Inserter,
    NotThis,
    attribute,
    ints,
    is_axis,
    is_op,
    producer,
    put,
    rank,
    reads,
    size,
)
from moe_onnx.rewrite.fuse.pairs import Pairs, combine, dispatch, expert_of_row, matrix
from moe_onnx.rewrite.fuse.products import plain, product_of, repeated
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.walk import walk


def gathers(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Nodes that look up something for each pair, by the flat ids; only those of a weight's product count."""
    found: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        ids = _flat_ids(node)
        if ids is not None:
            found.setdefault(ids, []).append(node)
    return {ids: nodes for ids, nodes in found.items() if any(_feeds_product(node) for node in nodes)}


def match(flat_ids: ir.Value, nodes: list[ir.Node]) -> Block:
    """The block of these lookups.

    Raises:
        NotThis: With the first condition that does not hold.
    """
    first = next(node for node in nodes if _feeds_product(node))
    ids, top_k, distinct = _chosen(flat_ids, first)
    experts = size(plain(first.inputs[0])[0], 0)
    if experts is None:
        raise NotThis(first, f"the number of experts, first axis of '{first.inputs[0].name}', is not known")  # type: ignore[union-attr]
    block = Block(flat_ids, ids, top_k, experts, distinct)
    for node in nodes:
        data = node.inputs[0]
        assert data is not None
        axes = rank(data)
        if axes not in (2, 3):
            raise NotThis(node, f"looks up what has {axes} axes for each pair, not matrices or vectors")
        if size(plain(data)[0], 0) != experts:
            raise NotThis(node, f"'{data.name}' is not known to be of {experts} experts, as the others are")
        if axes == 3:
            block.products.append(product_of(node))
        else:
            block.biases.append(node)
    _find_tokens(block)
    _check_as_many(block, first)
    walk(block)
    return block


def rewrite(graph: ir.Graph, block: Block, names: set[str]) -> str:
    """Put ``ascend.moe`` nodes for a block; what was done, in words."""
    total = block.total
    assert total is not None and block.tokens is not None and block.repeated is not None
    assert block.weighted is not None and block.weights is not None
    e = Inserter(total, names)
    ids = block.ids if block.distinct else _not_negative(e, block)
    weights = block.weights
    if block.distinct and rank(weights) == 2 and not same_rows(weights, ids):
        # A Mul takes the weights of one token for all.
        ids = matrix(e, ids, block.top_k)
        weights = e.op("Expand", weights, e.op("Shape", ids), name="weights_each")
        weights.shape, weights.type = ids.shape, block.weights.type
    pairs = Pairs(ids, weights, block.top_k, block.experts, block.tokens)
    rows, index, counts, chosen = dispatch(e, pairs, sort=block.distinct)
    instead: list[tuple[ir.Value, ir.Value]] = [(block.repeated, rows)]
    gone: list[ir.Node] = []
    if block.biases:
        expert = expert_of_row(e, index, chosen)
        for node in block.biases:
            bias = e.op("Gather", node.inputs[0], expert, name="bias", axis=0)
            instead.append((node.outputs[0], bias))
            gone.append(node)
    for product in block.products:
        given = rows if product.rows is block.repeated else product.rows
        y = e.product(given, product.weight, counts, product.transposed)
        instead.append((product.squeeze.outputs[0], y))
        gone.append(product.squeeze)
    new = dict(instead)
    last = new.get(block.weighted, block.weighted)
    count = len(block.products)
    done = f"{block.experts} experts, {block.top_k} a token: {count} products with gathered weights "
    if block.distinct:
        instead.append((total.outputs[0], combine(e, pairs, last, index)))
        put(graph, e, total, instead, [total, *gone])
        return f"{done}are MoeGroupedMatmul, after MoeInitRoutingV2, before MoeTokenUnpermuteWithRoutingMap"
    # An expert that a token has twice has two weights: no matrix of weights says that. The sum stays.
    assert block.end is not None
    back = e.op("Gather", last, index, name="pairs", axis=0)
    for place, value in enumerate(block.end.inputs):
        if value is block.weighted:
            block.end.replace_input_with(place, back)
    back.shape, back.type = block.weighted.shape, block.weighted.type
    put(graph, e, block.end, instead, gone)
    return f"{done}are MoeGroupedMatmul after MoeInitRoutingV2; ids are of no TopK, so that the sum stayed"


def _not_negative(e: Inserter, block: Block) -> ir.Value:
    """Ids that count as a Gather does: those below 0 from behind."""
    ids = block.ids
    assert ids.dtype is not None
    dtype = ids.dtype.numpy()
    below = e.op("Less", ids, e.constant(0, dtype))
    from_behind = e.op("Add", ids, e.constant(block.experts, dtype))
    made = e.op("Where", below, from_behind, ids, name="ids")
    made.shape, made.type = ids.shape, ids.type
    return made


def _flat_ids(node: ir.Node) -> ir.Value | None:
    """What a node looks up along the first axis by, ``[T*K]``."""
    if is_op(node, "Gather") and attribute(node, "axis", 0) == 0:
        return _flat(reads(node, 1))
    if is_op(node, "GatherND") and attribute(node, "batch_dims", 0) == 0:
        wide = producer(node.inputs[1], "Unsqueeze", "Reshape")
        if wide is None:
            return None
        numbers = ints(reads(wide, 1)) or []
        if wide.op_type == "Unsqueeze" and len(numbers) == 1 and is_axis(numbers[0], 1, 2):
            return _flat(wide.inputs[0])
        if wide.op_type == "Reshape" and len(numbers) == 2 and numbers[1] == 1:
            return wide.inputs[0]
    return None


def _flat(value: ir.Value | None) -> ir.Value | None:
    """``value``, if it is known to be a vector."""
    if value is None or producer(value, "TopK") is not None:
        return None
    return value if rank(value) == 1 else None


def _feeds_product(node: ir.Node) -> bool:
    users = {use.node for use in node.outputs[0].uses()}
    turned = {use.node for user in users if is_op(user, "Transpose") for use in user.outputs[0].uses()}
    return any(is_op(user, "MatMul") for user in users | turned)


def _chosen(flat: ir.Value, at: ir.Node) -> tuple[ir.Value, int, bool]:
    """The ids before they were made flat, K, and whether a TopK made them: none is there twice."""
    value: ir.Value | None = flat
    while (node := producer(value, "Reshape", "Flatten", "Cast", "Identity")) is not None:
        if node.op_type == "Cast" and attribute(node, "to", 0) not in (ir.DataType.INT32, ir.DataType.INT64):
            raise NotThis(node, "ids are cast to what may not hold them")
        value = node.inputs[0]
    top = producer(value, "TopK")
    if top is None or value is not top.outputs[1]:
        made = producer(flat, "Reshape")
        ids = made.inputs[0] if made is not None else None
        top_k = size(ids, 1) if rank(ids) == 2 else None
        if ids is None or not top_k:
            raise NotThis(at, f"ids '{flat.name}' are of no TopK, and are not known to be [T, K] made flat")
        if ids.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
            raise NotThis(at, f"ids '{ids.name}' are not known to be integers")
        return ids, top_k, False
    found, axes = ints(reads(top, 1)), rank(top.inputs[0])
    if not found or len(found) != 1:
        raise NotThis(top, "K is not a constant")
    if found[0] < 1:
        raise NotThis(top, "chooses no expert")
    axis = attribute(top, "axis", -1)
    if axis != -1 and (axes is None or axis != axes - 1):
        raise NotThis(top, "does not choose along the last axis")
    return (value if rank(value) == 2 else flat), found[0], True


def _check_as_many(block: Block, at: ir.Node) -> None:
    """Tokens are as many as choices, where the products could broadcast one: it is of one pair then.

    Raises:
        NotThis: If that is not known.
    """
    alike = same_rows(block.tokens, block.ids) or same_rows(block.repeated, block.flat_ids)
    if block.top_k == 1 and not alike:
        assert block.tokens is not None
        raise NotThis(
            at, f"tokens '{block.tokens.name}' are not known to be as many as those of '{block.ids.name}'"
        )


def _find_tokens(block: Block) -> None:
    """Some product reads every token K times in a row."""
    why: NotThis | None = None
    for product in block.products:
        try:
            tokens = repeated(product.rows, block.top_k, product.squeeze)
        except NotThis as reason:
            why = why or reason
            continue
        if block.repeated not in (None, product.rows):
            if tokens is not block.tokens:
                raise NotThis(product.squeeze, "products of one block read two different repeated tensors")
            continue
        block.tokens, block.repeated = tokens, product.rows
    if block.repeated is None:
        assert why is not None
        raise why
