"""16-bit training graphs against PyTorch: a reference cast by hand from the policy, and autocast itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_cases import Case, is_trained, tiny_lm
from moe_cases import MODES, layer, model
from routes import one_thread

import moe_onnx
from moe_onnx.runtime.loss_scale import LossScale

pytestmark = pytest.mark.parity

SCALE = 2.0**10
STEPS = 3
# Of the epsilon of a dtype (bfloat16 2^-7, float16 2^-10). Differences are norms over a tensor, of its own.
#
#   cast by hand: what sums in another order make of roundings, which now and then fall the other way;
#   autocast: it also rounds activations, and gradients of weights;
#   float32: what the rounding itself makes, which must be there, and no more than a few epsilons.
TOLERANCES = {
    "by_hand": {"loss": 0.5, "gradient": 0.5, "parameter": 0.1},
    "autocast": {"loss": 1.0, "gradient": 10.0, "parameter": 0.5},
    "float32": {"loss": 1.0, "gradient": 10.0, "parameter": 0.5},
}
MOST_BY_HAND, LEAST_OF_FLOAT32 = 0.05, 0.2  # the median gradient
SEEDS = {"tied_dense_norms": 15}  # where the common one chooses an expert by a hair
ADAMW = moe_onnx.AdamW(eps=1e-2)  # so large that steps follow gradients, not their signs
CONFIGS: dict[str, Any] = {
    "mixtral": tiny_lm(num_key_value_heads=2),
    "tied_dense_norms": tiny_lm(
        qk_norm="head", mlp_only_layers=(0,), tie_word_embeddings=True, attention_bias=True, clip_qkv=2.0
    ),
    "grouped": tiny_lm(unroll_experts=0, expert_bias=True, qk_norm="full"),
    "shared_gate": model(shared_expert_intermediate_size=10, shared_expert_gate=True, dispatch="routing_map"),
    "sigmoid": model(router_scores="sigmoid", router_selection_bias=True, shared_expert_intermediate_size=6),
    "clamped": layer(expert_activation="clamped_swiglu", expert_bias=True, swiglu_limit=0.5),
    "gelu": layer(expert_activation="gelu", expert_bias=True, router_weights_on="experts", unroll_experts=0),
    **{
        f"{mode}-{place}": layer(**MODES[mode], router_weights_on=place)
        for mode in MODES
        for place in ("combine", "experts")
    },
}


def found_by(
    config: Any, dtype: str, case: Case, form: str = "body"
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, first gradients and last parameters of the graphs."""
    config = type(config)(**{**config.__dict__, "dtype": dtype})
    graph = moe_onnx.build_training_graph(
        config, assembly="grad+apply", optimizer=case.optimizer, optimize_for=form
    )
    options = LossScale(init_scale=SCALE) if dtype == "float16" else None
    train = moe_onnx.TrainingSession(
        graph, parameters=case.parameters(), lr=case.lr, sess_options=one_thread(), loss_scale=options
    )
    losses, gradients = [], {}
    for batch in case.batches()[:STEPS]:
        inputs = {info.name for info in graph.manifest.graphs["grad"].inputs}
        metrics = train.step({name: value for name, value in batch.items() if name in inputs})
        assert not metrics["skipped"]
        losses.append(metrics["loss"])
        if not gradients:
            shared = train._state.shared
            gradients = {n: shared[f"{n}.grad"].array.copy() for n in train.parameters() if is_trained(n)}
    return losses, gradients, train.parameters()


