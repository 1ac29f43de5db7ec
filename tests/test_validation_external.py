"""External data: what a finding says, what is no finding, and that weights are not read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from broken_external import cut, data, entries, put
from broken_models import plain_model, save_on_disk
from onnx import TensorProto

import moe_onnx
from moe_onnx.validation.findings import Finding, Report, Table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_on_disk(plain_model(), tmp_path / "model.onnx")


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def test_a_missing_file_is_one_finding_with_path_bytes_and_tensors(path: Path) -> None:
    data(path).unlink()
    finding = only(moe_onnx.validate(path))
    assert finding.code == "MO101"
    assert str(data(path)) in finding.found
    assert "'weight', 'bias'" in finding.found
    assert finding.expected == "a file of 60 bytes"


def test_a_cut_file_names_the_tensors_that_it_ends_before(path: Path) -> None:
    cut(50)(path)
    finding = only(moe_onnx.validate(path))
    assert finding.code == "MO102"
    assert "50 bytes" in finding.found and "'bias'" in finding.found and "'weight'" not in finding.found
    assert finding.expected == "60 bytes"


def test_many_tensors_of_one_file_are_one_finding(tmp_path: Path) -> None:
    model = plain_model()
    for number in range(40):
        model.graph.initializer.add(name=f"w{number}", data_type=1, dims=[2], raw_data=bytes(8))
    path = save_on_disk(model, tmp_path / "model.onnx")
    data(path).unlink()
    findings = [finding for finding in moe_onnx.validate(path) if finding.code == "MO101"]
    assert len(findings) == 1 and "39 more tensors" in findings[0].found


def test_the_report_has_a_table_of_the_files(path: Path) -> None:
    (table,) = [one for one in moe_onnx.validate(path).figures if isinstance(one, Table)]
    assert table.rows == (("model.data", 2, 60, 60),)


def test_a_model_without_a_path_says_that_its_files_were_not_looked_at(path: Path) -> None:
    report = moe_onnx.validate(onnx.load(path, load_external_data=False))
    assert report.ok
    assert any("2 tensors in external files" in reason for check in report.checks for reason in check.skipped)


def test_a_right_checksum_is_no_finding(path: Path) -> None:
    put(checksum=hashlib.sha1(data(path).read_bytes()).hexdigest().upper())(path)
    assert not moe_onnx.validate(path).findings


def test_a_checksum_of_another_kind_is_said_to_be_none(path: Path) -> None:
    put(checksum=hashlib.md5(data(path).read_bytes()).hexdigest())(path)
    report = moe_onnx.validate(path)
    assert not report.findings
    assert any("no SHA-1" in reason for check in report.checks for reason in check.skipped)


@pytest.mark.parametrize(
    "harmless",
    [
        entries(lambda given: given.pop("length") and None),
        put(length="0"),
        put(location="./model.data"),
        put(prepacked_0="a|0;48;0"),
        lambda path: put(offset="0")(path),
    ],
    ids=["no length", "length 0", "a dot in the location", "prepacked weights", "offset 0"],
)
def test_what_onnxruntime_takes_is_no_finding(path: Path, harmless: object) -> None:
    harmless(path)  # type: ignore[operator]
    assert not moe_onnx.validate(path).findings


def test_tied_tensors_name_one_range(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    tied = model.graph.initializer.add()
    tied.CopyFrom(model.graph.initializer[0])
    tied.name = "tied"
    model.graph.node[0].input[1] = "tied"
    model.graph.node.add(op_type="MatMul", input=["x", "weight"], output=["z"])
    model.graph.output.add(name="z").type.tensor_type.elem_type = 1
    path.write_bytes(model.SerializeToString())
    assert not moe_onnx.validate(path).findings


def test_room_between_tensors_is_no_leftover(tmp_path: Path) -> None:
    """Writers start large tensors at multiples of up to 64 KiB."""
    path = save_on_disk(plain_model(), tmp_path / "model.onnx")
    entries(lambda given: given.update(offset="65536"), "bias")(path)
    data(path).write_bytes(data(path).read_bytes()[:48] + bytes(65536 - 48) + bytes(12) + bytes(4000))
    assert not moe_onnx.validate(path).findings


def test_bytes_that_another_model_of_the_folder_names_are_no_leftover(path: Path) -> None:
    save_on_disk(plain_model(), path)
    assert moe_onnx.validate(path).codes == ("MO108",)
    other = onnx.load(path, load_external_data=False)
    path.with_name("other.onnx").write_bytes(other.SerializeToString())
    assert not moe_onnx.validate(path).findings


def test_a_cache_of_links_is_a_note(path: Path, tmp_path: Path) -> None:
    """A download cache: model and data are links into one folder of files. onnxruntime loads it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for one in (path, data(path)):
        one.rename(blobs / one.name)
        (snapshot / one.name).symlink_to(Path("..") / "blobs" / one.name)
    assert moe_onnx.validate(snapshot / path.name).codes == ("MO104",)


def test_the_working_folder_does_not_matter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    assert not moe_onnx.validate(path.name).findings
    monkeypatch.chdir("/")
    assert not moe_onnx.validate(path).findings
    assert not moe_onnx.validate(os.path.relpath(path)).findings


def test_a_file_of_many_gigabytes_is_not_read(tmp_path: Path) -> None:
    """Three gigabytes, of which no block is there: reading them would take seconds and the room."""
    model = plain_model()
    size = 3 * 2**30
    weight = model.graph.initializer[0]
    weight.CopyFrom(TensorProto(name="weight", data_type=1, dims=[size // 4], data_location=1))
    weight.external_data.add(key="location", value="model.data")
    weight.external_data.add(key="checksum", value="00" * 20)
    model.graph.node[0].op_type, model.graph.node[0].input[0] = "Add", "weight"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    report = moe_onnx.validate(path)
    assert report.codes[0] == "MO101"
    data(path).touch()
    os.truncate(data(path), size - 1)
    assert moe_onnx.validate(path).codes[0] == "MO102"
    os.truncate(data(path), size)
    report = moe_onnx.validate(path)
    assert not {code for code in report.codes if code.startswith("MO1")}
    assert any("was not computed" in reason for check in report.checks for reason in check.skipped)
    assert sum(check.seconds for check in report.checks if check.name.startswith("external")) < 1


def test_the_intact_weights_are_those_that_were_saved(path: Path) -> None:
    """The base of all mutations of files is what it seems."""
    loaded = onnx.load(path)
    weight = onnx.numpy_helper.to_array(loaded.graph.initializer[0])
    np.testing.assert_array_equal(weight, np.arange(1, 13, dtype=np.float32).reshape(4, 3))
    assert data(path).stat().st_size == 60
