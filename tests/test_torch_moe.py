"""The MoE layer of ``torch_moe.py`` against transformers' own blocks, and the runs of ``moe_cases.py``.

Numbers worked out by hand are in ``test_torch_rules.py``, training in
``test_torch_training.py``. Where transformers' blocks differ:

- DeepSeek's routers compute in float32 whatever the model is in, Qwen2-MoE's softmax too, so
  that only GPT-OSS can be held to it in float64.
- A DeepSeek-V3 router of some versions gives experts outside of the best groups a choice of 0.0, not of
  minus infinity, so one of them would win from a negative score plus bias. Biases here are positive.
- DeepSeek-V2 does the same to its softmax scores, which are always positive, and never normalises.
- GPT-OSS has products ``x @ w`` of weights ``[E, in, out]``, and gate and up columns by turns. Its
  router has a bias on the logits, 0 here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_cases import is_trained, parameter_shapes, random_parameters
from moe_cases import CASES
from test_torch_models import check_gradients, relative

from moe_onnx.build.config import MoeLayerConfig

pytestmark = pytest.mark.parity

TOKENS = 40
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "moe_intermediate_size": 6,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
QWEN2: dict[str, Any] = {
    "hidden_size": 16,
    "moe_intermediate_size": 6,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 10,
}
GPT_OSS: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 6,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}
# model, its class of the block, options of its config, ours where they say it otherwise
BLOCKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3",
        "DeepseekV3MoE",
        {**DEEPSEEK, "norm_topk_prob": True},
        {"router_scores": "sigmoid", "router_selection_bias": True},
    ),
    "deepseek_v3_no_norm": (
        "DeepseekV3",
        "DeepseekV3MoE",
        {**DEEPSEEK, "norm_topk_prob": False, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0},
        {"router_scores": "sigmoid", "router_selection_bias": True},
    ),
    "deepseek_v3_no_groups": (
        "DeepseekV3",
        "DeepseekV3MoE",
        {**DEEPSEEK, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        {"router_scores": "sigmoid", "router_selection_bias": True},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2",
        "DeepseekV2Moe",
        {**DEEPSEEK, "topk_method": "group_limited_greedy"},
        {"group_score": "max", "norm_topk_prob": False},
    ),
    "qwen2_moe": ("Qwen2Moe", "Qwen2MoeSparseMoeBlock", {**QWEN2, "norm_topk_prob": False}, {}),
    "qwen2_moe_norm": ("Qwen2Moe", "Qwen2MoeSparseMoeBlock", {**QWEN2, "norm_topk_prob": True}, {}),
    "gpt_oss": ("GptOss", "GptOssMLP", GPT_OSS, {}),
    # Limits so small that gates and ups are clamped.
    "gpt_oss_clamped": ("GptOss", "GptOssMLP", {**GPT_OSS, "swiglu_limit": 0.6, "swiglu_alpha": 1.1}, {}),
}


def our_config(model: str, options: dict[str, Any], more: dict[str, Any]) -> MoeLayerConfig:
    mine = {**options, **more}
    for name in ("topk_method", "num_attention_heads"):
        mine.pop(name, None)
    if model.startswith("Deepseek"):
        mine["num_experts"] = mine.pop("n_routed_experts")
        shared = mine.pop("n_shared_experts") * mine["moe_intermediate_size"]
        mine["shared_expert_intermediate_size"] = shared
    elif model == "Qwen2Moe":
        mine["shared_expert_gate"] = True
    else:
        mine["num_experts"] = mine.pop("num_local_experts")
        mine["moe_intermediate_size"] = mine.pop("intermediate_size")
        mine |= {"expert_activation": "clamped_swiglu", "expert_bias": True}
        mine["router_scores"] = "top_k_then_softmax"
    return MoeLayerConfig(**mine)


def as_theirs(model: str, name: str, value: Any) -> tuple[str, Any]:
    """Name and layout of our parameter (or of its gradient) in their block."""
    if model != "GptOss":
        return name, value
    if name.startswith("experts.gate_up_proj"):  # gate rows first: to gate and up rows by turns
        experts, rows = value.shape[:2]
        turns = value.reshape(experts, 2, rows // 2, -1).swapaxes(1, 2)
        value = turns.reshape(value.shape)
    if name.startswith("experts.") and not name.endswith("_bias"):
        value = value.swapaxes(1, 2)
    return name.replace("gate.weight", "router.weight"), value


def their_block(model: str, block: str, options: dict[str, Any]) -> Any:
    import importlib

    pytest.importorskip("transformers", minversion="5.0")
    folder = {"DeepseekV3": "deepseek_v3", "DeepseekV2": "deepseek_v2"}
    folder |= {"Qwen2Moe": "qwen2_moe", "GptOss": "gpt_oss"}
    module = importlib.import_module(f"transformers.models.{folder[model]}.modeling_{folder[model]}")
    config = getattr(module, model + "Config")(**options)
    config._experts_implementation = "eager"
    return getattr(module, block)(config)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in BLOCKS), ("gpt_oss", "float64"), ("gpt_oss_clamped", "float64")],
)
def test_equals_transformers_block(name: str, dtype: str) -> None:
    import torch
    import torch_models
    import torch_moe

    model, block, options, more = BLOCKS[name]
    kind = getattr(torch, dtype)
    config = our_config(model, options, more)
    arrays = random_parameters(config, seed=6)
    for key, value in arrays.items():
        if not is_trained(key):
            arrays[key] = np.abs(value)
    theirs = their_block(model, block, options).to(kind)
    states = theirs.state_dict()
    given = dict(as_theirs(model, *item) for item in torch_models.tensors(arrays, kind).items())
    if model == "GptOss":
        given["router.bias"] = torch.zeros(config.num_experts, dtype=kind)
    assert {key: v.shape for key, v in given.items()} == {key: v.shape for key, v in states.items()}
    theirs.load_state_dict(given)
    generator = torch.Generator().manual_seed(1)
    x, way = (
        torch.randn(2, TOKENS // 2, config.hidden_size, generator=generator, dtype=kind) for _ in range(2)
    )
    their_x, our_x = (x.clone().requires_grad_() for _ in range(2))
    want = theirs(their_x)
    want = want[0] if isinstance(want, tuple) else want
    (want * way).sum().backward()

    leaves = {
        key: value.requires_grad_(is_trained(key))
        for key, value in torch_models.tensors(arrays, kind).items()
    }
    got, routing = torch_moe.moe_mlp(
        config, leaves, "", our_x.flatten(0, 1), torch.ones(TOKENS, dtype=torch.bool)
    )
    got = got.reshape(x.shape)
    (got * way).sum().backward()
    # Another choice of expert would show as a large difference; here it would be chance.
    assert routing.margin.min() > 1e-5
    limit = 1e-5 if dtype == "float32" else 1e-9
    assert relative(got, want) <= limit
    assert relative(our_x.grad, their_x.grad) <= limit
    grads = {key: value.grad for key, value in theirs.named_parameters() if key != "router.bias"}
    ours = dict(as_theirs(model, key, v.grad) for key, v in leaves.items() if is_trained(key))
    assert ours.keys() == grads.keys()
    for key, value in grads.items():
        assert relative(ours[key], value) <= limit, key
    if "clamped" in name:
        rows = [torch_moe.expert(replace(config, swiglu_limit=1e9), leaves, "", 0, our_x[0])]
        rows.append(torch_moe.expert(config, leaves, "", 0, our_x[0]))
        assert relative(*rows) > 1e-2  # the limits are reached


# --- The runs that graphs are compared with -------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_runs_are_fit_to_compare_with(name: str) -> None:
    """Every parameter matters, gradients are those of the loss, and float32 has room for all of it."""
    import torch
    import torch_models

    case = CASES[name]
    config, arrays = case.config, case.parameters()
    batch = torch_models.tensors(case.batches()[0], torch.float64)
    parameters = torch_models.tensors(arrays, torch.float64)
    out, gradients = torch_models.gradients(config, parameters, batch)
    assert gradients.keys() == {key for key in parameter_shapes(config) if is_trained(key)}
    assert all(value.any() for value in gradients.values())
    assert all(value.all() for key, value in parameters.items() if not is_trained(key))

    if name in list(CASES)[::6]:  # one of each kind: this takes longer than all the rest
        check_gradients(case, seeds=1)

    exact, single = (
        torch_models.train_steps(config, case.optimizer, arrays, case.batches(), case.lr, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert exact.margin > 1e-4
    for key in ("expert_load", "dropped"):
        assert all(map(torch.equal, exact.metrics[key], single.metrics[key])), key
    for key, value in exact.parameters.items():
        assert relative(single.parameters[key].double(), value) <= 5e-6, key
    if config.dispatch_mode != "dropless" and "of_all" not in name and "active_all" not in name:
        assert all(int(value.sum()) > 0 for value in exact.metrics["dropped"])
    else:
        assert not any(value.any() for value in exact.metrics["dropped"])


# A run and what it is compared with: whoever mixes them up must be far from the numbers of the run.
CONFUSED: list[tuple[str, dict[str, Any]]] = [
    ("softmax-probs-combine", {"token_drop_policy": "position"}),
    ("sigmoid-probs-combine", {"token_drop_policy": "position"}),
    ("softmax-position-combine", {"expert_capacity": 4}),
    ("softmax-active-combine", {"active_num": 21}),
    ("softmax-active-combine", {"dispatch_mode": "dropless", "active_num": 0}),
    ("sigmoid-dropless-combine", {"routed_scaling_factor": 1.0}),
    ("sigmoid-dropless-combine", {"router_scores": "softmax_then_top_k"}),
    ("softmax-dropless-combine", {"router_scores": "top_k_then_softmax"}),
    ("sigmoid_groups-dropless-combine", {"n_group": 1, "topk_group": 1}),
    ("sigmoid_groups-dropless-combine", {"group_score": "max"}),
    ("sigmoid_groups-dropless-combine", {"router_bias_update_rate": 0.0}),
    ("softmax_group_max", {"group_score": "top2_sum"}),
    ("sigmoid_no_norm", {"norm_topk_prob": True}),
    ("clamped_swiglu-unrolled-combine", {"swiglu_limit": 0.55}),
    ("clamped_swiglu-unrolled-combine", {"swiglu_alpha": 1.6}),
    ("geglu-unrolled-combine", {"expert_activation": "swiglu"}),
    ("lm-sequence-softmax-dropless", {"router_aux_loss": "per_layer"}),
    ("lm-global-sigmoid-dropless", {"router_aux_loss": "sequence"}),
    ("lm-noisy", {"noisy_top_k": False}),
]


@pytest.mark.parametrize(("name", "other"), CONFUSED, ids=[f"{n}-{'-'.join(o)}" for n, o in CONFUSED])
def test_runs_tell_options_apart(name: str, other: dict[str, Any]) -> None:
    import torch
    import torch_models

    case = CASES[name]
    runs = [
        torch_models.train_steps(
            config, case.optimizer, case.parameters(), case.batches(), case.lr, torch.float64
        )
        for config in (case.config, replace(case.config, **other))
    ]
    losses = [torch.tensor([float(loss) for loss in run.metrics["loss"]]) for run in runs]
    assert relative(*losses) > 1e-4
