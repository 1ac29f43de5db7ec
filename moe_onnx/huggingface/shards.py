"""The safetensors files of a checkpoint's folder, as one set of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_onnx.errors import CheckpointError
from moe_onnx.storage import FLOATS, TensorFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")


class Shards:
    """All tensors of a checkpoint, each in the file that holds it.

    Args:
        folder: With ``model.safetensors``, or else ``model.safetensors.index.json`` and the files it names
            (transformers looks in this order).

    Raises:
        CheckpointError: If files are missing, damaged or outside the folder, the index and the files name
            other tensors, a tensor is there twice or in a dtype that is no float; names file and tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[str, Any] | None = None
        if (folder / SINGLE).exists():
            self.files = [TensorFile(folder / SINGLE)]
        elif (folder / INDEX).exists():
            self.index = self._read_index()
            names = sorted(set(self.index["weight_map"].values()))
            missing = [name for name in names if not (folder / name).exists()]
            if missing:
                tensor = next(t for t, file in self.index["weight_map"].items() if file == missing[0])
                rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise CheckpointError(
                    f"{folder / missing[0]}: is missing{rest}; {INDEX} expects tensor '{tensor}' in it. "
                    f"Found are {len(names) - len(missing)} of {len(names)} files."
                )
            self.files = [TensorFile(folder / name) for name in names]
        else:
            raise self._nothing()
        self.file_of = self._gather()
        self._check_dtypes()

    def _nothing(self) -> CheckpointError:
        if not self.folder.is_dir():
            return CheckpointError(f"'{self.folder}' is no folder. Give the folder of a checkpoint.")
        pickles = sorted(path.name for pattern in _PICKLES for path in self.folder.glob(pattern))
        if pickles:
            return CheckpointError(
                f"{self.folder}: expected '{SINGLE}' or '{INDEX}', found pickles ('{pickles[0]}'), which "
                "can run code and are not read. Convert them: load the checkpoint in transformers and "
                "save_pretrained it."
            )
        parts = sorted(path.name for path in self.folder.glob("*.safetensors"))
        found = f"only {', '.join(repr(name) for name in parts[:3])}" if parts else "neither"
        return CheckpointError(f"{self.folder}: expected '{SINGLE}' or '{INDEX}', found {found}.")

    def _read_index(self) -> dict[str, Any]:
        path = self.folder / INDEX
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}.") from error
        places = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(places, dict) or not places:
            raise CheckpointError(
                f"{path}: expected an object 'weight_map' of file names, found {places!r:.60}."
            )
        for tensor, name in places.items():
            plain = isinstance(name, str) and name == Path(name).name and "\\" not in name
            if not plain or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path}: tensor '{tensor}' expected in a .safetensors file of this folder, found "
                    f"{name!r}."
                )
        return dict(data)

    def _gather(self) -> dict[str, TensorFile]:
        done: dict[str, TensorFile] = {}
        places = None if self.index is None else self.index["weight_map"]
        for file in self.files:
            for name in file.entries:
                if name in done:
                    raise CheckpointError(
                        f"{file.path}: tensor '{name}' is in '{done[name].path.name}' too, expected it "
                        "once. Take one of them out."
                    )
                done[name] = file
        for name, place in (places or {}).items():
            if name not in done:
                raise CheckpointError(
                    f"{self.folder / place}: expected tensor '{name}', as {INDEX} says; found none."
                )
            if done[name].path.name != place:
                raise CheckpointError(
                    f"{self.folder / INDEX}: expects tensor '{name}' in '{place}', found it in "
                    f"'{done[name].path.name}'."
                )
        for name in done:
            if places is not None and name not in places:
                raise CheckpointError(
                    f"{done[name].path}: tensor '{name}' was not expected, as {INDEX} does not name it."
                )
        return done

    def _check_dtypes(self) -> None:
        for name, file in self.file_of.items():
            if (dtype := file.entries[name].dtype) not in FLOATS:
                raise CheckpointError(
                    f"{file.path}: tensor '{name}' expected one of {', '.join(FLOATS)}, found {dtype}. "
                    "Quantised weights cannot be trained; take the checkpoint they were made from."
                )

    @property
    def largest(self) -> int:
        """Bytes of the largest file."""
        return max(file.file_size for file in self.files)
