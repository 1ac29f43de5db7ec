"""Checkpoints: parameters and optimizer state as safetensors, the rest as JSON, replaced as a whole.

    checkpoint/
      latest                    the name of the folder that counts
      step-00000120/
        model.safetensors       the parameters, by the names they have in transformers
        optimizer.safetensors   optimizer state, by the names of its graph inputs
        trainer.json            step, data order, config, optimizer, versions, in float16 the loss scale;
                                sizes and SHA-256 of the files

A save writes a new folder, renames it into place and then replaces ``latest``: whenever the process is
killed, ``latest`` names a complete checkpoint, the old one or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from moe_onnx.build.draft import LOSS_SCALE
from moe_onnx.errors import CheckpointError
from moe_onnx.runtime.loss_scale import from_json, to_json
from moe_onnx.runtime.training_state import STEP, checked_tensors
from moe_onnx.spec import PACKAGE_VERSION

if TYPE_CHECKING:
    from moe_onnx.runtime.training_session import TrainingSession

FORMAT = "moe_onnx.checkpoint"
FORMAT_VERSION = 1
LATEST = "latest"
MODEL, OPTIMIZER, TRAINER = "model.safetensors", "optimizer.safetensors", "trainer.json"
_KEPT = 2  # the checkpoint that counts and the one before it


def save_checkpoint(
    session: TrainingSession, folder: str | os.PathLike[str], *, data: Mapping[str, Any] | None = None
) -> Path:
    """Save a session's state, so that a kill at any moment leaves the old or the new checkpoint.

    Args:
        session: What to save.
        folder: The checkpoint's folder; made if need be. The one before this is kept too, older ones
            are removed.
        data: State of the data order (``TokenDataset.state_dict()``), given back by the load.

    Returns:
        The folder of this save, which can be loaded by itself as well.

    Raises:
        CheckpointError: If the folder cannot be written to.
    """
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left_over in root.glob(".new-*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        name = _free_name(root, session.global_step)
        beside = root / f".new-{name}"
        beside.mkdir()
        _write(session, beside, data)
        os.replace(beside, root / name)
        before = _pointer(root)
        _write_synced(root / f".new-{LATEST}", name.encode())
        os.replace(root / f".new-{LATEST}", root / LATEST)
        _sync(root)
    except OSError as error:
        raise CheckpointError(f"The checkpoint could not be saved to '{root}': {error}.") from error
    kept = {name, before}
    for old in root.glob("step-*"):
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return root / name


def load_checkpoint(session: TrainingSession, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` saved; a session is changed as a whole or not at all.

    Args:
        session: Of the same config, but for ``dtype``, and optimizer as the one that was saved.
        folder: The checkpoint's folder, or one of the ``step-...`` folders in it.

    Returns:
        The contents of ``trainer.json``; ``["data"]`` is the state of the data order.

    Raises:
        CheckpointError: If the checkpoint is not there, corrupt, of another model or another format;
            names file, tensor, expected and found.
    """
    path = _resolve(Path(folder))
    with _naming_others(Path(folder), path):
        about = _read_trainer(path / TRAINER)
    for what, ours in (("config", session.manifest.config), ("optimizer", session.manifest.optimizer)):
        _compare(path / TRAINER, what, _meant(ours), _meant(about.get(what)))
    scale = about.get(LOSS_SCALE)
    more = {} if scale is None else {LOSS_SCALE: from_json(scale, str(path / TRAINER))}
    parameters = set(session.manifest.parameter_names)
    expected = session.state_layout()
    state: dict[str, Any] = {}
    with _naming_others(Path(folder), path):
        for name in (MODEL, OPTIMIZER):
            wanted = {key: kind for key, kind in expected.items() if (key in parameters) == (name == MODEL)}
            state |= _read_tensors(path / name, wanted, about["files"].get(name))
    session.load_state_dict(state | more | {STEP: np.array(about["global_step"], np.int64)})
    return about


def checkpoint_model(folder: str | os.PathLike[str]) -> Path:
    """The file of a checkpoint's parameters, once its size and hash are found to be right.

    Args:
        folder: As of :func:`load_checkpoint`.

    Raises:
        CheckpointError: If the checkpoint is not there or corrupt.
    """
    path = _resolve(Path(folder))
    with _naming_others(Path(folder), path):
        about = _read_trainer(path / TRAINER)
        try:
            _check_file(path / MODEL, about["files"].get(MODEL))
        except OSError as error:
            raise CheckpointError(f"{path / MODEL}: cannot be read: {error}.") from error
    return path / MODEL


