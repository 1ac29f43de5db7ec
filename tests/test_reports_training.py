"""What public bug reports teach on whole training graphs, layers, losses, steps and checkpoints.

Each test is named after the entry of the collection that the other ``test_reports_*`` files follow.
Expected numbers come from hand values, from a dense float64 layer below that runs every expert on every
token, and from laws that hold without any reference.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from golden_cases import Arrays, parameter_shapes, random_parameters, tiny_lm
from report_tools import in_new_process
from routes import FAST, NATIVE
from tiny_graph import TinyGraph

import moe_onnx
from moe_onnx.build.config import QK_NORMS
from moe_onnx.build.moe_options import (
    AUX_LOSSES,
    DISPATCH_MODES,
    DISPATCHES,
    DROP_POLICIES,
    EXPERT_ACTIVATIONS,
    GROUP_SCORES,
    ROUTER_SCORES,
    WEIGHT_PLACES,
    MoeOptions,
)
from moe_onnx.build.recipe import recipe_from_dict
from moe_onnx.errors import CheckpointError, ConfigError, ModelError, NonFiniteError, OptionError
from moe_onnx.spec import DOMAIN

TOLERANCE = 1e-5  # of the largest value of a tensor, for float32 against float64
EVERY = "step+grad+apply+eval+forward"
ADAMW = moe_onnx.AdamW(eps=1e-4)  # a larger eps does not blow rounding up to whole steps
ROUTERS = [("softmax_then_top_k", True), ("softmax_then_top_k", False), ("top_k_then_softmax", True)]
FORMS = pytest.mark.parametrize("unroll", [16, 0], ids=["unrolled", "grouped"])
BOTH = pytest.mark.parametrize("assembly", ["grad+apply", "step"])


def layer(**options: Any) -> moe_onnx.MoeLayerConfig:
    small = {"hidden_size": 6, "num_experts": 4, "moe_intermediate_size": 5}
    return moe_onnx.MoeLayerConfig(**{**small, **options})


def session(model: onnx.ModelProto, kernels: str = FAST, **settings: Any) -> moe_onnx.InferenceSession:
    options = ort.SessionOptions()
    for name, value in {"intra_op_num_threads": 1, **settings}.items():
        setattr(options, name, value)
    return moe_onnx.InferenceSession(model, options, kernels=kernels)


def opened(config: Any, assembly: str = "grad", **settings: Any) -> moe_onnx.InferenceSession:
    return session(moe_onnx.build_training_graph(config, assembly=assembly).model, **settings)


def run(s: Any, feed: Arrays) -> Arrays:
    names = [output.name for output in s.get_outputs()]
    return dict(zip(names, s.run(names, feed), strict=True))


def layer_batch(config: Any, tokens: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    shape = (tokens, config.hidden_size)
    return {n: rng.standard_normal(shape).astype(np.float32) for n in ("hidden_states", "target")}


def lm_batch(config: Any, batch: int, length: int, seed: int = 0) -> Arrays:
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length))
    return {"input_ids": ids, "labels": ids.copy(), "attention_mask": np.ones_like(ids)}


def near(got: Any, want: Any, tolerance: float = TOLERANCE, floor: float = 1e-6) -> None:
    assert got.shape == want.shape
    if want.size:
        gap = np.abs(got.astype(np.float64) - want).max() / max(np.abs(want).max(), floor)
        assert gap <= tolerance, gap


def bits(values: Arrays) -> str:
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


erf = np.vectorize(math.erf, otypes=[np.float64])


def activation(kind: str, x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Of ``[T, E, rows]``, and its gradient as a function of that of its result."""
    if kind == "relu":
        return np.maximum(x, 0), lambda g: g * (x > 0)
    if kind == "gelu":
        cdf = (1 + erf(x / math.sqrt(2))) / 2
        return x * cdf, lambda g: g * (cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))
    gate, up = np.split(x, 2, axis=-1)
    s = 1 / (1 + np.exp(-gate))
    return gate * s * up, lambda g: np.concatenate([g * up * s * (1 + gate * (1 - s)), g * gate * s], -1)


def dense(config: Any, batch: Arrays, params: Arrays) -> Arrays:
    """The layer in float64, every expert on every token: all metrics and gradients, derived by hand."""
    x, target = (batch[n].astype(np.float64) for n in ("hidden_states", "target"))
    first = "experts.gate_up_proj" if config.expert_activation == "swiglu" else "experts.up_proj"
    gate, up, down = (params[n].astype(np.float64) for n in ("gate.weight", first, "experts.down_proj"))
    tokens, experts = len(x), config.num_experts
    logits = x @ gate.T
    probs = softmax(logits) if tokens else logits
    order = np.argsort(-logits, axis=1, kind="stable")[:, : config.num_experts_per_tok]
    chosen = np.zeros((tokens, experts), bool)
    np.put_along_axis(chosen, order, True, axis=1)
    normed = config.router_scores == "top_k_then_softmax" or config.norm_topk_prob
    total = (probs * chosen).sum(1, keepdims=True) if normed else np.ones((tokens, 1))
    weights = probs * chosen / total
    hidden, back = activation(config.expert_activation, np.einsum("th,efh->tef", x, up))
    y = np.einsum("tef,ehf->teh", hidden, down)
    out = np.einsum("te,teh->th", weights, y)
    n = max(tokens, 1)
    load = chosen.sum(0)
    lse = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) if tokens else x[:, 0]
    losses = {
        "mse_loss": ((out - target) ** 2).sum() / max(out.size, 1),
        "aux_loss": experts * (load / n * probs.sum(0) / n).sum(),
        "z_loss": (lse**2).sum() / n,
    }
    aux, z = config.router_aux_loss_coef, config.router_z_loss_coef
    losses["loss"] = losses["mse_loss"] + aux * losses["aux_loss"] + z * losses["z_loss"]
    d_out = 2 * (out - target) / max(out.size, 1)
    d_y = weights[..., None] * d_out[:, None]
    d_weights = np.einsum("th,teh->te", d_out, y)
    if normed:
        d_weights = d_weights - (d_weights * weights).sum(1, keepdims=True)
    d_probs = chosen * d_weights / total + aux * experts * load / n / n
    d_logits = probs * (d_probs - (d_probs * probs).sum(1, keepdims=True))
    d_logits += z * 2 / n * lse[:, None] * probs
    d_up = back(np.einsum("teh,ehf->tef", d_y, down))
    return {
        **{name: np.array(value) for name, value in losses.items()},
        "output": out,
        "expert_load": load[None],
        "gate.weight.grad": d_logits.T @ x,
        f"{first}.grad": np.einsum("tef,th->efh", d_up, x),
        "experts.down_proj.grad": np.einsum("teh,tef->ehf", d_y, hidden),
        "hidden_states.grad": np.einsum("tef,efh->th", d_up, up) + d_logits @ gate,
    }


