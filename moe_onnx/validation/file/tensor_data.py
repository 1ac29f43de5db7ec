"""Every tensor that a model holds, and how many bytes each should have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from onnx import NodeProto, TensorProto

from moe_onnx.validation.subject import Scope, Subject

# Bits of an element by the file format's numbers, which onnx releases before 1.20 do not all have names for.
BITS: dict[int, int] = {
    **dict.fromkeys((25, 26), 2),  # uint2, int2
    **dict.fromkeys((21, 22, 23), 4),  # uint4, int4, float4e2m1
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),  # uint8, int8, bool, the float8 types
    **dict.fromkeys((4, 5, 10, 16), 16),  # uint16, int16, float16, bfloat16
    **dict.fromkeys((1, 6, 12), 32),  # float32, int32, uint32
    **dict.fromkeys((7, 11, 13, 14), 64),  # int64, float64, uint64, complex64
    15: 128,  # complex128
}
NAMES: dict[int, str] = {number: name.lower() for name, number in TensorProto.DataType.items() if number}


def bytes_of(data_type: int, dims: Iterable[int]) -> int | None:
    """Bytes that a tensor of a dtype and dims takes, None where these do not say."""
    sizes, bits = list(dims), BITS.get(data_type)
    if bits is None or any(size < 0 for size in sizes):
        return None
    return (math.prod(sizes) * bits + 7) // 8


@dataclass
class Held:
    """A tensor and what holds it: a graph, or a node's attribute."""

    tensor: TensorProto
    scope: Scope
    part: str = ""  # "values of the sparse initializer", "attribute 'value'"
    node: NodeProto | None = None

    @property
    def where(self) -> str:
        """How a finding names it."""
        if self.node is not None:
            return f"{self.part} of {self.scope.place(self.node)}"
        return f"{self.part} {self.scope.tensor(self.tensor.name)}".strip()

    @cached_property
    def size(self) -> int | None:
        """Number of elements, None where a dim is negative."""
        dims = list(self.tensor.dims)
        return None if any(dim < 0 for dim in dims) else math.prod(dims)

    @cached_property
    def bytes(self) -> int | None:
        """Bytes that its dims and dtype ask for, None where they do not say."""
        return bytes_of(self.tensor.data_type, self.tensor.dims)

    @property
    def kind(self) -> str:
        """``"float32 [4, 3]"``-like: ONNX's name of the dtype, and the dims."""
        number = self.tensor.data_type
        return f"{NAMES.get(number, f'dtype {number}')} {list(self.tensor.dims)}"

    @property
    def is_external(self) -> bool:
        """Whether its data is in a file of its own."""
        return self.tensor.data_location == TensorProto.EXTERNAL


def tensors(subject: Subject) -> list[Held]:
    """Every tensor of the model, found once."""
    return subject.once(_tensors)


def _tensors(subject: Subject) -> list[Held]:
    return list(_each_tensor(subject))


def _each_tensor(subject: Subject) -> Iterator[Held]:
    for scope in subject.scopes:
        if scope.graph is not None:
            for tensor in scope.graph.initializer:
                yield Held(tensor, scope)
            for sparse in scope.graph.sparse_initializer:
                yield Held(sparse.values, scope, "values of the sparse initializer")
                yield Held(sparse.indices, scope, "indices of the sparse initializer")
        for node in scope.nodes:
            for attribute in node.attribute:
                part = f"attribute '{attribute.name}'"
                if attribute.HasField("t"):
                    yield Held(attribute.t, scope, part, node)
                for number, tensor in enumerate(attribute.tensors):
                    yield Held(tensor, scope, f"{part}[{number}]", node)
                if attribute.HasField("sparse_tensor"):
                    yield Held(attribute.sparse_tensor.values, scope, f"values of {part}", node)
                    yield Held(attribute.sparse_tensor.indices, scope, f"indices of {part}", node)
