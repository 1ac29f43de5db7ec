"""``fuse`` on what it cannot know: callers' attributes, operators of old opsets, sparse initializers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from fuse_dense import dense
from fuse_experts import weights_of
from fuse_forms import BATCHED, model_of, weights
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_fuse import ASCEND, ours, run

from moe_onnx.rewrite.fuse.shapes import folded
from moe_onnx.rewrite.passes import apply_passes


def by_caller(model: onnx.ModelProto, output: str, name: str) -> onnx.ModelProto:
    """The graph as a function, in which an attribute of a node is given by the caller."""
    model = onnx.shape_inference.infer_shapes(model)
    graph, given = model.graph, onnx.AttributeProto()
    for node in graph.node:
        for attr in node.attribute if output in node.output else ():
            if attr.name == name:
                given.CopyFrom(attr)
                attr.CopyFrom(onnx.AttributeProto(name=name, type=attr.type, ref_attr_name="given"))
    given.name = "given"
    constants = [helper.make_node("Constant", [], [t.name], value=t) for t in graph.initializer]
    function = helper.make_function(
        "local", "Layer", [v.name for v in graph.input], [v.name for v in graph.output],
        [*constants, *graph.node], model.opset_import, ["given"],
        value_info=[*graph.input, *graph.value_info, *graph.output],
    )  # fmt: skip
    call = helper.make_node("Layer", function.input, function.output, "call", domain="local")
    call.attribute.append(given)
    return helper.make_model(
        helper.make_graph([call], "g", graph.input, graph.output),
        opset_imports=[*model.opset_import, helper.make_opsetid("local", 1)],
        ir_version=10,
        functions=[function],
    )


@pytest.mark.parametrize(("output", "name"), [("y", "keepdims"), ("left", "num_outputs"), ("left", "axis")])
def test_attributes_that_callers_give_are_not_known(output: str, name: str) -> None:
    model = by_caller(model_of(BATCHED, weights()), output, name)
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    assert done.report.skipped


@pytest.mark.parametrize(
    ("output", "attribute"), [("hot", "axis"), ("stack", "axis"), ("y", "equation"), ("left0", "axis")]
)
def test_attributes_of_experts_that_callers_give(output: str, attribute: str) -> None:
    given = weights_of("separate", weights()) | {"low": np.array(-np.inf, np.float32)}
    model = by_caller(model_of(dense("one_hot", "einsum"), given), output, attribute)
    assert apply_passes(model, ["fuse"]).model is model


def test_operators_that_had_attributes_for_inputs() -> None:
    model = onnx.parser.parse_model("""<ir_version: 4, opset_import: ["": 9]>
    g (float[T, 6] x, float[T, 3] z) => (float[A, B] y) {
        sizes = Shape (x)
        first = Slice <starts = [0], ends = [1]> (sizes)
        shape = Concat <axis = 0> (first, first)
        r = Reshape (z, shape)
        top, ids = TopK <axis = 1, k = 2> (x)
        flat = Squeeze (ids)
        y = MatMul (r, z)
    }""")
    assert apply_passes(model, ["fuse"]).model is model


def test_sizes_that_are_read_twice_at_every_step() -> None:
    steps = "".join(f"s{i + 1} = Add (s{i}, s{i})\n" for i in range(50))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]>'
        f"g (float[3] x) => (int64[1] s50) {{ s0 = Shape (x)\n{steps} }}"
    )
    node = ir.from_proto(model).graph.node(-1)
    assert folded(node.outputs[0]) == [3 * 2**50]


# Of x [2, 3], c = [4, -7, 9, 2] and m = [[1, 2], [3, 4]]: what is not exact must not be known.
SIZES = (
    "Div (c, two)", "Div (two, c)", "Sub (c, two)", "Mul (c, big)", "Gather (c, minus)", "Gather (c, four)",
    "Gather <axis = 1> (m, one)", "Gather (m, one)", "Slice (c, minus, far)", "Slice (c, one, minus)",
    "Slice (c, one, far, zero, two)", "Slice (m, one, far)", "Shape <start = -1> (x)", "Shape <end = -1> (x)",
    "Shape <start = 1, end = 9> (x)", "Cast <to = 9> (c)", "Cast <to = 3> (big)", "Equal (c, four)",
    "Where (yes, c, two)", "Concat <axis = 0> (c, two)", "Concat <axis = 1> (m, m)", "Add (m, two)",
    "Reshape (m, minus)", "Squeeze (two)", "Unsqueeze (two, zero)", "Identity (m)", "ConstantOfShape (two)",
)  # fmt: skip


@pytest.mark.parametrize("made", SIZES)
def test_sizes_that_are_known_are_those_of_a_run(made: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[2, 3] x) => (int64[N] y)
    <int64[4] c = {{4, -7, 9, 2}}, int64[2, 2] m = {{1, 2, 3, 4}}, int64[1] two = {{2}}, int64[1] one = {{1}},
     int64[1] minus = {{-1}}, int64[1] four = {{4}}, int64[1] zero = {{0}}, int64[1] far = {{100}},
     int64[1] big = {{5000000000000000000}}, bool[1] yes = {{1}}> {{
        last = {made}
        y = Cast <to = 7> (last)
    }}""")
    known = folded(ir.from_proto(model).graph.node(0).outputs[0])
    if known is None:
        return
    (want,) = ReferenceEvaluator(model).run(None, {"x": np.zeros((2, 3), np.float32)})
    want = want.reshape(-1)
    assert len(known) == len(want)
    assert all(n is None or n == int(one) for n, one in zip(known, want, strict=True)), (known, want)


def test_names_that_are_taken_are_not_given_again() -> None:
    before = model_of(BATCHED, weights())
    for node in before.graph.node:  # what an output is called as another value takes its name
        node.input[:] = ["y/before" if name == "logits" else name for name in node.input]
        node.output[:] = ["y/before" if name == "logits" else name for name in node.output]
    before.graph.output.append(helper.make_tensor_value_info("y/before", onnx.TensorProto.FLOAT, ["T", 6]))
    after = apply_passes(before, ["fuse"]).model
    assert ours(after) == ASCEND
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    for want, got in zip(run(before, x), run(after, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_sparse_initializers_stay() -> None:
    model = model_of(BATCHED, weights())
    one = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(one, numpy_helper.from_array(np.array([0])), [3])
    )
    model.graph.node.append(helper.make_node("Neg", ["sparse"], ["less"], "less"))
    after = apply_passes(model, ["fuse"]).model
    assert ours(after) == ASCEND
    assert after.graph.sparse_initializer == model.graph.sparse_initializer
    inner = onnx.GraphProto()
    inner.CopyFrom(model.graph)
    inner.ClearField("input")
    branch = helper.make_node("If", ["go"], ["out"], "if", then_branch=inner, else_branch=inner)
    go = helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, [])
    graph = helper.make_graph(
        [branch], "g", [go, model.graph.input[0]], [helper.make_value_info("out", model.graph.output[0].type)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    done = apply_passes(model, ["fuse"])
    assert done.model is model
    assert [note.node for note in done.report.skipped] == ["sparse"]
