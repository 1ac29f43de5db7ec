"""Findings about names and order say where; what is legal is no finding."""

from __future__ import annotations

import pytest
from broken_models import copy_of, parse, plain_model, step_model
from broken_structure import add, function_model, nested_model, node, reads, reverse, without

import moe_onnx
from moe_onnx.validation.file.names import circles
from moe_onnx.validation.findings import Finding, Report


def of(report: Report, code: str) -> Finding:
    (finding,) = [one for one in report if one.code == code]
    return finding


def test_unsorted_dangling_and_doubled_models_have_three_messages() -> None:
    """The three that onnx.checker has one message for, in a training graph."""
    unsorted, dangling, doubled = (copy_of(step_model()) for _ in range(3))
    reverse(unsorted)
    removed = next(n for n in dangling.graph.node if n.op_type == "Softmax")
    name = removed.output[0]
    dangling.graph.node.remove(removed)
    twice = next(n for n in doubled.graph.node if n.op_type == "Softmax")
    add("Relu", [twice.input[0]], twice.output[0])(doubled)
    reports = [moe_onnx.validate(model) for model in (unsorted, dangling, doubled)]
    assert [set(r.codes) & {"MO201", "MO202", "MO203"} for r in reports] == [{"MO203"}, {"MO202"}, {"MO201"}]
    assert f"{name!r}" in of(reports[1], "MO202").found
    assert "more nodes likewise" in of(reports[0], "MO203").found
    assert f"node '{twice.name}' (Softmax)" in of(reports[2], "MO201").found


def test_a_misspelling_gets_a_question() -> None:
    model = plain_model()
    reads("shift", "produkt", "bias")(model)
    finding = of(moe_onnx.validate(model), "MO202")
    assert finding.where == "node 'shift' (Add)"
    assert "did you mean 'product'?" in finding.found


def test_a_missing_value_is_one_finding_with_the_number_of_its_readers() -> None:
    model = plain_model()
    for number in range(5):
        add("Relu", ["gone"], f"r{number}")(model)
    assert "and so do 4 more nodes" in of(moe_onnx.validate(model), "MO202").found


def test_hundreds_of_missing_values_are_counted() -> None:
    model = plain_model()
    for number in range(300):
        add("Relu", [f"gone{number}"], f"r{number}")(model)
    findings = [one for one in moe_onnx.validate(model) if one.code == "MO202"]
    assert len(findings) < 12 and "292 more" in findings[-1].found


def test_a_circle_is_told_by_its_nodes() -> None:
    model = plain_model()
    reads("project", "shifted", "weight")(model)
    report = moe_onnx.validate(model)
    finding = of(report, "MO204")
    assert "node 'project' (MatMul) reads from node 'shift' (Add) reads from node 'project'" in finding.found
    assert "MO203" not in report.codes


def test_places_inside_are_told() -> None:
    model = nested_model()
    reads("step", "w", "b")(model)
    where = of(moe_onnx.validate(model), "MO202").where
    assert where == ("node 'step' (Add) in body of node 'repeat' (Loop) in then_branch of node 'either' (If)")
    model = function_model()
    reads("second", "a", "x")(model)
    assert of(moe_onnx.validate(model), "MO202").where == "node 'second' (Mul) in function 'local.Gate'"


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] x) => (float[2] x) { y = Identity (x) }",
        "g (float[2] x) => (float[2] w) <float[2] w = {1, 2}> { y = Identity (x) }",
        "g (float[2] x) => (float[2] y, float[2] y) { y = Relu (x) }",
        "g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { y = Add (x, w) }",
        """g (float[2] x, bool c) => (float[2] y) { y = If (c) <
            then_branch = t () => (float[2] y) { y = Relu (x) },
            else_branch = e () => (float[2] y) { y = Neg (x) }> }""",
        """g (float[2] x, bool c) => (float[2] y) { y = If (c) <
            then_branch = t () => (float[2] p) <float[2] p = {1, 2}> { },
            else_branch = e () => (float[2] p) { p = Neg (x) }> }""",
        "g (float[4] x) => (float[2] y) { [a] y, rest = Split <num_outputs = 2> (x) }",
        "g (float[2] x) => (float[2] y) { y = Clip (x, , most) most = Constant <value = float {1}> () }",
    ],
    ids=[
        "an output that is an input",
        "an output that is an initializer",
        "one output twice",
        "a default for an input",
        "branches that name their value like the If",
        "a branch that gives a constant",
        "one of two outputs",
        "an input left out",
    ],
)
def test_what_is_legal_is_no_error(text: str) -> None:
    report = moe_onnx.validate(parse(text))
    assert {"MO203"} >= {finding.code for finding in report.of_severity("error")}
    assert ("MO203" in report.codes) == ("most)" in text)


def test_an_initializer_that_only_a_branch_reads_is_read() -> None:
    model = parse("""
        g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> { y = If (c) <
            then_branch = t () => (float[2] p) { p = Add (x, w) },
            else_branch = e () => (float[2] q) { q = Neg (x) }
        > }
    """)
    assert not moe_onnx.validate(model).findings


def test_nodes_that_only_move_data_may_be_left_over() -> None:
    """onnxruntime leaves such behind when it saves what it optimised."""
    model = plain_model()
    add("Shape", ["product"], "left")(model)
    add("Squeeze", ["left"], "over")(model)
    assert not moe_onnx.validate(model).findings
    add("Exp", ["product"], "computed")(model)
    assert "node of 'computed' (Exp)" in of(moe_onnx.validate(model), "MO206").found


def test_a_weight_that_is_cut_off_is_told_with_its_bytes() -> None:
    model = plain_model()
    without("shift")(model)
    node(model, "activate").input[0] = "product"
    assert "'bias': 12 bytes" in of(moe_onnx.validate(model), "MO207").found


def test_circles_are_shortest_and_one_a_group() -> None:
    assert circles([[1], [2], []]) == []
    assert circles([[0]]) == [[0]]
    assert circles([[1], [0], [3], [4], [2]]) == [[0, 1], [2, 3, 4]]
    assert circles([[1, 2], [0], [0]]) == [[0, 1]]
    long = [[(number + 1) % 5000] for number in range(5000)]
    assert len(circles(long)[0]) == 5000
