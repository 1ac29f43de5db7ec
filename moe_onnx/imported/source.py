"""A model made ready: its loss found, its parameters chosen, everything else as it was."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from moe_onnx.autodiff.bodies import expand_bodies
from moe_onnx.autodiff.gradients import sizes
from moe_onnx.autodiff.graphs import infer
from moe_onnx.autodiff.subgraphs import is_float
from moe_onnx.build.imported import CROSS_ENTROPY, LABELS, TARGET, ImportedModel
from moe_onnx.build.parameters import Parameter
from moe_onnx.errors import ModelError
from moe_onnx.imported.batch_norms import warn_of_batch_norms
from moe_onnx.imported.choice import chosen
from moe_onnx.imported.fusing import Fused
from moe_onnx.imported.losses import MASK, is_builtin
from moe_onnx.imported.naming import Known, find_weights, has_lost_experts, known_before
from moe_onnx.imported.parts import Weight, places
from moe_onnx.imported.reading import read_model
from moe_onnx.imported.root import find_root, shape_of, shifts
from moe_onnx.imported.simplify import simplify
from moe_onnx.imported.weights import ImportedWeights, read

_MOST_BYTES = 1 << 30  # of constants that every graph carries: a protobuf holds 2 GiB
_RESERVED = ("loss", "grad_norm", "num_tokens", "lr", "step", "loss_scale", LABELS, TARGET)
_HYPERPARAMETERS = ("lr", "step", "loss_scale", "grad_norm")


@dataclass
class Source:
    """What the graphs are made from.

    Attributes:
        model: Inputs (the parameters after the batch) and nodes; constants, but no parameter's values.
        outputs: Names of the model's own outputs.
        config: What is known of it.
        params: In the graphs' order.
        weights: Their values.
    """

    model: onnx.ModelProto
    outputs: tuple[str, ...]
    config: ImportedModel
    params: list[Parameter]
    weights: ImportedWeights


def prepare(
    given: Fused,
    *,
    loss: str,
    params: Sequence[str] | None,
    output: str | None,
    ignore_index: int,
    shift: bool | None,
) -> Source:
    """Read a model and change it into a source of training graphs; arguments as of the public function."""
    found = read_model(given.model, given.folder)
    graph = found.graph
    simplify(found)
    warn_of_batch_norms(graph)
    # Of all that may be trained: which weights are is known only when nodes are as they stay.
    floats = [str(value.name) for value in graph.initializers.values() if is_float(value)]
    while expand_bodies(found, str(find_root(graph, _values(graph), loss, output).name), floats):
        infer(found)
    known = find_weights(found, _names_before(given, found))
    values = _values(graph)
    root = find_root(graph, values, loss, output)
    weights = chosen(known, params, root)
    names = _freed_names(graph, values, [weight.name for weight in weights], root)
    halves = {w.tensor.dtype for w in weights} & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    dtype = "float16" if ir.DataType.FLOAT16 in halves else "bfloat16" if halves else "float32"
    products = [
        n for n in graph if n.op_type in ("MatMul", "Gemm") and n.outputs[0].dtype == ir.DataType.BFLOAT16
    ]
    if products:
        warnings.warn(
            "The model computes in bfloat16, and onnxruntime has no products of it for a CPU: its graphs run "
            "only on a device that has. Export it in float32, or float16, to train it on a CPU.",
            stacklevel=3,
        )
    logits = root if is_builtin(loss) else None
    limits = _limits(graph)
    dims = sizes(root)
    if loss == CROSS_ENTROPY and dims and isinstance(dims[-1], int):
        limits[LABELS] = dims[-1]
    config = ImportedModel(
        loss=loss if logits is not None else names.get(loss, loss),
        output="" if logits is None else names.get(str(root.name), str(root.name)),
        target="" if logits is None else LABELS if loss == CROSS_ENTROPY else TARGET,
        ignore_index=ignore_index,
        shift=shifts(loss, shift, dims),
        inputs={str(v.name): (_dtype(v), shape_of(v)) for v in graph.inputs},
        limits=limits,
        dtype=dtype,
        tied=tuple(weight.name for weight in weights if places(weight) > 1),
        split={w.name: known.split[w.name] for w in weights if w.name in known.split},
        renamed={w.name: known.renamed[w.name] for w in weights if w.name in known.renamed},
        fused=given.fused,
        not_fused=given.not_fused,
        verified=given.verified,
        producer=found.producer_name or "",
    )
    if set(config.inputs) <= {"input_ids", MASK, LABELS} and config.shift and "input_ids" in limits:
        config = _with_vocabulary(config)
    tensors = {weight.name: (weight.tensor, weight.is_turned) for weight in weights}
    own = ImportedWeights(tensors)
    parameters = [_parameter(weight, own) for weight in weights]
    _make_inputs(graph, weights)
    _load_constants(graph, [w for w in known.found.values() if w not in weights])
    outputs = tuple(str(value.name) for value in graph.outputs)
    return Source(ir.to_proto(found), outputs, config, parameters, own)


def _names_before(given: Fused, found: ir.Model) -> Known | None:
    """What made-up names of experts' weights mean: nodes that fuse has made do not say of which module."""
    if given.before is None or not has_lost_experts(found):
        return None
    before = read_model(given.before, given.folder)
    simplify(before)
    return known_before(before)


def _dtype(value: ir.Value) -> str:
    if value.dtype is None or not isinstance(value.type, ir.TensorType):
        raise ModelError(f"Input '{value.name}' is no tensor ({value.type}). Training feeds tensors only.")
    if value.dtype == ir.DataType.UNDEFINED:
        raise ModelError(
            f"Input '{value.name}' must have an element type, got none. Give it one in the model."
        )
    return str(value.dtype.numpy().name)


