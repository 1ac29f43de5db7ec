"""What onnx can tell of dtypes and shapes, without a copy of the weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import onnx
import onnx.shape_inference
from onnx import ModelProto, NodeProto

from moe_onnx.adapters.light import light_copy
from moe_onnx.adapters.schema import inference_goes_on

_MOST_NODES = 5_000_000  # that inference is left alone with
_LONGEST_VECTOR = 2**20  # that onnx may hold as sizes
_TERM = r"[A-Za-z]*(\.\.\.)?[A-Za-z]*"
_EQUATION = re.compile(f"{_TERM}(,{_TERM})*(->{_TERM})?")
_NO_OPERATOR = "Einsum whose equation is none"  # which inference passes over


def infer_types(model: ModelProto) -> tuple[ModelProto, str]:
    """A light copy with all types and shapes that onnx can tell, and what inference stopped at, or ``""``."""
    try:
        light, stopped = light_copy(model), endless(model)
    except RecursionError:  # only models that were made in memory; no reader takes such a file
        return model, "subgraphs are nested too deeply"
    if stopped:
        return light, stopped
    _blunt(light)
    plain, stopped = _inferred(light, data=False)
    # Lengths of vectors are known now, also of those that nodes make.
    return _inferred(plain, data=True) if propagates(plain) else (plain, stopped)


def _inferred(model: ModelProto, *, data: bool) -> tuple[ModelProto, str]:
    # A node that an operator of this package refuses need not cost the others their types.
    try:
        with inference_goes_on():
            return onnx.shape_inference.infer_shapes(model, data_prop=data), ""
    except Exception as error:  # RuntimeError, TypeError, ValueError and classes of onnx's own
        return model, str(error)


def propagates(model: ModelProto) -> bool:
    """Whether inference may be asked to propagate data.

    onnx (1.23) may then hold every element of a vector as a size, in functions among others: 2 microseconds
    and 270 bytes each, which nobody has the time and room for where there are 2^31 of them.
    """
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    shapes = [value.type.tensor_type.shape.dim for value in values]
    vectors = [shape[0].dim_value for shape in shapes if len(shape) == 1]
    vectors += [tensor.dims[0] for tensor in model.graph.initializer if len(tensor.dims) == 1]
    return max(vectors, default=0) <= _LONGEST_VECTOR


def endless(model: ModelProto) -> str:
    """Why inference would not come to an end, or ``""``.

    Inference walks through a function's body at each call: without end where a function calls itself (onnx
    1.19 ends the process by that), and for hours where each of forty functions calls the next one twice.
    """
    bodies = {(f.domain, f.name): list(_calls(f.node)) for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    for start in bodies:
        path = [(start, iter(bodies[start]))] if start not in sizes else []
        above = {start}
        while path:
            name, calls = path[-1]
            inner = next((call for call in calls if call in bodies and call not in sizes), None)
            if inner is None:
                sizes[name] = min(sum(1 + sizes.get(call, 0) for call in bodies[name]), _MOST_NODES)
                path.pop()
                above.discard(name)
            elif inner in above:
                return f"function '{inner[0]}.{inner[1]}' calls itself"
            else:
                path.append((inner, iter(bodies[inner])))
                above.add(inner)
    if sum(1 + sizes.get(call, 0) for call in _calls(model.graph.node)) > _MOST_NODES:
        return f"with its functions' bodies the model has more than {_MOST_NODES} nodes"
    return ""


def ends_inference(node: NodeProto) -> bool:
    """Whether inference of a node's types ends the process, or takes memory or time without end."""
    return has_other_outputs(node) or bool(bad_equations(node))


def has_other_outputs(node: NodeProto) -> bool:
    """Whether a Split has another number of outputs than it says.

    onnx 1.23.2 checks no bounds where a Split has more outputs than its ``num_outputs``: it aborts.
    """
    if node.op_type != "Split" or node.domain not in ("", "ai.onnx"):
        return False
    given = [attribute.i for attribute in node.attribute if attribute.name == "num_outputs"]
    return any(count > 0 and count != len(node.output) for count in given)


def bad_equations(node: NodeProto) -> list[str]:
    """The equations of an Einsum that are none.

    onnx 1.23.2 and onnxruntime 1.32 look for the end of a term for ever where it holds another character.
    """
    if node.op_type != "Einsum" or node.domain not in ("", "ai.onnx"):
        return []
    given = [a.s.decode("utf-8", "replace") for a in node.attribute if a.name == "equation"]
    return [one for one in given if not _EQUATION.fullmatch(one.replace(" ", ""))]


def _blunt(model: ModelProto) -> None:
    """Take from a copy what inference does not survive; a check says what is wrong with it."""
    for node in _nodes(model.graph.node):
        _blunt_node(node)
    for node in _nodes(node for function in model.functions for node in function.node):
        _blunt_node(node)
        # What a call gives as the equation, inference puts in.
        if node.op_type == "Einsum" and any(attribute.ref_attr_name for attribute in node.attribute):
            node.op_type = _NO_OPERATOR


def _blunt_node(node: NodeProto) -> None:
    if bad_equations(node):
        node.op_type = _NO_OPERATOR
    elif has_other_outputs(node):
        for attribute in node.attribute:
            if attribute.name == "num_outputs":
                attribute.i = max(1, len(node.output))


def _calls(nodes: Iterable[NodeProto]) -> Iterator[tuple[str, str]]:
    """What nodes call, those in their subgraphs too."""
    for node in _nodes(nodes):
        yield node.domain, node.op_type


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            waiting += attribute.g.node
            for graph in attribute.graphs:
                waiting += graph.node
