"""The native library in other versions of onnxruntime: the oldest that can have it, and later ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_onnx.kernels import native

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "it is there"),
]
TESTS = Path(__file__).parent
REGISTER = """
import sys, onnxruntime
onnxruntime.SessionOptions().register_custom_ops_library(sys.argv[1])
"""


def python_with(folder: Path, runtime: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with another onnxruntime, everything else as it is here."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*install, "--target", str(folder), runtime], check=True, timeout=100)
    path = os.pathsep.join([str(folder), str(TESTS), str(TESTS.parent)])
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("runtime", ["1.28.0", "1.30.0"])
def test_random_calls(runtime: str, tmp_path: Path) -> None:
    """Values of all dtypes, the words of errors in runs, and those of attributes when a session is made.

    The newest onnxruntime is what all tests run with: there it is ``test_native_fuzz.py``.
    """
    library = native.native_library_path()
    fuzz = [str(TESTS / "native_fuzz.py"), "--library", library, "--count", "200", "--seed", "6"]
    ended = python_with(tmp_path, f"onnxruntime=={runtime}", *fuzz)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"onnxruntime {runtime}" in ended.stdout


def test_an_older_runtime_is_refused_in_words(tmp_path: Path) -> None:
    ended = python_with(tmp_path, "onnxruntime==1.26.0", "-c", REGISTER, native.native_library_path())
    assert ended.returncode == 1
    assert "ascend_moe needs onnxruntime 1.28 or later, this is 1.26.0." in ended.stderr
