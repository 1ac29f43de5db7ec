"""A node with another operator, attribute, or constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper, numpy_helper

Change = Callable[[ModelProto, GraphProto, NodeProto], None]
# Operators that take one another's place, where the number of inputs allows it.
LIKE = (
    ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"),
    ("Softmax", "LogSoftmax", "Hardmax"),
    ("Sigmoid", "Relu", "Tanh", "Gelu", "Identity", "Neg", "Abs", "Exp", "Softplus", "Round"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceSumSquare"),
    ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal"),
)
# Attributes that may be there although they are not written.
HIDDEN: dict[str, dict[str, Any]] = {
    "TopK": {"axis": 0, "largest": 0, "sorted": 0}, "Gather": {"axis": 1}, "GatherND": {"batch_dims": 1},
    "ScatterElements": {"reduction": "add", "axis": 1}, "ScatterND": {"reduction": "add"},
    "Softmax": {"axis": 0}, "ReduceSum": {"keepdims": 0, "noop_with_empty_axes": 1},
    "Reshape": {"allowzero": 1}, "Concat": {"axis": 1},
    "Gemm": {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}, "Split": {"axis": 1},
    "Flatten": {"axis": 0}, "OneHot": {"axis": 0}, "Shape": {"start": 1, "end": 1},
    "Gelu": {"approximate": "tanh"},
    "CumSum": {"exclusive": 1, "reverse": 1}, "Transpose": {"perm": None}, "ArgMax": {"select_last_index": 1},
}  # fmt: skip
WORDS = {"reduction": ("none", "add", "mul", "max", "min"), "approximate": ("none", "tanh")}


def of_attributes(node: NodeProto) -> Iterator[tuple[str, Change]]:
    have = {attr.name: attr for attr in node.attribute}
    for name, attr in have.items():
        values: list[Any] = [None]
        if name == "num_outputs":
            continue  # onnxruntime ends the process for a wrong one
        if attr.type == AttributeProto.INT:
            values += [attr.i + 1, attr.i - 1, 0, 1, 2]
            if name == "to":
                values = [1, 6, 7, 9, 10, 11, 3, 2]
        elif attr.type == AttributeProto.INTS:
            ints = list(attr.ints)
            values += [ints[::-1], ints[1:] + ints[:1], sorted(ints), [*ints[1:2], *ints[:1], *ints[2:]]]
        elif attr.type == AttributeProto.FLOAT:
            values += [attr.f + 1, -attr.f, 0.0]
        elif name == "equation":
            text = attr.s.decode()
            given, _, out = text.partition("->")
            one, other = given.split(",")
            values = [
                f"{given}->{out[::-1]}",
                f"{one[::-1]},{other[::-1]}->{out}",
                f"{one[::-1]},{other}->{out}",
            ]
            values += [f"{one},{other[::-1]}->{out}", f"{one},{other[1:]}{other[:1]}->{out}"]
        elif attr.type == AttributeProto.STRING:
            values += [word for word in WORDS.get(name, ()) if word != attr.s.decode()]
        for value in values:
            if value is None or value != helper.get_attribute_value(attr):
                yield f"{name} = {value}", _set(name, value)
    for name, value in HIDDEN.get(node.op_type, {}).items():
        if name not in have and value is not None:
            yield f"{name} = {value}", _set(name, value)
            if name == "axis":
                yield f"{name} = -1", _set(name, -1)
                yield f"{name} = -2", _set(name, -2)


def _set(name: str, value: Any) -> Change:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        kept = [attr for attr in node.attribute if attr.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))

    return change


def of_operator(node: NodeProto) -> Iterator[tuple[str, Change]]:
    for group in LIKE:
        for kind in group:
            if node.op_type in group and kind != node.op_type and not node.domain:
                yield f"is {kind}", lambda model, graph, one, kind=kind: setattr(one, "op_type", kind)


def of_constant(place: int, value: np.ndarray[Any, Any]) -> Iterator[tuple[str, Change]]:
    """One reader sees another constant."""
    found: list[np.ndarray[Any, Any]] = []
    if value.dtype.kind in "iu":
        found += [value + 1, value - 1, -value, value * 0, value * 0 + 1, value * 0 - 1]
        for i in range(value.size if value.size > 1 else 0):
            for other in (-1, 0, 1, 2, int(value.flat[i]) + 1):
                one = value.copy()
                one.flat[i] = other
                found.append(one)
        if value.ndim == 1:
            found += [value[::-1], np.concatenate([value, value]), np.append(value, 1), value[:-1]]
    elif value.dtype.kind == "b":
        found += [~value]
    else:
        found += [value + 1, -value, np.zeros_like(value)]
    found += (
        [value.reshape(-1)] if value.ndim == 0 else [value.reshape(())] if value.size == 1 else [value[None]]
    )
    seen = {(value.shape, value.tobytes())}
    for array in found:
        array = np.ascontiguousarray(array).astype(value.dtype).reshape(array.shape)
        if (key := (array.shape, array.tobytes())) not in seen:
            seen.add(key)
            yield f"input {place} = {array.tolist()}", _constant(place, array)


def _constant(place: int, array: np.ndarray[Any, Any]) -> Change:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(array, "mutant"))
        node.input[place] = "mutant"

    return change
