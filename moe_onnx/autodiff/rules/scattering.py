"""Rules of ScatterElements and ScatterND, for every reduction.

Both are one problem: elements of ``x`` meet the updates that were sent to them. Elements that equal the
result of ``max`` or ``min`` share its gradient (as PyTorch's amax and amin); products are of all the
others, also where some are 0. Without a reduction, updates that overwrite each other have no gradient
by ONNX's own words: constant indices that do are refused; for indices that are computed, only
the update that was written last has the gradient, found by scattering numbers the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, constant_array, sizes
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.autodiff.rules.indexing import rows_of
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@dataclass(frozen=True)
class _Scatter:
    """ScatterElements of ``updates`` into ``x``, with result ``y`` of gradient ``d``."""

    g: Gradients
    index: ir.Value
    axis: int
    distinct: bool  # whether no two updates go to one element, for sure

    def take(self, value: ir.Value) -> ir.Value:
        return self.g.op("GatherElements", value, self.index, axis=self.axis)

    def put(self, value: ir.Value, updates: ir.Value, reduction: str | None = None) -> ir.Value:
        return self.g.op("ScatterElements", value, self.index, updates, axis=self.axis, reduction=reduction)

    def gradients(
        self, reduction: str, x: ir.Value, updates: ir.Value, y: ir.Value, d: ir.Value, *, keep: bool
    ) -> tuple[ir.Value | None, ir.Value]:
        """Of x (if it is to be kept) and of the updates."""
        if reduction == "add":
            return d, self.take(d)
        if reduction == "none":
            dx = self.put(d, self.g.zeros_like(updates, d)) if keep else None
            return dx, self._last(x, updates, self.take(d))
        if reduction == "mul":
            return self._product(x, updates, d)
        return self._extremum(x, updates, y, d)

    def _last(self, x: ir.Value, updates: ir.Value, taken: ir.Value) -> ir.Value:
        if self.distinct:
            return taken
        g = self.g
        shape = g.op("Shape", updates)
        numbers = g.op("Range", g.constant(0), g.op("Size", updates), g.constant(1))
        numbers = g.op("Reshape", numbers, shape, allowzero=1)
        none = g.op("Expand", g.constant(-1), g.op("Shape", x))
        last = g.op("Equal", self.take(self.put(none, numbers)), numbers)
        return g.op("Where", last, taken, g.like(0.0, taken))

    def _extremum(
        self, x: ir.Value, updates: ir.Value, y: ir.Value, d: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        g = self.g
        own = g.cast(g.op("Equal", x, y), d)
        sent = g.cast(g.op("Equal", updates, self.take(y)), d)
        share = g.div(d, self.put(own, sent, "add"))
        return g.mul(own, share), g.mul(sent, self.take(share))

    def _product(self, x: ir.Value, updates: ir.Value, d: ir.Value) -> tuple[ir.Value, ir.Value]:
        g, zero, one = self.g, self.g.like(0.0, d), self.g.like(1.0, d)
        flat = [g.op("Equal", v, zero) for v in (x, updates)]
        safe = [g.op("Where", is_zero, one, v) for is_zero, v in zip(flat, (x, updates), strict=True)]
        zeros = [g.cast(is_zero, d) for is_zero in flat]
        whole = g.mul(d, self.put(safe[0], safe[1], "mul"))
        count = self.put(zeros[0], zeros[1], "add")
        grads = []
        for here, none, part in ((whole, zeros[0], safe[0]), (self.take(whole), zeros[1], safe[1])):
            met = count if none is zeros[0] else self.take(count)
            grads.append(g.op("Where", g.op("Equal", met, none), g.div(here, part), zero))
        return grads[0], grads[1]


@register_gradient("ScatterElements", since=11)
def scatter_elements(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """What an element kept goes to x, what it was sent to the updates."""
    x, index, updates = node.inputs
    assert x is not None and index is not None and updates is not None
    axis, reduction = attribute(node, "axis", 0), attribute(node, "reduction", "none")
    distinct = reduction != "none" or _distinct_elements(index, x, axis)
    scatter = _Scatter(g, index, axis, distinct)
    dx, sent = scatter.gradients(reduction, x, updates, node.outputs[0], d, keep=g.needs(x))
    return [dx, None, sent]


@register_gradient("ScatterND", since=11)
def scatter_nd(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """As ScatterElements, of the rows that are left when the indexed axes are made one."""
    x, index, updates = node.inputs
    assert x is not None and index is not None and updates is not None
    reduction = attribute(node, "reduction", "none")
    rank = g.rank(x)
    row, depth = rows_of(g, x, index, 0)
    distinct = reduction != "none" or _distinct_rows(index, x)

    def flat(value: ir.Value, axis: int) -> ir.Value:
        # One axis of all that is indexed, and one of all else, which there may be nothing of.
        return g.op("Flatten", value, axis=axis)

    flat_x, flat_y, flat_d = (flat(value, depth) for value in (x, node.outputs[0], d))
    flat_u = flat(updates, g.rank(index) - 1)
    scatter = _Scatter(g, g.op("Expand", row, g.op("Shape", flat_u)), 0, distinct)
    dx, sent = scatter.gradients(reduction, flat_x, flat_u, flat_y, flat_d, keep=g.needs(x))
    if reduction == "add" or depth == rank == 1:
        dx = d if reduction == "add" else dx
    return [None if dx is None else g.reshape_like(dx, x), None, g.reshape_like(sent, updates)]


def _distinct_elements(index: ir.Value, x: ir.Value, axis: int) -> bool:
    """Whether constant indices send no two updates to one element; refused if they do."""
    array, dims = constant_array(index), sizes(x)
    if array is None:
        return False
    array = _positive(array, None if dims is None else dims[axis], "ScatterElements")
    if array is None:
        return False
    ordered = np.sort(array, axis=axis)
    _refuse_doubles(bool((np.diff(ordered, axis=axis) == 0).any()), index)
    return True


def _distinct_rows(index: ir.Value, x: ir.Value) -> bool:
    array, dims = constant_array(index), sizes(x)
    if array is None:
        return False
    columns = []
    for i in range(array.shape[-1]):
        column = _positive(array[..., i], None if dims is None else dims[i], "ScatterND")
        if column is None:
            return False
        columns.append(column.ravel())
    rows = np.stack(columns, axis=1)
    _refuse_doubles(len(np.unique(rows, axis=0)) < len(rows), index)
    return True


def _positive(array: np.ndarray, size: int | str | None, what: str) -> np.ndarray | None:
    """Indices from the start, where that can be told before the graph runs."""
    if (array >= 0).all() or (array < 0).all():
        return array
    return np.where(array < 0, array + size, array) if isinstance(size, int) else None


def _refuse_doubles(doubled: bool, index: ir.Value) -> None:
    if doubled:
        raise GradientError(
            f"the constant indices '{index.name}' hold a place twice, and without a reduction ONNX does not "
            "say which update stays. Make them distinct, or use reduction='add'."
        )
