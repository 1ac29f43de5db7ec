"""Every check finds what it is for, in a model broken for that reason only, and nothing in intact ones."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from broken_models import Mutation, mutations
from test_validation_intact import FOREIGN

import moe_onnx
from moe_onnx.validation import families
from moe_onnx.validation.findings import Report
from moe_onnx.validation.registry import CHECKS, CODES

families.load()
ALL = mutations()


INTACT: dict[tuple[bytes, str, tuple[tuple[str, object], ...]], Report] = {}


def report_of_intact(mutation: Mutation, folder: Path) -> Report:
    """Many mutations start from one model: it is validated once for each level and options."""
    options = dict(mutation.options)
    if mutation.on_disk or mutation.around is not nullcontext:  # other folders, other limits
        with mutation.around():
            return moe_onnx.validate(mutation.intact(folder), level=mutation.level, **options)
    key = (mutation.base().SerializeToString(deterministic=True), mutation.level, mutation.options)
    if key not in INTACT:
        INTACT[key] = moe_onnx.validate(mutation.intact(folder), level=mutation.level, **options)
    return INTACT[key]


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.id)
def test_a_model_broken_for_one_reason_is_caught_for_it(mutation: Mutation, tmp_path: Path) -> None:
    options = dict(mutation.options)
    for folder in ("intact", "broken"):
        (tmp_path / folder).mkdir()
    intact = report_of_intact(mutation, tmp_path / "intact")
    assert mutation.code not in intact.codes, intact.findings
    assert intact.ok, intact.findings
    with mutation.around():
        report = moe_onnx.validate(mutation.broken(tmp_path / "broken"), level=mutation.level, **options)
    assert mutation.code in report.codes, report.findings
    others = {f.code for f in report.of_severity("error")} - {mutation.code, *mutation.also}
    assert not others, report.findings
    for finding in report:
        more = re.search(r" and (\d+) more$", finding.where)
        if more is None or "experts" not in finding.where:
            assert len(finding.places) >= (int(more[1]) + 1 if more else 1), finding


def test_every_code_has_a_mutation() -> None:
    """MO001 is a defect of ours: test_validation_report.py makes one."""
    assert sorted(set(CODES) - {"MO001"}) == sorted({mutation.code for mutation in ALL})


def test_every_code_belongs_to_a_check() -> None:
    named = {code.name for check in CHECKS for code in check.codes}
    assert named == set(CODES) - {"MO001"}


def test_every_check_is_loaded() -> None:
    """A module with checks that families.py does not name would never run."""
    root = Path(families.__file__).parent
    with_checks = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in root.rglob("*.py")
        if "\n@check(" in path.read_text("utf-8")
    }
    assert with_checks == set(families.MODULES)


def test_the_readme_counts_right() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    assert (
        f"Each of the {len(set(CODES) - {'MO001'})} codes is caught in models broken for that reason only"
        in readme
    )
    assert f"({len(ALL)} of them, `tests/broken_*.py`)" in readme
    assert f"{len(FOREIGN)} models that come with onnx" in " ".join(readme.split())
