"""Proof of a rewrite by running: the model before and after, on random and adversarial inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from moe_onnx.adapters.python_ops import SESSION_DOMAIN
from moe_onnx.errors import VerificationError
from moe_onnx.rewrite.legalize import uses_domain
from moe_onnx.rewrite.notes import scopes
from moe_onnx.rewrite.passes import Applied
from moe_onnx.runtime.register import register
from moe_onnx.validation.rewriting.cases import TRIED, Case, adversarial, drawn
from moe_onnx.validation.run.aborting import has_nested_if, refuse_aborting, turning_einsum
from moe_onnx.validation.run.agreement import difference, differing, is_float, same_bits
from moe_onnx.validation.run.feeds import fed_bytes
from moe_onnx.validation.run.limits import TooLong
from moe_onnx.validation.run.messages import said
from moe_onnx.validation.run.sessions import (
    ERRORS,
    PLAIN,
    QUIET,
    WITHOUT_FOLDING,
    Array,
    MayEndProcess,
    Outputs,
    Session,
    make_session,
    weight_bytes,
)
from moe_onnx.validation.subject import Subject

_FOLDER = "session.model_external_initializers_file_folder_path"
_UNVERIFIED = (
    "{} Give inputs that it runs with (inputs=..., --inputs FILE.npz), or rewrite it without (verify=False, "
    "--no-verify)."
)


def verify(subject: Subject, done: Applied, *, seed: int, inputs: Mapping[str, Array] | None) -> list[str]:
    """Run a model and what passes made of it on the same inputs, and compare all outputs.

    Nodes of ``ascend.moe`` run by this package's function bodies, on both sides.

    Args:
        subject: The model before.
        done: What passes made, and how far outputs may move.
        seed: Of drawn inputs.
        inputs: The first inputs to use, instead of drawn ones.

    Returns:
        A line for each case: ``"zeros: 3 outputs are the same to the bit"``.

    Raises:
        VerificationError: If an output differs by more than the passes' tolerance, the rewritten model fails
            where the one before runs, or the one before could not be run at all.
    """
    size = weight_bytes(subject) + fed_bytes(subject)
    if size > subject.options.max_bytes:
        raise _not_run(
            subject, f"weights and inputs of {size} bytes are more than {subject.options.max_bytes}"
        )
    made = Subject(done.model, subject.name, subject.path, subject.folder, subject.options)
    nested = has_nested_if(subject.model) or has_nested_if(made.model)  # both sessions alike
    try:
        before = _session(subject, without_folding=nested)
    except ERRORS as error:
        raise _not_run(subject, f"no session can be made of it: {said(error)}") from error
    try:
        after = _session(made, without_folding=nested)
    except ERRORS as error:
        raise VerificationError(
            f"{subject.name}: no session can be made of the rewritten model, and of the one before there "
            f"can: {said(error)}. The original is as it was."
        ) from error
    base, outputs = _first(subject, before, seed, inputs)
    steady = _steady(before, base, outputs)
    lines = [_compared(subject, done, base, _only(outputs, steady), after, steady)]
    for case in adversarial(subject, base, seed, exact=not done.tolerance):
        try:
            outputs = before.run(case.values)
        except MayEndProcess as error:
            lines.append(f"{case.name}: left out: {error}")
            continue
        except ERRORS:
            lines.append(f"{case.name}: left out, as the model before refuses it")
            continue
        lines.append(_compared(subject, done, case, _only(outputs, steady), after, steady))
    return lines


def _session(subject: Subject, *, without_folding: bool) -> Session:
    """A session of a model, by function bodies, or as the Python ops that it was legalized to."""
    if not any(n.domain == SESSION_DOMAIN for scope in scopes(subject.model) for n in scope.owner.node):
        route = "body" if uses_domain(subject.model) else PLAIN
        return make_session(subject, route, without_folding=without_folding)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if subject.folder is not None:
        options.add_session_config_entry(_FOLDER, str(subject.folder))
    register(options, "python")
    refuse_aborting(subject.model)
    data = subject.model.SerializeToString()
    how = QUIET | (WITHOUT_FOLDING if without_folding else {})
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"], **how)
    return Session(session, PLAIN, 1, 0.0, None, turning_einsum(subject.model))


def _first(
    subject: Subject, session: Session, seed: int, inputs: Mapping[str, Array] | None
) -> tuple[Case, Outputs]:
    """Inputs that the model before runs with, and its outputs."""
    reason = ""
    for size in TRIED if inputs is None else TRIED[:1]:
        case = drawn(subject, seed, size) if inputs is None else Case("the inputs given", dict(inputs))
        if isinstance(case, str):
            raise _not_run(subject, case)
        try:
            return case, session.run(case.values)
        except TooLong as error:
            raise _not_run(subject, str(error)) from error
        except ERRORS as error:
            reason = reason or said(error)
    raise _not_run(subject, f"it does not run with {'drawn' if inputs is None else 'these'} inputs: {reason}")


def _not_run(subject: Subject, reason: str) -> VerificationError:
    return VerificationError(_UNVERIFIED.format(f"{subject.name}: it could not be verified, as {reason}."))


def _steady(session: Session, case: Case, outputs: Outputs) -> list[str]:
    """The outputs that are the same in a second run: random operators give others."""
    again = session.run(case.values)
    return [name for name, value in outputs.items() if name in again and same_bits(value, again[name])]


def _only(outputs: Outputs, names: Sequence[str]) -> Outputs:
    return {name: outputs[name] for name in names if name in outputs}


def _compared(
    subject: Subject, done: Applied, case: Case, expected: Outputs, session: Session, steady: Sequence[str]
) -> str:
    try:
        found = session.run(_as_taken(session, case.values) if done.other_floats else case.values)
    except ERRORS as error:
        raise VerificationError(
            f"{subject.name}: the rewritten model fails, and the one before runs, with {case}: {said(error)}."
            " The original is as it was.",
            inputs=case.values,
        ) from error
    found = _only(found, steady)
    if done.other_floats:
        found = {
            name: value.astype(expected[name].dtype)
            if name in expected and is_float(value) and is_float(expected[name])
            else value
            for name, value in found.items()
        }
    wrong = differing(expected, found, done.tolerance)
    if wrong:
        name, gap = max(wrong.items(), key=lambda item: item[1])
        raise VerificationError(
            f"{subject.name}: {_which(name, gap, expected, found, done)} with {case}. The rewrite by "
            f"{', '.join(done.report.passes)} was not accepted; the original is as it was.",
            output=name,
            difference=gap,
            inputs=case.values,
        )
    return f"{case.name}: {_how_equal(expected, found)}"


def _as_taken(session: Session, values: Mapping[str, Array]) -> dict[str, Array]:
    kinds = {arg.name: arg.type for arg in session.session.get_inputs()}
    return {
        name: value.astype(np.float64) if kinds.get(name) == "tensor(double)" else value
        for name, value in values.items()
    }


def _how_equal(expected: Outputs, found: Outputs) -> str:
    count = f"{len(expected)} output{'s' * (len(expected) != 1)}"
    if all(same_bits(value, found[name]) for name, value in expected.items()):
        return f"{count} the same to the bit"
    gaps = {name: difference(value, found[name]) for name, value in expected.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    of = "of its largest value" if expected[worst].any() else "of 0, which it was everywhere"
    return f"{count} equal, '{worst}' within {gaps[worst]:.1e} {of}"


def _which(name: str, gap: float, expected: Outputs, found: Outputs, done: Applied) -> str:
    """The output, by how much it differs, and the position where most."""
    if name not in expected or name not in found:
        return f"output '{name}' is only in the {'rewritten model' if name in found else 'model before'}"
    one, two = expected[name], found[name]
    if one.shape != two.shape or one.dtype != two.dtype:
        return f"output '{name}' is {two.dtype}{list(two.shape)}, it was {one.dtype}{list(one.shape)},"
    limit = done.tolerance.get(one.dtype.name, 0.0)
    at = _worst(one, two)
    size = f"by {gap:.1e} of its largest value" if gap < float("inf") else "altogether"
    if gap < float("inf") and not one.any():  # a share of nothing is no number
        size = f"by {gap:.1e}, and was 0 everywhere"
    allowed = f"at most {limit:g} is allowed" if limit else "no bit may"
    place = f"'{name}'{list(map(int, at))} is {two[at]}, it was {one[at]}"
    return f"output '{name}' differs {size}, {allowed}: {place},"


def _worst(one: Array, two: Array) -> Any:
    if not is_float(one):
        return tuple(np.argwhere(one != two)[0])
    a, b = one.astype(np.float64), two.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(a - b)
    gap[np.isnan(a) & np.isnan(b)] = -1
    gap[a == b] = -1
    gap[np.isnan(gap)] = np.inf
    return np.unravel_index(int(np.argmax(gap)), one.shape)
