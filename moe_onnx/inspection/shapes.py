"""Shapes of all values of a graph once its free sizes are given.

onnx's own shape inference does the work, with the sizes bound in inputs and in what the builder said of
values in between. What still depends on data, the rows of each expert, is taken as balanced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx.inliner
import onnx.shape_inference
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper

from moe_onnx.adapters.light import light_copy
from moe_onnx.adapters.schema import inference_goes_on
from moe_onnx.errors import ModelError, OptionError
from moe_onnx.inspection.integers import known_integers, put_in
from moe_onnx.inspection.tensors import Tensor, attribute
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.subject import normal_domain
from moe_onnx.validation.types import endless, propagates

MOST_PASSES = 12  # of inference: splits of splits become known one after the other

_ARITHMETIC = {"Concat", "Add", "Sub", "Mul", "Cast", "Gather", "Slice", "Squeeze", "Unsqueeze", "Min", "Max"}


@dataclass
class Bound:
    """A model whose sizes are given.

    Attributes:
        graph: Its graph, functions inlined (those of ``ascend.moe`` are operators).
        tensors: Dtype and shape of every value of the graph that is known, by name.
        constants: Names of initializers that are no graph inputs.
        unknown: Values whose size nothing tells.
        balanced: How many splits by data were taken to be into equal parts.
    """

    graph: GraphProto
    tensors: dict[str, Tensor]
    constants: set[str]
    unknown: list[str] = field(default_factory=list)
    balanced: int = 0


def free_sizes(model: ModelProto) -> list[str]:
    """Names of the sizes that the graph's inputs leave open, in their order."""
    names: dict[str, None] = {}
    for value in _real_inputs(model.graph):
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                names[dim.dim_param or "?"] = None
    return list(names)


def bind(model: ModelProto, sizes: Mapping[str, int], *, derived: Mapping[str, int] | None = None) -> Bound:
    """Give a model's free sizes values, and find what follows.

    Args:
        model: Any ONNX model; it is not changed.
        sizes: Value of each free size of the inputs.
        derived: Values of symbols that only values in between have, such as ``rows``.

    Raises:
        OptionError: If a free size is not given; names all that are missing.
        ModelError: If functions of the model call themselves.
    """
    if missing := [name for name in free_sizes(model) if name not in sizes]:
        raise OptionError(
            f"The graph's sizes {', '.join(map(repr, missing))} are free, got values of "
            f"{', '.join(sizes) or 'none'}. Give each one a value (sizes={{...}}, --size NAME=VALUE)."
        )
    copy = _plain(model)
    _fill(copy, {**(derived or {}), **sizes})
    found, balanced = Bound(copy.graph, {}, set()), 0
    for _ in range(MOST_PASSES):
        inferred = _inferred(copy)
        found = Bound(inferred.graph, _tensors(inferred.graph), _constants(inferred.graph), [], balanced)
        # What can be computed goes first: a split into equal parts is a guess.
        if put_in(copy.graph, found.tensors, known_integers(found.graph, found.tensors)):
            continue
        done = _balance(copy.graph, found.tensors) or _balance(copy.graph, found.tensors, also_computed=True)
        if not done:
            break
        balanced += done
    for node in found.graph.node:
        for name in node.output:
            if name and not (name in found.tensors and found.tensors[name].is_known):
                found.unknown.append(name)
    return found


def _plain(model: ModelProto) -> ModelProto:
    """A copy without data of weights and without functions: calls of others' are inlined."""
    copy = light_copy(model)
    if problem := endless(copy):
        raise ModelError(f"The model cannot be inspected: {problem}.")
    kept = [f for f in copy.functions if normal_domain(f.domain) != DOMAIN]
    del copy.functions[:]
    if kept:
        copy.functions.extend(kept)
        copy = onnx.inliner.inline_local_functions(copy)
    return copy


def _fill(model: ModelProto, sizes: Mapping[str, int]) -> None:
    """Bind symbols; those without a value are left to inference."""
    for values in (model.graph.input, model.graph.output, model.graph.value_info):
        for value in values:
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param"):
                    name = dim.dim_param
                    dim.Clear()
                    if name in sizes:
                        dim.dim_value = sizes[name]
                elif not dim.HasField("dim_value") and "?" in sizes:
                    dim.dim_value = sizes["?"]


def _inferred(model: ModelProto) -> ModelProto:
    try:
        with inference_goes_on():
            return onnx.shape_inference.infer_shapes(model, data_prop=propagates(model))
    except Exception as error:  # RuntimeError, TypeError, ValueError and classes of onnx's own
        raise ModelError(f"The shapes of the graph do not go together: {error}".rstrip(".") + ".") from error


def _tensors(graph: GraphProto) -> dict[str, Tensor]:
    found = {}
    for value in (*graph.value_info, *graph.output, *graph.input):
        kind = value.type.tensor_type
        if value.type.HasField("tensor_type") and kind.HasField("shape"):
            dims = (dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
            found[value.name] = Tensor(kind.elem_type, tuple(dims))
    for tensor in graph.initializer:
        found[tensor.name] = Tensor(tensor.data_type, tuple(tensor.dims))
    return found


def _constants(graph: GraphProto) -> set[str]:
    return {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}


def _balance(graph: GraphProto, tensors: Mapping[str, Tensor], *, also_computed: bool = False) -> int:
    """Make splits by data that are not known yet equal ones; how many.

    Lengths that are computed from shapes become known with them, and wait for that, unless ``also_computed``.
    """
    fixed, done = _constants(graph), 0
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        by_data = node.op_type == "Split" and len(node.input) > 1 and node.input[1]
        if not by_data or node.input[1] in fixed or all(_is_known(tensors, name) for name in node.output):
            continue
        whole = tensors.get(node.input[0])
        length = None if whole is None else whole.shape[attribute(node, "axis", 0)]
        if length is None or (not also_computed and _is_computed(node.input[1], makers)):
            continue
        parts = len(node.output)
        lengths = [length // parts + (i < length % parts) for i in range(parts)]
        name = f"{node.name or node.output[0]}.balanced"
        graph.initializer.append(numpy_helper.from_array(np.array(lengths, np.int64), name))
        node.input[1] = name
        done += 1
    return done


def _is_computed(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """Whether an integer is made from shapes, by arithmetic alone."""
    waiting, seen = [name], {name}
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.domain:
            continue
        if node.op_type == "Shape":
            return True
        if node.op_type in _ARITHMETIC:
            waiting += set(node.input) - seen
            seen.update(node.input)
    return False


def _is_known(tensors: Mapping[str, Tensor], name: str) -> bool:
    return name in tensors and tensors[name].is_known


def _real_inputs(graph: GraphProto) -> Iterable[onnx.ValueInfoProto]:
    given: set[str] = {tensor.name for tensor in graph.initializer}
    return (value for value in graph.input if value.name not in given)


def subgraph_tensors(graph: GraphProto) -> dict[str, Tensor]:
    """What inference left in a subgraph."""
    return _tensors(graph)
