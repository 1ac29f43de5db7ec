"""Static validation of a full-size training graph: time, peak memory, and how both grow with layers.

The graph is the step (forward, loss, backward, AdamW) of a language model with the sizes of
Qwen3-30B-A3B: 48 layers, 128 experts, top 8. It holds no weights. Each row is a fresh process; the peak
is that of the whole process, the libraries and the parsed model included.

    python benchmarks/validation.py                    # 6, 12, 24 and 48 layers
    python benchmarks/validation.py --layers 2 --unroll
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from operators import status

import moe_onnx


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--unroll", action="store_true", help="A node for each expert: a far larger graph.")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a child process that validates one
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure))))
        return
    head = f"{'layers':>6} {'experts':>8} {'nodes':>8} {'file MB':>8}"
    print(f"{head} {'seconds':>8} {'CPU s':>6} {'peak MB':>8}  report")
    with tempfile.TemporaryDirectory() as folder:
        for layers in arguments.layers:
            path = Path(folder) / "step.onnx"
            build(layers, arguments.experts, arguments.unroll, path)
            result = child("--measure", str(path))
            print(
                f"{layers:6} {arguments.experts:8} {result['nodes']:8} {path.stat().st_size / 1e6:8.1f} "
                f"{result['seconds']:8.2f} {result['cpu']:6.2f} {result['peak_mb']:8.0f}  {result['report']}"
            )


def build(layers: int, experts: int, unroll: bool, path: Path) -> None:
    config = moe_onnx.MoeLMConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        qk_norm="head",
        **({"unroll_experts": experts} if unroll else {}),
    )
    graph = moe_onnx.build_training_graph(config, assembly="step", optimizer=moe_onnx.AdamW())
    path.write_bytes(graph.models["step"].SerializeToString())


def measure(path: Path) -> dict[str, object]:
    start, cpu = time.perf_counter(), time.process_time()
    report = moe_onnx.validate(path)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    import onnx

    nodes = len(onnx.load(path, load_external_data=False).graph.node)
    peak = status("VmHWM") / 1e6
    found = ", ".join(report.codes) or "clean"
    return {"seconds": seconds, "cpu": cpu, "nodes": nodes, "peak_mb": peak, "report": found}


def child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
