"""Rules of the ``ascend.moe`` operators, in the six-input form that every route takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, sizes
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError
from moe_onnx.spec import DOMAIN

Grads = list[ir.Value | None]


@register_gradient("MoeInitRoutingV2", DOMAIN)
def init_routing(g: Gradients, node: ir.Node, d: ir.Value, *_: None) -> Grads:
    """Each token gets the sum of the gradients of its rows: MoeInitRoutingV2Grad."""
    expert_idx = node.inputs[1]
    assert expert_idx is not None
    dims = sizes(expert_idx)
    top_k = dims[1] if dims is not None and len(dims) == 2 else None
    if not isinstance(top_k, int):
        raise GradientError(
            f"the second size of '{expert_idx.name}', top_k, must be known when the graph is built, as "
            "MoeInitRoutingV2Grad has it as an attribute."
        )
    mode, active = attribute(node, "drop_pad_mode", 0), attribute(node, "active_num", 0)
    tokens = dims[0] if dims is not None else None
    if mode == 0 and active and isinstance(tokens, int):
        active = active if active < tokens * top_k else 0
    elif mode == 0 and active:
        # The forward keeps as many rows as there are, its gradient takes active_num in any case.
        missing = g.op("Max", g.sub(g.constant([active]), g.op("Shape", d, start=0, end=1)), g.constant([0]))
        # Of all axes: onnxruntime's transpose optimiser takes the pads of some for those of all.
        pads = g.op("Concat", g.constant([0, 0]), missing, g.constant([0]), axis=0)
        d = g.op("Pad", d, pads)
    name, slots = "MoeInitRoutingV2Grad", node.outputs[1]
    more: dict[str, Any] = {"domain": DOMAIN, "top_k": top_k, "drop_pad_mode": mode, "active_num": active}
    return [g.op(name, d, slots, **more), None]


@register_gradient("MoeTokenPermuteWithRoutingMap", DOMAIN)
def permute(g: Gradients, node: ir.Node, d: ir.Value | None, d_probs: ir.Value | None, _: None) -> Grads:
    """Tokens and probabilities by MoeTokenPermuteWithRoutingMapGrad, sizes from the map."""
    tokens, routing_map, probs = [*node.inputs, None][:3]
    assert tokens is not None
    needs_probs = probs is not None and g.needs(probs) and sizes(probs) != (0, 0)
    with_probs = needs_probs and d_probs is not None
    if d is None:  # the loss uses the probabilities alone
        assert d_probs is not None
        d = g.zeros_like(node.outputs[0], d_probs)
    tokens_grad, probs_grad = g.ops(
        "MoeTokenPermuteWithRoutingMapGrad",
        d,
        d_probs if with_probs else g.constant(np.empty((0, 0)), tokens.dtype),
        node.outputs[2],
        routing_map,
        domain=DOMAIN,
        outputs=2,
        num_experts=0,
        tokens_num=0,
        drop_and_pad=attribute(node, "drop_and_pad", 0),
    )
    if needs_probs and not with_probs and probs is not None:  # the loss uses the tokens alone
        probs_grad = g.zeros_like(probs, d)
    return [tokens_grad, None, probs_grad if needs_probs else None][: len(node.inputs)]


@register_gradient("MoeTokenUnpermuteWithRoutingMap", DOMAIN)
def unpermute(g: Gradients, node: ir.Node, d: ir.Value | None, *others: ir.Value | None) -> Grads:
    """Rows and probabilities by MoeTokenUnpermuteWithRoutingMapGrad, in the slot form."""
    if d is None or any(other is not None for other in others):
        raise GradientError("only 'unpermuted_tokens' has a gradient; the loss uses 'permute_probs'.")
    rows, _, routing_map, probs = [*node.inputs, None, None][:4]
    assert rows is not None
    absent = g.constant(np.empty((0, 0)), rows.dtype)
    with_probs = probs is not None and sizes(probs) != (0, 0)
    if routing_map is None and with_probs and probs is not None:
        # Only the padded form goes without a map, and its gradient wants one but for the sizes.
        routing_map = g.op("Expand", g.constant(True), g.op("Shape", probs))
    rows_grad, probs_grad = g.ops(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        d,
        node.outputs[1],
        node.outputs[2],
        routing_map if routing_map is not None else g.constant(np.empty((0, 0)), bool),
        rows if with_probs else absent,
        probs if with_probs else absent,
        domain=DOMAIN,
        outputs=2,
        drop_and_pad=attribute(node, "drop_and_pad", 0),
        restore_shape=attribute(node, "restore_shape") or None,
    )
    return [rows_grad, None, None, probs_grad if with_probs else None][: len(node.inputs)]


@register_gradient("MoeFinalizeRoutingV2", DOMAIN)
def finalize_routing(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """Rows and scales by MoeFinalizeRoutingV2Grad, biases by a sum over their slots."""
    expanded, index, _, _, bias, scales, expert_idx = [*node.inputs, *[None] * 5][:7]
    assert expanded is not None and index is not None
    mode = attribute(node, "drop_pad_mode", 0)
    padded = mode % 2 == 1
    scales = None if scales is not None and sizes(scales) == (0, 0) else scales
    if scales is not None and mode < 2:
        # The gradient takes slots by row. Without scales there is one a token, the same either way.
        columns = g.op("Concat", g.size(scales, 1), g.size(scales, 0), axis=0)
        by_slot = g.op("Transpose", g.op("Reshape", index, columns, allowzero=1), perm=[1, 0])
        index = g.op("Reshape", by_slot, g.op("Shape", index), allowzero=1)
    rows_grad = scales_grad = bias_grad = None
    if g.needs(expanded) or g.needs(scales):
        shape = sizes(expanded)
        known = padded and shape is not None and len(shape) == 3
        dims = [dim if isinstance(dim, int) else 0 for dim in shape[:2]] if known and shape else [0, 0]
        # Without scales only the sizes of the rows count, and only where the attributes do not say them.
        absent = scales is None and (not padded or all(dims))
        with_bias = scales is not None and bias is not None and sizes(bias) != (0, 0)
        empty = g.constant(np.empty((0, 0)), d.dtype)
        rows_grad, scales_grad = g.ops(
            "MoeFinalizeRoutingV2Grad",
            d,
            index,
            empty if absent else expanded,
            empty if scales is None else scales,
            expert_idx if with_bias else g.constant(np.empty((0, 0)), np.int32),
            bias if with_bias else empty,
            domain=DOMAIN,
            outputs=2,
            drop_pad_mode=int(padded),
            active_num=0,
            expert_num=dims[0],
            expert_capacity=dims[1],
        )
    if bias is not None and expert_idx is not None and g.needs(bias):
        bias_grad = _bias_grad(g, d, index if padded else None, bias, scales, expert_idx)
    return [rows_grad, None, d, d, bias_grad, scales_grad, None][: len(node.inputs)]


def _bias_grad(
    g: Gradients,
    d: ir.Value,
    dropped: ir.Value | None,
    bias: ir.Value,
    scales: ir.Value | None,
    expert_idx: ir.Value,
) -> ir.Value:
    """Each bias gets the sum of its slots' d * scale. Slots that ``dropped`` has -1 for go nowhere."""
    parts = d if scales is None else g.op("Unsqueeze", d, g.constant([1]))
    narrow = bias.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if narrow:  # sums are made in float32
        parts = g.op("Cast", parts, to=ir.DataType.FLOAT)
    if scales is not None:
        wide = g.op("Cast", scales, to=ir.DataType.FLOAT) if narrow else scales
        parts = g.mul(parts, g.op("Unsqueeze", wide, g.constant([2])))
    # T * K rows; -1 cannot stand for them where the hidden size is 0.
    slot_expert = g.op("Cast", g.op("Reshape", expert_idx, g.constant([-1])), to=ir.DataType.INT64)
    shape = g.op("Concat", g.op("Shape", slot_expert), g.op("Shape", bias, start=1, end=2), axis=0)
    parts = g.op("Reshape", parts, shape, allowzero=1)
    zeros = g.zeros_like(g.op("Cast", bias, to=ir.DataType.FLOAT) if narrow else bias, parts)
    if dropped is not None:
        # They are added to a row behind the last, which is cut off: chosen, not multiplied by 0.
        end = g.op("Shape", bias, start=0, end=1)
        slot_expert = g.op("Where", g.op("Less", dropped, g.constant(0, np.int32)), end, slot_expert)
        zeros = g.op("Pad", zeros, g.constant([0, 0, 1, 0]))
    where = g.op("Expand", g.op("Unsqueeze", slot_expert, g.constant([1])), shape)
    total = g.op("ScatterElements", zeros, where, parts, axis=0, reduction="add")
    if dropped is not None:
        total = g.op("Slice", total, g.constant([0]), end, g.constant([0]))
    return g.cast(total, bias) if narrow else total


