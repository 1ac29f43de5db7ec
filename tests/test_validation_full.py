"""Gradients, updates, indices, unnamed rows: what the checks in depth say, and when they say nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from broken_full import MOE, between, layer_graph, linear, ranked, routed, scaled, sum_of_rows
from broken_models import copy_of, parse
from onnx import helper

import moe_onnx
from moe_onnx.validation.findings import Bars, Finding, Outcome, Skipped, Table
from moe_onnx.validation.full.gradients import TOLERANCE, gradients
from moe_onnx.validation.full.indices import indices
from moe_onnx.validation.full.poison import poison
from moe_onnx.validation.full.updates import updates
from moe_onnx.validation.subject import Options, Subject


def run(
    check: Callable[[Subject], Iterable[Outcome]], model: onnx.ModelProto, **options: Any
) -> list[Outcome]:
    """What one check yields."""
    return list(check(Subject(model, "model", options=Options("full", **options))))


def findings(outcomes: list[Outcome]) -> list[Finding]:
    return [outcome for outcome in outcomes if isinstance(outcome, Finding)]


def reasons(outcomes: list[Outcome]) -> str:
    return "; ".join(outcome.reason for outcome in outcomes if isinstance(outcome, Skipped))


def bars(outcomes: list[Outcome]) -> Bars:
    return next(outcome for outcome in outcomes if isinstance(outcome, Bars))


@cache
def language_model(assembly: str, **options: Any) -> onnx.ModelProto:
    config = moe_onnx.MoeLMConfig(
        vocab_size=11, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, num_experts=3,
        moe_intermediate_size=3, **options,
    )  # fmt: skip
    return moe_onnx.build_training_graph(config, assembly=assembly).model


def of_another_expert(model: onnx.ModelProto) -> None:
    order = np.array([1, 2, 0])
    between(model, "experts.down_proj.grad", ("Gather", ["", "order"], {"axis": 0}), order=order)


def in_the_moment(model: onnx.ModelProto) -> None:
    """The step's moment takes the gradient with the wrong sign; nothing else of the step is inconsistent."""
    made = next(n for n in model.graph.node if "experts.down_proj.exp_avg.updated" in n.output)
    model.graph.node.append(helper.make_node("Neg", [made.input[1]], ["other_sign"], name="broken/sign"))
    made.input[1] = "other_sign"
    nodes = list(model.graph.node)
    nodes.insert(nodes.index(made), nodes.pop())
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def test_a_layer_is_right_and_the_bars_say_how_right() -> None:
    outcomes = run(gradients, layer_graph().models["grad"])
    assert not findings(outcomes)
    shown = bars(outcomes)
    trained = {p.name for p in layer_graph().manifest.parameters if p.trained}
    assert set(shown.labels) == trained | {"hidden_states"}
    assert shown.limit == TOLERANCE
    assert shown.log
    assert max(shown.values) < 1e-7


