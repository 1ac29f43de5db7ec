"""A whole training step of a MoE layer (forward, losses, backward, AdamW) against eager PyTorch.

One run, one machine, the same weights and batch, two threads each, float32. Contenders take turns in
blocks of steps; the first of a block are not counted, as threads of the contender before may still
spin. Figures are medians, ratios are of the blocks' medians. Peak memory is that of a fresh process for
each contender. The overhead of ``TrainingSession.step`` is measured against the same two graphs run
bare, bound in the same way. "native form" is a graph built for native kernels (one MoeGroupedMatmul a
product, one MoeAdamW a parameter), "portable" the default, run by native kernels or by function bodies.

    pip install -e ".[parity]"
    python benchmarks/training_step.py                 # all sizes, prints a table; "many" takes 20 GB
    python benchmarks/training_step.py --size small --blocks 5
"""

from __future__ import annotations

import os

# These pin OpenBLAS to an old processor on some machines; nothing here is to be measured that way.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import argparse
import dataclasses
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from operators import cpu_name, status
from torch_layer import SIZES

import moe_onnx
from moe_onnx.kernels import native
from moe_onnx.runtime.training_session import default_options

THREADS = 2
UNROLLED = 1024  # up to how many experts get nodes of their own
PORTABLE_UNROLLED = "onnxruntime, portable, unrolled"  # up to 16 experts this is the portable form itself
# Kernels, assembly, the graph's form, unroll_experts.
OURS: dict[str, tuple[str, str, str, int | None]] = {
    "onnxruntime, native form": ("native", "grad+apply", "native", None),
    "onnxruntime, native form, step": ("native", "step", "native", None),
    "onnxruntime, native, unrolled": ("native", "grad+apply", "native", UNROLLED),
    "onnxruntime, portable, native": ("native", "grad+apply", "body", None),
    PORTABLE_UNROLLED: ("native", "grad+apply", "body", UNROLLED),
    "onnxruntime, portable, bodies": ("body", "grad+apply", "body", None),
}
TORCH = tuple(
    f"torch, {experts}, AdamW {optimizer}"
    for experts in ("loop", "grouped")
    for optimizer in ("default", "fused")
)
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of steps of each contender")
    # A child process that measures one contender.
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--time-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(peak_memory(arguments.memory_of, arguments.size))
        return
    if arguments.time_of:
        call = {"one": contender(arguments.time_of, arguments.size)}
        print(*measure(call, 1, 3)["one"])
        return
    import torch

    versions = f"numpy {np.__version__}, onnxruntime {ort.__version__}, torch {torch.__version__}"
    print(f"{cpu_name()}, {THREADS} threads; Python {platform.python_version()}, {versions}")
    for size in SIZES if arguments.size == "all" else [arguments.size]:
        report(size, arguments.blocks)


def report(size: str, blocks: int) -> None:
    tokens, config = SIZES[size]
    ours = [name for name in OURS if not native.unavailable() or OURS[name][0] != "native"]
    ours = [name for name in ours if name != PORTABLE_UNROLLED or size == "many"]
    names = (*ours, *TORCH)
    if size == "many":
        medians = one_at_a_time(names, size, blocks)
    else:
        steps = 3 if tokens > 1000 else 30
        medians = measure({name: contender(name, size) for name in names}, blocks, steps)
    totals = {name: statistics.median(values) for name, values in medians.items()}
    best = {
        kind: min((n for n in TORCH if n.endswith(kind)), key=totals.__getitem__)
        for kind in ("default", "fused")
    }
    print(
        f"\n{size}: T={tokens} H={config.hidden_size} F={config.moe_intermediate_size} "
        f"E={config.num_experts} K={config.num_experts_per_tok}, float32, forward, loss, backward, AdamW"
    )
    print(
        f"  {'contender':32} {'median ms':>10} {'best ms':>9} {'of torch default':>17} "
        f"{'of torch fused':>15} {'peak MB':>8}"
    )
    for name, values in medians.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, medians[best[kind]], strict=True))
            for kind in ("default", "fused")
        ]
        peak = child_memory(name, size) / 1e6
        times = f"{totals[name]:10.2f} {min(values):9.2f} {ratios[0]:17.2f} {ratios[1]:15.2f}"
        print(f"  {name:32} {times} {peak:8.0f}")
    if size == "many":
        return
    session, batch = training_session(names[0], size), batch_of(size)
    over = measure({"step": lambda: session.step(batch), "bare": bare(session, batch)}, 3 * blocks, steps)
    step, graphs = (statistics.median(over[name]) for name in ("step", "bare"))
    more = statistics.median(a - b for a, b in zip(over["step"], over["bare"], strict=True))
    said = f"{more * 1e3:.0f} us ({more / graphs:.1%}) more by pairs of blocks"
    print(f"  TrainingSession.step {step:.2f} ms, its graphs bare {graphs:.2f} ms: {said}")


