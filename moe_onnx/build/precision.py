"""The compute dtype: where a graph rounds to 16 bit, in the way of PyTorch's autocast.

Parameters, optimizer state and gradients of parameters are float32 ("master weights"). With
``dtype="bfloat16"`` or ``"float16"``

- matrix products (attention's and the experts' projections, scores, mixing, the output) take 16-bit operands,
  sum in float32 and give a 16-bit result; so do dispatch and combine of the experts' rows, whose sums are
  float32's, too;
- norms, rotary embedding, softmax, activations, residual stream, router, losses, clipping and optimizer are
  float32, made of those 16-bit values;
- backward, the gradient of a 16-bit value is rounded to 16 bit, once, when all its parts are summed up in
  float32, and the gradient of a parameter is never rounded: where autocast has it go through the 16-bit copy
  of the weight, it stays the float32 sum here;
- the operators take float32 probabilities beside bfloat16 rows, and float16 ones beside float16 rows, as
  their source documents have it. Experts are chosen before that, by float32.

How that is written follows from what onnxruntime has. Measured with 1.32, the oldest and newest supported,
on an x86-64 CPU: of the operators used here it has 16-bit kernels for Cast, Identity, Reshape, Transpose,
Split, Concat, Slice, Gather, GatherElements, ScatterElements, Squeeze and Unsqueeze, and in bfloat16 for Pad,
in float16 for Expand. It has none for MatMul, Gemm, Add, Sub, Mul, Div, Sum, Where, Softmax, LogSoftmax,
Sigmoid, Erf, Gelu, Exp, Sqrt, Neg and all reductions: float16 nodes of these get Casts to float32 round them
when the model is loaded, which is what is emitted here, and bfloat16 nodes are refused. A product between
Casts is as fast as the float16 node (``benchmarks/precision.py``). So both dtypes are written alike: float32
nodes between Casts that round. The native library has kernels of the ``ascend.moe`` operators in both; they
are emitted as 16-bit nodes, and their function bodies cast within. No operator of these graphs has to be
refused.

A runtime with 16-bit kernels finds Cast, product, Cast to put in one. On a CPU, 16 bit saves no time.
"""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.gradients import HALVES
from moe_onnx.build.moe_options import MoeOptions

Half = ir.DataType | None
TYPES: dict[str, Half] = {
    "float32": None,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


def half_of(config: MoeOptions) -> Half:
    """The 16-bit type that a config computes in, None for float32."""
    return TYPES[config.dtype]


def narrow(e: Emitter, x: ir.Value, half: Half) -> ir.Value:
    """``x`` rounded to 16 bit; as it is where there is no ``half``."""
    if half is None or x.dtype == half:
        return x
    made = x.producer()
    source = made.inputs[0] if made is not None and made.op_type == "Cast" else None
    if source is not None and source.dtype == half:  # it was 16-bit before
        return source
    return _cast(e, x, half)


def wide(e: Emitter, x: ir.Value) -> ir.Value:
    """A 16-bit value as float32."""
    return _cast(e, x, ir.DataType.FLOAT) if x.dtype in HALVES else x


def rounded(e: Emitter, x: ir.Value, half: Half) -> ir.Value:
    """``x`` as float32 that holds 16-bit values."""
    return wide(e, narrow(e, x, half))


def probabilities(e: Emitter, weights: ir.Value, half: Half) -> ir.Value:
    """Weights of experts as the operators take them beside rows of this dtype."""
    return narrow(e, weights, half) if half == ir.DataType.FLOAT16 else weights


def _cast(e: Emitter, x: ir.Value, to: ir.DataType) -> ir.Value:
    value = e.op("Cast", x, to=to)
    value.shape = x.shape
    return value
