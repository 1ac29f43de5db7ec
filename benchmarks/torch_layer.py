"""A MoE layer's training step in eager PyTorch, float32: what ours is measured against.

``loop_step`` and ``grouped_step`` build the whole step (forward, mean squared error plus router losses,
backward, AdamW) and return a callable ``step(hidden_states, target) -> loss``; its ``forward``,
``backward`` and ``update`` are there to be timed one by one. Weights are stacked; tokens are sorted by
expert once, and gathered and scattered once; ``loop_step`` has one product for each expert,
``grouped_step`` one ``torch.nn.functional.grouped_mm`` for all of them.

    pip install -e ".[parity]"
    python benchmarks/torch_layer.py               # both sizes, every variant, each part
    python benchmarks/torch_layer.py --size small --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_onnx.build.config import MoeLayerConfig

# tokens, config
SIZES = {
    "small": (256, MoeLayerConfig(hidden_size=128, moe_intermediate_size=256, num_experts=8)),
    "large": (2048, MoeLayerConfig(hidden_size=512, moe_intermediate_size=1024, num_experts=8)),
    "many": (
        512,
        MoeLayerConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    ),
}
TOGETHER = ("small", "large")  # of "many", one contender fills the memory of a laptop
# Options of torch.optim.AdamW. On a CPU "default" is one parameter after the other, as of PyTorch 2.13.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


class Step:
    """One training step of a layer."""

    def __init__(
        self,
        config: MoeLayerConfig,
        parameters: Mapping[str, Any],
        *,
        optimizer: str = "default",
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = None,
    ) -> None:
        self.config = config
        self.parameters = {
            name: torch.nn.Parameter(torch.as_tensor(value, dtype=torch.float32).clone())
            for name, value in parameters.items()
        }
        self.max_grad_norm = max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=lr, weight_decay=weight_decay, **OPTIMIZERS[optimizer]
        )

    def __call__(self, hidden_states: Any, target: Any) -> float:
        """One step on a batch, arrays or tensors; returns its loss."""
        loss = self.forward(torch.as_tensor(hidden_states), torch.as_tensor(target))
        self.backward(loss)
        self.update()
        return loss.item()

    def forward(self, hidden_states: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        output, router_loss = self.layer(hidden_states)
        loss = F.mse_loss(output, target)
        return loss if router_loss is None else loss + router_loss

    def backward(self, loss: Tensor) -> None:
        """Gradients of all parameters."""
        loss.backward()

    def update(self) -> None:
        """Clip, update, drop the gradients."""
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def layer(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output of the layer, and what the router adds to the loss."""
        config = self.config
        top_k = config.num_experts_per_tok
        logits = F.linear(x, self.parameters["gate.weight"])
        probs = torch.softmax(logits, -1)
        if config.router_scores == "top_k_then_softmax":
            best, experts = torch.topk(logits, top_k)
            weights = torch.softmax(best, -1)
        else:
            weights, experts = torch.topk(probs, top_k)
            if config.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
        chosen = experts.flatten()
        counts = torch.bincount(chosen, minlength=config.num_experts)
        order = torch.argsort(chosen, stable=True)
        token = order // top_k
        rows = self.experts(x.index_select(0, token), counts)
        weight = weights.flatten().index_select(0, order)
        output = torch.zeros_like(x).index_add(0, token, rows * weight[:, None])
        return output, self.router_loss(logits, probs, counts)

    def router_loss(self, logits: Tensor, probs: Tensor, counts: Tensor) -> Tensor | None:
        """The aux and z-loss with their coefficients; None if both are 0."""
        config, tokens = self.config, len(logits)
        loss = None
        if config.router_aux_loss_coef:
            scale = config.router_aux_loss_coef * config.num_experts / tokens
            loss = scale * torch.dot(counts.to(probs.dtype), probs.mean(0))
        if config.router_z_loss_coef:
            z_loss = config.router_z_loss_coef * torch.logsumexp(logits, -1).square().mean()
            loss = z_loss if loss is None else loss + z_loss
        return loss

    def activation(self, up: Tensor) -> Tensor:
        """What stands between the two products."""
        if self.config.expert_activation == "swiglu":
            gate, up = up.chunk(2, dim=-1)
            return F.silu(gate) * up
        return ACTIVATIONS[self.config.expert_activation](up)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The stacked weights of both products, ``[E, out, in]``."""
        up = "gate_up_proj" if self.config.expert_activation == "swiglu" else "up_proj"
        return self.parameters[f"experts.{up}"], self.parameters["experts.down_proj"]

    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Every expert on its rows, which stand in the order of experts."""
        raise NotImplementedError


