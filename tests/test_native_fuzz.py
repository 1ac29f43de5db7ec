"""Native kernels on random calls against the reference, in sessions; ``.ci/sanitize`` makes many more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_cases import MAKERS, Maker
from native_compare import INEXACT, as_set, difference, expected, inferred, problem
from native_driver import Case, Result
from native_fuzz import made_cases, session_problem, session_result

from moe_onnx.kernels import native
from moe_onnx.operators import BY_NAME

FUZZ = Path(__file__).with_name("native_fuzz.py")
needs_library = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "it is there")
operators = pytest.mark.parametrize("op", MAKERS)


def test_every_operator_is_fuzzed() -> None:
    assert set(MAKERS) == set(BY_NAME)


@needs_library
@operators
def test_random_calls(op: str) -> None:
    library = native.native_library_path()
    made = made_cases(3, 0, 30, [op])
    wrong = [f"{case}\n{text}" for case, want in made if (text := session_problem(library, case, want))]
    assert not wrong, "\n".join(wrong)
    refused = sum(bool(want[0]) for _, want in made)
    assert 3 <= refused <= len(made) - 3


@needs_library
def test_random_calls_without_wide_vectors() -> None:
    library = native.native_library_path()
    command = [sys.executable, FUZZ, "--library", library, "--count", "60", "--seed", "4"]
    environment = os.environ | {"ASCEND_MOE_VECTORS": "baseline", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def large_case(op: str, seed: int) -> Case:
    """A call that is shared out among threads."""
    inputs, attributes = MAKERS[op](Maker(np.random.default_rng(seed), (512, 16, 4, 257)))
    return Case(op, inputs, attributes)


@needs_library
@operators
def test_bits_do_not_depend_on_threads(op: str) -> None:
    library = native.native_library_path()
    for seed in range(2):
        case = large_case(op, seed)
        want = expected(case)
        assert want is not None
        texts = [session_problem(library, case, want, threads) for threads in (1, 2, 3)]
        assert texts == [""] * 3
        if want[0] or op.startswith("MoeGroupedMatmul"):  # the order of its sums is onnxruntime's
            continue
        found = [session_result(library, case, threads) for threads in (1, 2, 3)]
        bits = {
            b"".join(value.tobytes() for value in outputs) for outputs in found if isinstance(outputs, list)
        }
        assert len(bits) == 1


@operators
def test_the_fuzz_can_fail(op: str) -> None:
    """One wrong bit in an output, one row that is not written, an error too few and one too many."""
    made = [(case, want) for case, want in made_cases(5, 0, 40, [op]) if inferred(case)[0] == ""]
    right = next(
        (c, w) for c, w in made if not w[0] and all(c.wanted) and np.isfinite(_floats(w[1][0])).all()
    )
    wrong = next(((c, w) for c, w in made if w[0]), None)
    assert (wrong is None) == (op == "MoeSquareSum")  # whose errors are all seen before it runs
    if wrong is not None:
        assert problem(*wrong, _result(wrong[0], "", []))
    assert problem(*right, _result(right[0], "refused", []))
    assert not problem(*right, _result(right[0], "", right[1][1]))
    for at, value in enumerate(right[1][1]):
        if not value.size:
            continue
        for change in (_last_bit, _other_row):
            broken = change(value)
            if change is _last_bit and (op, at) in INEXACT:
                continue
            assert difference(right[0], at, value, broken)
            assert problem(*right, _result(right[0], "", [*right[1][1][:at], broken, *right[1][1][at + 1 :]]))


def _floats(value: Any) -> Any:
    return value.astype(np.float64) if value.size else np.full(1, np.nan)


def _result(case: Case, error: str, outputs: list[Any]) -> Result:
    infos = [("", ()) if info is None else as_set(info) for info in inferred(case)[1]]
    return Result("", infos, error, outputs)


def _last_bit(value: Any) -> Any:
    broken = value.copy()
    broken.reshape(-1).view(np.uint8)[0] ^= 1
    return broken


def _other_row(value: Any) -> Any:
    broken = value.copy()
    broken.reshape(-1)[-1] = 77 if broken.reshape(-1)[-1] != 77 else 1
    return broken