def _values(graph: ir.Graph) -> dict[str, ir.Value]:
    values = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    return values | {str(v.name): v for node in graph for v in node.outputs if v.name}


def _freed_names(
    graph: ir.Graph, values: dict[str, ir.Value], params: Sequence[str], root: ir.Value
) -> dict[str, str]:
    """Rename the model's values whose names training graphs need; give new names by old."""
    for value in graph.inputs:
        if value.name in _HYPERPARAMETERS:
            raise ModelError(
                f"The model has an input '{value.name}', which training graphs have one of their own of. "
                "Rename it."
            )
    taken = set(_RESERVED)
    for name in params:
        taken |= {f"{name}.{end}" for end in ("grad", "updated", "exp_avg", "exp_avg_sq", "momentum_buffer")}
    outputs, renamed = {str(v.name) for v in graph.outputs}, {}
    for name in sorted((taken & set(values)) | {str(v.name) for v in graph.outputs if v.name in taken}):
        value = values[name]
        if value.is_graph_input() and name in (LABELS, TARGET):
            continue
        if value.is_initializer() or (value.is_graph_input() and name in taken):
            raise ModelError(f"The model has a value '{name}', a name that training graphs need. Rename it.")
        new = f"{name}/model"
        while new in values or new in outputs:
            new += "_"
        value.name = renamed[name] = new
    return renamed


def _limits(graph: ir.Graph) -> dict[str, int]:
    """Inputs of integers that look up rows of a table, and how many rows there are."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
            continue
        for use in value.uses():
            table = use.node.inputs[0] if use.node.op_type == "Gather" and use.idx == 1 else None
            dims = None if table is None else sizes(table)
            if dims and table is not None and table.is_initializer():
                axis = use.node.attributes.get("axis")
                rows = dims[0 if axis is None else axis.as_int()]
                if isinstance(rows, int) and rows > 0:
                    found[str(value.name)] = min(rows, found.get(str(value.name), rows))
    return found


def _with_vocabulary(config: ImportedModel) -> ImportedModel:
    data = config.to_dict()
    data["vocab_size"] = min(config.limits["input_ids"], config.limits.get(LABELS, 1 << 62))
    return ImportedModel.from_dict(data)


def _parameter(weight: Weight, weights: ImportedWeights) -> Parameter:
    """The parameter, with what values of its kind are drawn like where its own are not wanted."""
    value = weights.read(weight.name)
    kind, std = "normal", 0.0
    flat = value.reshape(-1).astype(np.float64) if value.size <= 1 << 24 else value.reshape(-1)[: 1 << 24]
    if not value.size:
        raise ModelError(f"Weight '{weight.name}' has no elements, shape {list(value.shape)}. Freeze it.")
    if (flat == flat[0]).all() and flat[0] in (0, 1):
        kind = "ones" if flat[0] else "zeros"
    else:
        std = float(np.std(flat.astype(np.float64)))
        std = std if np.isfinite(std) and std > 0 else 0.02
    return Parameter(weight.name, tuple(value.shape), kind, float(f"{std:.6g}"))


def _make_inputs(graph: ir.Graph, weights: Sequence[Weight]) -> None:
    """Parameters are float32 inputs, cast where they are read to what the model stores."""
    for weight in weights:
        old, name = weight.value, weight.name
        del graph.initializers[name]
        old.const_value = None
        if old.dtype == ir.DataType.FLOAT:
            graph.inputs.append(old)
            continue
        new = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=old.shape)
        graph.inputs.append(new)
        _look_up_first(graph, old, new)
        if not old.uses():
            continue
        node = ir.Node("", "Cast", [new], [ir.AttrInt64("to", int(old.dtype or 0))], name=f"{name}/cast")
        graph.insert_before(graph[0], node)
        ir.convenience.replace_all_uses_with(old, node.outputs[0])
        node.outputs[0].name = f"{name}/{weight.tensor.dtype.name.lower()}"
        node.outputs[0].type, node.outputs[0].shape = old.type, old.shape


def _look_up_first(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Cast the rows that are looked up, not the whole table: onnxruntime adds up no gradient in 16 bits."""
    for use in list(old.uses()):
        node = use.node
        if node.op_type not in ("Gather", "GatherND") or node.domain or use.idx or node.graph is not graph:
            continue
        out = node.outputs[0]
        if out.is_graph_output():
            continue
        cast = ir.Node("", "Cast", [out], [ir.AttrInt64("to", int(old.dtype or 0))], name=f"{node.name}/cast")
        made, name = cast.outputs[0], out.name
        made.type, made.shape = out.type, out.shape
        ir.convenience.replace_all_uses_with(out, made)
        cast.replace_input_with(0, out)
        node.replace_input_with(0, new)
        graph.insert_after(node, cast)
        out.name, out.type, made.name = f"{name}/float32", ir.TensorType(ir.DataType.FLOAT), name


def _load_constants(graph: ir.Graph, frozen: Sequence[Weight]) -> None:
    """Take what is not trained into the graph: files that it is read from may go away."""
    for weight in frozen:
        if weight.is_turned:
            turned_back = np.ascontiguousarray(read(weight.tensor, weight.name).T)
            weight.value.const_value = ir.tensor(turned_back, name=weight.name)
    total, largest = 0, ("", 0)
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not value.uses():
            continue
        total += tensor.nbytes
        largest = max(largest, (name, int(tensor.nbytes)), key=lambda one: one[1])
        if total > _MOST_BYTES:
            raise ModelError(
                f"What is not trained takes more than {_MOST_BYTES >> 20} MiB, which every graph would "
                f"carry; the largest is '{largest[0]}' of {largest[1] >> 20} MiB. Train it, too."
            )
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.tensor(read(tensor, name), tensor.dtype, name=name)
