"""Sessions of the model under validation: by every route, and with intermediate values as outputs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, ValueInfoProto
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from moe_onnx.errors import ModelError, MoeOnnxError
from moe_onnx.rewrite.legalize import uses_domain
from moe_onnx.runtime.ort_values import BFLOAT16_TENSOR, arrays_of, to_ort_value
from moe_onnx.runtime.routes import why_not
from moe_onnx.runtime.session import InferenceSession
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.file.tensor_data import bytes_of
from moe_onnx.validation.run.aborting import has_nested_if, refuse_aborting, turning_einsum
from moe_onnx.validation.run.limits import within_limit
from moe_onnx.validation.run.memory import PeakMemory
from moe_onnx.validation.subject import Subject

Array = np.ndarray[Any, Any]
Outputs = dict[str, Array]

PLAIN = "plain"  # onnxruntime's own session, nothing registered: what any program would make
_FOLDER = "session.model_external_initializers_file_folder_path"

# A second try with the same provider fails alike, and onnxruntime prints that it makes one.
QUIET: dict[str, Any] = {"enable_fallback": 0}
WITHOUT_FOLDING: dict[str, Any] = {"disabled_optimizers": ["ConstantFolding"]}

# Whatever onnxruntime and the operators raise; they have no common base.
ERRORS: tuple[type[Exception], ...] = (
    MoeOnnxError,
    RuntimeError,
    ValueError,
    TypeError,
    MemoryError,
    *(
        found
        for name in vars(ort_errors)
        if isinstance(found := getattr(ort_errors, name), type) and issubclass(found, Exception)
    ),
)


_NOT_FETCHED = ("float8", "float4", "int4", "int2", "map(")  # as numpy has no such thing


# What a kernel says that does not find on this machine what it needs. Others of its reasons to refuse a
# node hold on any machine: a division by a constant 0, an attribute of no known value.
_NOT_INSTALLED = ("Failed to construct locale",)


def is_not_here(error: Exception) -> bool:
    """Whether a session lacks a kernel on this machine, or what a kernel needs is not installed."""
    return isinstance(error, ort_errors.NotImplemented) or any(text in str(error) for text in _NOT_INSTALLED)


class MayEndProcess(ModelError):
    """A run that is not tried, as no error might come of it, but the end of the process."""


@dataclass
class Session:
    """A session, and what making it took."""

    session: onnxruntime.InferenceSession
    route: str
    threads: int
    seconds: float
    megabytes: float | None
    dies_of_empty: str = ""

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs that can be looked at."""
        outputs = self.session.get_outputs()
        # Beside bfloat16, onnxruntime gives out tensors only.
        kinds = (
            (*_NOT_FETCHED, "seq(", "optional(") if BFLOAT16_TENSOR in self.types.values() else _NOT_FETCHED
        )
        return [o.name for o in outputs if not any(kind in o.type for kind in kinds)]

    @property
    def types(self) -> dict[str, str]:
        """Types of inputs and outputs by name, as onnxruntime writes them."""
        return {arg.name: arg.type for arg in (*self.session.get_inputs(), *self.session.get_outputs())}

    def run(self, feeds: Mapping[str, Array], names: Sequence[str] | None = None) -> Outputs:
        """The outputs by name; those of a sequence as ``name[0]`` and so on, absent ones left out.

        Raises:
            TooLong: If it takes too long.
            MayEndProcess: If an input is empty, and no error may come of that, but the end of the process.
        """
        if self.dies_of_empty and any(np.size(value) == 0 for value in feeds.values()):
            raise MayEndProcess(
                f"onnxruntime may end the process by a division by 0, as Einsum '{self.dies_of_empty}' "
                "turns an operand that may be empty. Write its operands' letters in one order"
            )
        wanted = list(names) if names is not None else self.outputs
        if not wanted:
            return {}  # onnxruntime would give all
        if self.route != PLAIN:
            return self._run(wanted, feeds)
        kinds = self.types
        if BFLOAT16_TENSOR not in kinds.values():
            return self._run(wanted, feeds)
        values = {name: to_ort_value(value, kinds.get(name, "")) for name, value in feeds.items()}
        found = within_limit(lambda options: self.session.run_with_ort_values(wanted, values, options))
        return _flat(wanted, arrays_of(wanted, found, values))

    def _run(self, wanted: Sequence[str], feeds: Mapping[str, Array]) -> Outputs:
        fed = dict(feeds)
        return _flat(wanted, within_limit(lambda options: self.session.run(wanted, fed, options)))


def routes(subject: Subject) -> tuple[str, ...]:
    """The ways that this model can be run here: the kernels of our operators, and plain onnxruntime."""
    if not uses_domain(subject.model):
        return (PLAIN,)
    ours = [route for route, reason in why_not().items() if not reason]
    bodies = {f.name for f in subject.model.functions if f.domain == DOMAIN}
    used = {node.op_type for _, node in subject.nodes() if node.domain == DOMAIN}
    return (*ours, PLAIN) if used and used <= bodies else tuple(ours)


def make_session(
    subject: Subject,
    route: str,
    threads: int = 1,
    extra: Iterable[str] = (),
    *,
    without_folding: bool = False,
) -> Session:
    """A session of the model.

    Args:
        subject: The model.
        route: One of :func:`routes`.
        threads: Of the session.
        extra: Intermediate values of the main graph to be outputs as well.
        without_folding: Fold no constants; where that may end the process, none are in any case.

    Raises:
        Exception: One of :data:`ERRORS`.
    """
    refuse_aborting(subject.model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if subject.folder is not None:
        options.add_session_config_entry(_FOLDER, str(subject.folder))
    model = with_outputs(subject.model, extra)
    how = QUIET | (WITHOUT_FOLDING if without_folding or has_nested_if(model) else {})
    memory, start = PeakMemory(), time.perf_counter()
    if route == PLAIN:
        # Providers are named, as onnxruntime for other devices wants it.
        data = model.SerializeToString()
        made = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"], **how)
    else:
        made = InferenceSession(model, options, ["CPUExecutionProvider"], kernels=route, **how)
    turning = turning_einsum(subject.model)
    return Session(made, route, threads, time.perf_counter() - start, memory.growth(), turning)


def with_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """The model itself, or a copy in which further values are outputs."""
    present = {output.name for output in model.graph.output}
    missing = [name for name in names if name not in present]
    if not missing:
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.extend(ValueInfoProto(name=name) for name in missing)
    return copy


def weight_bytes(subject: Subject) -> int:
    """Bytes of all initializers, in the file or beside it."""
    total = 0
    for scope in subject.scopes:
        for tensor in scope.initializers.values():
            total += bytes_of(tensor.data_type, tensor.dims) or 0
    return total


def _flat(names: Sequence[str], values: Sequence[Any]) -> Outputs:
    found: Outputs = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, list):
            found |= _flat([f"{name}[{i}]" for i in range(len(value))], value)
        elif value is not None and not isinstance(value, dict):
            found[name] = np.asarray(value)
    return found
