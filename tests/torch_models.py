"""What the configs mean, in plain PyTorch: functions of (config, parameters, batch).

Written from the definitions, with no part of the package but the config and optimizer dataclasses:
whatever the training graphs compute has to agree with this, and ``test_torch_models.py`` holds this
to transformers' own models. Everything runs in the dtype of the parameters, float32 or float64. The
MoE layer itself is in ``torch_moe.py``.

Parameters are a dict of name to tensor (transformers' names and layouts), a batch is a dict of name to
integer or floating tensor; ``router_noise`` and ``expert_load_before`` may be left out of one, for none.
What stands at padding positions of ``logits`` means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_moe
from golden_cases import is_trained
from torch import Tensor
from torch_moe import SELECTION_BIAS, Config, Tensors, dense_mlp, moe_mlp

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.optimizers import SGD, AdamW

torch.set_num_threads(1)  # tests run side by side, on tensors that are too small to share

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
        bias = config.attention_bias or (config.qkv_bias and name != "o_proj")
        return out + parameters[f"{prefix}{name}.bias"] if bias else out

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
    """Losses, logits (a layer: output), expert_load, dropped and num_tokens of one batch.

    ``aux_loss`` and ``z_loss`` are given whether or not their coefficient is 0. ``num_tokens`` is what
    the loss is the mean over: positions with a label (a layer: tokens). ``kept``: for each MoE layer
    which pairs have a row, bool ``[T, E]``. ``margin``: the smallest distance that decided anything: of
    a real token's K-th router score from the next one, of its last group from the next one, and of
    the last weight an expert kept from the first it dropped.
    """
    if isinstance(config, MoeLayerConfig):
        out = layer(config, parameters, batch)
    else:
        out = language_model(config, parameters, batch)
    routings = out.pop("routings")
    out["aux_loss"] = torch_moe.aux_loss(config, routings, batch.get("expert_load_before"))
    out["z_loss"] = torch_moe.z_loss(routings)
    out["loss"] = (
        out["main_loss"]
        + config.router_aux_loss_coef * out["aux_loss"]
        + config.router_z_loss_coef * out["z_loss"]
    )
    out["expert_load"] = torch_moe.expert_load(config, routings)
    out["dropped"] = torch_moe.dropped(config, routings)
    out["kept"] = [r.kept for r in routings]
    chosen = [r.margin[r.real].min().item() for r in routings if r.real.any()]
    out["margin"] = min([*chosen, *(r.drop_margin for r in routings)], default=torch.inf)
    return out


def moe_prefixes(config: Config) -> list[str]:
    """What the parameters of each MoE layer begin with, in the order of all that is by layer."""
    if isinstance(config, MoeLayerConfig):
        return [""]
    layers = range(config.num_hidden_layers)
    return [f"model.layers.{number}.mlp." for number in layers if config.is_moe_layer(number)]


def noise_of(batch: Tensors, layer: int) -> Tensor | None:
    return batch["router_noise"][layer] if "router_noise" in batch else None


def layer(config: MoeLayerConfig, parameters: Tensors, batch: Tensors) -> dict[str, Any]:
    x = batch["hidden_states"]
    real = torch.ones(len(x), dtype=torch.bool)
    output, routing = moe_mlp(config, parameters, "", x, real, noise=noise_of(batch, 0))
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
                config,
                parameters,
                prefix + "mlp.",
                normed.flatten(0, 1),
                mask.flatten(),
                length=mask.shape[1],
                noise=noise_of(batch, len(routings)),
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


METRICS = ("loss", "main_loss", "aux_loss", "z_loss", "num_tokens", "expert_load", "dropped")


def tensors(arrays: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Own copies as tensors, the floating ones in ``dtype``."""
    found = {name: torch.as_tensor(value).clone() for name, value in arrays.items()}
    return {name: v.to(dtype) if v.is_floating_point() else v for name, v in found.items()}


def gradients(
    config: Config, parameters: Tensors, batch: Tensors
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``forward`` and the gradient of its loss by every parameter (zeros for one without influence)."""
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items() if is_trained(name)}
    out = forward(config, {**parameters, **leaves}, batch)
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
    values = tensors(parameters, dtype)
    biases = {name: value for name, value in values.items() if not is_trained(name)}
    leaves = {name: torch.nn.Parameter(value) for name, value in values.items() if is_trained(name)}
    rates = [lr] * len(batches) if isinstance(lr, (int, float)) else list(lr)
    stepper = torch_optimizer(optimizer, leaves, rates[0])
    result = Trained(metrics={name: [] for name in (*METRICS, "grad_norm")})
    for batch, rate in zip(batches, rates, strict=True):
        out, found = gradients(config, {**leaves, **biases}, tensors(batch, dtype))
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
        if biases:  # by a rule of their own: no optimizer, decay or clipping has to do with them
            for prefix, load in zip(moe_prefixes(config), out["expert_load"], strict=True):
                name = prefix + SELECTION_BIAS
                biases[name] = torch_moe.updated_selection_bias(config, biases[name], load)
        for name in METRICS:
            value = out[name]
            result.metrics[name].append(value.detach().clone() if isinstance(value, Tensor) else value)
        result.metrics["grad_norm"].append(norm)
        result.margin = min(result.margin, out["margin"])
    result.parameters = {name: value.detach() for name, value in {**leaves, **biases}.items()}
    return result
