"""The training loop: session and data order always belong together."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_graph import TinyGraph, V

import moe_onnx
from moe_onnx.errors import ModelError, NonFiniteError, OptionError
from moe_onnx.runtime import training_session
from moe_onnx.runtime.training_state import BoundGraph

TOKENS = np.tile(np.arange(V), 100)


def session(*assemblies: str, **options: Any) -> moe_onnx.TrainingSession:
    return moe_onnx.TrainingSession(TinyGraph(*assemblies), **{"lr": 0.5, **options})


def dataset() -> moe_onnx.TokenDataset:
    return moe_onnx.TokenDataset(TOKENS, batch_size=2, sequence_length=6, vocab_size=V)


def test_the_loss_falls_and_the_loop_stops() -> None:
    train = session()
    seen: list[int] = []
    history = moe_onnx.train(train, dataset(), 30, on_step=lambda m: seen.append(m["step"]), eval_every=10)
    assert seen == [m["step"] for m in history] == list(range(1, 31))
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    evaluated = [m["step"] for m in history if "eval_loss" in m]
    assert evaluated == [10, 20, 30] and history[-1]["eval_loss"] < 1
    assert moe_onnx.train(train, dataset(), 30) == []


def test_held_out_loss_counts_each_token_once() -> None:
    from moe_onnx.runtime.train import evaluate

    train, data = session(), dataset()
    batches = list(data.eval_batches(3))
    nll = sum(train.eval(b)["lm_loss"] * train.eval(b)["num_tokens"] for b in batches)
    assert evaluate(train, data, 3) == pytest.approx(nll / sum(b["input_ids"][:, 1:].size for b in batches))


@pytest.mark.parametrize("press_at", range(2, 9))
def test_ctrl_c_between_any_two_runs_can_be_gone_on_from(
    press_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = session()
    losses = [m["loss"] for m in moe_onnx.train(whole, dataset(), 6)]
    run, calls = BoundGraph.run, 0

    def pressed(self: BoundGraph, feed: dict[str, np.ndarray]) -> None:
        nonlocal calls
        calls += 1
        if calls == press_at:
            os.kill(os.getpid(), signal.SIGINT)
        run(self, feed)

    train, data = session(), dataset()
    found: list[float] = []
    monkeypatch.setattr(training_session.BoundGraph, "run", pressed)
    with pytest.raises(KeyboardInterrupt):
        moe_onnx.train(train, data, 6, on_step=lambda m: found.append(m["loss"]))
    monkeypatch.undo()
    assert train.global_step == len(found) == (press_at + 1) // 2
    train.save_checkpoint(tmp_path, data=data.state_dict())
    train, data = session(seed=9), dataset()
    data.load_state_dict(train.load_checkpoint(tmp_path)["data"])
    found += [m["loss"] for m in moe_onnx.train(train, data, 6)]
    assert found == losses
    assert all(np.array_equal(v, train.state_dict()[k]) for k, v in whole.state_dict().items())


def test_a_batch_that_fails_counts_as_not_drawn() -> None:
    train, data = session(), dataset()
    state = train.state_dict()
    state["bigram.bias"][0] = np.nan
    train.load_state_dict(state)
    before = data.state_dict()
    with pytest.raises(NonFiniteError):
        moe_onnx.train(train, data, 3)
    assert data.state_dict() == before


def test_skipping_comes_to_an_end() -> None:
    train = session(non_finite="skip")
    state = train.state_dict()
    state["bigram.bias"][0] = np.nan
    train.load_state_dict(state)
    rows: list[dict[str, Any]] = []
    with pytest.raises(NonFiniteError, match="20 batches in a row"):
        moe_onnx.train(train, dataset(), 3, on_step=rows.append)
    assert len(rows) == 20 and all(row["skipped"] for row in rows) and train.global_step == 0


def test_what_cannot_work_is_said_at_once() -> None:
    with pytest.raises(OptionError, match="save_every needs a checkpoint"):
        moe_onnx.train(session(), dataset(), 3, save_every=1)
    train = session("grad", "apply")
    with pytest.raises(ModelError, match="no 'eval' graph"):
        moe_onnx.train(train, dataset(), 3, eval_every=1)
    assert train.global_step == 0


def test_generated_tokens_are_the_seeds() -> None:
    train = session()
    moe_onnx.train(train, dataset(), 60)
    count = moe_onnx.generate(train, [2], 9, temperature=0)
    assert count == [(2 + i) % V for i in range(10)]  # what the tokens do
    hot = moe_onnx.generate(train, [0, 1], 30, temperature=3.0, seed=1)
    assert hot == moe_onnx.generate(train, [0, 1], 30, temperature=3.0, seed=1)
    assert hot != moe_onnx.generate(train, [0, 1], 30, temperature=3.0, seed=2)
    with pytest.raises(OptionError, match="temperature"):
        moe_onnx.generate(train, [0], 1, temperature=-1)
    with pytest.raises(OptionError, match="at least one token"):
        moe_onnx.generate(train, [], 1)