def check_layer(out: Arrays, want: Arrays) -> None:
    for name, value in out.items():
        if name == "expert_load":
            np.testing.assert_array_equal(value, want[name])
        elif name in want:
            near(value, want[name])
    norm = math.sqrt(sum((v**2).sum() for n, v in want.items() if n.endswith(".grad") and "states" not in n))
    assert float(out["grad_norm"]) == pytest.approx(norm, rel=TOLERANCE, abs=1e-9)


# Layers and routers.


def test_a03_sums_over_many_tokens_stay_exact() -> None:
    """FlagGems #4295: over 2^14 tokens all losses and gradients are as exact as over a few."""
    config = layer(hidden_size=2, moe_intermediate_size=2, router_z_loss_coef=1.0)
    params, feed = random_parameters(config, 0), layer_batch(config, 2**14)
    check_layer(run(opened(config), {**feed, **params}), dense(config, feed, params))


def test_a03_the_norm_of_large_gradients_is_exact() -> None:
    """FlagGems #4295: the norm over a million elements is that of float64, not of a sum that stalls."""
    config = tiny_lm(vocab_size=2**15, hidden_size=32, num_hidden_layers=1)
    params = random_parameters(config, 1)
    out = run(opened(config), {**lm_batch(config, 2, 9), **params})
    squares = [(out[f"{n}.grad"].astype(np.float64) ** 2).sum() for n in params]
    assert float(out["grad_norm"]) == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


def padded_model(unroll: int) -> tuple[onnx.ModelProto, Arrays, list[str], list[str]]:
    """An LM with all losses that also gives the gradients of router logits, and what layers add."""
    config = tiny_lm(router_z_loss_coef=0.1, router_aux_loss_coef=0.1, unroll_experts=unroll)
    model = moe_onnx.build_training_graph(config, assembly="eval").model
    logits = [n.input[0] for n in model.graph.node if n.op_type == "ReduceLogSumExp"]
    added = [n.output[0] for n in model.graph.node if n.op_type == "MoeTokenUnpermuteWithRoutingMap"]
    model = moe_onnx.differentiate(model, loss="loss", wrt=logits)
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in added
    )
    batch = lm_batch(config, 4, 6)
    batch["attention_mask"][1, 3:] = batch["attention_mask"][2] = 0
    batch["attention_mask"][3, :3] = 0
    return model, {**batch, **random_parameters(config, 3)}, logits, added


@FORMS
def test_a11_a53_tokens_left_out_are_zero_and_teach_the_router_nothing(unroll: int) -> None:
    """prime-rl #2035, transformers #37123: half of the tokens padding: they add exactly 0, both ways."""
    model, feed, logits, added = padded_model(unroll)
    s = session(model, "body", intra_op_num_threads=2)
    out = run(s, feed)
    real = feed["attention_mask"].astype(bool).ravel()
    assert len(logits) == len(added) == 2 and real.sum() == 12
    for name in [*added, *(f"{n}.grad" for n in logits)]:
        assert not out[name][~real].any(), name
        assert np.abs(out[name][real]).sum(1).all(), name
    assert out["expert_load"].sum(1).tolist() == [24, 24]
    assert bits(run(s, feed)) == bits(out)


@FORMS
def test_a12_a_bad_token_stays_alone(unroll: int) -> None:
    """vllm-ascend #10579: NaN or inf in one token reaches no other token's output."""
    config = layer(unroll_experts=unroll)
    params, feed = random_parameters(config, 1), layer_batch(config, 9)
    s = opened(config, "forward", kernels="body")
    good = run(s, {"hidden_states": feed["hidden_states"], **params})["output"]
    for bad in (np.nan, np.inf, -np.inf):
        x = feed["hidden_states"].copy()
        x[4] = bad
        out = run(s, {"hidden_states": x, **params})["output"]
        near(np.delete(out, 4, 0), np.delete(good, 4, 0))
        assert np.isnan(out[4]).all()


