"""Tiny models of transformers as ``torch.onnx.export`` writes them, and their gradients by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import moe_onnx

VOCABULARY = 32
# Gradients that are 0 but for rounding (of a key's bias) become whole steps, unless eps is above them.
OPTIMIZER = moe_onnx.AdamW(eps=1e-5)
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "intermediate_size": 24, "pad_token_id": None,  # whose row of the embedding torch would not train
}  # fmt: skip
# Class of the model, class of its config, and what its config has beside the sizes.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4}),
    "PhiMoE": ("PhimoeForCausalLM", "PhimoeConfig", {"num_local_experts": 4, "head_dim": 8}),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 2, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    ),
    "GraniteMoE": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {"num_local_experts": 4}),
}  # fmt: skip


def language_model(name: str) -> Any:
    """A tiny model with random weights, of which no two vectors are equal."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind, config_kind, more = ARCHITECTURES[name]
    config = getattr(transformers, config_kind)(**(_SIZES | more))
    config._experts_implementation, config._attn_implementation = "batched_mm", "eager"
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def export_language_model(model: Any, path: Path, *, optimize: bool = False) -> Path:
    """Export ``input_ids -> logits`` with free batch and sequence."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = model

        def forward(self, input_ids: Any) -> Any:
            return self.lm(input_ids=input_ids, use_cache=False).logits

    free = {
        "input_ids": {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("sequence", max=64)}
    }
    torch.onnx.export(
        Logits(), (torch.zeros(2, 5, dtype=torch.int64),), str(path), dynamo=True, dynamic_shapes=free,
        optimize=optimize, verbose=False, input_names=["input_ids"], output_names=["logits"],
    )  # fmt: skip
    return path


def torch_loss(model: Any, ids: np.ndarray) -> Any:
    """The loss of transformers: cross-entropy of the next token."""
    import torch

    logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY), torch.from_numpy(ids[:, 1:].ravel())
    )


def gradients_of(graph: moe_onnx.TrainingGraph, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Metrics and gradients that the graph ``grad`` gives at the model's own weights, by name."""
    weights = {name: np.asarray(value, np.float32) for name, value in graph.weights.parameters()}
    session = moe_onnx.InferenceSession(graph.models["grad"])
    names = [one.name for one in graph.manifest.graphs["grad"].outputs]
    return dict(zip(names, session.run(names, {**batch, **weights}), strict=True))


def own_name(name: str) -> str:
    """The module's name of a parameter: without the wrapper's, and what folding made of an attention's."""
    return name.removeprefix("lm.").replace("self_attn.weight", "self_attn.in_proj_weight")


def moe_layers(model: Any) -> int:
    """How many layers of a module have experts."""
    return sum(name.endswith(".experts") for name, _ in model.named_modules())


def logits_difference(graph: moe_onnx.TrainingGraph, model: Any, ids: np.ndarray) -> float:
    """Largest difference of the graph ``forward`` from the module, relative to the largest of the logits."""
    import torch

    found = moe_onnx.TrainingSession(graph, assembly="").forward({"input_ids": ids})["logits"]
    with torch.no_grad():
        theirs = model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
    return float(np.abs(found - theirs).max() / np.abs(theirs).max())


def largest_difference(
    graph: moe_onnx.TrainingGraph,
    model: Any,
    batch: dict[str, np.ndarray],
    loss: Any,
    least: float = 1e-3,
) -> tuple[float, float]:
    """Of the loss, and of all gradients together, relative to the largest of each gradient.

    Args:
        graph: Has ``grad``; its parameters are the module's under ``lm.`` or their own names.
        model: The module.
        batch: Of the graph.
        loss: Of torch, for the same batch.
        least: What the largest of a gradient is taken for where it is smaller: some are 0 but for rounding.
    """
    model.zero_grad()
    loss.backward()
    found = gradients_of(graph, batch)
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    ours = {own_name(info.name): found[info.gradient] for info in graph.manifest.parameters}
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    worst = max(
        float(np.abs(ours[name] - theirs[name]).max() / max(np.abs(theirs[name]).max(), least))
        for name in theirs
    )
    return abs(float(found["loss"]) - loss.item()), worst


def adamw_difference(graph: moe_onnx.TrainingGraph, model: Any, batches: list[Any], loss_of: Any) -> float:
    """Largest difference of any parameter from torch's after steps of ``OPTIMIZER`` over ``batches``."""
    import torch

    session = moe_onnx.TrainingSession(graph, lr=1e-2)
    decays = {own_name(info.name): info.weight_decay for info in graph.manifest.parameters}
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if decays.get(n) is decay],
            "weight_decay": 0.01 * decay,
        }
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, eps=OPTIMIZER.eps)
    for batch in batches:
        session.step(batch)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    ours = {own_name(name): value for name, value in session.parameters().items()}
    return max(
        float(np.abs(ours[n] - p.detach().numpy()).max()) for n, p in model.named_parameters() if n in ours
    )
