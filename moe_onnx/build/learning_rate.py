"""``LearningRate``: a schedule as options, called with the number of an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_onnx.build.options import Options

# How much of the way from ``lr`` to ``min_lr`` is left when the part ``x`` of the decay is over.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}
LR_SCHEDULES = tuple(_SHAPES)


@dataclass(frozen=True)
class LearningRate(Options):
    """The learning rate of each update; ``lr`` of a :class:`TrainingSession`.

    With s updates made before this one, W = ``warmup_steps``, N = ``steps`` and x = (s - W) / (N - W):

        s < W:              lr s / W
        W <= s, constant:   lr
        W <= s, linear:     min_lr + (lr - min_lr) (1 - x)
        W <= s, cosine:     min_lr + (lr - min_lr) (1 + cos(pi x)) / 2

    These are the values of the schedulers of transformers (``constant_with_warmup``, ``linear``,
    ``cosine``, ``cosine_with_min_lr``; ``polynomial`` of power 1 for ``linear`` with a ``min_lr``): of a
    warm-up the first update has rate 0. From update N + 1 on the rate stays at ``min_lr``, where the
    cosine of transformers would rise again. It depends on nothing but the number of the update, so
    training that goes on with the same options gets the same rates.

    Args:
        lr: The rate after the warm-up.
        lr_scheduler_type: ``"constant"``, ``"linear"`` or ``"cosine"``.
        steps: Updates in all, more than ``warmup_steps`` where the rate decays.
        warmup_steps: Updates over which the rate rises.
        min_lr: What it decays to, at most ``lr``; 0 with ``"constant"``.

    Raises:
        ConfigError: If a value is illegal.
    """

    lr: float
    lr_scheduler_type: str = "constant"
    steps: int = 1000
    warmup_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        """Check every field on its own, then what goes together."""
        self.check_float("lr")
        self.check_choice("lr_scheduler_type", LR_SCHEDULES)
        self.check_int("steps")
        self.check_int("warmup_steps", low=0)
        self.check_float("min_lr")
        decays = self.lr_scheduler_type != "constant"
        if decays and self.warmup_steps >= self.steps:
            raise self.refuse("warmup_steps", f"less than steps ({self.steps}) with a rate that decays")
        if self.min_lr and not decays:
            raise self.refuse(
                "min_lr", "0 with lr_scheduler_type 'constant'", "Or take 'linear' or 'cosine'."
            )
        if self.min_lr > self.lr:
            raise self.refuse("min_lr", f"at most lr ({self.lr:g})")

    def __call__(self, number: int) -> float:
        """The rate of update ``number``, 1 for the first."""
        before = number - 1
        if before < self.warmup_steps:
            return self.lr * before / self.warmup_steps
        # A constant rate may be warmed up over more updates than there are.
        over = min((before - self.warmup_steps) / max(self.steps - self.warmup_steps, 1), 1.0)
        return self.min_lr + (self.lr - self.min_lr) * _SHAPES[self.lr_scheduler_type](over)
