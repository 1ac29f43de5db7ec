"""Reports as one HTML page that needs nothing else: no script, no font, no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from moe_onnx.validation.findings import Bars, Figure, Finding, Report, Table
from moe_onnx.validation.registry import CODES
from moe_onnx.validation.saying import counted, number, scale_of

_STYLE = """
:root { color-scheme: light dark; --error: #c62828; --warning: #b26a00; --note: #1565c0; --ok: #2e7d32 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
code, .where { font-family: ui-monospace, monospace; font-size: .92em; overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100% } th { text-align: left; font-weight: 600 }
td, th { border-bottom: 1px solid #8884; padding: .3rem .6rem .3rem 0; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.badge { color: #fff; border-radius: .3rem; padding: .05rem .45rem; font-size: .85em }
.error { background: var(--error) } .warning { background: var(--warning) }
.note { background: var(--note) } .ok { background: var(--ok) }
.mend { opacity: .8 } pre { white-space: pre-wrap; margin: .3rem 0; overflow-wrap: anywhere }
.bar { position: relative; background: #8882; min-width: 16rem }
.bar i { display: block; height: 1.1em; background: #1e88e5 } .over i { background: var(--error) }
.bar b { position: absolute; top: 0; bottom: 0; border-left: 2px solid var(--error) }
"""


def report_page(report: Report) -> str:
    """A report as a page: verdict, findings, figures, checks, and the pages of the codes found."""
    verdict = (
        '<span class="badge ok">no errors</span>' if report.ok else '<span class="badge error">failed</span>'
    )
    counts = f"{counted(report)}; {len(report.checks)} checks"
    target = f", target {escape(report.target)}" if report.target else ""
    versions = ", ".join(f"{escape(name)} {escape(text)}" for name, text in report.versions.items())
    body = [
        f"<p>{verdict} level <b>{escape(report.level)}</b>{target}: {counts}.</p>",
        f"<p class=mend>{versions}</p>",
        "<h2>Findings</h2>",
        _findings(report.findings),
        *figures(report.figures),
        "<h2>Checks</h2>",
        _checks(report),
    ]
    if report.codes:
        body += ["<h2>What the codes mean</h2>", *(_code(name) for name in report.codes)]
    return page(f"Validation of {report.subject}", body)


def page(title: str, body: Iterable[str]) -> str:
    """A page of this title."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def figures(found: Iterable[Figure]) -> list[str]:
    """Tables and bars."""
    return [_bars(figure) if isinstance(figure, Bars) else _table(figure) for figure in found]


def rows(columns: Sequence[str], cells: Iterable[Sequence[Any]]) -> str:
    """A table of values, numbers to the right."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for row in cells:
        shown = (
            f"<td{' class=number' if isinstance(cell, (int, float)) else ''}>{escape(number(cell))}</td>"
            for cell in row
        )
        lines.append(f"<tr>{''.join(shown)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _table(table: Table) -> str:
    return f"<h2>{escape(table.title)}</h2>{rows(table.columns, table.rows)}"


def _bars(bars: Bars) -> str:
    scale = scale_of(bars)
    lines = []
    for label, value in zip(bars.labels, bars.values, strict=True):
        over = " over" if bars.limit is not None and not value <= bars.limit else ""
        mark = "" if bars.limit is None else f'<b style="left:{scale(bars.limit):.1f}%"></b>'
        bar = f'<div class="bar{over}"><i style="width:{scale(value):.1f}%"></i>{mark}</div>'
        shown = f"{number(value)} {bars.unit}".strip()
        cells = f"<td class=where>{escape(label)}</td><td>{bar}</td><td class=number>{escape(shown)}</td>"
        lines.append(f"<tr>{cells}</tr>")
    limit = (
        "" if bars.limit is None else f" <small>(line: limit {bars.limit:.3g} {escape(bars.unit)})</small>"
    )
    return f"<h2>{escape(bars.title)}{limit}</h2><table>{''.join(lines)}</table>"


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>None.</p>"
    lines = []
    for one in findings:
        expected = f"<br>expected: {escape(one.expected)}" if one.expected else ""
        status = f"<br>aclnn status {one.aclnn_status}" if one.aclnn_status else ""
        link = f'<a href="#{one.code}">{one.code}</a> {_badge(one.severity)}'
        what = f"{escape(one.title)}<br><span class=where>{escape(one.where)}</span>{_places(one.places)}"
        said = (
            f"<pre>{escape(one.found)}</pre>{expected}{status}<br><span class=mend>{escape(one.mend)}</span>"
        )
        lines.append(f"<tr><td>{link}</td><td>{what}</td><td>{said}</td></tr>")
    head = "<tr><th>code</th><th>what, where</th><th>found, and what to do</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _places(places: Sequence[str]) -> str:
    if len(places) < 2:
        return ""
    listed = escape("\n".join(places))
    return f"<details><summary>all {len(places)} places</summary><pre class=where>{listed}</pre></details>"


def _badge(severity: str) -> str:
    return f'<span class="badge {severity}">{severity}</span>'


def _checks(report: Report) -> str:
    cells = (
        (
            check.name,
            check.level,
            check.summary,
            check.findings,
            f"{check.seconds * 1e3:.1f} ms",
            "; ".join(check.skipped),
        )
        for check in report.checks
    )
    return rows(("check", "level", "looks at", "findings", "took", "left out"), cells)


def _code(name: str) -> str:
    code = CODES[name]
    return (
        f'<h3 id="{name}">{name} {_badge(code.severity)} {escape(code.title)}</h3>'
        f"<p>{_prose(code.why)}</p><p><b>To mend it:</b> {_prose(code.mend)}</p>"
    )


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
