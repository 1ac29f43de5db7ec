"""Runs over every router, dispatch and option of an MoE layer, compared live with PyTorch.

The whole grid of routers, modes and places of the weights is on one small layer, and the parts that a
model adds (padding, several layers, sequences) on a language model of two. ``expert_capacity`` and
``active_num`` are so small that tokens are dropped in every batch.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from golden_cases import Case, tiny_lm

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.optimizers import SGD, AdamW

Options = dict[str, Any]

BIASED: Options = {"router_selection_bias": True, "router_bias_update_rate": 0.05}
SIGMOID: Options = {"router_scores": "sigmoid", "routed_scaling_factor": 2.5}
GROUPS: Options = {"n_group": 4, "topk_group": 2}
ROUTERS: dict[str, Options] = {
    "softmax": {"norm_topk_prob": False},  # with it the weights are those of a softmax after
    "softmax_after": {"router_scores": "top_k_then_softmax"},
    "sigmoid": SIGMOID,
    "sigmoid_groups": {**SIGMOID, **BIASED, **GROUPS},
}
POSITION: Options = {"dispatch_mode": "drop_pad", "expert_capacity": 3, "token_drop_policy": "position"}
PROBS: Options = {"dispatch_mode": "drop_pad", "expert_capacity": 3, "token_drop_policy": "probs"}
ACTIVE: Options = {"dispatch_mode": "active", "active_num": 20}
MAP: Options = {"dispatch": "routing_map"}
MODES: dict[str, Options] = {
    "dropless": {},
    "active": ACTIVE,
    "position": POSITION,
    "probs": PROBS,
    "map_dropless": MAP,
    "map_position": {**MAP, **POSITION},
    "map_probs": {**MAP, **PROBS},
}
PLACES = ("combine", "experts")


def layer(**options: Any) -> MoeLayerConfig:
    small: Options = {"hidden_size": 12, "num_experts": 8, "num_experts_per_tok": 3}
    return MoeLayerConfig(**{**small, "moe_intermediate_size": 6, "router_z_loss_coef": 0.01, **options})


def model(**options: Any) -> MoeLMConfig:
    small: Options = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 6}
    return tiny_lm(**{**small, "num_key_value_heads": 2, "router_aux_loss_coef": 0.1, **options})


CONFIGS: dict[str, MoeLayerConfig | MoeLMConfig] = {
    f"{router}-{mode}-{place}": layer(**ROUTERS[router], **MODES[mode], router_weights_on=place)
    for router, mode, place in product(ROUTERS, MODES, PLACES)
}
# On a model each mode with each router once, the weights in both places by turns.
CONFIGS |= {
    f"lm-{router}-{mode}": model(
        **ROUTERS[router], **MODES[mode], router_weights_on=PLACES[(number + column) % 2]
    )
    for (number, router), (column, mode) in product(enumerate(ROUTERS), enumerate(MODES))
    if number % 2 == column % 2 or router == "sigmoid_groups"
}

# --- Options that the grid leaves alone -----------------------------------------------------------

_GROUPED: Options = {"unroll_experts": 0}
CONFIGS |= {
    f"grouped-{mode}-{place}": layer(
        **ROUTERS["sigmoid_groups"],
        **MODES[mode],
        **_GROUPED,
        router_weights_on=place,
        expert_bias=True,
        shared_expert_intermediate_size=5,
    )
    for mode, place in product(MODES, PLACES)
}
CONFIGS |= {
    f"{activation}-{kind}-{place}": layer(
        expert_activation=activation,
        expert_bias=True,
        swiglu_limit=0.5,  # so small that it clamps
        router_weights_on=place,
        **{"unrolled": PROBS, "grouped": {**_GROUPED, **POSITION}, "map": {**MAP, **PROBS}}[kind],
    )
    for activation, kind, place in product(
        ("swiglu", "geglu", "clamped_swiglu", "gelu", "relu"), ("unrolled", "grouped", "map"), PLACES
    )
}
_ONE_ROW: Options = {**PROBS, "expert_capacity": 1}
_SHARED: Options = {"shared_expert_intermediate_size": 10}
CONFIGS |= {
    # Routers
    "softmax_bias": layer(**BIASED),
    "softmax_after_bias": layer(**ROUTERS["softmax_after"], **BIASED, **PROBS),
    "softmax_after_groups": layer(**ROUTERS["softmax_after"], **BIASED, **GROUPS, routed_scaling_factor=2.0),
    "softmax_group_max": layer(**GROUPS, group_score="max", norm_topk_prob=False, routed_scaling_factor=4.0),
    "sigmoid_group_max": layer(**SIGMOID, **BIASED, **GROUPS, group_score="max"),
    "groups_of_one": layer(**SIGMOID, n_group=8, topk_group=5),
    "one_group_of_two": layer(**SIGMOID, **BIASED, n_group=2, topk_group=1),
    "all_groups": layer(**SIGMOID, n_group=4, topk_group=4),
    "sigmoid_no_norm": layer(**SIGMOID, norm_topk_prob=False, **PROBS),
    "sigmoid_top_1": layer(**SIGMOID, num_experts_per_tok=1, norm_topk_prob=False, **_ONE_ROW),
    "fixed_bias": layer(**SIGMOID, router_selection_bias=True),
    "noisy": layer(noisy_top_k=True),
    "noisy_after": layer(noisy_top_k=True, **ROUTERS["softmax_after"], **PROBS),
    "noisy_sigmoid": layer(noisy_top_k=True, **ROUTERS["sigmoid_groups"], **MAP),
    "lm-noisy": model(noisy_top_k=True, router_z_loss_coef=0.01, **PROBS),
    "lm-noisy_one_moe_layer": model(noisy_top_k=True, mlp_only_layers=(0,), **ACTIVE),
    # Capacities
    "capacity_1": layer(**_ONE_ROW),
    "capacity_of_all": layer(**{**POSITION, "expert_capacity": 9}),
    "capacity_factor": model(
        dispatch_mode="drop_pad", capacity_factor=0.5, tokens_per_batch=18, token_drop_policy="probs"
    ),
    "active_1": layer(**{**ACTIVE, "active_num": 1}),
    "active_all": layer(**{**ACTIVE, "active_num": 1000}),
    # Shared experts
    "shared": layer(**_SHARED),
    "shared_gate": layer(**_SHARED, shared_expert_gate=True, norm_topk_prob=False, **MAP),
    "lm-shared": model(**_SHARED, **ROUTERS["sigmoid_groups"], **PROBS, norm_topk_prob=False),
    "lm-shared_gate": model(**_SHARED, shared_expert_gate=True, **MAP, **POSITION, tie_word_embeddings=True),
}
# --- Losses: tokens count where they were sent, also if they are dropped --------------------------
CONFIGS |= {
    f"lm-{loss}-{router}-{mode}": model(
        router_aux_loss=loss, **{"router_aux_loss_coef": 1.0, **ROUTERS[router], **MODES[mode]}
    )
    for loss, router, mode in (
        *product(("sequence", "global"), ROUTERS, ("dropless",)),
        *product(("pooled", "per_layer"), ("sigmoid", "softmax_after"), ("map_dropless",)),
        *product(("pooled", "per_layer", "sequence", "global"), ("softmax", "sigmoid_groups"), ("probs",)),
    )
}
CONFIGS |= {
    "global": layer(router_aux_loss="global", router_aux_loss_coef=1.0),
    "lm-sequence_left": model(router_aux_loss="sequence", router_aux_loss_coef=1.0),
    "lm-sequence_one_moe_layer": model(
        router_aux_loss="sequence", router_aux_loss_coef=1.0, decoder_sparse_step=2
    ),
    "no_losses": layer(router_aux_loss_coef=0.0, router_z_loss_coef=0.0, **PROBS),
}

# Where the common seed decides something by a hair.
SEEDS = {
    "lm-sigmoid_groups-active": 12,
    "lm-noisy": 13,
    "lm-global-softmax-dropless": 12,
    "lm-pooled-softmax-probs": 19,
    "lm-per_layer-softmax-probs": 16,
    "lm-per_layer-sigmoid_groups-probs": 20,
    "lm-global-softmax-probs": 19,
}
ADAMW = AdamW(eps=1e-4)
# A bias must keep out of clipping and weight decay.
OPTIMIZERS: dict[str, AdamW | SGD] = {
    "fixed_bias": AdamW(weight_decay=0.3, eps=1e-4),
    "softmax_bias": SGD(weight_decay=0.1, max_grad_norm=0.1),
    "lm-shared": AdamW(weight_decay=0.3, max_grad_norm=0.05, eps=1e-4),
}
CASES = {
    name: Case(
        name,
        config,
        OPTIMIZERS.get(name, ADAMW),
        1e-2,
        seed=SEEDS.get(name, 11),
        left=name.endswith("_left") or name.startswith("lm-sigmoid"),
    )
    for name, config in CONFIGS.items()
}
