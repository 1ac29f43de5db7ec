"""The load of each expert over the steps of a run, as an SVG heatmap: one panel a layer."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_onnx.cli import svg

_WIDTH, _LEFT, _RIGHT, _TOP, _GAP = 760, 72, 120, 64, 54
_MOST_COLUMNS, _MOST_HEIGHT = 320, 240
# Shades of few tokens, of the mean, of many.
_FEW, _MEAN, _MANY = np.array([(37, 99, 201), (250, 250, 250), (201, 76, 37)], np.float64)

Array = np.ndarray[Any, Any]


def write_heatmap(
    path: Path, loads: Sequence[tuple[int, Sequence[Sequence[int]]]], unit: str = "step"
) -> Path:
    """Write the tokens of each expert, relative to the mean of its layer: blue none, white 1, red 2 and more.

    Args:
        path: Of the SVG; each panel is a small PNG in it, a pixel for each expert and column.
        loads: Step and ``expert_load`` ``[layers, E]`` of each; many steps are averaged to a column.
        unit: What a step is called.
    """
    steps = [step for step, _ in loads]
    columns = np.array_split(
        np.asarray([load for _, load in loads], np.float64), min(len(loads), _MOST_COLUMNS)
    )
    tokens = np.stack([column.sum(axis=0) for column in columns])  # [columns, layers, E]
    mean = tokens.mean(axis=2, keepdims=True)
    share = np.divide(tokens, mean, out=np.zeros_like(tokens), where=mean > 0)
    layers, experts = share.shape[1:]
    panel, width = min(14.0 * experts, _MOST_HEIGHT), _WIDTH - _LEFT - _RIGHT
    height = _TOP + layers * (panel + _GAP) + 12
    title = "Tokens of each expert, relative to the mean of its layer"
    parts = svg.page(_WIDTH, round(height), _LEFT, title)
    for layer in range(layers):
        top = _TOP + layer * (panel + _GAP)
        picture = base64.b64encode(_png(_colours(share[:, layer].T))).decode()
        parts.append(f'<text x="{_LEFT}" y="{top - 8:.1f}">MoE layer {layer}</text>')
        parts.append(
            f'<image x="{_LEFT}" y="{top:.1f}" width="{width}" height="{panel:.1f}" '
            'preserveAspectRatio="none" style="image-rendering:pixelated" '
            f'href="data:image/png;base64,{picture}"/>'
        )
        for expert in sorted({0, experts - 1}):
            y = top + (expert + 0.5) * panel / experts + 4
            parts.append(f'<text x="{_LEFT - 8}" y="{y:.1f}" text-anchor="end">expert {expert}</text>')
        below = top + panel + 16
        parts.append(f'<text x="{_LEFT}" y="{below:.1f}">{unit} {steps[0]}</text>')
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{below:.1f}" text-anchor="end">{steps[-1]}</text>')
    for i, value in enumerate((2.0, 1.5, 1.0, 0.5, 0.0)):
        x, y = _WIDTH - _RIGHT + 24, _TOP + 18 * i
        colour = "#" + bytes(_colours(np.array(value))).hex()
        parts.append(f'<rect x="{x}" y="{y}" width="16" height="14" fill="{colour}" stroke="#ccc"/>')
        parts.append(f'<text x="{x + 22}" y="{y + 11}">{value:g}{" and more" if value == 2 else ""}</text>')
    return svg.write(path, parts)


def _colours(share: Array) -> Array:
    """White at 1; nearer to blue below, to red above. Bytes ``[.., 3]``."""
    share = np.clip(share, 0, 2)[..., None]
    mixed = np.where(share < 1, _FEW + (_MEAN - _FEW) * share, _MEAN + (_MANY - _MEAN) * (share - 1))
    colours: Array = mixed.round().astype(np.uint8)
    return colours


def _png(pixels: Array) -> bytes:
    """A PNG of ``[height, width, 3]`` bytes."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    done = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
        done += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return done
