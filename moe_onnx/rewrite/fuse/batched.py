"""Weights gathered for each pair of token and expert: ``"batched_mm"`` of transformers.

    ids = TopK(...)[1]                           [T, K]
    rows = every token K times                   [T*K, H]
    Gather(W, flat ids) @ row                    [T*K, F], and whatever is row by row between products
    sum over K of weights[t, k] * row            [T, H]

The router and what stands between the products stays; rows come in the order of experts now.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import (
    Inserter,
    NotThis,
    attribute,
    ints,
    is_axis,
    is_op,
    only_user,
    producer,
    put,
    rank,
    reads,
    size,
)
from moe_onnx.rewrite.fuse.pairs import Pairs, combine, dispatch, expert_of_row
from moe_onnx.rewrite.fuse.rows import check_row_by_row


@dataclass
class Product:
    """``squeeze`` ``[T*K, out]`` is ``rows`` times the weight of each row's expert."""

    gather: ir.Node
    weight: ir.Value
    transposed: bool
    rows: ir.Value
    squeeze: ir.Node


@dataclass
class Block:
    """A layer of this form."""

    flat_ids: ir.Value
    ids: ir.Value
    top_k: int
    experts: int
    distinct: bool  # no token has an expert twice
    products: list[Product] = field(default_factory=list)
    biases: list[ir.Node] = field(default_factory=list)
    tokens: ir.Value | None = None  # [T, H]
    repeated: ir.Value | None = None  # [T*K, H]
    weighted: ir.Value | None = None  # the last rows, which are weighted
    weights: ir.Value | None = None  # [T, K] or of as many elements
    end: ir.Node | None = None  # what reads those
    total: ir.Node | None = None  # the sum over K


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
    experts = size(_plain(first.inputs[0])[0], 0)
    if experts is None:
        raise NotThis(first, f"the number of experts, first axis of '{first.inputs[0].name}', is not known")  # type: ignore[union-attr]
    block = Block(flat_ids, ids, top_k, experts, distinct)
    for node in nodes:
        data = node.inputs[0]
        assert data is not None
        axes = rank(data)
        if axes not in (2, 3):
            raise NotThis(node, f"looks up what has {axes} axes for each pair, not matrices or vectors")
        if size(_plain(data)[0], 0) != experts:
            raise NotThis(node, f"'{data.name}' is not known to be of {experts} experts, as the others are")
        if axes == 3:
            block.products.append(_product(node))
        else:
            block.biases.append(node)
    _find_tokens(block)
    _walk(block)
    return block


def rewrite(graph: ir.Graph, block: Block, names: set[str]) -> str:
    """Put ``ascend.moe`` nodes for a block; what was done, in words."""
    total = block.total
    assert total is not None and block.tokens is not None and block.repeated is not None
    assert block.weighted is not None and block.weights is not None
    e = Inserter(f"{total.name or total.outputs[0].name}/fused", names)
    pairs = Pairs(block.ids, block.weights, block.top_k, block.experts, block.tokens)
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
        y = e.op(
            "MoeGroupedMatmul",
            given,
            product.weight,
            counts,
            name="product",
            transpose_weight=int(product.transposed),
        )
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


def _flat_ids(node: ir.Node) -> ir.Value | None:
    """What a node looks up along the first axis by, ``[T*K]``."""
    if is_op(node, "Gather") and attribute(node, "axis", 0) == 0:
        return _flat(node.inputs[1])
    if is_op(node, "GatherND") and attribute(node, "batch_dims", 0) == 0:
        wide = producer(node.inputs[1], "Unsqueeze", "Reshape")
        if wide is None:
            return None
        numbers = ints(wide.inputs[1]) or []
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
        return ids, top_k, False
    found, axes = ints(top.inputs[1]), rank(top.inputs[0])
    if not found or len(found) != 1:
        raise NotThis(top, "K is not a constant")
    axis = attribute(top, "axis", -1)
    if axis != -1 and (axes is None or axis != axes - 1):
        raise NotThis(top, "does not choose along the last axis")
    return (value if rank(value) == 2 else flat), found[0], True


