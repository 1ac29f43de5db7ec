"""Inputs that are drawn for a run are legal ones, or there is a reason why there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from broken_models import parse
from broken_run import apply_model, dense_graph, eval_model
from onnx import helper
from routes import ELEMS

from moe_onnx.operators import BY_NAME
from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.run.feeds import Feeds, draw_feeds, free_sizes
from moe_onnx.validation.subject import Options, Subject, open_subject

OPS = Path(__file__).parent.parent / "ops"
# The rows left out here are those that no index names: no drawing of indices can know that.
NOT_DRAWN = ("b3_permuted_tokens_of_n_rows",)


def subject_of(model: onnx.ModelProto) -> Subject:
    return open_subject(model, Options("run"))


def fed(model: onnx.ModelProto, seed: int = 0, **sizes: int) -> Feeds:
    feeds = draw_feeds(subject_of(model), np.random.default_rng(seed), sizes)
    assert isinstance(feeds, Feeds), feeds
    return feeds


def why_not(model: onnx.ModelProto) -> str:
    feeds = draw_feeds(subject_of(model), np.random.default_rng(0))
    assert isinstance(feeds, Skipped)
    return feeds.reason


def hand_cases() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(OPS.glob("*/cases.json")):
        data = json.loads(path.read_text("utf-8"))
        found += [(data["operator"], case) for case in data["cases"] if "outputs" in case]
    return [(op, case) for op, case in found if case["name"] not in NOT_DRAWN]


@pytest.mark.parametrize("op", sorted(BY_NAME))
def test_indices_are_legal_in_the_shapes_of_every_hand_case(op: str) -> None:
    """The numpy operators refuse what is out of range, repeated, or not as the forward makes it."""
    spec, cases = BY_NAME[op], [case for name, case in hand_cases() if name == op]
    assert cases
    for case in cases:
        inputs = case["inputs"]
        names = [arg.name if inputs.get(arg.name) else "" for arg in spec.inputs]
        node = helper.make_node(op, names, ["y"], domain="ascend.moe", name="one", **case["attributes"])
        values = [(name, ELEMS[inputs[name]["dtype"]], inputs[name]["shape"]) for name in names if name]
        graph = helper.make_graph([node], "g", [helper.make_tensor_value_info(*v) for v in values], [])
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("ascend.moe", 1)]
        feeds = fed(helper.make_model(graph, opset_imports=imports))
        spec.reference(*[feeds.values.get(name) for name in names], **case["attributes"])


def test_indices_of_nodes_that_belong_together_agree() -> None:
    """The dispatch's indices are inputs of the combine, too, and go through a Cast and a Reshape."""
    model = parse(
        """
        g (float[6, 3] rows, int64[6, 1] slots, bool[3, 4] map, float[3, 4] probs)
            => (float[3, 3] y, float[3, 3] z)
        <int64[1] flat = {-1}>
        {
            short = Cast <to = 6> (slots)
            index = Reshape (short, flat)
            y = ascend.moe.MoeTokenUnpermuteWithRoutingMap (rows, index, map, probs)
            z = ascend.moe.MoeInitRoutingV2Grad <top_k = 2> (rows, index)
        }
        """,
        imports=', "ascend.moe" : 1',
    )
    feeds = fed(model)
    index, routing_map = feeds.values["slots"].reshape(-1), feeds.values["map"]
    assert sorted(index) == list(range(6))
    assert routing_map.sum(axis=1).tolist() == [2, 2, 2]
    rows = [(e, t) for e in range(4) for t in range(3) if routing_map[t, e]]
    slots = [(e, t) for t in range(3) for e in range(4) if routing_map[t, e]]
    assert [rows[i] for i in index] == slots


