"""Calls of every operator in every mode, with inputs as the forward operators make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_onnx.operators.moe_init_routing_v2 import moe_init_routing_v2
from moe_onnx.operators.moe_token_permute_with_routing_map import moe_token_permute_with_routing_map
from moe_onnx.operators.moe_token_unpermute_with_routing_map import moe_token_unpermute_with_routing_map
from moe_onnx.validation.device.golden_data import Array, Making


@dataclass(frozen=True)
class Call:
    """A call of an operator: inputs by name, absent ones left out, and attributes."""

    inputs: dict[str, Array]
    attributes: dict[str, Any]


def _chosen(m: Making, *, fewer: bool = False) -> Array:
    """A map ``[T, E]``; ``fewer``: every third token has an expert less, the next one none."""
    ids, chosen = m.draw.experts(m.sizes), np.zeros((m.sizes.tokens, m.sizes.experts), np.bool_)
    np.put_along_axis(chosen, ids, True, axis=1)
    if fewer:
        chosen[np.arange(0, m.sizes.tokens, 3), ids[::3, -1]] = False
        chosen[1::3] = False
    return chosen


def _row_index(m: Making, ids: Array, *, padded: bool) -> Array:
    rows = np.zeros((len(ids), 1), np.float32)
    index: Array
    if padded:
        experts, capacity = m.sizes.experts, m.sizes.capacity
        index = moe_init_routing_v2(rows, ids, drop_pad_mode=1, expert_num=experts, expert_capacity=capacity)[
            1
        ]
    else:
        index = moe_init_routing_v2(rows, ids)[1]
    return index


def _dispatch(m: Making, mode: str) -> Call:
    s, attributes = m.sizes, {"expert_num": m.sizes.experts}
    if mode.startswith("drop_pad"):
        attributes |= {"drop_pad_mode": 1, "expert_capacity": s.capacity}
        attributes |= {"expert_tokens_before_capacity_flag": int(mode.endswith("before_capacity"))}
    else:
        flags = {"dropless_cumsum": 1, "dropless_count": 2}
        attributes |= {"active_num": s.active if mode == "active" else 0}
        attributes |= {"expert_tokens_count_or_cumsum_flag": flags.get(mode, 0)}
    return Call({"x": m.floats(s.tokens, s.hidden), "expert_idx": m.draw.experts(s)}, attributes)


def _dispatch_grad(m: Making, mode: str) -> Call:
    s, padded = m.sizes, mode == "drop_pad"
    index = _row_index(m, m.draw.experts(s), padded=padded)
    rows = (s.experts, s.capacity) if padded else (s.active if mode == "active" else len(index),)
    attributes = {"top_k": s.top_k, "drop_pad_mode": int(padded)}
    attributes["active_num"] = s.active if mode == "active" else 0
    return Call({"grad_expanded_x": m.floats(*rows, s.hidden), "expanded_row_idx": index}, attributes)


def _num_out_tokens(m: Making, mode: str) -> int:
    return m.sizes.experts * m.sizes.capacity if _is_padded(mode) else m.sizes.tokens * m.sizes.top_k


def _is_padded(mode: str) -> bool:
    return mode.startswith("drop_pad")


def _permute(m: Making, mode: str) -> Call:
    s = m.sizes
    inputs = {
        "tokens": m.floats(s.tokens, s.hidden),
        "routing_map": _chosen(m, fewer=mode == "fewer_experts"),
    }
    if not mode.endswith("no_probs"):
        inputs["probs"] = m.weighted(s.tokens, s.experts)
    attributes = {"num_out_tokens": _num_out_tokens(m, mode), "drop_and_pad": int(_is_padded(mode))}
    return Call(inputs, attributes)


def _permuted(m: Making, mode: str) -> tuple[Array, Array]:
    """A map, and the indices that the dispatch makes of it."""
    chosen = _chosen(m, fewer=mode == "fewer_experts")
    index: Array = moe_token_permute_with_routing_map(
        np.zeros((m.sizes.tokens, 1), np.float32),
        chosen,
        num_out_tokens=_num_out_tokens(m, mode),
        drop_and_pad=_is_padded(mode),
    )[2]
    return chosen, index


def _permute_grad(m: Making, mode: str) -> Call:
    chosen, index = _permuted(m, mode)
    inputs = {"permuted_token_output_grad": m.floats(len(index), m.sizes.hidden)}
    if not mode.endswith("no_probs"):
        inputs["permuted_probs_output_grad"] = m.weighted(len(index))
    inputs |= {"sorted_indices": index, "routing_map": chosen}
    attributes = {"num_experts": m.sizes.experts, "tokens_num": m.sizes.tokens}
    return Call(inputs, {**attributes, "drop_and_pad": int(_is_padded(mode))})


def _unpermute(m: Making, mode: str) -> Call:
    chosen, index = _permuted(m, mode)
    if mode == "active":  # rows that were dropped are zeros, and their slots name no row
        index = np.where(index < m.sizes.active, index, -1).astype(np.int32)
    inputs = {"permuted_tokens": m.floats(len(index), m.sizes.hidden), "sorted_indices": index}
    if not mode.endswith("no_probs"):
        inputs |= {"routing_map": chosen, "probs": m.weighted(m.sizes.tokens, m.sizes.experts)}
    restore_shape = [m.sizes.tokens, m.sizes.hidden]
    return Call(inputs, {"drop_and_pad": int(_is_padded(mode)), "restore_shape": restore_shape})


def _unpermute_grad(m: Making, mode: str) -> Call:
    forward = _unpermute(m, mode)
    index, padded = forward.inputs["sorted_indices"], _is_padded(mode)
    made = moe_token_unpermute_with_routing_map(
        np.zeros((len(index), 1), np.float32),
        index,
        drop_and_pad=padded,
        restore_shape=[m.sizes.tokens, 1],
    )
    out_index, token_id = made[1], made[2]
    if mode.startswith("row_form"):
        token_id = (np.arange(len(index)) // m.sizes.top_k).astype(np.int32)
    inputs = {
        "unpermuted_tokens_grad": m.floats(m.sizes.tokens, m.sizes.hidden),
        "out_index": out_index,
        "permute_token_id": token_id,
    }
    if "probs" in forward.inputs:
        names = ("routing_map", "permuted_tokens", "probs")
        inputs |= {name: forward.inputs[name] for name in names}
    return Call(inputs, forward.attributes)


def _slots(m: Making, mode: str) -> tuple[Array, Array, tuple[int, ...]]:
    """Experts and row of each slot, and the rows' leading sizes; one expert a token without scales."""
    ids = m.draw.experts(m.sizes)
    if mode.endswith("no_scales"):
        ids = np.ascontiguousarray(ids[:, :1])
    padded = _is_padded(mode)
    index = _row_index(m, ids, padded=padded)
    return ids, index, (m.sizes.experts, m.sizes.capacity) if padded else (len(index),)


