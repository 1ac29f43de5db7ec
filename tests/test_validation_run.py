"""What a run tells of a model: which node goes wrong first, by which route, at which size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from broken_models import copy_of, parse, plain_model
from broken_run import (
    apply_model,
    change,
    eval_model,
    grad_model,
    reworked,
)
from onnx import helper, numpy_helper
from routes import OP_ROUTES

import moe_onnx
from moe_onnx.validation.file.tensor_data import bytes_of
from moe_onnx.validation.findings import Bars, NotDone, Report, Skipped, Table
from moe_onnx.validation.full.cuts import session_of
from moe_onnx.validation.full.gradients import gradients
from moe_onnx.validation.run import limits
from moe_onnx.validation.run.agreement import ROUTES, differing, same_bits
from moe_onnx.validation.run.bisection import first_bad_node
from moe_onnx.validation.run.feeds import fed_bytes
from moe_onnx.validation.run.messages import said
from moe_onnx.validation.run.runs import runs_of
from moe_onnx.validation.run.sessions import PLAIN, make_session, routes, weight_bytes
from moe_onnx.validation.subject import Options, Subject, open_subject


def run(model: onnx.ModelProto | Path) -> Report:
    return moe_onnx.validate(model, level="run")


def subject_of(model: onnx.ModelProto, **options: int) -> Subject:
    return open_subject(model, Options("run", **options))


def own(report: Report) -> list[str]:
    """The codes of this family."""
    return [code for code in report.codes if code.startswith("MO8")]


def found(report: Report, code: str) -> str:
    return next(finding.found for finding in report if finding.code == code)


def skipped(report: Report, check: str) -> str:
    return "; ".join(next(run.skipped for run in report.checks if run.name == check))


# ---- which node


def chain(length: int, wrong: int) -> onnx.ModelProto:
    """Additions in two strands that meet at the end; ``wrong`` divides zero by zero."""
    nodes = [helper.make_node("Relu", ["x"], ["a0"]), helper.make_node("Neg", ["x"], ["b0"])]
    for i in range(1, length):
        for strand in "ab":
            inputs = [f"{strand}{i - 1}", f"{strand}{max(i - 2, 0)}"]
            nodes.append(helper.make_node("Max", inputs, [f"{strand}{i}"], name=f"{strand}{i}"))
    nodes.append(helper.make_node("Add", [f"a{length - 1}", f"b{length - 1}"], ["y"], name="end"))
    bad = next(node for node in nodes if node.name == f"b{wrong}")
    bad.op_type, bad.input[1] = "Sub", bad.input[0]
    nodes.insert(nodes.index(bad) + 1, helper.make_node("Div", [f"b{wrong}"] * 2, ["nan"], name="culprit"))
    for node in nodes[nodes.index(bad) + 2 :]:
        node.input[:] = ["nan" if name == f"b{wrong}" else name for name in node.input]
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [3]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("wrong", [1, 298])
def test_one_node_among_hundreds_is_named(wrong: int) -> None:
    """Six hundred nodes, found in few runs; nodes need not be in order."""
    model = chain(300, wrong)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert "it begins at node 'culprit' (Div)" in found(run(model), "MO842")


def test_few_runs_are_needed() -> None:
    calls: list[int] = []
    model = chain(300, 298)
    bad_names = {"nan", "b299", "y"}

    def bad(names: Sequence[str]) -> set[str]:
        calls.append(len(names))
        return bad_names & set(names)

    node = first_bad_node(subject_of(model), ["y"], bad)
    assert node is not None and node.name == "culprit"
    assert len(calls) <= 5 and max(calls) <= 49


def test_a_node_is_named_when_its_subgraph_reads_what_is_bad() -> None:
    model = parse("""
        g (float[3] x) => (float[3] y)
        {
            none = Sub (x, x)
            [culprit] bad = Div (none, none)
            yes = Constant <value = bool {1}> ()
            [choice] y = If (yes) <
                then_branch = t () => (float[3] c) { c = Neg (bad) },
                else_branch = e () => (float[3] d) { d = Identity (x) }
            >
        }
    """)
    assert "node 'culprit' (Div)" in found(run(model), "MO842")


def test_bad_values_that_vanish_when_looked_at_name_no_node() -> None:
    assert first_bad_node(subject_of(plain_model()), ["y"], lambda names: set()) is None
    assert first_bad_node(subject_of(plain_model()), ["nobody's"], lambda names: {"y"}) is None


# ---- routes

OURS = (*OP_ROUTES[::-1], "body")  # native first, where it is


def other_body(model: onnx.ModelProto) -> onnx.ModelProto:
    """The function body gives twice what it should."""
    model = moe_onnx.add_function_bodies(model)
    function = next(f for f in model.functions if f.name == "MoeInitRoutingV2Grad")
    output = function.output[0]
    producer = next(node for node in function.node if output in node.output)
    producer.output[:] = ["half" if name == output else name for name in producer.output]
    function.node.append(helper.make_node("Add", ["half", "half"], [output]))
    return model


def test_a_body_that_means_something_else_is_found_and_its_node_named() -> None:
    """Kernels shadow it where they are registered; elsewhere it is used, silently."""
    report = run(other_body(grad_model()))
    assert "'y' differs by" in found(report, "MO811")
    assert "it begins at node 'give_back' (ascend.moe.MoeInitRoutingV2Grad)" in found(report, "MO811")
    assert [f.where for f in report if f.code == "MO811"] == [f"routes {OURS[0]!r} and 'plain'"]


def test_all_routes_that_there_are() -> None:
    assert routes(subject_of(plain_model())) == ("plain",)
    assert routes(subject_of(grad_model())) == OURS
    assert routes(subject_of(moe_onnx.add_function_bodies(grad_model()))) == (*OURS, "plain")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_go_every_route(dtype: str) -> None:
    elem = onnx.TensorProto.FLOAT16 if dtype == "float16" else onnx.TensorProto.BFLOAT16
    model = parse(
        """
        g (float[4, 3] x) => (float[2, 3] y) <int32[4] rows = {2, 0, 1, 3}>
        { y = ascend.moe.MoeInitRoutingV2Grad <top_k = 2> (x, rows) }
        """,
        imports=', "ascend.moe" : 1',
    )
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = elem
    report = run(moe_onnx.add_function_bodies(model))
    assert not own(report), report.findings
    table = next(f for f in report.figures if isinstance(f, Table) and f.title.startswith("Cost"))
    assert {row[0] for row in table.rows} == {*OURS, "plain"}


def test_agreement_is_by_the_size_of_the_tensor_and_of_its_kind() -> None:
    one = {"a.grad": np.float32([1e-9, -1e-9]), "b.grad": np.float32([3.0]), "i": np.array([1, 2])}
    noise = {**one, "a.grad": np.float32([-1e-9, 2e-9])}

    def kind(name: str) -> str:
        return "gradient" if name.endswith(".grad") else name

    assert differing(one, noise, ROUTES, kind) == {}
    assert differing(one, noise, ROUTES).keys() == {"a.grad"}
    assert differing(one, {**one, "b.grad": np.float32([3.0001])}, ROUTES, kind).keys() == {"b.grad"}
    assert differing(one, {**one, "i": np.array([1, 3])}, ROUTES, kind) == {"i": float("inf")}
    assert differing(one, {"b.grad": one["b.grad"]}, ROUTES, kind).keys() == {"a.grad", "i"}
    wild = {"x": np.array([np.nan, np.inf, 1], np.float32)}
    assert differing(wild, wild, ROUTES) == {}
    assert differing(wild, {"x": np.array([np.nan, -np.inf, 1], np.float32)}, ROUTES) == {"x": float("inf")}
    assert differing(wild, {"x": np.array([0, np.inf, 1], np.float32)}, ROUTES) == {"x": float("inf")}
    half = {"x": np.array([1, 2], ml_dtypes.bfloat16)}
    assert differing(half, {"x": half["x"] * ml_dtypes.bfloat16(1.01)}, ROUTES) == {}
    assert differing(half, {"x": half["x"] * ml_dtypes.bfloat16(1.1)}, ROUTES).keys() == {"x"}


def test_the_same_bits_are_the_same_zeros_and_nans() -> None:
    nan = np.array([np.nan, 0.0], np.float32)
    assert same_bits(nan, nan.copy())
    assert not same_bits(nan, np.array([np.nan, -0.0], np.float32))
    assert not same_bits(np.zeros(2), np.zeros((2, 1)))
    assert not same_bits(np.zeros(2), np.zeros(2, np.float32))


# ---- repeats


def test_noise_is_a_finding_in_training_graphs_only() -> None:
    noisy = copy_of(plain_model())
    change("y", "noise = RandomNormalLike (before) after = Add (before, noise)")(noisy)
    report = run(noisy)
    assert report.ok
    assert "gives other values in every run" in skipped(report, "run.comparisons.repeats")
    update = copy_of(apply_model())
    name = update.graph.output[0].name
    reworked(update, name, "[noise] n = RandomNormalLike (before) after = Add (before, n)")
    assert "it seems to begin at node 'noise' (RandomNormalLike)" in found(run(update), "MO821")


# ---- sizes


def test_the_axis_that_is_fixed_is_named() -> None:
    model = parse("""
        g (float[n, m] x, float[m] w) => (float[n, m] y)
        <int64[2] traced = {-1, 4}>
        { fixed = Reshape (x, traced) scaled = Mul (fixed, w) y = Relu (scaled) }
    """)
    report = run(model)
    (finding,) = [finding for finding in report if finding.code == "MO832"]
    assert finding.where == "axis 'm'"
    assert "runs with n 4, m 4, but with n 5, m 5:" in finding.found


def test_axes_that_take_multiples_are_free_enough() -> None:
    model = parse("""
        g (float[n] x) => (float[k] y)
        <int64[2] pairs = {-1, 4}, int64[1] flat = {-1}>
        { p = Reshape (x, pairs) q = Relu (p) y = Reshape (q, flat) }
    """)
    assert not own(run(model))


def test_the_first_size_that_fits_is_taken() -> None:
    """A batch of 1, as many exports have it while they call it dynamic."""
    model = parse("""
        g (float[batch, 3] x) => (float[batch, 3] y)
        <int64[2] traced = {1, 3}>
        { fixed = Reshape (x, traced) y = Relu (fixed) }
    """)
    report = run(model)
    assert own(report) == ["MO832"]
    assert found(report, "MO832").startswith("runs with batch 1, but with batch 2:")


def test_names_of_declared_axes_are_held_to_the_inputs() -> None:
    model = parse("g (float[n, 3] x) => (float[n, 3] y) { y = Concat <axis = 0> (x, x) }")
    (finding,) = [finding for finding in run(model) if finding.code == "MO833"]
    assert (finding.where, finding.expected) == ("output 'y'", "[n, 3]")
    assert finding.found == "shape [8, 3] with n 4"


# ---- batches


@cache
def layer_model() -> onnx.ModelProto:
    config = moe_onnx.MoeLayerConfig(hidden_size=4, num_experts=3, moe_intermediate_size=3)
    return moe_onnx.build_training_graph(config, assembly="grad").model


def test_a_layer_with_experts_is_clean_by_every_route() -> None:
    report = run(layer_model())
    assert not own(report), report.findings
    families = ("run.", "comparisons.", "free_axes.", "batches.", "cost.")
    assert not [check for check in report.checks if check.skipped and check.name.startswith(families)]
    bars = [figure for figure in report.figures if isinstance(figure, Bars)]
    alone = tuple(f"{route}, 1 thread" for route in (*OURS, "plain"))
    assert bars[0].labels == (*alone, f"{OURS[0]}, 2 threads")


def test_experts_without_tokens_have_no_gradient() -> None:
    """A decay that found its way into the gradient: small, and wrong for experts without tokens."""
    model = copy_of(layer_model())
    name = "experts.down_proj.grad"
    text = "little = Constant <value = float {0.0001}> () after = Add (before, little)"
    reworked(model, name, text)
    report = run(model)
    assert [f.where for f in report if f.code == "MO852"] == [f"output {name!r}"]
    assert "have no tokens, but a gradient" in found(report, "MO852")
    assert "a batch with tokens 0" in {f.where for f in report if f.code == "MO851"}


# ---- what cannot be run


def test_weights_that_are_too_many_are_not_loaded() -> None:
    subject = subject_of(plain_model(), max_bytes=10)
    assert "are more than" in runs_of(subject).why_not
    assert not runs_of(subject).sessions


def test_a_model_that_cannot_be_fed_is_no_error() -> None:
    model = parse("g (float[n] x, int64[k] size) => (float[m] y) { y = Reshape (x, size) }")
    report = run(model)
    assert not own(report)
    assert "says sizes" in skipped(report, "run.routes.first_run")


def test_integers_that_nobody_can_know_are_no_finding() -> None:
    """A whole number that must be even."""
    model = parse("""
        g (float[6] x, int64[1] columns) => (float[a, b] y)
        <int64[1] rest = {-1}, int64[1] four = {40}>
        { forty = Mul (columns, four) size = Concat <axis = 0> (rest, forty) y = Reshape (x, size) }
    """)
    report = run(model)
    assert not own(report)
    assert "with what was drawn for 'columns'" in skipped(report, "run.routes.first_run")


def test_a_model_with_nothing_in_it() -> None:
    empty = helper.make_model(helper.make_graph([], "empty", [], []))
    assert own(run(empty)) in ([], ["MO801"])


def test_external_data_is_found_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moe_onnx.add_function_bodies(grad_model())
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.int32([2, 0, 1, 3]), "order"))
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="w.data", size_threshold=0)
    monkeypatch.chdir(tmp_path)
    report = run(path)
    assert not own(report), report.findings
    assert len(report.figures) >= 3


# ---- runs that do not end

ENDLESS = """
    g (float[2] x) => (float loss, float[2] y)
    {
        yes = Constant <value = bool {1}> ()
        y = Loop (, yes, x) <
            body = b (int64 i, bool before, float[2] now) => (bool after, float[2] then)
            { after = Identity (before) then = Relu (now) }
        >
        loss = ReduceSum <keepdims = 0> (y)
    }
