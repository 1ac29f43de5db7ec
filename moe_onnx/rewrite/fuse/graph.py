"""What matchers ask of a graph of onnx-ir, and how they put nodes into it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from moe_onnx.rewrite.notes import mark
from moe_onnx.spec import DOMAIN

NAME = "fuse"
_READABLE = 1024  # elements of a constant that is looked at: sizes and axes, never weights


class NotThis(Exception):
    """A form does not match: the first condition that did not hold, and the node where."""

    def __init__(self, node: ir.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


def is_op(node: ir.Node | None, *kinds: str) -> bool:
    """Whether a node is one of ONNX's own operators of these names, and all its attributes are known.

    What a caller of a function will give may be anything.
    """
    return (
        node is not None and node.op_type in kinds and node.domain in ("", "ai.onnx") and not is_called(node)
    )


def is_called(node: ir.Node) -> bool:
    """Whether an attribute of a node is given by the callers of a function."""
    return any(attr.is_ref() for attr in node.attributes.values())


def producer(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    """The node that makes a value, if it is one of these operators."""
    node = None if value is None else value.producer()
    return node if is_op(node, *kinds) else None


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """What an attribute holds; what a caller of a function will give is no known value: None."""
    attr = node.attributes.get(name)
    return default if attr is None else attr.value


def fixed(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a value that no caller can override: of an input, it is the default."""
    if value is None or value.is_graph_input():
        return None
    tensor = value.const_value
    if isinstance(tensor, ir.ExternalTensor) and not tensor.base_dir:
        return None  # nobody knows where the file is
    return tensor


def ints(value: ir.Value | None) -> list[int] | None:
    """The integers of a small constant, as a list; None if it is no constant."""
    if value is None:
        return None
    tensor = fixed(value)
    node = value.producer()
    if tensor is None and is_op(node, "Constant"):
        assert node is not None
        attr = next(iter(node.attributes.values()), None)
        if attr is None or attr.is_ref():
            return None
        if attr.type == ir.AttributeType.TENSOR:
            tensor = attr.as_tensor()
        elif attr.type in (ir.AttributeType.INT, ir.AttributeType.INTS):
            return [int(number) for number in np.atleast_1d(attr.value)]
    if tensor is None or tensor.size > _READABLE:
        return None
    array = tensor.numpy()
    return [int(n) for n in array.reshape(-1)] if array.dtype.kind in "iu" else None


def terms(node: ir.Node) -> tuple[list[str], str] | None:
    """The letters of each input of an Einsum and of its output; None where one stands twice in a term."""
    given, arrow, out = attribute(node, "equation", "").replace(" ", "").partition("->")
    letters = given.split(",")
    plain = all(part.isalpha() and len(set(part)) == len(part) for part in (*letters, out))
    return (letters, out) if arrow and plain and len(letters) == len(node.inputs) else None


def rank(value: ir.Value | None) -> int | None:
    """How many axes a value has, if that is known."""
    if value is None:
        return None
    if value.shape is not None:
        return len(value.shape)
    if value.const_value is not None:
        return len(value.const_value.shape)
    node = producer(value, "Reshape")
    shape = ints(node.inputs[1]) if node is not None else None
    return None if shape is None else len(shape)


def size(value: ir.Value | None, axis: int) -> int | None:
    """The size of an axis, if it is known and fixed."""
    if value is None or (value.shape is None and value.const_value is None):
        return None
    shape = value.shape if value.shape is not None else value.const_value.shape  # type: ignore[union-attr]
    if not -len(shape) <= axis < len(shape):
        return None
    found = shape[axis]
    return found if isinstance(found, int) else None


def reads(node: ir.Node, index: int) -> ir.Value | None:
    """An input of a node, None where there is none."""
    return node.inputs[index] if index < len(node.inputs) else None