@FORMS
def test_a13_a41_a54_one_graph_runs_every_routing(unroll: int) -> None:
    """vllm-ascend #9170, onnxruntime #8146, transformers #40114: empty experts, 0, 1 and 2^k±1 tokens."""
    experts = 5
    config = layer(num_experts=experts, num_experts_per_tok=1, unroll_experts=unroll, router_z_loss_coef=0.1)
    model = moe_onnx.build_training_graph(config, assembly="grad").model
    assert not {n.op_type for n in model.graph.node} & {"If", "Loop", "Scan", "NonZero"}
    s, params = session(model, "body"), random_parameters(config, 2)
    all_last = {**params, "gate.weight": np.zeros_like(params["gate.weight"])}
    all_last["gate.weight"][-1] = 3
    for tokens in (33, 0, 1, 2, 3, 31, 32):
        feed = layer_batch(config, tokens, seed=tokens)
        check_layer(run(s, {**feed, **params}), dense(config, feed, params))
        feed["hidden_states"] = np.abs(feed["hidden_states"])
        out = run(s, {**feed, **all_last})
        check_layer(out, dense(config, feed, all_last))
        assert out["expert_load"].tolist() == [[0] * (experts - 1) + [tokens]]
        for name in ("experts.gate_up_proj.grad", "experts.down_proj.grad"):
            assert not out[name][:-1].any()


def test_a15_a_token_does_not_see_later_tokens_nor_other_sequences() -> None:
    """Megatron-LM #1421: logits of a truncated text are those of the whole one, whatever follows."""
    config = tiny_lm(num_key_value_heads=2)
    s, params = opened(config, "forward"), random_parameters(config, 4)
    batch = lm_batch(config, 3, 40)
    feed = {n: batch[n] for n in ("input_ids", "attention_mask")}
    whole = run(s, {**feed, **params})["logits"]
    other = copy.deepcopy(feed)
    other["input_ids"][:, 9:] = (other["input_ids"][:, 9:] + 7) % config.vocab_size
    near(run(s, {**other, **params})["logits"][:, :9], whole[:, :9])
    near(run(s, {**{n: v[:, :9] for n, v in feed.items()}, **params})["logits"], whole[:, :9])
    near(run(s, {**{n: v[1:2] for n, v in feed.items()}, **params})["logits"], whole[1:2])


SIZES = [  # experts, top_k, hidden, inner
    (1, 1, 7, 3),
    (3, 3, 1, 1),
    (7, 6, 7, 9),
    (64, 3, 5, 1),
    (65, 6, 7, 3),
    (65, 1, 1, 2),
]


@pytest.mark.parametrize(("experts", "top_k", "hidden", "inner"), SIZES)
def test_a01_a18_odd_sizes(experts: int, top_k: int, hidden: int, inner: int) -> None:
    """TransformerEngine #1336, vLLM #14568: sizes that are no powers of two, against float64."""
    config = layer(
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        router_z_loss_coef=0.01,
    )
    s, params = opened(config), random_parameters(config, experts)
    for tokens in (1, 129):
        feed = layer_batch(config, tokens)
        check_layer(run(s, {**feed, **params}), dense(config, feed, params))


@pytest.mark.parametrize(
    ("kind", "scores", "norm"),
    [("relu", *ROUTERS[0]), ("gelu", *ROUTERS[1]), ("relu", *ROUTERS[2]), ("swiglu", *ROUTERS[2])],
)
def test_a20_what_builds_also_trains(kind: str, scores: str, norm: bool) -> None:
    """Primus-Turbo #328: each activation and router goes through forward, backward and an update."""
    config = layer(expert_activation=kind, router_scores=scores, norm_topk_prob=norm, router_z_loss_coef=0.01)
    graph = moe_onnx.build_training_graph(config, optimizer=moe_onnx.SGD(max_grad_norm=None))
    train = moe_onnx.TrainingSession(graph, lr=0.1, parameters=random_parameters(config, 5))
    feed, before = layer_batch(config, 17), train.parameters()
    metrics, want = train.step(feed), dense(config, feed, before)
    assert metrics["loss"] == pytest.approx(float(want["loss"]), rel=TOLERANCE)
    for name, value in train.parameters().items():
        near(value - before[name], -0.1 * want[f"{name}.grad"], 1e-4)


@pytest.mark.parametrize(
    ("scores", "norm", "weights"),
    [
        ("softmax_then_top_k", False, [0, 0.23688, 0.64391, 0]),
        ("softmax_then_top_k", True, [0, 0.26894, 0.73106, 0]),
        ("top_k_then_softmax", True, [0, 0.26894, 0.73106, 0]),
        ("top_k_then_softmax", False, [0, 0.26894, 0.73106, 0]),
    ],
)
def test_a50_softmax_before_or_after_top_k(scores: str, norm: bool, weights: list[float]) -> None:
    """Megatron-LM #955: the weights of logits [1, 2, 3, 0], K = 2, and their gradients."""
    config = layer(
        hidden_size=4,
        moe_intermediate_size=1,
        expert_activation="relu",
        router_scores=scores,
        norm_topk_prob=norm,
        router_aux_loss_coef=0.0,
    )
    params = {  # logits are the token itself, and expert e gives unit vector e
        "gate.weight": np.eye(4, dtype=np.float32),
        "experts.up_proj": np.zeros((4, 1, 4), np.float32),
        "experts.down_proj": np.eye(4, dtype=np.float32)[:, :, None],
    }
    params["experts.up_proj"][:, 0, 0] = 1
    feed = {"hidden_states": np.array([[1, 2, 3, 0]], np.float32), "target": np.zeros((1, 4), np.float32)}
    seen = opened(config, "forward")
    output = run(seen, {"hidden_states": feed["hidden_states"], **params})["output"]
    np.testing.assert_allclose(output, [weights], atol=6e-6)
    out = run(opened(config), {**feed, **params})
    for name in (*params, "hidden_states"):  # the quotients are of the formula alone, in float64
        values = {n: v.astype(np.float64) for n, v in {**feed, **params}.items()}
        slope = np.zeros(values[name].shape)
        for at in np.ndindex(slope.shape):
            up, down = (copy.deepcopy(values) for _ in range(2))
            up[name][at] += 1e-6
            down[name][at] -= 1e-6
            slope[at] = (dense(config, up, up)["loss"] - dense(config, down, down)["loss"]) / 2e-6
        np.testing.assert_allclose(out[f"{name}.grad"], slope, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in AUX_LOSSES if kind != "sequence"])
