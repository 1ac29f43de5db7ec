"""``moe-onnx rewrite``: passes over a model, and a table of what they did."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from moe_onnx.cli.options import CONSOLE, WORK_FAILED, fail
from moe_onnx.cli.places import STDOUT, known_place
from moe_onnx.errors import OptionError, VerificationError
from moe_onnx.rewrite.notes import MAIN, Note, PassReport
from moe_onnx.rewrite.passes import PASSES
from moe_onnx.validation.findings import json_text, write_beside
from moe_onnx.validation.rewriting.data import check_free
from moe_onnx.validation.rewriting.rewrite import rewrite_model

FILE = click.Path(path_type=Path, dir_okay=False)
_MOST_ROWS = 40  # of a table; the report has all


def _list_of_passes() -> str:
    """Every pass with its options, for ``--help``."""
    lines = []
    for one in PASSES.values():
        lines.append(f"  {one.name:<12}{one.summary}")
        lines += [f"    :{name:<11}{text}" for name, text in one.options.items()]
    return "\n".join(lines)


HELP = inspect.cleandoc(
    """Rewrite MODEL, any ONNX file, by passes, in the order given.

    Each pass is checked by onnx's checker before and after. Then the original and the rewritten model are run
    on the same inputs, random ones and zeros, ties, large values, one token, empty batches, and all outputs
    must be the same: to the bit, or within what a pass states. Otherwise nothing is written, and the error
    says which output differs, by how much, with which inputs.

    External data stays on disk: beside the original it is named as before, to another folder it is copied.

    \b
    Passes (options stand behind a colon, with + between them):
    PASSES

    \b
    Examples:
      moe-onnx rewrite model/grad.onnx --passes expand -o plain.onnx
      moe-onnx rewrite model/grad.onnx --passes expand,strip --dry-run
      moe-onnx rewrite export.onnx --passes strip:functions+docs -o small.onnx --report report.json
      moe-onnx rewrite export.onnx --passes fold,fuse -o trainable.onnx
      moe-onnx rewrite trainable.onnx --passes contrib-moe -o served.onnx
      moe-onnx rewrite model.onnx --passes to_float64 -o double.onnx --inputs batch.npz

    Exit codes: 0 done (also where no pass had anything to do), 1 the rewritten model does something else, or
    could not be run, 2 MODEL could not be read or is not valid, or wrong usage.
    """
).replace("PASSES", _list_of_passes())


@click.command(help=HELP)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--passes", required=True, metavar="PASS,PASS", help="What to do, in this order.")
@click.option(
    "-o", "--output", type=FILE, callback=known_place, help="The rewritten model; may be MODEL itself."
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    callback=known_place,
    help="Write what was applied and skipped as JSON; - to stdout, alone.",
)
@click.option("--dry-run", is_flag=True, help="Write no model: only say what would be done.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Run both and compare.")
@click.option("--inputs", "inputs_file", type=FILE, help="Inputs to run with, an .npz file by input name.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of drawn inputs.")
def rewrite(
    model: Path,
    passes: str,
    output: Path | None,
    report_file: Path | None,
    dry_run: bool,
    verify: bool,
    inputs_file: Path | None,
    seed: int,
) -> None:
    """See :data:`HELP`."""
    if output is None and not dry_run:
        raise click.UsageError("Give -o OUT to write to, or --dry-run.")
    if report_file is not None and report_file != STDOUT:
        others = [one for one in (model, output, inputs_file) if one is not None]
        check_free(report_file, others, "the model's, or of its inputs")
    inputs = None if inputs_file is None else _inputs(inputs_file)
    names = [name for name in passes.split(",") if name.strip()]
    try:
        with CONSOLE.status(f"rewriting {model} ..."):
            done = rewrite_model(model, names, verify=verify, inputs=inputs, seed=seed)
    except VerificationError as error:
        fail(str(error), WORK_FAILED)
    if report_file is not None and report_file != STDOUT:
        check_free(report_file, done.data, "the model's external data")
    if output is not None and not dry_run:
        done.save(output)
    data = {"model": str(model), "output": str(output or ""), "dry_run": dry_run, **done.report.to_dict()}
    if report_file == STDOUT:
        click.echo(json_text(data), nl=False)
        return
    if report_file is not None:
        write_beside(report_file, json_text(data))
    print_report(done.report)
    told = "nothing to do" if not done.changed else f"{len(done.report.applied)} applied"
    where = "written nowhere (--dry-run)" if dry_run else f"written to {output}"
    CONSOLE.print(f"{told}, {len(done.report.skipped)} skipped; {where}", markup=False, soft_wrap=True)


def print_report(report: PassReport) -> None:
    """Print what was applied, what was skipped and how it was verified."""
    for title, notes in (("Applied", report.applied), ("Skipped", report.skipped)):
        if notes:
            CONSOLE.print(_table(title, notes))
    for line in report.verified or ["not verified"]:
        CONSOLE.print(f"[dim]verified[/]  {escape(line)}" if report.verified else line, soft_wrap=True)


def _table(title: str, notes: list[Note]) -> Table:
    text = "what" if title == "Applied" else "why"
    table = Table("pass", "operator", Column("node", overflow="fold"), Column(text, overflow="fold"))
    table.title, table.title_justify, table.box = title, "left", None
    for note in notes[:_MOST_ROWS]:
        inside = "" if note.place == MAIN else f" in {note.place}"
        table.add_row(note.by, note.operator, escape(note.node + inside), escape(note.text))
    if len(notes) > _MOST_ROWS:
        table.add_row("", "", f"and {len(notes) - _MOST_ROWS} more", "all are in --report")
    return table


def _inputs(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, EOFError) as error:
        raise OptionError(f"--inputs '{path}' is no .npz file of arrays: {error}.") from error


COMMANDS = (rewrite,)
