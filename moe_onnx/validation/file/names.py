"""Which names mean what where: what a graph has, what its subgraphs read of it, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moe_onnx.validation.subject import Scope, Subject


@dataclass
class Names:
    """The names of one scope.

    Attributes:
        scope: The scope.
        outer: Those of the scope around it.
        inputs: As a set.
        constants: Initializers, sparse ones too, as often as they are there.
        position: Of the first node that makes a name.
        inner: Subgraphs by the position of the node that holds them.
        free: What this scope reads and has not itself.
    """

    scope: Scope
    outer: Names | None
    inputs: set[str] = field(default_factory=set)
    constants: list[str] = field(default_factory=list)
    position: dict[str, int] = field(default_factory=dict)
    inner: dict[int, list[Names]] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    _constants: set[str] = field(default_factory=set)

    def own(self, name: str) -> bool:
        """Whether the name is one of this scope."""
        return name in self.position or name in self.inputs or name in self._constants

    def has(self, name: str) -> bool:
        """Whether the name means something here."""
        return self.own(name) or self.around(name) is not None

    def around(self, name: str, *, before: bool = False) -> Scope | None:
        """The scope around this one that has the name; ``before``: before the node that holds this one."""
        inner, outer = self, self.outer
        while outer is not None:
            made = outer.position.get(name)
            if name in outer.inputs or name in outer._constants:
                return outer.scope
            if made is not None and (not before or made < inner.scope.at):
                return outer.scope
            inner, outer = outer, outer.outer
        return None

    def reads(self, number: int) -> Iterator[str]:
        """What a node reads, by its inputs and inside its subgraphs."""
        yield from (name for name in self.scope.nodes[number].input if name)
        for inner in self.inner.get(number, ()):
            yield from sorted(inner.free)


def names_of(subject: Subject) -> list[Names]:
    """The names of every scope of ``subject.scopes``, found once."""
    return subject.once(_find)


def _find(subject: Subject) -> list[Names]:
    found: list[Names] = []
    by_scope: dict[int, Names] = {}
    for scope in subject.scopes:
        outer = None if scope.outer is None else by_scope[id(scope.outer)]
        names = by_scope[id(scope)] = Names(scope, outer, set(scope.inputs) - {""})
        if scope.graph is not None:
            names.constants = [tensor.name for tensor in scope.graph.initializer if tensor.name]
            sparse = (tensor.values.name for tensor in scope.graph.sparse_initializer)
            names.constants += [name for name in sparse if name]
            names._constants = set(names.constants)
        for number, node in enumerate(scope.nodes):
            for name in node.output:
                if name:
                    names.position.setdefault(name, number)
        if outer is not None:
            outer.inner.setdefault(scope.at, []).append(names)
        found.append(names)
    for names in reversed(found):  # inner ones first
        for number in range(len(names.scope.nodes)):
            names.free.update(name for name in names.reads(number) if not names.own(name))
    return found


def circles(needed: Sequence[Sequence[int]]) -> list[list[int]]:
    """One circle in each group of nodes that all depend on each other, by the nodes that each node needs."""
    found = []
    for group in _groups(needed):
        if len(group) > 1 or group[0] in needed[group[0]]:
            found.append(_circle(min(group), set(group), needed))
    return sorted(found)


def _circle(start: int, group: set[int], needed: Sequence[Sequence[int]]) -> list[int]:
    """The shortest way from a node back to itself."""
    came_from: dict[int, int] = {}
    reached = [start]
    for node in reached:  # grows
        for other in needed[node]:
            if other == start:
                way = [node]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if other in group and other not in came_from:
                came_from[other] = node
                reached.append(other)
    return [start]


def _groups(needed: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Strongly connected components, by Tarjan, without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    waiting: list[int] = []
    is_waiting: set[int] = set()
    for root in range(len(needed)):
        if root in index:
            continue
        path = [(root, iter(needed[root]))]
        index[root] = low[root] = len(index)
        waiting.append(root)
        is_waiting.add(root)
        while path:
            node, others = path[-1]
            for other in others:
                if other not in index:
                    index[other] = low[other] = len(index)
                    waiting.append(other)
                    is_waiting.add(other)
                    path.append((other, iter(needed[other])))
                    break
                if other in is_waiting:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = waiting.index(node, 0) if waiting[-1] != node else len(waiting) - 1
                    group = waiting[cut:]
                    del waiting[cut:]
                    is_waiting.difference_update(group)
                    yield group