"""


def endless_model(*, gradient: bool = False, moe: bool = False) -> onnx.ModelProto:
    model = parse(ENDLESS, imports=', "ascend.moe" : 1')
    if gradient:
        model.graph.output[1].name = model.graph.node[1].output[0] = "x.grad"
        model.graph.node[2].input[0] = "x.grad"
    if moe:
        more = grad_model().graph
        inputs = {"x": "z"}
        for node in more.node:
            node.input[:] = [inputs.get(name, name) for name in node.input]
        more.node[-1].output[0] = more.output[0].name = "w"
        more.input[0].name = "z"
        for field in ("node", "input", "output", "initializer"):
            getattr(model.graph, field).extend(getattr(more, field))
    return model


@pytest.mark.parametrize("moe", [False, True], ids=["plain", "ascend.moe"])
def test_a_loop_without_end_is_ended(moe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each kind of session; the limit is named, and that is no finding."""
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    report = run(endless_model(moe=moe))
    assert not own(report), report.findings
    assert skipped(report, "run.routes.first_run") == "a run takes longer than 0.2 s, and was ended"
    assert len([check for check in report.checks if "0.2 s" in "".join(check.skipped)]) >= 7


def test_full_does_not_wait_for_the_same_end_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    model = endless_model(gradient=True)
    report = moe_onnx.validate(model, level="full")
    assert "0.2 s" in skipped(report, "full.gradients.gradients")
    # A check by itself, which no run came before.
    (outcome,) = gradients(open_subject(model, Options("full")))
    assert isinstance(outcome, Skipped) and "0.2 s" in outcome.reason


