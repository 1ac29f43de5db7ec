"""What the configs mean, in plain PyTorch: functions of (config, parameters, batch).

Written from the definitions, with no part of the package but the config and optimizer dataclasses:
whatever the training graphs compute has to agree with this, and ``test_torch_models.py`` holds this
to transformers' own models. Everything runs in the dtype of the parameters, float32 or float64.

Parameters are a dict of name to tensor (transformers' names and layouts), a batch is a dict of name to
integer or floating tensor. What stands at padding positions of ``logits`` means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.optimizers import SGD, AdamW

Config = MoeLMConfig | MoeLayerConfig
Tensors = Mapping[str, Tensor]


# --- Experts and their router ---------------------------------------------------------------------


@dataclass
class Routing:
    """What a router decided: kept for the losses on it."""

    logits: Tensor  # [T, E]
    experts: Tensor  # [T, K], the largest score first
    weights: Tensor  # [T, K], 0 on padding
    real: Tensor  # bool [T]
    margin: Tensor  # [T], K-th score less the next one; infinite where all experts are chosen


def route(config: Config, x: Tensor, gate: Tensor, real: Tensor) -> Routing:
    logits = x @ gate.T
    top_k = config.num_experts_per_tok
    after = config.router_scores == "top_k_then_softmax"
    scores = logits if after else torch.softmax(logits, -1)
    # Of equal scores the lower expert wins, which torch.topk does not promise.
    ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights, experts = ranked[:, :top_k], order[:, :top_k]
    if after:
        weights = torch.softmax(weights, -1)
    elif config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = torch.where(real[:, None], weights, torch.zeros_like(weights))
    with torch.no_grad():
        if top_k < config.num_experts:
            margin = ranked[:, top_k - 1] - ranked[:, top_k]
        else:
            margin = torch.full_like(ranked[:, 0], torch.inf)
    return Routing(logits, experts, weights, real, margin)


def expert(config: Config, parameters: Tensors, prefix: str, number: int, x: Tensor) -> Tensor:
    """One expert on the rows given to it."""
    if config.expert_activation == "swiglu":
        gate, up = (x @ parameters[prefix + "experts.gate_up_proj"][number].T).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
    else:
        up = x @ parameters[prefix + "experts.up_proj"][number].T
        hidden = {"gelu": F.gelu, "relu": F.relu}[config.expert_activation](up)
    return hidden @ parameters[prefix + "experts.down_proj"][number].T


def moe_mlp(
    config: Config, parameters: Tensors, prefix: str, x: Tensor, real: Tensor
) -> tuple[Tensor, Routing]:
    """The weighted sum of each token's experts; ``x`` is ``[T, H]``."""
    routing = route(config, x, parameters[prefix + "gate.weight"], real)
    out = torch.zeros_like(x)
    for number in range(config.num_experts):
        token, slot = torch.where(routing.experts == number)
        rows = expert(config, parameters, prefix, number, x[token])
        out = out.index_add(0, token, rows * routing.weights[token, slot, None])
    return out, routing


def dense_mlp(parameters: Tensors, prefix: str, x: Tensor) -> Tensor:
    gate = x @ parameters[prefix + "gate_proj.weight"].T
    up = x @ parameters[prefix + "up_proj.weight"].T
    return (F.silu(gate) * up) @ parameters[prefix + "down_proj.weight"].T


def expert_load(config: Config, routings: Sequence[Routing]) -> Tensor:
    """Real tokens of each expert, int64 ``[MoE layers, E]``."""
    loads = [torch.bincount(r.experts[r.real].flatten(), minlength=config.num_experts) for r in routings]
    return torch.stack(loads) if loads else torch.zeros(0, config.num_experts, dtype=torch.int64)


def aux_loss(config: Config, routings: Sequence[Routing]) -> Tensor | float:
    """Switch load balancing: experts times the sum over experts of (share of choices) (mean probability)."""
    if not routings:
        return 0.0
    counts = expert_load(config, routings)
    sums = torch.stack([torch.softmax(r.logits, -1)[r.real].sum(0) for r in routings])
    tokens = torch.stack([r.real.sum() for r in routings])
    if config.router_aux_loss == "pooled":
        counts, sums, tokens = (v.sum(0, keepdim=True) for v in (counts, sums, tokens))
    tokens = tokens.clamp(min=1)[:, None]
    return (config.num_experts * (counts / tokens * (sums / tokens)).sum(-1)).mean()


