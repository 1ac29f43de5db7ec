"""From the tokens to the weighted sum: what stands on the way must work row by row."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.block import Block, Product
from moe_onnx.rewrite.fuse.graph import (
    NotThis,
    attribute,
    ints,
    is_axis,
    is_op,
    only_user,
    producer,
    rank,
    reads,
    size,
)
from moe_onnx.rewrite.fuse.products import on_axis
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.rows import check_row_by_row
from moe_onnx.rewrite.fuse.shapes import dims, folded


def walk(block: Block) -> None:
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
                if node.outputs[0].is_graph_output():
                    raise NotThis(node, f"rows '{node.outputs[0].name}' are an output of the graph")
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
    finish(block, *ends[0])


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


def finish(block: Block, rows: ir.Value, node: ir.Node) -> None:
    """Read the weighted sum, in either order of Mul and Reshape.

    Raises:
        NotThis: If it is none.
    """
    flat: ir.Value | None = None
    if is_op(node, "Mul"):
        flat = _one_a_row(node.inputs[1] if node.inputs[0] is rows else node.inputs[0])
        user = only_user(node.outputs[0])
        if user is None or not is_op(user, "Reshape"):
            raise NotThis(node, "the weighted rows are read by something else than one Reshape to [T, K, H]")
        shaped = user
    else:
        shaped = node
    shape = folded(reads(shaped, 1))
    width = _width(rows, block)
    if not _is_by_token(shaped, shape, width, block):
        wanted = f"[T, {block.top_k}, {'H' if width is None else width}]"
        raise NotThis(shaped, f"makes of the rows {shape or 'an unknown shape'}, not {wanted}")
    total = only_user(shaped.outputs[0])
    if flat is None:
        if total is None or not is_op(total, "Mul"):
            raise NotThis(shaped, "rows are summed without weights")
        other = total.inputs[1] if total.inputs[0] is shaped.outputs[0] else total.inputs[0]
        lifted = producer(other, "Unsqueeze")
        if lifted is None or not on_axis(lifted, 2) or rank(lifted.inputs[0]) != 2:
            raise NotThis(total, "weights are not [T, K, 1] of [T, K]")
        flat = lifted.inputs[0]
        if size(flat, 1) != block.top_k:
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
    weights = kept if fits and kept is not None else flat
    by_row = node.op_type == "Mul"
    if not _is_as_many(block, weights, rows if by_row else shaped.outputs[0], by_row=by_row):
        raise NotThis(total, f"weights '{weights.name}' are not known to be as many as the rows")
    block.weighted, block.end, block.total = rows, node, total
    block.weights = weights
    _check_dtypes(block)


def _is_as_many(block: Block, weights: ir.Value, rows: ir.Value, *, by_row: bool) -> bool:
    """Whether there is one weight a pair, or ``[1, K]`` for all tokens: a single pair takes many weights."""
    if same_rows(weights, rows) or any(same_rows(weights, ids) for ids in (block.ids, block.flat_ids)):
        return True
    if rank(weights) != 2:
        return False
    many, pairs = size(weights, 0), size(block.flat_ids, 0)
    if many is not None and pairs is not None and many * block.top_k == pairs:
        return True
    # One by one, K numbers a token are never a single one.
    return block.top_k > 1 if by_row else many == 1


def _is_by_token(shaped: ir.Node, shape: list[int | None] | None, width: int | None, block: Block) -> bool:
    """Whether a Reshape makes ``[T, K, H]`` of the rows."""
    if shape is None or len(shape) != 3 or shape[1] != block.top_k:
        return False
    if shape[2] == width:
        return True
    # The first size is that of the ids: what is left is the width.
    made, ids = dims(shaped.outputs[0]), dims(block.ids)
    return bool(shape[2] == -1 and made and ids and made[0] is not None and made[0] == ids[0])


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
