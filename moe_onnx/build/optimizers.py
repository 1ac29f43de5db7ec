"""Optimizers as options; ``update.py`` emits them as graph nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from moe_onnx.build.options import Options
from moe_onnx.errors import ConfigError

# Norm weights and biases are not decayed, as in the trainers people come from.
NO_DECAY = ("*norm.weight", "*.bias", "*_bias")


@dataclass(frozen=True)
class _Optimizer(Options):
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = NO_DECAY
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        """Check the fields that all optimizers share."""
        self.check_float("weight_decay")
        if self.max_grad_norm is not None:
            self.check_float("max_grad_norm", above=True)
        if isinstance(self.no_decay, str) or not all(isinstance(p, str) for p in self.no_decay):
            raise self.refuse("no_decay", "a sequence of name patterns")
        object.__setattr__(self, "no_decay", tuple(self.no_decay))

    def decays(self, name: str) -> bool:
        """Whether the parameter ``name`` is in the group that weight decay applies to."""
        return self.weight_decay > 0 and not any(fnmatchcase(name, pattern) for pattern in self.no_decay)

    def to_dict(self) -> dict[str, Any]:
        """The optimizer as plain data, its kind under ``"kind"``."""
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class AdamW(_Optimizer):
    """AdamW, equal to ``torch.optim.AdamW`` (decoupled decay, bias correction, no amsgrad).

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        p = p (1 - lr weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)

    Args:
        weight_decay: Per unit of learning rate and step.
        no_decay: Name patterns (``fnmatch``) of parameters that are not decayed.
        max_grad_norm: Gradients are scaled by ``min(1, max_grad_norm / (norm + 1e-6))``, as
            ``torch.nn.utils.clip_grad_norm_`` does with the norm over all of them; None: never.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment, > 0.

    The learning rate and the step (1 at the first update) are graph inputs.

    Raises:
        ConfigError: If a value is illegal.
    """

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Check the fields of AdamW."""
        super().__post_init__()
        self.check_float("beta1", "beta2", high=1.0, below=True)
        self.check_float("eps", above=True)


@dataclass(frozen=True)
class SGD(_Optimizer):
    """Stochastic gradient descent, equal to ``torch.optim.SGD``.

        g = g + weight_decay p;  b = g at step 1, then momentum b + g;  p = p - lr b

    with ``g + momentum b`` in place of ``b`` for Nesterov, and no ``b`` without momentum.

    Args:
        weight_decay: Added to the gradient, times the parameter.
        no_decay: Name patterns (``fnmatch``) of parameters that are not decayed.
        max_grad_norm: As in :class:`AdamW`.
        momentum: In [0, 1).
        nesterov: Needs a momentum.

    Raises:
        ConfigError: If a value is illegal.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        """Check the fields of SGD."""
        super().__post_init__()
        self.check_float("momentum", high=1.0, below=True)
        self.check_bool("nesterov")
        if self.nesterov and not self.momentum:
            raise self.refuse("nesterov", "False without momentum", "Give a momentum > 0.")


Optimizer = AdamW | SGD


def state_names(optimizer: Optimizer) -> tuple[str, ...]:
    """What an optimizer keeps for each parameter, by PyTorch's names."""
    if isinstance(optimizer, SGD):
        return ("momentum_buffer",) if optimizer.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def optimizer_from_dict(data: Mapping[str, Any]) -> Optimizer:
    """The optimizer that ``to_dict`` gave."""
    kinds: dict[str, type[Optimizer]] = {"AdamW": AdamW, "SGD": SGD}
    values: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n != "kind"
    }
    if data.get("kind") not in kinds:
        raise ConfigError(f"optimizer: 'kind' must be one of {', '.join(kinds)}, got {data.get('kind')!r}.")
    return kinds[data["kind"]](**values)
