"""MoeSwiGlu and its gradient: by every route within the promised units of the exact values."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import oracles
import pytest
from routes import NATIVE, ROUTES, all_of, has_route, make_model, run

import moe_onnx
from moe_onnx.spec import AXES

OP, GRAD = "MoeSwiGlu", "MoeSwiGluGrad"
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
SHAPES = [(0, 3), (4, 0), (1, 1), (5, 7), (3, 64), (2, 1031)]
ULPS = 4
# exp of more than this is infinite: the gate is closed. What is a little above may be either.
CLOSED = {2: -88.7229, 4: -88.7229, 8: -709.7828}
routes = pytest.mark.parametrize("route", [route for route in ROUTES if has_route(OP, route)])


def inputs_of(shape: tuple[int, int], dtype: Any, seed: int = 0) -> tuple[Any, Any]:
    """Gradient and rows; gates from closed to open, many where the derivative of SiLU crosses 0."""
    rng = np.random.default_rng([seed, *shape])
    rows, width = shape
    gate = rng.standard_normal(shape) * rng.choice([0.1, 1.0, 8.0, 60.0], shape)
    gate = np.where(rng.random(shape) < 0.1, -1.2784645427610738, gate)
    gate = np.where(np.abs(gate + 88.7229) < 0.4, -200, gate)
    up = rng.standard_normal(shape) * rng.choice([1e-3, 1.0, 30.0], shape)
    return rng.standard_normal((rows, width)).astype(dtype), np.concatenate([gate, up], 1).astype(dtype)


def exact(grad_y: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """In double precision: y, the gradients of gate and up, and the size of what the first adds up."""
    width = x.shape[1] // 2
    d, gate, up = (value.astype(np.float64) for value in (grad_y, x[:, :width], x[:, width:]))
    s, t = 1 / (1 + np.exp(-gate)), 1 / (1 + np.exp(gate))
    s = np.where(gate < CLOSED[x.dtype.itemsize], 0, s)
    return gate * s * up, d * up * (s + gate * s * t), d * gate * s, np.abs(d * up)


def assert_within(got: Any, want: Any, scale: Any, ulps: float = ULPS) -> None:
    """Units in the last place of the wide type, at ``scale``, and half of one of the narrow type."""
    wide = np.float64 if got.dtype == np.float64 else np.float32
    tiny = float(np.finfo(wide).tiny)
    # Products as in the operator may leave the normal numbers on the way.
    error = ulps * np.maximum(np.abs(scale) * np.finfo(wide).eps, tiny)
    if got.dtype.itemsize == 2:
        info = ml_dtypes.finfo(got.dtype)
        error = error + np.maximum(np.abs(want) * float(info.eps) / 2, float(info.smallest_subnormal) / 2)
    far = ~(np.abs(got.astype(np.float64) - want) <= error)
    assert not far.any(), (np.argwhere(far)[:3].tolist(), got[far][:3], want[far][:3])


@routes
@pytest.mark.parametrize("dtype", DTYPES)
@all_of("shape", SHAPES)
def test_within_the_promised_ulps(route: str, dtype: Any, shape: tuple[int, int]) -> None:
    grad_y, x = inputs_of(shape, dtype)
    y, of_gate, of_up, scale = exact(grad_y, x)
    (got,) = run(OP, route, [x], {})
    (grad,) = run(GRAD, route, [grad_y, x], {})
    assert (got.dtype, got.shape, grad.dtype, grad.shape) == (x.dtype, shape, x.dtype, x.shape)
    assert_within(got, y, y)
    assert_within(grad[:, shape[1] :], of_up, of_up)
    assert_within(grad[:, : shape[1]], of_gate, np.maximum(np.abs(of_gate), scale))


def test_the_oracle_sees_a_sigmoid_that_is_cut_off() -> None:
    """As onnxruntime's is at -18; and a derivative that is taken for the sigmoid."""
    _, x = inputs_of((3, 64), np.float32)
    y, of_gate, *_ = exact(np.ones((3, 64)), x)
    gate, up = x[:, :64].astype(np.float64), x[:, 64:]
    s = 1 / (1 + np.exp(-np.maximum(gate, -18)))
    for wrong, want in ((gate * s * up, y), (s * up, of_gate), (np.zeros_like(y), y)):
        with pytest.raises(AssertionError):
            assert_within(wrong.astype(np.float32), want, want)


