"""Tensors by name out of .npy, .npz, .safetensors and .pt files, and of folders of them.

Arrays are read when they are asked for, one at a time; .npy and .safetensors are memory-mapped.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from moe_onnx.errors import DataError
from moe_onnx.validation.device.golden_meta import golden_entry, golden_meta

SUFFIXES = (".npy", ".npz", ".safetensors", ".pt")
_OUTPUT = "output."
# Of safetensors' names, those that numpy has by ml_dtypes only: safetensors makes no arrays of them.
_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}

Array = NDArray[Any]
Reader = Callable[[], Array]
T = TypeVar("T")


def tensors(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Reader]:
    """What reads each tensor of a file, of a folder, or of a mapping of arrays, by name.

    In a folder, a tensor is called after its file's path in it without the suffix, followed by ``/`` and
    its own name where the file holds more than one. Of a golden case there are the outputs; elements of two
    bytes without a dtype, as numpy saves bfloat16, are bfloat16.

    Raises:
        DataError: If there is nothing to read, or a file is not what its suffix says.
    """
    if isinstance(source, Mapping):
        return {name: partial(np.asarray, value) for name, value in source.items()}
    path = Path(source)
    if not path.exists():
        raise DataError(f"'{path}': no such file or folder.")
    if not path.is_dir():
        return _of_file(path)
    found: dict[str, Reader] = {}
    for file in sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
        stem = file.relative_to(path).with_suffix("").as_posix()
        inside = _of_file(file)
        for name, reader in inside.items():
            full = stem if len(inside) == 1 and file.suffix in (".npy", ".pt") else f"{stem}/{name}"
            if full in found:
                raise DataError(f"'{path}': two files hold a tensor '{full}'; give them one at a time.")
            found[full] = reader
    if not found:
        raise DataError(f"'{path}' holds no tensors: no file in it ends in {', '.join(SUFFIXES)}.")
    return found


_UNREADABLE = (
    *(OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, EOFError),
    *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, SafetensorError),
)


def _of_file(path: Path) -> dict[str, Reader]:
    readers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".pt": _pt}
    if path.suffix not in readers:
        raise DataError(f"'{path}': its name must end in {', '.join(SUFFIXES)} to say what it holds.")
    found = _read(path, "", partial(readers[path.suffix], path))
    if not found:
        raise DataError(f"'{path}' holds no tensors.")
    return {name: partial(_read_tensor, path, name, reader) for name, reader in found.items()}


def _read(path: Path, name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except DataError:
        raise
    except _UNREADABLE as error:
        tensor = f", tensor '{name}'," if name else ""
        raise DataError(f"'{path}'{tensor} cannot be read as {path.suffix}: {error}.") from error


def _read_tensor(path: Path, name: str, reader: Reader) -> Array:
    array = _read(path, name, reader)
    # numpy's own files have no name for bfloat16 and keep its bytes.
    return array.view("bfloat16") if array.dtype == np.dtype("V2") else array


def _npy(path: Path) -> dict[str, Reader]:
    array = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects
    return {path.stem: lambda: array}


def _npz(path: Path) -> dict[str, Reader]:
    with _open_npz(path) as file:
        entries = {name: name for name in file.files}
        meta = golden_meta(file)
    if meta is not None:  # a golden case: what a device gives is held to its outputs
        outputs = [name for name in entries if name.startswith(_OUTPUT)]
        entries = {name.removeprefix(_OUTPUT): name for name in outputs}

    def reader(name: str) -> Reader:
        def read() -> Array:
            with _open_npz(path) as file:
                return golden_entry(file, name, meta)

        return read

    return {shown: reader(name) for shown, name in entries.items()}


def _open_npz(path: Path) -> Any:
    if not zipfile.is_zipfile(path):  # np.load would take other formats, and leave the file open
        raise DataError(f"'{path}' cannot be read as .npz: it is no zip archive, or was cut off.")
    return np.load(path, allow_pickle=False)


def _safetensors(path: Path) -> dict[str, Reader]:
    with safe_open(path, framework="numpy") as file:
        names = list(file.keys())

    def reader(name: str) -> Reader:
        def read() -> Array:
            with safe_open(path, framework="numpy") as file:
                dtype = file.get_slice(name).get_dtype()
                if dtype in _FLOAT8:
                    return _safetensors_bytes(path, name).view(_FLOAT8[dtype])
                try:
                    array: Array = file.get_tensor(name)
                except (AttributeError, TypeError):  # it looks the dtype up in numpy
                    raise DataError(
                        f"'{path}', tensor '{name}', is of dtype {dtype}, which numpy has not: convert it "
                        "to float32."
                    ) from None
            return array

        return read

    return {name: reader(name) for name in names}


def _safetensors_bytes(path: Path, name: str) -> Array:
    """The bytes of a tensor whose elements take one each, in its shape; the file was opened before."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
        start, end = entry["data_offsets"]
        file.seek(8 + size + start)
        return np.frombuffer(file.read(end - start), np.uint8).reshape(entry["shape"])


def _pt(path: Path) -> dict[str, Reader]:
    try:
        import torch
    except ImportError:
        raise DataError(
            f"'{path}' needs torch, which is not installed (pip install torch). Or save it as .npy or "
            ".safetensors where it is."
        ) from None
    # weights_only: a file of tensors must not run code.
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    found = _flat(loaded) if isinstance(loaded, (Mapping, list, tuple)) else {path.stem: loaded}
    numbers = (torch.Tensor, bool, int, float)
    wrong = [name for name, value in found.items() if not isinstance(value, numbers)]
    if wrong:
        raise DataError(f"'{path}': {', '.join(wrong[:5])} are no tensors and no numbers.")

    def reader(value: Any) -> Reader:
        def read() -> Array:
            if not isinstance(value, torch.Tensor):
                return np.asarray(value)
            tensor = value.detach().contiguous()
            if tensor.dtype == torch.bfloat16:
                array: Array = tensor.view(torch.int16).numpy().view("bfloat16")
                return array
            if (dtype := str(tensor.dtype).removeprefix("torch.")) in _FLOAT8.values():
                array = tensor.view(torch.uint8).numpy().view(dtype)
                return array
            return tensor.numpy()  # type: ignore[no-any-return]

        return read

    return {name: reader(value) for name, value in found.items()}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """What is in dicts and lists, by names with dots between."""
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    else:
        return {name: value}
    before = f"{name}." if name else ""
    return {key: item for part, inner in parts for key, item in _flat(inner, f"{before}{part}").items()}
