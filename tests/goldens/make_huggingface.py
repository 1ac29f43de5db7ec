"""Record what transformers makes of a tiny checkpoint of each architecture: ``goldens/huggingface``.

    python tests/goldens/make_huggingface.py          (with tests on the path, and the extra "parity")

Each folder is a checkpoint that transformers wrote, and ``expected.npz``: a batch with padding, its logits
(zero at padding, where they mean nothing), loss with aux loss, and the gradient of every parameter.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.huggingface_parity import Arrays, batch_of, load, model_of, theirs
from moe_onnx.build.config import MoeLMConfig

FOLDER = Path(__file__).parent / "huggingface"
SMALL: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 6}
EXPERTS = {"num_experts": 3}
QWEN = {**EXPERTS, "moe_intermediate_size": 6}
# Name in the benchmark, options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 3, "sliding_window": 3}),
    "qwen2_moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 5, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "head_dim": 6, "tie_word_embeddings": True}),
    "olmoe": ("olmoe", {**EXPERTS, "clip_qkv": 1.0}),
}


def record(folder: Path) -> Arrays:
    """What transformers gives for a checkpoint."""
    batch = batch_of(MoeLMConfig(vocab_size=16), 3, 7, "right", seed=5)
    out, gradients = theirs(load(folder), batch)
    logits = out.logits.detach().numpy() * batch["attention_mask"][..., None]
    found = {**batch, "logits": logits, "loss": np.float32(out.loss.item())}
    found |= {"aux_loss": np.float32(out.aux_loss.item())}
    return found | {f"grad/{name}": value for name, value in gradients.items()}


def main() -> None:
    """Write all of them anew."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for kind, (name, options) in KINDS.items():
        folder = FOLDER / kind
        shutil.rmtree(folder, ignore_errors=True)
        model_of(name, seed=2, **{**SMALL, **options}).save_pretrained(folder, max_shard_size="4KB")
        np.savez_compressed(folder / "expected.npz", **record(folder))  # type: ignore[arg-type]
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{kind:10} {size / 1e3:5.1f} kB in {len(list(folder.iterdir()))} files")


if __name__ == "__main__":
    main()
