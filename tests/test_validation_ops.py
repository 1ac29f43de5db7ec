"""Operators, types and functions under validation: what is said, what is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from broken_models import copy_of, parse, step_model
from broken_ops import ascend, attribute, branches, calls, inputs, operator, outputs, plain, typed
from onnx import ModelProto, TensorProto, helper
from routes import OP_ROUTES

import moe_onnx
from moe_onnx.adapters.function_body import function_body
from moe_onnx.validation import collapse
from moe_onnx.validation.findings import Report
from moe_onnx.validation.operators import known_ops
from moe_onnx.validation.operators.own_bodies import is_own_body


def findings(model: ModelProto, code: str) -> list[str]:
    return [str(finding) for finding in moe_onnx.validate(model).findings if finding.code == code]


def only(model: ModelProto, code: str) -> str:
    found = findings(model, code)
    assert len(found) == 1, found
    return found[0]


# --- names (public_reports A25, A56, A59)


def test_an_operator_without_domain_is_sent_to_its_domain() -> None:
    model = copy_of(ascend())
    operator("init", domain="")(model)
    said = only(model, "MO302")
    assert "node 'init' (MoeInitRoutingV2Grad)" in said and "Set the node's domain to 'ascend.moe'" in said


def test_the_checker_of_onnx_passes_over_what_is_found_here() -> None:
    for node, op, domain in (("init", "MoeInitRoutingV2Gard", "ascend.moe"), ("init", "Foo", "my.library")):
        model = copy_of(ascend())
        operator(node, op, domain)(model)
        model.opset_import.append(helper.make_opsetid("my.library", 1))
        onnx.checker.check_model(model)
        assert not moe_onnx.validate(model).ok


def test_ai_onnx_spelled_out_is_the_empty_domain() -> None:
    model = copy_of(plain())
    for node in model.graph.node:
        node.domain = "ai.onnx"
    model.opset_import[0].domain = "ai.onnx"
    assert moe_onnx.validate(model).codes == ()


def test_other_operators_of_like_names_are_left_alone() -> None:
    model = parse(
        """
        moe (float[2, 4] x, float[2, 2] p, float[2, 8, 4] a, float[2, 4, 8] b) => (float[2, 4] y)
        { y = com.microsoft.MoE <k = 1, activation_type = "relu"> (x, p, a, "", b) }
        """,
        imports=', "com.microsoft" : 1',
    )
    assert moe_onnx.validate(model).codes == ()


def test_a_model_of_custom_operators_only_needs_no_import_of_onnx() -> None:
    model = copy_of(ascend())
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("ascend.moe", 1))
    del model.functions[:]
    assert not {"MO301", "MO302", "MO303", "MO304", "MO305", "MO307"} & set(moe_onnx.validate(model).codes)


def test_a_function_of_the_model_may_have_any_name() -> None:
    model = copy_of(calls())
    for function in model.functions:
        if function.name == "Project":
            function.name = "MoeInitRoutingV2Grad"
    operator("first", "MoeInitRoutingV2Grad")(model)
    assert moe_onnx.validate(model).ok


def test_a_schema_that_the_user_registers_makes_an_operator_known() -> None:
    model = copy_of(plain())
    operator("activate", "Activate", "tests.library")(model)
    attribute("activate", axis=None)(model)
    model.opset_import.append(helper.make_opsetid("tests.library", 1))
    assert "MO303" in moe_onnx.validate(model).codes
    parameter = onnx.defs.OpSchema.FormalParameter
    onnx.defs.register_schema(
        onnx.defs.OpSchema(
            "Activate",
            "tests.library",
            1,
            inputs=[parameter("x", "tensor(float)")],
            outputs=[parameter("y", "tensor(float)")],
        )
    )
    try:
        assert moe_onnx.validate(model).ok
        inputs("activate", "narrow", "narrow")(model)
        assert "MO305" in moe_onnx.validate(model).codes
    finally:
        onnx.defs.deregister_schema("Activate", 1, "tests.library")


def test_operators_of_the_extensions_are_known_where_they_are_installed() -> None:
    model = copy_of(plain())
    operator("activate", "StringJoin", "ai.onnx.contrib")(model)
    assert "MO301" not in moe_onnx.validate(model).codes


# --- this package's operators (A22, A23, A26, A32, A47)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (("dy", "rows", "rows", "map", "kept", "probs"), ("drows", "dprobs")),
        (("dy", "rows", "rows", "map", "kept"), ("drows",)),
        (("dy", "rows", "rows", "", "", ""), ("drows", "")),
        (("dy", "rows", "rows"), ("drows",)),
    ],
)
def test_every_legal_set_of_optional_inputs_passes(given: tuple[str, ...], made: tuple[str, ...]) -> None:
    model = copy_of(ascend())
    inputs("unpermute", *given)(model)
    outputs("unpermute", *made)(model)
    if "dprobs" not in made:
        model.graph.output.pop()
    assert moe_onnx.validate(model).ok


def test_the_kind_of_an_attribute_is_told() -> None:
    model = copy_of(ascend())
    attribute("init", top_k="2")(model)
    said = only(model, "MO309")
    assert "'top_k' is of kind STRING" in said and "Expected: INT" in said and "561002" in said


def test_statuses_are_those_of_the_source_documents() -> None:
    for change, code, status in (
        (inputs("init", "", "rows"), "MO305", 161001),
        (typed("rows", TensorProto.INT64, 6), "MO314", 161002),
        (typed("kept", TensorProto.FLOAT16, 6, 4), "MO314", 561002),
        (attribute("init", top_k=0), "MO312", 561002),
        (typed("g", TensorProto.FLOAT, 5, 4), "MO315", 561002),
    ):
        model = copy_of(ascend())
        change(model)
        found = [f for f in moe_onnx.validate(model).findings if f.code == code]
        assert found and all(finding.aclnn_status == status for finding in found), found


def test_what_onnxruntime_saves_of_a_session_is_known(tmp_path: Path) -> None:
    for number, kernels in enumerate(("body", *OP_ROUTES)):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{number}.onnx")
        moe_onnx.InferenceSession(ascend(), options, kernels=kernels)
        noted = ("MO317",) if kernels == "native" else ()  # which needs no bodies and leaves them out
        assert moe_onnx.validate(tmp_path / f"{number}.onnx").codes == noted


def test_a_node_in_a_branch_is_held_to_the_types_outside() -> None:
    text = """
        inside (float[6, 4] g, int64[6] r, float[3, 4] x, bool c) => (float[3, 4] y)
        {
            y = If (c) <
                then_branch = t () => (float[3, 4] a) {
                    [inner] a = ascend.moe.MoeInitRoutingV2Grad
                        <top_k = 2, drop_pad_mode = 0, active_num = 0> (g, r)
                },
                else_branch = e () => (float[3, 4] b) { b = Identity (x) }
            >
        }
    """
    said = only(parse(text, imports=', "ascend.moe" : 1'), "MO314")
    assert "node 'inner' (ascend.moe.MoeInitRoutingV2Grad) in then_branch" in said and "got int64" in said


def test_attributes_passed_on_by_a_function_are_held_where_it_is_called() -> None:
    model = parse(
        """
        passed (float[6, 4] g, int32[6] r) => (float[3, 4] y) { [call] y = local.Back <k = 2> (g, r) }
        <domain: "local", opset_import: ["" : 21, "ascend.moe" : 1]>
        Back <k> (g, r) => (y)
        {
            [back] y = ascend.moe.MoeInitRoutingV2Grad
                <top_k : int = @k, drop_pad_mode = 0, active_num = 0> (g, r)
        }
        """,
        imports=', "local" : 1, "ascend.moe" : 1',
    )
    model.functions.append(function_body("MoeInitRoutingV2Grad", 21))
    assert moe_onnx.validate(model).codes == ()
    attribute("call", k=4)(model)
    assert "as node 'call' (local.Back) calls it" in only(model, "MO315")


# --- types (A28, A57)


def test_a_contradiction_in_a_branch_is_found_where_it_is() -> None:
    model = copy_of(branches())
    typed("w", TensorProto.FLOAT, 5, 3)(model)
    onnx.shape_inference.infer_shapes(copy_of(model))
    said = only(model, "MO321")
    assert "node 'inner' (MatMul) in then_branch of node 'choose' (If) and 1 more" in said
    assert "x is float [n, 4], w is float [5, 3]" in said


def test_readers_of_a_wrong_node_are_not_blamed() -> None:
    model = copy_of(plain())
    typed("x", TensorProto.FLOAT16, "n", 4)(model)
    assert "'project'" in only(model, "MO321")
    model = copy_of(plain())
    operator("project", "MatMull")(model)
    assert moe_onnx.validate(model).codes == ("MO301",)


def test_a_function_is_inferred_for_each_set_of_types() -> None:
    model = parse(
        """
        twice (float[2, 3] a, float[3, 2] b, float[4, 5] c) => (float[2, 2] y, float[2, 5] z)
        { [good] y = local.Mul (a, b) [bad] z = local.Mul (a, c) }
        <domain: "local", opset_import: ["" : 21]> Mul (l, r) => (o) { [mm] o = MatMul (l, r) }
        """,
        imports=', "local" : 1',
    )
    assert "as node 'bad' (local.Mul) calls it" in only(model, "MO321")


def test_sizes_that_nodes_compute_count() -> None:
    text = """
        computed (float[2, 3] x, float[5, 4] w) => (float[a, b] y)
        { s = Shape (w) [grow] z = Expand (x, s) y = Relu (z) }
    """
    assert "'grow'" in only(parse(text), "MO321")


def test_symbolic_and_missing_sizes_agree_with_everything() -> None:
    for shape in (("n", 3), ("m", 3), ("n", "k")):
        model = copy_of(plain())
        typed("y", TensorProto.FLOAT, *shape)(model)
        assert moe_onnx.validate(model).codes == ()
    model = copy_of(plain())
    typed("x", TensorProto.FLOAT, "n", -1)(model)  # as some exporters write a size that varies
    assert moe_onnx.validate(model).codes == ()
    model = copy_of(plain())
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert moe_onnx.validate(model).codes == ()


def test_loops_and_scans_are_inferred_inside() -> None:
    text = """
        loop (float[n, 3] x, float[K, 3] w, int64 t, bool c) => (float[n, 3] y)
        {
            y = Loop (t, c, x) <body = b (int64 i, bool k, float[n, 3] q) => (bool k2, float[n, 3] r) {
                k2 = Identity (k)
                [inner] p = MatMul (q, w)
                r = Identity (p)
            }>
        }
    """
    assert moe_onnx.validate(parse(text.replace("K", "3"))).codes == ()
    assert "node 'inner' (MatMul) in body" in only(parse(text.replace("K", "4")), "MO321")


# --- functions


def test_a_body_with_other_names_of_nodes_is_still_a_body() -> None:
    body = function_body("MoeInitRoutingV2Grad", 21)
    for node in body.node:
        node.name, node.doc_string = "", "said otherwise"
    assert is_own_body(body)
    body.input[0], body.input[1] = body.input[1], body.input[0]
    assert not is_own_body(body)


def test_a_body_of_another_build_is_said_to_be_that() -> None:
    """By its remark, its nodes' names or the model's producer; adding bodies replaces it, as is said."""
    model = copy_of(ascend())
    number = next(n for n, node in enumerate(model.functions[0].node) if node.output[0] == "two")
    model.functions[0].node[number].attribute[0].ints[:] = [3]
    for maker in ("remark", "names", "producer"):
        said = only(model, "MO341")
        assert "another build of moe_onnx" in said and "it replaces the body" in said, maker
        assert "Remove" not in said and "warning" in said, maker
        if maker == "remark":
            model.functions[0].doc_string = ""
        elif maker == "names":
            for node in model.functions[0].node:
                node.name = ""
            assert "Remove the function" in only(model, "MO341")
            model.producer_name = "moe_onnx"
    assert not findings(moe_onnx.add_function_bodies(model), "MO341")


def test_a_custom_operator_in_a_function_is_no_matter_with_its_body() -> None:
    """Measured: with the body in the model, onnxruntime takes it, registered or not."""
    model = parse(
        """
        inside (float[4, 3] g, int32[4] r) => (float[n, h] y) { z = local.Back (g, r) y = Relu (z) }
        <domain: "local", opset_import: ["" : 21, "ascend.moe" : 1]>
        Back (g, r) => (y)
        { y = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, drop_pad_mode = 0, active_num = 0> (g, r) }
        """,
        imports=', "local" : 1, "ascend.moe" : 1',
    )
    assert "MO346" in moe_onnx.validate(model).codes
    model.functions.append(function_body("MoeInitRoutingV2Grad", 21))
    assert moe_onnx.validate(model).codes == ()
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_a_function_that_standard_operators_shadow_is_never_run() -> None:
    model = copy_of(plain())
    header = '<domain: "", opset_import: ["" : 21]>'
    model.functions.append(onnx.parser.parse_function(header + " Softmax <axis> (a) => (b) { b = Neg (a) }"))
    assert "onnx has an operator Softmax" in only(model, "MO342")
    before = onnx.reference.ReferenceEvaluator(plain())
    after = onnx.reference.ReferenceEvaluator(model)
    feed = {"x": np.ones((2, 4), np.float32)}
    assert (before.run(None, feed)[0] == after.run(None, feed)[0]).all()


def test_long_chains_and_circles_of_functions_end() -> None:
    model = copy_of(calls())
    text = '<domain: "local", opset_import: ["" : 21, "local" : 1]> F{} (a) => (b) {{ b = local.F{} (a) }}'
    for number in range(300):
        model.functions.append(onnx.parser.parse_function(text.format(number, number + 1)))
    model.functions.append(onnx.parser.parse_function(text.format(300, 0)))
    operator("second", "F0")(model)
    assert "calls itself: F" in only(model, "MO343")


# --- many of a kind


def test_many_of_a_kind_are_one_finding() -> None:
    model = copy_of(plain())
    for _ in range(37):
        model.graph.node.add(op_type="Relu", input=["x"], output=["spare"], name="spare", domain="my.library")
    assert "and 36 more" in next(s for s in findings(model, "MO303") if "my.library.Relu" in s)


def test_a_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the suggestions nothing is suggested: the texts above come of the code that is meant."""
    monkeypatch.setattr(known_ops, "close_to", lambda word, known: "")
    model = copy_of(plain())
    operator("activate", "Sofmax")(model)
    assert "Softmax" not in only(model, "MO301")
    assert list(collapse.collapsed([])) == []


