"""What 16-bit compute costs on a CPU: kernels that there are, a product between Casts, whole training steps.

One run, one machine, two threads. Contenders take turns in blocks of steps; times are medians, ratios are of
the blocks' medians to float32's of the same block. Peak memory is that of a fresh process for each contender,
libraries, weights, gradients, optimizer state and batch included.

    python benchmarks/precision.py                    # everything
    python benchmarks/precision.py --part steps --blocks 5
"""

from __future__ import annotations

import os

# These pin OpenBLAS to an old processor on some machines; nothing here is to be measured that way.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper
from operators import cpu_name, status

import moe_onnx
from moe_onnx.runtime.training_session import default_options

THREADS = 2
HALVES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
DTYPES = ("float32", *HALVES)
SHAPES = ((512, 512, 1024), (2048, 512, 2048))  # rows, inner, columns of a product
LM: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 512}
# Name, config's options, batch; the first with products of each expert, the other with one for all.
MODELS = {
    "unrolled": ({**LM, **EXPERTS}, (4, 128)),
    "grouped": ({**LM, **EXPERTS, "unroll_experts": 0}, (4, 128)),
}
# Operators that training graphs have, by inputs: one tensor, two, or one and integers.
ONE = "Neg Sqrt Exp Sigmoid Relu Gelu Erf Tanh Softplus Softmax LogSoftmax Identity Transpose ReduceSum"
ONE += " ReduceSumSquare ReduceMean Flatten IsNaN Cast"
TWO = "MatMul Gemm Add Sub Mul Div Sum Max Min Equal Greater"
INTEGERS: dict[str, Any] = {
    "Reshape": [16],
    "Expand": [2, 4, 4],
    "Pad": [0, 0, 1, 0],
    "Gather": [1, 0],
    "Unsqueeze": [0],
    "CumSum": 0,
    "GatherElements": [[1, 0]],
}
MORE: dict[str, dict[str, Any]] = {"Cast": {"to": TensorProto.FLOAT}, "Split": {"num_outputs": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["kernels", "product", "steps", "all"], default="all")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of steps of each contender")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(peak_memory(*arguments.memory_of))
        return
    print(f"{cpu_name()}, {THREADS} threads, onnxruntime {ort.__version__}")
    parts = {"kernels": kernels, "product": products, "steps": lambda: steps(arguments.blocks)}
    for name in parts if arguments.part == "all" else [arguments.part]:
        parts[name]()


def kernels() -> None:
    """How a model of one node is loaded: as it is, with Casts round it, or not at all."""
    print("\nkernels of onnxruntime's CPU provider")
    for dtype, elem in HALVES.items():
        found: dict[str, list[str]] = {}
        for op in [*ONE.split(), *TWO.split(), *INTEGERS, "Split"]:
            inputs = [
                helper.make_tensor_value_info(n, elem, [4, 4]) for n in ("ab" if op in TWO.split() else "a")
            ]
            given = [onnx.numpy_helper.from_array(np.array(INTEGERS[op]), "i")] if op in INTEGERS else []
            names = [*(value.name for value in inputs), *(tensor.name for tensor in given)]
            node = helper.make_node(op, names, ["y", "z"][: 2 if op == "Split" else 1], **MORE.get(op, {}))
            output = [helper.make_empty_tensor_value_info("y")]
            graph = helper.make_graph([node], "one", inputs, output, given)
            found.setdefault(loaded(graph, op), []).append(op)
        for how, ops in found.items():
            print(f"  {dtype:9} {how}: {', '.join(sorted(ops))}")


def loaded(graph: onnx.GraphProto, op: str) -> str:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = os.path.join(folder, "model.onnx")
        try:
            ort.InferenceSession(model.SerializeToString(), options)
        except Exception:  # onnxruntime's errors have no common base worth naming
            return "refused"
        nodes = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    return "between Casts" if nodes.count("Cast") > (op == "Cast") else "has a kernel"


def products() -> None:
    """A product of 16-bit operands with a 16-bit result, as one node and in float32 between Casts."""
    print("\none product, x [n, k] times w [m, k]: median ms (best)")
    for n, k, m in SHAPES:
        calls = {"float32": product("float32", "node", (n, k, m))}
        calls["float16, one node"] = product("float16", "node", (n, k, m))
        calls |= {f"{dtype}, Casts": product(dtype, "casts", (n, k, m)) for dtype in HALVES}
        for name, values in measure(calls, 5, 10).items():
            print(f"  {n}x{k}x{m}  {name:18} {statistics.median(values):8.2f} ({min(values):.2f})")


def product(dtype: str, form: str, size: tuple[int, int, int]) -> Callable[[], Any]:
    n, k, m = size
    elem = HALVES.get(dtype, TensorProto.FLOAT)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)]
    if form == "casts":
        nodes = [helper.make_node("Cast", [name], [f"{name}_wide"], to=TensorProto.FLOAT) for name in "xw"]
        nodes.append(helper.make_node("Gemm", ["x_wide", "w_wide"], ["y_wide"], transB=1))
        nodes.append(helper.make_node("Cast", ["y_wide"], ["y"], to=elem))
    inputs = [
        helper.make_tensor_value_info("x", elem, [n, k]),
        helper.make_tensor_value_info("w", elem, [m, k]),
    ]
    graph = helper.make_graph(nodes, "one", inputs, [helper.make_tensor_value_info("y", elem, [n, m])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), default_options(THREADS))
    binding, rng = session.io_binding(), np.random.default_rng(0)
    for name, rows in (("x", n), ("w", m)):
        wide = rng.standard_normal((rows, k), np.float32)
        if dtype == "bfloat16":
            bits = np.ascontiguousarray((wide.view(np.uint32) >> 16).astype(np.uint16))
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
        else:
            value = ort.OrtValue.ortvalue_from_numpy(wide.astype(dtype))
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y", "cpu")
    return lambda: session.run_with_iobinding(binding)


