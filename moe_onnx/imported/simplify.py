"""What exports are full of and has no gradient, in a simpler form that gives the same values."""

from __future__ import annotations

import warnings

import onnx_ir as ir
from onnx_ir.passes import common as passes

from moe_onnx.autodiff.graphs import infer
from moe_onnx.rewrite.fold import NAME, fold_once
from moe_onnx.rewrite.notes import Notes

_ROUNDS = 8  # more shapes are known after each


def simplify(model: ir.Model) -> None:
    """Fold sizes, leave out what changes nothing, and let sequences of slices be slices."""
    failed = infer(model)
    for _ in range(_ROUNDS):
        notes = Notes(NAME)
        fold_once(model, {}, notes)
        if not notes.done:
            break
        passes.LiftConstantsToInitializersPass(lift_all_constants=False)(model)
        failed = infer(model)
    if failed:
        warnings.warn(f"Types and shapes in the model are not known, as onnx says: {failed}.", stacklevel=4)
    cast_plainly(model.graph)


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
