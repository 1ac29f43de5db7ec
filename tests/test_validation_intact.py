"""No false alarms: what is sound is found sound, ours or not, optimised by onnxruntime or not."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest

import moe_onnx
from moe_onnx.build.presets import ARCHITECTURES, FULL_SIZE, PRESETS
from moe_onnx.build.recipe import recipe_from_dict, recipe_tables
from moe_onnx.build.training_graph import TrainingGraph

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
# Models of onnx's own backend test: other exporters, old opsets and IR versions, subgraphs, sequences,
# optional values, strings. The two with operators of ai.onnx.preview.training run nowhere.
FOREIGN = [
    *sorted(DATA.glob("light/*.onnx")),
    *(path for path in sorted(DATA.glob("simple/*/model.onnx")) if "gradient" not in str(path)),
    *sorted(DATA.glob("pytorch-converted/*/model.onnx"))[::8],
]
ASSEMBLIES = "step+grad+apply+eval+forward"
# Of the architectures of checkpoints the one with most that the others have not; real sizes are validated by
# benchmarks/full_size.py.
RECIPES = sorted({*PRESETS} - {*ARCHITECTURES, *FULL_SIZE} | {"tiny_qwen2_moe_lm"})


def alarms(report: object) -> list[str]:
    return [str(finding) for finding in report if finding.severity != "note"]  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=RECIPES)
def recipe_graph(request: pytest.FixtureRequest) -> TrainingGraph:
    recipe = recipe_from_dict(recipe_tables(request.param), request.param)
    return moe_onnx.build_training_graph(recipe.config, assembly=ASSEMBLIES, optimizer=recipe.optimizer)


def test_recipes(recipe_graph: TrainingGraph, tmp_path: Path) -> None:
    """As files and for a target, which is all checks; in memory and for none a graph of each."""
    recipe_graph.save(tmp_path)
    checks = set()
    for name in recipe_graph.models:
        report = moe_onnx.validate(tmp_path / f"{name}.onnx", target="ascend910b")
        assert not alarms(report), name
        assert all(finding.code.startswith("MO5") for finding in report), name  # notes on the target alone
        checks |= {check.name for check in report.checks if not check.skipped}
    report = moe_onnx.validate(recipe_graph.models["eval"])
    assert not report.findings
    assert {check.name for check in report.checks if not check.skipped} <= checks


def test_what_onnxruntime_saves_of_recipes(recipe_graph: TrainingGraph, tmp_path: Path) -> None:
    """It fuses nodes into operators of com.microsoft, imports domains nobody uses, inlines functions."""
    recipe_graph.save(tmp_path)
    for name, optimise in (("grad", "ENABLE_EXTENDED"), ("apply", "ENABLE_ALL"), ("forward", "ENABLE_BASIC")):
        options = moe_onnx.register(onnxruntime.SessionOptions(), "python")
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{optimise}")
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # that a saved model is only for this machine is known
        onnxruntime.InferenceSession(tmp_path / f"{name}.onnx", options)
        assert not alarms(moe_onnx.validate(tmp_path / "optimised.onnx")), name


@pytest.mark.parametrize(
    "path", FOREIGN, ids=lambda path: "-".join(path.parts[-3:]).removesuffix("-model.onnx")
)
def test_foreign_models(path: Path) -> None:
    assert not alarms(moe_onnx.validate(path))


def test_there_are_enough_foreign_models() -> None:
    assert len(FOREIGN) >= 30
