"""Training graphs against a live PyTorch implementation: loss, every gradient, five optimizer steps.

Wider than the recorded runs of ``goldens/``: every option of the configs, several seeds, and every
router with every dispatch (``moe_cases.py``).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from golden_cases import Case, tiny_lm
from moe_cases import CASES as MOE_CASES
from routes import FAST, one_thread
from test_goldens import TOLERANCE, Session, run, run_grad_apply

import moe_onnx

pytestmark = pytest.mark.parity

ADAMW = moe_onnx.AdamW(eps=1e-4)
CONFIGS: dict[str, Any] = {
    "relu": tiny_lm(expert_activation="relu", num_hidden_layers=1),
    "gelu_all_experts": tiny_lm(expert_activation="gelu", num_experts_per_tok=4),
    "top_1": tiny_lm(num_experts_per_tok=1, router_z_loss_coef=0.1),
    "top_1_no_norm": tiny_lm(num_experts_per_tok=1, norm_topk_prob=False),
    "no_aux": tiny_lm(router_aux_loss_coef=0.0),
    "per_layer": tiny_lm(router_aux_loss="per_layer", router_aux_loss_coef=1.0),
    "pooled": tiny_lm(router_aux_loss_coef=1.0, decoder_sparse_step=2, num_hidden_layers=4),
    "all_dense": tiny_lm(mlp_only_layers=(0, 1)),
    "window": tiny_lm(sliding_window=2, num_key_value_heads=2),
    "one_kv_head": tiny_lm(num_key_value_heads=1, qk_norm="head"),
    "full_norm_bias": tiny_lm(qk_norm="full", attention_bias=True, num_key_value_heads=2),
    "clip": tiny_lm(clip_qkv=0.3, qk_norm="head"),
    "head_dim": tiny_lm(head_dim=10, num_key_value_heads=2, tie_word_embeddings=True),
    "grouped": tiny_lm(num_experts=18, num_experts_per_tok=3, unroll_experts=16),
    "grouped_few": tiny_lm(unroll_experts=0, expert_activation="relu"),
    "layer": moe_onnx.MoeLayerConfig(hidden_size=12, num_experts=4, moe_intermediate_size=10),
    "layer_grouped": moe_onnx.MoeLayerConfig(
        hidden_size=12, num_experts=6, moe_intermediate_size=10, unroll_experts=0, router_z_loss_coef=0.1
    ),
}
OPTIMIZERS = {
    "adamw": ADAMW,
    "adamw_decay": moe_onnx.AdamW(weight_decay=0.3, no_decay=("*embed*",), max_grad_norm=0.05, eps=1e-4),
    "sgd": moe_onnx.SGD(),
    "sgd_decay": moe_onnx.SGD(weight_decay=0.1, max_grad_norm=0.1),
    "nesterov": moe_onnx.SGD(momentum=0.9, nesterov=True, max_grad_norm=None),
}


def compare(case: Case, kernels: str = FAST) -> None:
    torch_models = pytest.importorskip("torch_models")
    want = torch_models.train_steps(
        case.config, case.optimizer, case.parameters(), case.batches(), case.lr, torch_models.torch.float64
    )
    assert want.margin > 1e-5  # else the routing may differ for no fault of either
    graph = moe_onnx.build_training_graph(case.config, assembly="grad+apply", optimizer=case.optimizer)
    sessions = {name: Session(model, one_thread(), kernels=kernels) for name, model in graph.models.items()}
    metrics, gradients, params = run_grad_apply(case, sessions)
    losses = [float(step["loss"]) for step in metrics]
    np.testing.assert_allclose(losses, np.array(want.metrics["loss"], float), rtol=TOLERANCE)
    # Models without experts have none of these; that others have them is held by the recorded runs.
    for name in {"expert_load", "dropped"} & set(metrics[0]):
        got = np.array([step[name] for step in metrics])
        np.testing.assert_array_equal(got, np.array([value.numpy() for value in want.metrics[name]]), name)
    for name in ("aux_loss", "z_loss"):
        if name in metrics[0]:
            got = [float(step[name]) for step in metrics]
            np.testing.assert_allclose(got, np.array(want.metrics[name], float), rtol=TOLERANCE)
    largest = max(float(v.abs().max()) for v in want.gradients.values())
    for name, value in want.gradients.items():
        reference = value.numpy()
        # Where softmax is blind to a shift the gradient is zero but for rounding: compared absolutely.
        scale = max(np.abs(reference).max(), 1e-4 * largest)
        gap = np.abs(gradients[f"{name}.grad"] - reference).max() / scale
        assert gap <= TOLERANCE, f"gradient of {name} is off by {gap:.1e}"
    for name, value in want.parameters.items():
        if name.endswith("k_proj.bias") and isinstance(case.optimizer, moe_onnx.AdamW):
            continue  # steps made of the rounding errors of a zero gradient
        gap = np.abs(params[name] - value.numpy()).max() / np.abs(value.numpy()).max()
        assert gap <= 2 * TOLERANCE, f"{name} is off by {gap:.1e} after five steps"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option(name: str) -> None:
    kernels = "body" if "grouped" in name else FAST
    compare(Case(name, CONFIGS[name], ADAMW, 1e-2, seed=11), kernels)


@pytest.mark.parametrize("name", MOE_CASES)
def test_every_router_and_dispatch(name: str) -> None:
    # Bodies do not know the router: each mode and place of the weights runs by them with one, and each mode
    # with grouped experts.
    compare(MOE_CASES[name], "body" if re.match("softmax-|grouped-.*-combine", name) else FAST)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    compare(Case(name, tiny_lm(num_hidden_layers=1), OPTIMIZERS[name], 2e-2, seed=12))


@pytest.mark.parametrize("tokens", [(1, 2), (5, 31)], ids=str)
def test_batches_of_other_sizes(tokens: tuple[int, int]) -> None:
    torch_models = pytest.importorskip("torch_models")
    config = tiny_lm(num_key_value_heads=2)
    rng = np.random.default_rng(4)
    ids = rng.integers(0, config.vocab_size, tokens)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": np.ones_like(ids)}
    case = Case("sizes", config, ADAMW, 1e-2, seed=13)
    graph = moe_onnx.build_training_graph(config, assembly="grad")
    out = run(Session(graph.model, one_thread(), kernels="body"), {**batch, **case.parameters()})
    tensors = {n: torch_models.torch.as_tensor(v) for n, v in {**case.parameters(), **batch}.items()}
    want = torch_models.forward(config, tensors, {n: tensors[n] for n in batch})
    np.testing.assert_allclose(out["loss"], float(want["loss"]), rtol=TOLERANCE)
