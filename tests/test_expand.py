"""``expand``: whatever holds ``ascend.moe`` nodes gives the same bits without any."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from routes import feed_of, make_model, one_thread, try_all
from test_cases import CASES, arguments, is_duplicate, name_of, tensor

import moe_onnx
from moe_onnx.adapters.function_body import function_body
from moe_onnx.operators import ALL, BY_NAME
from moe_onnx.rewrite.notes import MARK, scopes
from moe_onnx.rewrite.passes import apply_passes
from moe_onnx.runtime.ort_values import to_numpy, to_ort_value
from moe_onnx.spec import DOMAIN

INIT = "MoeInitRoutingV2Grad"
ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)
FEED: dict[str, Any] = {"g": ROWS, "i": np.array([5, 0, 1, 2, 4, 3], np.int32)}
WANT = np.array([[20, 22, 24, 26], [12, 14, 16, 18], [28, 30, 32, 34]], np.float32)


def plain_run(model: onnx.ModelProto, feed: dict[str, Any]) -> list[Any]:
    """Onnxruntime alone, nothing registered."""
    options = one_thread()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"], enable_fallback=0
    )
    kinds = {arg.name: arg.type for arg in session.get_inputs()}
    names = [out.name for out in session.get_outputs()]
    values = {name: to_ort_value(value, kinds[name]) for name, value in feed.items()}
    return [to_numpy(value) for value in session.run_with_ort_values(names, values)]


def domains(model: onnx.ModelProto) -> set[str]:
    found = {entry.domain for entry in model.opset_import}
    for function in model.functions:
        found |= {entry.domain for entry in function.opset_import}
    return found | {node.domain for scope in scopes(model) for node in scope.owner.node}


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without our domain; doing it again finds nothing to do."""
    before = model.SerializeToString(deterministic=True)
    done = apply_passes(model, ["expand"])
    assert model.SerializeToString(deterministic=True) == before
    assert done.report.applied
    assert not done.report.skipped
    assert DOMAIN not in domains(done.model)
    again = apply_passes(done.model, ["expand"])
    assert again.model is done.model
    assert not again.report.applied
    onnx.checker.check_model(done.model, full_check=True)
    return done.model


def init(x: str = "g", y: str = "y", name: str = "the_node", **attributes: Any) -> onnx.NodeProto:
    given = {"top_k": 2, **attributes}
    return helper.make_node(INIT, [x, "i"], [y], name, domain=DOMAIN, **given)


def model_of(*nodes: onnx.NodeProto, functions: Any = (), opset: int = 21, **how: Any) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("g", TensorProto.FLOAT, ["N", 4]),
        helper.make_tensor_value_info("i", TensorProto.INT32, ["N"]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, **how)
    imports = [helper.make_opsetid(domain, 1) for domain in (DOMAIN, "user")]
    return helper.make_model(
        graph, functions=functions, opset_imports=[*imports, helper.make_opsetid("", opset)], ir_version=10
    )


def runs_as(made: onnx.ModelProto, want: Any = WANT, feed: Any = FEED) -> None:
    for got in plain_run(made, feed):
        np.testing.assert_array_equal(got, want)


def test_a_node() -> None:
    made = expanded(model_of(init()))
    runs_as(made)
    marks = [entry.value for node in made.graph.node for entry in node.metadata_props if entry.key == MARK]
    assert marks == ["expand"] * len(made.graph.node)
    assert not made.functions


@pytest.mark.parametrize("opset", [18, 20, 22, 24, 26])
def test_every_opset(opset: int) -> None:
    runs_as(expanded(model_of(init(), opset=opset)))


def test_an_opset_that_is_too_old() -> None:
    model = model_of(init(), opset=17)
    done = apply_passes(model, ["expand"])
    assert done.model is model
    (note,) = done.report.skipped
    assert (note.node, note.operator) == ("the_node", f"{DOMAIN}.{INIT}")
    assert "opset >= 18, it is of 17" in note.text


