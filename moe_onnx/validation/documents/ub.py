"""The limits that the device's unified buffer (UB) sets to MoeTokenUnpermuteWithRoutingMapGrad.

With weights, a block of the kernel holds one row of all experts (without drop/pad) or a chunk of the hidden
size (with it), and the chunks' partial sums must fit beside. The source document states both limits as
formulas, and the kernels apply them a little otherwise: both are evaluated, in bytes and elements, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from moe_onnx.errors import ACLNN_ERR_INNER_TILING_ERROR
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.documents.moe_nodes import MoeNode, moe_nodes
from moe_onnx.validation.documents.targets import DEVICES
from moe_onnx.validation.findings import Finding, Outcome, Skipped, Table
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

OVER_THE_LIMIT = code(
    "MO551",
    "error",
    "The experts or the hidden size do not fit the device's unified buffer",
    why="MoeTokenUnpermuteWithRoutingMapGrad with probabilities keeps all experts' probabilities of a "
    "token in the unified buffer, and with drop/pad the partial sums of all chunks of a row. What does "
    "not fit is refused with 561002 when the model runs. With 192 KiB the limits are some 38,000 experts "
    "and a hidden size of four million; a smaller buffer, as with `--ub-size`, is reached sooner.",
    mend="Use fewer experts, a smaller hidden size, or 16-bit dtypes.",
)
OVER_THE_DOCUMENT = code(
    "MO552",
    "warning",
    "The experts fit the device's unified buffer, but not the document's formula",
    why="The document rounds the number of experts up to a multiple of 32 before it counts their bytes; "
    "the kernels do not. Between the two a model runs today and is not promised to run tomorrow.",
    mend="Use fewer experts.",
)
OP = "MoeTokenUnpermuteWithRoutingMapGrad"
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Limit:
    """One size held to one formula, in both readings: the largest that passes, None for none at all.

    Attributes:
        what: ``"experts"`` or ``"hidden size"``.
        size: What the model has.
        kernel: The largest size that the kernels accept.
        document: The largest size that the document allows.
    """

    what: str
    size: int
    kernel: int
    document: int


def expert_limits(ub_size: int, token_bytes: int, prob_bytes: int) -> tuple[int, int]:
    """The most experts without drop/pad, as the kernels and as the document have it.

        kernels:   E <= (UB - 256*t - 2048 - (6*t + 12)) / (1 + p)
        document:  (UB - (p + 1) * align32(E) - (t + 8) * 256) / (6*t + 12) >= 1

    with t and p the bytes of an element of the tokens and of the probabilities.
    """
    left = ub_size - 256 * token_bytes - 2048 - (6 * token_bytes + 12)
    most = max(left, 0) // (1 + prob_bytes)
    return most, most // 32 * 32


def hidden_limits(ub_size: int, token_bytes: int) -> tuple[int, int]:
    """The largest hidden size with drop/pad, as the kernels and as the document have it.

    kernels:   H <= 512 * floor((UB - 32 - 2048) / (2 * (8 + t)))
    document:  H <= 256 * (UB - 2080) / (8 + t)
    """
    left = max(ub_size - 2080, 0)
    kernel = 512 * (left // (2 * (8 + token_bytes)))
    return kernel, int(Fraction(256 * left, 8 + token_bytes))


def limit_of(node: MoeNode, ub_size: int) -> Limit | None:
    """The limit that a node is held to; None where there is none, or the sizes are not known."""
    if node.spec.name != OP or node.legal is None or node.info("probs") is None:
        return None
    tokens, probs = node.info("unpermuted_tokens_grad"), node.info("probs")
    token_bytes = BYTES.get(tokens.dtype if tokens is not None else "")
    prob_bytes = BYTES.get(probs.dtype if probs is not None else "")
    if token_bytes is None or prob_bytes is None:
        return None
    if node.legal["drop_and_pad"]:
        size = node.dim("unpermuted_tokens_grad", 1) or node.dim("permuted_tokens", 1)
        return None if size is None else Limit("hidden size", size, *hidden_limits(ub_size, token_bytes))
    size = node.dim("probs", 1) or node.dim("routing_map", 1)
    if size is None:
        return None
    return Limit("experts", size, *expert_limits(ub_size, token_bytes, prob_bytes))


@check("static", OVER_THE_LIMIT, OVER_THE_DOCUMENT)
def unified_buffer(subject: Subject) -> Iterator[Outcome]:
    """Experts and hidden sizes fit the unified buffer, by the document's formulas and by the kernels'."""
    device = DEVICES.get(subject.options.target)
    ub_size = subject.options.ub_size or (device.ub_size if device is not None else None)
    if ub_size is None:
        yield Skipped("neither a target nor the size of a unified buffer was given")
        return
    of_interest = [
        node for node in moe_nodes(subject) if node.spec.name == OP and node.info("probs") is not None
    ]
    found = [(node, limit) for node in of_interest if (limit := limit_of(node, ub_size)) is not None]
    if len(found) < len(of_interest):
        number = len(of_interest) - len(found)
        yield Skipped(
            f"{number} of {len(of_interest)} nodes of {OP} with probs: sizes or dtypes are not known"
        )
    yield from collapsed(finding for node, limit in found for finding in _findings(node, limit, ub_size))
    if found:
        yield _table(found, ub_size)


def _findings(node: MoeNode, limit: Limit, ub_size: int) -> Iterator[Finding]:
    values = f"{limit.what} {limit.size}, unified buffer of {ub_size} bytes"
    if limit.size > limit.kernel:
        yield OVER_THE_LIMIT(
            node.place,
            found=values,
            expected=f"at most {limit.kernel} (the document: {limit.document})",
            aclnn=ACLNN_ERR_INNER_TILING_ERROR,
        )
    elif limit.size > limit.document:
        yield OVER_THE_DOCUMENT(
            node.place,
            found=values,
            expected=f"at most {limit.document} (the kernels: {limit.kernel})",
            aclnn=ACLNN_ERR_INNER_TILING_ERROR,
        )


def _table(found: list[tuple[MoeNode, Limit]], ub_size: int) -> Table:
    """One row for each limit that a model meets, with what is left of it, as a part of the limit."""
    rows = []
    counts: dict[Limit, int] = {}
    for _, limit in found:
        counts[limit] = counts.get(limit, 0) + 1
    for limit, number in counts.items():
        rows.append(
            (
                limit.what,
                number,
                limit.size,
                limit.document,
                _margin(limit.size, limit.document),
                limit.kernel,
                _margin(limit.size, limit.kernel),
            )
        )
    columns = ("limit", "nodes", "found", "document's", "margin", "kernels'", "their margin")
    return Table(f"Unified buffer of {ub_size} bytes: {OP} with probs", columns, tuple(rows))


def _margin(size: int, limit: int) -> str:
    return f"{100 * (limit - size) / limit:.1f} %" if limit else "none"