def test_a51_the_balancing_loss_has_one_softmax(kind: str) -> None:
    """transformers #45120: all tokens at expert 0 of 8: loss 8 p0, gradient that of a single softmax."""
    config = layer(num_experts=8, num_experts_per_tok=1, router_aux_loss=kind, router_aux_loss_coef=1.0)
    params = random_parameters(config, 6)
    params["gate.weight"] *= 0.1
    params["gate.weight"][0] = 0.2
    x = np.abs(layer_batch(config, 12)["hidden_states"]) + np.float32(0.5)
    output = run(opened(config, "forward"), {"hidden_states": x, **params})["output"]
    before = {"expert_load_before": np.array([[5] + [0] * 7])} if kind == "global" else {}
    out = run(opened(config), {"hidden_states": x, "target": output, **params, **before})  # no other gradient
    p = softmax(x.astype(np.float64) @ params["gate.weight"].T)
    assert out["expert_load"].tolist() == [[12] + [0] * 7]
    assert out["mse_loss"] <= 1e-12
    assert float(out["aux_loss"]) == pytest.approx(8 * p[:, 0].mean(), rel=TOLERANCE)
    slope = 8 / 12 * (p[:, :1] * (np.eye(8)[0] - p)).T @ x
    assert np.abs(slope).max() > 0.1
    near(out["gate.weight.grad"], slope)


@pytest.mark.parametrize("kind", AUX_LOSSES)
def test_a51_a43_a_router_without_an_opinion(kind: str) -> None:
    """transformers #45120, onnx #3501: equal logits take experts 0..K-1; losses K or 1, and log(E)^2."""
    config = tiny_lm(
        num_experts=5,
        num_experts_per_tok=3,
        router_aux_loss=kind,
        router_z_loss_coef=1.0,
        router_aux_loss_coef=0.25,
    )
    params = random_parameters(config, 7)
    for name, value in params.items():
        if name.endswith("gate.weight"):
            value[...] = 0
    batch = lm_batch(config, 3, 7)
    batch["attention_mask"][0, 2:] = 0
    if kind == "global":
        batch["expert_load_before"] = np.array([[7, 0, 0, 0, 1]] * 2)
    out = run(opened(config, "eval"), {**batch, **params})
    assert out["expert_load"].tolist() == [[16, 16, 16, 0, 0]] * 2
    assert float(out["aux_loss"]) == pytest.approx(3 if kind in ("pooled", "per_layer") else 1, rel=1e-6)
    assert float(out["z_loss"]) == pytest.approx(math.log(5) ** 2, rel=1e-6)
    total = out["lm_loss"] + 0.25 * out["aux_loss"] + out["z_loss"]
    assert float(out["loss"]) == pytest.approx(float(total), rel=1e-6)


@pytest.mark.parametrize(("scores", "unroll"), [(ROUTER_SCORES[0], 16), (ROUTER_SCORES[1], 0)])
def test_a52_negative_logits_lose_to_no_zero(scores: str, unroll: int) -> None:
    """DeepSpeed #7986: all logits far below 0: no token is dropped, and the order is that of logits."""
    config = layer(router_scores=scores, unroll_experts=unroll, num_experts_per_tok=2)
    params = random_parameters(config, 8)
    for name in ("experts.gate_up_proj", "experts.down_proj"):  # one expert four times
        params[name][:] = params[name][0]
    params["gate.weight"] = np.repeat(np.float32([[-40], [-10], [-30], [-11]]), 6, axis=1)
    feed = layer_batch(config, 21)
    feed["hidden_states"] = np.abs(feed["hidden_states"]) + np.float32(0.1)
    out = run(opened(config), {**feed, **params})
    assert out["expert_load"].tolist() == [[0, 21, 0, 21]]
    alone = dense(layer(num_experts=1, num_experts_per_tok=1), feed, {n: v[:1] for n, v in params.items()})
    output = run(opened(config, "forward"), {"hidden_states": feed["hidden_states"], **params})["output"]
    near(output, alone["output"])  # weights sum to 1 over the chosen ones


@pytest.mark.parametrize(("scores", "norm"), ROUTERS)
def test_a44_extreme_logits_are_finite(scores: str, norm: bool) -> None:
    """vLLM #39391, SGLang #30079: logits of any size give distinct experts, and no NaN either way."""
    config = layer(router_scores=scores, norm_topk_prob=norm, router_z_loss_coef=1e-4)
    s, params, feed = opened(config), random_parameters(config, 9), layer_batch(config, 15)
    for scale in (1e2, 1e4):
        params["gate.weight"] *= np.float32(scale)
        out, want = run(s, {**feed, **params}), dense(config, feed, params)
        assert out["expert_load"].sum() == 30
        assert all(np.isfinite(value).all() for value in out.values())
        # Probabilities that are 0 in float32 tie, so that the second expert may be another, of weight 0.
        tied = scores == "softmax_then_top_k"
        for name in ("mse_loss", "z_loss") if tied else want.keys() & out.keys():
            near(out[name], want[name])


