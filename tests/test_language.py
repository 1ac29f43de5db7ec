"""``eval`` and ``generate`` give what numpy makes of the weights, or of the logits, of the same model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file
from tiny_graph import TinyGraph, V

import moe_onnx
from moe_onnx.cli import main
from moe_onnx.runtime.codec import ByteCodec
from moe_onnx.runtime.evaluation import evaluate_tokens
from moe_onnx.runtime.generate import probabilities

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
}
IDS = np.random.default_rng(3).integers(0, V, 101).astype(np.uint16)


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return TinyGraph().save(tmp_path / "tiny")


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", IDS)
    return tmp_path / "ids.npy"


@pytest.fixture
def trained(tiny: Path, ids: Path, tmp_path: Path) -> Path:
    how = ["--batch-size", 2, "--sequence-length", 6, "--lr", 0.5, "--steps", 5]
    run("train", tiny, "--tokens", ids, *how, "-o", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def moe() -> moe_onnx.TrainingSession:
    config = moe_onnx.MoeLMConfig(
        **SMALL,
        initializer_range=0.5,
    )
    graph = moe_onnx.build_training_graph(config, assembly="eval+forward")
    return moe_onnx.TrainingSession(graph, seed=4)


def test_the_loss_is_that_of_the_weights(tiny: Path, ids: Path, trained: Path) -> None:
    """A bigram model's loss needs no graph: pairs within sequences of 8, each counted once."""
    weights = load_file(next((trained / "checkpoint").glob("step-*")) / "model.safetensors")
    logits = weights["bigram.weight"].astype(np.float64)[IDS] + weights["bigram.bias"]
    nll = [-log_softmax(logits)[t, IDS[t + 1]] for t in range(len(IDS) - 1) if (t + 1) % 8]
    how = ["--checkpoint", trained, "--sequence-length", 8, "--batch-size", 3]
    found = json.loads(run("eval", tiny, "--tokens", ids, *how, "--json").output)
    assert found["tokens"] == len(nll) == 88
    assert found["batches"] == 5
    assert found["loss"] == pytest.approx(np.mean(nll), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-6)
    assert found["weights"].startswith("step 5 of")
    # Another size of batch is the same text; the checkpoint may be named by its own path as well.
    how[1] = next((trained / "checkpoint").glob("step-*"))
    again = json.loads(run("eval", tiny, "--tokens", ids, *how[:-1], 50, "--json").output)
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-6) and again["batches"] == 1


def test_the_loss_is_that_of_the_logits(moe: moe_onnx.TrainingSession) -> None:
    text = np.random.default_rng(0).integers(0, 11, 53)
    nll = []
    for start in range(0, 53, 10):  # the last sequence has 3 tokens
        part = text[start : start + 10]
        logits = moe.forward({"input_ids": part[None]})["logits"][0].astype(np.float64)
        nll += [-log_softmax(logits)[t, part[t + 1]] for t in range(len(part) - 1)]
    seen: list[tuple[int, int]] = []
    done = evaluate_tokens(
        moe, text, batch_size=4, sequence_length=10, on_batch=lambda e, n: seen.append((e.batches, n))
    )
    assert done.loss == pytest.approx(np.mean(nll), rel=1e-5)
    assert (done.tokens, seen) == (47, [(1, 2), (2, 2)])
    assert done.expert_load is not None and done.expert_load.sum() == 53 * 2  # padding counts nowhere
    assert set(done.other_losses) == {"aux_loss"}


def test_some_batches_are_spread_over_the_text(moe: moe_onnx.TrainingSession) -> None:
    text = np.repeat(np.arange(10), 8)  # sequence i is all i
    seen: list[set[int]] = []
    original = moe.eval
    moe.eval = lambda batch: (seen.append(set(batch["input_ids"].ravel())), original(batch))[1]  # type: ignore[method-assign]
    try:
        done = evaluate_tokens(moe, text, batch_size=1, sequence_length=8, batches=3)
    finally:
        del moe.eval  # type: ignore[method-assign]
    assert seen == [{0}, {4}, {9}] and done.batches == 3 and done.tokens == 21


def test_tables_and_picture(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 30)
    small = ["--layers", 1, "--hidden-size", 8, "--heads", 2, "--experts", 4, "--expert-size", 8]
    how = ["--batch-size", 2, "--sequence-length", 16, "--steps", 2]
    out = tmp_path / "run"
    run("train", *small, "--text", text, *how, "-o", out)
    said = run("eval", out, "--text", text, "--load-svg", tmp_path / "load.svg", "--threads", 1).output
    for word in ("perplexity", "bits per byte", "aux_loss", "Load of 4 experts", "step 2 of", "effective"):
        assert word in said
    assert "batch 1" in "".join(ElementTree.parse(tmp_path / "load.svg").getroot().itertext())
    result = run("generate", out, "--prompt", "the ", "--max-new-tokens", 12, "--seed", 3)
    again = run("generate", out, "--prompt", "the ", "--max-new-tokens", 12, "--seed", 3)
    assert result.stdout == again.stdout and result.stdout.startswith("the ")
    assert "step 2 of" in result.stderr and "step 2" not in result.stdout
    other = run("generate", out, "--prompt", "the ", "--max-new-tokens", 12, "--seed", 4)
    assert other.stdout != result.stdout


