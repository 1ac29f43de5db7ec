"""The manifest: what a training graph's tensors are for, as data that travels with the graph.

One manifest describes all graphs of a :class:`TrainingGraph`. It is saved as ``manifest.json`` and sits
in each model's ``metadata_props`` under :data:`METADATA_KEY`, so a graph never loses it.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from onnx import ModelProto

from moe_onnx.build.moe_options import FORMS
from moe_onnx.build.weights import WEIGHTS
from moe_onnx.errors import ModelError

FORMAT = "moe_onnx.manifest"
FORMAT_VERSION = 1
METADATA_KEY = FORMAT

INPUT_ROLES = ("batch", "parameter", "state", "gradient", "hyperparameter")
OUTPUT_ROLES = ("metric", "parameter", "state", "gradient", "logits", "output")

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a graph: its name, numpy dtype, shape (names are free sizes) and role."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: str


@dataclass(frozen=True)
class StateInfo:
    """One optimizer state of a parameter: the graph input that takes it, the output that gives it."""

    input: str
    output: str


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter: how it starts, whether it decays, and what its companions are called.

    One that is not ``trained`` (a router's selection bias) has no state, and its ``gradient`` is what its
    update takes instead: how many tokens experts had above the mean.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    init: dict[str, Any]
    weight_decay: bool
    gradient: str
    updated: str
    state: dict[str, StateInfo] = field(default_factory=dict)
    trained: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GraphInfo:
    """Inputs and outputs of one graph, in the model's order."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def inputs_of(self, role: str) -> tuple[TensorInfo, ...]:
        """The inputs of a role."""
        return tuple(info for info in self.inputs if info.role == role)

    def outputs_of(self, role: str) -> tuple[TensorInfo, ...]:
        """The outputs of a role."""
        return tuple(info for info in self.outputs if info.role == role)


@dataclass(frozen=True)
class Manifest:
    """Config, optimizer, parameters and graphs of a training graph.

    Args:
        config: ``config.to_dict()`` of what was built.
        optimizer: ``optimizer.to_dict()``, or None where no graph updates anything.
        parameters: In the graphs' order.
        dispatch: Kind and mode of the MoE layers' dispatch, with ``expert_capacity`` (rows of each expert,
            which a batch must have as many tokens as; 0: any number) and ``active_num``.
        graphs: By assembly: ``"grad"``, ``"apply"``, ``"step"``, ``"eval"``, ``"forward"``.
        versions: Packages the graphs were made with.
        opset: Opset version by domain.
        ir_version: IR version of the models.
        weights: File beside ``manifest.json`` with the values that training starts from; None: they are
            drawn. Only that file's manifest names it, not those that graphs carry.
        optimize_for: Which form the graphs have, ``"body"`` or ``"native"``.
    """

    config: dict[str, Any]
    optimizer: dict[str, Any] | None
    parameters: tuple[ParameterInfo, ...]
    graphs: dict[str, GraphInfo]
    versions: dict[str, str]
    opset: dict[str, int]
    ir_version: int
    dispatch: dict[str, Any] = field(default_factory=dict)
    weights: str | None = field(default=None, compare=False)
    optimize_for: str = "body"

    def __post_init__(self) -> None:
        """Hold options as JSON gives them back, tuples as lists, so that a reloaded manifest is equal."""
        for name in ("config", "optimizer"):
            object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all parameters, in their order."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def state_inputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of every optimizer state by the name of its graph input."""
        return {s.input: p.shape for p in self.parameters for s in p.state.values()}

    def parameter(self, name: str) -> ParameterInfo:
        """The parameter of a name.

        Raises:
            ModelError: If there is none; names the closest.
        """
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise ModelError(f"There is no parameter '{name}'.{_closest(name, self.parameter_names)}")

    def graph(self, assembly: str) -> GraphInfo:
        """Inputs and outputs of an assembly.

        Raises:
            ModelError: If the manifest has no such graph; lists those it has.
        """
        if assembly not in self.graphs:
            have = ", ".join(self.graphs) or "none"
            raise ModelError(
                f"The training graph has no '{assembly}' graph, only: {have}. Build it with that too."
            )
        return self.graphs[assembly]

    def to_dict(self) -> dict[str, Any]:
        """The manifest as plain data, in the order of the format."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "versions": dict(self.versions),
            "opset": dict(self.opset),
            "ir_version": self.ir_version,
            "optimize_for": self.optimize_for,
            "config": dict(self.config),
            "optimizer": None if self.optimizer is None else dict(self.optimizer),
            "dispatch": dict(self.dispatch),
            **({} if self.weights is None else {"weights": self.weights}),
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "graphs": {name: asdict(graph) for name, graph in self.graphs.items()},
        }

    def to_json(self) -> str:
        """The manifest as JSON text; :meth:`from_json` gives an equal one."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def of_model(cls, model: ModelProto) -> Manifest | None:
        """The manifest that a model carries, None where it carries none.

        Raises:
            ModelError: As :meth:`from_json`.
        """
        texts = [entry.value for entry in model.metadata_props if entry.key == METADATA_KEY]
        return cls.from_json(texts[0]) if texts else None

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read what :meth:`to_json` gave.

        Raises:
            ModelError: If the text is no manifest, or of another format version, or if something is
                missing or of the wrong kind; names what and where.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ModelError(f"The manifest is no JSON: {error}.") from error
        top = _Reader("manifest", data)
        if top.get("format", str) != FORMAT:
            raise ModelError(f"manifest: 'format' must be '{FORMAT}', got {data['format']!r}.")
        if top.get("format_version", int) != FORMAT_VERSION:
            raise ModelError(
                f"manifest: 'format_version' must be {FORMAT_VERSION}, got {data['format_version']}. "
                "Build the graphs again, or use the release of moe_onnx that made them."
            )
        form = top.get("optimize_for", str) if "optimize_for" in data else "body"
        if form not in FORMS:
            raise ModelError(f"manifest: 'optimize_for' must be one of {', '.join(FORMS)}, got {form!r:.60}.")
        graphs = _Reader("graphs", top.get("graphs", dict))
        return cls(
            config=top.get("config", dict),
            optimizer=top.get("optimizer", dict, type(None)),
            parameters=tuple(top.each("parameters", _parameter)),
            graphs={name: _graph(graphs.inner(name)) for name in graphs.data},
            versions=top.get("versions", dict),
            opset=top.get("opset", dict),
            ir_version=top.get("ir_version", int),
            dispatch=top.get("dispatch", dict) if "dispatch" in data else {},
            weights=_weights(top) if "weights" in data else None,
            optimize_for=form,
        )


