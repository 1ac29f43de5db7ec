"""The experts: an MLP each, on the rows that the dispatch gave them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.dispatch import Dispatched
from moe_onnx.build.layers import Parameters, dense_mlp, linear, silu
from moe_onnx.build.moe_options import MoeOptions
from moe_onnx.build.precision import Half, half_of, narrow, rounded, wide
from moe_onnx.spec import DOMAIN


def experts(
    e: Emitter, dispatched: Dispatched, params: Parameters, prefix: str, config: MoeOptions, fused: bool
) -> ir.Value:
    """What the experts make of their rows: ``[rows, H]`` again, in the same order, not rounded at last."""
    if config.unrolls():
        return _unrolled(e, dispatched, params, f"{prefix}experts.", config, fused)
    return _grouped(e, dispatched, params, f"{prefix}experts.", config, fused)


def shared_expert(
    e: Emitter, x: ir.Value, params: Parameters, prefix: str, config: MoeOptions
) -> ir.Value | None:
    """The output of the expert that takes every token, or None where there is none."""
    if config.shared_expert_intermediate_size is None:
        return None
    half = half_of(config)
    if not config.shared_expert_gate:
        return dense_mlp(e, x, params, f"{prefix}shared_experts.", half)
    y = dense_mlp(e, x, params, f"{prefix}shared_expert.", half)
    gate = wide(e, linear(e, x, params[f"{prefix}shared_expert_gate.weight"], half=half))
    return e.op("Mul", y, e.op("Sigmoid", gate))


def first_projection(config: MoeOptions) -> tuple[str, int]:
    """Name and rows of an expert's first product."""
    inner = config.moe_intermediate_size
    return ("gate_up_proj", 2 * inner) if config.is_gated else ("up_proj", inner)


def _activation(e: Emitter, hidden: ir.Value, config: MoeOptions, fused: bool, half: Half) -> ir.Value:
    """Of products, float32 that holds values of ``half``; what is rounded to that next may be so already."""
    kind = config.expert_activation
    if fused and kind == "swiglu":
        y = e.op("MoeSwiGlu", narrow(e, hidden, half), domain=DOMAIN)
        if hidden.shape is not None:  # rows of one expert, or of all
            y.shape = ir.Shape([hidden.shape[0], config.moe_intermediate_size])
        return wide(e, y)
    if not config.is_gated:
        return e.op("Gelu" if kind == "gelu" else "Relu", hidden)
    gate, up = e.ops("Split", hidden, outputs=2, axis=1, num_outputs=2)
    if kind == "swiglu":
        return e.op("Mul", silu(e, gate), up)
    if kind == "geglu":
        return e.op("Mul", e.op("Gelu", gate), up)
    limit = config.swiglu_limit
    # Not Min, whose gradient is shared at a tie: 16-bit values often are the limit itself.
    gate = e.op("Clip", gate, None, e.like(limit, gate))
    up = e.op("Clip", up, e.like(-limit, up), e.like(limit, up))
    swish = e.op("Mul", gate, e.op("Sigmoid", e.op("Mul", gate, e.like(config.swiglu_alpha, gate))))
    return e.op("Mul", e.op("Add", up, e.like(1, up)), swish)


