"""``Emitter``: the one way nodes get into a graph, for builders and gradient rules alike.

A thin layer over onnx-ir that closes its traps: names are unique whatever the graph holds already,
constants of one content are one initializer, the domain of every operator is imported, numpy scalars
are legal attributes, and an expression that is there already is used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from moe_onnx.errors import ModelError
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN, VERSION

Scalar = int | float | str | np.integer[Any] | np.floating[Any]
Attribute = Scalar | Sequence[Scalar] | np.dtype[Any] | ir.DataType | ir.TensorProtocol | ir.Graph


class Emitter:
    """Appends nodes to a graph.

    Args:
        graph: The graph. Its nodes so far are known to the sharing of subexpressions.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._scope: list[str] = []
        self._names = {value.name for value in (*graph.inputs, *graph.initializers.values())}
        self._node_names: set[str | None] = set()
        self._own: set[str | None] = set()  # names given here, which may be changed
        self._seen: dict[Any, ir.Node] = {}
        self._constants: dict[Any, ir.Value] = {}
        for inner in graph.subgraphs():
            self._names.update(value.name for value in (*inner.inputs, *inner.initializers.values()))
        for node in graph.all_nodes():
            self._names.update(value.name for value in node.outputs)
            self._node_names.add(node.name)
        for node in graph:
            self._seen.setdefault(_key(node.domain, node.op_type, node.inputs, node.attributes), node)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names of what is emitted inside start with ``name``."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def inside(self, name: str) -> Emitter:
        """An emitter for a subgraph, the attribute of a node to come. It may use values of this graph."""
        name = "/".join([*self._scope, name])
        inner = Emitter(ir.Graph([], [], nodes=[], opset_imports=self.graph.opset_imports, name=name))
        # A subgraph may not use a name again that the graph around it has.
        inner._scope, inner._names, inner._node_names = [name], self._names, self._node_names
        return inner

    def adopt(self, graph: ir.Graph, *, rename: bool = False) -> Emitter:
        """An emitter for a subgraph that is there already; a copy's values are to be renamed."""
        if rename:
            for inner in (graph, *graph.subgraphs()):
                values = [*inner.inputs, *inner.initializers.values()]
                for node in inner:
                    values += node.outputs
                    node.name = self._fresh(node.name or node.op_type, self._node_names)
                for value in values:
                    if value.name:
                        value.name = self._fresh(value.name, self._names)
        for inner in (graph, *graph.subgraphs()):
            inner.opset_imports.update(self.graph.opset_imports)
        emitter = Emitter(graph)
        self._names |= emitter._names
        self._node_names |= emitter._node_names
        emitter._scope, emitter._names, emitter._node_names = [], self._names, self._node_names
        return emitter

    def place(self, name: str, dtype: ir.DataType | None, shape: ir.Shape | None) -> ir.Value:
        """A further input of a subgraph, by this name or one like it."""
        value = ir.Value(name=self._fresh(name, self._names), shape=shape)
        value.type = None if dtype is None else ir.TensorType(dtype)
        self.graph.inputs.append(value)
        return value

    def name_output(self, value: ir.Value, name: str) -> None:
        """Name an output that a node was given later."""
        value.name = self._fresh(name, self._names)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        name: str = "",
        **attributes: Attribute,
    ) -> ir.Value:
        """Emit a node of one output, or find the same one; attributes that are None are left out."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, name=name, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        domain: str = "",
        name: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Emit a node of several outputs, or find the same one."""
        attrs = [_attribute(key, value) for key, value in attributes.items() if value is not None]
        key = _key(domain, op_type, inputs, {attr.name: attr for attr in attrs})
        found = self._seen.get(key)
        if found is not None and len(found.outputs) == outputs:
            return found.outputs
        if domain not in self.graph.opset_imports:
            if domain != DOMAIN:
                raise ModelError(f"The graph does not import the domain '{domain}' of {op_type}.")
            self.graph.opset_imports[domain] = VERSION
        if domain == "":
            _check_opset(op_type, self.graph.opset_imports[""], len(inputs), attrs)
        node = ir.Node(domain, op_type, inputs, attrs, num_outputs=outputs)
        base = "/".join([*self._scope, name or op_type])
        node.name = self._fresh(base, self._node_names)
        for i, value in enumerate(node.outputs):
            value.name = self._fresh(node.name if outputs == 1 else f"{node.name}:{i}", self._names)
            self._own.add(value.name)
            if (elem := _dtype(node, i)) is not None:
                value.dtype = elem
        self.graph.append(node)
        self._seen[key] = node
        return node.outputs

    def constant(self, value: Any, dtype: Any = None) -> ir.Value:
        """A constant, one initializer for each content. Without ``dtype`` integers are int64."""
        elem = dtype if isinstance(dtype, ir.DataType) else None
        array = np.asarray(value, elem.numpy() if elem else dtype)
        if dtype is None and (
            array.dtype.kind in "iu" or (not isinstance(value, np.ndarray) and array.size == 0)
        ):
            array = array.astype(np.int64)
        key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape))
            name = self._fresh(_constant_name(array), self._names)
            constant = ir.Value(
                name=name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(list(array.shape)),
                const_value=tensor,
            )
            self.graph.register_initializer(constant)
            self._constants[key] = constant
        return self._constants[key]

    def like(self, value: float, other: ir.Value) -> ir.Value:
        """A scalar constant in the dtype of ``other``."""
        return self.constant(value, other.dtype)

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[int | str]) -> ir.Value:
        """A new graph input."""
        if name in self._names:
            raise ModelError(f"The graph has a value '{name}' already.")
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(dims)))
        self._names.add(name)
        self.graph.inputs.append(value)
        return value

    def reserve(self, name: str) -> None:
        """Keep a name for an output to come."""
        self._names.add(name)

    def release(self, name: str) -> None:
        """Let a name that was kept be used."""
        self._names.discard(name)

    def output(self, value: ir.Value, name: str, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
        """Make ``value`` a graph output of this name; one that has a name to keep is copied."""
        if value.is_graph_output() or value.producer() is None or value.name not in self._own:
            value = self.op("Identity", value, name=name)
            if value.is_graph_output():  # the same value is wanted under two names
                node = ir.Node("", "Identity", [value], name=self._fresh(name, self._node_names))
                self.graph.append(node)
                value = node.outputs[0]
        self._names.discard(value.name)
        value.name = self._fresh(name, self._names)
        value.type = None if dtype is None else ir.TensorType(dtype)
        value.shape = shape
        self.graph.outputs.append(value)

    def rename(self, value: ir.Value, name: str) -> None:
        """Another name for a value, where its own is wanted for an output to come."""
        if value.name in self._own:
            self._names.discard(value.name)
            value.name = self._fresh(name, self._names)
            self._own.add(value.name)

    def ensure_name(self, value: ir.Value) -> None:
        """Give an output that its node leaves out a name, so that nodes can use it."""
        if not value.name:
            value.name = self._fresh("unnamed", self._names)

    def _fresh(self, base: str, taken: set[str | None]) -> str:
        name, number = base, 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        return name


def shaped(value: ir.Value, *dims: int | str) -> ir.Value:
    """Give a value its shape, where onnx cannot infer it; equal names are equal sizes."""
    value.shape = ir.Shape(list(dims))
    return value


_BOOLS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not", "Xor", "IsNaN")
_INT64S = ("Shape", "Size", "NonZero", "ArgMax", "ArgMin")


def _dtype(node: ir.Node, index: int) -> ir.DataType | None:
    """The dtype of an output, as far as a line can tell; inference on the whole graph checks it."""
    if node.domain == DOMAIN:
        spec = BY_NAME[node.op_type]
        var = spec.outputs[index].type_var
        if var == "I":
            return ir.DataType.INT32
        # The first input of the output's kind gives its dtype; where there is none the first of all does.
        kinds = zip(spec.inputs, node.inputs, strict=False)
        of_kind = (value for arg, value in kinds if value is not None and arg.type_var == var)
        first = next(of_kind, node.inputs[0])
        return None if first is None else first.dtype
    if node.domain == "" and node.op_type in _BOOLS:
        return ir.DataType.BOOL
    if node.op_type in _INT64S or (node.op_type == "TopK" and index == 1):
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    i = 1 if node.op_type in ("Where", "CastLike") else 0
    like = node.inputs[i] if len(node.inputs) > i else None
    return None if like is None else like.dtype


@lru_cache(maxsize=512)
def signature(op_type: str, version: int) -> tuple[int, frozenset[str]] | None:
    """The most inputs and the attributes that an opset gives a standard operator."""
    try:
        schema = onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None
    return schema.max_input, frozenset(schema.attributes)


def _check_opset(op_type: str, version: int, inputs: int, attrs: Sequence[ir.Attr]) -> None:
    """Refuse what the graph's opset does not have, rather than emit a model that is not valid."""
    found = signature(op_type, version)
    if found is None:
        missing = f"the operator {op_type}"
    elif inputs > found[0]:
        missing = f"input {inputs} of {op_type}"
    else:
        unknown = [attr.name for attr in attrs if attr.name not in found[1]]
        if not unknown:
            return
        missing = f"the attribute {unknown[0]} of {op_type}"
    raise ModelError(
        f"Opset {version} of ai.onnx has not {missing}, which has to be emitted. "
        "Convert the model to opset 18 or newer (onnx.version_converter.convert_version)."
    )


def _attribute(name: str, value: Any) -> ir.Attr:
    if isinstance(value, (bool, np.bool_)):
        value = int(value)
    elif isinstance(value, (ir.DataType, np.dtype)):
        value = int(value if isinstance(value, ir.DataType) else ir.DataType.from_numpy(value))
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, ir.Graph):
        return ir.AttrGraph(name, value)
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    if not isinstance(value, (list, tuple, np.ndarray)) and isinstance(value, ir.TensorProtocol):
        return ir.AttrTensor(name, value)
    items = [item.item() if isinstance(item, np.generic) else item for item in value]
    if any(isinstance(item, str) for item in items):
        return ir.AttrStrings(name, items)
    if any(isinstance(item, float) for item in items):
        return ir.AttrFloat32s(name, [float(item) for item in items])
    return ir.AttrInt64s(name, [int(item) for item in items])


def _key(domain: str, op_type: str, inputs: Any, attributes: Any) -> Any:
    attrs = []
    for name, attr in attributes.items():
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS, ir.AttributeType.TENSOR):
            return object()  # equal to nothing
        attrs.append((name, attr.type, str(attr.value)))
    return (domain, op_type, tuple(None if v is None else id(v) for v in inputs), tuple(sorted(attrs)))


def _constant_name(array: np.ndarray[Any, Any]) -> str:
    """Small constants are named by what they hold, which makes the text of a graph readable."""
    if array.size > 4:
        return f"{array.dtype.name}_constant"
    items = "_".join(f"{item:g}" if array.dtype.kind == "f" else str(item) for item in array.ravel().tolist())
    return f"{array.dtype.name}_{items or 'empty'}".replace("-", "m")
