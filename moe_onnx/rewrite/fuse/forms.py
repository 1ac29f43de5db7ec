"""The pass ``fuse``: all forms, in every graph of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import onnx_ir as ir
from onnx import ModelProto

from moe_onnx.adapters.function_body import OLDEST_OPSET, missing_bodies
from moe_onnx.rewrite.by_ir import by_ir
from moe_onnx.rewrite.fuse import batched, contrib, dense, loops, masked, sums, unrolled
from moe_onnx.rewrite.fuse.graph import NAME, NotThis
from moe_onnx.rewrite.fuse.meaning import Lost, Meaning
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.types import Types, homes_of, inferred, typed, values_of
from moe_onnx.rewrite.nodes import all_nodes, opset_of
from moe_onnx.rewrite.notes import MARK, ROUNDING, Notes, Pass
from moe_onnx.spec import DOMAIN, VERSION


def fuse(model: ModelProto, notes: Notes) -> ModelProto:
    """Layers in forms that are known become ``ascend.moe`` nodes, with their function bodies."""
    types = inferred(model)
    made = by_ir(lambda inner, inner_notes: _fuse(inner, types, inner_notes))(model, notes)
    if notes.done:
        used = {node.op_type for node in all_nodes(made) if node.domain == DOMAIN}
        made.functions.extend(missing_bodies(made, used, max(opset_of(made), OLDEST_OPSET)))
        made.ir_version = max(made.ir_version, 8)  # the first with functions
    return made


def _fuse(model: ir.Model, types: Mapping[tuple[str, str, str], Types], notes: Notes) -> None:
    names = {value.name for graph in _graphs(model) for value in values_of(graph) if value.name}
    names |= {node.name for graph in _graphs(model) for node in graph if node.name}
    for key, home, version in homes_of(model, OLDEST_OPSET):
        inside = [home, *home.subgraphs()]
        with typed([value for graph in inside for value in values_of(graph)], types.get(key, {})):
            reader = Reader()
            reader.scan(home)
            for graph in inside:
                if graph in (home, *home.subgraphs()):  # bodies of loops may be gone
                    _fuse_graph(graph, reader, names, version, notes)
        _forget(inside)
        if any(node.domain == DOMAIN for graph in inside for node in graph):
            home.opset_imports.setdefault(DOMAIN, VERSION)
            model.opset_imports.setdefault(DOMAIN, VERSION)


def _forget(inside: list[ir.Graph]) -> None:
    """Sizes that inference named are no part of the model: new values may have them of old ones."""
    for graph in inside:
        for node in graph:
            for value in node.outputs if MARK in node.metadata_props else ():
                named = [d.value or "" for d in value.shape or () if not isinstance(d, int)]
                if any(name.startswith("unk__") for name in named) and not value.is_graph_output():
                    value.shape, value.type = None, None


def _fuse_graph(graph: ir.Graph, reader: Reader, names: set[str], version: int, notes: Notes) -> None:
    place = notes.places.get(id(graph), "")
    found, misses = unrolled.chains(graph, reader)
    for why in misses:
        notes.skipped(why.node, why.reason)
    for chain in found:
        with _said(notes):
            last = chain.last
            _check_opset(last, version)
            notes.applied(last, unrolled.rewrite(graph, chain, reader, names), place)
    totals, misses = dense.sums(graph, reader)
    for why in misses:
        notes.skipped(why.node, why.reason)
    for one in totals:
        with _said(notes):
            node = one.node
            _check_opset(node, version)
            notes.applied(node, dense.rewrite(graph, one, reader, names), place)
    for why in masked.unproved(graph, reader):
        notes.skipped(why.node, why.reason)
    for permuted in masked.permutations(graph, reader):
        with _said(notes):
            node = permuted.rows[0]
            _check_opset(node, version)
            notes.applied(node, masked.rewrite(graph, permuted, reader, names), place)
    for node in loops.loops(graph, reader):
        with _said(notes):
            _check_opset(node, version)
            notes.applied(node, loops.rewrite(graph, node, reader, names), place)
    for flat_ids, nodes in batched.gathers(graph).items():
        seen = reader.read(flat_ids)
        if (isinstance(seen, Meaning) and seen.what == "at") or (isinstance(seen, Lost) and seen.found):
            continue  # rows of experts, one after the other
        with _said(notes):
            _check_opset(nodes[0], version)
            block = batched.match(flat_ids, nodes)
            assert block.total is not None
            total = block.total
            notes.applied(total, batched.rewrite(graph, block, names), place)
    for alone in sums.sums(graph):
        with _said(notes):
            _check_opset(alone.node, version)
            notes.applied(alone.node, sums.rewrite(graph, alone, names), place)
    for node in contrib.nodes(graph):
        with _said(notes):
            _check_opset(node, version)
            layer = contrib.match(node)
            notes.applied(node, contrib.rewrite(graph, layer, names), place)


@contextmanager
def _said(notes: Notes) -> Iterator[None]:
    try:
        yield
    except NotThis as why:
        notes.skipped(why.node, why.reason)


def _check_opset(node: ir.Node, version: int) -> None:
    if version < OLDEST_OPSET:
        raise NotThis(node, f"ai.onnx is of opset {version}; ascend.moe needs {OLDEST_OPSET}")


def _graphs(model: ir.Model) -> list[ir.Graph]:
    homes = [model.graph, *(function.graph for function in model.functions.values())]
    return [graph for home in homes for graph in (home, *home.subgraphs())]


FUSE = Pass(
    NAME,
    summary="Mixture-of-Experts layers made of standard operators become ascend.moe nodes.",
    needs=f"a form that is known, ai.onnx opset >= {OLDEST_OPSET}, a fixed number of experts",
    leaves="the router as it was; MoeInitRoutingV2, MoeGroupedMatmul, MoeTokenUnpermuteWithRoutingMap",
    apply=fuse,
    tolerance=ROUNDING,
)
