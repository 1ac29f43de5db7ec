"""The PyTorch models of ``torch_models.py`` against transformers' own, and against first principles.

Where transformers differs from what this project defines:

- Its loss leaves out positions whose label is -100, and looks at no mask. Here a label also counts only
  where both its position and the one predicting it are real. The batches below have -100 at padding
  and, with padding at the beginning, at the first real token.
- Its routers send padding tokens to experts with their usual weights. Here the weight is 0. Nothing
  real sees a padding token, so losses, gradients and the logits of real tokens are the same.
- Its router takes ``torch.topk``, which promises no order of equal scores.
- A loss over no label at all is NaN there, 0 here.
- It has no z-loss, no per-layer aux loss, no softmax after the top-k in these models, and bounds queries
  and keys (``clip_qkv``) in OLMoE only. What else a router can be is in ``test_torch_moe.py``.
- Its norms, softmaxes and rotary frequencies are in float32 also in a float64 model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_cases import CASES, Case, is_trained, parameter_shapes, random_mask, random_parameters
from moe_cases import CASES as MOE_CASES

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig

pytestmark = pytest.mark.parity

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.1,
    "initializer_range": 0.02,
}
MIXTRAL = {**SMALL, "intermediate_size": 12, "num_local_experts": 5, "rms_norm_eps": 1e-5}
QWEN3 = {
    **SMALL,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_experts": 5,
    "head_dim": 6,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
}
OLMOE = {**SMALL, "intermediate_size": 12, "num_experts": 5, "rms_norm_eps": 1e-5, "pad_token_id": None}

# kind, options of transformers' config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral_one_kv_head": ("Mixtral", {**MIXTRAL, "num_key_value_heads": 1}),
    "mixtral_no_gqa_top1": ("Mixtral", {**MIXTRAL, "num_key_value_heads": 4, "num_experts_per_tok": 1}),
    "mixtral_window": ("Mixtral", {**MIXTRAL, "sliding_window": 3}),
    "mixtral_head_dim_tied": ("Mixtral", {**MIXTRAL, "head_dim": 10, "tie_word_embeddings": True}),
    "mixtral_theta": ("Mixtral", {**MIXTRAL, "rope_theta": 500.0}),
    "qwen3": ("Qwen3Moe", QWEN3),
    "qwen3_mlp_only": ("Qwen3Moe", {**QWEN3, "mlp_only_layers": [0, 2]}),
    "qwen3_sparse_step": ("Qwen3Moe", {**QWEN3, "decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "qwen3_bias": ("Qwen3Moe", {**QWEN3, "attention_bias": True, "norm_topk_prob": False}),
    "qwen3_window": ("Qwen3Moe", {**QWEN3, "use_sliding_window": True, "sliding_window": 2}),
    "olmoe": ("Olmoe", {**OLMOE, "norm_topk_prob": False}),
    "olmoe_clip": ("Olmoe", {**OLMOE, "norm_topk_prob": False, "clip_qkv": 0.7}),
    "olmoe_clip_bias_norm": (
        "Olmoe",
        {
            **OLMOE,
            "norm_topk_prob": True,
            "clip_qkv": 1.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def our_config(kind: str, options: dict[str, Any]) -> MoeLMConfig:
    """The same model as a MoeLMConfig."""
    mine = dict(options)
    if kind != "Qwen3Moe":
        mine["moe_intermediate_size"] = mine.pop("intermediate_size")
    mine["num_experts"] = mine.pop("num_local_experts", mine.get("num_experts"))
    mine["qk_norm"] = {"Mixtral": "none", "Qwen3Moe": "head", "Olmoe": "full"}[kind]
    mine["rope_theta"] = mine.get("rope_theta", 10000.0)
    for name in ("use_sliding_window", "pad_token_id"):
        mine.pop(name, None)
    return MoeLMConfig(**mine)


def their_model(kind: str, options: dict[str, Any], parameters: dict[str, Any]) -> Any:
    import torch

    transformers = pytest.importorskip("transformers", minversion="5.0")

    options = dict(options)
    theta = options.pop("rope_theta", 10000.0)
    config = getattr(transformers, kind + "Config")(
        **options,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        output_router_logits=True,
        attn_implementation="eager",
        experts_implementation="eager",
        use_cache=False,
    )
    model = getattr(transformers, kind + "ForCausalLM")(config).to(torch.float32)
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    theirs = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in theirs.items()} == {
        name: p.shape for name, p in parameters.items()
    }
    with torch.no_grad():
        for name, value in parameters.items():
            theirs[name].copy_(torch.from_numpy(value))
    return model.train()


def batch_of(config: MoeLMConfig, seed: int, padding: str) -> dict[str, Any]:
    rng = np.random.default_rng([seed, 2])
    ids = rng.integers(0, config.vocab_size, (4, 9))
    mask = np.ones_like(ids) if padding == "none" else random_mask(rng, *ids.shape, padding == "left")
    # The first real token after padding at the beginning: transformers predicts it from the padding.
    predicted = mask * np.pad(mask[:, :-1], ((0, 0), (1, 0)))
    labels = np.where((predicted == 1) & (rng.random(ids.shape) > 0.1), ids, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def relative(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest value wanted."""
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("padding", ["none", "no_mask", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name: str, padding: str) -> None:
    import torch
    import torch_models

    kind, options = MODELS[name]
    config = our_config(kind, options)
    parameters = random_parameters(config, seed=11)
    model = their_model(kind, options, parameters)
    batch = torch_models.tensors(
        batch_of(config, 11, "none" if padding == "no_mask" else padding), torch.float32
    )
    given = {key: value for key, value in batch.items() if padding != "no_mask" or key != "attention_mask"}
    theirs = model(**given)
    theirs.loss.backward()

    out, gradients = torch_models.gradients(config, torch_models.tensors(parameters, torch.float32), batch)
    # Another choice of expert would show as a large difference; here it would be chance.
    assert out["margin"] > 1e-6
    real = batch["attention_mask"].bool()
    assert relative(out["logits"][real], theirs.logits[real]) <= 1e-5
    assert relative(out["aux_loss"], theirs.aux_loss) <= 1e-6
    assert relative(out["loss"], theirs.loss) <= 1e-6
    for key, parameter in model.named_parameters():
        assert relative(gradients[key], parameter.grad) <= 1e-5, key


PADDED = [CASES[name] for name in ("qwen3_dense_tied", "top_k_then_softmax")]
PADDED += [MOE_CASES[f"lm-sigmoid_groups-{mode}"] for mode in ("dropless", "active", "position", "probs")]


@pytest.mark.parametrize("case", PADDED, ids=lambda case: case.name)
def test_padding_reaches_nothing_real(case: Case) -> None:
    """Token ids and labels at padding have no influence on losses, load and gradients, and take no row."""
    import torch
    import torch_models

    config = case.config
    parameters = torch_models.tensors(case.parameters(), torch.float64)
    batch = case.batches()[0]
    padding = batch["attention_mask"] == 0
    assert padding[-1, 0]  # also padding that comes before real tokens
    other = {**batch, "input_ids": np.where(padding, 0, batch["input_ids"])}
    other["labels"] = np.where(padding, config.ignore_index, batch["labels"])
    (a, first), (b, second) = (
        torch_models.gradients(config, parameters, torch_models.tensors(v, torch.float64))
        for v in (batch, other)
    )
    assert torch.allclose(a["loss"], b["loss"], rtol=1e-14)
    assert torch.equal(a["expert_load"], b["expert_load"])
    real = int(batch["attention_mask"].sum()) * config.num_experts_per_tok
    assert (a["expert_load"].sum(1) == real).all()
    for ours, theirs in zip(a["kept"], b["kept"], strict=True):
        assert torch.equal(ours, theirs)
        assert not ours[torch.from_numpy(padding.flatten())].any()
    for key in first:
        assert torch.allclose(first[key], second[key], rtol=1e-10, atol=1e-14), key


def test_no_token_no_loss() -> None:
    import torch
    import torch_models

    config = CASES["top_k_then_softmax"].config
    parameters = torch_models.tensors(CASES["top_k_then_softmax"].parameters(), torch.float64)
    for change in ({"attention_mask": 0}, {"labels": config.ignore_index}):
        batch = torch_models.tensors(CASES["top_k_then_softmax"].batches()[0], torch.float64)
        batch |= {key: torch.full_like(batch[key], value) for key, value in change.items()}
        out, gradients = torch_models.gradients(config, parameters, batch)
        assert out["num_tokens"] == 0 and out["lm_loss"] == 0
        assert all(value.isfinite().all() for value in gradients.values())
        if "attention_mask" in change:
            assert out["loss"] == 0 and not any(value.any() for value in gradients.values())
    layer = MoeLayerConfig(hidden_size=4, num_experts=3, moe_intermediate_size=2)
    empty = {name: torch.zeros(0, 4, dtype=torch.float64) for name in ("hidden_states", "target")}
    values = torch_models.tensors(random_parameters(layer, 0), torch.float64)
    out, gradients = torch_models.gradients(layer, values, empty)
    assert out["loss"] == 0 and not any(value.any() for value in gradients.values())


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_loss(name: str) -> None:
    check_gradients(CASES[name], seeds=3)


def check_gradients(case: Case, seeds: int) -> None:
    """Central differences along random directions, in float64."""
    import torch
    import torch_models

    parameters = torch_models.tensors(case.parameters(), torch.float64)
    batch = torch_models.tensors(case.batches()[0], torch.float64)
    _, gradients = torch_models.gradients(case.config, parameters, batch)
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        way = {
            key: torch.randn(value.shape, dtype=value.dtype, generator=generator)
            for key, value in gradients.items()
        }
        step = 1e-6
        ends = []
        for s in (step, -step):
            moved = {key: parameters[key] + s * value for key, value in way.items()}
            ends.append(torch_models.forward(case.config, {**parameters, **moved}, batch)["loss"])
        slope = float(ends[0] - ends[1]) / (2 * step)
        want = float(sum((gradients[key] * way[key]).sum() for key in way))
        assert slope == pytest.approx(want, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_goldens_are_what_pytorch_says(name: str) -> None:
    from goldens.make import difference, record

    assert max(difference(record(CASES[name]), CASES[name].golden()).values()) <= 1e-6


@pytest.mark.parametrize("name", CASES)
def test_parameter_shapes_say_what_is_used(name: str) -> None:
    """Every parameter has an influence on the loss, and none is missing."""
    import torch
    import torch_models

    case = CASES[name]
    parameters = torch_models.tensors(case.parameters(), torch.float64)
    batch = torch_models.tensors(case.batches()[0], torch.float64)
    _, gradients = torch_models.gradients(case.config, parameters, batch)
    assert gradients.keys() == {key for key in parameter_shapes(case.config) if is_trained(key)}
    assert all(value.any() for value in gradients.values())


@pytest.mark.parametrize("kind", ["loop", "grouped"])
@pytest.mark.parametrize("optimizer", ["default", "foreach", "fused"])
@pytest.mark.parametrize("options", [{}, {"expert_activation": "gelu", "router_z_loss_coef": 0.1}])
def test_benchmarked_layers_train_the_same_model(kind: str, optimizer: str, options: dict[str, Any]) -> None:
    """The peers of ``benchmarks/torch_layer.py`` end where ``train_steps`` does."""
    import torch
    import torch_models

    from benchmarks.torch_layer import STEPS
    from moe_onnx.build.optimizers import AdamW

    if kind == "grouped" and not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this PyTorch has no torch.nn.functional.grouped_mm")
    config = MoeLayerConfig(hidden_size=16, num_experts=5, moe_intermediate_size=8, **options)
    parameters = random_parameters(config, 3)
    rng = np.random.default_rng(3)
    batches = [
        {name: rng.standard_normal((20, 16)).astype(np.float32) for name in ("hidden_states", "target")}
        for _ in range(3)
    ]
    # The peer decays every parameter; a layer has none that would be left out.
    want = torch_models.train_steps(
        config, AdamW(weight_decay=0.01, max_grad_norm=0.5), parameters, batches, 1e-3, torch.float32
    )
    step = STEPS[kind](config, parameters, optimizer=optimizer, lr=1e-3, weight_decay=0.01, max_grad_norm=0.5)
    losses = [step(**batch) for batch in batches]
    assert losses == pytest.approx([float(loss) for loss in want.metrics["loss"]], rel=1e-5)
    for name, value in step.parameters.items():
        assert relative(value, want.parameters[name]) <= 1e-4, name