def z_loss(routings: Sequence[Routing]) -> Tensor | float:
    """Mean over layers of the mean over real tokens of logsumexp(router logits) squared."""
    if not routings:
        return 0.0
    return torch.stack(
        [r.logits[r.real].logsumexp(-1).square().sum() / r.real.sum().clamp(min=1) for r in routings]
    ).mean()


# --- Attention ------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of ``[B, heads, S, D]``: dimension i turns with dimension i + D/2."""
    size, length = x.shape[-1], x.shape[-2]
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def visible(config: MoeLMConfig, mask: Tensor) -> Tensor:
    """Which key (last) a query (one before) may see: bool ``[B, 1, S, S]``."""
    position = torch.arange(mask.shape[1])
    back = position[:, None] - position[None, :]
    sees = back >= 0
    if config.sliding_window is not None:
        sees = sees & (back < config.sliding_window)
    return (sees & mask[:, None, :])[:, None]


def attention(config: MoeLMConfig, parameters: Tensors, prefix: str, x: Tensor, sees: Tensor) -> Tensor:
    batch, length, _ = x.shape

    def project(name: str, value: Tensor) -> Tensor:
        out = value @ parameters[f"{prefix}{name}.weight"].T
        return out + parameters[f"{prefix}{name}.bias"] if config.attention_bias else out

    def heads(value: Tensor, number: int) -> Tensor:
        return value.reshape(batch, length, number, config.head_size)

    def normed(value: Tensor, name: str) -> Tensor:
        return rms_norm(value, parameters[f"{prefix}{name}.weight"], config.rms_norm_eps)

    q, k, v = (project(name, x) for name in ("q_proj", "k_proj", "v_proj"))
    if config.qk_norm == "full":
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    q, k, v = (
        heads(value, n)
        for value, n in ((q, config.num_attention_heads), (k, config.kv_heads), (v, config.kv_heads))
    )
    if config.qk_norm == "head":
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    if config.clip_qkv is not None:  # after the norms, as in OLMoE
        q, k, v = (value.clamp(-config.clip_qkv, config.clip_qkv) for value in (q, k, v))
    q, k, v = (value.transpose(1, 2) for value in (q, k, v))
    q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
    shared = config.num_attention_heads // config.kv_heads
    k, v = (value.repeat_interleave(shared, dim=1) for value in (k, v))
    scores = q @ k.transpose(-1, -2) * config.attention_scale
    # A padding query that sees no key must not become NaN; a finite fill gives it some mean of values.
    scores = scores.masked_fill(~sees, torch.finfo(scores.dtype).min)
    out = torch.softmax(scores, -1) @ v
    return project("o_proj", out.transpose(1, 2).reshape(batch, length, -1))


# --- Models ---------------------------------------------------------------------------------------


def forward(config: Config, parameters: Tensors, batch: Tensors) -> dict[str, Any]:
    """Losses, logits (a layer: output), expert_load and num_tokens of one batch.

    ``aux_loss`` and ``z_loss`` are given whether or not their coefficient is 0. ``num_tokens`` is what
    the loss is the mean over: positions with a label (a layer: tokens). ``margin``: the smallest
    distance of a real token's K-th router score from the next one.
    """
    if isinstance(config, MoeLayerConfig):
        out = layer(config, parameters, batch)
    else:
        out = language_model(config, parameters, batch)
    routings = out.pop("routings")
    out["aux_loss"], out["z_loss"] = aux_loss(config, routings), z_loss(routings)
    out["loss"] = (
        out["main_loss"]
        + config.router_aux_loss_coef * out["aux_loss"]
        + config.router_z_loss_coef * out["z_loss"]
    )
    out["expert_load"] = expert_load(config, routings)
    out["margin"] = min((r.margin[r.real].min().item() for r in routings if r.real.any()), default=torch.inf)
    return out


def layer(config: MoeLayerConfig, parameters: Tensors, batch: Tensors) -> dict[str, Any]:
    x = batch["hidden_states"]
    output, routing = moe_mlp(config, parameters, "", x, torch.ones(len(x), dtype=torch.bool))
    error = (output - batch["target"]).square().sum() / max(output.numel(), 1)
    return {"main_loss": error, "output": output, "num_tokens": len(x), "routings": [routing]}


