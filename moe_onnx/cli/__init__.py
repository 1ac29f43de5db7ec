"""The command line: ``moe-onnx``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import moe_onnx
from moe_onnx.cli.commands import demo as run_demo
from moe_onnx.cli.commands import show_info, write_cards


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(moe_onnx.__version__, prog_name="moe-onnx")
def main() -> None:
    """Mixture-of-Experts training graphs in ONNX.

    \b
    Examples:
      moe-onnx demo            run both backward operators in onnxruntime
      moe-onnx info            versions, operators and the routes they can run by
    """  # noqa: D301 (click's mark for text that must not be wrapped)


@main.command()
def demo() -> None:
    """Run both backward operators in an onnxruntime session and print what they give.

    Exit code 0 if every route gives the same numbers, 1 if not.
    """
    sys.exit(0 if run_demo() else 1)


@main.command()
def info() -> None:
    """Show versions, operators and the routes they can run by."""
    show_info()


@main.command()
@click.argument("folder", default="ops", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is stale.")
def cards(folder: Path, check: bool) -> None:
    """Write the generated files of FOLDER (the project's ops/): card.md and function.txt."""
    stale = write_cards(folder, check=check)
    sys.exit(1 if check and stale else 0)
