"""The optimizers as graph nodes, elementwise but for scalars made once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.build.layers import exact_sum
from moe_onnx.build.optimizers import SGD, AdamW, Optimizer
from moe_onnx.spec import DOMAIN

# onnxruntime adds up a whole tensor in a few float32 lanes: of 2^24 squares a thousandth is lost. Above so
# many elements rows are summed in it, and the rows' sums in float64; below, one node is faster.
LONG_SUM = 2**16
# From so many elements for each of the first axis on, AdamW takes one slice of it after the other: its dozen
# passes over a slice find it in a cache (0.66 of the time at 2^20 elements), and their temporaries are as
# small. Below, starting the nodes again for every slice costs more. Reshaping to slices of any size would be
# a copy, as onnxruntime cannot write through a Reshape to where an output is bound.
LONG_SLICE = 2**18


@dataclass(frozen=True)
class Scalars:
    """What all parameters share: the learning rate, the clipping factor (or None), the step."""

    lr: ir.Value
    clip: ir.Value | None
    step: ir.Value


def global_norm(
    e: Emitter, gradients: list[ir.Value], shapes: list[tuple[int, ...]], fused: bool = False
) -> ir.Value:
    """The L2 norm over all gradients, of parameters of these shapes; ``fused``: one operator for each."""
    if fused:
        squares = [e.op("MoeSquareSum", g, domain=DOMAIN) for g in gradients]
    else:
        squares = [_sum_of_squares(e, g, shape) for g, shape in zip(gradients, shapes, strict=True)]
    return e.op("Sqrt", e.op("Sum", *squares) if len(squares) > 1 else squares[0])


def _sum_of_squares(e: Emitter, gradient: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    if math.prod(shape) <= LONG_SUM or len(shape) < 2:
        return e.op("ReduceSumSquare", gradient, keepdims=0)
    return exact_sum(e, e.op("ReduceSumSquare", gradient, e.constant([-1]), keepdims=0))


def clip_factor(e: Emitter, norm: ir.Value, optimizer: Optimizer) -> ir.Value | None:
    """``min(1, max_grad_norm / (norm + 1e-6))``, as PyTorch's ``clip_grad_norm_``."""
    if optimizer.max_grad_norm is None:
        return None
    limit, one = e.constant(np.float32(optimizer.max_grad_norm)), e.constant(np.float32(1))
    return e.op("Min", one, e.op("Div", limit, e.op("Add", norm, e.constant(np.float32(1e-6)))))


def load_excess(e: Emitter, load: ir.Value) -> ir.Value:
    """``E load - sum of loads``, float32 ``[E]``: above 0 at experts with more tokens than the mean.

    Like gradients, those of the parts of a batch add up to that of the whole.
    """
    total = e.op("ReduceSum", load, e.constant([0]), keepdims=1)
    # In integers, so that the mean has no rounding; the sign survives the cast.
    above = e.op("Sub", e.op("Mul", load, e.op("Size", load)), total)
    return e.op("Cast", above, to=ir.DataType.FLOAT)


def balance(e: Emitter, bias: ir.Value, excess: ir.Value, rate: float) -> ir.Value:
    """The selection bias after an update: overloaded experts are chosen less."""
    return e.op("Sub", bias, e.op("Mul", e.op("Sign", excess), e.constant(np.float32(rate))))


