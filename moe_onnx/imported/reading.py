"""An ONNX model as it is needed here: inlined, of an opset that can be differentiated, weights not loaded."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from moe_onnx.autodiff.bodies import inline_functions
from moe_onnx.build.draft import IR_VERSION, OPSET
from moe_onnx.errors import ModelError
from moe_onnx.rewrite.passes import check_valid
from moe_onnx.spec import DOMAIN

OLDEST_OPSET = 18  # that gradient rules can write for
_SMALL = 1 << 10  # bytes: what is larger is a weight, which no converter has to see


def check_readable(model: onnx.ModelProto) -> None:
    """See that a model is valid ONNX, of an opset that onnx knows, and that onnx-ir reads all of it.

    Raises:
        ModelError: If it is not.
    """
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            raise ModelError(
                f"The model must be of an opset that onnx {onnx.__version__} knows, up to {newest}, "
                f"got {entry.version}. Export it again for opset {newest}, or install a newer onnx."
            )
    check_valid(model, "The model is not valid ONNX")
    for tensor in model.graph.sparse_initializer:
        raise ModelError(
            f"Initializers must be dense, got '{tensor.values.name}' as a sparse tensor. Export it dense."
        )


def read_model(model: onnx.ModelProto, folder: Path | None = None) -> ir.Model:
    """Read a model; tensors in external files stay there.

    Args:
        model: The model.
        folder: Where its external files are, if it has some.

    Raises:
        ModelError: If the model, its functions, or its opset, cannot be brought to those of a training graph.
    """
    try:
        found = ir.from_proto(model)
    except Exception as error:  # what broken tensors make onnx-ir raise; the last cause is what is wrong
        raise ModelError(
            f"The model cannot be read: {_cause(error)}. See what moe-onnx validate says of it."
        ) from error
    if folder is not None:
        ir.external_data.set_base_dir(found.graph, folder)
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


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().rstrip(".")


def of_known_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model in an opset that layers can be fused in, if onnx can convert it; else as it is."""
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if model.functions or not versions or versions[0] >= OLDEST_OPSET:
        return model
    try:
        return ir.to_proto(_converted(ir.from_proto(model)))
    except ModelError:
        return model  # whoever trains it says so


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
    before = ir.to_proto(model)
    try:
        proto = onnx.version_converter.convert_version(before, OPSET)
    except Exception as error:  # RuntimeError, and onnx's own
        raise ModelError(
            f"The model is of opset {version}, and onnx cannot convert it to opset {OPSET}: "
            f"{str(error).strip()}. Export it again with opset {OLDEST_OPSET} or newer."
        ) from error
    known = {info.name for info in before.graph.value_info}
    for info in proto.graph.value_info:
        dims = info.type.tensor_type.shape.dim
        if info.name not in known and any(dim.dim_param.startswith("unk__") for dim in dims):
            info.type.tensor_type.ClearField("shape")  # the converter's own names: others know more
    done = ir.from_proto(proto)
    for value in [value for value in done.graph.inputs if value.name in weights]:
        done.graph.inputs.remove(value)
        value.const_value = weights[str(value.name)]
        done.graph.register_initializer(value)
    return done
