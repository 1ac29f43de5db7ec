"""Routing maps that are constants: what they select has slots and rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe_onnx.errors import ACLNN_ERR_INNER_TILING_ERROR
from moe_onnx.spec import MAX_TOP_K
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.documents.index_values import is_slot_form
from moe_onnx.validation.documents.moe_nodes import MoeNode, moe_nodes
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.operators.own_ops import SHAPE
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

TOO_MANY = code(
    "MO506",
    "error",
    "A constant routing map selects more experts than there are slots",
    why="Each token has K slots, K rows divided by tokens. On the device a token with more experts shifts "
    "the slots of all tokens after it: the results are wrong without a word.",
    mend="Select at most K experts a token, or give more rows.",
)
_SLOTS = {
    "MoeTokenPermuteWithRoutingMap": "",
    "MoeTokenPermuteWithRoutingMapGrad": "sorted_indices",
    "MoeTokenUnpermuteWithRoutingMap": "sorted_indices",
    "MoeTokenUnpermuteWithRoutingMapGrad": "out_index",
}
_WEIGHTS = {
    "MoeTokenPermuteWithRoutingMapGrad": "permuted_probs_output_grad",
    "MoeTokenUnpermuteWithRoutingMap": "probs",
    "MoeTokenUnpermuteWithRoutingMapGrad": "probs",
}


@check("static", TOO_MANY, SHAPE)
def constant_maps(subject: Subject) -> Iterator[Outcome]:
    """What a constant routing map selects fits the slots, and the combined rows fit the map."""
    nodes = [node for node in moe_nodes(subject) if node.legal is not None]
    yield from collapsed(finding for node in nodes for finding in (*_map(node), *_combined_rows(node)))


def _map(node: MoeNode) -> Iterator[Finding]:
    """What a constant routing map selects has slots."""
    op = node.spec.name
    if op not in _SLOTS or node.is_padded or (op in _WEIGHTS and node.info(_WEIGHTS[op]) is None):
        return
    chosen = node.constant("routing_map")
    if chosen is None or chosen.ndim != 2 or not chosen.shape[0]:
        return
    counts = np.count_nonzero(chosen, axis=1)
    slots = (node.legal or {})["num_out_tokens"] if not _SLOTS[op] else node.dim(_SLOTS[op], 0)
    why = "the rows divided by the tokens"
    if not slots and not _SLOTS[op]:  # as many as the map selects
        slots, why = MAX_TOP_K * len(chosen), "the limit of the document"
    if slots is None:
        return
    tensor, top_k = f"constant {node.name('routing_map')!r}", slots // len(chosen)
    by_row = op == "MoeTokenPermuteWithRoutingMapGrad" or (
        op == "MoeTokenUnpermuteWithRoutingMapGrad" and not is_slot_form(node)
    )
    if by_row:  # what counts is that every pair has a row, whichever token's
        found, wanted = f"{tensor} selects {counts.sum()} experts", f"at most {slots}, one for each row"
        wrong = int(counts.sum()) > slots
    else:
        token = int(counts.argmax())
        found, wanted = (
            f"{tensor} selects {counts[token]} experts for token {token}",
            f"at most {top_k}, {why}",
        )
        wrong = int(counts[token]) > top_k
    if wrong:
        yield TOO_MANY(node.place, found=found, expected=wanted, aclnn=ACLNN_ERR_INNER_TILING_ERROR)


def _combined_rows(node: MoeNode) -> Iterator[Finding]:
    """Without drop/pad the combine has a row for each slot, or for each pair that the map selects."""
    if node.spec.name != "MoeTokenUnpermuteWithRoutingMap" or node.is_padded:
        return
    rows, slots = node.dim("permuted_tokens", 0), node.dim("sorted_indices", 0)
    chosen = node.constant("routing_map")
    if rows is None or slots is None or rows == slots or (node.info("routing_map") and chosen is None):
        return
    selected = slots if chosen is None else np.count_nonzero(chosen)
    if rows != selected:
        yield SHAPE(
            node.place,
            found=f"'permuted_tokens' has {rows} rows",
            expected=f"{slots} rows, one for each slot, or {selected}, as many as 'routing_map' selects",
            aclnn=ACLNN_ERR_INNER_TILING_ERROR,
        )