def test_the_scalar_loop_agrees() -> None:
    grad_y, x = inputs_of((5, 7), np.float64)
    y, of_gate, of_up, scale = exact(grad_y, x)
    assert_within(oracles.swi_glu(x), y, y)
    grad = oracles.swi_glu_grad(grad_y, x)
    assert_within(grad, np.concatenate([of_gate, of_up], 1), np.concatenate([scale, of_up], 1))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_finite_differences(dtype: Any) -> None:
    """Central differences in double precision, element by element."""
    grad_y, x = inputs_of((4, 5), dtype, seed=1)
    x = np.clip(x.astype(np.float64), -8, 8)
    found = np.empty_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = 1e-5
        there, back = (moe_onnx.moe_swi_glu(x + sign * step) for sign in (1, -1))
        found[at] = (grad_y * (there - back)).sum() / 2e-5
    grad = moe_onnx.moe_swi_glu_grad(grad_y, x.astype(dtype))
    np.testing.assert_allclose(grad, found, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("route", NATIVE)
def test_every_gate_of_the_native_exponential(route: str) -> None:
    """A million gates over all that is not cut off, and beyond: no step, no hole."""
    gate = np.arange(-110, 110, 220 / 2**20, np.float32).reshape(-1, 1024)
    gate[np.abs(gate + 88.7229) < 0.001] = 0
    x = np.concatenate([gate, np.ones_like(gate)], 1)
    ones = np.ones_like(gate)
    want, _, want_of_up, _ = exact(ones, x)
    (y,) = run(OP, route, [x], {})
    assert_within(y, want, want)
    (grad,) = run(GRAD, route, [ones, x], {})
    normal = gate > CLOSED[4] + 0.01  # below, both are 0
    off = np.abs(grad[:, 1024:] - want_of_up)[normal] / np.spacing(
        np.abs(want_of_up[normal]).astype(np.float32)
    )
    assert off[gate[normal] < -87.3].max() <= 6 and off[gate[normal] >= -87.3].max() <= ULPS
    assert not grad[np.tile(gate < CLOSED[4] - 0.01, 2)].any()


@pytest.mark.parametrize("route", NATIVE)
def test_bits_do_not_depend_on_where_an_element_stands_or_on_threads(route: str) -> None:
    """Vectors, their tails and other rows make the same of the same numbers."""
    grad_y, x = inputs_of((1, 1031), np.float32)
    grads, rows = np.repeat(grad_y, 64, 0), np.repeat(x, 64, 0)
    for threads in (1, 2, 3):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = moe_onnx.InferenceSession(make_model(GRAD, [grads, rows], {}), options, kernels=route)
        (many,) = session.run(None, {"grad_y": grads, "x": rows})
        assert (many == many[:1]).all()
        one_by_one = [
            run(GRAD, route, [grad_y[:, i : i + 1], x[:, [i, 1031 + i]]], {})[0] for i in (0, 7, 8, 500, 1030)
        ]
        columns = np.concatenate(one_by_one, 0)
        np.testing.assert_array_equal(columns[:, 0], many[0, [0, 7, 8, 500, 1030]])


@pytest.mark.parametrize("route", NATIVE)
def test_bits_are_the_same_at_every_width_of_vectors(route: str) -> None:
    code = (
        "import hashlib, numpy as np, test_swi_glu as t\n"
        "g, x = t.inputs_of((3, 64), np.float32)\n"
        f"made = t.run(t.OP, {route!r}, [x], {{}}) + t.run(t.GRAD, {route!r}, [g, x], {{}})\n"
        "print(hashlib.sha256(b''.join(m.tobytes() for m in made)).hexdigest())\n"
    )
    found = set()
    for vectors in ("baseline", "avx2", ""):
        environment = {**os.environ, "ASCEND_MOE_VECTORS": vectors, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        found.add(ended.stdout)
    assert len(found) == 1


def test_the_letter_of_both_halves_is_explained() -> None:
    assert "2 F" in AXES["G"]
    with pytest.raises(moe_onnx.ShapeError, match=r"axis G \(gate and up.*divisible by 2, got 3"):
        moe_onnx.moe_swi_glu(np.zeros((1, 3), np.float32))
    with pytest.raises(moe_onnx.ShapeError, match=r"axis F .* is 3 in 'grad_y'.* but 2 in half of axis G"):
        moe_onnx.moe_swi_glu_grad(np.zeros((1, 3), np.float32), np.zeros((1, 4), np.float32))
