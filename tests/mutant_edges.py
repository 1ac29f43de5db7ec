"""A node that reads something else, or whose output something else reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mutant_nodes import Change
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


@dataclass
class Scope:
    """A graph of a model, its types, and what its nodes see, by the place of the node."""

    graph: GraphProto
    types: dict[str, tuple[int, str]]
    constants: dict[str, np.ndarray[Any, Any]]
    path: tuple[tuple[int, str], ...] = ()
    outer: list[str] = field(default_factory=list)


def of_edges(scope: Scope, at: int, node: NodeProto) -> Iterator[tuple[str, Change]]:
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


def _read(place: int, name: str) -> Change:
    return lambda model, graph, node: node.input.__setitem__(place, name)


def _swap(i: int) -> Change:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        node.input[i], node.input[i + 1] = node.input[i + 1], node.input[i]

    return change


def _skip(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
    """The node stays as an Identity of its first input."""
    node.op_type = "Identity"
    del node.input[1:], node.attribute[:], node.output[1:]


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
        turn = [ints([-1])] + [
            node("Constant", [], [name], value_ints=[n]) for name, n in (("d", -(2**62)), ("e", axis))
        ]
        yield f"turned axis {axis}", [*turn, node("Slice", ["a", "c", "d", "e", "c"], ["z"])]
    if axes > 1:
        perm = [1, 0, *range(2, axes)]
        yield "swapped axes", [node("Transpose", ["a"], ["z"], perm=perm)]
        yield "swapped axes in the same shape", [
            node("Transpose", ["a"], ["b"], perm=perm), node("Shape", ["a"], ["c"]),
            node("Reshape", ["b", "c"], ["z"], allowzero=1),
        ]  # fmt: skip
    if axes >= 1 and dtype in (*FLOATS, TensorProto.INT64):
        yield "CumSum", [ints(0), node("CumSum", ["a", "c"], ["z"])]


def _insert(place: int, made: list[NodeProto]) -> Change:
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


def of_outputs(scope: Scope, node: NodeProto) -> Iterator[tuple[str, Change]]:
    if scope.path:
        return
    for name in node.output:
        dtype, dims = scope.types.get(name, (0, "?"))
        if dtype and dims != "?" and name not in {out.name for out in scope.graph.output}:
            axes = len(dims.split(",")) if dims else 0
            yield f"{name} is an output", _output(name, dtype, axes, None)
            yield f"{name} has another reader", _output(name, dtype, axes, "Identity")


def _output(name: str, dtype: int, axes: int, kind: str | None) -> Change:
    def change(model: ModelProto, graph: GraphProto, node: NodeProto) -> None:
        out = name
        if kind is not None:
            out = "mutant_out"
            graph.node.append(helper.make_node(kind, [name], [out]))
        shape = [f"mutant_{i}" for i in range(axes)]
        graph.output.append(helper.make_tensor_value_info(out, dtype, shape))

    return change
