"""Gradients held against finite differences of the loss, in random directions, in double precision."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from moe_onnx.validation.collapse import few
from moe_onnx.validation.findings import Bars, Finding, Outcome, Skipped
from moe_onnx.validation.full.claims import LOSS, Claim, claims_of
from moe_onnx.validation.full.cuts import line
from moe_onnx.validation.full.double import Lifted, same
from moe_onnx.validation.full.first_run import first_run
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.drawing import Array
from moe_onnx.validation.run.limits import TooLong
from moe_onnx.validation.subject import Subject

TOLERANCE = 1e-5  # of the gradient's norm
# Central differences lose rounding / step and step^2: where a kink or a decision is near, another helps.
_STEPS = (1e-5, 1e-6, 1e-6, 1e-7, 1e-4)
_ROUNDING = 100 * 2.0**-52  # of the loss
_SECONDS = 300.0
_SHOWN = 5  # wrong gradients, the worst first; the bars show all

WRONG = code(
    "MO901",
    "error",
    "A gradient is not the slope of the loss",
    why="In double precision the loss is moved along random directions of one input, and the difference "
    "quotient is held against the gradient that the model gives. A right gradient agrees to "
    "1e-5 of its norm (usually 1e-9); one that lacks a term, has a wrong sign, or is made for other "
    "routing does not, however plausible training with it looks. Directions that change the routing are "
    "drawn again, as the loss has no slope there. A part that is left out on purpose (a stopped gradient) "
    "is found as well. What differences cannot see: a loss that is itself the wrong one.",
    mend="Build the backward pass with moe_onnx.build_training_graph or moe_onnx.differentiate; if the "
    "backward is your own, look at the operators between this input and the loss, the last one first.",
)
SHAPE = code(
    "MO902",
    "error",
    "A gradient has not the shape of its input",
    why="An update adds the gradient to its parameter elementwise. Another shape is broadcast, or refused: "
    "broadcast, it moves whole rows by the gradient of one element.",
    mend="Reduce the gradient over the axes that the forward pass broadcast.",
)
NOT_FINITE = code(
    "MO903",
    "error",
    "A gradient is NaN or infinite where the loss is finite",
    why="Typical causes are 0 times infinity behind a mask, a square root or a logarithm at 0, and the mean "
    "of no elements. One such value turns all parameters into NaN at the first update, through the norm.",
    mend="Choose with Where instead of multiplying by a mask, and choose before the operation that has no "
    "value there.",
)


@check("full", WRONG, SHAPE, NOT_FINITE)
def gradients(subject: Subject) -> Iterator[Outcome]:
    """Each gradient is the slope of the loss, in random directions, in double precision."""
    claims = claims_of(subject)
    if isinstance(claims, Skipped):
        yield claims
        return
    ran = first_run(subject)
    if isinstance(ran, Skipped):
        yield ran
        return
    lifted, found = ran.lifted, ran.found
    if found[LOSS].size != 1:
        yield Skipped(f"the output '{LOSS}' is no scalar, it has shape {list(found[LOSS].shape)}")
        return
    try:
        loss, decisions = lifted.loss()
        again, _ = lifted.loss()
    except Exception as error:  # onnxruntime's own classes have no common base
        yield Skipped(f"the model does not run in double precision: {line(error)}")
        return
    if not np.isfinite(loss):
        yield Skipped(f"the loss is {loss} for the inputs drawn: it has no slope there")
    elif again != loss:
        yield Skipped("the loss of the same inputs differs from run to run: it has no slope")
    else:
        yield from _compare(claims, lifted, found, loss, decisions, ran.rng)


def _compare(
    claims: list[Claim],
    lifted: Lifted,
    found: dict[str, Array],
    loss: float,
    decisions: list[Array],
    rng: np.random.Generator,
) -> Iterator[Outcome]:
    names: list[str] = []
    errors: list[float] = []
    bad: list[tuple[Claim, float, str, str]] = []
    undecided: list[str] = []
    idle: list[str] = []
    start = time.monotonic()
    for number, claim in enumerate(claims):
        if time.monotonic() - start > _SECONDS:
            rest = ", ".join(c.of for c in claims[number:][:5])
            yield Skipped(f"{len(claims) - number} gradients were not reached in {_SECONDS:g} s: {rest} ...")
            break
        try:
            gradient = np.asarray(claim.read(lifted.feed, found), np.float64)
            wrong = _form(claim, gradient, lifted.feed[claim.of])
            least = None if wrong else _least_error(claim, lifted, gradient, loss, decisions, rng)
        except TooLong:
            raise
        except Exception as problem:  # onnxruntime's own classes have no common base
            yield Skipped(f"{claim.of!r}: {line(problem)}")
            continue
        if wrong is not None:
            yield wrong
            continue
        if least is None:
            undecided.append(claim.of)
            continue
        error, slope, quotient = least
        names.append(claim.of)
        errors.append(max(error, 1e-17))  # for a logarithmic scale
        if error > TOLERANCE:
            said = f"slope {slope:.9g} in a random direction, off by {error:.2g} of the gradient's norm"
            bad.append((claim, error, said, f"{quotient:.9g}, as the loss changes"))
        idle += _idle(claim, gradient)
    bad.sort(key=lambda entry: -entry[1])
    for number, (_, _, said, wanted) in enumerate(bad[:_SHOWN], 1):
        more = f"; and so are {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        claims_off = [bad[number - 1], *(bad[_SHOWN:] if number == _SHOWN else ())]
        places = [f"output {claim.where!r}, gradient of {claim.of!r}" for claim, *_ in claims_off]
        yield WRONG(places[0], found=said + more, expected=wanted, places=places)
    if names:
        title = "Gradients against finite differences: error, of the gradient's norm"
        yield Bars(title, tuple(names), tuple(errors), "", True, TOLERANCE)
    if undecided:
        yield Skipped(f"every direction changes a decision (a top-k, say), for {few(undecided, 8)}")
    if idle:
        yield Skipped(f"had no effect on the loss of this batch, with a gradient of 0: {few(idle, 8)}")


def _form(claim: Claim, gradient: Array, value: Array) -> Finding | None:
    where = f"output {claim.where!r}, gradient of {claim.of!r}"
    if gradient.shape != value.shape:
        return SHAPE(where, found=f"shape {list(gradient.shape)}", expected=f"{list(value.shape)}")
    if not np.isfinite(gradient).all():
        bad = ~np.isfinite(gradient)
        at = [int(i) for i in np.argwhere(bad)[0]] if gradient.ndim else []
        return NOT_FINITE(where, found=f"{int(bad.sum())} of {bad.size} values are not finite, first at {at}")
    return None


def _least_error(
    claim: Claim,
    lifted: Lifted,
    gradient: Array,
    loss: float,
    decisions: list[Array],
    rng: np.random.Generator,
) -> tuple[float, float, float] | None:
    """The least error of some steps, as part of the norm, slope and quotient there; None: no slope."""
    value, norm = lifted.feed[claim.of], float(np.linalg.norm(gradient))
    best: tuple[float, float, float] | None = None
    for step in _STEPS:
        direction = rng.standard_normal(value.shape)
        up, up_decisions = lifted.loss({claim.of: value + step * direction})
        down, down_decisions = lifted.loss({claim.of: value - step * direction})
        if not (same(decisions, up_decisions) and same(decisions, down_decisions)):
            continue
        quotient, slope = (up - down) / (2 * step), float((gradient * direction).sum())
        # A gradient of nearly 0 is told from 0 only as far as rounding lets the quotient be known.
        least = _ROUNDING * max(abs(loss), 1.0) / step / TOLERANCE
        error = abs(slope - quotient) / (norm + least) if np.isfinite(quotient) else np.inf
        if best is None or error < best[0]:
            best = error, slope, quotient
        if error <= TOLERANCE:
            break
    return best


def _idle(claim: Claim, gradient: Array) -> Iterable[str]:
    """What the batch does not reach: the whole input, or experts of a stack."""
    if not gradient.any():
        return [claim.of] if gradient.size else []
    if gradient.ndim == 3:
        experts = np.flatnonzero(~gradient.any(axis=(1, 2)))
        return [f"{claim.of}[{', '.join(map(str, experts[:8]))}]"] if experts.size else []
    return []
