"""What exporters do: what is and what is not a finding, on small graphs of the same shape."""

from __future__ import annotations

import onnx
import pytest
from broken_foreign import BATCHED, EXPERTS, HITS, ROUTED, SIZES, dotted, lose, merge, merge_zeros, norms
from broken_hazards import MOE
from broken_models import parse

import moe_onnx


def found(model: onnx.ModelProto | str, imports: str = "") -> list[str]:
    """The findings of the family, as text."""
    model = parse(model, imports=imports) if isinstance(model, str) else model
    return [str(finding) for finding in moe_onnx.validate(model) if finding.code[:3] in ("MO7", "MO0")]


def test_merged_norms_are_named_with_all_they_stand_for_and_ties_are_none() -> None:
    model = norms()
    tied = norms()
    merge_zeros(tied)
    assert "'lm_head'" in found(tied)[0]
    tied.graph.initializer[2].float_data[3] = 1.0
    assert found(tied) == []  # the head uses the embedding: a tie
    merge(model)
    (one,) = found(model)
    assert "'model.norm1.weight'" in one and "'model.norm2'" in one and "optimize=False" in one


def test_a_node_fused_from_two_modules_has_one_parameter() -> None:
    """As torch's optimizer folds a BatchNorm into a Conv: the node says that it is of the BatchNorm."""
    model = norms()
    model.graph.node[0].metadata_props[0].value = "['', 'model', 'model.other', 'mul_1']"
    assert found(model) == []


def test_without_modules_nobody_knows_what_was_merged() -> None:
    model = norms()
    for node in model.graph.node:
        del node.metadata_props[:]
    (check,) = [c for c in moe_onnx.validate(model).checks if c.name == "hazards.foreign.merged_parameters"]
    assert "cannot be told" in check.skipped[0]
    for value in ("not python", "{}", "['a', 1]", "(" * 500):
        model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=value)
        assert found(model) == []
        del model.graph.node[0].metadata_props[:]


def test_lost_experts_are_named() -> None:
    model = dotted(EXPERTS)
    lose(model, 1, 3)
    (one,) = found(model)
    assert "layers.0.mlp" in one and "experts 1, 3 are nowhere" in one and "router has 4 rows" in one


def test_a_shard_of_the_experts_is_no_loss_and_experts_merged_by_value_are_still_there() -> None:
    model = dotted(EXPERTS)
    lose(model, 0, 1)
    assert found(model) == []
    model = dotted(EXPERTS)
    # The weight of expert 2 was merged into that of expert 0; its node is still there.
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if ".experts.2." in name:
                node.input[place] = name.replace(".2.", ".0.")
                node.name = "/layers.0/mlp/experts.2/w1/MatMul"
    del model.graph.initializer[3]
    assert not [one for one in found(model) if "MO703" in one]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Split <axis = 1, num_outputs = 2> (pairs)", "Split <axis = -1, num_outputs = 2> (pairs)"),
        ("Split <axis = 1, num_outputs = 2> (pairs)", "Split <axis = 0, num_outputs = 2> (places)"),
        ("Split <axis = 1, num_outputs = 2> (pairs)", "Split <axis = 1, num_outputs = 2> (both64)"),
    ],
)
def test_the_coordinates_of_what_was_found_may_be_split(old: str, new: str) -> None:
    text = HITS.replace(old, new).replace(
        "found = NonZero", "both64 = Cast <to = 7> (both)\n found = NonZero"
    )
    assert found(text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(weights, third)", "(weights, one_of)"),  # a loop's expert
        ("(weights, third)", "(weights, two_of)"),  # one token's
        ("float[8, 4, 6] weights", "float[8, 24] weights"),  # an embedding
        ("float[8, 4, 6] weights", "float[e, 4, 6] weights"),  # not a parameter: its size varies
    ],
)
def test_gathers_of_few_experts_and_of_rows_are_usual(old: str, new: str) -> None:
    text = BATCHED.replace("int64[n, 2] chosen", "int64[n, 2] chosen, int64 one_of, int64[1, 2] two_of")
    text = text.replace(old, new)
    if "weights," not in new:
        text = text.replace("(weights, third)", "(weights, ids)").replace(
            "float[slots, 4, 6] w", "float[a, b] w"
        )
    assert found(text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64[1] k = {2}", "int64[1] k = {1}"),  # one expert a token
        ("(rows, row_idx, map, scores)", "(rows, row_idx, map)"),  # nothing to pair
        ("drop_and_pad = 0>", "drop_and_pad = 1>"),  # by expert, not by slot
    ],
)
def test_the_order_of_ids_matters_only_where_slots_are_paired(old: str, new: str) -> None:
    text = ROUTED.replace("Cast <to = 6> (ids)", "Cast <to = 6> (chosen)").replace(old, new)
    assert not [one for one in found(text, MOE) if "MO706" in one]


def test_ids_from_outside_are_not_judged() -> None:
    text = ROUTED.replace("bool[t, 4] map", "bool[t, 4] map, int32[t, 2] given").replace(
        "(x, experts)", "(x, given)"
    )
    model = parse(text, imports=MOE)
    assert found(model) == []
    (check,) = [c for c in moe_onnx.validate(model).checks if c.name == "hazards.expert_use.expert_ids"]
    assert "cannot be told" in check.skipped[0]


def test_a_combine_in_the_order_of_scores_is_wrong_and_the_finding_says_where_it_comes_from() -> None:
    text = ROUTED.replace("Cast <to = 6> (ids)", "Cast <to = 6> (chosen)").replace("[sort]", "[unused]")
    (one,) = found(text, MOE)
    assert (
        one.startswith("MO706 error: node 'combine'") and "'dispatch'" in one and "order of its scores" in one
    )


def test_sizes_that_follow_an_input_are_usual() -> None:
    assert found(SIZES.replace("{-1, 8}", "{0, 4}")) == []
    assert found(SIZES.replace("float[n, 4] x", "float[6, 4] x").replace("{-1, 8}", "{3, 8}")) == []
    (one,) = found(SIZES.replace("{-1, 8}", "{3, 8}"))
    assert "'n'" in one and "[3, 8]" in one


def test_the_training_graphs_of_this_package_are_clean() -> None:
    config = moe_onnx.MoeLMConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, dispatch_mode="drop_pad",
        capacity_factor=1.0, tokens_per_batch=8,
    )  # fmt: skip
    for model in moe_onnx.build_training_graph(config, assembly="step+forward").models.values():
        assert found(model) == []
