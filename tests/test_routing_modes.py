"""Every router in every mode of dispatch: loops over tokens, finite differences, dropped tokens, padding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from routes import FAST, one_thread

import moe_onnx
from moe_onnx.build.parameters import parameters_of
from moe_onnx.rewrite.to_float64 import to_float64

Arrays = dict[str, np.ndarray[Any, Any]]
TOLERANCE = 2e-6  # of the largest value, for float32 sums in another order
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, not renormalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "top-k first": {"router_scores": "top_k_then_softmax"},
    "sigmoid": {"router_scores": "sigmoid", "norm_topk_prob": False},
    "sigmoid, bias, groups": {
        "router_scores": "sigmoid",
        "router_selection_bias": True,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "groups by the largest": {"n_group": 3, "topk_group": 2, "group_score": "max"},
}
PLACES = ("combine", "experts")
FORMS = list(itertools.product(PLACES, (0, 16), (False, True)))  # weights on, unrolled experts, biases
MODES: dict[str, dict[str, Any]] = {
    "init_routing, dropless": {},
    "init_routing, active": {"dispatch_mode": "active", "active_num": 13},
    "routing_map, dropless": {"dispatch": "routing_map"},
    **{
        f"{kind}, {policy}": {
            "dispatch": kind,
            "dispatch_mode": "drop_pad",
            "expert_capacity": 3,
            "token_drop_policy": policy,
        }
        for kind in ("init_routing", "routing_map")
        for policy in ("probs", "position")
    },
}
DROPPING = [name for name, options in MODES.items() if "dispatch_mode" in options]
TOKENS, HIDDEN = 11, 6


def layer(**options: Any) -> moe_onnx.MoeLayerConfig:
    small = {"hidden_size": HIDDEN, "num_experts": 6, "moe_intermediate_size": 5, "expert_activation": "relu"}
    return moe_onnx.MoeLayerConfig(**{**small, "router_aux_loss_coef": 0.0, **options})


def lm(**options: Any) -> moe_onnx.MoeLMConfig:
    small = {"vocab_size": 29, "hidden_size": 8, "num_attention_heads": 2, "num_experts": 6}
    return moe_onnx.MoeLMConfig(**{**small, "moe_intermediate_size": 5, **options})


def random_parameters(config: Any, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        p.name: np.float32((p.init == "ones") + 0.4 * rng.standard_normal(p.shape))
        for p in parameters_of(config)
    }


def lm_batch(config: Any, batch: int, length: int, seed: int = 0) -> Arrays:
    """No token occurs twice, so that no two tokens tie but for rounding."""
    ids = np.random.default_rng(seed).permutation(config.vocab_size)[: batch * length].reshape(batch, length)
    return {"input_ids": ids, "labels": ids.copy(), "attention_mask": np.ones_like(ids)}


def layer_feed(config: Any, seed: int = 0, tokens: int = TOKENS) -> Arrays:
    rng = np.random.default_rng(seed)
    names = ("hidden_states", "target")
    feed = {n: rng.standard_normal((tokens, HIDDEN)).astype(np.float32) for n in names}
    return {**feed, **random_parameters(config, seed)}


def opened(config: Any, assembly: str = "grad", kernels: str = FAST) -> moe_onnx.InferenceSession:
    model = moe_onnx.build_training_graph(config, assembly=assembly).model
    return moe_onnx.InferenceSession(model, one_thread(), kernels=kernels)


def run(session: Any, feed: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def near(got: Any, want: Any, what: str = "") -> None:
    scale = max(float(np.abs(want).max(initial=0)), 1e-3)
    assert np.abs(np.asarray(got) - want).max(initial=0) <= TOLERANCE * scale, what


# The oracle: one token after the other, from the definitions, in float64.


def chosen_by_loops(config: Any, params: Arrays, x: Any) -> list[dict[int, float]]:
    """Weight of each expert that a token chose, experts in the order of their scores."""
    choices = []
    for token in x.astype(np.float64):
        logits = params["gate.weight"].astype(np.float64) @ token
        after = config.router_scores == "top_k_then_softmax"
        scores = 1 / (1 + np.exp(-logits)) if config.router_scores == "sigmoid" else np.exp(logits)
        if config.router_scores == "softmax_then_top_k":
            scores = scores / scores.sum()
        choice = np.array(logits if after else scores)
        if config.router_selection_bias:
            choice = choice + params["gate.e_score_correction_bias"]
        size = config.num_experts // config.n_group
        groups = []
        for group in range(config.n_group):
            best = sorted(choice[group * size : (group + 1) * size], reverse=True)
            groups.append(sum(best[: 2 if config.group_score == "top2_sum" else 1]))
        allowed = sorted(range(config.n_group), key=lambda g: (-groups[g], g))[: config.topk_group]
        experts = [e for e in range(config.num_experts) if e // size in allowed]
        experts = sorted(experts, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
        weights = {e: scores[e] for e in experts}
        if after or config.norm_topk_prob:
            total = sum(weights.values())
            weights = {e: w / total for e, w in weights.items()}
        choices.append({e: config.routed_scaling_factor * w for e, w in weights.items()})
    return choices


def kept_by_loops(config: Any, choices: list[dict[int, float]]) -> set[tuple[int, int]]:
    """The pairs of expert and token that have a row."""
    pairs = [(e, t) for e in range(config.num_experts) for t, weights in enumerate(choices) if e in weights]
    if config.dispatch_mode == "active":
        return set(pairs[: config.active_num])
    if config.dispatch_mode == "dropless":
        return set(pairs)
    kept = set()
    for expert in range(config.num_experts):
        tokens = [t for e, t in pairs if e == expert]
        if config.token_drop_policy == "probs":
            tokens.sort(key=lambda t: (-choices[t][expert], t))
        kept |= {(expert, t) for t in tokens[: config.capacity]}
    return kept


def layer_by_loops(config: Any, params: Arrays, x: Any) -> tuple[Any, set[tuple[int, int]]]:
    choices = chosen_by_loops(config, params, x)
    kept = kept_by_loops(config, choices)
    out = np.zeros(x.shape)
    for expert, token in kept:
        up = params["experts.up_proj"][expert].astype(np.float64) @ x[token]
        hidden = np.maximum(up + params.get("experts.up_proj_bias", np.zeros((99, 1)))[expert], 0)
        y = params["experts.down_proj"][expert].astype(np.float64) @ hidden
        y = y + params.get("experts.down_proj_bias", np.zeros((99, 1)))[expert]
        out[token] += choices[token][expert] * y
    return out, kept


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_in_every_mode(router: str, mode: str) -> None:
    number = list(ROUTERS).index(router) + 2 * list(MODES).index(mode)
    place, unroll, bias = FORMS[5 * number % len(FORMS)]  # every mode meets other forms of experts
    options = {"router_weights_on": place, "unroll_experts": unroll, "expert_bias": bias}
    config = layer(**ROUTERS[router], **MODES[mode], **options)
    feed = layer_feed(config, seed=3)
    # Bodies do not know the router: each mode runs by them with two.
    out = run(
        opened(config, "forward", FAST if number % 3 else "body"),
        {n: v for n, v in feed.items() if n != "target"},
    )
    want, _ = layer_by_loops(config, feed, feed["hidden_states"])
    near(out["output"], want, str(options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("router", ["softmax, not renormalised", "top-k first", "sigmoid, bias, groups"])
def test_gradients_are_finite_differences(router: str, mode: str) -> None:
    place = PLACES[(list(ROUTERS).index(router) + list(MODES).index(mode)) % 2]
    config = layer(**ROUTERS[router], **MODES[mode], router_weights_on=place, expert_activation="swiglu")
    model = to_float64(moe_onnx.build_training_graph(config, assembly="grad").model)
    session = moe_onnx.InferenceSession(model, one_thread(), kernels=FAST)
    feed = {n: v.astype(np.float64) for n, v in layer_feed(config, seed=5).items()}
    out, rng = run(session, feed), np.random.default_rng(0)
    names = [n for n in feed if f"{n}.grad" in out]
    assert set(names) == set(feed) - {"target", "gate.e_score_correction_bias"}
    for name in names:
        misses = []
        for _ in range(3):  # a direction along which the routing changes has no difference quotient
            u = rng.standard_normal(feed[name].shape)
            up, down = (run(session, {**feed, name: feed[name] + h * u})["loss"] for h in (1e-5, -1e-5))
            slope = float((out[f"{name}.grad"] * u).sum())
            misses.append(abs(slope - (up - down) / 2e-5) / max(abs(slope), 1e-2))
        assert min(misses) <= 1e-6, name


@pytest.mark.parametrize("mode", DROPPING)
def test_a53_a11_a_dropped_token_gives_zero_and_has_no_gradient(mode: str) -> None:
    """transformers #37123, prime-rl #2035: not the token itself, not what stood in memory."""
    options = {**MODES[mode], "num_experts_per_tok": 1, "norm_topk_prob": False, "expert_bias": True}
    options |= {"active_num": 7} if "active_num" in options else {}
    number = DROPPING.index(mode)
    place, unroll = PLACES[number % 2], 16 if number % 3 else 0
    config = layer(**options, router_weights_on=place, unroll_experts=unroll)
    feed = layer_feed(config, seed=1)
    feed["gate.weight"][2:] *= np.float32(0.01)  # two experts are favoured
    _, kept = layer_by_loops(config, feed, feed["hidden_states"])
    dropped = sorted(set(range(TOKENS)) - {token for _, token in kept})
    assert dropped
    out = run(opened(config, kernels="body"), feed)
    assert out["dropped"].tolist() == [len(dropped)]
    output = run(opened(config, "forward"), {n: v for n, v in feed.items() if n != "target"})["output"]
    assert not output[dropped].any()
    assert not out["hidden_states.grad"][dropped].any()
    # Nothing of them is in any other gradient either: those are of the mean over the others.
    left = {n: np.delete(feed[n], dropped, axis=0) for n in ("hidden_states", "target")}
    alone = run(opened(layer(**{**options, "token_drop_policy": "position"})), {**feed, **left})
    assert alone["dropped"].tolist() == [0]
    for name, value in alone.items():
        if name.endswith(".grad") and name != "hidden_states.grad":
            near(out[name] * TOKENS, value * (TOKENS - len(dropped)), name)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("kind", ["init_routing", "routing_map"])
