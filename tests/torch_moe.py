"""What an MoE layer means, in plain PyTorch: router, dispatch, experts and the losses on a router.

Written from the definitions, expert by expert and token by token, with no part of the package but the
config dataclasses; ``torch_models.py`` makes models of it, and ``test_torch_moe.py`` holds it to
transformers' own blocks and to numbers worked out by hand. Tokens are flattened: T is batch times
sequence; ``real`` is False at padding, which no expert sees.

``dispatch`` (which operators carry tokens to experts) and ``router_weights_on`` (where they are weighed)
are no part of the meaning, so nothing here reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig

Config = MoeLMConfig | MoeLayerConfig
Tensors = Mapping[str, Tensor]

GATED = ("swiglu", "geglu", "clamped_swiglu")
SELECTION_BIAS = "gate.e_score_correction_bias"


# --- Router ---------------------------------------------------------------------------------------


@dataclass
class Routing:
    """What a router decided: kept for the losses on it."""

    logits: Tensor  # [T, E], with the noise
    probabilities: Tensor  # [T, E], what the load-balancing losses take; each row sums to 1
    experts: Tensor  # [T, K], the largest choice first
    weights: Tensor  # [T, K], 0 on padding; those of dropped pairs too
    real: Tensor  # bool [T]
    kept: Tensor  # bool [T, E], the real pairs that an expert computes
    margin: Tensor  # [T], how far from another choice of experts; infinite where there is none
    drop_margin: float  # how far from another choice of dropped tokens
    length: int  # tokens of a sequence


def router_logits(parameters: Tensors, prefix: str, x: Tensor, noise: Tensor | None) -> Tensor:
    logits = x @ parameters[prefix + "gate.weight"].T
    if noise is not None:
        scale = x @ parameters[prefix + "gate.noise.weight"].T
        logits = logits + noise * torch.logaddexp(scale, torch.zeros_like(scale))  # softplus
    return logits


def in_best_groups(config: Config, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Which experts stand in the groups a token may use, bool ``[T, E]``, and how narrowly, ``[T]``."""
    groups = choice.reshape(len(choice), config.n_group, -1)
    ranked = torch.sort(groups, dim=-1, descending=True).values
    score = ranked[..., :2].sum(-1) if config.group_score == "top2_sum" else ranked[..., 0]
    ranked, order = torch.sort(score, dim=-1, descending=True, stable=True)
    used = torch.zeros_like(score, dtype=torch.bool).scatter(1, order[:, : config.topk_group], True)
    return used.repeat_interleave(groups.shape[-1], dim=1), gap(ranked, config.topk_group)


def gap(ranked: Tensor, taken: int) -> Tensor:
    """What the last one taken is larger by than the first one left out; infinite if all are taken."""
    if taken == ranked.shape[1]:
        return torch.full_like(ranked[:, 0], torch.inf)
    return (ranked[:, taken - 1] - ranked[:, taken]).detach()


def route(
    config: Config,
    logits: Tensor,
    real: Tensor,
    selection_bias: Tensor | None = None,
    length: int | None = None,
) -> Routing:
    """Choose and weigh experts, then drop what finds no row; ``length``: of a sequence, all by default."""
    top_k = config.num_experts_per_tok
    if config.router_scores == "sigmoid":
        scores = torch.sigmoid(logits)
        probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        probabilities = torch.softmax(logits, -1)
        scores = logits if config.router_scores == "top_k_then_softmax" else probabilities
    choice = scores.detach()
    if config.router_selection_bias:
        assert selection_bias is not None
        choice = choice + selection_bias.detach()
    margin = torch.full_like(choice[:, 0], torch.inf)
    if config.n_group > 1:
        usable, margin = in_best_groups(config, choice)
        choice = choice.masked_fill(~usable, -torch.inf)
    # Of equal scores the lower expert wins, which torch.topk does not promise.
    ranked, order = torch.sort(choice, dim=-1, descending=True, stable=True)
    margin = torch.minimum(margin, gap(ranked, top_k))
    experts = order[:, :top_k]
    weights = scores.gather(1, experts)
    if config.router_scores == "top_k_then_softmax":
        weights = torch.softmax(weights, -1)
    elif config.norm_topk_prob:
        least = 1e-20 if config.router_scores == "sigmoid" else 0.0
        weights = weights / (weights.sum(-1, keepdim=True) + least)
    weights = weights * config.routed_scaling_factor
    weights = torch.where(real[:, None], weights, torch.zeros_like(weights))
    kept, drop_margin = keep(config, experts, weights.detach(), real)
    return Routing(
        logits,
        probabilities,
        experts,
        weights,
        real,
        kept,
        margin,
        drop_margin,
        len(real) if length is None else length,
    )


