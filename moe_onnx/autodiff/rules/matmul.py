"""Rules of matrix products."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, sizes
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("MatMul", since=9)
def matmul(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = a b`` over the last two axes: ``d b^T`` and ``a^T d``, summed over broadcast axes."""
    a, b = node.inputs
    assert a is not None and b is not None
    rank_a, rank_b = g.rank(a), g.rank(b)
    if rank_a == 2 and rank_b == 2:
        da = g.op("Gemm", d, b, transB=1) if g.needs(a) else None
        return [da, g.op("Gemm", a, d, transA=1) if g.needs(b) else None]
    if rank_a > 2 and rank_b == 2:
        da = g.op("MatMul", d, _transposed(g, b, 2)) if g.needs(a) else None
        if not g.needs(b):
            return [da, None]
        rows_a, rows_d = (g.op("Flatten", value, axis=rank_a - 1) for value in (a, d))
        return [da, g.op("Gemm", rows_a, rows_d, transA=1)]
    # A vector is a matrix of one row (a) or one column (b) whose axis the product drops.
    wide_a = g.op("Unsqueeze", a, g.constant([0])) if rank_a == 1 else a
    wide_b = g.op("Unsqueeze", b, g.constant([1])) if rank_b == 1 else b
    if rank_b == 1:
        d = g.op("Unsqueeze", d, g.constant([-1]))
    if rank_a == 1:
        d = g.op("Unsqueeze", d, g.constant([-2]))
    da = g.op("MatMul", d, _transposed(g, wide_b, max(rank_b, 2))) if g.needs(a) else None
    db = g.op("MatMul", _transposed(g, wide_a, max(rank_a, 2)), d) if g.needs(b) else None
    return [None if da is None else _fit(g, da, a, node), None if db is None else _fit(g, db, b, node)]


@register_gradient("Gemm", since=7)
def gemm(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``y = alpha op(a) op(b) + beta c``."""
    a, b, c = [*node.inputs, None][:3]
    alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))
    ta, tb = bool(attribute(node, "transA", 0)), bool(attribute(node, "transB", 0))
    scale: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
    da = db = dc = None
    if g.needs(a):
        first, second, t1, t2 = (b, d, tb, True) if ta else (d, b, False, not tb)
        da = g.op("Gemm", first, second, transA=int(t1), transB=int(t2), **scale)
    if g.needs(b):
        first, second, t1, t2 = (d, a, True, ta) if tb else (a, d, not ta, False)
        db = g.op("Gemm", first, second, transA=int(t1), transB=int(t2), **scale)
    if c is not None and g.needs(c):
        dc = g.unbroadcast(d, c, node.outputs[0])
        dc = dc if beta == 1 else g.mul(dc, g.like(beta, c))
    return [da, db, dc][: len(node.inputs)]


def _transposed(g: Gradients, value: ir.Value, rank: int) -> ir.Value:
    return g.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _fit(g: Gradients, grad: ir.Value, value: ir.Value, node: ir.Node) -> ir.Value:
    """Undo the broadcasting of the batch axes, and drop the axis that a vector was given."""
    vectors = sum(v is not None and g.rank(v) == 1 for v in node.inputs)
    y_sizes = sizes(node.outputs[0])
    if y_sizes is None:
        raise GradientError(f"the rank of '{node.outputs[0].name}' is not known.")
    batch = y_sizes[: len(y_sizes) - (2 - vectors)]
    dims = sizes(value)
    assert dims is not None
    if len(dims) > 1:
        return g.unbroadcast(grad, value, (*batch, *dims[-2:]))
    return g.op("Reshape", g.sum(grad, list(range(len(batch))), keepdims=False), g.constant([-1]))
