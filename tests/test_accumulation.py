"""An update by micro-batches is the update by the whole batch, each token weighing the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routes import one_thread
from tiny_graph import SHAPES, Numpy, TinyGraph, V

import moe_onnx
from moe_onnx.errors import BatchError, ModelError, NonFiniteError, OptionError
from moe_onnx.runtime.accumulate import norm_of

Arrays = dict[str, Any]
TOKENS = np.tile(np.arange(V), 100)


def parts_of(rng: np.random.Generator, vocab: int) -> list[Arrays]:
    """Micro-batches of one length whose numbers of labels differ much; the third has none."""
    found = []
    for rows, real in ((2, 6), (1, 2), (1, 1), (3, 5)):
        ids = rng.integers(0, vocab, (rows, 6))
        mask = (np.arange(6) < real).astype(np.int64) * np.ones_like(ids)
        labels = np.where(rng.random(ids.shape) < 0.2, -100, ids)
        found.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return found


def whole_of(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def tiny(**options: Any) -> moe_onnx.TrainingSession:
    return moe_onnx.TrainingSession(TinyGraph(), **{"lr": 0.5, **options})


def test_against_float64_by_hand() -> None:
    """The whole batch, position by position: weights by label are not the mean over micro-batches."""
    parts = parts_of(np.random.default_rng(0), V)
    train = tiny()
    oracle = Numpy(train.parameters())
    for _ in range(3):
        loss, count, norm = oracle.step(*whole_of(parts).values(), lr=0.5)
        metrics = train.step(parts)
        assert metrics["num_tokens"] == count and metrics["step"] == train.global_step
        np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], [loss, norm], rtol=1e-6)
    for name, value in train.parameters().items():
        np.testing.assert_allclose(value, oracle.values[name], atol=2e-6)
    naive = np.mean([tiny().eval(part)["loss"] for part in parts])
    assert abs(naive - tiny().eval(whole_of(parts))["loss"]) > 0.05  # the mistake would be seen


LM = {
    "num_hidden_layers": 1,
    "vocab_size": 11,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 6,
}


def sessions_of(config: Any, **options: Any) -> list[moe_onnx.TrainingSession]:
    optimizer = moe_onnx.AdamW(eps=1e-3)
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply", optimizer=optimizer)
    return [moe_onnx.TrainingSession(graph, lr=1e-2, sess_options=one_thread(), **options) for _ in range(2)]


def test_a_language_model() -> None:
    """Also what is no mean: loads, and the update of a selection bias by them."""
    config = moe_onnx.MoeLMConfig(
        **LM, router_aux_loss_coef=0.0, router_selection_bias=True, router_bias_update_rate=0.05
    )
    by_parts, whole = sessions_of(config)
    parts = parts_of(np.random.default_rng(1), 11)
    before = whole.parameters()
    for _ in range(3):
        one, other = by_parts.step(parts), whole.step(whole_of(parts))
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(one["expert_load"], other["expert_load"])
        for name in ("loss", "lm_loss", "grad_norm"):
            np.testing.assert_allclose(one[name], other[name], rtol=2e-6)
    for name, value in whole.parameters().items():
        np.testing.assert_allclose(by_parts.parameters()[name], value, atol=3e-7)
    assert any((value != before[name]).any() for name, value in whole.parameters().items() if "bias" in name)


def test_a_layer() -> None:
    config = moe_onnx.MoeLayerConfig(
        hidden_size=8, num_experts=4, moe_intermediate_size=6, router_aux_loss_coef=0.0
    )
    by_parts, whole = sessions_of(config)
    rng = np.random.default_rng(2)
    names = ("hidden_states", "target")
    parts = [{name: rng.standard_normal((n, 8), np.float32) for name in names} for n in (7, 1, 12)]
    one, other = by_parts.step(parts), whole.step(whole_of(parts))
    np.testing.assert_allclose(one["mse_loss"], other["mse_loss"], rtol=1e-6)
    for name, value in whole.parameters().items():
        np.testing.assert_allclose(by_parts.parameters()[name], value, atol=3e-7)


@pytest.mark.parametrize("kind", ["pooled", "global"])
def test_losses_of_the_router_are_means_of_the_micro_batches(kind: str) -> None:
    """With "global" the loads of the micro-batches before are in each."""
    config = moe_onnx.MoeLMConfig(**LM, router_aux_loss=kind, router_aux_loss_coef=0.5)
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply+eval")
    train = moe_onnx.TrainingSession(graph, sess_options=one_thread())
    parts = parts_of(np.random.default_rng(3), 11)
    seen, load = [], None
    for part in parts:
        more = {"expert_load_before": load} if kind == "global" and load is not None else {}
        seen.append(train.eval(part | more))
        load = seen[-1]["expert_load"] + (0 if load is None else load)
    tokens = [m["num_tokens"] for m in seen]
    found = train.step(parts)
    for name in ("aux_loss", "lm_loss", "loss"):
        np.testing.assert_allclose(
            found[name], np.average([m[name] for m in seen], weights=tokens), rtol=1e-6
        )
    if kind == "global":  # the loads before do count
        assert abs(train.eval(parts[3])["aux_loss"] - seen[3]["aux_loss"]) > 1e-4


def test_no_labels_at_all() -> None:
    """Then micro-batches weigh the same, for what the router's losses still have to say."""
    config = moe_onnx.MoeLMConfig(**LM, router_aux_loss_coef=0.5)
    train, other = sessions_of(config)
    part = {**parts_of(np.random.default_rng(4), 11)[0]}
    part["labels"] = np.full_like(part["labels"], -100)
    metrics = train.step([part, part])
    assert metrics["num_tokens"] == 0 and metrics["lm_loss"] == 0 and metrics["grad_norm"] > 0
    np.testing.assert_allclose(metrics["grad_norm"], other.step(part)["grad_norm"], rtol=1e-6)