def _finalize(m: Making, mode: str) -> Call:
    ids, index, leading = _slots(m, mode)
    s, by_column = m.sizes, mode.endswith("by_column")
    if by_column:  # slot (i, k) stands at k*T + i
        index = np.ascontiguousarray(index.reshape(ids.shape).T).reshape(-1)
    inputs = {"expanded_x": m.floats(*leading, s.hidden), "expanded_row_idx": index}
    if mode.endswith("all_inputs"):
        inputs |= {"x1": m.floats(s.tokens, s.hidden), "x2": m.floats(s.tokens, s.hidden)}
        inputs["bias"] = m.floats(s.experts, s.hidden)
    if not mode.endswith("no_scales"):
        inputs["scales"] = m.weighted(*ids.shape)
    if mode.endswith("all_inputs"):
        inputs["expert_idx"] = ids
    return Call(inputs, {"drop_pad_mode": int(_is_padded(mode)) + (0 if by_column else 2)})


def _finalize_grad(m: Making, mode: str) -> Call:
    ids, index, leading = _slots(m, mode)
    s, active = m.sizes, m.sizes.active if mode == "active" else 0
    rows = m.floats(*((active,) if active else leading), s.hidden)
    inputs = {"grad_y": m.floats(s.tokens, s.hidden), "expanded_row_idx": index}
    if not mode.endswith("no_scales"):
        inputs |= {"expanded_x": rows, "scales": m.weighted(*ids.shape)}
    if mode.endswith("all_inputs"):
        inputs |= {"expert_idx": ids, "bias": m.floats(s.experts, s.hidden)}
    attributes = {"drop_pad_mode": int(_is_padded(mode)), "active_num": active}
    experts, capacity = (s.experts, s.capacity) if _is_padded(mode) else (0, 0)
    return Call(inputs, {**attributes, "expert_num": experts, "expert_capacity": capacity})


