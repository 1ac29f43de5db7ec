"""The hand cases of ``ops/*/cases.json``, by every route."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from routes import BODY_ROUTES, OP_ROUTES, ROUTES, feed_of, has_route, make_model, one_thread, run, try_all

import moe_onnx
from moe_onnx import errors
from moe_onnx.operators import BY_NAME

OPS = Path(__file__).parent.parent / "ops"
CASES = [
    (case_file["operator"], case)
    for path in sorted(OPS.glob("*/cases.json"))
    for case_file in [json.loads(path.read_text())]
    for case in case_file["cases"]
]
NON_FINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def tensor(case: dict[str, Any] | None) -> Any:
    if case is None:
        return None
    dtype = np.dtype(ml_dtypes.bfloat16 if case["dtype"] == "bfloat16" else case["dtype"])
    size = int(np.prod(case["shape"]))
    if "fill" in case:
        flat = np.full(size, NON_FINITE.get(case["fill"], case["fill"]))
    elif "arange" in case:
        flat = np.arange(size)
    elif "repeat_arange" in case:
        flat = np.arange(size) // case["repeat_arange"]
    else:
        flat = np.array([NON_FINITE.get(v, v) for v in case["data"]], np.float64)
    return flat.astype(dtype).reshape(case["shape"])


def arguments(op: str, case: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    args = BY_NAME[op].inputs
    inputs = [tensor(case["inputs"].get(arg.name)) for arg in args]
    while inputs[-1] is None and args[len(inputs) - 1].optional:
        inputs.pop()
    return inputs, case.get("attributes", {})


def each(*routes: str, error: bool) -> Any:
    """A test for each operator and route, of all its hand cases: ``call(op, case, route)``."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for op, case in CASES:
        for route in routes:
            if (
                ("error" in case) == error
                and has_route(op, route)
                and not (error and route in BODY_ROUTES and is_duplicate(op, case))
                and not (route == "evaluator" and lacks_required(op, case))
            ):
                found.setdefault((op, route), []).append(case)
    groups = [pytest.param(*key, cases, id="-".join(key)) for key, cases in found.items()]
    return pytest.mark.parametrize(("op", "route", "cases"), groups)


def name_of(case: dict[str, Any]) -> str:
    return str(case["name"])


def lacks_required(op: str, case: dict[str, Any]) -> bool:
    """A node without its required input is no model, so onnx's evaluator has nothing to run."""
    return any(arg.name not in case["inputs"] for arg in BY_NAME[op].inputs if not arg.optional)


def is_duplicate(op: str, case: dict[str, Any]) -> bool:
    """Whether the error is a value that occurs twice: standard ops do not check that."""
    inputs, _ = arguments(op, case)
    if "position" not in case["error"]:
        return False
    at, value = case["error"]["position"][0], case["error"]["value"]
    return any(
        i is not None
        and i.ndim == 1
        and i.dtype == np.int32
        and len(i) > at
        and i[at] == value
        and value in i[:at]
        for i in inputs
    )


@each(*ROUTES, error=False)
def test_right_calls(op: str, route: str, cases: list[dict[str, Any]]) -> None:
    try_all(cases, lambda case: check_case(op, case, route), name_of)


def check_case(op: str, case: dict[str, Any], route: str) -> None:
    inputs, attributes = arguments(op, case)
    outputs = run(op, route, inputs, attributes)
    for arg, got in zip(BY_NAME[op].outputs, outputs, strict=True):
        want = tensor(case["outputs"][arg.name])
        if want is None:
            assert got is None, f"{arg.name} must be absent: {case['why']}"
            continue
        assert got is not None, f"{arg.name} is absent: {case['why']}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), arg.name
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), case["why"])


CONSTANT = [
    ("MoeInitRoutingV2Grad", "a2_dropless_k2"),
    ("MoeTokenPermuteWithRoutingMap", "m1_dropless"),
    ("MoeTokenUnpermuteWithRoutingMap", "b1_forward_no_probs"),
    ("MoeTokenUnpermuteWithRoutingMap", "pad_no_probs"),
    ("MoeTokenUnpermuteWithRoutingMapGrad", "b1_copy_slot_form"),
    ("MoeTokenUnpermuteWithRoutingMapGrad", "b4_pad_copy"),
]


