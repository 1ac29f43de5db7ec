"""What public bug reports teach on runtimes, registration, threads and memory: reports A21 to A36.

See ``report_tools.py`` for what all of them share.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from onnx import AttributeProto, TensorProto, helper
from report_tools import (
    BF16,
    COMBINE,
    DTYPES,
    F16,
    F32,
    FEW,
    GRAD,
    INIT,
    KERNEL_CHOICES,
    MODES,
    UNGRAD,
    V1,
    V1_GRAD,
    V1_INDEX,
    assert_same,
    check,
    child,
    each_dtype,
    everywhere,
    example,
    in_new_process,
    kernel_choices,
    layer_feed,
    layer_function,
    model_of,
    node,
    open_session,
    options_of,
    oracle,
    poison,
    report,
    std,
    v1_feed,
    wide_model,
    widened,
    with_index,
)
from routes import feed_of, make_model, run, session_of

import moe_onnx
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN


def grad_model(dtype: Any = F32, domain: str = DOMAIN) -> onnx.ModelProto:
    """V1 as a model: ``g``, ``index`` -> ``y``."""
    dispatch_grad = node(GRAD, ["g", "index"], ["y"], top_k=2)
    dispatch_grad.domain = domain
    example_of = V1.astype(dtype)
    return model_of([dispatch_grad], {"g": example_of, "index": V1_INDEX}, {"y": example_of})


# A21 to A37: runtime.

V5 = {
    "unpermuted_tokens_grad": [[1, 2], [3, 4], [5, 6]],
    "permuted_tokens": [[1, 0], [0, 1], [1, 1], [2, 0], [0, 2], [1, -1]],
    "probs": [[0.5, 9, 0.25], [0.125, 0.75, 9], [9, 1, 2]],
}
V5_INDEX = np.array([0, 4, 1, 2, 3, 5], np.int32)
V5_MAP = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]], np.bool_)
V5_GRAD = [[0.5, 1], [0.375, 0.5], [2.25, 3], [5, 6], [0.25, 0.5], [10, 12]]
V5_PROBS_GRAD = [[1, 0, 4], [4, 7, 0], [0, 10, -1]]


def v5_inputs(dtype: Any) -> list[Any]:
    dy, permuted, probs = (np.array(value, dtype) for value in V5.values())
    return [dy, V5_INDEX, V5_INDEX, V5_MAP, permuted, probs]


def child_a21() -> None:
    results: dict[str, Any] = {}
    for name, dtype in (("float16", F16), ("bfloat16", BF16)):
        for kernels in KERNEL_CHOICES:
            got = open_session(grad_model(dtype), kernels).run(None, v1_feed(dtype))
            model = make_model(UNGRAD, v5_inputs(dtype), {})
            got += open_session(model, kernels).run(None, feed_of(UNGRAD, v5_inputs(dtype)))
            assert all(value.dtype == dtype for value in got)
            results[f"{name} {kernels}"] = [value.astype(np.float64).tolist() for value in got]
        # A plain session with the Python ops on it cannot run 16 bits: it can only refuse, at load.
        model = moe_onnx.add_function_bodies(grad_model(dtype))
        try:
            ort.InferenceSession(model.SerializeToString(), moe_onnx.register(options_of(), "python"))
            results[f"{name} plain"] = "loaded"
        except Exception:
            results[f"{name} plain"] = "refused"
    report(results)


def test_a21_sixteen_bits_do_not_end_the_process() -> None:
    """onnxruntime-extensions #812: 16-bit tensors, which abort a Python op, run with right numbers."""
    results, _ = child(child_a21)
    for name in ("float16", "bfloat16"):
        assert results.pop(f"{name} plain") == "refused"
    want = [V1_GRAD.tolist(), V5_GRAD, V5_PROBS_GRAD]
    assert results == dict.fromkeys(results, want)
    assert len(results) == 2 * len(KERNEL_CHOICES)


FORMS = {
    "three inputs": ("dy index index", "rows probs_grad"),
    "trailing blanks": ("dy index index _ _ _", "rows probs_grad"),
    "a map alone": ("dy index index chosen", "rows probs_grad"),
    "rows alone": ("dy index index _ permuted", "rows probs_grad"),
    "map and rows": ("dy index index chosen permuted", "rows probs_grad"),
    "all": ("dy index index chosen permuted probs", "rows probs_grad"),
    "no second output": ("dy index index chosen permuted probs", "rows"),
    "no second output, no probs": ("dy index index", "rows"),
    "blank first output": ("dy index index chosen permuted probs", "_ probs_grad"),
}


