"""The two grouped products in onnxruntime against PyTorch and against one matrix product an expert.

One run, one machine, the same inputs: every figure is the median of interleaved runs, and ratios are
taken round by round. The contenders are the native kernel, the function body (one loop over the experts),
the unrolled form (Split, one product an expert, Concat; float32 only, as onnxruntime has no bfloat16
products), a Python loop over the experts in PyTorch, and PyTorch's own grouped product where it has one for
the dtype. The padded form (all experts as one batch of as many rows as the largest has) does not compute
the weight gradient in one product, and stands for the forward only.

    pip install -e ".[parity]"
    python benchmarks/grouped_matmul.py               # all sizes, both dtypes, prints a table
    python benchmarks/grouped_matmul.py --size E64 --dtype fp32 --repeats 5
"""

from __future__ import annotations

import os

# These pin OpenBLAS to an old processor on some machines; nothing here is to be measured that way.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import argparse
import platform
import statistics
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
from operators import measure

import moe_onnx
from moe_onnx.kernels import native
from moe_onnx.runtime.ort_values import to_ort_value

# experts, rows, hidden size, expert hidden size
SIZES = {"E8": (8, 2048, 1024, 1024), "E64": (64, 4096, 512, 1024), "E128": (128, 4096, 2048, 768)}
DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
ELEMS = {"fp32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16}
BASE = "torch loop over experts"
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved runs of each contender")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"numpy {np.__version__}, onnxruntime {ort.__version__}, torch {torch.__version__}"
    )
    for size in SIZES if arguments.size == "all" else [arguments.size]:
        for dtype in DTYPES if arguments.dtype == "all" else [arguments.dtype]:
            report(size, dtype, arguments.repeats)


def report(size: str, dtype: str, repeats: int) -> None:
    experts, rows, hidden, width = SIZES[size]
    rng = np.random.default_rng(0)
    # Uneven as a router makes it: some experts get several times the rows of others.
    groups = rng.multinomial(rows, rng.dirichlet(np.full(experts, 2.0))).astype(np.int32)
    data = {
        "x": rng.standard_normal((rows, hidden), np.float32).astype(DTYPES[dtype]),
        "weight": rng.standard_normal((experts, hidden, width), np.float32).astype(DTYPES[dtype]),
        "grad_y": rng.standard_normal((rows, width), np.float32).astype(DTYPES[dtype]),
        "group_sizes": groups,
    }
    data["weight_t"] = data["weight"].reshape(experts, width, hidden)  # other values, the same time
    flops = 2 * rows * hidden * width
    print(
        f"\nE={experts} N={rows} H={hidden} F={width}, {dtype}, groups of {groups.min()} to {groups.max()} "
        f"rows, {flops / 1e9:.1f} GFLOP"
    )
    for title, calls in (
        ("forward", lambda: forward(data, dtype, transposed=False)),
        ("forward, weight [E, F, H]", lambda: forward(data, dtype, transposed=True)),
        ("weight gradient", lambda: weight_grad(data, dtype)),
    ):
        times = measure(calls(), repeats)
        print(f"  {title:34} {'median ms':>10} {'of the torch loop':>18} {'GFLOP/s':>9}")
        for name, values in times.items():
            median = statistics.median(values)
            ratio = statistics.median(a / b for a, b in zip(values, times[BASE], strict=True))
            print(f"    {name:32} {median * 1e3:10.1f} {ratio:18.2f} {flops / median / 1e9:9.0f}")


def forward(data: dict[str, Any], dtype: str, *, transposed: bool) -> dict[str, Call]:
    weight = "weight_t" if transposed else "weight"
    names = ["x", weight, "group_sizes"]
    calls = by_routes("MoeGroupedMatmul", names, data, dtype, transpose_weight=int(transposed))
    if dtype == "fp32":
        calls["onnxruntime, unrolled"] = unrolled(names, data, transB=int(transposed))
        if not transposed:
            calls["onnxruntime, padded"] = padded(names, data)
    x, w = to_torch(data["x"]), to_torch(data[weight])
    bounds = split(data["group_sizes"])
    right = [m.T if transposed else m for m in w]
    out = x.new_empty(len(x), data["grad_y"].shape[1])

    def loop() -> None:
        for e, (a, b) in enumerate(bounds):
            torch.mm(x[a:b], right[e], out=out[a:b])

    calls[BASE] = loop
    ends = torch.tensor([b for _, b in bounds], dtype=torch.int32)
    stack = w.transpose(1, 2) if transposed else w
    return add_grouped(calls, lambda mm: mm(x, stack, offs=ends))


def weight_grad(data: dict[str, Any], dtype: str) -> dict[str, Call]:
    names = ["x", "grad_y", "group_sizes"]
    calls = by_routes("MoeGroupedMatmulWeightGrad", names, data, dtype, transpose_weight=0)
    if dtype == "fp32":
        calls["onnxruntime, unrolled"] = unrolled(names, data, transA=1)
    x, g = to_torch(data["x"]), to_torch(data["grad_y"])
    bounds = split(data["group_sizes"])
    out = x.new_empty(data["weight"].shape)

    def loop() -> None:
        for e, (a, b) in enumerate(bounds):
            torch.mm(x[a:b].T, g[a:b], out=out[e])

    calls[BASE] = loop
    ends = torch.tensor([b for _, b in bounds], dtype=torch.int32)
    return add_grouped(calls, lambda mm: mm(x.T, g, offs=ends))


