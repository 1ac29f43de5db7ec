"""Memory of ``export --from-hf`` and ``to-hf``: peaks of processes of their own, on a generated checkpoint.

    python benchmarks/huggingface_memory.py               # 220 MB in 4 files
    python benchmarks/huggingface_memory.py --layers 16   # twice as many

The checkpoint is a Mixtral in bfloat16 with random weights. A peak is what Linux calls VmHWM, in which pages
of mapped files count too. The export may take what building the graphs takes, and 1.2 times the largest file.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, EXPERTS, VOCAB = 512, 1024, 8, 4096
CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
CHILD = """
import sys, time
from pathlib import Path
import moe_onnx

what, source, target = sys.argv[1:]
start = time.perf_counter()
if what == "graphs":
    config = moe_onnx.from_pretrained(source).config
    moe_onnx.build_training_graph(config, assembly="grad+apply+eval+forward").save(target)
elif what == "export":
    moe_onnx.from_pretrained(source).save(target)
else:
    moe_onnx.save_pretrained(source, target)
seconds = time.perf_counter() - start
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, seconds)
"""


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer."""
    prefix = f"model.layers.{layer}."
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}block_sparse_moe.gate.weight": (EXPERTS, HIDDEN),
    }
    for name, rows in (("q", HIDDEN), ("k", HIDDEN // 4), ("v", HIDDEN // 4), ("o", HIDDEN)):
        found[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
    for expert in range(EXPERTS):
        for name, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
            found[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    return found


def write_checkpoint(folder: Path, layers: int, shards: int) -> int:
    """Write it file by file; give the bytes of the largest file."""
    shapes = [layer_shapes(layer) for layer in range(layers)]
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shards)]
    for layer, found in enumerate(shapes):
        parts[layer * shards // layers] |= found
    parts[0] |= {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    parts[-1] |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    rng = np.random.default_rng(0)
    places: dict[str, str] = {}
    largest = 0
    for number, part in enumerate(parts):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor, shape in part.items():
            end = at + 2 * int(np.prod(shape))
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            at, places[tensor] = end, name
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for shape in part.values():
                # The upper halves of float32: numbers around 0.02, of every bit pattern that they have.
                bits = (rng.standard_normal(shape, np.float32) * np.float32(0.02)).view(np.uint32)
                file.write((bits >> 16).astype(np.uint16).tobytes())
        largest = max(largest, (folder / name).stat().st_size)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return largest


def peak_of(what: str, source: Path, target: Path) -> tuple[int, float]:
    """Peak memory in bytes and seconds of a process that does one thing."""
    words = [sys.executable, "-c", CHILD, what, str(source), str(target)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=600)
    peak, seconds = done.stdout.split()
    return int(peak), float(seconds)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shards", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        largest = write_checkpoint(folder / "source", args.layers, args.shards)
        whole = sum(path.stat().st_size for path in (folder / "source").glob("*.safetensors"))
        print(f"{whole / 1e6:.0f} MB in {args.shards} files, the largest {largest / 1e6:.0f} MB")
        graphs, _ = peak_of("graphs", folder / "source", folder / "graphs")
        print(f"graphs alone    peak {graphs / 1e6:5.0f} MB")
        for what, start, end in (("export", "source", "model"), ("to-hf", "model", "back")):
            peak, seconds = peak_of(what, folder / start, folder / end)
            more = f", {(peak - graphs) / 1e6:+.0f} MB to the graphs" if what == "export" else ""
            print(f"{what:15} peak {peak / 1e6:5.0f} MB{more}, {seconds:.1f} s")
            if what == "export":
                assert peak <= graphs + 1.2 * largest, (
                    "more than 1.2 times the largest file beside the graphs"
                )
        for path in sorted((folder / "source").iterdir()):
            same = path.read_bytes() == (folder / "back" / path.name).read_bytes()
            assert same, f"{path.name} did not come back as it was"
    print("every file came back bit by bit")


if __name__ == "__main__":
    main()
