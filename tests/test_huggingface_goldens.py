"""Checkpoints that transformers wrote, with what it makes of them: ``goldens/make_huggingface.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_huggingface import contents

import moe_onnx

GOLDENS = Path(__file__).parent / "goldens" / "huggingface"
KINDS = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
LIMIT = 1e-5


def far(got: object, want: object) -> float:
    """The largest difference, relative to the largest value wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-6))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_every_gradient(kind: str, tmp_path: Path) -> None:
    with np.load(GOLDENS / kind / "expected.npz") as file:
        want = dict(file)
    batch = {name: want.pop(name) for name in ("input_ids", "labels", "attention_mask")}
    pretrained = moe_onnx.from_pretrained(GOLDENS / kind)
    graph = pretrained.training_graph(assembly="grad+forward")
    values = dict(pretrained.parameters())
    session = moe_onnx.InferenceSession(graph.models["grad"])
    names = [name for name in want if name != "logits"]
    outputs = [f"{name.removeprefix('grad/')}.grad" if "/" in name else name for name in names]
    found = dict(zip(names, session.run(outputs, {**batch, **values}), strict=True))
    forward = moe_onnx.InferenceSession(graph.models["forward"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    (logits,) = forward.run(["logits"], {**inputs, **values})
    found["logits"] = logits * batch["attention_mask"][..., None]
    assert {f"grad/{info.name}" for info in graph.manifest.parameters} < found.keys()
    assert {name: far(found[name], want[name]) for name in want if far(found[name], want[name]) > LIMIT} == {}


def test_the_files_come_back_as_transformers_wrote_them(tmp_path: Path) -> None:
    for kind in KINDS:
        graph = moe_onnx.from_pretrained(GOLDENS / kind).training_graph(assembly="forward")
        moe_onnx.save_pretrained(graph.save(tmp_path / kind), tmp_path / "back" / kind)
        wanted = contents(GOLDENS / kind)
        del wanted["expected.npz"]
        assert contents(tmp_path / "back" / kind) == wanted


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_the_record_is_what_transformers_says_now(kind: str) -> None:
    from goldens.make_huggingface import record

    with np.load(GOLDENS / kind / "expected.npz") as file:
        want = dict(file)
    found = record(GOLDENS / kind)
    assert found.keys() == want.keys()
    assert max(far(found[name], value) for name, value in want.items()) <= LIMIT