# --- Dispatch -------------------------------------------------------------------------------------


def keep(config: Config, experts: Tensor, weights: Tensor, real: Tensor) -> tuple[Tensor, float]:
    """Which pairs get a row, bool ``[T, E]``, and how narrowly: the least difference that decided."""
    # For each expert the real tokens that chose it, in the order of the batch, with their weights.
    waiting: list[list[tuple[int, float]]] = [[] for _ in range(config.num_experts)]
    for token in torch.where(real)[0].tolist():
        for number, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            waiting[number].append((token, weight))
    rows = [(number, token) for number, tokens in enumerate(waiting) for token, _ in tokens]
    margin = torch.inf
    if config.dispatch_mode == "active":
        rows = rows[: config.active_num]
    elif config.dispatch_mode == "drop_pad":
        rows, capacity = [], config.capacity
        for number, tokens in enumerate(waiting):
            if config.token_drop_policy == "probs":
                # A stable sort: of equal weights the first token is kept.
                tokens = sorted(tokens, key=lambda pair: -pair[1])
                if len(tokens) > capacity:
                    margin = min(margin, tokens[capacity - 1][1] - tokens[capacity][1])
            rows += [(number, token) for token, _ in tokens[:capacity]]
    kept = torch.zeros(len(real), config.num_experts, dtype=torch.bool)
    for number, token in rows:
        kept[token, number] = True
    return kept, margin


# --- Experts --------------------------------------------------------------------------------------


def expert(config: Config, parameters: Tensors, prefix: str, number: int, x: Tensor) -> Tensor:
    """One expert on the rows given to it."""

    def product(name: str, value: Tensor) -> Tensor:
        out = value @ parameters[f"{prefix}experts.{name}"][number].T
        return out + parameters[f"{prefix}experts.{name}_bias"][number] if config.expert_bias else out

    kind = config.expert_activation
    if kind in GATED:
        gate, up = product("gate_up_proj", x).chunk(2, dim=-1)
        if kind == "clamped_swiglu":
            limit = config.swiglu_limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
        else:
            hidden = {"swiglu": F.silu, "geglu": F.gelu}[kind](gate) * up
    else:
        hidden = {"gelu": F.gelu, "relu": F.relu}[kind](product("up_proj", x))
    return product("down_proj", hidden)


def dense_mlp(parameters: Tensors, prefix: str, x: Tensor) -> Tensor:
    gate = x @ parameters[prefix + "gate_proj.weight"].T
    up = x @ parameters[prefix + "up_proj.weight"].T
    return (F.silu(gate) * up) @ parameters[prefix + "down_proj.weight"].T


def shared_expert(config: Config, parameters: Tensors, prefix: str, x: Tensor) -> Tensor:
    """The expert of all tokens: DeepSeek's without a gate, Qwen2-MoE's with one."""
    if not config.shared_expert_gate:
        return dense_mlp(parameters, prefix + "shared_experts.", x)
    share = torch.sigmoid(x @ parameters[prefix + "shared_expert_gate.weight"].T)
    return share * dense_mlp(parameters, prefix + "shared_expert.", x)


def moe_mlp(
    config: Config,
    parameters: Tensors,
    prefix: str,
    x: Tensor,
    real: Tensor,
    length: int | None = None,
    noise: Tensor | None = None,
) -> tuple[Tensor, Routing]:
    """The weighted sum of each token's experts, and the shared one; ``x`` is ``[T, H]``."""
    logits = router_logits(parameters, prefix, x, noise if config.noisy_top_k else None)
    bias = parameters[prefix + SELECTION_BIAS] if config.router_selection_bias else None
    routing = route(config, logits, real, bias, length)
    out = torch.zeros_like(x)
    for number in range(config.num_experts):
        token, slot = torch.where((routing.experts == number) & routing.kept[:, number, None])
        rows = expert(config, parameters, prefix, number, x[token])
        out = out.index_add(0, token, rows * routing.weights[token, slot, None])
    if config.shared_expert_intermediate_size is not None:
        out = out + shared_expert(config, parameters, prefix, x)
    return out, routing


