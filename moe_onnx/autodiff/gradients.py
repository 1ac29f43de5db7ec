"""What gradient rules write with: ``Gradients`` emits nodes and knows shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter
from moe_onnx.autodiff.subgraphs import captured
from moe_onnx.errors import GradientError

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class Gradients:
    """The workbench of gradient rules."""

    def __init__(self, emitter: Emitter, needed: set[ir.Value]) -> None:
        self.emitter = emitter
        self._needed = needed
        self._splits: dict[Sizes, ir.Value] | None = None

    def needs(self, value: ir.Value | None) -> bool:
        """Whether anything that is wanted depends on this input's gradient."""
        return value in self._needed

    def captured(self, node: ir.Node) -> list[ir.Value]:
        """The values of outer graphs that a node's subgraphs use and that need a gradient."""
        return [value for value in captured(node) if value in self._needed]

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Emit a node of one output."""
        return self.emitter.op(op_type, *inputs, domain=domain, **attributes)

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Emit a node of several outputs."""
        return self.emitter.ops(op_type, *inputs, outputs=outputs, domain=domain, **attributes)

    def constant(self, value: Any, dtype: Any = None) -> ir.Value:
        """A constant; integers are int64."""
        return self.emitter.constant(value, dtype)

    def like(self, value: float, other: ir.Value) -> ir.Value:
        """A scalar in the dtype of ``other``."""
        return self.emitter.like(value, other)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit ``a + b``."""
        return self.op("Add", a, b)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit ``a - b``."""
        return self.op("Sub", a, b)

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit ``a * b``."""
        return self.op("Mul", a, b)

    def div(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit ``a / b``."""
        return self.op("Div", a, b)

    def neg(self, a: ir.Value) -> ir.Value:
        """Emit ``-a``."""
        return self.op("Neg", a)

    def sum(self, a: ir.Value, axes: Sequence[int], *, keepdims: bool) -> ir.Value:
        """Emit the sum over ``axes``; no axes: ``a`` itself."""
        return self.op("ReduceSum", a, self.constant(list(axes)), keepdims=int(keepdims)) if axes else a

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape of a value as an int64 tensor: a constant where it is known, else ``Shape``."""
        dims = sizes(value)
        if dims is not None and all(isinstance(dim, int) for dim in dims):
            return self.constant(list(dims))
        return self.op("Shape", value)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """One size of a value, as an int64 vector of one element, read when the graph runs."""
        axis %= self.rank(value)
        return self.op("Shape", value, start=axis, end=axis + 1)

    def cast(self, value: ir.Value, other: ir.Value) -> ir.Value:
        """``value`` in the dtype of ``other``."""
        if value.dtype == other.dtype and other.dtype is not None:
            return value
        if other.dtype is None:
            return self.op("CastLike", value, other)
        return self.op("Cast", value, to=other.dtype)

    def wide(self, value: ir.Value) -> ir.Value:
        """A 16-bit value in float32, which sums and statistics of such are made in; any other as it is."""
        if value.dtype not in HALVES:
            return value
        wide = self.op("Cast", value, to=ir.DataType.FLOAT)
        wide.shape = value.shape
        return wide

    def rank(self, value: ir.Value) -> int:
        """The rank of a value, which must be known.

        Raises:
            GradientError: If it is not.
        """
        dims = sizes(value)
        if dims is None:
            raise GradientError(
                f"The rank of '{value.name}' is not known, and its gradient needs it. Give the value a "
                "shape in the graph's value_info (sizes may be symbolic)."
            )
        return len(dims)

    def zeros_like(self, value: ir.Value, alive: ir.Value) -> ir.Value:
        """Zeros in the shape and dtype of ``value``.

        ``alive`` is any value that no runtime can know when it loads the graph: zeros of a static
        shape would be folded into a constant as large as a weight otherwise.
        """
        self.emitter.ensure_name(value)
        shape = self.op("Shape", value)
        dims = sizes(value)
        if dims is None or all(isinstance(dim, int) for dim in dims):
            flat = self.op("Reshape", alive, self.constant([-1]))
            nothing = self.op("Slice", flat, self.constant([0]), self.constant([0]), self.constant([0]))
            none = self.op("ReduceSum", self.op("Cast", nothing, to=ir.DataType.INT64), keepdims=0)
            shape = self.op("Add", shape, none)
        elem = value.dtype or alive.dtype
        if elem is None or not elem.is_floating_point():
            raise GradientError(f"The type of '{value.name}' is not known, and its gradient needs it.")
        if elem == ir.DataType.BFLOAT16:  # which onnxruntime cannot expand
            zeros = self.op("Expand", self.constant(0, ir.DataType.FLOAT), shape)
            return self.op("Cast", zeros, to=elem)
        return self.op("Expand", self.constant(0, elem), shape)

    def split_into(self, lengths: Sequence[int | str | None]) -> ir.Value | None:
        """The lengths of an earlier Split whose parts have just these (symbolic) sizes, if there is one."""
        if None in lengths:
            return None
        if self._splits is None:
            self._splits = {}
            for node in self.emitter.graph:
                if node.op_type == "Split" and node.domain == "" and len(node.inputs) > 1:
                    axis = attribute(node, "axis", 0)
                    parts = [sizes(out) for out in node.outputs]
                    if node.inputs[1] is not None and all(part is not None for part in parts):
                        key = tuple(part[axis] for part in parts if part is not None)
                        self._splits.setdefault(key, node.inputs[1])
        return self._splits.get(tuple(lengths))

    def unbroadcast(self, grad: ir.Value, value: ir.Value, stretched: ir.Value | Sizes) -> ir.Value:
        """Sum ``grad``, which has the sizes of ``stretched``, over the axes ``value`` was stretched along.

        Where the inferred shapes are equal nothing is emitted; where they cannot tell, the axes are
        found when the graph runs.
        """
        small = sizes(value)
        large = sizes(stretched) if isinstance(stretched, ir.Value) else stretched
        if small is not None and small == large and None not in small:
            return grad
        if small is None or large is None:
            return self._unbroadcast_unranked(grad, value)
        lead = len(large) - len(small)
        grad = self.sum(grad, range(lead), keepdims=False)
        pairs = list(zip(small, large[lead:], strict=True))
        # A size that is known and not 1 was not stretched, nor one that is the same on both sides.
        if all(isinstance(a, int) or (a == b and a is not None) for a, b in pairs):
            return self.sum(grad, [i for i, (a, b) in enumerate(pairs) if a == 1 and b != 1], keepdims=True)
        axes = self.op("NonZero", self.op("Equal", self.op("Shape", value), self.constant(1)))
        # The sum over an axis that was 1 on both sides changes nothing.
        axes = self.op("Reshape", axes, self.constant([-1]))
        return self.op("ReduceSum", grad, axes, keepdims=1, noop_with_empty_axes=1)

    def _unbroadcast_unranked(self, grad: ir.Value, value: ir.Value) -> ir.Value:
        """Everything is found when the graph runs, also how many axes there are."""
        shape = self.op("Shape", value)
        one = self.constant([1])
        lead = self.op("Sub", self.op("Shape", self.op("Shape", grad)), self.op("Shape", shape))
        stretched = self.op("Equal", self.op("Concat", self.op("Expand", one, lead), shape, axis=0), one)
        axes = self.op("Reshape", self.op("NonZero", stretched), self.constant([-1]))
        summed = self.op("ReduceSum", grad, axes, keepdims=1, noop_with_empty_axes=1)
        return self.op("Reshape", summed, shape, allowzero=1)

    def reshape_like(self, grad: ir.Value, value: ir.Value) -> ir.Value:
        """``grad`` in the shape of ``value``: by a constant where at most one size is not known."""
        dims = sizes(value)
        if dims is not None and 0 not in dims:
            unknown = [i for i, dim in enumerate(dims) if not isinstance(dim, int)]
            if len(unknown) <= 1:
                target = [-1 if i in unknown else dim for i, dim in enumerate(dims)]
                return self.op("Reshape", grad, self.constant(target))
        return self.op("Reshape", grad, self.op("Shape", value), allowzero=1)


Sizes = tuple[int | str | None, ...]


def sizes(value: ir.Value) -> Sizes | None:
    """The sizes of a value: a number, a symbol, or None each; None if the rank is not known."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of an attribute, or its default."""
    attr = node.attributes.get(name)
    return default if attr is None else attr.value


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """The integers of a constant input, or None where they are not known before the graph runs."""
    tensor = _constant_tensor(value)
    return None if tensor is None else [int(item) for item in tensor.numpy().ravel()]


def constant_array(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """A constant input, or None where it is not known before the graph runs."""
    tensor = _constant_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def constant_number(value: ir.Value | None) -> float | None:
    """The number in a constant scalar input, or None where it is not known before the graph runs."""
    tensor = _constant_tensor(value)
    return None if tensor is None or tensor.size != 1 else float(tensor.numpy().ravel()[0])


def _constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    # An initializer that is a graph input too is only a default: callers may pass something else.
    if value is None or value.is_graph_input():
        return None
    return ir.convenience.get_const_tensor(value)
