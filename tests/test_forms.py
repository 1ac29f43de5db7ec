"""Both forms of a training graph, for function bodies and for native kernels: one model, one checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from moe_cases import layer
from routes import NATIVE, one_thread

import moe_onnx
from moe_onnx.build.manifest import Manifest
from moe_onnx.build.update import LONG_SLICE

BEST = ("body", *NATIVE)[-1]  # bodies take long to load: they run where it matters
# With and without decay and clipping; the second weighs hard.
OPTIMIZERS = {
    "default": moe_onnx.AdamW(),
    "all": moe_onnx.AdamW(weight_decay=0.3, beta1=0.7, beta2=0.9, eps=1e-4, max_grad_norm=0.05),
    "plain": moe_onnx.AdamW(weight_decay=0.0, max_grad_norm=None),
}


def build(config: Any, form: str, **options: Any) -> moe_onnx.TrainingGraph:
    return moe_onnx.build_training_graph(config, optimize_for=form, **options)


def counts(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain)


def batch_of(config: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    if "vocab_size" in config:
        return {"input_ids": rng.integers(0, config["vocab_size"], (2, 9))}
    return {
        name: rng.standard_normal((17, config["hidden_size"]), np.float32)
        for name in ("hidden_states", "target")
    }


def train(graph: moe_onnx.TrainingGraph, steps: int, **options: Any) -> tuple[Any, list[float]]:
    session = moe_onnx.TrainingSession(graph, lr=3e-2, sess_options=one_thread(), **options)
    batch = batch_of(graph.manifest.config)
    return session, [session.step(batch)["loss"] for _ in range(steps)]


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    ("optimizer", "assembly", "kernels"),
    [("default", "grad+apply", "body"), ("all", "step", BEST), ("plain", "grad+apply", BEST)],
)
def test_updates_have_the_same_bits(optimizer: str, assembly: str, kernels: str) -> None:
    """Five steps from the same gradients: products and activation are the same nodes in both graphs."""
    config = layer(unroll_experts=0, router_selection_bias=True, router_bias_update_rate=0.01)
    config = dataclasses.replace(config, expert_activation="geglu")
    runs = []
    for form in ("body", "native"):
        graph = build(config, form, assembly=assembly, optimizer=OPTIMIZERS[optimizer])
        session, losses = train(graph, 5, kernels=kernels)
        runs.append((session.state_dict(), losses))
    assert runs[0][1] == runs[1][1] and len(set(runs[0][1])) == 5
    assert_same_bits(runs[0][0], runs[1][0])


def test_updates_by_slice_have_the_same_bits() -> None:
    """Of a weight that the portable form updates one expert after the other; with every kind of number."""
    config = layer(
        hidden_size=512, moe_intermediate_size=LONG_SLICE // 512, num_experts=2, num_experts_per_tok=1
    )
    config = dataclasses.replace(config, expert_activation="relu")
    graphs = {form: build(config, form, assembly="apply").model for form in ("body", "native")}
    assert "Scan" in {node.op_type for node in graphs["body"].graph.node}
    rng = np.random.default_rng(0)
    feed: dict[str, Any] = {"lr": np.array(1e-2, np.float32), "step": np.array(3)}
    feed["grad_norm"] = np.array(7, np.float32)
    for value in graphs["body"].graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.name in feed:
            continue
        feed[value.name] = rng.standard_normal(shape, np.float32)
        feed[value.name].reshape(-1)[:7] = [np.nan, np.inf, -np.inf, 0, -0.0, 1e-41, 3e38]
        if value.name.endswith("exp_avg_sq"):
            np.abs(feed[value.name], out=feed[value.name])
    found = []
    for form, kernels in (("body", "body"), ("native", "body"), *(("native", one) for one in NATIVE)):
        session = moe_onnx.InferenceSession(graphs[form], kernels=kernels)
        found.append(dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True)))
    for other in found[1:]:
        for name, value in found[0].items():
            np.testing.assert_array_equal(other[name].view(np.uint32), value.view(np.uint32), name)


def test_a_checkpoint_of_one_form_goes_on_in_the_other(tmp_path: Path) -> None:
    config = layer()
    for form, other in (("body", "native"), ("native", "body")):
        session, _ = train(build(config, form, assembly="grad+apply"), 2)
        session.save_checkpoint(tmp_path / form)
        goes_on = moe_onnx.TrainingSession(build(config, other), lr=3e-2)
        goes_on.load_checkpoint(tmp_path / form)
        assert_same_bits(goes_on.state_dict(), session.state_dict())
        batch = batch_of(config.to_dict())
        losses = [[one.step(batch)["loss"] for _ in range(3)] for one in (session, goes_on)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)
        assert losses[0][0] - losses[0][2] > 1e-3


def test_a_native_form_runs_in_a_plain_runtime() -> None:
    """With nothing registered, by the bodies that it carries; the numbers are those of the other form."""
    config = layer()
    graphs = {form: build(config, form, assembly="step") for form in ("body", "native")}
    session = moe_onnx.TrainingSession(graphs["body"], kernels="body")
    feed = {**session.state_dict(), **batch_of(config.to_dict())}
    feed |= {"lr": np.array(0.01, np.float32), "step": np.array(1)}
    found = {}
    for form, graph in graphs.items():
        onnx.checker.check_model(graph.model, full_check=True)
        plain = ort.InferenceSession(graph.model.SerializeToString(), one_thread())
        given = {arg.name: feed[arg.name] for arg in plain.get_inputs()}
        found[form] = dict(zip([o.name for o in plain.get_outputs()], plain.run(None, given), strict=True))
    for name, value in found["body"].items():
        np.testing.assert_allclose(found["native"][name], value, rtol=1e-4, atol=3e-5, err_msg=name)


def test_what_is_in_each_form() -> None:
    """Up to 16 experts have nodes of their own where bodies are to run; a number given stands in both."""
    for form, experts, unroll, is_grouped in (
        ("body", 16, None, False),
        ("body", 17, None, True),
        ("body", 3, 2, True),
        ("native", 2, None, True),
        ("native", 17, None, True),
        ("native", 17, 17, False),
        ("native", 18, 17, True),
    ):
        config = layer(num_experts=experts, num_experts_per_tok=2, unroll_experts=unroll)
        graph = build(config, form, assembly="apply+forward")
        assert counts(graph.models["forward"])["MoeGroupedMatmul"] == 2 * is_grouped
        activations = 0 if form == "body" else 1 if is_grouped else experts
        assert counts(graph.models["forward"])["MoeSwiGlu"] == activations
        assert counts(graph.models["apply"])["MoeAdamW"] == (3 if form == "native" else 0)
        assert graph.manifest.optimize_for == form
        assert graph.manifest.config["unroll_experts"] == unroll
    have = counts(build(layer(), "native").model)
    assert (have["MoeGroupedMatmul"], have["MoeGroupedMatmulWeightGrad"], have["MoeAdamW"]) == (4, 2, 3)
    assert (have["MoeSwiGlu"], have["MoeSwiGluGrad"], have["MoeSquareSum"]) == (1, 1, 3)
    geglu = dataclasses.replace(layer(), expert_activation="geglu")
    assert counts(build(geglu, "native").model)["MoeSwiGlu"] == 0
    default = moe_onnx.build_training_graph(layer()).model
    assert default.graph == build(layer(), "body").model.graph
    assert counts(build(layer(), "native", assembly="apply", optimizer=moe_onnx.SGD()).model)["MoeAdamW"] == 0


@pytest.mark.parametrize("unroll", [0, 8])
@pytest.mark.parametrize("form", ["body", "native"])
def test_shapes_in_the_graph_are_those_of_the_values(form: str, unroll: int) -> None:
    """A name of a size is one size: onnxruntime plans its memory by them, and only warns where they lie."""
    config = layer(unroll_experts=unroll)
    model = build(config, form, assembly="grad").model
    made = {name for node in model.graph.node for name in node.output} - {o.name for o in model.graph.output}
    told = [value for value in model.graph.value_info if value.name in made]
    told = [value for value in told if value.type.tensor_type.HasField("shape")]
    assert len(told) > 40 and (form == "body" or any("MoeSwiGlu" in value.name for value in told))
    model.graph.output.extend(told)
    session = moe_onnx.InferenceSession(model, one_thread(), kernels=BEST)
    graph = build(config, form, assembly="grad+apply")
    feed = {**graph.init_parameters(0), **batch_of(config.to_dict())}
    feed = {arg.name: feed[arg.name] for arg in session.get_inputs()}
    sizes: dict[str, int] = {}
    for value, found in zip(model.graph.output, session.run(None, feed), strict=True):
        dims = value.type.tensor_type.shape.dim
        assert len(dims) == found.ndim, value.name
        for dim, size in zip(dims, found.shape, strict=True):
            if dim.HasField("dim_value"):
                assert dim.dim_value == size, value.name
            elif dim.dim_param:
                assert sizes.setdefault(dim.dim_param, size) == size, (value.name, dim.dim_param)


def test_the_manifest_says_the_form(tmp_path: Path) -> None:
    graph = build(layer(), "native", assembly="grad+apply")
    loaded = moe_onnx.TrainingGraph.load(graph.save(tmp_path / "model"))
    assert loaded.manifest == graph.manifest and loaded.manifest.optimize_for == "native"
    data = json.loads(graph.manifest.to_json())
    del data["optimize_for"]  # as those were that had one form
    assert Manifest.from_json(json.dumps(data)).optimize_for == "body"
    with pytest.raises(moe_onnx.ModelError, match="'optimize_for' must be one of body, native, got 'gpu'"):
        Manifest.from_json(json.dumps({**data, "optimize_for": "gpu"}))


@pytest.mark.parametrize("wrong", ["natvie", None, True, ["native"]])
def test_other_forms_are_refused(wrong: Any) -> None:
    with pytest.raises(moe_onnx.ConfigError, match="optimize_for must be one of body, native, got"):
        build(layer(), wrong)


@pytest.mark.parametrize("wrong", [-1, True, 1.0, "16"])
def test_numbers_of_experts_that_are_none(wrong: Any) -> None:
    with pytest.raises(moe_onnx.ConfigError, match="'unroll_experts' must be an integer >= 0, got"):
        layer(unroll_experts=wrong)
