"""Recipes of real checkpoints: their sizes, of which graphs are made, and no weights."""

from __future__ import annotations

from typing import Any

_OPTIMIZER = {"kind": "AdamW", "weight_decay": 0.1, "beta2": 0.95, "max_grad_norm": 1.0}

# By the config.json of the checkpoint; what stands there and is the default here is said all the same.
_MODELS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {  # mistralai/Mixtral-8x7B-v0.1
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14336,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    "qwen3-30b-a3b": {  # Qwen/Qwen3-30B-A3B
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "qk_norm": "head",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "qwen1.5-moe-a2.7b": {  # Qwen/Qwen1.5-MoE-A2.7B, architecture qwen2_moe
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "shared_expert_gate": True,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "olmoe-1b-7b": {  # allenai/OLMoE-1B-7B-0924
        "vocab_size": 50304,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qk_norm": "full",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
}

# Without a table "training": nobody trains them with these defaults, and the shelf records no losses.
FULL_SIZE: dict[str, dict[str, dict[str, Any]]] = {
    name: {"model": {"kind": "MoeLMConfig", **model}, "optimizer": dict(_OPTIMIZER)}
    for name, model in _MODELS.items()
}
