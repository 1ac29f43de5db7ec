"""The model under validation, and what every check asks about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, helper

from moe_onnx.adapters.schema import tensor_info
from moe_onnx.errors import ModelFileError, OptionError
from moe_onnx.spec import TensorInfo
from moe_onnx.validation.findings import NotDone
from moe_onnx.validation.reading import not_text, read_model
from moe_onnx.validation.types import infer_types

T = TypeVar("T")
_FAILED = object()


@dataclass
class Scope:
    """A graph, subgraph or function body: a list of nodes in which a name means one value.

    Attributes:
        where: ``"graph"``, ``"function 'local.Gelu'"``, ``"then_branch of node 'if' (If)"``.
        nodes: Its nodes, in the file's order.
        inputs, outputs: Names.
        graph: The graph, None for a function.
        function: The function whose body this is, or holds this subgraph; None outside functions.
        outer: The scope whose names are visible too; None for the main graph and for functions.
        opsets: Opset version by domain, ``""`` for ONNX's own, that nodes here are of.
        at: Position among the outer nodes of the one that holds this subgraph; -1 where none does.
    """

    where: str
    nodes: list[NodeProto]
    inputs: list[str]
    outputs: list[str]
    graph: GraphProto | None
    function: FunctionProto | None
    outer: Scope | None
    opsets: dict[str, int]
    at: int = -1

    @cached_property
    def producers(self) -> dict[str, NodeProto]:
        """The node that makes a name, in this scope only; the first where there are several."""
        made: dict[str, NodeProto] = {}
        for node in self.nodes:
            for name in node.output:
                if name:
                    made.setdefault(name, node)
        return made

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """Dense initializers by name."""
        return {} if self.graph is None else {tensor.name: tensor for tensor in self.graph.initializer}

    def producer(self, name: str) -> tuple[Scope, NodeProto] | None:
        """The node that makes ``name`` and its scope, outer scopes included; None for inputs, constants."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.producers:
                return scope, scope.producers[name]
            if name in scope.initializers or name in scope.inputs:
                return None
            scope = scope.outer
        return None

    def initializer(self, name: str) -> onnx.TensorProto | None:
        """The initializer called ``name``, outer scopes included; None where the name is anything else."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.initializers and name not in scope.inputs:
                return scope.initializers[name]
            if name in scope.producers or name in scope.inputs:
                return None
            scope = scope.outer
        return None

    def place(self, node: NodeProto) -> str:
        """How a finding names a node: name, operator, and the scope unless it is the main graph."""
        said = f"node {node.name!r}" if node.name else f"the node of {next(iter(node.output), '')!r}"
        inside = "" if self.where == "graph" else f" in {self.where}"
        return f"{said} ({operator_name(node)}){inside}"

    def tensor(self, name: str) -> str:
        """How a finding names a value."""
        return f"{name!r}" if self.where == "graph" else f"{name!r} in {self.where}"


MAX_BYTES = 2**31  # of weights and inputs that levels "run" and "full" load: more is left out


@dataclass
class Options:
    """What :func:`moe_onnx.validate` was asked for."""

    level: str = "static"
    target: str = ""
    ub_size: int | None = None  # bytes
    seed: int = 0
    max_bytes: int = MAX_BYTES


@dataclass
class Subject:
    """A model, without the data of its external tensors.

    Attributes:
        model: As it stands in the file.
        name: What the report calls it.
        path: The file, None for a ``ModelProto``.
        folder: Where external data is looked for, None where nothing says.
        options: What was asked for.
    errors: Codes of the errors that the levels before this one found.
    """

    model: ModelProto
    name: str
    path: Path | None = None
    folder: Path | None = None
    options: Options = field(default_factory=Options)
    errors: tuple[str, ...] = ()
    _made: dict[Callable[[Subject], Any], Any] = field(default_factory=dict, repr=False)

    def once(self, make: Callable[[Subject], T]) -> T:
        """What ``make`` gives for this model: made when it is first asked for, and kept.

        Raises:
            NotDone: If making it failed before: the check that was the first to ask has told why.
        """
        if make not in self._made:
            self._made[make] = _FAILED
            self._made[make] = make(self)
        if self._made[make] is _FAILED:
            raise NotDone(f"what it looks at could not be prepared ({make.__name__.strip('_')})")
        found: T = self._made[make]
        return found

    def made(self, make: Callable[[Subject], T]) -> T | None:
        """What :meth:`once` has made of this by now; None where nothing has asked for it, or it failed."""
        found: T | None = self._made.get(make)
        return None if found is _FAILED else found

    @cached_property
    def scopes(self) -> list[Scope]:
        """Every scope, the main graph first, outer ones before inner ones, then functions."""
        opsets = {normal_domain(entry.domain): entry.version for entry in self.model.opset_import}
        found = _with_inner(_scope_of(self.model.graph, "graph", None, None, opsets))
        for function in self.model.functions:
            where = f"function '{function.domain}.{function.name}'"
            own = {normal_domain(entry.domain): entry.version for entry in function.opset_import}
            body = Scope(
                where,
                list(function.node),
                list(function.input),
                list(function.output),
                None,
                function,
                None,
                own,
            )
            found += _with_inner(body)
        return found

    @property
    def main(self) -> Scope:
        """The main graph."""
        return self.scopes[0]

    def nodes(self) -> Iterator[tuple[Scope, NodeProto]]:
        """Every node of every scope."""
        for scope in self.scopes:
            for node in scope.nodes:
                yield scope, node

    @cached_property
    def inferred(self) -> tuple[ModelProto, str]:
        """See :func:`infer_types`: a light copy of the model with types, and what stopped inference."""
        return infer_types(self.model)

    @cached_property
    def _types(self) -> list[dict[str, TensorInfo]]:
        light = self.inferred[0]
        scopes = Subject(light, self.name).scopes
        found: list[dict[str, TensorInfo]] = []
        index = {id(scope): number for number, scope in enumerate(scopes)}
        for scope in scopes:
            types = dict(found[index[id(scope.outer)]]) if scope.outer is not None else {}
            found.append(types | _types_of(scope))
        return found

    def types(self, scope: Scope) -> dict[str, TensorInfo]:
        """What onnx can tell of the values that ``scope`` sees: little in functions, whose inputs vary."""
        return self._types[self._numbers[id(scope)]]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(scope): number for number, scope in enumerate(self.scopes)}

    @cached_property
    def functions(self) -> dict[tuple[str, str], FunctionProto]:
        """Local functions by domain and name."""
        return {(normal_domain(f.domain), f.name): f for f in self.model.functions}


def open_subject(source: ModelProto | str | os.PathLike[str], options: Options) -> Subject:
    """Read a model, but not the data of its external tensors.

    Raises:
        ModelFileError: If there is no file, or it is not a model.
        OptionError: If ``source`` is neither a path nor a model.
    """
    if isinstance(source, ModelProto):
        if where := not_text(source):
            raise ModelFileError(f"The model's {where} holds bytes that are no text in UTF-8.")
        return Subject(source, source.graph.name or "model", options=options)
    if not isinstance(source, (str, os.PathLike)):
        raise OptionError(
            f"model must be a path or an onnx.ModelProto, got {type(source).__name__}. "
            "For bytes give onnx.load_from_string(...)."
        )
    path = Path(source)
    # External data lies beside the name that was given; it may be a link, as in caches of downloads.
    return Subject(read_model(path), str(path), path, Path(os.path.abspath(path)).parent, options)


def operator_name(node: NodeProto) -> str:
    """``Relu``, ``ascend.moe.MoeInitRoutingV2``."""
    domain = normal_domain(node.domain)
    return f"{domain}.{node.op_type}" if domain else node.op_type


def normal_domain(domain: str) -> str:
    """``ai.onnx`` is another spelling of ONNX's own, empty, domain."""
    return "" if domain == "ai.onnx" else domain


