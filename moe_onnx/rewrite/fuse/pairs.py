"""The ``ascend.moe`` nodes round experts, for pairs of token and expert that a graph has chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import Inserter, rank


@dataclass
class Pairs:
    """``ids`` and ``weights`` of each token's experts, ``[T, K]`` or flat; ``tokens`` ``[T, H]``."""

    ids: ir.Value
    weights: ir.Value
    top_k: int
    experts: int
    tokens: ir.Value


def dispatch(
    e: Inserter, pairs: Pairs, *, sort: bool = True
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Rows in the order of experts, the row of each pair, rows of each expert, ids.

    ``sort``: ids ascend in a token, as the combine pairs a token's rows with its experts in that order.
    """
    pairs.ids = matrix(e, pairs.ids, pairs.top_k)
    ids = pairs.ids
    if sort:
        many = e.constant([pairs.top_k])
        ids, _ = e.ops("TopK", ids, many, outputs=2, name="ascending", axis=-1, largest=0, sorted=1)
    chosen = e.op("Cast", ids, name="expert_idx", to=int(ir.DataType.INT32))
    rows, index, counts, _ = e.ops(
        "MoeInitRoutingV2",
        pairs.tokens,
        chosen,
        outputs=4,
        name="dispatch",
        active_num=0,
        expert_capacity=0,
        expert_num=pairs.experts,
        drop_pad_mode=0,
        expert_tokens_count_or_cumsum_flag=2,
        expert_tokens_before_capacity_flag=0,
    )
    return rows, index, counts, chosen


def expert_of_row(e: Inserter, index: ir.Value, chosen: ir.Value) -> ir.Value:
    """The expert of each row, int32."""
    flat = e.op("Reshape", chosen, e.constant([-1]))
    return e.op("ScatterElements", flat, index, flat, name="expert_of_row", axis=0)


def combine(
    e: Inserter, pairs: Pairs, rows: ir.Value, index: ir.Value, gate: ir.Value | None = None
) -> ir.Value:
    """The sum of each token's rows, times its weights, or those of ``gate`` ``[T, E]``."""
    tokens = e.op("Shape", pairs.ids, start=0, end=1)
    shape = e.op("Concat", tokens, e.constant([pairs.experts]), axis=0)
    nowhere = e.op("Expand", e.constant(False, np.bool_), shape)
    here = e.op("Expand", e.constant(True, np.bool_), e.op("Shape", pairs.ids))
    chosen = e.op("ScatterElements", nowhere, pairs.ids, here, name="routing_map", axis=1)
    weights = gate if gate is not None else _by_expert(e, pairs, shape)
    return e.ops(
        "MoeTokenUnpermuteWithRoutingMap",
        rows,
        index,
        chosen,
        weights,
        outputs=4,
        name="combine",
        drop_and_pad=0,
    )[0]


def _by_expert(e: Inserter, pairs: Pairs, shape: ir.Value) -> ir.Value:
    weights = matrix(e, pairs.weights, pairs.top_k)
    assert weights.dtype is not None
    nothing = e.op("Expand", e.constant(0, weights.dtype.numpy()), shape)
    return e.op("ScatterElements", nothing, pairs.ids, weights, name="weights", axis=1)


def matrix(e: Inserter, value: ir.Value, columns: int) -> ir.Value:
    """Rows of so many columns, of a vector."""
    if rank(value) == 2:
        return value
    made = e.op("Reshape", value, e.constant([-1, columns]))
    made.type = value.type
    return made