def update(
    e: Emitter,
    optimizer: Optimizer,
    scalars: Scalars,
    parameter: ir.Value,
    gradient: ir.Value,
    states: dict[str, ir.Value],
    decays: bool,
    shape: tuple[int, ...],
    fused: bool = False,
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """The updated parameter and states; ``shape`` is the parameter's; ``fused``: AdamW as one operator."""
    if isinstance(optimizer, SGD):
        return _sgd(e, optimizer, scalars, parameter, gradient, states, decays)
    factors = _adamw_factors(e, optimizer, scalars, decays)
    old = (parameter, gradient, states["exp_avg"], states["exp_avg_sq"])
    if fused:
        new = e.ops("MoeAdamW", *old, factors.joined(e), domain=DOMAIN, outputs=3)
        return new[0], {"exp_avg": new[1], "exp_avg_sq": new[2]}
    by_slice = len(shape) > 2 and shape[0] > 1 and math.prod(shape[1:]) >= LONG_SLICE
    new = _adamw_by_slice(e, factors, old, shape[1:]) if by_slice else _adamw(e, factors, *old)
    return new[0], {"exp_avg": new[1], "exp_avg_sq": new[2]}


@dataclass(frozen=True)
class _AdamWFactors:
    """What the elements of one parameter are weighed by; ``kept`` is None without decay."""

    beta1: ir.Value
    weight1: ir.Value
    beta2: ir.Value
    weight2: ir.Value
    rate: ir.Value
    eps: ir.Value
    kept: ir.Value | None

    def joined(self, e: Emitter) -> ir.Value:
        """As MoeAdamW has them: one tensor, the same one for all parameters that decay alike."""
        kept = e.constant(np.float32(1)) if self.kept is None else self.kept
        scalars = (self.beta1, self.weight1, self.beta2, self.weight2, self.rate, self.eps, kept)
        return e.op("Concat", *[e.op("Unsqueeze", one, e.constant([0])) for one in scalars], axis=0)


def _adamw_factors(e: Emitter, optimizer: AdamW, scalars: Scalars, decays: bool) -> _AdamWFactors:
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    # Powers of the betas cancel against 1: they are taken in double precision.
    step = e.op("Cast", scalars.step, to=ir.DataType.DOUBLE)
    one = e.constant(1.0, np.float64)
    left1 = e.op("Sub", one, e.op("Pow", e.constant(beta1, np.float64), step))
    root2 = e.op("Sqrt", e.op("Sub", one, e.op("Pow", e.constant(beta2, np.float64), step)))
    lr = e.op("Cast", scalars.lr, to=ir.DataType.DOUBLE)
    # m / left1 / (sqrt(v) / root2 + eps) = m (root2 / left1) / (sqrt(v) + eps root2): a pass less.
    rate = e.op("Cast", e.op("Div", e.op("Mul", lr, root2), left1), to=ir.DataType.FLOAT)
    eps = e.op("Cast", e.op("Mul", e.constant(optimizer.eps, np.float64), root2), to=ir.DataType.FLOAT)
    weight1: ir.Value = e.constant(np.float32(1 - beta1))
    weight2: ir.Value = e.constant(np.float32(1 - beta2))
    if scalars.clip is not None:  # clipping costs nothing where the gradient is weighed anyway
        weight1 = e.op("Mul", weight1, scalars.clip)
        weight2 = e.op("Mul", weight2, e.op("Mul", scalars.clip, scalars.clip))
    kept = None
    if decays:
        decay = e.constant(np.float32(optimizer.weight_decay))
        kept = e.op("Sub", e.constant(np.float32(1)), e.op("Mul", scalars.lr, decay))
    betas = [e.constant(np.float32(beta)) for beta in (beta1, beta2)]
    return _AdamWFactors(betas[0], weight1, betas[1], weight2, rate, eps, kept)


def _adamw(
    e: Emitter, by: _AdamWFactors, parameter: ir.Value, gradient: ir.Value, m: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    m = e.op("Add", e.op("Mul", m, by.beta1), e.op("Mul", gradient, by.weight1))
    v = e.op("Add", e.op("Mul", v, by.beta2), e.op("Mul", e.op("Mul", gradient, gradient), by.weight2))
    change = e.op("Div", e.op("Mul", m, by.rate), e.op("Add", e.op("Sqrt", v), by.eps))
    if by.kept is not None:
        parameter = e.op("Mul", parameter, by.kept)
    return e.op("Sub", parameter, change), m, v


def _adamw_by_slice(
    e: Emitter, by: _AdamWFactors, old: tuple[ir.Value, ...], shape: tuple[int, ...]
) -> Sequence[ir.Value]:
    """The same numbers, one slice of the first axis after the other."""
    inner = e.inside("slice")
    names = ("parameter", "grad", "exp_avg", "exp_avg_sq")
    parts = [inner.input(f"{inner.graph.name}/{name}", ir.DataType.FLOAT, shape) for name in names]
    for name, value in zip(("parameter", *names[2:]), _adamw(inner, by, *parts), strict=True):
        inner.output(value, f"{inner.graph.name}/{name}.updated", ir.DataType.FLOAT, ir.Shape(list(shape)))
    return e.ops("Scan", *old, outputs=3, body=inner.graph, num_scan_inputs=len(old))


def _sgd(
    e: Emitter,
    optimizer: SGD,
    scalars: Scalars,
    parameter: ir.Value,
    gradient: ir.Value,
    states: dict[str, ir.Value],
    decays: bool,
) -> tuple[ir.Value, dict[str, ir.Value]]:
    if scalars.clip is not None:
        gradient = e.op("Mul", gradient, scalars.clip)
    if decays:
        decay = e.op("Mul", parameter, e.constant(np.float32(optimizer.weight_decay)))
        gradient = e.op("Add", gradient, decay)
    done: dict[str, ir.Value] = {}
    if optimizer.momentum:
        # The buffer starts at 0, which makes it the gradient at the first step, as in PyTorch.
        momentum = e.constant(np.float32(optimizer.momentum))
        buffer = e.op("Add", e.op("Mul", states["momentum_buffer"], momentum), gradient)
        done["momentum_buffer"] = buffer
        gradient = e.op("Add", gradient, e.op("Mul", buffer, momentum)) if optimizer.nesterov else buffer
    return e.op("Sub", parameter, e.op("Mul", gradient, scalars.lr)), done
