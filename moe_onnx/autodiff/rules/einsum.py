"""The rule of Einsum."""

from __future__ import annotations

import string
from collections import Counter

import onnx_ir as ir

from moe_onnx.autodiff.gradients import Gradients, attribute, sizes
from moe_onnx.autodiff.registry import register_gradient
from moe_onnx.errors import GradientError

Grads = list[ir.Value | None]


@register_gradient("Einsum", since=12)
def einsum(g: Gradients, node: ir.Node, d: ir.Value) -> Grads:
    """The gradient of an operand is an Einsum of the output's with all other operands.

    Axes that only this operand has are repeated, those along which it was broadcast are summed.
    """
    equation = attribute(node, "equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    values = [value for value in node.inputs if value is not None]
    operands, output = _letters(g, values, equation.replace(" ", ""))
    for operand in (*operands, output):
        if len(set(operand)) < len(operand):
            raise GradientError(
                f"equation '{equation}' takes a diagonal ('{operand}' holds a letter twice), which has no "
                "gradient rule. Take it by GatherND or multiply by a mask first."
            )
    return [
        _operand(g, values, operands, output, i, d) if g.needs(value) else None
        for i, value in enumerate(values)
    ]


def _operand(
    g: Gradients, values: list[ir.Value], operands: list[str], output: str, i: int, d: ir.Value
) -> ir.Value:
    others = [k for k in range(len(values)) if k != i]
    there = set(output).union(*(operands[k] for k in others))
    letters = "".join(letter for letter in operands[i] if letter in there)
    terms = ",".join([output, *(operands[k] for k in others)])
    inputs = [d, *(values[k] for k in others)]
    grad = d if not others and letters == output else g.op("Einsum", *inputs, equation=f"{terms}->{letters}")
    alone = [axis for axis, letter in enumerate(operands[i]) if letter not in there]
    if alone:
        grad = g.op("Unsqueeze", grad, g.constant(alone))
    # A size of 1 may have been stretched to that of another operand, or that of others to ours.
    full = [_size(values, operands, letter, skip=None) for letter in operands[i]]
    own = sizes(values[i])
    assert own is not None
    large = tuple(1 if axis in alone else size for axis, size in enumerate(full))
    known = all(a == b and a is not None for a, b in zip(own, full, strict=True))
    if not known:
        grad = g.unbroadcast(grad, values[i], large)
    seen = [
        _size(values, operands, letter, skip=i) if letter not in output else None for letter in operands[i]
    ]
    certain = all(
        letter in output or (size is not None and size == mine and letter in there)
        for letter, size, mine in zip(operands[i], seen, own, strict=True)
    )
    if not (known and certain and not alone):
        grad = g.op("Expand", grad, g.shape(values[i]))
    return grad


def _size(values: list[ir.Value], operands: list[str], letter: str, skip: int | None) -> int | str | None:
    """How long the axis of a letter is, where all who have it agree."""
    found: set[int | str | None] = set()
    for k, (value, operand) in enumerate(zip(values, operands, strict=True)):
        dims = sizes(value)
        if letter in operand and k != skip and dims is not None:
            found.add(dims[operand.index(letter)])
    found = {size for size in found if size != 1} or found
    return next(iter(found)) if len(found) == 1 else None


def _letters(g: Gradients, values: list[ir.Value], equation: str) -> tuple[list[str], str]:
    """The letters of every operand and of the output, with letters in the place of "..."."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    lengths = [g.rank(v) - len(t.replace("...", "")) for t, v in zip(terms, values, strict=True)]
    longest = max([0, *(n for t, n in zip(terms, lengths, strict=True) if "..." in t)])
    dots = "".join(unused[:longest])
    operands = [
        term.replace("...", dots[longest - length :] if length else "")
        for term, length in zip(terms, lengths, strict=True)
    ]
    if arrow:
        return operands, right.replace("...", dots)
    counts = Counter("".join(terms).replace(".", ""))
    return operands, dots + "".join(sorted(letter for letter, count in counts.items() if count == 1))