def form_model(inputs: str, outputs: str, sizes_known: bool = False) -> onnx.ModelProto:
    ins, outs = ([("" if n == "_" else n) for n in text.split()] for text in (inputs, outputs))
    values = v5_values()
    unpermute = helper.make_node(UNGRAD, ins, outs, domain=DOMAIN, name="the_node")
    model = model_of(
        [unpermute],
        {name: values[name] for name in ins if name},
        {name: values["dy"] for name in outs if name},
    )
    if sizes_known:
        for value in model.graph.input:
            elem = value.type.tensor_type.elem_type
            shape = values[value.name].shape
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem, shape))
    return model


def run_form(model: onnx.ModelProto, kernels: str) -> dict[str, Any]:
    session = open_session(model, kernels)
    feed = {i.name: v5_values()[i.name] for i in session.get_inputs()}
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feed), strict=True))


def v5_values() -> dict[str, Any]:
    return dict(zip(("dy", "index", "_", "chosen", "permuted", "probs"), v5_inputs(F32), strict=True))


@pytest.mark.parametrize(("inputs", "outputs"), FORMS.values(), ids=FORMS)
@kernel_choices
def test_a22_optional_inputs_and_outputs_may_be_absent(kernels: str, inputs: str, outputs: str) -> None:
    """onnxruntime-extensions #923, #283: every legal form of a node loads and runs."""
    got = run_form(form_model(inputs, outputs), kernels)
    assert list(got) == [name for name in outputs.split() if name != "_"]
    has_probs = "probs" in inputs.split()
    if "rows" in got:
        copies = [[1, 2], [3, 4], [3, 4], [5, 6], [1, 2], [5, 6]]  # dY by V5_INDEX
        np.testing.assert_array_equal(got["rows"], V5_GRAD if has_probs else copies)
    if has_probs and "probs_grad" in got:
        np.testing.assert_array_equal(got["probs_grad"], V5_PROBS_GRAD)
    elif "probs_grad" in got:
        assert got["probs_grad"].size == 0


@pytest.mark.parametrize(
    ("inputs", "missing"),
    [
        ("dy index index _ permuted probs", "routing_map"),
        ("dy index index chosen _ probs", "permuted_tokens"),
        ("dy index _ chosen permuted probs", "permute_token_id"),
        ("dy", "out_index"),
    ],
)
@kernel_choices
def test_a22_illegal_forms_are_refused_by_name(kernels: str, inputs: str, missing: str) -> None:
    """onnxruntime-extensions #923: a form that cannot run is refused when the session is made."""
    with pytest.raises(moe_onnx.MissingInputError, match=missing) as caught:
        open_session(form_model(inputs, "rows probs_grad", sizes_known=True), kernels)
    assert "the_node" in str(caught.value)
    # Where sizes are not known, probs may turn out to be empty, which is absent: then the run refuses.
    with pytest.raises(moe_onnx.MoeOnnxError, match=missing):
        run_form(form_model(inputs, "rows probs_grad"), kernels)


@kernel_choices
def test_a22_forward_outputs_may_be_absent(kernels: str) -> None:
    """onnxruntime-extensions #283: the same of the dispatch, whose counts are in the middle."""
    inputs, _ = example(INIT, "padded")
    feed = {"x": inputs[0], "ids": inputs[1]}
    attributes = {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 3}
    want = oracles.init_routing_v2(*inputs, **attributes, expert_tokens_before_capacity_flag=True)
    for outputs, flag in (("rows", 0), ("rows index", 0), ("_ index", 0), ("rows _ _ before", 1)):
        names = [("" if n == "_" else n) for n in outputs.split()]
        dispatch = helper.make_node(
            INIT, ["x", "ids"], names, domain=DOMAIN, expert_tokens_before_capacity_flag=flag, **attributes
        )
        shown = {n: v for n, v in zip(names, want, strict=False) if n}
        got = open_session(model_of([dispatch], feed, shown), kernels).run(None, feed)
        assert_same(got, list(shown.values()))


ATTRIBUTES = {
    GRAD: ("top_k", "drop_pad_mode", "active_num"),
    INIT: (
        "active_num",
        "expert_capacity",
        "expert_num",
        "drop_pad_mode",
        "expert_tokens_count_or_cumsum_flag",
        "expert_tokens_before_capacity_flag",
    ),
    COMBINE: ("drop_and_pad", "restore_shape"),
    UNGRAD: ("drop_and_pad", "restore_shape"),
}


def with_attribute(op: str, name: str, value: Any) -> onnx.ModelProto:
    model = make_model(op, *example(op, MODES[op][0]))
    attributes = model.graph.node[0].attribute
    kept = [attr for attr in attributes if attr.name != name]
    del attributes[:]
    attributes.extend(kept)
    if value is not None:
        attributes.append(helper.make_attribute(name, value))
    return model