def test_a52_an_expert_of_one_row_keeps_the_right_token(kind: str, policy: str) -> None:
    """DeepSpeed #7986: the largest weight, though all logits are negative; of equal ones the first."""
    config = layer(
        hidden_size=2, num_experts=2, num_experts_per_tok=1, norm_topk_prob=False, dispatch=kind,
        dispatch_mode="drop_pad", expert_capacity=1, token_drop_policy=policy,
    )  # fmt: skip
    params = random_parameters(config, 0)
    params["gate.weight"] = np.float32([[-1, 0], [-9, 0]])
    params["experts.up_proj"] = np.abs(params["experts.up_proj"])
    x = np.float32([[1, 1], [3, 1], [2, 1], [3, 1]])  # 3 against 27: the surest at expert 0
    output = run(opened(config, "forward"), {"hidden_states": x, **params})["output"]
    assert np.flatnonzero(output.any(axis=1)).tolist() == [1 if policy == "probs" else 0]


@pytest.mark.parametrize(
    "mode", ["init_routing, active", "init_routing, probs", "routing_map, dropless", "routing_map, position"]
)
def test_without_a_limit_all_modes_are_one_model(mode: str) -> None:
    options = dict(MODES[mode])
    options |= {"expert_capacity": TOKENS} if "expert_capacity" in options else {}
    options |= {"active_num": 3 * TOKENS} if "active_num" in options else {}
    same = {"router_scores": "sigmoid", "expert_activation": "geglu", "router_z_loss_coef": 0.1}
    feed = layer_feed(layer(**same), seed=2)
    want = run(opened(layer(**same)), feed)
    for place in PLACES[list(MODES).index(mode) % 2 :]:
        out = run(opened(layer(**same, **options, router_weights_on=place), kernels="body"), feed)
        for name, value in want.items():
            near(out[name], value, name)
        if "dropped" in out:
            assert out["dropped"].tolist() == [0]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a12_poisoned_capacity_rows_reach_nothing(policy: str) -> None:
    """vllm-ascend #10579: NaN in rows of experts that hold no token: nothing changes."""
    options = {"dispatch_mode": "drop_pad", "expert_capacity": 7, "token_drop_policy": policy}
    config = layer(**options, unroll_experts=0, num_experts=3)
    model, feed = moe_onnx.build_training_graph(config, assembly="grad").model, layer_feed(config, seed=4)
    clean = run(moe_onnx.InferenceSession(model, one_thread(), kernels="body"), feed)
    free = np.arange(7) >= clean["expert_load"][0][:, None]
    assert free.any()
    poison = np.where(np.repeat(free[:, :, None], HIDDEN, 2), np.float32(np.nan), np.float32(0))
    combine, backward = (
        next(node for node in model.graph.node if node.op_type == f"MoeFinalizeRoutingV2{kind}")
        for kind in ("", "Grad")
    )
    add = helper.make_node("Add", [combine.input[0], "poison"], ["poisoned"])
    model.graph.node.insert(list(model.graph.node).index(combine), add)
    combine.input[0] = backward.input[2] = "poisoned"
    model.graph.input.append(helper.make_tensor_value_info("poison", TensorProto.FLOAT, poison.shape))
    dirty = run(moe_onnx.InferenceSession(model, one_thread(), kernels="body"), {**feed, "poison": poison})
    for name, value in clean.items():
        np.testing.assert_array_equal(dirty[name], value, name)


