"""Many findings of one kind and cause become one, many names a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moe_onnx.validation.findings import Finding, Outcome


def few(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 37 more``."""
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


def collapsed(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Findings that say the same of many places as one, at the first place; everything else as it is."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Finding):
            key = outcome.code, outcome.found, outcome.expected, outcome.mend
            groups.setdefault(key, []).append(outcome)
        else:
            yield outcome
    for first, *more in groups.values():
        where = f"{first.where} and {len(more)} more"
        yield replace(first, where=where, places=places_of((first, *more))) if more else first


def first_few(found: Iterable[Outcome], most: int = 3) -> Iterator[Outcome]:
    """The first findings of each code; the last of them says how many more there are, and lists where."""
    rest: dict[str, list[Finding]] = {}
    counts: Counter[str] = Counter()
    for outcome in found:
        if not isinstance(outcome, Finding):
            yield outcome
            continue
        counts[outcome.code] += 1
        if counts[outcome.code] < most:
            yield outcome
        else:
            rest.setdefault(outcome.code, []).append(outcome)
    for last, *more in rest.values():
        found_more = f"{last.found}; and {len(more)} more like it"
        yield replace(last, found=found_more, places=places_of((last, *more))) if more else last


def places_of(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The places of all of them, in order."""
    return tuple(place for finding in findings for place in finding.places)
