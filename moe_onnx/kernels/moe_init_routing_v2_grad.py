"""Fast form of MoeInitRoutingV2Grad: bit-equal to the reference, in blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.kernels._blocks import run_blocks
from moe_onnx.operators._arrays import Array, wide_dtype
from moe_onnx.operators.moe_init_routing_v2_grad import prepare


def moe_init_routing_v2_grad(
    grad_expanded_x: Any,
    expanded_row_idx: Any,
    *,
    top_k: int,
    drop_pad_mode: int = 0,
    active_num: int = 0,
) -> Array:
    """See :func:`moe_onnx.moe_init_routing_v2_grad`."""
    plan = prepare(
        grad_expanded_x,
        expanded_row_idx,
        top_k=top_k,
        drop_pad_mode=drop_pad_mode,
        active_num=active_num,
    )
    # Taking rows of a strided array copies all of it each time.
    rows, slots = np.ascontiguousarray(plan.rows), plan.slots
    num_tokens, hidden = len(slots), rows.shape[1]
    grad_x: Array = np.empty((num_tokens, hidden), rows.dtype)
    wide = wide_dtype(rows.dtype)
    if not len(rows):
        grad_x[...] = 0
        return grad_x
    dropped = (slots < 0) | (slots >= len(rows)) if plan.masked else None

    def work(start: int, stop: int, block: int) -> None:
        block = max(1, min(block, stop - start))
        taken = np.empty((block, hidden), rows.dtype)
        sums = np.empty((block, hidden), wide) if wide != rows.dtype else None
        for low in range(start, stop, block):
            high = min(low + block, stop)
            part = taken[: high - low]
            total = grad_x[low:high] if sums is None else sums[: high - low]
            total[...] = 0
            for slot in range(slots.shape[1]):
                # Indices are checked, and dropped ones are blanked below: clip only spares a check.
                np.take(rows, slots[low:high, slot], axis=0, out=part, mode="clip")
                if dropped is not None:
                    part[dropped[low:high, slot]] = 0
                np.add(total, part, out=total, casting="same_kind")
            if sums is not None:
                grad_x[low:high] = total

    run_blocks(num_tokens, hidden * wide.itemsize, rows.nbytes, work)
    return grad_x


def rough_shapes(inputs: Sequence[Array], attributes: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the outputs as well as can be told when the call itself is wrong."""
    grad, index = inputs
    top_k = max(int(attributes.get("top_k", 1)), 1)
    return [(index.size // top_k, grad.shape[-1] if grad.ndim else 0)]
