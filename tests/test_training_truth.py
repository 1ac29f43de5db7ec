"""What must hold of every training graph: finite differences, symmetries, empty and extreme batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from golden_cases import CASES, Arrays, Case, is_trained, random_parameters
from routes import FAST, OP_ROUTES

import moe_onnx
from moe_onnx.rewrite.to_float64 import to_float64

# Central differences in float64 lose half of the digits: eps^2 and rounding / eps, both near 1e-10.
EPS, FINITE_DIFFERENCE = 1e-5, 2e-6
BASE = CASES["mixtral"].config


def session(model: onnx.ModelProto, threads: int = 1, kernels: str = FAST) -> moe_onnx.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return moe_onnx.InferenceSession(model, options, kernels=kernels)


def grad_session(config: Any, threads: int = 1) -> moe_onnx.InferenceSession:
    return session(moe_onnx.build_training_graph(config, assembly="grad").model, threads)


def run(s: Any, feed: Arrays) -> Arrays:
    names = [output.name for output in s.get_outputs()]
    return dict(zip(names, s.run(names, feed), strict=True))


def batch_of(config: Any, batch: int, length: int, seed: int = 0) -> Arrays:
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length))
    return {"input_ids": ids, "labels": ids.copy(), "attention_mask": np.ones_like(ids)}


def with_routing(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, its routing maps among its outputs."""
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    for node in model.graph.node:
        if node.op_type == "MoeTokenUnpermuteWithRoutingMap":
            info = onnx.helper.make_tensor_value_info(node.input[2], onnx.TensorProto.BOOL, None)
            seen.graph.output.append(info)
    return seen


def routes(out: Arrays) -> list[np.ndarray[Any, Any]]:
    return [value for value in out.values() if value.dtype == bool]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_finite_differences_of_the_whole_loss(name: str) -> None:
    case = CASES[name]
    graph = moe_onnx.build_training_graph(case.config, assembly="grad", optimizer=case.optimizer)
    s = session(with_routing(to_float64(graph.model)))
    feed = {
        key: value.astype(np.float64) if value.dtype == np.float32 else value
        for key, value in {**case.parameters(), **case.batches()[0]}.items()
    }
    out = run(s, feed)
    rng = np.random.default_rng(0)
    trained = [key for key in case.parameters() if is_trained(key)]
    scale = max(np.abs(out[f"{key}.grad"]).max() for key in trained)
    for key in trained:
        for _ in range(5):  # a direction that changes the routing has no difference quotient: redraw
            direction = rng.standard_normal(feed[key].shape)
            up, down = (run(s, {**feed, key: feed[key] + h * direction}) for h in (EPS, -EPS))
            same = zip(routes(out), routes(up), routes(down), strict=True)
            if all((a == b).all() and (a == c).all() for a, b, c in same):
                break
        else:
            raise AssertionError(f"{key}: every direction changes the routing")
        quotient = (up["loss"] - down["loss"]) / (2 * EPS)
        slope = (out[f"{key}.grad"] * direction).sum()
        assert slope == pytest.approx(quotient, rel=FINITE_DIFFERENCE, abs=FINITE_DIFFERENCE * scale), key


@pytest.mark.parametrize("op", ["Erf", "Gelu", "Softplus"])
def test_what_onnxruntime_has_not_in_double_precision_is_right(op: str) -> None:
    """Also in a branch, of which onnxruntime makes a graph of its own."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 7, opset_import: ["" : 20]>
        g (float[n] x, bool there) => (float[n] y) {{
            y = If (there) <then_branch = a () => (float[n] p) {{ p = {op} (x) }},
                            else_branch = b () => (float[n] q) {{ q = Identity (x) }}>
        }}""")
    x = np.linspace(-9, 9, 999)
    (found,) = session(to_float64(model)).run(None, {"x": x, "there": np.array(True)})
    meant = {
        "Erf": math.erf,
        "Gelu": lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
        "Softplus": lambda v: math.log1p(math.exp(v)),
    }[op]
    np.testing.assert_allclose(found, [meant(v) for v in x], rtol=0, atol=2e-14)


def permuted(params: Arrays, order: Any) -> Arrays:
    """The same model, its experts renumbered, the router with them."""
    moved = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    return {n: v[order] if n.endswith(moved) else v for n, v in params.items()}


