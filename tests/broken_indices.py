"""Nodes whose constant indices, or whose modes, the source documents do not allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from broken_documents import (
    Break,
    Model,
    attribute,
    combine,
    combine_grad,
    combine_grad_padded,
    dispatch,
    finalize,
    finalize_grad,
    grad,
    grad_active,
    grad_padded,
    grouped,
    node_of,
    permute,
    permute_grad,
    text,
)
from broken_models import Mutation
from onnx import numpy_helper


def constant(base: Callable[[], Model], **arrays: Any) -> Callable[[], Model]:
    """The same model with inputs that are initializers."""

    def build() -> Model:
        model = base()
        set_constants(model, arrays)
        return model

    return build


def set_constants(model: Model, arrays: dict[str, Any]) -> None:
    kept = [value for value in model.graph.input if value.name not in arrays]
    others = [tensor for tensor in model.graph.initializer if tensor.name not in arrays]
    del model.graph.input[:], model.graph.initializer[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(others)
    for name, values in arrays.items():
        array = np.array(values)
        array = array.astype(np.int32) if array.dtype != np.bool_ else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))


def values(**arrays: Any) -> Break:
    return lambda model: set_constants(model, arrays)


_ROWS = [0, 5, 1, 3, 4, 6, 2, 7]
_INDICES: list[tuple[str, str, Callable[[], Model], Break]] = [
    ("MO503", "row past the last one", constant(grad, index=_ROWS), values(index=[*_ROWS[:7], 8])),
    ("MO503", "-1 without drop pad", constant(grad, index=_ROWS), values(index=[*_ROWS[:7], -1])),
    ("MO503", "row past all slots of the active ones", constant(grad_active, index=_ROWS),
     values(index=[*_ROWS[:7], 8])),
    ("MO503", "-2 in drop pad", constant(grad_padded, index=[2, 4, 0, 3, 1, 5, -1, -1]),
     values(index=[2, 4, 0, 3, 1, 5, -1, -2])),
    ("MO503", "row past the capacities", constant(grad_padded, index=[2, 4, 0, 3, 1, 5, -1, -1]),
     values(index=[2, 4, 0, 3, 1, 6, -1, -1])),
    ("MO503", "expert that is not there", constant(dispatch, experts=[[0, 1]] * 4),
     values(experts=[[0, 3]] * 4)),
    ("MO503", "-1 in the padded combine", constant(combine_grad_padded, index=[0, 4, 1, 2, 3, 5]),
     values(index=[0, 4, 1, 2, 3, -1])),
    ("MO503", "token that is not there", constant(combine_grad_padded, token=[0, 0, 1, 1, 2, 2]),
     values(token=[0, 0, 1, 1, 2, 4])),
    ("MO503", "token of the row form that is not there", constant(
        combine_grad, index=_ROWS, token=[0, 0, 1, 1, 2, 2, 3, 3]),
     values(token=[0, 0, 1, 1, 2, 2, 3, 4])),
    ("MO503", "row that was not combined", constant(combine, index=_ROWS), values(index=[*_ROWS[:7], 8])),
    ("MO503", "row of no gradient", constant(permute_grad, index=_ROWS), values(index=[*_ROWS[:7], -2])),
    ("MO503", "row of no expert", constant(finalize, index=_ROWS), values(index=[*_ROWS[:7], -1])),
    ("MO503", "bias of no expert", constant(finalize, experts=[[0, 1]] * 4), values(experts=[[0, 3]] * 4)),
    ("MO503", "rows of a group below 0", constant(grouped, sizes=[3, 5, 0]), values(sizes=[3, 6, -1])),
    ("MO504", "row of two slots", constant(grad, index=_ROWS), values(index=[*_ROWS[:7], 2])),
    ("MO504", "padded row of two slots", constant(grad_padded, index=[2, 4, 0, 3, 1, 5, -1, -1]),
     values(index=[2, 4, 0, 3, 1, 4, -1, -1])),
    ("MO504", "row written twice", constant(combine_grad, index=_ROWS), values(index=[*_ROWS[:7], 0])),
    ("MO504", "row combined twice", constant(combine, index=_ROWS), values(index=[*_ROWS[:7], 0])),
    ("MO504", "row of two slots of a gradient", constant(finalize_grad, index=_ROWS),
     values(index=[*_ROWS[:7], 0])),
    ("MO505", "rows left over", constant(grouped, sizes=[3, 5, 0]), values(sizes=[3, 4, 0])),
    ("MO505", "more rows than there are", constant(grouped, sizes=[3, 5, 0]), values(sizes=[3, 4, 2])),
]  # fmt: skip

_MAP = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]], np.bool_)
_FULL = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]], np.bool_)
_INDICES += [
    ("MO506", "three experts for two slots", constant(permute, map=_MAP), values(map=_FULL)),
    ("MO506", "three experts combined for two slots", constant(combine, map=_MAP), values(map=_FULL)),
    ("MO506", "more pairs than rows", constant(combine_grad, map=_MAP), values(map=_FULL)),
    ("MO506", "more pairs than rows of a gradient", constant(permute_grad, map=_MAP), values(map=_FULL)),
]

# Dispatch and what takes its indices.
_X = "(float[4, 2] x, int32[4, 2] experts, float[4, 2] scales) => (float[t, h] y)"
_ROUTED = "rows, index = ascend.moe.MoeInitRoutingV2 <expert_num = 3> (x, experts) same = Identity (index)"
_ROUTED_PADDED = (
    "rows, index = ascend.moe.MoeInitRoutingV2 <expert_num = 3, expert_capacity = 2, drop_pad_mode = 1>"
    " (x, experts)"
)
index_pair = text(
    _X,
    f"{_ROUTED} [op] y = ascend.moe.MoeFinalizeRoutingV2 <drop_pad_mode = 2> (rows, same, , , , scales)",
)
index_pair_padded = text(
    _X,
    f"{_ROUTED_PADDED} [op] y = ascend.moe.MoeFinalizeRoutingV2 <drop_pad_mode = 3>"
    " (rows, index, , , , scales)",
)
dispatch_pair = text(
    "(float[4, 2] x, int32[4, 2] experts, float[8, 2] g) => (float[t, h] y)",
    f"{_ROUTED} [op] y = ascend.moe.MoeInitRoutingV2Grad <top_k = 2> (g, same)",
)
dispatch_pair_padded = text(
    "(float[4, 2] x, int32[4, 2] experts, float[any, any2, any3] g) => (float[t, h] y)",
    f"{_ROUTED_PADDED} [op] y = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, drop_pad_mode = 1> (g, index)",
)
_SORTED = (
    "rows, weights, index = ascend.moe.MoeTokenPermuteWithRoutingMap"
    " <num_out_tokens = {n}, drop_and_pad = {padded}> (x, map)"
)
_BY_MAP = "(float[4, 2] x, bool[4, 3] map, float[4, 3] probs, float[4, 2] dy) => (float[t, h] y)"
map_pair = text(
    _BY_MAP,
    _SORTED.format(n=8, padded=0)
    + " [op] y, place, token, w = ascend.moe.MoeTokenUnpermuteWithRoutingMap <drop_and_pad = 0>"
    " (rows, index, map, probs)",
)
map_grad = text(
    _BY_MAP,
    _SORTED.format(n=6, padded=1)
    + " done, place, token = ascend.moe.MoeTokenUnpermuteWithRoutingMap <drop_and_pad = 1>"
    " (rows, index, map, probs)"
    " [op] y = ascend.moe.MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad = 1>"
    " (dy, place, token, map, rows, probs)",
)


def index_of_sort(model: Model) -> None:
    """The padded gradient takes the tokens for the places of their sort."""
    node_of(model).input[1] = "index"


def dropless_gradient(model: Model) -> None:
    node_of(model).attribute[0].i = 0


_MODES: list[tuple[str, str, Callable[[], Model], Break]] = [
    ("MO507", "default mode of the combine", index_pair, attribute(drop_pad_mode=0)),
    ("MO507", "padded by column", index_pair_padded, attribute(drop_pad_mode=1)),
    ("MO508", "combine in drop pad alone", index_pair, attribute(drop_pad_mode=3)),
    ("MO508", "top_k of the gradient", dispatch_pair, attribute(top_k=4)),
    ("MO508", "gradient without drop pad", dispatch_pair_padded, attribute(drop_pad_mode=0)),
    ("MO508", "combine by map in drop pad alone", map_pair, attribute(drop_and_pad=1)),
    ("MO508", "gradient by map without drop pad", map_grad, dropless_gradient),
    ("MO508", "tokens for places", map_grad, index_of_sort),
]  # fmt: skip

# A wrong mode may also be a wrong rank.
MUTATIONS = [
    Mutation(code, name, base, break_it, also=("MO315",) if code == "MO508" else ())
    for code, name, base, break_it in (*_INDICES, *_MODES)
]
