"""Gradient accumulation: the micro-batches of one update, put together to what the whole batch gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from moe_onnx.build.manifest import Manifest
from moe_onnx.runtime.training_state import Array, TrainingState

_LONG_SUM = 2**16  # elements that are summed in float32 before float64 takes over, as in the graphs


class Accumulator:
    """Gradients and metrics of several runs of the graph ``grad``.

    The loss of a language model is a mean over its tokens with a label, that of a layer one over its
    tokens: a mean of such means weighs a token by how few others are beside it. So with n_i tokens in
    micro-batch i

        gradient = sum_i n_i gradient_i / sum_i n_i

    and all losses likewise, which for ``lm_loss`` and ``mse_loss`` is what the whole batch gives. The
    router's losses are not linear in their batch: they are this mean of those of the micro-batches
    (``router_aux_loss="global"`` has the loads of the earlier ones in it). Counts, and ``load_excess``
    of selection biases, add up. Where no token has a label, all micro-batches weigh the same.

    Args:
        manifest: Says which gradients there are.
        state: Whose gradients are read, and overwritten by :meth:`finish`.
    """

    def __init__(self, manifest: Manifest, state: TrainingState) -> None:
        trained = {p.gradient: p.trained for p in manifest.parameters}
        self._gradients = {n: state.shared[n].array for n, is_mean in trained.items() if is_mean}
        self._excesses = {n: state.shared[n].array for n, is_mean in trained.items() if not is_mean}
        self._norm = state.shared["grad_norm"].array
        # The one further set of gradients that accumulation costs.
        self._sums = {n: np.empty_like(a) for n, a in (self._gradients | self._excesses).items()}
        self.start()

    def start(self) -> None:
        """Forget the last update's."""
        self._tokens, self._weight, self._parts = 0, 0, 0
        self._metrics: dict[str, Any] = {}

    @property
    def load(self) -> Array | None:
        """``expert_load`` of the micro-batches so far."""
        found: Array | None = self._metrics.get("expert_load")
        return found

    def add(self, metrics: Mapping[str, Any], tokens: int) -> None:
        """Take in the micro-batch that has just run; ``tokens`` is what its loss is a mean over."""
        # Micro-batches without tokens weigh nothing, unless there are no others.
        fresh = not self._weight or (tokens > 0 and not self._tokens)
        weight = tokens if tokens or self._tokens else 1
        before = 0 if fresh else self._weight
        for name, value in metrics.items():
            old = self._metrics.get(name)
            if old is None:
                self._metrics[name] = value
            elif _is_count(value):
                self._metrics[name] = old + value
            elif before + weight:
                self._metrics[name] = (old * before + value * weight) / (before + weight)
        for name, found in self._excesses.items():
            _add(self._sums[name], found, 1, fresh=not self._parts)
        if weight:
            for name, found in self._gradients.items():
                _add(self._sums[name], found, weight, fresh=fresh)
        self._tokens, self._weight, self._parts = self._tokens + tokens, before + weight, self._parts + 1

    def finish(self) -> dict[str, Any]:
        """Put the update's gradients and their norm where ``apply`` reads them; give the metrics."""
        for name, found in self._gradients.items():
            np.divide(self._sums[name], np.float32(self._weight), out=found)
        for name, found in self._excesses.items():
            np.copyto(found, self._sums[name])
        self._norm[...] = norm_of(self._gradients.values())
        return self._metrics | {"grad_norm": self._norm.item()}


def norm_of(arrays: Iterable[Array]) -> float:
    """The L2 norm over all arrays together."""
    total = 0.0
    for array in arrays:
        flat = array.reshape(-1)
        for at in range(0, flat.size, _LONG_SUM):
            part = flat[at : at + _LONG_SUM]
            total += float(np.dot(part, part))
    return math.sqrt(total)


def _is_count(value: Any) -> bool:
    return bool(np.asarray(value).dtype.kind in "iu")


def _add(total: Array, found: Array, weight: int, *, fresh: bool) -> None:
    """Add ``weight`` times ``found``, which is overwritten: no temporaries as large as a weight."""
    factor = np.float32(weight)
    if fresh:
        np.multiply(found, factor, out=total)
    else:
        np.multiply(found, factor, out=found)
        np.add(total, found, out=total)
