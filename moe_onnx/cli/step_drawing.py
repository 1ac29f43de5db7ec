"""A training step as a picture: a row for each module, a column for each phase, layers once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from pathlib import Path

from moe_onnx.cli import svg
from moe_onnx.cli.units import count, flops
from moe_onnx.inspection.inspection import Inspection, Part
from moe_onnx.inspection.places import PHASES, folded

_ROW, _BOX, _LEFT, _TOP, _GAP = 62, 46, 28, 92, 70
_WIDTHS = {"forward": 360, "backward": 360, "optimizer": 340}
_FILLS = {"forward": "#e8f0fb", "backward": "#fdeee4", "optimizer": "#eaf5ea"}
_LINES = {"forward": "#2563c9", "backward": "#c9601a", "optimizer": "#2f8a3c"}
# From the batch to the loss; what is not named here comes before the loss, in the graph's order.
ORDER = (
    "positions",
    "model.embed_tokens",
    "model.layers.*.input_layernorm",
    "model.layers.*.self_attn",
    "model.layers.*.post_attention_layernorm",
    "model.layers.*.mlp.dense",
    "gate",
    "dispatch",
    "experts",
    "combine",
    "shared_expert",
    "model.layers.*.mlp.gate",
    "model.layers.*.mlp.dispatch",
    "model.layers.*.mlp.experts",
    "model.layers.*.mlp.combine",
    "model.layers.*.mlp.shared_expert",
    "model.layers.*.residual",
    "model.norm",
    "lm_head",
)


def draw_step(path: Path, done: Inspection) -> Path:
    """Write the step of an inspection as SVG, self-contained and the same for the same graphs.

    Arrows follow the data: down the forward column, over to the backward one at the loss, up again, and
    from each gradient to its update. A box names the module, its nodes and operations, over all its layers,
    and the operators of ``ascend.moe`` in it.
    """
    parts = _merged(done)
    rows = _rows({part for _, part in parts})
    columns = [phase for phase in PHASES if any(phase == key[0] for key in parts)]
    lefts, at = {}, _LEFT + 40
    for phase in columns:
        lefts[phase] = at
        at += _WIDTHS[phase] + _GAP
    width, height = at - _GAP + 2 * _LEFT, _TOP + len(rows) * _ROW + 40
    tokens = f", {done.tokens:,} tokens" if done.tokens else ""
    title = f"{Path(done.subject).name}: {count(done.parameters)} parameters{tokens}"
    lines = svg.page(width, height, _LEFT, title)
    lines.append(_arrowheads())
    lines.append(_layers_frame(rows, done, width))
    for phase in columns:
        total = sum((p.cost.flops for key, p in parts.items() if key[0] == phase), 0)
        text = f"{phase}  {flops(total)}"
        lines.append(
            f'<text x="{lefts[phase]}" y="{_TOP - 22}" style="font-weight:600;fill:{_LINES[phase]}">'
            f"{escape(text)}</text>"
        )
    special = _special(done)
    for row, name in enumerate(rows):
        for phase in columns:
            part = parts.get((phase, name))
            if part is not None:
                lines += _box(lefts[phase], row, phase, name, part, special.get((phase, name), ()))
    lines += _arrows(parts, rows, lefts)
    return svg.write(path, [line for line in lines if line])


def _merged(done: Inspection) -> dict[tuple[str, str], Part]:
    """The parts of all graphs of the step."""
    found: dict[tuple[str, str], Part] = {}
    for graph in done.step:
        for part in graph.parts:
            key = part.phase, part.part
            old = found.get(key)
            nodes, cost = (
                (part.nodes, part.cost) if old is None else (part.nodes + old.nodes, part.cost + old.cost)
            )
            found[key] = Part(*key, nodes, cost)
    return found


def _rows(names: set[str]) -> list[str]:
    last = [name for name in ("loss", "grad_norm") if name in names]
    known = [name for name in ORDER if name in names]
    return [*known, *sorted(names - {*known, *last}), *last]


def _special(done: Inspection) -> dict[tuple[str, str], tuple[str, ...]]:
    """The operators of ascend.moe of each box."""
    from moe_onnx.inspection.places import place_of
    from moe_onnx.spec import DOMAIN

    parameters = set() if done.manifest is None else set(done.manifest.parameter_names)
    found: dict[tuple[str, str], dict[str, None]] = {}
    for graph in done.step:
        for node in done.models[graph.name].graph.node:
            if node.domain == DOMAIN:
                place = place_of(node, parameters, {}) if parameters else None
                key = (place.phase, place.part) if place is not None else ("forward", "other")
                found.setdefault(key, {})[node.op_type] = None
    return {key: tuple(names) for key, names in found.items()}


def _box(left: int, row: int, phase: str, name: str, part: Part, special: Sequence[str]) -> list[str]:
    top, width = _TOP + row * _ROW, _WIDTHS[phase]
    short = name.removeprefix("model.layers.*.").removeprefix("model.")
    nodes = f"{part.nodes:,} node{'s' if part.nodes != 1 else ''}"
    second = f"{nodes}, {flops(part.cost.flops)}" if part.cost.flops else nodes
    third = ", ".join(special)
    lines = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{_BOX}" rx="6" fill="{_FILLS[phase]}" '
        f'stroke="{_LINES[phase]}"/>',
        f'<text x="{left + 10}" y="{top + 17}" style="font-weight:600;fill:#222">{escape(short)}</text>',
        f'<text x="{left + width - 10}" y="{top + 17}" text-anchor="end">{escape(second)}</text>',
    ]
    if third:
        style = "font-size:10.5px;fill:#666"
        lines.append(f'<text x="{left + 10}" y="{top + 35}" style="{style}">{escape(third)}</text>')
    return lines


def _arrows(parts: dict[tuple[str, str], Part], rows: Sequence[str], lefts: dict[str, int]) -> list[str]:
    lines = []
    for phase, down in (("forward", True), ("backward", False)):
        mine = [row for row, name in enumerate(rows) if (phase, name) in parts]
        x = lefts.get(phase, 0) + 150
        for above, below in itertools.pairwise(mine):
            start, end = _TOP + above * _ROW + _BOX, _TOP + below * _ROW
            if not down:
                start, end = end, start
            lines.append(_line(x, start, x, end, phase))
    for row, name in enumerate(rows):
        y = _TOP + row * _ROW + _BOX // 2
        if name == "loss" and ("forward", name) in parts and ("backward", name) in parts:
            right = lefts["forward"] + _WIDTHS["forward"]
            lines.append(_line(right, y, lefts["backward"], y, "backward"))
        if ("backward", name) in parts and ("optimizer", name) in parts:
            right = lefts["backward"] + _WIDTHS["backward"]
            lines.append(_line(right, y, lefts["optimizer"], y, "optimizer"))
    return lines


def _line(x1: int, y1: int, x2: int, y2: int, phase: str) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{_LINES[phase]}" '
        f'stroke-width="1.5" marker-end="url(#to-{phase})"/>'
    )


def _arrowheads() -> str:
    heads = (
        f'<marker id="to-{phase}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        for phase, colour in _LINES.items()
    )
    return f"<defs>{''.join(heads)}</defs>"


def _layers_frame(rows: Sequence[str], done: Inspection, width: int) -> str:
    """A frame round the rows that stand once for all layers."""
    inside = [row for row, name in enumerate(rows) if ".layers.*." in name]
    if not inside or done.manifest is None:
        return ""
    layers = {name for p in done.manifest.parameters if ".layers." in (name := p.name)}
    number = len({name.split(".layers.")[1].split(".")[0] for name in layers})
    assert all(folded(name) != name for name in layers)
    top, bottom = _TOP + inside[0] * _ROW - 8, _TOP + inside[-1] * _ROW + _BOX + 8
    middle = (top + bottom) // 2
    said = f"{number} layer{'s' * (number > 1)}"
    return (
        f'<rect x="{_LEFT}" y="{top}" width="{width - 2 * _LEFT}" height="{bottom - top}" rx="10" '
        'fill="none" stroke="#999" stroke-dasharray="5 4"/>'
        f'<text x="{_LEFT + 20}" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 {_LEFT + 20} {middle})" style="font-weight:600">{said}</text>'
    )
