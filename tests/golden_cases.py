"""Tiny training runs whose results are recorded: configs, optimizers, parameters, batches.

Everything is made by numpy from a seed, by nothing of the package but its config and optimizer
dataclasses; ``goldens/make.py`` records with PyTorch, and whoever checks against the records needs
no PyTorch. AdamW turns rounding in a gradient near 0 into a step of full length, so most cases have
a larger eps: ``goldens/make.py`` checks that noise of float32's size leaves the results alone.

    case = CASES["mixtral"]
    parameters, batches = case.parameters(), case.batches()     # batches: one for each step
    golden = case.golden()                                       # name -> array, see goldens/make.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.optimizers import SGD, AdamW

GOLDENS = Path(__file__).parent / "goldens"
STEPS = 5
Arrays = dict[str, np.ndarray[Any, Any]]


def parameter_shapes(config: MoeLMConfig | MoeLayerConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters, as transformers has them."""
    if isinstance(config, MoeLayerConfig):
        return _expert_shapes(config, "")
    hidden, size = config.hidden_size, config.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        queries, keys = config.num_attention_heads * size, config.kv_heads * size
        projections = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
        }
        for name, shape in projections.items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape
            if config.attention_bias or (config.qkv_bias and name != "o_proj"):
                shapes[f"{layer}self_attn.{name}.bias"] = shape[:1]
        if config.qk_norm != "none":
            head = config.qk_norm == "head"
            shapes[layer + "self_attn.q_norm.weight"] = (size if head else queries,)
            shapes[layer + "self_attn.k_norm.weight"] = (size if head else keys,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if config.is_moe_layer(number):
            shapes |= _expert_shapes(config, layer + "mlp.")
        else:
            shapes[layer + "mlp.gate_proj.weight"] = (config.intermediate_size, hidden)
            shapes[layer + "mlp.up_proj.weight"] = (config.intermediate_size, hidden)
            shapes[layer + "mlp.down_proj.weight"] = (hidden, config.intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _expert_shapes(config: MoeLMConfig | MoeLayerConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    gated = config.expert_activation in ("swiglu", "geglu", "clamped_swiglu")
    first, rows = ("gate_up_proj", 2 * inner) if gated else ("up_proj", inner)
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (experts, hidden),
        f"experts.{first}": (experts, rows, hidden),
        "experts.down_proj": (experts, hidden, inner),
    }
    if config.noisy_top_k:
        shapes["gate.noise.weight"] = (experts, hidden)
    if config.router_selection_bias:
        shapes["gate.e_score_correction_bias"] = (experts,)
    if config.expert_bias:
        shapes[f"experts.{first}_bias"] = (experts, rows)
        shapes["experts.down_proj_bias"] = (experts, hidden)
    if (size := config.shared_expert_intermediate_size) is not None:
        shared = "shared_expert." if config.shared_expert_gate else "shared_experts."
        shapes[shared + "gate_proj.weight"] = (size, hidden)
        shapes[shared + "up_proj.weight"] = (size, hidden)
        shapes[shared + "down_proj.weight"] = (hidden, size)
        if config.shared_expert_gate:
            shapes["shared_expert_gate.weight"] = (1, hidden)
    return {prefix + name: shape for name, shape in shapes.items()}


def is_trained(name: str) -> bool:
    """Whether a parameter has a gradient: all but the bias that experts are chosen by."""
    return not name.endswith("gate.e_score_correction_bias")


def random_parameters(config: MoeLMConfig | MoeLayerConfig, seed: int) -> Arrays:
    """Parameters large enough for every part to matter: norms not ones, biases not zeros."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in parameter_shapes(config).items():
        value = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * value
        elif name.endswith("bias"):
            value = 0.3 * value
        elif not name.endswith("embed_tokens.weight"):
            value = value / np.sqrt(shape[-1])
        found[name] = value.astype(np.float32)
    return found


def random_mask(rng: np.random.Generator, batch: int, sequence: int, left: bool = False) -> Any:
    """One row without padding, the others padded at their ends; ``left``: the last row at its beginning."""
    lengths = rng.integers(2, sequence, batch)
    lengths[0] = sequence
    mask = (np.arange(sequence) < lengths[:, None]).astype(np.int64)
    if left:
        mask[-1] = mask[-1, ::-1]
    return mask


@dataclass(frozen=True)
class Case:
    """One recorded run."""

    name: str
    config: MoeLMConfig | MoeLayerConfig
    optimizer: AdamW | SGD
    lr: float
    seed: int
    left: bool = False  # the last row of each batch is padded at its beginning

    def parameters(self) -> Arrays:
        return random_parameters(self.config, self.seed)

    def batches(self) -> list[Arrays]:
        """A batch for each step. Labels at padding positions are token ids, to be left out by the mask."""
        rng = np.random.default_rng([self.seed, 1])
        return [self._batch(rng) for _ in range(STEPS)]

    def _batch(self, rng: np.random.Generator) -> Arrays:
        if isinstance(self.config, MoeLayerConfig):
            shape = (int(rng.integers(9, 14)), self.config.hidden_size)
            names = ("hidden_states", "target")
            found = {name: rng.standard_normal(shape).astype(np.float32) for name in names}
            return found | self._routing_inputs(rng, 1, shape[0])
        batch, sequence = 3, int(rng.integers(6, 9))
        ids = rng.integers(0, self.config.vocab_size, (batch, sequence))
        labels = np.where(rng.random(ids.shape) < 0.15, self.config.ignore_index, ids)
        mask = random_mask(rng, batch, sequence, self.left)
        layers = sum(map(self.config.is_moe_layer, range(self.config.num_hidden_layers)))
        found = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        return found | self._routing_inputs(rng, layers, ids.size)

    def _routing_inputs(self, rng: np.random.Generator, layers: int, tokens: int) -> Arrays:
        config, found = self.config, {}
        if config.noisy_top_k:
            noise = rng.standard_normal((layers, tokens, config.num_experts))
            found["router_noise"] = noise.astype(np.float32)
        if config.router_aux_loss == "global":
            found["expert_load_before"] = rng.integers(0, 9, (layers, config.num_experts))
        return found

    def golden(self) -> Arrays:
        with np.load(GOLDENS / f"{self.name}.npz") as file:
            return dict(file)


def tiny_lm(**options: Any) -> MoeLMConfig:
    small = {"vocab_size": 24, "hidden_size": 16, "num_experts": 4, "moe_intermediate_size": 8}
    heads = {"num_attention_heads": 4, "intermediate_size": 12}
    return MoeLMConfig(**{**small, **heads, **options})


_ALL = (
    Case(
        "mixtral",
        tiny_lm(num_key_value_heads=2, rms_norm_eps=1e-5),
        AdamW(max_grad_norm=0.5, eps=1e-4),
        1e-2,
        1,
    ),
    Case(
        "qwen3_dense_tied",
        tiny_lm(
            num_key_value_heads=2,
            head_dim=6,
            qk_norm="head",
            mlp_only_layers=(0,),
            tie_word_embeddings=True,
            rope_theta=1000.0,
            sliding_window=4,
        ),
        AdamW(weight_decay=0.1, beta2=0.95, eps=1e-3),
        1e-2,
        2,
        left=True,
    ),
    Case(
        "olmoe",
        tiny_lm(qk_norm="full", clip_qkv=1.0, norm_topk_prob=False, moe_intermediate_size=6),
        SGD(momentum=0.9, weight_decay=0.01, max_grad_norm=2.0),
        5e-2,
        3,
    ),
    Case(
        "top_k_then_softmax",
        tiny_lm(
            router_scores="top_k_then_softmax",
            router_aux_loss="per_layer",
            router_aux_loss_coef=0.05,
            router_z_loss_coef=0.01,
            num_key_value_heads=1,
            num_experts=5,
            moe_intermediate_size=6,
            ignore_index=-1,
        ),
        SGD(momentum=0.8, nesterov=True, max_grad_norm=None),
        5e-2,
        4,
        left=True,
    ),
    Case(
        "gelu_bias",
        tiny_lm(expert_activation="gelu", attention_bias=True, num_experts_per_tok=3, num_hidden_layers=1),
        AdamW(weight_decay=0.0, max_grad_norm=None, eps=1e-5),
        1e-2,
        5,
    ),
    Case(
        "grouped",
        tiny_lm(
            num_experts=20,
            moe_intermediate_size=4,
            num_experts_per_tok=4,
            num_hidden_layers=1,
            router_z_loss_coef=0.01,
        ),
        AdamW(eps=1e-4),
        1e-2,
        8,
    ),
    Case(
        "capacity",
        tiny_lm(
            dispatch_mode="drop_pad",
            expert_capacity=14,
            router_weights_on="combine",
            expert_bias=True,
            expert_activation="clamped_swiglu",
            num_experts=5,
            moe_intermediate_size=6,
        ),
        AdamW(eps=1e-4),
        1e-2,
        9,
    ),
    Case(
        "deepseek",
        tiny_lm(
            dispatch="routing_map",
            dispatch_mode="drop_pad",
            expert_capacity=16,
            token_drop_policy="position",
            router_weights_on="experts",
            router_scores="sigmoid",
            routed_scaling_factor=2.5,
            router_selection_bias=True,
            router_bias_update_rate=0.05,
            n_group=4,
            topk_group=2,
            router_aux_loss="sequence",
            router_aux_loss_coef=0.1,
            shared_expert_intermediate_size=5,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=6,
        ),
        AdamW(eps=1e-4),
        1e-2,
        10,
    ),
    Case(
        "layer_swiglu",
        MoeLayerConfig(hidden_size=16, num_experts=4, moe_intermediate_size=8, router_z_loss_coef=0.01),
        AdamW(weight_decay=0.1),
        1e-2,
        7,
    ),
    Case(
        "layer_relu",
        MoeLayerConfig(
            hidden_size=16,
            num_experts=3,
            num_experts_per_tok=1,
            moe_intermediate_size=12,
            expert_activation="relu",
            norm_topk_prob=False,
        ),
        SGD(weight_decay=0.01),
        5e-1,
        8,
    ),
)
CASES = {case.name: case for case in _ALL}
