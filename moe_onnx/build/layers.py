"""Parts of a decoder layer. Tokens are rows: hidden states are ``[tokens, hidden_size]`` throughout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.config import MoeLMConfig
from moe_onnx.build.precision import Half, half_of, narrow, rounded, wide

Parameters = dict[str, ir.Value]
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Positions:
    """What all attention layers of a model share.

    ``batch`` and ``sequence`` are sizes (vectors of one element); ``cos`` and ``sin`` are
    ``[sequence, 1, head_dim / 2]``; ``bias`` ``[batch, 1, sequence, sequence]`` is 0 where a query may
    look and the lowest float32 elsewhere.
    """

    batch: ir.Value
    sequence: ir.Value
    cos: ir.Value
    sin: ir.Value
    bias: ir.Value


def linear(
    e: Emitter, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None, *, half: Half = None
) -> ir.Value:
    """``x W^T (+ b)`` with the weight as ``[out, in]``; of 16-bit operands, and 16-bit, with ``half``."""
    operands = [rounded(e, value, half) for value in (x, weight, bias) if value is not None]
    return narrow(e, e.op("Gemm", *operands, transB=1), half)


def exact_sum(e: Emitter, x: ir.Value, *axes: ir.Value) -> ir.Value:
    """A sum of many terms: onnxruntime's own, in a few float32 lanes, loses digits as they grow."""
    total = e.op("ReduceSum", e.op("Cast", x, to=ir.DataType.DOUBLE), *axes, keepdims=0)
    return e.op("Cast", total, to=ir.DataType.FLOAT)


