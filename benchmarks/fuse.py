"""A layer whose weights are gathered for each pair, as torch exports it, with and without ``fuse``.

Forward alone, and a training step by ``moe_onnx.training_graph_from(fuse=...)``: loss, gradients of all
weights and of the tokens, AdamW. Every run is in a fresh process, of one thread: how far its peak (VmHWM)
rises over what it held after a run of one token, and the median time. Outputs, losses and norms of gradients
are compared.

    python benchmarks/fuse.py                                   # two minutes
    python benchmarks/fuse.py --tokens 16 64 --kernels body
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper
from operators import status

import moe_onnx

LAYER = """
<ir_version: 10, opset_import: ["": 21]>
layer (float[T, {h}] given) => (float[T, {h}] y)
<float[{h}] norm, float[{e}, {h}] gate, float[{e}, {f2}, {h}] up, float[{e}, {h}, {f}] down,
 int64[1] last = {{-1}},
 int64[1] one = {{1}}, int64[1] k = {{{k}}}, int64[3] times = {{1, {k}, 1}}, int64[2] flat = {{-1, {h}}},
 int64[3] pairs = {{-1, {k}, {h}}}>
{{
    x = Mul (given, norm)
    logits = Gemm <transB = 1> (x, gate)
    probs = Softmax <axis = -1> (logits)
    top, ids = TopK <axis = -1, largest = 1, sorted = 1> (probs, k)
    x_3d = Unsqueeze (x, one)
    x_times = Expand (x_3d, times)
    rows = Reshape (x_times, flat)
    ids_flat = Reshape (ids, last)
    ids_2d = Unsqueeze (ids_flat, last)
    ups = GatherND (up, ids_2d)
    column = Unsqueeze (rows, last)
    raised_3d = MatMul (ups, column)
    raised = Squeeze (raised_3d, last)
    left, right = Split <axis = 1, num_outputs = 2> (raised)
    sigmoid = Sigmoid (left)
    silu = Mul (left, sigmoid)
    hidden = Mul (silu, right)
    downs = GatherND (down, ids_2d)
    hidden_3d = Unsqueeze (hidden, last)
    done_3d = MatMul (downs, hidden_3d)
    done = Squeeze (done_3d, last)
    weights_flat = Reshape (top, last)
    weights_2d = Unsqueeze (weights_flat, last)
    weighted = Mul (done, weights_2d)
    by_token = Reshape (weighted, pairs)
    y = ReduceSum <keepdims = 0> (by_token, one)
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--most-unfused", type=int, default=256, help="tokens of the largest unfused run")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", default="auto", help="auto, native, body")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(Path(args.one), args)
        return
    print(f"onnxruntime {ort.__version__}, E {args.experts}, K {args.top_k}, H {args.hidden}, F {args.inner}")
    print("| tokens | graph | layer | peak MB | median ms | largest difference |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args)
        for tokens in args.tokens:
            for graph in ("forward", "step"):
                before: dict[str, Any] = {}
                for layer in ("unfused", "fused"):
                    if layer == "unfused" and tokens > args.most_unfused:
                        print(f"| {tokens} | {graph} | {layer} | not run | | |", flush=True)
                        continue
                    result = measure(Path(folder) / layer / graph, tokens, args)
                    before = before or result
                    pairs = zip(result["sums"], before["sums"], strict=True)
                    off = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
                    said = f"{off:.1e}" if before is not result else ""
                    cost = f"{result['peak_mb']:.0f} | {result['ms']:.2f}"
                    print(f"| {tokens} | {graph} | {layer} | {cost} | {said} |", flush=True)


def write(folder: Path, args: argparse.Namespace) -> None:
    """The layer with and without fuse, alone and as a training step."""
    text = LAYER.format(h=args.hidden, f=args.inner, f2=2 * args.inner, e=args.experts, k=args.top_k)
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {
        "gate": (args.experts, args.hidden),
        "up": (args.experts, 2 * args.inner, args.hidden),
        "down": (args.experts, args.hidden, args.inner),
    }
    model.graph.initializer.append(numpy_helper.from_array(np.ones(args.hidden, np.float32), "norm"))
    for name, shape in shapes.items():
        value = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for fuse in (False, True):
        target = folder / ("fused" if fuse else "unfused")
        graph = moe_onnx.training_graph_from(
            model, loss="mean-squared-error", output="y", assembly="step", fuse=fuse
        )
        assert bool(graph.manifest.config["fused"]) == fuse
        graph.save(target / "step")
        (target / "forward").mkdir()
        done = moe_onnx.rewrite_model(model, ["fuse"]).model if fuse else model
        onnx.save(done, target / "forward" / "model.onnx")


def measure(path: Path, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """A run in a process of its own."""
    more = {"--hidden": args.hidden, "--repeats": args.repeats, "--kernels": args.kernels}
    command = [sys.executable, __file__, "--one", str(path), "--tokens", str(tokens)]
    command += [str(word) for pair in more.items() for word in pair]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_one(path: Path, args: argparse.Namespace) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.enable_cpu_mem_arena = 1, False
    rng = np.random.default_rng(1)
    x, target = (rng.standard_normal((args.tokens[0], args.hidden)).astype(np.float32) for _ in range(2))
    if path.name == "step":
        trained = moe_onnx.TrainingSession(path, lr=1e-4, sess_options=options, kernels=args.kernels)

        def run(rows: int) -> list[float]:
            metrics = trained.step({"given": x[:rows], "target": target[:rows]})
            return [float(metrics["loss"]), float(metrics["grad_norm"])]
    else:
        session = moe_onnx.InferenceSession(onnx.load(path / "model.onnx"), options, kernels=args.kernels)

        def run(rows: int) -> list[float]:
            (y,) = session.run(None, {"given": x[:rows]})
            return [float(np.sqrt(np.sum(np.square(y, dtype=np.float64))))]

    run(1)  # makes the session
    # What loading the model took, at its peak and what it has freed since, is not the run's.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    sums = run(len(x))
    peak = status("VmHWM") - before
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        run(len(x))
        times.append(time.perf_counter() - start)
    print(json.dumps({"peak_mb": peak / 2**20, "ms": 1e3 * float(np.median(times)), "sums": sums}))


if __name__ == "__main__":
    main()
