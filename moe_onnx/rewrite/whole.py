"""``legalize`` and ``to_float64`` as passes: nodes are told by what changed in the whole."""

from __future__ import annotations

from collections import Counter

from onnx import ModelProto, NodeProto, TensorProto

from moe_onnx.adapters.python_ops import SESSION_DOMAIN
from moe_onnx.rewrite.legalize import BODY_DOMAIN, legalize
from moe_onnx.rewrite.notes import MARK, ROUNDING, Notes, Pass, mark, scopes
from moe_onnx.rewrite.to_float64 import to_float64

_LIFTED = {"float32": 1e-4}


def legalize_for_python(model: ModelProto, notes: Notes) -> ModelProto:
    """What :func:`moe_onnx.rewrite.legalize.legalize` does for the Python route, without a session."""
    done = legalize(model, route="python")
    if _same(model, done.model):
        return model
    before = _nodes(model)
    for place, node in _new(before, done.model):
        mark(node, "legalize")
        if node.domain == SESSION_DOMAIN:
            notes.applied(node, "is called as a Python op, its attributes and inputs written out", place)
        elif node.domain == BODY_DOMAIN:
            notes.applied(node, "runs its function body, its attributes and inputs written out", place)
        else:
            notes.applied(node, "written for a node beside it, or inlined from a function", place)
    for text in done.notes:
        notes.skipped("", text)
    if not notes.done:
        notes.applied("", "functions and opset imports written out")
    return done.model


def lift(model: ModelProto, notes: Notes) -> ModelProto:
    """What :func:`moe_onnx.rewrite.to_float64.to_float64` does."""
    lifted = to_float64(model)
    if _same(model, lifted):
        return model
    before = _nodes(model)
    for place, node in _new(before, lifted):
        mark(node, "to_float64")
        notes.applied(node, "in double precision", place)
    held = (t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL)
    tensors = sum(tensor.data_type == 1 for tensor in held)
    values = sum(value.type.tensor_type.elem_type == 1 for value in (*model.graph.input, *model.graph.output))
    notes.applied("", f"{tensors} initializers, {values} inputs and outputs of float32 are of float64")
    return lifted


def _same(before: ModelProto, after: ModelProto) -> bool:
    return bool(before.SerializeToString(deterministic=True) == after.SerializeToString(deterministic=True))


def _plain(node: NodeProto) -> bytes:
    """A node without its mark and without its subgraphs, whose nodes are looked at themselves."""
    copy = NodeProto()
    copy.CopyFrom(node)
    for attr in copy.attribute:
        attr.ClearField("g")
        attr.ClearField("graphs")
    for entry in list(copy.metadata_props):
        if entry.key == MARK:
            copy.metadata_props.remove(entry)
    data: bytes = copy.SerializeToString(deterministic=True)
    return data


def _nodes(model: ModelProto) -> Counter[tuple[str, bytes]]:
    return Counter((scope.place, _plain(node)) for scope in scopes(model) for node in scope.owner.node)


def _new(before: Counter[tuple[str, bytes]], after: ModelProto) -> list[tuple[str, NodeProto]]:
    """The nodes that were not in the model before; bodies of functions that were not there are left out."""
    places = {place for place, _ in before}
    return [
        (scope.place, node)
        for scope in scopes(after)
        if scope.function is None or scope.place in places
        for node in scope.owner.node
        if (scope.place, _plain(node)) not in before
    ]


LEGALIZE = Pass(
    "legalize",
    summary="ascend.moe nodes in the form that this package's Python ops take.",
    needs="ascend.moe nodes, and onnxruntime-extensions to run the result (moe_onnx.register)",
    leaves=f"nodes of {SESSION_DOMAIN}, and function bodies of {BODY_DOMAIN} for those without a Python op",
    apply=legalize_for_python,
    tolerance=ROUNDING,  # Python kernels sum in another order than bodies
)
TO_FLOAT64 = Pass(
    "to_float64",
    summary="Double precision wherever there was float32, for finite differences.",
    needs="a model of float32, none of its floats of 16 bits",
    leaves="float64 inputs, outputs, constants and casts, of the same values; external data stays float32",
    apply=lift,
    tolerance=_LIFTED,
    other_floats=True,
)