def test_renumbering_experts_changes_no_loss_and_moves_gradients() -> None:
    s, params = grad_session(BASE), CASES["mixtral"].parameters()
    batch, order = batch_of(BASE, 3, 9), np.array([2, 0, 3, 1])
    before, after = run(s, {**batch, **params}), run(s, {**batch, **permuted(params, order)})
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    np.testing.assert_array_equal(after["expert_load"], before["expert_load"][:, order])
    for name, moved in permuted({n: before[f"{n}.grad"] for n in params}, order).items():
        gap = np.abs(after[f"{name}.grad"] - moved).max()
        assert gap <= 2e-6 * np.abs(moved).max(), name


def test_padding_changes_nothing() -> None:
    """Longer sequences and further rows, all padding, with other tokens and labels in them."""
    s, params = grad_session(BASE), CASES["mixtral"].parameters()
    batch = batch_of(BASE, 2, 7)
    before = run(s, {**batch, **params})
    wide = {"input_ids": 3, "labels": 5, "attention_mask": 0}
    padded = {n: np.pad(v, ((0, 1), (0, 4)), constant_values=wide[n]) for n, v in batch.items()}
    after = run(s, {**padded, **params})
    for name in ("expert_load", "num_tokens"):
        np.testing.assert_array_equal(after[name], before[name])
    for name, value in before.items():
        if value.dtype == np.float32:
            gap = np.abs(after[name] - value).max()
            assert gap <= 2e-6 * np.abs(value).max(), name


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0), (2, 1)], ids=str)
def test_batches_without_anything_to_predict(shape: tuple[int, int]) -> None:
    """No tokens at all, or none that has a next one: loss and gradients are 0, not NaN."""
    config = moe_onnx.MoeLMConfig(
        vocab_size=11, hidden_size=8, num_experts=3, moe_intermediate_size=4, router_z_loss_coef=0.0,
        router_aux_loss_coef=0.0, num_key_value_heads=2, num_hidden_layers=1,
    )  # fmt: skip
    out = run(grad_session(config), {**batch_of(config, *shape), **random_parameters(config, 0)})
    assert out["loss"] == 0
    assert out["num_tokens"] == 0
    assert out["grad_norm"] == 0
    for name, value in out.items():
        if name.endswith(".grad"):
            assert not value.any(), name
    assert out["expert_load"].sum() == 2 * shape[0] * shape[1]


def test_all_losses_of_a_batch_that_is_all_padding_are_zero() -> None:
    case = CASES["top_k_then_softmax"]
    batch = batch_of(case.config, 2, 6)
    batch["attention_mask"][:] = 0
    out = run(grad_session(case.config), {**batch, **case.parameters()})
    assert [float(out[n]) for n in ("loss", "lm_loss", "aux_loss", "z_loss", "grad_norm")] == [0] * 5
    assert not out["expert_load"].any()


def test_one_expert_takes_all_and_the_others_get_zero_gradients() -> None:
    config = moe_onnx.MoeLayerConfig(
        hidden_size=4, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=3, router_aux_loss_coef=0.0
    )
    params = random_parameters(config, 0)
    params["gate.weight"][:] = 0
    params["gate.weight"][3] = 10
    x = np.abs(np.random.default_rng(0).standard_normal((9, 4))).astype(np.float32)
    out = run(grad_session(config), {"hidden_states": x, "target": -x, **params})
    assert out["expert_load"].tolist() == [[0, 0, 0, 9, 0]]
    for name in ("experts.gate_up_proj.grad", "experts.down_proj.grad"):
        assert np.flatnonzero(np.abs(out[name]).sum((1, 2))).tolist() == [3]


@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("unroll", [0, 16])
def test_the_grouped_and_the_unrolled_experts_are_one_model(top_k: int, unroll: int) -> None:
    options = {"hidden_size": 8, "num_experts": 5, "num_experts_per_tok": top_k, "moe_intermediate_size": 6}
    configs = [moe_onnx.MoeLayerConfig(**options, unroll_experts=n) for n in (unroll, 4)]
    rng = np.random.default_rng(2)
    feed = {n: rng.standard_normal((13, 8)).astype(np.float32) for n in ("hidden_states", "target")}
    feed |= random_parameters(configs[0], 1)
    first, second = (run(grad_session(config), feed) for config in configs)
    for name, value in first.items():
        gap = np.abs(second[name] - value).max()
        assert gap <= 2e-6 * max(np.abs(value).max(), 1e-3), name