def _weights(top: _Reader) -> str:
    if (name := top.get("weights", str)) != WEIGHTS:
        raise ModelError(f"manifest: 'weights' must be '{WEIGHTS}', got {name!r}.")
    return WEIGHTS


def _closest(name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f" Did you mean '{close[0]}'?" if close else ""


@dataclass(frozen=True)
class _Reader:
    """A JSON object and where it stands, so that errors can say what is missing where."""

    where: str
    data: Any

    def __post_init__(self) -> None:
        if not isinstance(self.data, Mapping):
            raise ModelError(f"{self.where} must be an object, got {self.data!r:.60}.")

    def get(self, key: str, *kinds: type) -> Any:
        if key not in self.data:
            raise ModelError(
                f"{self.where}: '{key}' is missing; there are {', '.join(self.data) or 'no keys'}."
            )
        value = self.data[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ModelError(f"{self.where}: '{key}' must be {names}, got {value!r:.60}.")
        return value

    def inner(self, key: str) -> _Reader:
        return _Reader(f"{self.where}.{key}", self.get(key, dict))

    def each(self, key: str, read: Callable[[_Reader], T]) -> list[T]:
        return [read(_Reader(f"{self.where}.{key}[{i}]", item)) for i, item in enumerate(self.get(key, list))]

    def shape(self, *kinds: type) -> tuple[Any, ...]:
        for dim in (dims := self.get("shape", list)):
            if not isinstance(dim, kinds) or isinstance(dim, bool) or (isinstance(dim, int) and dim < 0):
                raise ModelError(f"{self.where}: 'shape' must hold sizes, got {dims!r:.60}.")
        return tuple(dims)


def _parameter(item: _Reader) -> ParameterInfo:
    state = item.inner("state")
    return ParameterInfo(
        name=item.get("name", str),
        dtype=item.get("dtype", str),
        shape=item.shape(int),
        init=item.get("init", dict),
        weight_decay=item.get("weight_decay", bool),
        gradient=item.get("gradient", str),
        updated=item.get("updated", str),
        trained=item.get("trained", bool) if "trained" in item.data else True,
        state={
            k: StateInfo(state.inner(k).get("input", str), state.inner(k).get("output", str))
            for k in state.data
        },
    )


def _graph(item: _Reader) -> GraphInfo:
    def tensor(roles: tuple[str, ...]) -> Callable[[_Reader], TensorInfo]:
        def read(one: _Reader) -> TensorInfo:
            if (role := one.get("role", str)) not in roles:
                raise ModelError(f"{one.where}: 'role' must be one of {', '.join(roles)}, got {role!r}.")
            return TensorInfo(one.get("name", str), one.get("dtype", str), one.shape(int, str), role)

        return read

    return GraphInfo(
        tuple(item.each("inputs", tensor(INPUT_ROLES))), tuple(item.each("outputs", tensor(OUTPUT_ROLES)))
    )
