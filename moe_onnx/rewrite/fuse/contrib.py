"""``com.microsoft`` ``MoE``, as onnxruntime's CPU kernel computes it -> a router and ``ascend.moe`` nodes.

The kernel takes logits, makes probabilities of all of them, and gives ties to the expert of the higher
number, unlike ``TopK``. Its Gelu is the one by Tanh. All this was found by running it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, attribute, put, rank, reads, size
from moe_onnx.rewrite.fuse.pairs import Pairs, combine, dispatch, expert_of_row

DOMAIN = "com.microsoft"
_PLAIN = ("relu", "gelu", "silu", "identity")


@dataclass
class Layer:
    """A node of this kind, and its sizes."""

    node: ir.Node
    experts: int
    hidden: int
    inner: int
    top_k: int
    activation: str


def nodes(graph: ir.Graph) -> list[ir.Node]:
    """Those of a graph."""
    return [node for node in graph if node.domain == DOMAIN and node.op_type == "MoE"]


def match(node: ir.Node) -> Layer:
    """What a node computes.

    Raises:
        NotThis: If that is not what the CPU kernel has been seen to compute.
    """
    x, up, down = reads(node, 0), reads(node, 2), reads(node, 4)
    kind = attribute(node, "activation_type", "relu")
    if any(attr.is_ref() for attr in node.attributes.values()):
        raise NotThis(node, "attributes are given by the callers of a function")
    if x is None or x.dtype != ir.DataType.FLOAT:
        raise NotThis(node, f"the CPU kernel is of float32, the input is of {None if x is None else x.dtype}")
    if len(node.inputs) > 6 and any(value is not None for value in node.inputs[6:]):
        raise NotThis(node, "the CPU kernel has no third product (fc3_experts_weights)")
    if attribute(node, "use_sparse_mixer", 0):
        raise NotThis(node, "use_sparse_mixer=1 is no rule of the CPU kernel")
    if kind not in (*_PLAIN, "swiglu"):
        raise NotThis(node, f"activation_type={kind!r} is none of the CPU kernel's")
    if kind == "swiglu" and attribute(node, "swiglu_fusion", 0) != 1:
        raise NotThis(node, "the CPU kernel has only the interleaved SwiGLU (swiglu_fusion=1)")
    if attribute(node, "swiglu_limit_after_activation", 0):
        raise NotThis(node, "swiglu_limit_after_activation=1 is no rule of the CPU kernel")
    if kind == "swiglu" and not attribute(node, "swiglu_limit", 0.0) >= 0:
        raise NotThis(node, "the CPU kernel ends the process for a negative swiglu_limit")
    experts, hidden, inner = size(up, 0), size(up, 2), size(down, 2)
    if experts is None or hidden is None or inner is None:
        raise NotThis(node, "the shapes of its weights are not known")
    width = inner * (2 if kind == "swiglu" else 1)
    if size(up, 1) != width or size(down, 0) != experts or size(down, 1) != hidden:
        raise NotThis(
            node, f"its weights are not [{experts}, {width}, {hidden}] and [{experts}, {hidden}, {inner}]"
        )
    top_k = attribute(node, "k", 1)
    if not 1 <= top_k <= experts:
        raise NotThis(node, f"k = {top_k} is not in 1 .. {experts}")
    return Layer(node, experts, hidden, inner, top_k, kind)


def rewrite(graph: ir.Graph, node: ir.Node, names: set[str]) -> str:
    """Put the nodes for a layer; what was done, in words.

    Raises:
        NotThis: With the first condition that does not hold.
    """
    layer = match(node)
    e = Inserter(node, names)
    x, logits, up, up_bias, down, down_bias = [*node.inputs, *[None] * 6][:6]
    assert x is not None
    is_matrix = rank(x) == 2
    tokens = x if is_matrix else e.op("Reshape", x, e.constant([-1, layer.hidden]))
    probs = e.op("Softmax", logits, axis=-1)
    ids, weights = _choose(e, probs, layer)
    if attribute(node, "normalize_routing_weights", 0) == 1:  # the kernel does not take 2 for yes
        weights = e.op("Div", weights, e.op("ReduceSum", weights, e.constant([1]), keepdims=1))
    ids.dtype, weights.dtype = ir.DataType.INT64, ir.DataType.FLOAT
    for value in (ids, weights):
        value.shape = ir.Shape([None, layer.top_k])
    pairs = Pairs(ids, weights, layer.top_k, layer.experts, tokens)
    rows, index, counts, chosen = dispatch(e, pairs)
    expert = expert_of_row(e, index, chosen) if up_bias is not None or down_bias is not None else None

    def product(what: str, given: ir.Value, weight: ir.Value | None, bias: ir.Value | None) -> ir.Value:
        y = e.op("MoeGroupedMatmul", given, weight, counts, name=what, transpose_weight=1)
        return y if bias is None else e.op("Add", y, e.op("Gather", bias, expert, name="bias", axis=0))

    hidden = _activate(e, product("up", rows, up, up_bias), layer)
    y = combine(e, pairs, product("down", hidden, down, down_bias), index)
    if not is_matrix:
        y = e.op("Reshape", y, e.op("Shape", x), allowzero=1)
    put(graph, e, node, [(node.outputs[0], y)], [node])
    return (
        f"{layer.experts} experts, {layer.top_k} a token, {layer.activation}: a router of ONNX operators, "
        "MoeInitRoutingV2, 2 MoeGroupedMatmul, MoeTokenUnpermuteWithRoutingMap"
    )


def _choose(e: Inserter, probs: ir.Value, layer: Layer) -> tuple[ir.Value, ir.Value]:
    """The K best experts; of equal ones the last, so that TopK is asked from behind."""
    back = e.constant(np.arange(layer.experts)[::-1])
    turned = e.op("Gather", probs, back, name="from_behind", axis=1)
    best, at = e.ops(
        "TopK", turned, e.constant([layer.top_k]), outputs=2, name="choice", axis=-1, largest=1, sorted=1
    )
    return e.op("Sub", e.constant(layer.experts - 1), at), best


def _activate(e: Inserter, raised: ir.Value, layer: Layer) -> ir.Value:
    kind, node = layer.activation, layer.node
    if kind == "identity":
        return raised
    if kind == "silu":
        return e.op("Mul", raised, e.op("Sigmoid", raised))
    if kind == "gelu":
        return e.op("Gelu", raised, approximate="tanh")
    if kind == "relu":
        return e.op("Relu", raised)

    def number(value: float) -> ir.Value:
        return e.constant(value, np.float32)

    both = e.op("Reshape", raised, e.constant([-1, layer.inner, 2]))
    gate = e.op("Gather", both, e.constant(0), name="gate", axis=2)
    linear = e.op("Gather", both, e.constant(1), name="linear", axis=2)
    limit = attribute(node, "swiglu_limit", None)
    if limit is not None:
        # Not Min, whose gradient is shared at a tie.
        gate = e.op("Clip", gate, None, number(limit))
        linear = e.op("Clip", linear, number(-limit), number(limit))
    scaled = e.op("Mul", gate, number(attribute(node, "activation_alpha", 1.0)))
    swish = e.op("Mul", gate, e.op("Sigmoid", scaled))
    return e.op("Mul", swish, e.op("Add", linear, number(attribute(node, "activation_beta", 0.0))))