@pytest.mark.parametrize(
    ("op", "name"), [pytest.param(op, n, id=f"{op}-{n}") for op in ATTRIBUTES for n in ATTRIBUTES[op]]
)
@kernel_choices
def test_a23_attributes_of_a_wrong_type_are_named(kernels: str, op: str, name: str) -> None:
    """onnxruntime-extensions #74: the message names operator, attribute and expected type."""
    wanted = AttributeProto.INTS if name == "restore_shape" else AttributeProto.INT
    for value in (2.0, "2", [2.0], [2] if wanted == AttributeProto.INT else 2):
        with pytest.raises(moe_onnx.AttributeValueError) as caught:
            open_session(with_attribute(op, name, value), kernels)
        assert (caught.value.op, caught.value.aclnn_status) == (op, 561002)
        for part in (op, f"'{name}'", AttributeProto.AttributeType.Name(wanted)):
            assert part in str(caught.value)


@kernel_choices
def test_a23_missing_and_unknown_attributes(kernels: str) -> None:
    """onnxruntime-extensions #74: defaults are filled in, required and unknown ones are named."""
    session = open_session(with_attribute(GRAD, "active_num", None), kernels)
    inputs, attributes = example(GRAD, "dropless")
    got = session.run(None, feed_of(GRAD, inputs))
    assert_same(got, oracle(GRAD, inputs, attributes))
    with pytest.raises(moe_onnx.AttributeValueError, match=f"{GRAD}.*'top_k'.*missing"):
        open_session(with_attribute(GRAD, "top_k", None), kernels)
    for op in ATTRIBUTES:
        with pytest.raises(moe_onnx.AttributeValueError, match=f"{op}.*'not_known'"):
            open_session(with_attribute(op, "not_known", 1), kernels)
    with pytest.raises(moe_onnx.AttributeValueError, match="drop_and_pad'?\\?"):
        open_session(with_attribute(UNGRAD, "drop_and_padd", 1), kernels)


@pytest.mark.parametrize("kernels", ["auto", *KERNEL_CHOICES])
def test_a24_one_session_holds_an_operator_in_every_dtype(kernels: str) -> None:
    """onnxruntime-extensions #451: one name with two element types is no conflict."""
    nodes, feed, want = [], {}, {}
    for i, dtype in enumerate([*DTYPES.values(), np.dtype(np.float64)]):
        grads, attributes = example(GRAD, "padded", dtype, seed=i)
        feed |= {f"g{i}": grads[0], f"i{i}": grads[1]}
        nodes.append(node(GRAD, [f"g{i}", f"i{i}"], [f"y{i}"], **attributes))
        want[f"y{i}"] = oracle(GRAD, grads, attributes)[0]
        inputs, attributes = example(UNGRAD, "slot", dtype, seed=i)
        if i % 2:
            inputs[3] = inputs[3].astype(np.int8) * np.int8(-3)
        names = [f"{name}{i}" for name in ("dy", "o", "o", "m", "p", "w")]
        feed |= dict(zip(names, inputs, strict=True))
        nodes.append(node(UNGRAD, names, [f"r{i}", f"q{i}"], **attributes))
        want[f"r{i}"], want[f"q{i}"] = oracle(UNGRAD, inputs, attributes)
    got = open_session(model_of(nodes, feed, want), kernels).run(None, feed)
    assert_same(got, list(want.values()))


FRESH = """
import sys, json
import numpy as np
import onnxruntime as ort
how, path = sys.argv[1:]
if how == "late":
    import onnxruntime_extensions
    every = [ort.SessionOptions() for _ in range(3)]
    for options in every:
        options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    import moe_onnx
else:
    every = [None] * 3
    import moe_onnx
feed = {"g": np.arange(1, 13, dtype=np.float32).reshape(6, 2)}
feed["index"] = np.array([4, 1, 5, 3, 0, 2], np.int32)
results = {}
for kernels, options in zip(("body", "python", "auto"), every):
    try:
        session = moe_onnx.InferenceSession(path, options, kernels=kernels)
        results[kernels] = session.run(None, feed)[0].tolist()
    except moe_onnx.MoeOnnxError as error:
        results[kernels] = str(error)
    except Exception as error:
        results[kernels] = f"{type(error).__name__}, not an error of this package: {error}"
print(json.dumps(results))
"""


@pytest.fixture
def v1_path(tmp_path: Path) -> str:
    path = tmp_path / "model.onnx"
    onnx.save(grad_model(), path)
    return str(path)


def test_a25_the_first_session_of_a_process_works(v1_path: str) -> None:
    """onnxruntime-extensions #964: import and session are all it takes."""
    results, _ = in_new_process(FRESH, "fresh", v1_path)
    assert results == dict.fromkeys(("body", "python", "auto"), V1_GRAD.tolist())


