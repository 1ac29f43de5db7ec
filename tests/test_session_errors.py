"""What an operator says of a wrong call comes out of every way to run it, once, and there only."""

from __future__ import annotations

import copy
import pickle
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_c
from routes import OP_ROUTES, feed_of, make_model
from test_session import (
    BF16,
    INIT,
    KERNELS,
    SLOTS,
    UNPERMUTE,
    assert_outputs,
    call,
    plain_registered,
)

import moe_onnx

WRONG = {INIT: ("expanded_row_idx", 3, -7), UNPERMUTE: ("out_index", 2, 77)}


def silent(parallel: bool = False) -> ort.SessionOptions:
    """onnxruntime logs the errors that it raises."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2  # run_async needs a thread beside the caller's
    if parallel:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = 2
    return options


def set_up(
    op: str, kernels: str, dtype: Any = np.float32, parallel: bool = False
) -> tuple[Any, dict[str, Any], dict[str, Any], list[Any]]:
    """A session, a right feed, a wrong feed, and what the right one gives."""
    inputs, attributes, want = call(op, dtype)
    model = make_model(op, inputs, attributes)
    session = moe_onnx.InferenceSession(model, silent(parallel), kernels=kernels)
    feed, (name, at, value) = feed_of(op, inputs), WRONG[op]
    wrong = feed[name].copy()
    wrong[at] = value
    return session, feed, {**feed, name: wrong}, want


def by_run(session: Any, feed: dict[str, Any]) -> list[Any]:
    outputs: list[Any] = session.run(None, feed)
    return outputs


def by_ort_values(session: Any, feed: dict[str, Any]) -> list[Any]:
    values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feed.items()}
    names = [arg.name for arg in session.get_outputs()]
    return [value.numpy() for value in session.run_with_ort_values(names, values)]


def by_iobinding(session: Any, feed: dict[str, Any]) -> list[Any]:
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_cpu_input(name, value)
    for arg in session.get_outputs():
        binding.bind_output(arg.name)
    session.run_with_iobinding(binding)
    outputs: list[Any] = binding.copy_outputs_to_cpu()
    return outputs


def by_vector(session: Any, feed: dict[str, Any]) -> list[Any]:
    feeds, outputs = ort_c.OrtValueVector(), ort_c.OrtValueVector()
    for value in feed.values():
        feeds.push_back(ort.OrtValue.ortvalue_from_numpy(value)._ortvalue)
    names = [arg.name for arg in session.get_outputs()]
    cpu = ort_c.OrtDevice(ort_c.OrtDevice.cpu(), ort_c.OrtDevice.default_memory(), 0)
    session.run_with_ortvaluevector(ort.RunOptions(), [*feed], feeds, names, outputs, [cpu] * len(names))
    return [value.numpy() for value in outputs]


WAYS = [by_run, by_ort_values, by_iobinding, by_vector]


def by_async(session: Any, feed: dict[str, Any]) -> tuple[list[Any], Any, str]:
    told: queue.Queue[tuple[list[Any], Any, str]] = queue.Queue()
    session.run_async(None, feed, lambda *got: told.put(got), "data")
    return told.get(timeout=20)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", [INIT, UNPERMUTE])
@pytest.mark.parametrize("kernels", OP_ROUTES)
def test_an_error_of_a_kernel(kernels: str, op: str, way: Callable[..., Any]) -> None:
    """It is the operator's own, with its node; afterwards the session works as before."""
    session, feed, wrong, want = set_up(op, kernels)
    name, at, value = WRONG[op]
    for _ in range(2):
        with pytest.raises(moe_onnx.IndexValueError) as caught:
            way(session, wrong)
        error = caught.value
        assert (error.op, error.node, error.aclnn_status) == (op, "the_node", 561002)
        assert (error.input_name, error.position, error.value) == (name, (at,), value)
        text = str(error)
        assert text.startswith(f"{op}: '{name}' values must be in ")
        assert f"got {value} at position [{at}]" in text
        assert text.endswith("(node 'the_node')")
        assert text.count("the_node") == 1
        assert_outputs(session.run(None, feed), want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", [INIT, UNPERMUTE])
def test_an_error_of_a_body(op: str, way: Callable[..., Any]) -> None:
    """It names the operator and the rule, not onnxruntime's node, and which kernels say more."""
    session, feed, wrong, want = set_up(op, "body")
    with pytest.raises(moe_onnx.BodyCheckError) as caught:
        way(session, wrong)
    assert (caught.value.op, caught.value.aclnn_status) == (op, 561002)
    assert f"{op}: {WRONG[op][0]} must be in range" in str(caught.value)
    assert 'kernels="native" or kernels="python"' in str(caught.value)
    assert isinstance(caught.value.__cause__, Exception)
    assert_outputs(session.run(None, feed), want)


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_an_error_in_run_async(kernels: str, parallel: bool) -> None:
    """It is the text that the callback gets, and is raised by no later run."""
    session, feed, wrong, want = set_up(INIT, kernels, parallel=parallel)
    for _ in range(3):
        results, data, text = by_async(session, wrong)
        assert (results, data) == ([], "data")
        assert INIT in text
        assert "expanded_row_idx" in text
        if kernels in OP_ROUTES:
            assert text.endswith("(node 'the_node')")
        assert_outputs(session.run(None, feed), want)
        results, _, text = by_async(session, feed)
        assert text == ""
        assert_outputs(results, want)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float64], ids=str)
