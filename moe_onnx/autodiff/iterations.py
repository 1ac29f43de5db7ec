"""The Loop that goes back over the iterations of a Loop or a Scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.gradients import Gradients, sizes
from moe_onnx.autodiff.subgraphs import move_to_front, prune
from moe_onnx.errors import GradientError


@dataclass
class Iterated:
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


class Backward:
    """The Loop that goes back: its inputs, and what it reads of the iterations that were."""

    def __init__(self, g: Gradients, it: Iterated) -> None:
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
        """Go back in ``inner``, the copy of the body."""
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
        """A further input of the Loop's body."""
        return self.inner.place(name, dtype, shape)

    def slice_of(self, outer: ir.Value, axis: int, backward: bool, like: ir.Value) -> ir.Value:
        """What ``outer`` holds for the iteration, along an axis."""
        part = self.inner.op("Gather", outer, self.step if backward else self.index, axis=axis)
        part.type = None if outer.dtype is None else ir.TensorType(outer.dtype)
        part.shape = like.shape
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
