"""Checkpoints of Hugging Face written by hand: bytes of files, with nothing of the package.

``checkpoint(folder, kind)`` writes a tiny one in two files with an index; its tensors come back by the
names they have on disk. What is wrong in a test is then done to these files.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8"}
HIDDEN, VOCAB, EXPERTS, INNER = 8, 16, 3, 6
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

_ALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "torch_dtype": "float32",
    "use_cache": True,
    "transformers_version": "4.40.0",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "rope_theta": 500.0,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        **_ALL,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "intermediate_size": 10,
        "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": 5,
        "num_experts": EXPERTS,
        "max_window_layers": 1,
        "sliding_window": 4,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        **_ALL,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 10,
        "moe_intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "head_dim": 6,
        "attention_bias": False,
        "rope_scaling": None,
        **_ALL,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": INNER,
        "num_experts": EXPERTS,
        "clip_qkv": 2.0,
        **_ALL,
    },
}


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk, as each model's own code lists them."""
    head = 6 if kind == "qwen3_moe" else HIDDEN // 2
    moe, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if kind == "mixtral":
        moe, names = "block_sparse_moe", ("w1", "w3", "w2")
    layer = "model.layers.0."
    found: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (2 * head, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (head, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (head, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, 2 * head),
        f"{layer}{moe}.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        for name in names[:2]:
            found[f"{layer}{moe}.experts.{expert}.{name}.weight"] = (INNER, HIDDEN)
        found[f"{layer}{moe}.experts.{expert}.{names[2]}.weight"] = (HIDDEN, INNER)
    if kind == "qwen2_moe":
        for name, size in (("q", 2 * head), ("k", head), ("v", head)):
            found[f"{layer}self_attn.{name}_proj.bias"] = (size,)
        found[f"{layer}mlp.shared_expert.gate_proj.weight"] = (5, HIDDEN)
        found[f"{layer}mlp.shared_expert.up_proj.weight"] = (5, HIDDEN)
        found[f"{layer}mlp.shared_expert.down_proj.weight"] = (HIDDEN, 5)
        found[f"{layer}mlp.shared_expert_gate.weight"] = (1, HIDDEN)
    if kind in ("qwen3_moe", "olmoe"):
        own = kind == "qwen3_moe"
        found[f"{layer}self_attn.q_norm.weight"] = (head if own else HIDDEN,)
        found[f"{layer}self_attn.k_norm.weight"] = (head,)
    return found


def values(kind: str, dtype: str = "float32") -> Arrays:
    rng = np.random.default_rng(3)
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    return {
        name: rng.standard_normal(shape).astype(kinds.get(dtype, dtype))
        for name, shape in shapes(kind).items()
    }


def as_bytes(tensors: Arrays, metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file, as its format is described."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} if metadata is None else metadata}
    data = b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": CODES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def read(path: Path) -> Arrays:
    """The tensors of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    dtypes = {code: name for name, code in CODES.items()}
    found = {}
    for name, item in header.items():
        kind = dtypes[item["dtype"]]
        dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
        start, end = (8 + length + at for at in item["data_offsets"])
        found[name] = np.frombuffer(raw[start:end], dtype).reshape(item["shape"])
    return found


def checkpoint(folder: Path, kind: str = "mixtral", dtype: str = "float32", **config: Any) -> Arrays:
    """Write a checkpoint in two files, its tensors alternating between them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[kind], **config}))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    tensors = values(kind, dtype)
    write_two(folder, tensors)
    return tensors


def write_two(folder: Path, tensors: Arrays) -> None:
    places = {name: (FIRST, SECOND)[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in (FIRST, SECOND):
        (folder / file).write_bytes(as_bytes({n: tensors[n] for n in sorted(places) if places[n] == file}))
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def stacked(kind: str, tensors: Arrays) -> Arrays:
    """The same as transformers has it in memory: experts of a layer in one tensor, all under ``mlp``."""
    gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {n.replace("block_sparse_moe", "mlp"): v for n, v in tensors.items() if ".experts." not in n}
    layer = "model.layers.0." + ("block_sparse_moe" if kind == "mixtral" else "mlp")

    def all_of(name: str) -> list[Any]:
        return [tensors[f"{layer}.experts.{expert}.{name}.weight"] for expert in range(EXPERTS)]

    pairs = [np.concatenate(pair) for pair in zip(all_of(gate), all_of(up), strict=True)]
    found["model.layers.0.mlp.experts.gate_up_proj"] = np.stack(pairs)
    found["model.layers.0.mlp.experts.down_proj"] = np.stack(all_of(down))
    return found
