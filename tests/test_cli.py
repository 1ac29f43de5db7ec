"""The commands do what their help says, with the exit codes it names, and print no tracebacks."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result
from routes import NATIVE
from safetensors.numpy import load_file
from tiny_graph import TinyGraph, V

import moe_onnx
from moe_onnx.build.presets import PRESETS
from moe_onnx.build.recipe import recipe_from_dict
from moe_onnx.cli import main
from moe_onnx.cli.curve import write_curve
from moe_onnx.cli.heatmap import write_heatmap

ROOT = Path(__file__).parent.parent
SMALL = ["--layers", "1", "--hidden-size", "8", "--heads", "2", "--experts", "4", "--expert-size", "8"]


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.tile(np.arange(V, dtype=np.uint16), 60))
    return tmp_path / "ids.npy"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return TinyGraph().save(tmp_path / "tiny")


def train(tiny: Path, tokens: Path, out: Path, *more: object, code: int = 0) -> Result:
    how = ["--tokens", tokens, "--batch-size", 2, "--sequence-length", 6, "--lr", 0.5]
    return run("train", tiny, *how, "-o", out, *more, code=code)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("command", ["export", "train", "demo", "info", "cards"])
def test_help_has_examples(command: str) -> None:
    output = run(command, "--help").output
    assert "Examples:" in output and f"moe-onnx {command}" in output


def test_train_by_schedule_and_micro_batches(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    how = ["--lr-schedule", "cosine", "--warmup-steps", 2, "--min-lr", 0.1, "--accumulate", 3, "--threads", 1]
    train(tiny, tokens, tmp_path / "whole", "--steps", 6, *how)
    found = rows(tmp_path / "whole")
    rate = moe_onnx.LearningRate(lr=0.5, lr_scheduler_type="cosine", steps=6, warmup_steps=2, min_lr=0.1)
    assert [row["lr"] for row in found] == [rate(number) for number in range(1, 7)]
    assert {row["num_tokens"] for row in found} == {3 * 2 * 5}
    wrong = train(tiny, tokens, tmp_path / "no", "--min-lr", 0.1, code=2)
    assert "'min_lr' must be 0 with lr_scheduler_type 'constant'" in wrong.output.replace("\n", " ")


def test_compute_dtypes(tokens: Path, tmp_path: Path) -> None:
    run("export", *SMALL, "--vocab-size", V, "--dtype", "float16", "-o", tmp_path / "model")
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert manifest["config"]["dtype"] == "float16"
    how = ["--steps", 2, "--init-scale", 1024, "--growth-interval", 1, "--threads", 1]
    train(tmp_path / "model", tokens, tmp_path / "run", *how)
    assert [row["loss_scale"] for row in rows(tmp_path / "run")] == [1024, 2048]
    about = json.loads(next((tmp_path / "run" / "checkpoint").glob("step-*/trainer.json")).read_text())
    assert about["loss_scale"] == {"scale": 4096.0, "growth_tracker": 0, "overflows": 0}
    assert "'float64' is not one of" in run("export", "--dtype", "float64", "-o", tmp_path, code=2).output


def test_train_writes_a_run(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    output = train(tiny, tokens, out, "--steps", 20, "--eval-every", 10, "--threads", 1).output
    assert "step 20/20" in output and "tokens/s" in output
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, 21))
    assert found[-1]["loss"] < found[0]["loss"]
    assert [row["step"] for row in found if "eval_loss" in row] == [10, 20]
    picture = ElementTree.parse(out / "loss.svg").getroot()
    assert picture.tag.endswith("svg") and sum(e.tag.endswith("polyline") for e in picture) == 3
    assert load_file(out / "checkpoint" / "step-00000020" / "model.safetensors")["bigram.bias"].shape == (V,)


def test_resume_gives_the_same_bits(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny, tokens, whole, "--steps", 9)
    train(tiny, tokens, parts, "--steps", 5)
    assert "resumed at step 5" in train(tiny, tokens, parts, "--steps", 9, "--resume").output
    assert rows(whole) == rows(parts)
    model = Path("checkpoint", "step-00000009", "model.safetensors")
    assert (whole / model).read_bytes() == (parts / model).read_bytes()
    assert "step 9" in train(tiny, tokens, parts, "--steps", 9, "--resume").output  # nothing left to do


def test_rows_after_the_checkpoint_are_dropped(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    """A process that was killed had written more metrics than it had saved, the last one half."""
    out = tmp_path / "run"
    train(tiny, tokens, out, "--steps", 3)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    train(tiny, tokens, out, "--steps", 6, "--resume")
    assert [row["step"] for row in rows(out)] == list(range(1, 7))


def test_wrong_usage_exits_with_2(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "nothing to resume" in train(tiny, tokens, out, "--resume", code=2).output
    train(tiny, tokens, out, "--steps", 1)
    assert "There is a run in" in train(tiny, tokens, out, code=2).output
    assert "either --text or --tokens" in run("train", tiny, "-o", out, code=2).output
    assert "not both" in train(tiny, tokens, out, "--layers", 2, code=2).output
    assert "No such option" in run("train", tiny, "--stepz", 2, code=2).output
    assert "manifest.json" in train(tmp_path, tokens, tmp_path / "other", code=2).output
    text = tmp_path / "text.txt"
    text.write_text("what is not in the vocabulary " * 9)
    assert (
        "in [0, 7), got 119 at position 0"
        in run("train", tiny, "--text", text, "-o", out / "b", code=2).output
    )
    (out / "checkpoint" / "step-00000001" / "model.safetensors").write_bytes(b"x" * 20)
    assert "model.safetensors" in train(tiny, tokens, out, "--resume", code=2).output


def test_a_loss_that_is_not_finite_exits_with_1(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    output = train(tiny, tokens, out, "--steps", 50, "--lr", 1e38, code=1).output
    assert "not updated" in output or "Nothing was updated" in output
    assert "--skip-non-finite" in output
    assert "is saved in" in output and (out / "checkpoint" / "latest").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_saves_and_says_how_to_go_on(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "a run"
    how = ["--tokens", str(tokens), "--batch-size", "2", "--sequence-length", "6", "--lr", "0.5"]
    words = [
        sys.executable,
        "-m",
        "moe_onnx.cli",
        "train",
        str(tiny),
        *how,
        "--steps",
        "100000",
        "-o",
        str(out),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "step 1/" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, (output, errors)
    assert "Traceback" not in errors
    assert "interrupted" in output and "--resume" in output and "'" in output.split("to go on:")[1]
    saved = json.loads(next((out / "checkpoint").glob("step-*/trainer.json")).read_text())["global_step"]
    assert len(rows(out)) == saved >= 1
    train(tiny, tokens, out, "--steps", saved + 1, "--resume")
    train(tiny, tokens, tmp_path / "calm", "--steps", saved + 1)
    assert rows(out) == rows(tmp_path / "calm")


def test_export_and_info(tmp_path: Path) -> None:
    model = tmp_path / "model"
    output = run("export", *SMALL, "--optimizer", "sgd", "--set", "qk_norm=head", "-o", model).output
    assert "MoeInitRoutingV2Grad" in output and "MatMul" in output and "grad" in output
    files = sorted(path.name for path in model.iterdir())
    assert files == ["apply.onnx", "eval.onnx", "forward.onnx", "grad.onnx", "manifest.json"]
    graph = moe_onnx.TrainingGraph.load(model)
    assert graph.manifest.config["qk_norm"] == "head" and graph.manifest.config["num_experts"] == 4
    assert graph.manifest.optimizer is not None and graph.manifest.optimizer["kind"] == "SGD"
    assert f"{graph.manifest.num_parameters:,} in" in run("info", model).output
    assert "MoeTokenUnpermuteWithRoutingMap" in run("info", model / "grad.onnx").output
    assert "onnxruntime" in run("info").output
    (tmp_path / "no.onnx").write_bytes(b"\xff\xff")
    assert "is no ONNX model" in run("info", tmp_path / "no.onnx", code=2).output


def test_a_recipe_can_be_toml_json_or_a_preset(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[model]\nhidden_size = 8\nnum_attention_heads = 2\n[optimizer]\nkind = "SGD"\n'
    )
    run("export", "--config", tmp_path / "a.toml", "--layers", 1, "--assembly", "eval", "-o", tmp_path / "a")
    graph = moe_onnx.TrainingGraph.load(tmp_path / "a")
    assert graph.manifest.config["num_hidden_layers"] == 1 and graph.manifest.config["hidden_size"] == 8
    assert list(graph.models) == ["eval"]
    (tmp_path / "a.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    run("export", "--config", tmp_path / "a.json", "--assembly", "forward", "-o", tmp_path / "b")
    (tmp_path / "bad.toml").write_text("[modle]\nhidden_size = 8\n[model]\n")
    bad = ["--assembly", "eval", "-o", tmp_path / "c"]
    assert "no table 'modle'" in run("export", "--config", tmp_path / "bad.toml", *bad, code=2).output
    assert "one of: tiny_moe_lm" in run("export", "--config", "tiny_moe_ml", *bad, code=2).output
    assert "hidden_size" in run("export", "--set", "hiden_size=3", *bad, code=2).output
    assert "FIELD=VALUE" in run("export", "--set", "hidden_size", *bad, code=2).output
    assert "assembly must be" in run("export", "--assembly", "evil", "-o", tmp_path / "c", code=2).output


def test_the_shelf_and_the_presets_are_equal() -> None:
    """The wheel has no ``models/``: both are changed together."""
    shelf = {path.parent.name: path for path in (ROOT / "models").glob("*/recipe.toml")}
    assert set(PRESETS) <= set(shelf)
    for name, tables in PRESETS.items():
        assert tomllib.loads(shelf[name].read_text("utf-8")) == tables
    for path in shelf.values():
        recipe_from_dict(tomllib.loads(path.read_text("utf-8")), str(path))


def test_train_builds_a_model_of_its_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    out = tmp_path / "run"
    how = ["--text", text, "--batch-size", 2, "--sequence-length", 16, "--steps", 3]
    run("train", *SMALL, *how, "-o", out)
    assert (out / "model" / "grad.onnx").exists() and len(rows(out)) == 3
    manifest = json.loads((out / "model" / "manifest.json").read_text("utf-8"))
    assert manifest["optimize_for"] == ("native" if NATIVE else "body")


def test_export_for_native_kernels(tmp_path: Path) -> None:
    how = ["--assembly", "grad+apply", "--optimize-for"]
    output = run("export", *SMALL, *how, "native", "-o", tmp_path / "a").output
    assert "MoeAdamW" in output and "MoeGroupedMatmul" in output and "optimized for native" in output
    assert "optimized for native" in run("info", tmp_path / "a").output
    assert moe_onnx.TrainingGraph.load(tmp_path / "a").manifest.optimize_for == "native"
    assert "'body', 'native'" in run("export", *SMALL, *how, "npu", "-o", tmp_path / "b", code=2).output


def test_demo(tmp_path: Path) -> None:
    output = run("demo", "--steps", 25, "-o", tmp_path).output
    assert "MoeInitRoutingV2Grad: 2 in the gradient graph" in output
    assert "MoeTokenUnpermuteWithRoutingMapGrad: 2 in the gradient graph" in output
    assert "onnx.checker accepts" in output and "sample" in output
    assert re.search(r"moe-onnx validate: 0 errors, 0 warnings, 0 notes; \d+ checks of level static", output)
    for name in ("model/grad.onnx", "checkpoint/latest", "metrics.jsonl", "loss.svg"):
        assert (tmp_path / name).exists()


def test_demo_trains_no_graph_in_which_errors_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_broken(graph: moe_onnx.TrainingGraph, folder: Path) -> None:
        # Gradients of two layers change places: onnx.checker sees nothing in it.
        a, b = (f"model.layers.{i}.self_attn.q_proj.weight.grad" for i in (0, 1))
        other = {a: b, b: a}
        for node in graph.models["grad"].graph.node:
            for names in (node.input, node.output):
                names[:] = [other.get(name, name) for name in names]
        save(graph, folder)

    save = moe_onnx.TrainingGraph.save
    monkeypatch.setattr(moe_onnx.TrainingGraph, "save", save_broken)
    output = run("demo", "--steps", 1, "-o", tmp_path, code=1).output
    assert "onnx.checker accepts" in output and "error: grad.onnx: MO613" in output
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "losses", [[], [1.0], [2.0, float("nan"), 1.5], [3.0] * 5, [1e-9, 2e-9], [5.5, 0.01]]
)
def test_every_curve_is_a_picture(losses: list[float], tmp_path: Path) -> None:
    path = write_curve(tmp_path / "a.svg", list(enumerate(losses, 1)), [(1, 2.0)], "a < b & c")
    assert "nan" not in path.read_text()
    assert next(iter(ElementTree.parse(path).getroot())).text == "a < b & c"


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["config"]
    return config


def test_options_of_routers_and_dispatches(tmp_path: Path) -> None:
    router = ["--router", "sigmoid", "--aux-loss", "sequence", "--dispatch", "routing_map"]
    limit = ["--capacity-factor", 1.1, "--set", "tokens_per_batch=30", "--drop-policy", "position"]
    output = run("export", *SMALL, *router, *limit, "--assembly", "eval", "-o", tmp_path / "a").output
    assert "17 rows of each expert" in output
    config = config_of(tmp_path / "a")
    assert config["router_scores"] == "sigmoid" and config["router_aux_loss"] == "sequence"
    assert (config["dispatch"], config["dispatch_mode"]) == ("routing_map", "drop_pad")
    assert (config["token_drop_policy"], config["capacity_factor"]) == ("position", 1.1)
    run("export", *SMALL, "--active-num", 9, "--assembly", "eval", "-o", tmp_path / "b")
    assert config_of(tmp_path / "b")["dispatch_mode"] == "active"
    # What is said here replaces what a recipe says of its limit.
    preset = ["export", "--config", "tiny_capacity_lm", "--assembly", "eval", "-o", tmp_path / "c"]
    for words, mode in (
        (["--dispatch-mode", "dropless"], "dropless"),
        (["--expert-capacity", 16], "drop_pad"),
    ):
        run(*preset, *words)
        assert config_of(tmp_path / "c")["dispatch_mode"] == mode
    output = run("export", *SMALL, "--capacity-factor", 1.5, "-o", tmp_path / "d", code=2).output
    assert "tokens_per_batch" in output


def test_a_run_with_a_capacity_and_little_text(tmp_path: Path) -> None:
    """Its evaluation has fewer sequences than a batch: filled up, they are no smaller than the capacity."""
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 12)
    how = [
        "--capacity-factor",
        2,
        "--batch-size",
        8,
        "--sequence-length",
        32,
        "--steps",
        4,
        "--eval-every",
        2,
    ]
    out = tmp_path / "run"
    run("train", *SMALL, "--kv-heads", 1, *how, "--text", text, "-o", out)
    found = rows(out)
    assert [row["step"] for row in found if "eval_loss" in row] == [2, 4]
    assert all(len(row["dropped"]) == 1 for row in found)
    ElementTree.parse(out / "expert_load.svg")


def test_the_heatmap_shows_the_load(tmp_path: Path) -> None:
    """A pixel for each expert and step: blue where nothing is, white at the mean, red at twice as much."""
    loads = [(step, [[0, 4, 8], [4, 4, 4]]) for step in (1, 2)]
    path = write_heatmap(tmp_path / "load.svg", loads)
    text = path.read_text()
    ElementTree.fromstring(text)
    panels = []
    for data in re.findall(r'base64,([^"]+)', text):
        png = base64.b64decode(data)
        assert png.startswith(b"\x89PNG") and png[16:24] == (2).to_bytes(4, "big") + (3).to_bytes(4, "big")
        start = png.index(b"IDAT") + 4
        lines = zlib.decompress(png[start : start + int.from_bytes(png[start - 8 : start - 4], "big")])
        panels.append(np.frombuffer(lines, np.uint8).reshape(3, 7)[:, 1:].reshape(3, 2, 3).tolist())
    blue, white, red = [37, 99, 201], [250, 250, 250], [201, 76, 37]
    assert panels == [[[blue] * 2, [white] * 2, [red] * 2], [[white] * 2] * 3]
    many = [(step, np.ones((48, 128), int).tolist()) for step in range(1000)]
    assert write_heatmap(path, many).stat().st_size < 1e6
