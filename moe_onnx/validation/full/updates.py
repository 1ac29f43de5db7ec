"""Updates held against the optimizer that the manifest names, in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moe_onnx.build.manifest import Manifest, ParameterInfo
from moe_onnx.build.optimizers import SGD, AdamW, Optimizer
from moe_onnx.validation.findings import Bars, Outcome, Skipped
from moe_onnx.validation.full.claims import claims_of, clip_of, optimizer_of
from moe_onnx.validation.full.first_run import first_run
from moe_onnx.validation.full.lively import Arrays
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.drawing import Array
from moe_onnx.validation.run.feeds import manifest_of
from moe_onnx.validation.subject import Subject

TOLERANCE = 1e-5  # of the largest change
_SHOWN = 5  # parameters, the worst first; the bars show all

UPDATE = code(
    "MO904",
    "error",
    "An update is not that of the optimizer",
    why="The manifest names an optimizer and its options. In double precision, for parameters, states, "
    "gradients and a step number drawn at random, the graph's updated parameters and states are held "
    "against that optimizer's formula (torch.optim's, with clip_grad_norm_). Resuming a checkpoint in "
    "another trainer, and comparing with one, both rest on that.",
    mend="Build the graph again with moe_onnx.build_training_graph, or correct the manifest's optimizer.",
)


@check("full", UPDATE)
def updates(subject: Subject) -> Iterator[Outcome]:
    """Updated parameters and states are those of the manifest's optimizer."""
    manifest, optimizer = manifest_of(subject), optimizer_of(subject)
    outputs = {output.name for output in subject.model.graph.output}
    if manifest is None or optimizer is None:
        yield Skipped("no manifest names an optimizer")
        return
    if not any(info.updated in outputs for info in manifest.parameters):
        yield Skipped("this graph updates no parameter")
        return
    ran = first_run(subject)
    if isinstance(ran, Skipped):
        yield ran
        return
    feed, found = ran.lifted.feed, ran.found
    given = {info.gradient: feed[info.gradient] for info in manifest.parameters if info.gradient in feed}
    claims = claims_of(subject)
    taken = {} if isinstance(claims, Skipped) else {claim.of: claim for claim in claims}
    needed = {"lr", "step", *(s.input for p in manifest.parameters for s in p.state.values())}
    if missing := needed - set(feed):
        yield Skipped(f"the graph has no input {min(missing)!r}, which the manifest's optimizer needs")
        return
    errors: dict[str, float] = {}
    worst: dict[str, str] = {}  # output of each parameter
    for info in _with_update(manifest, outputs):
        try:
            gradient = given.get(info.gradient)
            if gradient is None and info.name in taken:
                gradient = taken[info.name].read(feed, found)
            if info.trained:
                wanted = _expected(info, optimizer, gradient, feed, found)
            else:
                wanted = _balanced(info, manifest, gradient, feed, found)
        except (KeyError, ValueError, IndexError) as problem:
            yield Skipped(f"the manifest does not fit the graph at {info.name!r}: {problem}")
            continue
        if wanted is None:
            yield Skipped(f"nothing tells what {info.name!r} is updated by")
            continue
        for name, (before, value) in wanted.items():
            error = _error(found[name], value, before)
            if error > errors.get(info.name, 1e-17):
                errors[info.name], worst[info.name] = error, name
            else:
                errors.setdefault(info.name, 1e-17)
    bad = sorted((name for name in errors if errors[name] > TOLERANCE), key=lambda name: -errors[name])
    for number, name in enumerate(bad[:_SHOWN], 1):
        more = f"; and so are {len(bad) - _SHOWN} more parameters'" if len(bad) > _SHOWN else ""
        places = [f"output {worst[one]!r}" for one in (name, *(bad[_SHOWN:] if number == _SHOWN else ()))]
        yield UPDATE(
            places[0],
            places=places,
            found=f"off by {errors[name]:.2g} of the largest change{more}",
            expected=f"{type(optimizer).__name__} with the manifest's options",
        )
    if errors:
        title = "Updates against the optimizer's formula: error, of the largest change"
        yield Bars(title, tuple(errors), tuple(errors.values()), "", True, TOLERANCE)


