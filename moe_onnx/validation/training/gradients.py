"""Gradients: each is that of its own parameter, and counts in the norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from moe_onnx.build.manifest import ParameterInfo
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.flow import MOVES, Flow, flow_of
from moe_onnx.validation.training.nodes import int_attribute, is_op
from moe_onnx.validation.training.prepared import Training, few, training_of

GRADIENT_LOST = code(
    "MO612",
    "error",
    "A gradient does not depend on its parameter",
    why="The gradient of a loss depends on what the loss depends on. One that does not is a constant, mostly "
    "zeros, or belongs to something else: the parameter stands still, or is moved only by weight decay.",
    mend="Differentiate again with `moe_onnx.differentiate` or `build_training_graph`.",
)
GRADIENT_CROSSED = code(
    "MO613",
    "error",
    "A gradient is that of another parameter",
    why="Two outputs of the same shape that changed places go unnoticed by every shape check: training "
    "runs, the loss even falls for a while. A gradient is made of what its parameter is multiplied with "
    "and of what comes back there; here it is made of another parameter's.",
    mend="Bind each gradient to the parameter it is named after; level 'full' measures all of them.",
)
NORM = code(
    "MO620",
    "error",
    "The gradient norm leaves a gradient out",
    why="Clipping scales all gradients by one factor made from the norm over all of them. Without some "
    "of them it is too small, and what should be clipped is not: spikes of the loss that nobody else has.",
    mend="Sum the squares of all trained parameters' gradients, each once.",
)

GRAD_NORM = "grad_norm"
_MOST_BITS = 2**33  # of the table of dependences: 1 GB
_SPREADS = MOVES | {"Expand"}
_WIDELY_USED = 64


def prepared(subject: Subject, assemblies: Sequence[str]) -> tuple[Training, Flow] | str:
    """The manifest and what depends on what in its graph, or why a check of the graph does not apply."""
    training = training_of(subject)
    if isinstance(training, str):
        return training
    if training.assembly not in assemblies:
        return f"the graph {training.assembly!r} has none of what is looked at here"
    if len(subject.main.nodes) * len(training.manifest.parameters) > _MOST_BITS:
        return "nodes and parameters are too many"
    flow = flow_of(subject)
    return (training, flow) if len(flow.order) == len(flow.nodes) else "nodes stand in a cycle"


def loss_of(training: Training) -> str:
    """The output that parameters are for: the loss, or what a graph without one gives."""
    if training.assembly != "forward":
        return "loss"
    return next((one.name for one in training.info.outputs if one.role in ("logits", "output")), "")


def gradient_parts(training: Training, flow: Flow) -> dict[str, frozenset[str]]:
    """By trained parameter, the values that its gradient is the elementwise sum of."""
    found = {}
    for parameter in training.manifest.parameters:
        name = parameter.gradient if training.assembly == "grad" else parameter.updated
        if parameter.trained and name in flow.maker:
            leaves = flow.spread(name, stop={GRAD_NORM}).leaves
            found[parameter.name] = frozenset(leaf for leaf in leaves if not _is_total(flow, leaf))
    return found


def _is_total(flow: Flow, name: str) -> bool:
    """Whether a value is a sum over all of a tensor: a number, which the norm is made of."""
    node = flow.node(name)
    if node is None or not node.op_type.startswith("Reduce"):
        return False
    has_axes = (len(node.input) > 1 and bool(node.input[1])) or any(a.name == "axes" for a in node.attribute)
    return not has_axes and int_attribute(node, "keepdims", 1) == 0


@check("static", GRADIENT_LOST, GRADIENT_CROSSED, NORM)
def gradients(subject: Subject) -> Iterator[Outcome]:
    """Every gradient depends on its parameter, is its own, and counts in the norm."""
    found = prepared(subject, ("step", "grad"))
    if isinstance(found, str):
        yield Skipped(found)
        return
    training, flow = found
    parts = gradient_parts(training, flow)
    depends = flow.dependence([p.name for p in training.manifest.parameters])
    bits = {p.name: 1 << number for number, p in enumerate(training.manifest.parameters)}
    before = flow.ancestors(["loss"])
    counted = flow.ancestors([GRAD_NORM]) if GRAD_NORM in flow.maker else None
    sound, uncounted = [], []
    for parameter in training.manifest.parameters:
        own = parts.get(parameter.name)
        # A parameter that the loss does not see is another finding, as is an update without gradient.
        if own is None or parameter.name not in before or (training.assembly == "step" and not own):
            continue
        if not any(depends.get(name, 0) & bits[parameter.name] for name in own):
            where = f"gradient {parameter.gradient!r}" if training.assembly == "grad" else "gradient"
            made = f"{few(own)} depends on nothing of it" if own else "it is a constant, or an input"
            yield GRADIENT_LOST(f"{where} of parameter {parameter.name!r}", found=made)
            continue
        sound.append(parameter)
        if counted is not None and not all(name in counted for name in own):
            uncounted.append(parameter.name)
    yield from _crossed(flow, sound, parts)
    if uncounted:
        yield NORM(
            f"output {GRAD_NORM!r}",
            found=f"{len(uncounted)} of {len(parts)} gradients are not in it: those of {few(uncounted)}",
            expected="all",
            places=[f"gradient of parameter {name!r}" for name in uncounted],
        )


def _crossed(
    flow: Flow, parameters: Sequence[ParameterInfo], parts: Mapping[str, frozenset[str]]
) -> Iterator[Outcome]:
    same: dict[frozenset[str], list[str]] = {}
    for parameter in parameters:
        same.setdefault(parts[parameter.name], []).append(parameter.name)
    for part, names in same.items():
        if len(names) > 1:
            where = f"gradients of parameters {few(names)}"
            yield GRADIENT_CROSSED(
                where,
                found=f"all are {few(part)}",
                expected="one gradient for each",
                places=[f"gradient of parameter {name!r}" for name in names],
            )
    shared = {name for names in same.values() if len(names) > 1 for name in names}
    uses = _companions(flow, [parameter.name for parameter in parameters])
    owners: dict[str, list[str]] = {}
    for name, values in uses.items():
        for value in values:
            owners.setdefault(value, []).append(name)
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    for parameter in parameters:
        if parameter.name in shared:
            continue
        agree: Counter[str] = Counter()
        for value in _operands(flow, parts[parameter.name]):
            if len(owners.get(value, ())) <= _WIDELY_USED:
                agree.update(owners.get(value, ()))
        others = [name for name in agree if shapes[name] == parameter.shape]
        best = max(others, key=lambda name: agree[name], default=parameter.name)
        if agree[best] > agree[parameter.name]:
            yield GRADIENT_CROSSED(
                f"gradient of parameter {parameter.name!r}",
                found=f"it is made of what {best!r} is multiplied with: {few(parts[parameter.name])}",
                expected="of what its own parameter is multiplied with",
            )


def _companions(flow: Flow, names: Sequence[str]) -> dict[str, set[str]]:
    """For every parameter, the values that it is multiplied with, forward and backward."""
    parameters = set(names)
    found: dict[str, set[str]] = {}
    beside: dict[str, set[str]] = {}
    for name in names:
        values: set[str] = set()
        left, seen = [name], {name}
        while left:
            value = left.pop()
            for number in flow.users.get(value, ()):
                node = flow.nodes[number]
                if is_op(node, _SPREADS) or is_op(node, ("Split",)):
                    left += [out for out in node.output if out and out not in seen]
                    seen.update(node.output)
                else:
                    values.update(flow.source(one) for one in node.input if one and one != value)
        found[name] = {value for value in values - parameters if _varies(flow, value)}
        beside[name] = values & parameters
    # A bias stands beside the matrix of its product.
    return {name: found[name].union(*(found[one] for one in beside[name])) for name in names}


def _operands(flow: Flow, parts: Iterable[str]) -> set[str]:
    """The values that a gradient is the product of."""
    found: set[str] = set()
    left = list(parts)
    while left:
        value = left.pop()
        if value in found:
            continue
        found.add(value)
        node = flow.node(value)
        if node is None:
            continue
        if is_op(node, _SPREADS) or is_op(node, ("ReduceSum", "Slice", "Pad")):
            left += list(node.input[:1])
        elif is_op(node, ("Concat",)):
            left += list(node.input)
        else:
            found.update(flow.source(name) for name in node.input if name)
    return {value for value in found if value in flow.maker or value in flow.inputs}


def _varies(flow: Flow, value: str) -> bool:
    return value in flow.maker or value in flow.inputs