def _unrolled(
    e: Emitter, dispatched: Dispatched, params: Parameters, prefix: str, config: MoeOptions, fused: bool
) -> ir.Value:
    """Nodes of its own for each expert: the fastest form where experts are few."""
    count, hidden_size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    half = half_of(config)
    name, rows = first_projection(config)
    parts = dispatched.split(e, dispatched.rows, count)
    weights = None if dispatched.weights is None else dispatched.split(e, dispatched.weights, count)
    # All of a parameter is rounded at once: two nodes, not two for each expert.
    given = (params.get(f"{prefix}{n}") for n in (name, "down_proj", f"{name}_bias", "down_proj_bias"))
    weight, last, bias, last_bias = (None if p is None else rounded(e, p, half) for p in given)
    assert weight is not None and last is not None
    up = _matrices(e, weight, count, rows, hidden_size)
    down = _matrices(e, last, count, hidden_size, inner)
    up_bias, down_bias = _each(e, bias, count), _each(e, last_bias, count)
    done = []
    for i in range(count):
        with e.scope(str(i)):
            # Rows and weights are rounded already.
            hidden = rounded(e, linear(e, parts[i], up[i], up_bias[i]), half)
            hidden = _activation(e, hidden, config, fused, half if weights is None else None)
            bias = down_bias[i]
            if weights is None:
                done.append(linear(e, rounded(e, hidden, half), down[i], bias))
                continue
            y = linear(e, rounded(e, e.op("Mul", hidden, weights[i]), half), down[i])
            done.append(y if bias is None else e.op("Add", y, e.op("Mul", weights[i], bias)))
    return done[0] if count == 1 else e.op("Concat", *done, axis=0)


def _matrices(e: Emitter, stacked: ir.Value, experts: int, rows: int, columns: int) -> list[ir.Value]:
    """The weights of each expert as a matrix."""
    parts = (
        e.ops("Split", stacked, outputs=experts, axis=0, num_outputs=experts) if experts > 1 else [stacked]
    )
    return [e.op("Reshape", part, e.constant([rows, columns])) for part in parts]


def _each(e: Emitter, stacked: ir.Value | None, experts: int) -> list[ir.Value | None]:
    """The bias of each expert, as one row."""
    if stacked is None or experts == 1:
        return [stacked] * experts
    return list(e.ops("Split", stacked, outputs=experts, axis=0, num_outputs=experts))


def _grouped(
    e: Emitter, dispatched: Dispatched, params: Parameters, prefix: str, config: MoeOptions, fused: bool
) -> ir.Value:
    """One node a product, however many experts there are.

    It has no bias: in 16 bit the sum of product and bias is rounded once more.
    """
    name, width = first_projection(config)
    sizes, weights = dispatched.group_sizes(e, config.num_experts), dispatched.weights
    half = half_of(config)
    given = [params.get(f"{prefix}{n}_bias") for n in (name, "down_proj")]
    biases = [None if bias is None else rounded(e, bias, half) for bias in given]
    expert = _expert_of_row(e, dispatched) if config.expert_bias else None

    def product(what: str, x: ir.Value, out: int) -> ir.Value:
        weight = narrow(e, params[f"{prefix}{name if what == 'up' else 'down_proj'}"], half)
        x = narrow(e, x, half)
        y = e.op("MoeGroupedMatmul", x, weight, sizes, domain=DOMAIN, name=what, transpose_weight=1)
        return wide(e, shaped(y, "rows", out))

    hidden = product("up", dispatched.rows, width)
    if biases[0] is not None:
        hidden = rounded(e, e.op("Add", hidden, e.op("Gather", biases[0], expert, axis=0)), half)
    hidden = _activation(e, hidden, config, fused, half if weights is None else None)
    if weights is not None:
        hidden = e.op("Mul", hidden, weights)
    y = product("down", hidden, config.hidden_size)
    if biases[1] is None:
        return y
    bias = e.op("Gather", biases[1], expert, axis=0)
    return e.op("Add", y, bias if weights is None else e.op("Mul", weights, bias))


def _expert_of_row(e: Emitter, dispatched: Dispatched) -> ir.Value:
    """The expert of each row, int64."""
    length = e.op("Squeeze", e.op("Shape", dispatched.rows, end=1))
    row = e.op("Range", e.constant(0), length, e.constant(1))
    if isinstance(dispatched.sizes, int):
        return e.op("Div", row, e.constant(dispatched.sizes))
    # How many experts' rows have ended before it.
    end = e.op("CumSum", e.op("Cast", dispatched.sizes, to=ir.DataType.INT64), e.constant(np.int64(0)))
    ended = e.op("GreaterOrEqual", e.op("Unsqueeze", row, e.constant([1])), end)
    return e.op("ReduceSum", e.op("Cast", ended, to=ir.DataType.INT64), e.constant([1]), keepdims=0)
