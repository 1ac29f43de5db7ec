"""Rules of If, Loop and Scan, which see the values that their subgraphs use of the graphs around them.

A branch, or the body of a loop, is computed again beside its gradients. Loops and scans give the values
that they carry, as they were at every iteration, as further outputs: the gradient is a Loop that reads
them from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.gradients import Gradients, attribute
from moe_onnx.autodiff.iterations import Backward, Iterated
from moe_onnx.autodiff.registry import register_gradient, sees_captured
from moe_onnx.autodiff.reverse import gradients_inside
from moe_onnx.autodiff.subgraphs import copy_into, is_float, needed_in, prune
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("If")
@sees_captured
def if_(g: Gradients, node: ir.Node, *d: ir.Value | None) -> Grads:
    """An If of the same condition, whose branches are the gradients of the branches."""
    captured = g.captured(node)
    branches: list[tuple[Emitter, Grads]] = []
    for name in ("then_branch", "else_branch"):
        inner, outputs = copy_into(g.emitter, node.attributes[name].as_graph(), {})
        seeds = [
            (out, grad) for out, grad in zip(outputs, d, strict=True) if grad is not None and is_float(out)
        ]
        branches.append((inner, gradients_inside(inner, seeds, captured)))
    kept = [i for i in range(len(captured)) if any(grads[i] is not None for _, grads in branches)]
    found: Grads = [None] * (len(node.inputs) + len(captured))
    if not kept:
        return found
    alive = next(grad for grad in d if grad is not None)
    for inner, grads in branches:
        work = Gradients(inner, set())
        for i in kept:
            grad = grads[i]
            grad = work.zeros_like(captured[i], alive) if grad is None else work.cast(grad, captured[i])
            inner.output(grad, f"{captured[i].name}.grad", captured[i].dtype, captured[i].shape)
        prune(inner.graph)
    then, other = (inner.graph for inner, _ in branches)
    made = g.ops("If", node.inputs[0], outputs=len(kept), then_branch=then, else_branch=other)
    for i, out in zip(kept, made, strict=True):
        out.type, out.shape = captured[i].type, captured[i].shape
        found[len(node.inputs) + i] = out
    return found


@register_gradient("Loop", since=11)
@sees_captured
def loop(g: Gradients, node: ir.Node, *d: ir.Value | None) -> Grads:
    """As many iterations as there were, from the last to the first."""
    body, carried = node.attributes["body"].as_graph(), len(node.inputs) - 2
    initial = [value for value in node.inputs[2:] if value is not None]
    if len(initial) < carried:
        raise GradientError("a Loop without one of its initial values has no gradient rule.")
    states = list(
        zip(initial, body.inputs[2:], body.outputs[1 : 1 + carried], node.outputs[:carried], strict=True)
    )
    stacks = [
        (own, out, 0, False)
        for own, out in zip(body.outputs[1 + carried :], node.outputs[carried:], strict=True)
    ]
    it = Iterated(node, body, states, [], stacks, body.inputs[0], body.inputs[1])
    states_d, _, captured = _reverse(g, it, d)
    return [None, None, *states_d, *captured]


@register_gradient("Scan", since=9)
@sees_captured
def scan(g: Gradients, node: ir.Node, *d: ir.Value | None) -> Grads:
    """As Loop; slices of the inputs have gradients of their own, which are put together again."""
    body, count = node.attributes["body"].as_graph(), attribute(node, "num_scan_inputs")
    carried, outputs = len(node.inputs) - count, len(node.outputs) - (len(node.inputs) - count)
    inputs = [value for value in node.inputs if value is not None]

    def listed(name: str, length: int) -> list[int]:
        return list(attribute(node, name) or [0] * length)

    states = list(
        zip(
            inputs[:carried],
            body.inputs[:carried],
            body.outputs[:carried],
            node.outputs[:carried],
            strict=True,
        )
    )
    slices = [
        (outer, own, axis % g.rank(outer), bool(backward))
        for outer, own, axis, backward in zip(
            inputs[carried:],
            body.inputs[carried:],
            listed("scan_input_axes", count),
            listed("scan_input_directions", count),
            strict=True,
        )
    ]
    stacks = [
        (own, out, axis, bool(backward))
        for own, out, axis, backward in zip(
            body.outputs[carried:],
            node.outputs[carried:],
            listed("scan_output_axes", outputs),
            listed("scan_output_directions", outputs),
            strict=True,
        )
    ]
    states_d, slices_d, captured = _reverse(g, Iterated(node, body, states, slices, stacks), d)
    return [*states_d, *slices_d, *captured]


def _reverse(g: Gradients, it: Iterated, d: Sequence[ir.Value | None]) -> tuple[Grads, Grads, Grads]:
    """The gradients of initial states, of what was sliced, and of captured values."""
    captured = g.captured(it.node)
    wanted = _wanted(g, it, captured)
    alive = next(grad for grad in d if grad is not None)
    grads = dict(zip(it.node.outputs, d, strict=True))
    run = Backward(g, it)
    inner, outputs = copy_into(g.emitter, it.body, run.places)
    run.start(inner)
    work = Gradients(inner, set())
    offset = len(outputs) - len(it.states) - len(it.stacks)  # the condition
    seeds: list[tuple[ir.Value, ir.Value]] = []
    chosen = [k for k, state in enumerate(it.states) if state[1] in wanted]
    carried = []  # (initial, input of the new body, its next value)
    for k in chosen:
        initial, _, _, final = it.states[k]
        place = run.input(f"{initial.name}.grad", initial.dtype or final.dtype, None)
        seeds.append((outputs[offset + k], place))
        start = grads[final]
        carried.append([g.zeros_like(final, alive) if start is None else start, place, None])
    for k, (_, outer, axis, backward) in enumerate(it.stacks):
        grad, own = grads[outer], outputs[offset + len(it.states) + k]
        if grad is not None and is_float(own):
            seeds.append((own, run.slice_of(grad, axis, backward, it.stacks[k][0])))
    sliced = [k for k, part in enumerate(it.slices) if part[1] in wanted]
    targets = [run.places[it.states[k][1]] for k in chosen]
    targets += [run.places[it.slices[k][1]] for k in sliced]
    results = gradients_inside(inner, seeds, [*targets, *captured])
    for k, (entry, grad) in enumerate(zip(carried, results, strict=False)):
        place = targets[k]
        entry[2] = work.zeros_like(place, alive) if grad is None else work.cast(grad, place)
    stacked: Grads = []
    for k, grad in enumerate(results[len(chosen) : len(targets)]):
        place = targets[len(chosen) + k]
        stacked.append(work.zeros_like(place, alive) if grad is None else work.cast(grad, place))
    kept = [i for i, grad in enumerate(results[len(targets) :]) if grad is not None]
    for i in kept:  # sums over all iterations, of 16-bit values in float32
        zeros, part = g.wide(g.zeros_like(captured[i], alive)), results[len(targets) + i]
        assert part is not None
        place = run.input(f"{captured[i].name}.sum", zeros.dtype, captured[i].shape)
        carried.append([zeros, place, work.add(place, work.wide(part))])
    found = run.finish(carried, stacked)
    states_d: Grads = [None] * len(it.states)
    for k, out in zip(chosen, found, strict=False):
        out.type, out.shape = it.states[k][0].type, it.states[k][0].shape
        states_d[k] = out
    captured_d: Grads = [None] * len(captured)
    for i, out in zip(kept, found[len(chosen) :], strict=False):
        out.shape = captured[i].shape
        captured_d[i] = out
    slices_d: Grads = [None] * len(it.slices)
    for k, out in zip(sliced, found[len(carried) :], strict=True):
        slices_d[k] = run.joined(out, *it.slices[k])
    return states_d, slices_d, captured_d


def _wanted(g: Gradients, it: Iterated, captured: list[ir.Value]) -> set[ir.Value]:
    """What of the body depends on anything wanted, through any number of iterations."""
    start = {own for initial, own, _, _ in it.states if g.needs(initial) and is_float(initial)}
    start |= {own for outer, own, _, _ in it.slices if g.needs(outer)}
    while True:
        needed = needed_in(it.body, {*start, *captured})
        more = {own for initial, own, out, _ in it.states if out in needed and is_float(initial)} - start
        if not more:
            return needed
        start |= more
