"""Mixtral: grouped-query attention, perhaps with a sliding window, and experts in every layer."""

from __future__ import annotations

from moe_onnx.huggingface.architectures.description import DECODER, Architecture
from moe_onnx.huggingface.fields import Fields


def _read(fields: Fields) -> None:
    fields.take("moe_intermediate_size", "intermediate_size")
    fields.take("num_experts", "num_local_experts", "num_experts")
    fields.take("sliding_window")
    fields.must("router_jitter_noise", 0.0)
    fields.set("norm_topk_prob", True)


MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    defaults={
        **DECODER,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
    },
    read=_read,
    module="block_sparse_moe",
    experts=("w1", "w3", "w2"),
    adds="a sliding window in all layers",
)