def steps(blocks: int) -> None:
    """A whole training step of a language model: forward, losses, backward, AdamW."""
    for name, (config, shape) in MODELS.items():
        sizes = f"H={config['hidden_size']} F={config['moe_intermediate_size']} E={config['num_experts']}"
        print(
            f"\ntraining step, experts {name}: {config['num_hidden_layers']} layers, {sizes}, batch {shape}"
        )
        medians = measure({dtype: step_of(name, dtype) for dtype in DTYPES}, blocks, 3)
        print(f"  {'compute':10} {'median ms':>10} {'best ms':>9} {'of float32':>11} {'peak MB':>8}")
        for dtype, values in medians.items():
            ratio = statistics.median(a / b for a, b in zip(values, medians["float32"], strict=True))
            command = [sys.executable, __file__, "--memory-of", name, dtype]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            times = f"{statistics.median(values):10.1f} {min(values):9.1f} {ratio:11.2f}"
            print(f"  {dtype:10} {times} {float(out.split()[-1]) / 1e6:8.0f}")


def step_of(name: str, dtype: str) -> Callable[[], Any]:
    options, shape = MODELS[name]
    graph = moe_onnx.build_training_graph(moe_onnx.MoeLMConfig(**options, dtype=dtype), assembly="grad+apply")
    session = moe_onnx.TrainingSession(graph, sess_options=default_options(THREADS))
    batch = {"input_ids": np.random.default_rng(0).integers(0, options["vocab_size"], shape)}
    return lambda: session.step(batch)


def peak_memory(name: str, dtype: str) -> float:
    call = step_of(name, dtype)
    for _ in range(3):
        call()
    return status("VmHWM")


def measure(calls: dict[str, Callable[[], Any]], blocks: int, count: int) -> dict[str, list[float]]:
    """Median milliseconds of a call, for each block of each contender."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(blocks + 1):  # the first is a warm-up
        for name, call in calls.items():
            times = []
            for number in range(count + 1):
                start = time.perf_counter()
                call()
                if number:
                    times.append((time.perf_counter() - start) * 1e3)
            if block:
                medians[name].append(statistics.median(times))
    return medians


if __name__ == "__main__":
    main()
