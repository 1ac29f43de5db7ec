"""``contrib-moe``: layers of ours as onnxruntime's MoE, by a loop over tokens, and back; or why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fuse_forms import BATCHED, TRANSPOSED, by_hand, changed, feeds, model_of, weights
from onnx import helper
from test_fuse import OAI, microsoft

import moe_onnx
from moe_onnx.rewrite.contrib_moe import forms
from moe_onnx.rewrite.passes import apply_passes

Arrays = Mapping[str, np.ndarray[Any, Any]]
SIZES: dict[str, Any] = {
    "hidden_size": 6,
    "num_experts": 5,
    "moe_intermediate_size": 4,
    "num_experts_per_tok": 2,
}
# Forms of routers, activations and dispatch: each is in one of them.
LAYERS: dict[str, dict[str, Any]] = {
    "swiglu, grouped": {"unroll_experts": 0, "expert_bias": True},
    "swiglu, unrolled": {"expert_bias": True, "norm_topk_prob": False},
    "clamped, unrolled": {"expert_activation": "clamped_swiglu", "swiglu_limit": 0.5, "expert_bias": True},
    "clamped, grouped": {
        "expert_activation": "clamped_swiglu", "swiglu_limit": 0.5, "router_scores": "top_k_then_softmax",
        "unroll_experts": 0,
    },
    "relu, by map": {"expert_activation": "relu", "dispatch": "routing_map", "unroll_experts": 0},
    "relu, sigmoid": {"expert_activation": "relu", "router_scores": "sigmoid", "routed_scaling_factor": 2.5},
    "native form": {"expert_bias": True},
    "native form, unrolled": {"unroll_experts": 4},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
}  # fmt: skip


def contrib(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == "com.microsoft"]


def runner(model: onnx.ModelProto) -> Callable[[Arrays], np.ndarray[Any, Any]]:
    """By onnxruntime alone."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda given: np.asarray(session.run(None, dict(given))[0])


def layer(x: np.ndarray[Any, Any], w: Arrays, config: moe_onnx.MoeLayerConfig) -> np.ndarray[Any, Any]:
    """One token and one expert at a time, in float64."""
    y, top_k = np.zeros(x.shape), config.num_experts_per_tok
    wide = {name: value.astype(np.float64) for name, value in w.items()}
    for t, token in enumerate(x):
        # In float32, as in the graph: which experts tie is a matter of rounding.
        logits = (token @ w["gate.weight"].T).astype(np.float64)
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        scores = 1 / (1 + np.exp(-logits)) if config.router_scores == "sigmoid" else probs
        chosen = np.argsort(-scores.astype(np.float32), kind="stable")[:top_k]
        total = scores[chosen].sum() if config.norm_topk_prob else 1.0
        for expert in chosen:
            first = "gate_up_proj" if config.is_gated else "up_proj"
            raised = wide[f"experts.{first}"][expert] @ token
            if config.expert_bias:
                raised = raised + wide[f"experts.{first}_bias"][expert]
            gate, up = np.split(raised, 2) if config.is_gated else (raised, raised)
            if config.expert_activation == "swiglu":
                hidden = gate / (1 + np.exp(-gate)) * up
            elif config.expert_activation == "relu":
                hidden = np.maximum(raised, 0)
            else:
                gate = np.minimum(gate, config.swiglu_limit)
                up = np.clip(up, -config.swiglu_limit, config.swiglu_limit)
                hidden = gate / (1 + np.exp(-config.swiglu_alpha * gate)) * (up + 1)
            out = wide["experts.down_proj"][expert] @ hidden
            if config.expert_bias:
                out = out + wide["experts.down_proj_bias"][expert]
            y[t] += config.routed_scaling_factor * scores[expert] / total * out
    return y


FUSED_AGAIN = ("swiglu, grouped", "clamped, unrolled")


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_the_builder_are_one_node_of_the_same_values(name: str) -> None:
    config = moe_onnx.MoeLayerConfig(**SIZES | LAYERS[name])
    form = "native" if name.startswith("native") else "body"
    before = moe_onnx.build_training_graph(config, assembly="forward", optimize_for=form).model
    done = apply_passes(before, ["contrib-moe"])
    assert len(done.report.applied) == 1 and not done.report.skipped
    assert [node.op_type for node in contrib(done.model)] == ["MoE"]
    assert not [node for node in done.model.graph.node if node.domain == "ascend.moe"]
    assert apply_passes(done.model, ["contrib-moe"]).model is done.model
    back = apply_passes(done.model, ["fuse"]).model
    assert not contrib(back) and len(back.graph.node) > len(done.model.graph.node)
    rng = np.random.default_rng(0)
    w = {i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(np.float32)
         for i in before.graph.input[1:]}  # fmt: skip
    some = rng.standard_normal((7, 6)).astype(np.float32)
    # What the builder's own graphs give is held elsewhere.
    runs = [runner(model) for model in ((done.model, back) if name in FUSED_AGAIN else (done.model,))]
    for x in (some, some[:1], some[:0], np.zeros_like(some), 50 * some):
        want = layer(x, w, config)
        for one in runs:
            got = one({"hidden_states": x, **w})
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(initial=0), 1))


