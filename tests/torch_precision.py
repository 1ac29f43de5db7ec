"""What 16-bit compute means, cast by cast in plain PyTorch: written from the policy, not from the graphs.

``forward`` is ``torch_models.forward`` with roundings. Values are float32 throughout; ``half`` rounds one
to 16 bit and its gradient, the sum of all there are of it, too; ``master`` rounds a weight, whose gradient
stays as it is. Where an operator gives a 16-bit gradient of its own, ``half_gradient`` rounds that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_models
import torch_moe
from torch import Tensor
from torch_moe import SELECTION_BIAS, Config, Tensors

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, forth: bool, back: bool) -> Tensor:
        ctx.dtype = dtype if back else torch.float32
        return x.to(dtype if forth else torch.float32).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        return d.to(ctx.dtype).to(torch.float32), None, None, None


@dataclass
class Policy:
    dtype: torch.dtype

    def half(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.dtype, True, True)

    def master(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.dtype, True, False)

    def half_gradient(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.dtype, False, True)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` holds 16-bit values already, so that all who read it add to one gradient."""
        out = x @ self.master(weight).T
        return self.half(out if bias is None else out + self.master(bias))

    def weights(self, weights: Tensor) -> Tensor:
        """float32 beside bfloat16 rows, float16 beside float16 rows."""
        return self.half(weights) if self.dtype == torch.float16 else weights


def attention(
    p: Policy, config: MoeLMConfig, parameters: Tensors, prefix: str, x: Tensor, sees: Tensor
) -> Tensor:
    batch, length, _ = x.shape
    x = p.half(x)

    def project(name: str, value: Tensor) -> Tensor:
        bias = parameters[f"{prefix}{name}.bias"] if config.attention_bias else None
        return p.linear(value, parameters[f"{prefix}{name}.weight"], bias)

    def normed(value: Tensor, name: str) -> Tensor:
        return torch_models.rms_norm(value, parameters[f"{prefix}{name}.weight"], config.rms_norm_eps)

    q, k, v = (project(name, x) for name in ("q_proj", "k_proj", "v_proj"))
    if config.qk_norm == "full":
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    q, k, v = (value.reshape(batch, length, -1, config.head_size) for value in (q, k, v))
    if config.qk_norm == "head":
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    if config.clip_qkv is not None:
        q, k, v = (value.clamp(-config.clip_qkv, config.clip_qkv) for value in (q, k, v))
    q, k, v = (value.transpose(1, 2) for value in (q, k, v))
    q = torch_models.rotate(q, config.rope_theta) * config.attention_scale
    k = torch_models.rotate(k, config.rope_theta)
    q, k, v = p.half(q), p.half(k), p.half(v) if config.clip_qkv is not None else v
    shared = config.num_attention_heads // config.kv_heads
    k, v = (value.repeat_interleave(shared, dim=1) for value in (k, v))
    scores = p.half(q @ k.transpose(-1, -2))
    scores = scores.masked_fill(~sees, torch.finfo(scores.dtype).min)
    out = p.half(p.half(torch.softmax(scores, -1)) @ v)
    return project("o_proj", out.transpose(1, 2).reshape(batch, length, -1))


def dense_mlp(p: Policy, parameters: Tensors, prefix: str, x: Tensor) -> Tensor:
    gate, up = (p.linear(x, parameters[f"{prefix}{name}_proj.weight"]) for name in ("gate", "up"))
    return p.linear(p.half(F.silu(gate) * up), parameters[prefix + "down_proj.weight"])


def expert(
    p: Policy, config: Config, parameters: Tensors, prefix: str, number: int, x: Tensor, weight: Tensor | None
) -> Tensor:
    """Not rounded at last: the combine does that."""

    def of(name: str) -> Tensor | None:
        found = parameters.get(f"{prefix}experts.{name}")
        return None if found is None else found[number]

    limit = 16 if config.unroll_experts is None else config.unroll_experts
    grouped = config.num_experts > limit  # products without a bias of their own
    first = "gate_up_proj" if config.is_gated else "up_proj"
    bias = of(f"{first}_bias")
    hidden = p.linear(x, of(first), None if grouped else bias)
    if grouped and bias is not None:
        hidden = p.half(hidden + p.master(bias))
    if config.is_gated:
        gate, up = hidden.chunk(2, dim=-1)
        if config.expert_activation == "clamped_swiglu":
            gate, up = (
                gate.clamp(max=config.swiglu_limit),
                up.clamp(-config.swiglu_limit, config.swiglu_limit),
            )
            hidden = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
        else:
            hidden = {"swiglu": F.silu, "geglu": F.gelu}[config.expert_activation](gate) * up
    else:
        hidden = {"gelu": F.gelu, "relu": F.relu}[config.expert_activation](hidden)
    out = p.half(hidden if weight is None else hidden * weight) @ p.master(of("down_proj")).T
    out = p.half(out) if grouped else out
    if (bias := of("down_proj_bias")) is None:
        return out
    return out + p.master(bias) * (1.0 if weight is None else weight)


