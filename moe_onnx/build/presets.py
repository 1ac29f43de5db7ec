"""Recipes that come with the package, by name; each is also a folder of ``models/``."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny_moe_lm": {
        "model": {
            "kind": "MoeLMConfig",
            "vocab_size": 256,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": True,
        },
        "optimizer": {"kind": "AdamW", "weight_decay": 0.01, "beta2": 0.99, "max_grad_norm": 1.0},
        "training": {"steps": 400, "batch_size": 8, "sequence_length": 128, "lr": 0.003, "seed": 0},
    },
}
