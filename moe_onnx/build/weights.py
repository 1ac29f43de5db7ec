"""First values of a training graph's parameters that come from somewhere, not from a seed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moe_onnx.storage import TensorFile

WEIGHTS = "model.safetensors"  # beside manifest.json, by the graph's own parameter names
ORIGIN = "huggingface"  # folder beside it: of which checkpoint the weights are, and its other files


class Weights(Protocol):
    """Where a training graph's first values are."""

    def parameters(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Name and value of each parameter, one at a time, in the dtype they are stored in."""

    def write_weights(self, folder: Path) -> None:
        """Write :data:`WEIGHTS`, and :data:`ORIGIN` if there is one, into a folder that has neither."""


class StoredWeights:
    """The file :data:`WEIGHTS` of a saved training graph.

    Args:
        folder: Of the graph.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = TensorFile(folder / WEIGHTS)

    def parameters(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """See :class:`Weights`."""
        for name in self.file.entries:
            yield name, self.file.read(name)

    def write_weights(self, folder: Path) -> None:
        """See :class:`Weights`."""
        shutil.copyfile(self.folder / WEIGHTS, folder / WEIGHTS)
        if (self.folder / ORIGIN).is_dir():
            shutil.copytree(self.folder / ORIGIN, folder / ORIGIN)
