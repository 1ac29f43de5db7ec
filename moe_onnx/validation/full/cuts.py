"""A model cut down to some of its values, and sessions that run what a check has rewritten."""

from __future__ import annotations

from collections.abc import Iterable

import onnxruntime
from onnx import AttributeProto, ModelProto, NodeProto, TypeProto, ValueInfoProto

from moe_onnx.runtime.session import InferenceSession
from moe_onnx.validation.hazards.equations import unreadable_equation
from moe_onnx.validation.run.aborting import refuse_aborting
from moe_onnx.validation.run.messages import said
from moe_onnx.validation.run.sessions import QUIET
from moe_onnx.validation.subject import Subject

_FOLDER = "session.model_external_initializers_file_folder_path"


def cut(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """A copy of a model that makes some values of its main graph only, and holds only what they need.

    Types of the new outputs are left to inference.
    """
    wanted = list(dict.fromkeys(names))
    needed, kept = set(wanted), []
    # By need, not by order: a node may stand before those whose outputs it reads.
    makers = {name: number for number, node in enumerate(model.graph.node) for name in node.output if name}
    todo, seen = list(wanted), set()
    while todo:
        number = makers.get(todo.pop())
        if number is None or number in seen:
            continue
        seen.add(number)
        more = set(reads(model.graph.node[number])) - needed
        needed |= more
        todo += more
    kept = [node for number, node in enumerate(model.graph.node) if number in seen]
    small = ModelProto()
    for field, value in model.ListFields():
        if field.name == "graph":
            continue
        if field.name in ("opset_import", "functions"):
            getattr(small, field.name).extend(value)
        elif field.name == "ir_version":
            small.ir_version = value
    small.graph.name = model.graph.name
    small.graph.node.extend(kept)
    small.graph.input.extend(info for info in model.graph.input if info.name in needed)
    small.graph.initializer.extend(t for t in model.graph.initializer if t.name in needed)
    small.graph.sparse_initializer.extend(
        t for t in model.graph.sparse_initializer if t.values.name in needed
    )
    types = {info.name: info.type for info in model.graph.output}
    for name in wanted:
        small.graph.output.append(ValueInfoProto(name=name, type=types.get(name, TypeProto())))
    return small


def reads(node: NodeProto) -> Iterable[str]:
    """Names that a node reads, its subgraphs included (their own names do no harm)."""
    todo = [node]
    while todo:
        one = todo.pop()
        yield from (name for name in one.input if name)
        for attribute in one.attribute:
            for graph in [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs:
                yield from (output.name for output in graph.output)
                todo += graph.node


def session_of(model: ModelProto, subject: Subject, *, plain: bool = False) -> onnxruntime.InferenceSession:
    """A quiet session of one thread of a model made of the subject's; ``plain``: onnxruntime's own.

    Raises:
        Exception: Whatever onnxruntime or the model's operators have against it.
    """
    if place := unreadable_equation(subject):
        raise RuntimeError(f"onnxruntime does not come to an end with the equation of {place}")
    refuse_aborting(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong with the model is said by others
    options.intra_op_num_threads = 1
    # It runs a few times only: optimizing would take longer.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if subject.folder is not None:
        options.add_session_config_entry(_FOLDER, str(subject.folder))
    if plain:
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"], **QUIET
        )
    return InferenceSession(model, options, ["CPUExecutionProvider"], kernels="body", **QUIET)


def line(error: Exception) -> str:
    """The first line of an error's message."""
    return said(error)[:300]
