"""Fast form of MoeTokenUnpermuteWithRoutingMapGrad: one pass over the rows, in the rows' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.kernels._blocks import run_blocks
from moe_onnx.operators._arrays import Array, wide_dtype
from moe_onnx.operators.moe_token_unpermute_with_routing_map_grad import prepare


def moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Any,
    out_index: Any,
    permute_token_id: Any,
    routing_map: Any = None,
    permuted_tokens: Any = None,
    probs: Any = None,
    *,
    drop_and_pad: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Array, Array | None]:
    """See :func:`moe_onnx.moe_token_unpermute_with_routing_map_grad`."""
    plan = prepare(
        unpermuted_tokens_grad,
        out_index,
        permute_token_id,
        routing_map,
        permuted_tokens,
        probs,
        drop_and_pad=drop_and_pad,
        restore_shape=restore_shape,
    )
    # Taking rows of a strided array copies all of it each time.
    source, hidden = np.ascontiguousarray(plan.grad), plan.grad.shape[1]
    grad: Array = np.empty((plan.num_rows, hidden), source.dtype)
    wide = wide_dtype(source.dtype)
    # From slots to rows: which token each row copies, and whether any does.
    token = np.zeros(plan.num_rows, np.intp)
    token[plan.row] = plan.token
    blank = np.ones(plan.num_rows, bool)
    blank[plan.row] = False
    some_blank = bool(blank.any())
    rows, given = plan.permuted_tokens, plan.probs
    dots = np.zeros(plan.num_rows, wide)
    weight = np.zeros((plan.num_rows, 1), wide)
    if given is not None:
        weight[plan.row, 0] = given.reshape(-1)[plan.cell]

    def work(start: int, stop: int, block: int) -> None:
        block = max(1, min(block, stop - start))
        taken = np.empty((block, hidden), source.dtype)
        scratch = np.empty((block, hidden), wide)
        # 16-bit rows are widened to sum their products; what is wide already is used as it is.
        widened = np.empty((2, block, hidden), wide) if wide != source.dtype else None
        for low in range(start, stop, block):
            high = min(low + block, stop)
            if rows is None:
                np.take(source, token[low:high], axis=0, out=grad[low:high], mode="clip")
            else:
                left = taken[: high - low]
                np.take(source, token[low:high], axis=0, out=left, mode="clip")
                right = rows[low:high]  # fewer rows than slots: the last slots name none
                if widened is not None:
                    widened[0, : len(left)] = left
                    widened[1, : len(right)] = right
                    left, right = widened[0, : len(left)], widened[1, : len(right)]
                if len(right):
                    # Sums along rows of one layout have one order, whatever the block holds.
                    products = np.multiply(left[: len(right)], right, out=scratch[: len(right)])
                    np.add.reduce(products, axis=1, out=dots[low : low + len(right)])
                if widened is None:
                    np.multiply(left, weight[low:high], out=grad[low:high])
                else:
                    grad[low:high] = np.multiply(left, weight[low:high], out=left)
            if some_blank:
                grad[low:high][blank[low:high]] = 0

    run_blocks(plan.num_rows, hidden * wide.itemsize, grad.nbytes, work)
    if given is None:
        return grad, None
    probs_grad: Array = np.zeros(given.shape, given.dtype)
    with np.errstate(all="ignore"):
        probs_grad.reshape(-1)[plan.cell] = dots[plan.row].astype(given.dtype)
    return grad, probs_grad


def rough_shapes(inputs: Sequence[Array], attributes: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the outputs as well as can be told when the call itself is wrong."""
    grad, index, probs = inputs[0], inputs[1], inputs[5]
    return [(index.size, grad.shape[-1] if grad.ndim else 0), probs.shape]
