"""From tokens to the rows of their experts and back, in every mode of the two source documents.

| dispatch, mode | to rows | and back |
|---|---|---|
| init_routing, dropless or active | MoeInitRoutingV2 | MoeTokenUnpermuteWithRoutingMap |
| init_routing, drop_pad | MoeInitRoutingV2 | MoeFinalizeRoutingV2 |
| routing_map, dropless or drop_pad | MoeTokenPermuteWithRoutingMap | MoeTokenUnpermuteWithRoutingMap |

The backward pass has the Grad operator of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.capacity import real_pairs, with_rest, within_capacity
from moe_onnx.build.moe_options import MoeOptions
from moe_onnx.build.precision import Half, half_of, narrow, probabilities, wide
from moe_onnx.build.router import Routing, real_choices, tokens_per_expert
from moe_onnx.spec import DOMAIN


@dataclass(frozen=True)
class Dispatched:
    """The rows of all experts, ordered by expert, and the way back.

    ``rows`` is ``[rows, H]``, float32 that holds values of the compute dtype; ``sizes`` how many of them
    each expert has, int32 ``[E]``, or the number that every one has; ``weights`` ``[rows, 1]`` is what
    experts weigh their rows by, None where the combine does; ``combine`` makes ``[tokens, H]`` of
    ``[rows, H]``, which it rounds first; ``dropped`` counts the real pairs without a row, None where there
    are none.
    """

    rows: ir.Value
    sizes: ir.Value | int
    weights: ir.Value | None
    combine: Callable[[ir.Value], ir.Value]
    dropped: ir.Value | None = None

    def split(self, e: Emitter, rows: ir.Value, experts: int) -> Sequence[ir.Value]:
        """The rows of each expert."""
        if experts == 1:
            return [rows]
        if isinstance(self.sizes, int):
            return e.ops("Split", rows, outputs=experts, axis=0, num_outputs=experts)
        lengths = e.op("Cast", self.sizes, to=ir.DataType.INT64)
        return e.ops("Split", rows, lengths, outputs=experts, axis=0)

    def group_sizes(self, e: Emitter, experts: int) -> ir.Value:
        """``sizes`` as a tensor."""
        if isinstance(self.sizes, int):
            return e.constant(np.full(experts, self.sizes), np.int32)
        return self.sizes


def dispatch(
    e: Emitter, x: ir.Value, routing: Routing, mask: ir.Value | None, config: MoeOptions
) -> Dispatched:
    """Copy tokens to rows. ``mask`` is as in ``route``: padding tokens take no row of a limited number."""
    if config.dispatch == "routing_map":
        return _by_map(e, x, routing, mask, config)
    if config.dispatch_mode == "drop_pad":
        return _drop_pad(e, x, routing, mask, config)
    if config.dispatch_mode == "active":
        return _active(e, x, routing, mask, config)
    return _dropless(e, x, routing, config)


def _dropless(e: Emitter, x: ir.Value, routing: Routing, config: MoeOptions) -> Dispatched:
    rows, row_idx, counts, _ = _init_routing(e, x, routing.expert_idx, config, counts=2)
    weights = None
    if config.router_weights_on == "experts":
        weights = _weights_of_rows(e, _weights_of_slots(e, routing, config), row_idx, e.op("Shape", row_idx))
    return Dispatched(
        shaped(rows, "rows", config.hidden_size),
        counts,
        weights,
        lambda done: _unpermute(e, done, shaped(row_idx, "rows"), routing, config),
    )


def _active(
    e: Emitter, x: ir.Value, routing: Routing, mask: ir.Value | None, config: MoeOptions
) -> Dispatched:
    """All rows but the first ``active_num`` are dropped, which are those of the last experts."""
    expert_idx, experts = with_rest(e, routing.expert_idx, mask, config)
    rows, row_idx, ends, _ = _init_routing(
        e, x, expert_idx, config, experts=experts, active=config.active_num, counts=1
    )
    ends = _head(e, ends, e.constant([config.num_experts]))
    kept_ends = e.op("Min", ends, e.constant(config.active_num, np.int32))
    first = _head(e, kept_ends, e.constant([-1]))
    starts = e.op("Concat", e.constant([0], np.int32), first, axis=0)
    total = _last(e, kept_ends)
    total_long = e.op("Cast", total, to=ir.DataType.INT64)
    here = e.op("Less", row_idx, total)
    kept_idx = shaped(e.op("Where", here, row_idx, e.constant(-1, np.int32)), "slots")
    weights = None
    if config.router_weights_on == "experts":
        weights = _weights_of_rows(e, _weights_of_slots(e, routing, config), row_idx, e.op("Shape", row_idx))
        weights = _head(e, weights, total_long)
    # Rows behind those of the last expert are padding tokens'.
    rows = _head(e, rows, total_long)
    wanted = _last(e, ends)
    dropped = e.op("Cast", e.op("Sub", wanted, total), to=ir.DataType.INT64)

    def combine(done: ir.Value) -> ir.Value:
        missing = e.op("Sub", e.op("Shape", row_idx), total_long)
        shape = e.op("Concat", missing, e.constant([config.hidden_size]), axis=0)
        none = e.op("Expand", e.like(0.0, done), shape)
        every = shaped(e.op("Concat", done, none, axis=0), "slots", config.hidden_size)
        return _unpermute(e, every, kept_idx, routing, config)

    rows = shaped(rows, "rows", config.hidden_size)
    return Dispatched(rows, e.op("Sub", kept_ends, starts), weights, combine, dropped)


def _drop_pad(
    e: Emitter, x: ir.Value, routing: Routing, mask: ir.Value | None, config: MoeOptions
) -> Dispatched:
    """Every expert has C rows; MoeFinalizeRoutingV2 leaves out what has none."""
    hidden, limit = config.hidden_size, config.num_experts * config.capacity
    slot_mask = mask
    if config.token_drop_policy == "probs":
        slot_mask = e.op(
            "GatherElements", within_capacity(e, routing, mask, config), routing.expert_idx, axis=1
        )
    expert_idx, experts = with_rest(e, routing.expert_idx, slot_mask, config)
    rows, row_idx, _, _ = _init_routing(e, x, expert_idx, config, experts=experts, capacity=config.capacity)
    if experts > config.num_experts:
        rows = _head(e, rows, e.constant([config.num_experts]))
        inside = e.op("Less", row_idx, e.constant(limit, np.int32))
        row_idx = shaped(e.op("Where", inside, row_idx, e.constant(-1, np.int32)), "slots")
    rows = e.op("Reshape", rows, e.constant([limit, hidden]))
    weights, scales = None, _weights_of_slots(e, routing, config)
    if config.router_weights_on == "experts":
        is_lost = e.op("Less", row_idx, e.constant(0, np.int32))
        lost = e.op("Where", is_lost, e.constant(limit, np.int32), row_idx)
        weights = _weights_of_rows(e, scales, lost, e.constant([limit + 1]))
        weights = _head(e, weights, e.constant([limit]))
        # Without scales the operator takes K to be 1.
        ones = e.op("Expand", e.like(1.0, scales), e.op("Shape", routing.expert_idx))
        scales = shaped(ones, "tokens", config.num_experts_per_tok)
    half = half_of(config)
    absent = _absent(e, half)
    scales = probabilities(e, scales, half)

    def combine(done: ir.Value) -> ir.Value:
        y = e.op(
            "MoeFinalizeRoutingV2",
            e.op("Reshape", narrow(e, done, half), e.constant([config.num_experts, config.capacity, hidden])),
            row_idx,
            absent,
            absent,
            absent,
            scales,
            e.constant(np.empty((0, 0)), np.int32),
            domain=DOMAIN,
            name="combine",
            drop_pad_mode=3,
        )
        return wide(e, shaped(y, "tokens", hidden))

    has_row = e.op("GreaterOrEqual", row_idx, e.constant(0, np.int32))
    used = e.op("ReduceSum", e.op("Cast", has_row, to=ir.DataType.INT64), keepdims=1)
    return Dispatched(
        rows, config.capacity, weights, combine, e.op("Sub", real_pairs(e, routing, mask), used)
    )


def _by_map(
    e: Emitter, x: ir.Value, routing: Routing, mask: ir.Value | None, config: MoeOptions
) -> Dispatched:
    """By the routing map, with the weights of the rows as a second output."""
    padded, dropped, chosen = config.dispatch_mode == "drop_pad", None, routing.routing_map
    if padded and config.token_drop_policy == "probs":
        chosen = within_capacity(e, routing, mask, config)
    elif padded:
        chosen = real_choices(e, routing, mask)
    in_experts, half = config.router_weights_on == "experts", half_of(config)
    rows, weights, sorted_indices = e.ops(
        "MoeTokenPermuteWithRoutingMap",
        narrow(e, x, half),
        chosen,
        probabilities(e, routing.weights, half) if in_experts else _absent(e, half),
        outputs=3,
        domain=DOMAIN,
        name="dispatch",
        num_out_tokens=config.num_experts * config.capacity,
        drop_and_pad=int(padded),
    )
    counts = tokens_per_expert(e, chosen)
    if padded:
        used = e.op("ReduceSum", e.op("Min", counts, e.constant(config.capacity)), keepdims=1)
        dropped = e.op("Sub", real_pairs(e, routing, mask), used)
    shaped(sorted_indices, "rows")
    return Dispatched(
        wide(e, shaped(rows, "rows", config.hidden_size)),
        config.capacity if padded else e.op("Cast", counts, to=ir.DataType.INT32),
        e.op("Unsqueeze", wide(e, shaped(weights, "rows")), e.constant([1])) if in_experts else None,
        lambda done: _unpermute(e, done, sorted_indices, routing, config, chosen=chosen, padded=padded),
        dropped,
    )


def _init_routing(
    e: Emitter,
    x: ir.Value,
    expert_idx: ir.Value,
    config: MoeOptions,
    *,
    experts: int | None = None,
    active: int = 0,
    capacity: int = 0,
    counts: int = 0,
) -> Sequence[ir.Value]:
    rows, *rest = e.ops(
        "MoeInitRoutingV2",
        narrow(e, x, half_of(config)),
        expert_idx,
        outputs=4,
        domain=DOMAIN,
        name="dispatch",
        active_num=active,
        expert_capacity=capacity,
        expert_num=experts or config.num_experts,
        drop_pad_mode=int(capacity > 0),
        expert_tokens_count_or_cumsum_flag=counts,
        expert_tokens_before_capacity_flag=0,
    )
    return wide(e, rows), *rest


def _unpermute(
    e: Emitter,
    rows: ir.Value,
    index: ir.Value,
    routing: Routing,
    config: MoeOptions,
    *,
    chosen: ir.Value | None = None,
    padded: bool = False,
) -> ir.Value:
    absent, half = config.router_weights_on == "experts", half_of(config)
    combined = e.ops(
        "MoeTokenUnpermuteWithRoutingMap",
        narrow(e, rows, half),
        index,
        routing.routing_map if chosen is None else chosen,
        _absent(e, half) if absent else probabilities(e, routing.weights, half),
        outputs=4,
        domain=DOMAIN,
        name="combine",
        drop_and_pad=int(padded),
    )
    return wide(e, shaped(combined[0], "tokens", config.hidden_size))


def _absent(e: Emitter, half: Half) -> ir.Value:
    """What an operator takes for no probabilities beside rows of this dtype."""
    return e.constant(np.empty((0, 0)), half or np.float32)


def _head(e: Emitter, rows: ir.Value, end: ir.Value) -> ir.Value:
    """The rows before ``end``, a vector of one integer."""
    return e.op("Slice", rows, e.constant([0]), end, e.constant([0]))


def _last(e: Emitter, rows: ir.Value) -> ir.Value:
    """The last row alone."""
    return e.op("Slice", rows, e.constant([-1]), e.constant([np.iinfo(np.int64).max]), e.constant([0]))


def _weights_of_slots(e: Emitter, routing: Routing, config: MoeOptions) -> ir.Value:
    """``[tokens, K]``, experts ascending."""
    weights = e.op("GatherElements", routing.weights, routing.expert_idx, axis=1)
    return shaped(weights, "tokens", config.num_experts_per_tok)


def _weights_of_rows(e: Emitter, slots: ir.Value, row_idx: ir.Value, rows: ir.Value) -> ir.Value:
    """``[rows, 1]``."""
    flat = e.op("Reshape", slots, e.constant([-1]))
    none = e.op("Expand", e.constant(np.float32(0)), rows)
    return e.op("Unsqueeze", e.op("ScatterElements", none, row_idx, flat, axis=0), e.constant([1]))
