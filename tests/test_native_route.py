"""Which kernels run, who may have them, what happens where they are not, and what their errors become."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_extensions
import pytest
from onnx import TensorProto, helper
from routes import NATIVE, ROUTES, feed_of, make_model, one_thread
from test_session import BF16, INDEX, INIT, UNPERMUTE, assert_outputs, call, numbers
from tiny_graph import TinyGraph

import moe_onnx
from moe_onnx.kernels import native
from moe_onnx.runtime import register as registering
from moe_onnx.runtime import routes
from moe_onnx.runtime.native_errors import native_error
from moe_onnx.runtime.ort_values import to_ort_value

EXTENSIONS = onnxruntime_extensions.get_library_path()
BEST = "native" if NATIVE else "python"


def quiet() -> ort.SessionOptions:
    options = one_thread()
    options.log_severity_level = 4
    return options


def init_model(**attributes: int) -> onnx.ModelProto:
    inputs, _, _ = call(INIT)
    return make_model(INIT, inputs, {"top_k": 2, **attributes})


FEED = feed_of(INIT, call(INIT)[0])
WRONG = {**FEED, "expanded_row_idx": INDEX + np.int32(1)}
PLAIN_MODEL = init_model(drop_pad_mode=0, active_num=0).SerializeToString()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A process that has no native library and has told nobody."""
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setenv(native.OVERRIDE, str(tmp_path / "not_there.so"))
    monkeypatch.setattr(routes, "_told", [])
    return monkeypatch


# Which routes there are.


def test_which_routes_are_tested() -> None:
    """All of them; the native one wherever there is a library, and else its reason can be read."""
    assert ROUTES[:6] == ("reference", "kernel", "evaluator", "body_plain", "body", "python")
    assert ROUTES[6:] == NATIVE
    if not NATIVE:
        assert any(word in native.unavailable() for word in ("compiler", native.SWITCH, native.OVERRIDE))
        return
    session = moe_onnx.InferenceSession(init_model(), quiet(), kernels="native")
    assert session.moe_kernels == {"native": 1, "python": 0, "body": 0}


def test_auto_prefers_native_then_python() -> None:
    assert moe_onnx.InferenceSession(init_model(), quiet()).moe_kernels[BEST] == 1
    options = moe_onnx.register(quiet())
    assert registering.registered(options) == BEST
    assert_outputs(ort.InferenceSession(PLAIN_MODEL, options).run(None, FEED), call(INIT)[2])


def test_auto_is_what_the_options_have() -> None:
    """Options are shared by sessions, and a second library cannot be added."""
    for kernels in ("python", *NATIVE):
        options = moe_onnx.register(quiet(), kernels)
        assert moe_onnx.register(options) is options
        assert moe_onnx.InferenceSession(init_model(), options).moe_kernels[kernels] == 1
        assert registering.registered(options) == kernels
    train = moe_onnx.TrainingSession(TinyGraph(), sess_options=moe_onnx.register(quiet(), "python"))
    assert train._kernels == "body"


def test_training_is_native_or_by_bodies() -> None:
    train = moe_onnx.TrainingSession(TinyGraph())
    assert train._kernels == (NATIVE[0] if NATIVE else "body")


def test_named_kernels_that_are_not_there(without: pytest.MonkeyPatch) -> None:
    for open_it in (
        lambda: moe_onnx.InferenceSession(init_model(), quiet(), kernels="native"),
        lambda: moe_onnx.register(quiet(), "native"),
    ):
        with pytest.raises(moe_onnx.ModelError, match=r"native kernels are unavailable: .*not_there\.so"):
            open_it()


