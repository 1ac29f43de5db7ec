"""Whether the shapes of all values are fixed by the model alone: then no other inputs would fit it better."""

from __future__ import annotations

from moe_onnx.validation.run.drawing import SIZE_INPUTS
from moe_onnx.validation.run.feeds import free_sizes
from moe_onnx.validation.subject import Subject, normal_domain

# Operators whose outputs have as many elements as their inputs' values say.
_COUNTING = frozenset(("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit"))


def has_fixed_shapes(subject: Subject) -> bool:
    """Whether inputs have fixed shapes, and no size comes of values that a run gives; False if in doubt."""
    nodes = subject.main.nodes
    plain = len(subject.scopes) == 1 and all(not normal_domain(node.domain) for node in nodes)
    if not plain or free_sizes(subject):
        return False
    fed = {name for name in subject.main.inputs if name not in subject.main.initializers}
    fed |= {name for node in nodes if node.op_type.startswith("Random") for name in node.output}
    before = -1
    while len(fed) > before:  # once more where nodes stand before those whose outputs they read
        before = len(fed)
        for node in nodes:
            if node.op_type not in ("Shape", "Size") and not fed.isdisjoint(node.input):
                fed.update(name for name in node.output if name)
    for node in nodes:
        sizes = {at for at in SIZE_INPUTS.get(node.op_type, ()) if at < len(node.input)}
        if node.op_type in _COUNTING:
            sizes.update(range(len(node.input)))
        if any(node.input[at] in fed for at in sizes):
            return False
    return True
