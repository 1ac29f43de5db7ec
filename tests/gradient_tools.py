"""Models of one operator, their differentiated forms, and finite differences in random directions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import compose, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import moe_onnx
from moe_onnx.spec import DOMAIN, VERSION

Array = np.ndarray[Any, Any]

# max |difference| / sum of |gradient x direction|, of central differences of fourth order in float64.
TOLERANCE = 1e-7
FLOAT32_TOLERANCE = 2e-4
STEP = 1e-3

# How much a graph says of the sizes of its inputs.
SHAPES = ("static", "symbolic", "free", "unranked")


LOSS = "loss"


@dataclass(frozen=True, eq=False)
class Case:
    """One node: its inputs in order (None is absent), those that are initializers, those that vary."""

    op: str
    inputs: tuple[Array | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    wrt: tuple[int, ...] | None = None
    outputs: int = 1
    used: tuple[int, ...] = (0,)
    domain: str = ""
    opset: int = 21
    note: str = ""
    known: tuple[int, ...] = ()  # inputs whose sizes every graph gives
    same: tuple[tuple[int, int], ...] = ()  # inputs that are one value: (1, 0) is op(x, x)

    @property
    def varied(self) -> list[int]:
        floats = [
            i
            for i, v in enumerate(self.inputs)
            if v is not None and v.dtype.kind == "f" and i not in {a for a, _ in self.same}
        ]
        return floats if self.wrt is None else list(self.wrt)

    def __str__(self) -> str:
        sizes = ",".join("-" if v is None else "x".join(map(str, v.shape)) or "()" for v in self.inputs)
        attrs = ",".join(f"{k}={v}".replace(" ", "") for k, v in self.attributes.items())
        return " ".join(filter(None, [self.op, sizes, attrs, self.note]))


def make_model(case: Case, shapes: str = "static", dtype: Any = np.float64) -> onnx.ModelProto:
    """``loss = sum over the used outputs of sum(y v)``: v is what the gradient rule is given.

    Without ranks the loss is the output itself, whose sum is differentiated.
    """
    graph = onnx.GraphProto(name="one_node")
    _add(graph, case, shapes, dtype, "")
    return _model(case, graph)


def make_joint_model(cases: Sequence[Case], shapes: str, dtype: Any = np.float64) -> onnx.ModelProto:
    """Many cases of one operator and opset side by side: a model for each takes longer than its node.

    Everything of a case is named after it. The first output is the sum of their losses, these are the others.
    """
    graph = onnx.GraphProto(name="nodes")
    for case in cases:
        _add(graph, case, shapes, dtype, prefix_of(case, cases))
    losses = [output.name for output in graph.output]
    graph.node.append(helper.make_node("Sum", losses, [LOSS], name="sum_of_losses"))
    total = helper.make_tensor_value_info(LOSS, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [])
    graph.output.insert(0, total)
    return _model(cases[0], graph)


def side_by_side(models: Sequence[onnx.ModelProto], prefixes: Sequence[str]) -> onnx.ModelProto:
    """Models of one opset as one, for one session: the names of each get its prefix."""
    joint = onnx.ModelProto()
    joint.CopyFrom(models[0])
    del joint.functions[:]
    joint.graph.Clear()
    joint.graph.name = "models"
    functions: dict[tuple[str, str], onnx.FunctionProto] = {}
    for model, prefix in zip(models, prefixes, strict=True):
        functions |= {(function.domain, function.name): function for function in model.functions}
        renamed = compose.add_prefix(model, prefix, rename_functions=False).graph
        joint.graph.node.extend(renamed.node)
        joint.graph.initializer.extend(renamed.initializer)
        joint.graph.input.extend(renamed.input)
        joint.graph.output.extend(renamed.output)
    joint.functions.extend(functions.values())
    return joint


def prefix_of(case: Case, cases: Sequence[Case]) -> str:
    return f"c{cases.index(case)}_"


def _add(graph: onnx.GraphProto, case: Case, shapes: str, dtype: Any, prefix: str) -> None:
    """The case to a graph, its loss as an output."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = _node(graph, case, shapes, dtype, prefix)
    terms = []
    for i in case.used if shapes != "unranked" else ():
        v, term, total = f"{prefix}v{i}", f"{prefix}term{i}", f"{prefix}sum{i}"
        graph.input.append(_value_info(v, np.dtype(dtype), forward(case)[i].shape, shapes))
        weigh = helper.make_node("Mul", [node.output[i], v], [term], name=f"{prefix}weigh{i}")
        graph.node.append(weigh)
        graph.node.append(helper.make_node("ReduceSum", [term], [total], name=total, keepdims=0))
        terms.append(total)
    loss = helper.make_tensor_value_info(f"{prefix}{LOSS}", elem, None if shapes == "unranked" else [])
    terms = terms or [node.output[0]]
    graph.node.append(helper.make_node("Sum", terms, [loss.name], name=f"{prefix}loss_node"))
    graph.output.append(loss)


