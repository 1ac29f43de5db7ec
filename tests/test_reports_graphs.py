"""What public bug reports teach on models, constants, optimisers and subgraphs: reports A37 to A55.

See ``report_tools.py`` for what all of them share.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from report_tools import (
    BF16,
    COMBINE,
    F16,
    F32,
    FEW,
    GRAD,
    INIT,
    INT_MAX,
    INT_MIN,
    MODES,
    UNGRAD,
    V1,
    V1_GRAD,
    V1_INDEX,
    assert_same,
    check,
    each_dtype,
    everywhere,
    example,
    in_new_process,
    info,
    kernel_choices,
    layer_feed,
    layer_function,
    model_of,
    node,
    open_session,
    options_of,
    oracle,
    routes_of,
    std,
    v1_feed,
    wide_model,
    widened,
)
from routes import BODY_ROUTES, ROUTES, has_route, run

import moe_onnx
from moe_onnx.spec import DOMAIN


@kernel_choices
def test_a37_external_data_is_found_from_anywhere(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime #6696: weights beside the model file are found by path, relative path and bytes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    weights = [numpy_helper.from_array(V1, "g"), numpy_helper.from_array(V1_INDEX, "index")]
    grad = node(GRAD, ["g", "index"], ["sums"], top_k=2)
    add = std("Add", ["sums", "x"], ["y"])
    model = model_of([grad, add], {"x": V1}, {"y": V1}, initializers=weights)
    path = tmp_path / "a" / "m.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert (tmp_path / "a" / "m.data").stat().st_size >= V1.nbytes
    monkeypatch.chdir(tmp_path / "elsewhere")
    x = np.ones((3, 2), np.float32)
    folder = options_of()
    folder.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(tmp_path / "a")
    )
    sources: list[tuple[Any, ort.SessionOptions]] = [
        (str(path), options_of()),
        (path, options_of()),
        (os.path.join("..", "a", "m.onnx"), options_of()),
        (path.read_bytes(), folder),
        (onnx.load(path, load_external_data=False), folder),
        (onnx.load(path), options_of()),
    ]
    for source, options in sources:
        session = moe_onnx.InferenceSession(source, options, kernels=kernels)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], V1_GRAD + 1)
    monkeypatch.chdir(tmp_path / "a")
    session = moe_onnx.InferenceSession("m.onnx", options_of(), kernels=kernels)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], V1_GRAD + 1)


# A40 and on: what reports on graphs say about operators and sessions.


BF16_VALUES, BF16_BITS = [1.0, 0.1, -3.3], [0x3F80, 0x3DCD, 0xC053]
INITIALIZERS = {
    "make_tensor": lambda: helper.make_tensor("g", TensorProto.BFLOAT16, [3, 1], BF16_VALUES),
    "raw": lambda: helper.make_tensor(
        "g", TensorProto.BFLOAT16, [3, 1], np.array(BF16_BITS, np.uint16).tobytes(), raw=True
    ),
    "from_array": lambda: numpy_helper.from_array(
        np.array(BF16_VALUES, np.float32).astype(BF16).reshape(3, 1), "g"
    ),
    "fed": None,
}


@pytest.mark.parametrize("make", INITIALIZERS.values(), ids=INITIALIZERS)
@kernel_choices
def test_a40_bfloat16_constants_keep_their_bits(kernels: str, make: Any) -> None:
    """onnx #4189, #6604: a bfloat16 constant is neither fp16 bits nor empty, however it was made."""
    index = np.array([2, 0, 1], np.int32)
    like = np.array(BF16_VALUES, np.float32).astype(BF16).reshape(3, 1)
    feed = {"index": index} if make else {"g": like, "index": index}
    model = model_of(
        [node(GRAD, ["g", "index"], ["y"], top_k=1)],
        feed,
        {"y": like},
        initializers=[make()] if make else (),
    )
    (got,) = open_session(model, kernels).run(None, feed)
    assert got.dtype == BF16
    assert got.view(np.uint16)[:, 0].tolist() == [BF16_BITS[i] for i in index]
    assert got.astype(np.float64)[:, 0].tolist() == [-3.296875, 1, 0.10009765625]


