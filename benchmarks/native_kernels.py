"""The native kernels: every operator against its function body and a plain copy, and the time of a byte.

One run, one machine, the same inputs; medians of interleaved runs, ratios taken round by round. The second
table grows the number of tokens: the time of a byte should stay the same.

    pip install -e .
    python benchmarks/native_kernels.py                   # float32 and bfloat16, T=4096 K=8 H=2048 E=64
    python benchmarks/native_kernels.py --tokens 256 --hidden 128 --top-k 2 --experts 8
    python benchmarks/native_kernels.py --grow 65536      # T=1024 to 65536; the last holds 9 GB
"""

from __future__ import annotations

import os

# These pin OpenBLAS to an old processor on some machines; nothing here is to be measured that way.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import argparse
import gc
import platform
import statistics
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from operators import Call, copy_of, cpu_name, measure

import moe_onnx
from moe_onnx.kernels import native
from moe_onnx.runtime.ort_values import to_ort_value

DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
ELEMS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.bool_): TensorProto.BOOL,
}
GROWING = ("MoeInitRoutingV2Grad", "MoeTokenUnpermuteWithRoutingMapGrad")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tokens", 4096), ("top-k", 8), ("hidden", 2048), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved runs of each contender")
    parser.add_argument("--grow", type=int, metavar="T", help="only the time of a byte, up to so many tokens")
    arguments = parser.parse_args()
    versions = f"Python {platform.python_version()}, onnxruntime {ort.__version__}"
    print(f"{cpu_name()}, {os.cpu_count()} cores; {versions}")
    print(f"native library: {native.build_line() or native.unavailable()}")
    sizes = arguments.top_k, arguments.hidden, arguments.experts
    for dtype in DTYPES if arguments.dtype == "all" else [arguments.dtype]:
        if arguments.grow:
            grow(arguments.grow, *sizes, dtype, arguments.repeats)
        else:
            compare(arguments.tokens, *sizes, dtype, arguments.repeats)


def compare(tokens: int, top_k: int, hidden: int, experts: int, dtype: str, repeats: int) -> None:
    data = inputs_of(tokens, top_k, hidden, experts, dtype)
    print(f"\nT={tokens} K={top_k} H={hidden} E={experts}, {dtype}")
    print(f"  {'operator':38} {'MB':>6} {'native ms':>10} {'of the body':>12} {'of a copy':>10}")
    for op, (names, outputs, attributes) in calls_of(top_k, experts).items():
        runs = {k: session(op, names, outputs, data, k, attributes) for k in ("native", "body")}
        moved = bytes_of(op, names, data, attributes)
        times = measure({**{k: v[0] for k, v in runs.items()}, "copy": copy_of(moved)}, repeats)
        ratios = [
            statistics.median(a / b for a, b in zip(times["native"], times[other], strict=True))
            for other in ("body", "copy")
        ]
        median = statistics.median(times["native"]) * 1e3
        print(f"  {op:38} {moved / 1e6:6.0f} {median:10.2f} {ratios[0]:12.2f} {ratios[1]:10.2f}")
        del runs
        gc.collect()


def grow(most: int, top_k: int, hidden: int, experts: int, dtype: str, repeats: int) -> None:
    print(f"\nK={top_k} H={hidden} E={experts}, {dtype}: picoseconds a byte, and the same of a plain copy")
    print(
        f"  {'operator':38} {'T':>7} {'MB':>7} {'native ms':>10} {'ps/byte':>8} {'copy':>8} {'of a copy':>10}"
    )
    for op in GROWING:
        names, outputs, attributes = calls_of(top_k, experts)[op]
        tokens = 1024
        while tokens <= most:
            data = inputs_of(tokens, top_k, hidden, experts, dtype)
            call, _ = session(op, names, outputs, data, "native", attributes)
            moved = bytes_of(op, names, data, attributes)
            times = measure({"native": call, "copy": copy_of(moved)}, repeats)
            native_time, copy_time = (statistics.median(times[k]) for k in ("native", "copy"))
            ratio = statistics.median(a / b for a, b in zip(times["native"], times["copy"], strict=True))
            print(
                f"  {op:38} {tokens:7} {moved / 1e6:7.0f} {native_time * 1e3:10.2f} "
                f"{native_time / moved * 1e12:8.0f} {copy_time / moved * 1e12:8.0f} {ratio:10.2f}"
            )
            tokens *= 4
            del data, call
            gc.collect()


