"""Inputs for a run of any model: drawn so that they are legal, or a reason why nothing can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TypeProto, ValueInfoProto, helper

from moe_onnx.build.forward import LOAD_BEFORE
from moe_onnx.build.manifest import METADATA_KEY, Manifest, TensorInfo
from moe_onnx.build.parameters import Parameter
from moe_onnx.errors import MoeOnnxError
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.routing_feeds import draw_indices
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.uses import Uses

Array = np.ndarray[Any, Any]

SMALL = 4  # size of an axis about which nothing is known
_SIZES = {"batch": 2, "sequence": 5}
# Inputs that say sizes, axes or counts: what fits them only the model's author knows.
_SIZE_INPUTS: dict[str, tuple[int, ...]] = {
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
_POSITIVE = ("Log", "Sqrt", "Pow", "Acosh", "Reciprocal", "Asin", "Acos", "Atanh")


@dataclass
class Feeds:
    """Drawn inputs.

    Attributes:
        values: Arrays by input name; initializers that may be overridden are left as they are.
        how: What each was drawn as, for people.
        sizes: Size of each free axis.
    """

    values: dict[str, Array] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


class _NotKnown(Exception):
    """Why an input cannot be drawn."""


def draw_feeds(
    subject: Subject, rng: np.random.Generator, sizes: Mapping[str, int] | None = None
) -> Feeds | Skipped:
    """Inputs that the model should take.

    Parameters start as the manifest says, where there is one; optimizer state is drawn as after some
    steps; token ids are below the embedding's rows, indices within their axis, masks 0 or 1, indices of
    ``ascend.moe`` nodes as the forward operators make them; floats are standard normal, or positive
    where they go into a logarithm or the like.

    Args:
        subject: The model.
        rng: Where values come from.
        sizes: Sizes of free axes, by the name the model gives them or ``"input[axis]"``; others are
            those of :func:`free_sizes`.

    Returns:
        The inputs, or why the model cannot be fed.
    """
    feeds = Feeds(sizes={**free_sizes(subject), **(sizes or {})})
    manifest = manifest_of(subject)
    drawing = _Drawing(subject, rng, feeds.sizes, manifest)
    try:
        for info in required_inputs(subject):
            value, how = drawing.draw(info)
            feeds.values[info.name], feeds.how[info.name] = value, how
    except _NotKnown as error:
        return Skipped(f"the model cannot be fed: {error}")
    if manifest is not None:
        _tie(feeds, manifest)
    return feeds


def required_inputs(subject: Subject) -> list[ValueInfoProto]:
    """Inputs of the graph without a default."""
    given = {tensor.name for tensor in subject.model.graph.initializer}
    given |= {sparse.values.name for sparse in subject.model.graph.sparse_initializer}
    return [info for info in subject.model.graph.input if info.name not in given]


def free_sizes(subject: Subject) -> dict[str, int]:
    """The axes of inputs that have no fixed size, and sizes for them that a model should run with."""
    found: dict[str, int] = {}
    for info in required_inputs(subject):
        for dim in _dims(info):
            if isinstance(dim, str):
                found.setdefault(dim, _SIZES.get(dim, SMALL))
    if (manifest := manifest_of(subject)) is not None:
        rows = manifest.dispatch.get("expert_capacity", 0)
        fewest = rows if isinstance(rows, int) else 0
        if "batch" in found and "sequence" in found:
            found["sequence"] = max(found["sequence"], -(-fewest // found["batch"]))
            if "tokens" in found:
                found["tokens"] = found["batch"] * found["sequence"]
        elif "tokens" in found:
            found["tokens"] = max(7, fewest)
    return found


def manifest_of(subject: Subject) -> Manifest | None:
    """The manifest that the model carries, None where there is none that can be read."""
    if "manifest" not in subject.shared:
        text = next((p.value for p in subject.model.metadata_props if p.key == METADATA_KEY), "")
        try:
            subject.shared["manifest"] = Manifest.from_json(text) if text else None
        except (MoeOnnxError, ValueError, TypeError):
            subject.shared["manifest"] = None
    found = subject.shared["manifest"]
    return found if isinstance(found, Manifest) else None


def fed_bytes(subject: Subject) -> int:
    """Bytes of the inputs that have fixed shapes, parameters above all."""
    total = 0
    for info in required_inputs(subject):
        dims = _dims(info)
        if dims and all(isinstance(dim, int) for dim in dims):
            total += math.prod(int(dim) for dim in dims) * 4
    return total


def _dims(info: ValueInfoProto) -> list[int | str]:
    """Sizes: numbers, or names of free axes."""
    dims: list[int | str] = []
    for axis, dim in enumerate(info.type.tensor_type.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param or f"{info.name}[{axis}]")
    return dims


def _tie(feeds: Feeds, manifest: Manifest) -> None:
    """The norm of gradients is the norm of the gradients."""
    names = [p.gradient for p in manifest.parameters if p.trained and p.gradient in feeds.values]
    if names and "grad_norm" in feeds.values:
        total = sum(float(np.square(feeds.values[name], dtype=np.float64).sum()) for name in names)
        old = feeds.values["grad_norm"]
        feeds.values["grad_norm"] = np.full(old.shape, math.sqrt(total), old.dtype)
        feeds.how["grad_norm"] = "norm of the drawn gradients"


class _Drawing:
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
        self.indices: dict[str, Array] = {}  # inputs of ascend.moe nodes that belong together

    def draw(self, info: ValueInfoProto) -> tuple[Array, str]:
        shape, dtype = self.shape(info), _dtype(info)
        if info.name in self.roles:
            value, how = self.of_training(info.name, shape, dtype)
        elif dtype.kind in "iub":
            value, how = self.whole(info.name, shape, dtype)
        elif dtype.kind == "c" or dtype.kind == "f" or dtype.name == "bfloat16":
            value, how = self.floats(info.name, shape)
        else:
            raise _NotKnown(f"input {info.name!r} holds {dtype.name}")
        return np.ascontiguousarray(value, dtype).reshape(shape), how

    def shape(self, info: ValueInfoProto) -> tuple[int, ...]:
        kind = info.type.WhichOneof("value")
        if kind != "tensor_type":
            raise _NotKnown(f"input {info.name!r} is {'of no type' if kind is None else f'a {kind[:-5]}'}")
        if not info.type.tensor_type.HasField("shape"):
            raise _NotKnown(f"input {info.name!r} has no shape")
        shape = tuple([d if isinstance(d, int) else self.sizes.get(d, SMALL) for d in _dims(info)])
        if math.prod(int(size) for size in shape) > 2**31:
            raise _NotKnown(f"input {info.name!r} of shape {list(shape)} is too large")
        return shape

    def of_training(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, str]:
        assert self.manifest is not None
        role, config = self.roles[name].role, self.manifest.config
        if role == "parameter":
            return self.parameter(name, shape)
        if role == "state":
            # As after some steps: an optimizer without history divides noise by noise.
            if name.endswith("_sq"):
                return self.rng.uniform(0.5e-4, 1e-4, shape), "uniform in [0.5e-4, 1e-4)"
            return 0.01 * self.rng.standard_normal(shape), "normal, 0.01"
        if role == "gradient":
            return 0.01 * self.rng.standard_normal(shape), "normal, 0.01"
        if name == "lr":
            return np.full(shape, 1e-3), "0.001"
        if name == "step":
            return np.full(shape, 3), "3"
        vocab = config.get("vocab_size", 2)
        if name in ("input_ids", "labels") and isinstance(vocab, int) and vocab > 0:
            return self.rng.integers(0, vocab, shape), f"ids in [0, {vocab})"
        if name == "attention_mask":
            return self.padded(shape), "1, but 0 at the end of the last row"
        if name == LOAD_BEFORE:
            return self.rng.integers(0, 9, shape), "whole numbers in [0, 9)"
        return np.abs(self.rng.standard_normal(shape)) if not shape else self.rng.standard_normal(
            shape
        ), "normal"

    def parameter(self, name: str, shape: tuple[int, ...]) -> tuple[Array, str]:
        assert self.manifest is not None
        init = next((p.init for p in self.manifest.parameters if p.name == name), {})
        kind, std = init.get("kind"), init.get("std", 0.0)
        if kind in ("normal", "ones", "zeros") and isinstance(std, (int, float)):
            first = Parameter(name, shape, str(kind), float(std)).first_value(self.seed)
            return first, f"{kind}, {std}" if kind == "normal" else str(kind)
        return 0.02 * self.rng.standard_normal(shape), "normal, 0.02"

    def padded(self, shape: tuple[int, ...]) -> Array:
        """A mask with one row that ends early, if rows are long enough."""
        mask = np.ones(shape, np.int64)
        if len(shape) >= 2 and shape[-1] > 2 and mask.size:
            mask.reshape(-1, shape[-1])[-1, -(shape[-1] // 3) :] = 0
        return mask

    def floats(self, name: str, shape: tuple[int, ...]) -> tuple[Array, str]:
        if any(use.op in _POSITIVE and use.index == 0 for use in self.uses.of(name)):
            return self.rng.uniform(
                0.25, 0.95, shape
            ), "uniform in [0.25, 0.95): the model wants positive ones"
        return self.rng.standard_normal(shape), "standard normal"

    def whole(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, str]:
        """Integers and booleans: by what they are used for."""
        limit, reason = None, ""
        for use in self.uses.of(name):
            if use.node.domain == DOMAIN:
                routed = self.routing(use.node, name, shape)
                if routed is not None:
                    return routed, f"as the forward operators make them, for {use.scope.place(use.node)}"
            if use.index in _SIZE_INPUTS.get(use.op, ()):
                raise _NotKnown(f"input {name!r} says sizes or axes to {use.scope.place(use.node)}")
            size = self.axis_size(use)
            if size is not None and (limit is None or size < limit):
                limit, reason = size, f"within the axis that {use.scope.place(use.node)} reads"
        if limit is not None:
            return self.rng.integers(0, max(limit, 1), shape), f"whole numbers in [0, {limit}): {reason}"
        if dtype.kind == "b":
            return self.rng.integers(0, 2, shape), "true or false"
        if "mask" in name.lower():
            return self.padded(shape), "a mask: 1, but 0 at the end of the last row"
        # Never 0: onnxruntime dies of an integer division by it.
        return self.rng.integers(1, 4, shape), "whole numbers of 1 to 3"

    def routing(self, node: onnx.NodeProto, name: str, shape: tuple[int, ...]) -> Array | None:
        """An index input of an ``ascend.moe`` node, together with its companions."""
        if name not in self.indices:
            for other, value in draw_indices(node, self.known_shape, self.rng).items():
                self.indices.setdefault(other, value)
        found = self.indices.get(name)
        return found if found is not None and found.size == math.prod(shape) else None

    def known_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value of the main graph, with the sizes that free axes are drawn with."""
        info = self.subject.types(self.subject.main).get(name)
        if info is None or info.shape is None:
            return None
        sizes = [d if isinstance(d, int) else self.sizes.get(d or "") for d in info.shape]
        return None if None in sizes else tuple(int(size or 0) for size in sizes)

    def axis_size(self, use: Any) -> int | None:
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

    def dim(self, scope: Any, name: str, axis: int) -> int:
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
        raise _NotKnown(f"input {info.name!r} is of no known dtype") from None
    return np.dtype(dtype)
