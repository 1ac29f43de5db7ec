"""Numbers of a report as text and as lengths, alike on a terminal and in a page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from moe_onnx.validation.findings import SEVERITIES, Bars, Report


def number(value: Any) -> str:
    """A value as a cell shows it."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def scale_of(bars: Bars) -> Callable[[float], float]:
    """What places a value on a bar, in percent of its length."""
    values = [v for v in (*bars.values, bars.limit) if v is not None and math.isfinite(v) and v > 0]
    if not values:
        return lambda value: 0.0
    high, low = max(values), min(values)
    if not bars.log or high == low:
        return lambda value: 100 * min(max(value, 0.0), high) / high if value == value else 100.0
    top, bottom = math.log10(high), math.log10(low) - 0.5

    def place(value: float) -> float:
        if value != value or value > high:
            return 100.0
        return 100 * (math.log10(value) - bottom) / (top - bottom) if value >= low else 0.0

    return place


def counted(*reports: Report) -> str:
    """How many findings of each severity there are, in words."""
    numbers = {severity: sum(len(r.of_severity(severity)) for r in reports) for severity in SEVERITIES}
    return ", ".join(f"{n} {severity}{'' if n == 1 else 's'}" for severity, n in numbers.items())
