"""What ``torch_models.py`` makes of the layers of ``torch_moe.py``: training, shared experts, inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from golden_cases import is_trained
from moe_cases import CASES

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.optimizers import SGD, AdamW

pytestmark = pytest.mark.parity


def test_bias_goes_against_the_load() -> None:
    import torch
    import torch_moe

    config = MoeLayerConfig(num_experts=4, router_selection_bias=True, router_bias_update_rate=0.25)
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    got = torch_moe.updated_selection_bias(config, bias, torch.tensor([5, 2, 1, 0]))  # mean 2
    assert got.tolist() == [0.75, 2.0, 3.25, 4.25]
    assert torch_moe.updated_selection_bias(config, bias, torch.zeros(4).long()).tolist() == bias.tolist()


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.5), SGD(momentum=0.9, max_grad_norm=1e-3)])
def test_bias_is_nothing_to_the_optimizer(optimizer: AdamW | SGD) -> None:
    """It moves by whole rates, from step to step by the loads of each, and has no gradient."""
    import torch
    import torch_models

    case = CASES["lm-sigmoid_groups-probs"]
    start = torch_models.tensors(case.parameters(), torch.float64)
    run = torch_models.train_steps(case.config, optimizer, case.parameters(), case.batches(), 1e-2)
    biases = [name for name in start if not is_trained(name)]
    assert biases == [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in range(2)]
    assert run.gradients.keys() == start.keys() - set(biases)
    norm = torch.stack([value.norm() for value in run.gradients.values()]).norm()
    assert float(run.metrics["grad_norm"][0]) == pytest.approx(float(norm))
    for number, name in enumerate(biases):
        signs = [
            torch.sign(load[number].double() - load[number].double().mean())
            for load in run.metrics["expert_load"]
        ]
        want = start[name] - case.config.router_bias_update_rate * torch.stack(signs).sum(0)
        assert torch.allclose(run.parameters[name], want, rtol=1e-14)
        assert not torch.equal(want, start[name])


@pytest.mark.parametrize("gate", [False, True])
def test_shared_expert_takes_every_token(gate: bool) -> None:
    """Also those that no other expert keeps: what a layer gives them is the shared expert's."""
    import torch
    import torch.nn.functional as F
    import torch_models

    case = CASES["shared_gate" if gate else "shared"]
    mode = {"dispatch": "init_routing", "dispatch_mode": "active", "active_num": 1}
    small = replace(case, config=replace(case.config, **mode))
    values = torch_models.tensors(small.parameters(), torch.float64)
    batch = torch_models.tensors(small.batches()[0], torch.float64)
    out = torch_models.forward(small.config, values, batch)
    x, prefix = batch["hidden_states"], "shared_expert." if gate else "shared_experts."
    hidden = F.silu(F.linear(x, values[prefix + "gate_proj.weight"]))
    hidden = hidden * F.linear(x, values[prefix + "up_proj.weight"])
    want = F.linear(hidden, values[prefix + "down_proj.weight"])
    if gate:
        want = want / (1 + torch.exp(-F.linear(x, values["shared_expert_gate.weight"])))
    alone = ~out["kept"][0].any(1)
    assert int(alone.sum()) == len(x) - 1
    assert torch.allclose(out["output"][alone], want[alone], rtol=1e-12)
    assert not torch.allclose(out["output"], want)


def test_inputs_that_may_be_left_out() -> None:
    """Without noise the logits have none, and nothing came before; each layer has its own of both."""
    import torch
    import torch_models

    for name, key in (("lm-noisy", "router_noise"), ("lm-global-sigmoid-dropless", "expert_load_before")):
        case = CASES[name]
        assert isinstance(case.config, MoeLMConfig)
        parameters = torch_models.tensors(case.parameters(), torch.float64)
        batch = torch_models.tensors(case.batches()[0], torch.float64)
        assert batch[key].shape[0] == 2 and batch[key].shape[-1] == case.config.num_experts
        zero = batch | {key: torch.zeros_like(batch[key])}
        without = {other: value for other, value in batch.items() if other != key}
        last = batch | {key: torch.stack([batch[key][0], batch[key][1].flip(0)])}
        losses = [
            float(torch_models.forward(case.config, parameters, given)["loss"])
            for given in (batch, zero, without, last)
        ]
        assert losses[1] == losses[2]
        assert len({round(loss, 6) for loss in losses}) == 3


@pytest.mark.parametrize("router", ["softmax", "sigmoid_groups"])
def test_sequence_loss_is_the_mean_of_each_sequence_alone(router: str) -> None:
    import torch
    import torch_models

    case = CASES[f"lm-sequence-{router}-dropless"]
    parameters = torch_models.tensors(case.parameters(), torch.float64)
    batch = torch_models.tensors(case.batches()[0], torch.float64)
    whole = torch_models.forward(case.config, parameters, batch)["aux_loss"]
    alone = [
        torch_models.forward(case.config, parameters, {key: value[[row]] for key, value in batch.items()})
        for row in range(len(batch["input_ids"]))
    ]
    losses = [float(out["aux_loss"]) for out in alone]
    assert len(set(losses)) == len(losses) == 3
    assert float(whole) == pytest.approx(sum(losses) / 3, rel=1e-12)


def test_places_of_the_weights_and_operators_mean_the_same() -> None:
    import torch_models

    runs = []
    for name in ("sigmoid-probs-combine", "sigmoid-map_probs-experts"):
        case = CASES[name]
        runs.append(
            torch_models.train_steps(case.config, case.optimizer, case.parameters(), case.batches(), case.lr)
        )
    for key, value in runs[0].parameters.items():
        np.testing.assert_array_equal(value, runs[1].parameters[key])
