"""However a model writes our operators, every route runs it, or says what is wrong and where."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import oracles
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from routes import ELEMS, NATIVE, make_model, one_thread

import moe_onnx
from moe_onnx.adapters.python_ops import SESSION_DOMAIN
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.legalize import BODY_DOMAIN, Legalized, legalize

INIT, UNPERMUTE = "MoeInitRoutingV2Grad", "MoeTokenUnpermuteWithRoutingMapGrad"
KERNELS = ("python", "body", *NATIVE)
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32

rows = np.arange(24, dtype=np.float32).reshape(6, 4)
index = np.array([5, 0, 1, 2, 4, 3], np.int32)
GRAD_X = oracles.init_routing_v2_grad(rows, index, top_k=2)
_, chosen, slots = oracles.random_routing(np.random.default_rng(0), 4, 5, 2)
FEED = {"g": rows, "i": index}
WHOLE: dict[str, Any] = {
    "dy": np.arange(12, dtype=np.float32).reshape(4, 3) - 5,
    "out": slots,
    "token": slots,
    "map": chosen,
    "p": np.arange(24, dtype=np.float32).reshape(8, 3) % 7,
    "probs": np.arange(20, dtype=np.float32).reshape(4, 5) / 4,
}


def init(x: str = "g", y: str = "y", name: str = "the_node", **attributes: Any) -> onnx.NodeProto:
    given = {"top_k": 2, **attributes}
    return helper.make_node(INIT, [x, "i"], [y], name, domain="ascend.moe", **given)


def model_of(
    *nodes: onnx.NodeProto,
    feed: dict[str, Any] = FEED,
    outputs: tuple[str, ...] = ("y",),
    opset: int | None = 21,
    domains: tuple[str, ...] = ("ascend.moe", "user"),
    functions: tuple[onnx.FunctionProto, ...] = (),
    static: bool = False,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(name, ELEMS[v.dtype.name], v.shape if static else [None] * v.ndim)
            for name, v in feed.items()
        ],
        [helper.make_tensor_value_info(name, FLOAT, [None, None]) for name in outputs],
    )
    imports = [helper.make_opsetid(domain, 1) for domain in domains]
    if opset is not None:
        imports.append(helper.make_opsetid("", opset))
    return helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10)


def legal(model: onnx.ModelProto, route: str, **how: Any) -> Legalized:
    """The legalized model; the one given must stay as it was."""
    before = model.SerializeToString(deterministic=True)
    done = legalize(model, route=route, **how)
    assert model.SerializeToString(deterministic=True) == before
    return done


def session_of(model: onnx.ModelProto, kernels: str) -> moe_onnx.InferenceSession:
    options = one_thread()
    options.log_severity_level = 4
    return moe_onnx.InferenceSession(model, options, kernels=kernels)


def assert_runs(model: onnx.ModelProto, kernels: str, want: Any, feed: Any = FEED) -> Any:
    session = session_of(model, kernels)
    (out,) = session.run(None, feed)
    np.testing.assert_array_equal(out, want)
    return session


def all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    inner = [attr.g for node in graph.node for attr in node.attribute if attr.HasField("g")]
    return [*graph.node, *[node for sub in inner for node in all_nodes(sub)]]


@pytest.mark.parametrize("route", KERNELS)
def test_attributes_are_written_out(route: str) -> None:
    """Also at their defaults: Python ops must find all of theirs, evaluators those of functions."""
    unpermute = helper.make_node(UNPERMUTE, ["dy", "out", "token"], ["G"], "other", domain="ascend.moe")
    model = model_of(init(), unpermute, feed={**FEED, **WHOLE}, outputs=("y", "G"))
    written = {
        node.op_type: {a.name: helper.get_attribute_value(a) for a in node.attribute}
        for node in legal(model, route).model.graph.node
    }
    told = {INIT: "the_node", UNPERMUTE: "other"}
    for op, own in (
        (INIT, ("top_k", "drop_pad_mode", "active_num")),
        (UNPERMUTE, ("drop_and_pad",)),
    ):
        assert {name: written[op].pop(name) for name in own} == dict.fromkeys(own, 0) | (
            {"top_k": 2} if op == INIT else {}
        )
        if route == "body":
            assert written[op] == ({} if op == INIT else {"restore_shape": []})
        elif route == "native":
            assert written[op] == {}
        else:  # what the session's own ops are told besides
            assert written[op] == {"node": told[op].encode(), "session": 0, "restore_shape": b""}


def unpermute_model(
    inputs: list[str], outputs: list[str], static: bool = False, opset: int = 21
) -> tuple[onnx.ModelProto, dict[str, Any], list[Any]]:
    node = helper.make_node(UNPERMUTE, inputs, outputs, "the_node", domain="ascend.moe")
    feed = {name: WHOLE[name] for name in inputs if name}
    names = tuple(name for name in outputs if name)
    probs = [feed.get(name) for name in ("map", "p", "probs")] if "probs" in feed else []
    want = dict(zip(("G", "Q"), oracles.unpermute_grad(*[WHOLE[n] for n in inputs[:3]], *probs), strict=True))
    model = model_of(node, feed=feed, outputs=names, static=static, opset=opset)
    return model, feed, [want[name] for name in names]


GIVEN = {
    "three": [],
    "empty_names": ["", "", ""],
    "map": ["map"],
    "rows": ["", "p"],
    "map_and_rows": ["map", "p"],
    "all": ["map", "p", "probs"],
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("given", GIVEN)
def test_omitted_inputs(given: str, static: bool, kernels: str) -> None:
    """Every legal combination, whether or not sizes are known when the model is loaded."""
    outputs = ["G", "Q"] if given == "all" else ["G"]
    model, feed, want = unpermute_model(["dy", "out", "token", *GIVEN[given]], outputs, static)
    for got, out in zip(session_of(model, kernels).run(None, feed), want, strict=True):
        np.testing.assert_array_equal(got, out)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("given", [["", "", "probs"], ["map", "", "probs"], ["", "p", "probs"]])
def test_inputs_that_must_not_be_omitted(given: list[str], static: bool, kernels: str) -> None:
    """Refused on loading, with the node's name."""
    model, _, _ = unpermute_model(["dy", "out", "token", "map", "p", "probs"], ["G"], static)
    model.graph.node[0].input[3:] = given
    with pytest.raises(moe_onnx.MissingInputError, match="'the_node'") as caught:
        session_of(model, kernels)
    assert caught.value.aclnn_status == 561002


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("outputs", [["G"], ["G", ""], ["", "Q"]])
def test_omitted_outputs(outputs: list[str], kernels: str) -> None:
    model, feed, want = unpermute_model(["dy", "out", "token", "map", "p", "probs"], outputs)
    (got,) = session_of(model, kernels).run(None, feed)
    np.testing.assert_array_equal(got, want[0])


