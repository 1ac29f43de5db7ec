"""Dynamic loss scaling for float16, whose gradients would otherwise be too small for it, or too large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_onnx.build.draft import LOSS_SCALE
from moe_onnx.build.options import Options
from moe_onnx.errors import CheckpointError, NonFiniteError

_STATE = ("scale", "growth_tracker", "overflows")


@dataclass(frozen=True)
class LossScale(Options):
    """How the loss scale of float16 training goes, as in ``torch.amp.GradScaler``.

    Graphs multiply the loss by the scale before they differentiate it, and gradients by its inverse, in
    float32, before the norm and the clipping. An update whose gradients are not finite, though its loss
    is, is skipped, and the scale multiplied by ``backoff_factor``; after ``growth_interval`` updates in a
    row without one it is multiplied by ``growth_factor``.

    Args:
        init_scale: The first scale.
        growth_factor: Above 1.
        backoff_factor: In (0, 1).
        growth_interval: Updates.
        min_scale: Below this scale it is an error: something else than the scale is wrong.

    Raises:
        ConfigError: If a value is illegal.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14

    def __post_init__(self) -> None:
        """Check every field."""
        self.check_float("init_scale", "min_scale", above=True)
        self.check_float("growth_factor", low=1.0, above=True)
        self.check_float("backoff_factor", high=1.0, above=True, below=True)
        self.check_int("growth_interval")
        if self.init_scale < self.min_scale:
            raise self.refuse("init_scale", f"at least min_scale ({self.min_scale:g})")


class Scaler:
    """A scale in training: what it is now, for how many updates it has held, how often it did not."""

    def __init__(self, options: LossScale) -> None:
        self.options = options
        self.scale, self.growth_tracker, self.overflows = options.init_scale, 0, 0

    def back_off(self, number: int, metrics: Mapping[str, Any]) -> None:
        """The gradients of an update were not finite.

        Raises:
            NonFiniteError: If the scale would become too small; it stays as it is.
        """
        scale = self.scale * self.options.backoff_factor
        if scale < self.options.min_scale:
            raise NonFiniteError(
                f"Update {number}: the gradient norm is {metrics['grad_norm']} at a loss scale of "
                f"{self.scale:g}, and min_scale is {self.options.min_scale:g}. Nothing was updated. Lower "
                "the learning rate, or train in bfloat16, which has the range of float32.",
                metrics=dict(metrics),
            )
        self.scale, self.growth_tracker, self.overflows = scale, 0, self.overflows + 1

    def grow(self) -> None:
        """An update was made."""
        self.growth_tracker += 1
        if self.growth_tracker == self.options.growth_interval:
            grown = float(np.float32(self.scale * self.options.growth_factor))
            self.scale = grown if math.isfinite(grown) else self.scale  # as a float32 input it must exist
            self.growth_tracker = 0

    def state(self) -> np.ndarray[Any, Any]:
        """All of it, float64 ``[3]``: scale, updates since it changed, updates that were skipped."""
        return np.array([getattr(self, name) for name in _STATE], np.float64)

    def load(self, state: Any) -> None:
        """Take over what :meth:`state` gave.

        Raises:
            CheckpointError: If it is something else.
        """
        found = np.asarray(state)
        legal = found.shape == (3,) and found.dtype.kind == "f" and bool(np.isfinite(found).all())
        if not legal or found[0] <= 0 or (found[1:] < 0).any() or (found[1:] % 1 != 0).any():
            raise CheckpointError(
                f"state dict: '{LOSS_SCALE}' must be a positive scale and two counts, found {state!r:.60}."
            )
        self.scale, self.growth_tracker, self.overflows = float(found[0]), int(found[1]), int(found[2])


def to_json(state: Any) -> dict[str, Any]:
    """A state of :class:`Scaler` for ``trainer.json``."""
    return dict(zip(_STATE, np.asarray(state).tolist(), strict=True))


def from_json(state: Any, where: str) -> np.ndarray[Any, Any]:
    """What :func:`to_json` gave, as it was.

    Raises:
        CheckpointError: If it is something else.
    """
    if not isinstance(state, dict) or not all(isinstance(state.get(n), (int, float)) for n in _STATE):
        raise CheckpointError(f"{where}: '{LOSS_SCALE}' must hold {', '.join(_STATE)}, found {state!r:.60}.")
    return np.array([state[name] for name in _STATE], np.float64)
