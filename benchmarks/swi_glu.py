"""MoeSwiGlu and its gradient by every route, PyTorch's, and a copy of as many bytes.

The rows are those of a layer's first product, gate and up side by side. Forward reads two halves and
writes one; the gradient reads three and writes two. Standard operators are nodes of a graph that the
builder makes in its portable form; their gradient is given what their forward left (halves, sigmoid and
SiLU). PyTorch's forward is chunk, silu and mul without autograd, its gradient autograd's, behind a
forward that is not timed. Contenders take turns; figures are medians.

    python benchmarks/swi_glu.py                      # 4096 rows of 2 x 1024, two threads
    python benchmarks/swi_glu.py --dtype bf16 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from adam_w import THREADS, copy
from onnx import TensorProto, helper
from operators import cpu_name

import moe_onnx
from moe_onnx.kernels import native
from moe_onnx.runtime.ort_values import to_ort_value
from moe_onnx.runtime.training_session import default_options

DTYPES = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
ELEMS = {DTYPES["fp32"]: TensorProto.FLOAT, DTYPES["bf16"]: TensorProto.BFLOAT16}
HALVES = {"forward": 3, "gradient": 5}  # that are read and written
BASE = "copy of as many bytes"
Call = Callable[[], Any]
# What is done before each call and not timed, and the call.
Contender = tuple[Call, Call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024, help="of a half")
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=31)
    arguments = parser.parse_args()
    print(f"{cpu_name()}, {THREADS} threads; {arguments.rows} rows of 2 x {arguments.width}")
    for dtype in DTYPES if arguments.dtype == "all" else [arguments.dtype]:
        for what in HALVES:
            report(what, dtype, (arguments.rows, arguments.width), arguments.repeats)


def report(what: str, dtype: str, shape: tuple[int, int], repeats: int) -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((shape[0], 2 * shape[1]), np.float32).astype(DTYPES[dtype])}
    if what == "gradient":
        feeds["grad_y"] = rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
    size = HALVES[what] * shape[0] * shape[1] * DTYPES[dtype].itemsize
    calls: dict[str, Contender] = {BASE: (nothing, copy(size))}
    op = "MoeSwiGlu" if what == "forward" else "MoeSwiGluGrad"
    node = helper.make_node(op, sorted(feeds), ["out"], domain="ascend.moe")
    for kernels in ["body"] if native.unavailable() else ["native", "body"]:
        calls[f"{op}, {kernels}"] = nothing, session([node], ["out"], feeds, kernels)[0]
    calls["standard operators"] = nothing, standard(what, dtype, feeds)
    if find_spec("torch"):
        calls["torch"] = by_torch(feeds)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, (prepare, call) in calls.items():
            prepare()
            start = time.perf_counter()
            call()
            if repeat > 1:  # the first are warm-ups
                times[name].append(time.perf_counter() - start)
    print(f"{what}, {dtype}, {size / 1e6:.0f} MB read and written")
    print(f"  {'contender':32} {'median ms':>10} {'GB/s':>7} {'of the copy':>12}")
    base = statistics.median(times[BASE])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"  {name:32} {median * 1e3:10.2f} {size / median / 1e9:7.1f} {median / base:12.2f}")


def nothing() -> None:
    pass


def standard(what: str, dtype: str, feeds: dict[str, Any]) -> Call:
    """By nodes between the products of a portable graph, given the values between as they are."""
    config = moe_onnx.MoeLayerConfig(
        hidden_size=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=feeds["x"].shape[1] // 2,
        unroll_experts=0,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
    )
    nodes = moe_onnx.build_training_graph(config, assembly="grad", optimize_for="body").model.graph.node
    up, down, of_down, of_up = (node for node in nodes if node.op_type == "MoeGroupedMatmul")
    forward = between(nodes, down.input[0], {up.output[0]})
    given = {up.output[0]: feeds["x"]}
    if what == "forward":
        return session(forward, [down.input[0]], given, "body")[0]
    made = {value for node in forward for value in node.output}
    backward = between(nodes, of_up.input[0], {of_down.output[0], *made})
    left = sorted(made.intersection(value for node in backward for value in node.input))
    call, binding = session(forward, left, given, "body")
    call()
    given = {of_down.output[0]: feeds["grad_y"]}
    given |= {name: value.numpy() for name, value in zip(left, binding.get_outputs(), strict=True)}
    return session(backward, [of_up.input[0]], given, "body")[0]


def between(nodes: Any, end: str, starts: set[str]) -> list[Any]:
    """The nodes that make a value of others."""
    needed, found = {end}, []
    for node in reversed(nodes):
        if needed.intersection(node.output) - starts:
            found.append(node)
            needed.update(set(node.input) - starts)
    return found[::-1]


def session(nodes: list[Any], outputs: list[str], feeds: dict[str, Any], kernels: str) -> tuple[Call, Any]:
    """A call, without copies of inputs and outputs, and its binding."""
    elems = {name: ELEMS[array.dtype] for name, array in feeds.items()}
    info = helper.make_tensor_value_info
    last = next(iter(elems.values())) if outputs == ["out"] else None
    graph = helper.make_graph(
        nodes,
        "benchmark",
        [info(name, elem, [None, None]) for name, elem in elems.items()],
        [
            info(name, last, [None, None]) if last else helper.make_empty_tensor_value_info(name)
            for name in outputs
        ],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ascend.moe", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model = onnx.shape_inference.infer_shapes(model)
    runner = moe_onnx.InferenceSession(model, default_options(THREADS), kernels=kernels)
    binding = runner.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, to_ort_value(array))
    for name in outputs:
        binding.bind_output(name)
    return lambda: ort.InferenceSession.run_with_iobinding(runner, binding), binding


def by_torch(feeds: dict[str, Any]) -> Contender:
    import torch

    torch.set_num_threads(THREADS)

    def tensor(array: Any) -> Any:
        if array.dtype == np.float32:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)

    x, made = tensor(feeds["x"]), []

    def forward() -> None:
        gate, up = x.chunk(2, 1)
        made[:] = [torch.nn.functional.silu(gate) * up]

    if "grad_y" not in feeds:
        return nothing, forward
    x.requires_grad_()
    d = tensor(feeds["grad_y"])
    return forward, lambda: torch.autograd.grad(made[0], x, d)


if __name__ == "__main__":
    main()
