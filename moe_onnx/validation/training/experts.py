"""Unrolled experts: every part of a stacked parameter is used, by the rows of its own expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from onnx import NodeProto

from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.flow import Flow
from moe_onnx.validation.training.gradients import loss_of, prepared
from moe_onnx.validation.training.nodes import int_attribute, is_op
from moe_onnx.validation.training.prepared import Training, as_one, few

LOST = code(
    "MO616",
    "error",
    "An expert is lost",
    why="Experts of one layer are stacked, `[E, ...]`, and split into one branch each. A branch that was cut "
    "off, as tracing does with experts that no token of the example chose, or a gradient that has a "
    "constant in its place, leaves an expert that never trains while the router still sends it tokens.",
    mend="Build or export the graph with all experts: each part of the split has a branch and a gradient.",
)
MIXED = code(
    "MO617",
    "error",
    "The branches of experts are mixed up",
    why="Rows, weights, biases and gradients of the experts are split and joined in the same order. One "
    "branch with another's weights, or a join in another order, has all the right shapes and gives every "
    "token of these experts the wrong answer.",
    mend="Use part i of each split in branch i, and join the branches in the order 0, 1, .. E-1.",
)

# They bring together what is of one expert.
_TOGETHER = ("Gemm", "MatMul", "FusedMatMul", "Mul", "MoeSwiGluGrad")


@check("static", LOST, MIXED)
def experts(subject: Subject) -> Iterator[Outcome]:
    """Unrolled experts: every expert of every layer has its branch, in weights and gradients."""
    found = prepared(subject, ("step", "grad", "eval", "forward"))
    if isinstance(found, str):
        yield Skipped(found)
        return
    training, flow = found
    if training.config is None:
        yield Skipped(training.no_config)
        return
    count = training.config.num_experts
    if count < 2:
        yield Skipped("there is one expert")
        return
    lost = list(_lost(training, flow, count))
    if lost:
        yield as_one(lost, "parameters")
    for outcome in _mixed(flow, count):
        if not lost or outcome.code != LOST.name:  # where they are joined they are lost as well
            yield outcome


def is_split(node: NodeProto, count: int) -> bool:
    """Whether a node splits the first axis into one part for each expert."""
    return is_op(node, ("Split",)) and len(node.output) == count and int_attribute(node, "axis", 0) == 0


def _lost(training: Training, flow: Flow, count: int) -> Iterator[Finding]:
    loss = loss_of(training)
    if loss not in flow.maker:
        return
    before = flow.ancestors([loss])
    for parameter in training.manifest.parameters:
        for number in flow.users.get(parameter.name, ()):
            node = flow.nodes[number]
            if not is_split(node, count) or not any(name in before for name in node.output):
                continue
            gone = [index for index, name in enumerate(node.output) if name not in before]
            if gone:
                yield LOST(
                    f"parameter {parameter.name!r}",
                    found=f"{_experts(gone)} of {count} without a way to {loss!r}: parts {gone[:8]} of "
                    f"{flow.scope.place(node)} are not used",
                    expected="a branch for each",
                )


def _experts(numbers: Sequence[int]) -> str:
    return f"expert {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} experts"


def _mixed(flow: Flow, count: int) -> Iterator[Finding]:
    """Follow each part of the splits by expert until the parts are joined again."""
    label: dict[str, int] = {}
    for number in flow.order:
        node = flow.nodes[number]
        if is_op(node, ("Shape", "Size")):
            continue
        if is_split(node, count):
            label.update((name, index) for index, name in enumerate(node.output) if name)
            continue
        labels = [label[name] for name in flow.reads[number] if name in label]
        if not labels:
            continue
        if is_op(node, ("Concat",)) and len(node.input) == count and int_attribute(node, "axis", 0) == 0:
            yield from _join(flow, node, label)
            continue
        different = len(set(labels)) > 1
        if different and node.op_type not in _TOGETHER:
            continue
        if different:
            wrong = next(name for name in flow.reads[number] if label.get(name, labels[0]) != labels[0])
            yield MIXED(
                flow.scope.place(node),
                found=f"it brings {wrong!r} of expert {label[wrong]} to expert {labels[0]}",
                expected="operands of one expert",
            )
        label.update((name, labels[0]) for name in node.output if name)


def _join(flow: Flow, node: NodeProto, label: Mapping[str, int]) -> Iterator[Finding]:
    parts = [label.get(name) for name in node.input]
    if parts == list(range(len(parts))):
        return
    where = flow.scope.place(node)
    foreign = [name for name, part in zip(node.input, parts, strict=True) if part is None]
    absent = [index for index in range(len(parts)) if index not in parts]
    if foreign:
        yield LOST(
            where,
            found=f"{few(foreign)} stands where {_experts(absent)} ({absent[:8]}) should",
            expected="the parts of all experts",
        )
    elif absent:
        yield LOST(where, found=f"it joins experts {parts}", expected=f"all of 0 to {len(parts) - 1}")
    else:
        yield MIXED(where, found=f"it joins experts in the order {parts}", expected="0, 1, ..")
