"""What exports are full of and has no gradient, in a simpler form that gives the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from moe_onnx.autodiff.gradients import attribute, constant_ints
from moe_onnx.imported.weights import read

_MOST = 64  # elements of what is folded: sizes, axes, indices; weights stay what they are


def slice_sequences(graph: ir.Graph) -> None:
    """Let ``SequenceAt(SplitToSequence(x, lengths), i)`` be a Slice, where lengths and i are constants.

    Sequences have no gradients; slices have.
    """
    for node in list(graph):
        if node.op_type != "SplitToSequence" or node.domain or len(node.inputs) < 2:
            continue
        lengths, users = node.inputs[1], list(node.outputs[0].uses())
        parts, rank = constant_ints(lengths), None if lengths is None else _rank(lengths)
        if parts is None or rank is None or not attribute(node, "keepdims", 1):
            continue
        if node.outputs[0].is_graph_output():
            continue
        for use in users:
            index = constant_ints(use.node.inputs[1]) if use.node.op_type == "SequenceAt" else None
            if index is None or index[0] < 0 or (rank and index[0] >= len(parts)):
                continue
            start = sum(parts[: index[0]]) if rank else index[0] * parts[0]
            length = parts[index[0]] if rank else parts[0]
            _replace(graph, node, use.node, start, start + length)
        if not node.outputs[0].uses():
            graph.remove(node, safe=True)


def fold_sizes(graph: ir.Graph, version: int) -> None:
    """Replace nodes that compute small integers or booleans from constants by what they give."""
    known: dict[ir.Value, np.ndarray[Any, Any]] = {}
    for node in list(graph):
        values = [_small(value, known) for value in node.inputs if value is not None]
        if (
            not values
            or any(value is None for value in values)
            or node.domain
            or len(node.outputs) != 1
            or any(
                a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()
            )
            or node.op_type.startswith(("Random", "Multinomial", "Bernoulli", "Sequence", "Optional"))
        ):
            continue
        result = _evaluated(node, [value for value in values if value is not None], version)
        out = node.outputs[0]
        if result is None or result.size > _MOST or result.dtype.kind not in "iub" or out.is_graph_output():
            continue
        known[out] = result
        name, tensor = str(out.name), ir.tensor(result)
        shape = ir.Shape(list(result.shape))
        new = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        ir.convenience.replace_all_uses_with(out, new)
        out.name = f"{name}/folded"
        graph.remove(node, safe=True)
        graph.register_initializer(new)
        known[new] = result


def _small(value: ir.Value, known: dict[ir.Value, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    if value in known:
        return known[value]
    tensor = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > _MOST or (tensor.size > 1 and tensor.dtype.is_floating_point()):
        return None
    return read(tensor, str(value.name))


def _evaluated(
    node: ir.Node, values: list[np.ndarray[Any, Any]], version: int
) -> np.ndarray[Any, Any] | None:
    """The output of a node, None where onnx cannot tell."""
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
    return np.asarray(result)


def cast_plainly(graph: ir.Graph) -> None:
    """Let CastLike be the Cast that it is: the second input, which it takes the type of, has no gradient."""
    for node in graph:
        if node.op_type != "CastLike" or node.domain or len(node.inputs) != 2:
            continue
        like, out = node.inputs[1], node.outputs[0]
        if like is None or like.dtype is None:
            continue
        new = ir.Node(
            "", "Cast", [node.inputs[0]], [ir.AttrInt64("to", int(like.dtype))], name=node.name,
            metadata_props=dict(node.metadata_props),
        )  # fmt: skip
        graph.insert_before(node, new)
        name, kind, shape = out.name, out.type, out.shape
        ir.convenience.replace_all_uses_with(out, new.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
        new.outputs[0].name, new.outputs[0].type, new.outputs[0].shape = name, kind, shape


def _rank(value: ir.Value) -> int | None:
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else len(tensor.shape)


def _replace(graph: ir.Graph, split: ir.Node, at: ir.Node, start: int, stop: int) -> None:
    out = at.outputs[0]
    inputs = [split.inputs[0]]
    for what, number in (("start", start), ("stop", stop), ("axis", attribute(split, "axis", 0))):
        tensor = ir.tensor(np.array([number], np.int64))
        name = f"{out.name}/{what}"
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)  # type: ignore[arg-type]
        graph.register_initializer(value)
        inputs.append(value)
    node = ir.Node("", "Slice", inputs, name=at.name, metadata_props=dict(at.metadata_props))
    graph.insert_before(at, node)
    new, kept = node.outputs[0], out.name
    ir.convenience.replace_all_uses_with(out, new, replace_graph_outputs=True)
    graph.remove(at, safe=True)
    new.name = kept