@pytest.mark.parametrize(
    "options",
    [
        {
            "expert_activation": "geglu",
            "router_scores": "top_k_then_softmax",
            "dispatch_mode": "active",
            "active_num": 20,
        },
        {"dispatch_mode": "drop_pad", "expert_capacity": 6, "tie_word_embeddings": True},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_steps_of_every_mode_are_right(options: dict[str, Any]) -> None:
    """Of a step the gradient is what its optimizer took."""
    subject = Subject(language_model("step", **options), "model", options=Options("full"))
    outcomes = [*gradients(subject), *updates(subject)]
    assert not findings(outcomes), outcomes
    slopes, steps = (outcome for outcome in outcomes if isinstance(outcome, Bars))
    assert len(slopes.labels) == len(steps.labels) > 9
    assert max(slopes.values) < 1e-6
    assert max(steps.values) < 1e-7


@pytest.mark.parametrize(
    ("assembly", "break_it", "of"),
    [
        ("grad", scaled("gate.weight.grad", 0), {"gate.weight"}),
        ("grad", of_another_expert, {"experts.down_proj"}),
        ("step", in_the_moment, {"experts.down_proj"}),
    ],
    ids=["no_gradient_for_the_router", "experts_have_each_others", "the_other_sign_in_a_step"],
)
def test_one_wrong_gradient_of_a_layer_is_found_alone(assembly: str, break_it: Any, of: set[str]) -> None:
    model = copy_of(layer_graph().models[assembly])
    break_it(model)
    found = findings(run(gradients, model))
    assert {f.code for f in found} == {"MO901"}
    assert {f.where.split("gradient of ")[1].strip("'") for f in found} == of


def test_a_wrong_gradient_is_told_in_numbers() -> None:
    model = copy_of(linear())
    between(model, "bias.grad", ("Neg", [""], {}))
    (found,) = findings(run(gradients, model))
    assert found.where == "output 'bias.grad', gradient of 'bias'"
    assert "off by 2" in found.found or "off by 1" in found.found or "off by 0." in found.found
    assert float(found.expected.split(",")[0]) == pytest.approx(-float(found.found.split()[1]), rel=1e-6)


def test_what_has_no_slope_is_left_out() -> None:
    def model(text: str) -> onnx.ModelProto:
        made = parse(f"g (float[4] x) => (float loss, float[4] slope) {{ {text} slope = Identity (x) }}")
        made.graph.node[-1].output[0] = made.graph.output[1].name = "x.grad"
        return made

    wild = """
        much = Constant <value = float {1e12}> ()
        two = Constant <value = int64[1] {2}> ()
        wild = Mul (x, much)
        waves = Sin (wild)
        values, order = TopK (waves, two)
        loss = ReduceSum <keepdims = 0> (x)
    """
    assert "every direction changes a decision" in reasons(run(gradients, model(wild)))
    log = "zero = Sub (x, x) none = Log (zero) loss = ReduceSum <keepdims = 0> (none)"
    assert "the loss is -inf" in reasons(run(gradients, model(log)))
    rows = "loss = Identity (x)"
    assert "no scalar" in reasons(run(gradients, model(rows)))
    narrow = "half = Cast <to = 10> (x) wide = Cast <to = 1> (half) loss = ReduceSum <keepdims = 0> (wide)"
    assert "rounds to few bits" in reasons(run(gradients, model(narrow)))
    noise = "noise = RandomNormalLike (x) loss = ReduceSum <keepdims = 0> (noise)"
    assert "differs from run to run" in reasons(run(gradients, model(noise)))


def test_models_without_gradients_are_left_out() -> None:
    assert "no output 'loss'" in reasons(
        run(gradients, parse("g (float[2] x) => (float[2] y) { y = Relu (x) }"))
    )
    without = parse("g (float[2] x) => (float loss) { loss = ReduceSum <keepdims = 0> (x) }")
    assert "no output is called" in reasons(run(gradients, without))
    assert "takes" in reasons(run(gradients, layer_graph().models["grad"], max_bytes=100))
    assert "no manifest" in reasons(run(updates, without))
    assert "updates no parameter" in reasons(run(updates, layer_graph().models["grad"]))
    assert "no ascend.moe" in reasons(run(indices, without))
    assert "no ascend.moe" in reasons(run(poison, without))


def test_a_manifest_that_does_not_fit_raises_nothing() -> None:
    for old, new in (
        ('"momentum_buffer"', '"exp_avg"'),
        ('"experts.down_proj.momentum_buffer"', '"experts.gate_up_proj.momentum_buffer"'),
        ('"experts.down_proj"', '"experts.other"'),
        ('"lr"', '"rate"'),
        ("3,", "7,"),
        ('"kind": "SGD"', '"kind": "AdamW"'),
    ):
        # A step is dear to run; its gradient is read from the momentum.
        model = copy_of(layer_graph("SGD").models["step" if "gate_up" in new else "apply"])
        prop = next(p for p in model.metadata_props if p.key == "moe_onnx.manifest")
        assert old in prop.value
        prop.value = prop.value.replace(old, new)
        run(updates, model)


def test_indices_are_shown_and_wrong_ones_named() -> None:
    outcomes = run(indices, ranked("Identity (rank)")())
    assert not findings(outcomes)
    (table,) = (outcome for outcome in outcomes if isinstance(outcome, Table))
    assert table.rows == (("gather", "expanded_row_idx", 4, 0, 3, 0, 0),)
    (found,) = findings(run(indices, ranked("Add (rank, one)")()))
    assert (found.code, found.aclnn_status) == ("MO921", 561002)
    assert "'expanded_row_idx' values must be in [0, 4)" in found.found
    assert "got 4 at position" in found.found
    (found,) = findings(run(indices, ranked("Min (rank, two)")()))
    assert "must be unique" in found.found
    assert "got 2 at position" in found.found


def test_nodes_behind_one_with_a_wrong_index_are_said_not_to_be_seen() -> None:
    model = ranked("Add (rank, one)")()
    model.graph.node.append(
        helper.make_node(
            "MoeInitRoutingV2Grad", ["dx", "rest"], ["d2x"], name="second", domain="ascend.moe", top_k=1
        )
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 0], np.int32), "rest"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("d2x", onnx.TensorProto.FLOAT, [2, 3]))
    outcomes = run(indices, model)
    (found,) = findings(outcomes)
    assert found.code == "MO921"
    assert "1 nodes were not reached" in reasons(outcomes)


@pytest.mark.parametrize("gradient", [False, True], ids=["combine", "its_gradient"])
def test_slots_in_the_order_of_the_router_are_seen_at_the_combine(gradient: bool) -> None:
    assert not findings(run(indices, routed(gradient=gradient)()))
    (found,) = findings(run(indices, routed(order="as_chosen", gradient=gradient)()))
    assert (found.code, found.severity) == ("MO923", "warning")
    assert "which do not ascend" in found.found
    assert found.where.startswith("node 'combine' (ascend.moe.MoeTokenUnpermuteWithRoutingMap")


def test_indices_given_as_inputs_are_drawn_legal() -> None:
    for mode, rows in ((0, "4, 3"), (1, "2, 3, 3")):
        model = parse(
            f"g (float[{rows}] g, int32[4] i) => (float[2, 3] y) "
            f"{{ y = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, drop_pad_mode = {mode}> (g, i) }}",
            imports=MOE,
        )
        assert not findings([*run(indices, model), *run(poison, model)])


def test_poison_in_rows_without_a_slot_is_found_where_it_comes_from() -> None:
    assert not findings(run(poison, sum_of_rows()))
    model = sum_of_rows()
    next(node for node in model.graph.node if node.op_type == "ReduceSum").input[0] = "rows"
    (found,) = findings(run(poison, model))
    assert (found.code, found.severity) == ("MO911", "warning")
    assert found.where == "node 'combine' (ascend.moe.MoeTokenUnpermuteWithRoutingMapGrad)"
    assert "its 2 rows that no index names changes output 'total'" in found.found


@pytest.mark.parametrize(
    "options",
    [{"dispatch_mode": "active", "active_num": 20}, {"dispatch_mode": "drop_pad", "expert_capacity": 16}],
    ids=["active", "drop_pad"],
)
def test_graphs_that_drop_tokens_are_poisoned_and_do_not_mind(options: dict[str, Any]) -> None:
    outcomes = run(poison, language_model("grad", **options))
    assert not outcomes, outcomes  # neither a finding nor a reason why nothing could be poisoned
