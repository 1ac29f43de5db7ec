"""Masks of expert ids, and weights by expert that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from moe_onnx.rewrite.fuse.divisors import divides
from moe_onnx.rewrite.fuse.graph import (
    NotThis,
    attribute,
    fixed,
    ints,
    is_op,
    places,
    rank,
    reads,
    size,
    terms,
)
from moe_onnx.rewrite.fuse.meaning import Expert, Meaning, Source
from moe_onnx.rewrite.fuse.reading_axes import dense
from moe_onnx.rewrite.fuse.shapes import dims, folded, is_filled, number
from moe_onnx.rewrite.fuse.views import scalar_of, view

if TYPE_CHECKING:
    from moe_onnx.rewrite.fuse.reading import Reader


def _equal(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """``ids == 3``, ``ids[..., None] == arange(E)``, ``ids == turn``."""
    ids = reader.meaning(node.inputs[0], "ids")
    other = node.inputs[1]
    if ids is None:
        ids, other = reader.meaning(node.inputs[1], "ids"), node.inputs[0]
    if ids is None or other is None:
        return None
    if (turn := reader.meaning(other, "turn")) is not None and set(turn.axes) <= {"1"}:
        return replace(ids, what="hot", expert=turn.of) if turn.choice == ids.choice else None
    if reader.read(other) is not None:
        return None
    known = ints(other)
    if known is not None and len(known) == 1 and (rank(other) or 0) <= len(ids.axes):
        if known[0] < 0:
            raise NotThis(node, f"compares them with {known[0]}, which is no expert")
        return replace(ids, what="hot", expert=known[0])
    if known is not None and known == list(range(len(known))):
        sizes = dims(other) or [len(known)]
        at = next(i for i, many in enumerate(sizes) if many == len(known)) - len(sizes)
        if sizes.count(1) != len(sizes) - 1 or len(sizes) > len(ids.axes) or ids.axes[at] != "1":
            raise NotThis(node, "compares them with numbers that do not stand along an axis of their own")
        if ids.choice.experts is None or len(known) < ids.choice.experts:
            # No map of all experts: what chose another one is lost.
            raise NotThis(node, f"compares them with {len(known)} numbers, not with all {_experts(ids)}")
        axes = list(ids.axes)
        axes[at] = "E"
        return replace(ids, what="hot", axes=tuple(axes))
    count = scalar_of(other)
    if count is not None and (rank(other) == 0 or size(other, 0) == 1) and known is None:
        return replace(ids, what="hot", expert=count)
    raise NotThis(node, f"compares them with '{other.name}', which is no expert, and not all of them")


def _one_hot(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    ids, depth = reader.meaning(node.inputs[0], "ids"), number(node.inputs[1])
    if ids is None:
        return None
    if not is_zero_one(node.inputs[2]):
        raise NotThis(node, "has other values than 0 and 1")
    if depth is None or ids.choice.experts is None or depth < ids.choice.experts:
        raise NotThis(node, f"is of {depth or 'an unknown number of'} experts, not of all {_experts(ids)}")
    axes = list(ids.axes)
    axes.insert(attribute(node, "axis", -1) % (len(axes) + 1), "E")
    return replace(ids, what="hot", axes=tuple(axes))


def _experts(ids: Meaning) -> str:
    return f"{ids.choice.experts or 'an unknown number of'} experts"


def is_zero_one(value: ir.Value | None) -> bool:
    """Whether the values of a OneHot are 0 and 1."""
    found = ints(value)
    if found is not None:
        return found == [0, 1]
    tensor = fixed(value)
    return tensor is not None and tensor.size == 2 and tensor.numpy().tolist() in ([0, 1], [False, True])


def _reduced(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """Over the choices of a token: of a mask, whether any is the expert; of weights, that of the expert."""
    one = reader.read(node.inputs[0])
    if not isinstance(one, Meaning) or one.what not in ("hot", "gate"):
        return None
    axes = ints(reads(node, 1))
    if (
        reads(node, 1) is None
        and one.what == "hot"
        and one.expert is not None
        and node.op_type == "ReduceSum"
    ):
        return replace(
            one, what="count", axes=("1",) * (len(one.axes) if attribute(node, "keepdims", 1) else 0)
        )
    if axes is None or (one.what == "gate" and node.op_type == "ReduceMax"):
        return None
    gone = places(axes, len(one.axes))
    if gone is None:
        return None
    letters = {one.axes[axis] for axis in gone}
    if letters == {"T", "K"} and one.what == "hot" and "E" in one.axes and not attribute(node, "keepdims", 1):
        return one.turned(("E",))  # whether anybody has chosen it
    if not letters <= {"K", "1"} or "K" not in letters:
        raise NotThis(node, "reduces another axis than that of a token's choices")
    keep = ["1"] if attribute(node, "keepdims", 1) else []
    kept = tuple(x for i, letter in enumerate(one.axes) for x in (keep if i in gone else [letter]))
    return one.turned(kept)


def _greater(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    hot = reader.meaning(node.inputs[0], "hot")
    if hot is not None and not is_filled(node.inputs[1], 0):
        raise NotThis(node, "compares it with something else than 0")
    return hot


def _multiplied(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """A mask times weights; weights by expert times or over what keeps zeros; ``token * K`` of an index."""
    left, right = (reader.read(one) for one in node.inputs[:2])
    if node.op_type == "Div" and isinstance(left, Meaning) and left.what == "at":
        by_k = left.coords == ("P",) and number(node.inputs[1]) == left.choice.top_k
        return replace(left, coords=("T",)) if by_k else None
    if node.op_type == "Mul" and isinstance(left, Meaning) and left.what == "at":
        return _scaled(left, node.inputs[1])
    if node.op_type == "Mul" and isinstance(right, Meaning) and right.what == "at":
        return _scaled(right, node.inputs[0])
    for one, other, at in ((left, node.inputs[1], 0), (right, node.inputs[0], 1)):
        if not isinstance(one, Meaning) or (node.op_type == "Div" and at):
            continue
        if one.what == "hot" and node.op_type == "Mul" and other is not None:
            return _weighted(one, other, value)
        if one.what == "gate" and one.axes == ("T", "E"):
            sizes = dims(other)
            if node.op_type == "Div" and not divides(reader, other, one):
                return None
            if sizes is not None and len(sizes) <= 2:
                return dense(one, value)
    return None


def _scaled(at: Meaning, factor: ir.Value | None) -> Meaning | None:
    """``token * K``, the first part of an index of pairs."""
    times = number(factor) if at.coords == ("T",) else None
    if times is not None and times in (at.choice.top_k, at.choice.experts):
        return replace(at, coords=(f"T*{times}",))
    return None


def _weighted(hot: Meaning, other: ir.Value, value: ir.Value) -> Meaning | None:
    if hot.axes == ("T", "E") and (dims(other) or [1])[0] != 1 and rank(other) == 2:
        return replace(hot, what="gate", source=Source("dense", value))
    weights = pair_weights(other, hot)
    return None if weights is None else replace(hot, what="gate", source=Source("pairs", weights))


def pair_weights(other: ir.Value, hot: Meaning) -> ir.Value | None:
    """``w`` ``[T, K]`` of a factor that stands beside a mask, axis by axis."""
    found = view(other)
    if found is None or len(found.axes) > len(hot.axes):
        return None
    axes = ("1",) * (len(hot.axes) - len(found.axes)) + found.axes
    wanted = {"T": 0, "K": 1}
    if (
        rank(found.base) != 2
        or size(found.base, 1) not in (hot.choice.top_k, None)
        or size(found.base, 0) == 1
    ):
        return None
    if any(wanted.get(letter, "1") != axis for letter, axis in zip(hot.axes, axes, strict=True)):
        return None
    return found.base if {"T", "K"} <= set(hot.axes) else None


def _where(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    hot = reader.meaning(node.inputs[0], "hot")
    if hot is None or hot.axes != ("T", "E") or rank(value) != 2:
        return None
    if is_filled(node.inputs[2], 0):
        return replace(hot, what="gate", source=Source("dense", value))
    if not is_filled(node.inputs[2], float("-inf")):
        raise NotThis(node, "puts something else than zeros, or -inf, where an expert is not chosen")
    return replace(hot, what="masked")


def _scattered(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """Weights, or a mark, put where the experts of each token are."""
    ids = reader.meaning(node.inputs[1], "ids")
    if ids is None or ids.axes != ("T", "K") or not is_op(node, "ScatterElements"):
        return None
    kind = attribute(node, "reduction", "none")
    if attribute(node, "axis", 0) not in (1, -1):
        raise NotThis(node, "puts along another axis than that of experts")
    if kind not in ("none", "add"):
        raise NotThis(node, f"puts by reduction={kind!r}")
    made = replace(ids, axes=("T", "E"))
    if is_filled(node.inputs[0], float("-inf")) and kind == "none":
        return replace(made, what="masked")
    if not is_filled(node.inputs[0], 0):
        raise NotThis(node, "puts into what is not known to be zeros, or -inf")
    if is_filled(node.inputs[2], 1):
        return replace(made, what="hot")
    return replace(made, what="gate", source=Source("dense", value))


def _softmax(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    masked = reader.meaning(node.inputs[0], "masked")
    if masked is None or masked.axes != ("T", "E") or attribute(node, "axis", -1) not in (1, -1):
        return None
    return dense(masked, value)


def _product(reader: Reader, node: ir.Node, value: ir.Value) -> Meaning | None:
    """``w[:, None, :] @ one_hot`` ``[T, 1, E]``, or the same by Einsum."""
    hot = reader.meaning(node.inputs[1], "hot")
    other = node.inputs[0]
    if is_op(node, "Einsum"):
        letters, out = terms(node) or ([], "")
        if len(letters) != 2:
            return None
        if hot is None:
            hot, other = reader.meaning(node.inputs[0], "hot"), node.inputs[1]
            letters.reverse()
        if hot is None or hot.axes != ("T", "K", "E") or rank(other) != 2 or len(letters[1]) != 3:
            return None
        t, k, e = list(letters[1])
        if letters[0] != f"{t}{k}" or out != f"{t}{e}" or other is None:
            return None
        return replace(hot, what="gate", axes=("T", "E"), source=Source("dense", value))
    if hot is None or hot.axes != ("T", "K", "E") or other is None:
        return None
    found = view(other)
    if found is None or found.axes != (0, "1", 1) or rank(found.base) != 2:
        return None
    return replace(hot, what="gate", axes=("T", "1", "E"), source=Source("pairs", found.base))


def expert_at(reader: Reader, index: ir.Value | None) -> Expert:
    """The expert that an index names: a number, or the turn of a Loop."""
    turn = reader.meaning(index, "turn")
    if turn is not None:
        return turn.of if set(turn.axes) <= {"1"} else None
    known = folded(index)
    if known is not None:
        return known[0] if len(known) == 1 and known[0] is not None and known[0] >= 0 else None
    return scalar_of(index)


RULES = {
    "Equal": _equal, "OneHot": _one_hot, "ReduceSum": _reduced, "ReduceMax": _reduced, "Greater": _greater,
    "Mul": _multiplied, "Div": _multiplied, "Where": _where, "ScatterElements": _scattered,
    "Softmax": _softmax, "MatMul": _product, "Einsum": _product,
}  # fmt: skip
