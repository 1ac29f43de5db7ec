"""What torch's exports of tiny language models give as training graphs, as a table in Markdown.

Loss and gradients against torch's, relative to the largest of each gradient; the largest difference of any
parameter after three steps of AdamW (eps 1e-5). What cannot be differentiated says why.

    PYTHONPATH=. python benchmarks/train_exports.py [NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

import moe_onnx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from torch_exports import (
    ARCHITECTURES,
    OPTIMIZER,
    VOCABULARY,
    adamw_difference,
    export_language_model,
    language_model,
    largest_difference,
    torch_loss,
)


def row(name: str, optimize: bool, folder: Path) -> str:
    """One row of the table."""
    model = language_model(name)
    path = export_language_model(model, folder / f"{name}.onnx", optimize=optimize)
    rng = np.random.default_rng(1)
    batches = [{"input_ids": rng.integers(0, VOCABULARY, (2, 9))} for _ in range(3)]
    try:
        graph = moe_onnx.training_graph_from(
            path, loss="cross-entropy", assembly="grad+apply", optimizer=OPTIMIZER
        )
    except moe_onnx.MoeOnnxError as error:
        return f"| {name} | refused: {error} | | | |"
    losses = {**batches[0], "labels": batches[0]["input_ids"]}
    loss = torch_loss(model, batches[0]["input_ids"])
    of_loss, of_gradients = largest_difference(graph, model, losses, loss)
    of_steps = adamw_difference(graph, model, batches, lambda m, b: torch_loss(m, b["input_ids"]))
    count = len(graph.manifest.parameters)
    return f"| {name} | {count} | {of_loss:.0e} | {of_gradients:.0e} | {of_steps:.0e} |"


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    print("| Model | parameters | loss | gradients | after three steps |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or ARCHITECTURES:
            print(row(name, False, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
