"""Rules of If, Loop and Scan, which see the values that their subgraphs use of the graphs around them.

A branch, or the body of a loop, is computed again beside its gradients. Loops and scans give the values
that they carry, as they were at every iteration, as further outputs: the gradient is a Loop that reads
them from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.gradients import Gradients, attribute, sizes
from moe_onnx.autodiff.registry import register_gradient, sees_captured
from moe_onnx.autodiff.reverse import gradients_inside
from moe_onnx.autodiff.subgraphs import copy_into, is_float, move_to_front, needed_in, prune
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
    graphs = {"then_branch": branches[0][0].graph, "else_branch": branches[1][0].graph}
    outputs = g.ops("If", node.inputs[0], outputs=len(kept), **graphs)
    for i, out in zip(kept, outputs, strict=True):
        out.type, out.shape = captured[i].type, captured[i].shape
        found[len(node.inputs) + i] = out
    return found


@dataclass
class _Iterated:
    """A Loop or a Scan: what its body is given at an iteration, and what becomes of the body's outputs."""

    node: ir.Node
    body: ir.Graph
    states: list[tuple[ir.Value, ir.Value, ir.Value, ir.Value]]  # initial, in the body, of the body, final
    slices: list[tuple[ir.Value, ir.Value, int, bool]] = field(
        default_factory=list
    )  # outer, inner, axis, reversed
    stacks: list[tuple[ir.Value, ir.Value, int, bool]] = field(default_factory=list)  # of the body, outer, ..
    counter: ir.Value | None = None
    condition: ir.Value | None = None


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
    it = _Iterated(node, body, states, [], stacks, body.inputs[0], body.inputs[1])
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
    states_d, slices_d, captured = _reverse(g, _Iterated(node, body, states, slices, stacks), d)
    return [*states_d, *slices_d, *captured]


def _reverse(g: Gradients, it: _Iterated, d: Sequence[ir.Value | None]) -> tuple[Grads, Grads, Grads]:
    """The gradients of initial states, of what was sliced, and of captured values."""
    captured = g.captured(it.node)
    wanted = _wanted(g, it, captured)
    alive = next(grad for grad in d if grad is not None)
    grads = dict(zip(it.node.outputs, d, strict=True))
    run = _Backward(g, it)
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
        entry[2] = work.zeros_like(place, entry[1]) if grad is None else work.cast(grad, place)
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


def _wanted(g: Gradients, it: _Iterated, captured: list[ir.Value]) -> set[ir.Value]:
    """What of the body depends on anything wanted, through any number of iterations."""
    start = {own for initial, own, _, _ in it.states if g.needs(initial) and is_float(initial)}
    start |= {own for outer, own, _, _ in it.slices if g.needs(outer)}
    while True:
        needed = needed_in(it.body, {*start, *captured})
        more = {own for initial, own, out, _ in it.states if out in needed and is_float(initial)} - start
        if not more:
            return needed
        start |= more


