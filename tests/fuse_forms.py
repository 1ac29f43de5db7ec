"""MoE layers in standard operators, by hand, and what each gives by a loop over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

T, H, F, E, K = 5, 4, 3, 6, 2

# As torch.onnx writes the "batched_mm" experts of transformers: names are shorter, nothing else.
BATCHED = """
<ir_version: 10, opset_import: ["": 21]>
layer (float[T, 4] x) => (float[T, 4] y)
<float[6, 4] gate, float[6, 6, 4] up, float[6, 4, 3] down, int64[1] last = {-1}, int64[1] one = {1},
 int64[1] k = {2}, int64[3] twice = {1, 2, 1}, int64[2] flat = {-1, 4}, int64[3] pairs = {-1, 2, 4}>
{
    logits = Gemm <transB = 1> (x, gate)
    probs = Softmax <axis = -1> (logits)
    top, ids = TopK <axis = -1, largest = 1, sorted = 1> (probs, k)
    sum = ReduceSum <keepdims = 1> (top, last)
    weights = Div (top, sum)
    x_3d = Unsqueeze (x, one)
    x_twice = Expand (x_3d, twice)
    rows = Reshape (x_twice, flat)
    ids_flat = Reshape (ids, last)
    ids_2d = Unsqueeze (ids_flat, last)
    ups = GatherND (up, ids_2d)
    column = Unsqueeze (rows, last)
    raised_3d = MatMul (ups, column)
    raised = Squeeze (raised_3d, last)
    left, right = Split <axis = 1, num_outputs = 2> (raised)
    sigmoid = Sigmoid (left)
    silu = Mul (left, sigmoid)
    hidden = Mul (silu, right)
    downs = GatherND (down, ids_2d)
    hidden_3d = Unsqueeze (hidden, last)
    done_3d = MatMul (downs, hidden_3d)
    done = Squeeze (done_3d, last)
    weights_flat = Reshape (weights, last)
    weights_2d = Unsqueeze (weights_flat, last)
    weighted = Mul (done, weights_2d)
    by_token = Reshape (weighted, pairs)
    y = ReduceSum <keepdims = 0> (by_token, one)
}
"""

# Rows times matrices, biases, activations by columns, weights after the Reshape: as GPT-OSS, and a bit more.
TRANSPOSED = [
    (
        "float[6, 6, 4] up, float[6, 4, 3] down",
        "float[6, 4, 6] up, float[6, 3, 4] down, float[6, 6] up_bias, float[6, 4] down_bias, "
        "int64[1] zero = {0}, int64[1] two = {2}, int64[1] far = {100}, float limit = {0.5}",
    ),
    ("column = Unsqueeze (rows, last)", "column = Unsqueeze (rows, one)"),
    ("MatMul (ups, column)", "MatMul (column, ups)"),
    (
        "raised = Squeeze (raised_3d, last)",
        "product = Squeeze (raised_3d, one)\n    bias = Gather (up_bias, ids_flat)\n"
        "    raised = Add (product, bias)",
    ),
    (
        "left, right = Split <axis = 1, num_outputs = 2> (raised)",
        "left_free = Slice (raised, zero, far, one, two)\n    right = Slice (raised, one, far, one, two)\n"
        "    left = Min (left_free, limit)",
    ),
    ("hidden_3d = Unsqueeze (hidden, last)", "hidden_3d = Unsqueeze (hidden, one)"),
    ("MatMul (downs, hidden_3d)", "MatMul (hidden_3d, downs)"),
    (
        "done = Squeeze (done_3d, last)",
        "out = Squeeze (done_3d, one)\n    out_bias = GatherND (down_bias, ids_2d)\n"
        "    biased = Add (out, out_bias)\n    biased_3d = Unsqueeze (biased, one)\n"
        "    done = Squeeze (biased_3d, one)",
    ),
    ("weights_flat = Reshape (weights, last)\n", ""),
    ("weights_2d = Unsqueeze (weights_flat, last)", "weights_3d = Unsqueeze (weights, last)"),
    ("weighted = Mul (done, weights_2d)\n", "by_token = Reshape (done, pairs)\n"),
    ("by_token = Reshape (weighted, pairs)", "weighted = Mul (weights_3d, by_token)"),
    ("y = ReduceSum <keepdims = 0> (by_token, one)", "y = ReduceSum <keepdims = 0> (weighted, one)"),
]


def changed(text: str, *changes: tuple[str, str]) -> str:
    """A text with replacements, each of which must be found."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def weights(seed: int = 0, *, transposed: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """The initializers of weights that a text declares without values."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"gate": (E, H), "up": (E, 2 * F, H), "down": (E, H, F)}
    if transposed:
        shapes |= {"up": (E, H, 2 * F), "down": (E, F, H), "up_bias": (E, 2 * F), "down_bias": (E, H)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model_of(text: str, values: dict[str, np.ndarray[Any, Any]]) -> onnx.ModelProto:
    """The model of a text, with values for weights."""
    model = onnx.parser.parse_model(text)
    inputs = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name)
        for name, value in values.items()
        if name not in {tensor.name for tensor in model.graph.initializer} and name not in inputs
    )
    return model


def by_hand(x: Any, w: dict[str, Any], *, transposed: bool = False) -> np.ndarray[Any, Any]:
    """One token and one expert at a time, in float64."""
    x, w = x.astype(np.float64), {name: value.astype(np.float64) for name, value in w.items()}
    y = np.zeros_like(x)
    for t, token in enumerate(x):
        # In float32, as in the graph: which experts tie is a matter of rounding.
        logits = (token.astype(np.float32) @ w["gate"].astype(np.float32).T).astype(np.float64)
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        chosen = np.argsort(-probs, kind="stable")[:K]
        for expert in chosen:
            if transposed:
                raised = token @ w["up"][expert] + w["up_bias"][expert]
                left, right = np.minimum(raised[::2], 0.5), raised[1::2]
            else:
                raised = w["up"][expert] @ token
                left, right = raised[:F], raised[F:]
            hidden = left / (1 + np.exp(-left)) * right
            out = (
                hidden @ w["down"][expert] + w["down_bias"][expert]
                if transposed
                else w["down"][expert] @ hidden
            )
            y[t] += probs[expert] / probs[chosen].sum() * out
    return y


def feeds(w: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens for which something is special, by what it is."""
    rng = np.random.default_rng(1)
    some = rng.standard_normal((T, H)).astype(np.float32)
    return {
        "random": some,
        "many tokens": rng.standard_normal((40, H)).astype(np.float32),
        "ties": np.zeros((T, H), np.float32),
        "one token": some[:1],
        "all to one expert": np.repeat(some[:1], 7, 0)
        + 1e-3 * rng.standard_normal((7, H)).astype(np.float32),
        "no token": some[:0],
    }
