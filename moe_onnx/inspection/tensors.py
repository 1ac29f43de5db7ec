"""A value's dtype and sizes, and attributes of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, helper


@dataclass(frozen=True)
class Tensor:
    """Element type of ONNX, and sizes; a size that is not known is None."""

    elem_type: int
    shape: tuple[int | None, ...]

    @property
    def is_known(self) -> bool:
        """Whether all sizes are."""
        return None not in self.shape

    @property
    def size(self) -> int:
        """Number of elements; 0 where a size is not known."""
        return math.prod(dim for dim in self.shape if dim is not None) if self.is_known else 0

    @property
    def nbytes(self) -> int:
        """Bytes; 0 where a size is not known."""
        return self.size * itemsize(self.elem_type)


def itemsize(elem_type: int) -> int:
    """Bytes of an element; types of 4 bits count as one."""
    try:
        return int(np.dtype(helper.tensor_dtype_to_np_dtype(elem_type)).itemsize)
    except (KeyError, TypeError):
        return 0  # strings, sequences


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of a node's attribute, or its default."""
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)