@pytest.mark.parametrize("kernels", OP_ROUTES)
def test_an_error_in_other_dtypes(kernels: str, dtype: Any) -> None:
    session, feed, wrong, want = set_up(UNPERMUTE, kernels, dtype)
    with pytest.raises(moe_onnx.IndexValueError, match=r"got 77 at position \[2\].*'the_node'"):
        session.run(None, wrong)
    assert_outputs(session.run(None, feed), want)


def test_no_other_session_or_thread_sees_an_error() -> None:
    """Neither one that ran before nor one that is made later."""
    first, feed, wrong, want = set_up(INIT, "python")
    second = set_up(INIT, "python")[0]
    failed: list[BaseException] = []

    def fail() -> None:
        try:
            first.run(None, wrong)
        except moe_onnx.IndexValueError as error:
            failed.append(error)

    for _ in range(20):
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        for session in (first, second, set_up(INIT, "python")[0]):
            assert_outputs(session.run(None, feed), want)
    assert len(failed) == 20


def test_the_first_of_several_errors() -> None:
    """The operator's is raised, what its NaN broke further down is the cause given."""
    inputs, attributes, _ = call(INIT)
    model = make_model(INIT, inputs, attributes)
    grad, index = (arg.name for arg in model.graph.input)
    del model.graph.output[:]
    model.graph.node[0].name = ""
    model.graph.node[0].output[0] = "first"
    model.graph.node.extend(
        [
            helper.make_node(INIT, [grad, index], ["b"], "second", domain="ascend.moe", top_k=3),
            helper.make_node("Cast", ["first"], ["as_index"], to=TensorProto.INT64),
            helper.make_node("Gather", [grad, "as_index"], ["gathered"]),
        ]
    )
    model.graph.output.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, None))
    model.graph.output.append(helper.make_tensor_value_info("gathered", TensorProto.FLOAT, None))
    session = moe_onnx.InferenceSession(model, silent(), kernels="python")
    feed = {grad: np.zeros((6, 4), np.float32), index: np.array([0, 1, 2, 3, 4, 99], np.int32)}
    with pytest.raises(moe_onnx.IndexValueError) as caught:
        session.run(None, feed)
    assert caught.value.node in ("first", "second")  # a node without a name goes by its output
    assert isinstance(caught.value.__cause__, ort_c.InvalidArgument)
    feed[index] = np.arange(6, dtype=np.int32)
    session.run(None, feed)
    feed[grad][:] = 1e6  # an error of onnxruntime's own stays its own
    with pytest.raises(ort_c.InvalidArgument):
        session.run(None, feed)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_bodies_beside_registered_kernels(dtype: Any) -> None:
    """``kernels="body"`` runs bodies also where the options know the Python kernels."""
    inputs, attributes, want = call(UNPERMUTE, dtype)
    options = plain_registered()
    options.log_severity_level = 4
    model = make_model(UNPERMUTE, inputs, {"drop_and_pad": 0, **attributes})
    session = moe_onnx.InferenceSession(model, options, kernels="body")
    feed = feed_of(UNPERMUTE, inputs)
    assert_outputs(session.run(None, feed), want)
    with pytest.raises(moe_onnx.BodyCheckError):
        session.run(None, {**feed, "out_index": SLOTS + 1})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("shape", "good"), [([4, 3], True), ([4, 4], False), ([3], False)])
