"""Integers that a graph computes from shapes: what onnx's data propagation leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, helper, numpy_helper

from moe_onnx.inspection.tensors import Tensor, attribute

Array = np.ndarray[Any, Any]
# Which inputs of an operator tell the shape of its output, so that a value that is known is of use there.
SHAPING = {
    "Expand": (1,),
    "Reshape": (1,),
    "ConstantOfShape": (0,),
    "Pad": (1,),
    "Slice": (1, 2),
    "Split": (1,),
    "Range": (0, 1, 2),
    "TopK": (1,),
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Max": np.maximum,
    "Min": np.minimum,
}
_LONGEST = 64  # elements of what counts as sizes


def known_integers(graph: GraphProto, tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Values of integer tensors that follow from shapes and constants, by name.

    Where a slice from 0 on is known to have a length, its end is known too: that is how a number of rows that
    depends on data gets the value that was given for it.
    """
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer if _is_short(t.dims)}
    for node in graph.node:
        if node.domain:
            continue
        if node.op_type == "Slice":
            _learn_end(node, tensors, values)
        done = _value(node, tensors, values)
        if done is not None and done.size <= _LONGEST and len(node.output) == 1:
            values.setdefault(node.output[0], done)
    return values


def put_in(graph: GraphProto, tensors: Mapping[str, Tensor], values: Mapping[str, Array]) -> int:
    """Make constants of the known integers that shape a value of unknown size; how many there were."""
    given = {tensor.name for tensor in graph.initializer}
    done = 0
    for node in graph.node:
        places = SHAPING.get(node.op_type, ()) if not node.domain else ()
        if not places or all(n in tensors and tensors[n].is_known for n in node.output if n):
            continue
        for at in places:
            name = node.input[at] if at < len(node.input) else ""
            if not name or name in given or name not in values:
                continue
            constant = f"{name}.known"
            if constant not in given:
                graph.initializer.append(numpy_helper.from_array(values[name], constant))
                given.add(constant)
            node.input[at] = constant
            done += 1
    return done


def _is_short(dims: Any) -> bool:
    return int(np.prod(list(dims), dtype=np.int64)) <= _LONGEST


def _learn_end(node: NodeProto, tensors: Mapping[str, Tensor], values: dict[str, Array]) -> None:
    """The end of a slice of one axis whose length is known."""
    if len(node.input) < 4 or len(node.input) > 4 or node.input[2] in values:
        return
    start, axes = values.get(node.input[1]), values.get(node.input[3])
    made = tensors.get(node.output[0])
    if start is None or axes is None or made is None or start.size != 1 or axes.size != 1 or start.item():
        return
    length = made.shape[int(axes.item())]
    if length is not None:
        values[node.input[2]] = np.array([length], np.int64)


def _value(node: NodeProto, tensors: Mapping[str, Tensor], values: Mapping[str, Array]) -> Array | None:
    kind = node.op_type
    if kind in ("Shape", "Size"):
        return _of_shape(node, tensors)
    if kind == "Slice" and _is_empty(node, tensors, values):
        return np.empty((0,), np.int64)
    given = [values.get(name) for name in node.input]
    arrays = [array for array in given if array is not None]
    if not arrays or len(arrays) < len(given):
        return None
    try:
        return _computed(node, arrays)
    except (ValueError, IndexError, TypeError):
        return None  # not ours to say: inference will


def _computed(node: NodeProto, arrays: list[Array]) -> Array | None:
    kind, first = node.op_type, arrays[0]
    if kind == "Cast":
        return first.astype(helper.tensor_dtype_to_np_dtype(attribute(node, "to")))
    if first.dtype.kind not in "iu":
        return None
    if kind in _BINARY:
        total = first
        for other in arrays[1:]:
            total = np.asarray(_BINARY[kind](total, other))
        return total
    if kind == "Concat":
        return np.concatenate(arrays, axis=attribute(node, "axis", 0))
    if kind == "Squeeze":
        return first.squeeze(tuple(arrays[1].tolist()) if len(arrays) > 1 else None)
    if kind == "Unsqueeze":
        return np.expand_dims(first, tuple(arrays[1].tolist()))
    if kind == "Identity":
        return first
    if kind == "Gather":
        return np.take(first, arrays[1], axis=attribute(node, "axis", 0))
    if kind == "ReduceSum":
        axes = tuple(arrays[1].tolist()) if len(arrays) > 1 else None
        return np.asarray(first.sum(axis=axes, keepdims=bool(attribute(node, "keepdims", 1))))
    if kind == "Slice" and first.ndim == 1 and len(arrays) <= 4:
        return first[int(arrays[1].item()) : int(arrays[2].item())]
    return None


def _of_shape(node: NodeProto, tensors: Mapping[str, Tensor]) -> Array | None:
    of = tensors.get(node.input[0])
    if of is None:
        return None
    if node.op_type == "Size":
        return np.array(of.size, np.int64) if of.is_known else None
    dims = of.shape[attribute(node, "start", 0) : attribute(node, "end", None)]
    return None if None in dims else np.array(dims, np.int64)


def _is_empty(node: NodeProto, tensors: Mapping[str, Tensor], values: Mapping[str, Array]) -> bool:
    """Whether a slice of a vector is one of no elements."""
    of = tensors.get(node.input[0])
    start, end = (values.get(name) for name in node.input[1:3])
    one = of is not None and len(of.shape) == 1 and start is not None and end is not None
    return one and start is not None and end is not None and start.tolist() == end.tolist() == [0]
