"""One update by AdamW: MoeAdamW, the same in standard operators, PyTorch's, and a copy of as many bytes.

An update reads parameter, gradient and two moments and writes all but the gradient: 28 bytes an element, in
place. The copy reads and writes 14 each. Contenders take turns; figures are medians and the best.

    python benchmarks/adam_w.py                      # 64 experts' weights of 768 x 2048, two threads
    python benchmarks/adam_w.py --experts 8 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnxruntime as ort
from operators import cpu_name

import moe_onnx
from moe_onnx.kernels import native
from moe_onnx.runtime.training_session import default_options

THREADS, BYTES = 2, 28
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    shape = (arguments.experts, 768, 2048)
    count = int(np.prod(shape))
    calls = {"copy of as many bytes": copy(BYTES * count)}
    if not native.unavailable():
        calls["MoeAdamW, native"] = update(shape, "native", "native")
        calls["standard operators, native"] = update(shape, "body", "native")
    calls["standard operators, bodies"] = update(shape, "body", "body")
    if find_spec("torch"):
        calls |= {f"torch, {name}": by_torch(shape, name == "fused") for name in ("fused", "default")}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(arguments.repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:  # the first is a warm-up
                times[name].append(time.perf_counter() - start)
    print(
        f"{cpu_name()}, {THREADS} threads; {count:,} float32 parameters, {BYTES * count / 1e9:.2f} GB a step"
    )
    print(f"  {'contender':32} {'median ms':>10} {'best ms':>9} {'GB/s':>7} {'of the copy':>12}")
    first = statistics.median(times["copy of as many bytes"])
    for name, values in times.items():
        median, rate = statistics.median(values), BYTES * count / min(values) / 1e9
        print(f"  {name:32} {median * 1e3:10.1f} {min(values) * 1e3:9.1f} {rate:7.1f} {median / first:12.2f}")


def copy(moved: int) -> Call:
    """Half of the bytes are read, half written; in parts, one a thread."""
    size = moved // 2 // 4 // THREADS
    parts = [(np.ones(size, np.float32), np.ones(size, np.float32)) for _ in range(THREADS)]
    pool = ThreadPoolExecutor(THREADS)
    return lambda: list(pool.map(lambda part: np.copyto(*part), parts))


def update(shape: tuple[int, ...], form: str, kernels: str) -> Call:
    """The apply graph of one layer's first product, its outputs bound to the memory of its inputs."""
    experts, inner, hidden = shape
    config = moe_onnx.MoeLayerConfig(
        hidden_size=hidden,
        num_experts=experts,
        num_experts_per_tok=1,
        moe_intermediate_size=inner,
        expert_activation="relu",
    )
    model = moe_onnx.build_training_graph(config, assembly="apply", optimize_for=form).model
    keep_update(model, "experts.up_proj")
    session = moe_onnx.InferenceSession(model, default_options(THREADS), kernels=kernels)
    rng, binding = np.random.default_rng(0), session.io_binding()
    values: dict[str, Any] = {"lr": np.array(1e-3, np.float32), "step": np.array(5)}
    values["grad_norm"] = np.array(2, np.float32)
    for info in session.get_inputs():
        array = values.get(info.name)
        array = rng.random(info.shape, np.float32) if array is None else array
        values[info.name] = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(info.name, values[info.name])
    for info in session.get_outputs():
        binding.bind_ortvalue_output(info.name, values[info.name.removesuffix(".updated")])
    return lambda: (values, ort.InferenceSession.run_with_iobinding(session, binding))


def keep_update(model: Any, parameter: str) -> None:
    """Leave the update of one parameter alone in the graph."""
    kept = [value for value in model.graph.output if value.name.startswith(parameter)]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    needed, nodes = {value.name for value in kept}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(node.input)
            needed.update(name for a in node.attribute for inner in a.g.node for name in inner.input)
    inputs = [value for value in model.graph.input if value.name in needed]
    del model.graph.node[:], model.graph.input[:], model.metadata_props[:]
    model.graph.node.extend(reversed(nodes))
    model.graph.input.extend(inputs)


def by_torch(shape: tuple[int, ...], fused: bool) -> Call:
    import torch

    torch.set_num_threads(THREADS)
    weight = torch.nn.Parameter(torch.rand(shape))
    weight.grad = torch.rand(shape)
    return torch.optim.AdamW([weight], fused=fused).step


if __name__ == "__main__":
    main()
