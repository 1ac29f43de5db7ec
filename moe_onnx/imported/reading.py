"""An ONNX model as it is needed here: inlined, of an opset that can be differentiated, weights not loaded."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from moe_onnx.autodiff.bodies import inline_functions
from moe_onnx.build.draft import IR_VERSION, OPSET
from moe_onnx.errors import ModelError, ModelFileError
from moe_onnx.spec import DOMAIN

OLDEST_OPSET = 18  # that gradient rules can write for
_SMALL = 1 << 10  # bytes: what is larger is a weight, which no converter has to see


def read_model(model: onnx.ModelProto | str | os.PathLike[str], folder: Path | None = None) -> ir.Model:
    """Read a model; tensors in external files stay there.

    Args:
        model: The model or its path.
        folder: Where the external files of a ``ModelProto`` are, if it has some.

    Raises:
        ModelFileError: If there is no such file, or it is no model.
        ModelError: If its functions, or its opset, cannot be brought to those of a training graph.
    """
    if isinstance(model, onnx.ModelProto):
        found = ir.from_proto(model)
        if folder is not None:
            ir.external_data.set_base_dir(found.graph, folder)
    else:
        path = Path(model)
        if not path.is_file():
            raise ModelFileError(f"{path}: there is no such file. Give the path of an ONNX model.")
        try:
            found = ir.load(path)
        except Exception as error:  # protobuf's, onnx's, and what broken graphs make onnx-ir raise
            raise ModelFileError(f"{path}: this is no ONNX model ({error}).") from error
    graph, imports = found.graph, found.graph.opset_imports
    if "ai.onnx" in imports:  # the other name of the standard domain
        imports[""] = imports.pop("ai.onnx")
    if "" not in imports:
        raise ModelError("The model does not import ONNX's own operators. Give a model that computes a loss.")
    for value in graph.initializers.values():  # of old models, where each is an input, too
        if value in graph.inputs:
            graph.inputs.remove(value)
    for key in [key for key in found.functions if key[0] == DOMAIN]:
        del found.functions[key]  # the bodies of our operators, which every graph gets anew
    inline_functions(found)
    if imports[""] < OLDEST_OPSET:
        found = _converted(found)
    found.ir_version = max(found.ir_version or IR_VERSION, IR_VERSION)
    passes.LiftConstantsToInitializersPass(lift_all_constants=False)(found)
    return found


def _converted(model: ir.Model) -> ir.Model:
    """The model in the opset of this package's own graphs; weights are put aside, and keep their place."""
    graph, version = model.graph, model.graph.opset_imports[""]
    weights = {}
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > _SMALL:
            weights[name] = value.const_value
            value.type, value.shape = ir.TensorType(value.const_value.dtype), value.const_value.shape  # type: ignore[assignment]
            value.const_value = None
            del graph.initializers[name]
            graph.inputs.append(value)
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), OPSET)
    except Exception as error:  # RuntimeError, and onnx's own
        raise ModelError(
            f"The model is of opset {version}, and onnx cannot convert it to opset {OPSET}: "
            f"{str(error).strip()}. Export it again with opset {OLDEST_OPSET} or newer."
        ) from error
    done = ir.from_proto(proto)
    for value in [value for value in done.graph.inputs if value.name in weights]:
        done.graph.inputs.remove(value)
        value.const_value = weights[str(value.name)]
        done.graph.register_initializer(value)
    return done
