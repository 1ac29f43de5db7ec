"""Products of rows with gathered weights, and rows that are every token K times."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.block import Product
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


def on_axis(node: ir.Node, axis: int) -> bool:
    """Whether an Unsqueeze or Squeeze is at this axis of three."""
    axes = ints(reads(node, 1))
    return axes is not None and len(axes) == 1 and is_axis(axes[0], axis, 3)


def _squeezes(node: ir.Node, axis: int, width: int | None) -> bool:
    if is_op(node, "Squeeze"):
        return on_axis(node, axis)
    shape = ints(reads(node, 1)) if is_op(node, "Reshape") else None
    return shape is not None and len(shape) == 2 and shape[1] == width


def plain(weight: ir.Value | None) -> tuple[ir.Value, bool]:
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


def product_of(gather: ir.Node) -> Product:
    """The one product of a lookup of weights.

    Raises:
        NotThis: If what reads the lookup is something else.
    """
    weight, turned = plain(gather.inputs[0])
    matrices = gather.outputs[0]
    user = only_user(matrices)
    if is_op(user, "Transpose") and user is not None and list(attribute(user, "perm", ())) == [0, 2, 1]:
        turned, matrices = not turned, user.outputs[0]
        user = only_user(matrices)
    if user is None or not is_op(user, "MatMul"):
        raise NotThis(gather, "the weights of each pair are read by something else than one MatMul")
    left = user.inputs[0] is matrices
    if left and reads(user, 1) is matrices:
        raise NotThis(user, "multiplies the weights of each pair with themselves")
    single = 2 if left else 1  # the axis of size 1
    lifted = producer(user.inputs[1 if left else 0], "Unsqueeze")
    if lifted is None or not on_axis(lifted, single):
        raise NotThis(user, f"its other factor is not one row a pair (no Unsqueeze at axis {single})")
    squeeze = only_user(user.outputs[0])
    out = size(weight, 2 if left == turned else 1)
    if squeeze is None or not _squeezes(squeeze, single, out):
        raise NotThis(user, f"its result is not read by one Squeeze at axis {single}")
    rows = lifted.inputs[0]
    assert rows is not None
    return Product(gather, weight, left != turned, rows, squeeze)


def repeated(rows: ir.Value, top_k: int, at: ir.Node) -> ir.Value:
    """``x`` ``[T, H]`` of ``Reshape(Expand(Unsqueeze(x, 1), [1, K, 1]), [-1, H])``.

    Raises:
        NotThis: If ``rows`` is not that.
    """
    flat = producer(rows, "Reshape")
    if flat is None:
        raise NotThis(rows.producer() or at, f"'{rows.name}' is not every token {top_k} times in a row")
    wide = producer(flat.inputs[0], "Expand", "Tile")
    lifted = producer(None if wide is None else wide.inputs[0], "Unsqueeze")
    if wide is None or lifted is None or ints(reads(lifted, 1)) not in ([1], [-2]):
        raise NotThis(flat, f"'{rows.name}' is not every token {top_k} times in a row")
    tokens, times, to = lifted.inputs[0], ints(reads(wide, 1)), ints(reads(flat, 1))
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