_FORWARD: dict[Case, list[Array]] = {}


def forward(case: Case) -> list[Array]:
    """The outputs of the node alone."""
    if case not in _FORWARD:
        forward_all([case])
    return _FORWARD[case]


def forward_all(cases: Sequence[Case], kernels: str = "body") -> None:
    """The outputs of the nodes of many cases, by one session."""
    graph = onnx.GraphProto(name="plain")
    for case in cases:
        node = _node(graph, case, "static", np.float64, prefix_of(case, cases))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    values = iter(runner(_model(cases[0], graph), kernels=kernels)(joint_feed(cases)))
    for case in cases:
        _FORWARD[case] = [next(values) for _ in range(case.outputs)]


def _node(graph: onnx.GraphProto, case: Case, shapes: str, dtype: Any, prefix: str) -> onnx.NodeProto:
    """The node, with its inputs and initializers, to a graph."""
    names = ["" if v is None else f"{prefix}x{i}" for i, v in enumerate(case.inputs)]
    twins = dict(case.same)
    for i, value in enumerate(case.inputs):
        if value is None or i in twins:
            continue
        value = value.astype(dtype) if value.dtype.kind == "f" else value
        if i in case.constant:
            graph.initializer.append(numpy_helper.from_array(value, names[i]))
        else:
            says = "static" if i in case.known else shapes
            graph.input.append(_value_info(names[i], value.dtype, value.shape, says))
    names = [names[twins.get(i, i)] for i in range(len(names))]
    outputs = [f"{prefix}y{i}" for i in range(case.outputs)]
    attributes = dict(case.attributes)
    if case.op == "Cast":
        attributes["to"] = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    name = f"{prefix}the_node"
    node = helper.make_node(case.op, names, outputs, domain=case.domain, name=name, **attributes)
    graph.node.append(node)
    return node


def _model(case: Case, graph: onnx.GraphProto) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", case.opset)]
    if case.domain:
        imports.append(helper.make_opsetid(case.domain, VERSION))
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _value_info(name: str, dtype: Any, shape: Sequence[int], shapes: str) -> onnx.ValueInfoProto:
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    if shapes == "unranked":
        return helper.make_tensor_value_info(name, elem, None)
    dims: Any = list(shape)
    if shapes != "static":
        dims = [None if shapes == "free" else f"{name}_{i}" for i in range(len(shape))]
    return helper.make_tensor_value_info(name, elem, dims)


def feed_of(case: Case, dtype: Any = np.float64, prefix: str = "") -> dict[str, Array]:
    same = {a for a, _ in case.same}
    return {
        f"{prefix}x{i}": value.astype(dtype) if value.dtype.kind == "f" else value
        for i, value in enumerate(case.inputs)
        if value is not None and i not in case.constant and i not in same
    }


def joint_feed(cases: Sequence[Case]) -> dict[str, Array]:
    return {k: v for case in cases for k, v in feed_of(case, prefix=prefix_of(case, cases)).items()}


class Erf(OpRun):
    """To the last bit: that of onnx 1.23 is off by 2e-8, which finite differences see."""

    def _run(self, x: Array) -> tuple[Array]:
        return (_erf(x),)


class Gelu(OpRun):
    """For the same reason."""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        if approximate == "none":
            return (x * (1 + _erf(x / math.sqrt(2))) / 2,)
        return (x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,)


