"""``moe_onnx.InferenceSession`` is onnxruntime's session with our operators; so is ``register``."""

from __future__ import annotations

import gc
import importlib
import os
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_extensions
import oracles
import pytest
from onnx import helper, numpy_helper
from routes import NATIVE, feed_of, make_model

import moe_onnx
from moe_onnx.runtime.register import _probe

INIT, UNPERMUTE = "MoeInitRoutingV2Grad", "MoeTokenUnpermuteWithRoutingMapGrad"
BF16 = np.dtype(ml_dtypes.bfloat16)
KERNELS = ("python", "body", *NATIVE)
INDEX = np.array([5, 0, 1, 2, 4, 3], np.int32)
_, MAP, SLOTS = oracles.random_routing(np.random.default_rng(0), 4, 5, 2)


def numbers(rows: int, columns: int, dtype: Any = np.float32) -> Any:
    """Small integers, so that all routes are exact in all dtypes."""
    return (np.arange(rows * columns) % 13 - 5).reshape(rows, columns).astype(dtype)


def call(op: str, dtype: Any = np.float32, probs: Any = None) -> tuple[list[Any], dict[str, int], Any]:
    """Inputs, attributes and the outputs that an oracle gives."""
    if op == INIT:
        inputs = [numbers(6, 4, dtype), INDEX]
        return inputs, {"top_k": 2}, [oracles.init_routing_v2_grad(*inputs, top_k=2)]
    weights = numbers(4, 5, dtype if probs is None else probs)
    inputs = [numbers(4, 3, dtype), SLOTS, SLOTS, MAP, numbers(8, 3, dtype), weights]
    return inputs, {}, [*oracles.unpermute_grad(*inputs)]


def assert_outputs(got: list[Any], want: list[Any]) -> None:
    assert [out.dtype for out in got] == [out.dtype for out in want]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))


def plain_registered() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    return options


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", [INIT, UNPERMUTE])
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
def test_every_dtype_goes_in_and_comes_out(op: str, dtype: Any, kernels: str) -> None:
    """Also bfloat16, as arrays. The model given stays as it was."""
    inputs, attributes, want = call(op, dtype)
    model = make_model(op, inputs, attributes)
    before = model.SerializeToString(deterministic=True)
    session = moe_onnx.InferenceSession(model, kernels=kernels)
    assert model.SerializeToString(deterministic=True) == before
    assert session.moe_kernels == {"native": 0, "python": 0, "body": 0, kernels: 1}
    assert_outputs(session.run(None, feed_of(op, inputs)), want)


