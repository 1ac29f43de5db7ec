"""``ops/native/example``: the operators in a program without Python, by onnxruntime's C API."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from routes import make_model
from test_native_packaging import OPS, compiler

from moe_onnx.kernels import native

SOURCE = OPS / "native" / "example" / "main.cpp"
RESULT = ["grad_x[0]: 12 14", "grad_x[1]: 18 20", "grad_x[2]: 6 8"]


def runtime() -> Path | None:
    """onnxruntime as a C library, which its wheels for Linux bring along."""
    return next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"), None)


def test_each_function_has_a_slot_of_its_own() -> None:
    texts = [path.read_text() for path in (SOURCE, OPS / "native" / "ort_abi.h")]
    found = re.findall(r"^  NAME\((\w+), (\d+),", "".join(texts), re.MULTILINE)
    slots: dict[str, str] = {}
    for name, slot in found:
        assert slots.setdefault(slot, name) == name
    assert {"Run": "9", "RegisterCustomOpsLibrary_V2": "228"}.items() <= {
        n: s for s, n in slots.items()
    }.items()


def test_the_example(tmp_path: Path) -> None:
    """It is built, runs a model, and prints what an operator refuses; without the library it says so."""
    library = runtime()
    if (
        not compiler() or library is None
    ):  # the command that its first lines give is all that can be looked at
        assert f"-I ops/native {SOURCE.relative_to(OPS.parent)}" in SOURCE.read_text()
        return
    program, model = tmp_path / "example", tmp_path / "model.onnx"
    inputs = [np.zeros((6, 2), np.float32), np.zeros(6, np.int32)]
    onnx.save(make_model("MoeInitRoutingV2Grad", inputs, {"top_k": 2}), model)
    build = [
        *compiler(),
        "-std=c++17",
        "-Wall",
        "-Werror",
        "-I",
        OPS / "native",
        SOURCE,
        "-o",
        program,
        "-ldl",
    ]
    subprocess.run(build, check=True, timeout=120)
    kernels = "not_there.so" if native.unavailable() else native.native_library_path()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [program, library, kernels, model], capture_output=True, text=True, timeout=60, env=environment
    )
    if native.unavailable():
        assert done.returncode == 1
        assert "not_there.so" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    *rows, refused = done.stdout.splitlines()
    assert rows == RESULT
    assert refused.startswith("refused: ")
    assert "IndexValueError (aclnn 561002)" in refused
    assert "got 99 at position [3]" in refused
