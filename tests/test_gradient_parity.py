"""Gradient rules against PyTorch's autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_cases import CASES
from gradient_tools import Case, feed_of, make_model, run, weights_of

import moe_onnx
from moe_onnx.autodiff.registry import rules

pytestmark = pytest.mark.parity

RELATIVE = 1e-8  # of the largest element; attributes are float32, all else float64


def elementwise() -> dict[str, Callable[..., Any]]:
    import torch
    from torch.nn import functional

    return {
        "Abs": torch.abs,
        "Add": torch.add,
        "Clip": lambda x, low=None, high=None: x if low is high is None else torch.clamp(x, low, high),
        "Cos": torch.cos,
        "Div": torch.div,
        "Elu": lambda x, alpha=1.0: torch.where(x > 0, x, alpha * torch.expm1(x)),
        "Erf": torch.erf,
        "Exp": torch.exp,
        "Gelu": lambda x, approximate: functional.gelu(x, approximate=approximate),
        "LeakyRelu": lambda x, alpha=0.01: functional.leaky_relu(x, alpha),
        "Log": torch.log,
        "Mul": torch.mul,
        "Neg": torch.neg,
        "Pow": torch.pow,
        "Reciprocal": torch.reciprocal,
        "Relu": torch.relu,
        "Sigmoid": torch.sigmoid,
        "Sin": torch.sin,
        "Softplus": functional.softplus,
        "Sqrt": torch.sqrt,
        "Sub": torch.sub,
        "Sum": lambda *x: sum(x),
        "Tanh": torch.tanh,
        "Where": torch.where,
        "Max": lambda a, b=None, *c: a if b is None else torch.maximum(a, b) if not c else None,
        "Min": torch.minimum,
    }


def shaped() -> dict[str, Callable[..., Any]]:
    import torch
    from torch.nn import functional

    def reduction(name: str) -> Callable[..., Any]:
        calls: dict[str, Callable[..., Any]] = {
            "Sum": torch.sum,
            "Mean": torch.mean,
            "SumSquare": lambda x, **k: torch.sum(x * x, **k),
            "LogSumExp": torch.logsumexp,
            "LogSum": lambda x, **k: torch.log(torch.sum(x, **k)),
            "L1": lambda x, **k: torch.linalg.vector_norm(x, 1, **k),
            "L2": lambda x, **k: torch.linalg.vector_norm(x, 2, **k),
            "Prod": lambda x, **k: product(x, **k),
            "Max": torch.amax,
            "Min": torch.amin,
        }

        def call(x: Any, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
            dims = tuple(int(a) for a in axes) if axes is not None and len(axes) else ()
            if not dims and noop_with_empty_axes:
                return None
            return calls[name](x, dim=dims or tuple(range(x.ndim)), keepdim=bool(keepdims))

        return call

    def matmul(a: Any, b: Any) -> Any:
        return torch.matmul(a, b)

    def gemm(a: Any, b: Any, c: Any = 0.0, alpha: float = 1, beta: float = 1, **t: int) -> Any:
        a, b = (a.T if t.get("transA") else a), (b.T if t.get("transB") else b)
        return alpha * (a @ b) + (0 if c is None else beta * c)

    def slices(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
        for i, start in enumerate(starts):
            axis, step = i if axes is None else int(axes[i]), 1 if steps is None else int(steps[i])
            size, end = x.shape[axis], int(ends[i])
            first = max(int(start) + size, 0) if start < 0 else int(start)  # clamped, also going down
            past = None if step < 0 and end < -size else min(end, 99)
            places = range(size)[slice(min(first, 99), past, step)]
            x = x.index_select(axis, torch.tensor(list(places), dtype=torch.long))
        return x

    def gather(x: Any, index: Any, axis: int = 0) -> Any:
        size = x.shape[axis]
        index = torch.where(index < 0, index + size, index).long()
        axis %= x.ndim
        return x.movedim(axis, 0)[index].movedim(
            tuple(range(index.ndim)), tuple(range(axis, axis + index.ndim))
        )

    def wrapped(x: Any, index: Any, axis: int) -> Any:
        return torch.where(index < 0, index + x.shape[axis], index).long()

    def scatter(x: Any, index: Any, updates: Any, axis: int, reduction: str = "none") -> Any:
        index = wrapped(x, index, axis)
        if reduction == "none":
            return torch.scatter(x, axis, index, updates)
        name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
        return torch.scatter_reduce(x, axis, index, updates, name)

    def scatter_nd(x: Any, index: Any, updates: Any, reduction: str = "none") -> Any:
        depth, rows = index.shape[-1], torch.arange(x.numel()).reshape(x.shape)
        places = rows[tuple(index.reshape(-1, depth).T)].reshape(-1)
        return scatter(x.reshape(-1), places, updates.reshape(-1), 0, reduction).reshape(x.shape)

    def channels(value: Any, x: Any) -> Any:
        return value.reshape(-1, *[1] * (x.ndim - 2))

    def batch_norm(x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float) -> Any:
        root = torch.rsqrt(var + float(np.float32(epsilon)))
        return (x - channels(mean, x)) * channels(root * scale, x) + channels(bias, x)

    def layer_norm(x: Any, scale: Any, bias: Any = None, axis: int = -1, epsilon: float = 1e-5) -> Any:
        return functional.layer_norm(x, x.shape[axis:], scale, bias, float(np.float32(epsilon)))

    def rms_norm(x: Any, scale: Any, axis: int = -1, epsilon: float = 1e-5) -> Any:
        whole = scale.expand(x.shape[axis:])
        return functional.rms_norm(x, x.shape[axis:], whole, float(np.float32(epsilon)))

    def cross_entropy(x: Any, labels: Any, reduction: str = "mean", ignore_index: int = -9) -> Any:
        return functional.cross_entropy(x, labels.long(), reduction=reduction, ignore_index=ignore_index)

    def pad(x: Any, pads: Any, value: Any = 0.0, axes: Any = None, mode: str = "constant") -> Any:
        n = len(pads) // 2
        chosen = [int(a) % x.ndim for a in axes] if axes is not None else list(range(n))
        amounts = [[0, 0] for _ in range(x.ndim)]
        for i, axis in enumerate(chosen):
            amounts[axis] = [int(pads[i]), int(pads[i + n])]
        if mode != "constant":
            numbers = np.arange(x.numel()).reshape(x.shape)
            return x.reshape(-1)[torch.tensor(np.pad(numbers, amounts, mode=mode))]
        if torch.is_tensor(value) and value.requires_grad:
            return pad(x - value, pads, 0.0, axes) + value
        flat = [n for pair in reversed(amounts) for n in pair]
        return functional.pad(x, flat, value=0.0 if value is None else float(value))

    def product(x: Any, dim: tuple[int, ...], keepdim: bool) -> Any:
        for axis in sorted((d % x.ndim for d in dim), reverse=True):
            x = x.prod(axis, keepdim=keepdim)
        return x

    found: dict[str, Callable[..., Any]] = {
        f"Reduce{name}": reduction(name)
        for name in ("Sum", "Mean", "SumSquare", "LogSum", "LogSumExp", "L1", "L2", "Max", "Min", "Prod")
    }
    found |= {
        "BatchNormalization": batch_norm,
        "Einsum": lambda *x, equation: torch.einsum(equation, *x),
        "InstanceNormalization": lambda x, s, b, epsilon: functional.instance_norm(
            x, weight=s, bias=b, eps=float(np.float32(epsilon))
        ),
        "ScatterND": scatter_nd,
        "Concat": lambda *x, axis: torch.cat(x, axis),
        "Expand": lambda x, shape: x * torch.ones(tuple(shape), dtype=x.dtype),
        "Flatten": lambda x, axis=1: x.reshape(x.shape[:axis].numel(), -1) if x.numel() else None,
        "Gather": gather,
        "GatherElements": lambda x, index, axis: torch.gather(x, axis, wrapped(x, index, axis)),
        "Gemm": gemm,
        "LayerNormalization": layer_norm,
        "LogSoftmax": lambda x, axis=-1: torch.log_softmax(x, axis),
        "MatMul": matmul,
        "Pad": pad,
        "RMSNormalization": rms_norm,
        "ScatterElements": scatter,
        "Slice": slices,
        "Softmax": lambda x, axis=-1: torch.softmax(x, axis),
        "SoftmaxCrossEntropyLoss": cross_entropy,
        "Tile": lambda x, repeats: x.tile(tuple(int(r) for r in repeats)),
        "Transpose": lambda x, perm=None: x.permute(perm or tuple(range(x.ndim))[::-1]),
        "Trilu": lambda x, k=0, upper=1: (torch.triu if upper else torch.tril)(x, int(k)),
    }
    return found


# Named here, as torch is not there when the default tests are collected.
WITHOUT = ("Identity", "Cast", "CastLike", "CumSum", "Dropout", "GatherND", "Reshape", "Split", "Squeeze")
CONTROL = ("If", "Loop", "Scan")
OPS = {
    op
    for _, op in rules()
    if op not in (*WITHOUT, *CONTROL, "TopK", "Unsqueeze") and not op.startswith("Moe")
}
PARITY_CASES = [case for case in CASES if case.op in OPS and case.used == (0,)]


TIES = (
    Case("Max", (np.asarray([1.0, 2, 3]), np.asarray([2.0, 2, 2])), note="tie"),
    Case("Min", (np.asarray([1.0, 2, 3]), np.asarray([2.0, 2, 2])), note="tie"),
    Case("ReduceMax", (np.asarray([[3.0, 1, 3, 3]]),), note="tie"),
    Case("ReduceMin", (np.asarray([[3.0, 1, 1, 3]]),), note="tie"),
    Case("ReduceL2", (np.zeros(3),), note="zeros"),
    Case("ReduceL1", (np.asarray([-1.0, 0, 2]),), note="zero"),
    Case("Relu", (np.asarray([-1.0, 0, 2]),), note="zero"),
    Case("LeakyRelu", (np.asarray([-1.0, 0, 2]),), note="zero"),
    Case("Abs", (np.asarray([-1.0, 0, 2]),), note="zero"),
    Case("Clip", (np.asarray([-2.0, -1, 1, 2]), np.asarray(-1.0), np.asarray(1.0)), wrt=(0,), note="bounds"),
    Case("Pow", (np.asarray([0.0, 0, 0, 2]), np.asarray([0.0, 1, 2, 0])), note="zeros"),
)


@pytest.mark.parametrize("case", [*PARITY_CASES, *TIES], ids=str)
def test_autograd_agrees(case: Case) -> None:
    import torch

    call = {**elementwise(), **shaped()}[case.op]
    twins = dict(case.same)
    tensors = [None if v is None else torch.tensor(v) for v in case.inputs]
    tensors = [tensors[twins.get(i, i)] for i in range(len(tensors))]
    for i in case.varied:
        tensors[i].requires_grad_()
    y = call(*tensors, **case.attributes)
    if y is None:
        pytest.skip("PyTorch has no such form")
    feed = {**feed_of(case), **weights_of(case, np.random.default_rng(3))}
    names = [f"x{i}" for i in case.varied]
    got = run(moe_onnx.differentiate(make_model(case), loss="loss", wrt=names), feed)[1:]
    want = torch.autograd.grad(y, [tensors[i] for i in case.varied], torch.tensor(feed["v0"]))
    for value, other in zip(got, want, strict=True):
        expected = other.numpy()
        assert value.shape == expected.shape
        scale = max(float(np.abs(expected).max(initial=0)), 1.0)
        assert np.abs(value - expected).max(initial=0) <= RELATIVE * scale