def test_greedy_is_the_argmax_of_each_forward_pass(moe: moe_onnx.TrainingSession) -> None:
    expected = [3, 1]
    for _ in range(9):
        logits = moe.forward({"input_ids": np.array([expected[-6:]])})["logits"]
        expected.append(int(logits[0, -1].argmax()))
    drawn: list[int] = []
    greedy = moe_onnx.generate(moe, [3, 1], 9, temperature=0, context=6, on_token=drawn.append)
    assert greedy == expected and drawn == expected[2:]
    assert moe_onnx.generate(moe, [3, 1], 9, top_k=1, context=6) == expected
    assert moe_onnx.generate(moe, [3, 1], 9, top_p=1e-9, context=6) == expected
    assert moe_onnx.generate(moe, [3, 1], 9, temperature=1e-300, context=6) == expected


def test_the_greedy_command(tiny: Path, trained: Path) -> None:
    """A bigram model's most likely continuation is read from its weights."""
    weights = load_file(next((trained / "checkpoint").glob("step-*")) / "model.safetensors")
    best = (weights["bigram.weight"] + weights["bigram.bias"]).argmax(axis=1)
    expected = [2]
    for _ in range(6):
        expected.append(int(best[expected[-1]]))
    how = ["--temperature", 0, "--max-new-tokens", 6]
    result = run("generate", tiny, "--checkpoint", trained, "--prompt-ids", "2", *how)
    assert result.stdout.strip() == ",".join(map(str, expected))


def test_what_is_drawn_from() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    assert probabilities(logits) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert probabilities(logits, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(logits, top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(logits, top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])
    # Of the two that are left, the first has 4/7 of the probability.
    assert probabilities(logits, top_k=2, top_p=0.5) == pytest.approx([0, 1, 0, 0])
    assert probabilities(np.zeros(4), top_k=2) == pytest.approx([0.5, 0.5, 0, 0])
    assert probabilities(logits, top_k=99) == pytest.approx([0.1, 0.4, 0.2, 0.3])


def test_bytes_are_tokens() -> None:
    codec = ByteCodec(256)
    assert codec.encode("a\n\N{EURO SIGN}") == [97, 10, 0xE2, 0x82, 0xAC]
    assert codec.decode([97, 0xE2, 0x82, 0xAC]) == "a\N{EURO SIGN}"
    assert ByteCodec(300).decode([97, 256, 98]) == "a\N{REPLACEMENT CHARACTER}b"
    with pytest.raises(moe_onnx.OptionError, match=r"\[0, 100\), got 120 at position 1"):
        ByteCodec(100).encode("ax")


def test_wrong_usage(tiny: Path, ids: Path, trained: Path, moe: Any, tmp_path: Path) -> None:
    evaluated = ["eval", tiny, "--tokens", ids]
    assert "nothing was trained" in run(*evaluated).output
    assert "either --text or --tokens" in run("eval", tiny, code=2).output
    assert "There is no checkpoint" in run(*evaluated, "--checkpoint", tmp_path, code=2).output
    assert "a run of other graphs" in run("eval", trained, "--tokens", ids, code=2).output
    assert "neither" in run("eval", tmp_path, "--tokens", ids, code=2).output
    np.save(tmp_path / "bad.npy", np.array([1, 9]))
    assert "got 9 at position 1" in run("eval", tiny, "--tokens", tmp_path / "bad.npy", code=2).output
    np.save(tmp_path / "one.npy", np.array([1]))
    assert "at least 2" in run("eval", tiny, "--tokens", tmp_path / "one.npy", code=2).output
    generated = ["generate", tiny, "--max-new-tokens", 1]
    assert "--prompt or --prompt-ids" in run(*generated, code=2).output
    assert "got '7' at position 1" in run(*generated, "--prompt-ids", "1 7", code=2).output
    assert "at least one token" in run(*generated, "--prompt-ids", "", code=2).output
    assert (
        "top_p must be in (0, 1], got 1.5"
        in run(*generated, "--prompt-ids", 1, "--top-p", 1.5, code=2).output
    )
    with pytest.raises(moe_onnx.OptionError, match="top_k must be an integer >= 1, got 0"):
        moe_onnx.generate(moe, [1], 1, top_k=0)
    for command in ("eval", "generate"):
        output = run(command, "--help").output
        assert "Examples:" in output and f"moe-onnx {command}" in output


def test_what_is_not_finite_exits_with_1(tiny: Path, ids: Path, trained: Path) -> None:
    session = moe_onnx.TrainingSession(tiny)
    state = session.state_dict()
    state["bigram.bias"][:] = np.nan
    session.load_state_dict(state)
    with pytest.raises(moe_onnx.NonFiniteError, match="logits after 1 tokens"):
        moe_onnx.generate(session, [1], 1)
    session.save_checkpoint(trained / "nan")
    assert "nan" in run("eval", tiny, "--checkpoint", trained / "nan", "--tokens", ids, code=1).output
    broken = ["--checkpoint", trained / "nan", "--prompt-ids", 1]
    assert "not finite" in run("generate", tiny, *broken, code=1).output


def test_a_capacity_is_filled_up() -> None:
    config = moe_onnx.MoeLMConfig(
        **SMALL,
        dispatch_mode="drop_pad",
        expert_capacity=30,
    )
    session = moe_onnx.TrainingSession(moe_onnx.build_training_graph(config, assembly="eval"), assembly="")
    done = evaluate_tokens(session, np.arange(9), batch_size=1, sequence_length=5)
    assert done.tokens == 7 and done.dropped is not None and done.dropped.tolist() == [0]