class Pad(OpRun):
    """With negative pads, which crop and which that of onnx 1.23 does not know."""

    def _run(  # type: ignore[override]
        self,
        x: Array,
        pads: Array,
        fill: Array | None = None,
        axes: Array | None = None,
        mode: str = "constant",
    ) -> tuple[Array]:
        axes = np.arange(x.ndim) if axes is None else axes % x.ndim
        ends = [(0, 0)] * x.ndim
        for axis, low, high in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
            ends[int(axis)] = (int(low), int(high))
        kept = tuple(
            slice(max(-low, 0), size + min(high, 0)) for size, (low, high) in zip(x.shape, ends, strict=True)
        )
        grown = [(max(low, 0), max(high, 0)) for low, high in ends]
        more = {"constant_values": 0 if fill is None else fill} if mode == "constant" else {}
        return (np.pad(x[kept], grown, mode=mode, **more).astype(x.dtype),)  # type: ignore[call-overload]


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x))


def runner(
    model: onnx.ModelProto, *, plain: bool = False, kernels: str = "body"
) -> Callable[[dict[str, Array]], list[Array]]:
    """onnxruntime where it has the kernels, else onnx's reference evaluator."""
    return _runner(model.SerializeToString(deterministic=True), plain, kernels)


@functools.lru_cache(maxsize=64)
def _runner(data: bytes, plain: bool, kernels: str) -> Callable[[dict[str, Array]], list[Array]]:
    model = onnx.load_model_from_string(data)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # a pool of threads costs more than these nodes
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if any(node.domain == DOMAIN for node in model.graph.node):
        session: Any = moe_onnx.InferenceSession(model, options, kernels=kernels)
        return lambda feed: list(session.run(None, feed))
    try:
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error) and "Could not find an implementation" not in str(error):
            raise
        session = ReferenceEvaluator(model, new_ops=[Erf, Gelu])
    return lambda feed: list(session.run(None, feed))


def run(model: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    return runner(model)(feed)


def weights_of(case: Case, rng: np.random.Generator, prefix: str = "") -> dict[str, Array]:
    return {f"{prefix}v{i}": np.asarray(rng.standard_normal(forward(case)[i].shape)) for i in case.used}


def slopes(
    model: onnx.ModelProto, feed: dict[str, Array], names: Sequence[str], rng: np.random.Generator
) -> list[tuple[str, Array, float]]:
    """Random directions of the inputs, and how steep the sum of the first output is along them."""
    call = runner(model, plain=True)
    return joint_slopes(lambda moved: call(moved)[:1], feed, [list(names)], rng)


def joint_slopes(
    call: Callable[[dict[str, Array]], list[Array]],
    feed: dict[str, Array],
    names: Sequence[Sequence[str]],
    rng: np.random.Generator,
) -> list[tuple[str, Array, float]]:
    """The same of as many outputs as there are lists of names: what only that output depends on.

    One input of each list moves at a time, those of all lists in one run.
    """
    found = []
    for step in range(2 * max(map(len, names), default=0)):
        moving = {of[step // 2]: i for i, of in enumerate(names) if step // 2 < len(of)}
        along = {name: np.asarray(rng.standard_normal(feed[name].shape)) for name in moving}

        def sums(h: float, along: dict[str, Array] = along) -> list[float]:
            moved = {name: np.asarray(feed[name] + h * u) for name, u in along.items()}
            return [float(value.sum()) for value in call({**feed, **moved})]

        up, down, above, below = (sums(h) for h in (STEP, -STEP, 2 * STEP, -2 * STEP))
        for name, i in moving.items():
            near, far = up[i] - down[i], above[i] - below[i]
            found.append((name, along[name], (8 * near - far) / (12 * STEP)))
    return found


def check_slopes(gradients: dict[str, Array], found: list[tuple[str, Array, float]]) -> None:
    """The slope along a direction is the gradient times the direction."""
    for name, u, slope in found:
        got, scale = float((gradients[name] * u).sum()), float(np.abs(gradients[name] * u).sum())
        assert np.isfinite(got), f"d loss / d {name} is not finite: {gradients[name]}"
        assert abs(got - slope) <= TOLERANCE * max(scale, 1), (
            f"along a direction of {name}: gradient {got}, finite differences {slope}"
        )
