"""A layer whose weights are gathered for each pair, as torch exports it, before and after ``fuse``.

Every run is in a fresh process, of one thread: how far its peak (VmHWM) rises over what it held before the
first run, and the median time of a step, forward alone and with the gradients of tokens and weights
(``moe_onnx.differentiate``). Outputs and gradients are compared with those of the layer before.

    python benchmarks/fuse.py
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
from moe_onnx.rewrite.passes import apply_passes

LAYER = """
<ir_version: 10, opset_import: ["": 21]>
layer (float[T, {h}] x) => (float[T, {h}] y)
<float[{e}, {h}] gate, float[{e}, {f2}, {h}] up, float[{e}, {h}, {f}] down, int64[1] last = {{-1}},
 int64[1] one = {{1}}, int64[1] k = {{{k}}}, int64[3] times = {{1, {k}, 1}}, int64[2] flat = {{-1, {h}}},
 int64[3] pairs = {{-1, {k}, {h}}}>
{{
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
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(Path(args.one), args.tokens[0], args.hidden)
        return
    print(f"onnxruntime {ort.__version__}, E {args.experts}, K {args.top_k}, H {args.hidden}, F {args.inner}")
    print("| tokens | graph | layer | peak MB | step ms | largest difference |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), args)
        for tokens in args.tokens:
            for graph in ("forward", "gradients"):
                results = [measure(files[layer, graph], tokens, args.hidden) for layer in ("before", "fused")]
                for layer, result in zip(("before", "fused"), results, strict=True):
                    pairs = zip(result["sums"], results[0]["sums"], strict=True)
                    off = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
                    print(
                        f"| {tokens} | {graph} | {layer} | {result['peak_mb']:.0f} | {result['ms']:.2f} "
                        f"| {off:.1e} |",
                        flush=True,
                    )


def write(folder: Path, args: argparse.Namespace) -> dict[tuple[str, str], Path]:
    """The layer before and after, each alone and with gradients."""
    text = LAYER.format(h=args.hidden, f=args.inner, f2=2 * args.inner, e=args.experts, k=args.top_k)
    before = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {
        "gate": (args.experts, args.hidden),
        "up": (args.experts, 2 * args.inner, args.hidden),
        "down": (args.experts, args.hidden, args.inner),
    }
    for name, shape in shapes.items():
        value = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        before.graph.initializer.append(numpy_helper.from_array(value, name))
    fused = apply_passes(before, ["fuse"]).model
    files = {}
    for layer, model in {"before": before, "fused": fused}.items():
        graphs = {"forward": model, "gradients": moe_onnx.differentiate(model, loss="y", wrt=["x", *shapes])}
        for name, graph in graphs.items():
            files[layer, name] = folder / f"{layer}-{name}.onnx"
            onnx.save(graph, files[layer, name])
    return files


def measure(path: Path, tokens: int, hidden: int) -> dict[str, Any]:
    """A run in a process of its own."""
    command = [sys.executable, __file__, "--one", str(path), "--tokens", str(tokens), "--hidden", str(hidden)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_one(path: Path, tokens: int, hidden: int) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.enable_cpu_mem_arena = 1, False
    session = moe_onnx.InferenceSession(onnx.load(path), options)
    x = np.random.default_rng(1).standard_normal((tokens, hidden)).astype(np.float32)
    # What loading the model took, at its peak and what it has freed since, is not the run's.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    outputs = session.run(None, {"x": x})
    peak = status("VmHWM") - before
    times = []
    for _ in range(5):
        start = time.perf_counter()
        session.run(None, {"x": x})
        times.append(time.perf_counter() - start)
    sums = [float(np.sqrt(np.sum(np.square(value, dtype=np.float64)))) for value in outputs]
    print(json.dumps({"peak_mb": peak / 2**20, "ms": 1e3 * float(np.median(times)), "sums": sums}))


if __name__ == "__main__":
    main()
