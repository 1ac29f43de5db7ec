"""A model lifted to double precision, to be asked for its loss, gradients and decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

from moe_onnx.rewrite.to_float64 import to_float64
from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.full.cuts import line, session_of
from moe_onnx.validation.full.lively import Arrays, is_too_large, lively_feeds
from moe_onnx.validation.run.drawing import Array
from moe_onnx.validation.run.limits import within_limit
from moe_onnx.validation.subject import Subject, normal_domain

# Operators whose outputs are decisions: where one changes, the loss need not have a slope. Which output.
_DECISIONS = {"TopK": 1, "ArgMax": 0, "ArgMin": 0, "NonZero": 0}


@dataclass
class Lifted:
    """A session in double precision, and inputs for it.

    Attributes:
        feed: Inputs by name, those initializers among them that may be moved.
        decisions: Names of the values that are decisions, with the axis along which their order says
            nothing (None: it says something).
        outputs: Names of the model's own outputs.
    """

    session: onnxruntime.InferenceSession
    feed: Arrays
    decisions: dict[str, int | None]
    outputs: list[str]

    def run(self, names: Sequence[str], changed: Mapping[str, Array] | None = None) -> Arrays:
        """Values of the model, as they are with some inputs changed."""
        options = onnxruntime.RunOptions()
        options.only_execute_path_to_fetches = True
        # A sum of 0-dimensional arrays is none any more.
        moved = {name: np.asarray(value) for name, value in (changed or {}).items()}
        feed = {**self.feed, **moved}
        values = within_limit(lambda ended: self.session.run(list(names), feed, ended), options)
        return dict(zip(names, values, strict=True))

    def loss(self, changed: Mapping[str, Array] | None = None) -> tuple[float, list[Array]]:
        """The loss, and all decisions on the way."""
        found = self.run(["loss", *self.decisions], changed)
        taken = [
            found[name] if axis is None else np.sort(found[name], axis=axis)
            for name, axis in self.decisions.items()
        ]
        return float(found["loss"].reshape(())), taken


def lift(subject: Subject, moved: Iterable[str], rng: np.random.Generator) -> Lifted | Skipped:
    """The model in double precision with inputs drawn for it, or why it cannot be had.

    Args:
        subject: The model.
        moved: Names of initializers that must be inputs.
        rng: Where inputs come from.
    """
    # Twice as wide, and once more as gradients.
    if (too_large := is_too_large(subject, 4, "in double precision, with gradients,")) is not None:
        return too_large
    drawn = lively_feeds(subject, rng)
    if isinstance(drawn, Skipped):
        return drawn
    feed = dict(drawn)
    try:
        model = to_float64(_with_data(subject))
    except Exception as error:  # onnx has many ways to refuse data of other files
        return Skipped(f"the model cannot be lifted to double precision: {error}")
    feed |= _as_inputs(model, moved)
    outputs = [output.name for output in model.graph.output]
    decisions = _show_decisions(model, outputs)
    try:
        session = session_of(model, Subject(model, subject.name))
    except Exception as error:  # onnxruntime's own classes have no common base
        return Skipped(f"onnxruntime makes no session of the model in double precision: {line(error)}")
    kinds = {arg.name: arg.type for arg in session.get_inputs()}
    doubles = {n: v.astype(np.float64) if kinds.get(n) == "tensor(double)" else v for n, v in feed.items()}
    return Lifted(session, doubles, decisions, outputs)


def _with_data(subject: Subject) -> ModelProto:
    """The model, with the data that it has in other files."""
    tensors = subject.model.graph.initializer
    if not any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors):
        return subject.model
    whole = ModelProto()
    whole.CopyFrom(subject.model)
    onnx.load_external_data_for_model(whole, str(subject.folder or "."))
    return whole


def _as_inputs(model: ModelProto, names: Iterable[str]) -> Arrays:
    """Make inputs of initializers; give their values."""
    wanted, values = set(names), {}
    inputs = {info.name for info in model.graph.input}
    kept = []
    for tensor in model.graph.initializer:
        if tensor.name in wanted:
            values[tensor.name] = numpy_helper.to_array(tensor)
            if tensor.name not in inputs:
                info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                model.graph.input.append(info)
        else:
            kept.append(tensor)
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return values


def _show_decisions(model: ModelProto, outputs: Sequence[str]) -> dict[str, int | None]:
    """Make outputs of what is decided in the main graph."""
    found: dict[str, int | None] = {}
    for node in model.graph.node:
        at = _DECISIONS.get(node.op_type)
        if at is None or normal_domain(node.domain) or len(node.output) <= at or not node.output[at]:
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        found[node.output[at]] = axis if node.op_type == "TopK" else None
        if node.output[at] not in outputs:
            model.graph.output.append(helper.make_tensor_value_info(node.output[at], TensorProto.INT64, None))
    return found


def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether decisions are the same."""
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(first, second, strict=True))
