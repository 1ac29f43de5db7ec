"""Limits that the source documents set to their operators, with aclnn's status.

What they say of inputs, attributes, dtypes and sizes is what the operators of this package demand of
every node: see ``own_ops``.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_onnx.errors import ACLNN_ERR_PARAM_INVALID, LimitError
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.documents.moe_nodes import MoeNode, moe_nodes
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

LIMIT = code(
    "MO501",
    "error",
    "An operator is used beyond its documented limit",
    why="With weights at most 512 experts per token and no more than there are, without drop/pad; in "
    "drop/pad a capacity of at most the number of tokens; no more rows than there are (token, expert) "
    "pairs. The device refuses the call with 561002; documents since 2026-05 print 561103 for it. This "
    "package keeps the limits on a CPU too, so that a model that runs here is one that a device takes.",
    mend="Lower top_k or the capacity.",
)
SORT_LIMIT = code(
    "MO502",
    "warning",
    "There are more tokens or experts than the device's dispatch can sort",
    why="MoeTokenPermuteWithRoutingMap sorts row numbers as float32 keys on the device, which counts to "
    "2^24: the document demands fewer than 16777215 tokens and experts (161002). On a CPU there is no "
    "such limit.",
    mend="Split the batch, or do not plan to run it on the device.",
)
_SORTED = "MoeTokenPermuteWithRoutingMap"
_SORT_LIMIT = 16777215


@check("static", LIMIT, SORT_LIMIT)
def documented_limits(subject: Subject) -> Iterator[Outcome]:
    """No operator is used beyond the limits of its document."""
    nodes = moe_nodes(subject)
    yield from collapsed(finding for node in nodes for finding in (*_limit(node), *_sort_limit(node)))


def _limit(node: MoeNode) -> Iterator[Finding]:
    error = node.checked
    if isinstance(error, LimitError):
        # Messages are "<Op>: <what must hold>, got <value>. <What to do.>"
        said, _, advice = str(error).removeprefix(f"{node.spec.name}: ").partition(". ")
        yield LIMIT(node.place, found=said.rstrip("."), mend=advice, aclnn=error.aclnn_status)


def _sort_limit(node: MoeNode) -> Iterator[Finding]:
    if node.spec.name != _SORTED or node.legal is None:
        return
    tokens = node.dim("tokens", 0) or node.dim("routing_map", 0)
    for what, size in (("tokens", tokens), ("experts", node.dim("routing_map", 1))):
        if size is not None and size >= _SORT_LIMIT:
            yield SORT_LIMIT(
                node.place,
                found=f"{size} {what}",
                expected=f"fewer than {_SORT_LIMIT}",
                aclnn=ACLNN_ERR_PARAM_INVALID,
            )