SOME = pytest.param(slice(1, 20, 19), id="some")
ALL_CASES = pytest.param(slice(None), id="all", marks=pytest.mark.parity)


@pytest.mark.parametrize("which", [SOME, ALL_CASES])
@pytest.mark.parametrize("op", [spec.name for spec in ALL])
def test_hand_cases(op: str, which: slice) -> None:
    """All dtypes, absent inputs and outputs, empty ones: what the cards say, by standard operators alone."""
    cases = [case for other, case in CASES if other == op and "error" not in case][which]

    def check(case: dict[str, Any]) -> None:
        inputs, attributes = arguments(op, case)
        model = apply_passes(make_model(op, inputs, attributes), ["expand"]).model
        assert DOMAIN not in domains(model)
        for arg, got in zip(BY_NAME[op].outputs, plain_run(model, feed_of(op, inputs)), strict=True):
            want = tensor(case["outputs"][arg.name])
            if want is None:
                assert not got.size
                continue
            assert (got.dtype, got.shape) == (want.dtype, want.shape), arg.name
            np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))

    try_all(cases, check, name_of)


def test_what_is_wrong_is_refused_and_named() -> None:
    """Rules that bodies check are checked: the runtime prints rule and node."""
    cases = [(op, case) for op, case in CASES if case.get("error", {}).get("class") == "IndexValueError"]
    cases = [(op, case) for op, case in cases if not is_duplicate(op, case)][:6]

    def check(one: tuple[str, dict[str, Any]]) -> None:
        op, case = one
        inputs, attributes = arguments(op, case)
        model = apply_passes(make_model(op, inputs, attributes), ["expand"]).model
        with pytest.raises(Exception, match=rf"{op}: .*\[the_node\]"):
            plain_run(model, feed_of(op, inputs))
        options = one_thread()
        options.log_severity_level = 4
        with pytest.raises(moe_onnx.BodyCheckError, match=r"\[the_node\]"):
            moe_onnx.InferenceSession(model, options).run(None, feed_of(op, inputs))

    try_all(cases, check, lambda one: f"{one[0]} {name_of(one[1])}")


def test_what_a_rewrite_can_see_is_refused_at_once() -> None:
    with pytest.raises(moe_onnx.AttributeValueError, match="'the_node'"):
        apply_passes(model_of(init(top_k=0)), ["expand"])
    node = init()
    node.op_type = "MoeInitRoutingGrad"
    with pytest.raises(moe_onnx.ModelError, match="MoeInitRouting"):
        apply_passes(model_of(node), ["expand"])


def test_names_that_are_taken() -> None:
    """Bodies name their values: the model may have those names, and two nodes one name."""
    inner = function_body(INIT).node[0].output[0]
    taken = f"the_node/{inner}"
    nodes = [init(y="a"), init(y="b"), helper.make_node("Add", ["a", "b"], [taken])]
    half = helper.make_node("Constant", [], ["zero"], value_float=0.5)
    made = expanded(model_of(*nodes, half, helper.make_node("Mul", [taken, "zero"], ["y"])))
    names = [name for scope in scopes(made) for node in scope.owner.node for name in node.output]
    assert len(names) == len(set(names))
    runs_as(made)


def branch(x: str, y: str, name: str) -> onnx.GraphProto:
    return helper.make_graph(
        [init(x, y, name)], name, [], [helper.make_tensor_value_info(y, TensorProto.FLOAT, [None, None])]
    )


