"""Qwen2-MoE: a shared expert behind a gate, biases of queries, keys and values, dense layers among others."""

from __future__ import annotations

from typing import Any

from moe_onnx.huggingface.architectures.description import DECODER, Architecture
from moe_onnx.huggingface.fields import Fields


def _read(fields: Fields) -> None:
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        fields.take(name)
    for name in ("decoder_sparse_step", "norm_topk_prob", "qkv_bias"):
        fields.take(name)
    fields.take("num_experts", "num_experts", "num_local_experts")
    fields.set("mlp_only_layers", fields.layers("mlp_only_layers"))
    fields.set("shared_expert_gate", True)
    fields.set("sliding_window", _window(fields))


def _window(fields: Fields) -> Any:
    """The window of all layers, or None; transformers lets layers differ, which is refused."""
    use, window, kinds = fields.flag("use_sliding_window"), fields.get("sliding_window"), _layer_types(fields)
    fields.get("max_window_layers")  # only says what layer_types are where they are left out
    if not use:
        if kinds - {"full_attention"}:
            found = fields.get("layer_types")
            raise fields.refuse(
                "layer_types", found, '"full_attention" everywhere without use_sliding_window'
            )
        return None
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"} and window is not None:
        return window
    found = {"layer_types": fields.get("layer_types"), "sliding_window": window}
    raise fields.refuse("layer_types", found, "given with use_sliding_window, and the same for all layers")


def _layer_types(fields: Fields) -> set[str]:
    value = fields.get("layer_types") or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise fields.refuse("layer_types", value, "a list of words")
    return set(value)


QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    defaults={
        **DECODER,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-6,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "mlp_only_layers": (),
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    read=_read,
    adds="a shared expert with a gate, biases of queries, keys and values",
)
