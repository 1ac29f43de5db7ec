"""The pass ``fuse``: all forms, in every graph of a model."""

from __future__ import annotations

import onnx_ir as ir
from onnx import ModelProto

from moe_onnx.adapters.function_body import OLDEST_OPSET, function_body
from moe_onnx.autodiff.graphs import infer
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.by_ir import by_ir
from moe_onnx.rewrite.fuse import batched
from moe_onnx.rewrite.fuse.graph import NAME, NotThis
from moe_onnx.rewrite.nodes import all_nodes, opset_of
from moe_onnx.rewrite.notes import ROUNDING, Notes, Pass
from moe_onnx.spec import DOMAIN


def fuse(model: ModelProto, notes: Notes) -> ModelProto:
    """Layers in forms that are known become ``ascend.moe`` nodes, with their function bodies."""
    made = by_ir(_fuse)(model, notes)
    if notes.done:
        used = {node.op_type for node in all_nodes(made) if node.domain == DOMAIN}
        have = {function.name for function in made.functions if function.domain == DOMAIN}
        opset = opset_of(made)
        made.functions.extend(function_body(n, opset) for n in sorted(used - have) if n in BY_NAME)
        made.ir_version = max(made.ir_version, 8)  # the first with functions
    return made


def _fuse(model: ir.Model, notes: Notes) -> None:
    unknown = [value for value in _values(model) if value.shape is None]
    types = {value: value.type for value in unknown}
    infer(model)
    names = {value.name for value in _values(model) if value.name}
    names |= {node.name for graph in _graphs(model) for node in graph if node.name}
    for graph in _graphs(model):
        _fuse_graph(graph, names, model.opset_imports.get("", OLDEST_OPSET), notes)
    if any(DOMAIN in graph.opset_imports for graph in _graphs(model)):
        model.opset_imports.setdefault(DOMAIN, 1)
    for value, before in types.items():  # what inference found out was for the matchers
        value.shape, value.type = None, before


def _fuse_graph(graph: ir.Graph | ir.Function, names: set[str], opset: int, notes: Notes) -> None:
    for flat_ids, nodes in batched.gathers(graph).items():
        version = graph.opset_imports.get("", opset)
        try:
            if version < OLDEST_OPSET:
                raise NotThis(nodes[0], f"ai.onnx is of opset {version}; ascend.moe needs {OLDEST_OPSET}")
            block = batched.match(flat_ids, nodes)
        except NotThis as why:
            notes.skipped(why.node, why.reason)
            continue
        assert block.total is not None
        place = notes.places.get(id(block.total.graph), "")
        total = block.total
        what = batched.rewrite(graph, block, names)
        notes.applied(total, what, place)


def _graphs(model: ir.Model) -> list[ir.Graph | ir.Function]:
    found: list[ir.Graph | ir.Function] = [model.graph, *model.graph.subgraphs()]
    for function in model.functions.values():
        if function.domain != DOMAIN:
            found += [function, *function.subgraphs()]
    return found


def _values(model: ir.Model) -> list[ir.Value]:
    found: list[ir.Value] = []
    for graph in _graphs(model):
        found.extend(graph.inputs)
        found += [value for node in graph for value in node.outputs]
        if isinstance(graph, ir.Graph):
            found.extend(graph.initializers.values())
    return found


FUSE = Pass(
    NAME,
    summary="Mixture-of-Experts layers made of standard operators become ascend.moe nodes.",
    needs=f"a form that is known, ai.onnx opset >= {OLDEST_OPSET}, a fixed number of experts",
    leaves="the router as it was; MoeInitRoutingV2, MoeGroupedMatmul, MoeTokenUnpermuteWithRoutingMap",
    apply=fuse,
    tolerance=ROUNDING,
)
