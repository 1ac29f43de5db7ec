"""``contrib-moe``: layers of ``ascend.moe`` become ``com.microsoft`` ``MoE``, which runs and does not train.

The kernel makes a softmax of what it takes for a router's scores, chooses by that, and gives ties to the
expert of the higher number. So it is given the logarithms of the weights that the graph has chosen: of them
it makes the graph's own K experts, with weights that add up to 1, and its output is multiplied by what they
added up to. Any router stays as it is that way, and its ties. Experts' weights stay where they are: what the
kernel wants in another order is turned by nodes, once, when a session is made, if they are initializers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from moe_onnx.rewrite.by_ir import by_ir
from moe_onnx.rewrite.contrib_moe.activation import Activation, activation_of
from moe_onnx.rewrite.contrib_moe.dispatched import BY_INDEX, BY_MAP, Dispatch, dispatch_of
from moe_onnx.rewrite.contrib_moe.products import (
    Products,
    check_alike,
    check_rows,
    first_of,
    linear_of,
    stacked_bias,
    stacked_weight,
)
from moe_onnx.rewrite.contrib_moe.weights import check_never_negative
from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, attribute, producer, put, rank, reads, size
from moe_onnx.rewrite.fuse.types import MAIN, Types, inferred, typed
from moe_onnx.rewrite.notes import MARK, ROUNDING, Notes, Pass
from moe_onnx.spec import DOMAIN

NAME, CONTRIB = "contrib-moe", "com.microsoft"
_NEAR = 2000  # values after a dispatch that are looked at
_TINY = float(np.finfo(np.float32).tiny)


@dataclass
class Layer:
    """A layer, from the node that dispatches to the one that combines."""

    dispatch: Dispatch
    combine: ir.Node
    first: list[Products]  # of gates and what they gate together, or one of each
    last: Products
    activation: Activation


def contrib_moe(model: ModelProto, notes: Notes) -> ModelProto:
    """Layers that the CPU kernel can compute become one node each."""
    types = inferred(model)
    return by_ir(lambda inner, said: _rewrite(inner, types, said))(model, notes)


def _rewrite(model: ir.Model, types: Mapping[tuple[str, str, str], Types], notes: Notes) -> None:
    homes: list[tuple[tuple[str, str, str], Any]] = [(MAIN, model.graph)]
    homes += [(key, one.graph) for key, one in model.functions.items() if one.domain != DOMAIN]
    every = [graph for _, home in homes for graph in (home, *home.subgraphs())]
    names = {value.name for graph in every for value in _values(graph) if value.name}
    names |= {node.name for graph in every for node in graph if node.name}
    for key, home in homes:
        inside = [home, *home.subgraphs()]
        with typed([value for graph in inside for value in _values(graph)], types.get(key, {})):
            for graph in inside:
                for node in [n for n in graph if n.domain == DOMAIN and n.op_type in _ENDS]:
                    place = notes.places.get(id(graph), "")
                    try:
                        layer = match(node)
                    except NotThis as why:
                        notes.skipped(why.node, why.reason, place)
                        continue
                    notes.applied(node, replace(graph, layer, names), place)
                    home.opset_imports.setdefault(CONTRIB, 1)
                    model.opset_imports.setdefault(CONTRIB, 1)
                for node in [n for n in graph if not _is_combined(n)]:
                    notes.skipped(node, "its rows are summed by no MoeTokenUnpermuteWithRoutingMap")


def _is_combined(dispatch: ir.Node) -> bool:
    """Whether some node that combines comes after, which then was told of itself."""
    if dispatch.domain != DOMAIN or dispatch.op_type not in (BY_INDEX, BY_MAP):
        return True
    seen, waiting = set(dispatch.outputs), list(dispatch.outputs)
    while waiting:
        for use in waiting.pop().uses():
            if use.node.domain == DOMAIN and use.node.op_type in _ENDS:
                return True
            new = [out for out in use.node.outputs if out not in seen]
            seen.update(new)
            waiting += new if len(seen) < _NEAR else []
    return False


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]


_ENDS = ("MoeTokenUnpermuteWithRoutingMap", "MoeFinalizeRoutingV2")


def match(node: ir.Node) -> Layer:
    """The layer that a node ends.

    Raises:
        NotThis: With the first condition that does not hold.
    """
    if node.op_type != _ENDS[0]:
        raise NotThis(node, "combines rows of which some may be dropped; MoE drops none")
    rows, probs = node.inputs[0], reads(node, 3)
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
        raise NotThis(node, "what a gradient needs of it is read, too")
    if attribute(node, "drop_and_pad", 0) or attribute(node, "restore_shape", ()):
        raise NotThis(node, "combines rows of which some may be dropped; MoE drops none")
    dispatch = dispatch_of(node)
    if probs is None or rank(probs) != 2 or size(probs, 0) == 0:
        raise NotThis(node, "has no probs: experts weigh their rows themselves")
    for value in (dispatch.tokens, rows, probs):
        if value is None or value.dtype != ir.DataType.FLOAT:
            raise NotThis(node, _not_float32(None if value is None else value.dtype))
    check_never_negative(probs, node)
    assert rows is not None
    return Layer(dispatch, node, *_experts(rows, node, dispatch))


def _not_float32(dtype: ir.DataType | None) -> str:
    if dtype == ir.DataType.FLOAT16:
        return "is of FLOAT16: logarithms of its weights, which MoE takes, would lose their digits"
    return f"is of {dtype or 'a type that is not known'}, which onnxruntime's CPU kernel does not take"


def _experts(rows: ir.Value, at: ir.Node, dispatch: Dispatch) -> tuple[list[Products], Products, Activation]:
    """The products of all experts, first ones and the last, and what stands between."""
    joined = producer(rows, "Concat")
    parts = [rows]
    if joined is not None:
        parts = [value for value in joined.inputs if value is not None]
        if len(parts) != dispatch.experts or attribute(joined, "axis", 0):
            raise NotThis(joined, f"does not put the rows of {dispatch.experts} experts behind each other")
    first: list[Products] = []
    last = Products()
    kinds = []
    for part in parts:
        down = linear_of(part)
        if down is None:
            raise NotThis(part.producer() or at, "gives rows that are no product of an expert's last weight")
        kind, ups = activation_of(down.rows, down.node)
        first = first or [Products() for _ in ups]
        if len(ups) != len(first):
            raise NotThis(down.node, "has another number of first products than expert 0")
        for products, up in zip(first, ups, strict=True):
            products.parts.append(up)
        last.parts.append(down)
        kinds.append(kind)
        if kind != kinds[0]:
            raise NotThis(down.node, f"its activation is another one than expert 0's: {kind} and {kinds[0]}")
    head = last.parts[0]
    if not head.is_grouped and len(parts) != dispatch.experts:
        raise NotThis(head.node, f"is one product, and there are {dispatch.experts} experts")
    for one in (*first, last):
        check_alike(one, dispatch)
    for one in first:
        check_rows(one, dispatch)
    if len({one.parts[0].sizes for one in first}) > 1:
        raise NotThis(head.node, "its rows are made of two products of different sizes")
    return first, last, kinds[0]


def replace(graph: ir.Graph, layer: Layer, names: set[str]) -> str:
    """Put the node for a layer; what was done, in words."""
    node, kind = layer.combine, layer.activation
    e = Inserter(node, names, "moe")
    chosen, probs = node.inputs[2], node.inputs[3]
    zero = e.constant(0, np.float32)
    weights = e.op("Where", chosen, probs, zero, name="weights")
    total = e.op("ReduceSum", weights, e.constant([1]), name="total", keepdims=1)
    # Not Log(0): a token that is padding has only such, and its output is 0 times something finite.
    scores = e.op("Log", e.op("Max", weights, e.constant(_TINY, np.float32)), name="scores")
    experts, top_k = layer.dispatch.experts, layer.dispatch.top_k
    turned = kind.halves or len(layer.first) == 2
    up, up_bias = first_of(e, layer.first, experts, halves=kind.halves)
    down, down_bias = stacked_weight(e, layer.last), stacked_bias(e, layer.last)
    attributes: dict[str, Any] = {"k": top_k, "activation_type": kind.name}
    attributes["normalize_routing_weights"] = 1
    if kind.name == "swiglu":
        attributes |= {"swiglu_fusion": 1, "activation_alpha": kind.alpha, "activation_beta": kind.beta}
        if kind.limit is not None:
            attributes["swiglu_limit"] = kind.limit
    inputs = [layer.dispatch.tokens, scores, up, up_bias, down, down_bias]
    y = e.op("MoE", *(inputs if down_bias is not None else inputs[:5]), **attributes)
    e.nodes[-1].domain = CONTRIB
    done = e.op("Mul", y, total, name="output")
    for one in e.nodes:
        one.metadata_props[MARK] = NAME
    put(graph, e, node, [(node.outputs[0], done)], [node])
    how = ", its first weight interleaved" if turned else ""
    return f"{experts} experts, {top_k} a token, {kind.name}: com.microsoft MoE{how}"


CONTRIB_MOE = Pass(
    NAME,
    summary="Layers of ascend.moe nodes become com.microsoft MoE nodes, for inference by onnxruntime.",
    needs="float32, no rows dropped, an activation of onnxruntime's CPU kernel, weights on the combine",
    leaves="the router as it was, its weights' logarithms as the kernel's scores; infinite ones give NaN",
    apply=contrib_moe,
    tolerance=ROUNDING,
)
