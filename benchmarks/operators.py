"""The two backward operators by every route, against PyTorch and against a plain copy.

One run, one machine, the same inputs: every figure is the median of interleaved runs, and ratios are
taken within the run. Peak memory is that of a fresh process for each contender.

    pip install -e ".[parity]"
    python benchmarks/operators.py                 # all sizes, fp32 and bf16, prints a table
    python benchmarks/operators.py --size small --dtype fp32 --repeats 5
"""

from __future__ import annotations

import os

# These pin OpenBLAS to an old processor on some machines; nothing here is to be measured that way.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import moe_onnx
from moe_onnx.kernels import native

# tokens, top_k, hidden, experts; a training step of a layer, and one on a laptop
SIZES = {"large": (4096, 8, 2048, 64), "small": (2048, 2, 1024, 8), "laptop": (256, 2, 128, 8)}
DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved runs of each contender")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # a child process that measures one
    arguments = parser.parse_args()
    if arguments.memory_of:
        op, contender = arguments.memory_of.split("/")
        print(extra_memory(op, contender, arguments.size, arguments.dtype))
        return
    versions = f"numpy {np.__version__}, onnxruntime {ort.__version__}, torch {torch_module().__version__}"
    print(f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}")
    for size in SIZES if arguments.size == "all" else [arguments.size]:
        for dtype in DTYPES if arguments.dtype == "all" else [arguments.dtype]:
            for op in OPERATORS:
                report(op, size, dtype, arguments.repeats)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report(op: str, size: str, dtype: str, repeats: int) -> None:
    make, base = OPERATORS[op]
    tokens, top_k, hidden, experts = SIZES[size]
    calls, num_bytes = make(size, dtype, None)
    times = measure(calls, repeats)
    print(
        f"\n{op}, T={tokens} K={top_k} H={hidden} E={experts}, {dtype}, {num_bytes / 1e6:.0f} MB in and out"
    )
    print(
        f"  {'contender':34} {'median ms':>10} {'of ' + base:>22} {'extra peak MB':>14} {'of the bytes':>13}"
    )
    for name, values in times.items():
        median = statistics.median(values)
        ratio = statistics.median(a / b for a, b in zip(values, times[base], strict=True))
        # torch's gradient cannot be told from its forward in one process's peak.
        peak = child_memory(op, name, size, dtype) if name.startswith("onnxruntime") else None
        memory = f"{peak / 1e6:14.0f} {peak / num_bytes:13.2f}" if peak is not None else ""
        print(f"  {name:34} {median * 1e3:10.2f} {ratio:22.2f} {memory}")


def measure(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, run in turn so that a machine that drifts does so for all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):  # the first is a warm-up
        for name, call in calls.items():
            start = time.perf_counter()
            result = call()
            elapsed = time.perf_counter() - start
            if round_:
                # A contender that has to prepare (an autograd forward) gives its own time.
                times[name].append(result if isinstance(result, float) else elapsed)
            result = None  # memory that is given back now is not in the time of the next contender
    return times


def child_memory(op: str, contender: str, size: str, dtype: str) -> float:
    command = [sys.executable, __file__, "--memory-of", f"{op}/{contender}", "--size", size, "--dtype", dtype]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout.split()[-1])


def extra_memory(op: str, contender: str, size: str, dtype: str) -> float:
    """Peak bytes of the first run beyond what the process held with its inputs and session made."""
    make, _ = OPERATORS[op]
    calls, _ = make(size, dtype, contender)
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # forget the peak so far
    before = status("VmRSS")
    calls[contender]()
    return status("VmHWM") - before


def status(key: str) -> float:
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith(key))


def torch_module() -> Any:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    return torch


def inputs_of(size: str, dtype: str) -> dict[str, Any]:
    tokens, top_k, hidden, experts = SIZES[size]
    rng = np.random.default_rng(0)
    expert_idx = np.sort(np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k], axis=1).astype(
        np.int32
    )
    routing_map = np.zeros((tokens, experts), bool)
    np.put_along_axis(routing_map, expert_idx, True, axis=1)
    probs = rng.random((tokens, experts), np.float32).astype(DTYPES[dtype])
    dy = rng.standard_normal((tokens, hidden), np.float32).astype(DTYPES[dtype])
    rows, index, _, _ = moe_onnx.moe_init_routing_v2(dy, expert_idx)
    return {"dy": dy, "index": index, "map": routing_map, "rows": rows, "probs": probs}


