"""A saved training graph is a folder: its ``manifest.json``, the graphs beside it, and what they carry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from moe_onnx.build.manifest import FORMAT, Manifest
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.prepared import carried_manifest, few, parse

DIFFERS = code(
    "MO622",
    "error",
    "The folder's manifest.json is not the one its graph carries",
    why="A training session reads manifest.json and the graphs beside it. If they come from different "
    "builds, states, gradients and capacities are taken for what they are not, and nothing fails.",
    mend="Save the training graph again as a whole (`TrainingGraph.save`), into an empty folder.",
)
FOLDER = code(
    "MO623",
    "error",
    "A graph of the folder's manifest.json is missing, or is another graph",
    why="manifest.json lists the graphs of a build, each in a file of its name. One that is missing, cut off "
    "or mistaken for another stops a training session, and tools that only run one of the files do not tell.",
    mend="Save the training graph again as a whole (`TrainingGraph.save`).",
)
STRIPPED = code(
    "MO624",
    "warning",
    "The graph has lost the manifest it was saved with",
    why="manifest.json names this file as one of its graphs, but the model does not carry the manifest in "
    "its metadata any more, as after tools that drop metadata. Away from its folder nobody can train it.",
    mend="Keep metadata_props when a model is rewritten, or save the training graph again.",
)

_NAME = "manifest.json"
_MOST_BYTES = 2**29  # of a graph beside the one that is validated


@check("static", DIFFERS, FOLDER, STRIPPED)
def folder(subject: Subject) -> Iterator[Outcome]:
    """The manifest.json beside a graph is that of the graph, and its other graphs are there."""
    if subject.path is None or subject.folder is None:
        yield Skipped("the model does not come from a file")
        return
    text = _text(subject.folder / _NAME)
    if text is None:
        yield Skipped(f"there is no {_NAME} of this package beside the file")
        return
    beside = parse(text)
    carried = carried_manifest(subject)
    if isinstance(beside, str):
        if carried is not None:  # another program's manifest.json is none of our business
            yield DIFFERS(f"'{_NAME}'", found=f"it cannot be read: {beside.rstrip('.')}")
        return
    stem = subject.path.stem
    if carried is None:
        if stem in beside.graphs:
            yield STRIPPED(f"'{subject.path.name}'", found="no manifest in its metadata", expected="one")
        return
    if isinstance(carried, Manifest) and carried != beside:
        yield DIFFERS(f"'{_NAME}'", found=_difference(beside, carried), expected="as in the graph's metadata")
        return
    yield from _file(subject.path.name, stem, subject.model, beside)
    for name in beside.graphs:
        if name != stem:
            yield from _sibling(subject.folder, name, beside)


def _text(path: Path) -> bytes | None:
    """The file, where it says that it is ours."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        text = path.read_bytes()
    except OSError:
        return None
    return text if FORMAT.encode() in text[:4096] else None


def _difference(beside: Manifest, carried: Manifest) -> str:
    """The first thing in which two manifests differ."""
    a, b = beside.to_dict(), carried.to_dict()
    path: list[str] = []
    while type(a) is type(b) and isinstance(a, (dict, list)):
        if isinstance(a, list):
            if len(a) != len(b):
                return f"{'.'.join(path)} has {len(a)} entries, the graph's has {len(b)}"
            keys: Any = range(len(a))
        else:
            keys = [*a, *(key for key in b if key not in a)]
            if absent := [key for key in keys if key not in a or key not in b]:
                has = "only the file has" if absent[0] in a else "only the graph has"
                return f"{has} {'.'.join([*path, str(absent[0])])!r}"
        key = next((key for key in keys if a[key] != b[key]), None)
        if key is None:
            break
        path.append(str(key))
        a, b = a[key], b[key]
    return f"'{'.'.join(path)}' is {a!r:.80}, in the graph {b!r:.80}"


def _sibling(folder: Path, name: str, manifest: Manifest) -> Iterator[Outcome]:
    where = f"'{name}.onnx'"
    if not name or Path(name).name != name:
        yield FOLDER(f"'{_NAME}'", found=f"{name!r} cannot be the name of a file")
        return
    path = folder / f"{name}.onnx"
    try:
        if not path.is_file():
            yield FOLDER(where, found="there is no such file", expected=f"the graph {name!r} of {_NAME}")
        elif path.stat().st_size > _MOST_BYTES:
            yield Skipped(f"{where} was not looked into: it is large")
        else:
            model = onnx.load(path, load_external_data=False)
            yield from _file(path.name, name, model, manifest)
    except (DecodeError, OSError, ValueError) as error:
        yield FOLDER(where, found=f"it cannot be read: {str(error)[:200] or type(error).__name__}")


def _file(file: str, name: str, model: ModelProto, manifest: Manifest) -> Iterator[Outcome]:
    """Whether a file holds the graph that its name says."""
    if name not in manifest.graphs:
        return
    info = manifest.graphs[name]
    for side, values, wanted in (
        ("inputs", model.graph.input, info.inputs),
        ("outputs", model.graph.output, info.outputs),
    ):
        given = {value.name for value in values}
        missing = [one.name for one in wanted if one.name not in given]
        if missing and model.graph.name != name:
            called = f"the graph {model.graph.name!r}"
            yield FOLDER(
                f"'{file}'",
                found=f"{called} without the {side} {few(missing)}",
                expected=f"{name!r}",
                places=[f"'{file}', {side[:-1]} {one!r}" for one in missing],
            )
            return
        if missing and side == "outputs":
            yield FOLDER(
                f"'{file}'",
                found=f"the {side} {few(missing)} are missing",
                expected=f"{name!r}",
                places=[f"'{file}', {side[:-1]} {one!r}" for one in missing],
            )