def test_a25_options_registered_before_the_import(v1_path: str) -> None:
    """onnxruntime-extensions #188: options that cannot see the operators work, or are named."""
    results, _ = in_new_process(FRESH, "late", v1_path)
    assert results.pop("body") == V1_GRAD.tolist()
    for result in results.values():
        if result != V1_GRAD.tolist():
            assert "not an error of this package" not in result
            assert "import moe_onnx" in result.lower()


@pytest.mark.parametrize("domain", ["", "ascend_moe", "Ascend.Moe", "ai.onnx.contrib", "com.microsoft"])
@pytest.mark.parametrize("kernels", ["auto", *KERNEL_CHOICES])
def test_a25_a_mistyped_domain_is_named(kernels: str, domain: str) -> None:
    """onnxruntime #8635: an operator in a wrong domain is an error that says which is right."""
    with pytest.raises(moe_onnx.ModelError, match=rf"{GRAD}.*'{DOMAIN}'"):
        open_session(grad_model(domain=domain), kernels)


def test_a25_what_a_plain_session_needs() -> None:
    """onnxruntime #23566: a plain session needs registered ops or function bodies, and either do."""
    model = grad_model()
    model.graph.node[0].attribute.extend(
        helper.make_attribute(name, 0) for name in ("drop_pad_mode", "active_num")
    )
    with pytest.raises(Exception, match=GRAD):
        ort.InferenceSession(model.SerializeToString(), options_of())
    registered = ort.InferenceSession(model.SerializeToString(), moe_onnx.register(options_of()))
    body = moe_onnx.add_function_bodies(model)
    for session in (registered, ort.InferenceSession(body.SerializeToString(), options_of())):
        np.testing.assert_array_equal(session.run(None, v1_feed())[0], V1_GRAD)


LOAD_PLAIN = """
import sys, json
import numpy as np
import onnxruntime as ort
feed = {"g": np.arange(1, 13, dtype=np.float32).reshape(6, 2)}
feed["index"] = np.array([4, 1, 5, 3, 0, 2], np.int32)
try:
    session = ort.InferenceSession(sys.argv[1])
    print(json.dumps(session.run(None, feed)[0].tolist()))
except Exception as error:
    print(json.dumps(str(error)))
"""


@kernel_choices
def test_a26_an_optimised_model_can_be_saved_and_read_again(kernels: str, tmp_path: Path) -> None:
    """onnxruntime-extensions #868: what onnxruntime saves after registration is no foreign model."""
    path = str(tmp_path / "optimised.onnx")
    open_session(grad_model(), kernels, optimized_model_filepath=path)
    onnx.checker.check_model(path)
    plain, _ = in_new_process(LOAD_PLAIN, path)
    if kernels == "body":
        assert plain == V1_GRAD.tolist()
    else:
        assert GRAD in plain  # a clear error: which operator is missing
    for again in ("auto", *KERNEL_CHOICES):
        got = open_session(path, again).run(None, v1_feed())
        np.testing.assert_array_equal(got[0], V1_GRAD)


@each_dtype
@everywhere(GRAD, UNGRAD, routes=("reference", "kernel", "python"))
def test_a27_outputs_are_what_was_declared(op: str, mode: str, route: str, dtype: Any) -> None:
    """onnxruntime-extensions #922: number, dtype, shape and layout of what an op's body returns."""
    inputs, attributes = example(op, mode, dtype)
    got = run(op, route, inputs, attributes)
    assert [type(value) for value in got] == [np.ndarray] * (2 if op == UNGRAD else 1)
    assert all(value.flags.c_contiguous and value.flags.writeable for value in got)
    assert_same(got, oracle(op, inputs, attributes))
    if op == UNGRAD:
        got = run(op, route, inputs[:3], attributes)
        assert len(got) == 2 and got[0].dtype == dtype and got[1] is None


@pytest.mark.parametrize("op", [GRAD, UNGRAD])
def test_a27_a_registered_op_never_raises_nor_changes_its_outputs(op: str) -> None:
    """onnxruntime-extensions #922: whatever goes wrong, a Python op returns what it declared."""
    from onnxruntime_extensions._ocos import Opdef

    bodies = [d.body for d in Opdef._odlist.values() if d.op_type == f"{DOMAIN}::{op}"]
    inputs, attributes = example(op, MODES[op][0])
    want = oracle(op, inputs, attributes)
    wrong = [with_index(inputs, (1,), 99), inputs, [value[:0] for value in inputs]]
    assert bodies
    for body in bodies:
        for values, attrs in zip((inputs, *wrong), (attributes, attributes, {}, {"a": 1}), strict=True):
            result = body(*values, **attrs)
            results = result if isinstance(result, tuple) else (result,)
            assert len(results) == len(want)
            for value, right in zip(results, want, strict=True):
                array = np.asarray(value.flatten().tolist())
                assert array.dtype in (np.float32, np.float64)
                assert array.flags.c_contiguous and len(value.shape) == right.ndim
                assert array.size == np.prod(value.shape)
                if values is inputs and attrs is attributes:
                    np.testing.assert_array_equal(array.reshape(right.shape), right)


