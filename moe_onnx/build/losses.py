"""Losses. Padding tokens are in none of them; a mean over nothing is 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.layers import exact_sum
from moe_onnx.build.moe_options import MoeOptions
from moe_onnx.build.router import Routing, real_choices


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
    return mean_log_loss(e, logits, label, counted)


def mean_log_loss(
    e: Emitter, logits: ir.Value, label: ir.Value, counted: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Mean of ``-log softmax(logits)[label]`` over the counted rows, and how many these are.

    ``logits`` is ``[rows, classes]``, ``label`` int64 ``[rows, 1]`` and ``counted`` bool ``[rows, 1]``.
    """
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


def load_balancing_loss(
    e: Emitter,
    routings: Sequence[Routing],
    loads: Sequence[ir.Value],
    mask: ir.Value | None,
    num_tokens: ir.Value,
    config: MoeOptions,
    *,
    sequences: ir.Value | None = None,
    loads_before: ir.Value | None = None,
) -> ir.Value:
    """The auxiliary loss of the kind ``config.router_aux_loss``, unweighted.

    With P[t, e] the router's probability (softmax of the logits; for sigmoid scores s_e / sum of s),
    c_e how many real tokens chose e (dropped ones count, too), n how many real tokens there are:

        pooled, per_layer:  E sum_e (c_e / n) (sum_t P[t, e] / n)
        sequence:           mean over sequences of  sum_e (E c_e / (K n)) (sum_t P[t, e] / n)
        global:             E sum_e (F_e / sum_e F_e) (sum_t P[t, e] / n),   F_e = before_e + c_e

    ``"pooled"`` takes c, P and n over the tokens of all MoE layers together (transformers'
    ``load_balancing_loss_func``), the others are means over layers of the loss of each. ``"sequence"``
    is that of DeepSeek-V3 (eq. 17 to 20), over the sequences that have a real token. ``"global"`` is
    Megatron's: before_e are the choices in earlier parts of the same batch, the graph input
    ``expert_load_before``. Balanced experts give K (pooled, per_layer) or 1 (sequence, global), and an
    empty batch 0. Counts have no gradient.

    ``sequences``, for ``"sequence"``, is ``[batch, sequence, E]`` as a tensor of sizes; ``loads_before``,
    for ``"global"``, int64 ``[layers, E]``.
    """
    zero, kind, experts = e.constant(np.float32(0)), config.router_aux_loss, config.num_experts
    probs = [r.probs if mask is None else e.op("Where", mask, r.probs, zero) for r in routings]
    if kind == "sequence":
        assert sequences is not None
        losses = [
            _of_sequences(e, r, p, mask, sequences, config) for r, p in zip(routings, probs, strict=True)
        ]
        return e.op("Mul", _sum(e, losses), e.constant(np.float32(1 / len(losses))))
    sums = [exact_sum(e, p, e.constant([0])) for p in probs]
    counts = [e.op("Cast", load, to=ir.DataType.FLOAT) for load in loads]
    n = _at_least_one(e, num_tokens)
    shares = [e.op("Div", count, n) for count in counts] if kind == "per_layer" else []
    if kind == "pooled":
        n = e.op("Mul", n, e.like(len(routings), n))
        shares, sums = [e.op("Div", _sum(e, counts), n)], [_sum(e, sums)]
    if kind == "global":
        assert loads_before is not None
        for i, load in enumerate(loads):
            before = e.op("Gather", loads_before, e.constant(i), axis=0)
            every = e.op("Add", before, load)
            total = _at_least_one(e, e.op("ReduceSum", every, e.constant([0]), keepdims=1))
            shares.append(e.op("Div", e.op("Cast", every, to=ir.DataType.FLOAT), total))
    losses = []
    for share, total in zip(shares, sums, strict=True):
        losses.append(e.op("ReduceSum", e.op("Mul", share, e.op("Div", total, n)), keepdims=0))
    return e.op("Mul", _sum(e, losses), e.constant(np.float32(experts / len(losses))))


def _of_sequences(
    e: Emitter,
    routing: Routing,
    probs: ir.Value,
    mask: ir.Value | None,
    sequences: ir.Value,
    config: MoeOptions,
) -> ir.Value:
    """The mean over sequences of one layer's loss."""
    parts = []
    for value in (e.op("Cast", real_choices(e, routing, mask), to=ir.DataType.FLOAT), probs):
        parts.append(exact_sum(e, e.op("Reshape", value, sequences, allowzero=1), e.constant([1])))
    counts, sums = parts  # [batch, E]
    # Every token chooses K.
    n_k = e.op("ReduceSum", counts, e.constant([1]), keepdims=1)
    n = e.op("Max", e.op("Div", n_k, e.constant(np.float32(config.num_experts_per_tok))), e.like(1.0, counts))
    product = e.op("Mul", e.op("Div", counts, n), e.op("Div", sums, n))
    each = e.op("ReduceSum", product, e.constant([1]), keepdims=0)
    real = e.op("Cast", e.op("Greater", n_k, e.like(0.0, n_k)), to=ir.DataType.INT64)
    mean = e.op("Div", exact_sum(e, each), _at_least_one(e, e.op("ReduceSum", real, keepdims=0)))
    scale = config.num_experts / config.num_experts_per_tok
    return e.op("Mul", mean, e.constant(np.float32(scale)))


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


def nan_logits(e: Emitter, routings: Sequence[Routing], mask: ir.Value | None) -> ir.Value:
    """How many router logits of real tokens are NaN: a dispatch that drops tokens could hide them."""
    found = []
    for routing in routings:
        bad = e.op("IsNaN", routing.logits)
        bad = bad if mask is None else e.op("And", bad, mask)
        found.append(e.op("ReduceSum", e.op("Cast", bad, to=ir.DataType.INT64), keepdims=0))
    return _sum(e, found)


def weighted_sum(e: Emitter, losses: Sequence[tuple[float, ir.Value]]) -> ir.Value:
    """The total loss."""
    parts = [loss if weight == 1 else e.op("Mul", loss, e.like(weight, loss)) for weight, loss in losses]
    return _sum(e, parts)


def _sum(e: Emitter, values: Sequence[ir.Value]) -> ir.Value:
    if len(values) == 1:
        return values[0]
    if values[0].dtype != ir.DataType.INT64:
        return e.op("Sum", *values)
    total = values[0]  # onnx has Sum for floats only
    for value in values[1:]:
        total = e.op("Add", total, value)
    return total


def _at_least_one(e: Emitter, count: ir.Value) -> ir.Value:
    return e.op("Cast", e.op("Max", count, e.constant(1)), to=ir.DataType.FLOAT)