def test_restore_shape(shape: list[int], good: bool, static: bool, kernels: str) -> None:
    """Checked in padded mode: on loading where sizes are known, in the run where they are not."""
    grad, order = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([1, 3, 0, 2], np.int32)
    tokens = np.array([0, 1, 2, 3], np.int32)
    inputs = [grad, order, tokens, None, None, None]
    model = make_model(UNPERMUTE, inputs, {"drop_and_pad": 1, "restore_shape": shape})
    if static:
        for arg, value in zip(model.graph.input, inputs, strict=False):
            for dim, size in zip(arg.type.tensor_type.shape.dim, value.shape, strict=True):
                dim.dim_value = size

    def run() -> Any:
        session = moe_onnx.InferenceSession(model, silent(), kernels=kernels)
        return session.run(None, feed_of(UNPERMUTE, inputs[:3]))[0]

    if good:
        want = np.empty((4, 3), np.float32)
        want[order] = grad[tokens]
        np.testing.assert_array_equal(run(), want)
    else:
        at_load_or_named = moe_onnx.ShapeError if static or kernels in OP_ROUTES else ValueError
        with pytest.raises(at_load_or_named, match="restore_shape") as caught:
            run()
        assert caught.value.aclnn_status == 561002  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_feeds_of_a_wrong_dtype(dtype: Any, kernels: str) -> None:
    """The message names the input and the dtypes that it takes."""
    session, feed, _, want = set_up(INIT, kernels, dtype)
    wanted = {"grad_expanded_x": np.dtype(dtype).name, "expanded_row_idx": "int32"}
    for name, legal in wanted.items():
        for given in (np.float64, np.int64, np.float16):
            with pytest.raises(moe_onnx.DtypeError) as caught:
                session.run(None, {**feed, name: feed[name].astype(given)})
            assert isinstance(caught.value, TypeError)
            for mention in (f"'{name}'", legal, np.dtype(given).name):
                assert mention in str(caught.value)
    for missing in feed:
        with pytest.raises(ValueError, match=missing):
            session.run(None, {name: feed[name] for name in feed if name != missing})
    with pytest.raises(Exception, match="surplus"):
        session.run(None, {**feed, "surplus": feed["expanded_row_idx"]})
    assert_outputs(session.run(None, feed), want)


def test_what_is_no_model_is_left_to_onnxruntime(tmp_path: Path) -> None:
    for source in (tmp_path / "absent.onnx", b"no model", b""):
        given = str(source) if isinstance(source, Path) else source
        with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever it is
            ort.InferenceSession(given)
        with pytest.raises(type(theirs.value)) as ours:
            moe_onnx.InferenceSession(source)
        assert str(ours.value) == str(theirs.value)


def test_wrong_kernels_list_the_right_ones() -> None:
    inputs, attributes, _ = call(INIT)
    with pytest.raises(moe_onnx.OptionError) as caught:
        moe_onnx.InferenceSession(make_model(INIT, inputs, attributes), kernels="pyhton")
    assert all(repr(name) in str(caught.value) for name in ("auto", "native", *KERNELS, "pyhton"))


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(copier: Any) -> None:
    inputs, attributes, _ = call(INIT)
    session = moe_onnx.InferenceSession(make_model(INIT, inputs, attributes))
    with pytest.raises(TypeError, match="build a session there"):
        copier(session)
