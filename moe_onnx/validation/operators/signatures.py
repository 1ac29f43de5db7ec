"""What is known of an operator, wherever it is known: onnx, onnxruntime, the model's own functions.

onnx describes its own domains in the version that a model imports; onnxruntime's schemas are asked for
what onnx does not know (``com.microsoft`` and the domains of its optimised models). Functions of the model
take as many inputs as they name. Libraries of custom ops cannot be asked, but tried: see :func:`is_served`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import onnx
import onnx.defs
import onnxruntime
from onnx import FunctionProto, TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from moe_onnx.adapters import python_ops
from moe_onnx.operators import BY_NAME
from moe_onnx.runtime.register import register
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.subject import Subject

EXTENSIONS = ("ai.onnx.contrib", "com.microsoft.extensions")
_NEWEST = 2**30  # of any domain: what fits the C int that onnx takes
_UNREGISTERED = "is not a registered function/op"


@dataclass(frozen=True)
class Slots:
    """The inputs or the outputs of an operator. ``most`` None: any number, more of the last."""

    names: tuple[str, ...]
    needed: tuple[bool, ...]  # must be there, and not be ""
    least: int
    most: int | None


@dataclass(frozen=True)
class Signature:
    """What a node of an operator may look like. ``attributes`` maps to ``AttributeProto`` types."""

    source: str
    inputs: Slots
    outputs: Slots
    attributes: dict[str, int]
    required: frozenset[str]
    since: int = 1
    deprecated: bool = False


@cache
def runtime_schemas() -> dict[tuple[str, str], tuple[Any, ...]]:
    """All versions of all operators of the installed onnxruntime, by domain and name."""
    found: dict[tuple[str, str], list[Any]] = {}
    for schema in _ort.get_all_operator_schema():
        found.setdefault((schema.domain, schema.name), []).append(schema)
    return {key: tuple(schemas) for key, schemas in found.items()}


class Known:
    """The operators with schemas, as they are during one validation: users register schemas as well."""

    def __init__(self) -> None:
        self._signatures: dict[tuple[str, str, int | None], Signature | None] = {}

    @classmethod
    def of(cls, subject: Subject) -> Known:
        """The one of this validation."""
        return subject.once(_known)

    def signature(self, domain: str, op: str, version: int | None) -> Signature | None:
        """The operator in a version of its domain, the newest where none is imported; None if unknown."""
        key = domain, op, version
        if key not in self._signatures:
            self._signatures[key] = self._look_up(*key)
        return self._signatures[key]

    def _look_up(self, domain: str, op: str, version: int | None) -> Signature | None:
        wanted = clamp(version)
        try:
            return _signature(onnx.defs.get_schema(op, wanted, domain), "onnx")
        except onnx.defs.SchemaError:
            pass
        known = [s for s in runtime_schemas().get((domain, op), ()) if s.since_version <= wanted]
        newest = max(known, key=lambda schema: schema.since_version, default=None)
        return None if newest is None else _signature(newest, "onnxruntime")

    @cached_property
    def names(self) -> dict[str, frozenset[str]]:
        """Operators of any version, by domain."""
        found: dict[str, set[str]] = {DOMAIN: set(BY_NAME)}
        for domain, op in (*self.first, *runtime_schemas()):
            found.setdefault(domain, set()).add(op)
        return {domain: frozenset(ops) for domain, ops in found.items()}

    @cached_property
    def first(self) -> dict[tuple[str, str], int]:
        """The first version of its domain that has an operator, of those that onnx knows."""
        found: dict[tuple[str, str], int] = {}
        for schema in onnx.defs.get_all_schemas_with_history():
            key = schema.domain, schema.name
            found[key] = min(schema.since_version, found.get(key, schema.since_version))
        return found

    def homes(self, op: str) -> list[str]:
        """The domains that have an operator of this name; those of onnxruntime's inner workings count not."""
        return [domain for domain in sorted(self.names) if op in self.names[domain] and ".n" not in domain]


def _known(subject: Subject) -> Known:
    return Known()


def clamp(version: int | None) -> int:
    """What onnx takes as a version: files may hold any 64-bit number."""
    return _NEWEST if version is None or version < 1 else min(version, _NEWEST)


def close_to(word: str, known: Iterable[str]) -> str:
    """The known word that ``word`` may be a misspelling of, or ``""``."""
    by_lower = {name.lower(): name for name in sorted(known)}
    close = difflib.get_close_matches(word.lower()[:100], by_lower, 1, 0.75)
    return by_lower[close[0]] if close else ""


@cache
def is_served(domain: str, op: str) -> bool:
    """Whether onnxruntime-extensions has the operator: it has no list to ask, but a session can be tried.

    A session of a model that holds only the operator either does not know it, or complains of something
    else; nothing is run.
    """
    if domain not in EXTENSIONS or python_ops.UNAVAILABLE:
        return False
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], domain=domain)],
        "probe",
        [value("x", TensorProto.FLOAT, None)],
        [value("y", TensorProto.FLOAT, None)],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(
            model.SerializeToString(),
            register(options, "python"),
            providers=["CPUExecutionProvider"],
            enable_fallback=0,
        )
    except Exception as error:  # of many kinds, and the text is all that tells them apart
        return _UNREGISTERED not in str(error)
    return True


def of_function(function: FunctionProto) -> Signature:
    """A function of the model. onnxruntime calls it with fewer inputs and attributes too, not with more."""
    defaults = {attr.name: int(attr.type) for attr in function.attribute_proto}
    return Signature(
        "the model's function",
        Slots(tuple(function.input), (False,) * len(function.input), 0, len(function.input)),
        Slots(tuple(function.output), (False,) * len(function.output), 0, len(function.output)),
        {**dict.fromkeys(function.attribute, 0), **defaults},
        frozenset(),
    )


def _signature(schema: Any, source: str) -> Signature:
    attributes = schema.attributes
    return Signature(
        source,
        _slots(schema.inputs, schema.min_input, schema.max_input),
        _slots(schema.outputs, schema.min_output, schema.max_output),
        {name: int(attr.type.value) for name, attr in attributes.items()},
        frozenset(name for name, attr in attributes.items() if attr.required),
        schema.since_version,
        schema.deprecated,
    )


def _slots(parameters: Sequence[Any], least: int, most: int) -> Slots:
    variadic = any(parameter.option.name == "Variadic" for parameter in parameters)
    return Slots(
        tuple(parameter.name for parameter in parameters),
        tuple(parameter.option.name == "Single" for parameter in parameters),
        least,
        None if variadic else most,
    )
