"""What each mode of dispatch and each router costs: whole training steps of a layer, side by side.

One run, the same weights and batch, two threads, float32, AdamW. Contenders take turns in blocks of steps
(see training_step.py); figures are medians, ratios are of the blocks' medians, to the dropless layer that
MoeInitRoutingV2 dispatches. Capacities are what a balanced expert has; ``dropped`` says how many of the
T K pairs of token and expert got no row in the first step, so that less work is known for what it is.

    pip install -e .
    python benchmarks/dispatch_modes.py                # both sizes, prints a table
    python benchmarks/dispatch_modes.py --size small --blocks 3
"""

from __future__ import annotations

import os

# These pin OpenBLAS to an old processor on some machines; nothing here is to be measured that way.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)

import argparse
import platform
import statistics
from dataclasses import replace
from typing import Any

import onnxruntime as ort
from operators import cpu_name
from torch_layer import SIZES, TOGETHER
from training_step import THREADS, batch_of, measure

import moe_onnx
from moe_onnx.runtime.training_session import default_options

FIRST = "init_routing, dropless"


def contenders(size: str) -> dict[str, dict[str, Any]]:
    """Options by name."""
    tokens, config = SIZES[size]
    pairs = tokens * config.num_experts_per_tok
    limit = {"dispatch_mode": "drop_pad", "capacity_factor": 1.0, "tokens_per_batch": tokens}
    routing_map = {"dispatch": "routing_map"}
    return {
        FIRST: {},
        "  weights on experts": {"router_weights_on": "experts"},
        "  sigmoid, bias, groups": {
            "router_scores": "sigmoid",
            "router_selection_bias": True,
            "router_bias_update_rate": 0.001,
            "n_group": 4,
            "topk_group": 2,
        },
        "init_routing, active, 7/8 of rows": {"dispatch_mode": "active", "active_num": pairs * 7 // 8},
        "init_routing, drop_pad, position": {**limit, "token_drop_policy": "position"},
        "init_routing, drop_pad, probs": limit,
        "routing_map, dropless": routing_map,
        "routing_map, drop_pad, position": {**routing_map, **limit, "token_drop_policy": "position"},
        "routing_map, drop_pad, probs": {**routing_map, **limit},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*TOGETHER, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of steps of each contender")
    arguments = parser.parse_args()
    versions = f"Python {platform.python_version()}, onnxruntime {ort.__version__}"
    print(f"{cpu_name()}, {THREADS} threads; {versions}")
    for size in TOGETHER if arguments.size == "all" else [arguments.size]:
        report(size, arguments.blocks)


def report(size: str, blocks: int) -> None:
    tokens, config = SIZES[size]
    batch, calls, dropped = batch_of(size), {}, {}
    for name, options in contenders(size).items():
        graph = moe_onnx.build_training_graph(replace(config, **options), assembly="grad+apply")
        session = moe_onnx.TrainingSession(graph, sess_options=default_options(THREADS))
        dropped[name] = int(session.step(batch).get("dropped", [0])[0])
        calls[name] = lambda session=session: session.step(batch)
    medians = measure(calls, blocks, 3 if tokens > 1000 else 20)
    print(
        f"\n{size}: T={tokens} H={config.hidden_size} F={config.moe_intermediate_size} "
        f"E={config.num_experts} K={config.num_experts_per_tok}, float32, forward, loss, backward, AdamW"
    )
    print(f"  {'mode':36} {'median ms':>10} {'of the first':>13} {'dropped':>9}")
    for name, values in medians.items():
        ratio = statistics.median(a / b for a, b in zip(values, medians[FIRST], strict=True))
        print(f"  {name:36} {statistics.median(values):10.2f} {ratio:13.2f} {dropped[name]:9}")


if __name__ == "__main__":
    main()
