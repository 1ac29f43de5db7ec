"""The costly generated files of ``models/`` are fresh, too. If this fails: ``moe-onnx shelf``."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_onnx.build.presets import ARCHITECTURES
from moe_onnx.cli.shelf import is_fresh, shelf_files

pytestmark = pytest.mark.parity

FILES = shelf_files(Path(__file__).parent.parent / "models")
COSTLY = [
    path
    for path in FILES
    if path.name == "summary.txt" or (path.name == "losses.json" and path.parent.name in ARCHITECTURES)
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", COSTLY, ids=lambda path: path.parent.name)
def test_it_is_fresh(path: Path) -> None:
    assert is_fresh(path, FILES[path]())