def test_noise_is_another_in_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_onnx.runtime import training_session

    config = moe_onnx.MoeLayerConfig(
        hidden_size=4, num_experts=4, moe_intermediate_size=4, noisy_top_k=True, router_noise_seed=5
    )
    train, seen = sessions_of(config)[0], []
    run = training_session.BoundGraph.run

    def watched(self: Any, feed: Arrays) -> None:
        seen.extend([feed["router_noise"]] if "router_noise" in feed else [])
        run(self, feed)

    monkeypatch.setattr(training_session.BoundGraph, "run", watched)
    part = {name: np.ones((3, 4), np.float32) for name in ("hidden_states", "target")}
    train.step([part, part])
    train.step(part)
    first, second, third = (noise.tobytes() for noise in seen)
    assert len({first, second, third}) == 3
    fresh = np.random.default_rng((5, 1)).standard_normal(seen[0].shape, np.float32)
    np.testing.assert_array_equal(seen[0], fresh)  # what a step of one batch draws


def test_one_micro_batch_is_a_batch() -> None:
    one, other = tiny(), tiny()
    part = parts_of(np.random.default_rng(5), V)[0]
    assert one.step([part]) | {"expert_load": 0} == other.step(part) | {"expert_load": 0}
    assert all(np.array_equal(v, other.state_dict()[k]) for k, v in one.state_dict().items())


def test_what_cannot_be() -> None:
    parts = parts_of(np.random.default_rng(6), V)
    with pytest.raises(BatchError, match="at least one micro-batch"):
        tiny().step([])
    train = moe_onnx.TrainingSession(TinyGraph("step"))
    with pytest.raises(ModelError, match="4 micro-batches needs the graphs 'grad' and 'apply'"):
        train.step(parts)
    train = tiny()
    before = train.state_dict()
    with pytest.raises(BatchError, match=r"micro-batch 3 of 4: .* got 7 at \[0, 0\]"):
        train.step([*parts[:2], {"input_ids": [[V, 0]]}, parts[3]])
    assert all(np.array_equal(v, before[k]) for k, v in train.state_dict().items())
    data = moe_onnx.TokenDataset(TOKENS, batch_size=2, sequence_length=6, vocab_size=V)
    with pytest.raises(OptionError, match="gradient_accumulation_steps must be an integer >= 1, got 0"):
        moe_onnx.train(train, data, 1, gradient_accumulation_steps=0)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_one_that_is_not_finite_spoils_the_update(policy: str) -> None:
    train = tiny(non_finite=policy)
    state = train.state_dict()
    state["bigram.weight"][0] = np.inf  # token 0 only
    train.load_state_dict(state)
    good, bad = {"input_ids": np.ones((2, 3), np.int64)}, {"input_ids": np.zeros((1, 3), np.int64)}
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="Update 1: micro-batch 2 of 3: the loss is nan"):
            train.step([good, bad, good])
    else:
        metrics = train.step([good, bad, good])
        assert metrics["skipped"] is True and metrics["num_tokens"] == 6  # of the first two
    assert all(np.array_equal(v, state[k], equal_nan=True) for k, v in train.state_dict().items())
    assert train.step([good, good])["skipped"] is False  # nothing of the bad one is left


def test_training_by_micro_batches_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def dataset() -> moe_onnx.TokenDataset:
        return moe_onnx.TokenDataset(TOKENS, batch_size=2, sequence_length=6, vocab_size=V)

    whole, data = tiny(), dataset()
    losses = [m["loss"] for m in moe_onnx.train(whole, data, 6, gradient_accumulation_steps=3)]
    fed = dataset()
    for _ in range(18):
        fed.next_batch()
    assert fed.state_dict() == data.state_dict()
    first, data = tiny(), dataset()
    found = moe_onnx.train(first, data, 2, checkpoint=tmp_path, gradient_accumulation_steps=3)
    again, data = tiny(seed=9), dataset()
    data.load_state_dict(again.load_checkpoint(tmp_path)["data"])
    found += moe_onnx.train(again, data, 6, gradient_accumulation_steps=3)
    assert [m["loss"] for m in found] == losses
    assert all(np.array_equal(v, whole.state_dict()[k]) for k, v in again.state_dict().items())


def test_the_norm_of_many_gradients() -> None:
    """In float32 alone 2^24 ones would sum up short."""
    assert norm_of([np.ones((2**12, 2**12), np.float32), np.ones(2**20, np.float32)]) == (
        pytest.approx(np.sqrt(2**24 + 2**20), rel=1e-7)
    )
    assert norm_of([np.full(3, np.nan, np.float32)]) != norm_of([])
    assert SHAPES  # the oracle's names are those of the graph
