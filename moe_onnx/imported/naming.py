"""The weights in a model: what exporters merged is split, what lost its name gets it back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from moe_onnx.imported.modules import (
    BUFFERS,
    MADE_UP,
    computed_from,
    is_experts,
    is_parameter,
    kind_of,
    modules_of,
    owns,
    says_modules,
)
from moe_onnx.imported.weights import read, sizes_of

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
Use = Any  # a node and the slot that it reads a value in: onnx-ir has no public type for it
_READ_AS_WEIGHT = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Gather": 0, "GatherND": 0}


@dataclass
class Weight:
    """A parameter to be: the value that the graph reads, and its tensor, whose transpose it may be."""

    name: str
    value: ir.Value
    tensor: ir.TensorProtocol
    is_turned: bool = False


@dataclass
class Weights:
    """All float initializers of a model by the name that the parameter has, and what was done to them."""

    found: dict[str, Weight] = field(default_factory=dict)
    split: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def is_weight(self, weight: Weight) -> bool:
        """The rule for what is trained where nobody says otherwise.

        What the exporter calls a parameter. Where it does not say: floats that are no scalars, no buffer of
        a known name, and that have a name of their own, are what a product or lookup reads as its matrix,
        or were computed from a parameter.
        """
        if (said := is_parameter(weight.value)) is not None:
            return said
        if (sources := computed_from(weight.value)) and not MADE_UP.search(weight.name):
            is_named = weight.name in self.renamed or any(_of_module(name) for name in sources)
            return is_named or _is_matrix(weight.value)
        if any(_of_module(name) for name in sources):
            return True
        if not len(weight.tensor.shape) or BUFFERS.search(weight.name):
            return False
        original = self.renamed.get(weight.name, weight.name)
        return not MADE_UP.search(original) or weight.name in self.renamed or _is_matrix(weight.value)


Known = Mapping[str, tuple[str, bool]]


def find_weights(model: ir.Model, known: Known | None = None) -> Weights:
    """The weights of a model, whose graph is changed so that each parameter is a value of its own.

    Args:
        model: The model.
        known: By the made-up name of an initializer, the parameter that it is, and whether it is turned:
            where the nodes that read it do not say so any more.
    """
    graph, done = model.graph, Weights()
    for value in _float_initializers(graph):
        _split_merged(graph, value, done)
    made_up = [value for value in _float_initializers(graph) if _is_made(value)]
    names = {str(value.name) for value in graph.initializers.values()}
    for value in _float_initializers(graph):
        if value not in made_up:
            assert value.const_value is not None
            done.found[str(value.name)] = Weight(str(value.name), value, value.const_value)
    lost, is_optimized = [], any(computed_from(value) for value in made_up)
    for value in made_up:
        hint = None if known is None else known.get(str(value.name))
        lost += [] if _rename(graph, value, done, names, hint) else [f"'{value.name}'{_made_of(value)}"]
    if lost:
        warnings.warn(
            f"{len(lost)} weights have made-up names, and nothing says which parameters they are: "
            f"{', '.join(lost[:4])}. They are trained so. Export with optimize=False to keep names.",
            stacklevel=4,
        )
    shared = {name: _modules_alike(weight.value) for name, weight in done.found.items() if is_optimized}
    several = [f"'{name}' by {', '.join(read)}" for name, read in shared.items() if len(read) > 1]
    if several:
        warnings.warn(
            f"{len(several)} weights are read by several modules: {'; '.join(several[:4])}. Either they are "
            "tied, or the exporter merged parameters of equal values: they are trained as one. Export with "
            "optimize=False to keep apart what is not tied.",
            stacklevel=4,
        )
    return done


def _of_module(name: str) -> bool:
    """Whether a name is that of a module's weight; values of a trace are ``div``, ``arange_5``."""
    return "." in name and not BUFFERS.search(name)


def _is_made(value: ir.Value) -> bool:
    """Whether an initializer is none of the model's own, but what an exporter made of such."""
    return bool(MADE_UP.search(str(value.name)) or computed_from(value))


