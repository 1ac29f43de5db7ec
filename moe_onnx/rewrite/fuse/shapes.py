"""What is known of sizes: arithmetic of shapes by exporters, and which values have equally many rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from moe_onnx.rewrite.fuse.casts import FLOATS
from moe_onnx.rewrite.fuse.graph import attribute, fixed, ints, is_op, producer, rank, reads

_MATH: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a // b,
}
_DEEP = 60
_LONG = 1024  # elements


def dims(value: ir.Value | None) -> list[int | str | None] | None:
    """The sizes of a value: numbers, names, None where unknown; None without a rank."""
    if value is None:
        return None
    shape = value.shape
    if shape is None:
        const = value.const_value
        return None if const is None else [d if isinstance(d, int) else None for d in const.shape]
    return [d if isinstance(d, int) else d.value for d in shape]


def folded(value: ir.Value | None) -> list[int | None] | None:
    """The integers of a vector or number made of constants and shapes; None: not known."""
    return _folded(value, {}, 0)


Known = dict[ir.Value, list[int | None] | None]


def _folded(value: ir.Value | None, known: Known, depth: int) -> list[int | None] | None:
    """Each value once: what is read twice at every step would be read without end."""
    if value is None:
        return None
    if value not in known:
        found = _fold(value, known, depth)
        if found is not None and len(found) > _LONG:
            found = None
        # What does not fit into int64 is something else as it runs.
        known[value] = found and [None if n is None or abs(n) >= 2**63 else n for n in found]
    return known[value]


def _fold(value: ir.Value, known: Known, depth: int) -> list[int | None] | None:
    found = ints(value)
    if found is not None:
        return list(found)
    node = value.producer()
    if node is None or depth > _DEEP or not is_op(
        node, "Shape", "Gather", "Slice", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Cast", "Identity",
        "Equal", "Where", "ConstantOfShape", *_MATH,
    ):  # fmt: skip
        return None
    if node.op_type == "Shape":
        sizes = dims(node.inputs[0])
        if sizes is None:
            return None
        start, end = attribute(node, "start", 0), attribute(node, "end", None)
        return [d if isinstance(d, int) else None for d in sizes][start:end]
    flat = node.op_type in ("Unsqueeze", "Squeeze", "Reshape", "Cast", "Identity")
    if not flat and any((rank(one) or 0) > 1 for one in node.inputs):
        return None  # of a matrix, a list of numbers says too little
    if node.op_type == "Concat":
        parts = [_folded(one, known, depth + 1) for one in node.inputs]
        return None if any(part is None for part in parts) else [n for part in parts for n in part or ()]
    if node.op_type == "ConstantOfShape":
        many, fill = _folded(node.inputs[0], known, depth + 1), attribute(node, "value", None)
        if many is None or len(many) != 1 or many[0] is None or many[0] > 16 or fill is None:
            return None
        return [int(fill.numpy().reshape(-1)[0])] * many[0]
    given = [_folded(one, known, depth + 1) for one in node.inputs]
    first = given[0]
    if first is None:
        return None
    if node.op_type == "Cast" and attribute(node, "to", 0) not in (ir.DataType.INT32, ir.DataType.INT64):
        return first if set(first) <= {0, 1} else None  # a bool keeps no number, a float rounds otherwise
    if flat:
        return first
    if node.op_type == "Gather":
        at = given[1]
        if at is None or any(i is None or not -len(first) <= i < len(first) for i in at):
            return None
        return [first[i] for i in at if i is not None]
    if node.op_type == "Slice":
        start, end = given[1:3] if len(given) > 2 else (None, None)
        if len(node.inputs) > 4 or start is None or end is None or None in (*start, *end):
            return None
        return first[start[0] : end[0]]
    if node.op_type == "Where":
        parts = [_wide(part, max(len(p or ()) for p in given)) for part in given]
        if any(part is None for part in parts):
            return None
        return [(None if c is None else a if c else b) for c, a, b in zip(*parts, strict=True)]
    second = given[1]
    if second is None:
        return None
    length = max(len(first), len(second))
    left, right = _wide(first, length), _wide(second, length)
    if left is None or right is None:
        return None
    if node.op_type == "Equal":
        return [None if a is None or b is None else int(a == b) for a, b in zip(left, right, strict=True)]
    if node.op_type == "Div" and any(n is not None and n < low for n, low in _division(left, right)):
        return None
    of = _MATH[node.op_type]
    return [None if a is None or b is None else of(a, b) for a, b in zip(left, right, strict=True)]


def _division(left: list[int | None], right: list[int | None]) -> list[tuple[int | None, int]]:
    """Operands and their least values: below zero ONNX truncates, and Python does not."""
    return [*((n, 0) for n in left), *((n, 1) for n in right)]


def _wide(part: list[int | None] | None, length: int) -> list[int | None] | None:
    if part is None or len(part) not in (1, length):
        return None
    return part * length if len(part) == 1 else part


def number(value: ir.Value | None) -> int | None:
    """The one integer of a value."""
    found = folded(value)
    return found[0] if found is not None and len(found) == 1 else None


def wanted_shape(node: ir.Node) -> list[int | None] | None:
    """What shape a Reshape or Expand makes, as far as is known."""
    asked, made = folded(reads(node, 1)), dims(node.outputs[0])
    if asked is None:
        return None if made is None else [d if isinstance(d, int) else None for d in made]
    if made is None or len(made) != len(asked) or node.op_type != "Reshape":
        return asked
    return [d if isinstance(d, int) and a is None else a for a, d in zip(asked, made, strict=True)]


def is_filled(value: ir.Value | None, fill: float) -> bool:
    """Whether every element of a value is known to be one number."""
    for _ in range(_DEEP):
        node = producer(value, "Expand", "ConstantOfShape", "Identity", "Cast", "Constant", "Reshape")
        if node is None:
            break
        if node.op_type == "ConstantOfShape":
            tensor = attribute(node, "value", None)
            return (0.0 if tensor is None else float(tensor.numpy().reshape(-1)[0])) == fill
        if node.op_type == "Constant":
            break
        if node.op_type == "Cast" and math.isinf(fill) and attribute(node, "to", 0) not in FLOATS:
            return False
        value = node.inputs[0]
    if value is None:
        return False
    tensor = fixed(value)
    node = producer(value, "Constant")
    if tensor is None and node is not None:
        attr = node.attributes.get("value")
        tensor = None if attr is None or attr.is_ref() else attr.as_tensor()
        if tensor is None:
            one = attribute(node, "value_float", attribute(node, "value_int", None))
            return one is not None and float(one) == fill
    if tensor is None or tensor.size > 1024 or tensor.size == 0:
        return False
    return bool((tensor.numpy().astype("float64") == fill).all())


def asked_dims(shape: ir.Value | None, made: ir.Value) -> list[int | str | None]:
    """The sizes that an Expand asks for, with names where they are those of another value."""
    numbers = folded(shape)
    node = producer(shape, "Shape")
    named = dims(node.inputs[0]) if node is not None else None
    if node is not None and named is not None:
        named = named[attribute(node, "start", 0) : attribute(node, "end", None)]
    if numbers is None:
        return named if named is not None else [None] * (rank(made) or 0)
    return [d if n is None else n for n, d in zip(numbers, named or [None] * len(numbers), strict=True)]
