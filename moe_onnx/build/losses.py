"""Losses. Padding tokens are in none of them; a mean over nothing is 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.layers import exact_sum
from moe_onnx.build.moe import Routing


def cross_entropy(
    e: Emitter, logits: ir.Value, labels: ir.Value, attention_mask: ir.Value, ignore_index: int
) -> tuple[ir.Value, ir.Value]:
    """Mean negative log-likelihood of the next token, in nats, and over how many tokens.

        loss = mean over t of -log softmax(logits[t])[labels[t + 1]]

    where labels[t + 1] is not ``ignore_index`` and neither position is padding. The last position of
    a sequence predicts nothing.
    """
    one = e.constant([1])
    last = e.op("Concat", e.op("Shape", labels, end=1), one, axis=0)
    following = e.op("Slice", labels, one, e.constant([np.iinfo(np.int64).max]), one)
    # An empty sequence has no position to fill up.
    some = e.op(
        "Slice",
        e.op("Expand", e.constant(ignore_index), last),
        e.constant([0]),
        e.op("Shape", labels, start=1),
        one,
    )
    target = e.op("Concat", following, some, axis=1)
    mask = e.op("Cast", attention_mask, to=ir.DataType.BOOL)
    real_next = e.op("Slice", mask, one, e.constant([np.iinfo(np.int64).max]), one)
    nothing = e.op("Cast", e.op("Mul", some, e.constant(0)), to=ir.DataType.BOOL)
    both = e.op("And", mask, e.op("Concat", real_next, nothing, axis=1))
    counted = e.op("And", both, e.op("Not", e.op("Equal", target, e.constant(ignore_index))))
    flat = e.constant([-1, 1])
    counted = shaped(e.op("Reshape", counted, flat), "tokens", 1)
    label = shaped(e.op("Reshape", target, flat), "tokens", 1)
    # Labels that are left out look up class 0, and are not selected afterwards.
    label = e.op("Where", counted, label, e.constant(0))
    log_probs = e.op("LogSoftmax", logits, axis=-1)
    picked = e.op("GatherElements", log_probs, label, axis=1)
    kept = e.op("Where", counted, e.op("Neg", picked), e.constant(np.float32(0)))
    count = e.op("ReduceSum", e.op("Cast", counted, to=ir.DataType.INT64), keepdims=0, name="num_tokens")
    return e.op("Div", exact_sum(e, kept), _at_least_one(e, count), name="lm_loss"), count


def mean_squared_error(e: Emitter, output: ir.Value, target: ir.Value) -> ir.Value:
    """``mean((output - target)^2)`` over all elements."""
    rows = e.op("ReduceSumSquare", e.op("Sub", output, target), e.constant([1]), keepdims=0)
    return e.op("Div", exact_sum(e, rows), _at_least_one(e, e.op("Size", output)))


def tokens_per_expert(e: Emitter, routing: Routing, mask: ir.Value | None) -> ir.Value:
    """How many real tokens chose each expert, int64 ``[E]``."""
    chosen = routing.routing_map if mask is None else e.op("And", routing.routing_map, mask)
    return e.op("ReduceSum", e.op("Cast", chosen, to=ir.DataType.INT64), e.constant([0]), keepdims=0)


def load_balancing_loss(
    e: Emitter,
    routings: Sequence[Routing],
    loads: Sequence[ir.Value],
    mask: ir.Value | None,
    num_tokens: ir.Value,
    *,
    num_experts: int,
    kind: str,
) -> ir.Value:
    """The auxiliary loss of the Switch Transformer for K choices a token, unweighted.

        loss = E sum_e (tokens that chose e / n) (sum over tokens of softmax(logits)[e] / n)

    With ``"pooled"`` both sums run over the real tokens of all MoE layers, and n is how many these
    are (transformers' ``load_balancing_loss_func``). With ``"per_layer"`` it is the mean of the loss of
    each layer on its own. Balanced experts give K. The counts have no gradient.
    """
    zero = e.constant(np.float32(0))
    sums = []
    for routing in routings:
        probs = routing.probs if mask is None else e.op("Where", mask, routing.probs, zero)
        sums.append(exact_sum(e, probs, e.constant([0])))
    counts = [e.op("Cast", load, to=ir.DataType.FLOAT) for load in loads]
    n = _at_least_one(e, num_tokens)
    layers = len(routings)
    if kind == "pooled":
        n = e.op("Mul", n, e.like(layers, n))
        counts, sums = [_sum(e, counts)], [_sum(e, sums)]
    losses = []
    for count, total in zip(counts, sums, strict=True):
        product = e.op("Mul", e.op("Div", count, n), e.op("Div", total, n))
        losses.append(e.op("ReduceSum", product, keepdims=0))
    return e.op("Mul", _sum(e, losses), e.constant(np.float32(num_experts / len(losses))))


def router_z_loss(
    e: Emitter, routings: Sequence[Routing], mask: ir.Value | None, num_tokens: ir.Value
) -> ir.Value:
    """Mean over layers and real tokens of ``logsumexp(router logits)^2``, unweighted (ST-MoE)."""
    zero, parts = e.constant(np.float32(0)), []
    for routing in routings:
        peak = e.op("ReduceLogSumExp", routing.logits, e.constant([1]), keepdims=1)
        peak = peak if mask is None else e.op("Where", mask, peak, zero)
        parts.append(exact_sum(e, e.op("Mul", peak, peak)))
    mean = e.op("Div", _sum(e, parts), _at_least_one(e, num_tokens))
    return e.op("Mul", mean, e.constant(np.float32(1 / len(routings))))


def weighted_sum(e: Emitter, losses: Sequence[tuple[float, ir.Value]]) -> ir.Value:
    """The total loss."""
    parts = [loss if weight == 1 else e.op("Mul", loss, e.like(weight, loss)) for weight, loss in losses]
    return _sum(e, parts)


def _sum(e: Emitter, values: Sequence[ir.Value]) -> ir.Value:
    return values[0] if len(values) == 1 else e.op("Sum", *values)


def _at_least_one(e: Emitter, count: ir.Value) -> ir.Value:
    return e.op("Cast", e.op("Max", count, e.constant(1)), to=ir.DataType.FLOAT)
