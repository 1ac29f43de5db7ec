"""What is no model is refused in a sentence that says what it is; limits of runtimes are as measured."""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from broken_models import parse, plain_model
from broken_structure import function_model, node
from safetensors.numpy import save_file

import moe_onnx
from moe_onnx.errors import ModelFileError, OptionError
from moe_onnx.validation.file.runtime_limits import OLDEST, loads
from moe_onnx.validation.types import infer_types

ROOT = Path(__file__).parent.parent
BYTES = plain_model().SerializeToString()


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def safetensors(path: Path) -> None:
    save_file({"some.weight": np.zeros(3, np.float32)}, path)


def array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))


def gigabytes(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 * 2**30)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "no such file"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
    "an empty file": (content(b""), "is empty"),
    "text": (content(b"a model, no doubt\n" * 9), "looks like text"),
    "control characters": (content(b"\x08\x0a"), "no graph."),
    "a web page": (content(b"<!DOCTYPE html><html>404</html>"), "HTML page"),
    "a pointer": (content(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"), "git lfs pull"),
    "a cut model": (content(BYTES[:-9]), "cut off"),
    "half a model": (content(BYTES[: len(BYTES) // 2]), "cut off"),
    "random bytes": (content(np.random.default_rng(0).bytes(999)), "no ONNX model"),
    "a tensor": (content(onnx.numpy_helper.from_array(np.zeros((2, 3))).SerializeToString()), "TensorProto"),
    "a graph": (content(plain_model().graph.SerializeToString()), "no graph"),
    "a node": (content(plain_model().graph.node[0].SerializeToString()), "no graph"),
    "safetensors": (safetensors, "looks like a safetensors file"),
    "an array": (array, "array of numpy"),
    "an archive": (archive, "zip archive"),
    "three gigabytes": (gigabytes, "external data"),
    "a pipe": (os.mkfifo, "no regular file"),
    "a link to nothing": (lambda path: path.symlink_to("gone"), "leads nowhere"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "names that are no text": (content(BYTES.replace(b"product", b"pr\xffduct")), "UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_model_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    make, said = BAD[name]
    path = tmp_path / "model.onnx"
    make(path)
    with pytest.raises(ModelFileError) as caught:
        moe_onnx.validate(path)
    message = str(caught.value)
    assert message.startswith(f"'{path}'") and said in message, message
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize("length", range(1, len(BYTES), 7))
def test_every_cut_of_a_model_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(BYTES[:length])
    with pytest.raises(ModelFileError):
        moe_onnx.validate(path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "model.onnx/inside"])
def test_paths_that_none_can_be_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(BYTES)
    with pytest.raises(ModelFileError, match="cannot be read"):
        moe_onnx.validate(tmp_path / name)


def test_a_folder_says_which_models_are_in_it(tmp_path: Path) -> None:
    (tmp_path / "this.onnx").write_bytes(BYTES)
    with pytest.raises(ModelFileError, match=r"this\.onnx"):
        moe_onnx.validate(tmp_path)


def test_bytes_are_no_path() -> None:
    with pytest.raises(OptionError, match="load_from_string"):
        moe_onnx.validate(BYTES)  # type: ignore[arg-type]


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(BYTES)
    path.chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr("builtins.open", refuse)
        monkeypatch.setattr(Path, "open", refuse)
        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ModelFileError, match="Permission denied"):
        moe_onnx.validate(path)


def test_the_name_of_a_file_does_not_say_what_is_in_it(tmp_path: Path) -> None:
    """onnx.load reads .json and .onnxtxt as text."""
    for suffix in (".json", ".onnxtxt", ".textproto", ""):
        path = tmp_path / f"model{suffix}"
        path.write_bytes(BYTES)
        assert moe_onnx.validate(path).ok


def test_the_oldest_supported_runtime_is_that_of_the_metadata() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (bound,) = [one for one in metadata["project"]["dependencies"] if one.startswith("onnxruntime>=")]
    assert bound == f"onnxruntime>={OLDEST.version}"


def test_the_installed_runtime_reads_what_the_oldest_does() -> None:
    assert loads(OLDEST.ir_version, "", 13)
    for domain, version in OLDEST.opsets.items():
        assert loads(10, domain, version), domain
    assert not loads(99, "", 13)
    assert not loads(10, "", 999)
    assert loads(10, "of.somebody", 999)


def test_newer_versions_say_which_runtime_reads_what() -> None:
    model = plain_model()
    model.ir_version, model.opset_import[0].version = 99, 99
    found = {finding.code: finding for finding in moe_onnx.validate(model)}
    assert found["MO121"].found == "IR version 99" and "at most 14" in found["MO121"].expected
    assert found["MO122"].found == "version 99 of 'ai.onnx'" and "at most 28" in found["MO122"].expected


@pytest.mark.parametrize("imports", [["ai.onnx"], ["", "of.somebody"], ["", "ai.onnx.contrib"]])
def test_harmless_imports_are_no_finding(imports: list[str]) -> None:
    """The alias of the default domain, and imports that no node needs, as onnxruntime writes them."""
    model = plain_model()
    del model.opset_import[:]
    for domain in imports:
        model.opset_import.add(domain=domain, version=21 if domain in ("", "ai.onnx") else 1000)
    assert not moe_onnx.validate(model).findings


def test_a_function_of_another_opset_with_the_same_operators_is_no_finding() -> None:
    model = function_model()
    model.functions[0].opset_import[0].version = 18
    assert "MO128" not in moe_onnx.validate(model).codes


@pytest.mark.parametrize("depth", [3, 30, 60])
def test_models_nested_deeply_are_checked(depth: int) -> None:
    """No reader takes a file of more than 33 branches in each other; a model in memory may have them."""
    model = parse("deep (bool c) => (bool y) { }")
    graph = model.graph
    for level in range(depth):
        made = graph.node.add(op_type="If", input=["c"], output=["y" if not level else f"y{level}"])
        for name in ("then_branch", "else_branch"):
            branch = made.attribute.add(name=name, type=onnx.AttributeProto.GRAPH).g
            branch.name = name
            branch.output.add(name=f"y{level + 1}").type.tensor_type.elem_type = onnx.TensorProto.BOOL
            if name == "then_branch":
                graph = branch
            else:
                branch.node.add(op_type="Not", input=["c"], output=[f"y{level + 1}"])
    graph.node.add(op_type="Not", input=["c"], output=[f"y{depth}"])
    assert not moe_onnx.validate(model).findings


def test_inference_of_functions_without_end_is_not_begun() -> None:
    text = "calls (float[2] x) => (float[2] y) { y = local.f0 (x) }\n"
    for number in range(40):
        call = f"local.f{number + 1}"
        text += f'<domain: "local", opset_import: ["" : 21, "local" : 1]> f{number} (a) => (b) '
        text += f"{{ c = {call} (a) b = {call} (c) }}\n"
    text += '<domain: "local", opset_import: ["" : 21]> f40 (a) => (b) { b = Relu (a) }'
    model = parse(text, imports=', "local" : 1')
    assert "nodes" in infer_types(model)[1]
    node_of_last = model.functions[-1].node[0]
    node_of_last.op_type, node_of_last.domain = "f0", "local"
    assert "calls itself" in infer_types(model)[1]
    assert not infer_types(function_model())[1]
    assert node(function_model(), "call").domain == "local"


def test_data_is_not_propagated_through_functions_of_vectors_of_gigabytes() -> None:
    """onnx would hold every element as a size."""
    model = function_model()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2**31 - 1
    assert not moe_onnx.validate(model).findings
