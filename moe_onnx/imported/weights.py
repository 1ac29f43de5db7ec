"""The values of an imported model's parameters: read where they are, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from moe_onnx.build.weights import WEIGHTS
from moe_onnx.errors import CheckpointError
from moe_onnx.storage import NAMES, write_tensors

Array = np.ndarray[Any, Any]


class ImportedWeights:
    """See :class:`~moe_onnx.build.weights.Weights`.

    Args:
        tensors: By parameter, the model's tensor, and whether the parameter is its transpose.
    """

    def __init__(self, tensors: Mapping[str, tuple[ir.TensorProtocol, bool]]) -> None:
        self._tensors = dict(tensors)

    def parameters(self) -> Iterator[tuple[str, Array]]:
        """Name and value of each parameter, one at a time, in the dtype they are stored in."""
        for name in self._tensors:
            yield name, self.read(name)

    def read(self, name: str) -> Array:
        """The value of one parameter.

        Raises:
            CheckpointError: If the file that it is in cannot be read.
        """
        tensor, is_turned = self._tensors[name]
        value = read(tensor, name)
        return value.T if is_turned else value

    def write_weights(self, folder: Path) -> None:
        """Write the file of weights, one parameter after the other."""
        entries = []
        for name, (tensor, is_turned) in self._tensors.items():
            shape = sizes_of(tensor)
            entries.append((name, NAMES[tensor.dtype.numpy().name], shape[::-1] if is_turned else shape))

        def pieces(name: str) -> list[Array]:
            return [np.ascontiguousarray(self.read(name)).reshape(-1)]

        write_tensors(folder / WEIGHTS, entries, pieces, {"format": "pt"})


def sizes_of(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """The shape of a tensor."""
    return tuple(int(dim) for dim in ir.Shape(list(tensor.shape)).numpy())  # type: ignore[arg-type]


def read(tensor: ir.TensorProtocol, name: str) -> Array:
    """A tensor's value; one in a file is not mapped any longer when this returns.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    try:
        value = tensor.numpy()
        if isinstance(tensor, ir.ExternalTensor):
            value = np.array(value)
            tensor.release()
    except Exception as error:  # OSError, and onnx-ir's for files that are cut off
        raise CheckpointError(f"Initializer '{name}' cannot be read: {error}.") from error
    return value
