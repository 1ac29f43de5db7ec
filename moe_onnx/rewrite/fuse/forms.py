"""The pass ``fuse``: all forms, in every graph of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import onnx_ir as ir
from onnx import ModelProto

from moe_onnx.adapters.function_body import OLDEST_OPSET, missing_bodies
from moe_onnx.rewrite.by_ir import by_ir
from moe_onnx.rewrite.fuse import batched, contrib, dense, loops, masked, sums, unrolled
from moe_onnx.rewrite.fuse.graph import NAME, NotThis, is_op, size
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

    def rewritten(node: ir.Node, done: Callable[[], str | tuple[ir.Node, str]]) -> None:
        """Rewrite what is at a node and say so, there or where it ends; or say why not."""
        try:
            if version < OLDEST_OPSET:
                raise NotThis(node, f"ai.onnx is of opset {version}; ascend.moe needs {OLDEST_OPSET}")
            said = done()
            at, text = (node, said) if isinstance(said, str) else said
            notes.applied(at, text, place)
        except NotThis as why:
            notes.skipped(why.node, why.reason)

    def left(misses: Iterable[NotThis]) -> None:
        for why in misses:
            notes.skipped(why.node, why.reason)

    found, misses = unrolled.chains(graph, reader)
    left(misses)
    for chain in found:
        rewritten(chain.last, partial(unrolled.rewrite, graph, chain, reader, names))
    totals, misses = dense.sums(graph, reader)
    left(misses)
    for total in totals:
        rewritten(total.node, partial(dense.rewrite, graph, total, reader, names))
    left(masked.unproved(graph, reader))
    for permuted in masked.permutations(graph, reader):
        rewritten(permuted.rows[0], partial(masked.rewrite, graph, permuted, reader, names))
    for node in loops.loops(graph, reader):
        rewritten(node, partial(loops.rewrite, graph, node, reader, names))
    for flat_ids, nodes in batched.gathers(graph).items():
        seen = reader.read(flat_ids)
        if (isinstance(seen, Meaning) and seen.what == "at") or (isinstance(seen, Lost) and seen.found):
            continue  # rows of experts, one after the other
        rewritten(nodes[0], partial(_batch, graph, flat_ids, nodes, names))
    for alone in sums.sums(graph):
        rewritten(alone.node, partial(sums.rewrite, graph, alone, names))
    for node in contrib.nodes(graph):
        rewritten(node, partial(contrib.rewrite, graph, node, names))
    left(_weights_by_map(graph, reader))


def _weights_by_map(graph: ir.Graph, reader: Reader) -> Iterator[NotThis]:
    """Products that pick experts' weights by a map of choices: a layer that nothing else would speak of."""
    for node in graph:
        if not is_op(node, "Einsum", "MatMul") or len(node.inputs) != 2:
            continue
        for chosen, weights in (node.inputs, node.inputs[::-1]):
            if weights is None or weights.producer() is not None:
                continue
            seen = reader.read(chosen) if chosen is not None else None
            if not isinstance(seen, Meaning) or seen.what != "hot" or not seen.choice.experts:
                continue
            if size(weights, 0) == seen.choice.experts:
                text = f"picks experts' weights '{weights.name}' by a map of choices, which is no known form"
                yield NotThis(node, f"{text}: index them by the ids")


def _batch(graph: ir.Graph, flat_ids: ir.Value, nodes: list[ir.Node], names: set[str]) -> tuple[ir.Node, str]:
    block = batched.match(flat_ids, nodes)
    assert block.total is not None
    return block.total, batched.rewrite(graph, block, names)


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
