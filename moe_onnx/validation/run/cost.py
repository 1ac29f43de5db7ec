"""What a run costs: figures for the report, no findings."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from moe_onnx.validation.findings import Bars, Outcome, Skipped, Table
from moe_onnx.validation.registry import check
from moe_onnx.validation.run.memory import PeakMemory
from moe_onnx.validation.run.runs import REPEATS, runs_of
from moe_onnx.validation.run.sessions import ERRORS
from moe_onnx.validation.subject import Subject


@check("run")
def cost(subject: Subject) -> Iterator[Outcome]:
    """Time and memory of a run by each route."""
    runs = runs_of(subject)
    if runs.why_not:
        yield Skipped(runs.why_not)
        return
    rows, labels, times = [], [], []
    for (route, threads), session in runs.sessions.items():
        memory, took = PeakMemory(), []
        try:
            for _ in range(REPEATS):
                start = time.perf_counter()
                session.run(runs.feeds.values)
                took.append(time.perf_counter() - start)
        except ERRORS:
            continue  # a finding of another check
        milliseconds = float(np.median(took)) * 1e3
        rows.append(
            (
                route,
                threads,
                round(session.seconds, 3),
                _rounded(session.megabytes),
                round(runs.seconds.get((route, threads), took[0]) * 1e3, 2),
                round(milliseconds, 3),
                _rounded(memory.growth()),
            )
        )
        labels.append(f"{route}, {threads} thread{'s' if threads > 1 else ''}")
        times.append(milliseconds)
    sizes = ", ".join(f"{name} {size}" for name, size in runs.feeds.sizes.items())
    columns = ("route", "threads", "load s", "load peak MB", "first run ms", "run ms", "run peak MB")
    yield Table(f"Cost of a run ({sizes})" if sizes else "Cost of a run", columns, tuple(rows))
    yield Bars("Time of a run", tuple(labels), tuple(times), "ms")


def _rounded(megabytes: float | None) -> float | str:
    return "?" if megabytes is None else round(megabytes, 1)
