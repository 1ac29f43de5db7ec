"""Recipes that come with the package, by name; each is also a folder of ``models/``."""

from __future__ import annotations

from typing import Any

from moe_onnx.build.full_size import FULL_SIZE

_SIZES: dict[str, Any] = {
    "kind": "MoeLMConfig",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_OPTIMIZER = {"kind": "AdamW", "weight_decay": 0.01, "beta2": 0.99, "max_grad_norm": 1.0}
_TRAINING = {"steps": 400, "batch_size": 8, "sequence_length": 128, "lr": 0.003, "seed": 0}

# One of each architecture, as small as it may be and still have all that makes it one; full_size.py has the
# sizes of its checkpoint.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "tiny_mixtral_lm": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    "tiny_qwen2_moe_lm": {
        "num_key_value_heads": 4,
        "qkv_bias": True,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
        "shared_expert_gate": True,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "tiny_qwen3_moe_lm": {
        "head_dim": 16,
        "qk_norm": "head",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "tiny_olmoe_lm": {
        "num_key_value_heads": 4,
        "qk_norm": "full",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
}
_SMALLER = {"hidden_size": 32}
_SHORTER = {"batch_size": 4, "sequence_length": 64}

_MODELS: dict[str, dict[str, Any]] = {
    "tiny_moe_lm": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": True,
    },
    "tiny_capacity_lm": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "dispatch_mode": "drop_pad",
        "capacity_factor": 1.25,
        "token_drop_policy": "probs",
        "router_aux_loss": "per_layer",
        "router_aux_loss_coef": 0.01,
        "router_z_loss_coef": 0.001,
        "tie_word_embeddings": True,
    },
    "tiny_deepseek_lm": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "dispatch": "routing_map",
        "router_scores": "sigmoid",
        "routed_scaling_factor": 2.5,
        "router_selection_bias": True,
        "router_bias_update_rate": 0.001,
        "n_group": 4,
        "topk_group": 2,
        "router_aux_loss": "sequence",
        "router_aux_loss_coef": 0.0001,
        "tie_word_embeddings": True,
    },
    "tiny_active_lm": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "expert_activation": "geglu",
        "dispatch_mode": "active",
        "active_num": 1920,
        "router_scores": "top_k_then_softmax",
        "router_weights_on": "experts",
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": True,
    },
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    name: {"model": {**_SIZES, **model}, "optimizer": dict(_OPTIMIZER), "training": dict(_TRAINING)}
    for name, model in _MODELS.items()
}
PRESETS |= {
    name: {
        "model": {**_SIZES, **_SMALLER, **model},
        "optimizer": dict(_OPTIMIZER),
        "training": {**_TRAINING, **_SHORTER},
    }
    for name, model in ARCHITECTURES.items()
}
PRESETS |= FULL_SIZE
