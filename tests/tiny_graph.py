"""A training graph small enough to be written, differentiated and stepped by hand: a bigram model.

    logits[b, t] = weight[input_ids[b, t]] + bias

with the graphs, names and roles of every training graph, and :class:`Numpy`, the same in numpy.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, parser

from moe_onnx.build.manifest import GraphInfo, Manifest, ParameterInfo, StateInfo, TensorInfo

V = 7
MOMENTUM = 0.9
MAX_NORM = 1.0
HEADER = '<ir_version: 10, opset_import: ["" : 21]>'

# Loss of the bigram model over what labels and mask leave in; `d` is the gradient by the logits.
LOSS = """
  one = Constant <value = int64 {1}> ()
  zero_axis = Constant <value = int64[1] {0}> ()
  one_axis = Constant <value = int64[1] {1}> ()
  minus_one = Constant <value = int64[1] {-1}> ()
  big = Constant <value = int64[1] {9223372036854775807}> ()
  rows = Gather (bigram.weight, input_ids)
  logits = Add (rows, bigram.bias)
  before = Slice (logits, zero_axis, minus_one, one_axis)
  after = Slice (labels, one_axis, big, one_axis)
  mask_t = Slice (attention_mask, zero_axis, minus_one, one_axis)
  mask_n = Slice (attention_mask, one_axis, big, one_axis)
  ignored = Constant <value = int64 {-100}> ()
  is_ignored = Equal (after, ignored)
  is_label = Not (is_ignored)
  label_int = Cast <to = 7> (is_label)
  mask_both = Mul (mask_t, mask_n)
  keep_int = Mul (mask_both, label_int)
  keep = Cast <to = 1> (keep_int)
  num_tokens = ReduceSum <keepdims = 0> (keep_int)
  at_least_one = Max (num_tokens, one)
  n = Cast <to = 1> (at_least_one)
  depth = Constant <value = int64[1] {7}> ()
  off_on = Constant <value = float[2] {0, 1}> ()
  safe = Where (is_ignored, zero_axis, after)
  onehot = OneHot <axis = -1> (safe, depth, off_on)
  logp = LogSoftmax <axis = -1> (before)
  picked = Mul (logp, onehot)
  last = Constant <value = int64[1] {-1}> ()
  nll = ReduceSum <keepdims = 0> (picked, last)
  kept = Mul (nll, keep)
  total = ReduceSum <keepdims = 0> (kept)
  mean = Div (total, n)
  loss = Neg (mean)
  lm_loss = Identity (loss)
  aux_loss = Constant <value = float {0}> ()
  z_loss = Constant <value = float {0}> ()
  tokens_1 = Reshape (num_tokens, last)
  both = Concat <axis = 0> (tokens_1, tokens_1)
  load_shape = Constant <value = int64[2] {1, 2}> ()
  expert_load = Reshape (both, load_shape)
"""
BACKWARD = """
  p = Exp (logp)
  diff = Sub (p, onehot)
  scale = Div (keep, n)
  scale_3 = Unsqueeze (scale, last)
  d = Mul (diff, scale_3)
  flat_shape = Constant <value = int64[2] {-1, 7}> ()
  d_flat = Reshape (d, flat_shape)
  ids_t = Slice (input_ids, zero_axis, minus_one, one_axis)
  ids_hot = OneHot <axis = -1> (ids_t, depth, off_on)
  ids_flat = Reshape (ids_hot, flat_shape)
  ids_turned = Transpose <perm = [1, 0]> (ids_flat)
  bigram.weight.grad = MatMul (ids_turned, d_flat)
  bigram.bias.grad = ReduceSum <keepdims = 0> (d_flat, zero_axis)
  ss_w = ReduceSumSquare <keepdims = 0> (bigram.weight.grad)
  ss_b = ReduceSumSquare <keepdims = 0> (bigram.bias.grad)
  ss = Add (ss_w, ss_b)
  grad_norm = Sqrt (ss)