def _grouped(m: Making, mode: str) -> Call:
    s, rows, transposed = m.sizes, m.sizes.tokens * m.sizes.top_k, mode == "transposed"
    last = (s.width, s.hidden) if transposed else (s.hidden, s.width)
    inputs = {
        "x": m.floats(rows, s.hidden),
        "weight": m.floats(s.experts, *last),
        "group_sizes": m.draw.group_sizes(rows, s),
    }
    return Call(inputs, {"transpose_weight": int(transposed)})


def _grouped_weight_grad(m: Making, mode: str) -> Call:
    s, rows = m.sizes, m.sizes.tokens * m.sizes.top_k
    inputs = {
        "x": m.floats(rows, s.hidden),
        "grad_y": m.floats(rows, s.width),
        "group_sizes": m.draw.group_sizes(rows, s),
    }
    return Call(inputs, {"transpose_weight": int(mode == "transposed")})


def _gate_up(m: Making) -> Array:
    shape = (m.sizes.tokens * m.sizes.top_k, m.sizes.width)
    return np.concatenate([m.draw.gates(m.rows, *shape), m.floats(*shape)], axis=1)


def _activation(m: Making, mode: str) -> Call:
    return Call({"x": _gate_up(m)}, {})


def _activation_grad(m: Making, mode: str) -> Call:
    s, rows = m.sizes, m.sizes.tokens * m.sizes.top_k
    return Call({"grad_y": m.floats(rows, s.width), "x": _gate_up(m)}, {})


def _square_sum(m: Making, mode: str) -> Call:
    return Call({"x": m.floats(m.sizes.experts, m.sizes.width, m.sizes.hidden)}, {})


def _update(m: Making, mode: str) -> Call:
    s = m.sizes
    shape = (s.experts, s.width, s.hidden)
    inputs = {name: m.floats(*shape) for name in ("parameter", "gradient", "exp_avg")}
    inputs["exp_avg_sq"] = np.square(m.floats(*shape))
    # The fourth step of AdamW without and with decay, of a clipped gradient.
    factors = [0.9, 0.05, 0.999, 0.00025, 1.8e-4, 6.3e-10, 0.9999 if mode == "decay" else 1.0]
    return Call({**inputs, "factors": np.array(factors, m.rows)}, {})


_BY_MAP = ("dropless", "dropless_no_probs", "fewer_experts", "drop_pad", "drop_pad_no_probs")
MAKERS: dict[str, tuple[Callable[[Making, str], Call], tuple[str, ...]]] = {
    "MoeInitRoutingV2": (
        _dispatch,
        ("dropless", "dropless_count", "dropless_cumsum", "active", "drop_pad", "drop_pad_before_capacity"),
    ),
    "MoeInitRoutingV2Grad": (_dispatch_grad, ("dropless", "active", "drop_pad")),
    "MoeTokenPermuteWithRoutingMap": (_permute, _BY_MAP),
    "MoeTokenPermuteWithRoutingMapGrad": (_permute_grad, _BY_MAP),
    "MoeTokenUnpermuteWithRoutingMap": (_unpermute, (*_BY_MAP, "active")),
    "MoeTokenUnpermuteWithRoutingMapGrad": (
        _unpermute_grad,
        (*_BY_MAP, "active", "row_form", "row_form_no_probs"),
    ),
    "MoeFinalizeRoutingV2": (
        _finalize,
        (
            "dropless",
            "dropless_no_scales",
            "dropless_all_inputs",
            "dropless_by_column",
            "drop_pad",
            "drop_pad_all_inputs",
            "drop_pad_by_column",
        ),
    ),
    "MoeFinalizeRoutingV2Grad": (
        _finalize_grad,
        (
            "dropless",
            "dropless_no_scales",
            "dropless_all_inputs",
            "active",
            "drop_pad",
            "drop_pad_no_scales",
            "drop_pad_all_inputs",
        ),
    ),
    "MoeGroupedMatmul": (_grouped, ("plain", "transposed")),
    "MoeGroupedMatmulWeightGrad": (_grouped_weight_grad, ("plain", "transposed")),
    "MoeSwiGlu": (_activation, ("plain",)),
    "MoeSwiGluGrad": (_activation_grad, ("plain",)),
    "MoeSquareSum": (_square_sum, ("plain",)),
    "MoeAdamW": (_update, ("plain", "decay")),
}