def test_the_fallback_is_told_once(without: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With the reason and the way out, to the package's logger; not at all where it was asked for."""
    caplog.set_level(logging.INFO, "moe_onnx")
    for _ in range(2):
        assert moe_onnx.InferenceSession(init_model(), quiet()).moe_kernels["python"] == 1
        moe_onnx.register(quiet())
    (record,) = caplog.records
    assert record.name == "moe_onnx"
    assert record.levelno == logging.WARNING
    assert "not_there.so" in record.getMessage()
    assert "'python'" in record.getMessage()
    caplog.clear()
    without.setattr(routes, "_told", [])
    for kernels in ("python", "body"):
        moe_onnx.InferenceSession(init_model(), quiet(), kernels=kernels)
    assert caplog.records == []
    without.setenv(native.SWITCH, "0")
    moe_onnx.TrainingSession(TinyGraph())
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "MOE_ONNX_NATIVE=0" in record.getMessage()


def test_register_takes_kernels_that_are_libraries() -> None:
    for wrong in ("body", "pyhton"):
        with pytest.raises(moe_onnx.OptionError, match="'auto', 'native', 'python', got"):
            moe_onnx.register(ort.SessionOptions(), wrong)


def test_the_form_of_graphs_for_a_route(without: pytest.MonkeyPatch) -> None:
    """What native kernels are fast with is built only where they will run."""
    assert [routes.form_for(kernels) for kernels in routes.KERNELS] == ["body"] * 4
    without.delenv(native.OVERRIDE)
    form = "native" if NATIVE else "body"
    assert [routes.form_for(kernels) for kernels in routes.KERNELS] == [form, form, "body", "body"]


# One options object, one library of kernels.


def plainly(options: ort.SessionOptions, kernels: str) -> None:
    path = EXTENSIONS if kernels == "python" else moe_onnx.native_library_path()
    options.register_custom_ops_library(path)


WAYS = {"register": moe_onnx.register, "plain": plainly}


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_one_library_is_registered_once(first: str, second: str) -> None:
    for kernels in ("python", *NATIVE):
        options = quiet()
        for way in (first, second, first):
            WAYS[way](options, kernels)
        assert_outputs(ort.InferenceSession(PLAIN_MODEL, options).run(None, FEED), call(INIT)[2])


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_native_and_python_kernels_are_not_mixed(first: str, second: str) -> None:
    """In no order: onnxruntime would take both, and then make no session of any model."""
    for one, other in (("native", "python"), ("python", "native")):
        options = quiet()
        if not NATIVE:
            options.add_session_config_entry(registering._MARK, one)  # as if it were there
            with pytest.raises(moe_onnx.OptionError if other == "python" else moe_onnx.ModelError):
                WAYS[second](options, other)
            continue
        WAYS[first](options, one)
        with pytest.raises(moe_onnx.OptionError) as caught:
            WAYS[second](options, other)
        for mention in ("onnxruntime-extensions", "native kernels", "new SessionOptions", "kernels='body'"):
            assert mention in str(caught.value)
        assert_outputs(ort.InferenceSession(PLAIN_MODEL, options).run(None, FEED), call(INIT)[2])


def test_sessions_on_options_with_other_kernels() -> None:
    """Bodies run beside any library, and are not shadowed by it; other kernels are refused."""
    for one, other in (("native", "python"), ("python", "native")):
        if one not in ("python", *NATIVE):
            continue
        options = moe_onnx.register(quiet(), one)
        if other in ("python", *NATIVE):
            with pytest.raises(moe_onnx.OptionError, match="cannot be added"):
                moe_onnx.InferenceSession(init_model(), options, kernels=other)
        for model in (init_model(), moe_onnx.add_function_bodies(init_model())):
            session = moe_onnx.InferenceSession(model, options, kernels="body")
            assert_outputs(session.run(None, FEED), call(INIT)[2])
            with pytest.raises(moe_onnx.BodyCheckError):
                session.run(None, WRONG)


def test_a_registration_that_nobody_saw() -> None:
    """As one before moe_onnx was imported: it is found by trying."""
    original = ort.SessionOptions.register_custom_ops_library.__wrapped__
    paths = {"python": EXTENSIONS, **{name: moe_onnx.native_library_path() for name in NATIVE}}
    for kernels, path in paths.items():
        options = quiet()
        original(options, path)
        assert registering.registered(options) == kernels
        assert moe_onnx.register(options) is options
        assert moe_onnx.InferenceSession(init_model(), options).moe_kernels[kernels] == 1
        for other in set(paths) - {kernels}:
            with pytest.raises(moe_onnx.OptionError, match="cannot be added"):
                moe_onnx.register(options, other)


def test_what_onnxruntime_makes_of_both() -> None:
    """Nothing, of any model; if this changes, the refusal may go."""
    if not NATIVE:
        assert not native.is_native_library(EXTENSIONS)
        return
    original = ort.SessionOptions.register_custom_ops_library.__wrapped__
    paths = [EXTENSIONS, moe_onnx.native_library_path()]
    for pair, text in (
        (paths, "Domain already set in registry"),
        (paths[::-1], "Conflicting with a registered"),
    ):
        options = quiet()
        for path in pair:
            original(options, path)
        with pytest.raises(Exception, match=text):
            ort.InferenceSession(PLAIN_MODEL, options)
        with pytest.raises(moe_onnx.ModelError, match="new SessionOptions"):
            moe_onnx.InferenceSession(init_model(), options)


# What runs, and what is said of it.


def test_plain_sessions_need_nothing_written_out() -> None:
    """No attributes, no absent inputs, any float type: what Python ops cannot take in a plain session."""
    for dtype in (np.float16, BF16, np.float32, np.float64):
        rows, index = numbers(8, 3, dtype), np.arange(8, dtype=np.int32)
        model = make_model(UNPERMUTE, [rows, index, index], {})
        if not NATIVE:
            with pytest.raises(Exception, match=UNPERMUTE):
                ort.InferenceSession(model.SerializeToString(), moe_onnx.register(quiet()))
            continue
        session = ort.InferenceSession(model.SerializeToString(), moe_onnx.register(quiet()))
        kinds = {arg.name: arg.type for arg in session.get_inputs()}
        feed = {
            name: to_ort_value(v, kinds[name]) for name, v in feed_of(UNPERMUTE, [rows, index, index]).items()
        }
        got = session.run_with_ort_values(["permuted_tokens_grad"], feed)[0]
        assert got.shape() == [8, 3]


def test_what_plain_sessions_raise() -> None:
    """onnxruntime's exception, with the class, the status and the text of the error that the package has."""
    with pytest.raises(moe_onnx.IndexValueError) as expected:
        moe_onnx.moe_init_routing_v2_grad(*WRONG.values(), top_k=2)
    session = ort.InferenceSession(PLAIN_MODEL, moe_onnx.register(quiet()))
    if not NATIVE:  # Python ops cannot
        assert np.isnan(session.run(None, WRONG)[0]).all()
        return
    with pytest.raises(Exception, match="Name:'the_node'") as caught:
        session.run(None, WRONG)
    assert str(caught.value).endswith(f"IndexValueError (aclnn 561002): {expected.value}")


def scan_of(node: onnx.NodeProto) -> onnx.ModelProto:
    """The node over a sequence of rows; the index comes from outside."""
    float_, value = TensorProto.FLOAT, helper.make_tensor_value_info
    body = helper.make_graph([node], "body", [value("x", float_, [6, 4])], [value("y", float_, [3, 4])])
    scan = helper.make_node("Scan", ["grad_expanded_x"], ["ys"], "scan", body=body, num_scan_inputs=1)
    inputs = [
        value("grad_expanded_x", float_, [None, 6, 4]),
        value("expanded_row_idx", TensorProto.INT32, [6]),
    ]
    graph = helper.make_graph([scan], "graph", inputs, [value("ys", float_, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_node_in_a_scan_and_its_error() -> None:
    node = helper.make_node(INIT, ["x", "expanded_row_idx"], ["y"], domain="ascend.moe", top_k=2)
    rows, index, (want,) = FEED["grad_expanded_x"], FEED["expanded_row_idx"], call(INIT)[2]
    for kernels in ("python", *NATIVE):
        session = moe_onnx.InferenceSession(scan_of(node), quiet(), kernels=kernels)
        feed = {"grad_expanded_x": np.stack([rows, rows]), "expanded_row_idx": index}
        assert_outputs(session.run(None, feed), [np.stack([want, want])])
        with pytest.raises(moe_onnx.IndexValueError, match=r"got 6 at .*\(node 'y'\)$") as caught:
            session.run(None, {**feed, "expanded_row_idx": index + np.int32(1)})
        assert caught.value.node == "y"


def test_bodies_are_left_out_and_own_functions_kept() -> None:
    """A kernel goes before a body anyway; a body that means something else is told of."""
    if not NATIVE:
        return
    model = moe_onnx.add_function_bodies(init_model())
    session = moe_onnx.InferenceSession(model, quiet(), kernels="native")
    assert session.moe_notes == []
    assert_outputs(session.run(None, FEED), call(INIT)[2])
    model.functions[0].node.append(helper.make_node("Identity", [model.functions[0].output[0]], ["unused"]))
    session = moe_onnx.InferenceSession(model, quiet(), kernels="native")
    assert any("is not this package's body" in note for note in session.moe_notes)
    assert_outputs(session.run(None, FEED), call(INIT)[2])


RUN = "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running Loop node. "
RUN += "Name:'loop' Status Message: Non-zero status code returned while running MoeX node. Name:'a 'b'' "
RUN += "Status Message: "


@pytest.mark.parametrize(
    ("text", "kind", "status", "rest"),
    [
        (RUN + "LimitError (aclnn 561002): MoeX: too\nmuch.", moe_onnx.LimitError, 561002, {"node": "a 'b'"}),
        (RUN + "DtypeError (aclnn 561002): MoeX: not so.", moe_onnx.DtypeError, 561002, {"op": "MoeX"}),
        (
            "... : Exception during initialization: MissingInputError (aclnn 161001): MoeX: none.",
            moe_onnx.MissingInputError,
            161001,
            {"node": None, "args": ("MoeX: none.",)},
        ),
        (
            RUN + "IndexValueError (aclnn 561002): MoeX: 'ids' values must be unique apart from -1 (rows), "
            "got -3 at position [2] and again at position [4].",
            moe_onnx.IndexValueError,
            561002,
            {"input_name": "ids", "position": (4,), "value": -3},
        ),
        (
            RUN
            + "IndexValueError (aclnn 561002): MoeX: 'ids' values must be in [0, 4) (got so far), got 77 at "
            "position [2, 1]. Check how the indices were made.",
            moe_onnx.IndexValueError,
            561002,
            {"input_name": "ids", "position": (2, 1), "value": 77},
        ),
    ],
)
def test_errors_out_of_text(text: str, kind: type, status: int, rest: dict[str, Any]) -> None:
    error = native_error(text)
    assert type(error) is kind
    assert error.aclnn_status == status
    assert {name: getattr(error, name) for name in rest} == rest
    if "initialization" not in text:
        assert str(error).endswith("(node 'a 'b'')")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Non-zero status code returned while running Add node. Name:'a' Status Message: no",
        RUN + "MemoryError: out of memory in a kernel of ascend_moe",
        RUN + "ModelError (aclnn x): MoeX: no number",
        RUN + "OSError (aclnn 1): MoeX: none of ours",
        RUN + "IndexValueError (aclnn 561002): MoeX: without the value",
    ],
)
def test_other_text_is_no_error_of_ours(text: str) -> None:
    assert native_error(text) is None