def subgraphs(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """The subgraphs of a node by attribute."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        for number, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{number}]", graph


def _scope_of(
    graph: GraphProto,
    where: str,
    outer: Scope | None,
    function: FunctionProto | None,
    opsets: dict[str, int],
    at: int = -1,
) -> Scope:
    return Scope(
        where,
        list(graph.node),
        [value.name for value in graph.input],
        [value.name for value in graph.output],
        graph,
        function,
        outer,
        opsets,
        at,
    )


def _with_inner(outermost: Scope) -> list[Scope]:
    """A scope and all inside it, outer before inner. By a stack: depth of nesting is up to the model."""
    found, waiting = [], [outermost]
    while waiting:
        scope = waiting.pop()
        found.append(scope)
        inner = [
            _scope_of(graph, f"{name} of {scope.place(node)}", scope, scope.function, scope.opsets, at)
            for at, node in enumerate(scope.nodes)
            for name, graph in subgraphs(node)
        ]
        waiting += reversed(inner)
    return found


def _types_of(scope: Scope) -> dict[str, TensorInfo]:
    values = [] if scope.graph is None else [*scope.graph.input, *scope.graph.value_info, *scope.graph.output]
    if scope.function is not None and scope.graph is None:
        values = list(scope.function.value_info)
    types = {v.name: tensor_info(v.type) for v in values if v.type.HasField("tensor_type")}
    for name, tensor in scope.initializers.items():
        types[name] = tensor_info(helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    return types