def test_one_long_run_among_others_leaves_its_check_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long at other sizes only is not said to fail there."""
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    model = parse("""
        g (float[n] x) => (float[n] y)
        {
            size = Shape (x)
            four = Constant <value = int64[1] {4}> ()
            more = Greater (size, four)
            scalar = Constant <value = int64[0] {}> ()
            yes = Constant <value = bool {1}> ()
            turns = Reshape (more, scalar)
            y = Loop (, turns, x) <
                body = b (int64 i, bool before, float[n] now) => (bool after, float[n] then)
                { after = Identity (before) then = Relu (now) }
            >
        }
    """)
    report = run(model)
    assert not own(report), report.findings
    assert "0.2 s" in skipped(report, "run.free_axes.sizes")


# ---- one cause is told once


def test_an_axis_of_zero_leaves_the_others_no_larger() -> None:
    """numpy has no array of these dims, empty as it would be."""
    model = parse("g (float[4611686018427387904, 0] x) => (float[4611686018427387904, 0] y) { y = Relu (x) }")
    report = run(model)
    assert "MO001" not in report.codes, report.findings
    assert "is too large" in skipped(report, "run.routes.first_run")


def test_a_defect_of_the_runs_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("moe_onnx.validation.run.runs.draw", defect)
    report = run(plain_model())
    assert [finding.code for finding in report] == ["MO001"]
    assert "could not be prepared" in skipped(report, "run.cost.cost")


def test_what_is_made_once_is_made_once() -> None:
    """Also where making it fails, or gives nothing; and who only looks makes nothing."""
    subject = subject_of(plain_model())
    calls: list[str] = []

    def empty(_: Subject) -> set[int]:
        calls.append("empty")
        return set()

    def broken(_: Subject) -> int:
        calls.append("broken")
        raise KeyError("a defect")

    assert subject.made(empty) is None and not calls
    assert subject.once(empty) is subject.once(empty) is subject.made(empty)
    with pytest.raises(KeyError, match="a defect"):
        subject.once(broken)
    with pytest.raises(NotDone, match=r"could not be prepared \(broken\)"):
        subject.once(broken)
    assert subject.made(broken) is None and calls == ["empty", "broken"]


def test_what_the_static_checks_found_is_not_told_again() -> None:
    report = run(parse("g (float[2] x) => (float[2] y) { y = Reluu (x) }"))
    assert [finding.code for finding in report] == ["MO301"]
    assert "found errors first ('MO301')" in skipped(report, "run.routes.sessions")


def test_shapes_that_come_of_values_are_not_held_against_the_model() -> None:
    """A width that the values of an input say, and one that its shape says."""
    text = """
        g (float[2, 4] x, float[7] z) => (float[n] y)
        {{
            zero = Constant <value = float {{0}}> ()
            above = Greater (z, zero)
            flat = Constant <value = int64[1] {{-1}}> ()
            row = {op}
            long = Reshape (row, flat)
            r = Reshape (x, flat)
            y = Einsum <equation = "i,i->i"> (r, long)
        }}
    """
    assert own(run(parse(text.format(op="Compress (z, above)")))) == ["MO805"]
    assert own(run(parse(text.format(op="Identity (z)")))) == ["MO806"]


def test_nothing_is_printed_over_a_session_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime prints that it tries once more, with the providers that it had."""

    def fails(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("onnxruntime.InferenceSession._create_inference_session", fails)
    subject = subject_of(grad_model())
    with pytest.raises(RuntimeError, match="out of order"):
        session_of(grad_model(), subject)
    assert set(runs_of(subject).failures) == {*OURS}
    assert set(runs_of(subject_of(plain_model())).failures) == {"plain"}
    assert capsys.readouterr().out == ""


def test_bytes_are_those_of_the_dtype() -> None:
    tensor = onnx.TensorProto
    assert bytes_of(tensor.FLOAT, [3, 4]) == 48
    assert bytes_of(tensor.BFLOAT16, [3]) == 6
    assert bytes_of(tensor.INT4, [3]) == 2
    assert bytes_of(tensor.FLOAT, [-1]) is None and bytes_of(99, [1]) is None
    model = parse("g (double[5] x, float16[n] z) => (double[5] y) <int64[2] w = {1, 2}> { y = Relu (x) }")
    assert weight_bytes(subject_of(model)) == 16 and fed_bytes(subject_of(model)) == 40


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "Exception during initialization: /src/ort/core/cpu/math/element_wise_ops.h:256 onnxruntime::"
            "Div<T>::Div(const onnxruntime::OpKernelInfo&) [with T = long int] b_data[i] != T{0} "
            "was false. Integer division by zero\n",
            "Exception during initialization: Integer division by zero",
        ),
        (
            "Exception during initialization: /src/ort/core/optimizer/a.cc:22 static void onnxruntime::"
            "Graph::Check(const std::vector<int, std::allocator<int> >&, bool (*)(int)) const Node is gone.",
            "Exception during initialization: Node is gone",
        ),
        (
            r"C:\a\_work\1\s\onnxruntime\core\x.cc:5 onnxruntime::f::<lambda_1>::operator () ndim == 2 "
            "was false. Not two.",
            "Not two",
        ),
        ("/a/b.h:12 void onnxruntime::f(int) x == 1 was false. ", "x == 1 was false"),
        ("tensorprotoutils.cc:1657 GetSizeInBytes Out of bounds", "Out of bounds"),
        ("Load model from /models/m.onnx failed:File doesn't exist", None),
        ("Fetch (a::b(c)) and shape {2,3}/{4}.h", None),
    ],
)  # fmt: skip
def test_messages_are_without_places_in_the_source(text: str, left: str | None) -> None:
    assert said(RuntimeError(text)) == (text if left is None else left)