@pytest.mark.parametrize("kernels", [*KERNELS, "auto"])
@pytest.mark.parametrize("given", [np.float32, np.float64, np.float16, BF16], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16], ids=str)
def test_empty_probs_of_another_dtype(dtype: Any, given: Any, kernels: str) -> None:
    """Of shape [0, 0] they are absent, whatever their dtype: the schema takes them, too."""
    dtype, given = np.dtype(dtype), np.dtype(given)
    model, feed, _ = unpermute_model(["dy", "out", "token"], ["G", "Q"][:1])
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = ELEMS[dtype.name]
    model.graph.node[0].input.extend(["", "rows", "probs"])
    model.graph.node[0].output.append("Q")
    model.graph.output.append(helper.make_tensor_value_info("Q", ELEMS[given.name], [0, 0]))
    model.graph.initializer.extend(
        helper.make_tensor(n, ELEMS[given.name], [0, 0], []) for n in ("probs", "rows")
    )
    feed["dy"] = feed["dy"].astype(dtype)
    session = session_of(model, kernels)
    got, empty = session.run(None, feed)
    np.testing.assert_array_equal(got, oracles.unpermute_grad(*feed.values())[0])
    assert (got.dtype, empty.dtype, empty.shape) == (dtype, given, (0, 0))
    copies = dtype == BF16  # which Casts would change
    assert session.moe_kernels["python"] == int(kernels == "python" and not copies)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_empty_map_of_another_dtype(kernels: str) -> None:
    """Without probs a map of shape [0, 0] is absent too, whatever its dtype."""
    model, feed, want = unpermute_model(["dy", "out", "token"], ["G"])
    model.graph.node[0].input.append("map")
    model.graph.initializer.append(helper.make_tensor("map", ELEMS["int8"], [0, 0], []))
    (got,) = session_of(model, kernels).run(None, feed)
    np.testing.assert_array_equal(got, want[0])


