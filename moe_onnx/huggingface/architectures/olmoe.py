"""OLMoE: norms of all queries and keys together, clipped queries, keys and values, many small experts."""

from __future__ import annotations

from moe_onnx.huggingface.architectures.description import DECODER, Architecture
from moe_onnx.huggingface.fields import Fields


def _read(fields: Fields) -> None:
    fields.take("moe_intermediate_size", "intermediate_size")
    fields.take("num_experts", "num_experts", "num_local_experts")
    for name in ("norm_topk_prob", "attention_bias", "clip_qkv"):
        fields.take(name)
    fields.set("qk_norm", "full")
    size = fields.values["head_dim"]
    heads, hidden = fields.values["num_attention_heads"], fields.values["hidden_size"]
    if (
        isinstance(size, int) and isinstance(heads, int) and size * heads != hidden
    ):  # its norms are of hidden_size
        raise fields.refuse("head_dim", size, f"hidden_size / num_attention_heads ({hidden} / {heads})")


OLMOE = Architecture(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    defaults={
        **DECODER,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    },
    read=_read,
    adds="norms over all heads of queries and keys, clip_qkv",
)
