"""Types as ONNX writes them: read from graphs, merged, shown."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper

from moe_onnx.adapters.schema import elem_name
from moe_onnx.spec import Dim, show
from moe_onnx.validation.subject import Scope, subgraphs

_SMALL = 1024  # elements of a constant that inference may read


def types_in(scope: Scope) -> dict[str, TypeProto]:
    """What the graph of a scope says of the types of its values."""
    types = declared_in(scope)
    for value in () if scope.graph is None else scope.graph.input:
        if value.type.WhichOneof("value"):
            types[value.name] = _without_negative(value.type)
    for name, tensor in scope.initializers.items():
        types[name] = _without_negative(helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    return types


def declared_in(scope: Scope) -> dict[str, TypeProto]:
    """What it says of values that nodes make."""
    values = () if scope.graph is None else (*scope.graph.value_info, *scope.graph.output)
    return {v.name: _without_negative(v.type) for v in values if v.type.WhichOneof("value")}


def has_negative(proto: TypeProto) -> bool:
    """Whether a size is negative."""
    return proto.HasField("tensor_type") and any(d.dim_value < 0 for d in proto.tensor_type.shape.dim)


def _without_negative(proto: TypeProto) -> TypeProto:
    """Some exporters write -1 for a size that varies; runtimes read any negative size like that."""
    if not has_negative(proto):
        return proto
    copy = TypeProto()
    copy.CopyFrom(proto)
    for dim in copy.tensor_type.shape.dim:
        if dim.dim_value < 0:
            dim.Clear()
    return copy


def graphs_inside(node: NodeProto) -> Iterator[GraphProto]:
    """The subgraphs of a node, and theirs."""
    stack = [graph for _, graph in subgraphs(node)]
    while stack:
        graph = stack.pop()
        yield graph
        stack += [inner for each in graph.node for _, inner in subgraphs(each)]


def names_inside(node: NodeProto) -> Iterator[str]:
    """The names that nodes in the subgraphs of a node read."""
    for graph in graphs_inside(node):
        for inner in graph.node:
            yield from inner.input


def constants_of(scope: Scope, node: NodeProto) -> dict[str, TensorProto]:
    """Small constants among the inputs, by name: sizes, axes, steps."""
    found = {}
    for name in node.input:
        tensor = scope.initializer(name)
        if tensor is None and (made := scope.producer(name)) is not None and made[1].op_type == "Constant":
            tensor = next((a.t for a in made[1].attribute if a.name == "value"), None)
        if tensor is not None and tensor.data_location != TensorProto.EXTERNAL and _is_small(tensor):
            found[name] = tensor
    return found


def _is_small(tensor: TensorProto) -> bool:
    size = 1
    for dim in tensor.dims:
        size *= dim
    return 0 <= size <= _SMALL


def merged(made: TypeProto, known: TypeProto) -> TypeProto:
    """What a node gives, with the sizes that inference over the whole model knows besides."""
    if not (made.HasField("tensor_type") and known.HasField("tensor_type")):
        return made if made.WhichOneof("value") else known
    ours, theirs = made.tensor_type, known.tensor_type
    if ours.elem_type and theirs.elem_type and ours.elem_type != theirs.elem_type:
        return made
    if not ours.elem_type:
        ours.elem_type = theirs.elem_type
    if not ours.HasField("shape"):
        if theirs.HasField("shape"):
            ours.shape.CopyFrom(theirs.shape)
    elif theirs.HasField("shape") and len(ours.shape.dim) == len(theirs.shape.dim):
        for dim, other in zip(ours.shape.dim, theirs.shape.dim, strict=True):
            if not dim.HasField("dim_value") and other.WhichOneof("value"):
                dim.CopyFrom(other)
    return made


def sizes(tensor: TypeProto.Tensor) -> tuple[Dim, ...]:
    """A shape as the package writes it."""
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim
    )


def said_inputs(node: NodeProto, given: dict[str, TypeProto]) -> str:
    """The types of a node's inputs, for a reader."""
    said = []
    for name in list(node.input)[:8]:
        if name and given[name].HasField("tensor_type"):
            tensor = given[name].tensor_type
            elem = elem_name(tensor.elem_type).lower() if tensor.elem_type else "?"
            said.append(f"{name} is {elem} {show(sizes(tensor)) if tensor.HasField('shape') else ''}".strip())
    return ", ".join(said)
