"""The MoE layer: router, dispatch, experts, combine, and what its losses need.

The dispatch is MoeInitRoutingV2 and the combine MoeTokenUnpermuteWithRoutingMap, so that the backward
has MoeInitRoutingV2Grad and MoeTokenUnpermuteWithRoutingMapGrad.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.layers import Parameters, linear, silu
from moe_onnx.spec import DOMAIN


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one layer go.

    ``logits`` and ``probs`` (softmax over all experts) are float32 ``[tokens, E]``; ``weights``
    ``[tokens, E]`` is 0 at experts that were not chosen and in padding tokens; ``routing_map`` is bool
    ``[tokens, E]``, K true in every row; ``expert_idx`` int32 ``[tokens, K]`` ascends in every row.
    """

    logits: ir.Value
    probs: ir.Value
    weights: ir.Value
    routing_map: ir.Value
    expert_idx: ir.Value


def route(
    e: Emitter, x: ir.Value, weight: ir.Value, mask: ir.Value | None, config: MoeLayerConfig | MoeLMConfig
) -> Routing:
    """Choose K experts for each token, and their weights; ties go to the lower expert.

    ``mask`` is bool ``[tokens, 1]``, false in padding tokens, which get weight 0.
    """
    experts, top_k = config.num_experts, config.num_experts_per_tok
    logits = linear(e, x, weight)
    probs = e.op("Softmax", logits, axis=-1)
    scores = probs if config.router_scores == "softmax_then_top_k" else logits
    _, chosen = e.ops("TopK", scores, e.constant([top_k]), outputs=2, axis=-1, largest=1, sorted=1)
    # The combine pairs a token's rows with its experts in ascending order.
    ascending = e.ops("TopK", chosen, e.constant([top_k]), outputs=2, axis=-1, largest=0, sorted=1)[0]
    nowhere = e.op("Expand", e.constant(False), e.op("Shape", logits))
    here = e.op("Expand", e.constant(True), e.op("Shape", chosen))
    routing_map = e.op("ScatterElements", nowhere, chosen, here, axis=1, name="routing_map")
    zero = e.constant(np.float32(0))
    if config.router_scores == "softmax_then_top_k":
        weights = e.op("Where", routing_map, probs, zero)
        if config.norm_topk_prob:
            total = e.op("ReduceSum", weights, e.constant([1]), keepdims=1)
            weights = e.op("Div", weights, total)
    else:
        lowest = e.constant(np.float32(np.finfo(np.float32).min))
        weights = e.op("Softmax", e.op("Where", routing_map, logits, lowest), axis=-1)
    if mask is not None:
        weights = e.op("Where", mask, weights, zero)
    expert_idx = shaped(e.op("Cast", ascending, to=ir.DataType.INT32), "tokens", top_k)
    return Routing(logits, probs, shaped(weights, "tokens", experts), routing_map, expert_idx)


def moe_layer(
    e: Emitter,
    x: ir.Value,
    params: Parameters,
    prefix: str,
    mask: ir.Value | None,
    config: MoeLayerConfig | MoeLMConfig,
) -> tuple[ir.Value, Routing]:
    """``sum over the K experts of weight * expert(x)`` for each token, dropless."""
    with e.scope("router"):
        routing = route(e, x, params[f"{prefix}gate.weight"], mask, config)
    rows, row_idx, counts, _ = e.ops(
        "MoeInitRoutingV2",
        x,
        routing.expert_idx,
        outputs=4,
        domain=DOMAIN,
        name="dispatch",
        active_num=0,
        expert_capacity=0,
        expert_num=config.num_experts,
        drop_pad_mode=0,
        expert_tokens_count_or_cumsum_flag=2,
        expert_tokens_before_capacity_flag=0,
    )
    shaped(rows, "rows", config.hidden_size)
    shaped(row_idx, "rows")
    with e.scope("experts"):
        if config.num_experts <= config.unroll_experts:
            rows = _unrolled_experts(e, rows, counts, params, f"{prefix}experts.", config)
        else:
            rows = _grouped_experts(e, rows, counts, params, f"{prefix}experts.", config)
    combined = e.ops(
        "MoeTokenUnpermuteWithRoutingMap",
        shaped(rows, "rows", config.hidden_size),
        row_idx,
        routing.routing_map,
        routing.weights,
        outputs=4,
        domain=DOMAIN,
        name="combine",
        drop_and_pad=0,
    )
    return shaped(combined[0], "tokens", config.hidden_size), routing


def _activation(e: Emitter, hidden: ir.Value, config: MoeLayerConfig | MoeLMConfig) -> ir.Value:
    if config.expert_activation == "swiglu":
        gate, up = e.ops("Split", hidden, outputs=2, axis=1, num_outputs=2)
        return e.op("Mul", silu(e, gate), up)
    return e.op("Gelu" if config.expert_activation == "gelu" else "Relu", hidden)


def _first(config: MoeLayerConfig | MoeLMConfig) -> str:
    return "gate_up_proj" if config.expert_activation == "swiglu" else "up_proj"


def _up_rows(config: MoeLayerConfig | MoeLMConfig) -> int:
    return config.moe_intermediate_size * (2 if config.expert_activation == "swiglu" else 1)


def _unrolled_experts(
    e: Emitter,
    rows: ir.Value,
    counts: ir.Value,
    params: Parameters,
    prefix: str,
    config: MoeLayerConfig | MoeLMConfig,
) -> ir.Value:
    """Nodes of its own for each expert: the fastest form where experts are few."""
    experts, inner = config.num_experts, config.moe_intermediate_size
    if experts == 1:
        parts: list[ir.Value] = [rows]
    else:
        lengths = e.op("Cast", counts, to=ir.DataType.INT64)
        parts = list(e.ops("Split", rows, lengths, outputs=experts, axis=0))
    up = _matrices(e, params[f"{prefix}{_first(config)}"], experts, _up_rows(config), config.hidden_size)
    down = _matrices(e, params[f"{prefix}down_proj"], experts, config.hidden_size, inner)
    done = []
    for expert in range(experts):
        with e.scope(str(expert)):
            hidden = _activation(e, linear(e, parts[expert], up[expert]), config)
            done.append(linear(e, hidden, down[expert]))
    return done[0] if experts == 1 else e.op("Concat", *done, axis=0)


def _matrices(e: Emitter, stacked: ir.Value, experts: int, rows: int, columns: int) -> list[ir.Value]:
    """The weights of each expert as a matrix."""
    parts = (
        e.ops("Split", stacked, outputs=experts, axis=0, num_outputs=experts) if experts > 1 else [stacked]
    )
    return [e.op("Reshape", part, e.constant([rows, columns])) for part in parts]


def _grouped_experts(
    e: Emitter,
    rows: ir.Value,
    counts: ir.Value,
    params: Parameters,
    prefix: str,
    config: MoeLayerConfig | MoeLMConfig,
) -> ir.Value:
    """One node a product, however many experts there are."""
    up, down = params[f"{prefix}{_first(config)}"], params[f"{prefix}down_proj"]
    hidden = e.op("MoeGroupedMatmul", rows, up, counts, domain=DOMAIN, name="up", transpose_weight=1)
    hidden = _activation(e, shaped(hidden, "rows", _up_rows(config)), config)
    return e.op("MoeGroupedMatmul", hidden, down, counts, domain=DOMAIN, name="down", transpose_weight=1)
