"""Nodes that break a rule of the source documents on inputs, dtypes, attributes, sizes and limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from broken_models import Mutation, parse

IMPORT = ', "ascend.moe" : 1'
Model = onnx.ModelProto
Break = Callable[[Any], Any]


def text(signature: str, node: str, constants: str = "") -> Callable[[], Model]:
    """A model of one node or a few, from ONNX text."""
    return lambda: parse(f"g {signature} {constants} {{ {node} }}", imports=IMPORT)


# Four tokens, two experts a token, three experts, H = 2: eight rows; capacity 2 has six.
dispatch = text(
    "(float[4, 2] x, int32[4, 2] experts) => (float[r, h] rows, int32[n] index)",
    "[op] rows, index = ascend.moe.MoeInitRoutingV2 <expert_num = 3, expert_tokens_count_or_cumsum_flag = 0>"
    " (x, experts)",
)
dispatch_padded = text(
    "(float[4, 2] x, int32[4, 2] experts) => (float[e, c, h] rows, int32[n] index)",
    "[op] rows, index = ascend.moe.MoeInitRoutingV2 <expert_num = 3, expert_capacity = 2, drop_pad_mode = 1>"
    " (x, experts)",
)
grad = text(
    "(float[8, 2] g, int32[8] index) => (float[t, h] dx)",
    "[op] dx = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, drop_pad_mode = 0, active_num = 0> (g, index)",
)
grad_active = text(
    "(float[5, 2] g, int32[8] index) => (float[t, h] dx)",
    "[op] dx = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, active_num = 5> (g, index)",
)
grad_padded = text(
    "(float[3, 2, 2] g, int32[8] index) => (float[t, h] dx)",
    "[op] dx = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, drop_pad_mode = 1> (g, index)",
)
permute = text(
    "(float[4, 2] x, bool[4, 3] map, float[4, 3] probs)"
    " => (float[n, h] rows, float[n] weights, int32[n] index)",
    "[op] rows, weights, index = ascend.moe.MoeTokenPermuteWithRoutingMap <num_out_tokens = 8>"
    " (x, map, probs)",
)
permute_padded = text(
    "(float[4, 2] x, bool[4, 3] map) => (float[n, h] rows, float[m] weights, int32[n] index)",
    "[op] rows, weights, index = ascend.moe.MoeTokenPermuteWithRoutingMap"
    " <num_out_tokens = 6, drop_and_pad = 1> (x, map)",
)
permute_grad = text(
    "(float[8, 2] g, float[8] gp, int32[8] index, bool[4, 3] map) => (float[t, h] dx, float[t, e] dp)",
    "[op] dx, dp = ascend.moe.MoeTokenPermuteWithRoutingMapGrad <num_experts = 3, tokens_num = 4>"
    " (g, gp, index, map)",
)
combine = text(
    "(float[8, 2] rows, int32[8] index, bool[4, 3] map, float[4, 3] probs) => (float[t, h] y)",
    "[op] y, place, token, weights = ascend.moe.MoeTokenUnpermuteWithRoutingMap <drop_and_pad = 0>"
    " (rows, index, map, probs)",
)
_DOUBLE = (
    "(float[4, 2] dy, int32[{n}] index, int32[{n}] token, bool[4, 3] map, float[{n}, 2] rows, "
    "float[4, 3] probs)"
)
_GRADS = " => (float[n, h] dr, float[t, e] dp)"
combine_grad = text(
    _DOUBLE.format(n=8) + _GRADS,
    "[op] dr, dp = ascend.moe.MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad = 0>"
    " (dy, index, token, map, rows, probs)",
)
combine_grad_padded = text(
    _DOUBLE.format(n=6) + _GRADS,
    "[op] dr, dp = ascend.moe.MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad = 1, restore_shape = [4, 2]>"
    " (dy, index, token, map, rows, probs)",
)
_SLOTS = (
    "float[{rows}, 2] rows, int32[8] index, float[4, 2] x1, float[4, 2] x2, float[3, 2] bias, "
    "float[4, 2] scales, int32[4, 2] experts"
)
finalize = text(
    f"({_SLOTS.format(rows=8)}) => (float[t, h] y)",
    "[op] y = ascend.moe.MoeFinalizeRoutingV2 <drop_pad_mode = 2>"
    " (rows, index, x1, x2, bias, scales, experts)",
)
finalize_padded = text(
    f"({_SLOTS.format(rows='3, 2')}) => (float[t, h] y)",
    "[op] y = ascend.moe.MoeFinalizeRoutingV2 <drop_pad_mode = 3>"
    " (rows, index, x1, x2, bias, scales, experts)",
)
finalize_grad = text(
    "(float[4, 2] dy, int32[8] index, float[8, 2] rows, float[4, 2] scales, int32[4, 2] experts, "
    "float[3, 2] bias) => (float[n, h] dr, float[t, k] ds)",
    "[op] dr, ds = ascend.moe.MoeFinalizeRoutingV2Grad <drop_pad_mode = 0, active_num = 0, expert_num = 0,"
    " expert_capacity = 0> (dy, index, rows, scales, experts, bias)",
)
grouped = text(
    "(float[8, 2] x, float[3, 2, 5] weight, int32[3] sizes) => (float[n, f] y)",
    "[op] y = ascend.moe.MoeGroupedMatmul <transpose_weight = 0> (x, weight, sizes)",
)


def node_of(model: Model) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == "op")


def without(name: str) -> Break:
    """The node takes nothing for an input of the graph."""

    def break_it(model: Model) -> None:
        inputs = node_of(model).input
        inputs[list(inputs).index(name)] = ""

    return break_it


def dtype(elem: int, *names: str) -> Break:
    """Inputs and outputs of the graph get another element type."""

    def break_it(model: Model) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if value.name in names:
                value.type.tensor_type.elem_type = elem

    return break_it


def shape(**shapes: tuple[int, ...]) -> Break:
    """Inputs of the graph get other sizes."""

    def break_it(model: Model) -> None:
        for value in model.graph.input:
            if value.name in shapes:
                sizes = value.type.tensor_type.shape
                sizes.Clear()
                for size in shapes[value.name]:
                    sizes.dim.add().dim_value = size

    return break_it


def attribute(**given: Any) -> Break:
    def break_it(model: Model) -> None:
        node = node_of(model)
        kept = [a for a in node.attribute if a.name not in given]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in given.items())

    return break_it


def both(*breaks: Break) -> Break:
    def break_it(model: Model) -> None:
        for one in breaks:
            one(model)

    return break_it


T = onnx.TensorProto
_RULES: list[tuple[str, str, Callable[[], Model], Break]] = [
    # 161001, and 561002 for companions
    ("MO305", "combine gradient without its index", combine_grad, without("index")),
    ("MO305", "dispatch gradient without rows", grad, without("g")),
    ("MO313", "probs without the map", combine_grad, without("map")),
    ("MO313", "probs without the rows", combine_grad, without("rows")),
    ("MO313", "combine with probs without the map", combine, without("map")),
    ("MO313", "bias without experts", finalize, without("experts")),
    ("MO313", "x2 without x1", finalize, without("x1")),
    ("MO313", "scales without rows", finalize_grad, without("rows")),
    ("MO313", "weights of rows without the map", permute_grad, without("map")),
    # 161002, and 561002 for mixes
    ("MO314", "int64 row index", grad, dtype(T.INT64, "index")),
    ("MO314", "int64 rows", grad, dtype(T.INT64, "g")),
    ("MO314", "float map", combine_grad, dtype(T.FLOAT, "map")),
    ("MO314", "int64 token ids", combine_grad, dtype(T.INT64, "token")),
    ("MO314", "probs of another dtype", combine_grad, dtype(T.FLOAT16, "probs")),
    ("MO314", "rows of another dtype", combine_grad, dtype(T.BFLOAT16, "rows")),
    ("MO314", "int64 experts", dispatch, dtype(T.INT64, "experts")),
    ("MO314", "bias of another dtype", finalize, dtype(T.FLOAT16, "bias")),
    ("MO314", "weight of another dtype", grouped, dtype(T.FLOAT16, "weight")),
    # 561002: attributes
    ("MO312", "drop_pad_mode 2", grad, attribute(drop_pad_mode=2)),
    ("MO312", "drop_pad_mode -1", grad, attribute(drop_pad_mode=-1)),
    ("MO312", "top_k 0", grad, attribute(top_k=0)),
    ("MO312", "active_num -1", grad, attribute(active_num=-1)),
    ("MO312", "active_num -1 in drop pad", grad_padded, attribute(active_num=-1)),
    ("MO312", "counts flag 3", dispatch, attribute(expert_tokens_count_or_cumsum_flag=3)),
    ("MO312", "counts without experts", dispatch, attribute(
        expert_num=0, expert_tokens_count_or_cumsum_flag=1)),
    ("MO312", "negative capacity", dispatch_padded, attribute(expert_capacity=-1)),
    ("MO312", "drop pad without capacity", dispatch_padded, attribute(expert_capacity=0)),
    ("MO312", "drop_and_pad 2", combine_grad, attribute(drop_and_pad=2)),
    ("MO312", "negative num_out_tokens", permute, attribute(num_out_tokens=-1)),
    ("MO312", "drop_pad_mode 4", finalize, attribute(drop_pad_mode=4)),
    ("MO312", "transpose_weight 2", grouped, attribute(transpose_weight=2)),
    # 561002: ranks and sizes
    ("MO315", "rows of rank 4", grad, shape(g=(8, 2, 1, 1))),
    ("MO315", "rows of rank 3 without drop pad", grad, shape(g=(4, 2, 2))),
    ("MO315", "rows of rank 2 in drop pad", grad_padded, shape(g=(6, 2))),
    ("MO315", "index of rank 2", grad, shape(index=(4, 2))),
    ("MO315", "rows and index of two lengths", grad, shape(g=(7, 2))),
    ("MO315", "rows are not active_num", grad_active, attribute(active_num=4)),
    ("MO315", "top_k does not divide", grad, attribute(top_k=3)),
    ("MO315", "index and token ids of two lengths", combine_grad, shape(token=(7,))),
    ("MO315", "probs of too few tokens", combine_grad, shape(probs=(3, 3))),
    ("MO315", "probs of too many experts", combine_grad, shape(probs=(4, 4))),
    ("MO315", "probs of rank 1", combine_grad, shape(probs=(12,))),
    ("MO315", "map of rank 1", combine_grad, shape(map=(12,))),
    ("MO315", "rows of another hidden size", combine_grad, shape(rows=(8, 3))),
    ("MO315", "tokens do not divide the slots", combine_grad, shape(dy=(3, 2), map=(3, 3), probs=(3, 3))),
    ("MO315", "experts do not divide the slots", combine_grad_padded, shape(map=(4, 4), probs=(4, 4))),
    ("MO315", "restore_shape of other tokens", combine_grad_padded, attribute(restore_shape=[3, 2])),
    ("MO315", "experts of other tokens", dispatch, shape(experts=(3, 2))),
    ("MO315", "scales of other slots", finalize, shape(scales=(4, 1), experts=(4, 1))),
    ("MO315", "map of other tokens", permute_grad, shape(map=(5, 3))),
    ("MO315", "weight of another width", grouped, shape(weight=(3, 3, 5))),
    # 561002: limits
    ("MO501", "more experts a token than experts", combine_grad, shape(map=(4, 1), probs=(4, 1))),
    ("MO501", "more than 512 experts a token", combine_grad, shape(
        index=(2052,), token=(2052,), rows=(2052, 2), map=(4, 600), probs=(4, 600))),
    ("MO501", "capacity above the tokens", combine_grad_padded, both(
        shape(dy=(1, 2), map=(1, 3), probs=(1, 3)), attribute(restore_shape=[1, 2]))),
    ("MO501", "capacity above the tokens in the dispatch", dispatch_padded, attribute(expert_capacity=5)),
    ("MO501", "more rows than pairs", permute, attribute(num_out_tokens=16)),
    ("MO501", "more than 512 in the combine", combine, shape(
        index=(2052,), rows=(2052, 2), map=(4, 600), probs=(4, 600))),
    ("MO502", "2^24 tokens", permute_padded, shape(x=(1 << 24, 2), map=(1 << 24, 3))),
    ("MO502", "2^24 experts", permute, shape(map=(4, 1 << 24), probs=(4, 1 << 24))),
]  # fmt: skip

MUTATIONS = [Mutation(code, name, base, break_it) for code, name, base, break_it in _RULES]
