"""A model with one thing changed, in every way that is listed here: what a rewrite must tell from the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

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
    "Softmax": {"axis": 0}, "ReduceSum": {"keepdims": 0, "noop_with_empty_axes": 1}, "Reshape": {"allowzero": 1},
    "Gemm": {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}, "Split": {"axis": 1}, "Concat": {"axis": 1},
    "Flatten": {"axis": 0}, "OneHot": {"axis": 0}, "Shape": {"start": 1, "end": 1}, "Gelu": {"approximate": "tanh"},
    "CumSum": {"exclusive": 1, "reverse": 1}, "Transpose": {"perm": None}, "ArgMax": {"select_last_index": 1},
}  # fmt: skip
WORDS = {"reduction": ("none", "add", "mul", "max", "min"), "approximate": ("none", "tanh")}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
ORDINARY = (TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.BOOL)


@dataclass
class Scope:
    """A graph of a model, its types, and what its nodes see, by the place of the node."""

    graph: GraphProto
    types: dict[str, tuple[int, str]]
    constants: dict[str, np.ndarray[Any, Any]]
    path: tuple[tuple[int, str], ...] = ()
    outer: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Mutant:
    """What was changed, and the model."""

    label: str
    model: ModelProto


def mutants(model: ModelProto) -> Iterator[tuple[str, Any]]:
    """All changes of a model: a label, and a function of no arguments that makes the mutant."""
    for scope in _scopes(model):
        for at, node in enumerate(scope.graph.node):
            where = f"{node.op_type} {node.output[0]}"
            for what, change in _changes(scope, at, node):
                yield f"{where}: {what}", _made(model, scope.path, at, change)


def _made(model: ModelProto, path: tuple[tuple[int, str], ...], at: int, change: Any) -> Any:
    def make() -> ModelProto:
        copy = ModelProto()
        copy.CopyFrom(model)
        graph = copy.graph
        for number, name in path:
            graph = next(a.g for a in graph.node[number].attribute if a.name == name)
        change(copy, graph, graph.node[at])
        return copy

    return make


def _scopes(model: ModelProto) -> Iterator[Scope]:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    waiting = [Scope(inferred.graph, {}, {})]
    while waiting:
        scope = waiting.pop(0)
        graph = scope.graph
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            dims = ",".join(d.dim_param or str(d.dim_value) for d in tensor.shape.dim)
            scope.types[value.name] = (tensor.elem_type, dims if tensor.HasField("shape") else "?")
        for tensor in graph.initializer:
            scope.types[tensor.name] = (tensor.data_type, ",".join(map(str, tensor.dims)))
            scope.constants[tensor.name] = numpy_helper.to_array(tensor)
        for node in graph.node:
            if node.op_type == "Constant":
                value = helper.get_node_attr_value(node, node.attribute[0].name)
                array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.array(value)
                scope.constants[node.output[0]] = array
        yield scope
        for number, node in enumerate(graph.node):
            seen = [*scope.outer, *(v.name for v in graph.input), *(t.name for t in graph.initializer)]
            seen += [out for one in graph.node[:number] for out in one.output]
            for attr in node.attribute:
                if attr.type == AttributeProto.GRAPH:
                    path = (*scope.path, (number, attr.name))
                    inner = Scope(attr.g, dict(scope.types), dict(scope.constants), path, seen)
                    waiting.append(inner)


def _changes(scope: Scope, at: int, node: NodeProto) -> Iterator[tuple[str, Any]]:
    yield from _of_attributes(node)
    yield from _of_operator(node)
    for place, name in enumerate(node.input):
        if name in scope.constants and scope.constants[name].size <= 16:
            yield from _of_constant(place, scope.constants[name])
    yield from _of_edges(scope, at, node)
    yield from _of_outputs(scope, node)


def _of_attributes(node: NodeProto) -> Iterator[tuple[str, Any]]:
    have = {attr.name: attr for attr in node.attribute}
    for name, attr in have.items():
        values: list[Any] = [None]
        if attr.type == AttributeProto.INT:
            values += [attr.i + 1, attr.i - 1, 0, 1, 2]
            if name == "to":
                values = [1, 6, 7, 9, 10, 11, 3, 2]
        elif attr.type == AttributeProto.INTS:
            ints = list(attr.ints)
            values += [ints[::-1], ints[1:] + ints[:1], sorted(ints), [ints[1], ints[0], *ints[2:]] if ints[1:] else ints]
        elif attr.type == AttributeProto.FLOAT:
            values += [attr.f + 1, -attr.f, 0.0]
        elif name == "equation":
            text = attr.s.decode()
            given, _, out = text.partition("->")
            values = [f"{given}->{out[::-1]}", f"{','.join(t[::-1] for t in given.split(','))}->{out}"]
            values += [f"{one[::-1]},{other}->{out}" for one, other in [given.split(",")]]
            values += [f"{one},{other[::-1]}->{out}" for one, other in [given.split(",")]]
            values += [f"{one},{other[1:]}{other[:1]}->{out}" for one, other in [given.split(",")]]
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


def _set(name: str, value: Any) -> Any:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        kept = [attr for attr in node.attribute if attr.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
        if value is not None:
            node.attribute.append(helper.make_attribute(name, value))

    return change


def _of_operator(node: NodeProto) -> Iterator[tuple[str, Any]]:
    for group in LIKE:
        for kind in group:
            if node.op_type in group and kind != node.op_type and not node.domain:
                yield f"is {kind}", lambda model, graph, one, kind=kind: setattr(one, "op_type", kind)


def _of_constant(place: int, value: np.ndarray[Any, Any]) -> Iterator[tuple[str, Any]]:
    """One reader sees another constant."""
    found: list[np.ndarray[Any, Any]] = []
    if value.dtype.kind in "iu":
        found += [value + 1, value - 1, -value, value * 0, value * 0 + 1, value * 0 - 1, value[..., ::-1] if value.ndim else value]
        for i in range(value.size if value.size > 1 else 0):
            for other in (-1, 0, 1, 2, int(value.flat[i]) + 1):
                one = value.copy()
                one.flat[i] = other
                found.append(one)
        found += [np.concatenate([value, value]), np.concatenate([value, value * 0 + 1]), value[:-1]] if value.ndim == 1 else []
    elif value.dtype.kind == "b":
        found += [~value]
    else:
        found += [value + 1, -value, value * 0]
    found += [value.reshape(-1)] if value.ndim == 0 else [value.reshape(())] if value.size == 1 else [value[None]]
    seen = {(value.shape, value.tobytes())}
    for array in found:
        array = np.ascontiguousarray(array).astype(value.dtype).reshape(array.shape)
        if (key := (array.shape, array.tobytes())) not in seen:
            seen.add(key)
            yield f"input {place} = {array.tolist()}", _constant(place, array)


def _constant(place: int, array: np.ndarray[Any, Any]) -> Any:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(array, "mutant"))
        node.input[place] = "mutant"

    return change


def _of_edges(scope: Scope, at: int, node: NodeProto) -> Iterator[tuple[str, Any]]:
    before = [*scope.outer, *(v.name for v in scope.graph.input), *(t.name for t in scope.graph.initializer)]
    before += [out for one in scope.graph.node[:at] for out in one.output]
    for place, name in enumerate(node.input):
        mine = scope.types.get(name)
        if mine is None:
            continue
        for other in before:
            theirs = scope.types.get(other)
            if other != name and theirs is not None and theirs[0] == mine[0] and _alike(mine[1], theirs[1]):
                yield f"input {place} is {other}", _read(place, other)
        for kind, made in _steps(mine):
            yield f"input {place} behind {kind}", _insert(place, made)
    for i in range(len(node.input) - 1):
        if node.input[i] != node.input[i + 1] and node.input[i] and node.input[i + 1]:
            yield f"inputs {i} and {i + 1} swapped", _swap(i)
    if node.input and scope.types.get(node.input[0], 0) == scope.types.get(node.output[0], 1):
        yield "is skipped", _skip


def _alike(one: str, other: str) -> bool:
    """Of as many axes, and fixed sizes the same."""
    left, right = one.split(","), other.split(",")
    return one == other or (len(left) == len(right) and all(
        a == b or not (a.isdigit() and b.isdigit()) for a, b in zip(left, right, strict=True)
    ))  # fmt: skip


def _read(place: int, name: str) -> Any:
    return lambda model, graph, node: node.input.__setitem__(place, name)


def _swap(i: int) -> Any:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        node.input[i], node.input[i + 1] = node.input[i + 1], node.input[i]

    return change


def _skip(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
    """The node stays as an Identity of its first input."""
    node.op_type, inputs = "Identity", list(node.input)
    del node.input[1:], node.attribute[:], node.output[1:]
    assert inputs


def _steps(kind: tuple[int, str]) -> Iterator[tuple[str, list[NodeProto]]]:
    """Nodes from ``a`` to ``z`` that keep dtype and shape, and mostly no values."""
    dtype, dims = kind
    axes = -1 if dims == "?" else len(dims.split(",")) if dims else 0
    node = helper.make_node

    def ints(values: Any) -> NodeProto:
        return node("Constant", [], ["c"], value=numpy_helper.from_array(np.asarray(values, np.int64)))

    if dtype in FLOATS:
        for op in ("Neg", "Abs", "Relu", "Round", "Sigmoid"):
            yield op, [node(op, ["a"], ["z"])]
        yield "Cast and back", [node("Cast", ["a"], ["b"], to=7), node("Cast", ["b"], ["z"], to=dtype)]
        yield "Cast of 16 bit", [node("Cast", ["a"], ["b"], to=10), node("Cast", ["b"], ["z"], to=dtype)]
    elif dtype in (TensorProto.INT64, TensorProto.INT32):
        yield "Cast of bool", [node("Cast", ["a"], ["b"], to=9), node("Cast", ["b"], ["z"], to=dtype)]
        yield "Cast of 8 bit", [node("Cast", ["a"], ["b"], to=3), node("Cast", ["b"], ["z"], to=dtype)]
        yield "Neg", [node("Neg", ["a"], ["z"])]
        yield "Mod", [ints(2), node("Cast", ["c"], ["d"], to=dtype), node("Mod", ["a", "d"], ["z"])]
    elif dtype == TensorProto.BOOL:
        yield "Not", [node("Not", ["a"], ["z"])]
    for axis in range(max(axes, 0)):
        turn = [ints([-1]), node("Constant", [], ["d"], value_ints=[-(2**62)]), node("Constant", [], ["e"], value_ints=[axis])]
        yield f"turned axis {axis}", [*turn, node("Slice", ["a", "c", "d", "e", "c"], ["z"])]
    if axes > 1:
        perm = [1, 0, *range(2, axes)]
        yield "swapped axes", [node("Transpose", ["a"], ["z"], perm=perm)]
        yield "swapped axes in the same shape", [
            node("Transpose", ["a"], ["b"], perm=perm), node("Shape", ["a"], ["c"]),
            node("Reshape", ["b", "c"], ["z"], allowzero=1),
        ]  # fmt: skip
    if axes >= 1 and dtype in FLOATS + (TensorProto.INT64,):
        yield "CumSum", [ints(0), node("CumSum", ["a", "c"], ["z"])]


def _insert(place: int, made: list[NodeProto]) -> Any:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        at = next(i for i, one in enumerate(graph.node) if one is node or one == node)
        new = []
        for one in made:
            copy = NodeProto()
            copy.CopyFrom(one)
            for i, name in enumerate(copy.input):
                copy.input[i] = node.input[place] if name == "a" else f"mutant_{name}"
            copy.output[0] = f"mutant_{copy.output[0]}"
            new.append(copy)
        node.input[place] = "mutant_z"
        rest = list(graph.node)
        rest[at:at] = new
        del graph.node[:]
        graph.node.extend(rest)

    return change


def _of_outputs(scope: Scope, node: NodeProto) -> Iterator[tuple[str, Any]]:
    if scope.path:
        return
    for name in node.output:
        dtype, dims = scope.types.get(name, (0, "?"))
        if dtype and dims != "?" and name not in {out.name for out in scope.graph.output}:
            axes = len(dims.split(",")) if dims else 0
            yield f"{name} is an output", _output(name, dtype, axes, None)
            yield f"{name} has another reader", _output(name, dtype, axes, "Identity")


def _output(name: str, dtype: int, axes: int, kind: str | None) -> Any:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        out = name
        if kind is not None:
            out = "mutant_out"
            graph.node.append(helper.make_node(kind, [name], [out]))
        shape = [f"mutant_{i}" for i in range(axes)]
        graph.output.append(helper.make_tensor_value_info(out, dtype, shape))

    return change