def test_in_subgraphs() -> None:
    """Branches that use one name for different values, a branch within a branch, and a Loop.

    Conditions are not known at load: onnxruntime 1.32 dies when it inlines a branch of an If over a constant
    with an If inside, by whatever tool the inner one was made.
    """
    inner = helper.make_node(
        "If", ["yes"], ["z"], "inner", then_branch=branch("g", "t", "a"), else_branch=branch("g", "t", "b")
    )
    z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, None])
    outer_then = helper.make_graph([inner], "then", [], [z])
    size = helper.make_node("Size", ["g"], ["size"])
    yes = helper.make_node("Cast", ["size"], ["yes"], to=TensorProto.BOOL)
    node = helper.make_node(
        "If", ["yes"], ["c"], "outer", then_branch=outer_then, else_branch=branch("g", "t", "c")
    )
    once = helper.make_node("Constant", [], ["once"], value_int=1)
    body = helper.make_graph(
        [init(y="row", name="in_loop"), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [
            helper.make_tensor_value_info("n", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("row", TensorProto.FLOAT, [None, None]),
        ],
    )
    loop = helper.make_node("Loop", ["once", "yes"], ["rows"], "loop", body=body)
    largest = helper.make_node("ReduceMax", ["rows", "axis"], ["d"], keepdims=0)
    axis = helper.make_node("Constant", [], ["axis"], value_ints=[0])
    main = init("g", "m", "main")  # beside the nodes that hold the others
    top = helper.make_node("Max", ["c", "d", "m"], ["y"])
    model = model_of(size, yes, node, once, loop, axis, largest, main, top)
    runs_as(expanded(model))
    places = [note.place for note in apply_passes(model, ["expand"]).report.applied]
    assert sorted(places) == sorted(
        [
            "graph",
            "else_branch of node 'outer' (If)",
            "then_branch of node 'inner' (If) in then_branch of node 'outer' (If)",
            "else_branch of node 'inner' (If) in then_branch of node 'outer' (If)",
            "body of node 'loop' (Loop)",
        ]
    )


def test_in_functions() -> None:
    """Functions stay functions; an attribute that a caller gives goes into the body."""
    node = init("x", "z", "inside")
    del node.attribute[:]
    node.attribute.append(onnx.AttributeProto(name="top_k", type=2, ref_attr_name="k"))
    node.input[1] = "at"
    layer = helper.make_function(
        "user", "Layer", ["x", "at"], ["z"], [node], [helper.make_opsetid(DOMAIN, 1)], ["k"]
    )
    call = helper.make_node("Layer", ["g", "i"], ["y"], "call", domain="user", k=2)
    model = model_of(call, functions=[layer])
    done = apply_passes(model, ["expand"])
    assert [f.name for f in done.model.functions] == ["Layer"]
    assert [(n.node, n.place) for n in done.report.applied] == [("inside", "function 'user.Layer'")]
    runs_as(expanded(model))


def test_bodies_of_the_model_go() -> None:
    """Ours, and those that mean something else: a node means the operator."""
    wrong = helper.make_function(
        DOMAIN,
        INIT,
        ["a", "b"],
        ["c"],
        [helper.make_node("Neg", ["a"], ["c"])],
        [helper.make_opsetid("", 21)],
    )
    for body in (function_body(INIT, 21), wrong):
        made = expanded(model_of(init(), functions=[body]))
        assert not made.functions
        runs_as(made)


def test_what_else_is_in_a_model_stays() -> None:
    model = model_of(init(), doc_string="of the graph")
    model.producer_name, model.doc_string = "me", "of the model"
    model.metadata_props.add(key="kept", value="as it is")
    model.graph.node[0].metadata_props.add(key="origin", value="layer 3")
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0] * 4))
    model.graph.value_info.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 2]))
    made = expanded(model)
    for field, value in model.ListFields():
        if field.name not in ("graph", "opset_import"):
            assert getattr(made, field.name) == value
    for field, value in model.graph.ListFields():
        if field.name != "node":
            assert getattr(made.graph, field.name) == value
    origins = [n for n in made.graph.node if any(e.key == "origin" for e in n.metadata_props)]
    assert [list(node.output) for node in origins] == [["y"]]


def test_nothing_to_do() -> None:
    model = model_of(helper.make_node("Neg", ["g"], ["y"]))
    model.opset_import.remove(model.opset_import[0])
    done = apply_passes(model, ["expand"])
    assert done.model is model
    assert not done.report.applied
    assert not done.report.skipped
