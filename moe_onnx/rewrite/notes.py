"""What a pass is, and what it says of each node: applied, or skipped with the first reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

if TYPE_CHECKING:
    import onnx_ir as ir

MARK = "moe_onnx.pass"  # metadata of a node: the passes that made it
MAIN = "graph"

# How far outputs may be from those before, by dtype, as a share of the largest value of an output.
EXACT: Mapping[str, float] = {}
ROUNDING: Mapping[str, float] = {"float64": 1e-11, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Note:
    """What a pass did at one node, or why it did nothing there.

    Attributes:
        by: Name of the pass.
        node: The node's name, or that of its first output; of a function ``domain.name``; ``""`` for a model.
        operator: ``ascend.moe.MoeGroupedMatmul``, ``MatMul``, ``"function"``.
        place: ``"graph"``, ``"function 'local.Layer'"``, ``"then_branch of node 'if' (If)"``.
        text: What was done, or the first condition that did not hold.
    """

    by: str
    node: str
    operator: str
    place: str
    text: str

    def __str__(self) -> str:
        inside = "" if self.place == MAIN else f" in {self.place}"
        return f"{self.by}: {self.operator} '{self.node}'{inside}: {self.text}"


@dataclass
class PassReport:
    """What passes did with a model, in their order.

    Attributes:
        passes: The passes, with their options as they were asked for.
        applied, skipped: One note a node.
        verified: How it was verified that outputs stayed as they were; empty where it was not.
    """

    passes: tuple[str, ...] = ()
    applied: list[Note] = field(default_factory=list)
    skipped: list[Note] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, as in the JSON file."""
        return {"format": "moe_onnx.rewrite", "format_version": 1, **asdict(self)}


class Notes:
    """Where a pass says what it does; ``options``: what stands behind its name, ``strip:functions+docs``."""

    def __init__(self, by: str, options: tuple[str, ...] = ()) -> None:
        self.by, self.options = by, options
        self.done: list[Note] = []
        self.left: list[Note] = []
        self.places: dict[int, str] = {}  # of onnx-ir's graphs, by id

    def applied(self, node: NodeProto | ir.Node | FunctionProto | str, what: str, place: str = "") -> None:
        """A node, function or (by its name) tensor was rewritten: ``what`` stands for it now.

        ``place`` need not be given for nodes of onnx-ir, which know it.
        """
        self.done.append(self._note(node, what, place))

    def skipped(self, node: NodeProto | ir.Node | FunctionProto | str, reason: str, place: str = "") -> None:
        """A node that looked like one for the pass was left: the first condition that did not hold."""
        self.left.append(self._note(node, reason, place))

    def _note(self, node: NodeProto | ir.Node | FunctionProto | str, text: str, place: str) -> Note:
        if isinstance(node, str):
            return Note(self.by, node, "", place or MAIN, text)
        if isinstance(node, FunctionProto):
            return Note(self.by, f"{node.domain}.{node.name}", "function", place or MAIN, text)
        if isinstance(node, NodeProto):
            name = node.name or next((out for out in node.output if out), "")
        else:
            name = node.name or next((out.name for out in node.outputs if out.name), "")
            place = place or self.places.get(id(node.graph), "")
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
        return Note(self.by, name or "", f"{domain}{node.op_type}", place or MAIN, text)


Apply = Callable[[ModelProto, Notes], ModelProto]


@dataclass(frozen=True)
class Pass:
    """A rewrite of models, ``ModelProto`` -> ``ModelProto``.

    Attributes:
        name: What it is asked for by.
        summary: One line.
        needs: What a model must be for it to do anything.
        leaves: What holds afterwards.
        apply: Changes the model that it is given, which is a copy, and gives it or another one. It says in
            the notes what it did and what it did not; where it did nothing by them, the model is taken as
            unchanged. Applied again, it must find nothing to do. Nodes that it makes are marked, see
            :func:`mark`. Tensors with external data keep it: no data is read.
            :func:`moe_onnx.rewrite.by_ir.by_ir` makes one of a function over onnx-ir.
        tolerance: How far outputs may move, by dtype: :data:`EXACT`, :data:`ROUNDING` or others.
        options: What may stand behind its name, and what that means.
        other_floats: Whether floats may go in and out in another dtype than before.
    """

    name: str
    summary: str
    needs: str
    leaves: str
    apply: Apply
    tolerance: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    other_floats: bool = False


@dataclass
class Scope:
    """A list of nodes in which a name means one value, and where it is."""

    place: str
    owner: GraphProto | FunctionProto
    function: FunctionProto | None  # the one that it is, or is inside of


def scopes(model: ModelProto) -> Iterator[Scope]:
    """The main graph, its subgraphs, then functions and theirs: outer ones before inner ones."""
    yield from _inside(Scope(MAIN, model.graph, None))
    for function in model.functions:
        yield from _inside(Scope(f"function '{function.domain}.{function.name}'", function, function))


def _inside(outermost: Scope) -> Iterator[Scope]:
    waiting = [outermost]
    while waiting:  # by a stack: depth of nesting is up to the model
        scope = waiting.pop()
        yield scope
        suffix = "" if scope.place == MAIN else f" in {scope.place}"
        for node in scope.owner.node:
            name = node.name or next(iter(node.output), "")
            for attr in node.attribute:
                inner = [attr.g] if attr.type == AttributeProto.GRAPH else attr.graphs
                place = f"{attr.name} of node '{name}' ({node.op_type}){suffix}"
                waiting += [Scope(place, graph, scope.function) for graph in inner]


def mark(node: NodeProto | ir.Node, by: str) -> None:
    """Say in a node's metadata which pass made it, behind those that made what it is made of."""
    if not isinstance(node, NodeProto):
        before = node.metadata_props.get(MARK, "")
        node.metadata_props[MARK] = _added(before, by)
        return
    for entry in node.metadata_props:
        if entry.key == MARK:
            entry.value = _added(entry.value, by)
            return
    node.metadata_props.add(key=MARK, value=by)


def _added(before: str, by: str) -> str:
    return before if by in before.split(",") else f"{before},{by}".lstrip(",")