def test_the_training_graph_is_clean() -> None:
    report: Report = moe_onnx.validate(step_model())
    families = ("known_ops.", "own_ops.", "functions.", "inference.")
    assert not [code for code in report.codes if code.startswith("MO3")]
    assert not [check for check in report.checks if check.name.startswith(families) and check.skipped]


def test_what_may_run_is_no_misfit() -> None:
    """Sizes of 0 and -1, sizes that are not known, branches that may never be taken, divisors by Cast."""
    model = parse("""
        fits (float[2, 6] x, float[n, 6] rows, float[0, 4] none, float[2, 3] image, bool switch, float[3] f)
            => (float a, float b, float c, float d, float e, float g)
        <int64[2] kept = {0, -1}, int64[2] shape = {5, 6}, int64[2] empty = {-1, 4}, int64[1] zero = {0}>
        {
            v = Reshape (x, kept)
            w = Reshape (rows, shape)
            u = Reshape (none, empty)
            t = If (switch) <
                then_branch = then () => (one) { one = Reshape (x, shape) },
                else_branch = other () => (two) { two = Identity (x) }>
            float_zero = Cast <to = 1> (zero)
            s = Div (f, float_zero)
            a = ReduceSum <keepdims = 0> (v)
            b = ReduceSum <keepdims = 0> (w)
            c = ReduceSum <keepdims = 0> (u)
            d = ReduceSum <keepdims = 0> (t)
            e = ReduceSum <keepdims = 0> (s)
            g = ReduceSum <keepdims = 0> (image)
        }
    """)
    assert not moe_onnx.validate(model).of_severity("error")
