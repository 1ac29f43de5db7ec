"""What casts keep."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import attribute

# Bits of a number's digits, and of its exponent.
_BITS = {
    ir.DataType.BFLOAT16: (8, 8), ir.DataType.FLOAT16: (11, 5), ir.DataType.FLOAT: (24, 8),
    ir.DataType.DOUBLE: (53, 11),
}  # fmt: skip
# What weights may be cast to, and stay weights.
FLOATS = frozenset(_BITS)


def holds(one: int | None, other: int | None) -> bool:
    """Whether a float dtype has all numbers of another one."""
    if one not in FLOATS or other not in FLOATS:
        return False
    return all(a >= b for a, b in zip(_BITS[ir.DataType(one)], _BITS[ir.DataType(other)], strict=True))


def is_one_cast(first: int | None, between: int | None, last: int | None) -> bool:
    """Whether a cast by way of ``between`` is the cast without it: digits that ends have are not lost."""
    return holds(between, first) or holds(between, last)


def keeps_number(cast: ir.Node) -> bool:
    """Whether the numbers of experts stay what they are: no bool, no rounding, no narrow integers."""
    given = None if cast.inputs[0] is None else cast.inputs[0].dtype
    to = attribute(cast, "to", 0)
    return to in (ir.DataType.INT32, ir.DataType.INT64) and given is not None and given.is_integer()