@register_gradient("MoeGroupedMatmul", DOMAIN)
def grouped_matmul(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The product with the other orientation of the weights, and MoeGroupedMatmulWeightGrad."""
    x, weight, group_sizes = node.inputs
    assert x is not None
    transpose = attribute(node, "transpose_weight", 0)
    dx = dw = None
    if g.needs(x):
        other = 1 - transpose
        dx = g.op("MoeGroupedMatmul", d, weight, group_sizes, domain=DOMAIN, transpose_weight=other)
    if g.needs(weight):
        name = "MoeGroupedMatmulWeightGrad"
        # Of 16-bit factors in float32: this may be the gradient of a float32 parameter.
        dw = g.op(name, g.wide(x), g.wide(d), group_sizes, domain=DOMAIN, transpose_weight=transpose)
    return [dx, dw, None]


@register_gradient("MoeSquareSum", DOMAIN)
def square_sum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """``2 d x``."""
    (x,) = node.inputs
    assert x is not None
    return [g.mul(g.mul(d, g.like(2.0, x)), x)]


@register_gradient("MoeSwiGlu", DOMAIN)
def swi_glu(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """MoeSwiGluGrad."""
    return [g.op("MoeSwiGluGrad", d, node.inputs[0], domain=DOMAIN)]