def _plain(weight: ir.Value | None) -> tuple[ir.Value, bool]:
    """A weight behind Transposes that keep its experts, and whether they swapped the other two axes."""
    assert weight is not None
    turned = False
    while (node := producer(weight, "Transpose", "Identity")) is not None:
        perm = list(attribute(node, "perm", ())) or [2, 1, 0]
        if node.op_type == "Transpose" and perm not in ([0, 1, 2], [0, 2, 1]):
            break
        turned ^= node.op_type == "Transpose" and perm == [0, 2, 1]
        assert node.inputs[0] is not None
        weight = node.inputs[0]
    return weight, turned


def _product(gather: ir.Node) -> Product:
    weight, turned = _plain(gather.inputs[0])
    matrices = gather.outputs[0]
    user = only_user(matrices)
    if is_op(user, "Transpose") and user is not None and list(attribute(user, "perm", ())) == [0, 2, 1]:
        turned, matrices = not turned, user.outputs[0]
        user = only_user(matrices)
    if user is None or not is_op(user, "MatMul"):
        raise NotThis(gather, "the weights of each pair are read by something else than one MatMul")
    left = user.inputs[0] is matrices
    if left and user.inputs[1] is matrices:
        raise NotThis(user, "multiplies the weights of each pair with themselves")
    single = 2 if left else 1  # the axis of size 1
    lifted = producer(user.inputs[1 if left else 0], "Unsqueeze")
    if lifted is None or not _on(lifted, single):
        raise NotThis(user, f"its other factor is not one row a pair (no Unsqueeze at axis {single})")
    squeeze = only_user(user.outputs[0])
    out = size(weight, 2 if left == turned else 1)
    if squeeze is None or not _squeezes(squeeze, single, out):
        raise NotThis(user, f"its result is not read by one Squeeze at axis {single}")
    rows = lifted.inputs[0]
    assert rows is not None
    return Product(gather, weight, left != turned, rows, squeeze)


def _on(node: ir.Node, axis: int) -> bool:
    axes = ints(reads(node, 1))
    return axes is not None and len(axes) == 1 and is_axis(axes[0], axis, 3)


def _squeezes(node: ir.Node, axis: int, width: int | None) -> bool:
    if is_op(node, "Squeeze"):
        return _on(node, axis)
    shape = ints(node.inputs[1]) if is_op(node, "Reshape") else None
    return shape is not None and len(shape) == 2 and shape[1] == width


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


def repeated(rows: ir.Value, top_k: int, at: ir.Node) -> ir.Value:
    """``x`` ``[T, H]`` of ``Reshape(Expand(Unsqueeze(x, 1), [1, K, 1]), [-1, H])``, or of ``x`` where K is 1.

    Raises:
        NotThis: If ``rows`` is not that.
    """
    flat = producer(rows, "Reshape")
    if flat is None:
        raise NotThis(rows.producer() or at, f"'{rows.name}' is not every token {top_k} times in a row")
    wide = producer(flat.inputs[0], "Expand", "Tile")
    lifted = producer(None if wide is None else wide.inputs[0], "Unsqueeze")
    if wide is None or lifted is None or ints(lifted.inputs[1]) not in ([1], [-2]):
        raise NotThis(flat, f"'{rows.name}' is not every token {top_k} times in a row")
    tokens, times, to = lifted.inputs[0], ints(wide.inputs[1]), ints(flat.inputs[1])
    assert tokens is not None
    if rank(tokens) != 2:
        raise NotThis(lifted, f"'{tokens.name}' is not known to be a matrix of tokens")
    hidden = size(tokens, 1)
    if times is None or len(times) != 3 or times[1] != top_k:
        raise NotThis(wide, f"does not repeat every token K = {top_k} times")
    if wide.op_type == "Tile" and (times[0], times[2]) != (1, 1):
        raise NotThis(wide, "repeats more than the tokens")
    if wide.op_type == "Expand":
        if times[0] not in (1, size(tokens, 0)):
            raise NotThis(wide, "expands the axis of tokens, too")
        if times[2] not in (1, hidden):
            raise NotThis(wide, "expands the hidden axis, too")
    if hidden is None:
        raise NotThis(lifted, f"the hidden size, last axis of '{tokens.name}', is not known")
    if to is None or len(to) != 2 or to[1] != hidden:
        raise NotThis(flat, "does not make rows [T*K, H] of it")
    return tokens


