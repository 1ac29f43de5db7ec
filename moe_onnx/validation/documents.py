"""What the source documents ask of their operators' inputs, attributes and sizes, with aclnn's status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moe_onnx.errors import (
    ACLNN_ERR_PARAM_INVALID,
    AttributeValueError,
    DtypeError,
    LimitError,
    MissingInputError,
    MoeOnnxError,
)
from moe_onnx.validation.findings import Finding, Outcome
from moe_onnx.validation.moe_nodes import MoeNode, collapsed, moe_nodes
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

MISSING = code(
    "MO501",
    "error",
    "An operator lacks an input that it needs",
    why="The device's operators return 161001 for a required tensor that is a null pointer, and 561002 "
    "where `probs` (or `scales`, `bias`) is given without the tensors that go with it. onnxruntime says "
    "no more than that a node is invalid, and the Python kernels cannot load it at all.",
    mend="Give the input, or leave out the one that needs it.",
)
DTYPE = code(
    "MO502",
    "error",
    "An operator is given a dtype that it has no kernel for",
    why="Floats are float16, bfloat16 or float32 (float64 only to validate), indices int32, maps bool or "
    "int8: 161002. Mixes are refused with 561002, but for float32 weights beside bfloat16 rows. int64 "
    "indices, which every standard operator gives, are the usual case.",
    mend="Put a Cast before the input.",
)
ATTRIBUTE = code(
    "MO503",
    "error",
    "An attribute of an operator is out of its range",
    why="The documents fix the ranges: `dropPadMode` 0 or 1, `topK` > 0, `activeNum` >= 0, and so on. The "
    "device refuses the call with 561002 (documents since 2026-05 print 561103 for it); schemas of ONNX "
    "know no ranges, so `onnx.checker` finds nothing.",
    mend="Give the attribute a value of its range.",
)
SHAPE = code(
    "MO504",
    "error",
    "The sizes of an operator's inputs do not go together",
    why="Rank and sizes follow from the documents' signatures: 561002 (since 2026-05 561103). Not all are "
    "checked on the device: lengths that `topK` or the experts do not divide, and companions of other "
    "sizes, are read past their end there. This package refuses all of them.",
    mend="Make the sizes agree.",
)
LIMIT = code(
    "MO505",
    "error",
    "An operator is used beyond its documented limit",
    why="With weights at most 512 experts per token and no more than there are, without drop/pad; in "
    "drop/pad a capacity of at most the number of tokens; no more rows than there are (token, expert) "
    "pairs. 561002.",
    mend="Lower top_k or the capacity.",
)
SORT_LIMIT = code(
    "MO506",
    "warning",
    "There are more tokens or experts than the device's dispatch can sort",
    why="MoeTokenPermuteWithRoutingMap sorts row numbers as float32 keys on the device, which counts to "
    "2^24: the document demands fewer than 16777215 tokens and experts (161002). On a CPU there is no "
    "such limit.",
    mend="Split the batch, or do not plan to run it on the device.",
)
_SORTED = "MoeTokenPermuteWithRoutingMap"
_SORT_LIMIT = 16777215

BROKEN = (MISSING, DTYPE, ATTRIBUTE, SHAPE, LIMIT)


@check("static", *BROKEN)
def documented_rules(subject: Subject) -> Iterator[Outcome]:
    """Inputs, dtypes, attributes, ranks, sizes and limits of every operator are as its document says."""
    yield from collapsed(_broken(moe_nodes(subject)))


def _broken(nodes: Iterable[MoeNode]) -> Iterator[Finding]:
    for node in nodes:
        if isinstance(node.checked, MoeOnnxError):
            yield finding_of(node, node.checked)


def finding_of(node: MoeNode, error: MoeOnnxError) -> Finding:
    """A finding that says what an operator's own check said."""
    kinds = (
        (MissingInputError, MISSING),
        (DtypeError, DTYPE),
        (AttributeValueError, ATTRIBUTE),
        (LimitError, LIMIT),
    )
    kind = next((code for error_class, code in kinds if isinstance(error, error_class)), SHAPE)
    # Messages are "<Op>: <what must hold>, got <value>. <What to do>."
    said, _, advice = str(error).removeprefix(f"{node.spec.name}: ").partition(". ")
    return kind(node.place, found=said.rstrip("."), mend=advice, aclnn=error.aclnn_status)


@check("static", SORT_LIMIT)
def sort_limit(subject: Subject) -> Iterator[Outcome]:
    """MoeTokenPermuteWithRoutingMap has fewer than 16777215 tokens and experts."""
    for node in moe_nodes(subject):
        if node.spec.name != _SORTED or node.legal is None:
            continue
        sizes = (
            ("tokens", node.dim("tokens", 0) or node.dim("routing_map", 0)),
            ("experts", node.dim("routing_map", 1)),
        )
        for what, size in sizes:
            if size is not None and size >= _SORT_LIMIT:
                yield SORT_LIMIT(
                    node.place,
                    found=f"{size} {what}",
                    expected=f"fewer than {_SORT_LIMIT}",
                    aclnn=ACLNN_ERR_PARAM_INVALID,
                )
