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
} | FULL_SIZE
