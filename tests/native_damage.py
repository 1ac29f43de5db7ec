"""Random calls, right and wrong: what ``native_cases`` makes, damaged in half of the cases.

A case is made from a seed and its number alone, so that a failure can be made again.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from native_cases import MAKERS, Maker, Rng, pick
from native_driver import TYPES, Case

from moe_onnx.operators import BY_NAME
from moe_onnx.spec import INDICES, MAPS


def make_case(seed: int, number: int, ops: list[str]) -> Case:
    """Case ``number`` of ``seed``; of some operators their numbers' turns only."""
    op = ops[number % len(ops)]
    rng = np.random.default_rng([seed, number, list(BY_NAME).index(op)])
    maker = Maker(rng)
    inputs, attributes = MAKERS[op](maker)
    case = Case(op, inputs, attributes, number=number)
    if maker.odds(0.45):
        for _ in range(1 + int(maker.odds(0.3))):
            damage(rng, case)
    # Inference sees all sizes, some, or none.
    share = pick(rng, (0.0, 0.3, 1.0))
    case.known = [() if a is None else _hidden(rng, a.shape, share) for a in case.inputs]
    case.wanted = [True] * len(BY_NAME[op].outputs)
    if maker.odds(0.2):
        case.wanted[1:] = [maker.odds(0.5) for _ in case.wanted[1:]]
    return case


def _hidden(rng: Rng, shape: tuple[int, ...], share: float) -> tuple[Any, ...]:
    return tuple(pick(rng, (None, "some", "other")) if rng.random() < share else size for size in shape)


SIZES = (-(2**63), -1, 0, 1, 2, 3, 4, 7, 16, 600, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1)


def damage(rng: Rng, case: Case) -> None:
    """Make one thing wrong, or at least another."""
    spec, inputs = BY_NAME[case.op], case.inputs
    kind = pick(rng, ("index", "index", "map", "shape", "shape", "dtype", "attribute", "drop", "absent"))
    if kind in ("index", "map"):
        kinds = INDICES if kind == "index" else MAPS
        places = [
            i for i, a in enumerate(inputs) if a is not None and a.size and spec.inputs[i].dtypes == kinds
        ]
        if places:
            _damage_values(rng, inputs, pick(rng, places))
        return
    if kind in ("attribute", "drop") and spec.attributes:
        attribute = pick(rng, spec.attributes)
        if kind == "drop":
            case.attributes.pop(attribute.name, None)
        elif attribute.kind == "ints":
            case.attributes[attribute.name] = [int(pick(rng, SIZES)) for _ in range(int(rng.integers(4)))]
        else:
            near = case.attributes.get(attribute.name, 0) + int(rng.integers(-2, 3))
            near = min(max(near, SIZES[0]), SIZES[-1])
            case.attributes[attribute.name] = near if rng.random() < 0.4 else pick(rng, SIZES)
        return
    at = int(rng.integers(len(inputs)))
    array = inputs[at]
    if kind == "absent" or array is None:
        dtype = pick(rng, list(TYPES)) if array is None else array.dtype.name
        inputs[at] = None if rng.random() < 0.5 else np.zeros((0, 0), getattr(ml_dtypes, dtype, dtype))
    elif kind == "dtype":
        dtype = pick(rng, list(TYPES))
        with np.errstate(all="ignore"):
            inputs[at] = np.nan_to_num(array).astype(getattr(ml_dtypes, dtype, dtype))
    else:
        inputs[at] = _damaged_shape(rng, array)


def _damage_values(rng: Rng, inputs: list[Any], at: int) -> None:
    array = inputs[at] = inputs[at].copy()
    flat = array.reshape(-1)
    if array.dtype != np.int32:
        flat[rng.random(flat.size) < rng.random()] = pick(rng, (0, 1))
        return
    numbers = (-(2**31), -2, -1, 0, 1, flat.size - 1, flat.size, flat.size + 1, 2**31 - 1)
    for _ in range(int(rng.integers(1, 4))):
        again = flat[int(rng.integers(flat.size))]
        flat[int(rng.integers(flat.size))] = again if rng.random() < 0.4 else pick(rng, numbers)
    for other in inputs:  # the slot form wants both index tensors alike
        is_alike = other is not None and other is not array and other.shape == array.shape
        if is_alike and other.dtype == np.int32 and rng.random() < 0.3:
            other[...] = array


def _damaged_shape(rng: Rng, array: Any) -> Any:
    kind = pick(rng, ("more", "fewer", "none", "axis", "no axis", "turned", "scalar"))
    axis = int(rng.integers(max(array.ndim, 1)))
    if kind == "axis":
        return array.reshape(*array.shape[:axis], 1, *array.shape[axis:])
    if kind == "no axis":
        return array.reshape(-1)
    if kind == "turned":
        return np.ascontiguousarray(array.T)
    if kind == "scalar" or not array.ndim:
        return np.zeros((), array.dtype)
    if kind == "none":
        return np.take(array, [], axis)
    if kind == "fewer":
        return np.take(array, range(max(array.shape[axis] - 1, 0)), axis)
    shape = [size + (i == axis) for i, size in enumerate(array.shape)]
    return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