def symbolic_model(op: str, mode: str, outputs: Sequence[Sequence[Any]]) -> onnx.ModelProto:
    model = make_model(op, *example(op, mode))
    for value, shape in zip(model.graph.output, outputs, strict=True):
        elem = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, elem, shape))
    return model


@kernel_choices
@pytest.mark.parametrize(
    ("op", "mode", "outputs"),
    [
        (GRAD, "dropless", [["T", "H"]]),
        (GRAD, "padded", [["T", 5]]),
        (UNGRAD, "slot", [["N", "H"], ["T", 4]]),
        (UNGRAD, "padded", [["N", 5], ["T", "E"]]),
    ],
)
def test_a28_declared_shapes_are_those_of_the_run(
    kernels: str, op: str, mode: str, outputs: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime #14683: symbolic shapes hold at three batch sizes, without a warning."""
    session = open_session(symbolic_model(op, mode, outputs), kernels, log_severity_level=2)
    for tokens in (6, 3, 11):
        inputs, attributes = example(op, mode, tokens=tokens)
        assert_same(session.run(None, feed_of(op, inputs)), oracle(op, inputs, attributes))
    assert "VerifyOutputSizes" not in capfd.readouterr().err
    # That the warning would be seen: a wrong rank or size gives it.
    wrong = [[9, 9]] * len(outputs)
    session = open_session(symbolic_model(op, mode, wrong), kernels, log_severity_level=2)
    session.run(None, feed_of(op, inputs))
    assert "VerifyOutputSizes" in capfd.readouterr().err


@pytest.mark.parametrize(("op", "mode"), [(op, mode) for op in MODES for mode in MODES[op]])
def test_a28_inferred_shapes_are_those_of_the_run(op: str, mode: str) -> None:
    """onnxruntime #14683: what the schema infers is what every size gives."""
    for tokens in (6, 3, 11):
        inputs, attributes = example(op, mode, tokens=tokens)
        model = make_model(op, inputs, attributes)
        for value, array in zip(model.graph.input, inputs, strict=True):
            elem = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem, array.shape))
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        shapes = [
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            for value in inferred.graph.output
        ]
        want = [(0,) if v is None else v.shape for v in oracle(op, inputs, attributes)]
        assert shapes == want


@kernel_choices
def test_a29_bfloat16_goes_in_and_comes_out(kernels: str) -> None:
    """onnxruntime #20578, #24106: ml_dtypes arrays and OrtValues both work, and outlive the session."""
    session = open_session(grad_model(BF16), kernels)
    (first,) = session.run(None, v1_feed(BF16))
    raw = np.ascontiguousarray(V1.astype(BF16)).view(np.uint16)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.BFLOAT16)
    index = ort.OrtValue.ortvalue_from_numpy(V1_INDEX)
    (second,) = session.run(["y"], {"g": value, "index": V1_INDEX})
    (third,) = session.run_with_ort_values(["y"], {"g": value, "index": index})
    assert (third.data_type(), third.shape()) == ("tensor(bfloat16)", [3, 2])
    (empty,) = session.run(None, {"g": np.zeros((0, 2), BF16), "index": np.zeros(0, np.int32)})
    del session, third
    poison(first)
    for got in (first, second):
        assert_same([got], [V1_GRAD.astype(BF16)])
    assert (empty.dtype, empty.shape) == (BF16, (0, 2))


@pytest.mark.parametrize("fed", [np.uint16, np.float32, np.float16, np.int16])
@kernel_choices
def test_a29_other_arrays_for_bfloat16_get_advice(kernels: str, fed: Any) -> None:
    """onnxruntime #13001: an array of another dtype is refused with the input's name and the cure."""
    session = open_session(grad_model(BF16), kernels)
    with pytest.raises(moe_onnx.DtypeError) as caught:
        session.run(None, {"g": V1.astype(fed), "index": V1_INDEX})
    for part in ("'g'", "bfloat16", np.dtype(fed).name, "astype"):
        assert part in str(caught.value)


