"""The names of a model's weights: what lost its name gets it back, what was merged is split."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from moe_onnx.imported.merged import modules_alike, split_merged
from moe_onnx.imported.modules import MADE_UP, computed_from, is_experts, modules_of
from moe_onnx.imported.parts import Weight, Weights, float_initializers, is_matrix
from moe_onnx.imported.weights import read, sizes_of

Known = Mapping[str, tuple[str, bool]]


def find_weights(model: ir.Model, known: Known | None = None) -> Weights:
    """The weights of a model, whose graph is changed so that each parameter is a value of its own.

    Args:
        model: The model.
        known: By the made-up name of an initializer, the parameter that it is, and whether it is turned:
            where the nodes that read it do not say so any more.
    """
    graph, done = model.graph, Weights()
    for value in float_initializers(graph):
        split_merged(graph, value, done)
    made_up = [value for value in float_initializers(graph) if _is_made(value)]
    names = {str(value.name) for value in graph.initializers.values()}
    for value in float_initializers(graph):
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
    shared = {name: modules_alike(weight.value) for name, weight in done.found.items() if is_optimized}
    several = [f"'{name}' by {', '.join(read)}" for name, read in shared.items() if len(read) > 1]
    if several:
        warnings.warn(
            f"{len(several)} weights are read by several modules: {'; '.join(several[:4])}. Either they are "
            "tied, or the exporter merged parameters of equal values: they are trained as one. Export with "
            "optimize=False to keep apart what is not tied.",
            stacklevel=4,
        )
    return done


def _is_made(value: ir.Value) -> bool:
    """Whether an initializer is none of the model's own, but what an exporter made of such."""
    return bool(MADE_UP.search(str(value.name)) or computed_from(value))


def _made_of(value: ir.Value) -> str:
    sources = computed_from(value)
    return f" (computed from {', '.join(sources)})" if sources else ""


def known_before(model: ir.Model) -> Known:
    """What the weights of a model with made-up names are, for the same model rewritten."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        weights = find_weights(model)
    return {old: (new, weights.found[new].is_turned) for new, old in weights.renamed.items()}


def has_lost_experts(model: ir.Model) -> bool:
    """Whether weights of experts have made-up names."""
    return any(MADE_UP.search(str(v.name)) and is_experts(v) for v in float_initializers(model.graph))


def _rename(
    graph: ir.Graph, value: ir.Value, done: Weights, names: set[str], hint: tuple[str, bool] | None = None
) -> bool:
    """Give a matrix that constant folding made, its parameter's name and layout; False where that is lost."""
    tensor, uses = value.const_value, list(value.uses())
    assert tensor is not None
    original = str(value.name)
    plain = Weight(original, value, tensor)
    if not is_matrix(value):
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
