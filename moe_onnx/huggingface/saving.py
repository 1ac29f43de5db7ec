"""``moe_onnx.save_pretrained``: trained parameters in the form of the checkpoint they came from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_onnx.build.manifest import Manifest
from moe_onnx.build.weights import ORIGIN, WEIGHTS, StoredWeights
from moe_onnx.errors import CheckpointError, ModelError, OptionError
from moe_onnx.huggingface.fields import CONFIG
from moe_onnx.huggingface.origin import TENSORS, Origin, Tensor, carry, find_origin, read_origin
from moe_onnx.huggingface.pretrained import Pretrained
from moe_onnx.huggingface.shards import INDEX
from moe_onnx.runtime.checkpoint import checkpoint_model, has_checkpoint
from moe_onnx.runtime.training_session import TrainingSession
from moe_onnx.storage import FLOATS, NAMES, PIECE, TensorFile, write_tensors

Array = np.ndarray[Any, Any]
Pieces = Callable[[str, int, int], Iterable[Array]]
DTYPES = tuple(NAMES)


def save_pretrained(
    source: TrainingSession | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    origin: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write trained parameters as a checkpoint of Hugging Face, for transformers to load.

    Names, dtypes and files are those of the checkpoint that was exported; ``config.json`` and the files of
    the tokenizer are carried along. The folder is made beside its place and moved there when it is whole.

    Args:
        source: A session; or the folder of a run, of a checkpoint, or of an exported graph (whose
            parameters are untrained: what was exported comes back bit by bit).
        folder: To write to.
        origin: Folder of the exported graph; None: found beside ``source``, or in a folder above it.
        dtype: Of all tensors, ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"float64"``; None: as each
            was.
        overwrite: Whether a checkpoint that is in ``folder`` already may be replaced. Its files that are
            no weights stay, unless new ones have their names.

    Returns:
        The folder.

    Raises:
        CheckpointError: If ``source`` is no checkpoint, or of another model than ``origin``, or if a value
            is too large for its dtype; names file, tensor, expected and found.
        OptionError: If the folder is not empty, or ``dtype`` is unknown.
    """
    target = Path(folder)
    if dtype is not None and dtype not in NAMES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    _check_target(target, overwrite)
    about, sizes, where, pieces = _opened(source, origin)
    _check_fit(about, sizes, where)
    beside = target.resolve().parent / f".{target.resolve().name}.new-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _write(beside, about, None if dtype is None else NAMES[dtype], pieces)
        _put(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise OptionError(f"'{target}' is no folder. Give the folder to write to.")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise OptionError(
            f"'{target}' is not empty. Give another folder, or say that the checkpoint in it may be "
            "overwritten (overwrite=True, --overwrite)."
        )
    if not (target / CONFIG).exists():
        raise OptionError(
            f"'{target}' holds no '{CONFIG}', so it is no checkpoint to overwrite. Give another folder."
        )


def _opened(
    source: TrainingSession | str | os.PathLike[str], origin: str | os.PathLike[str] | None
) -> tuple[Origin, dict[str, int], str, Pieces]:
    """The origin, the elements of each parameter, where they are, and how their values are had."""
    if isinstance(source, TrainingSession):
        arrays = {name: array.reshape(-1) for name, array in source.parameters().items()}
        return (
            _origin(origin, lambda: _of_session(source)),
            {name: array.size for name, array in arrays.items()},
            "the session",
            lambda name, start, count: _cut(arrays[name][start : start + count]),
        )
    file = TensorFile(_model_file(Path(source)))
    sizes = {name: entry.size for name, entry in file.entries.items()}
    return _origin(origin, lambda: find_origin(file.path.parent)), sizes, str(file.path), file.pieces


def _origin(given: str | os.PathLike[str] | None, found: Callable[[], Origin | Path | None]) -> Origin:
    if given is not None:
        folder: Origin | Path | None = Path(given)
        if not (Path(given) / TENSORS).exists():
            folder = Path(given) / ORIGIN
    else:
        folder = found()
    if folder is None:
        raise CheckpointError(
            f"There is no '{ORIGIN}/{TENSORS}' beside the checkpoint, which says how it was called in its "
            "source. Give the folder of the exported graph as origin (--origin)."
        )
    return folder if isinstance(folder, Origin) else read_origin(folder)


def _of_session(session: TrainingSession) -> Origin | Path | None:
    weights = session.graph.weights
    if isinstance(weights, Pretrained):
        return weights.origin
    return find_origin(weights.folder) if isinstance(weights, StoredWeights) else None


def _model_file(source: Path) -> Path:
    for folder in (source, source / "checkpoint"):
        if has_checkpoint(folder):
            return checkpoint_model(folder)
    try:
        if Manifest.from_json((source / "manifest.json").read_bytes()).weights is not None:
            return source / WEIGHTS
    except (OSError, ModelError):
        pass
    raise CheckpointError(
        f"There is no checkpoint in '{source}'. Give the folder of a run, of a checkpoint, or of a graph "
        "that was exported from a checkpoint."
    )


def _cut(array: Array) -> Iterator[Array]:
    step = PIECE // array.itemsize
    for at in range(0, array.size, step):
        yield array[at : at + step]


def _check_fit(about: Origin, sizes: dict[str, int], where: str) -> None:
    """Every parameter is written, and every tensor is in one."""
    ends: dict[str, int] = {}
    for file in about.files:
        for tensor in file.tensors:
            end = tensor.start + int(np.prod(tensor.shape, dtype=np.int64))
            ends[tensor.parameter] = max(ends.get(tensor.parameter, 0), end)
    for name in [*ends, *(name for name in sizes if name not in ends)]:
        if ends.get(name) != sizes.get(name):
            raise CheckpointError(
                f"{where}: tensor '{name}' expected {_elements(ends.get(name))}, as {about.folder} says, "
                f"found {_elements(sizes.get(name))}. They are of different models."
            )


def _elements(count: int | None) -> str:
    return "none" if count is None else f"{count} elements"


def _write(folder: Path, about: Origin, dtype: str | None, pieces: Pieces) -> None:
    carry(about.folder, folder)
    places: dict[str, str] = {}
    total = 0
    for file in about.files:
        by_name = {tensor.name: tensor for tensor in file.tensors}
        tensors = [(t.name, dtype or t.dtype, t.shape) for t in file.tensors]

        def values(name: str, by_name: dict[str, Tensor] = by_name, path: Path = folder / file.name) -> Any:
            return _converted(by_name[name], FLOATS[dtype or by_name[name].dtype], pieces, path)

        write_tensors(folder / file.name, tensors, values, file.metadata)
        places |= {tensor.name: file.name for tensor in file.tensors}
        total += sum(
            int(np.prod(shape, dtype=np.int64)) * FLOATS[kind].itemsize for _, kind, shape in tensors
        )
    if about.index_metadata is not None:
        metadata = {**about.index_metadata, **({} if dtype is None else {"total_size": total})}
        text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n", "utf-8")
    if dtype is not None:
        _say_dtype(folder / CONFIG, FLOATS[dtype].name)


def _converted(tensor: Tensor, dtype: np.dtype[Any], pieces: Pieces, path: Path) -> Iterator[Array]:
    for piece in pieces(tensor.parameter, tensor.start, int(np.prod(tensor.shape, dtype=np.int64))):
        with np.errstate(over="ignore"):
            done = piece.astype(dtype, copy=False)
        lost = np.isinf(done) & np.isfinite(piece) if done.dtype != piece.dtype else np.False_
        if lost.any():
            raise CheckpointError(
                f"{path.name}: tensor '{tensor.name}' expected values that {dtype.name} can hold, found "
                f"{piece[lost][0]}. Save it with another dtype (dtype='float32', --dtype float32)."
            )
        yield done


def _say_dtype(path: Path, dtype: str) -> None:
    data = json.loads(path.read_text("utf-8"))
    name = "torch_dtype" if "torch_dtype" in data else "dtype"
    path.write_text(json.dumps({**data, name: dtype}, indent=2) + "\n", "utf-8")


def _put(beside: Path, target: Path) -> None:
    """Move a whole folder to its place; what is there stays beside it until then."""
    place = target.resolve()
    if not place.exists():
        os.replace(beside, place)
        return
    for path in place.iterdir():
        stale = path.name.endswith(".safetensors") or path.name == INDEX
        if not stale and not (beside / path.name).exists():
            if path.is_dir():
                shutil.copytree(path, beside / path.name, symlinks=True)
            else:
                shutil.copy2(path, beside / path.name, follow_symlinks=False)
    old = beside.with_name(f"{beside.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(place, old)
    try:
        os.replace(beside, place)
    except BaseException:
        os.replace(old, place)
        raise
    shutil.rmtree(old)
