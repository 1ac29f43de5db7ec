"""A loss curve as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from moe_onnx.cli import svg

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 64, 24, 48, 52


def write_curve(path: Path, train: Points, held_out: Points = (), title: str = "") -> Path:
    """Write the loss by step: each step in grey, smoothed in blue, on held-out text in orange."""
    points = [(x, y) for x, y in (*train, *held_out) if math.isfinite(y)]
    if not points:
        points = [(0.0, 0.0)]
    x_ticks = _ticks(0, max(x for x, _ in points))
    y_ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    x_low, x_high, y_low, y_high = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        down = (y_high - y) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return _LEFT + across, _TOP + down

    def line(series: Points, colour: str, width: float) -> str:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in series if math.isfinite(p[1])))
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    parts = svg.page(_WIDTH, _HEIGHT, _LEFT, title)
    for tick in y_ticks:
        _, y = at(x_low, tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e6e6"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = at(tick, y_low)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">step</text>'
    )
    parts += [line(train, "#c9ced6", 1), line(_smooth(train), "#2563c9", 2)]
    legend = [("#2563c9", "loss, smoothed"), ("#c9ced6", "loss of each step")]
    if held_out:
        parts.append(line(held_out, "#e07b1a", 2))
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#e07b1a"/>' for x, y in (at(*p) for p in held_out)
        ]
        legend.append(("#e07b1a", "held-out text"))
    for i, (colour, label) in enumerate(legend):
        y = _TOP + 14 + 18 * i
        parts.append(f'<rect x="{_WIDTH - 180}" y="{y - 5}" width="18" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - 154}" y="{y}">{label}</text>')
    return svg.write(path, parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, about six, from at most ``low`` to at least ``high``."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def _smooth(series: Points, keep: float = 0.9) -> list[tuple[float, float]]:
    """The exponential mean, without the bias of its start."""
    total = weight = 0.0
    smoothed = []
    for x, y in series:
        if math.isfinite(y):
            total, weight = keep * total + (1 - keep) * y, keep * weight + 1 - keep
            smoothed.append((x, total / weight))
    return smoothed