@pytest.mark.parametrize(
    ("scores", "assembly"), [*zip(ROUTER_SCORES, ("step", "grad+apply", "step"), strict=True)]
)
def test_a43_a44_a_router_that_is_not_finite_is_caught(scores: str, assembly: str) -> None:
    """onnx #3501, vLLM #39391: NaN and infinite logits end in an error before anything is updated."""
    graph = moe_onnx.build_training_graph(layer(router_scores=scores), assembly=assembly)
    train, feed = moe_onnx.TrainingSession(graph), layer_batch(layer(), 8)
    good = train.state_dict()
    infinite = [(np.inf, 0), (-np.inf, slice(None)), (3e38, 2)]  # which a sigmoid takes
    for bad, rows in [(np.nan, 1), (np.nan, slice(None)), *(infinite if scores != "sigmoid" else [])]:
        state = copy.deepcopy(good)
        state["gate.weight"][rows] = bad
        train.load_state_dict(state)
        with pytest.raises(NonFiniteError, match=r"Update 1: the loss is (nan|inf)"):
            train.step(feed)
        assert bits(train.state_dict()) == bits(state)
    train.load_state_dict(good)
    assert train.step(feed)["step"] == 1


def test_a43_more_choices_than_experts_are_refused() -> None:
    """onnx #3501: top_k past the experts is an error of the config, not of TopK."""
    with pytest.raises(ConfigError, match=r"'num_experts_per_tok' must be at most num_experts \(4\), got 5"):
        layer(num_experts_per_tok=5)


# Steps.


def small_lm(unroll: int = 16, **options: Any) -> Any:
    return tiny_lm(num_hidden_layers=1, num_key_value_heads=2, unroll_experts=unroll, **options)


def trainer(config: Any, assembly: str = "grad+apply", **options: Any) -> moe_onnx.TrainingSession:
    optimizer = options.pop("optimizer", ADAMW)
    graph = moe_onnx.build_training_graph(config, assembly=assembly, optimizer=optimizer)
    settings = {"lr": 1e-2, "parameters": random_parameters(config, 0), **options}
    return moe_onnx.TrainingSession(graph, **settings)


def test_a14_all_kernels_train_alike() -> None:
    """pytorch/ao #4825: Python kernels, native kernels and function bodies are one training."""
    config = small_lm()
    runs = [trainer(config, kernels=kernels) for kernels in ("python", "body", *NATIVE)]
    for number in range(3):
        first, *others = (t.step(lm_batch(config, 2, 9, number)) for t in runs)
        for other in others:
            assert first["loss"] == pytest.approx(other["loss"], rel=1e-6)
            np.testing.assert_array_equal(first["expert_load"], other["expert_load"])
    for name, value in runs[0].parameters().items():
        for run in runs[1:]:
            near(value, run.parameters()[name])


@FORMS
def test_a16_ten_steps_do_not_depend_on_the_numbering_of_experts(unroll: int) -> None:
    """Megatron-LM #1327, #1603: renumbered experts train to the same losses."""
    config = small_lm(unroll)
    order = np.array([2, 0, 3, 1])
    params = random_parameters(config, 1)
    moved = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    other = {n: v[order] if n.endswith(moved) else v for n, v in params.items()}
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply", optimizer=ADAMW)
    runs = [moe_onnx.TrainingSession(graph, parameters=p, lr=1e-3) for p in (params, other)]
    for number in range(10):
        batch = lm_batch(config, 3, 8, number)
        first, renumbered = (t.step(batch) for t in runs)
        assert renumbered["loss"] == pytest.approx(first["loss"], rel=1e-6)


@FORMS
def test_a17_forty_repeats_of_a_step_give_one_result(unroll: int) -> None:
    """unsloth-zoo #1258: metrics, parameters and state have the same bytes every time."""
    config = small_lm(unroll)
    graph = moe_onnx.build_training_graph(config)
    s = session(graph.model, "body", intra_op_num_threads=2)
    state = {i.name: np.zeros(i.shape, np.float32) for i in graph.manifest.graphs["step"].inputs_of("state")}
    hyper = {"lr": np.array(0.01, np.float32), "step": np.array(1)}
    feed = {**lm_batch(config, 4, 33), **random_parameters(config, 2), **state, **hyper}
    assert len({bits(run(s, feed)) for _ in range(40)}) == 1


@BOTH
def test_a36_bound_steps_equal_plain_runs(assembly: str) -> None:
    """onnxruntime #21888, #8144: state rebound at every step, sizes changing, equals plain runs."""
    config = small_lm()
    graph = moe_onnx.build_training_graph(config, assembly=assembly, optimizer=ADAMW)
    names = graph.manifest.parameter_names
    params: Arrays = random_parameters(config, 0)
    state = {n: np.zeros(shape, np.float32) for n, shape in graph.manifest.state_inputs.items()}
    train = moe_onnx.TrainingSession(graph, lr=1e-2, parameters=params, kernels=FAST)
    plain = {name: session(model) for name, model in graph.models.items()}
    kept = []
    for number, (batch, length) in enumerate([(2, 9), (3, 4), (1, 17), (2, 9)], 1):
        feed = lm_batch(config, batch, length, number)
        metrics = train.step(feed)
        hyper = {"lr": np.array(1e-2, np.float32), "step": np.array(number)}
        if assembly == "step":
            out = run(plain["step"], {**feed, **params, **state, **hyper})
            new = out
        else:
            out = run(plain["grad"], {**feed, **params})
            grads = {n: v for n, v in out.items() if n == "grad_norm" or n.endswith(".grad")}
            new = run(plain["apply"], {**params, **state, **hyper, **grads})
        params, state = ({n: new[f"{n}.updated"] for n in group} for group in (params, state))
        assert metrics["loss"] == float(out["loss"])
        kept.append((metrics["expert_load"], metrics["expert_load"].copy()))
        found = train.state_dict()
        assert found.pop("step") == number
        assert bits(found) == bits({n: {**params, **state}[n] for n in found})
    assert set(names) == set(params)
    assert all(np.array_equal(given, then) for given, then in kept)  # what was handed out stays


