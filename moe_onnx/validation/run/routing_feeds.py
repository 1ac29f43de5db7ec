"""Index inputs of single ``ascend.moe`` nodes, as the forward operators would make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto

from moe_onnx.operators import BY_NAME

Array = np.ndarray[Any, Any]
ShapeOf = Callable[[str], tuple[int, ...] | None]

_EXPERTS = 4  # where nothing says how many there are


def draw_indices(node: NodeProto, shape_of: ShapeOf, rng: np.random.Generator) -> dict[str, Array]:
    """Values for the index inputs of a node, by name; nothing where sizes are not known or do not fit.

    Args:
        node: Of the domain ``ascend.moe``.
        shape_of: The shape of a value, None if not known.
        rng: Where values come from.
    """
    spec = BY_NAME.get(node.op_type)
    if spec is None:
        return {}
    args = [arg.name for arg in spec.inputs]
    names = {arg: name for arg, name in zip(args, node.input, strict=False) if name}
    shapes = {arg: shape_of(name) or () for arg, name in names.items()}
    ints = {a.name: a.i for a in node.attribute if a.type == AttributeProto.INT}
    try:
        found = _values(shapes, ints, node, rng)
    except (ValueError, IndexError, ZeroDivisionError):
        return {}  # sizes that do not belong together
    return {names[arg]: value for arg, value in found.items() if arg in names}


def _values(
    shapes: dict[str, tuple[int, ...]], ints: dict[str, int], node: NodeProto, rng: np.random.Generator
) -> dict[str, Array]:
    if "group_sizes" in shapes:
        (groups,) = shapes["group_sizes"]
        return {"group_sizes": rng.multinomial(shapes["x"][0], np.full(groups, 1 / groups))}
    tokens, experts, top_k, capacity = _sizes(shapes, ints, node)
    if top_k <= experts:
        chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    else:  # an expert may take a token twice
        chosen = rng.integers(0, max(experts, 1), (tokens, top_k))
    chosen.sort(axis=1)  # the combine pairs slots with experts in ascending order
    routing_map = np.zeros((tokens, max(experts, 1)), bool)
    np.put_along_axis(routing_map, chosen, True, axis=1)
    flat = chosen.reshape(-1)
    place: Array = np.empty(len(flat), np.int64)
    place[np.argsort(flat, kind="stable")] = np.arange(len(flat))
    if ints.get("drop_and_pad"):  # the token of each row, selected ones first
        rows: Array = np.argsort(~routing_map, axis=0, kind="stable")[:capacity].T.reshape(-1)
        if len(rows) != (count := _slots(shapes)):  # nothing says which expert a row is of
            rows = rng.integers(0, max(tokens, 1), count)
        index, order = rows, np.argsort(rows, kind="stable")
        out_index, token_id = order, rows[order]
    else:
        index = place
        if _is_padded(node, ints):
            counts = np.bincount(flat, minlength=experts)
            rank = place - (np.cumsum(counts) - counts)[flat]
            index = np.where(rank < capacity * (experts > 0), flat * capacity + rank, -1)
        if node.op_type == "MoeFinalizeRoutingV2" and ints.get("drop_pad_mode", 0) < 2:
            index = index.reshape(tokens, top_k).T.reshape(-1)
        out_index = token_id = index
    return {
        "expert_idx": chosen,
        "routing_map": routing_map,
        "expanded_row_idx": index,
        "sorted_indices": index,
        "out_index": out_index,
        "permute_token_id": token_id,
    }


def _is_padded(node: NodeProto, ints: dict[str, int]) -> bool:
    return ints.get("drop_pad_mode", 0) % 2 == 1 and "Routing" in node.op_type


def _slots(shapes: dict[str, tuple[int, ...]]) -> int:
    """N, as the index inputs have it."""
    names = ("expanded_row_idx", "sorted_indices", "out_index")
    return next((shapes[name][0] for name in names if name in shapes), 0)


def _sizes(
    shapes: dict[str, tuple[int, ...]], ints: dict[str, int], node: NodeProto
) -> tuple[int, int, int, int]:
    """Tokens, experts, experts of a token and rows of an expert."""

    def first(*names: str) -> tuple[int, ...]:
        """The shape of the first of these inputs that is there."""
        return next((s for name in names if (s := shapes.get(name, ())) not in ((), (0, 0))), ())

    slots, pairs, choices = _slots(shapes), first("routing_map", "probs"), first("scales", "expert_idx")
    padded_rows = next((shape for shape in shapes.values() if len(shape) == 3), None)  # [E, C, H]
    experts = pairs[1] if pairs else padded_rows[0] if padded_rows else 0
    if not padded_rows:
        experts = experts or ints.get("expert_num", 0) or ints.get("num_experts", 0)
        experts = experts or (first("bias") or (0,))[0]
    if choices:
        tokens, top_k = choices
    elif pairs:
        tokens = pairs[0]
        if node.op_type == "MoeTokenPermuteWithRoutingMap":
            slots = ints.get("num_out_tokens", 0) or tokens * min(2, experts)
        top_k = slots // max(tokens, 1)
    else:
        restored = next((a.ints[0] for a in node.attribute if a.name == "restore_shape" and a.ints), 0)
        tokens = (first("unpermuted_tokens_grad", "grad_y") or (0,))[0] or ints.get("tokens_num", 0)
        tokens = tokens or restored
        top_k = ints.get("top_k", 0) or (slots // tokens if tokens else 1)
        tokens = tokens or slots // top_k
    if not padded_rows:
        experts = experts or max(_EXPERTS, top_k)
    if ints.get("drop_and_pad"):
        top_k = min(2, experts)
    capacity = padded_rows[1] if padded_rows else ints.get("expert_capacity", 0) or slots // max(experts, 1)
    return tokens, experts, top_k, capacity