def _with_update(manifest: Manifest, outputs: set[str]) -> Iterator[ParameterInfo]:
    for info in manifest.parameters:
        if {info.updated, *(state.output for state in info.state.values())} <= outputs:
            yield info


def _expected(
    info: ParameterInfo, optimizer: Optimizer, gradient: Array | None, feed: Arrays, found: Arrays
) -> dict[str, tuple[Array, Array]] | None:
    """What updated values should be, by output, each with the value before."""
    norm = feed.get("grad_norm", found.get("grad_norm"))
    if gradient is None or (norm is None and optimizer.max_grad_norm is not None):
        return None
    g = gradient * clip_of(optimizer, 0.0 if norm is None else norm)
    lr, step = float(feed["lr"].reshape(())), float(feed["step"].reshape(()))
    before = feed[info.name]
    decay = optimizer.weight_decay if info.weight_decay else 0.0
    states = {name: (feed[state.input], state.output) for name, state in info.state.items()}
    if isinstance(optimizer, SGD):
        g = g + decay * before
        wanted = {}
        if optimizer.momentum:
            old, output = states["momentum_buffer"]
            buffer = optimizer.momentum * old + g
            wanted[output] = old, buffer
            g = g + optimizer.momentum * buffer if optimizer.nesterov else buffer
        return {info.updated: (before, before - lr * g), **wanted}
    return _adamw(info, optimizer, g, (lr, step, decay), states, before)


def _adamw(
    info: ParameterInfo,
    optimizer: AdamW,
    g: Array,
    scalars: tuple[float, float, float],
    states: dict[str, tuple[Array, str]],
    before: Array,
) -> dict[str, tuple[Array, Array]]:
    lr, step, decay = scalars
    (old_m, m_output), (old_v, v_output) = states["exp_avg"], states["exp_avg_sq"]
    # As a float32 graph holds them: of 0.999 the rounding alone is a hundred thousandth of v's change.
    beta1, rest1, beta2, rest2 = (
        float(np.float32(x))
        for x in (optimizer.beta1, 1 - optimizer.beta1, optimizer.beta2, 1 - optimizer.beta2)
    )
    m = beta1 * old_m + rest1 * g
    v = beta2 * old_v + rest2 * g * g
    root = np.sqrt(v / (1 - optimizer.beta2**step)) + optimizer.eps
    after = before * (1 - lr * decay) - lr * m / (1 - optimizer.beta1**step) / root
    return {info.updated: (before, after), m_output: (old_m, m), v_output: (old_v, v)}


def _balanced(
    info: ParameterInfo, manifest: Manifest, excess: Array | None, feed: Arrays, found: Arrays
) -> dict[str, tuple[Array, Array]] | None:
    """A selection bias falls where experts have more tokens than the mean, and rises where fewer."""
    rate = manifest.config.get("router_bias_update_rate")
    if excess is None and "expert_load" in found:
        biases = [p.name for p in manifest.parameters if not p.trained]
        load = found["expert_load"].astype(np.float64)
        if load.ndim == 2 and len(load) == len(biases):
            row = load[biases.index(info.name)]
            excess = row - row.mean()
    if excess is None or not isinstance(rate, (int, float)):
        return None
    before = feed[info.name]
    return {info.updated: (before, before - rate * np.sign(excess))}


def _error(found: Array, wanted: Array, before: Array) -> float:
    if found.shape != wanted.shape:
        return math.inf
    if not found.size:
        return 0.0
    change, gap = float(np.abs(wanted - before).max()), float(np.abs(found - wanted).max())
    # What is rounded away of a small change of large values is no error.
    least = 2.0**-48 * float(np.abs(before).max()) / TOLERANCE
    return gap / (change + least) if math.isfinite(gap) and change + least > 0 else (gap and math.inf)