def _made_of(value: ir.Value) -> str:
    sources = computed_from(value)
    return f" (computed from {', '.join(sources)})" if sources else ""


def _modules_alike(value: ir.Value) -> list[str]:
    """The modules that read a matrix in the same way, where there are several."""
    readers: dict[str, dict[str, None]] = {}
    waiting = list(value.uses())
    while waiting:
        use = waiting.pop(0)
        if use.node.op_type == "Transpose" and not use.node.domain:
            waiting += use.node.outputs[0].uses()
        elif _READ_AS_WEIGHT.get(use.node.op_type) == use.idx and says_modules(use.node):
            how = "lookup" if use.node.op_type.startswith("Gather") else "product"
            readers.setdefault(how, {}).update(dict.fromkeys(modules_of(use.node)[-1:]))
    return next((list(modules) for modules in readers.values() if len(modules) > 1), [])


def _float_initializers(graph: ir.Graph) -> list[ir.Value]:
    found = [value for value in graph.initializers.values() if value.const_value is not None]
    return [value for value in found if value.const_value.dtype in FLOATS]  # type: ignore[union-attr]


def _split_merged(graph: ir.Graph, value: ir.Value, done: Weights) -> None:
    """Give each module that reads an initializer of another one a parameter of its own."""
    name, tensor = str(value.name), value.const_value
    assert tensor is not None
    for use in list(value.uses()):
        out = use.node.outputs[0]
        is_alias = use.node.op_type == "Identity" and _is_parameters(name) and _is_parameters(str(out.name))
        # torch.onnx.export(dynamo=False) leaves an Identity from the parameter kept to each merged one.
        if is_alias and str(out.name) not in graph.initializers and not out.is_graph_output():
            _new_parameter(graph, value, str(out.name), list(out.uses()), done)
            graph.remove(use.node, safe=True)
    if "." not in name or not _may_be_merged(tensor, name):
        return
    # A module that is called twice is another one by names of nodes; there, Identities say what was merged.
    uses = [(use, modules_of(use.node)) for use in value.uses() if says_modules(use.node)]
    if not any(modules and owns(modules, name) for _, modules in uses):
        return  # read by others only: a module around it, which is no other parameter
    others: dict[str, list[Use]] = {}
    for use, modules in uses:
        if modules and not owns(modules, name):
            other = f"{modules[-1]}.{kind_of(use.node, use.idx, name)}"
            others.setdefault(other, []).append(use)
    for other, several in others.items():
        if other not in graph.initializers:
            _new_parameter(graph, value, other, several, done)


def _is_parameters(name: str) -> bool:
    return "." in name or bool(MADE_UP.search(name))


def _new_parameter(graph: ir.Graph, value: ir.Value, name: str, uses: list[Use], done: Weights) -> None:
    for use in uses:
        for out in use.node.outputs:
            if out.name == name:
                out.name = f"{name}/value"
    new = ir.Value(
        name=name,
        type=value.type,
        shape=value.shape,
        const_value=value.const_value,
        metadata_props=dict(value.metadata_props),
    )
    graph.register_initializer(new)
    for use in uses:
        use.node.replace_input_with(use.idx, new)
    done.split[name] = str(value.name)


def _may_be_merged(tensor: ir.TensorProtocol, name: str) -> bool:
    """Vectors, and what is the same everywhere. A matrix of two uses is tied: an embedding and its head."""
    if not len(tensor.shape):
        return False
    if len(tensor.shape) == 1:
        return True
    value = read(tensor, name)
    return bool(value.size) and bool((value == value.reshape(-1)[0]).all())


def _is_matrix(value: ir.Value) -> bool:
    """Whether a product or a lookup reads a value as its matrix."""
    if len(value.shape or ()) < 2:
        return False
    uses = [use for use in value.uses() if use.node.domain == ""]
    return any(_READ_AS_WEIGHT.get(use.node.op_type) == use.idx for use in uses) or is_experts(value)