def _walk(block: Block) -> None:
    """Follow the rows from the tokens to the weighted sum: everything on the way must be row by row."""
    start = [block.repeated, *(node.outputs[0] for node in block.biases)]
    rows = {value for value in start if value is not None}
    lifted: dict[ir.Node, list[Product]] = {}
    for product in block.products:
        lifted.setdefault(_lifter(product), []).append(product)
    assert block.repeated is not None
    home = block.products[0].gather.graph
    waiting = list(rows)
    done: set[ir.Node] = set()
    ends: list[tuple[ir.Value, ir.Node]] = []
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            raise NotThis(value.producer(), f"rows '{value.name}' are an output of the graph")  # type: ignore[arg-type]
        users = list(dict.fromkeys(use.node for use in value.uses()))
        for node in users:
            if node in done:
                continue
            if node.graph is not home:
                raise NotThis(node, f"reads rows '{value.name}' in a subgraph")
            if node in lifted:
                if len({use.node for use in node.outputs[0].uses()}) != len(lifted[node]):
                    raise NotThis(node, "its rows are read by something else than products with weights")
                done.add(node)
                new = [product.squeeze.outputs[0] for product in lifted[node]]
            elif _is_end(node, value):
                ends.append((value, node))
                continue
            elif (back := _back(node)) is not None:
                done |= {node, back}
                new = [back.outputs[0]]
            else:
                missing = [v for v in node.inputs if v is not None and v not in rows]
                if any(_is_late(v, block, rows) for v in missing):
                    continue  # comes again when its other rows are known
                check_row_by_row(node, rows)
                done.add(node)
                new = list(node.outputs)
            rows.update(new)
            waiting += new
    for product in block.products:
        if product.squeeze.outputs[0] not in rows:
            raise NotThis(product.gather, "its product reads rows that do not come from the tokens")
    for use in (use for value in rows for use in value.uses()):
        if use.node not in done and use.node not in {node for _, node in ends}:
            raise NotThis(use.node, "reads rows beside values that depend on other rows")
    if len({node for _, node in ends}) != 1:
        at = ends[1][1] if len(ends) > 1 else block.products[-1].squeeze
        raise NotThis(at, f"rows go to {len(ends)} weighted sums, not to one")
    _finish(block, *ends[0])


def _lifter(product: Product) -> ir.Node:
    matmul = product.squeeze.inputs[0].producer()  # type: ignore[union-attr]
    assert matmul is not None
    return next(n for v in matmul.inputs if (n := producer(v, "Unsqueeze")) and n.inputs[0] is product.rows)


def _back(node: ir.Node) -> ir.Node | None:
    """The Squeeze that undoes an Unsqueeze at once."""
    if not is_op(node, "Unsqueeze"):
        return None
    axes = ints(reads(node, 1))
    user = only_user(node.outputs[0])
    if axes is None or len(axes) != 1 or user is None or not is_op(user, "Squeeze"):
        return None
    other = ints(reads(user, 1))
    return user if other is not None and len(other) == 1 and (other[0] - axes[0]) % 3 == 0 else None


def _is_late(value: ir.Value, block: Block, rows: set[ir.Value]) -> bool:
    """Whether a value depends on rows that were not reached yet."""
    seen: set[ir.Value] = set()
    waiting = [value]
    late = {p.squeeze.outputs[0] for p in block.products} | rows
    while waiting:
        one = waiting.pop()
        if one in seen or one in (block.tokens, block.flat_ids):
            continue
        seen.add(one)
        if one in late:
            return True
        node = one.producer()
        if node is not None and len(seen) < 10_000:
            waiting += [v for v in node.inputs if v is not None]
    return False


def _is_end(node: ir.Node, rows: ir.Value) -> bool:
    """Whether a node weighs the rows, or gives them their two axes of pairs back."""
    if is_op(node, "Reshape"):
        return True
    if not is_op(node, "Mul"):
        return False
    other = node.inputs[1] if node.inputs[0] is rows else node.inputs[0]
    return other is not rows and _one_a_row(other) is not None