@pytest.mark.parametrize("mode", MODES)
def test_appended_padding_changes_nothing(mode: str) -> None:
    """Longer sequences and further rows of padding take no capacity, and are in no loss."""
    number = list(MODES).index(mode)
    kind, place = ("sequence", "global")[number % 2], PLACES[number // 2 % 2]
    config = lm(**MODES[mode], router_weights_on=place, router_aux_loss=kind, router_z_loss_coef=0.1)
    params, session = random_parameters(config, 6), opened(config)
    batch = lm_batch(config, 2, 7)
    more = {"expert_load_before": np.full((2, 6), 2)} if kind == "global" else {}
    before = run(session, {**batch, **params, **more})
    fill = {"input_ids": 3, "labels": 5, "attention_mask": 0}
    wide = {n: np.pad(v, ((0, 1), (0, 4)), constant_values=fill[n]) for n, v in batch.items()}
    after = run(session, {**wide, **params, **more})
    for name, value in before.items():
        if value.dtype.kind == "i":
            np.testing.assert_array_equal(after[name], value, name)
        else:
            near(after[name], value, name)
    if mode in DROPPING:
        assert before["dropped"].all()


@pytest.mark.parametrize("mode", MODES)
def test_a43_ties_go_to_the_lowest_expert(mode: str) -> None:
    """onnx #3501: equal logits take experts 0 .. K-1, in every router and every mode."""
    for options in list(ROUTERS.values())[list(MODES).index(mode) % 2 :: 2]:  # each in half of the modes
        config = layer(**options, **MODES[mode])
        feed = layer_feed(config)
        for name in feed.keys() & {"gate.weight", "gate.e_score_correction_bias"}:
            feed[name][:] = 0
        assert run(opened(config, "eval"), feed)["expert_load"].tolist() == [[TOKENS, TOKENS, 0, 0, 0, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_a44_nan_logits_raise(mode: str) -> None:
    """vLLM #39391: also where the dispatch drops the token, so that the loss does not know."""
    router = ("softmax", "top-k first", "sigmoid, bias, groups")[list(MODES).index(mode) % 3]
    config = layer(**ROUTERS[router], **MODES[mode])
    session = moe_onnx.TrainingSession(moe_onnx.build_training_graph(config))
    feed, state = layer_feed(config), session.state_dict()
    state["gate.weight"][5] = np.nan
    session.load_state_dict(state)
    message = r"Update 1: (the loss is nan|\d+ router logits are NaN)"
    with pytest.raises(moe_onnx.NonFiniteError, match=message):
        session.step({n: feed[n] for n in ("hidden_states", "target")})


def test_a_nan_that_is_dropped_is_counted() -> None:
    config = layer(dispatch_mode="active", active_num=2, num_experts_per_tok=1)
    feed = layer_feed(config)
    feed["gate.weight"][:] = np.float32([[9], [-9], [-9], [-9], [-9], [-9]])
    feed["hidden_states"][:] = np.abs(feed["hidden_states"]) + 0.5
    feed["hidden_states"][-1] = np.nan  # the last row of expert 0
    feed["target"][:] = 0
    out = run(opened(config, "eval"), feed)
    assert np.isfinite(out["loss"])
    assert out["nan_router_logits"] == 6


# What only training has: noise, the balanced bias, the losses on the router, batches that are too small.


@pytest.mark.parametrize("assembly", ["grad+apply", "step"])
def test_the_selection_bias_follows_the_load(assembly: str) -> None:
    """``b -= rate sign(load - mean)``: by no gradient, no learning rate, no decay."""
    config = lm(router_scores="sigmoid", router_selection_bias=True, router_bias_update_rate=0.125)
    optimizer = moe_onnx.AdamW(weight_decay=0.5, no_decay=())
    graph = moe_onnx.build_training_graph(config, assembly=assembly, optimizer=optimizer)
    session = moe_onnx.TrainingSession(graph, lr=0.1)
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    want = {name.format(layer): np.zeros(6, np.float32) for layer in range(2)}
    for seed in range(3):
        loads = session.step(lm_batch(config, 3, 6, seed))["expert_load"]
        for layer_number, load in enumerate(loads):
            want[name.format(layer_number)] -= np.float32(0.125) * np.sign(load - load.mean()).astype(
                np.float32
            )
        params = session.parameters()
        for key, value in want.items():
            np.testing.assert_array_equal(params[key], value)
            info = graph.manifest.parameter(key)
            assert not info.trained and not info.weight_decay and not info.state
    assert any(value.any() for value in want.values())


def test_the_bias_selects_but_never_weighs() -> None:
    """By hand: scores .5, .5, .75 and a bias that lifts expert 0: chosen are 0 and 2, weights 0.4 and 0.6."""
    config = layer(
        hidden_size=1, num_experts=3, moe_intermediate_size=1, router_scores="sigmoid",
        router_selection_bias=True,
    )  # fmt: skip
    params = {
        "gate.weight": np.float32([[0], [0], [np.log(3)]]),
        "gate.e_score_correction_bias": np.float32([1, 0, 0]),
        "experts.up_proj": np.float32([[[1]], [[10]], [[100]]]),
        "experts.down_proj": np.ones((3, 1, 1), np.float32),
    }
    out = run(opened(config, "forward"), {"hidden_states": np.ones((1, 1), np.float32), **params})
    assert out["output"].tolist() == [[pytest.approx(0.4 * 1 + 0.6 * 100)]]


def test_noise_is_drawn_anew_and_the_same_again(tmp_path: Any) -> None:
    config = lm(noisy_top_k=True)
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply+eval")
    assert "router_noise" not in {i.name for i in graph.manifest.graph("eval").inputs}
    batch, first = lm_batch(config, 2, 5), moe_onnx.TrainingSession(graph, seed=3)
    losses = [first.step(batch)["loss"] for _ in range(2)]
    first.save_checkpoint(tmp_path)
    losses += [first.step(batch)["loss"] for _ in range(2)]
    again = moe_onnx.TrainingSession(graph, seed=4)  # the seed of the weights is not that of the noise
    again.load_checkpoint(tmp_path)
    assert [again.step(batch)["loss"] for _ in range(2)] == losses[2:]
    # Given noise is taken; no noise is the model without it.
    still = moe_onnx.TrainingSession(graph, seed=3)
    plain = moe_onnx.TrainingSession(moe_onnx.build_training_graph(lm(), assembly="grad+apply"), seed=3)
    silent = np.zeros((2, 10, 6), np.float32)
    assert still.step({**batch, "router_noise": silent})["loss"] == pytest.approx(
        plain.step(batch)["loss"], rel=1e-6
    )
    other = moe_onnx.TrainingSession(graph, seed=3)
    assert other.step(batch)["loss"] == losses[0] != still.step({**batch, "router_noise": silent})["loss"]
    with pytest.raises(moe_onnx.BatchError, match="axis 1 .tokens. must be 10"):
        still.step({**batch, "router_noise": np.zeros((2, 9, 6), np.float32)})


def test_the_losses_of_sequences_and_of_a_whole_batch() -> None:
    """Against loops over tokens, with padding, and an empty sequence."""
    for kind in ("sequence", "global"):
        for scores in ("softmax_then_top_k", "sigmoid"):
            config = lm(router_aux_loss=kind, router_scores=scores, num_hidden_layers=1)
            params, batch = random_parameters(config, 2), lm_batch(config, 3, 7)
            batch["attention_mask"][0, 4:] = batch["attention_mask"][2] = 0
            model = moe_onnx.build_training_graph(config, assembly="eval").model
            gate = next(n for n in model.graph.node if n.name.endswith("mlp/router/Gemm"))
            model.graph.output.append(helper.make_tensor_value_info(gate.output[0], TensorProto.FLOAT, None))
            before = np.array([[4, 0, 2, 0, 7, 1]])
            more = {"expert_load_before": before} if kind == "global" else {}
            session = moe_onnx.InferenceSession(model, one_thread(), kernels=FAST)
            out = run(session, {**params, **batch, **more})
            logits = out[gate.output[0]].astype(np.float64).reshape(3, 7, 6)
            scored = np.exp(logits) if scores == "softmax_then_top_k" else 1 / (1 + np.exp(-logits))
            probs = scored / scored.sum(-1, keepdims=True)
            counts, sums, real = np.zeros((3, 6)), np.zeros((3, 6)), np.zeros(3)
            for i, t in itertools.product(range(3), range(7)):
                if batch["attention_mask"][i, t]:
                    real[i] += 1
                    sums[i] += probs[i, t]
                    counts[i, sorted(range(6), key=lambda e: (-logits[i, t, e], e))[:2]] += 1
            if kind == "sequence":
                each = [6 / 2 * (counts[i] / real[i] * sums[i] / real[i]).sum() for i in (0, 1)]
                want = float(np.mean(each))
            else:
                load = before[0] + counts.sum(0)
                want = float(6 * (load / load.sum() * sums.sum(0) / real.sum()).sum())
            assert float(out["aux_loss"]) == pytest.approx(want, rel=1e-6), (kind, scores)


@pytest.mark.parametrize("kind", ["init_routing", "routing_map"])
def test_a_batch_smaller_than_the_capacity_is_refused(kind: str) -> None:
    config = lm(dispatch=kind, dispatch_mode="drop_pad", capacity_factor=2.0, tokens_per_batch=30)
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply+forward")
    assert graph.manifest.dispatch == {
        "kind": kind, "mode": "drop_pad", "expert_capacity": 20, "active_num": 0
    }  # fmt: skip
    session = moe_onnx.TrainingSession(graph)
    with pytest.raises(moe_onnx.BatchError, match="T = 18 tokens .* C = 20"):
        session.step(lm_batch(config, 3, 6))
    session.step(lm_batch(config, 4, 5))
    with pytest.raises(Exception, match=r"capacity|20"):  # the bare graph, too
        run(opened(config, "forward"), {**graph.init_parameters(), **{
            n: v for n, v in lm_batch(config, 3, 6).items() if n != "labels"
        }})  # fmt: skip
    assert len(moe_onnx.generate(session, [1, 2], 3)) == 5  # pads what is too short


def test_active_rows_in_the_manifest() -> None:
    graph = moe_onnx.build_training_graph(layer(**MODES["init_routing, active"]), assembly="eval")
    assert graph.manifest.dispatch["active_num"] == 13
    assert (
        moe_onnx.TrainingGraph(graph.models, type(graph.manifest).from_json(graph.manifest.to_json()))
        == graph
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n_group": 4}, "'n_group' must be a divisor of num_experts"),
    ({"n_group": 3, "topk_group": 4}, "'topk_group' must be at most n_group"),
    ({"n_group": 6, "topk_group": 1}, "'topk_group' must be so large that its groups hold"),
    ({"router_bias_update_rate": 0.1}, "'router_bias_update_rate' must be 0 without router_selection_bias"),
    ({"shared_expert_gate": True}, "'shared_expert_gate' must be False without"),
    (
        {"dispatch": "routing_map", "dispatch_mode": "active", "active_num": 3},
        "'dispatch' must be 'init_routing'",
    ),
    ({"dispatch_mode": "active"}, "'active_num' must be > 0"),
    ({"active_num": 3}, "'active_num' must be 0 with dispatch_mode 'dropless'"),
    ({"capacity_factor": 1.0}, "'capacity_factor' must be None with dispatch_mode 'dropless'"),
    ({"dispatch_mode": "drop_pad"}, "'expert_capacity' must be given"),
    ({"dispatch_mode": "drop_pad", "expert_capacity": 0}, "'expert_capacity' must be an integer >= 1"),
    (
        {"dispatch_mode": "drop_pad", "expert_capacity": 1, "capacity_factor": 1.0},
        "None beside capacity_factor",
    ),
    ({"dispatch_mode": "drop_pad", "expert_capacity": 2**29}, r"below 2\^31"),
    ({"dispatch_mode": "active", "active_num": 2**31}, r"below 2\^31"),
    ({"tokens_per_batch": 8}, "'tokens_per_batch' must be None with dispatch_mode 'dropless'"),
    ({"dispatch_mode": "drop_pad", "capacity_factor": 1.0}, "'tokens_per_batch' must be given"),
    (
        {"dispatch_mode": "drop_pad", "capacity_factor": 0.0, "tokens_per_batch": 8},
        r"'capacity_factor' .* \(0",
    ),
    ({"dispatch_mode": "drop_pad", "expert_capacity": 9, "tokens_per_batch": 8}, "at most tokens_per_batch"),
    ({"routed_scaling_factor": 0.0}, r"'routed_scaling_factor' .* \(0"),
    ({"router_aux_loss": "sequence", "router_aux_loss_coef": 1.0}, "another than 'sequence'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[m for _, m in WRONG])
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(moe_onnx.ConfigError, match=f"MoeLayerConfig: .*{message}"):
        layer(**options)


def test_the_capacity_is_a_share_rounded_up() -> None:
    def capacity(factor: float, tokens: int) -> int:
        return layer(dispatch_mode="drop_pad", capacity_factor=factor, tokens_per_batch=tokens).capacity

    assert [capacity(1.0, 12), capacity(1.0, 13), capacity(1.25, 12), capacity(99.0, 12)] == [4, 5, 5, 12]
    assert [capacity(1.1, 30), capacity(1e308, 12)] == [11, 12]  # not the float above 11, no overflow


def test_the_excess_of_the_parts_of_a_batch_adds_up() -> None:
    """As gradients do: accumulated over parts it balances as the whole batch would."""
    config = layer(router_scores="sigmoid", router_selection_bias=True)
    session, feed = opened(config), layer_feed(config, tokens=24)
    name = "gate.e_score_correction_bias.load_excess"
    whole = run(session, feed)
    parts = [
        run(session, {**feed, **{n: feed[n][i : i + 6] for n in ("hidden_states", "target")}})
        for i in range(0, 24, 6)
    ]
    np.testing.assert_array_equal(sum(part[name] for part in parts), whole[name])
    load = whole["expert_load"][0]
    np.testing.assert_array_equal(np.sign(whole[name]), np.sign(load - load.mean()))


def test_a_bias_can_choose_an_expert_without_a_score() -> None:
    """Its weight is 0, not 0 / 0."""
    config = layer(num_experts_per_tok=1, router_selection_bias=True)
    feed = layer_feed(config)
    feed["hidden_states"] = np.abs(feed["hidden_states"]) + np.float32(0.5)
    feed["gate.weight"][:] = np.float32([[200], [0], [0], [0], [0], [0]])
    feed["gate.e_score_correction_bias"][:] = [-2, 0, 0, 0, 0, 0]
    out = run(opened(config, "forward"), {n: v for n, v in feed.items() if n != "target"})
    assert not out["output"].any()


def test_a_model_without_experts_has_no_limit() -> None:
    options = {
        "dispatch_mode": "drop_pad",
        "expert_capacity": 100,
        "num_hidden_layers": 1,
        "mlp_only_layers": (0,),
    }
    config = lm(**options, router_aux_loss="global", noisy_top_k=True, router_selection_bias=True)
    session = moe_onnx.TrainingSession(moe_onnx.build_training_graph(config))
    session.step(lm_batch(config, 1, 3))
