"""Reports as text on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from moe_onnx.validation.device.compare import Comparison
from moe_onnx.validation.device.measure import Errors, histogram_labels
from moe_onnx.validation.findings import Bars, Report, Table
from moe_onnx.validation.saying import counted, number, scale_of

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "blue"}
_BAR = 32  # characters


def print_report(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print findings, figures and the verdict; with ``verbose`` the checks too."""
    for finding in report.findings:
        console.print(
            f"[{_COLOURS[finding.severity]}]{finding.code} {finding.severity}[/] {escape(finding.title)}"
        )
        lines = [("where", finding.where), ("found", finding.found), ("expected", finding.expected)]
        if finding.aclnn_status:
            lines.append(("aclnn", str(finding.aclnn_status)))
        for word, text in (*lines, ("mend", finding.mend)):
            if text:
                console.print(f"  [dim]{word:>8}[/]  {escape(text)}", soft_wrap=True)
    for figure in report.figures:
        console.print(_bars(figure) if isinstance(figure, Bars) else _table(figure))
    if verbose:
        console.print(_checks(report))
    seconds = sum(check.seconds for check in report.checks)
    left_out = sum(bool(check.skipped) for check in report.checks)
    partly = f", {left_out} in part or not at all (--verbose says why)" if left_out and not verbose else ""
    verdict = "[green]no errors[/]" if report.ok else "[bold red]failed[/]"
    console.print(
        f"{verdict}: {counted(report)}; {len(report.checks)} checks of level {report.level} "
        f"in {seconds:.1f} s{partly}"
    )
    if report.findings:
        console.print("moe-onnx explain CODE says more.", style="dim")


def print_comparison(done: Comparison, console: Console, *, histogram: bool = True) -> None:
    """Print a row for each tensor, the worst positions of those that failed, and a histogram of errors."""
    for row in done.rows:
        verdict = "[green]ok[/]    " if row.ok else "[bold red]failed[/]"
        about = f"{row.dtype} {list(row.shape)}" if row.dtype else ""
        console.print(f"{verdict} {escape(row.name)}  [dim]{escape(about)}[/]", soft_wrap=True)
        if (e := row.errors) is not None:
            numbers = f"MERE {e.mere:.1e}  MARE {e.mare:.1e}  max abs {e.max_abs:.1e}"
            console.print(
                f"       {numbers}  exceeding {e.exceeding:.2%}  1 - cosine {max(0.0, 1 - e.cosine):.0e}",
                style="dim",
                soft_wrap=True,
            )
        for failure in row.failures:
            console.print(f"       [red]{escape(failure)}[/]", soft_wrap=True)
        for at, wanted, actual in () if row.ok or row.errors is None else row.errors.worst:
            console.print(
                f"         {escape(str(list(at)))}: {actual:.9g}, expected {wanted:.9g}", soft_wrap=True
            )
    if histogram and (found := [row.errors for row in done.rows if row.errors is not None]):
        console.print(_bars(error_histogram(found)))
    failed = len(done.failed)
    verdict = "[green]all within[/]" if done.ok else f"[bold red]{failed} failed[/]"
    console.print(f"{verdict} of {len(done.rows)} tensors, {done.standard}")


def error_histogram(found: list[Errors]) -> Bars:
    """Elements of all tensors by their relative error."""
    counts = tuple(float(sum(one.histogram[i] for one in found)) for i in range(len(found[0].histogram)))
    return Bars("elements by relative error", histogram_labels(), counts, log=True)


def _table(figure: Table) -> RichTable:
    table = RichTable(title=figure.title, title_justify="left", box=None)
    numeric = [
        all(isinstance(row[i], (int, float)) for row in figure.rows) for i in range(len(figure.columns))
    ]
    for column, right in zip(figure.columns, numeric, strict=True):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in figure.rows:
        table.add_row(*(escape(number(cell)) for cell in row))
    return table


def _bars(figure: Bars) -> RichTable:
    scale = scale_of(figure)
    limit = "" if figure.limit is None else f" (limit {f'{figure.limit:.3g} {figure.unit}'.strip()})"
    table = RichTable(title=figure.title + limit, title_justify="left", box=None, show_header=False)
    for label, value in zip(figure.labels, figure.values, strict=True):
        over = figure.limit is not None and not value <= figure.limit
        bar = "█" * max(round(scale(value) / 100 * _BAR), 1 if value else 0)
        table.add_row(
            escape(label), f"[red]{bar}[/]" if over else bar, f"{number(value)} {figure.unit}".strip()
        )
    return table


def _checks(report: Report) -> RichTable:
    table = RichTable("check", "level", "looks at", "findings", "left out", box=None)
    for check in report.checks:
        table.add_row(
            check.name,
            check.level,
            escape(check.summary),
            str(check.findings),
            escape("; ".join(check.skipped)),
        )
    return table
