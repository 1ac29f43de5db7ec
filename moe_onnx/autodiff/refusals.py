"""What to do about a node that blocks a gradient: the nearest form that has one."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.autodiff.registry import rules

_CONSTANT_ALMOST_EVERYWHERE = (
    "Its output is constant almost everywhere: for a straight-through gradient register a rule that returns "
    "[d], or leave out of wrt what is reached only through it."
)
_SEQUENCE = (
    "Sequences and optionals carry no gradients: give their tensors to the nodes that use them directly, "
    "or put together by Concat."
)
_CONVOLUTION = (
    "Convolutions and pooling have no rules: as Gather or Slice, MatMul and Reduce nodes they have."
)
_RECURRENT = "Write the recurrence as a Scan or Loop, which have rules."
_RANDOM = "What is drawn at random has no gradient with respect to its input: make it an input of the graph."
_MATRIX = "Write it by MatMul, or register a rule."
_ADVICE = {
    "Resize": "Interpolation has no gradient rule: as MatMul with a constant matrix of weights it has.",
    "Upsample": "Interpolation has no gradient rule: as MatMul with a constant matrix of weights it has.",
    "GridSample": "Interpolation has no gradient rule: as Gather and Mul it has.",
    "Det": _MATRIX,
    "Mod": "x - y Floor(x / y), with the Floor computed for no gradient, has one.",
    "Unique": "Take unique values by Gather at constant or computed indices, which has a rule.",
    "Compress": "Gather at NonZero indices has a rule.",
    **dict.fromkeys(("Round", "Floor", "Ceil", "Sign"), _CONSTANT_ALMOST_EVERYWHERE),
    **dict.fromkeys(
        (
            *("SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "SequenceMap"),
            *("SplitToSequence", "ConcatFromSequence", "Optional", "OptionalGetElement"),
        ),
        _SEQUENCE,
    ),
    **dict.fromkeys(
        ("Conv", "ConvTranspose", "ConvInteger", "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool"),
        _CONVOLUTION,
    ),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _RECURRENT),
    **dict.fromkeys(("Bernoulli", "RandomNormalLike", "RandomUniformLike", "Multinomial"), _RANDOM),
}


def advice(node: ir.Node, version: int | None) -> str:
    """A sentence for the end of an error."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    known = rules().get((domain, node.op_type))
    if known and version is not None:
        return f"It has a rule for opsets {', '.join(known)}: convert the model with onnx.version_converter."
    found = _ADVICE.get(node.op_type) if domain == "" else None
    general = (
        "Register a rule with moe_onnx.register_gradient, or leave out of wrt what is reached only "
        "through it."
    )
    return f"{found} {general}" if found else general
