"""The loss of a model: a scalar that it computes, or the output that one is attached to."""

from __future__ import annotations

import difflib

import onnx_ir as ir

from moe_onnx.autodiff.gradients import sizes
from moe_onnx.build.imported import CROSS_ENTROPY, SQUARED_ERROR, Shape
from moe_onnx.errors import ModelError, OptionError
from moe_onnx.imported.losses import is_builtin
from moe_onnx.imported.parts import FLOATS


def find_root(graph: ir.Graph, values: dict[str, ir.Value], loss: str, output: str | None) -> ir.Value:
    """The scalar that is the loss, or the output that it is made from.

    Raises:
        OptionError: If there is no such value, or it is none that a loss can be made from.
    """
    if not isinstance(loss, str) or not loss:
        raise OptionError(f"loss must be 'cross-entropy', 'mean-squared-error' or a name, got {loss!r}.")
    if is_builtin(loss):
        return _output(graph, values, loss, output)
    if output is not None:
        raise OptionError(f"output is for losses that are attached; '{loss}' is of the model. Leave it out.")
    if loss not in values:
        scalars = [n for n, v in values.items() if sizes(v) == () and v.dtype in FLOATS and v.producer()]
        close = difflib.get_close_matches(loss, [*values, CROSS_ENTROPY, SQUARED_ERROR], 1)
        hint = (
            f"Did you mean '{close[0]}'?" if close else f"Scalars are: {', '.join(scalars[-4:]) or 'none'}."
        )
        raise OptionError(f"loss: the model has no value '{loss}'. {hint}")
    value = values[loss]
    if value.dtype not in FLOATS:
        raise OptionError(
            f"loss: '{loss}' must be a float, got {value.dtype}. Only floats have gradients: give the value "
            "it is rounded or counted from."
        )
    if sizes(value) != ():
        have = "unknown rank" if sizes(value) is None else f"shape [{', '.join(map(str, shape_of(value)))}]"
        raise OptionError(
            f"loss: '{loss}' must be a scalar, got {have}. Reduce it (ReduceMean, keepdims=0), or use "
            "'cross-entropy' or 'mean-squared-error'."
        )
    return value


def _output(graph: ir.Graph, values: dict[str, ir.Value], loss: str, output: str | None) -> ir.Value:
    floats = [v for v in graph.outputs if v.dtype in FLOATS]
    if output is None:
        named = [v for v in floats if v.name == "logits"]
        if len(floats) != 1 and not named:
            have = ", ".join(f"'{v.name}'" for v in floats) or "none"
            raise OptionError(f"output: {loss} needs one output of floats, the model has {have}. Name it.")
        value = (named or floats)[0]
    elif output not in values:
        close = difflib.get_close_matches(output, values, 1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise OptionError(f"output: the model has no value '{output}'.{hint}")
    else:
        value = values[output]
        if value.producer() is None:
            what = "a weight" if value.is_initializer() else "an input"
            raise OptionError(f"output must be what the model computes, got '{output}', which is {what}.")
    if value.dtype not in FLOATS:
        raise OptionError(f"output: '{value.name}' must be floats, got {value.dtype}.")
    if loss == CROSS_ENTROPY and len(shape_of(value)) < 2:
        raise OptionError(
            f"output: cross-entropy needs rows of logits, got '{value.name}' of shape "
            f"{list(shape_of(value))}."
        )
    return value


def shifts(loss: str, shift: bool | None, dims: tuple[int | str | None, ...] | None) -> bool:
    """Whether a position of the logits is held against the label of the next one."""
    if shift is not None and not isinstance(shift, bool):
        raise OptionError(f"shift must be True, False or None, got {shift!r}.")
    if loss != CROSS_ENTROPY:
        if shift:
            raise OptionError(f"shift is for cross-entropy, got the loss {loss!r}. Leave it out.")
        return False
    rank = len(dims or ())
    if shift and rank != 3:
        raise OptionError(f"shift needs logits [batch, sequence, classes], got a rank of {rank}.")
    return rank == 3 if shift is None else shift


def shape_of(value: ir.Value) -> Shape:
    """The shape of an input or output, with a name for every free size.

    Raises:
        ModelError: If not even the rank is known.
    """
    dims = sizes(value)
    if dims is None:
        raise ModelError(
            f"The rank of '{value.name}' is not known. Give it a shape in the model (sizes may be symbols)."
        )
    return tuple(f"{value.name}_{i}" if dim is None or dim == "" else dim for i, dim in enumerate(dims))
