"""Operations and bytes of every node, from its shapes.

    operator                             matrix FLOPs          other FLOPs
    MatMul, Gemm                         2 M N K               Gemm: M N each for a bias, alpha, beta
    MoeGroupedMatmul, its WeightGrad     2 rows in out         -
    Conv                                 2 out Cin/group prod(kernel)   out for a bias
    Einsum                               2 prod(all sizes)     -
    reductions, CumSum                   -                     input elements
    ReduceSumSquare, ReduceL2, ReduceMean ..                   2 input elements
    Softmax, LogSoftmax                  -                     5 elements (max, sub, exp, sum, div)
    LayerNormalization and the like      -                     8 elements
    MoeTokenUnpermuteWithRoutingMap, MoeFinalizeRoutingV2      2 T K H
    their gradients                      -                     3 T K H (weighted rows, dots for the weights)
    MoeInitRoutingV2Grad, MoeTokenPermuteWithRoutingMapGrad    T K H (sums)
    MoeSwiGlu                            -                     3 output elements (sigmoid, two products)
    MoeSwiGluGrad                        -                     9 elements of grad_y (two sigmoids, the rest)
    MoeSquareSum                         -                     2 input elements
    ScatterElements, ScatterND by add    -                     elements of the updates
    arithmetic, elementwise              -                     output elements
    what moves, compares or counts       -                     -

A product over a matrix of M x K and one of K x N is 2 M N K (a multiplication and an addition), which is
what ``torch.utils.flop_counter`` counts too; it leaves out everything in the second column. Rows of experts
are those that the dispatch gives: T K dropless, experts times capacity in drop/pad, free rows included.

Bytes are what the nodes read and write if each reads its inputs and writes its outputs once, and nothing
stays in a cache in between; ``Reshape`` and its like move nothing, ``Gather`` reads what it writes. A fusing
runtime moves less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import AttributeProto, GraphProto, NodeProto

from moe_onnx.inspection.shapes import subgraph_tensors
from moe_onnx.inspection.tensors import Tensor, attribute
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.subject import normal_domain

VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
NOTHING = {"Shape", "Size", "Constant", "ConstantOfShape", "Range"}
ONE_EACH = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Sqrt",
    "Exp",
    "Log",
    "Pow",
    "Neg",
    "Abs",
    "Reciprocal",
    "Sigmoid",
    "Tanh",
    "Erf",
    "Relu",
    "Gelu",
    "Softplus",
    "Cos",
    "Sin",
    "Max",
    "Min",
    "Clip",
    "Sign",
    "Floor",
    "Ceil",
    "Round",
    "Mod",
    "LeakyRelu",
    "Elu",
    "HardSigmoid",
    "Silu",
    "Swish",
    "Mish",
    "PRelu",
    "Softsign",
    "Mean",
    "Sum",
}
REDUCED = {"ReduceSum": 1, "ReduceMax": 1, "ReduceMin": 1, "ReduceProd": 1, "CumSum": 1, "ReduceMean": 1}
REDUCED |= {"ReduceSumSquare": 2, "ReduceL2": 2, "ReduceL1": 2, "ReduceLogSum": 2, "ReduceLogSumExp": 4}
PER_ELEMENT = {"Softmax": 5, "LogSoftmax": 5, "LayerNormalization": 8, "RMSNormalization": 6}
PER_ELEMENT |= {"GroupNormalization": 8, "InstanceNormalization": 8, "BatchNormalization": 4}
# Times the elements of the first input, or of the first output: mostly T K H.
ROUTED = {
    "MoeTokenUnpermuteWithRoutingMap": ("in", 2),
    "MoeTokenUnpermuteWithRoutingMapGrad": ("out", 3),
    "MoeFinalizeRoutingV2": ("in", 2),
    "MoeFinalizeRoutingV2Grad": ("out", 3),
    "MoeInitRoutingV2Grad": ("in", 1),
    "MoeTokenPermuteWithRoutingMapGrad": ("in", 1),
    "MoeSquareSum": ("in", 2),
    "MoeSwiGlu": ("out", 3),
    "MoeSwiGluGrad": ("in", 9),
}
FLOATS = {1, 10, 11, 16}


@dataclass(frozen=True)
class Cost:
    """Operations of matrix products and others, and bytes read and written."""

    matrix: int = 0
    other: int = 0
    read: int = 0
    written: int = 0

    @property
    def flops(self) -> int:
        """All operations."""
        return self.matrix + self.other

    @property
    def moved(self) -> int:
        """All bytes."""
        return self.read + self.written

    def __add__(self, more: Cost) -> Cost:
        return Cost(
            self.matrix + more.matrix,
            self.other + more.other,
            self.read + more.read,
            self.written + more.written,
        )

    def times(self, count: int) -> Cost:
        """The cost of doing it so many times."""
        return Cost(self.matrix * count, self.other * count, self.read * count, self.written * count)


def cost_of(node: NodeProto, tensors: Mapping[str, Tensor]) -> Cost:
    """What a node costs, its subgraphs included (see the module's text for the formulas).

    A ``Scan`` runs its body once for each slice; of an ``If`` the dearer branch counts; a ``Loop`` of which
    nobody knows the trips counts once.
    """
    graphs = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    if graphs:
        return _of_subgraphs(node, graphs, tensors)
    inputs = [tensors.get(name) if name else None for name in node.input]
    outputs = [tensors[name] for name in node.output if name in tensors]
    kind = node.op_type
    if kind in VIEWS or kind in NOTHING:
        made = 0 if kind in VIEWS else sum(t.nbytes for t in outputs)
        return Cost(written=made)
    matrix, other = _flops(node, inputs, outputs)
    read = sum(t.nbytes for t in inputs if t is not None)
    written = sum(t.nbytes for t in outputs)
    if kind in ("Gather", "GatherElements", "GatherND", "Slice"):
        read = written + sum(t.nbytes for t in inputs[1:] if t is not None)
    return Cost(matrix, other, read, written)


def _of_subgraphs(node: NodeProto, graphs: Sequence[GraphProto], tensors: Mapping[str, Tensor]) -> Cost:
    costs = []
    for graph in graphs:
        inner = {**tensors, **subgraph_tensors(graph)}
        costs.append(sum((cost_of(one, inner) for one in graph.node), Cost()))
    if node.op_type == "Scan":
        states = len(node.input) - int(attribute(node, "num_scan_inputs", 0))
        scanned = tensors.get(node.input[states]) if states < len(node.input) else None
        trips = scanned.shape[0] if scanned is not None and scanned.shape else 1
        return costs[0].times(trips or 0)
    return max(costs, key=lambda cost: (cost.flops, cost.moved))


def _flops(node: NodeProto, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> tuple[int, int]:
    kind = node.op_type
    first = inputs[0] if inputs else None
    made = outputs[0].size if outputs else 0
    if normal_domain(node.domain) == DOMAIN:
        return _of_ours(node, inputs, outputs)
    if normal_domain(node.domain):
        return 0, 0
    if kind == "MatMul" and first is not None and first.shape:
        return 2 * made * (first.shape[-1] or 0), 0
    if kind == "Gemm" and first is not None and len(first.shape) == 2:
        inner = first.shape[0 if attribute(node, "transA", 0) else 1] or 0
        extra = [len(inputs) > 2 and inputs[2] is not None, attribute(node, "alpha", 1.0) != 1]
        return 2 * made * inner, made * sum(extra)
    if kind == "Conv" and len(inputs) > 1 and inputs[1] is not None and inputs[1].is_known:
        weight = inputs[1]
        per = weight.size // max(weight.shape[0] or 1, 1)
        return 2 * made * per, made * (len(inputs) > 2)
    if kind == "Einsum":
        return 2 * _einsum(node, inputs), 0
    if not outputs or outputs[0].elem_type not in FLOATS:
        return 0, 0
    if kind in REDUCED and first is not None:
        return 0, REDUCED[kind] * first.size
    if kind in PER_ELEMENT:
        return 0, PER_ELEMENT[kind] * made
    if kind.startswith("Scatter") and attribute(node, "reduction", b"none") != b"none":
        return 0, inputs[2].size if len(inputs) > 2 and inputs[2] is not None else 0
    if kind in ("Sum", "Mean", "Max", "Min"):
        return 0, made * max(len(inputs) - 1, 1)
    return 0, made if kind in ONE_EACH else 0


def _of_ours(node: NodeProto, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> tuple[int, int]:
    x = inputs[0]
    if node.op_type == "MoeGroupedMatmul" and x is not None and outputs:
        return 2 * x.size * (outputs[0].shape[-1] or 0), 0
    if node.op_type == "MoeGroupedMatmulWeightGrad" and x is not None:
        other = inputs[1]
        return 2 * x.size * ((other.shape[-1] or 0) if other is not None else 0), 0
    if node.op_type in ROUTED:
        where, times = ROUTED[node.op_type]
        rows = x if where == "in" else (outputs[0] if outputs else None)
        return 0, times * (rows.size if rows is not None else 0)
    return 0, 0


def _einsum(node: NodeProto, inputs: Sequence[Tensor | None]) -> int:
    terms = attribute(node, "equation", b"").decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, inputs, strict=False):
        if tensor is None or not tensor.is_known or "." in term or len(term) != len(tensor.shape):
            return 0
        sizes |= {letter: dim or 0 for letter, dim in zip(term, tensor.shape, strict=True)}
    return math.prod(sizes.values())