def test_a35_batches_of_any_strides_in_reused_buffers() -> None:
    """onnxruntime #13548: views are read as what they show, and a buffer may be filled anew."""
    config = layer()
    plain, odd = (trainer(config, "grad+apply+forward") for _ in range(2))
    room = np.zeros((2, 40, 3, 12), np.float32)
    given = []
    for number in range(3):
        feed = layer_batch(config, 10, number)
        x, target = room[0, ::4, 1, ::2], room[1, ::-4, 2, 11::-2]
        x[...], target[...] = feed["hidden_states"], feed["target"]
        before = room.copy()
        assert odd.step({"hidden_states": x, "target": target})["loss"] == plain.step(feed)["loss"]
        assert np.array_equal(room, before)
        output = odd.forward({"hidden_states": x})["output"]
        given.append((output, output.copy()))
    assert bits(odd.state_dict()) == bits(plain.state_dict())
    turned = {n: np.asarray(v, order="F") for n, v in plain.state_dict().items()}
    odd.load_state_dict(turned)
    assert bits(odd.state_dict()) == bits(plain.state_dict())
    assert all(np.array_equal(a, b) for a, b in given)


def test_a35_checkpoints_of_strided_parameters(tmp_path: Path) -> None:
    """onnxruntime #13548: parameters given as views are saved as what they show."""
    config = layer()
    values = random_parameters(config, 3)
    views = {n: np.ascontiguousarray(v.T).T for n, v in values.items()}
    train = trainer(config, parameters=views)
    train.save_checkpoint(tmp_path)
    other = trainer(config)
    other.load_checkpoint(tmp_path)
    assert bits(other.parameters()) == bits({n: values[n] for n in other.parameters()})


def test_a33_sessions_of_one_graph_in_threads() -> None:
    """onnxruntime #3280, #4600: four threads, each with a session of its own, train to the same bits."""
    config = layer()
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply")
    found: list[Any] = [None] * 4

    def work(slot: int) -> None:
        train = moe_onnx.TrainingSession(graph)
        for number in range(8):
            train.step(layer_batch(config, 5 + number, number))
        found[slot] = bits(train.state_dict())

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None and len(set(found)) == 1


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a34_a_training_session_says_that_it_cannot_be_copied(duplicate: Callable[[Any], Any]) -> None:
    """onnxruntime #5093: a copy that shared state would be two counters of one training."""
    train = moe_onnx.TrainingSession(TinyGraph())
    with pytest.raises(TypeError, match=r"TrainingSession cannot be pickled or copied.*state_dict"):
        duplicate(train)


@pytest.mark.parametrize(("unroll", "assembly"), [(16, "grad+apply"), (0, "step")])
def test_a41_experts_without_tokens_stay_where_they_are(unroll: int, assembly: str) -> None:
    """onnxruntime #8146, #26041: without tokens an expert changes by its weight decay, and by nothing."""
    config = layer(num_experts_per_tok=1, unroll_experts=unroll, router_aux_loss_coef=0.0)
    params = random_parameters(config, 4)
    params["gate.weight"][:] = 0
    train = trainer(config, assembly, parameters=params, optimizer=moe_onnx.AdamW(weight_decay=0.5))
    for _ in range(2):
        train.step(layer_batch(config, 7))
    after, kept = train.parameters(), np.float32(1) - np.float32(1e-2) * np.float32(0.5)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        np.testing.assert_array_equal(after[name][1:], params[name][1:] * kept * kept)
        assert (after[name][0] != params[name][0] * kept * kept).any()


def test_a41_an_update_without_any_gradient() -> None:
    """onnxruntime #8146: no tokens at all: loss 0, norm 0, and parameters as they were, not NaN."""
    config = small_lm(router_aux_loss_coef=0.0)
    for optimizer in (moe_onnx.AdamW(weight_decay=0.0), moe_onnx.SGD(momentum=0.9)):
        train = trainer(config, optimizer=optimizer)
        before = bits(train.parameters())
        metrics = train.step({**lm_batch(config, 2, 5), "attention_mask": np.zeros((2, 5), np.int64)})
        assert (metrics["loss"], metrics["grad_norm"], metrics["num_tokens"]) == (0, 0, 0)
        assert bits(train.parameters()) == before


LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


def test_a45_every_optimisation_level_takes_the_same_step() -> None:
    """onnxruntime #17565, #29235: no level fails to load, drops a cast or changes a number."""
    config = small_lm(router_z_loss_coef=0.1)
    found = []
    for level in LEVELS:
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        train = trainer(config, "step", sess_options=options, optimizer=ADAMW)
        losses = [train.step(lm_batch(config, 2, 8, number))["loss"] for number in range(2)]
        found.append((losses, train.state_dict()))
    for losses, state in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        for name, value in state.items():
            near(value, found[0][1][name], 5e-5)


# Models as files.

MODELS = {
    "lm": tiny_lm(router_z_loss_coef=0.1, mlp_only_layers=(0,)),
    "layer": layer(unroll_experts=0),
}
of_models = pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))