@pytest.mark.parametrize("opset", [18, 26])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "mode"), [(INIT, "padded"), (GRAD, "padded"), (COMBINE, "slot"), (UNGRAD, "slot")]
)
def test_a30_bodies_use_only_what_the_cpu_has(op: str, mode: str, dtype: Any, opset: int) -> None:
    """onnxruntime #26311: bodies load in 16 bits in a plain session, which lacks bf16 MatMul and more."""
    inputs, attributes = example(op, mode, dtype)
    session = ort.InferenceSession(wide_model(op, inputs, attributes, opset), options_of())
    got = session.run(None, {f"in{i}": widened(v) for i, v in enumerate(inputs)})
    want = [widened(v) for v in oracle(op, inputs, attributes) if v is not None]
    assert_same(got, want)


@each_dtype
@kernel_choices
def test_a31_a_layer_as_a_function_runs_like_its_nodes(kernels: str, dtype: Any) -> None:
    """onnxruntime #27873: the same layer, twice as a function and once flat, in every dtype."""
    feed, want = layer_feed(dtype)
    called = [
        helper.make_node("Back", list(feed), [f"x{i}", f"q{i}"], domain="my.layers", k=2) for i in range(2)
    ]
    flat = [
        node(UNGRAD, ["dy", "index", "index", "chosen", "permuted", "probs"], ["rows", "q2"]),
        node(GRAD, ["rows", "index"], ["x2"], top_k=2),
    ]
    shown = {f"{name}{i}": feed["dy"] for i in range(3) for name in "xq"}
    model = model_of(
        [*called, *flat], feed, shown, functions=[layer_function()], domains=(DOMAIN, "my.layers")
    )
    assert_same(open_session(model, kernels).run(None, feed), want * 3)


def other_function(domain: str) -> onnx.FunctionProto:
    """A function of an operator's name that does something else: the last two rows, negated."""
    return onnx.parser.parse_function(
        f'<domain: "{domain}", opset_import: ["": 21]>\n'
        f"{GRAD} <top_k: int = 1, drop_pad_mode: int = 0, active_num: int = 0>"
        " (grad_expanded_x, expanded_row_idx) => (grad_x) {"
        " start = Constant <value_ints = [-2]> ()"
        " end = Constant <value_ints = [9]> ()"
        " last = Slice (grad_expanded_x, start, end)"
        " grad_x = Neg (last) }"
    )


def test_a32_a_function_of_an_operators_name_is_noticed() -> None:
    """onnxruntime #10075: a body that means another thing is refused, noted or not used at all."""
    model = grad_model()
    model.functions.append(other_function(DOMAIN))
    silent, refusals = {}, []
    for kernels in ("auto", *KERNEL_CHOICES):
        try:
            session = open_session(model, kernels)
        except moe_onnx.ModelError as error:
            refusals.append(str(error))
            continue
        if not any("function" in text and GRAD in text for text in session.moe_notes):
            silent[kernels] = session.run(None, v1_feed())[0].tolist()
    assert all(GRAD in refusal for refusal in refusals)
    assert silent == {kernels: V1_GRAD.tolist() for kernels in silent}


@pytest.mark.parametrize("kernels", ["auto", *KERNEL_CHOICES])
def test_a32_a_function_of_that_name_elsewhere_is_left_alone(kernels: str) -> None:
    """onnxruntime #10075: in a domain of its own such a function is the model's affair."""
    own = node(GRAD, ["g", "index"], ["own"], top_k=2)
    own.domain = "my.ops"
    ours = node(GRAD, ["g", "index"], ["y"], top_k=2)
    model = model_of(
        [own, ours],
        v1_feed(),
        {"own": V1, "y": V1},
        functions=[other_function("my.ops")],
        domains=(DOMAIN, "my.ops"),
    )
    got = open_session(model, kernels).run(None, v1_feed())
    assert_same(got, [np.array([[-9, -10], [-11, -12]], np.float32), V1_GRAD])


def back_model(pairs: int) -> tuple[onnx.ModelProto, Callable[[int], tuple[dict[str, Any], list[Any]]]]:
    """Pairs of Python-op nodes side by side, and calls of them in any number of tokens."""
    nodes, names = [], ["dy", "index", "chosen", "permuted", "probs"]
    for i in range(pairs):
        nodes.append(
            node(
                UNGRAD,
                ["dy", "index", "index", "chosen", "permuted", "probs"],
                [f"rows{i}", f"probs_grad{i}"],
            )
        )
        nodes.append(node(GRAD, [f"rows{i}", "index"], [f"grad_x{i}"], top_k=2))

    def call(tokens: int) -> tuple[dict[str, Any], list[Any]]:
        inputs, attributes = example(UNGRAD, "slot", tokens=tokens, seed=tokens)
        grad, probs_grad = oracle(UNGRAD, inputs, attributes)
        grad_x = oracles.init_routing_v2_grad(grad, inputs[1], top_k=2)
        feed = dict(zip(names, [*inputs[:2], *inputs[3:]], strict=True))
        return feed, [probs_grad, grad_x] * pairs

    shown = [f"{name}{i}" for i in range(pairs) for name in ("probs_grad", "grad_x")]
    feed, want = call(4)
    return model_of(nodes, feed, dict(zip(shown, want, strict=True))), call


