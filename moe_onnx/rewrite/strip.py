"""``strip``: what no runtime reads goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx import FunctionProto, ModelProto
from onnx.helper import make_opsetid

from moe_onnx.rewrite.nodes import function_nodes, graphs
from moe_onnx.rewrite.notes import EXACT, Notes, Pass, scopes

NAME = "strip"
OPTIONS = {
    "functions": "functions that nothing calls",
    "imports": "opset imports of domains that nothing uses",
    "docs": "doc strings",
    "metadata": "metadata of graphs, nodes, values and functions, marks of passes among it",
    "manifest": "metadata of the model, the manifest of a training graph among it",
}
DEFAULT = ("functions", "imports", "docs", "metadata")


def strip(model: ModelProto, notes: Notes) -> ModelProto:
    """Take away what is asked for, everything but the model's own metadata by default."""
    wanted = notes.options or DEFAULT
    if "functions" in wanted:
        _functions(model, notes)
    if "imports" in wanted:
        _imports(model, notes)
    if "docs" in wanted and (count := sum(map(_no_doc, _messages(model)))):
        notes.applied("doc strings", f"{count} taken away")
    if "metadata" in wanted and (count := sum(map(_no_metadata, _messages(model, inner=True)))):
        notes.applied("metadata", f"{count} entries taken away")
    if "manifest" in wanted and (count := _no_metadata(model)):
        notes.applied("metadata of the model", f"{count} entries taken away")
    return model


def _key(function: FunctionProto) -> tuple[str, str, str]:
    domain = "" if function.domain == "ai.onnx" else function.domain
    return domain, function.name, function.overload


def _calls(nodes: Iterator[Any]) -> set[tuple[str, str, str]]:
    return {("" if n.domain == "ai.onnx" else n.domain, n.op_type, n.overload) for n in nodes}


def _functions(model: ModelProto, notes: Notes) -> None:
    """Also those that only functions call which nothing calls."""
    calls = {_key(function): _calls(function_nodes(function)) for function in model.functions}
    waiting = _calls(node for graph in graphs(model.graph) for node in graph.node)
    called = set()
    while waiting:
        one = waiting.pop()
        if one in calls and one not in called:
            called.add(one)
            waiting |= calls[one]
    for function in list(model.functions):
        if _key(function) not in called:
            notes.applied(function, "nothing calls it")
            model.functions.remove(function)


def _imports(model: ModelProto, notes: Notes) -> None:
    used = {call[0] for call in _calls(node for graph in graphs(model.graph) for node in graph.node)}
    used |= {domain for function in model.functions for domain, _, _ in _calls(function_nodes(function))}
    for entry in list(model.opset_import):
        if entry.domain not in ("", "ai.onnx") and entry.domain not in used:
            notes.applied(entry.domain, "no node is of this domain")
            model.opset_import.remove(entry)
    for function in model.functions:
        own = {domain for domain, _, _ in _calls(function_nodes(function))}
        kept = [e for e in function.opset_import if e.domain in ("", "ai.onnx") or e.domain in own]
        if len(kept) < len(function.opset_import):
            gone = {e.domain for e in function.opset_import} - {e.domain for e in kept}
            notes.applied(function, f"imported {', '.join(sorted(gone))} for no node")
            copies = [make_opsetid(e.domain, e.version) for e in kept]
            del function.opset_import[:]
            function.opset_import.extend(copies)


def _messages(model: ModelProto, *, inner: bool = False) -> Iterator[Any]:
    """What may have a doc string and metadata; ``inner``: not the model itself."""
    if not inner:
        yield model
    for scope in scopes(model):
        yield scope.owner
        yield from scope.owner.node
        yield from scope.owner.value_info
        for node in scope.owner.node:
            yield from node.attribute
        if isinstance(scope.owner, FunctionProto):
            yield from scope.owner.attribute_proto
        else:
            yield from (*scope.owner.input, *scope.owner.output, *scope.owner.initializer)


def _no_doc(message: Any) -> int:
    had = bool(message.doc_string)
    message.ClearField("doc_string")
    return int(had)


def _no_metadata(message: Any) -> int:
    count = len(getattr(message, "metadata_props", ()))
    if count:
        message.ClearField("metadata_props")
    return count


STRIP = Pass(
    NAME,
    summary="What no runtime reads goes: functions that nothing calls, doc strings, metadata.",
    needs="any model",
    leaves="the same nodes, without what was asked for; by default all but the metadata of the model",
    apply=strip,
    tolerance=EXACT,
    options=OPTIONS,
)
