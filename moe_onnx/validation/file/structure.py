"""Graphs are graphs: every name means one value that is made before it is read."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator

from onnx import NodeProto

from moe_onnx.validation.collapse import places_of
from moe_onnx.validation.file.names import Names, circles, names_of
from moe_onnx.validation.findings import Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject, operator_name

_MOST = 8  # findings of a kind in one graph; more are counted

TWICE = code(
    "MO201",
    "error",
    "A name stands for two values",
    why="A name means one value in a graph, and in all graphs inside it. `onnxruntime` and `onnx.checker` "
    "refuse a second one; of two initializers of one name `onnxruntime` takes the last without a word.",
    mend="Give one of them another name, and have those that mean it read that.",
)
DANGLING = code(
    "MO202",
    "error",
    "A node reads a value that nothing makes",
    why="The name is no input, no initializer and no node's output that can be seen from there: a "
    "misspelling, a node that was removed, or a value of another graph or of a function's caller.",
    mend="Correct the name, or put back what made the value.",
)
UNSORTED = code(
    "MO203",
    "error",
    "A node stands before one whose output it reads",
    why="`onnxruntime` sorts the main graph and its subgraphs and runs them; in a function it refuses the "
    "model, and so do `onnx.checker`, shape inference and most other readers.",
    mend="Sort the nodes by what they read: onnx_ir's TopologicalSortPass does.",
)
CYCLE = code(
    "MO204",
    "error",
    "A node reads what depends on it",
    why="No order of the nodes can run such a graph. `onnxruntime` says that the graph is not acyclic, "
    "without saying where.",
    mend="Find the edge that closes the circle among the nodes named, and have it read another value.",
)
NO_OUTPUT = code(
    "MO205",
    "error",
    "An output that nothing makes",
    why="A graph's output is an input, an initializer, or what a node of this very graph makes: a branch "
    "cannot give a value of the graph around it, and a function's output comes from one of its nodes. "
    "`onnxruntime` refuses the model; for functions it names neither the function nor the output.",
    mend="Correct the name, or make the value: by Identity where it is one of outside.",
)
SAME_NODE_NAME = code(
    "MO210",
    "error",
    "Two nodes have one name",
    why="`onnxruntime` refuses a graph, branch or function in which two nodes have the same name (measured "
    "with 1.32); `onnx.checker` does not look. Nodes without a name are legal.",
    mend="Rename one of the nodes, or leave the name out.",
)
SAME_FUNCTION = code(
    "MO211",
    "error",
    "Two functions have one name",
    why="Domain, name and overload say which function a node calls. `onnxruntime` and `onnx.checker` refuse "
    "two.",
    mend="Remove one of them, or rename it and its callers.",
)
HIDDEN = code(
    "MO212",
    "note",
    "A subgraph's own value hides one of outside",
    why="ONNX asks for names that are unique across a graph and its subgraphs. `onnxruntime` and "
    "`onnx.checker` take an input or initializer of a subgraph by the name of an outer value, and mean the "
    "inner one; tools that inline or rename may mean the other.",
    mend="Rename the inner value.",
)
NAMELESS = code(
    "MO213",
    "error",
    "A graph input or output without a name or a type",
    why="The empty name means that an optional value is absent, so no value can have it. Inputs need a type "
    "for `onnxruntime`, outputs for `onnx.checker`.",
    mend="Name it, and set its type: onnx.helper.make_tensor_value_info.",
)
NO_OUTPUTS = code(
    "MO214",
    "warning",
    "The graph has no outputs",
    why="`onnxruntime` loads such a model and removes every node of it.",
    mend="Declare as graph outputs what the model is for.",
)


@check("static", TWICE, SAME_NODE_NAME, HIDDEN)
def names(subject: Subject) -> Iterator[Outcome]:
    """Every name stands for one value, and for one node."""
    for here in names_of(subject):
        yield from _values(here)
        scope = here.scope
        counts = Counter(node.name for node in scope.nodes if node.name)
        doubles = [name for name, count in counts.items() if count > 1]
        for name in doubles[:_MOST]:
            same = [node for node in scope.nodes if node.name == name]
            operators = ", ".join(dict.fromkeys(operator_name(node) for node in same))
            yield SAME_NODE_NAME(
                scope.place(same[1]), found=f"{len(same)} nodes are called {name!r} ({operators})"
            )
        if len(doubles) > _MOST:
            rest = set(doubles[_MOST:])
            yield SAME_NODE_NAME(
                scope.where,
                found=f"and {len(rest)} more such names",
                places=[scope.place(node) for node in scope.nodes if node.name in rest],
            )


def _values(here: Names) -> Iterator[Outcome]:
    scope = here.scope
    inputs = Counter(name for name in scope.inputs if name)
    constants = Counter(here.constants)
    for kind, counted in (("inputs", inputs), ("initializers", constants)):
        for name, count in counted.items():
            if count > 1:
                yield TWICE(scope.tensor(name), found=f"{count} {kind} are called so")
    for name in dict.fromkeys([*inputs, *constants]):
        if (outer := here.around(name, before=True)) is not None:
            yield HIDDEN(scope.tensor(name), found=f"{outer.where} has a value of this name too")
    first: dict[str, str] = {}
    found = []
    for node in scope.nodes:
        for name in filter(None, node.output):
            outer = here.around(name, before=True)
            if name in first:
                other = f"so does {first[name]}"
            elif name in inputs:
                other = "an input is called so"
            elif name in constants:
                other = "an initializer is called so"
            elif outer is not None:
                other = f"{outer.where} has a value of this name too"
            else:
                first[name] = scope.place(node)
                continue
            found.append(TWICE(scope.tensor(name), found=f"{scope.place(node)} makes it, and {other}"))
    yield from found[:_MOST]
    if len(found) > _MOST:
        rest = found[_MOST:]
        yield TWICE(scope.where, found=f"and {len(rest)} more such values", places=places_of(rest))


@check("static", DANGLING, UNSORTED, CYCLE)
def order(subject: Subject) -> Iterator[Outcome]:
    """Nodes read what there is, and stand after the nodes that they read from; none waits for itself."""
    for here in names_of(subject):
        yield from _dangling(here)
        yield from _order(here)


def _dangling(here: Names) -> Iterator[Outcome]:
    readers: dict[str, list[NodeProto]] = {}
    for node in here.scope.nodes:
        for name in dict.fromkeys(node.input):
            if name and not here.has(name):
                readers.setdefault(name, []).append(node)
    for name in list(readers)[:_MOST]:
        nodes = readers[name]
        more = f" (and so do {len(nodes) - 1} more nodes)" if len(nodes) > 1 else ""
        yield DANGLING(
            here.scope.place(nodes[0]),
            found=f"reads {name!r}{more}, which nothing makes{_closest(name, here)}",
            places=map(here.scope.place, nodes),
        )
    if rest := list(readers)[_MOST:]:
        yield DANGLING(
            here.scope.where,
            found=f"and {len(rest)} more values that nothing makes",
            places=map(here.scope.tensor, rest),
        )


def _order(here: Names) -> Iterator[Outcome]:
    scope, position = here.scope, here.position
    late: dict[int, str] = {}
    for number in range(len(scope.nodes)):
        for name in here.reads(number):
            if position.get(name, -1) >= number:
                late.setdefault(number, name)
    if not late:
        return
    needed = [
        [position[name] for name in here.reads(number) if name in position]
        for number in range(len(scope.nodes))
    ]
    found = circles(needed)
    for circle in found[:_MOST]:
        nodes = [scope.place(scope.nodes[number]) for number in circle]
        path = " reads from ".join([*nodes[:6], *(["..."] if len(nodes) > 6 else []), nodes[0]])
        yield CYCLE(
            nodes[0],
            found="reads its own output" if len(nodes) == 1 else f"a circle of {len(nodes)} nodes: {path}",
            places=nodes,
        )
    # The closing edge of a circle is late by necessity; what else is late was not sorted.
    in_circles = {number for circle in found for number in circle}
    unsorted = [number for number in late if number not in in_circles]
    if unsorted:
        node, name = scope.nodes[unsorted[0]], late[unsorted[0]]
        more = f"; {len(unsorted) - 1} more nodes likewise" if len(unsorted) > 1 else ""
        yield UNSORTED(
            scope.place(node),
            found=f"reads {name!r} of {scope.place(scope.nodes[position[name]])}, which stands later "
            f"({position[name]} after {unsorted[0]}){more}",
            expected="nodes in an order that they can run in",
            places=[scope.place(scope.nodes[number]) for number in unsorted],
        )


@check("static", NO_OUTPUT, NAMELESS, NO_OUTPUTS)
def outputs(subject: Subject) -> Iterator[Outcome]:
    """Outputs are made in their graph; the model's inputs and outputs have names and types."""
    for here in names_of(subject):
        scope, is_function = here.scope, here.scope.graph is None
        for name in dict.fromkeys(filter(None, scope.outputs)):
            if name in here.position or (here.own(name) and not is_function):
                continue
            if here.own(name):
                found = "an input; a function's output must come from a node of it"
            elif (outer := here.around(name)) is not None:
                found = f"a value of {outer.where}, not of the subgraph"
            else:
                found = f"nothing makes it{_closest(name, here)}"
            yield NO_OUTPUT(f"output {scope.tensor(name)}", found=found, expected="a node that makes it")
    graph = subject.model.graph
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for number, value in enumerate(values):
            if not value.name:
                yield NAMELESS(f"graph {kind} {number}", found="no name")
            elif value.type.WhichOneof("value") is None:
                yield NAMELESS(f"graph {kind} {value.name!r}", found="no type")
    if nameless := sum(not tensor.name for tensor in graph.initializer):
        yield NAMELESS("graph", found=f"{nameless} initializers without a name")
    if not graph.output and (graph.node or not subject.model.functions):
        yield NO_OUTPUTS("graph", found=f"{len(graph.node)} nodes and no outputs")


@check("static", SAME_FUNCTION)
def functions(subject: Subject) -> Iterable[Outcome]:
    """Functions have names of their own, and so do their outputs."""
    counts = Counter((f.domain, f.name, getattr(f, "overload", "")) for f in subject.model.functions)
    for (domain, name, overload), count in counts.items():
        if count > 1:
            which = f" (overload {overload!r})" if overload else ""
            yield SAME_FUNCTION(f"function '{domain}.{name}'{which}", found=f"{count} functions of this name")
    for scope in subject.scopes:
        if scope.graph is None:
            for name, count in Counter(scope.outputs).items():
                if count > 1:
                    yield TWICE(f"output {scope.tensor(name)}", found=f"{count} outputs of the function")


def _closest(name: str, here: Names) -> str:
    """A question after a misspelling. Only names of the scope itself, and not of thousands."""
    candidates = [*here.inputs, *here.constants, *here.position][:2000]
    close = difflib.get_close_matches(name[:100], candidates, 1, 0.8)
    return f"; did you mean {close[0]!r}?" if close else ""
