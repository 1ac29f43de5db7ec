"""The checks by level and family: each a function of the subject that yields what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_onnx.validation.findings import Code, Outcome, Severity
from moe_onnx.validation.subject import Subject

CODES: dict[str, Code] = {}
CHECKS: list[Check] = []

Function = Callable[[Subject], Iterable[Outcome]]


@dataclass(frozen=True)
class Check:
    """A check: its function, its level, and the codes it may find."""

    name: str
    level: str
    summary: str
    codes: tuple[Code, ...]
    function: Function


def code(name: str, severity: Severity, title: str, *, why: str, mend: str) -> Code:
    """Define a code, once and for ever."""
    made = Code(name, severity, title, why, mend)
    if CODES.setdefault(name, made) != made:
        raise ValueError(f"{name} is defined twice: {CODES[name].title!r} and {title!r}")
    return made


def check(level: str, *codes: Code) -> Callable[[Function], Function]:
    """Register a check. The first line of its docstring says what it looks at."""

    def register(function: Function) -> Function:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        module = function.__module__.removeprefix("moe_onnx.validation.")
        CHECKS.append(Check(f"{module}.{function.__name__}", level, summary, codes, function))
        return function

    return register
