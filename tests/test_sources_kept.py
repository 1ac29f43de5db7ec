"""No command overwrites the files that it reads: models, their external data, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from test_huggingface import contents
from test_imported import mlp
from tiny_graph import TinyGraph

import moe_onnx
from moe_onnx.cli import main
from moe_onnx.validation.findings import write_beside

SQUARED: dict[str, Any] = {"loss": "mean-squared-error", "assembly": "grad"}


def stored(folder: Path, name: str = "net.onnx", data: str = "net.bin") -> Path:
    """A model with all its weights in a file of external data."""
    folder.mkdir(exist_ok=True)
    onnx.save_model(mlp(), folder / name, save_as_external_data=True, location=data, size_threshold=0)
    return folder / name


def refused(folder: Path, *words: object) -> str:
    """What a command says that must change nothing."""
    before = contents(folder)
    run = CliRunner().invoke(main, [str(word) for word in words])
    assert run.exit_code == 2, run.output
    assert contents(folder) == before
    return " ".join(run.output.split())


@pytest.mark.parametrize("data", ["model.safetensors", "grad.onnx", "manifest.json"])
def test_training_graphs_leave_external_data_alone(data: str, tmp_path: Path) -> None:
    """Also where the folder holds a training graph already, whose files may be replaced."""
    other = moe_onnx.training_graph_from(mlp(), **SQUARED)
    folder = other.save(tmp_path / "out")
    path = stored(folder, data=data)
    graph = moe_onnx.training_graph_from(path, **SQUARED)
    before = contents(folder)
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, tmp_path / "link", folder / ".." / "out"):
        with pytest.raises(moe_onnx.ModelError, match=f"{data}: is a file that this graph is made from"):
            graph.save(place)
    assert contents(folder) == before
    saved = graph.save(tmp_path / "elsewhere")
    session = moe_onnx.InferenceSession(saved / "grad.onnx")
    weights = {name: np.array(value) for name, value in graph.weights.parameters()}
    assert set(weights) <= {one.name for one in session.get_inputs()}
    again = moe_onnx.TrainingGraph.load(saved)
    again.save(saved)  # in place: it is its own
    for name, value in again.weights.parameters():
        np.testing.assert_array_equal(value, weights[name])


def test_the_commands_name_the_file(tmp_path: Path) -> None:
    path = stored(tmp_path, data="model.safetensors")
    words = ("--loss", "mean-squared-error", "-o", tmp_path)
    assert "model.safetensors: is a file that this graph" in refused(tmp_path, "train-graph", path, *words)
    path = stored(tmp_path, "eval.onnx")
    assert "eval.onnx: is a file that this graph" in refused(tmp_path, "train-graph", path, *words)
    stripped = ("rewrite", stored(tmp_path), "--passes", "strip:docs", "--no-verify")
    model = onnx.load(tmp_path / "net.onnx", load_external_data=False)
    model.doc_string = "to be taken away"
    onnx.save(model, tmp_path / "net.onnx")
    said = refused(tmp_path, *stripped, "-o", tmp_path / "net.bin")
    assert "net.bin' is the model's external data, and would be overwritten" in said
    for taken in ("net.onnx", "net.bin", "new.onnx"):
        report = ("-o", tmp_path / "new.onnx", "--report", tmp_path / taken)
        assert f"{taken}' is the model's" in refused(tmp_path, *stripped, *report)
    (tmp_path / "far").mkdir()
    said = refused(tmp_path, *stripped, "-o", tmp_path / "far" / "net.bin")
    assert "is the model's external data" in said  # which is about to be brought there


def test_a_model_is_rewritten_in_place_beside_what_has_the_name_of_its_draft(tmp_path: Path) -> None:
    path = stored(tmp_path, data="net.onnx.new")
    data = (tmp_path / "net.onnx.new").read_bytes()
    done = moe_onnx.rewrite_model(path, ["strip:docs"], verify=False)
    assert done.save(path) == path
    write_beside(path, path.read_bytes())
    assert contents(tmp_path).keys() == {"net.onnx", "net.onnx.new"}
    assert (tmp_path / "net.onnx.new").read_bytes() == data


def test_reports_replace_nothing_that_was_read(tmp_path: Path) -> None:
    path, graphs = stored(tmp_path), tmp_path / "graphs"
    moe_onnx.training_graph_from(mlp(), **SQUARED).save(graphs)
    (graphs / "old.svg").touch()
    (tmp_path / "link.json").symlink_to(path)
    for taken in (path, tmp_path / "net.bin", tmp_path / "link.json"):
        for words in (
            ["validate", path, "--json"],
            ["validate", path, "--html"],
            ["inspect", path, "--json"],
        ):
            assert f"{taken.name}' is a file of '{path}', and would be" in refused(tmp_path, *words, taken)
    for name in ("grad.onnx", "manifest.json"):
        for words in (["inspect", graphs, "--graph"], ["validate", graphs / "grad.onnx", "--html"]):
            assert f"{name}' is a file of '{graphs}" in refused(tmp_path, *words, graphs / name)
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        np.save(tmp_path / name / "deep" / "x.npy", np.ones(3, np.float32))
    taken = tmp_path / "two" / "deep" / "x.npy"
    assert "x.npy' is a file of" in refused(
        tmp_path, "compare", tmp_path / "one", tmp_path / "two", "--json", taken
    )
    same = refused(tmp_path, "validate", path, "--json", tmp_path / "r", "--html", tmp_path / "." / "r")
    assert "r' is the file of another report" in same
    for words in (
        ["inspect", graphs, "--json"],
        ["inspect", graphs, "--graph"],
        ["validate", path, "--html"],
    ):
        assert "there is no folder" in refused(tmp_path, *words, tmp_path / "nowhere" / "report")
    # Their own files are written again, in folders that are read too.
    left = contents(tmp_path)
    for words in (
        ["validate", path, "--json", tmp_path / "report.json"],
        ["validate", graphs / "grad.onnx", "--html", graphs / "report.html"],
        ["inspect", graphs, "--size", "n=2", "--json", graphs / "costs", "--graph", graphs / "old.svg"],
        ["compare", tmp_path / "one", tmp_path / "two", "--json", tmp_path / "two" / "diff.txt"],
    ):
        for _ in range(2):
            done = CliRunner().invoke(main, [str(word) for word in words])
            assert done.exit_code in (0, 1), done.output
        assert Path(words[-1]).stat().st_size
    assert left.items() - {("graphs/old.svg", b"")} <= contents(tmp_path).items()


def test_a_graph_that_is_read_is_not_taken_for_one_of_before(tmp_path: Path) -> None:
    """Graphs of the training graph that was in a folder are removed: not this, which only has its name."""
    folder = moe_onnx.training_graph_from(mlp(), **SQUARED | {"assembly": "grad+apply+eval"}).save(
        tmp_path / "m"
    )
    path = stored(folder, data="eval.onnx")
    graph = moe_onnx.training_graph_from(path, **SQUARED)
    before = (folder / "eval.onnx").read_bytes()
    graph.save(folder)
    assert (folder / "eval.onnx").read_bytes() == before
    assert {one.name for one in folder.glob("*.onnx")} == {"net.onnx", "eval.onnx", "grad.onnx"}


def test_a_picture_of_an_evaluation_replaces_nothing_that_was_read(tmp_path: Path) -> None:
    graphs, text, run = TinyGraph().save(tmp_path / "graphs"), tmp_path / "book.txt", tmp_path / "run"
    text.write_text("so it is")
    step = run / "checkpoint" / "step-00000002"
    step.mkdir(parents=True)
    for name in ("model.safetensors", "trainer.json"):
        (step / name).touch()
    (graphs / "huggingface").mkdir()
    (graphs / "huggingface" / "tensors.json").touch()
    (run / "checkpoint" / "latest").write_text(step.name)
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").touch()
    words = [
        "eval",
        graphs,
        "--checkpoint",
        run,
        "--text",
        text,
        "--tokenizer",
        tmp_path / "words",
        "--load-svg",
    ]
    for taken in (
        text,
        graphs / "eval.onnx",
        graphs / "huggingface" / "tensors.json",
        step / "model.safetensors",
        step / "trainer.json",
        run / "checkpoint" / "latest",
        tmp_path / "words" / "tokenizer.json",
    ):
        assert f"{taken.name}' is a file of" in refused(tmp_path, *words, taken)
    assert "there is no folder" in refused(tmp_path, *words, tmp_path / "nowhere" / "load.svg")