def branches(then: int, other: int) -> onnx.ModelProto:
    """An If whose branches compute in a dtype each, under the same names, from the outer inputs."""

    def branch(name: str, elem: int) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Cast", ["g"], ["x"], to=elem),
            init("x", "out", f"in_{name}"),
            helper.make_node("Cast", ["out"], ["result"], to=FLOAT),
        ]
        result = helper.make_tensor_value_info("result", FLOAT, [None, None])
        return helper.make_graph(nodes, name, [], [result])

    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("then", then), else_branch=branch("else", other)
    )
    return model_of(node, feed={"c": np.array(True), **FEED})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("then", "other"),
    [("float32", "float32"), ("float16", "float32"), ("float32", "bfloat16")],
)
def test_nodes_in_branches(then: str, other: str, kernels: str) -> None:
    """Both are served. Sibling branches may use one name for values of two dtypes."""
    model = branches(ELEMS[then], ELEMS[other])
    assert legal(model, kernels).python_nodes == (2 if kernels == "python" else 0)
    for condition in (True, False):
        feed = {"c": np.array(condition), **FEED}
        session = assert_runs(model, kernels, GRAD_X, feed)
        wrong = {**feed, "i": index + 1}
        name = "in_then" if condition else "in_else"
        match = "must be in range" if kernels == "body" else f"'{name}'"
        with pytest.raises(moe_onnx.MoeOnnxError, match=match):
            session.run(None, wrong)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_node_in_a_loop(kernels: str) -> None:
    """Each turn halves the rows and doubles them again."""
    body = helper.make_graph(
        [
            init("x", "half"),
            helper.make_node("Concat", ["half", "half"], ["next"], axis=0),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", FLOAT, [None, None]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, [None, None]),
        ],
    )
    model = model_of(
        helper.make_node("Loop", ["turns", "", "g"], ["y"], body=body),
        feed={"turns": np.array(2, np.int64), **FEED},
    )
    want = rows
    for _ in range(2):
        half = oracles.init_routing_v2_grad(want, index, top_k=2)
        want = np.concatenate([half, half])
    assert_runs(model, kernels, want, {"turns": np.array(2, np.int64), **FEED})


def function(name: str, nodes: list[Any], attributes: Any = (), defaults: Any = ()) -> Any:
    opsets = [helper.make_opsetid(d, v) for d, v in (("", 21), ("ascend.moe", 1), ("user", 1))]
    return helper.make_function(
        "user", name, ["g", "i"], ["y"], nodes, opsets, list(attributes), list(defaults)
    )


def refer(node: onnx.NodeProto, name: str, kind: int) -> onnx.NodeProto:
    """Let the attribute come from the function's attribute of the same name."""
    kept = [attr for attr in node.attribute if attr.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.AttributeProto(name=name, ref_attr_name=name, type=kind)])
    return node


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("calls", [1, 2])
def test_nodes_in_nested_functions(calls: int, kernels: str) -> None:
    """Their attributes come down through both calls; each call is a node of its own."""
    integer = onnx.AttributeProto.INT
    inner = function("Inner", [refer(init(), "top_k", integer)], ["top_k"])
    call = helper.make_node("Inner", ["g", "i"], ["z"], domain="user")
    outer = function(
        "Outer", [refer(call, "top_k", integer), helper.make_node("Neg", ["z"], ["y"])], ["top_k"]
    )
    nodes = [helper.make_node("Outer", ["g", "i"], [f"y{n}"], domain="user", top_k=2) for n in range(calls)]
    model = model_of(
        *nodes,
        helper.make_node("Sum", [f"y{n}" for n in range(calls)], ["y"]),
        functions=(outer, inner),
    )
    session = assert_runs(model, kernels, -calls * GRAD_X)
    assert session.moe_kernels[kernels] == calls
    with pytest.raises(moe_onnx.MoeOnnxError, match="range" if kernels == "body" else "the_node"):
        session.run(None, {"g": rows, "i": index + 1})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("left_out", ["top_k", "alpha"])
def test_default_attributes_of_functions(left_out: str, kernels: str) -> None:
    """What a call leaves out is the function's default, for our operator and others beside it."""
    nodes = [
        helper.make_node("Neg", ["g"], ["n"]),
        helper.make_node("LeakyRelu", ["n"], ["z"], alpha=0.5),
        init("z", top_k=3),
    ]
    kind = onnx.AttributeProto.INT if left_out == "top_k" else onnx.AttributeProto.FLOAT
    default = helper.make_attribute(left_out, 3 if left_out == "top_k" else 0.5)
    refer(nodes[2 if left_out == "top_k" else 1], left_out, kind)
    called = helper.make_node("F", ["g", "i"], ["y"], domain="user")
    model = model_of(called, functions=(function("F", nodes, defaults=[default]),))
    assert_runs(model, kernels, oracles.init_routing_v2_grad(-rows / 2, index, top_k=3))