def inputs_of(tokens: int, top_k: int, hidden: int, experts: int, dtype: str) -> dict[str, Any]:
    """Tensors of a dropless layer, each by the name that it has in ``calls_of``."""
    rng = np.random.default_rng(0)
    chosen = np.argpartition(rng.random((tokens, experts)), top_k - 1, axis=1)[:, :top_k]
    expert_idx = np.sort(chosen, axis=1).astype(np.int32)
    routing_map = np.zeros((tokens, experts), bool)
    np.put_along_axis(routing_map, expert_idx, True, axis=1)
    x = rng.standard_normal((tokens, hidden), np.float32).astype(DTYPES[dtype])
    # The row of each slot, by a stable sort of the experts; rows hold copies of their tokens.
    order = np.argsort(expert_idx.reshape(-1), kind="stable")
    index = np.empty(tokens * top_k, np.int32)
    index[order] = np.arange(tokens * top_k, dtype=np.int32)
    probs = rng.random((tokens, experts), np.float32).astype(DTYPES[dtype])
    return {
        "x": x,
        "expert_idx": expert_idx,
        "index": index,
        "map": routing_map,
        "rows": x[order // top_k],
        "probs": probs,
        "row_probs": rng.random(tokens * top_k, np.float32).astype(DTYPES[dtype]),
        "scales": probs[:, :top_k].copy(),
    }


def calls_of(top_k: int, experts: int) -> dict[str, tuple[list[str], int, dict[str, Any]]]:
    """Inputs, number of outputs and attributes of each operator; "" is an absent input."""
    return {
        "MoeInitRoutingV2": (["x", "expert_idx"], 4, {"expert_num": experts}),
        "MoeInitRoutingV2Grad": (["rows", "index"], 1, {"top_k": top_k}),
        "MoeTokenUnpermuteWithRoutingMap": (["rows", "index", "map", "probs"], 1, {}),
        "MoeTokenUnpermuteWithRoutingMapGrad": (["x", "index", "index", "map", "rows", "probs"], 2, {}),
        "MoeTokenPermuteWithRoutingMap": (["x", "map", "probs"], 3, {"num_out_tokens": 0}),
        "MoeTokenPermuteWithRoutingMapGrad": (["rows", "row_probs", "index", "map"], 2, {}),
        "MoeFinalizeRoutingV2": (["rows", "index", "", "", "", "scales"], 1, {"drop_pad_mode": 2}),
        "MoeFinalizeRoutingV2Grad": (["x", "index", "rows", "scales"], 2, {"drop_pad_mode": 0}),
    }


def bytes_of(op: str, names: list[str], data: dict[str, Any], attributes: dict[str, Any]) -> int:
    """Bytes that a call reads and writes: each input once, each output of rows or tokens once."""
    read = sum(data[name].nbytes for name in names if name)
    rows_in = any(name == "rows" for name in names[:1])
    return read + int(data["x" if rows_in else "rows"].nbytes)


def session(
    op: str, names: list[str], outputs: int, data: dict[str, Any], kernels: str, attributes: dict[str, Any]
) -> tuple[Call, Any]:
    """A session of one node, its inputs bound: no copies of inputs in the time."""
    value = helper.make_tensor_value_info
    unique = list(dict.fromkeys(name for name in names if name))
    spec = moe_onnx.operators.BY_NAME[op]
    out = [f"out_{i}" for i in range(outputs)]
    kinds = [
        TensorProto.INT32 if "int32" in arg.dtypes else ELEMS[data["x"].dtype]
        for arg in spec.outputs[:outputs]
    ]
    ranks = [len(arg.axes.split("|")[0].split()) for arg in spec.outputs[:outputs]]
    node = helper.make_node(op, names, out, domain="ascend.moe", **attributes)
    graph = helper.make_graph(
        [node],
        "benchmark",
        [value(name, ELEMS[data[name].dtype], [None] * data[name].ndim) for name in unique],
        [value(n, k, [None] * r) for n, k, r in zip(out, kinds, ranks, strict=True)],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ascend.moe", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    runner = moe_onnx.InferenceSession(model, kernels=kernels)
    binding = runner.io_binding()
    for name in unique:
        binding.bind_ortvalue_input(name, to_ort_value(data[name]))
    for name in out:
        binding.bind_output(name)
    return lambda: runner.run_with_iobinding(binding), runner


if __name__ == "__main__":
    main()