@of_models
def test_a28_declared_shapes_and_dtypes_are_those_of_the_run(
    config: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime #14683, extensions #922: at three sizes, for model and manifest, without a warning."""
    graph = moe_onnx.build_training_graph(config, assembly=EVERY)
    params = random_parameters(config, 0)
    state = {n: np.zeros(shape, np.float32) for n, shape in graph.manifest.state_inputs.items()}
    scalars = {"lr": np.array(0.1, np.float32), "step": np.array(1), "grad_norm": np.array(1, np.float32)}
    everything = {**params, **state, **scalars, **{f"{n}.grad": v for n, v in params.items()}}
    for name, model in graph.models.items():
        options = ort.SessionOptions()
        options.log_severity_level = 2
        s = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        info = graph.manifest.graphs[name]
        assert [i.name for i in s.get_inputs()] == [i.name for i in info.inputs]
        assert [o.name for o in s.get_outputs()] == [o.name for o in info.outputs]
        for batch, length in ((1, 2), (3, 5), (2, 16)):
            sizes = {"batch": batch, "sequence": length, "tokens": batch * length}
            made = layer_batch(config, batch * length) if "vocab_size" not in vars(config) else None
            feed = {**everything, **(lm_batch(config, batch, length) if made is None else made)}
            values = s.run(None, {i.name: feed[i.name] for i in info.inputs})
            for value, declared in zip(values, info.outputs, strict=True):
                assert value.shape == tuple(sizes.get(str(d), d) for d in declared.shape), declared.name
                assert value.dtype == declared.dtype
                assert value.dtype.kind != "f" or np.isfinite(value).all(), declared.name
    logged = capfd.readouterr()
    assert "VerifyOutputSizes" not in logged.err + logged.out and "[W:" not in logged.err


@of_models
def test_a46_a47_a58_models_are_pinned_sorted_and_whole(config: Any) -> None:
    """onnx #5701, #3533, onnxruntime #20559: versions, imports, unique names, order, nothing unused."""
    graph = moe_onnx.build_training_graph(config, assembly=EVERY)
    for name, model in graph.models.items():
        onnx.checker.check_model(model, full_check=True)
        assert model.ir_version == 10
        imports = {i.domain: i.version for i in model.opset_import}
        assert imports == ({"": 21} if name == "apply" and DOMAIN not in imports else {"": 21, DOMAIN: 1})
        bodies = {f.name for f in model.functions if f.domain == DOMAIN}
        for function in model.functions:
            used = {node.domain for node in function.node}
            versions = {i.domain: i.version for i in function.opset_import}
            assert used <= set(versions)
            assert versions.items() <= imports.items()
        ours = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
        assert {node.domain for node in model.graph.node} <= {"", DOMAIN}
        assert ours <= bodies and bodies <= ours | {n.op_type for f in model.functions for n in f.node}
        assert not model.graph.initializer or max(len(i.raw_data) for i in model.graph.initializer) < 1024
        names = [node.name for node in model.graph.node]
        assert all(names) and len(set(names)) == len(names)
        known = [i.name for i in (*model.graph.input, *model.graph.initializer)]
        made = [out for node in model.graph.node for out in node.output if out]
        assert len({*known, *made}) == len(known) + len(made)
        seen, read = set(known), {o.name for o in model.graph.output}
        for node in model.graph.node:
            assert {i for i in node.input if i} <= seen, node.name
            seen.update(node.output)
            read.update(node.input)
        for node in model.graph.node:
            assert set(node.output) & read, f"{name}: nothing reads {node.name}"
        assert {i.name for i in model.graph.input} <= read


def digests() -> dict[str, str]:
    found = {}
    for name, config in (("lm", small_lm(router_z_loss_coef=0.1)), ("layer", layer(unroll_experts=0))):
        graph = moe_onnx.build_training_graph(config, assembly="step+eval")
        found[name] = bits(
            {n: np.frombuffer(m.SerializeToString(), np.uint8) for n, m in graph.models.items()}
        )
        found[f"{name} parameters"] = bits(graph.init_parameters(3))
    return found


def test_a54_a16_builds_are_the_same_bytes_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers #40114: names and nodes depend on the config alone, not on hashes or history."""
    code = "import test_reports_training as t; import report_tools; report_tools.report(t.digests())"
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    there, _ = in_new_process(code)
    assert there == digests()


def test_a48_many_layers_and_experts(tmp_path: Path) -> None:
    """onnxruntime #20354: 4 layers of 128 experts load in seconds, and optimise to a valid model."""
    config = tiny_lm(num_experts=128, num_hidden_layers=4)
    model = moe_onnx.build_training_graph(config, assembly="grad").model
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    s = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {**lm_batch(config, 2, 5), **random_parameters(config, 0)}
    done = onnx.load(tmp_path / "optimised.onnx")
    names = [out for node in done.graph.node for out in node.output if out]
    assert len(names) == len(set(names))
    again = session(done)
    assert bits(run(again, feed)) == bits(run(s, feed))


STOCK = """
import json, sys
sys.modules["moe_onnx"] = sys.modules["onnxruntime_extensions"] = sys.modules["onnxruntime.training"] = None
import numpy as np, onnxruntime as ort
s = ort.InferenceSession(sys.argv[1])
feed = dict(np.load(sys.argv[2]))
loss = s.run(["loss"], {i.name: feed[i.name] for i in s.get_inputs()})[0]
print(json.dumps(float(loss)))
"""


def test_a49_a66_a_step_runs_on_stock_onnxruntime(tmp_path: Path) -> None:
    """onnx #4536, onnxruntime #24905: no training op, no training build, nothing of ours at run time."""
    config = small_lm(router_z_loss_coef=0.1)
    graph = moe_onnx.build_training_graph(config)
    folder = graph.save(tmp_path)
    state = {n: np.zeros(shape, np.float32) for n, shape in graph.manifest.state_inputs.items()}
    hyper = {"lr": np.array(0.1, np.float32), "step": np.array(1)}
    feed = {**lm_batch(config, 2, 5), **random_parameters(config, 0), **state, **hyper}
    np.savez(tmp_path / "feed.npz", **feed)
    loss, _ = in_new_process(STOCK, str(folder / "step.onnx"), str(tmp_path / "feed.npz"))
    assert loss == pytest.approx(float(run(session(graph.model), feed)["loss"]), rel=1e-6)
    package = Path(moe_onnx.__file__).parent
    assert not [p for p in package.rglob("*.py") if "onnxruntime.training" in p.read_text("utf-8")]


def test_a37_a39_folders_move_and_are_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime #6696, onnx #3157: save, load, save elsewhere, delete the first, run from anywhere."""
    graph = moe_onnx.build_training_graph(layer(), assembly=EVERY)
    first = graph.save(tmp_path / "a" / "one")
    monkeypatch.chdir(tmp_path)
    second = moe_onnx.TrainingGraph.load(Path("a/one")).save("b")
    shutil.rmtree(first)
    assert sorted(p.name for p in Path("b").iterdir()) == sorted(
        [*(f"{name}.onnx" for name in EVERY.split("+")), "manifest.json"]
    )
    loaded = moe_onnx.TrainingGraph.load(second)
    assert loaded.manifest == graph.manifest
    for name, model in loaded.models.items():
        assert model == graph.models[name]
    monkeypatch.chdir("/")
    train = moe_onnx.TrainingSession(tmp_path / "b", seed=1)
    assert bits(train.parameters()) == bits(graph.init_parameters(1))
    train.step(layer_batch(layer(), 5))


@pytest.mark.parametrize("name", ["../other", "..", ".", "", "a/b", "{root}/other"])
def test_a60_a_checkpoint_is_looked_for_in_its_own_folder(name: str, tmp_path: Path) -> None:
    """nncf #3443: a pointer that leads out of the folder is refused, whatever is there."""
    train = moe_onnx.TrainingSession(TinyGraph())
    saved = train.save_checkpoint(tmp_path / "x")
    shutil.copytree(saved, tmp_path / "other")
    shutil.copytree(saved, tmp_path / "x" / "a" / "b")
    (tmp_path / "x" / "latest").write_text(name.format(root=tmp_path))
    with pytest.raises(CheckpointError, match="latest: names "):
        train.load_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("name", ["../grad", "/grad", "", "a/grad"])
def test_a60_a_saved_graph_names_files_of_its_own_folder(name: str, tmp_path: Path) -> None:
    """nncf #3443: a manifest whose graphs are elsewhere is refused by name."""
    folder = moe_onnx.build_training_graph(layer(), assembly="grad").save(tmp_path / "x")
    data = json.loads((folder / "manifest.json").read_text())
    data["graphs"][name] = data["graphs"].pop("grad")
    (folder / "manifest.json").write_text(json.dumps(data))
    shutil.copy(folder / "grad.onnx", tmp_path)
    with pytest.raises(ModelError, match=re.escape(f"{name!r}")):
        moe_onnx.TrainingGraph.load(folder)


WORDS: list[tuple[str, Callable[[Any], Any], tuple[str, ...]]] = [
    ("expert_activation", lambda v: layer(expert_activation=v), EXPERT_ACTIVATIONS),
    ("router_scores", lambda v: layer(router_scores=v), ROUTER_SCORES),
    ("group_score", lambda v: layer(group_score=v), GROUP_SCORES),
    ("dispatch", lambda v: layer(dispatch=v), DISPATCHES),
    ("token_drop_policy", lambda v: layer(token_drop_policy=v), DROP_POLICIES),
    ("router_weights_on", lambda v: layer(router_weights_on=v), WEIGHT_PLACES),
    ("router_aux_loss", lambda v: tiny_lm(router_aux_loss=v), AUX_LOSSES),
    ("qk_norm", lambda v: tiny_lm(qk_norm=v), QK_NORMS),
    (
        "assembly",
        lambda v: moe_onnx.build_training_graph(layer(), assembly=v),
        ("step", "grad", "apply", "eval", "forward"),
    ),
    ("kind", lambda v: recipe_from_dict({"model": {"kind": v}}), ("MoeLMConfig", "MoeLayerConfig")),
    ("kind", lambda v: recipe_from_dict({"optimizer": {"kind": v}}), ("AdamW", "SGD")),
    ("non_finite", lambda v: moe_onnx.TrainingSession(TinyGraph(), non_finite=v), ("raise", "skip")),
    (
        "kernels",
        lambda v: moe_onnx.TrainingSession(TinyGraph(), kernels=v),
        ("auto", "native", "python", "body"),
    ),
]


@pytest.mark.parametrize("value", ["prob", "", None, 1, "STEP"], ids=repr)
@pytest.mark.parametrize(("name", "make", "legal"), WORDS, ids=[f"{i}-{w[0]}" for i, w in enumerate(WORDS)])
def test_a61_a_wrong_word_lists_the_legal_ones(
    name: str, make: Callable[[Any], Any], legal: tuple[str, ...], value: Any
) -> None:
    """Megatron-LM #812, #815: every string option is checked at once, and every listed word works."""
    with pytest.raises((ConfigError, OptionError)) as caught:
        make(value)
    assert name in str(caught.value) and repr(value) in str(caught.value)
    for word in legal:
        assert word in str(caught.value)
        if value == "":
            make(word)


def test_a61_documented_defaults_are_legal() -> None:
    """Megatron-LM #812: what the documentation says a field may be is what the check takes."""
    text = " ".join((MoeOptions.__doc__ or "").split()) + str(moe_onnx.MoeLMConfig.__doc__)
    words = (*EXPERT_ACTIVATIONS, *ROUTER_SCORES, *AUX_LOSSES, *QK_NORMS, *DISPATCHES, *DISPATCH_MODES)
    for word in (*words, *DROP_POLICIES, *GROUP_SCORES, *WEIGHT_PLACES):
        assert f'"{word}"' in text
    for config in (moe_onnx.MoeLayerConfig(), moe_onnx.MoeLMConfig()):
        assert type(config).from_dict(config.to_dict()) == config
        assert {p: v.shape for p, v in random_parameters(config, 0).items()} == parameter_shapes(config)
