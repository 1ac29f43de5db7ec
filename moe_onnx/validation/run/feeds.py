"""Inputs for a run of any model: drawn so that they are legal, or a reason why nothing can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moe_onnx.build.manifest import METADATA_KEY, Manifest
from moe_onnx.errors import MoeOnnxError
from moe_onnx.validation.file.tensor_data import bytes_of
from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.run.drawing import SMALL, Array, Drawing, NotKnown, dims_of, required_inputs
from moe_onnx.validation.subject import Subject

_SIZES = {"batch": 2, "sequence": 5}


@dataclass
class Feeds:
    """Drawn inputs.

    Attributes:
        values: Arrays by input name; initializers that may be overridden are left as they are.
        how: What each was drawn as, for people.
        sizes: Size of each free axis.
        guessed: Inputs of integers or booleans about which nothing was known.
    """

    values: dict[str, Array] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    guessed: list[str] = field(default_factory=list)


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
    drawing = Drawing(subject, rng, feeds.sizes, manifest)
    feeds.guessed = drawing.guessed
    try:
        for info in required_inputs(subject):
            value, how = drawing.draw(info)
            feeds.values[info.name], feeds.how[info.name] = value, how
    except NotKnown as error:
        return Skipped(f"the model cannot be fed: {error}")
    if manifest is not None:
        _tie(feeds, manifest)
    return feeds


def free_sizes(subject: Subject) -> dict[str, int]:
    """The axes of inputs that have no fixed size, and sizes for them that a model should run with."""
    found: dict[str, int] = {}
    for info in required_inputs(subject):
        for dim in dims_of(info):
            if isinstance(dim, str):
                found.setdefault(dim, _SIZES.get(dim, SMALL))
    if (manifest := manifest_of(subject)) is not None:
        fewest = fewest_tokens(manifest)
        if "batch" in found and "sequence" in found:
            found["sequence"] = max(found["sequence"], -(-fewest // found["batch"]))
            if "tokens" in found:
                found["tokens"] = found["batch"] * found["sequence"]
        elif "tokens" in found:
            found["tokens"] = max(7, fewest)
    return found


def fewest_tokens(manifest: Manifest) -> int:
    """How many tokens a batch must have: each expert has rows for as many."""
    rows = manifest.dispatch.get("expert_capacity", 0)
    return rows if isinstance(rows, int) else 0


def manifest_of(subject: Subject) -> Manifest | None:
    """The manifest that the model carries, None where there is none that can be read."""
    if "manifest" not in subject.shared:
        text = next((p.value for p in subject.model.metadata_props if p.key == METADATA_KEY), "")
        try:
            subject.shared["manifest"] = Manifest.from_json(text) if text else None
        except (MoeOnnxError, ValueError, TypeError, RecursionError):
            subject.shared["manifest"] = None
    found = subject.shared["manifest"]
    return found if isinstance(found, Manifest) else None


def fed_bytes(subject: Subject) -> int:
    """Bytes of the inputs that have fixed shapes, parameters above all."""
    total = 0
    for info in required_inputs(subject):
        dims = dims_of(info)
        if dims and all(isinstance(dim, int) for dim in dims):
            total += bytes_of(info.type.tensor_type.elem_type, [int(dim) for dim in dims]) or 0
    return total


def _tie(feeds: Feeds, manifest: Manifest) -> None:
    """The norm of gradients is the norm of the gradients."""
    names = [p.gradient for p in manifest.parameters if p.trained and p.gradient in feeds.values]
    if names and "grad_norm" in feeds.values:
        total = sum(float(np.square(feeds.values[name], dtype=np.float64).sum()) for name in names)
        old = feeds.values["grad_norm"]
        feeds.values["grad_norm"] = np.full(old.shape, math.sqrt(total), old.dtype)
        feeds.how["grad_norm"] = "norm of the drawn gradients"
