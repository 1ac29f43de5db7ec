"""Inference of dtypes and shapes, one node at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
from onnx import NodeProto, TypeProto, helper

from moe_onnx.adapters.schema import elem_name, inference_goes_on
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import show
from moe_onnx.validation.operators.known_ops import malformed, own_operator
from moe_onnx.validation.operators.misfits import misfit
from moe_onnx.validation.operators.signatures import clamp
from moe_onnx.validation.operators.type_protos import (
    constants_of,
    declared_in,
    graphs_inside,
    has_negative,
    merged,
    names_inside,
    said_inputs,
    sizes,
    types_in,
)
from moe_onnx.validation.subject import Scope, Subject, normal_domain, operator_name, subgraphs
from moe_onnx.validation.types import endless, ends_inference, propagates

_NOISE = re.compile(r"\[(Shape|Type)InferenceError\]\s*|\(op_type:\w+[^)]*\):\s*|Inference error\(s\):\s*")
# What onnx says where types are not known: of inputs, and of outputs of subgraphs, which it does not infer.
_UNTYPED = re.compile(
    "[dD]eclared=0|outputs should all be tensors|have type but instead is null|of input .* unknown|"
    "data from external tensor"
)

# onnx 1.19 ends the process, at times, where it infers a single node that has subgraphs.
_BRANCHES_ARE_SAFE = tuple(int(part) for part in onnx.__version__.split(".")[:2]) >= (1, 20)


@dataclass(frozen=True)
class Problem:
    """``kind`` is ``"node"``, ``"dtype"`` or ``"shape"``."""

    kind: str
    where: str
    found: str
    expected: str = ""


# Runtimes take a domain that is not imported for the newest; imports are an affair of the versions' check.
_NOT_IMPORTED = "No opset import for domain"


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
            id(scope): types_in(other)
            for scope, other in zip(scopes, Subject(light, "").scopes[: len(scopes)], strict=True)
        }
        self._strict: dict[int, dict[str, TypeProto]] = {id(scope): {} for scope in scopes}
        self._scopes = scopes

    def run(self) -> Iterator[Problem]:
        """Infer every node of the graph, then of its subgraphs."""
        late: list[tuple[NodeProto, Problem]] = []
        hurt: set[int] = set()  # graphs with problems of their own
        for scope in self._scopes:
            declared = declared_in(scope)
            for name, tensor in scope.initializers.items():
                if name in declared:
                    made = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
                    yield from self._compare(scope, name, declared[name], made, "the tensor is")
            for node in scope.nodes:
                if id(node) in malformed(self.subject):
                    hurt.add(id(scope.graph))
                has_graphs = next(subgraphs(node), None) is not None
                for problem in self._node(scope, node, declared):
                    if has_graphs and problem.kind == "node":
                        late.append((node, problem))
                    else:
                        hurt.add(id(scope.graph))
                        yield problem
        # What a node says of its subgraphs is said again where they have said nothing themselves.
        for node, problem in late:
            if not any(id(graph) in hurt for graph in graphs_inside(node)):
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

    def has_schema(self, scope: Scope, node: NodeProto) -> bool:
        """Whether onnx has the operator of a node, which then counts, and not a function."""
        domain = normal_domain(node.domain)
        return self._schema(domain, node.op_type, clamp(scope.opsets.get(domain))) is not None

    def is_own(self, node: NodeProto) -> bool:
        """Whether a node is of an operator of this package."""
        return bool(own_operator(node))

    def _node(self, scope: Scope, node: NodeProto, declared: dict[str, TypeProto]) -> Iterator[Problem]:
        domain = normal_domain(node.domain)
        schema = self._schema(domain, node.op_type, clamp(scope.opsets.get(domain)))
        if id(node) in malformed(self.subject) or ends_inference(node):
            self._forget(scope, node, declared)
            return
        if schema is None:
            if (domain, node.op_type) not in self.subject.functions:
                self.blind.add(operator_name(node))
            return
        if not _BRANCHES_ARE_SAFE and next(subgraphs(node), None) is not None:
            for name in node.output:
                self._strict[id(scope)][name] = self._lenient[id(scope)].get(name) or TypeProto()
            return
        given: dict[str, TypeProto] = {}
        for name in (*node.input, *names_inside(node)):
            if name and name not in given:
                given[name] = self.type_of(scope, name) or TypeProto()
        constants = constants_of(scope, node)
        try:
            outputs = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                given,
                input_data=constants,
                opset_imports=self._imports,
                ir_version=self.subject.model.ir_version,
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            untyped = _UNTYPED.search(str(error)) is not None
            untyped = untyped or _NOT_IMPORTED in str(error)
            if not untyped and not own_operator(node):  # whose findings are of own_ops
                said = said_inputs(node, given)
                found = _plain(str(error)) + (f"; {said}" if said else "")
                yield Problem("node", scope.place(node), found)
            self._forget(scope, node, declared)
            return
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError):
            return  # onnx's own difficulties: constants that it cannot read, attributes that it cannot infer
        # A branch may be one that is never taken.
        if scope.outer is None and (found := misfit(node, given, constants)):
            yield Problem("node", scope.place(node), found)
        for name, made in outputs.items():
            if name in declared:
                yield from self._compare(scope, name, declared[name], made, f"{scope.place(node)} gives")
            known = self._lenient[id(scope)].get(name)
            self._strict[id(scope)][name] = made if known is None else merged(made, known)

    def _forget(self, scope: Scope, node: NodeProto, declared: dict[str, TypeProto]) -> None:
        """Of what a wrong node gives nothing counts but what is declared: its readers are not to blame."""
        for name in node.output:
            self._strict[id(scope)][name] = declared.get(name, TypeProto())

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
        ours, theirs = sizes(said), sizes(true)
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


def whole_model_problem(subject: Subject) -> Problem | None:
    """What onnx's strict inference finds with the sizes that nodes compute, which a node alone shows not."""
    graph = subject.model.graph
    sizes_known = all(dim >= 0 for tensor in graph.initializer for dim in tensor.dims)
    values = (*graph.input, *graph.value_info, *graph.output)
    if not sizes_known or any(has_negative(value.type) for value in values):
        return None  # onnx takes -1 for a size, everybody else for an unknown one
    light = subject.inferred[0]
    if endless(light) or not propagates(light):
        return None
    try:
        with inference_goes_on():  # past nodes of this package, whose findings are of own_ops
            onnx.shape_inference.infer_shapes(light, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        message = str(error)
        # An error in the function that defines an operator of ONNX is an affair of onnx.
        first = next((line for line in message.splitlines() if "op_type" in line), message)
        if any(name in first for name in BY_NAME):
            return None  # own_ops has looked at it; what is left are limits, which documents has
        if message.count("Inference error(s)") > 1 or _UNTYPED.search(first) or _NOT_IMPORTED in message:
            return None
        said = re.search(r"\(op_type:(\w+)(?:, node name: (.*?))?\):", first)
        where = "the model"
        if said:
            where = f"node {said[2]!r} ({said[1]})" if said[2] else f"a node {said[1]}"
        kind = "node"
        if "existing shape differ" in first:
            kind = "shape"
        elif "differs from existing" in first:
            kind = "dtype"
        return Problem(kind, where, _plain(first))
    except (onnx.checker.ValidationError, RuntimeError, ValueError, TypeError):
        pass  # as in the lenient run, which has said so
    return None


def _plain(message: str) -> str:
    """An error of onnx without its brackets."""
    return " ".join(_NOISE.sub("", message).split()).rstrip(".")[:500]
