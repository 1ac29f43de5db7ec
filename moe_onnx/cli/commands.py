"""What ``moe-onnx info`` (of the installation), ``cards``, ``pages`` and ``shelf`` print."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_onnx.adapters.cards import card_files
from moe_onnx.adapters.python_ops import SERVED, UNAVAILABLE
from moe_onnx.cli.shelf import is_fresh, shelf_files
from moe_onnx.kernels import native
from moe_onnx.operators import ALL
from moe_onnx.runtime.routes import why_not
from moe_onnx.validation.findings import write_beside
from moe_onnx.validation.pages import page_files

_CONSOLE = Console()


def show_info() -> None:
    """Print versions, and the routes each operator can run by."""
    for package in (
        "moe-onnx",
        "onnx",
        "onnxruntime",
        "onnxruntime-extensions",
        "onnx-ir",
        "numpy",
        "ml_dtypes",
        "safetensors",
    ):
        try:
            _CONSOLE.print(f"{package:24} {version(package)}")
        except ModuleNotFoundError:
            _CONSOLE.print(f"{package:24} not installed")
    _show_routes()
    _CONSOLE.print("\nRoutes of each operator, and the float types they take:")
    table = Table("numpy", "native", "python", "body", "operator")
    compiled = "unavailable" if native.unavailable() else "all"
    for spec in ALL:
        python = "-" if spec.name not in SERVED else "unavailable" if UNAVAILABLE else "fp32, fp64"
        table.add_row("all", compiled, python, "all", spec.name)
    _CONSOLE.print(table)


def _show_routes() -> None:
    """Print which routes there are, or why not, and what the native library is."""
    reasons = why_not()
    _CONSOLE.print()
    table = Table("route", "available")
    for route, reason in reasons.items():
        table.add_row(route, Text(f"no: {reason}" if reason else "yes"))
    _CONSOLE.print(table)
    if not reasons["native"]:
        # Paths are read by people and scripts: in one piece, whatever the width.
        for line in (f"native library: {native.native_library_path()}", f"built by: {native.build_line()}"):
            _CONSOLE.print(line, markup=False, highlight=False, soft_wrap=True)


def write_cards(folder: Path, *, check: bool) -> list[Path]:
    """Write the stale ones of the operators' generated files, or only name them; give them."""
    return _write(_made(card_files(folder)), _same_text, check)


def write_shelf(folder: Path, *, check: bool) -> list[Path]:
    """Write the stale ones of the recipes' generated files, or only name them; give them."""
    return _write(shelf_files(folder), is_fresh, check)


def write_pages(folder: Path, *, check: bool) -> list[Path]:
    """Write the stale ones of the pages of codes, or only name them; give them."""
    return _write(_made(page_files(folder)), _same_text, check)


def _made(files: dict[Path, str]) -> dict[Path, Callable[[], str]]:
    """Texts that are there already, as those that are made when they are asked for."""
    return {path: partial(str, text) for path, text in files.items()}


def _same_text(path: Path, text: str) -> bool:
    return path.exists() and path.read_text("utf-8") == text


def _write(
    files: dict[Path, Callable[[], str]], fresh: Callable[[Path, str], bool], check: bool
) -> list[Path]:
    stale = []
    for path, make in files.items():
        text = make()
        if fresh(path, text):
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_beside(path, text)
        _CONSOLE.print(f"{'stale' if check else 'written'}: {path}")
    if not stale:
        _CONSOLE.print("All files are fresh.")
    return stale
