"""The peak that ``moe_onnx.inspect`` estimates, beside what a run of onnxruntime takes.

A language model is run once, each graph in a fresh process, with and without onnxruntime's arena, by native
kernels and by function bodies. Measured is how far the process's peak (VmHWM) rises over what it held before
the run, weights and batch included, less the outputs that the run gives. The estimate knows nothing of the
runtime's order of nodes, of what kernels need while they run, nor of what an allocator keeps.

    python benchmarks/activation_peak.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import numpy as np
import onnxruntime
from operators import status

import moe_onnx

SIZES: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_experts": 8,
    "moe_intermediate_size": 1024,
}
BATCH, SEQUENCE = 4, 256
MODELS: dict[str, dict[str, Any]] = {"unrolled": {}, "grouped": {"unroll_experts": 0}}
GRAPHS = ("forward", "eval", "grad")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # a child process
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    row = "{:9} {:8} {:7} {:>11} {:>9} {:>6} {:>13} {:>6}"
    print(
        row.format("experts", "graph", "kernels", "estimate MB", "arena MB", "ratio", "no arena MB", "ratio")
    )
    for model in MODELS:
        for graph in GRAPHS:
            for kernels in ("native", "body"):
                found = [child(model, graph, kernels, arena) for arena in ("arena", "none")]
                estimate = found[0]["estimate"] / 1e6
                cells = [text for one in found for text in said(one["measured"] / 1e6, estimate)]
                print(row.format(model, graph, kernels, f"{estimate:.0f}", *cells), flush=True)


def said(measured: float, estimate: float) -> tuple[str, str]:
    return f"{measured:.0f}", f"{measured / estimate:.2f}"


def child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(model: str, graph: str, kernels: str, arena: str) -> dict[str, float]:
    config = moe_onnx.MoeLMConfig(**SIZES, **MODELS[model])
    built = moe_onnx.build_training_graph(config, assembly=graph)
    found = moe_onnx.inspect(built, batch_size=BATCH, sequence_length=SEQUENCE).graphs[graph]
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = arena == "arena"
    options.enable_mem_pattern = False
    session = moe_onnx.InferenceSession(built.model, options, kernels=kernels)
    feed: dict[str, Any] = {
        info.name: np.ones((BATCH, SEQUENCE), np.int64)
        for info in built.manifest.graph(graph).inputs_of("batch")
    }
    rng = np.random.default_rng(0)
    feed["input_ids"] = rng.integers(0, config.vocab_size, (BATCH, SEQUENCE))
    feed |= built.init_parameters()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feed.items()}
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # the high-water mark starts anew
    before = status("VmRSS")
    session.run_with_ort_values([value.name for value in session.get_outputs()], values)  # copies nothing
    measured = status("VmHWM") - before - found.peak.outputs
    return {"estimate": found.peak.activations, "measured": measured}


if __name__ == "__main__":
    main()
