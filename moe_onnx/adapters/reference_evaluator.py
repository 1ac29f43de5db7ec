"""OpSpec -> operator classes of ``onnx.reference.ReferenceEvaluator``."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from moe_onnx.errors import DtypeError
from moe_onnx.operators import ALL
from moe_onnx.spec import DOMAIN, OpSpec


def reference_ops() -> list[type[OpRun]]:
    """Operator classes for ``ReferenceEvaluator(model, new_ops=moe_onnx.reference_ops())``."""
    return [_make(spec) for spec in ALL]


class _Carrier(Exception):
    """Carries a DtypeError past OpRun, which takes any TypeError for a mistake in the op's code."""


class _Op(OpRun):
    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        try:
            return super().run(*args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]
        except _Carrier as carrier:
            raise carrier.args[0] from None


def _make(spec: OpSpec) -> type[OpRun]:
    def run(self: OpRun, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        # Attributes of the node come as arguments, absent ones as None.
        given = {name: value for name, value in attributes.items() if value is not None}
        try:
            result = spec.reference(*inputs, **given)
        except DtypeError as error:
            raise _Carrier(error) from error
        outputs = result if isinstance(result, tuple) else (result,)
        return tuple(
            absent_output(spec, i, inputs) if value is None else value for i, value in enumerate(outputs)
        )

    return type(spec.name, (_Op,), {"op_domain": DOMAIN, "_run": run, "__doc__": spec.summary})


def absent_output(spec: OpSpec, index: int, inputs: tuple[Any, ...]) -> Any:
    """ONNX has no None: an absent output is empty, of the dtype of its absent input if there is one."""
    arg = spec.outputs[index]
    dtype = arg.dtypes[0] if "int32" in arg.dtypes else np.asarray(inputs[0]).dtype
    for source, value in zip(spec.inputs, inputs, strict=False):
        if source.type_var == arg.type_var and source.optional and value is not None:
            dtype = value.dtype
    return np.zeros((0,) * len(arg.axes.split()), dtype)
