"""Each layer's tokens go and come back by the layer's own router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from moe_onnx.build.forward import moe_layers
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.gradients import loss_of, prepared
from moe_onnx.validation.training.prepared import few
from moe_onnx.validation.training.routing_origins import (
    COMBINE,
    COMBINES,
    DISPATCHES,
    FINALIZE,
    GATES,
    PERMUTE,
    Layer,
    Origins,
    Routes,
)

FORWARD = code(
    "MO628",
    "error",
    "A layer routes by what belongs to another layer",
    why="The router of a layer chooses the experts of its own tokens; the combine needs the row indices, the "
    "map and the weights of the dispatch that its rows came from. Those of another layer have the same "
    "shapes: tokens go to experts that nobody chose for them, or get other tokens' rows back, and nothing "
    "complains.",
    mend="Let dispatch and combine read the tokens, expert ids, indices, map and weights of their own layer.",
)
# What a combine reads besides rows.
_READS = {
    COMBINE: {1: "sorted_indices", 2: "routing_map", 3: "probs"},
    FINALIZE: {1: "expanded_row_idx", 5: "scales"},
}


@dataclass
class Forward:
    """The routing operators of a graph, its layers, and what is wrong with their way forward."""

    routes: Routes
    layers: list[Layer]
    wrong: list[Finding]


def forward_of(subject: Subject) -> Forward | str:
    """The layers' routing operators, or why they cannot be looked at; read once."""
    return subject.once(_read)


@check("static", FORWARD)
def routing(subject: Subject) -> Iterator[Outcome]:
    """Dispatch and combine read tokens, expert ids, indices, maps and weights of their own layer."""
    found = forward_of(subject)
    if isinstance(found, str):
        yield Skipped(found)
        return
    yield from collapsed(found.wrong)


def _read(subject: Subject) -> Forward | str:
    found = prepared(subject, ("step", "grad", "eval", "forward"))
    if isinstance(found, str):
        return found
    training, flow = found
    if training.config is None:
        return training.no_config
    routes = Routes(flow, (parameter.name for parameter in training.manifest.parameters))
    if not len(routes.of(*DISPATCHES)) == len(routes.of(*COMBINES)) == moe_layers(training.config):
        return "dispatch or combine of some layers are no operators, or there are too many"
    layers: list[Layer] = []
    wrong = list(_forward(routes, layers, flow.ancestors([loss_of(training)])))
    twice = [number for number, count in Counter(one.dispatch for one in layers).items() if count > 1]
    if twice and not wrong:
        wrong.append(FORWARD(routes.place(twice[0]), found="two combines take its rows", expected="one"))
    return Forward(routes, layers, wrong)


def _forward(routes: Routes, layers: list[Layer], before: set[str]) -> Iterator[Finding]:
    """What is wrong on the way of the tokens; ``layers`` are filled in."""
    flow, dispatches = routes.flow, set(routes.of(*DISPATCHES))
    for combine in routes.of(*COMBINES):
        node = flow.nodes[combine]
        rows = routes.origins(node.input[0])
        if not rows.nodes:
            continue  # the experts do not use their rows: another finding
        if len(rows.nodes) > 1 or not rows.nodes <= dispatches:
            yield FORWARD(
                routes.place(combine),
                found=f"its rows come from {routes.places(rows.nodes)}",
                expected="one dispatch",
            )
            continue
        (dispatch,) = rows.nodes
        owners = {
            prefix for prefix in routes.prefixes.values() for name in rows.inputs if _is_expert(name, prefix)
        }
        prefix = owners.pop() if len(owners) == 1 else None
        layers.append(Layer(dispatch, combine, prefix))
        chosen = routes.origins(flow.nodes[dispatch].input[1])
        if prefix is None or prefix + GATES[0] not in before:
            pass  # whose router is the dispatch's cannot be told; a router that is not read is MO611
        elif chosen.routers and chosen.routers != {prefix}:
            yield FORWARD(
                routes.place(dispatch),
                found=f"it sends tokens where {few(_gates(chosen.routers))} says, but to other experts",
                expected=f"as {prefix + GATES[0]!r} says",
            )
            continue
        elif given := routes.router_inputs(prefix):
            tokens = flow.source(flow.nodes[dispatch].input[0])
            if tokens not in given:
                yield FORWARD(
                    routes.place(dispatch),
                    found=f"it sends {tokens!r}, which its router does not read",
                    expected="the tokens that the router reads",
                )
        yield from islice(_foreign(routes, layers[-1], rows.routers, chosen.routers), 1)


def _foreign(routes: Routes, layer: Layer, beside_rows: set[str], routers: set[str]) -> Iterator[Finding]:
    """Inputs of the combine that come from another dispatch than its rows, or from another router."""
    node, where = routes.flow.nodes[layer.combine], routes.place(layer.combine)
    if routers and (others := beside_rows - routers):
        yield FORWARD(
            where,
            found=f"its rows are split or weighed as {few(_gates(others))} says",
            expected=f"as {few(_gates(routers))} says, which their dispatch follows",
        )
    dispatch = routes.flow.nodes[layer.dispatch]
    weights = dispatch.input[2] if dispatch.op_type == PERMUTE and len(dispatch.input) > 2 else ""
    if routers and (others := routes.origins(weights).routers - routers):
        yield FORWARD(
            routes.place(layer.dispatch),
            found=f"'probs' comes from the router of {few(_gates(others))}",
            expected=f"from that of {few(_gates(routers))}, as its map",
        )
    for index, name in _READS.get(node.op_type, {}).items():
        made = routes.origins(node.input[index]) if index < len(node.input) else Origins()
        if foreign := made.nodes - {layer.dispatch}:
            yield FORWARD(
                where,
                found=f"{name!r} comes from {routes.places(foreign)}",
                expected=f"from {routes.place(layer.dispatch)}, as its rows",
            )
        elif routers and (others := made.routers - routers):
            yield FORWARD(
                where,
                found=f"{name!r} comes from the router of {few(_gates(others))}",
                expected=f"from that of {few(_gates(routers))}, as its rows",
            )


def _is_expert(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}experts.")


def _gates(prefixes: Iterable[str]) -> list[str]:
    return sorted(prefix + GATES[0] for prefix in prefixes)
