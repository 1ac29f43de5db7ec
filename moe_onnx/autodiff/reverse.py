"""Reverse mode: from the loss back to what is wanted, one rule a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.gradients import HALVES, Gradients, is_float, sizes
from moe_onnx.autodiff.registry import find_rule
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
    return _Walk(emitter, loss, wrt).run()


class _Walk:
    def __init__(self, emitter: Emitter, loss: ir.Value, wrt: Sequence[ir.Value]) -> None:
        self.emitter, self.loss, self.wrt = emitter, loss, wrt
        self.nodes = list(emitter.graph)
        for value in (loss, *wrt):
            if not is_float(value):
                raise GradientError(
                    f"'{value.name}' is {value.dtype}: only floating-point values have gradients."
                )
        self.needed = self._needed()
        self.g = Gradients(emitter, self.needed)
        self.parts: dict[ir.Value, list[ir.Value]] = {}
        self.reached_by: dict[ir.Value, ir.Node] = {}

    def run(self) -> list[ir.Value]:
        dims = sizes(self.loss)
        one = self.g.like(1.0, self.loss)
        self.parts[self.loss] = [one if dims == () else self.g.op("Expand", one, self.g.shape(self.loss))]
        for node in reversed(self.nodes):
            grads = [self._total(out) for out in node.outputs]
            if all(grad is None for grad in grads) or not any(v in self.needed for v in _inputs(node)):
                continue
            self._differentiate(node, grads)
        return [self._result(value) for value in self.wrt]

    def _needed(self) -> set[ir.Value]:
        """Values on a differentiable path from something wanted; integers end such paths."""
        needed = set(self.wrt)
        for node in self.nodes:
            if any(value in needed for value in _inputs(node)):
                needed.update(out for out in node.outputs if is_float(out))
        return needed

    def _total(self, value: ir.Value) -> ir.Value | None:
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
        if rule is None or (captured := [v for v in _captured(node) if v in self.needed]):
            why = (
                f"has no gradient rule for opset {version}"
                if rule is None
                else f"uses '{captured[0].name}' inside a subgraph, which rules cannot see"
            )
            raise GradientError(
                f"{label} (node '{node.name}') {why}. Path from the loss: {self._path(node)}. Register a "
                "rule with moe_onnx.register_gradient, or leave out of wrt what is reached only through it."
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
        if len(parts) != len(node.inputs):
            raise GradientError(
                f"{label} (node '{node.name}'): its gradient rule returned {len(parts)} values for "
                f"{len(node.inputs)} inputs. Return one for each, None where there is no gradient."
            )
        for value, part in zip(node.inputs, parts, strict=True):
            if value is None or value not in self.needed:
                continue
            if part is None:
                raise GradientError(
                    f"{label} (node '{node.name}') is not differentiable for its input '{value.name}', and "
                    f"something wanted is behind it. Path from the loss: {self._path(node)}."
                )
            self.parts.setdefault(value, []).append(part)
            self.reached_by.setdefault(value, node)

    def _result(self, value: ir.Value) -> ir.Value:
        total = self._total(value)
        if total is None:
            raise GradientError(
                f"The loss '{self.loss.name}' has no differentiable path to '{value.name}': "
                f"{self._why_not(value)}."
            )
        narrowed = self._narrowed(total, value)
        assert narrowed is not None
        return narrowed

    def _narrowed(self, grad: ir.Value | None, value: ir.Value) -> ir.Value | None:
        """The gradient of a 16-bit value is 16-bit."""
        return grad if grad is None or value.dtype not in HALVES else self.g.cast(grad, value)

    def _path(self, node: ir.Node) -> str:
        steps = [node]
        while not any(out is self.loss for out in steps[-1].outputs):
            reached = [self.reached_by[out] for out in steps[-1].outputs if out in self.reached_by]
            if not reached:
                break
            steps.append(reached[0])
        names = [f"{step.op_type} '{step.name}'" for step in reversed(steps)]
        if len(names) > 9:
            names = [*names[:4], f"({len(names) - 8} more)", *names[-4:]]
        return " <- ".join([f"'{self.loss.name}'", *names])

    def _why_not(self, value: ir.Value) -> str:
        """Follow the value forward: the node where the path ends, or that there is none."""
        reached, blocked = {value}, []
        for node in self.nodes:
            if any(v in reached for v in _inputs(node)):
                reached.update(node.outputs)
                if not any(out in self.needed for out in node.outputs):
                    blocked.append(node)
        if self.loss not in reached:
            return "the loss does not depend on it"
        ends = ", ".join(f"{n.op_type} '{n.name}'" for n in blocked[:3])
        return f"every path from it ends in integers or booleans, at {ends}"


def _captured(node: ir.Node) -> Iterable[ir.Value]:
    """Values of outer graphs that a node's subgraphs use."""
    for attr in node.attributes.values():
        graphs = (
            [attr.as_graph()]
            if attr.type == ir.AttributeType.GRAPH
            else attr.as_graphs()
            if attr.type == ir.AttributeType.GRAPHS
            else []
        )
        for graph in graphs:
            for inner in graph.all_nodes():
                yield from (v for v in inner.inputs if v is not None and v.graph is not graph)
            yield from (v for v in graph.outputs if v.graph is not graph)


def _inputs(node: ir.Node) -> Iterable[ir.Value]:
    yield from (v for v in node.inputs if v is not None)
    yield from _captured(node)
