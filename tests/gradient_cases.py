"""The cases of every gradient rule, away from kinks: those have tests of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gradient_tools import Array, Case
from oracles import padded_slots, random_routing

from moe_onnx.spec import DOMAIN

_RNG = np.random.default_rng(20240521)

BROADCASTS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((3,), (2, 3)),
    ((2, 1, 3), (4, 1)),
    ((1, 1), (2, 3)),
    ((2, 3), ()),
    ((), (2, 3)),
    ((), ()),
    ((1,), (1, 1)),
    ((2, 1, 1), (1, 3, 1)),
    ((0, 3), (1, 3)),
    ((1, 3), (0, 1)),
)


def normal(*shape: int) -> Array:
    return np.asarray(_RNG.standard_normal(shape))


def positive(*shape: int) -> Array:
    return np.asarray(_RNG.uniform(0.5, 2.0, shape))


def apart(*shape: int) -> Array:
    """Numbers that differ from each other and from 0 by more than finite differences move them."""
    size = int(np.prod(shape))
    numbers = (np.arange(size) - size // 2 + 0.5) * 0.3
    return np.asarray(_RNG.permutation(numbers).reshape(shape))


def ints(values: Any, dtype: Any = np.int64) -> Array:
    return np.asarray(values, dtype)


def case(op: str, *inputs: Array | None, constant: Any = (), **more: Any) -> Case:
    fields = ("wrt", "outputs", "used", "domain", "opset", "note", "same", "known")
    named = {k: more.pop(k) for k in fields if k in more}
    return Case(op, inputs, more, (constant,) if isinstance(constant, int) else tuple(constant), **named)


def elementwise() -> Iterator[Case]:
    for op in ("Identity", "Neg", "Exp", "Sin", "Cos", "Sigmoid", "Tanh", "Erf", "Softplus"):
        for shape in ((2, 3), (), (0, 3)):
            yield case(op, normal(*shape))
    for op in ("Sqrt", "Reciprocal", "Log"):
        for shape in ((2, 3), (), (0, 3)):
            yield case(op, positive(*shape))
    for op in ("Abs", "Relu", "LeakyRelu", "Elu"):
        for shape in ((2, 3), (), (0, 3)):
            yield case(op, apart(*shape))
    yield case("LeakyRelu", apart(2, 3), alpha=0.25)
    yield case("LeakyRelu", apart(2, 3), alpha=-0.5)
    yield case("Elu", apart(2, 3), alpha=0.5)
    yield case("Elu", apart(2, 3), alpha=-0.5)
    for approximate in ("none", "tanh"):
        yield case("Gelu", normal(2, 3), approximate=approximate)
    yield case("Cast", normal(2, 3), to=11)
    yield case("CastLike", normal(2, 3), normal(), wrt=(0,))
    yield case("Dropout", normal(2, 3))
    yield case("Dropout", normal(2, 3), np.asarray(0.5), constant=1, wrt=(0,))
    yield case(
        "Dropout", normal(2, 3), np.asarray(0.0), np.asarray(True), constant=(1, 2), wrt=(0,), outputs=2
    )
    yield case("Dropout", normal(2, 3), np.asarray(0.5), np.asarray(False), constant=(1, 2), wrt=(0,))
    for a, b in BROADCASTS:
        for op in ("Add", "Sub", "Mul"):
            yield case(op, normal(*a), normal(*b))
        yield case("Div", normal(*a), positive(*b))
        yield case("Pow", positive(*a), normal(*b))
        for op in ("Max", "Min"):
            x = apart(*a)
            yield case(op, x, np.asarray(_RNG.permutation(apart(*b).ravel()).reshape(b) + 0.1))
        yield case("Where", np.asarray(_RNG.random(a) < 0.5), normal(*b), normal(*a))
        yield case("Where", np.asarray(_RNG.random(b) < 0.5), normal(), normal(*a))
    for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max"):
        x = positive(2, 3)
        yield case(op, x, x, same=((1, 0),), note="one value twice")
    yield case("Pow", normal(2, 3), ints(2), note="integer exponent")
    yield case("Pow", normal(2, 3), ints([1, 2, 3]), note="integer exponents")
    yield case("Pow", normal(2, 3), np.asarray(3.0), wrt=(0,), note="negative bases")
    yield case("Sum", normal(2, 3))
    yield case("Sum", normal(2, 3), normal(3), normal(), normal(2, 1))
    yield case("Max", apart(2, 3))
    yield case("Max", apart(2, 3), apart(3) + 0.1, apart(2, 1) + 0.2)
    yield case("Where", ints([[True], [False]], bool), normal(3), normal(2, 1))
    x = apart(3, 4)
    for low, high in ((-1.0, 1.0), (None, 1.0), (-1.0, None), (None, None)):
        bounds = [None if b is None else np.asarray(b) for b in (low, high)]
        while bounds and bounds[-1] is None:
            bounds.pop()
        yield case("Clip", x, *bounds, wrt=(0,), note=f"{low}..{high}")
        yield case("Clip", x, *bounds, wrt=(0,), constant=range(1, 1 + len(bounds)), note=f"{low}..{high}")


def reductions() -> Iterator[Case]:
    ops = ("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceLogSumExp", "ReduceL1", "ReduceL2")
    for op in (*ops, "ReduceMax", "ReduceMin", "ReduceProd"):
        for keepdims in (0, 1):
            for axes in ([0], [-1], [0, 2], [-1, -3], [0, 1, 2]):
                yield case(op, apart(2, 3, 2), ints(axes), constant=1, keepdims=keepdims)
            yield case(op, apart(2, 3), keepdims=keepdims)
            yield case(op, apart(2, 3), None, keepdims=keepdims, noop_with_empty_axes=0)
            yield case(op, apart(2, 1), ints([1]), constant=1, keepdims=keepdims)
            yield case(op, apart(2, 3), ints([]), constant=1, keepdims=keepdims)
            yield case(op, apart(2, 3), ints([]), constant=1, keepdims=keepdims, noop_with_empty_axes=1)
            yield case(op, apart(2, 3), keepdims=keepdims, noop_with_empty_axes=1)
            yield case(op, apart(0, 3), ints([1]), constant=1, keepdims=keepdims)
            yield case(op, apart(0, 3), ints([-1]), constant=1, keepdims=keepdims)
        yield case(op, apart(2, 3), ints([1]), keepdims=1, note="axes computed")
        yield case(op, apart(2, 3), ints([], np.int64), keepdims=1, note="no axes, computed")
        yield case(op, apart(2, 3, 2), ints([-1, 0]), keepdims=0, note="axes computed", known=(1,))
    yield case("ReduceSum", apart(2, 3), ints([]), keepdims=0, note="no axes, computed", known=(1,))
    more = {"keepdims": 0, "noop_with_empty_axes": 1, "known": (1,)}
    yield case("ReduceSum", apart(2, 3), ints([]), note="no axes, computed", **more)
    for op in (*ops, "ReduceMax", "ReduceMin", "ReduceProd"):
        yield case(op, apart())
        if op != "ReduceSum":
            yield case(op, apart(2, 3), axes=[1], keepdims=0, opset=17)
            yield case(op, apart(2, 3), axes=[-2], keepdims=1, opset=13)
            yield case(op, apart(2, 3), keepdims=0, opset=17)
    yield case("ReduceLogSum", positive(2, 3), ints([0]), constant=1, keepdims=0)
    yield case("ReduceLogSum", positive(2, 3), keepdims=1)
    for zeros in ([(0, 1)], [(0, 1), (1, 1)], [(0, 0), (0, 1)]):
        x = positive(2, 3)
        for place in zeros:
            x[place] = 0
        yield case("ReduceProd", x, ints([1]), constant=1, keepdims=0, note=f"{len(zeros)} zeros")
        yield case("ReduceProd", x, keepdims=0, note=f"{len(zeros)} zeros")
    yield case("ReduceSum", normal(2, 3), ints([0]), constant=1, keepdims=0, opset=13)
    for op in ("Softmax", "LogSoftmax"):
        for shape, axis in (((2, 3), -1), ((2, 3), 0), ((2, 3, 2), 1), ((0, 3), 1), ((3,), -1)):
            yield case(op, normal(*shape), axis=axis)
        yield case(op, normal(2, 3))
    for exclusive in (0, 1):
        for reverse in (0, 1):
            for axis in (0, -1):
                yield case("CumSum", normal(2, 3), ints(axis), exclusive=exclusive, reverse=reverse)


def normalizations() -> Iterator[Case]:
    for shape, axis in (((2, 3), -1), ((2, 3, 4), -1), ((2, 3, 4), 1), ((2, 3), 0), ((0, 3), -1)):
        part = shape[axis:]
        eps = {"epsilon": 1e-2}
        yield case("LayerNormalization", normal(*shape), normal(*part), normal(*part), axis=axis, **eps)
        yield case("LayerNormalization", normal(*shape), normal(*part), axis=axis, **eps)
        yield case("RMSNormalization", normal(*shape), normal(*part), axis=axis, opset=23, **eps)
    yield case("LayerNormalization", normal(2, 3), normal(3), None)
    yield case("LayerNormalization", normal(2, 3), normal(3), normal(3), opset=17)
    yield case("RMSNormalization", normal(2, 3), normal(1), opset=23)
    yield case("InstanceNormalization", normal(2, 3, 4), normal(3), normal(3), epsilon=1e-2)
    yield case("InstanceNormalization", normal(2, 3, 2, 2), normal(3), normal(3), epsilon=1e-2, opset=22)
    for shape in ((2, 3), (2, 3, 4), (2, 3, 2, 2)):
        running = (normal(3), normal(3), normal(3), positive(3))
        yield case("BatchNormalization", normal(*shape), *running, epsilon=1e-2)
    labels = ints([0, 2, 1, 2])
    for reduction in ("none", "sum", "mean"):
        yield case("SoftmaxCrossEntropyLoss", normal(4, 3), labels, reduction=reduction)
        yield case("SoftmaxCrossEntropyLoss", normal(4, 3), labels, reduction=reduction, ignore_index=2)
        ignored = ints([0, -100, 1, -100], np.int32)
        more: dict[str, Any] = {"reduction": reduction, "ignore_index": -100}
        yield case("SoftmaxCrossEntropyLoss", normal(4, 3), ignored, **more)
        yield case("SoftmaxCrossEntropyLoss", normal(4, 3), ignored, outputs=2, used=(0, 1), **more)
        yield case("SoftmaxCrossEntropyLoss", normal(4, 3), labels, outputs=2, used=(1,), reduction=reduction)
        where = ints([[0, 1], [2, 2]])
        yield case("SoftmaxCrossEntropyLoss", normal(2, 3, 2), where, reduction=reduction)


def matrices() -> Iterator[Case]:
    pairs: tuple[Any, ...] = (
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((2, 3), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((1, 2, 3), (5, 3, 4)),
        ((5, 2, 3), (1, 3, 4)),
        ((6, 1, 2, 3), (5, 3, 4)),
        ((5, 2, 3), (3,)),
        ((3,), (5, 3, 4)),
        ((3,), (6, 5, 3, 4)),
        ((6, 5, 2, 3), (3,)),
        ((6, 5, 2, 3), (3, 4)),
        ((1, 1), (1, 1)),
        ((1, 1, 1), (5, 1, 1)),
        ((0, 3), (3, 4)),
        ((2, 3), (3, 0)),
        ((5, 0, 3), (3, 4)),
        ((0, 2, 3), (3, 4)),
        ((2, 2, 3), (3, 0)),
        ((0, 2, 3), (1, 3, 4)),
    )
    for a, b in pairs:
        yield case("MatMul", normal(*a), normal(*b))
    for one in (0, 1):
        yield case("MatMul", normal(2, 3), normal(3, 4), wrt=(one,))
        yield case("MatMul", normal(5, 2, 3), normal(3, 4), wrt=(one,))
    x = normal(3, 3)
    yield case("MatMul", x, x, same=((1, 0),), note="one value twice")
    for ta in (0, 1):
        for tb in (0, 1):
            a, b = normal(*((3, 2) if ta else (2, 3))), normal(*((4, 3) if tb else (3, 4)))
            yield case("Gemm", a, b, transA=ta, transB=tb)
            for c in ((2, 4), (4,), (1, 4), (2, 1), (1,), ()):
                yield case("Gemm", a, b, normal(*c), transA=ta, transB=tb, alpha=0.5, beta=-0.25)
    for equation, *shapes in (
        ("ij,jk->ik", (2, 3), (3, 4)),
        ("bij,bjk->bik", (2, 2, 3), (2, 3, 4)),
        ("bhid,bhjd->bhij", (2, 1, 3, 2), (2, 1, 4, 2)),
        ("ij->ji", (2, 3)),
        ("ij->", (2, 3)),
        ("ij->i", (2, 3)),
        ("ij,ij->i", (2, 3), (2, 3)),
        ("i,j->ij", (2,), (3,)),
        (",ij->ij", (), (2, 3)),
        ("ij,kl->i", (2, 3), (2, 2)),
        ("ij,jk,kl->il", (2, 3), (3, 2), (2, 2)),
        ("ij,jk", (2, 3), (3, 4)),
        ("ba", (2, 3)),
        ("...ij,...jk", (2, 2, 3), (1, 3, 4)),
        ("...i->...", (2, 2, 3)),
        ("i...,i...->...", (2, 3), (2, 3)),
        (" i j , j k -> i k ", (0, 3), (3, 4)),
        ("ij,jk->ik", (2, 1), (3, 4)),
        ("ij,jk->ik", (2, 3), (1, 4)),
    ):
        yield case("Einsum", *(normal(*shape) for shape in shapes), equation=equation)
    x = normal(3, 3)
    yield case("Einsum", x, x, equation="ij,jk->ik", same=((1, 0),), note="one value twice")
    yield case("Gemm", normal(2, 3), normal(3, 4), normal(4))
    yield case("Gemm", normal(2, 3), normal(3, 4), None, alpha=2.0)
    yield case("Gemm", normal(2, 3), normal(3, 4), normal(4), opset=13)
    yield case("Gemm", normal(0, 3), normal(3, 4), normal(4))


def shaping() -> Iterator[Case]:
    for x, shape in (
        ((2, 3), [3, 2]),
        ((2, 3), [-1]),
        ((2, 3), [0, 3, 1]),
        ((), [1]),
        ((), [1, 1]),
        ((1,), []),
        ((0, 3), [3, 0]),
    ):
        more = {"allowzero": 1} if x == (0, 3) else {}
        yield case("Reshape", normal(*x), ints(shape, np.int64), constant=1, **more)
        yield case("Reshape", normal(*x), ints(shape, np.int64), note="shape computed", **more)
    for x, axes in (((1, 2, 1), [0]), ((1, 2, 1), [-1, 0]), ((1,), [0]), ((1, 0), [0])):
        yield case("Squeeze", normal(*x), ints(axes), constant=1)
    yield case("Squeeze", normal(1, 2, 1))
    yield case("Squeeze", normal(1, 1))
    for x, axes in (((2, 3), [0]), ((2, 3), [-1, 1]), ((), [0]), ((0,), [0])):
        yield case("Unsqueeze", normal(*x), ints(axes), constant=1)
    for axis in (0, 1, 2, -1, 3):
        yield case("Flatten", normal(2, 3, 4), axis=axis)
    yield case("Flatten", normal(0, 3, 4))
    yield case("Flatten", normal(3))
    yield case("Transpose", normal(2, 3))
    yield case("Transpose", normal(2, 3, 4), perm=[2, 0, 1])
    yield case("Transpose", normal())
    yield case("Transpose", normal(2, 0, 3), perm=[1, 2, 0])
    for x, shape in (
        ((3,), [2, 3]),
        ((2, 1), [2, 3]),
        ((2, 3), [1, 1]),
        ((), [2, 3]),
        ((2, 1), [4, 1, 3]),
        ((1, 3), [0, 3]),
        ((2, 3), [2, 3]),
    ):
        yield case("Expand", normal(*x), ints(shape), constant=1)
        yield case("Expand", normal(*x), ints(shape), note="shape computed")
    yield case("Concat", normal(2, 3), axis=0)
    yield case("Concat", normal(2, 3), normal(1, 3), axis=0)
    yield case("Concat", normal(2, 3), normal(2, 1), normal(2, 2), axis=-1)
    yield case("Concat", normal(2, 3), normal(0, 3), axis=-2)
    yield case("Concat", normal(2, 3), normal(2, 1), axis=1, wrt=(1,))
    x = normal(2, 3)
    yield case("Concat", x, x, axis=1, same=((1, 0),), note="one value twice")
    for used in ((0,), (1,), (0, 1)):
        yield case("Split", normal(2, 5), axis=1, num_outputs=2, outputs=2, used=used)
        for constant in ((), (1,)):
            more = {"constant": constant, "outputs": 2, "used": used}
            yield case("Split", normal(2, 5), ints([2, 3]), axis=-1, note=f"lengths {constant}", **more)
            yield case("Split", normal(5, 2), ints([0, 5]), note=f"lengths {constant}", **more)
    yield case("Split", normal(4, 2), num_outputs=1)
    big, least = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    for starts, ends, axes in (
        ([1], [3], [0]),
        ([-2], [big], [-1]),
        ([0, 1], [2, -1], [0, 1]),
        ([0, 1], [2, -1], None),
        ([least], [2], [1]),
        ([-9], [9], [0]),
        ([3], [1], [0]),
        ([9], [12], [1]),
    ):
        rest = [ints(starts), ints(ends), *([] if axes is None else [ints(axes)])]
        whole = [*rest, *([None] if axes is None else []), ints([1] * len(starts))]
        yield case("Slice", normal(4, 5), *rest, constant=range(1, 1 + len(rest)))
        fixed = [i + 1 for i in range(len(rest)) if i != 1]
        yield case("Slice", normal(4, 5), *rest, constant=fixed, note="ends computed")
        fixed = [i + 1 for i, v in enumerate(whole) if v is not None]
        yield case("Slice", normal(4, 5), *whole, constant=fixed)
    for starts, ends, axes, steps in (
        ([0], [9], [1], [2]),
        ([1], [big], [1], [2]),
        ([-4], [-1], [1], [2]),
        ([-1], [least], [1], [-1]),
        ([3], [0], [1], [-1]),
        ([9], [least], [-1], [-2]),
        ([-2], [-9], [0], [-2]),
        ([least], [big], [0], [3]),
        ([4, 0], [0, 3], [-1, 0], [-2, 2]),
        ([1], [1], [1], [2]),
        ([1], [3], [1], [-2]),
        ([-9], [least], [1], [-1]),
        ([0], [9], [1], [big]),
    ):
        rest = [ints(starts), ints(ends), ints(axes), ints(steps)]
        note = f"{starts}:{ends}:{steps} of {axes}".replace(" ", "")
        yield case("Slice", normal(4, 5), *rest, constant=(1, 2, 3, 4), note=note)
        if len(axes) == 2 or steps == [3]:
            yield case("Slice", normal(4, 5), *rest, note=f"{note} computed")
            yield case("Slice", normal(4, 5), *rest, constant=(3, 4), note=f"{note} starts computed")
    yield case("Slice", normal(4, 5), ints([1, 0]), ints([3, 4]), note="no axes, computed")
    yield case("Slice", normal(0, 5), ints([4]), ints([0]), ints([1]), ints([-2]), constant=(1, 2, 3, 4))
    yield case("Slice", normal(0, 5), ints([1]), ints([3]), ints([1]), constant=(1, 2, 3))
    yield case("Pad", normal(2, 3), ints([1, 0, 2, 1]))
    yield case("Pad", normal(2, 3), ints([1, 2]), None, ints([-1]))
    yield case("Pad", normal(2, 3), ints([1, -1, 0, 1]), np.asarray(2.0), wrt=(0,))
    yield case("Pad", normal(2, 3), ints([0, -1, 0, -1]), constant=1)
    yield case("Pad", normal(0, 3), ints([1, 0, 0, 0]))
    yield case("Pad", normal(2, 3), ints([1, 0, 2, 1]), np.asarray(2.0), note="the fill too")
    yield case("Pad", normal(2, 3), ints([0, 0]), np.asarray(2.0), ints([0]), note="nothing filled")
    for mode in ("edge", "reflect", "wrap"):
        yield case("Pad", normal(3, 4), ints([1, 2, 2, 1]), mode=mode)
        yield case("Pad", normal(3, 4), ints([1, 2, 2, 1]), constant=1, mode=mode)
        yield case("Pad", normal(3, 4), ints([2, 1]), None, ints([-1]), mode=mode)
    for repeats in ([2, 3], [1, 2], [1, 1]):
        yield case("Tile", normal(2, 3), ints(repeats), constant=1)
        yield case("Tile", normal(2, 3), ints(repeats), note="repeats computed")
    yield case("Tile", normal(0, 3), ints([2, 2]))
    yield case("Tile", normal(2, 3), ints([0, 2]))
    for upper in (0, 1):
        yield case("Trilu", normal(3, 4), upper=upper)
        yield case("Trilu", normal(2, 3, 3), ints(-1), upper=upper)


def indexing() -> Iterator[Case]:
    for dtype in (np.int64, np.int32):
        for axis in (0, 1, -1):
            for index in (1, [0, 2, 0, -1], [[0, 1], [1, 1]], [[-1]], []):
                yield case("Gather", normal(3, 3), ints(index, dtype), axis=axis)
    yield case("Gather", normal(4), ints(2))
    yield case("Gather", normal(4), ints([2, 2, -4]), constant=1)
    yield case("Gather", normal(3, 0), ints([0, 1]))
    yield case("Gather", normal(2, 3, 4), ints([[1, 0], [2, 2]]), axis=1)
    for dtype in (np.int64, np.int32):
        yield case("GatherElements", normal(3, 4), ints([[0, -1, 2, 0], [0, 1, 2, 0]], dtype), axis=0)
        yield case("GatherElements", normal(2, 3), ints([[0, 0], [-1, 2]], dtype), axis=-1)
    yield case("GatherElements", normal(2, 3), np.zeros((2, 0), np.int64), axis=1)
    for axis, index in ((0, [[0, 1, 2], [2, 0, 1]]), (1, [[0, -1], [2, 1]]), (-1, [[2, 1], [0, 2]])):
        size = np.shape(index)
        yield case("ScatterElements", normal(3, 3), ints(index), normal(*size), axis=axis)
        yield case("ScatterElements", normal(3, 3), ints(index, np.int32), normal(*size), axis=axis, wrt=(2,))
        yield case("ScatterElements", normal(3, 3), ints(index), normal(*size), axis=axis, reduction="add")
    twice = ints([[0, 0, -3], [0, 2, 2]])
    yield case("ScatterElements", normal(3, 3), twice, normal(2, 3), axis=0, reduction="add")
    yield case("ScatterElements", normal(3, 3), np.zeros((0, 3), np.int64), normal(0, 3), axis=0)
    yield from scattering()
    for axis, largest, k in ((-1, 1, 2), (0, 0, 1), (1, 1, 4), (1, 0, 0)):
        more = {"axis": axis, "largest": largest, "outputs": 2}
        yield case("TopK", apart(3, 4), ints([k]), **more)
        yield case("TopK", apart(3, 4), ints([k]), constant=1, **more)
    for shape, index in (
        ((3, 4), ints([[0, 1], [-1, -1], [0, 1]])),
        ((3, 4), ints([[0], [2], [0], [-3]])),
        ((3, 4, 2), ints([[[0, 1]], [[2, -1]]])),
        ((3, 4), ints([1])),
        ((3, 4), ints([1, 2])),
        ((3, 4), np.zeros((0, 2), np.int64)),
    ):
        yield case("GatherND", normal(*shape), index, known=(1,))
    for shape, index, batch_dims in (
        ((2, 3, 4), ints([[1], [-1]]), 1),
        ((2, 3, 4), ints([[[1, 0], [1, -1]], [[0, 0], [0, 0]]]), 1),
        ((2, 3, 4), ints([[[1], [0], [1]], [[0], [-1], [0]]]), 1),
        ((2, 2, 3, 2), ints([[[0], [1]], [[2], [-1]]]), 2),
        ((2, 3, 4), np.zeros((2, 0, 1), np.int64), 1),
    ):
        yield case("GatherND", normal(*shape), index, known=(1,), batch_dims=batch_dims)


def scattering() -> Iterator[Case]:
    """Updates that meet, and zeros among what is multiplied."""
    meeting, once = ints([[0, 0, -3], [0, 2, 2]]), ints([[0, 1, -1], [2, 0, 1]])
    for reduction in ("none", "add", "mul", "max", "min"):
        for index in (once,) if reduction == "none" else (once, meeting):
            for constant in ((), (1,)):
                more = {"axis": 0, "reduction": reduction, "constant": constant}
                note = "meeting" if index is meeting else "once"
                yield case("ScatterElements", apart(3, 3), index, apart(2, 3) + 0.1, note=note, **more)
    for places in ((0,), (0, 1), (0, 4), (3,)):
        x, updates = normal(3, 3), normal(2, 3)
        updates.ravel()[list(places)] = 0
        if places == (3,):
            x[0, 0] = 0
        more = {"axis": 0, "reduction": "mul", "note": f"zeros at {places}"}
        yield case("ScatterElements", x, meeting, updates, **more)
    rows = (
        ((3, 4), ints([[0], [2]]), ints([[1], [1], [-2]])),
        ((3, 4), ints([[0, 1], [2, -1]]), ints([[0, 1], [0, 1], [0, -3]])),
        ((2, 3, 2), ints([[[0, 1], [1, 0]]]), ints([[[0, 1], [0, -2]]])),
        ((4,), ints([[1], [-1]]), ints([[1], [1]])),
        ((3, 4), np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64)),
    )
    for shape, once, meeting in rows:
        for reduction in ("none", "add", "mul", "max", "min"):
            for index in (once,) if reduction == "none" else (once, meeting):
                sent = (*index.shape[:-1], *shape[index.shape[-1] :])
                note = "meeting" if index is meeting else "once"
                more = {"reduction": reduction, "known": (1,), "note": note}
                yield case("ScatterND", apart(*shape), index, apart(*sent) + 0.1, **more)
        sent = (*once.shape[:-1], *shape[once.shape[-1] :])
        yield case("ScatterND", normal(*shape), once, normal(*sent), constant=1, note="constant")
        yield case(
            "ScatterND", normal(*shape), once, normal(*sent), known=(1,), wrt=(2,), note="updates alone"
        )


def routing() -> Iterator[Case]:
    """The operators of ascend.moe, with the routing held fixed."""
    tokens, experts, top_k, hidden, capacity = 5, 4, 2, 3, 2
    expert_idx, routing_map, indices = random_routing(_RNG, tokens, experts, top_k)
    modes: list[dict[str, Any]] = [
        {"active_num": 0, "drop_pad_mode": 0, "expert_tokens_count_or_cumsum_flag": 2},
        {"active_num": 6, "drop_pad_mode": 0},
        {"active_num": 10, "drop_pad_mode": 0},
        {"active_num": 50, "drop_pad_mode": 0, "note": "more than there are"},
        {"drop_pad_mode": 1, "expert_capacity": capacity, "expert_tokens_before_capacity_flag": 1},
        {"drop_pad_mode": 1, "expert_capacity": tokens, "active_num": 3},
    ]
    more: dict[str, Any] = {"domain": DOMAIN, "outputs": 4}
    for mode in modes:
        x = normal(tokens, hidden)
        yield case("MoeInitRoutingV2", x, expert_idx, known=(1,), expert_num=experts, **mode, **more)
    combine, rows = "MoeTokenUnpermuteWithRoutingMap", normal(tokens * top_k, hidden)
    probs, shape = positive(tokens, experts), [tokens, hidden]
    dropped = np.where(indices % 3 == 0, -1, indices).astype(np.int32)
    for index in (indices, dropped):
        for restore in ({}, {"restore_shape": shape}):
            yield case(combine, rows, index, routing_map, probs, **restore, **more)
            yield case(combine, rows, index, routing_map, **restore, **more)
        yield case(combine, rows, index, restore_shape=shape, **more)
    yield case(combine, rows, indices, routing_map, probs, wrt=(3,), note="probs alone", **more)
    slots, _, _ = padded_slots(routing_map, capacity)
    padded = normal(experts * capacity, hidden)
    more["drop_and_pad"] = 1
    yield case(combine, padded, slots, routing_map, probs, **more)
    yield case(combine, padded, slots, None, probs, **more)
    yield case(combine, padded, slots, restore_shape=shape, **more)
    permute, tokens_in = "MoeTokenPermuteWithRoutingMap", normal(tokens, hidden)
    fewer = routing_map & (_RNG.random(routing_map.shape) < 0.7)
    how: dict[str, Any] = {"domain": DOMAIN, "outputs": 3, "drop_and_pad": 0}
    for chosen, num in ((routing_map, 0), (routing_map, tokens * top_k), (fewer, 0), (fewer, tokens * 3)):
        both = {"num_out_tokens": num, "used": (0, 1), "note": f"{int(chosen.sum())} pairs", **how}
        yield case(permute, tokens_in, chosen, probs, **both)
        yield case(permute, tokens_in, chosen, num_out_tokens=num, **how)
    yield case(permute, tokens_in, fewer.astype(np.int8), probs, used=(1,), num_out_tokens=0, **how)
    yield case(permute, tokens_in, routing_map, probs, used=(0, 1), wrt=(0,), note="tokens alone", **how)
    yield case(permute, tokens_in, routing_map, probs, used=(0,), note="rows alone", **how)
    yield case(permute, tokens_in, routing_map, probs, used=(0, 1), wrt=(2,), note="probs alone", **how)
    how |= {"drop_and_pad": 1, "num_out_tokens": experts * capacity}
    yield case(permute, tokens_in, routing_map, probs, used=(0, 1), **how)
    yield case(permute, tokens_in, fewer, probs, used=(1,), **how)
    yield case(permute, tokens_in, routing_map, **how)
    yield from finalizing(expert_idx, indices)
    sizes = ints([2, 0, 5, 3], np.int32)
    for transpose in (0, 1):
        weight = normal(*((experts, 2, hidden) if transpose else (experts, hidden, 2)))
        for wrt in ((0, 1), (0,), (1,)):
            kind: dict[str, Any] = {"domain": DOMAIN, "transpose_weight": transpose, "wrt": wrt}
            yield case("MoeGroupedMatmul", rows, weight, sizes, **kind)
    yield case("MoeGroupedMatmul", normal(0, 3), normal(2, 3, 2), ints([0, 0], np.int32), domain=DOMAIN)
    yield case("MoeSquareSum", normal(2, 3, 4), domain=DOMAIN)
    yield case("MoeSwiGlu", normal(5, 6), domain=DOMAIN)
    yield case("MoeSwiGlu", normal(0, 6), domain=DOMAIN, note="no rows")


def finalizing(expert_idx: Array, indices: Array) -> Iterator[Case]:
    """MoeFinalizeRoutingV2 in its four modes, with and without what it may go without."""
    tokens, top_k = expert_idx.shape
    experts, hidden, capacity = 4, 3, 3
    for mode in range(4):
        index, rows = indices, normal(tokens * top_k, hidden)
        if mode % 2:
            slots = _RNG.permutation(experts * capacity)[: tokens * top_k]
            index, rows = np.where(slots < 3, -1, slots), normal(experts, capacity, hidden)
        index = np.asarray(index.reshape(tokens, top_k), np.int32)
        flat = index.T.ravel() if mode < 2 else index.ravel()
        one = index[:, 0].copy() if mode % 2 else ints(_RNG.permutation(tokens), np.int32)
        x, bias, scales = normal(tokens, hidden), normal(experts, hidden), normal(tokens, top_k)
        more: dict[str, Any] = {"domain": DOMAIN, "drop_pad_mode": mode}
        op = "MoeFinalizeRoutingV2"
        yield case(op, rows, flat, x, x + 1, bias, scales, expert_idx, **more)
        if mode < 2:
            continue  # the columns are turned first: from there on it is the same
        yield case(op, rows, flat, x, None, None, scales, **more)
        yield case(op, rows, flat, None, None, bias, scales, expert_idx, wrt=(4,), note="bias", **more)
        yield case(op, rows, flat, None, None, bias, scales, expert_idx, wrt=(5,), note="scales", **more)
        single = rows if mode % 2 else rows[:tokens]
        yield case(op, single, one, **more)
        yield case(op, single, one, x, None, bias, None, expert_idx[:, :1], **more)


CASES = [
    *elementwise(),
    *reductions(),
    *normalizations(),
    *matrices(),
    *shaping(),
    *indexing(),
    *routing(),
]