def measure(calls: dict[str, Call], blocks: int, steps: int) -> dict[str, list[float]]:
    """Median milliseconds of a step, for each block of each contender."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(blocks + 1):  # the first is a warm-up
        for name, call in calls.items():
            times = []
            for number in range(steps + 2):
                start = time.perf_counter()
                call()
                if number > 1:
                    times.append((time.perf_counter() - start) * 1e3)
            if block:
                medians[name].append(statistics.median(times))
    return medians


def batch_of(size: str) -> dict[str, Any]:
    tokens, config = SIZES[size]
    rng = np.random.default_rng(0)
    shape = (tokens, config.hidden_size)
    return {name: rng.standard_normal(shape, np.float32) for name in ("hidden_states", "target")}


def training_session(name: str, size: str) -> moe_onnx.TrainingSession:
    kernels, assembly, form, unroll = OURS[name]
    config = dataclasses.replace(SIZES[size][1], unroll_experts=unroll)
    optimizer = moe_onnx.AdamW(max_grad_norm=None)
    graph = moe_onnx.build_training_graph(config, assembly=assembly, optimizer=optimizer, optimize_for=form)
    options = default_options(THREADS)
    return moe_onnx.TrainingSession(graph, kernels=kernels, sess_options=options)


def contender(name: str, size: str) -> Call:
    """One step of a contender, weights and batch made."""
    batch = batch_of(size)
    if name in OURS:
        session = training_session(name, size)
        return lambda: session.step(batch)
    import torch
    from torch_layer import STEPS

    torch.set_num_threads(THREADS)
    _, config = SIZES[size]
    graph = moe_onnx.build_training_graph(config, assembly="apply")
    _, experts, optimizer = name.split(", ")
    step = STEPS[experts](config, graph.init_parameters(0), optimizer=optimizer.removeprefix("AdamW "))
    # A layer in a model passes its gradient on: so does ours.
    x = torch.from_numpy(batch["hidden_states"]).requires_grad_()
    target = torch.from_numpy(batch["target"])

    def run() -> None:
        x.grad = None
        step(x, target)

    return run


def bare(session: moe_onnx.TrainingSession, batch: dict[str, Any]) -> Call:
    """The two graphs of a step by onnxruntime alone, on the session's own bindings."""
    session.step(batch)
    grad, apply = (session._bind(name) for name in ("grad", "apply"))

    def run() -> None:
        for bound in (grad, apply):
            ort.InferenceSession.run_with_iobinding(bound._session, bound._binding)

    return run


def one_at_a_time(names: Sequence[str], size: str, blocks: int) -> dict[str, list[float]]:
    """As ``measure``, each block in a process of its own: all contenders together do not fit in memory."""
    medians: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(blocks):
        for name in names:
            medians[name].append(child("--time-of", name, size))
    return medians


def child_memory(name: str, size: str) -> float:
    return child("--memory-of", name, size)


def child(what: str, name: str, size: str) -> float:
    """What a process of its own measures of one contender."""
    command = [sys.executable, __file__, what, name, "--size", size]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout.split()[-1])


def peak_memory(name: str, size: str) -> float:
    """Peak bytes of a process that makes three steps, libraries, weights and batch included."""
    call = contender(name, size)
    for _ in range(3):
        call()
    return status("VmHWM")


if __name__ == "__main__":
    main()
