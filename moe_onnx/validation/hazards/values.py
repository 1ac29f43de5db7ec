"""Where a value comes from, and what of it is known before a run. Nothing here raises on broken models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper

from moe_onnx.spec import TensorInfo
from moe_onnx.validation.operators.own_bodies import in_own_body
from moe_onnx.validation.subject import Scope, Subject, normal_domain

FAR = 64  # nodes that a walk goes back at most
MOST_ELEMENTS = 1 << 20  # of a constant that is read
# These hand on the elements of their first input, whatever its shape.
VIEWS = frozenset(
    {"Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Dropout"}
)


def is_op(node: NodeProto, *names: str) -> bool:
    """Whether a node is one of these operators of ONNX's own domain."""
    return node.op_type in names and not normal_domain(node.domain)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute, ``default`` where it is missing or of a kind that has no plain value."""
    for given in node.attribute:
        if given.name != name:
            continue
        if given.type == AttributeProto.INT:
            return given.i
        if given.type == AttributeProto.FLOAT:
            return given.f
        if given.type == AttributeProto.STRING:
            return given.s.decode("utf-8", "replace")
        if given.type == AttributeProto.INTS:
            return list(given.ints)
        if given.type == AttributeProto.TENSOR:
            return given.t
    return default


def integer(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute; ``default`` also where it is of another type."""
    value = attribute(node, name, default)
    return value if isinstance(value, int) else default


def argument(node: NodeProto, position: int) -> str:
    """The name of an input, ``""`` where there is none."""
    return node.input[position] if position < len(node.input) else ""


def read(tensor: TensorProto) -> np.ndarray | None:
    """The elements of a small tensor in the file; None where they are elsewhere, many, or no tensor."""
    size = 1
    for dim in tensor.dims:
        size *= dim
        if dim < 0 or size > MOST_ELEMENTS:
            return None
    if tensor.data_location == TensorProto.EXTERNAL or tensor.data_type == TensorProto.STRING:
        return None
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, OverflowError):
        return None  # bytes that do not fit: another check says so


def constant_of(node: NodeProto) -> np.ndarray | None:
    """What a Constant node gives, None for other nodes and for kinds that are not numbers."""
    if not is_op(node, "Constant"):
        return None
    for given in node.attribute:
        if given.type == AttributeProto.TENSOR:
            return read(given.t)
        if given.name in ("value_int", "value_ints"):
            return np.asarray(given.i if given.name == "value_int" else list(given.ints), np.int64)
        if given.name in ("value_float", "value_floats"):
            return np.asarray(given.f if given.name == "value_float" else list(given.floats), np.float32)
    return None


def constant(scope: Scope, name: str) -> np.ndarray | None:
    """The value of ``name`` where it is a small constant: an initializer, a Constant, or a Cast of one."""
    for _ in range(FAR):
        if not name:
            return None
        tensor = scope.initializer(name)
        if tensor is not None:
            return read(tensor)
        made = scope.producer(name)
        if made is None:
            return None
        scope, node = made
        if not is_op(node, "Identity", "Cast"):
            return constant_of(node)
        name = argument(node, 0)
    return None


def integers(scope: Scope, name: str) -> list[int] | None:
    """A small constant of integers as a flat list."""
    value = constant(scope, name)
    if value is None or value.dtype.kind not in "iu" or value.size > 4096:
        return None
    return [int(one) for one in value.reshape(-1)]


def back(scope: Scope, name: str, through: frozenset[str] = VIEWS) -> tuple[Scope, str]:
    """The value that ``name`` is a view of, by nodes of ``through``, and the scope it is in."""
    for _ in range(FAR):
        made = scope.producer(name) if name else None
        if made is None or not is_op(made[1], *through) or name != next(iter(made[1].output), ""):
            return scope, name
        scope, name = made[0], argument(made[1], 0)
    return scope, name


def source(scope: Scope, name: str, through: frozenset[str] = VIEWS) -> tuple[Scope, NodeProto, int] | None:
    """The node behind views that makes ``name``, its scope, and which of its outputs that is."""
    scope, name = back(scope, name, through)
    made = scope.producer(name) if name else None
    return None if made is None else (made[0], made[1], list(made[1].output).index(name))


def consumers(subject: Subject, scope: Scope) -> dict[str, list[NodeProto]]:
    """The nodes that read a name, in this scope only; a subgraph's reading is its node's."""
    return subject.once(_consumers)[id(scope)]


def _consumers(subject: Subject) -> dict[int, dict[str, list[NodeProto]]]:
    every: dict[int, dict[str, list[NodeProto]]] = {}
    for scope in subject.scopes:
        found = every[id(scope)] = {}
        for node in scope.nodes:
            for name in dict.fromkeys(node.input):
                found.setdefault(name, []).append(node)
    return every


def dims(types: dict[str, TensorInfo], name: str) -> list[int | str | None] | None:
    """The shape of a value as onnx tells it; None where not even its rank is known."""
    info = types.get(name)
    return None if info is None or info.shape is None else list(info.shape)


def foreign_nodes(subject: Subject) -> Iterator[tuple[Scope, NodeProto]]:
    """Every node but those of our own function bodies, which are known good."""
    for scope in subject.scopes:
        if not in_own_body(subject, scope):
            for node in scope.nodes:
                yield scope, node
