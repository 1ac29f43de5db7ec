"""Pictures as SVG: text that every browser shows.

A plotting library would be by far the heaviest dependency of this package, for a few lines and rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from moe_onnx.validation.findings import write_beside

_STYLE = "font-family:system-ui,sans-serif;font-size:12px;fill:#444"


def page(width: int, height: int, left: int, title: str) -> list[str]:
    """The head of a picture: white, with its title ``left`` from the edge."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{_STYLE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="26" style="font-size:15px;fill:#111">{escape(title)}</text>',
    ]


def write(path: Path, parts: Sequence[str]) -> Path:
    """Write a picture of these parts, beside its place first."""
    return write_beside(path, "\n".join([*parts, "</svg>", ""]))
