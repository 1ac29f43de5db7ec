"""Parameters that an exporter has merged, as their values are equal: each module gets its own again."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from moe_onnx.imported.modules import MADE_UP, kind_of, modules_of, owns, says_modules
from moe_onnx.imported.parts import READ_AS_WEIGHT, Weights
from moe_onnx.imported.weights import read

Use = Any  # a node and the slot that it reads a value in: onnx-ir has no public type for it


def split_merged(graph: ir.Graph, value: ir.Value, done: Weights) -> None:
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


def modules_alike(value: ir.Value) -> list[str]:
    """The modules that read a matrix in the same way, where there are several."""
    readers: dict[str, dict[str, None]] = {}
    waiting = list(value.uses())
    while waiting:
        use = waiting.pop(0)
        if use.node.op_type == "Transpose" and not use.node.domain:
            waiting += use.node.outputs[0].uses()
        elif READ_AS_WEIGHT.get(use.node.op_type) == use.idx and says_modules(use.node):
            how = "lookup" if use.node.op_type.startswith("Gather") else "product"
            readers.setdefault(how, {}).update(dict.fromkeys(modules_of(use.node)[-1:]))
    return next((list(modules) for modules in readers.values() if len(modules) > 1), [])