@pytest.mark.parametrize("nans", [False, True], ids=["numbers", "NaNs"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
@everywhere((INIT, "dropless"), (UNGRAD, "slot"), (UNGRAD, "row"))
def test_a40_copies_keep_every_bit_pattern(op: str, mode: str, route: str, dtype: Any, nans: bool) -> None:
    """onnx #6646, #4618: what the contract calls a copy is one, of all patterns of 16 bits."""
    every = np.arange(65536, dtype=np.uint16)
    every = every[np.isnan(every.view(dtype).astype(np.float32)) == nans]
    x = every[: len(every) // 6 * 6].reshape(-1, 6).view(dtype)
    order = np.random.default_rng(0).permutation(len(x)).astype(np.int32)
    if op == INIT:
        inputs = [x, order[:, None].copy()]
        places = np.argsort(np.argsort(order))
    else:
        token = order if mode == "slot" else np.arange(len(x), dtype=np.int32)
        inputs = [x, order, token]
        places = order
    got = run(op, route, inputs, {})[0]
    want = np.empty(x.shape, np.uint16)
    want[places] = x.view(np.uint16)
    np.testing.assert_array_equal(got.view(np.uint16), want)


@routes_of(INIT)
def test_a43_ties_keep_their_order_at_any_length(route: str) -> None:
    """onnx #3501: equal experts keep the order of tokens, however a runtime sorts long inputs."""
    for tokens in (1, 2, 100, 5000):
        ids = np.tile(np.array([1, 1], np.int32), (tokens, 1))
        ids[tokens // 2 :, 0] = 0
        x = np.arange(tokens, dtype=np.float32).reshape(tokens, 1)
        rows, index, *_ = run(INIT, route, [x, ids], {})
        order = np.argsort(ids.reshape(-1), kind="stable")
        np.testing.assert_array_equal(index[order], np.arange(2 * tokens))
        np.testing.assert_array_equal(rows[:, 0], order // 2)


@each_dtype
@pytest.mark.parametrize("mode", MODES[INIT])
def test_a44_an_expert_named_twice_counts_twice(mode: str, dtype: Any) -> None:
    """vLLM #39391, SGLang #30079: a duplicated expert id has two rows and both come back."""
    ids = np.array([[1, 1], [0, 0], [2, 1], [3, 3], [0, 1], [1, 1]], np.int32)
    inputs, attributes = example(INIT, mode, dtype, capacity=6)
    inputs[1] = ids
    rows, index, *_ = want = oracle(INIT, inputs, attributes)
    named = index[(index >= 0) & (index < rows.size // 5)]
    assert len(named) == len(set(named.tolist()))
    kept = (index.reshape(6, 2) >= 0) & (index.reshape(6, 2) < rows.size // 5)
    sums = inputs[0].astype(np.float64) * kept.sum(axis=1)[:, None]
    back = {"top_k": 2, "drop_pad_mode": int(mode == "padded"), "active_num": attributes["active_num"]}
    for route in ROUTES:
        if has_route(INIT, route):
            assert_same(run(INIT, route, inputs, attributes), want)
        (got,) = run(GRAD, route, [rows, index], back)
        np.testing.assert_array_equal(got.astype(np.float64), sums)


@pytest.mark.parametrize("bad", [4, -1, INT_MIN, INT_MAX])
@routes_of(INIT)
def test_a44_expert_ids_out_of_range_are_refused(route: str, bad: int) -> None:
    """vLLM #39391: an id that NaN logits gave is an error, wherever the number of experts is known."""
    for mode, sizes in (("padded", {}), ("dropless", {"expert_num": 4}), ("active", {"expert_num": 4})):
        inputs, attributes = example(INIT, mode)
        inputs[1][3, 1] = bad
        error = moe_onnx.BodyCheckError if route in BODY_ROUTES else moe_onnx.IndexValueError
        with pytest.raises(error, match="expert_idx"):
            run(INIT, route, inputs, attributes | sizes)


LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "eps"), [(F16, 2.0**-10), (BF16, 2.0**-7)], ids=["fp16", "bf16"])
@kernel_choices
def test_a45_no_optimiser_drops_a_rounding(kernels: str, dtype: Any, eps: float, level: str) -> None:
    """onnxruntime #17565, #29235: casts between 16-bit operators round at every optimisation level."""
    # Rows (1 + eps)^2, rounded to 1 + 2 eps, and -(1 + eps): unrounded they would sum to eps + eps^2.
    feed = {
        "dy": np.array([[1 + eps]], dtype),
        "index": np.arange(2, dtype=np.int32),
        "chosen": np.ones((1, 2), np.bool_),
        "permuted": np.array([[1], [1]], dtype),
        "probs": np.array([[1 + eps, -1]], dtype),
    }
    model = model_of(
        [
            node(UNGRAD, ["dy", "index", "index", "chosen", "permuted", "probs"], ["rows", "probs_grad"]),
            node(GRAD, ["rows", "index"], ["y"], top_k=2),
        ],
        feed,
        {"y": feed["dy"]},
    )
    session = open_session(
        model, kernels, graph_optimization_level=getattr(ort.GraphOptimizationLevel, level)
    )
    (got,) = session.run(None, feed)
    assert (got.dtype, float(got[0, 0])) == (dtype, eps)


def branch(name: str, nodes: list[onnx.NodeProto], like: Any) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [info(nodes[-1].output[0], like)])


@each_dtype
@kernel_choices
def test_a47_nodes_in_the_branches_of_an_if(kernels: str, dtype: Any) -> None:
    """onnx #5701: an operator inside a subgraph runs there, with values of the graph round it."""
    inputs, attributes = example(GRAD, "dropless", dtype)
    by_two = node(GRAD, ["g", "index"], ["by_two"], top_k=2)
    by_three = node(GRAD, ["g", "index"], ["by_three"], top_k=3)
    choose = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        then_branch=branch("then", [by_two], inputs[0]),
        else_branch=branch("else", [by_three], inputs[0]),
    )
    feed = {"g": inputs[0], "index": inputs[1], "flag": np.array(True)}
    model = model_of([choose], feed, {"y": inputs[0]})
    session = open_session(model, kernels)
    for flag, top_k in ((True, 2), (False, 3)):
        got = session.run(None, {**feed, "flag": np.array(flag)})
        assert_same(got, [oracles.init_routing_v2_grad(*inputs, top_k=top_k)])
        with pytest.raises(moe_onnx.MoeOnnxError, match=GRAD):
            session.run(None, {**feed, "flag": np.array(flag), "index": inputs[1] + np.int32(1)})


@kernel_choices
def test_a47_nodes_in_the_body_of_a_loop(kernels: str) -> None:
    """onnx #5701: the same in a Loop, whose state goes through the operator three times."""
    state = np.array([[1, 2], [3, 4]], np.float32)
    body = helper.make_graph(
        [
            std("Concat", ["before", "before"], ["twice"], axis=0),
            node(GRAD, ["twice", "index"], ["after"], top_k=2),
            std("Identity", ["go"], ["still"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            info("before", state),
        ],
        [helper.make_tensor_value_info("still", TensorProto.BOOL, []), info("after", state)],
    )
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], body=body)
    feed = {"x": state, "index": np.array([0, 2, 1, 3], np.int32), "times": np.array(3, np.int64)}
    (got,) = open_session(model_of([loop], feed, {"y": state}), kernels).run(None, feed)
    np.testing.assert_array_equal(got, state * 8)


@each_dtype
@kernel_choices
def test_a47_nodes_in_functions_in_functions(kernels: str, dtype: Any) -> None:
    """onnxscript #1451: an operator two functions deep, with an attribute handed through."""
    feed, want = layer_feed(dtype)
    inner = helper.make_node("Back", list(feed), ["grad_x", "probs_grad"], domain="my.layers")
    inner.attribute.append(AttributeProto(name="k", type=AttributeProto.INT, ref_attr_name="k"))
    outer = helper.make_function(
        "my.layers",
        "Outer",
        list(feed),
        ["grad_x", "probs_grad"],
        [inner],
        [helper.make_opsetid("my.layers", 1), helper.make_opsetid("", 21)],
        ["k"],
    )
    call = helper.make_node("Outer", list(feed), ["x", "q"], domain="my.layers", k=2)
    model = model_of(
        [call],
        feed,
        {"x": feed["dy"], "q": feed["dy"]},
        functions=[layer_function(), outer],
        domains=(DOMAIN, "my.layers"),
    )
    assert_same(open_session(model, kernels).run(None, feed), want)
    if dtype == F32:
        portable = moe_onnx.add_function_bodies(model)
        onnx.checker.check_model(portable, full_check=True)
        for function in portable.functions:
            used = {n.domain for n in function.node}
            assert used <= {entry.domain for entry in function.opset_import}
        session = ort.InferenceSession(portable.SerializeToString(), options_of())
        assert_same(session.run(None, feed), want)


@kernel_choices
def test_a48_many_nodes_keep_unique_names(kernels: str, tmp_path: Path) -> None:
    """onnxruntime #20354: inlined bodies get names of their own, and the optimised model is valid."""
    nodes = [node(GRAD, ["g", "index"], ["y0"], top_k=1)]
    nodes += [node(GRAD, [f"y{i}", "index"], [f"y{i + 1}"], top_k=1) for i in range(23)]
    model = model_of(nodes, v1_feed(), {"y23": V1})
    path = tmp_path / "optimised.onnx"
    session = open_session(model, kernels, optimized_model_filepath=str(path))
    want = V1
    for _ in range(24):
        want = want[V1_INDEX]
    np.testing.assert_array_equal(session.run(None, v1_feed())[0], want)
    names = [n.name for n in onnx.load(path).graph.node if n.name]
    assert len(names) == len(set(names)) > 0
    onnx.checker.check_model(str(path))


RUN_PLAIN = """
import sys, json
import numpy as np
import onnxruntime as ort
arrays = np.load(sys.argv[2])
session = ort.InferenceSession(sys.argv[1])
got = session.run(None, {name: arrays[name] for name in arrays.files})
assert not [name for name in sys.modules if name.startswith(("moe_onnx", "onnxruntime_extensions"))]
print(json.dumps([value.tolist() for value in got]))
"""


def test_a49_a_model_with_bodies_runs_on_stock_onnxruntime(tmp_path: Path) -> None:
    """onnx #4536, onnxruntime #13057: exported gradients need no training op and nothing of ours."""
    inputs, attributes = example(UNGRAD, "slot", BF16)
    (tmp_path / "m.onnx").write_bytes(wide_model(UNGRAD, inputs, attributes))
    np.savez(tmp_path / "in.npz", **{f"in{i}": widened(v) for i, v in enumerate(inputs)})
    got, _ = in_new_process(RUN_PLAIN, str(tmp_path / "m.onnx"), str(tmp_path / "in.npz"))
    want = oracle(UNGRAD, inputs, attributes)
    assert got == [value.astype(np.float64).tolist() for value in want]


@each_dtype
@everywhere((GRAD, "active"), (GRAD, "padded"), UNGRAD, COMBINE, routes=FEW)
def test_a53_a_dropped_token_is_zero_not_itself(op: str, mode: str, route: str, dtype: Any) -> None:
    """transformers #37123: a token without rows gets 0, and gives its router no gradient."""
    inputs, attributes = example(op, mode, dtype)
    if op == GRAD:
        index = inputs[1].reshape(6, 2)
        # Token 2 swaps its rows for dropped ones; the others keep theirs.
        if mode == "padded":
            index[2] = -1
        else:
            for slot in range(2):
                spare = 10 + slot
                index[index == spare] = index[2, slot]
                index[2, slot] = spare
        assert not run(op, route, inputs, attributes)[0][2].astype(np.float64).any()
    elif mode == "padded":
        # A token that no padded slot names: the next token stands in its slots.
        at = 1 if op == COMBINE else 2
        inputs[at] = np.where(inputs[at] == 2, 3, inputs[at]).astype(np.int32)
        dropped = run(op, route, inputs, attributes)[1 if op == UNGRAD else 0]
        assert not dropped[2].astype(np.float64).any()
    else:
        for i in (1, 2) if op == UNGRAD and mode == "slot" else (1,):
            inputs[i][4:6] = -1
        dropped = run(op, route, inputs, attributes)[1 if op == UNGRAD else 0]
        assert not dropped[2].astype(np.float64).any()
    check(op, route, inputs, attributes)


@each_dtype
@everywhere(COMBINE, UNGRAD, routes=FEW)
def test_a54_a_map_that_selects_nothing_runs(op: str, mode: str, route: str, dtype: Any) -> None:
    """transformers #40114: NonZero with no hits is no special case; every routing runs one graph."""
    inputs, attributes = example(op, mode, dtype)
    inputs[2 if op == COMBINE else 3][...] = False
    got = run(op, route, inputs, attributes)
    assert_same(got, oracle(op, inputs, attributes))
    if mode != "padded":
        assert not got[0].astype(np.float64).any()


@each_dtype
@routes_of(GRAD)
def test_a55_minus_one_is_not_the_last_row(route: str, dtype: Any) -> None:
    """onnxruntime #1533, #28311: Gather wraps -1 to the last row; a dropped slot must not."""
    grad = V1.astype(dtype).reshape(2, 3, 2)
    grad[1, 2] = 60000
    index = np.array([4, -1, -1, -1, 0, 2], np.int32)
    got = run(GRAD, route, [grad, index], {"top_k": 2, "drop_pad_mode": 1, "active_num": 0})
    assert_same(got, [np.array([[9, 10], [0, 0], [6, 8]], dtype)])
