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
        d = g.op("Pad", d, g.op("Concat", g.constant([0]), missing, axis=0), None, g.constant([0]))
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


@register_gradient("MoeGroupedMatmul", DOMAIN)
def grouped_matmul(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The product with the other orientation of the weights, and MoeGroupedMatmulWeightGrad."""
    x, weight, group_sizes = node.inputs
    transpose = attribute(node, "transpose_weight", 0)
    dx = dw = None
    if g.needs(x):
        other = 1 - transpose
        dx = g.op("MoeGroupedMatmul", d, weight, group_sizes, domain=DOMAIN, transpose_weight=other)
    if g.needs(weight):
        name = "MoeGroupedMatmulWeightGrad"
        dw = g.op(name, x, d, group_sizes, domain=DOMAIN, transpose_weight=transpose)
    return [dx, dw, None]
