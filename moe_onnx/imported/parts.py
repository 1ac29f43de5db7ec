"""The weights in a model: what they are known by, and the rule for which of them are trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.imported.modules import BUFFERS, MADE_UP, computed_from, is_experts, is_parameter

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
READ_AS_WEIGHT = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Gather": 0, "GatherND": 0}


@dataclass
class Weight:
    """A parameter to be: the value that the graph reads, and its tensor, whose transpose it may be."""

    name: str
    value: ir.Value
    tensor: ir.TensorProtocol
    is_turned: bool = False


@dataclass
class Weights:
    """All float initializers of a model by the name that the parameter has, and what was done to them."""

    found: dict[str, Weight] = field(default_factory=dict)
    split: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def is_weight(self, weight: Weight) -> bool:
        """The rule for what is trained where nobody says otherwise.

        What the exporter calls a parameter. Where it does not say: floats that are no scalars, no buffer of
        a known name, and that have a name of their own, are what a product or lookup reads as its matrix,
        or were computed from a parameter.
        """
        if (said := is_parameter(weight.value)) is not None:
            return said
        if (sources := computed_from(weight.value)) and not MADE_UP.search(weight.name):
            is_named = weight.name in self.renamed or any(of_module(name) for name in sources)
            return is_named or is_matrix(weight.value)
        if any(of_module(name) for name in sources):
            return True
        if not len(weight.tensor.shape) or BUFFERS.search(weight.name):
            return False
        original = self.renamed.get(weight.name, weight.name)
        return not MADE_UP.search(original) or weight.name in self.renamed or is_matrix(weight.value)


def of_module(name: str) -> bool:
    """Whether a name is that of a module's weight; values of a trace are ``div``, ``arange_5``."""
    return "." in name and not BUFFERS.search(name)


def is_matrix(value: ir.Value) -> bool:
    """Whether a product or a lookup reads a value as its matrix."""
    if len(value.shape or ()) < 2:
        return False
    uses = [use for use in value.uses() if use.node.domain == ""]
    return any(READ_AS_WEIGHT.get(use.node.op_type) == use.idx for use in uses) or is_experts(value)


def float_initializers(graph: ir.Graph) -> list[ir.Value]:
    """The initializers that may be weights, in the model's order."""
    found = [value for value in graph.initializers.values() if value.const_value is not None]
    return [value for value in found if value.const_value.dtype in FLOATS]  # type: ignore[union-attr]


def places(weight: Weight) -> int:
    """How many nodes read a weight."""
    return len(set(_readers(weight.value)))


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    yield from (use.node for use in value.uses())