@pytest.mark.parametrize(("op", "name"), CONSTANT)
def test_indices_and_maps_may_be_constants(op: str, name: str) -> None:
    """Beside static shapes: runtimes compare what they know at load, in branches that are not taken too."""
    case = next(case for other, case in CASES if other == op and name_of(case) == name)
    inputs, attributes = arguments(op, case)
    model, feed = make_model(op, inputs, attributes), feed_of(op, inputs)
    for value in list(model.graph.input):
        array = feed[value.name]
        if array.dtype.kind == "f":
            value.type.tensor_type.shape.CopyFrom(
                onnx.helper.make_tensor_type_proto(1, array.shape).tensor_type.shape
            )
        else:
            model.graph.initializer.append(onnx.numpy_helper.from_array(feed.pop(value.name), value.name))
            model.graph.input.remove(value)
    options = one_thread()
    options.log_severity_level = 4  # what cannot be folded is said at length
    found = moe_onnx.InferenceSession(model, options, kernels="body").run(None, feed)
    wanted = case["outputs"]
    for value, arg in zip(found, BY_NAME[op].outputs, strict=False):
        if wanted.get(arg.name) is not None:
            np.testing.assert_allclose(value, tensor(wanted[arg.name]), rtol=1e-6)


@each("reference", "kernel", "evaluator", error=True)
def test_errors_in_python(op: str, route: str, cases: list[dict[str, Any]]) -> None:
    try_all(cases, lambda case: check_python(op, case, route), name_of)


def check_python(op: str, case: dict[str, Any], route: str) -> None:
    inputs, attributes = arguments(op, case)
    with pytest.raises(getattr(errors, case["error"]["class"])) as caught:
        run(op, route, inputs, attributes)
    check_error(op, case, inputs, caught.value)


@each(*OP_ROUTES, error=True)
def test_errors_in_a_session(op: str, route: str, cases: list[dict[str, Any]]) -> None:
    """Through onnxruntime an op's error is the same error, with the node's name."""
    try_all(cases, lambda case: check_session(op, case, route), name_of)


# Whether an input has a shape, so is there at all, shows in a run only; dtypes are refused at load.
LATER_IN_A_SESSION = [(f"MoeFinalizeRoutingV2{end}", "order_missing_before_dtype") for end in ("", "Grad")]


def check_session(op: str, case: dict[str, Any], route: str) -> None:
    if (op, name_of(case)) in LATER_IN_A_SESSION:
        return
    inputs, attributes = arguments(op, case)
    kind = getattr(errors, case["error"]["class"])
    with pytest.raises(kind) as caught:
        run(op, route, inputs, attributes)
    check_error(op, case, inputs, caught.value)
    with pytest.raises(kind) as expected:
        run(op, "reference", inputs, attributes)
    if kind is not errors.RankError:  # found when the model is loaded, with sizes unknown
        assert str(caught.value) == f"{expected.value} (node 'the_node')"
    assert caught.value.node == "the_node"


@each(*BODY_ROUTES, error=True)
def test_errors_in_a_body(op: str, route: str, cases: list[dict[str, Any]]) -> None:
    """A body fails the run, or its session; where it names the rule, the session says so."""
    try_all(cases, lambda case: check_body(op, case, route), name_of)


def check_body(op: str, case: dict[str, Any], route: str) -> None:
    inputs, attributes = arguments(op, case)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (onnxruntime's errors have no base)
        run(op, route, inputs, attributes)
    if case["error"]["class"] == "IndexValueError":
        assert isinstance(caught.value, errors.BodyCheckError), caught.value
        assert caught.value.aclnn_status == case["error"]["aclnn_status"]


def check_error(op: str, case: dict[str, Any], inputs: list[Any], error: errors.MoeOnnxError) -> None:
    want = case["error"]
    assert error.aclnn_status == want["aclnn_status"], str(error)
    assert error.op == op
    assert isinstance(error, ValueError)
    for mention in want.get("mentions", []):
        assert str(mention) in str(error), (mention, str(error))
    if "position" in want:
        assert isinstance(error, errors.IndexValueError)
        value = inputs[[a.name for a in BY_NAME[op].inputs].index(error.input_name)]
        assert [int(np.ravel_multi_index(error.position, value.shape))] == want["position"]
        assert error.value == want["value"]