def session(
    op: str, kernels: str, names: list[str], data: dict[str, Any], outputs: int, **attributes: Any
) -> Call:
    types = {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.bool_): TensorProto.BOOL,
             DTYPES["fp32"]: TensorProto.FLOAT, DTYPES["bf16"]: TensorProto.BFLOAT16}  # fmt: skip
    value = helper.make_tensor_value_info
    unique = list(dict.fromkeys(names))
    out = [f"out_{i}" for i in range(outputs)]
    node = helper.make_node(op, names, out, domain="ascend.moe", **attributes)
    graph = helper.make_graph(
        [node],
        "benchmark",
        [value(name, types[data[name].dtype], [None] * data[name].ndim) for name in unique],
        [value(name, types[data["dy"].dtype], [None, None]) for name in out],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ascend.moe", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    onnx.checker.check_model(model)
    runner = moe_onnx.InferenceSession(model, kernels=kernels)
    feed = {name: data[name] for name in unique}
    return lambda: drop(runner.run(None, feed))


def routes() -> tuple[str, ...]:
    """The routes that this installation has."""
    return ("python", "body") if native.unavailable() else ("native", "python", "body")


def init_routing_grad(size: str, dtype: str, only: str | None) -> tuple[dict[str, Call], int]:
    tokens, top_k, hidden, _ = SIZES[size]
    data = inputs_of(size, dtype)
    rows, index = data["rows"], data["index"]
    op, names = "MoeInitRoutingV2Grad", ["rows", "index"]
    calls: dict[str, Call] = {}
    for kernels in routes():
        name = f"onnxruntime, {kernels}"
        if only in (None, name):
            calls[name] = session(op, kernels, names, data, 1, top_k=top_k)
    if only is None:
        torch = torch_module()
        x = to_torch(rows)
        row_of_slot = torch.from_numpy(index.astype(np.int64))
        token_of_row = torch.empty_like(row_of_slot)
        token_of_row[row_of_slot] = torch.arange(tokens * top_k) // top_k
        slots = row_of_slot.view(tokens, top_k)
        calls["torch index_add"] = lambda: drop(x.new_zeros(tokens, hidden).index_add_(0, token_of_row, x))
        calls["torch gather + sum"] = lambda: drop(x[slots].sum(1))
        if dtype == "fp32":  # it sums bf16 in bf16
            calls["torch embedding_bag"] = lambda: drop(
                torch.nn.functional.embedding_bag(slots, x, mode="sum")
            )
        calls["copy of the same bytes"] = copy_of(rows.nbytes + tokens * hidden * rows.itemsize)
    return calls, rows.nbytes + index.nbytes + tokens * hidden * rows.itemsize


def unpermute_grad(size: str, dtype: str, only: str | None) -> tuple[dict[str, Call], int]:
    tokens, _, hidden, experts = SIZES[size]
    data = inputs_of(size, dtype)
    op = "MoeTokenUnpermuteWithRoutingMapGrad"
    names = ["dy", "index", "index", "map", "rows", "probs"]
    num_bytes = sum(data[name].nbytes for name in names) + data["rows"].nbytes + data["probs"].nbytes
    calls: dict[str, Call] = {}
    for kernels in routes():
        name = f"onnxruntime, {kernels}"
        if only in (None, name):
            calls[name] = session(op, kernels, names, data, 2, drop_and_pad=0)
    if only is None:
        torch = torch_module()
        rows, probs, dy = to_torch(data["rows"]), to_torch(data["probs"]), to_torch(data["dy"])
        rows.requires_grad_()
        probs.requires_grad_()
        mask = torch.from_numpy(data["map"]).T.contiguous()
        token = torch.arange(tokens).expand(experts, tokens).masked_select(mask)

        def backward() -> float:
            # Megatron's unpermute with a routing map, in plain PyTorch.
            weight = probs.T.contiguous().masked_select(mask)
            out = rows.new_zeros(tokens, hidden)
            out = out.scatter_add(0, token.unsqueeze(1).expand(-1, hidden), rows * weight.unsqueeze(-1))
            start = time.perf_counter()
            torch.autograd.grad(out, (rows, probs), dy)
            return time.perf_counter() - start

        calls["torch autograd"] = backward
        calls["copy of the same bytes"] = copy_of(num_bytes)
    return calls, num_bytes


def to_torch(array: Any) -> Any:
    torch = torch_module()
    if array.dtype == DTYPES["bf16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def drop(_: Any) -> None:
    """Let the result go inside the timed call, as a caller that uses it once would."""


def copy_of(num_bytes: int) -> Call:
    """The streaming limit: as many bytes in and out as the operator has, half read and half written."""
    source = np.ones(num_bytes // 2, np.uint8)
    target = np.empty_like(source)
    return lambda: np.copyto(target, source)


OPERATORS: dict[str, tuple[Callable[[str, str, str | None], tuple[dict[str, Call], int]], str]] = {
    "MoeInitRoutingV2Grad": (init_routing_grad, "torch index_add"),
    "MoeTokenUnpermuteWithRoutingMapGrad": (unpermute_grad, "torch autograd"),
}

if __name__ == "__main__":
    main()