def _one_a_row(value: ir.Value | None) -> ir.Value | None:
    """``w`` of ``w[:, None]``, a number for every row."""
    node = producer(value, "Unsqueeze", "Reshape")
    if node is None:
        return None
    numbers = ints(reads(node, 1))
    if node.op_type == "Reshape":
        return node.inputs[0] if numbers == [-1, 1] else None
    if numbers is None or len(numbers) != 1 or not is_axis(numbers[0], 1, 2):
        return None
    # A single number weighs all rows alike.
    return node.inputs[0] if rank(node.inputs[0]) == 1 and size(node.inputs[0], 0) != 1 else None


def _finish(block: Block, rows: ir.Value, node: ir.Node) -> None:
    """Read the weighted sum, in either order of Mul and Reshape."""
    flat: ir.Value | None = None
    if is_op(node, "Mul"):
        flat = _one_a_row(node.inputs[1] if node.inputs[0] is rows else node.inputs[0])
        user = only_user(node.outputs[0])
        if user is None or not is_op(user, "Reshape"):
            raise NotThis(node, "the weighted rows are read by something else than one Reshape to [T, K, H]")
        shaped = user
    else:
        shaped = node
    shape = ints(shaped.inputs[1])
    width = _width(rows, block)
    if shape is None or len(shape) != 3 or shape[1:] != [block.top_k, width]:
        wanted = f"[T, {block.top_k}, {'H' if width is None else width}]"
        raise NotThis(shaped, f"makes of the rows {shape or 'an unknown shape'}, not {wanted}")
    total = only_user(shaped.outputs[0])
    if flat is None:
        if total is None or not is_op(total, "Mul"):
            raise NotThis(shaped, "rows are summed without weights")
        other = total.inputs[1] if total.inputs[0] is shaped.outputs[0] else total.inputs[0]
        lifted = producer(other, "Unsqueeze")
        if lifted is None or not _on(lifted, 2) or rank(lifted.inputs[0]) != 2:
            raise NotThis(total, "weights are not [T, K, 1] of [T, K]")
        flat = lifted.inputs[0]
        if size(flat, 1) != block.top_k or (size(flat, 0) == 1 and size(block.tokens, 0) != 1):
            raise NotThis(total, f"weights are not known to be of K = {block.top_k} experts for each token")
        total = only_user(total.outputs[0])
    if total is None or not is_op(total, "ReduceSum"):
        raise NotThis(shaped, "the weighted rows are read by something else than one ReduceSum")
    axes = ints(reads(total, 1))
    if axes not in ([1], [-2]) or attribute(total, "keepdims", 1):
        raise NotThis(total, "does not sum over K alone, or keeps its axis")
    kept = flat
    while (before := producer(kept, "Reshape")) is not None and rank(kept) != 2:
        kept = before.inputs[0]
    assert flat is not None
    fits = rank(kept) == 2 and size(kept, 1) == block.top_k
    block.weighted, block.end, block.total = rows, node, total
    block.weights = kept if fits else flat
    _check_dtypes(block)


def _width(rows: ir.Value | None, block: Block) -> int | None:
    """The columns of rows; where inference does not say, as in subgraphs, those of the last product."""
    out = {one.squeeze.outputs[0]: size(one.weight, 1 if one.transposed else 2) for one in block.products}
    while rows is not None:
        known = out.get(rows) or size(rows, 1)
        node = producer(rows, "Add", "Cast", "Squeeze", "Unsqueeze")
        if known is not None or node is None:
            return known
        # One of two is the bias of each row.
        biases = {bias.outputs[0] for bias in block.biases}
        rows = next((value for value in node.inputs if value is not None and value not in biases), None)
    return None


def _check_dtypes(block: Block) -> None:
    assert block.weighted is not None and block.weights is not None and block.total is not None
    rows, weights = block.weighted.dtype, block.weights.dtype
    if rows is None or weights is None or rows != weights:
        raise NotThis(
            block.total, f"rows and weights are not known to have one dtype, they have {rows} and {weights}"
        )