@pytest.mark.parametrize(
    ("activation", "more"),
    [
        ("relu", {"normalize_routing_weights": 1}),
        ("gelu", {"k": 5}),
        ("silu", {"k": 1, "bias": True}),
        ("identity", {"shape": (2, "S", 4)}),
        ("swiglu", {**OAI, "bias": True, "normalize_routing_weights": 1, "shape": ("B", "S", 4)}),
    ],
)
def test_the_node_of_onnxruntime_comes_back(activation: str, more: dict[str, Any]) -> None:
    """``fuse`` and back: the kernel's own values, its order of ties among them."""
    before = microsoft(activation, **more)
    after = apply_passes(before, ["fuse", "contrib-moe"]).model
    assert len(contrib(after)) == 1 and not [n for n in after.graph.node if n.domain == "ascend.moe"]
    rng, runs = np.random.default_rng(4), [runner(model) for model in (before, after)]
    dims = (8, 4) if len(before.graph.input[0].type.tensor_type.shape.dim) == 2 else (2, 4, 4)
    x = rng.standard_normal(dims).astype(np.float32)
    tied = [[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [1, 1, 2, 1, 1], [3, 1, 0, 3, 1]] * 2
    for logits in (rng.standard_normal((8, 5)), tied, [[90, 0, 0, -90, 0]] * 8):
        want, got = (one({"x": x, "logits": np.asarray(logits, np.float32)}) for one in runs)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("transposed", [False, True])
def test_what_fuse_leaves_becomes_moe_and_is_fused_again(transposed: bool, tmp_path: Path) -> None:
    """GPT-OSS's layout needs two Transposes and no order of its own; the weights stay in their file."""
    text = changed(BATCHED, *TRANSPOSED) if transposed else BATCHED
    text = text if not transposed else changed(
        text, ("left = Min (left_free, limit)", "left = Clip (left_free, , limit)"),
        ("right = Slice (raised, one, far, one, two)",
         "right_free = Slice (raised, one, far, one, two)\n    right = Clip (right_free, low, limit)"),
        ("float limit = {0.5}", "float limit = {0.5}, float low = {-0.5}"),
    )  # fmt: skip
    given = weights(transposed=transposed)
    path = tmp_path / "layer.onnx"
    onnx.save(model_of(text, given), path, save_as_external_data=True, location="w", size_threshold=200)
    done = moe_onnx.rewrite_model(path, ["fuse", "contrib-moe"])
    (node,) = contrib(done.model)
    assert not done.report.skipped
    turned = [
        n.op_type
        for n in done.model.graph.node
        if "/moe/" in n.name and n.op_type in ("Transpose", "Reshape")
    ]
    assert sorted(turned) == (["Transpose"] * 2 if transposed else ["Reshape", "Reshape", "Transpose"])
    kept = {t.name: t.external_data[0].value for t in done.model.graph.initializer if t.external_data}
    assert kept == {"up": "w", "down": "w"}
    assert helper.get_node_attr_value(node, "k") == 2
    if not transposed:
        whole = apply_passes(apply_passes(model_of(text, given), ["fuse"]).model, ["contrib-moe"]).model
        again = apply_passes(whole, ["fuse"]).model
        runs = [runner(model) for model in (whole, again)]
        for name, x in feeds(given).items():
            for one in runs:
                want = by_hand(x, given)
                np.testing.assert_allclose(one({"x": x}), want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_gates_by_a_product_of_their_own() -> None:
    """As of experts that are modules: two products, one of which has a bias."""
    text = changed(
        BATCHED, ("float[6, 6, 4] up,", "float[6, 3, 4] w1, float[6, 3] b1, float[6, 3, 4] w3,"),
        ("ups = GatherND (up, ids_2d)",
         "w1s = GatherND (w1, ids_2d)\n    b1s = GatherND (b1, ids_2d)\n    w3s = GatherND (w3, ids_2d)"),
        ("raised_3d = MatMul (ups, column)",
         "left_3d = MatMul (w1s, column)\n    right_3d = MatMul (w3s, column)"),
        ("raised = Squeeze (raised_3d, last)",
         "left_0 = Squeeze (left_3d, last)\n    right = Squeeze (right_3d, last)"),
        ("left, right = Split <axis = 1, num_outputs = 2> (raised)", "left = Add (left_0, b1s)"),
    )  # fmt: skip
    given = weights()
    own = {"gate": given["gate"], "down": given["down"], "w1": given["up"][:, :3], "w3": given["up"][:, 3:]}
    x = feeds(given)["many tokens"]
    for bias in (np.zeros((6, 3), np.float32), np.full((6, 3), 0.3, np.float32)):
        before = model_of(text, own | {"b1": bias})
        after = apply_passes(before, ["fuse", "contrib-moe"]).model
        assert len(contrib(after)) == 1
        got, want = (runner(model)({"x": x}) for model in (after, before))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        if not bias.any():
            np.testing.assert_allclose(got, by_hand(x, given), rtol=1e-5, atol=1e-5)


def test_padding_in_a_language_model_is_no_nan() -> None:
    config = moe_onnx.MoeLMConfig(
        vocab_size=11, hidden_size=8, num_experts=3, moe_intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=2, router_selection_bias=True, router_scores="sigmoid",
    )  # fmt: skip
    graph = moe_onnx.build_training_graph(config, assembly="forward")
    done = moe_onnx.rewrite_model(graph.model, ["contrib-moe"])
    assert len(contrib(done.model)) == 1 and len(done.report.verified) >= 5
    ids = np.arange(10).reshape(2, 5)
    given = {"input_ids": ids, "attention_mask": np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])}
    given |= graph.init_parameters(3)
    got, want = (runner(model)(given) for model in (done.model, graph.model))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("options", "node", "reason"),
    [
        ({"expert_activation": "gelu"}, "experts/0/Gemm_2", "its activation is Gelu by Erf"),
        (
            {"expert_activation": "geglu"},
            "experts/0/Gemm_2",
            r"none of the CPU kernel's: Gelu\(none, x\[first\]\) \*",
        ),
        ({"dispatch_mode": "active", "active_num": 9}, "combine", "sorted_indices are made by Where"),
        ({"dispatch_mode": "drop_pad", "expert_capacity": 2}, "combine", "of which some may be dropped"),
        ({"router_weights_on": "experts"}, "combine", "has no probs: experts weigh their rows themselves"),
        ({"dtype": "bfloat16"}, "combine", "is of BFLOAT16, which onnxruntime's CPU kernel does not take"),
        (
            {"dtype": "float16"},
            "combine",
            "is of FLOAT16: logarithms of its weights.* would lose their digits",
        ),
    ],
)
def test_what_the_kernel_cannot_do_is_left_and_said(options: dict[str, Any], node: str, reason: str) -> None:
    model = moe_onnx.build_training_graph(
        moe_onnx.MoeLayerConfig(**SIZES | options), assembly="forward"
    ).model
    done = apply_passes(model, ["contrib-moe"])
    assert done.model is model
    (note,) = done.report.skipped
    import re

    assert note.node == node and re.search(reason, note.text), note


