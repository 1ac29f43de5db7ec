"""The router: which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.layers import Parameters, linear
from moe_onnx.build.moe_options import MoeOptions

SELECTION_BIAS = "gate.e_score_correction_bias"
SIGMOID_EPS = 1e-20  # added to sums of sigmoid scores, as DeepSeek-V3 does


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one layer want to go; a dispatch of limited rows may drop some.

    ``logits`` and ``probs`` (scores over all experts that sum to 1) are float32 ``[tokens, E]``;
    ``weights`` ``[tokens, E]`` is 0 at experts that were not chosen and in padding tokens;
    ``routing_map`` is bool ``[tokens, E]``, K true in every row; ``expert_idx`` int32 ``[tokens, K]``
    ascends in every row. ``dropped`` counts the real pairs of token and expert that got no row, where
    that may happen.
    """

    logits: ir.Value
    probs: ir.Value
    weights: ir.Value
    routing_map: ir.Value
    expert_idx: ir.Value
    dropped: ir.Value | None = None


def route(
    e: Emitter,
    x: ir.Value,
    params: Parameters,
    prefix: str,
    mask: ir.Value | None,
    noise: ir.Value | None,
    config: MoeOptions,
) -> Routing:
    """Choose K experts for each token, and their weights; ties go to the lower expert.

    A NaN logit ranks first, so that it is chosen and its weight makes the loss NaN, unless the dispatch
    drops it; graphs that may drop count such logits in the metric ``nan_router_logits``.

    ``mask`` is bool ``[tokens, 1]``, false in padding tokens, which get weight 0; ``noise`` float32
    ``[tokens, E]``, standard normal. None: no padding, no noise.
    """
    top_k = config.num_experts_per_tok
    logits = linear(e, x, params[f"{prefix}gate.weight"])
    if noise is not None:
        spread = e.op("Softplus", linear(e, x, params[f"{prefix}gate.noise.weight"]))
        logits = e.op("Add", logits, e.op("Mul", noise, spread))
    probs, scores = _scores(e, logits, config)
    choice = scores
    if config.router_selection_bias:
        choice = e.op("Add", scores, params[f"{prefix}{SELECTION_BIAS}"])
    if config.topk_group < config.n_group:
        choice = _within_groups(e, choice, config)
    _, chosen = e.ops("TopK", choice, e.constant([top_k]), outputs=2, axis=-1, largest=1, sorted=1)
    # The combine pairs a token's rows with its experts in ascending order.
    ascending = e.ops("TopK", chosen, e.constant([top_k]), outputs=2, axis=-1, largest=0, sorted=1)[0]
    routing_map = mark(e, chosen, logits, axis=1, name="routing_map")
    weights = _weights(e, logits, scores, routing_map, config)
    if mask is not None:
        weights = e.op("Where", mask, weights, e.constant(np.float32(0)))
    expert_idx = shaped(e.op("Cast", ascending, to=ir.DataType.INT32), "tokens", top_k)
    return Routing(logits, probs, shaped(weights, "tokens", config.num_experts), routing_map, expert_idx)


def mark(e: Emitter, index: ir.Value, like: ir.Value, *, axis: int, name: str) -> ir.Value:
    """A bool tensor of the shape of ``like``, true where ``index`` points to along an axis."""
    nowhere = e.op("Expand", e.constant(False), e.op("Shape", like))
    here = e.op("Expand", e.constant(True), e.op("Shape", index))
    return e.op("ScatterElements", nowhere, index, here, axis=axis, name=name)


def real_choices(e: Emitter, routing: Routing, mask: ir.Value | None) -> ir.Value:
    """The routing map without padding tokens."""
    return routing.routing_map if mask is None else e.op("And", routing.routing_map, mask)


def tokens_per_expert(e: Emitter, chosen: ir.Value) -> ir.Value:
    """How many tokens of a map chose each expert, int64 ``[E]``."""
    return e.op("ReduceSum", e.op("Cast", chosen, to=ir.DataType.INT64), e.constant([0]), keepdims=0)


def _scores(e: Emitter, logits: ir.Value, config: MoeOptions) -> tuple[ir.Value, ir.Value]:
    """Probabilities over all experts for the losses, and what experts are chosen by."""
    if config.router_scores == "sigmoid":
        scores = e.op("Sigmoid", logits)
        return e.op("Div", scores, _sum_of_scores(e, scores)), scores
    probs = e.op("Softmax", logits, axis=-1)
    return probs, probs if config.router_scores == "softmax_then_top_k" else logits


def _within_groups(e: Emitter, choice: ir.Value, config: MoeOptions) -> ir.Value:
    """``choice`` in the best groups, -inf elsewhere.

    Not 0, as in transformers' DeepSeek-V3: with a negative bias that would beat experts of good groups.
    """
    groups, size = config.n_group, config.num_experts // config.n_group
    grouped = e.op("Reshape", choice, e.constant([0, groups, size]))
    best = e.constant([min(2 if config.group_score == "top2_sum" else 1, size)])
    largest, _ = e.ops("TopK", grouped, best, outputs=2, axis=-1, largest=1, sorted=1)
    score = e.op("ReduceSum", largest, e.constant([-1]), keepdims=0)
    _, chosen = e.ops("TopK", score, e.constant([config.topk_group]), outputs=2, axis=-1, largest=1, sorted=1)
    allowed = e.op("Unsqueeze", mark(e, chosen, score, axis=1, name="group_map"), e.constant([-1]))
    left = e.op("Where", allowed, grouped, e.constant(np.float32(-np.inf)))
    return e.op("Reshape", left, e.constant([0, config.num_experts]))


def _weights(
    e: Emitter, logits: ir.Value, scores: ir.Value, routing_map: ir.Value, config: MoeOptions
) -> ir.Value:
    if config.router_scores == "top_k_then_softmax":
        lowest = e.constant(np.float32(np.finfo(np.float32).min))
        weights = e.op("Softmax", e.op("Where", routing_map, logits, lowest), axis=-1)
    else:
        weights = e.op("Where", routing_map, scores, e.constant(np.float32(0)))
        # A bias can choose experts whose scores are all 0.
        if config.norm_topk_prob and (config.router_scores == "sigmoid" or config.router_selection_bias):
            weights = e.op("Div", weights, _sum_of_scores(e, weights))
        elif config.norm_topk_prob:
            weights = e.op("Div", weights, e.op("ReduceSum", weights, e.constant([1]), keepdims=1))
    if config.routed_scaling_factor != 1:
        weights = e.op("Mul", weights, e.constant(np.float32(config.routed_scaling_factor)))
    return weights


def _sum_of_scores(e: Emitter, scores: ir.Value) -> ir.Value:
    total = e.op("ReduceSum", scores, e.constant([1]), keepdims=1)
    return e.op("Add", total, e.constant(np.float32(SIGMOID_EPS)))