def test_nodes_do_not_grow_with_experts_above_the_threshold() -> None:
    def nodes(experts: int) -> int:
        config = moe_onnx.MoeLayerConfig(num_experts=experts)
        return len(moe_onnx.build_training_graph(config, assembly="step").model.graph.node)

    assert nodes(17) == nodes(256) < nodes(16)


def losses(case: Case, threads: int) -> list[float]:
    graph = moe_onnx.build_training_graph(case.config, optimizer=case.optimizer)
    s = session(graph.model, threads)
    params = case.parameters()
    state = {i.name: np.zeros(i.shape, np.float32) for i in graph.manifest.graphs["step"].inputs_of("state")}
    found = []
    for number, batch in enumerate(case.batches(), 1):
        hyper = {"lr": np.array(case.lr, np.float32), "step": np.array(number)}
        out = run(s, {**batch, **params, **state, **hyper})
        params, state = ({name: out[f"{name}.updated"] for name in group} for group in (params, state))
        found.append(float(out["loss"]))
    return found


def test_losses_are_bit_identical_at_one_thread_count_and_close_across_counts() -> None:
    case = CASES["mixtral"]
    two = losses(case, 2)
    assert losses(case, 2) == two
    np.testing.assert_allclose(losses(case, 1), two, rtol=1e-6)


def test_the_gradient_of_a_layers_input() -> None:
    """By finite differences; this is where MoeInitRoutingV2Grad is in the backward of one layer."""
    config = moe_onnx.MoeLayerConfig(hidden_size=4, num_experts=3, moe_intermediate_size=5)
    model = moe_onnx.build_training_graph(config, assembly="grad").model
    assert [node.op_type for node in model.graph.node if node.op_type.endswith("Grad")] == [
        "MoeTokenUnpermuteWithRoutingMapGrad",
        "MoeInitRoutingV2Grad",
    ]
    s = session(to_float64(model))
    rng = np.random.default_rng(3)
    feed = {n: rng.standard_normal((7, 4)) for n in ("hidden_states", "target")}
    feed |= {n: v.astype(np.float64) for n, v in random_parameters(config, 3).items()}
    out, direction = run(s, feed), rng.standard_normal((7, 4))
    up, down = (
        run(s, {**feed, "hidden_states": feed["hidden_states"] + h * direction})["loss"] for h in (EPS, -EPS)
    )
    slope = (out["hidden_states.grad"] * direction).sum()
    assert slope == pytest.approx((up - down) / (2 * EPS), rel=FINITE_DIFFERENCE)


@pytest.mark.parametrize("kernels", OP_ROUTES)
def test_the_routes_compute_the_same(kernels: str) -> None:
    """The operators as custom ops, inside a whole graph."""
    case = CASES["mixtral"]
    model = moe_onnx.build_training_graph(case.config, assembly="grad").model
    feed = {**case.parameters(), **case.batches()[0]}
    found, body = (run(moe_onnx.InferenceSession(model, kernels=k), feed) for k in (kernels, "body"))
    for name, value in body.items():
        gap = np.abs(found[name] - value).max()
        assert gap <= 2e-6 * np.abs(value).max(), name


def test_means_over_many_equal_tokens_are_those_of_one() -> None:
    """Sums of 2^17 equal terms in float32 would be off by a thousandth."""
    config = moe_onnx.MoeLMConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, num_experts=3,
        num_experts_per_tok=1, moe_intermediate_size=2, router_z_loss_coef=0.1,
    )  # fmt: skip
    s = session(moe_onnx.build_training_graph(config, assembly="eval").model)
    params = random_parameters(config, 0)
    ids = [np.full((n, 2), 3) for n in (1, 2**17)]
    one, many = (
        run(s, {**params, "input_ids": i, "labels": i, "attention_mask": np.ones_like(i)}) for i in ids
    )
    for name in ("loss", "lm_loss", "aux_loss", "z_loss"):
        assert many[name] == pytest.approx(one[name], rel=3e-7), name
