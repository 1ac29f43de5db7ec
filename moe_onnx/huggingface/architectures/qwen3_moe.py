"""Qwen3-MoE: norms of each head's queries and keys, heads of any size, dense layers among others."""

from __future__ import annotations

from moe_onnx.huggingface.architectures.description import DECODER, Architecture
from moe_onnx.huggingface.fields import Fields


def _read(fields: Fields) -> None:
    fields.take("moe_intermediate_size")
    fields.take("intermediate_size")
    fields.take("num_experts", "num_experts", "num_local_experts")
    for name in ("decoder_sparse_step", "norm_topk_prob", "attention_bias"):
        fields.take(name)
    fields.set("mlp_only_layers", fields.layers("mlp_only_layers"))
    fields.set("qk_norm", "head")
    use, window = fields.flag("use_sliding_window"), fields.get("sliding_window")
    fields.get("max_window_layers")  # in the files of old, and of no effect
    fields.set("sliding_window", window if use else None)


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    defaults={
        **DECODER,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "mlp_only_layers": (),
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": None,
    },
    read=_read,
    adds="norms of each head's queries and keys",
)
