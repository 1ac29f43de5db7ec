"""Folders of runs and graphs, as people come back to them: nothing sound is lost; how to go on is said."""

from __future__ import annotations

import itertools
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_cli import SMALL, rows, run, tiny, tokens, train
from test_huggingface import contents
from tiny_graph import V

import moe_onnx
from moe_onnx.cli import training

__all__ = ["tiny", "tokens"]  # fixtures


def told(output: str) -> str:
    return " ".join(output.split())


def test_a_finished_run_is_left_alone(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    """Its older checkpoint, too, which one more of the same step would push out."""
    out = tmp_path / "run"
    train(tiny, tokens, out, "--steps", 4, "--save-every", 2)
    before = contents(out / "checkpoint")
    train(tiny, tokens, out, "--steps", 4, "--resume")
    assert contents(out / "checkpoint") == before
    assert len(rows(out)) == 4
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(moe_onnx.TrainingSession, "step", interrupted)
        train(tiny, tokens, out, "--steps", 9, "--resume", code=130)
    assert contents(out / "checkpoint") == before
    said = told(train(tiny, tokens, out, "--steps", 3, "--resume", code=2).output)
    assert "has made 4 updates, more than --steps 3, which counts those before" in said
    assert contents(out / "checkpoint") == before


def test_where_a_checkpoint_is_lost_the_others_are_named(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny, tokens, out, "--steps", 4, "--save-every", 2)
    latest, older = out / "checkpoint" / "latest", "step-00000002"
    (out / "checkpoint" / "step-00000004" / "optimizer.safetensors").write_bytes(b"broken")
    said = told(train(tiny, tokens, out, "--steps", 6, "--resume", code=2).output)
    assert "optimizer.safetensors: cannot be read" in said
    assert (
        f"There are other checkpoints: {older}. They can be loaded by their path; to go on from one" in said
    )
    latest.unlink()
    for words, code in ((("--resume",), 2), ((), 2)):
        said = told(train(tiny, tokens, out, "--steps", 6, *words, code=code).output)
        assert ("step-00000004" in said and older in said) if words else "There is a run in" in said
    latest.write_bytes(b"\xff")
    said = told(train(tiny, tokens, out, "--steps", 6, "--resume", code=2).output)
    assert "latest: cannot be read" in said and f"other checkpoints: {older}, step-00000004." in said
    latest.write_text("step-00000004")
    (out / "checkpoint" / "step-00000004" / "trainer.json").write_text("{")
    said = told(train(tiny, tokens, out, "--steps", 6, "--resume", code=2).output)
    assert "trainer.json: cannot be read" in said and f"other checkpoints: {older}." in said
    latest.write_text(older)
    train(tiny, tokens, out, "--steps", 6, "--resume")
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5, 6]


def test_the_time_left_is_that_of_the_steps_left(
    tiny: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever it is read, which is once a step."""
    out = tmp_path / "run"
    train(tiny, tokens, out, "--steps", 10)
    ticks = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    said = train(tiny, tokens, out, "--steps", 20, "--resume", "--eval-every", 5).output.splitlines()
    lines = {line.split()[1]: line for line in said if line.startswith("step ") and " left" in line}
    assert lines["12/20"].endswith("  8 s left")
    assert lines["20/20"].endswith("  0 s left")
    assert "held-out" not in lines["14/20"]
    assert f"held-out {rows(out)[14]['eval_loss']:.4f}" in lines["15/20"]


def test_files_of_a_checkpoint_may_be_read_by_the_same_people(
    tiny: Path, tokens: Path, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    train(tiny, tokens, tmp_path / "run", "--steps", 1)
    os.umask(before)
    folder = tmp_path / "run" / "checkpoint" / "step-00000001"
    assert len({stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}) == 1


def test_graphs_of_another_assembly_do_not_stay(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run("export", *SMALL, "-o", folder)
    (folder / "notes.onnx").write_bytes(b"mine")
    run("export", *SMALL, "--hidden-size", 16, "--assembly", "step", "-o", folder)
    assert {path.name for path in folder.iterdir()} == {"step.onnx", "manifest.json", "notes.onnx"}
    assert list(moe_onnx.TrainingGraph.load(folder).models) == ["step"]


def test_the_demo_overwrites_no_run(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    train(tiny, tokens, tmp_path / "run", "--steps", 1)
    before = contents(tmp_path / "run")
    assert "There is a run in" in told(run("demo", "-o", tmp_path / "run", code=2).output)
    assert contents(tmp_path / "run") == before


def test_a_size_that_the_graph_lacks(tiny: Path) -> None:
    said = told(run("inspect", tiny, "--size", "N=8", code=2).output)
    assert "There is no free size 'N'. There are: batch, sequence" in said


@pytest.mark.parametrize(
    ("table", "field", "message"),
    [
        ("training", "learning_rate", "Schedule: there is no option 'learning_rate'"),
        (
            "model",
            "hidden_sise",
            "MoeLMConfig: there is no option 'hidden_sise'. Did you mean 'hidden_size'?",
        ),
        ("optimizer", "beta", "AdamW: there is no option 'beta'"),
    ],
)
def test_a_recipe_with_a_wrong_field(table: str, field: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": {"vocab_size": 256, "hidden_size": 8}} | {table: {field: 1}}))
    said = told(run("export", "--config", path, "-o", tmp_path / "out", code=2).output)
    assert f"recipe.json, table [{table}]: {message}" in said


def test_a_file_is_not_blamed_for_options_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": {"vocab_size": 256, "hidden_size": 8}}))
    said = told(run("export", "--config", path, "--heads", 3, "-o", tmp_path / "out", code=2).output)
    assert "MoeLMConfig: " in said and "recipe.json" not in said


def test_a_resume_that_is_refused_leaves_the_model_of_the_run(tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", *SMALL, "--tokens", tokens, "--batch-size", 2, "--sequence-length", 6, "-o", out]
    run(*words, "--steps", 2)
    before = contents(out)
    said = told(run(*words, "--hidden-size", 16, "--steps", 4, "--resume", code=2).output)
    assert "saved from another config: 'hidden_size' expected 16, found 8" in said
    assert contents(out) == before


def test_python_saves_what_was_trained_before(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    """A call that has no step left to make was asked for a checkpoint all the same."""
    session, again = (moe_onnx.TrainingSession(tiny, lr=0.5) for _ in range(2))
    data = moe_onnx.TokenDataset(tokens, batch_size=2, sequence_length=6, vocab_size=V)
    moe_onnx.train(session, data, 1, checkpoint=tmp_path / "run")
    moe_onnx.train(session, data, 3)
    assert again.load_checkpoint(tmp_path / "run")["global_step"] == 1
    moe_onnx.train(session, data, 3, checkpoint=tmp_path / "run")
    assert again.load_checkpoint(tmp_path / "run")["global_step"] == 3


def test_a_text_that_is_too_short(tiny: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.zeros(6, np.uint16))
    said = told(train(tiny, tmp_path / "few.npy", tmp_path / "run", code=2).output)
    assert "its 6 tokens are too few for a sequence of 6 beside 6 held out" in said