class _Loop(Step):
    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = self.weights
        # unbind, and not up[e]: whose backward makes a gradient of the whole stack for each expert.
        parts = zip(rows.split(counts.tolist()), up.unbind(0), down.unbind(0), strict=True)
        return torch.cat(
            [F.linear(self.activation(F.linear(part, u)), d) for part, u, d in parts if len(part)]
        )


class _Grouped(Step):
    def experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = self.weights
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = self.activation(F.grouped_mm(rows, up.transpose(1, 2), offs=ends))
        return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)


def loop_step(config: MoeLayerConfig, parameters: Mapping[str, Any], **options: Any) -> Step:
    """The step with one product for each expert; options as those of ``Step``."""
    return _Loop(config, parameters, **options)


def grouped_step(config: MoeLayerConfig, parameters: Mapping[str, Any], **options: Any) -> Step:
    """The step with ``torch.nn.functional.grouped_mm`` (PyTorch >= 2.10; float32 on a CPU works)."""
    return _Grouped(config, parameters, **options)


STEPS = {"loop": loop_step, "grouped": grouped_step}
PARTS = ("forward", "backward", "update", "step")


def random_parameters(config: MoeLayerConfig, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    gated = config.expert_activation == "swiglu"
    shapes = {
        "gate.weight": (experts, hidden),
        "experts.gate_up_proj" if gated else "experts.up_proj": (experts, (1 + gated) * inner, hidden),
        "experts.down_proj": (experts, hidden, inner),
    }
    return {
        name: config.initializer_range * rng.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }


def parts_of(step: Step, hidden_states: Tensor, target: Tensor) -> dict[str, float]:
    """Seconds of each part of one step."""
    marks = [time.perf_counter()]
    loss = step.forward(hidden_states, target)
    marks.append(time.perf_counter())
    step.backward(loss)
    marks.append(time.perf_counter())
    step.update()
    marks.append(time.perf_counter())
    parts = (b - a for a, b in pairwise(marks))
    return {**dict(zip(PARTS, parts, strict=False)), "step": marks[-1] - marks[0]}


def measure(size: str, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each part of each contender, run in turn."""
    tokens, config = SIZES[size]
    rng = np.random.default_rng(1)
    shape = (tokens, config.hidden_size)
    batch = [torch.from_numpy(rng.standard_normal(shape, np.float32)) for _ in range(2)]
    parameters = random_parameters(config, 0)
    contenders = {
        f"{kind}, {optimizer}": STEPS[kind](config, parameters, optimizer=optimizer)
        for kind in STEPS
        for optimizer in OPTIMIZERS
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for turn in range(repeats + 2):
        for name, step in contenders.items():
            parts = parts_of(step, *batch)
            if turn >= 2:
                times[name].append(parts)
    return {name: {part: [t[part] for t in found] for part in PARTS} for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*TOGETHER, "all"], default="all")
    parser.add_argument("--repeats", type=int, default=15, help="runs of each contender, in turn")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, median (best) of {arguments.repeats} in ms"
    )
    for size in TOGETHER if arguments.size == "all" else [arguments.size]:
        tokens, config = SIZES[size]
        print(
            f"\nT={tokens} H={config.hidden_size} F={config.moe_intermediate_size} "
            f"E={config.num_experts} K={config.num_experts_per_tok}, {config.expert_activation}"
        )
        print(f"  {'experts, AdamW':20}" + "".join(f"{part:>18}" for part in PARTS))
        for name, parts in measure(size, arguments.repeats).items():
            cells = (f"{1e3 * statistics.median(t):.2f} ({1e3 * min(t):.2f})" for t in parts.values())
            print(f"  {name:20}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
