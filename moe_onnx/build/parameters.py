"""The parameters of a model: names, shapes and first values. Names are those of transformers (5.x)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.experts import first_projection
from moe_onnx.build.router import SELECTION_BIAS
from moe_onnx.errors import ConfigError

_FILLS = {"ones": 1.0, "zeros": 0.0}


@dataclass(frozen=True)
class Parameter:
    """A tensor of a model; ``init`` is ``"normal"`` (of standard deviation ``std``), ``"ones"``, ``"zeros"``.

    What is not ``trained`` has no gradient: a router's selection bias, updated by the loads of experts.
    """

    name: str
    shape: tuple[int, ...]
    init: str = "normal"
    std: float = 0.0
    trained: bool = True

    def first_value(self, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The value training starts from. Each name has a random stream of its own.

        So a parameter starts the same whatever others a model has, and in whatever order.
        """
        if self.init in _FILLS:
            return np.full(self.shape, _FILLS[self.init], np.float32)
        if self.init != "normal":
            known = ", ".join(["normal", *_FILLS])
            raise ConfigError(f"Parameter '{self.name}': init must be one of {known}, got {self.init!r}.")
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        return rng.standard_normal(self.shape, np.float32) * np.float32(self.std)


def parameters_of(config: MoeLayerConfig | MoeLMConfig) -> list[Parameter]:
    """All parameters of a model, in the order of its graphs' inputs."""
    return list(_layer(config) if isinstance(config, MoeLayerConfig) else _language_model(config))


def _layer(config: MoeLayerConfig) -> Iterator[Parameter]:
    yield from _experts("", config)


def _language_model(config: MoeLMConfig) -> Iterator[Parameter]:
    std, hidden, size = config.initializer_range, config.hidden_size, config.head_size
    heads = {"q": config.num_attention_heads, "k": config.kv_heads, "v": config.kv_heads}
    yield Parameter("model.embed_tokens.weight", (config.vocab_size, hidden), std=std)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield Parameter(f"{prefix}input_layernorm.weight", (hidden,), "ones")
        attention = f"{prefix}self_attn."
        for name, count in heads.items():
            yield from _linear(
                f"{attention}{name}_proj", count * size, hidden, std, config.attention_bias or config.qkv_bias
            )
        yield from _linear(f"{attention}o_proj", hidden, heads["q"] * size, std, config.attention_bias)
        if config.qk_norm != "none":
            for name in ("q", "k"):
                length = size if config.qk_norm == "head" else heads[name] * size
                yield Parameter(f"{attention}{name}_norm.weight", (length,), "ones")
        yield Parameter(f"{prefix}post_attention_layernorm.weight", (hidden,), "ones")
        if config.is_moe_layer(layer):
            yield from _experts(f"{prefix}mlp.", config)
        else:
            for name in ("gate", "up"):
                yield Parameter(
                    f"{prefix}mlp.{name}_proj.weight", (config.intermediate_size, hidden), std=std
                )
            yield Parameter(f"{prefix}mlp.down_proj.weight", (hidden, config.intermediate_size), std=std)
    yield Parameter("model.norm.weight", (hidden,), "ones")
    if not config.tie_word_embeddings:
        yield Parameter("lm_head.weight", (config.vocab_size, hidden), std=std)


def _linear(name: str, rows: int, columns: int, std: float, bias: bool) -> Sequence[Parameter]:
    weight = Parameter(f"{name}.weight", (rows, columns), std=std)
    return [weight, Parameter(f"{name}.bias", (rows,), "zeros")] if bias else [weight]


def _experts(prefix: str, config: MoeLayerConfig | MoeLMConfig) -> Iterator[Parameter]:
    std, hidden, inner = config.initializer_range, config.hidden_size, config.moe_intermediate_size
    count = config.num_experts
    yield Parameter(f"{prefix}gate.weight", (count, hidden), std=std)
    if config.noisy_top_k:
        yield Parameter(f"{prefix}gate.noise.weight", (count, hidden), "zeros")
    if config.router_selection_bias:
        yield Parameter(f"{prefix}{SELECTION_BIAS}", (count,), "zeros", trained=False)
    first, rows = first_projection(config)
    for name, shape in ((first, (count, rows, hidden)), ("down_proj", (count, hidden, inner))):
        yield Parameter(f"{prefix}experts.{name}", shape, std=std)
        if config.expert_bias:
            yield Parameter(f"{prefix}experts.{name}_bias", shape[:2], "zeros")
    if (size := config.shared_expert_intermediate_size) is not None:
        shared = f"{prefix}shared_expert{'' if config.shared_expert_gate else 's'}."
        for name, matrix in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
            yield Parameter(f"{shared}{name}_proj.weight", matrix, std=std)
        if config.shared_expert_gate:
            yield Parameter(f"{prefix}shared_expert_gate.weight", (1, hidden), std=std)