def _meant(options: Any) -> Any:
    """Config or optimizer without what the form of a graph is: all forms have the same parameters."""
    if not isinstance(options, Mapping):
        return options or {}
    return {name: value for name, value in options.items() if name != "unroll_experts"}


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether there are checkpoints in the folder, or it is one, sound or not."""
    root = Path(folder)
    return (root / LATEST).exists() or (root / TRAINER).exists() or bool(_whole(root))


def _write(session: TrainingSession, folder: Path, data: Mapping[str, Any] | None) -> None:
    state = session.state_dict()
    step, scale = int(state.pop(STEP)), state.pop(LOSS_SCALE, None)
    parameters = {name: state.pop(name) for name in session.manifest.parameter_names}
    files = {}
    for name, tensors in ((MODEL, parameters), (OPTIMIZER, state)):
        save_file(tensors, str(folder / name), {"format": "pt"})  # transformers wants to see "pt"
        _sync(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
    about = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "moe_onnx": PACKAGE_VERSION,
        "global_step": step,
        "config": session.manifest.config,
        "optimizer": session.manifest.optimizer,
        "data": None if data is None else dict(data),
        **({} if scale is None else {LOSS_SCALE: to_json(scale)}),
        "files": files,
    }
    _write_synced(folder / TRAINER, json.dumps(about, indent=1).encode())
    for name in files:
        shutil.copymode(folder / TRAINER, folder / name)  # safetensors writes for the owner's eyes only
    _sync(folder)


def _free_name(root: Path, step: int) -> str:
    name = f"step-{step:08}"
    number = 1
    while (root / name).exists():  # saved before at this step; it must stay until the new one is there
        name, number = f"step-{step:08}.{number}", number + 1
    return name


def _pointer(root: Path) -> str | None:
    return (root / LATEST).read_text("utf-8").strip() if (root / LATEST).exists() else None


def _resolve(folder: Path) -> Path:
    if (folder / TRAINER).exists():
        return folder
    try:
        name = _pointer(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / LATEST}: cannot be read: {error}.{_others(folder)}") from error
    if name is None:
        raise CheckpointError(
            f"There is no checkpoint in '{folder}': neither '{LATEST}' nor '{TRAINER}' is there."
            f"{_others(folder)}"
        )
    if Path(name).name != name or name == "..":
        raise CheckpointError(
            f"{folder / LATEST}: names '{name}', which is no folder in '{folder}'. To load a checkpoint from "
            "elsewhere, give its own path."
        )
    if not (folder / name / TRAINER).exists():
        raise CheckpointError(
            f"{folder / LATEST}: names '{name}', which holds no '{TRAINER}'.{_others(folder, name)}"
        )
    return folder / name


def _whole(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob(f"step-*/{TRAINER}"))


def _others(root: Path, named: str = "") -> str:
    """What else there is to load, as the end of a message."""
    others = [name for name in _whole(root) if name != named]
    if not others:
        return ""
    return (
        f" There are other checkpoints: {', '.join(others)}. They can be loaded by their path; to go on from "
        f"one, write its name into '{root / LATEST}'."
    )


@contextmanager
def _naming_others(root: Path, path: Path) -> Iterator[None]:
    """Where a checkpoint that ``latest`` names is broken, say which others there are."""
    try:
        yield
    except CheckpointError as error:
        if path == root:
            raise
        raise CheckpointError(f"{error}{_others(root, path.name)}") from error


def _read_trainer(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise CheckpointError(f"{path}: 'format' must be '{FORMAT}', found {found!r:.60}.")
    if about.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: 'format_version' must be {FORMAT_VERSION}, found "
            f"{about.get('format_version')!r} (saved by moe_onnx {about.get('moe_onnx')}). "
            "Load it with that release."
        )
    step, files = about.get("global_step"), about.get("files")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"{path}: 'global_step' must be an integer >= 0, found {step!r:.60}.")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: 'files' must be an object, found {files!r:.60}.")
    return about


def _compare(path: Path, what: str, ours: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    absent = "nothing"
    # Parameters and optimizer state are float32 whatever is computed in.
    for key in [key for key in (*ours, *(key for key in found if key not in ours)) if key != "dtype"]:
        if ours.get(key, absent) != found.get(key, absent):
            raise CheckpointError(
                f"{path}: saved from another {what}: '{key}' expected {ours.get(key, absent)!r}, found "
                f"{found.get(key, absent)!r}."
            )


def _read_tensors(
    path: Path, expected: Mapping[str, tuple[tuple[int, ...], str]], listed: Any
) -> dict[str, Any]:
    """The tensors of a file, once names, shapes, dtypes, size and hash are found to be right."""
    try:
        # safetensors 0.4 cannot read what it wrote of no tensors, as of SGD without momentum.
        found = load_file(str(path)) if expected else {}
    except (OSError, SafetensorError, TypeError, KeyError) as error:  # the last two: unknown dtypes
        raise CheckpointError(f"{path}: cannot be read: {error!r}.") from error
    # A foreign file is better known by its tensors than by its hash.
    tensors = checked_tensors(found, expected, str(path))
    _check_file(path, listed)
    return tensors


def _check_file(path: Path, listed: Any) -> None:
    size = path.stat().st_size
    if not isinstance(listed, dict) or listed.get("bytes") != size or listed.get("sha256") != _sha256(path):
        raise CheckpointError(
            f"{path}: is not the file that was saved: {TRAINER} expects {listed!r}, found {size} bytes, "
            f"sha256 {_sha256(path)}."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """See that a file, or a folder's list of names, is on the disk."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        return  # folders cannot be opened on Windows
    try:
        os.fsync(number)
    except OSError:
        pass  # nor synced everywhere
    finally:
        os.close(number)
