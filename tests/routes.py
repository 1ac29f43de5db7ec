"""Every route an operator can be run by, called alike.

A route takes the operator, its inputs in order (None is absent), its attributes, and gives numpy
outputs, absent ones as None. A test over routes is a test of all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import moe_onnx
from moe_onnx.adapters.schema import ELEM_TYPES
from moe_onnx.kernels import PYTHON_KERNELS, native
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN

WRONG = {"int64": TensorProto.INT64, "int16": TensorProto.INT16}  # for no input of any operator
ELEMS = {**ELEM_TYPES, **WRONG, "uint8": TensorProto.UINT8, "uint16": TensorProto.UINT16}
KERNELS = {kernel.name: kernel.run for kernel in PYTHON_KERNELS}
NATIVE = () if native.unavailable() else ("native",)  # what there is is told at the head of a test run
ROUTES = ("reference", "kernel", "evaluator", "body_plain", "body", "python", *NATIVE)
BODY_ROUTES = ("body_plain", "body")
OP_ROUTES = ("python", *NATIVE)  # in sessions, with every check
# By which to run what is not about a route: a session of a body takes ten times as long to make.
FAST = "native" if NATIVE else "body"


def all_of(name: str, values: Iterable[Any]) -> Callable[[Any], Any]:
    """One test of all values of an argument: a test of its own for each would take longer than the value.

    Every value is tried, and the failure says which were wrong.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run_all(**arguments: Any) -> None:
            try_all(values, lambda value: test(**arguments, **{name: value}))

        signature = inspect.signature(test)
        rest = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        run_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        run_all.__name__, run_all.__doc__ = test.__name__, test.__doc__
        run_all.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return run_all

    return decorate


def dtypes_of(names: Iterable[str]) -> Callable[[Any], Any]:
    """One test of all dtypes, but not of all by the optimised body: each needs a session, which takes long.

    Its fp16 differs from bf16, and fp64 from fp32, by nothing but Casts, which the unoptimised bodies of the
    hand cases have in every dtype.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        every: Any = all_of("dtype", names)(test)
        fewer: Any = all_of("dtype", [name for name in names if name not in ("fp16", "fp64")])(test)

        def by_route(**arguments: Any) -> None:
            (fewer if arguments["route"] == "body" else every)(**arguments)

        by_route.__signature__ = every.__signature__  # type: ignore[attr-defined]
        by_route.__name__, by_route.__doc__ = test.__name__, test.__doc__
        by_route.pytestmark = every.pytestmark  # type: ignore[attr-defined]
        return by_route

    return decorate


def try_all(values: Iterable[Any], test: Callable[[Any], None], name: Callable[[Any], str] = repr) -> None:
    """Call ``test`` with each value; raise the first failure, with a note on all that failed."""
    failed: list[tuple[str, BaseException]] = []
    for value in values:
        try:
            test(value)
        except (Exception, pytest.fail.Exception) as error:
            failed.append((name(value), error))
    if failed:
        failed[0][1].add_note(f"failed: {', '.join(value for value, _ in failed)}")
        raise failed[0][1]


def has_route(op: str, route: str) -> bool:
    return op in KERNELS or route not in ("kernel", "python")


def run(op: str, route: str, inputs: list[Any], attributes: dict[str, Any]) -> list[Any]:
    if route in ("reference", "kernel"):
        call = BY_NAME[op].reference if route == "reference" else KERNELS[op]
        result = call(*inputs, **attributes)
        return list(result) if isinstance(result, tuple) else [result]
    model = make_model(op, inputs, attributes)
    if route == "evaluator":
        session = ReferenceEvaluator(model, new_ops=moe_onnx.reference_ops())
    else:
        session = _cached_session(model.SerializeToString(), route)
    values = session.run(None, feed_of(op, inputs))
    absent = [is_absent(op, i, inputs, attributes) for i in range(len(values))]
    for value, none, arg in zip(values, absent, BY_NAME[op].outputs, strict=True):
        assert not (none and value.size), f"{arg.name} is absent in the contract, got {value}"
    return [None if none else value for value, none in zip(values, absent, strict=True)]


@functools.lru_cache(maxsize=512)
def _cached_session(model: bytes, route: str) -> Any:
    # One session for all sizes: making one costs more than running it.
    return session_of(onnx.load_model_from_string(model), route)


def one_thread() -> ort.SessionOptions:
    """Options of a session without a pool: tests run side by side, and a pool takes long to make."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def session_of(model: onnx.ModelProto, route: str) -> Any:
    options = one_thread()
    options.log_severity_level = 4
    if route == "body_plain":
        # Nothing registered and nothing optimised: what any runtime has to do with the body.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return moe_onnx.InferenceSession(model, options, kernels=route if route in OP_ROUTES else "body")


def make_model(op: str, inputs: list[Any], attributes: dict[str, Any], opset: int = 21) -> onnx.ModelProto:
    spec = BY_NAME[op]
    names = [arg.name if value is not None else "" for arg, value in zip(spec.inputs, inputs, strict=False)]
    while names and not names[-1]:
        names.pop()
    ints = {
        k: int(v) if isinstance(v, (bool, np.bool_)) else v for k, v in attributes.items() if v is not None
    }
    node = helper.make_node(op, names, [a.name for a in spec.outputs], domain=DOMAIN, name="the_node", **ints)
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(arg.name, ELEMS[value.dtype.name], [None] * value.ndim)
            for arg, value in zip(spec.inputs, inputs, strict=False)
            if value is not None
        ],
        [helper.make_tensor_value_info(a.name, _elem(a, inputs, spec), None) for a in spec.outputs],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def feed_of(op: str, inputs: list[Any]) -> dict[str, Any]:
    spec = BY_NAME[op]
    return {a.name: v for a, v in zip(spec.inputs, inputs, strict=False) if v is not None}


def _elem(arg: Any, inputs: list[Any], spec: Any) -> int:
    for source, value in zip(spec.inputs, inputs, strict=False):
        if value is not None and source.type_var == arg.type_var:
            return int(ELEMS[value.dtype.name])
    dtype = "float32" if inputs[0] is None else inputs[0].dtype.name
    return int(ELEMS["int32"] if arg.type_var == "I" else ELEMS[dtype])


def is_absent(op: str, output: int, inputs: list[Any], attributes: dict[str, Any]) -> bool:
    """Whether the contract calls this output absent, said again, apart from the code."""
    if "Unpermute" in op:
        probs = inputs[-1] if len(inputs) == len(BY_NAME[op].inputs) else None
        last = len(BY_NAME[op].outputs) - 1
        return output == last and (probs is None or probs.shape == (0, 0))
    if "Permute" in op:
        probs = [*inputs, None, None][1 if op.endswith("Grad") else 2]
        return output == 1 and (probs is None or probs.shape == (0, 0))
    if "Finalize" in op:
        scales = inputs[3] if len(inputs) > 3 else None
        return output == 1 and (scales is None or scales.shape == (0, 0))
    if "InitRouting" not in op:
        return False
    padded = attributes.get("drop_pad_mode", 0) == 1
    if output == 2:
        return padded or not attributes.get("expert_tokens_count_or_cumsum_flag", 0)
    return output == 3 and not (padded and attributes.get("expert_tokens_before_capacity_flag", False))
