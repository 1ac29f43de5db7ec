"""The generated files of ``models/``: each recipe's graph as text and its first losses, or a summary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from moe_onnx.build.recipe import Recipe, recipe_from_dict, recipe_tables
from moe_onnx.build.training_graph import build_training_graph
from moe_onnx.cli.options import ASSEMBLY
from moe_onnx.inspection.inspection import inspect
from moe_onnx.inspection.summary import summary_text
from moe_onnx.runtime.data import TokenDataset
from moe_onnx.runtime.training_session import TrainingSession, default_options

STEPS = 10
_MADE_OF = "Made by `moe-onnx shelf` from the recipe"
TOLERANCE = 1e-4  # relative; of float32 sums in another order, after ten steps
_WORDS = "a all and are as at be by can each for from gives has if in is it its of on or that the to"


def graph_text(recipe: Recipe) -> str:
    """The ``step`` graph of a recipe, a line for each input, constant, node and output.

    Written here, and not by onnx's printer, whose text is another from version to version.
    """
    graph = build_training_graph(recipe.config, optimizer=recipe.optimizer).model.graph
    lines = [f"input {_typed(value)}" for value in graph.input]
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        lines.append(f"constant {tensor.name} = {values.dtype}{list(values.shape)} {values.ravel().tolist()}")
    for node in graph.node:
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        attributes = [f"{a.name} = {onnx.helper.get_attribute_value(a)}" for a in node.attribute]
        given = f" <{', '.join(attributes)}>" if attributes else ""
        lines.append(f"{', '.join(node.output)} = {name}{given} ({', '.join(node.input)})")
    lines += [f"output {_typed(value)}" for value in graph.output]
    return "\n".join(lines) + "\n"


def _typed(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    dims = ", ".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
    return f"{onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}[{dims}] {value.name}"


def first_losses(recipe: Recipe) -> dict[str, Any]:
    """The losses of the first steps, on words drawn by a generator of fixed seed."""
    how = recipe.schedule
    words = _WORDS.split()
    drawn = np.random.Generator(np.random.PCG64(0)).integers(0, len(words), 20_000)
    text = " ".join(words[i] for i in drawn).encode()
    data = TokenDataset(
        np.frombuffer(text, np.uint8),
        batch_size=how.batch_size,
        sequence_length=how.sequence_length,
        seed=how.seed,
    )
    graph = build_training_graph(recipe.config, assembly="grad+apply", optimizer=recipe.optimizer)
    options = default_options(1)
    session = TrainingSession(
        graph, seed=how.seed, lr=how.learning_rate, kernels="body", sess_options=options
    )
    losses = [session.step(data.next_batch())["loss"] for _ in range(STEPS)]
    return {
        "data": f"{len(drawn)} words of {len(words)}, drawn by numpy's PCG64(0); see moe_onnx/cli/shelf.py",
        "rtol": TOLERANCE,
        "losses": [round(loss, 6) for loss in losses],
    }


def summary(tables: dict[str, Any], where: str) -> str:
    """What ``inspect`` says of a recipe of real sizes, and of which recipe that was."""
    recipe = recipe_from_dict(tables, where)
    graph = build_training_graph(recipe.config, assembly=ASSEMBLY, optimizer=recipe.optimizer)
    return f"{_MADE_OF} {digest(tables)}\n\n{summary_text(inspect(graph))}"


def digest(tables: dict[str, Any]) -> str:
    """What tells one recipe from another: SHA-256 of its tables."""
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def shelf_files(folder: Path) -> dict[Path, Callable[[], str]]:
    """Path of every generated file under ``folder``, a folder of recipes, and what makes its text.

    A recipe without a table ``training`` has the sizes of a real checkpoint: its graph as text would be tens
    of thousands of lines, and nobody trains it here.
    """
    files: dict[Path, Callable[[], str]] = {}
    for path in sorted(folder.glob("*/recipe.toml")):
        tables = recipe_tables(str(path))
        recipe = recipe_from_dict(tables, str(path))
        if "training" not in tables:
            files[path.parent / "summary.txt"] = partial(summary, tables, str(path))
            continue
        files[path.parent / "graph.txt"] = partial(graph_text, recipe)
        files[path.parent / "losses.json"] = partial(_losses_text, recipe)
    return files


def _losses_text(recipe: Recipe) -> str:
    return json.dumps(first_losses(recipe), indent=1) + "\n"


def is_fresh(path: Path, text: str) -> bool:
    """Whether a file says what it should: losses to their tolerance, everything else to the letter."""
    if not path.exists():
        return False
    found = path.read_text("utf-8")
    if path.name != "losses.json":
        return found == text
    old, new = json.loads(found), json.loads(text)
    return old.keys() == new.keys() and np.allclose(old["losses"], new["losses"], rtol=TOLERANCE, atol=0)
