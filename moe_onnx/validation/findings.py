"""What a validation says: codes, findings, figures, and the report that holds them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from moe_onnx.errors import ValidationError

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
LEVELS = ("static", "run", "full")
REPORT_FORMAT, REPORT_VERSION = "moe_onnx.report", 1


@dataclass(frozen=True)
class Code:
    """A kind of finding. Codes are stable: none ever changes its meaning, none is used again.

    Args:
        name: ``"MO203"``; the hundreds are the family.
        severity: ``"error"``: the model is wrong, or will not run; ``"warning"``: it may be silently
            wrong or needlessly dear; ``"note"``: worth knowing.
        title: One line, a statement about the model.
        why: What goes wrong, and where that was seen: one paragraph of Markdown.
        mend: What to do, where a finding does not know better.
    """

    name: str
    severity: Severity
    title: str
    why: str
    mend: str

    def __call__(
        self,
        where: str,
        *,
        found: str,
        expected: str = "",
        mend: str = "",
        aclnn: int | None = None,
        places: Iterable[str] = (),
    ) -> Finding:
        """A finding of this kind at ``where``; with ``places``, where it is of several."""
        every = tuple(places) or (where,)
        return Finding(
            self.name, self.severity, where, found, expected, mend or self.mend, self.title, aclnn, every
        )


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Attributes:
        code: Name of its :class:`Code`; ``moe-onnx explain CODE`` prints the page about it.
        severity: ``"error"``, ``"warning"`` or ``"note"``.
        where: Node, tensor, function or file it is about; of several the first, and how many more.
        found: What is there.
        expected: What should be, or ``""`` where ``found`` says it all.
        mend: What to do.
        title: The code's title.
        aclnn_status: What the source documents' operator returns in this case, or None.
        places: Every node, tensor, parameter or function that is so, named as in ``where``: no count
            stands for any of them. ``where`` alone, where it is one.
    """

    code: str
    severity: Severity
    where: str
    found: str
    expected: str
    mend: str
    title: str
    aclnn_status: int | None = None
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        wanted = f" Expected: {self.expected}." if self.expected else ""
        status = f" (aclnn {self.aclnn_status})" if self.aclnn_status else ""
        return f"{self.code} {self.severity}: {self.where}: {self.found}.{wanted} {self.mend}{status}"


@dataclass(frozen=True)
class Table:
    """Rows of measured or counted values, for the report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Bars:
    """One value for each label, for a plot; ``limit`` is where values become findings."""

    title: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    unit: str = ""
    log: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Skipped:
    """Why a check did not apply to this model, or only in part."""

    reason: str


class NotDone(Exception):
    """Raised inside a check that cannot go on: what it found so far holds, its message is why it stopped."""


Figure = Table | Bars
Outcome = Finding | Figure | Skipped


@dataclass(frozen=True)
class CheckRun:
    """One check: what it looks at, how long it took, how many findings it had, what it left out."""

    name: str
    level: str
    summary: str
    seconds: float
    findings: int
    skipped: tuple[str, ...] = ()


@dataclass
class Report:
    """The outcome of :func:`moe_onnx.validate`.

    Attributes:
        subject: The file, or what else was validated.
        level: The level asked for.
        target: The device asked for, or ``""``.
        findings: Errors first, then warnings, then notes; within these by code and place.
        checks: Every check of the level, also those that did not apply.
        figures: Tables and bars of measured values.
        versions: Packages the report was made with.
    """

    subject: str
    level: str
    target: str = ""
    findings: list[Finding] = field(default_factory=list)
    checks: list[CheckRun] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not self.of_severity("error")

    def of_severity(self, severity: str) -> list[Finding]:
        """The findings of a severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes found, each once, in order."""
        return tuple(dict.fromkeys(sorted(finding.code for finding in self.findings)))

    def raise_if_failed(self) -> None:
        """Raise the errors found.

        Raises:
            ValidationError: If :attr:`ok` is false; its ``report`` is this one.
        """
        if errors := self.of_severity("error"):
            lines = "\n".join(f"  {finding}" for finding in errors)
            raise ValidationError(f"{self.subject}: {len(errors)} errors.\n{lines}", report=self)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, as in the JSON file."""
        figures = [{"kind": type(figure).__name__.lower(), **asdict(figure)} for figure in self.figures]
        counts = {severity: len(self.of_severity(severity)) for severity in SEVERITIES}
        return {
            "format": REPORT_FORMAT,
            "format_version": REPORT_VERSION,
            "subject": self.subject,
            "level": self.level,
            "target": self.target,
            "ok": self.ok,
            "counts": counts,
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [asdict(check) for check in self.checks],
            "figures": figures,
            "versions": self.versions,
        }

    def save_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON, beside its place first."""
        return write_beside(path, json_text(self.to_dict()))


def json_text(data: Mapping[str, Any]) -> str:
    """Plain data as JSON text."""
    return json.dumps(_finite(data), indent=1, ensure_ascii=False) + "\n"


def write_beside(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file so that no half-written one ever stands at ``path``."""
    path = Path(path)
    beside = path.with_name(path.name + ".new")
    while os.path.lexists(beside):  # of another writer, or somebody's own
        beside = beside.with_name(beside.name + "-")
    beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    os.replace(beside, path)
    return path


def _finite(data: Any) -> Any:
    """JSON knows no NaN and no infinity: they become text."""
    if isinstance(data, float) and not abs(data) < float("inf"):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