def moe_mlp(
    p: Policy,
    config: Config,
    parameters: Tensors,
    prefix: str,
    x: Tensor,
    real: Tensor,
    length: int | None = None,
    noise: Tensor | None = None,
) -> tuple[Tensor, torch_moe.Routing]:
    logits = torch_moe.router_logits(parameters, prefix, x, noise if config.noisy_top_k else None)
    bias = parameters[prefix + SELECTION_BIAS] if config.router_selection_bias else None
    routing = torch_moe.route(config, logits, real, bias, length)
    x = p.half(x)
    rows_of, in_experts = p.half_gradient(x), config.router_weights_on == "experts"
    weights = (
        routing.weights if in_experts and config.dispatch == "init_routing" else p.weights(routing.weights)
    )
    out = torch.zeros_like(x)
    for number in range(config.num_experts):
        token, slot = torch.where((routing.experts == number) & routing.kept[:, number, None])
        weight = weights[token, slot, None]
        rows = p.half_gradient(rows_of[token])
        y = p.half(expert(p, config, parameters, prefix, number, rows, weight if in_experts else None))
        out = out.index_add(0, token, y if in_experts else y * weight)
    out = p.half(out)
    if config.shared_expert_intermediate_size is not None:
        shared = "shared_expert." if config.shared_expert_gate else "shared_experts."
        y = dense_mlp(p, parameters, prefix + shared, x)
        if config.shared_expert_gate:
            y = y * torch.sigmoid(p.linear(x, parameters[prefix + "shared_expert_gate.weight"]))
        out = out + y
    return out, routing


def forward(p: Policy, config: Config, parameters: Tensors, batch: Tensors) -> dict[str, Any]:
    """By the functions above in the places of ``torch_models``' own, and with 16-bit logits."""
    with _replaced(torch_models, moe_mlp=lambda *a, **k: moe_mlp(p, *a, **k)):
        if isinstance(config, MoeLayerConfig):
            return torch_models.forward(config, parameters, batch)
        parts: dict[str, Callable[..., Any]] = {
            "attention": lambda *a: attention(p, *a),
            "dense_mlp": lambda params, prefix, x: dense_mlp(p, params, prefix, p.half(x)),
            "language_model": lambda *a: language_model(p, *a),
        }
        with _replaced(torch_models, **parts):
            return torch_models.forward(config, parameters, batch)


_PLAIN_MODEL = torch_models.language_model


def language_model(p: Policy, config: MoeLMConfig, parameters: Tensors, batch: Tensors) -> dict[str, Any]:
    """The output projection is the one product that ``torch_models`` has no function for."""
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"

    class Head:
        T = None

        def __rmatmul__(self, x: Tensor) -> Tensor:
            return p.linear(p.half(x), parameters[head])

    Head.T = Head()  # type: ignore[assignment]
    if not config.tie_word_embeddings:
        return _PLAIN_MODEL(config, {**parameters, head: Head.T}, batch)  # type: ignore[dict-item]
    untied = MoeLMConfig(**{**config.__dict__, "tie_word_embeddings": False})
    return _PLAIN_MODEL(untied, {**parameters, "lm_head.weight": Head.T}, batch)  # type: ignore[dict-item]


class _replaced:
    def __init__(self, module: Any, **parts: Any) -> None:
        self.module, self.parts = module, parts

    def __enter__(self) -> None:
        self.before = {name: getattr(self.module, name) for name in self.parts}
        for name, part in self.parts.items():
            setattr(self.module, name, part)

    def __exit__(self, *_: object) -> None:
        for name, part in self.before.items():
            setattr(self.module, name, part)
