"""No model that a file can hold makes a check fail, raise or end the process.

``python tests/fuzz_models.py SECONDS`` does the same for longer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fuzz_models import cut_bytes, damaged, failures, intact, parsed

import moe_onnx
from moe_onnx.errors import ModelFileError

TARGETS = (None, "ascend910b", "ascend950")


@pytest.mark.parametrize("chunk", range(4))
def test_no_check_fails_on_models_with_damaged_fields(chunk: int) -> None:
    for number in range(30):
        rng = Random(f"{chunk}/{number}")
        model = damaged(rng)
        found = failures(model, target=TARGETS[number % 3])
        assert not found, f"{chunk}/{number}\n{found[0]}\n{str(model)[:3000]}"


def test_no_check_fails_on_files_with_damaged_bytes(tmp_path: Path) -> None:
    """Either the file is refused in a sentence, or there is a report."""
    path = tmp_path / "damaged.onnx"
    outcomes: Counter[str] = Counter()
    for number in range(90):
        data = cut_bytes(Random(number))
        path.write_bytes(data)
        try:
            report = moe_onnx.validate(path)
        except ModelFileError:
            outcomes["refused"] += 1
        else:
            outcomes["ok" if report.ok else "not ok"] += 1
            assert "MO001" not in report.codes, f"{number}: {report.findings}"
    # How many depends on the models that the tables of mutations happen to hold.
    assert min(outcomes["refused"], outcomes["ok"], outcomes["not ok"]) >= 1, outcomes


def test_models_are_damaged_in_ways_that_many_checks_see() -> None:
    """The fuzz test tests something: damage is found, of many kinds, and the models differ."""
    assert len(intact()) >= 8
    codes: Counter[str] = Counter()
    seen = set()
    for number in range(40):
        model = damaged(Random(f"0/{number}"))
        seen.add(model.SerializeToString())
        codes.update(moe_onnx.validate(model).codes)
    assert len(seen) > 30
    assert len(codes) > 12, codes


def test_a_model_of_bytes_that_are_none_is_none() -> None:
    assert parsed(b"\xff\xff\xff") is None