def child_a33() -> None:
    model, call = back_model(1)
    # One thread each: pools of eight callers would only spin against one another.
    shared = open_session(model, "python", intra_op_num_threads=1)
    parallel = open_session(
        back_model(3)[0],
        "python",
        execution_mode=ort.ExecutionMode.ORT_PARALLEL,
        inter_op_num_threads=3,
    )
    wrong: list[str] = []
    counts = dict.fromkeys(("runs", "errors"), 0)

    def worker(number: int) -> None:
        feed, want = call(1 + 3 * number)
        if number == 7:  # this one is always wrong, and must be the only one to hear of it
            feed["index"] = feed["index"].copy()
            feed["index"][0] = 1000
        for i in range(200):
            try:
                if i % 20 == 19:  # six nodes in one run, spread over a pool's threads
                    assert_same(parallel.run(None, feed), want * 3)
                else:
                    assert all(map(np.array_equal, shared.run(None, feed), want))
                counts["runs"] += 1
                if number == 7:
                    wrong.append("no error")
            except moe_onnx.IndexValueError as error:
                counts["errors"] += 1
                if number != 7 or error.value != 1000:
                    wrong.append(f"thread {number}: {error}")
            except BaseException as error:
                wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=worker, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    binding = shared.io_binding()
    for tokens in (5, 9, 2):
        feed, want = call(tokens)
        for name, value in feed.items():
            binding.bind_cpu_input(name, value)
        for output in shared.get_outputs():
            binding.bind_output(output.name)
        shared.run_with_iobinding(binding)
        assert_same(binding.copy_outputs_to_cpu(), want)
    report([counts["runs"], counts["errors"], wrong[:5]])


def test_a33_threads_share_a_session() -> None:
    """onnxruntime #3280, #4600: eight threads, parallel execution and IO binding, right numbers."""
    (runs, errors, wrong), _ = child(child_a33, timeout=50)
    assert wrong == []
    assert (runs, errors) == (1400, 200)


def call_kernels(_: int = 0) -> list[list[float]]:
    """Both kernels on enough rows to start threads, then a session; for child processes."""
    ones = np.ones((2100, 1000), np.float32)
    (sums,) = run(GRAD, "kernel", [ones, np.arange(2100, dtype=np.int32)], {"top_k": 2})
    assert (sums == 2).all() and len(sums) == 1050
    inputs, attributes = example(UNGRAD, "slot")
    check(UNGRAD, "kernel", inputs, attributes)
    return open_session(grad_model(), "python", intra_op_num_threads=1).run(None, v1_feed())[0].tolist()


def run_path(path: str) -> list[list[float]]:
    return open_session(path, "auto").run(None, v1_feed())[0].tolist()


def child_a34(path: str) -> None:
    session = open_session(grad_model(), "python")
    session.run(None, v1_feed())
    call_kernels()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        forked = pool.map_async(call_kernels, range(4)).get(timeout=15)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map_async(run_path, [path]).get(timeout=25)
    report([*forked, *spawned, session.run(None, v1_feed())[0].tolist()])


def test_a34_processes_fork_and_spawn(v1_path: str) -> None:
    """onnxruntime #31961, #7846: after a fork kernels and new sessions run; spawned ones take a path."""
    results, log = child(child_a34, v1_path, timeout=50)
    assert results == [V1_GRAD.tolist()] * 6
    assert "SIGSEGV" not in log


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a34_a_session_says_that_it_cannot_be_pickled(duplicate: Callable[[Any], Any]) -> None:
    """onnxruntime #5093: pickling is a TypeError that says what to do instead."""
    session = open_session(grad_model(), "body")
    with pytest.raises(TypeError, match=r"InferenceSession.*pickled.*model"):
        duplicate(session)


def strided(value: Any, way: str) -> Any:
    """An equal array with other strides."""
    if way == "every other row":
        return np.repeat(value, 2, axis=0)[::2]
    if way == "backwards":
        flipped = np.ascontiguousarray(value[..., ::-1])
        return flipped[..., ::-1]
    if way == "transposed" and value.ndim > 1:
        return np.ascontiguousarray(value.T).T
    wide = np.zeros((*value.shape[:-1], value.shape[-1] * 3 + 1), value.dtype)
    wide[..., 1::3] = value
    return wide[..., 1::3]


WAYS = ("every other row", "backwards", "transposed", "every third column")


