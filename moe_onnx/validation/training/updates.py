"""Updates: each is made of its own parameter, gradient, states, and of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe_onnx.build.manifest import ParameterInfo
from moe_onnx.build.optimizers import SGD, AdamW
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.flow import Flow, scalar
from moe_onnx.validation.training.gradients import GRAD_NORM, gradient_parts, prepared
from moe_onnx.validation.training.prepared import Training, as_one, few

INCOMPLETE = code(
    "MO614",
    "error",
    "An update leaves something out",
    why="A parameter is updated from itself, its gradient, its states and the learning rate; AdamW's bias "
    "correction needs the step, and clipping the norm. An update without one of them still has the right "
    "shape: the parameter stands still, starts anew at each step, or ignores the schedule.",
    mend="Build the graph again with `build_training_graph`; its optimizers equal PyTorch's.",
)
CROSSED = code(
    "MO615",
    "error",
    "An update reads what belongs to another parameter",
    why="States and parameters of one shape that changed places fit everywhere. Adam then divides one "
    "parameter's gradient by another's second moment, which trains, only worse.",
    mend="Let each update read its own parameter, gradient and states.",
)
CONSTANT = code(
    "MO626",
    "error",
    "An update computes with another constant than its optimizer says",
    why="Betas, eps, weight decay, momentum and the clipping limit are constants of the graph; manifest and "
    "checkpoint only repeat them. If they differ, a run is resumed, compared and reported with values that "
    "it was not trained with.",
    mend="Build the graph again with the optimizer that is meant; its options cannot be changed afterwards.",
)


@check("static", INCOMPLETE, CROSSED, CONSTANT)
def updates(subject: Subject) -> Iterator[Outcome]:
    """Every update is made of its own parameter, gradient, states, and its optimizer's constants."""
    found = prepared(subject, ("step", "apply"))
    if isinstance(found, str):
        yield Skipped(found)
        return
    training, flow = found
    parts = gradient_parts(training, flow) if training.assembly == "step" else {}
    owner: dict[str, str] = {}
    for parameter in training.manifest.parameters:
        states = [state.input for state in parameter.state.values()]
        for name in (parameter.name, parameter.gradient, *states):
            owner[name] = parameter.name
    same: dict[tuple[str, str], list[Finding]] = {}
    for parameter in training.manifest.parameters:
        for kind, finding in _of_parameter(training, flow, parameter, owner, parts):
            same.setdefault((finding.code, kind), []).append(finding)
    for findings in same.values():
        yield as_one(findings, "outputs")


def _of_parameter(
    training: Training,
    flow: Flow,
    parameter: ParameterInfo,
    owner: dict[str, str],
    parts: dict[str, frozenset[str]],
) -> Iterator[tuple[str, Finding]]:
    """Findings, each with what it has in common with others of the same cause."""
    applies = training.assembly == "apply"
    gradient = [parameter.gradient] if applies else []
    states = {state.output: state.input for state in parameter.state.values()}
    wanted = {
        parameter.updated: [parameter.name, *gradient, *states.values(), *_scalars(training, parameter)]
    }
    wanted |= {output: [given, *gradient] for output, given in states.items()}
    for output, needs in wanted.items():
        if output not in flow.maker:
            continue
        spread = flow.spread(output, stop={GRAD_NORM})
        reached = spread.inputs | spread.beside
        missing = [name for name in needs if name not in reached and _is_there(flow, name)]
        foreign = [
            name for name in sorted(spread.inputs) if owner.get(name, parameter.name) != parameter.name
        ]
        if foreign:
            other = owner[foreign[0]]
            finding = CROSSED(
                f"output {output!r}",
                found=f"it reads {few(foreign)} of parameter {other!r}",
                expected=f"only what belongs to {parameter.name!r}",
            )
            yield " and ".join(sorted((parameter.name, other))), finding
        elif missing:
            kind = " ".join(name.removeprefix(parameter.name) for name in missing)
            yield kind, INCOMPLETE(f"output {output!r}", found=f"it does not depend on {few(missing)}")
        elif not applies and not (spread.leaves & parts.get(parameter.name, spread.leaves)):
            what = "the gradient" if parameter.trained else "the loads of the experts"
            yield what, INCOMPLETE(f"output {output!r}", found=f"it does not depend on {what}")
        else:
            key = next((key for key, state in parameter.state.items() if state.output == output), "")
            yield from _constants(training, flow, parameter, output, key, spread.constants)


def _constants(
    training: Training, flow: Flow, parameter: ParameterInfo, output: str, state: str, names: set[str]
) -> Iterator[tuple[str, Finding]]:
    values = [scalar(flow, name) for name in names]
    read = {np.float32(value) for value in values if value is not None}
    for option, value in _options(training, parameter, state).items():
        if np.float32(value) not in read:
            there = ", ".join(f"{one:g}" for one in sorted(read)) or "none"
            expected = f"{option} = {value:g} among them"
            yield option, CONSTANT(f"output {output!r}", found=f"constants {there}", expected=expected)


def _options(training: Training, parameter: ParameterInfo, state: str) -> dict[str, float]:
    """The options that must stand in an update as they are, by name; ``state`` is "" for the parameter."""
    optimizer, config = training.optimizer, training.config
    if not parameter.trained:
        rate = 0.0 if config is None else config.router_bias_update_rate
        return {"router_bias_update_rate": rate} if rate else {}
    wanted: dict[str, float] = {}
    if optimizer is None:
        return wanted
    if optimizer.max_grad_norm is not None:
        wanted["max_grad_norm"] = optimizer.max_grad_norm
    decay = {"weight_decay": optimizer.weight_decay} if parameter.weight_decay else {}
    if isinstance(optimizer, SGD):
        momentum = {"momentum": optimizer.momentum} if optimizer.momentum else {}
        return wanted | decay | momentum
    betas = {"exp_avg": {"beta1": optimizer.beta1}, "exp_avg_sq": {"beta2": optimizer.beta2}}
    return wanted | betas.get(state, {"eps": optimizer.eps, **decay})


def _scalars(training: Training, parameter: ParameterInfo) -> list[str]:
    """The hyperparameters that an update needs; those of a selection bias are constants."""
    optimizer = training.optimizer
    if not parameter.trained or optimizer is None:
        return []
    names = ["lr"]
    if isinstance(optimizer, AdamW):
        names.append("step")
    return names if optimizer.max_grad_norm is None else [*names, GRAD_NORM]


def _is_there(flow: Flow, name: str) -> bool:
    """What the graph does not have at all is a finding about its inputs and outputs."""
    return name in flow.inputs or name in flow.maker