def test_a_training_graph_starts_as_its_manifest_says() -> None:
    model = dense_graph().models["step"]
    feeds = fed(model, batch=3, sequence=8, tokens=24)
    values = feeds.values
    assert values["input_ids"].shape == (3, 8)
    assert values["input_ids"].min() >= 0 and values["input_ids"].max() < 7
    assert set(np.unique(values["attention_mask"])) == {0, 1}
    np.testing.assert_array_equal(values["attention_mask"][:2], 1)
    np.testing.assert_array_equal(values["model.norm.weight"], 1)
    assert 0.01 < values["model.embed_tokens.weight"].std() < 0.03
    assert (values["model.norm.weight.exp_avg_sq"] > 0).all()
    assert values["lr"].shape == () and values["lr"].dtype == np.float32
    again = fed(model, batch=3, sequence=8, tokens=24).values
    for name, value in values.items():
        np.testing.assert_array_equal(value, again[name])
    assert (fed(model, seed=1).values["input_ids"] != fed(model).values["input_ids"]).any()


def test_the_norm_of_drawn_gradients_is_their_norm() -> None:
    values = fed(apply_model()).values
    squares = [np.square(v, dtype=np.float64).sum() for name, v in values.items() if name.endswith(".grad")]
    assert values["grad_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-6)


def test_a_capacity_has_tokens_enough() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(eval_model())
    entry = next(p for p in model.metadata_props if p.key == "moe_onnx.manifest")
    data = json.loads(entry.value)
    data["dispatch"] = {"expert_capacity": 40}
    entry.value = json.dumps(data)
    sizes = free_sizes(subject_of(model))
    assert sizes["batch"] * sizes["sequence"] >= 40


TRACED = parse("""
    g (int64[n, 3] ids, int32[n] rows, bool[n, m] keep, int64[n, m] padding_mask, float[n] logged,
        int64[k] other) => (float[p] y)
    <float[11, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22}>
    {
        moved = Identity (ids)
        found = Gather (table, moved)
        second = GatherElements <axis = 1> (table, index)
        index = Unsqueeze (rows, one)
        one = Constant <value = int64[1] {1}> ()
        y = Log (logged)
    }
""")


def test_integers_are_what_they_are_used_for() -> None:
    feeds = fed(TRACED, n=50, m=4)
    values = feeds.values
    assert values["ids"].shape == (50, 3) and values["ids"].min() >= 0 and 5 < values["ids"].max() < 11
    assert set(np.unique(values["rows"])) == {0, 1}
    assert values["keep"].dtype == bool
    assert set(np.unique(values["padding_mask"])) == {0, 1}
    assert (values["logged"] > 0).all()
    assert values["other"].min() >= 1, "0 may be divided by, which kills the process"
    assert feeds.guessed == ["keep", "other"]
    assert feeds.sizes == {"n": 50, "m": 4, "k": 4}
    assert "within the axis" in feeds.how["ids"]


def test_inputs_with_a_default_are_left_alone() -> None:
    model = parse("g (float[3] x, float[3] w) => (float[3] y) <float[3] w = {1, 2, 3}> { y = Mul (x, w) }")
    model.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [3]))
    assert list(fed(model).values) == ["x"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("g (float[n] x, int64[k] size) => (float[m] y) { y = Reshape (x, size) }", "'size' says sizes"),
        ("g (string[n] words) => (string[n] y) { y = Identity (words) }", "'words' holds object"),
        ("g (seq(float[n]) many) => (seq(float[n]) y) { y = Identity (many) }", "'many' is a sequence"),
        ("g (optional(float[n]) x) => (bool y) { y = OptionalHasElement (x) }", "'x' is an optional"),
        ("g (float8e5m2[n] x) => (float[n] y) { y = Cast <to = 1> (x) }", "'x' holds float8_e5m2"),
        ("g (float[n] x, float[r] ratio) => (float[n] y) { y = Resize (x, ratio, ratio) }", "'ratio' says"),
    ],
)
def test_what_cannot_be_fed_says_why(text: str, reason: str) -> None:
    assert reason in why_not(parse(text))


def test_inputs_without_type_or_shape() -> None:
    model = parse("g (float[n] x) => (float[n] y) { y = Relu (x) }")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert "'x' has no shape" in why_not(model)
    model.graph.input[0].type.tensor_type.elem_type = 99
    assert "'x'" in why_not(model)
    model.graph.input[0].ClearField("type")
    assert "'x' is of no type" in why_not(model)
    model = parse("g (float[n, 9999999999] x) => (float[n, 9999999999] y) { y = Relu (x) }")
    assert "too large" in why_not(model)
