"""``moe_onnx.validate``: everything that can be known of a model before it costs a training run."""

from __future__ import annotations

import functools
import os
import time
import traceback
from importlib.metadata import PackageNotFoundError, version

from onnx import ModelProto

from moe_onnx.errors import OptionError
from moe_onnx.spec import PACKAGE_VERSION
from moe_onnx.validation import families
from moe_onnx.validation.documents.targets import TARGETS
from moe_onnx.validation.findings import (
    LEVELS,
    SEVERITIES,
    CheckRun,
    Figure,
    Finding,
    NotDone,
    Report,
    Skipped,
)
from moe_onnx.validation.registry import CHECKS, CODES, Check, code
from moe_onnx.validation.subject import Options, Subject, open_subject

CHECK_FAILED = code(
    "MO001",
    "error",
    "A check of moe_onnx failed",
    why="An exception left a check. What the check looks at is not known to hold. This is a defect of "
    "moe_onnx, not of the model.",
    mend="Report it with the traceback that the JSON report holds, and the model if you may.",
)


def validate(
    model: ModelProto | str | os.PathLike[str],
    *,
    level: str = "static",
    target: str | None = None,
    ub_size: int | None = None,
    seed: int = 0,
) -> Report:
    """Check a model: any ONNX file, of this package or not.

    Args:
        model: A path (external data stays where it is), or a ``ModelProto``.
        level: ``"static"`` reads the model; ``"run"`` also makes sessions and compares their outputs;
            ``"full"`` also holds every gradient against finite differences. Each includes the ones before. A
            model whose weights take more than 2 GiB (``MAX_BYTES``) is not loaded, and a run that takes
            longer than 60 s is ended: the report says what was left out for that.
        target: A device whose limits the model is held to as well: see ``moe-onnx validate --help``.
        ub_size: Bytes of the device's unified buffer, instead of the target's own.
        seed: Of the inputs that are drawn for runs.

    Returns:
        The report. It has an error where anything is wrong; nothing is raised for that.

    Raises:
        OptionError: If an option is none of the legal ones.
        ModelFileError: If there is no such file, or it is no model.
    """
    if level not in LEVELS:
        raise OptionError(f"level must be one of {', '.join(map(repr, LEVELS))}, got {level!r}.")
    if target is not None and target not in TARGETS:
        raise OptionError(f"target must be one of {', '.join(map(repr, TARGETS))}, got {target!r}.")
    if ub_size is not None and ub_size <= 0:
        raise OptionError(f"ub_size must be a number of bytes > 0, got {ub_size}.")
    families.load()
    subject = open_subject(model, Options(level, target or "", ub_size, seed))
    report = Report(subject.name, level, target or "", versions=dict(_versions()))
    for known in LEVELS[: LEVELS.index(level) + 1]:
        subject.errors = tuple(dict.fromkeys(finding.code for finding in report.of_severity("error")))
        for one in CHECKS:
            if one.level == known:
                _run(one, subject, report)
    rank = {severity: number for number, severity in enumerate(SEVERITIES)}
    report.findings.sort(key=lambda finding: (rank[finding.severity], finding.code))
    return report


def _run(one: Check, subject: Subject, report: Report) -> None:
    start = time.perf_counter()
    findings: list[Finding] = []
    figures: list[Figure] = []
    skipped: list[str] = []
    try:
        for outcome in one.function(subject):
            if isinstance(outcome, Finding):
                findings.append(outcome)
            elif isinstance(outcome, Skipped):
                skipped.append(outcome.reason)
            else:
                figures.append(outcome)
    except NotDone as reason:
        skipped.append(str(reason))
    except Exception:
        # Not to go on with a guess: the report is not ok from here on, and says why.
        findings.append(CHECK_FAILED(f"check {one.name}", found=traceback.format_exc().strip()))
    seconds = time.perf_counter() - start
    report.findings += findings
    report.figures += figures
    report.checks.append(CheckRun(one.name, one.level, one.summary, seconds, len(findings), tuple(skipped)))


@functools.cache
def _versions() -> dict[str, str]:
    found = {"moe_onnx": PACKAGE_VERSION}
    for package in ("onnx", "onnxruntime", "onnxruntime-extensions", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


__all__ = ["CODES", "validate"]