def knows(opset: int) -> bool:
    """Whether the installed onnxruntime loads models of this opset at all."""
    try:
        model = model_of(helper.make_node("Identity", ["g"], ["y"]), opset=opset, domains=())
        ort.InferenceSession(model.SerializeToString())
    except Exception:
        return False
    return True


OPSETS = [opset for opset in range(18, onnx.defs.onnx_opset_version() + 1) if knows(opset)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_from_18(opset: int, kernels: str) -> None:
    assert_runs(model_of(init(), opset=opset), kernels, GRAD_X)
    model, feed, want = unpermute_model(["dy", "out", "token", "map", "p", "probs"], ["G", "Q"])
    model.opset_import[-1].version = opset
    for got, out in zip(session_of(model, kernels).run(None, feed), want, strict=True):
        np.testing.assert_array_equal(got, out)


@pytest.mark.parametrize("opset", [11, 13, 17])
def test_older_opsets(opset: int) -> None:
    """The Python kernels take them as far as they can; bodies say that they are too old."""
    assert_runs(model_of(init(), opset=opset), "python", GRAD_X)
    with pytest.raises(moe_onnx.ModelError, match=f"opset >= 18.* {opset}.*version_converter"):
        session_of(model_of(init(), opset=opset), "body")
    model, feed, want = unpermute_model(["dy", "out", "token"], ["G"], opset=opset)
    message = ""
    try:
        (got,) = session_of(model, "python").run(None, feed)
        np.testing.assert_array_equal(got, want[0])
    except moe_onnx.ModelError as error:
        message = str(error)
    assert not message or "opset" in message


def without_imports(missing: str) -> onnx.ModelProto:
    return model_of(
        helper.make_node("Relu", ["g"], ["x"]),
        init("x"),
        opset=21 if missing == "ascend.moe" else None,
        domains=("ascend.moe",) if missing == "ai.onnx" else (),
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("missing", ["ai.onnx", "ascend.moe", "both"])
def test_missing_opset_imports(missing: str, kernels: str) -> None:
    """They are added."""
    model = without_imports(missing)
    made = legal(model, kernels).model
    domains = {node.domain for node in made.graph.node}
    assert domains <= {entry.domain for entry in made.opset_import}
    assert_runs(model, kernels, GRAD_X)


@pytest.mark.parametrize("missing", ["ai.onnx", "ascend.moe", "both"])
def test_missing_opset_imports_cost_no_kernel(missing: str) -> None:
    """Dtypes are still inferred, so that the Python kernel serves the node behind the Relu."""
    assert legal(without_imports(missing), "python").python_nodes == 1


def test_bodies_are_added_where_missing_and_kept_where_not() -> None:
    own = moe_onnx.function_body(INIT, 21)
    own.doc_string = "my own"
    unpermute = helper.make_node(UNPERMUTE, ["dy", "out", "token"], ["G"], "other", domain="ascend.moe")
    model = model_of(init(), unpermute, feed={**FEED, **WHOLE}, outputs=("y", "G"), functions=(own,))
    made = {f.name: f for f in moe_onnx.add_function_bodies(model).functions}
    assert sorted(made) == [INIT, UNPERMUTE]
    assert made[INIT] == own
    assert made[UNPERMUTE].node
    assert len(model.functions) == 1


MISTAKES: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "misspelt": (
        helper.make_node("MoeInitRoutingGrad", ["g", "i"], ["y"], "bad", domain="ascend.moe"),
        moe_onnx.ModelError,
        ["MoeInitRoutingGrad", f"Did you mean '{INIT}'?"],
    ),
    "unlike_any": (
        helper.make_node("Zzz", ["g", "i"], ["y"], "bad", domain="ascend.moe"),
        moe_onnx.ModelError,
        ["Zzz", *BY_NAME],
    ),
    "wrong_domain": (
        helper.make_node(INIT, ["g", "i"], ["y"], "bad", domain="ascend.mo", top_k=2),
        moe_onnx.ModelError,
        ["'ascend.mo'", "'ascend.moe'"],
    ),
    "no_domain": (
        helper.make_node(INIT, ["g", "i"], ["y"], "bad", top_k=2),
        moe_onnx.ModelError,
        [INIT, "'ascend.moe'"],
    ),
    "unknown_attribute": (
        init(name="bad", topk=2),
        moe_onnx.AttributeValueError,
        ["'topk'", "Did you mean 'top_k'?"],
    ),
    "float_attribute": (
        init(name="bad", top_k=2.0),
        moe_onnx.AttributeValueError,
        ["'top_k'", "INT", "FLOAT", "2.0"],
    ),
    "list_attribute": (
        init(name="bad", top_k=[2]),
        moe_onnx.AttributeValueError,
        ["'top_k'", "INT", "INTS"],
    ),
    "value": (init(name="bad", top_k=0), moe_onnx.AttributeValueError, ["'top_k'", "> 0", "got 0"]),
    "no_top_k": (
        helper.make_node(INIT, ["g", "i"], ["y"], "bad", domain="ascend.moe"),
        moe_onnx.AttributeValueError,
        ["'top_k'", "missing"],
    ),
    "many_inputs": (
        helper.make_node(INIT, ["g", "i", "g"], ["y"], "bad", domain="ascend.moe", top_k=2),
        moe_onnx.ModelError,
        ["3 inputs", "at most 2", "expanded_row_idx"],
    ),
    "many_outputs": (
        helper.make_node(INIT, ["g", "i"], ["y", "z"], "bad", domain="ascend.moe", top_k=2),
        moe_onnx.ModelError,
        ["2 outputs", "at most 1", "grad_x"],
    ),
    "few_inputs": (
        helper.make_node(INIT, ["g"], ["y"], "bad", domain="ascend.moe", top_k=2),
        moe_onnx.MissingInputError,
        ["'expanded_row_idx'"],
    ),
    "dtype": (
        helper.make_node(INIT, ["g", "g"], ["y"], "bad", domain="ascend.moe", top_k=2),
        moe_onnx.DtypeError,
        ["'expanded_row_idx'", "int32", "float32"],
    ),
}


@pytest.mark.parametrize("place", ["graph", "branch", "function"])
@pytest.mark.parametrize("route", KERNELS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str, route: str, place: str) -> None:
    """With the node, what is wrong and what is right, wherever the node stands."""
    node, error, mentions = MISTAKES[mistake]
    functions: tuple[Any, ...] = ()
    if place == "branch":
        result = helper.make_tensor_value_info("y", FLOAT, [None, None])
        good = helper.make_graph([init()], "good", [], [result])
        bad = helper.make_graph([node], "bad", [], [result])
        node = helper.make_node("If", ["c"], ["z"], then_branch=bad, else_branch=good)
    elif place == "function":
        functions = (function("F", [node]),)
        node = helper.make_node("F", ["g", "i"], ["y"], domain="user")
    model = model_of(node, feed={"c": np.array(True), **FEED}, outputs=(node.output[0],), functions=functions)
    with pytest.raises(error) as caught:
        legal(model, route)
    for mention in ("bad", *mentions):
        assert mention in str(caught.value)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_names_that_ours_could_hit(dtype: str, kernels: str) -> None:
    """A user's values may have the names that legalizing would have made up."""
    done = legal(branches(ELEMS["float16"], ELEMS["float16"]), "python")
    made = {name for node in all_nodes(done.model.graph) for name in node.output if "/" in name}
    more = legal(unpermute_model(["dy", "out", "token"], ["G"])[0], "python")
    made |= {name for node in more.model.graph.node for name in node.output if "/" in name}
    assert len(made) > 4
    taken = sorted(name.replace("out/", "y_/").replace("G/", "y_/") for name in made)
    last = helper.make_node("Cast", ["y_"], ["y"], to=FLOAT)
    users = [helper.make_node("Neg", ["g"], [name]) for name in taken]
    nodes = [helper.make_node("Cast", ["g"], ["x"], to=ELEMS[dtype]), init("x", "y_"), last]
    total = helper.make_node("Sum", taken, ["total"])
    model = model_of(*users, *nodes, total, outputs=("y", "total"))
    y, summed = session_of(model, kernels).run(None, FEED)
    np.testing.assert_array_equal(y, GRAD_X)
    np.testing.assert_array_equal(summed, -rows * len(taken))


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_sixteen_bits_between_casts(dtype: Any) -> None:
    """Widening, the float32 kernel and one rounding are bit for bit what the contract says."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 33)).astype(dtype)
    order = rng.permutation(40).astype(np.int32)
    model = make_model(INIT, [x, order], {"top_k": 8})
    done = legal(model, "python")
    assert (done.python_nodes, done.body_nodes) == (1, 0)
    assert "'the_node'" in done.notes[0]
    assert np.dtype(dtype).name in done.notes[0]
    feed = {"grad_expanded_x": x, "expanded_row_idx": order}
    (got,) = session_of(model, "python").run(None, feed)
    want = oracles.init_routing_v2_grad(x, order, top_k=8)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_sixteen_bit_copies_take_the_body(dtype: Any) -> None:
    """Without probs every bit counts, also those of NaNs; a note says so. With probs the kernel runs."""
    inputs = [WHOLE["dy"].astype(dtype), slots, slots]
    done = legal(make_model(UNPERMUTE, inputs, {}), "python")
    assert (done.python_nodes, done.body_nodes) == (0, 1)
    assert "'the_node' runs its function body: without 'probs'" in done.notes[0]
    inputs += [chosen, WHOLE["p"].astype(dtype), WHOLE["probs"].astype(dtype)]
    assert legal(make_model(UNPERMUTE, inputs, {}), "python").python_nodes == 1


@pytest.mark.parametrize("restore", [None, [4, 3]])
@pytest.mark.parametrize("given", ["three", "all"])
def test_the_evaluator_of_onnx_runs_bodies(given: str, restore: list[int] | None) -> None:
    """It ignores default attributes of functions, so none is left out."""
    model, feed, want = unpermute_model(["dy", "out", "token", *GIVEN[given]], ["G"])
    if restore:
        model.graph.node[0].attribute.append(helper.make_attribute("restore_shape", restore))
    model = moe_onnx.add_function_bodies(model)
    onnx.checker.check_model(model, full_check=True)
    (got,) = ReferenceEvaluator(model).run(None, feed)
    np.testing.assert_array_equal(got, want[0])


def test_an_input_of_unknown_dtype() -> None:
    """Behind an operator that nobody knows: the body takes any dtype, and a note says why."""
    model = model_of(
        helper.make_node("Mystery", ["g"], ["x"], domain="user"),
        init("x", "a", "after_mystery"),
        init("g", "b", "beside_it"),
        outputs=("a", "b"),
    )
    done = legal(model, "python")
    assert (done.python_nodes, done.body_nodes) == (1, 1)
    domains = {node.name: node.domain for node in done.model.graph.node}
    assert domains["after_mystery"] == BODY_DOMAIN
    assert domains["beside_it"] == SESSION_DOMAIN
    assert [(f.domain, f.name) for f in done.model.functions] == [(BODY_DOMAIN, INIT)]
    assert len(done.notes) == 1
    assert "'after_mystery'" in done.notes[0]
    assert "dtype" in done.notes[0]


def casting(op: str, dtype: str, static: bool) -> tuple[onnx.ModelProto, Any, list[Any]]:
    """The operator in ``dtype`` between casts from and to float32, which every runtime can feed."""
    top_k_ids = np.array([[0, 2], [1, 2], [0, 1]], np.int32)
    sizes = np.array([2, 0, 4], np.int32)
    matrices = np.arange(24, dtype=np.float32).reshape(3, 2, 4) % 5 - 2
    # Exact in every dtype; there are no updates in 16 bits.
    update = [
        rows,
        *(np.full_like(rows, x) for x in (2, 4, 14)),
        np.array([2, 2, 2, 2, 16, 4, 2], np.float32) / 4,
    ]
    gates = np.array([[-128, 128, 2, 3], [0, 128, 4, -5]], np.float32)
    if op in ("MoeAdamW", "MoeSquareSum") and "16" in dtype:
        dtype = "float64"
    calls: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
        INIT: (FEED, {"top_k": 2}, [GRAD_X]),
        UNPERMUTE: (WHOLE, {}, [*oracles.unpermute_grad(*WHOLE.values())]),
        "MoeInitRoutingV2": (
            {"x": rows[:3], "e": top_k_ids},
            {"expert_num": 3},
            [*oracles.init_routing_v2(rows[:3], top_k_ids, expert_num=3)[:2]],
        ),
        "MoeTokenPermuteWithRoutingMap": (
            {name: WHOLE[name] for name in ("dy", "map", "probs")},
            {},
            [*oracles.permute(*[WHOLE[name] for name in ("dy", "map", "probs")])],
        ),
        "MoeTokenPermuteWithRoutingMapGrad": (
            {"p": WHOLE["p"], "gp": WHOLE["p"][:, 1].copy(), "out": WHOLE["out"], "map": WHOLE["map"]},
            {},
            [*oracles.permute_grad(WHOLE["p"], WHOLE["p"][:, 1], WHOLE["out"], WHOLE["map"])],
        ),
        "MoeTokenUnpermuteWithRoutingMap": (
            {name: WHOLE[name] for name in ("p", "out", "map", "probs")},
            {},
            [*oracles.unpermute(*[WHOLE[name] for name in ("p", "out", "map", "probs")])[:1]],
        ),
        "MoeFinalizeRoutingV2": (
            {"x": rows, "i": index},
            {"drop_pad_mode": 2},
            [oracles.finalize(rows, index, drop_pad_mode=2)],
        ),
        "MoeFinalizeRoutingV2Grad": (
            {"g": rows, "i": index},
            {"active_num": 4},
            [oracles.finalize_grad(rows, index, active_num=4)[0]],
        ),
        "MoeGroupedMatmul": (
            {"x": rows % 5, "w": matrices, "sizes": sizes},
            {"transpose_weight": 1},
            [oracles.grouped_matmul(rows % 5, matrices, sizes, transpose_weight=1)],
        ),
        "MoeGroupedMatmulWeightGrad": (
            {"x": rows % 5, "g": rows[:, :3] % 4, "sizes": sizes},
            {},
            [oracles.grouped_matmul_weight_grad(rows % 5, rows[:, :3] % 4, sizes)],
        ),
        "MoeSwiGlu": ({"x": gates}, {}, [oracles.swi_glu(gates)]),
        "MoeSwiGluGrad": (
            {"g": gates[:, :2] / 128, "x": gates},
            {},
            [oracles.swi_glu_grad(gates[:, :2] / 128, gates)],
        ),
        "MoeSquareSum": ({"x": gates}, {}, [oracles.square_sum(gates)]),
        "MoeAdamW": (
            dict(zip("pgmvf", update, strict=True)),
            {},
            [*oracles.adam_w(*update)],
        ),
    }
    feed, attributes, want = calls[op]
    cast = {name: f"{name}_cast" for name, value in feed.items() if value.dtype == np.float32}
    names = [f"out{i}" for i in range(len(want))]
    model = model_of(
        *[helper.make_node("Cast", [n], [c], to=ELEMS[dtype]) for n, c in cast.items()],
        helper.make_node(
            op, [cast.get(n, n) for n in feed], names, "the_node", domain="ascend.moe", **attributes
        ),
        *[helper.make_node("Cast", [n], [f"{n}_f"], to=FLOAT) for n in names],
        feed=feed,
        outputs=tuple(f"{name}_f" for name in names),
        static=static,
    )
    for value, out in zip(model.graph.output, want, strict=True):
        shape = helper.make_tensor_type_proto(FLOAT, [None] * out.ndim)
        value.type.CopyFrom(shape)
    return model, feed, want


@pytest.mark.parametrize(
    ("dtype", "static"), [("float32", False), ("float32", True), ("float16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("op", BY_NAME)
def test_with_bodies_a_model_runs_anywhere(op: str, dtype: str, static: bool) -> None:
    """The strict checker takes it, plain onnxruntime runs it unregistered, twice is as once."""
    model, feed, want = casting(op, dtype, static)
    before = model.SerializeToString(deterministic=True)
    made = moe_onnx.add_function_bodies(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(made, full_check=True)
    plain = ort.InferenceSession(made.SerializeToString(), one_thread())
    by_python, by_body = legal(made, "python"), legal(made, "body", body_domain=BODY_DOMAIN)
    sessions = [plain, session_of(made, "body")]
    if by_python.python_nodes:
        sessions.append(session_of(made, "python"))
    else:  # the same model: one session says all
        assert by_python.model == by_body.model
    assert not legal(made, "native").model.functions
    for session in sessions:
        for got, out in zip(session.run(None, feed), want, strict=True):
            np.testing.assert_array_equal(got, out)
    again = moe_onnx.add_function_bodies(made)
    assert again.SerializeToString(deterministic=True) == made.SerializeToString(deterministic=True)