def known_before(model: ir.Model) -> Known:
    """What the weights of a model with made-up names are, for the same model rewritten."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        weights = find_weights(model)
    return {old: (new, weights.found[new].is_turned) for new, old in weights.renamed.items()}


def has_lost_experts(model: ir.Model) -> bool:
    """Whether weights of experts have made-up names."""
    return any(MADE_UP.search(str(v.name)) and is_experts(v) for v in _float_initializers(model.graph))


def _rename(
    graph: ir.Graph, value: ir.Value, done: Weights, names: set[str], hint: tuple[str, bool] | None = None
) -> bool:
    """Give a matrix that constant folding made, its parameter's name and layout; False where that is lost."""
    tensor, uses = value.const_value, list(value.uses())
    assert tensor is not None
    original = str(value.name)
    plain = Weight(original, value, tensor)
    if not _is_matrix(value):
        done.found[original] = plain
        return not done.is_weight(plain)  # an epsilon, a table of positions
    if hint is not None and is_experts(value):
        return _call(graph, value, done, names, *hint)
    modules = {tuple(modules_of(use.node)) for use in uses}
    module = next(iter(modules))
    is_turned = len(tensor.shape) == 2 and all(u.node.op_type == "MatMul" and u.idx == 1 for u in uses)
    tied = _same(tensor, done, original) if is_turned else None
    if tied is not None:  # an embedding, and the output projection that reads its transpose
        _turn(graph, value, tied)
        return True
    sources = computed_from(value)
    if is_turned and len(sources) == 1 == len(computed_from(value, all_of_them=True)):
        return _call(graph, value, done, names, sources[0], is_turned)
    if len(modules) != 1 or not module or not MADE_UP.search(original):
        done.found[original] = plain
        return False
    return _call(graph, value, done, names, f"{module[-1]}.weight", is_turned)


def _call(
    graph: ir.Graph, value: ir.Value, done: Weights, names: set[str], base: str, is_turned: bool
) -> bool:
    """Give a weight a name that nothing has, and its own layout."""
    tensor, original = value.const_value, str(value.name)
    assert tensor is not None
    name, number = base, 1
    while name in names:
        number += 1
        name = f"{base}_{number}"
    names.add(name)
    done.renamed[name] = original
    if original in done.split:
        done.split[name] = done.split.pop(original)
    if not is_turned:
        del graph.initializers[original]
        value.name = name
        graph.register_initializer(value)
        done.found[name] = Weight(name, value, tensor)
        return True
    shape = ir.Shape(list(sizes_of(tensor))[::-1])
    new = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(new)
    _turn(graph, value, new)
    done.found[name] = Weight(name, new, tensor, is_turned=True)
    return True


def _turn(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let the users of ``old`` read the transpose of ``new``."""
    node = ir.Node("", "Transpose", [new], [ir.AttrInt64s("perm", [1, 0])], name=f"{old.name}/transpose")
    name = str(old.name)
    graph.insert_before(graph[0], node)
    ir.convenience.replace_all_uses_with(old, node.outputs[0])
    del graph.initializers[name]
    node.outputs[0].name = name
    node.outputs[0].type, node.outputs[0].shape = old.type, old.shape


def _same(tensor: ir.TensorProtocol, done: Weights, name: str) -> ir.Value | None:
    """The parameter of which a tensor is the transpose, in every bit."""
    shape = sizes_of(tensor)[::-1]
    if min(shape) < 2:
        return None
    for weight in done.found.values():
        other = weight.tensor
        if weight.is_turned or tuple(other.shape) != shape or other.dtype != tensor.dtype:
            continue
        mine, theirs = read(tensor, name), read(other, weight.name)
        if np.array_equal(mine[:, 0], theirs[0]) and np.array_equal(mine.T, theirs):
            return weight.value
    return None


def places(weight: Weight) -> int:
    """How many nodes read a weight."""
    return len(set(_readers(weight.value)))


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    yield from (use.node for use in value.uses())
