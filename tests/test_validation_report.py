"""What a report says: in Python, on a terminal, as JSON, as a page; and how the command leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_models import copy_of, parse, plain_model
from click.testing import CliRunner

import moe_onnx
from moe_onnx.cli import main
from moe_onnx.validation import families, registry
from moe_onnx.validation.findings import Bars, CheckRun, Report, Skipped, Table
from moe_onnx.validation.html import report_page
from moe_onnx.validation.pages import page_files
from moe_onnx.validation.registry import CODES
from moe_onnx.validation.validate import CHECK_FAILED

ROOT = Path(__file__).parent.parent
families.load()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[registry.Check]]:
    """The list of checks, to be changed for one test."""
    changed = list(registry.CHECKS)
    monkeypatch.setattr("moe_onnx.validation.validate.CHECKS", changed)
    return changed


def add(checks: list[registry.Check], function: Any) -> None:
    checks.append(registry.Check("test.one", "static", "What a test looks at.", (CHECK_FAILED,), function))


def test_a_check_that_fails_is_never_a_pass(checks: list[registry.Check]) -> None:
    """The other checks run, the report is not ok, and the traceback is in it."""

    def broken(subject: object) -> Iterator[object]:
        yield Skipped("before it fails")
        raise ZeroDivisionError("on purpose")

    before = len(moe_onnx.validate(plain_model()).checks)
    add(checks, broken)
    checks.append(checks.pop(0))
    report = moe_onnx.validate(plain_model())
    assert not report.ok and report.codes == ("MO001",) and len(report.checks) == before + 1
    assert "ZeroDivisionError: on purpose" in report.findings[0].found
    with pytest.raises(moe_onnx.ValidationError, match="MO001 error: check test.one") as caught:
        report.raise_if_failed()
    assert caught.value.report is report


def test_a_clean_report(tmp_path: Path) -> None:
    report = moe_onnx.validate(plain_model())
    assert report.ok and not report.findings and report.level == "static"
    report.raise_if_failed()
    data = json.loads(report.save_json(tmp_path / "r.json").read_text())
    assert (data["format"], data["format_version"], data["ok"]) == ("moe_onnx.report", 1, True)
    assert data["counts"] == {"error": 0, "warning": 0, "note": 0}
    assert {check["name"] for check in data["checks"]} == {check.name for check in report.checks}
    assert data["versions"]["onnxruntime"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def sample() -> Report:
    report = Report("a <model>", "run", "ascend910b", versions={"onnx": "1"})
    report.findings = [
        CHECK_FAILED("node 'x<y'", found="1 & 2", expected="less [red]", aclnn=561002),
    ]
    report.checks = [CheckRun("a.b", "static", "Looks.", 0.5, 1, ("no <weights>",))]
    report.figures = [
        Table("Times", ("graph", "ms"), (("grad<", 1.5), ("apply", 2))),
        Bars("Errors", ("w", "b", "c"), (1e-9, 3e-4, float("nan")), log=True, limit=1e-6),
        Bars("Nothing", ("w",), (0.0,)),
    ]
    return report


class _Balance(HTMLParser):
    """Tags that are closed in order, and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        given = dict(attrs)
        assert not {"src", "onload", "onclick"} & set(given)
        if "href" in given:
            self.links.append(str(given["href"]))
        if "id" in given:
            self.ids.add(str(given["id"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = report_page(sample())
    parser = _Balance()
    parser.feed(text)
    assert not parser.open
    assert parser.links and all(link.startswith("#") and link[1:] in parser.ids for link in parser.links)
    assert "http" not in text and "<script" not in text and "url(" not in text
    for escaped in ("a &lt;model&gt;", "x&lt;y", "1 &amp; 2", "grad&lt;", "no &lt;weights&gt;", "561002"):
        assert escaped in text, escaped
    assert text.count('class="bar over"') == 2  # 3e-4 and NaN, not 1e-9
    widths = [float(width) for width in re.findall(r'<i style="width:([\d.]+)%', text)]
    assert all(0 <= width <= 100 for width in widths) and widths[0] < widths[1]
    assert CODES["MO001"].title in text


def test_the_terminal_says_the_same(tmp_path: Path) -> None:
    from rich.console import Console

    from moe_onnx.validation.printing import print_report

    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    print_report(sample(), console, verbose=True)
    text = console.export_text()
    console.file.close()
    for part in (
        "MO001 error",
        "node 'x<y'",
        "less [red]",
        "561002",
        "Times",
        "grad<",
        "Errors (limit 1e-06",
        "no <w",
    ):
        assert part in text, part
    assert "failed: 1 error, 0 warnings, 0 notes; 1 checks of level run" in text


def test_every_place_is_in_the_file_and_on_the_page_not_on_the_terminal(tmp_path: Path) -> None:
    """Twelve nodes read what nothing makes: the terminal names one, scripts get them all."""
    model = copy_of(plain_model())
    for number in range(12):
        model.graph.node.add(op_type="Relu", input=["nobody"], output=[f"r<{number}"], name=f"r<{number}")
    path, page = tmp_path / "bad.onnx", tmp_path / "page.html"
    path.write_bytes(model.SerializeToString())
    printed = run("validate", path, "--json", tmp_path / "r.json", "--html", page).output
    assert "r<0" in printed and "r<7" not in printed
    findings = json.loads((tmp_path / "r.json").read_text())["findings"]
    (found,) = (one for one in findings if one["code"] == "MO202")
    assert found["places"] == [f"node 'r<{number}' (Relu)" for number in range(12)]
    assert found["where"] == found["places"][0] and "11 more nodes" in found["found"]
    text = page.read_text()
    parser = _Balance()
    parser.feed(text)
    assert not parser.open
    assert "<summary>all 12 places</summary>" in text and "node &#x27;r&lt;7&#x27; (Relu)" in text


def test_a_finding_of_one_place_names_it() -> None:
    one = CHECK_FAILED("check a", found="x")
    assert one.places == ("check a",)
    assert "<details>" not in report_page(Report("m", "static", findings=[one]))


def test_exit_codes(tmp_path: Path) -> None:
    """0 clean, 1 errors, 2 not to be read: scripts go by them."""
    good, bad, page = tmp_path / "good.onnx", tmp_path / "bad.onnx", tmp_path / "page.html"
    good.write_bytes(plain_model().SerializeToString())
    model = copy_of(plain_model())
    model.graph.node[1].input[0] = "nobody"
    bad.write_bytes(model.SerializeToString())
    assert run("validate", good).exit_code == 0
    result = run("validate", bad, "--json", tmp_path / "r.json", "--html", page)
    assert result.exit_code == 1 and "nobody" in result.output
    assert json.loads((tmp_path / "r.json").read_text())["ok"] is False
    assert "nobody" in page.read_text()
    result = run("validate", bad, "--json", "-")
    assert result.exit_code == 1 and json.loads(result.output)["counts"]["error"] >= 1
    assert run("validate", good, "--json", tmp_path / "no" / "r.json").exit_code == 2
    cut, empty = tmp_path / "cut.onnx", tmp_path / "empty.onnx"
    cut.write_bytes(good.read_bytes()[:-7])
    empty.write_bytes(b"")
    for path in (cut, empty, tmp_path, tmp_path / "none.onnx", tmp_path / "r.json"):
        result = run("validate", path)
        assert result.exit_code == 2 and len(result.output.splitlines()) <= 3, (path, result.output)
    for arguments in (("--level", "deep"), ("--target", "ascend310"), ("--ub-size", 0)):
        assert run("validate", good, *arguments).exit_code == 2


def test_options_of_the_function() -> None:
    for options, message in (
        ({"level": "deep"}, "'static', 'run', 'full', got 'deep'"),
        ({"target": "ascend310"}, "'ascend910b'.*got 'ascend310'"),
        ({"ub_size": 0}, "ub_size must be a number of bytes > 0, got 0"),
    ):
        with pytest.raises(moe_onnx.OptionError, match=message):
            moe_onnx.validate(plain_model(), **options)  # type: ignore[arg-type]


def test_every_code_has_its_page() -> None:
    """If this fails: ``moe-onnx pages``."""
    folder = ROOT / "moe_onnx" / "validation" / "pages"
    for path, text in page_files(folder).items():
        assert path.exists() and path.read_text("utf-8") == text, path
    assert {path.stem for path in folder.glob("MO*.md")} == set(CODES)


def test_explain() -> None:
    listed = run("explain")
    assert listed.exit_code == 0
    assert re.findall(r"^MO\d{3}", listed.output, re.MULTILINE) == sorted(CODES)
    one = run("explain", "mo001")
    assert one.exit_code == 0 and "defect of moe_onnx" in " ".join(one.output.split())
    assert run("explain", "MO000").exit_code == 2


def test_codes_are_well_said() -> None:
    for name, code in CODES.items():
        assert re.fullmatch(r"MO\d{3}", name)
        assert code.title and not code.title.endswith(".") and "\n" not in code.title, name
        assert len(code.why) > 60 and code.why.endswith((".", "`")), name
        assert len(code.mend) > 15 and code.mend.endswith((".", "`")), name


def test_weights_are_not_copied() -> None:
    """A large model is not held twice: what onnx infers from has no weights."""
    weight = np.zeros((2048, 2048), np.float32)
    model = parse("weighted (float[n, 2048] x) => (float[n, 2048] y) { y = MatMul (x, weight) }")
    import onnx

    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    from moe_onnx.validation.subject import Options, open_subject

    subject = open_subject(model, Options())
    assert subject.types(subject.main)["y"].shape == ("n", 2048)
    assert subject.inferred[0].ByteSize() < 10_000
