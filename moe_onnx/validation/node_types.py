"""Inference of dtypes and shapes, one node at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper

from moe_onnx.adapters.schema import elem_name
from moe_onnx.spec import Dim, show
from moe_onnx.validation.known_ops import malformed, own_operator
from moe_onnx.validation.signatures import clamp
from moe_onnx.validation.subject import Scope, Subject, normal_domain, operator_name, subgraphs

_SMALL = 1024  # elements of a constant that inference may read
_NOISE = re.compile(r"\[(Shape|Type)InferenceError\]\s*|\(op_type:\w+[^)]*\):\s*|Inference error\(s\):\s*")
# onnx does not infer the outputs of subgraphs that say nothing of their types, and then complains.
_UNTYPED = re.compile("declared=0|outputs should all be tensors")
_FROM_INSIDE = "Graph attribute inferencing failed"


@dataclass(frozen=True)
class Problem:
    """``kind`` is ``"node"``, ``"dtype"`` or ``"shape"``."""

    kind: str
    where: str
    found: str
    expected: str = ""


class Walk:
    """The types of all values of a model's graph and subgraphs, and what contradicts itself.

    Attributes:
        stopped: What inference over the whole model stopped at, or ``""``.
        blind: Operators that onnx cannot infer.
    """

    def __init__(self, subject: Subject) -> None:
        light, self.stopped = subject.inferred
        self.subject = subject
        self.blind: set[str] = set()
        self._imports = list(subject.model.opset_import)
        self._schemas: dict[tuple[str, str, int], onnx.defs.OpSchema | None] = {}
        scopes = [scope for scope in subject.scopes if scope.function is None]
        # What onnx's inference over the whole model knows: also sizes that nodes compute.
        self._lenient = {
            id(scope): _types_in(other)
            for scope, other in zip(scopes, Subject(light, "").scopes[: len(scopes)], strict=True)
        }
        self._strict: dict[int, dict[str, TypeProto]] = {id(scope): {} for scope in scopes}
        self._scopes = scopes

    def run(self) -> Iterator[Problem]:
        """Infer every node of the graph, then of its subgraphs."""
        late: list[tuple[NodeProto, Problem]] = []
        hurt: set[int] = set()  # graphs with problems of their own
        for scope in self._scopes:
            declared = _declared_in(scope)
            for name, tensor in scope.initializers.items():
                if name in declared:
                    made = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
                    yield from self._compare(scope, name, declared[name], made, "the tensor is")
            for node in scope.nodes:
                for problem in self._node(scope, node, declared):
                    if _FROM_INSIDE in problem.found:
                        late.append((node, problem))
                    else:
                        hurt.add(id(scope.graph))
                        yield problem
        # What a node says of its subgraphs is said again where they have said nothing themselves.
        for node, problem in late:
            if not any(id(graph) in hurt for graph in _graphs_inside(node)):
                yield problem

    def type_of(self, scope: Scope, name: str) -> TypeProto | None:
        """What is known of a value that ``scope`` sees."""
        seen: Scope | None = scope
        while seen is not None:
            for types in (self._strict[id(seen)], self._lenient[id(seen)]):
                if name in types:
                    return types[name]
            seen = seen.outer
        return None

    def is_own(self, node: NodeProto) -> bool:
        """Whether a node is of an operator of this package."""
        return bool(own_operator(node))

    def _node(self, scope: Scope, node: NodeProto, declared: dict[str, TypeProto]) -> Iterator[Problem]:
        domain = normal_domain(node.domain)
        schema = self._schema(domain, node.op_type, clamp(scope.opsets.get(domain)))
        if schema is None or id(node) in malformed(self.subject):
            if schema is None and (domain, node.op_type) not in self.subject.functions:
                self.blind.add(operator_name(node))
            return
        given: dict[str, TypeProto] = {}
        for name in (*node.input, *_names_inside(node)):
            if name and name not in given:
                given[name] = self.type_of(scope, name) or TypeProto()
        try:
            outputs = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                given,
                input_data=_constants(scope, node),
                opset_imports=self._imports,
                ir_version=self.subject.model.ir_version,
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            untyped = _UNTYPED.search(str(error)) and _has_untyped_outputs(node)
            if not untyped and not own_operator(node):  # whose findings are of own_ops
                said = _inputs(node, given)
                found = _plain(str(error)) + (f"; {said}" if said else "")
                yield Problem("node", scope.place(node), found)
            return
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
            return  # onnx's own difficulties: constants that it cannot read, attributes that it cannot infer
        for name, made in outputs.items():
            if name in declared:
                yield from self._compare(scope, name, declared[name], made, f"{scope.place(node)} gives")
            known = self._lenient[id(scope)].get(name)
            self._strict[id(scope)][name] = made if known is None else _merged(made, known)

    def _compare(
        self, scope: Scope, name: str, declared: TypeProto, made: TypeProto, giver: str
    ) -> Iterator[Problem]:
        if not (declared.HasField("tensor_type") and made.HasField("tensor_type")):
            kinds = declared.WhichOneof("value"), made.WhichOneof("value")
            if None not in kinds and kinds[0] != kinds[1] and "optional_type" not in kinds:
                yield Problem("dtype", scope.tensor(name), f"declared as {kinds[0]}", f"{giver} {kinds[1]}")
            return
        said, true = declared.tensor_type, made.tensor_type
        if said.elem_type and true.elem_type and said.elem_type != true.elem_type:
            yield Problem(
                "dtype",
                scope.tensor(name),
                f"declared as {elem_name(said.elem_type)}",
                f"{giver} {elem_name(true.elem_type)}",
            )
        if not (said.HasField("shape") and true.HasField("shape")):
            return
        ours, theirs = _shape(said), _shape(true)
        if len(ours) != len(theirs) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(ours, theirs, strict=True)
        ):
            yield Problem("shape", scope.tensor(name), f"declared as {show(ours)}", f"{giver} {show(theirs)}")

    def _schema(self, domain: str, op: str, version: int) -> onnx.defs.OpSchema | None:
        key = domain, op, version
        if key not in self._schemas:
            try:
                self._schemas[key] = onnx.defs.get_schema(op, version, domain)
            except onnx.defs.SchemaError:
                self._schemas[key] = None
        return self._schemas[key]


def _types_in(scope: Scope) -> dict[str, TypeProto]:
    types = _declared_in(scope)
    for value in () if scope.graph is None else scope.graph.input:
        if value.type.WhichOneof("value"):
            types[value.name] = value.type
    for name, tensor in scope.initializers.items():
        types[name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


def _declared_in(scope: Scope) -> dict[str, TypeProto]:
    values = () if scope.graph is None else (*scope.graph.value_info, *scope.graph.output)
    return {value.name: value.type for value in values if value.type.WhichOneof("value")}


def _graphs_inside(node: NodeProto) -> Iterator[GraphProto]:
    stack = [graph for _, graph in subgraphs(node)]
    while stack:
        graph = stack.pop()
        yield graph
        stack += [inner for each in graph.node for _, inner in subgraphs(each)]


def _has_untyped_outputs(node: NodeProto) -> bool:
    types = [value.type for _, graph in subgraphs(node) for value in graph.output]
    return any(
        not t.WhichOneof("value") or (t.HasField("tensor_type") and not t.tensor_type.elem_type)
        for t in types
    )


def _names_inside(node: NodeProto) -> Iterator[str]:
    for graph in _graphs_inside(node):
        for inner in graph.node:
            yield from inner.input


def _constants(scope: Scope, node: NodeProto) -> dict[str, TensorProto]:
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


def _merged(made: TypeProto, known: TypeProto) -> TypeProto:
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


def _shape(tensor: TypeProto.Tensor) -> tuple[Dim, ...]:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim
    )


def _plain(message: str) -> str:
    """An error of onnx without its brackets."""
    return " ".join(_NOISE.sub("", message).split()).rstrip(".")[:500]


def _inputs(node: NodeProto, given: dict[str, TypeProto]) -> str:
    """The types of a node's inputs, for a reader."""
    said = []
    for name in list(node.input)[:8]:
        if name and given[name].HasField("tensor_type"):
            tensor = given[name].tensor_type
            elem = elem_name(tensor.elem_type).lower() if tensor.elem_type else "?"
            said.append(
                f"{name} is {elem} {show(_shape(tensor)) if tensor.HasField('shape') else ''}".strip()
            )
    return ", ".join(said)