class _Backward:
    """The Loop that goes back: its inputs, and what it reads of the iterations that were."""

    def __init__(self, g: Gradients, it: _Iterated) -> None:
        self.g, self.it = g, it
        self.places: dict[ir.Value, ir.Value] = {}
        for initial, own, _, _ in it.states:
            self._place(own, initial.type, own.shape)
        for outer, own, axis, _ in it.slices:
            dims = sizes(outer)
            shape = own.shape
            if shape is None and dims is not None:
                shape = ir.Shape([dim for i, dim in enumerate(dims) if i != axis])
            self._place(own, outer.type, shape)
        if it.counter is not None:
            self._place(it.counter, ir.TensorType(ir.DataType.INT64), ir.Shape([]))
        if it.condition is not None:
            self._place(it.condition, ir.TensorType(ir.DataType.BOOL), ir.Shape([]))

    def _place(self, own: ir.Value, type_: ir.TypeProtocol | None, shape: ir.Shape | None) -> None:
        place = ir.Value(name=f"{own.name}.place", type=own.type or type_, shape=shape)
        self.places[own] = place

    def start(self, inner: Emitter) -> None:
        self.inner = inner
        self.count = self._count()
        self.step = self.input("step", ir.DataType.INT64, ir.Shape([]))
        self.input("go_on", ir.DataType.BOOL, ir.Shape([]))
        last = self.g.sub(self.count, self.g.constant(1))
        self.index = inner.op("Sub", last, self.step)

    def _count(self) -> ir.Value:
        """How many iterations there were, a scalar."""
        g = self.g
        if self.it.counter is None:
            outer, _, axis, _ = self.it.slices[0]
            length = g.op("Shape", outer, start=axis, end=axis + 1)
        else:
            length = g.op("Shape", self._record(self.it.counter, self.it.counter.type or _INT64), end=1)
        return g.op("Reshape", length, g.constant([]))

    def input(self, name: str, dtype: ir.DataType | None, shape: ir.Shape | None) -> ir.Value:
        return self.inner.place(name, dtype, shape)

    def slice_of(self, outer: ir.Value, axis: int, backward: bool, like: ir.Value) -> ir.Value:
        part = self.inner.op("Gather", outer, self.step if backward else self.index, axis=axis)
        part.dtype, part.shape = outer.dtype, like.shape
        return part

    def _record(self, own: ir.Value, type_: ir.TypeProtocol) -> ir.Value:
        """The values of something in the body at every iteration: a further output of the node."""
        node, body = self.it.node, self.g.emitter.adopt(self.it.body)
        body.output(own, f"{own.name}.at", type_.dtype, own.shape)
        for name in ("scan_output_axes", "scan_output_directions"):
            if (attr := node.attributes.get(name)) is not None:
                node.attributes[name] = ir.AttrInt64s(name, [*attr.as_ints(), 0])
        node.resize_outputs(len(node.outputs) + 1)
        out = node.outputs[-1]
        self.g.emitter.name_output(out, f"{own.name}.all")
        out.dtype = type_.dtype
        if own.shape is not None:
            out.shape = ir.Shape([None, *own.shape])
        return out

    def finish(
        self, carried: Sequence[Sequence[ir.Value | None]], stacked: Sequence[ir.Value | None]
    ) -> list[ir.Value]:
        """Emit the Loop; its outputs are those of ``carried`` and the stacks of ``stacked``."""
        inner, g = self.inner, self.g
        inner.output(self.inner.graph.inputs[1], "go_on", ir.DataType.BOOL, ir.Shape([]))
        for value in (*(entry[2] for entry in carried), *stacked):
            assert value is not None
            inner.output(value, "grad", value.dtype, value.shape)
        prune(inner.graph, keep=self.index.producer())
        self._fill_places()
        initial = [entry[0] for entry in carried]
        outputs = g.ops(
            "Loop",
            self.count,
            g.constant(True, bool),
            *initial,
            outputs=len(carried) + len(stacked),
            body=inner.graph,
        )
        for out, value in zip(outputs, (*initial, *stacked), strict=True):
            assert value is not None
            out.type, out.shape = ir.TensorType(value.dtype) if value.dtype else None, None
        return list(outputs)

    def _fill_places(self) -> None:
        """What the copy of the body still uses of its inputs is read from what was, before all else."""
        graph, made = self.inner.graph, []
        for own, place in self.places.items():
            if not place.uses() and not any(out is place for out in graph.outputs):
                continue
            if own is self.it.condition:
                value = self.inner.constant(True, bool)
            elif own is self.it.counter:
                value = self.index
            else:
                value = self._read(own)
                made.append(value.producer())
            ir.convenience.replace_all_uses_with(place, value, replace_graph_outputs=True)
        move_to_front(graph, [node for node in (self.index.producer(), *made) if node is not None])
        prune(graph)

    def _read(self, own: ir.Value) -> ir.Value:
        for outer, inside, axis, backward in self.it.slices:
            if inside is own:
                index = self.step if backward else self.index
                return self.inner.op("Gather", outer, index, axis=axis)
        initial, _, out, _ = next(state for state in self.it.states if state[1] is own)
        type_ = own.type or initial.type
        if not isinstance(type_, ir.TensorType):
            raise GradientError(
                f"'{own.name}', which is carried from one iteration to the next, is no tensor."
            )
        before, after = sizes(own), sizes(out)
        if before is not None and after is not None:
            fixed = len(before) == len(after) and all(
                a == b or not isinstance(a, int) or not isinstance(b, int)
                for a, b in zip(before, after, strict=True)
            )
            if not fixed:
                raise GradientError(
                    f"'{own.name}', which is carried from one iteration to the next, changes its shape from "
                    f"{list(before)} to {list(after)}; only values of one shape can be kept for the way back."
                )
        return self.inner.op("Gather", self._record(own, type_), self.index, axis=0)

    def joined(self, stack: ir.Value, outer: ir.Value, _: ir.Value, axis: int, backward: bool) -> ir.Value:
        """What came slice by slice, the last iteration first, as one value."""
        g = self.g
        if not backward:
            flip = (g.constant([-1]), g.constant([-(2**62)]), g.constant([0]), g.constant([-1]))
            stack = g.op("Slice", stack, *flip)
        if axis:
            order = list(range(1, g.rank(outer)))
            order.insert(axis, 0)
            stack = g.op("Transpose", stack, perm=order)
        return stack


_INT64 = ir.TensorType(ir.DataType.INT64)
