"""Which of the kernel's activations stands between the experts' products, in any of its spellings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from moe_onnx.rewrite.contrib_moe.dispatched import is_same_type, number
from moe_onnx.rewrite.contrib_moe.products import Linear, linear_of
from moe_onnx.rewrite.fuse.graph import NotThis, attribute, ints, is_axis, is_op, producer, reads, size
from moe_onnx.spec import DOMAIN

Tree = tuple[Any, ...]
WHOLE: Tree = ("columns", "all", 0)  # of the first product that is met
_HALVES, _TURNS = ("first", "second"), ("even", "odd")


@dataclass(frozen=True)
class Activation:
    """An activation of the kernel.

    ``halves``: the first product gives all gates, then all that they gate; the kernel wants them in turns.
    """

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    halves: bool = False


def activation_of(hidden: ir.Value, at: ir.Node) -> tuple[Activation, list[Linear]]:
    """What is made of the first product, and that; of two, that of the gates first.

    Raises:
        NotThis: If the kernel has no such activation.
    """
    found: dict[ir.Value, Linear] = {}
    tree = _tree(hidden, found, at)
    products = list(found.values())
    if len(products) > 2:
        raise NotThis(at, f"its rows are made of {len(products)} products, not of one or two")
    known = {WHOLE: "identity", ("Relu", WHOLE): "relu", ("Gelu", "tanh", WHOLE): "gelu"}
    known[_product([WHOLE, ("Sigmoid", WHOLE)])] = "silu"
    if tree in known:
        return Activation(known[tree]), products
    if tree == ("Gelu", "none", WHOLE):
        raise NotThis(at, "its activation is Gelu by Erf; the kernel's is the one by Tanh")
    kind, (gate, linear) = _swiglu(tree, at)
    if gate == linear and len(products) == 1:
        return kind, products
    if gate == linear or kind.halves:
        raise NotThis(at, f"its activation is none of the CPU kernel's: {_said(tree)}")
    return kind, [products[gate], products[linear]]


def _swiglu(tree: Tree, at: ir.Node) -> tuple[Activation, tuple[int, int]]:
    """``gate sigmoid(alpha gate) (linear + beta)``, clamped or not; of which products both are."""
    no = NotThis(at, f"its activation is none of the CPU kernel's: {_said(tree)}")
    if tree[0] != "Mul" or tree[1] != 1 or len(tree[2]) != 3:
        raise no
    for sigmoid in (one for one in tree[2] if one[0] == "Sigmoid"):
        others = [one for one in tree[2] if one is not sigmoid]
        for gate, linear in (others, others[::-1]):
            inside, alpha, beta = sigmoid[1], 1.0, 0.0
            if inside != gate and inside[0] == "Mul" and inside[2] == (gate,):
                inside, alpha = gate, inside[1]
            if inside != gate:
                continue
            if linear[0] == "Add":
                beta, linear = linear[1], linear[2]
            limit = None
            if gate[0] == "Clip" and linear[0] == "Clip":
                limit = gate[2]
                if gate[1] is not None or limit is None or linear[1:3] != (-limit, limit):
                    raise no
                if not limit >= 0:  # the kernel would end the process
                    raise NotThis(at, f"its activation is clamped to a negative limit, {limit:g}")
                gate, linear = gate[3], linear[3]
            if not gate[0] == linear[0] == "columns":
                continue
            pair, of = (gate[1], linear[1]), (gate[2], linear[2])
            if (pair in (_HALVES, _TURNS) and of[0] == of[1]) or (pair == ("all", "all") and of[0] != of[1]):
                return Activation("swiglu", alpha, beta, limit, pair == _HALVES), of
    raise no


def _said(tree: Tree) -> str:
    names = {"columns": lambda t: "xy"[t[2]] + f"[{t[1]}]", "Mul": lambda t: " * ".join(map(_said, t[2]))}
    if tree[0] in names:
        return names[tree[0]](tree)
    return f"{tree[0]}({', '.join(_said(one) if isinstance(one, tuple) else str(one) for one in tree[1:])})"


def _product(factors: list[Tree], number: float = 1.0) -> Tree:
    """Factors in one order, numbers put together."""
    flat: list[Tree] = []
    for one in factors:
        if one[0] == "Mul":
            number *= one[1]
            flat += one[2]
        else:
            flat.append(one)
    return flat[0] if number == 1 and len(flat) == 1 else ("Mul", number, tuple(sorted(flat, key=repr)))


def _tree(value: ir.Value | None, found: dict[ir.Value, Linear], at: ir.Node) -> Tree:
    if value is None:
        raise NotThis(at, "an input of its activation is missing")
    made = linear_of(value)
    if made is not None:
        found.setdefault(value, made)
        return ("columns", "all", list(found).index(value))
    node = value.producer()
    if node is not None and node.domain == DOMAIN and node.op_type == "MoeSwiGlu":
        whole = _tree(node.inputs[0], found, node)
        gate, up = (_part(half, whole, node) for half in _HALVES)
        return _product([gate, ("Sigmoid", gate), up])
    if node is None or node.domain not in ("", "ai.onnx"):
        what = "an input of the graph" if node is None else f"{node.domain}.{node.op_type}"
        raise NotThis(node or at, f"between the experts' products is {what}")
    part = _columns(value, node)
    if part is not None:
        source, name = part
        return _part(name, _tree(source, found, at), node)
    if is_op(node, "Identity") or is_same_type(node):
        return _tree(node.inputs[0], found, node)
    if is_op(node, "Relu", "Sigmoid"):
        return (node.op_type, _tree(node.inputs[0], found, node))
    if is_op(node, "Gelu"):
        return ("Gelu", attribute(node, "approximate", "none"), _tree(node.inputs[0], found, node))
    if is_op(node, "Swish"):
        inner = _tree(node.inputs[0], found, node)
        return _product([inner, ("Sigmoid", _product([inner], attribute(node, "alpha", 1.0)))])
    numbers = [number(one) for one in node.inputs]
    if is_op(node, "Mul"):
        factors = [_tree(v, found, node) for v, n in zip(node.inputs, numbers, strict=True) if n is None]
        total = 1.0
        for one in numbers:
            total *= 1.0 if one is None else one
        return _product(factors, total)
    if is_op(node, "Add") and (numbers[0] is None) != (numbers[1] is None):
        which = 0 if numbers[0] is None else 1
        return ("Add", numbers[1 - which], _tree(node.inputs[which], found, node))
    if is_op(node, "Clip", "Min", "Max") and numbers[0] is None:
        return _clip(node, numbers, _tree(node.inputs[0], found, node))
    raise NotThis(node, f"{node.op_type} is in no activation of the CPU kernel")


def _part(name: str, whole: Tree, node: ir.Node) -> Tree:
    """Some columns of a product, which ``node`` takes."""
    if whole[:2] != WHOLE[:2]:
        raise NotThis(node, "takes columns of what is no product")
    return ("columns", name, whole[2])


def _clip(node: ir.Node, numbers: list[float | None], inner: Tree) -> Tree:
    low = high = None
    if is_op(node, "Clip"):
        bounds = [*numbers[1:], None, None][:2]
        given = [value is not None for value in [*node.inputs[1:], None, None][:2]]
        if any(there and bound is None for there, bound in zip(given, bounds, strict=True)):
            raise NotThis(node, "is clipped by what is no number")
        low, high = bounds
    elif len(numbers) == 2 and numbers[1] is not None:
        low, high = (None, numbers[1]) if is_op(node, "Min") else (numbers[1], None)
    else:
        raise NotThis(node, f"{node.op_type} of more than a value and a number")
    if inner[0] == "Clip" and (low is None or inner[1] is None) and (high is None or inner[2] is None):
        low, high, inner = inner[1] if low is None else low, inner[2] if high is None else high, inner[3]
    return ("Clip", low, high, inner)


def _columns(value: ir.Value, node: ir.Node) -> tuple[ir.Value | None, str] | None:
    """Half of the columns of a matrix: the first or second ones, or every other one."""
    source = reads(node, 0)
    if is_op(node, "Split") and len(node.outputs) == 2 and is_axis(attribute(node, "axis", 0), 1, 2):
        lengths = ints(reads(node, 1))
        if len(node.inputs) < 2 or node.inputs[1] is None or (lengths and lengths[0] == lengths[1]):
            return source, _HALVES[value is node.outputs[1]]
        return None
    if is_op(node, "Slice"):
        starts, ends, axes = (ints(reads(node, i)) for i in (1, 2, 3))
        steps, width = ints(reads(node, 4)) or [1], size(source, 1)
        if width is None and (made := linear_of(source)) is not None:
            width = made.sizes[0]
        if not starts or not ends or not axes or width is None or width % 2:
            return None
        if len(axes) != 1 or not is_axis(axes[0], 1, 2):
            return None
        start, end, half = starts[0], min(ends[0], width), width // 2
        names = {
            (0, half, 1): "first",
            (half, width, 1): "second",
            (0, width, 2): "even",
            (1, width, 2): "odd",
        }
        name = names.get((start, end, steps[0]))
        return None if name is None else (source, name)
    pairs = producer(source, "Reshape") if is_op(node, "Gather") else None
    shape = ints(pairs.inputs[1]) if pairs is not None else None
    if pairs is not None and shape is not None and len(shape) == 3 and shape[2] == 2:
        at, width = ints(node.inputs[1]), size(pairs.inputs[0], 1)
        if at in ([0], [1]) and attribute(node, "axis", 0) == 2 and width == 2 * shape[1]:
            return pairs.inputs[0], _TURNS[at[0]]
    return None