def rms_norm(e: Emitter, x: ir.Value, weight: ir.Value, size: int, eps: float) -> ir.Value:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, of ``size`` elements."""
    squares = e.op("ReduceSumSquare", x, e.constant([-1]), keepdims=1)
    mean = e.op("Mul", squares, e.like(1 / size, x))
    root = e.op("Sqrt", e.op("Add", mean, e.like(eps, x)))
    return e.op("Mul", e.op("Div", x, root), weight)


def silu(e: Emitter, x: ir.Value) -> ir.Value:
    """``x sigmoid(x)``."""
    return e.op("Mul", x, e.op("Sigmoid", x))


def dense_mlp(e: Emitter, x: ir.Value, params: Parameters, prefix: str, half: Half) -> ir.Value:
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""
    gate = wide(e, linear(e, x, params[f"{prefix}gate_proj.weight"], half=half))
    up = wide(e, linear(e, x, params[f"{prefix}up_proj.weight"], half=half))
    hidden = e.op("Mul", silu(e, gate), up)
    return wide(e, linear(e, hidden, params[f"{prefix}down_proj.weight"], half=half))


def positions(e: Emitter, input_ids: ir.Value, attention_mask: ir.Value, config: MoeLMConfig) -> Positions:
    """Rotary angles of positions 0, 1, .. and the mask of what a query may look at."""
    batch, sequence = e.op("Shape", input_ids, end=1), e.op("Shape", input_ids, start=1)
    length = e.op("Squeeze", sequence)
    zero, one = e.constant(0), e.constant(1)
    position = shaped(e.op("Range", zero, length, one), "sequence")
    half = config.head_size // 2
    frequency = config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
    column = e.op("Unsqueeze", position, e.constant([1, 2]))
    angle = e.op("Mul", e.op("Cast", column, to=ir.DataType.FLOAT), e.constant(frequency.astype(np.float32)))
    row = e.op("Unsqueeze", position, e.constant([0]))
    behind = e.op("Sub", e.op("Unsqueeze", position, e.constant([1])), row)  # query - key
    visible = e.op("GreaterOrEqual", behind, zero)
    if config.sliding_window is not None:
        visible = e.op("And", visible, e.op("Less", behind, e.constant(config.sliding_window)))
    real_key = e.op("Unsqueeze", e.op("Cast", attention_mask, to=ir.DataType.BOOL), e.constant([1, 2]))
    allowed = e.op("And", visible, real_key)
    low = e.constant(np.float32(LOWEST))
    bias = e.op("Where", allowed, e.constant(np.float32(0)), low)
    return Positions(batch, sequence, e.op("Cos", angle), e.op("Sin", angle), bias)


def attention(
    e: Emitter, x: ir.Value, params: Parameters, prefix: str, config: MoeLMConfig, where: Positions
) -> ir.Value:
    """Grouped-query attention with rotary positions; query heads of a group share keys and values."""
    size, heads, kv_heads = config.head_size, config.num_attention_heads, config.kv_heads
    group, half = heads // kv_heads, half_of(config)
    projected = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        bias = params.get(f"{prefix}{name}_proj.bias")
        y = wide(e, linear(e, x, params[f"{prefix}{name}_proj.weight"], bias, half=half))
        norm = params.get(f"{prefix}{name}_norm.weight")
        if norm is not None and config.qk_norm == "full":
            y = rms_norm(e, y, norm, count * size, config.rms_norm_eps)
        y = _reshape(e, y, where, "batch", "sequence", count, size)
        if norm is not None and config.qk_norm == "head":
            y = rms_norm(e, y, norm, size, config.rms_norm_eps)
        if config.clip_qkv is not None:
            limit = config.clip_qkv
            y = e.op("Clip", y, e.like(-limit, y), e.like(limit, y))
        projected[name] = y if name == "v" else _rotate(e, y, where)
    q = e.op("Mul", projected["q"], e.like(config.attention_scale, x))
    # Rotated and scaled in float32, and rounded once.
    q, k, v = (rounded(e, value, half) for value in (q, projected["k"], projected["v"]))
    q = e.op("Transpose", q, perm=[0, 2, 1, 3])
    k = e.op("Transpose", k, perm=[0, 2, 3, 1])
    v = e.op("Transpose", v, perm=[0, 2, 1, 3])
    if group == 1:
        scores = e.op("Add", rounded(e, e.op("MatMul", q, k), half), where.bias)
        mixed = e.op("MatMul", rounded(e, e.op("Softmax", scores, axis=-1), half), v)
    else:
        # The query heads of a group are further rows of one matrix: keys and values are not repeated.
        q = _reshape(e, q, where, "batch", kv_heads, "group_rows", size, group=group)
        scores = rounded(e, e.op("MatMul", q, k), half)
        scores = _reshape(e, scores, where, "batch", kv_heads, group, "sequence", "sequence")
        scores = e.op("Add", scores, e.op("Unsqueeze", where.bias, e.constant([1])))
        weights = rounded(e, e.op("Softmax", scores, axis=-1), half)
        weights = _reshape(e, weights, where, "batch", kv_heads, "group_rows", "sequence", group=group)
        mixed = e.op("MatMul", weights, v)
        mixed = _reshape(e, mixed, where, "batch", heads, "sequence", size)
    mixed = e.op("Transpose", narrow(e, mixed, half), perm=[0, 2, 1, 3])
    mixed = shaped(e.op("Reshape", mixed, e.constant([-1, heads * size])), "tokens", heads * size)
    bias = params.get(f"{prefix}o_proj.bias")
    return wide(e, linear(e, mixed, params[f"{prefix}o_proj.weight"], bias, half=half))


def _rotate(e: Emitter, x: ir.Value, where: Positions) -> ir.Value:
    """Rotary embedding of ``[batch, sequence, heads, head_dim]``; element i turns with i + half."""
    first, second = e.ops("Split", x, outputs=2, axis=-1, num_outputs=2)
    turned_first = e.op("Sub", e.op("Mul", first, where.cos), e.op("Mul", second, where.sin))
    turned_second = e.op("Add", e.op("Mul", second, where.cos), e.op("Mul", first, where.sin))
    return e.op("Concat", turned_first, turned_second, axis=-1)


def _reshape(e: Emitter, x: ir.Value, where: Positions, *dims: int | str, group: int = 1) -> ir.Value:
    """Reshape to sizes of which some are only known when the graph runs."""
    sizes = {"batch": where.batch, "sequence": where.sequence}
    if "group_rows" in dims:
        sizes["group_rows"] = e.op("Mul", where.sequence, e.constant([group]))
    shape = e.op("Concat", *(sizes.get(str(dim)) or e.constant([dim]) for dim in dims), axis=0)
    return shaped(e.op("Reshape", x, shape, allowzero=1), *dims)