@each_dtype
@everywhere(routes=FEW)
def test_a35_strides_are_respected(op: str, mode: str, route: str, dtype: Any) -> None:
    """onnxruntime #13548: views give what contiguous copies give, and are left as they are."""
    inputs, attributes = example(op, mode, dtype)
    want = oracle(op, inputs, attributes)
    for way in WAYS:
        views = [strided(value, way) for value in inputs]
        assert not any(view.flags.c_contiguous for view in views)
        for view in views:
            view.flags.writeable = False
        assert_same(run(op, route, views, attributes), want)
        assert_same(views, inputs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", [GRAD, UNGRAD])
@kernel_choices
def test_a35_strides_of_ort_values_are_respected(kernels: str, op: str, way: str) -> None:
    """onnxruntime #13548: an OrtValue of a view holds the view's numbers."""
    inputs, attributes = example(op, MODES[op][0])
    session = session_of(make_model(op, inputs, attributes), kernels)
    feed = {
        name: ort.OrtValue.ortvalue_from_numpy(strided(value, way))
        for name, value in feed_of(op, inputs).items()
    }
    got = session.run_with_ort_values([a.name for a in BY_NAME[op].outputs], feed)
    assert_same([value.numpy() for value in got], oracle(op, inputs, attributes))


@each_dtype
@everywhere(routes=FEW)
def test_a35_outputs_do_not_change_with_a_reused_buffer(op: str, mode: str, route: str, dtype: Any) -> None:
    """onnxruntime #13548: a loop that writes its next batch into the same arrays keeps old results."""
    top_k = {"experts": 3, "top_k": 1, "capacity": 2}  # K=1, where an output could be its input
    inputs, attributes = example(op, mode, dtype, **top_k)
    want = oracle(op, inputs, attributes)
    first = run(op, route, inputs, attributes)
    other, _ = example(op, mode, dtype, seed=1, **top_k)
    for value, new in zip(inputs, other, strict=True):
        value[...] = new
    second = run(op, route, inputs, attributes)
    assert_same(first, want)
    assert_same(second, oracle(op, other, attributes))


@each_dtype
@kernel_choices
def test_a36_outputs_rebound_as_inputs(kernels: str, dtype: Any) -> None:
    """onnxruntime #21888, #8144: a state handed on by IO binding, T changing, equals plain runs."""
    state = np.zeros((1, 5), dtype)
    inputs, attributes = example(GRAD, "dropless", dtype)
    last = [np.arange(1, dtype=np.int32), np.zeros((1, 5), dtype)]
    # state' = state + the first token's gradient, by an operator, as 16 bits have no Add.
    model = model_of(
        [
            node(GRAD, ["g", "index"], ["y"], top_k=2),
            std("Gather", ["y", "first"], ["token"]),
            std("Concat", ["state", "token"], ["two"], axis=0),
            node(GRAD, ["two", "both"], ["new_state"], top_k=2),
        ],
        {"g": inputs[0], "index": inputs[1], "first": last[0], "state": state, "both": last[0]},
        {"new_state": state, "y": inputs[0]},
    )
    session = open_session(model, kernels)
    fixed = {"first": np.zeros(1, np.int32), "both": np.array([0, 1], np.int32)}
    binding = session.io_binding()
    bound: Any = None
    plain, exact = state, state.astype(np.float64)
    for step, tokens in enumerate((6, 9, 1, 4)):
        (grad, index), attributes = example(GRAD, "dropless", dtype, tokens=tokens, seed=step)
        feed = {"g": grad, "index": index, **fixed}
        plain, y = session.run(None, {**feed, "state": plain})
        want = oracles.init_routing_v2_grad(grad, index, top_k=2)
        exact = exact + want[:1].astype(np.float64)
        for name, value in feed.items():
            binding.bind_ortvalue_input(name, ort_value(value))
        binding.bind_ortvalue_input("state", ort_value(state) if bound is None else bound)
        for name in ("new_state", "y"):
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        bound, bound_y = binding.get_outputs()
        for got in (plain, from_ort_value(bound, dtype)):
            np.testing.assert_array_equal(got.astype(np.float64), exact)
        assert_same([y, from_ort_value(bound_y, dtype)], [want, want])


def ort_value(value: Any) -> ort.OrtValue:
    if value.dtype != BF16:
        return ort.OrtValue.ortvalue_from_numpy(value)
    raw = np.ascontiguousarray(value).view(np.uint16)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.BFLOAT16)


def from_ort_value(value: ort.OrtValue, dtype: Any) -> Any:
    if dtype != BF16:
        return value.numpy()
    # onnxruntime gives no bfloat16 to numpy: a Cast in a session of its own does.
    cast = model_of(
        [std("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], {"x": np.zeros((1, 1), BF16)}, {"y": V1}
    )
    session = ort.InferenceSession(cast.SerializeToString(), options_of())
    return session.run_with_ort_values(["y"], {"x": value})[0].numpy().astype(BF16)