"""


def update(name: str) -> str:
    """SGD with momentum and clipping; the first step starts the buffer."""
    return f"""
  {name}.clipped = Mul ({name}.grad, factor)
  {name}.old = Mul ({name}.momentum_buffer, momentum)
  {name}.momentum_buffer.updated = Add ({name}.old, {name}.clipped)
  {name}.by = Mul ({name}.momentum_buffer.updated, rate)
  {name}.updated = Sub ({name}, {name}.by)
"""


UPDATE = f"""
  momentum = Constant <value = float {{{MOMENTUM}}}> ()
  limit = Constant <value = float {{{MAX_NORM}}}> ()
  tiny = Constant <value = float {{0.000001}}> ()
  most = Constant <value = float {{1}}> ()
  norm_above = Add (grad_norm, tiny)
  ratio = Div (limit, norm_above)
  factor = Min (ratio, most)
  step_float = Cast <to = 1> (step)
  step_one = Div (step_float, step_float)
  rate = Mul (lr, step_one)
{update("bigram.weight")}{update("bigram.bias")}"""

SHAPES = {"bigram.weight": (V, V), "bigram.bias": (V,)}
IDS = ("batch", "sequence")


def parameters(role_of: str = "") -> list[TensorInfo]:
    kinds = {"": "parameter", ".grad": "gradient", ".momentum_buffer": "state"}
    kinds |= {".updated": "parameter", ".momentum_buffer.updated": "state"}
    return [TensorInfo(name + role_of, "float32", shape, kinds[role_of]) for name, shape in SHAPES.items()]


def tensors(role: str, kinds: dict[str, tuple[str, tuple[int | str, ...]]]) -> list[TensorInfo]:
    return [TensorInfo(name, dtype, shape, role) for name, (dtype, shape) in kinds.items()]


BATCH = tensors("batch", dict.fromkeys(("input_ids", "labels", "attention_mask"), ("int64", IDS)))
HYPER = tensors("hyperparameter", {"lr": ("float32", ()), "step": ("int64", ())})
NORM_IN = tensors("hyperparameter", {"grad_norm": ("float32", ())})
NORM_OUT = tensors("metric", {"grad_norm": ("float32", ())})
METRICS = tensors(
    "metric",
    {
        **dict.fromkeys(("loss", "lm_loss", "aux_loss", "z_loss"), ("float32", ())),
        "num_tokens": ("int64", ()),
        "expert_load": ("int64", (1, 2)),
    },
)
LOGITS = tensors("logits", {"logits": ("float32", (*IDS, V))})
UPDATED = [*parameters(".updated"), *parameters(".momentum_buffer.updated")]
STATE = parameters(".momentum_buffer")
GRAPHS = {
    "grad": (LOSS + BACKWARD, [*BATCH, *parameters()], [*METRICS, *NORM_OUT, *parameters(".grad")]),
    "apply": (UPDATE, [*parameters(), *parameters(".grad"), *STATE, *HYPER, *NORM_IN], UPDATED),
    "step": (
        LOSS + BACKWARD + UPDATE,
        [*BATCH, *parameters(), *STATE, *HYPER],
        [*METRICS, *NORM_OUT, *UPDATED],
    ),
    "eval": (LOSS, [*BATCH, *parameters()], METRICS),
    "forward": (
        "rows = Gather (bigram.weight, input_ids)\n logits = Add (rows, bigram.bias)",
        [BATCH[0], BATCH[2], *parameters()],
        LOGITS,
    ),
}


def declared(infos: list[TensorInfo]) -> list[onnx.ValueInfoProto]:
    kind = {"float32": onnx.TensorProto.FLOAT, "int64": onnx.TensorProto.INT64}
    return [helper.make_tensor_value_info(info.name, kind[info.dtype], info.shape) for info in infos]


class TinyGraph:
    """What ``build_training_graph`` gives, of the bigram model."""

    weights = None  # they are drawn

    def __init__(self, *assemblies: str, vocab_size: int = V) -> None:
        assemblies = assemblies or ("grad", "apply", "eval", "forward")
        found = [
            ParameterInfo(
                name,
                "float32",
                shape,
                {"kind": "normal", "std": 0.5},
                weight_decay=False,
                gradient=f"{name}.grad",
                updated=f"{name}.updated",
                state={
                    "momentum_buffer": StateInfo(f"{name}.momentum_buffer", f"{name}.momentum_buffer.updated")
                },
            )
            for name, shape in SHAPES.items()
        ]
        self.manifest = Manifest(
            config={
                "kind": "MoeLMConfig",
                "vocab_size": vocab_size,
                "num_experts": 2,
                "num_experts_per_tok": 1,
            },
            optimizer={"kind": "SGD", "momentum": MOMENTUM, "max_grad_norm": MAX_NORM},
            parameters=tuple(found),
            graphs={a: GraphInfo(tuple(GRAPHS[a][1]), tuple(GRAPHS[a][2])) for a in assemblies},
            versions={"moe_onnx": "0.1.0"},
            opset={"": 21},
            ir_version=10,
        )
        self.models = {name: self._model(name) for name in assemblies}

    def _model(self, assembly: str) -> onnx.ModelProto:
        text, inputs, outputs = GRAPHS[assembly]
        # The text form knows no dots in names.
        quiet = text.replace("bigram.", "bigram_dot_").replace(".momentum_buffer", "_dot_momentum_buffer")
        for word in ("updated", "grad", "clipped", "old", "by"):
            quiet = quiet.replace(f".{word}", f"_dot_{word}")
        model = parser.parse_model(f"{HEADER} tiny () => () {{ {quiet} }}")
        for node in model.graph.node:
            node.input[:] = [name.replace("_dot_", ".") for name in node.input]
            node.output[:] = [name.replace("_dot_", ".") for name in node.output]
        model.graph.input.extend(declared(inputs))
        model.graph.output.extend(declared(outputs))
        onnx.checker.check_model(model, full_check=True)
        return model

    def init_parameters(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {name: (rng.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in SHAPES.items()}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, model in self.models.items():
            onnx.save(model, path / f"{name}.onnx")
        (path / "manifest.json").write_text(self.manifest.to_json(), "utf-8")
        return path


class Numpy:
    """The same model and optimizer in float64, one position at a time."""

    def __init__(self, parameters: dict[str, np.ndarray]) -> None:
        self.values = {name: value.astype(np.float64) for name, value in parameters.items()}
        self.buffers = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def gradients(
        self, ids: np.ndarray, labels: np.ndarray, mask: np.ndarray
    ) -> tuple[float, int, dict[str, np.ndarray]]:
        loss, n = 0.0, 0
        grads = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for b in range(ids.shape[0]):
            for t in range(ids.shape[1] - 1):
                label = labels[b, t + 1]
                if label == -100 or not mask[b, t] or not mask[b, t + 1]:
                    continue
                logits = self.values["bigram.weight"][ids[b, t]] + self.values["bigram.bias"]
                p = np.exp(logits - logits.max())
                p /= p.sum()
                loss -= np.log(p[label])
                p[label] -= 1
                grads["bigram.weight"][ids[b, t]] += p
                grads["bigram.bias"] += p
                n += 1
        return loss / max(n, 1), n, {name: grad / max(n, 1) for name, grad in grads.items()}

    def step(
        self, ids: np.ndarray, labels: np.ndarray, mask: np.ndarray, lr: float
    ) -> tuple[float, int, float]:
        loss, n, grads = self.gradients(ids, labels, mask)
        norm = float(np.sqrt(sum((grad**2).sum() for grad in grads.values())))
        factor = min(1.0, MAX_NORM / (norm + 1e-6))
        for name, grad in grads.items():
            self.buffers[name] = MOMENTUM * self.buffers[name] + factor * grad
            self.values[name] -= lr * self.buffers[name]
        return loss, n, norm


def batch(rng: np.random.Generator, size: int = 3, length: int = 5) -> dict[str, np.ndarray]:
    """A batch with padding and left-out labels in it."""
    ids = rng.integers(0, V, (size, length))
    labels = np.where(rng.random((size, length)) < 0.2, -100, ids)
    mask = np.ones((size, length), np.int64)
    mask[0, length - 1 :] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
