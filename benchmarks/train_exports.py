"""What torch's exports of tiny language models give as training graphs, as a table in Markdown.

MoE layers that were fused, of how many; loss, logits and gradients against torch's, the last two relative to
the largest value of each tensor, the worst of all tensors and of three batches; the largest difference of any
parameter after three steps of AdamW (eps 1e-5). What cannot be differentiated, or is not fused, says why.

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
    logits_difference,
    moe_layers,
    torch_loss,
)


def row(name: str, folder: Path) -> str:
    """One row of the table."""
    model = language_model(name)
    path = export_language_model(model, folder / f"{name}.onnx")
    rng = np.random.default_rng(1)
    batches = [{"input_ids": rng.integers(0, VOCABULARY, shape)} for shape in ((2, 9), (1, 4), (3, 7))]
    try:
        graph = moe_onnx.training_graph_from(
            path, loss="cross-entropy", assembly="grad+apply+forward", optimizer=OPTIMIZER
        )
    except moe_onnx.MoeOnnxError as error:
        return f"| {name} | refused: {error} | | | | | |"
    config = graph.manifest.config
    fused = f"{len(config['fused'])} of {moe_layers(model)}"
    fused += "".join(f"; {node}: {why}" for node, why in config["not_fused"].items())
    of_logits = of_loss = of_gradients = 0.0
    for batch in batches:
        ids = batch["input_ids"]
        of_logits = max(of_logits, logits_difference(graph, model, ids))
        loss = torch_loss(model, ids)
        both = largest_difference(graph, model, {**batch, "labels": ids}, loss, least=1e-30)
        of_loss, of_gradients = max(of_loss, both[0]), max(of_gradients, both[1])
    of_steps = adamw_difference(graph, model, batches, lambda m, b: torch_loss(m, b["input_ids"]))
    return (
        f"| {name} | {fused} | {len(graph.manifest.parameters)} | {of_logits:.1e} | {of_loss:.1e} "
        f"| {of_gradients:.1e} | {of_steps:.1e} |"
    )


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    print("| export | fused layers | parameters | logits | loss | gradients | parameters, 3 steps |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or ARCHITECTURES:
            print(row(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
