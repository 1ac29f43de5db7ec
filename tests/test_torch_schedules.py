"""Learning rates and accumulated gradients against transformers' schedulers and PyTorch's autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_cases import random_parameters, tiny_lm
from routes import one_thread
from test_accumulation import parts_of, whole_of

import moe_onnx

pytestmark = pytest.mark.parity

# Our kind, with a min_lr or not, and transformers' scheduler that says the same.
THEIRS: dict[str, tuple[str, bool]] = {
    "constant_with_warmup": ("constant", False),
    "linear": ("linear", False),
    "cosine": ("cosine", False),
    "cosine_with_min_lr": ("cosine", True),
    "polynomial": ("linear", True),
}


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", THEIRS)
def test_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind, has_least = THEIRS[name]
    least, steps = (1e-4 if has_least else 0.0), 40
    stepper = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    more = {"cosine_with_min_lr": {"min_lr": least}, "polynomial": {"lr_end": least, "power": 1.0}}
    theirs = transformers.get_scheduler(
        name,
        stepper,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=more.get(name),
    )
    ours = moe_onnx.LearningRate(
        lr=3e-3, lr_scheduler_type=kind, steps=steps, warmup_steps=warmup, min_lr=least
    )
    for number in range(1, steps + 2):
        assert ours(number) == pytest.approx(stepper.param_groups[0]["lr"], rel=1e-12, abs=1e-18), number
        stepper.step()
        theirs.step()


@pytest.mark.parametrize("kind", ["pooled", "global"])
def test_accumulated_gradients(kind: str) -> None:
    """Of the losses' mean by tokens in float64, differentiated as one; and AdamW's step with it."""
    torch_models = pytest.importorskip("torch_models")
    torch = torch_models.torch
    config = tiny_lm(num_key_value_heads=2, router_aux_loss=kind, router_aux_loss_coef=0.5)
    optimizer = moe_onnx.AdamW(eps=1e-3)
    values = random_parameters(config, 1)
    parts = parts_of(np.random.default_rng(1), config.vocab_size)
    leaves = {n: torch.nn.Parameter(v) for n, v in torch_models.tensors(values, torch.float64).items()}
    stepper = torch_models.torch_optimizer(optimizer, leaves, 1e-2)
    total, tokens, load = 0.0, 0, None
    for part in parts:
        more: dict[str, Any] = {} if load is None else {"expert_load_before": load}
        out = torch_models.forward(config, leaves, torch_models.tensors(part, torch.float64) | more)
        total, tokens = total + out["loss"] * out["num_tokens"], tokens + out["num_tokens"]
        load = out["expert_load"] + (0 if load is None else load)
    (total / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(leaves.values(), optimizer.max_grad_norm)
    stepper.step()
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply", optimizer=optimizer)
    train = moe_onnx.TrainingSession(graph, parameters=values, lr=1e-2, sess_options=one_thread())
    metrics = train.step(parts)
    assert metrics["loss"] == pytest.approx((total / tokens).item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for name, value in train.parameters().items():
        want = leaves[name].detach().numpy()
        assert np.abs(value - want).max() <= 1e-5 * np.abs(want).max(), name
    assert len(whole_of(parts)["input_ids"]) == 7
