"""The architectures that can be read, one file each. A further one is a file here, and a line below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_onnx.errors import ConfigError
from moe_onnx.huggingface.architectures.description import Architecture
from moe_onnx.huggingface.architectures.mixtral import MIXTRAL
from moe_onnx.huggingface.architectures.olmoe import OLMOE
from moe_onnx.huggingface.architectures.qwen2_moe import QWEN2_MOE
from moe_onnx.huggingface.architectures.qwen3_moe import QWEN3_MOE

ARCHITECTURES: dict[str, Architecture] = {
    one.model_type: one for one in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE)
}
# What stands between the builder and others that are asked for.
MISSING = {
    "deepseek_v2": "multi-head latent attention",
    "deepseek_v3": "multi-head latent attention, and multi-token prediction is left out of checkpoints",
    "gpt_oss": "attention sinks, layers that alternate in their window, YaRN positions, and experts whose "
    "gate and up rows alternate",
    "granitemoe": "multipliers of embedding, attention, residuals and logits",
    "phimoe": "LayerNorm, sparsemixer routing and LongRoPE positions",
    "jamba": "Mamba layers",
    "dbrx": "LayerNorm, and one matrix for queries, keys and values",
    "qwen3_next": "linear attention layers",
    "glm4_moe": "partial rotary positions",
}


def architecture_of(path: Path, data: Mapping[str, Any]) -> Architecture:
    """The architecture that a ``config.json`` names.

    Args:
        path: The file, for errors.
        data: Its contents.

    Raises:
        ConfigError: If it is not known, or not of a language model; lists those that are.
    """
    known = ", ".join(ARCHITECTURES)
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{path}: 'model_type' must be one of {known}, got {kind!r}.")
    if kind not in ARCHITECTURES:
        lacks = MISSING.get(kind, "a description of it in moe_onnx/huggingface/architectures")
        raise ConfigError(
            f"{path}: the architecture '{kind}' is not known. Known: {known}. What is missing for it: "
            f"{lacks}."
        )
    architecture = ARCHITECTURES[kind]
    classes = data.get("architectures")
    if classes and classes != [architecture.class_name]:
        raise ConfigError(
            f"{path}: 'architectures' must be [{architecture.class_name!r}], a language model, got "
            f"{classes!r}."
        )
    if data.get("quantization_config") is not None:
        found = data["quantization_config"]
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        raise ConfigError(
            f"{path}: 'quantization_config' must be left out, got quant_method {method!r}. Quantised weights "
            "cannot be trained; take the checkpoint they were made from."
        )
    return architecture
