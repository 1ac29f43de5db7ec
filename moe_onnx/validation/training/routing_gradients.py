"""The gradients of each layer's routing operators go back the way that the tokens came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.prepared import training_of
from moe_onnx.validation.training.routing import FORWARD, forward_of
from moe_onnx.validation.training.routing_origins import (
    COMBINE,
    COMBINES,
    DISPATCHES,
    FINALIZE,
    INIT,
    PERMUTE,
    Layer,
    Origins,
    Routes,
)

BACKWARD = code(
    "MO629",
    "error",
    "A routing operator's gradient reads what belongs to another layer",
    why="A gradient goes back the way that the values came: by the indices, map, weights and rows of its own "
    "forward operator, from the gradient of what that operator made. With those of another layer all "
    "shapes agree, and every token is moved by another token's error.",
    mend="Give each Grad operator the values of its own forward operator, or differentiate again.",
)

# Inputs of a Grad operator: their names, and which input ("<") or output (">") of the forward they are.
_SAME: dict[str, dict[int, tuple[str, str, int]]] = {
    f"{INIT}Grad": {1: ("expanded_row_idx", ">", 1)},
    f"{PERMUTE}Grad": {2: ("sorted_indices", ">", 2), 3: ("routing_map", "<", 1)},
    f"{COMBINE}Grad": {
        1: ("out_index", ">", 1),
        2: ("permute_token_id", ">", 2),
        3: ("routing_map", "<", 2),
        4: ("permuted_tokens", "<", 0),
        5: ("probs", "<", 3),
    },
    f"{FINALIZE}Grad": {
        1: ("expanded_row_idx", "<", 1),
        2: ("expanded_x", "<", 0),
        3: ("scales", "<", 5),
    },
}


@check("static", BACKWARD)
def routing_gradients(subject: Subject) -> Iterator[Outcome]:
    """Each routing operator has its own Grad operator, which reads what belongs to it."""
    found, training = forward_of(subject), training_of(subject)
    if isinstance(found, str) or isinstance(training, str):
        yield Skipped(found if isinstance(found, str) else str(training))
        return
    routes, layers = found.routes, found.layers
    if training.assembly not in ("step", "grad"):
        yield Skipped("there is no backward pass in this graph")
        return
    if found.wrong:
        yield Skipped(f"the way forward is wrong already ({FORWARD.name})")
        return
    forward = Counter(routes.flow.nodes[n].op_type for n in routes.of(*DISPATCHES, *COMBINES))
    if len(layers) < len(routes.of(*COMBINES)) or any(
        len(routes.of(f"{name}Grad")) != forward[name] for name in (*DISPATCHES, *COMBINES)
    ):
        yield Skipped("gradients of some layers are no operators, or there are too many")
        return
    yield from collapsed(_backward(routes, layers))


def _backward(routes: Routes, layers: Sequence[Layer]) -> Iterator[Finding]:
    owner: dict[int, int] = {}  # forward node: its Grad node
    for name in (*DISPATCHES, *COMBINES):
        grads = routes.of(f"{name}Grad")
        owners, doubled = _matched(routes, grads, routes.of(name))
        if doubled:
            grad, forward = doubled[0]
            yield BACKWARD(
                routes.place(grad),
                found=f"it reads the indices of {routes.place(forward)}, as another Grad operator does",
                expected="each forward operator has one Grad operator",
            )
            return
        owner.update((forward, grad) for grad, forward in owners.items())
    for forward, grad in owner.items():
        for label, given, wanted in _pairs(routes, grad, forward):
            if given != wanted:
                yield BACKWARD(
                    routes.place(grad),
                    found=f"{label!r} is {given!r}",
                    expected=f"{wanted!r}, as in {routes.place(forward)}",
                )
    yield from _upstream(routes, layers, owner)


def _matched(
    routes: Routes, grads: Sequence[int], forwards: Sequence[int]
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """The forward node of each Grad node: that with which it shares most; and those that share one."""
    found: dict[int, int] = {}
    taken: set[int] = set()
    doubled: list[tuple[int, int]] = []
    by_value: dict[tuple[int, str], set[int]] = {}
    for forward in forwards:
        for index, value in _of_forward(routes, forward).items():
            by_value.setdefault((index, value), set()).add(forward)
    votes: dict[int, Counter[int]] = {}
    for grad in grads:
        node, counts = routes.flow.nodes[grad], Counter[int]()
        for index in _SAME[node.op_type]:
            if index < len(node.input) and node.input[index]:
                counts.update(by_value.get((index, routes.flow.source(node.input[index])), ()))
        votes[grad] = counts
    # Those that are sure first; what is left settles the others.
    for grad in sorted(grads, key=lambda one: len(_best(votes[one]))):
        best = _best(votes[grad])
        free = [forward for forward in best or forwards if forward not in taken]
        if not free:
            doubled.append((grad, best[0] if best else forwards[0]))
            continue
        found[grad] = free[0]
        taken.add(free[0])
    return found, doubled


def _best(votes: Counter[int]) -> list[int]:
    return [forward for forward, count in votes.items() if count == max(votes.values())]


def _of_forward(routes: Routes, forward: int) -> Mapping[int, str]:
    """The values that the Grad operator of a node should read, by the number of its input."""
    node = routes.flow.nodes[forward]
    found = {}
    for index, (_, side, position) in _SAME[f"{node.op_type}Grad"].items():
        names = node.input if side == "<" else node.output
        if position < len(names) and names[position]:
            found[index] = routes.flow.source(names[position])
    return found


def _pairs(routes: Routes, grad: int, forward: int) -> Iterator[tuple[str, str, str]]:
    """Names of a Grad node's inputs, what they are, and what they should be."""
    node, wanted = routes.flow.nodes[grad], _of_forward(routes, forward)
    for index, (label, _, _) in _SAME[node.op_type].items():
        if index in wanted and index < len(node.input) and node.input[index]:
            made = routes.origins(node.input[index])
            if made.nodes or made.routers or made.inputs:  # what is left out is an empty constant
                yield label, routes.flow.source(node.input[index]), wanted[index]


