"""Learning rates: values by hand, limits, and training that goes on with the rates it had."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_graph import TinyGraph, V

import moe_onnx
from moe_onnx.build.recipe import Schedule, recipe_from_dict
from moe_onnx.errors import ConfigError

# lr 1 over 10 updates, 2 of them warm-up: the rates of updates 1, 2, .. 12.
HALF = math.sqrt(0.5) / 2
COSINE = [1, 0.5 + math.cos(math.pi / 8) / 2, 0.5 + HALF, 0.5 + math.cos(3 * math.pi / 8) / 2, 0.5]
COSINE += [1 - value for value in COSINE[3::-1]]
BY_HAND: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({}, [0, 0.5] + 10 * [1]),
    "linear": ({}, [0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0]),
    "cosine": ({}, [0, 0.5, *COSINE, 0]),
    "linear to 0.2": ({"min_lr": 0.2}, [0, 0.5, *(0.2 + 0.8 * i / 8 for i in range(8, -1, -1)), 0.2]),
    "cosine to 0.2": ({"min_lr": 0.2}, [0, 0.5, *(0.2 + 0.8 * value for value in COSINE), 0.2]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_values(name: str) -> None:
    options, wanted = BY_HAND[name]
    rate = moe_onnx.LearningRate(
        lr=1.0, lr_scheduler_type=name.split()[0], steps=10, warmup_steps=2, **options
    )
    np.testing.assert_allclose([rate(number) for number in range(1, 13)], wanted, atol=1e-15)


def test_without_warm_up_the_first_update_has_the_whole_rate() -> None:
    for kind in ("constant", "linear", "cosine"):
        assert moe_onnx.LearningRate(lr=0.3, lr_scheduler_type=kind, steps=1)(1) == 0.3
    # A constant rate knows no last update, so its warm-up may be longer than the training.
    assert moe_onnx.LearningRate(lr=0.3, steps=4, warmup_steps=10)(4) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "'lr' must be a finite number"),
        ({"lr_scheduler_type": "cosnie"}, "Did you mean 'cosine'"),
        ({"lr_scheduler_type": "linear", "steps": 5, "warmup_steps": 5}, r"less than steps \(5\).*got 5"),
        ({"min_lr": 0.1}, "'min_lr' must be 0 with lr_scheduler_type 'constant', got 0.1"),
        ({"lr_scheduler_type": "cosine", "min_lr": 2.0}, r"'min_lr' must be at most lr \(1\), got 2.0"),
        ({"warmup_steps": -1}, "'warmup_steps' must be an integer >= 0"),
        ({"warmup": 1}, "no option 'warmup'. Did you mean 'warmup_steps'"),
    ],
)
def test_what_is_no_schedule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        moe_onnx.LearningRate(**{"lr": 1.0, **options})


def test_recipes_have_them() -> None:
    how = {"lr": 0.5, "steps": 20, "lr_scheduler_type": "cosine", "warmup_steps": 5, "min_lr": 0.1}
    schedule = recipe_from_dict({"training": {**how, "gradient_accumulation_steps": 4}}).schedule
    assert schedule.gradient_accumulation_steps == 4
    assert schedule.learning_rate == moe_onnx.LearningRate(**how)
    assert Schedule().learning_rate(7) == Schedule().lr
    with pytest.raises(ConfigError, match="warmup_steps"):
        Schedule(steps=5, lr_scheduler_type="linear", warmup_steps=5)
    with pytest.raises(ConfigError, match="'gradient_accumulation_steps' must be an integer >= 1"):
        Schedule(gradient_accumulation_steps=0)


def test_training_goes_on_with_the_same_rates(tmp_path: Path) -> None:
    def session(seed: int = 0) -> moe_onnx.TrainingSession:
        rate = moe_onnx.LearningRate(lr=0.5, lr_scheduler_type="cosine", steps=8, warmup_steps=3, min_lr=0.01)
        return moe_onnx.TrainingSession(TinyGraph(), lr=rate, seed=seed)

    def dataset() -> moe_onnx.TokenDataset:
        return moe_onnx.TokenDataset(np.tile(np.arange(V), 50), batch_size=2, sequence_length=6, vocab_size=V)

    whole = session()
    history = moe_onnx.train(whole, dataset(), 8)
    rates = [m["lr"] for m in history]
    assert rates[0] == 0 and max(rates) == rates[3] == 0.5 and rates[3:] == sorted(rates[3:], reverse=True)
    data = dataset()
    found = moe_onnx.train(session(), data, 5, checkpoint=tmp_path)
    again = session(seed=1)
    data.load_state_dict(again.load_checkpoint(tmp_path)["data"])
    found += moe_onnx.train(again, data, 8)
    assert [(m["lr"], m["loss"]) for m in found] == [(m["lr"], m["loss"]) for m in history]
    assert all(np.array_equal(v, whole.state_dict()[k]) for k, v in again.state_dict().items())
