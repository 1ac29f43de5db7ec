"""Reverse mode: from the loss back to what is wanted, one rule a node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.gradients import HALVES, Gradients, sizes
from moe_onnx.autodiff.refusals import advice
from moe_onnx.autodiff.registry import captures, find_rule
from moe_onnx.autodiff.subgraphs import flowing, is_float, needed_in
from moe_onnx.errors import GradientError, MoeOnnxError


def add_gradients(emitter: Emitter, loss: ir.Value, wrt: Sequence[ir.Value]) -> list[ir.Value]:
    """Emit the gradient of ``loss`` for each value of ``wrt``.

    Args:
        emitter: Of the graph that computes the loss, with types and shapes inferred.
        loss: A float scalar (or a tensor, whose sum is differentiated).
        wrt: Graph inputs, initializers or intermediate values, all float.

    Returns:
        The gradients, each in the shape and dtype of its value.

    Raises:
        GradientError: If an operator on the way has no rule, or if no differentiable path leads from
            the loss to something wanted.
    """
    for value in (loss, *wrt):
        if not is_float(value):
            raise GradientError(
                f"'{value.name}' is {value.dtype}: only floating-point values have gradients."
            )
    walk = _Walk(emitter, wrt)
    one = walk.g.like(1.0, loss)
    start = one if sizes(loss) == () else walk.g.op("Expand", one, walk.g.shape(loss))
    walk.run([(loss, start)])
    return [walk.result(value, loss) for value in wrt]


def gradients_inside(
    emitter: Emitter, seeds: Sequence[tuple[ir.Value, ir.Value]], wrt: Sequence[ir.Value]
) -> list[ir.Value | None]:
    """Emit, into a subgraph, the gradients for values that it uses; None where no path leads to one.

    Args:
        emitter: Of the subgraph.
        seeds: Outputs of the subgraph and their gradients.
        wrt: Values of the subgraph or of graphs around it.
    """
    walk = _Walk(emitter, wrt)
    walk.run(seeds)
    return [walk.total(value) for value in wrt]


class _Walk:
    def __init__(self, emitter: Emitter, wrt: Sequence[ir.Value]) -> None:
        self.emitter = emitter
        self.nodes = list(emitter.graph)
        self.needed = needed_in(self.nodes, wrt)
        self.g = Gradients(emitter, self.needed)
        self.parts: dict[ir.Value, list[ir.Value]] = {}
        self.reached_by: dict[ir.Value, ir.Node] = {}

    def run(self, seeds: Sequence[tuple[ir.Value, ir.Value]]) -> None:
        """From values whose gradients are known to all that they depend on."""
        for value, grad in seeds:
            self.parts.setdefault(value, []).append(grad)
        self.starts = {value for value, _ in seeds}
        for node in reversed(self.nodes):
            grads = [self.total(out) for out in node.outputs]
            if all(grad is None for grad in grads) or not any(v in self.needed for v in flowing(node)):
                continue
            self._differentiate(node, grads)

    def total(self, value: ir.Value) -> ir.Value | None:
        """The sum of all parts of a gradient so far."""
        parts = self.parts.get(value)
        if not parts:
            return None
        if len(parts) > 1:
            op = "Add" if len(parts) == 2 else "Sum"
            parts = self.parts[value] = [self.g.wide(part) for part in parts]  # rounded once, as a sum
            parts[:] = [self.emitter.op(op, *parts, name=f"{value.name}.grad")]
        return parts[0]

    def _differentiate(self, node: ir.Node, grads: list[ir.Value | None]) -> None:
        version = node.version or self.emitter.graph.opset_imports.get(node.domain)
        rule = find_rule("" if node.domain == "ai.onnx" else node.domain, node.op_type, version)
        label = f"{node.domain or 'ai.onnx'}::{node.op_type}"
        outer = self.g.captured(node)
        if rule is None or (outer and not captures(rule)):
            why = (
                f"has no gradient rule for opset {version}"
                if rule is None
                else f"uses '{outer[0].name}' inside a subgraph, which its rule cannot see"
            )
            raise GradientError(
                f"{label} (node '{node.name}') {why}. Path from the loss: {self._path(node)}. "
                f"{advice(node, version)}"
            )
        try:
            with self.emitter.scope("grad"), self.emitter.scope(node.name or node.op_type):
                if node.op_type != "Cast":  # whose rule takes the sums of 16-bit gradients as they are
                    grads = [self._narrowed(d, out) for d, out in zip(grads, node.outputs, strict=True)]
                parts = list(rule(self.g, node, *grads))
        except MoeOnnxError as error:
            raise GradientError(
                f"{label} (node '{node.name}'): {error} Path from the loss: {self._path(node)}."
            ) from error
        reached = set(flowing(node))
        values = [*node.inputs, *outer] if captures(rule) else list(node.inputs)
        if len(parts) != len(values):
            raise GradientError(
                f"{label} (node '{node.name}'): its gradient rule returned {len(parts)} values for "
                f"{len(values)} inputs. Return one for each, None where there is no gradient."
            )
        for i, (value, part) in enumerate(zip(values, parts, strict=True)):
            if value is None or value not in self.needed or value not in reached:
                continue
            if part is None and i >= len(node.inputs):
                continue  # no path leads to it in the subgraph
            if part is None:
                raise GradientError(
                    f"{label} (node '{node.name}') is not differentiable for its input '{value.name}', and "
                    f"something wanted is behind it. Path from the loss: {self._path(node)}."
                )
            self.parts.setdefault(value, []).append(part)
            self.reached_by.setdefault(value, node)

    def result(self, value: ir.Value, loss: ir.Value) -> ir.Value:
        """The gradient of something wanted, in its own dtype."""
        total = self.total(value)
        if total is None:
            raise GradientError(
                f"The loss '{loss.name}' has no differentiable path to '{value.name}': "
                f"{self._why_not(value, loss)}."
            )
        narrowed = self._narrowed(total, value)
        assert narrowed is not None
        return narrowed

    def _narrowed(self, grad: ir.Value | None, value: ir.Value) -> ir.Value | None:
        """The gradient of a 16-bit value is 16-bit."""
        return grad if grad is None or value.dtype not in HALVES else self.g.cast(grad, value)

    def _path(self, node: ir.Node) -> str:
        steps = [node]
        while not any(out in self.starts for out in steps[-1].outputs):
            reached = [self.reached_by[out] for out in steps[-1].outputs if out in self.reached_by]
            if not reached:
                break
            steps.append(reached[0])
        names = [f"{step.op_type} '{step.name}'" for step in reversed(steps)]
        if len(names) > 9:
            names = [*names[:4], f"({len(names) - 8} more)", *names[-4:]]
        start = next((out.name for out in steps[-1].outputs if out in self.starts), "?")
        return " <- ".join([f"'{start}'", *names])

    def _why_not(self, value: ir.Value, loss: ir.Value) -> str:
        """Follow the value forward: the node where the path ends, or that there is none."""
        reached, blocked = {value}, []
        for node in self.nodes:
            if any(v in reached for v in flowing(node)):
                reached.update(node.outputs)
                if not any(out in self.needed for out in node.outputs):
                    blocked.append(node)
        if loss not in reached:
            return "the loss does not depend on it"
        ends = ", ".join(f"{n.op_type} '{n.name}'" for n in blocked[:3])
        return f"every path from it ends in integers or booleans, at {ends}"