def _upstream(routes: Routes, layers: Sequence[Layer], owner: Mapping[int, int]) -> Iterator[Finding]:
    """Whether gradients come from where the values went."""
    flow = routes.flow
    outs = {layer.combine: flow.nodes[layer.combine].output[0] for layer in layers}
    backs = {layer.combine: flow.nodes[owner[layer.combine]].output[0] for layer in layers}
    depends = flow.dependence([*outs.values(), *backs.values()])
    count = len(layers)
    later = {
        layer.combine: {
            other.combine
            for other in layers
            if depends.get(flow.nodes[other.dispatch].input[0], 0) >> number & 1
        }
        for number, layer in enumerate(layers)
    }
    for layer in layers:
        combine, dispatch = owner[layer.combine], owner[layer.dispatch]
        bits = depends.get(flow.nodes[combine].input[0], 0) >> count
        come = {other.combine for number, other in enumerate(layers) if bits >> number & 1}
        if come != later[layer.combine]:
            missing, extra = later[layer.combine] - come, come - later[layer.combine]
            said = f"does not depend on the gradient of {routes.places(missing or extra)}"
            yield BACKWARD(
                routes.place(combine),
                found=f"its gradient {said if missing else said.replace('does not depend', 'depends')}",
                expected="it depends on those of all later layers, and of no other",
            )
        node = flow.nodes[dispatch]
        for index in (0, 1) if node.op_type == f"{PERMUTE}Grad" else (0,):
            made = routes.origins(node.input[index]) if index < len(node.input) else Origins()
            if foreign := made.nodes - {combine, layer.dispatch}:
                yield BACKWARD(
                    routes.place(dispatch),
                    found=f"its gradient comes from {routes.places(foreign)}",
                    expected=f"from {routes.place(combine)}",
                )
