"""The house stands as drawn: imports go one way, names are public on purpose, nothing is stale."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from routes import try_all

import moe_onnx
from moe_onnx.adapters.cards import card_files
from moe_onnx.build.presets import ARCHITECTURES
from moe_onnx.build.recipe import recipe_tables
from moe_onnx.cli import main
from moe_onnx.cli.shelf import digest, is_fresh, shelf_files
from moe_onnx.operators import ALL

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moe_onnx"

# Which rooms a room may import. Rooms to the right of it in the house, and nothing else.
ROOMS = {
    "errors": set(),
    "spec": {"errors"},
    "storage": {"errors"},
    "operators": {"errors", "spec"},
    "kernels": {"errors", "spec", "operators"},
    "adapters": {"errors", "spec", "operators", "kernels"},
    "autodiff": {"errors", "spec", "operators", "adapters"},
    "build": {"errors", "spec", "storage", "operators", "adapters", "autodiff"},
    "rewrite": {"errors", "spec", "operators", "adapters", "autodiff"},
    "runtime": {
        "errors",
        "spec",
        "storage",
        "operators",
        "kernels",
        "adapters",
        "autodiff",
        "rewrite",
        "build",
    },
    "huggingface": {"errors", "spec", "storage", "build", "runtime"},
    "validation": {
        "errors",
        "spec",
        "operators",
        "kernels",
        "adapters",
        "rewrite",
        "runtime",
        "build",
        "autodiff",
    },
}
ROOMS["inspection"] = {*ROOMS["validation"], "validation"}
ROOMS["imported"] = {"errors", "spec", "storage", "autodiff", "build", "rewrite", "validation"}
NOT_ALLOWED = {
    "errors": {"numpy", "onnx", "onnxruntime", "onnxruntime_extensions"},
    "spec": {"numpy", "onnx", "onnxruntime", "onnxruntime_extensions"},
    "storage": {"onnx", "onnxruntime", "onnxruntime_extensions"},
    "operators": {"onnx", "onnxruntime", "onnxruntime_extensions"},
    "kernels": {"onnx", "onnxruntime", "onnxruntime_extensions"},
    "adapters": {"onnxruntime"},
    "autodiff": {"onnxruntime", "onnxruntime_extensions"},
    "build": {"onnxruntime", "onnxruntime_extensions"},
    "rewrite": {"onnxruntime", "onnxruntime_extensions"},
    "imported": {"onnxruntime", "onnxruntime_extensions"},
    "runtime": {"onnxruntime_extensions"},
    "huggingface": {"onnxruntime", "onnxruntime_extensions"},
    "cli": {"onnxruntime_extensions"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_imports_go_one_way() -> None:
    try_all(modules(), check_rooms, str)


def check_rooms(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "cli", "__main__"):  # the front door and the user's side see everything
        return
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("moe_onnx.")}
    assert rooms <= ROOMS[room] | {room}, f"{room} must not import {rooms - ROOMS[room]}"


def test_rooms_keep_off_what_is_not_theirs() -> None:
    try_all(modules(), check_foreign, str)


def check_foreign(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imported(path)}
    assert not foreign & NOT_ALLOWED.get(room_of(path), set())
    if path.name != "tensor_files.py":  # reads .pt files, where torch is installed
        assert not foreign & {"torch", "transformers"}
    if path.name != "python_ops.py":
        assert "onnxruntime_extensions" not in foreign


def test_public_names() -> None:
    """Changing what is public is a visible act: it changes this list."""
    assert sorted(moe_onnx.__all__) == [
        "AdamW",
        "AttributeValueError",
        "BatchError",
        "BodyCheckError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DtypeError",
        "GradientError",
        "IndexValueError",
        "InferenceSession",
        "LearningRate",
        "LimitError",
        "LossScale",
        "MissingInputError",
        "ModelError",
        "ModelFileError",
        "MoeLMConfig",
        "MoeLayerConfig",
        "MoeOnnxError",
        "NonFiniteError",
        "OptionError",
        "Pretrained",
        "RankError",
        "RoutingMapError",
        "SGD",
        "ShapeError",
        "TokenDataset",
        "TrainingGraph",
        "TrainingSession",
        "ValidationError",
        "VerificationError",
        "__version__",
        "add_function_bodies",
        "build_training_graph",
        "compare",
        "differentiate",
        "from_pretrained",
        "function_body",
        "generate",
        "inspect",
        "load_checkpoint",
        "moe_adam_w",
        "moe_finalize_routing_v2",
        "moe_finalize_routing_v2_grad",
        "moe_grouped_matmul",
        "moe_grouped_matmul_weight_grad",
        "moe_init_routing_v2",
        "moe_init_routing_v2_grad",
        "moe_square_sum",
        "moe_swi_glu",
        "moe_swi_glu_grad",
        "moe_token_permute_with_routing_map",
        "moe_token_permute_with_routing_map_grad",
        "moe_token_unpermute_with_routing_map",
        "moe_token_unpermute_with_routing_map_grad",
        "native_library_path",
        "reference_ops",
        "register",
        "register_gradient",
        "rewrite_model",
        "save_checkpoint",
        "save_pretrained",
        "train",
        "training_graph_from",
        "validate",
    ]
    for name in moe_onnx.__all__:
        assert name == "__version__" or getattr(moe_onnx, name).__doc__, name


def test_errors_derive_from_ours_and_from_a_builtin() -> None:
    classes = [getattr(moe_onnx, name) for name in moe_onnx.__all__ if name.endswith("Error")]
    for error in classes:
        assert issubclass(error, moe_onnx.MoeOnnxError)
        # A number that is not finite is no fault of an argument.
        builtin = ArithmeticError if error is moe_onnx.NonFiniteError else ValueError
        assert error is moe_onnx.MoeOnnxError or issubclass(error, builtin)
    assert issubclass(moe_onnx.DtypeError, TypeError)
    assert issubclass(moe_onnx.IndexValueError, IndexError)


CARDS = card_files(ROOT / "ops")


@pytest.mark.parametrize("path", sorted(CARDS), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_generated_files_are_fresh(path: Path) -> None:
    """If this fails: ``moe-onnx cards``."""
    assert path.read_text("utf-8") == CARDS[path]


def test_a_stale_file_is_seen(tmp_path: Path) -> None:
    from moe_onnx.cli.commands import write_cards

    assert len(write_cards(tmp_path, check=True)) == 2 * len(ALL)
    assert not list(tmp_path.iterdir())
    write_cards(tmp_path, check=False)
    assert not write_cards(tmp_path, check=True)
    (tmp_path / ALL[0].name / "card.md").write_text("old")
    assert write_cards(tmp_path, check=True) == [tmp_path / ALL[0].name / "card.md"]


def test_the_shelf_is_fresh() -> None:
    """If this fails: ``moe-onnx shelf``. Losses are recorded, so they are compared to their tolerance."""
    files = shelf_files(ROOT / "models")
    assert {path.name for path in files} == {"graph.txt", "losses.json", "summary.txt"}
    for path, make in files.items():
        if path.name == "summary.txt":
            # Making one takes a quarter of a minute: the parity lane does (test_gallery.py).
            assert digest(recipe_tables(path.parent / "recipe.toml")) in path.read_text("utf-8"), path
        elif path.name == "graph.txt" or path.parent.name not in ARCHITECTURES:
            assert is_fresh(path, make()), path


def test_other_losses_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    path.write_text('{"losses": [2.0, 1.0]}')
    assert is_fresh(path, '{"losses": [2.0, 1.00001]}')
    assert not is_fresh(path, '{"losses": [2.0, 1.001]}')


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_function_text_is_the_function(spec: object) -> None:
    """What others parse from ``function.txt`` is what our models carry."""
    import onnx

    name = spec.name  # type: ignore[attr-defined]
    parsed = onnx.parser.parse_function((ROOT / "ops" / name / "function.txt").read_text("utf-8"))
    body = moe_onnx.function_body(name)

    def plain(nodes: object) -> list[object]:
        result = []
        for node in nodes:  # type: ignore[attr-defined]
            inner = [plain(attr.g.node) for attr in node.attribute if attr.HasField("g")]
            attrs = [attr.SerializeToString() for attr in node.attribute if not attr.HasField("g")]
            result.append((node.op_type, list(node.input), list(node.output), attrs, inner))
        return result

    assert plain(parsed.node) == plain(body.node)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_every_operator_has_its_folder_and_cases(spec: object) -> None:
    name = spec.name  # type: ignore[attr-defined]
    cases = json.loads((ROOT / "ops" / name / "cases.json").read_text("utf-8"))
    assert cases["operator"] == name
    names = [case["name"] for case in cases["cases"]]
    assert len(names) == len(set(names)) >= 3
    assert all(case["why"] for case in cases["cases"])


def test_no_python_in_ops_and_models() -> None:
    assert not [*(ROOT / "ops").rglob("*.py"), *(ROOT / "models").rglob("*.py")]


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_python_runs(tmp_path: Path) -> None:
    """All python blocks of the README, in one process, in their order."""
    code = "\n".join(blocks("python"))
    assert "InferenceSession" in code
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=tmp_path)


def test_readme_has_the_two_commands() -> None:
    shell = "\n".join(blocks("bash"))
    assert "moe-onnx demo" in shell
    assert "pytest" in shell


def test_names_that_are_imported_on_first_use() -> None:
    code = (
        "import moe_onnx; assert set(moe_onnx.__all__) <= set(dir(moe_onnx)); from moe_onnx import *; train"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    with pytest.raises(AttributeError, match="'trian'"):
        moe_onnx.trian  # noqa: B018


@pytest.mark.parametrize("before", [None, "upb"])
def test_import_leaves_the_environment_alone(before: str | None) -> None:
    """onnxruntime-extensions slows protobuf down in all processes that are started after its import."""
    name = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    code = "import os; before = dict(os.environ); import moe_onnx; assert dict(os.environ) == before"
    env = {key: value for key, value in os.environ.items() if key != name}
    env |= {name: before} if before else {}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=env)


def test_import_is_light() -> None:
    """Importing brings in neither torch nor anything of the command line or of graphs."""
    heavy = ("torch", "rich", "click", "onnx_ir")
    code = f"import sys, moe_onnx; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=100, capture_output=True, text=True
    )
    assert out.stdout.strip() in ("[]", "['torch']")  # onnxruntime-extensions imports torch where it is


@pytest.mark.parametrize("command", [["--help"], ["demo", "--help"], ["cards", "ops", "--check"]])
def test_commands_succeed(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output


def test_the_command_line_is_a_program() -> None:
    run = [sys.executable, "-m", "moe_onnx.cli", "info"]
    subprocess.run(run, check=True, timeout=100, cwd=ROOT, capture_output=True)


def test_a_wrong_command_exits_with_2() -> None:
    run = [sys.executable, "-m", "moe_onnx.cli", "dmeo"]
    assert subprocess.run(run, timeout=100, capture_output=True).returncode == 2