def only_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, in the graph where it is made."""
    users = {use.node for use in value.uses()}
    if len(users) != 1 or value.is_graph_output():
        return None
    (user,) = users
    made_by = value.producer()
    return user if made_by is not None and user.graph is made_by.graph else None


def is_axis(number: int, axis: int, axes: int) -> bool:
    """Whether an attribute or constant names this axis of so many."""
    return number in (axis, axis - axes)


def places(numbers: Sequence[int], axes: int) -> set[int] | None:
    """The axes of so many that numbers name; None where there is no such axis, or one is named twice."""
    found = {number % axes for number in numbers if -axes <= number < axes}
    return found if len(found) == len(numbers) else None


class Inserter:
    """Makes marked nodes with new names, in place of a node; as a context, none after all for a NotThis."""

    def __init__(self, at: ir.Node, names: set[str], what: str = "fused") -> None:
        self.prefix, self.names = f"{at.name or at.outputs[0].name}/{what}", names
        self.nodes: list[ir.Node] = []

    def __enter__(self) -> Inserter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, NotThis):
            self._discard()

    def ops(
        self, kind: str, *inputs: ir.Value | None, outputs: int, name: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """A node of ours where the name of the operator begins with ``Moe``, of ONNX otherwise."""
        domain = DOMAIN if kind.startswith("Moe") else ""
        attrs = ir.convenience.convert_attributes(attributes)
        node = ir.Node(domain, kind, inputs, attrs, num_outputs=outputs)
        node.name = self.fresh(f"{self.prefix}/{name or kind}")
        for i, value in enumerate(node.outputs):
            value.name = self.fresh(node.name if not i else f"{node.name}:{i}", also=node.name)
        mark(node, NAME)
        self.nodes.append(node)
        return node.outputs

    def op(self, kind: str, *inputs: ir.Value | None, name: str = "", **attributes: Any) -> ir.Value:
        """A node of one output."""
        return self.ops(kind, *inputs, outputs=1, name=name, **attributes)[0]

    def like(self, node: ir.Node, inputs: Sequence[ir.Value | None], name: str = "") -> Sequence[ir.Value]:
        """A node of the same kind and attributes, with other inputs."""
        attrs = {key: attr for key, attr in node.attributes.items() if not attr.is_ref()}
        made = self.ops(node.op_type, *inputs, outputs=len(node.outputs), name=name)
        for attr in attrs.values():
            self.nodes[-1].attributes.add(attr)
        return made

    def _discard(self) -> None:
        """Forget what was made: it must not be seen as reading anything."""
        for node in self.nodes:
            for i in range(len(node.inputs)):
                node.replace_input_with(i, None)
        self.nodes.clear()

    def product(
        self, rows: ir.Value, weight: ir.Value, counts: ir.Value | None, transposed: bool
    ) -> ir.Value:
        """The rows of each expert times its matrix."""
        return self.op(
            "MoeGroupedMatmul", rows, weight, counts, name="product", transpose_weight=int(transposed)
        )

    def constant(self, value: Any, dtype: Any = np.int64) -> ir.Value:
        """A node, not an initializer, which functions do not have."""
        made = self.op("Constant", value=ir.tensor(np.asarray(value, dtype)))
        made.dtype = ir.DataType.from_numpy(np.dtype(dtype))
        return made

    def fresh(self, name: str, also: str = "") -> str:
        """A name that nothing has; ``also`` may be had already."""
        made, number = name, 1
        while made in self.names and made != also:
            made, number = f"{name}_{number}", number + 1
        self.names.add(made)
        return made


def put(
    graph: ir.Graph,
    made: Inserter,
    before: ir.Node,
    instead: Iterable[tuple[ir.Value, ir.Value]],
    gone: Iterable[ir.Node],
) -> None:
    """Insert the nodes, let new values stand for old ones, and drop what nothing reads any more."""
    pairs: list[tuple[ir.Value, ir.Value]] = []
    named: set[ir.Value] = set()
    for old, new in instead:
        # A value has one name: a second output of the graph is one of its own.
        own = made.op("Identity", new) if old.is_graph_output() and new in named else new
        if old.is_graph_output():
            named.add(own)
        pairs.append((old, own))
    for node in made.nodes:  # whose module they are of stays known
        about = {key: text for key, text in before.metadata_props.items() if key not in node.metadata_props}
        node.metadata_props.update(about)
    graph.insert_before(before, made.nodes)
    for old, new in pairs:
        _take_over(made, old, new)
    prune(gone)
    graph.sort()


def prune(gone: Iterable[ir.Node]) -> None:
    """Take away nodes that nothing reads, and what only they read."""
    dropped = list(gone)
    while dropped:
        node = dropped.pop()
        if node.graph is None or any(out.uses() or out.is_graph_output() for out in node.outputs):
            continue
        read = [value for value in node.inputs if value is not None]
        node.graph.remove(node, safe=True)
        for value in read:
            maker = value.producer()
            if maker is not None:
                dropped.append(maker)
            elif value.is_initializer() and not (
                value.uses() or value.is_graph_input() or value.is_graph_output()
            ):
                assert value.graph is not None and value.name is not None
                value.graph.initializers.pop(value.name, None)


def detach(graph: ir.Graph) -> list[ir.Value]:
    """Let a body that will be taken away read nothing; what it read of the graphs around it."""
    inside = [graph, *graph.subgraphs()]
    read: dict[ir.Value, None] = {}
    for inner in inside:
        for node in inner:
            for i, value in enumerate(node.inputs):
                if value is not None and value.graph not in inside:
                    read[value] = None
                node.replace_input_with(i, None)
    return list(read)


def _take_over(made: Inserter, old: ir.Value, new: ir.Value) -> None:
    new.shape, new.type = old.shape, old.type
    if old.is_graph_output():
        # The name of an output is what the model is called by.
        old.name, new.name = made.fresh(f"{old.name}/before"), old.name
        new.doc_string = old.doc_string
        new.metadata_props.update(old.metadata_props)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