def wanted_by(
    config: Any, dtype: str, case: Case, way: str
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The same of PyTorch."""
    import torch_models
    import torch_moe
    import torch_precision

    torch = torch_models.torch
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    values = torch_models.tensors(case.parameters(), torch.float32)
    biases = {n: v for n, v in values.items() if not is_trained(n)}
    leaves = {n: torch.nn.Parameter(v) for n, v in values.items() if is_trained(n)}
    stepper = torch_models.torch_optimizer(case.optimizer, leaves, case.lr)
    scale = SCALE if dtype == "float16" else 1.0
    router = torch_moe.router_logits

    def plain_router(parameters: Any, prefix: str, x: Any, noise: Any) -> Any:
        with torch.autocast("cpu", enabled=False):  # as for every other user of it
            return router(parameters, prefix, x.float(), noise)

    losses, gradients = [], {}
    for arrays in case.batches()[:STEPS]:
        batch = torch_models.tensors(arrays, torch.float32)
        if way == "by_hand":
            out = torch_precision.forward(torch_precision.Policy(half), config, {**leaves, **biases}, batch)
        else:
            with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=half):
                patch.setattr(torch_moe, "router_logits", plain_router)
                patch.setattr(torch.Tensor, "index_add", index_add_wide)
                out = torch_models.forward(config, {**leaves, **biases}, batch)
        stepper.zero_grad()
        (out["loss"] * scale).backward()
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad / scale
        losses.append(out["loss"].item())
        gradients = gradients or {n: leaf.grad.numpy().copy() for n, leaf in leaves.items()}
        torch.nn.utils.clip_grad_norm_(leaves.values(), case.optimizer.max_grad_norm or torch.inf)
        stepper.step()
    return losses, gradients, {n: leaf.detach().numpy() for n, leaf in leaves.items()}


def index_add_wide(self: Any, dim: int, index: Any, source: Any) -> Any:
    """autocast leaves sums of 16-bit rows into float32 tokens to its user."""
    import torch

    return torch.index_add(self, dim, index, source.to(self.dtype))


def gaps(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Of each tensor the norm of the difference, relative to its own.

    What a key's bias has for a gradient is rounding: softmax does not see it. Relative to the largest.
    """
    norms = {name: float(np.linalg.norm(value)) for name, value in want.items()}
    largest = max(norms.values())
    norms |= {name: largest for name in norms if name.endswith("k_proj.bias")}
    return {n: float(np.linalg.norm(got[n] - v)) / max(norms[n], 1e-3 * largest) for n, v in want.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_validation_has_nothing_to_say(dtype: str) -> None:
    """By every route, with other sizes, threads and batches; here as it takes its time."""
    graph = moe_onnx.build_training_graph(tiny_lm(num_hidden_layers=1, dtype=dtype), assembly="grad")
    report = moe_onnx.validate(graph.model, level="run")
    assert report.ok and not report.findings, report.codes


def check(way: str, got: tuple[Any, ...], want: tuple[Any, ...], eps: float) -> None:
    limits = TOLERANCES[way]
    np.testing.assert_allclose(got[0], want[0], rtol=limits["loss"] * eps)
    for what, index in (("gradient", 1), ("parameter", 2)):
        off = gaps({n: got[index][n] for n in want[1]}, {n: want[index][n] for n in want[1]})
        worst = max(off, key=lambda name: off[name])
        said = f"{way}: {what} of {worst} is off by {off[worst] / eps:.3f} epsilons"
        assert off[worst] <= limits[what] * eps, said


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_against_pytorch_and_float32(name: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    eps = float(torch.finfo(getattr(torch, dtype)).eps)
    case = Case("precision", CONFIGS[name], ADAMW, 1e-2, seed=SEEDS.get(name, 11))
    got, plain = found_by(case.config, dtype, case), found_by(case.config, "float32", case)
    by_hand = wanted_by(case.config, dtype, case, "by_hand")
    check("by_hand", got, by_hand, eps)
    assert np.median(list(gaps(got[1], by_hand[1]).values())) <= MOST_BY_HAND * eps
    check("autocast", got, wanted_by(case.config, dtype, case, "autocast"), eps)
    check("float32", got, plain, eps)
    assert got[0] != plain[0]
    assert np.median(list(gaps(got[1], plain[1]).values())) >= LEAST_OF_FLOAT32 * eps


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["mixtral", "grouped", "shared_gate", "dropless-experts", "position-combine"]
)
def test_the_form_for_native_kernels(name: str, dtype: str) -> None:
    """Activations that are one node round where those of standard operators do."""
    torch = pytest.importorskip("torch")
    eps = float(torch.finfo(getattr(torch, dtype)).eps)
    case = Case("precision", CONFIGS[name], ADAMW, 1e-2, seed=SEEDS.get(name, 11))
    got = found_by(case.config, dtype, case, "native")
    for want in (wanted_by(case.config, dtype, case, "by_hand"), found_by(case.config, dtype, case)):
        check("by_hand", got, want, eps)
        assert np.median(list(gaps(got[1], want[1]).values())) <= MOST_BY_HAND * eps
