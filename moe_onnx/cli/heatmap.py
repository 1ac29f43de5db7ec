"""The load of each expert over the steps of a run, as an SVG heatmap: one panel a layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from moe_onnx.cli.curve import STYLE

_WIDTH, _LEFT, _RIGHT, _TOP, _GAP = 760, 64, 120, 64, 40
_MOST_COLUMNS, _MOST_HEIGHT = 160, 240
# From few tokens through the mean (white) to many.
_FEW, _MEAN, _MANY = (37, 99, 201), (250, 250, 250), (201, 76, 37)


def write_heatmap(path: Path, loads: Sequence[tuple[int, Sequence[Sequence[int]]]]) -> Path:
    """Write the tokens of each expert, relative to the mean of its layer: blue none, white 1, red 2 and more.

    Args:
        path: Of the SVG.
        loads: Step and ``expert_load`` ``[layers, E]`` of each; many steps are averaged to a column.
    """
    steps = [step for step, _ in loads]
    columns = np.array_split(np.asarray([load for _, load in loads], np.float64), _count(len(loads)))
    tokens = np.stack([column.sum(axis=0) for column in columns])  # [columns, layers, E]
    mean = tokens.mean(axis=2, keepdims=True)
    share = np.divide(tokens, mean, out=np.zeros_like(tokens), where=mean > 0)
    layers, experts = share.shape[1:]
    row = max(3.0, min(14.0, _MOST_HEIGHT / experts))
    panel = row * experts
    width = (_WIDTH - _LEFT - _RIGHT) / len(share)
    height = _TOP + layers * (panel + _GAP) + 12
    title = "Tokens of each expert, of the mean of its layer"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" style="{STYLE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" style="font-size:15px;fill:#111">{escape(title)}</text>',
    ]
    for layer in range(layers):
        top = _TOP + layer * (panel + _GAP)
        parts.append(f'<text x="{_LEFT}" y="{top - 8:.1f}">MoE layer {layer}</text>')
        for expert in {0, experts - 1}:
            y = top + (expert + 0.5) * row + 4
            parts.append(f'<text x="{_LEFT - 8}" y="{y:.1f}" text-anchor="end">expert {expert}</text>')
        for column, values in enumerate(share[:, layer]):
            for expert, value in enumerate(values):
                parts.append(
                    f'<rect x="{_LEFT + column * width:.2f}" y="{top + expert * row:.2f}" '
                    f'width="{width + 0.3:.2f}" height="{row + 0.3:.2f}" fill="{_colour(float(value))}"/>'
                )
        below = top + panel + 16
        parts.append(f'<text x="{_LEFT}" y="{below:.1f}">step {steps[0]}</text>')
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{below:.1f}" text-anchor="end">{steps[-1]}</text>')
    for i, value in enumerate((2.0, 1.5, 1.0, 0.5, 0.0)):
        y = _TOP + 18 * i
        x = _WIDTH - _RIGHT + 24
        parts.append(f'<rect x="{x}" y="{y}" width="16" height="14" fill="{_colour(value)}" stroke="#ccc"/>')
        text = f"{value:g}{' and more' if value == 2 else ''}"
        parts.append(f'<text x="{x + 22}" y="{y + 11}">{text}</text>')
    beside = path.with_suffix(".new")
    beside.write_text("\n".join([*parts, "</svg>", ""]), "utf-8")
    os.replace(beside, path)
    return path


def _count(steps: int) -> int:
    return min(steps, _MOST_COLUMNS)


def _colour(share: float) -> str:
    """White at 1; nearer to blue below, to red above."""
    near, weight = (_FEW, 1 - share) if share < 1 else (_MANY, min(share - 1, 1.0))
    mixed = (round(a + (b - a) * weight) for a, b in zip(_MEAN, near, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