def model_of(nodes: list[Any], inputs: dict[str, int], outputs: dict[str, int], *weights: Any) -> Any:
    """A model of one-dimensional values by name and ONNX type."""
    infos = [
        [helper.make_tensor_value_info(name, kind, [None]) for name, kind in of.items()]
        for of in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "passes_on", *infos, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_outputs_beside_bfloat16_have_memory_of_their_own(level: str) -> None:
    """They look at what onnxruntime computed, for as long as they like, and at nothing of feed or session."""
    given = np.arange(1000).astype(BF16)
    weight = helper.make_tensor("w", 16, [1000], given.tobytes(), raw=True)
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Cast", ["x"], ["z"], to=16)]
    inputs = {"x": 16, "f": 1}
    model = model_of(nodes, inputs, {"y": 16, "z": 16, "w": 16, "x": 16, "f": 1}, weight)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = moe_onnx.InferenceSession(model, options)
    floats = given.astype(np.float32)
    for out in session.run(None, {"x": given, "f": floats}):
        assert out.flags.writeable and not np.shares_memory(out, given) and not np.shares_memory(out, floats)
        out[:] = 7
    assert (given == np.arange(1000).astype(BF16)).all()
    # The feed's own arrays are gone with the run: these are no contiguous ones.
    outputs = session.run(None, {"x": np.repeat(given, 2)[::2], "f": np.repeat(floats, 2)[::2]})
    del session
    gc.collect()
    others = [np.full(1000, 9, dtype) for dtype in (BF16, np.float32) for _ in range(1000)]
    for out in outputs:
        np.testing.assert_array_equal(out.astype(np.float32), floats)
    assert len(others) == 2000


def test_a_small_bfloat16_output_keeps_no_large_one() -> None:
    nodes = [
        helper.make_node("Slice", ["x", "from", "to"], ["small"]),
        helper.make_node("Cast", ["x"], ["large"], to=1),
    ]
    ends = [helper.make_tensor(name, 7, [1], [value]) for name, value in (("from", 0), ("to", 1))]
    session = moe_onnx.InferenceSession(model_of(nodes, {"x": 16}, {"small": 16, "large": 1}, *ends))
    x = np.ones(1_000_000, BF16)

    def resident() -> float:
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    if not os.path.exists("/proc/self/statm"):
        assert session.run(["small"], {"x": x})[0] == 1
        return
    kept = [session.run(None, {"x": x})[0] for _ in range(3)]
    before = resident()
    kept += [session.run(None, {"x": x})[0] for _ in range(50)]
    assert resident() - before < 40  # not the 200 MB of the large ones
    assert all(out == 1 for out in kept)


def test_a_sequence_beside_bfloat16_is_refused_by_name() -> None:
    model = model_of([helper.make_node("SequenceConstruct", ["f"], ["s"])], {"x": 16, "f": 1}, {"x": 16})
    model.graph.output.append(helper.make_tensor_sequence_value_info("s", 1, [None]))
    session = moe_onnx.InferenceSession(model)
    feed = {"x": np.ones(3, BF16), "f": np.ones(3, np.float32)}
    with pytest.raises(moe_onnx.ModelError, match="Output 's' is a seq.*Leave it out of output_names"):
        session.run(None, feed)
    assert session.run(["x"], feed)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kernels", KERNELS)
def test_float32_probs_beside_bfloat16(kernels: str) -> None:
    inputs, attributes, want = call(UNPERMUTE, BF16, probs=np.float32)
    session = moe_onnx.InferenceSession(make_model(UNPERMUTE, inputs, attributes), kernels=kernels)
    assert [out.dtype for out in want] == [BF16, np.float32]
    assert_outputs(session.run(None, feed_of(UNPERMUTE, inputs)), want)


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "fortran": np.asfortranarray,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "columns_reversed": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "every_second": lambda a: np.repeat(a, 2, axis=0)[::2],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read_only": read_only,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("op", [INIT, UNPERMUTE])
def test_any_memory_layout(op: str, dtype: Any, kernels: str, layout: str) -> None:
    """Feeds need not be contiguous or writable, and stay as they were."""
    inputs, attributes, _ = call(op, dtype)
    fed = [LAYOUTS[layout](v) if v.ndim == 2 or layout != "broadcast" else v for v in inputs]
    if op == INIT:
        want = [oracles.init_routing_v2_grad(*fed, top_k=2)]
    else:
        if layout == "broadcast":
            fed[3] = MAP  # a map of equal rows would be another routing
        want = [*oracles.unpermute_grad(*fed)]
    kept = [value.copy() for value in fed]
    session = moe_onnx.InferenceSession(make_model(op, inputs, attributes), kernels=kernels)
    assert_outputs(session.run(None, feed_of(op, fed)), want)
    for value, before in zip(fed, kept, strict=True):
        np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("source", ["str", "path", "bytes", "proto"])
def test_every_source_of_a_model(source: str, kernels: str, tmp_path: Path) -> None:
    """A path, a pathlib.Path, bytes and a ModelProto are alike."""
    inputs, attributes, want = call(INIT)
    model = make_model(INIT, inputs, attributes)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    given = {"str": str(path), "path": path, "bytes": path.read_bytes(), "proto": model}[source]
    session = moe_onnx.InferenceSession(given, kernels=kernels)
    assert_outputs(session.run(None, feed_of(INIT, inputs)), want)


@pytest.mark.parametrize("kernels", KERNELS)
def test_loading_by_path_is_quiet(kernels: str, tmp_path: Path, capfd: Any) -> None:
    inputs, attributes, _ = call(INIT)
    onnx.save(make_model(INIT, inputs, attributes), tmp_path / "model.onnx")
    moe_onnx.InferenceSession(tmp_path / "model.onnx", kernels=kernels)
    assert capfd.readouterr() == ("", "")


def with_external_data(folder: Path, op: bool = True) -> tuple[str, dict[str, Any], list[Any]]:
    """A model that adds weights, which stand in a file beside it."""
    inputs, attributes, _ = call(INIT)
    model = make_model(INIT, inputs, attributes)
    weights = numbers(6, 4) * 2
    name = model.graph.input[0].name
    add = helper.make_node("Add", [name, "weights"], ["sum"])
    model.graph.initializer.append(numpy_helper.from_array(weights, "weights"))
    if op:
        model.graph.node[0].input[0] = "sum"
        model.graph.node.insert(0, add)
        want = oracles.init_routing_v2_grad(inputs[0] + weights, INDEX, top_k=2)
    else:
        add.output[0], want = model.graph.output[0].name, inputs[0] + weights
        del model.graph.node[:], model.graph.input[1:]
        model.graph.node.append(add)
        inputs = inputs[:1]
    path = str(folder / "model.onnx")
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path, feed_of(INIT, inputs), [want]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", [True, False], ids=["ours", "foreign"])
def test_external_data(op: bool, kernels: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The data is looked for beside the model, wherever the process stands, now and later."""
    (tmp_path / "elsewhere").mkdir()
    path, feed, want = with_external_data(tmp_path, op)
    monkeypatch.chdir(tmp_path / "elsewhere")
    options = ort.SessionOptions()
    relative = os.path.join(os.pardir, "model.onnx")
    sessions = [moe_onnx.InferenceSession(p, options, kernels=kernels) for p in (path, relative)]
    monkeypatch.chdir(tmp_path)
    sessions.append(moe_onnx.InferenceSession("model.onnx", options, kernels=kernels))
    sessions.append(moe_onnx.InferenceSession(onnx.load("model.onnx"), options, kernels=kernels))
    for session in sessions:
        assert_outputs(session.run(None, feed), want)


@pytest.mark.parametrize("kernels", KERNELS)
def test_external_data_when_providers_are_set_anew(kernels: str, tmp_path: Path) -> None:
    """``set_providers`` makes the session again, from the same model."""
    path, feed, want = with_external_data(tmp_path)
    session = moe_onnx.InferenceSession(path, kernels=kernels)
    session.set_providers(["CPUExecutionProvider"])
    assert_outputs(session.run(None, feed), want)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_a_model_without_our_operators(dtype: Any, tmp_path: Path) -> None:
    """It passes through as it is: a function of the user's own is called, not inlined."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    opset = helper.make_opsetid("", 21)
    cast = helper.make_node("Cast", ["a"], ["b"], to=elem)
    function = helper.make_function("user", "Same", ["a"], ["b"], [cast], [opset])
    graph = helper.make_graph(
        [helper.make_node("Same", ["x"], ["y"], domain="user")],
        "graph",
        [helper.make_tensor_value_info("x", elem, [None, 3])],
        [helper.make_tensor_value_info("y", elem, [None, 3])],
    )
    model = helper.make_model(
        graph,
        functions=[function],
        opset_imports=[opset, helper.make_opsetid("user", 1)],
        ir_version=10,
    )
    onnx.save(model, tmp_path / "model.onnx")
    x = numbers(4, 3, dtype)
    for source in (model, model.SerializeToString(), tmp_path / "model.onnx"):
        session = moe_onnx.InferenceSession(source)
        assert session.moe_kernels == {"native": 0, "python": 0, "body": 0}
        assert session.moe_notes == []
        assert_outputs(session.run(None, {"x": x}), [x])


def three_sessions() -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """One float32 model, with all its attributes and inputs, in a plain session and in ours."""
    inputs, _, want = call(UNPERMUTE)
    model = make_model(UNPERMUTE, inputs, {"drop_and_pad": 0})
    helper.set_model_props(model, {"made_by": "me"})
    sessions = {kernels: moe_onnx.InferenceSession(model, kernels=kernels) for kernels in KERNELS}
    sessions["plain"] = ort.InferenceSession(model.SerializeToString(), plain_registered())
    return sessions, feed_of(UNPERMUTE, inputs), want


def test_the_interface_is_onnxruntimes() -> None:
    """Names, types, shapes, providers, metadata; outputs by names in any order; run options."""
    sessions, feed, want = three_sessions()
    plain = sessions["plain"]
    g, q = (arg.name for arg in plain.get_outputs())
    for session in sessions.values():
        assert isinstance(session, ort.InferenceSession)
        for kind in ("get_inputs", "get_outputs"):
            args = [[(a.name, a.type) for a in getattr(s, kind)()] for s in (session, plain)]
            assert args[0] == args[1]
        assert session.get_providers() == plain.get_providers() == ["CPUExecutionProvider"]
        assert session.get_modelmeta().custom_metadata_map == {"made_by": "me"}
        assert session.get_modelmeta().graph_name == plain.get_modelmeta().graph_name
        assert_outputs(session.run(None, feed), want)
        assert_outputs(session.run([], feed), want)
        assert_outputs(session.run([q], feed), want[1:])
        assert_outputs(session.run((q, g), feed, ort.RunOptions()), want[::-1])
        stop = ort.RunOptions()
        stop.terminate = True
        with pytest.raises(Exception, match="terminate flag"):
            session.run(None, feed, stop)
        assert_outputs(session.run(None, feed), want)


def test_other_ways_to_run() -> None:
    """run_with_ort_values, run_with_iobinding and run_async give what run gives."""
    sessions, feed, want = three_sessions()
    for session in sessions.values():
        values = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in feed.items()}
        names = [arg.name for arg in session.get_outputs()]
        outputs = session.run_with_ort_values(names, values)
        assert_outputs([value.numpy() for value in outputs], want)
        binding = session.io_binding()
        for name, value in feed.items():
            binding.bind_cpu_input(name, value)
        for name in names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        assert_outputs(binding.copy_outputs_to_cpu(), want)
        told: queue.Queue[Any] = queue.Queue()
        session.run_async(None, feed, lambda *got, to=told: to.put(got), "data")
        results, data, text = told.get(timeout=20)
        assert_outputs(results, want)
        assert (data, text) == ("data", "")


@pytest.mark.parametrize(
    ("providers", "provider_options"),
    [
        (["CPUExecutionProvider"], None),
        ([("CPUExecutionProvider", {"use_arena": "1"})], None),
        (["CPUExecutionProvider"], [{}]),
    ],
)
def test_providers(providers: Any, provider_options: Any) -> None:
    inputs, attributes, want = call(INIT)
    model, options = make_model(INIT, inputs, attributes), ort.SessionOptions()
    session = moe_onnx.InferenceSession(model, options, providers, provider_options)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert_outputs(session.run(None, feed_of(INIT, inputs)), want)


@pytest.mark.parametrize("before", ["nothing", "register", "plain"])
def test_register_as_often_as_you_like(before: str) -> None:
    """Also where the library is registered already; the options are returned."""
    options = plain_registered() if before == "plain" else ort.SessionOptions()
    for _ in range(2 if before == "register" else 1):
        assert moe_onnx.register(options, "python") is options
    inputs, _, want = call(UNPERMUTE)
    model = make_model(UNPERMUTE, inputs, {"drop_and_pad": 0})
    for make in (ort.InferenceSession, moe_onnx.InferenceSession):
        session = make(model.SerializeToString(), options)
        assert_outputs(session.run(None, feed_of(UNPERMUTE, inputs)), want)


@pytest.mark.parametrize("plain", [True, False])
def test_register_leaves_no_trace(plain: bool, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """To find out what is registered writes no file, prints nothing and changes no option."""
    monkeypatch.chdir(tmp_path)
    options = plain_registered() if plain else ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    options.log_severity_level = 0
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    names = [n for n in dir(options) if not n.startswith("_") and not callable(getattr(options, n))]
    before = {name: getattr(options, name) for name in names}
    moe_onnx.register(options, "python")
    assert {name: getattr(options, name) for name in names} == before
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("calls", ["pp", "rp", "pr", "rr", "prp"])
def test_one_options_object_may_be_registered_on_again_and_again(calls: str) -> None:
    """p: plainly, by onnxruntime's method; r: by ours."""
    options = ort.SessionOptions()
    for call in calls:
        if call == "p":
            options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
        else:
            assert moe_onnx.register(options, "python") is options
    for _ in range(3):
        session = ort.InferenceSession(_probe(), options)
        feed = {"g": np.full((1, 1), 7, np.float32), "i": np.zeros(1, np.int32)}
        assert session.run(None, feed)[0].item() == 7


def test_other_libraries_are_registered_as_ever(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    with pytest.raises(Exception, match="absent"):
        options.register_custom_ops_library(str(tmp_path / "absent.so"))
    importlib.reload(importlib.import_module("moe_onnx.runtime.register"))  # wraps no second time
    wrapped = ort.SessionOptions.register_custom_ops_library
    assert not hasattr(wrapped.__wrapped__, "__wrapped__")
