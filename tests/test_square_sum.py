"""MoeSquareSum: by every route near the sum of fractions, and the same bits whatever the threads."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import onnxruntime as ort
import oracles
import pytest
from routes import NATIVE, ROUTES, all_of, has_route, make_model, run

import moe_onnx

OP = "MoeSquareSum"
SHAPES = [(), (1,), (17,), (3, 5), (2, 3, 4, 5), (7, 1031), (40_000,)]
routes = pytest.mark.parametrize("route", [route for route in ROUTES if has_route(OP, route)])


def values(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng([1, *shape])
    return np.asarray(rng.standard_normal(shape) * rng.choice([1e-3, 1, 1e3], shape), dtype)


@routes
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@all_of("shape", SHAPES)
def test_near_the_exact_sum(route: str, dtype: Any, shape: tuple[int, ...]) -> None:
    x = values(shape, dtype)
    want = float(oracles.square_sum(x))
    (got,) = run(OP, route, [x], {})
    assert (got.dtype, got.shape) == (x.dtype, ())
    unit = 2.0**-23 if dtype == np.float32 else 2.0**-52
    # The body adds up a row in the precision of x; in double precision all add up everything.
    terms = 1 if dtype == np.float32 and not route.startswith("body") else max((1, *shape[-1:]))
    terms = x.size if dtype == np.float64 else terms
    assert abs(float(got) - want) <= terms * unit * want


@pytest.mark.parametrize("route", NATIVE)
def test_bits_do_not_depend_on_threads(route: str) -> None:
    x = values((11, 9973))
    found = set()
    for threads in (1, 2, 3):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = moe_onnx.InferenceSession(make_model(OP, [x], {}), options, kernels=route)
        for _ in range(3):
            (got,) = session.run(None, {"x": x})
            found.add(hashlib.sha256(got.tobytes()).hexdigest())
    assert len(found) == 1


def test_the_oracle_sees_a_sum_of_float32() -> None:
    x = values((40_000,))
    total = np.float32(0)
    for value in x:
        total += value * value
    want = float(oracles.square_sum(x))
    assert abs(float(total) - want) > 2.0**-23 * want
