"""Where rows are limited: which pairs of token and expert get one, and how many would want one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.moe_options import MoeOptions
from moe_onnx.build.router import Routing, mark, real_choices, tokens_per_expert


def within_capacity(e: Emitter, routing: Routing, mask: ir.Value | None, config: MoeOptions) -> ir.Value:
    """The map of the C tokens of largest weight of each expert; of equal ones the first in the batch."""
    chosen = real_choices(e, routing, mask)
    # What was not chosen must lose to every weight, and weights may be 0.
    score = e.op("Where", chosen, routing.weights, e.constant(np.float32(-1)))
    capacity = e.constant([config.capacity])
    _, first = e.ops("TopK", score, capacity, outputs=2, axis=0, largest=1, sorted=1)
    return e.op("And", chosen, mark(e, first, score, axis=0, name="within_capacity"))


def with_rest(
    e: Emitter, expert_idx: ir.Value, mask: ir.Value | None, config: MoeOptions
) -> tuple[ir.Value, int]:
    """Slots that are not to have a row go to one expert more, behind all others."""
    if mask is None:
        return expert_idx, config.num_experts
    rest = e.constant(config.num_experts, np.int32)
    moved = shaped(e.op("Where", mask, expert_idx, rest), "tokens", config.num_experts_per_tok)
    return moved, config.num_experts + 1


def real_pairs(e: Emitter, routing: Routing, mask: ir.Value | None) -> ir.Value:
    """How many pairs of a real token and an expert there are, ``[1]``."""
    return e.op(
        "ReduceSum", tokens_per_expert(e, real_choices(e, routing, mask)), e.constant([0]), keepdims=1
    )
