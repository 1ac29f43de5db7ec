"""What a model says are gradients of its loss: by output, or as an optimizer's step has taken it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from moe_onnx.build.manifest import Manifest, ParameterInfo
from moe_onnx.build.optimizers import SGD, Optimizer, optimizer_from_dict
from moe_onnx.errors import MoeOnnxError
from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.run.drawing import Array, required_inputs
from moe_onnx.validation.run.feeds import manifest_of
from moe_onnx.validation.run.uses import Uses
from moe_onnx.validation.subject import Subject

LOSS, SUFFIX = "loss", ".grad"
_FLOATS = ("float32", "float64")
_ROUNDING_OPS = ("QuantizeLinear", "DynamicQuantizeLinear")
_FEW_BITS = frozenset(
    number
    for name, number in TensorProto.DataType.items()
    if name.startswith(("FLOAT1", "BFLOAT", "FLOAT8", "FLOAT4"))
)

Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Claim:
    """A gradient that a model gives.

    Attributes:
        of: The input, or initializer, that it is the gradient of.
        where: The output it is seen in.
        read: Makes it of the inputs and the outputs.
    """

    of: str
    where: str
    read: Callable[[Arrays, Arrays], Array]


def claims_of(subject: Subject) -> list[Claim] | Skipped:
    """All gradients of the loss that the model gives, or why there are none to look at."""
    outputs = {output.name for output in subject.model.graph.output}
    if LOSS not in outputs:
        return Skipped(f"the model has no output '{LOSS}', whose gradients could be looked at")
    loss = subject.types(subject.main).get(LOSS)
    if loss is not None and loss.shape is not None and any(dim not in (1, None) for dim in loss.shape):
        return Skipped(f"the output '{LOSS}' is no scalar")
    if (narrow := _narrow(subject)) is not None:
        return Skipped(f"{narrow} rounds to few bits: in between the loss has no slope")
    if manifest_of(subject) is None and (scatter := _drawn_scatter(subject)) is not None:
        return Skipped(f"{scatter} writes by indices that are drawn, and may be twice: what it gives is open")
    types = subject.types(subject.main)
    inputs = {info.name for info in subject.model.graph.input}
    inputs |= {tensor.name for tensor in subject.model.graph.initializer}
    movable = {name for name in inputs if name in types and types[name].dtype in _FLOATS}
    found = {}
    for output in subject.model.graph.output:
        name = output.name.removesuffix(SUFFIX)
        if name != output.name and name in movable:
            found[name] = Claim(name, output.name, _output(output.name))
    manifest, optimizer = manifest_of(subject), optimizer_of(subject)
    for info in manifest.parameters if manifest is not None else ():
        if not info.trained or info.name in found or info.name not in movable:
            continue
        if info.gradient in outputs:
            found[info.name] = Claim(info.name, info.gradient, _output(info.gradient))
        elif optimizer is not None and _is_updated(info, optimizer, outputs, inputs):
            where = next((s.output for s in info.state.values()), info.updated)
            found[info.name] = Claim(info.name, where, _step(info, optimizer))
    if not found:
        return Skipped(f"no output is called as an input and '{SUFFIX}', and no manifest names gradients")
    return list(found.values())


def _narrow(subject: Subject) -> str | None:
    """A node that rounds values to fewer bits than float32 has."""
    for scope, node in subject.nodes():
        to = next((a.i for a in node.attribute if a.name == "to"), TensorProto.FLOAT)
        if (node.op_type == "Cast" and to in _FEW_BITS) or node.op_type in _ROUNDING_OPS:
            return scope.place(node)
    return None


def _drawn_scatter(subject: Subject) -> str | None:
    """A node that sets values by an index that is an input of the graph."""
    uses = Uses(subject)
    for info in required_inputs(subject):
        for use in uses.of(info.name):
            adds_up = any(a.name == "reduction" and a.s not in (b"", b"none") for a in use.node.attribute)
            if use.op in ("ScatterElements", "ScatterND") and use.index == 1 and not adds_up:
                return use.scope.place(use.node)
    return None


def optimizer_of(subject: Subject) -> Optimizer | None:
    """The optimizer that the manifest says the graph has."""
    manifest: Manifest | None = manifest_of(subject)
    try:
        return (
            None
            if manifest is None or manifest.optimizer is None
            else optimizer_from_dict(manifest.optimizer)
        )
    except (MoeOnnxError, TypeError, ValueError):
        return None  # a corrupt manifest is another family's finding


def clip_of(optimizer: Optimizer, norm: Array | float) -> float:
    """What clipping multiplies gradients by; constants are those that a float32 graph holds."""
    if optimizer.max_grad_norm is None:
        return 1.0
    limit, least = float(np.float32(optimizer.max_grad_norm)), float(np.float32(1e-6))
    return min(1.0, limit / (float(np.reshape(norm, ())) + least))


def first_state(info: ParameterInfo, optimizer: Optimizer) -> str:
    """The state that takes the gradient as it is: the first moment, or the momentum."""
    return "momentum_buffer" if isinstance(optimizer, SGD) else "exp_avg"


def _output(name: str) -> Callable[[Arrays, Arrays], Array]:
    return lambda feed, found: found[name]


def _is_updated(info: ParameterInfo, optimizer: Optimizer, outputs: set[str], inputs: set[str]) -> bool:
    """Whether the step leaves enough to see the gradient by."""
    if "lr" not in inputs or (optimizer.max_grad_norm is not None and "grad_norm" not in outputs):
        return False
    if isinstance(optimizer, SGD) and not optimizer.momentum:
        return info.updated in outputs
    state = info.state.get(first_state(info, optimizer))
    return state is not None and state.output in outputs and state.input in inputs


def _step(info: ParameterInfo, optimizer: Optimizer) -> Callable[[Arrays, Arrays], Array]:
    """The gradient, from what a step has made of it."""
    f32 = np.float32

    def read(feed: Arrays, found: Arrays) -> Array:
        clip = clip_of(optimizer, found["grad_norm"]) if optimizer.max_grad_norm is not None else 1.0
        decay = float(f32(optimizer.weight_decay)) if info.weight_decay else 0.0
        if isinstance(optimizer, SGD):
            if optimizer.momentum:
                state = info.state[first_state(info, optimizer)]
                change = found[state.output] - feed[state.input] * float(f32(optimizer.momentum))
            else:
                change = (feed[info.name] - found[info.updated]) / float(np.reshape(feed["lr"], ()))
            taken: Array = change - decay * feed[info.name]
            return taken / clip
        state = info.state[first_state(info, optimizer)]
        change = found[state.output] - feed[state.input] * float(f32(optimizer.beta1))
        made: Array = change / float(f32(1 - optimizer.beta1)) / clip
        return made

    return read
