"""``fold``: sizes that are known become constants, and nodes that change nothing go, bit for bit.

This is what ``torch.onnx.export(optimize=False)`` leaves to do, and its optimizer does at the price of the
names of weights: what other passes look for stands behind Transposes that turn nothing and computed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from moe_onnx.rewrite.by_ir import by_ir
from moe_onnx.rewrite.fuse.graph import attribute, ints, is_op, producer, rank, reads
from moe_onnx.rewrite.fuse.types import Types, homes_of, inferred, typed, values_of
from moe_onnx.rewrite.nodes import fresh
from moe_onnx.rewrite.notes import EXACT, Notes, Pass, mark

NAME = "fold"
_MOST = 64  # elements of what is folded: sizes, axes, indices
_ROUNDS = 8  # more shapes are known after each
_UNSTABLE = ("Random", "Multinomial", "Bernoulli", "SequenceC", "Optional", "Constant", "Identity")
Array = np.ndarray[Any, Any]


def fold(model: ModelProto, notes: Notes) -> ModelProto:
    """Fold what is known, until nothing more is."""
    for _ in range(_ROUNDS):
        types, more = inferred(model), Notes(notes.by)
        model = by_ir(lambda inner, said, types=types: fold_once(inner, types, said))(model, more)  # type: ignore[misc]
        notes.done += more.done
        if not more.done:
            break
    return model


def fold_once(model: ir.Model, types: Mapping[tuple[str, str, str], Types], notes: Notes) -> None:
    """Fold in place what is known by the shapes of values, and by these types."""
    homes = homes_of(model, 0)
    every = [graph for _, home, _ in homes for graph in (home, *home.subgraphs())]
    names = {str(value.name) for graph in every for value in values_of(graph)}
    for key, home, version in homes:
        inside = [home, *home.subgraphs()]
        with typed([value for graph in inside for value in values_of(graph)], types.get(key, {})):
            for graph in inside:
                for node in list(graph):
                    if node.graph is graph:  # not dropped meanwhile
                        _fold_node(graph, node, version, notes, names)


def _fold_node(graph: ir.Graph, node: ir.Node, version: int, notes: Notes, names: set[str]) -> None:
    if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1 or node.op_type.startswith(_UNSTABLE):
        return
    out, place = node.outputs[0], notes.places.get(id(graph), "")
    if not out.uses():
        return
    if is_op(node, "Reshape") and small(node.inputs[0]) is None:  # type: ignore[arg-type]
        _free_one(graph, node, notes, place, names)
        return
    if out.is_graph_output():
        return
    if is_op(node, "SequenceAt"):
        _slice(graph, node, notes, place, names)
        return
    same = unchanged(node)
    if same is not None:
        notes.applied(node, f"gives '{same.name}' as it is", place)
        ir.convenience.replace_all_uses_with(out, same)
        _drop(node)
        return
    value = _value(node, version)
    if value is not None:
        notes.applied(node, f"is a constant: {value.tolist()}", place)
        _constant(graph, node, value, out, names)


def unchanged(node: ir.Node) -> ir.Value | None:
    """The input that a node gives back."""
    x = reads(node, 0)
    if x is None or any(attr.is_ref() for attr in node.attributes.values()):
        return None
    if is_op(node, "Transpose"):
        perm = list(attribute(node, "perm", ()))
        return x if (perm and perm == sorted(perm)) or rank(x) in (0, 1) else None
    if is_op(node, "Concat", "Max", "Min", "Sum"):
        return x if len(node.inputs) == 1 else None
    if is_op(node, "Squeeze"):
        wide, at = producer(x, "Unsqueeze"), ints(reads(node, 1))
        there_and_back = wide is not None and at and len(at) == 1 and ints(wide.inputs[1]) == at
        return wide.inputs[0] if wide is not None and there_and_back else None
    shape = producer(reads(node, 1), "Shape") if is_op(node, "Expand") else None
    whole = shape is not None and attribute(shape, "start", 0) == 0 and "end" not in shape.attributes
    return x if whole and shape is not None and shape.inputs[0] is x else None


def _value(node: ir.Node, version: int) -> Array | None:
    """The integers or booleans that a node gives, where they are known."""
    if any(attr.is_ref() for attr in node.attributes.values()):
        return None
    if is_op(node, "Shape"):
        x = node.inputs[0]
        if x is None or (x.shape is None and x.const_value is None):
            return None
        dims: Any = x.shape if x.shape is not None else x.const_value.shape  # type: ignore[union-attr]
        picked = list(dims)[attribute(node, "start", 0) : attribute(node, "end", None)]
        return np.array(picked, np.int64) if all(isinstance(dim, int) for dim in picked) else None
    values = [small(value) for value in node.inputs if value is not None]
    if is_op(node, "NonZero") and rank(node.inputs[0]) == 0:
        return None  # onnxruntime finds a place in a number, onnx none
    if not values or any(value is None for value in values):
        return None
    if any(
        attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()
    ):
        return None
    return evaluated(node, [value for value in values if value is not None], version)


def small(value: ir.Value) -> Array | None:
    """What is known of a value: a small constant of integers or booleans, or one float."""
    maker = producer(value, "Constant")
    if value.is_graph_input() or (maker is not None and len(maker.attributes) != 1):
        return None  # what a caller gives, or a node that is none
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > _MOST:
        return None
    if isinstance(tensor, ir.ExternalTensor) and not tensor.base_dir:
        return None  # a ModelProto does not say where its files are
    return None if tensor.size > 1 and tensor.dtype.is_floating_point() else tensor.numpy()


def evaluated(node: ir.Node, values: list[Array], version: int) -> Array | None:
    """A few integers or booleans that a node gives for constants; else, or if onnx cannot tell, None."""
    try:
        proto = ir.to_proto(node)
        names = [name for name in proto.input if name]
        graph = onnx.helper.make_graph(
            [proto],
            "one",
            [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in dict.fromkeys(names)],
            [onnx.helper.make_value_info(proto.output[0], onnx.TypeProto())],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
        (result,) = ReferenceEvaluator(model).run(None, dict(zip(names, values, strict=True)))
    except Exception:  # whatever a wrong node makes it raise: it stays as it is
        return None
    found = np.asarray(result)
    return found if found.size <= _MOST and found.dtype.kind in "iub" else None


def _free_one(graph: ir.Graph, node: ir.Node, notes: Notes, place: str, names: set[str]) -> None:
    """Let a Reshape to ``[a computed size, 2, 16]`` be one to ``[-1, 2, 16]``.

    The number of elements leaves one size open: where the size that was computed is another one, the
    Reshape fails before, and does not now.
    """
    parts = producer(reads(node, 1), "Concat")
    if parts is None:
        return
    sizes: list[int] = []
    for value in parts.inputs:
        known = None if value is None else small(value)
        if known is not None and known.dtype.kind == "i" and (known > 0).all():
            sizes += [int(size) for size in known.reshape(-1)]
        elif value is not None and value.shape is not None and list(value.shape) == [1] and -1 not in sizes:
            sizes.append(-1)
        else:
            return
    if sizes.count(-1) == 1:
        notes.applied(node, f"to {sizes}: the one size that is computed is what is left", place)
        shape = _new(graph, node, np.array(sizes, np.int64), fresh(f"{node.outputs[0].name}/shape", names))
        node.replace_input_with(1, shape)
        _drop(parts)


def _slice(graph: ir.Graph, node: ir.Node, notes: Notes, place: str, names: set[str]) -> None:
    """Let ``SequenceAt(SplitToSequence(x, lengths), i)`` be a Slice: sequences have no gradients."""
    split = producer(node.inputs[0], "SplitToSequence")
    lengths, index = ints(reads(split, 1)) if split is not None else None, ints(node.inputs[1])
    axes = rank(split.inputs[1]) if split is not None and lengths else None
    if (
        split is None
        or lengths is None
        or index is None
        or axes is None
        or not attribute(split, "keepdims", 1)
    ):
        return
    at = index[0]
    if not 0 <= at < (len(lengths) if axes else at + 1):
        return
    start = sum(lengths[:at]) if axes else at * lengths[0]
    stop = start + (lengths[at] if axes else lengths[0])
    out, name = node.outputs[0], str(node.outputs[0].name)
    inputs = [split.inputs[0]]
    for what, number in (("start", start), ("stop", stop), ("axis", attribute(split, "axis", 0))):
        inputs.append(_new(graph, node, np.array([number], np.int64), fresh(f"{name}/{what}", names)))
    made = ir.Node("", "Slice", inputs, name=node.name, metadata_props=dict(node.metadata_props))
    mark(made, NAME)
    notes.applied(node, f"is a Slice [{start}:{stop}] of '{split.inputs[0].name}'", place)  # type: ignore[union-attr]
    graph.insert_before(node, made)
    kept = (out.type, out.shape)
    ir.convenience.replace_all_uses_with(out, made.outputs[0])
    _drop(node)
    made.outputs[0].name, (made.outputs[0].type, made.outputs[0].shape) = name, kept


def _constant(graph: ir.Graph, node: ir.Node, value: Array, out: ir.Value, names: set[str]) -> None:
    name, kept = str(out.name), (out.type, out.shape)
    out.name = fresh(f"{name}/computed", names)
    new = _new(graph, node, value, name)
    new.type, new.shape = kept
    ir.convenience.replace_all_uses_with(out, new)
    _drop(node)


def _drop(node: ir.Node) -> None:
    """Take away a node that nothing reads any more, and those that only it read."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.graph is None or any(out.uses() or out.is_graph_output() for out in one.outputs):
            continue
        waiting += [maker for value in one.inputs if value is not None and (maker := value.producer())]
        one.graph.remove(one, safe=True)


def _new(graph: ir.Graph, before: ir.Node, value: Array, name: str) -> ir.Value:
    """A node, not an initializer, which functions do not have."""
    made = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(value))], name=name)
    made.outputs[0].name = name
    mark(made, NAME)
    graph.insert_before(before, made)
    return made.outputs[0]


FOLD = Pass(
    NAME,
    summary="Sizes that are known become constants, nodes that change nothing go: before fuse.",
    needs="shapes that onnx can infer",
    leaves="Constants of at most 64 integers; no weight is read",
    apply=fold,
    tolerance=EXACT,
)
