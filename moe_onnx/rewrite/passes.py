"""All passes by name, and a sequence of them applied to a model: checked before and after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import onnx.checker
from onnx import ModelProto, TensorProto, ValueInfoProto

from moe_onnx.adapters.light import light_copy
from moe_onnx.errors import ModelError, OptionError
from moe_onnx.rewrite.contrib_moe.forms import CONTRIB_MOE
from moe_onnx.rewrite.expand import EXPAND
from moe_onnx.rewrite.fold import FOLD
from moe_onnx.rewrite.fuse.forms import FUSE
from moe_onnx.rewrite.nodes import copied, import_domains
from moe_onnx.rewrite.notes import Notes, Pass, PassReport, scopes
from moe_onnx.rewrite.strip import STRIP
from moe_onnx.rewrite.whole import LEGALIZE, TO_FLOAT64

DEFECT = "this is a defect of the pass"

PASSES: dict[str, Pass] = {
    one.name: one for one in (EXPAND, LEGALIZE, TO_FLOAT64, STRIP, FOLD, FUSE, CONTRIB_MOE)
}


@dataclass
class Applied:
    """What :func:`apply_passes` gives.

    Attributes:
        model: The rewritten model; the one that was given, where no pass had anything to do.
        report: What was applied and skipped.
        tolerance: How far outputs may be from those before, by dtype.
        other_floats: Whether floats may go in and out in another dtype.
    """

    model: ModelProto
    report: PassReport
    tolerance: dict[str, float] = field(default_factory=dict)
    other_floats: bool = False


def chosen_passes(passes: Sequence[str | Pass]) -> list[tuple[Pass, tuple[str, ...]]]:
    """The passes of names such as ``"expand"`` and ``"strip:functions+docs"``.

    Raises:
        OptionError: If there is no such pass or option.
    """
    if isinstance(passes, (str, Pass)) or not passes:
        raise OptionError(f"passes must be a list of some of {', '.join(PASSES)}, got {passes!r}.")
    found: list[tuple[Pass, tuple[str, ...]]] = []
    for one in passes:
        if isinstance(one, Pass):
            found.append((one, ()))
            continue
        name, colon, text = one.strip().partition(":")
        known = PASSES.get(name)
        if known is None:
            raise OptionError(f"passes: there is no pass {name!r}; there are {', '.join(PASSES)}.")
        options = tuple(word.strip() for word in text.split("+")) if colon else ()
        for option in options:
            if option not in known.options:
                legal = ", ".join(known.options) or "none"
                raise OptionError(f"pass {name!r}: there is no option {option!r}; there are {legal}.")
        found.append((known, options))
    return found


def apply_passes(model: ModelProto, passes: Sequence[str | Pass]) -> Applied:
    """Apply passes, one after the other, to a copy: nothing is run. See :func:`moe_onnx.rewrite_model`.

    A pass that says nothing in its notes leaves the model as it was, to the last byte.

    Raises:
        OptionError: If there is no such pass.
        ModelError: If onnx's checker refuses the model, or what a pass made of it; other errors of this
            package where a node cannot be what it says.
    """
    chosen = chosen_passes(passes)
    named = tuple(":".join((one.name, "+".join(options))).rstrip(":") for one, options in chosen)
    done = Applied(model, PassReport(named))
    check_valid(model, "The model is not valid ONNX, and is not rewritten")
    for one, options in chosen:
        notes = Notes(one.name, options)
        made = one.apply(copied(done.model), notes)
        done.report.skipped += notes.left
        if not notes.done:
            continue
        check_valid(made, f"Pass {one.name!r} made a model that is not valid ONNX; {DEFECT}")
        done.report.applied += notes.done
        done.model = made
        done.tolerance = _sum(done.tolerance, one.tolerance)
        done.other_floats = done.other_floats or one.other_floats
    return done


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {*first, *second}}


def check_valid(model: ModelProto, what: str) -> None:
    """Check a model by onnx's checker, which would read all external data: it gets a copy without data.

    Raises:
        ModelError: If it refuses the model; ``what`` is what the message begins with.
    """
    light = light_copy(model)
    import_domains(light)  # runtimes do not ask for these
    for scope in scopes(light):
        for value in (*getattr(scope.owner, "input", ()), *scope.owner.output):
            if isinstance(value, ValueInfoProto) and value.type.WhichOneof("value") == "tensor_type":
                value.type.tensor_type.shape.SetInParent()  # nor for these
        for tensor in getattr(scope.owner, "initializer", ()):
            _empty(tensor)
        for node in scope.owner.node:
            for attr in node.attribute:
                if attr.HasField("t"):
                    _empty(attr.t)
    try:
        onnx.checker.check_model(light)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{what}: {str(error).strip()}") from error


def _empty(tensor: TensorProto) -> None:
    """A tensor without data is one of no elements."""
    values = [name.name for name, _ in tensor.ListFields() if name.name.endswith("_data")]
    if "external_data" in values or not values:
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        del tensor.dims[:]
        tensor.dims.append(0)
