"""The MoE layer: router, dispatch, experts, combine, each in a file of its own."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.build.dispatch import dispatch
from moe_onnx.build.experts import experts, shared_expert
from moe_onnx.build.layers import Parameters
from moe_onnx.build.moe_options import MoeOptions
from moe_onnx.build.router import Routing, route


def moe_layer(
    e: Emitter,
    x: ir.Value,
    params: Parameters,
    prefix: str,
    mask: ir.Value | None,
    noise: ir.Value | None,
    config: MoeOptions,
    fused: bool = False,
) -> tuple[ir.Value, Routing]:
    """``sum over the K experts of weight * expert(x)`` for each token, and the shared expert.

    ``x`` and the result are float32. A pair of token and expert that the dispatch drops adds 0, and has no
    gradient. ``fused``: the activation is one operator where there is one.
    """
    with e.scope("router"):
        routing = route(e, x, params, prefix, mask, noise, config)
    dispatched = dispatch(e, x, routing, mask, config)
    with e.scope("experts"):
        rows = experts(e, dispatched, params, prefix, config, fused)
    y = dispatched.combine(rows)
    with e.scope("shared_expert"):
        shared = shared_expert(e, x, params, prefix, config)
    y = y if shared is None else e.op("Add", y, shared)
    return y, replace(routing, dropped=dispatched.dropped)