def test_messages_of_onnxruntime_lose_their_frame() -> None:
    error = RuntimeError("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Gather: index 7 is out of reach.\nmore")
    assert said(error) == "Gather: index 7 is out of reach"
    assert said(RuntimeError("")) == "RuntimeError"
    assert len(said(RuntimeError("x" * 999))) == 400


def test_everything_a_run_draws_is_in_the_report() -> None:
    table = next(figure for figure in run(eval_model()).figures if isinstance(figure, Table))
    assert table.columns == ("input", "dtype", "drawn as")
    assert ("input_ids and 1 more", "int64", "ids in [0, 7)") in table.rows
    assert len(table.rows) < len(eval_model().graph.input)


def test_outputs_that_are_no_tensors_beside_bfloat16() -> None:
    """Nor is an output that the graph passes on as it came any alarm."""
    nodes = [
        helper.make_node("SequenceConstruct", ["f"], ["s"]),
        helper.make_node("Cast", ["x"], ["y"], to=1),
    ]
    x, f, y = (
        helper.make_tensor_value_info(name, kind, [3]) for name, kind in (("x", 16), ("f", 1), ("y", 1))
    )
    outputs = [y, x, f, helper.make_tensor_sequence_value_info("s", 1, [3])]
    graph = helper.make_graph(nodes, "sequence", [x, f], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    report = run(model)
    assert own(report) == []
    made = make_session(subject_of(model), PLAIN)
    assert made.outputs == ["y", "x", "f"]
    fed = {"x": np.ones(3, ml_dtypes.bfloat16), "f": np.arange(3, dtype=np.float32)}
    assert made.run(fed)["f"].tolist() == [0, 1, 2]