# --- Loads and losses -----------------------------------------------------------------------------


def expert_load(config: Config, routings: Sequence[Routing]) -> Tensor:
    """Real tokens that chose each expert, dropped ones among them, int64 ``[MoE layers, E]``."""
    loads = [torch.bincount(r.experts[r.real].flatten(), minlength=config.num_experts) for r in routings]
    return torch.stack(loads) if loads else torch.zeros(0, config.num_experts, dtype=torch.int64)


def dropped(config: Config, routings: Sequence[Routing]) -> Tensor:
    """Pairs of a real token and an expert it chose that have no row, int64 ``[MoE layers]``."""
    kept = [r.kept.sum() for r in routings]
    return expert_load(config, routings).sum(1) - torch.stack(kept) if kept else torch.zeros(0).long()


def aux_loss(config: Config, routings: Sequence[Routing], before: Tensor | None = None) -> Tensor | float:
    """The load-balancing loss; ``before``: loads of a batch's earlier parts, int64 ``[MoE layers, E]``."""
    if not routings:
        return 0.0
    if config.router_aux_loss == "sequence":
        return torch.stack([sequence_loss(config, r) for r in routings]).mean()
    counts = expert_load(config, routings)
    if config.router_aux_loss == "global":
        before = torch.zeros_like(counts) if before is None else before
        losses = [global_loss(config, r, n) for r, n in zip(routings, before + counts, strict=True)]
        return torch.stack(losses).mean()
    # Switch: experts times the sum over experts of (share of choices) (mean probability).
    sums = torch.stack([r.probabilities[r.real].sum(0) for r in routings])
    tokens = torch.stack([r.real.sum() for r in routings])
    if config.router_aux_loss == "pooled":
        counts, sums, tokens = (v.sum(0, keepdim=True) for v in (counts, sums, tokens))
    tokens = tokens.clamp(min=1)[:, None]
    return (config.num_experts * (counts / tokens * (sums / tokens)).sum(-1)).mean()


def sequence_loss(config: Config, r: Routing) -> Tensor:
    """DeepSeek-V3's (equations 17 to 20): the mean of the sequences that have a real token."""
    losses = []
    for first in range(0, len(r.real), max(r.length, 1)):
        own = [t for t in range(first, first + r.length) if r.real[t]]
        if own:
            counts = torch.bincount(r.experts[own].flatten(), minlength=config.num_experts)
            share = counts * (config.num_experts / (config.num_experts_per_tok * len(own)))
            losses.append((share * r.probabilities[own].mean(0)).sum())
    return torch.stack(losses).mean() if losses else r.logits.new_zeros(())


def global_loss(config: Config, r: Routing, counts: Tensor) -> Tensor:
    """One layer's, of ``counts`` over more than this batch and probabilities of this batch alone."""
    tokens, total = int(r.real.sum()), int(counts.sum())
    if not tokens or not total:
        return r.logits.new_zeros(())
    mean = r.probabilities[r.real].mean(0)
    return config.num_experts * (counts.to(mean.dtype) / total * mean).sum()


def z_loss(routings: Sequence[Routing]) -> Tensor | float:
    """Mean over layers of the mean over real tokens of logsumexp(router logits) squared."""
    if not routings:
        return 0.0
    return torch.stack(
        [r.logits[r.real].logsumexp(-1).square().sum() / r.real.sum().clamp(min=1) for r in routings]
    ).mean()


def updated_selection_bias(config: Config, bias: Tensor, load: Tensor) -> Tensor:
    """Less where an expert's load is above the mean of its layer, more where it is below."""
    # load > mean, without rounding: the two are integers.
    above = torch.sign(load * config.num_experts - load.sum())
    return bias - config.router_bias_update_rate * above.to(bias.dtype)