def language_model(config: MoeLMConfig, parameters: Tensors, batch: Tensors) -> dict[str, Any]:
    mask = batch["attention_mask"].bool()
    sees = visible(config, mask)
    routings = []
    x = parameters["model.embed_tokens.weight"][batch["input_ids"]]
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        normed = rms_norm(x, parameters[prefix + "input_layernorm.weight"], config.rms_norm_eps)
        x = x + attention(config, parameters, prefix + "self_attn.", normed, sees)
        normed = rms_norm(x, parameters[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
        if config.is_moe_layer(number):
            tokens, routing = moe_mlp(
                config, parameters, prefix + "mlp.", normed.flatten(0, 1), mask.flatten()
            )
            routings.append(routing)
            x = x + tokens.reshape(x.shape)
        else:
            x = x + dense_mlp(parameters, prefix + "mlp.", normed)
    x = rms_norm(x, parameters["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    logits = x @ parameters[head].T
    out: dict[str, Any] = {"logits": logits, "routings": routings}
    if "labels" in batch:
        label = batch["labels"][:, 1:]
        kept = (label != config.ignore_index) & mask[:, 1:] & mask[:, :-1]
        log_prob = torch.log_softmax(logits[:, :-1], -1)
        # Where a label is left out it may be no token id at all.
        chosen = log_prob.gather(-1, label.where(kept, torch.zeros_like(label))[..., None])[..., 0]
        count = int(kept.sum())
        out["main_loss"] = -chosen.where(kept, torch.zeros_like(chosen)).sum() / max(count, 1)
        out["lm_loss"], out["num_tokens"] = out["main_loss"], count
    return out


# --- Training -------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What ``train_steps`` gives; each metric has one value for each step."""

    metrics: dict[str, list[Any]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, before clipping
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    margin: float = torch.inf  # the smallest of all steps


METRICS = ("loss", "main_loss", "aux_loss", "z_loss", "num_tokens", "expert_load")


def tensors(arrays: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Own copies as tensors, the floating ones in ``dtype``."""
    found = {name: torch.as_tensor(value).clone() for name, value in arrays.items()}
    return {name: v.to(dtype) if v.is_floating_point() else v for name, v in found.items()}


def gradients(
    config: Config, parameters: Tensors, batch: Tensors
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``forward`` and the gradient of its loss by every parameter (zeros for one without influence)."""
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    out = forward(config, leaves, batch)
    found = torch.autograd.grad(out["loss"], list(leaves.values()), allow_unused=True, materialize_grads=True)
    return out, dict(zip(leaves, found, strict=True))


def torch_optimizer(
    optimizer: AdamW | SGD, parameters: Mapping[str, torch.nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for name, p in parameters.items() if optimizer.decays(name)]},
        {"params": [p for name, p in parameters.items() if not optimizer.decays(name)], "weight_decay": 0.0},
    ]
    groups[0]["weight_decay"] = optimizer.weight_decay
    groups = [group for group in groups if group["params"]]
    if isinstance(optimizer, SGD):
        return torch.optim.SGD(groups, lr=lr, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
    return torch.optim.AdamW(groups, lr=lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)


def train_steps(
    config: Config,
    optimizer: AdamW | SGD,
    parameters: Mapping[str, Any],
    batches: Sequence[Mapping[str, Any]],
    lr: float | Sequence[float],
    dtype: torch.dtype = torch.float64,
    noise: float = 0.0,
) -> Trained:
    """One PyTorch optimizer step for each batch; ``lr`` is one number, or one for each step.

    ``noise`` perturbs each gradient that is not 0, relative to the largest of its tensor: what a run
    makes of rounding.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = {name: torch.nn.Parameter(value) for name, value in tensors(parameters, dtype).items()}
    rates = [lr] * len(batches) if isinstance(lr, (int, float)) else list(lr)
    stepper = torch_optimizer(optimizer, leaves, rates[0])
    result = Trained(metrics={name: [] for name in (*METRICS, "grad_norm")})
    for batch, rate in zip(batches, rates, strict=True):
        out, found = gradients(config, leaves, tensors(batch, dtype))
        if not result.gradients:
            result.gradients = {name: value.clone() for name, value in found.items()}
        for name, leaf in leaves.items():
            leaf.grad = found[name]
            if noise:
                random = torch.randn(leaf.shape, dtype=dtype, generator=generator)
                leaf.grad = leaf.grad + noise * leaf.grad.abs().max() * random * (leaf.grad != 0)
        limit = torch.inf if optimizer.max_grad_norm is None else optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), limit)
        for group in stepper.param_groups:
            group["lr"] = rate
        stepper.step()
        for name in METRICS:
            value = out[name]
            result.metrics[name].append(value.detach().clone() if isinstance(value, Tensor) else value)
        result.metrics["grad_norm"].append(norm)
        result.margin = min(result.margin, out["margin"])
    result.parameters = {name: leaf.detach() for name, leaf in leaves.items()}
    return result