def add_grouped(calls: dict[str, Call], call: Callable[[Any], Any]) -> dict[str, Call]:
    """PyTorch's grouped product, where this version has it and it takes the dtype on this machine."""
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    try:
        call(found)
    except Exception as error:  # whatever it refuses with: there is nothing to compare with then
        print(f"  torch grouped_mm: not for this case ({str(error).splitlines()[0][:90]})")
        return calls
    return {**calls, "torch grouped_mm": lambda: call(found)}


def by_routes(
    op: str, names: list[str], data: dict[str, Any], dtype: str, **attributes: int
) -> dict[str, Call]:
    """One node of the operator, by the native kernel where there is one and by its body."""
    node = helper.make_node(op, names, ["out"], domain="ascend.moe", **attributes)
    rank = 2 if op == "MoeGroupedMatmul" else 3
    kinds = ["body"] if native.unavailable() else ["native", "body"]
    return {
        f"onnxruntime, {kernels}": session([node], names, data, dtype, rank, kernels) for kernels in kinds
    }


def padded(names: list[str], data: dict[str, Any]) -> Call:
    """All experts in one batch, each of as many rows as the largest has: gather, MatMul, gather."""
    sizes = data["group_sizes"]
    most, starts = int(sizes.max()), np.cumsum(sizes) - sizes
    slot = np.arange(most)
    rows = np.where(slot < sizes[:, None], starts[:, None] + slot, len(data["x"]))
    back = np.concatenate([e * most + np.arange(size) for e, size in enumerate(sizes)])
    extra = {"rows": rows.astype(np.int64), "back": back.astype(np.int64)}
    nodes = [
        helper.make_node("Constant", [], ["pads"], value_ints=[0, 0, 1, 0]),
        helper.make_node("Constant", [], ["flat"], value_ints=[len(sizes) * most, data["weight"].shape[2]]),
        helper.make_node("Pad", ["x", "pads"], ["x_and_zeros"]),
        helper.make_node("Gather", ["x_and_zeros", "rows"], ["batch"]),
        helper.make_node("MatMul", ["batch", "weight"], ["products"]),
        helper.make_node("Reshape", ["products", "flat"], ["by_row"]),
        helper.make_node("Gather", ["by_row", "back"], ["out"]),
    ]
    return session(nodes, [*names[:2], *extra], {**data, **extra}, "fp32", 2)


def unrolled(names: list[str], data: dict[str, Any], **transposed: int) -> Call:
    """Split by run-time sizes, one product an expert, one Concat: what a graph without the operator does."""
    experts = len(data["group_sizes"])
    is_gradient = names[1] == "grad_y"
    of = [[f"{letter}_{e}" for e in range(experts)] for letter in "xwy"]
    nodes = [
        helper.make_node("Cast", ["group_sizes"], ["sizes"], to=TensorProto.INT64),
        helper.make_node("Constant", [], ["first"], value_ints=[0]),
        helper.make_node("Split", ["x", "sizes"], of[0], axis=0),
    ]
    if is_gradient:
        nodes.append(helper.make_node("Split", ["grad_y", "sizes"], of[1], axis=0))
    else:
        slabs = [f"slab_{e}" for e in range(experts)]
        nodes.append(helper.make_node("Split", [names[1]], slabs, axis=0, num_outputs=experts))
        nodes += [helper.make_node("Squeeze", [s, "first"], [w]) for s, w in zip(slabs, of[1], strict=True)]
    for x, w, y in zip(*of, strict=True):
        out = f"{y}_2d" if is_gradient else y
        nodes.append(helper.make_node("Gemm", [x, w], [out], **transposed))
        if is_gradient:
            nodes.append(helper.make_node("Unsqueeze", [out, "first"], [y]))
    nodes.append(helper.make_node("Concat", of[2], ["out"], axis=0))
    return session(nodes, names, data, "fp32", 3 if is_gradient else 2)


def session(
    nodes: list[Any],
    names: list[str],
    data: dict[str, Any],
    dtype: str,
    rank: int,
    kernels: str = "body",
) -> Call:
    value = helper.make_tensor_value_info
    integers = {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.int64): TensorProto.INT64}
    kinds = [integers.get(data[name].dtype, ELEMS[dtype]) for name in names]
    graph = helper.make_graph(
        nodes,
        "benchmark",
        [value(name, kind, [None] * data[name].ndim) for name, kind in zip(names, kinds, strict=True)],
        [value("out", ELEMS[dtype], [None] * rank)],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ascend.moe", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    runner = moe_onnx.InferenceSession(model, kernels=kernels)
    binding = runner.io_binding()
    for name in names:  # no copies of inputs in the time, as PyTorch has none
        binding.bind_ortvalue_input(name, to_ort_value(data[name]))
    binding.bind_output("out")

    def call() -> None:
        runner.run_with_iobinding(binding)

    return call


def split(group_sizes: Any) -> list[tuple[int, int]]:
    ends = np.cumsum(group_sizes).tolist()
    return list(zip([0, *ends], ends, strict=False))


def to_torch(array: Any) -> Any:
    if array.dtype == DTYPES["bf16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


if __name__ == "__main__":
    main()
