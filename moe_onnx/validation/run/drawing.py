"""One input of a model after the other: what it is used for says which values are legal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TypeProto, ValueInfoProto, helper

from moe_onnx.build.draft import LOSS_SCALE
from moe_onnx.build.forward import LOAD_BEFORE
from moe_onnx.build.manifest import Manifest, TensorInfo
from moe_onnx.build.parameters import Parameter
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.file.tensor_data import bytes_of
from moe_onnx.validation.run.routing_feeds import draw_indices
from moe_onnx.validation.run.uses import Use, Uses
from moe_onnx.validation.subject import Scope, Subject

Array = np.ndarray[Any, Any]

SMALL = 4  # size of an axis about which nothing is known
# Inputs that say sizes, axes or counts: what fits them only the model's author knows.
SIZE_INPUTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "ConstantOfShape": (0,), "Slice": (1, 2, 3, 4),
    "TopK": (1,), "Pad": (1, 3), "Resize": (1, 2, 3), "Upsample": (1,), "Squeeze": (1,), "Unsqueeze": (1,),
    "Split": (1,), "Range": (0, 1, 2), "OneHot": (1,), "Loop": (0,), "CumSum": (1,), "ReduceSum": (1,),
    "ReduceMean": (1,), "ReduceMax": (1,), "ReduceMin": (1,), "ReduceProd": (1,), "ReduceL1": (1,),
    "ReduceL2": (1,), "ReduceLogSum": (1,), "ReduceLogSumExp": (1,), "ReduceSumSquare": (1,),
    "CenterCropPad": (1,), "AffineGrid": (1,), "Col2Im": (1, 2), "MaxUnpool": (1, 2), "Trilu": (1,),
    "SequenceAt": (1,), "SequenceInsert": (2,), "SplitToSequence": (1,), "STFT": (1, 3),
    "DFT": (1, 2), "HannWindow": (0,), "HammingWindow": (0,), "BlackmanWindow": (0,),
    "MelWeightMatrix": (0, 1, 2), "NonMaxSuppression": (2,), "BitShift": (1,), "ReverseSequence": (1,),
}  # fmt: skip
_FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
# Inputs of operators that are defined for some numbers only: from, to.
_DOMAINS: dict[tuple[str, int], tuple[float, float]] = {
    ("Log", 0): (0.25, 0.95), ("Sqrt", 0): (0.25, 0.95), ("Pow", 0): (0.25, 0.95), ("Asin", 0): (0.25, 0.95),
    ("Acos", 0): (0.25, 0.95), ("Atanh", 0): (0.25, 0.95), ("Reciprocal", 0): (0.25, 0.95),
    ("Acosh", 0): (1.25, 1.95), ("Div", 1): (0.25, 0.95), ("BatchNormalization", 4): (0.25, 0.95),
    ("Bernoulli", 0): (0.25, 0.75), ("Dropout", 1): (0.25, 0.75),
}  # fmt: skip


class NotKnown(Exception):
    """Why an input cannot be drawn."""


def required_inputs(subject: Subject) -> list[ValueInfoProto]:
    """Inputs of the graph without a default."""
    given = {tensor.name for tensor in subject.model.graph.initializer}
    given |= {sparse.values.name for sparse in subject.model.graph.sparse_initializer}
    return [info for info in subject.model.graph.input if info.name not in given]


def dims_of(info: ValueInfoProto) -> list[int | str]:
    """Sizes: numbers, or names of free axes."""
    dims: list[int | str] = []
    for axis, dim in enumerate(info.type.tensor_type.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param or f"{info.name}[{axis}]")
    return dims


class Drawing:
    """Draws one input after the other."""

    def __init__(
        self, subject: Subject, rng: np.random.Generator, sizes: Mapping[str, int], manifest: Manifest | None
    ) -> None:
        self.subject, self.rng, self.sizes, self.manifest = subject, rng, sizes, manifest
        self.seed = int(rng.integers(2**31))
        self.uses = Uses(subject)
        self.roles: dict[str, TensorInfo] = {}
        if manifest is not None:
            self.roles = {info.name: info for graph in manifest.graphs.values() for info in graph.inputs}
        self.guessed: list[str] = []
        self.indices: dict[int, dict[str, Array]] = {}  # by node: inputs that belong together

    def draw(self, info: ValueInfoProto) -> tuple[Array, str]:
        """A value for an input, and what it was drawn as; NotKnown where that cannot be."""
        shape, dtype = self.shape(info), _dtype(info)
        if info.name in self.roles:
            value, how = self.of_training(info.name, shape)
        elif dtype.kind in "iub":
            value, how = self.whole(info.name, shape, dtype)
        elif dtype.name in _FLOATS:
            value, how = self.floats(info.name, shape)
        else:
            raise NotKnown(f"input {info.name!r} holds {dtype.name}")
        return np.ascontiguousarray(value, dtype).reshape(shape), how

    def shape(self, info: ValueInfoProto) -> tuple[int, ...]:
        """The shape of an input, with the sizes of its free axes."""
        kind = info.type.WhichOneof("value")
        if kind != "tensor_type":
            said = "of no type" if kind is None else f"a{'n' if kind[0] in 'aeiou' else ''} {kind[:-5]}"
            raise NotKnown(f"input {info.name!r} is {said}")
        if not info.type.tensor_type.HasField("shape"):
            raise NotKnown(f"input {info.name!r} has no shape")
        shape = tuple([d if isinstance(d, int) else self.sizes.get(d, SMALL) for d in dims_of(info)])
        # An axis of 0 makes no others small: arrays of [2^62, 0] are none that numpy has.
        room = bytes_of(info.type.tensor_type.elem_type, [max(int(size), 1) for size in shape])
        if (room or 0) > self.subject.options.max_bytes:
            raise NotKnown(f"input {info.name!r} of shape {list(shape)} is too large")
        return shape

    def of_training(self, name: str, shape: tuple[int, ...]) -> tuple[Array, str]:
        """An input that the manifest knows."""
        assert self.manifest is not None
        role, config = self.roles[name].role, self.manifest.config
        if role == "parameter":
            return self.parameter(name, shape)
        if role == "state":
            # As after some steps: an optimizer without history divides noise by noise.
            if name.endswith("_sq"):
                return self.rng.uniform(0.5e-4, 1e-4, shape), "uniform in [0.5e-4, 1e-4)"
            return 0.01 * self.normal(shape), "normal, 0.01"
        if role == "gradient":
            return 0.01 * self.normal(shape), "normal, 0.01"
        if name == "lr":
            return np.full(shape, 1e-3), "0.001"
        if name == "step":
            return np.full(shape, 3), "3"
        if name == LOSS_SCALE:
            return np.full(shape, 1024), "1024"
        limits, dtype = config.get("limits", {}), np.dtype(self.roles[name].dtype)
        vocab = limits.get(name, config.get("vocab_size", 2))
        if name in limits and isinstance(vocab, int) and 0 < vocab < 2**31:
            return self.rng.integers(0, vocab, shape), f"whole numbers in [0, {vocab})"
        if name in ("input_ids", "labels") and isinstance(vocab, int) and 0 < vocab < 2**31:
            return self.rng.integers(0, vocab, shape), f"ids in [0, {vocab})"
        if name == "attention_mask":
            return self.padded(shape), "1, but 0 at the end of the last row"
        if name == LOAD_BEFORE:
            return self.rng.integers(0, 9, shape), "whole numbers in [0, 9)"
        if dtype.kind in "iub":  # an input of an imported model
            return self.whole(name, shape, dtype)
        return self.normal(shape), "standard normal"

    def parameter(self, name: str, shape: tuple[int, ...]) -> tuple[Array, str]:
        """A parameter as training starts with it."""
        assert self.manifest is not None
        init = next((p.init for p in self.manifest.parameters if p.name == name), {})
        kind, std = init.get("kind"), init.get("std", 0.0)
        if kind in ("normal", "ones", "zeros") and isinstance(std, (int, float)) and abs(std) < 1e6:
            first = Parameter(name, shape, str(kind), float(std)).first_value(self.seed)
            return first, f"{kind}, {std}" if kind == "normal" else str(kind)
        return 0.02 * self.normal(shape), "normal, 0.02"

    def normal(self, shape: tuple[int, ...]) -> Array:
        """Standard normal, in no more memory than float32 takes."""
        return np.asarray(self.rng.standard_normal(shape, np.float32))

    def padded(self, shape: tuple[int, ...]) -> Array:
        """A mask with one row that ends early, if rows are long enough."""
        mask = np.ones(shape, np.int64)
        if len(shape) >= 2 and shape[-1] > 2 and mask.size:
            mask.reshape(-1, shape[-1])[-1, -(shape[-1] // 3) :] = 0
        return mask

    def floats(self, name: str, shape: tuple[int, ...]) -> tuple[Array, str]:
        """Standard normal, but where an operator is defined for some numbers only."""
        for use in self.uses.of(name):
            self.refuse_sizes(use, name)
            if (use.op, use.index) in _DOMAINS:
                low, high = _DOMAINS[use.op, use.index]
                how = f"uniform in [{low}, {high}), for {use.scope.place(use.node)}"
                return self.rng.uniform(low, high, shape), how
        return self.normal(shape), "standard normal"

    def whole(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, str]:
        """Integers and booleans: by what they are used for."""
        if not math.prod(shape):
            return np.zeros(shape), "empty"
        limit, reason = None, ""
        for use in self.uses.of(name):
            if use.node.domain == DOMAIN and use.node.op_type in BY_NAME:
                how = f"as the forward operators make them, for {use.scope.place(use.node)}"
                return self.routing(use, name, shape), how
            self.refuse_sizes(use, name)
            size = self.axis_size(use)
            if size is not None and (limit is None or size < limit):
                limit, reason = size, f"within the axis that {use.scope.place(use.node)} reads"
        if limit is not None:
            return self.rng.integers(0, max(limit, 1), shape), f"whole numbers in [0, {limit}): {reason}"
        if dtype.kind == "b":
            self.guessed.append(name)
            return self.rng.integers(0, 2, shape), "true or false"
        if "mask" in name.lower():
            return self.padded(shape), "a mask: 1, but 0 at the end of the last row"
        self.guessed.append(name)
        # Never 0: onnxruntime dies of an integer division by it.
        return self.rng.integers(1, 4, shape), "whole numbers of 1 to 3"

    def refuse_sizes(self, use: Use, name: str) -> None:
        """Raise where an input says sizes: which ones fit only the model's author knows."""
        if use.index in SIZE_INPUTS.get(use.op, ()):
            raise NotKnown(f"input {name!r} says sizes, axes or counts to {use.scope.place(use.node)}")

    def routing(self, use: Use, name: str, shape: tuple[int, ...]) -> Array:
        """An index input of an ``ascend.moe`` node, together with its companions."""
        node = use.node
        if id(node) not in self.indices:
            # The same stream for all nodes: those of one layer belong together.
            rng = np.random.default_rng(self.seed)
            self.indices[id(node)] = draw_indices(node, self.known_shape, rng)
        found = self.indices[id(node)].get(node.input[use.index])
        if found is None or found.size != math.prod(shape):
            raise NotKnown(f"which values of input {name!r} are legal in {use.scope.place(node)}")
        return found

    def known_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value of the main graph, with the sizes that free axes are drawn with."""
        info = self.subject.types(self.subject.main).get(name)
        if info is None or info.shape is None:
            return None
        sizes = [d if isinstance(d, int) else self.sizes.get(d or "") for d in info.shape]
        return None if None in sizes else tuple(int(size or 0) for size in sizes)

    def axis_size(self, use: Use) -> int | None:
        """How many values an index may have, where a use is as an index."""
        node = use.node
        if use.op in ("Gather", "GatherElements", "ScatterElements") and use.index == 1:
            return self.dim(use.scope, node.input[0], use.attribute("axis", 0))
        if use.op in ("GatherND", "ScatterND") and use.index == 1:
            sizes = [self.dim(use.scope, node.input[0], axis) for axis in range(4)]
            return min((size for size in sizes if size is not None), default=1)
        if use.op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and use.index == 1:
            return self.dim(use.scope, node.input[0], 1)
        return None

    def dim(self, scope: Scope, name: str, axis: int) -> int:
        """The size of an axis; 1 where it is not known, as index 0 is legal in any."""
        info = self.subject.types(scope).get(name)
        if info is None or info.shape is None or not -len(info.shape) <= axis < len(info.shape):
            return 1
        size = info.shape[axis]
        return size if isinstance(size, int) else self.sizes.get(size or "", 1)


def _dtype(info: ValueInfoProto) -> np.dtype[Any]:
    proto: TypeProto = info.type
    try:
        dtype = helper.tensor_dtype_to_np_dtype(proto.tensor_type.elem_type)
    except (KeyError, ValueError, TypeError):
        raise NotKnown(f"input {info.name!r} is of no known dtype") from None
    return np.dtype(dtype)