# What is changed of a fused layer, and what is said then.
NEAR_MISSES = {
    "weights that may be negative": (
        [("weights = Div (top, sum)", "weights = Sub (top, sum)")], "made by Sub and may be negative",
    ),
    "another activation": (
        [("sigmoid = Sigmoid (left)", "sigmoid = Tanh (left)")], "Tanh is in no activation",
    ),
    "the gate behind": (
        [("sigmoid = Sigmoid (left)", "sigmoid = Sigmoid (right)")], "kernel's: Sigmoid(x[second])",
    ),
    "columns without their fractions": (
        [("sigmoid = Sigmoid (left)", "whole = Cast <to = 7> (left)\n    floor = Cast <to = 1> (whole)\n"
          "    sigmoid = Sigmoid (floor)")], "Cast is in no activation",
    ),
    "a number without its fraction": (
        [("float[6, 4] gate,", "float[6, 4] gate, float half = {0.5},"),
         ("hidden = Mul (silu, right)", "none = Cast <to = 7> (half)\n    beta = Cast <to = 1> (none)\n"
          "    more = Add (right, beta)\n    hidden = Mul (silu, more)")], "Add is in no activation",
    ),
    "a clamp to nothing": (
        [("float[6, 4] gate,", "float[6, 4] gate, float least = {1}, float most = {-1},"),
         ("left, right =", "left_0, right_0 ="),
         ("sigmoid = Sigmoid (left)", "left = Clip (left_0, , most)\n"
          "    right = Clip (right_0, least, most)\n    sigmoid = Sigmoid (left)")],
        "is clamped to a negative limit, -1",
    ),
    "half of it": ([("hidden = Mul (silu, right)", "hidden = Add (silu, right)")], "Add is in no activation"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_after_fuse(name: str) -> None:
    changes, reason = NEAR_MISSES[name]
    model = apply_passes(model_of(changed(BATCHED, *changes), weights()), ["fuse"]).model
    done = apply_passes(model, ["contrib-moe"])
    assert not done.report.applied and reason in done.report.skipped[0].text


def test_a_limit_that_ends_the_process_is_not_run() -> None:
    model = microsoft("swiglu", **OAI | {"swiglu_limit": -1.0})
    model.doc_string = "something to strip"
    with pytest.raises(moe_onnx.ModelError, match=r"Node 'moe' \(MoE\): swiglu_limit=-1 is negative"):
        moe_onnx.rewrite_model(model, ["strip"])


@pytest.mark.parametrize("given", ["by the call", "by default", "two calls deep", "in a branch"])
def test_a_limit_that_a_function_is_given_is_not_run(given: str) -> None:
    model = microsoft("swiglu", **OAI)
    (node,) = model.graph.node
    attr = next(one for one in node.attribute if one.name == "swiglu_limit")
    attr.CopyFrom(
        onnx.AttributeProto(name="swiglu_limit", type=onnx.AttributeProto.FLOAT, ref_attr_name="at")
    )
    imports = [*model.opset_import, helper.make_opsetid("local", 1)]
    inner = onnx.NodeProto.FromString(node.SerializeToString())
    if given == "in a branch":
        value = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["T", 4])
        yes = helper.make_node("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(np.array(True)))
        graphs = [helper.make_graph([inner], name, [], [value]) for name in ("t", "e")]
        nodes = [yes, helper.make_node("If", ["yes"], ["y"], then_branch=graphs[0], else_branch=graphs[1])]
    else:
        nodes = [inner]
    names = [name for name in node.input if name]
    default = [helper.make_attribute("at", -1.0)] if given == "by default" else []
    attributes = [] if default else ["at"]
    functions = [
        helper.make_function(
            "local", "Layer", names, ["y"], nodes, imports, attributes, attribute_protos=default
        )
    ]
    call = helper.make_node("Layer", names, ["y"], domain="local", **({} if default else {"at": -1.0}))
    if given == "two calls deep":
        call.attribute[0].CopyFrom(onnx.AttributeProto(name="at", type=1, ref_attr_name="of"))
        functions.append(helper.make_function("local", "Outer", names, ["y"], [call], imports, ["of"]))
        call = helper.make_node("Outer", names, ["y"], domain="local", of=-1.0)
    node.CopyFrom(call)
    model.opset_import.append(imports[-1])
    model.functions.extend(functions)
    model.doc_string = "something to strip"
    with pytest.raises(moe_onnx.ModelError, match=r"Node 'moe' \(MoE\): swiglu_limit=-1 is negative"):
        moe_onnx.rewrite_model(model, ["strip"])
    for owner in (node, model.functions[0]):  # a limit of 1 runs
        for one in owner.attribute if owner is node else owner.attribute_proto:
            one.f = 1.0
    assert moe_onnx.rewrite_model(model, ["strip"]).report.verified


@pytest.mark.parametrize(
    ("shape", "experts"), [((), 3), ((1,), 3), ((1, 1), 3), ((6,), 3), ((1, 6), 3), ((), 1)]
)
def test_what_gemm_adds_is_a_bias_or_the_layer_is_left(shape: tuple[int, ...], experts: int) -> None:
    config = {"num_experts": experts, "num_experts_per_tok": min(experts, 2), "expert_bias": True}
    model = moe_onnx.build_training_graph(moe_onnx.MoeLayerConfig(**SIZES | config), assembly="forward").model
    lasts = [n for n in model.graph.node if n.op_type == "Gemm" and n.name.startswith("experts/")][1::2]
    for i, node in enumerate(lasts):
        # Of one expert the rows themselves would fit, too.
        node.input[2] = f"c{i}" if experts > 1 else "dispatch:0"
        added = np.full(shape, i + 0.5, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(added, f"c{i}"))
    done = moe_onnx.rewrite_model(model, ["contrib-moe"])
    assert len(contrib(done.model)) == (shape[-1:] == (6,))
    assert done.changed or "no product of an expert's last weight" in done.report.skipped[0].text


def test_a_wrong_order_of_columns_is_found_by_running(monkeypatch: pytest.MonkeyPatch) -> None:
    right = forms.first_of

    def wrong(e: Any, made: Any, experts: int, *, halves: bool) -> Any:
        return right(e, made, experts, halves=False)

    monkeypatch.setattr(forms, "first_of", wrong)
    model = moe_onnx.build_training_graph(moe_onnx.MoeLayerConfig(**SIZES), assembly="forward").model
    with pytest.raises(moe_onnx.VerificationError, match="output 'output' differs by"):
        moe_onnx.rewrite_model(model, ["contrib-moe"])
