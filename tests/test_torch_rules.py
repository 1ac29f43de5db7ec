"""The rules of ``torch_moe.py`` for routers, dispatch and losses, on numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from moe_onnx.build.config import MoeLayerConfig

pytestmark = pytest.mark.parity


def config_of(experts: int, top_k: int, **options: Any) -> MoeLayerConfig:
    small = {"hidden_size": 2, "moe_intermediate_size": 1}
    return MoeLayerConfig(**small, num_experts=experts, num_experts_per_tok=top_k, **options)


def routed(config: Any, logits: Any, bias: Any = None, real: Any = None, length: int | None = None) -> Any:
    """The routing of logits given as numbers."""
    import torch
    import torch_moe

    rows = torch.tensor(logits, dtype=torch.float64)
    mask = torch.ones(len(rows), dtype=torch.bool) if real is None else torch.tensor(real, dtype=torch.bool)
    bias = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    return torch_moe.route(config, rows, mask, bias, length)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


# --- Choice and weights ---------------------------------------------------------------------------


def test_equal_scores_take_the_lower_expert() -> None:
    for scores in ("softmax_then_top_k", "top_k_then_softmax", "sigmoid"):
        config = config_of(40, 3, router_scores=scores)
        row = [0.0] * 30 + [2.0] + [0.0] * 9
        assert routed(config, [row] * 5).experts.tolist() == [[30, 0, 1]] * 5


def test_weights_of_each_kind() -> None:
    row = [math.log(v) for v in (1.0, 4.0, 2.0, 1.0)]  # softmax: 1/8, 1/2, 1/4, 1/8
    for options, want in (
        ({"norm_topk_prob": False}, [1 / 2, 1 / 4]),
        ({"norm_topk_prob": True}, [2 / 3, 1 / 3]),
        ({"router_scores": "top_k_then_softmax", "norm_topk_prob": False}, [2 / 3, 1 / 3]),
        ({"router_scores": "sigmoid", "norm_topk_prob": False}, [4 / 5, 2 / 3]),
        ({"router_scores": "sigmoid", "norm_topk_prob": True}, [6 / 11, 5 / 11]),
    ):
        for scale in (1.0, 2.5):
            config = config_of(4, 2, routed_scaling_factor=scale, **options)
            got = routed(config, [row, row], real=[True, False])
            assert got.experts.tolist()[0] == [1, 2]
            assert got.weights.tolist()[0] == pytest.approx([scale * v for v in want], rel=1e-14)
            assert got.weights.tolist()[1] == [0.0, 0.0]


def test_bias_chooses_and_does_not_weigh() -> None:
    row = [logit(p) for p in (0.5, 0.6, 0.1, 0.3)]
    bias = [0.0, -0.3, 0.3, 0.0]  # choice 0.5, 0.3, 0.4, 0.3
    config = config_of(4, 2, router_scores="sigmoid", norm_topk_prob=False, router_selection_bias=True)
    got = routed(config, [row], bias)
    assert got.experts.tolist() == [[0, 2]]
    assert got.weights.tolist()[0] == pytest.approx([0.5, 0.1])
    assert float(got.margin[0]) == pytest.approx(0.1)
    # Added to the logits here: 0 + 0, 0.4 - 0.3, -2.2 + 3, -0.8 + 0.
    after = replace(config, router_scores="top_k_then_softmax")
    got = routed(after, [row], [0.0, -0.3, 3.0, 0.0])
    assert got.experts.tolist() == [[2, 1]]
    assert got.weights[0, 0] / got.weights[0, 1] == pytest.approx((1 / 9) / (6 / 4))


def test_groups() -> None:
    scores = [0.9, 0.1, 0.1, 0.6, 0.6, 0.3, 0.2, 0.2, 0.2]  # of three: sums of two 1.0, 1.2, 0.4
    row = [logit(p) for p in scores]
    kinds = {"router_scores": "sigmoid", "n_group": 3, "topk_group": 1, "norm_topk_prob": False}
    config = config_of(9, 3, **kinds)
    got = routed(config, [row])
    assert got.experts.tolist() == [[3, 4, 5]]
    assert float(got.margin[0]) == pytest.approx(0.2)  # of groups; no other expert could be chosen
    largest = routed(replace(config, group_score="max"), [row])
    assert largest.experts.tolist() == [[0, 1, 2]]
    assert float(largest.margin[0]) == pytest.approx(0.3)
    assert routed(replace(config, topk_group=2), [row]).experts.tolist() == [[0, 3, 4]]
    # The bias counts for groups too.
    lifted = replace(config, router_selection_bias=True)
    assert routed(lifted, [row], [0.0] * 6 + [1.0] * 3).experts.tolist() == [[6, 7, 8]]
    # Scores below 0 are no worse in a group that may be used than anything outside.
    after = replace(lifted, router_scores="top_k_then_softmax")
    assert routed(after, [row], [-50.0] * 6 + [-60.0] * 3).experts.tolist() == [[3, 4, 5]]
    # Equal groups: the lower one; groups of one expert have its score.
    assert routed(config, [[0.0] * 9]).experts.tolist() == [[0, 1, 2]]
    single = config_of(4, 2, router_scores="sigmoid", n_group=4, topk_group=2)
    assert routed(single, [[1.0, 3.0, 0.0, 2.0]]).experts.tolist() == [[1, 3]]


def test_noise() -> None:
    import torch
    import torch_moe

    parameters = {
        "gate.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64),
        "gate.noise.weight": torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64),
    }
    x, noise = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[3.0, -1.0]]).double()
    got = torch_moe.router_logits(parameters, "", x, noise)
    want = [1 + 3 * math.log(2), 2 - math.log(1 + math.exp(3))]
    assert got.tolist()[0] == pytest.approx(want, rel=1e-15)
    assert torch_moe.router_logits(parameters, "", x, None).tolist() == [[1.0, 2.0]]


# --- Dispatch -------------------------------------------------------------------------------------

# First choices 0 0 1 0 0 with weights growing by position but for the second token, padding in between.
WAITING = [[2.0, 0.0], [1.0, 0.0], [0.0, 1.0], [9.0, 0.0], [3.0, 0.0], [2.0, 0.0]]
REAL = [True, True, True, False, True, True]


@pytest.mark.parametrize(
    ("options", "want", "margin"),
    [
        ({}, [0, 1, 4, 5], math.inf),
        ({"dispatch_mode": "drop_pad", "token_drop_policy": "position"}, [0, 1], math.inf),
        ({"dispatch_mode": "drop_pad", "token_drop_policy": "probs"}, [0, 4], 0.0),  # 0 and 5 are equal
    ],
)
def test_what_an_expert_keeps(options: dict[str, Any], want: list[int], margin: float) -> None:
    import torch_moe

    capacity = {"expert_capacity": 2} if options else {}
    config = config_of(2, 1, norm_topk_prob=False, **options, **capacity)
    got = routed(config, WAITING, real=REAL)
    assert [token for token in range(6) if got.kept[token, 0]] == want
    assert [token for token in range(6) if got.kept[token, 1]] == [2]
    assert got.drop_margin == margin
    assert torch_moe.expert_load(config, [got]).tolist() == [[4, 1]]
    assert torch_moe.dropped(config, [got]).tolist() == [4 - len(want)]


def test_active_rows_go_by_expert_then_token() -> None:
    logits = [[0.0, 2.0, 1.0], [2.0, 1.0, 0.0], [9.0, 9.0, 9.0], [1.0, 0.0, 2.0]]
    pairs = [(1, 0), (3, 0), (0, 1), (1, 1), (0, 2), (3, 2)]  # (token, expert), no padding among them
    for number in range(1, 8):
        config = config_of(3, 2, dispatch_mode="active", active_num=number)
        got = routed(config, logits, real=[True, True, False, True])
        kept = {(token, expert) for token in range(4) for expert in range(3) if got.kept[token, expert]}
        assert kept == set(pairs[:number])


@pytest.mark.parametrize("bias", [False, True])
def test_a_dropped_pair_gives_nothing(bias: bool) -> None:
    """Both tokens choose both experts with weights 3/4 and 1/4 or the other way round; one row each."""
    import torch
    import torch_moe

    config = config_of(
        2,
        2,
        expert_activation="relu",
        expert_bias=bias,
        dispatch_mode="drop_pad",
        expert_capacity=1,
        routed_scaling_factor=2.0,
    )
    values = {
        "gate.weight": [[math.log(3), 0.0], [0.0, math.log(3)]],
        "experts.up_proj": [[[1.0, 1.0]], [[2.0, 2.0]]],
        "experts.down_proj": [[[1.0], [10.0]], [[100.0], [1000.0]]],
        "experts.up_proj_bias": [[0.5], [0.0]],
        "experts.down_proj_bias": [[7.0, 0.0], [0.0, 0.0]],
    }
    parameters = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    real = torch.ones(2, dtype=torch.bool)
    out, routing = torch_moe.moe_mlp(config, parameters, "", x, real)
    assert routing.kept.tolist() == [[False, True], [True, False]]
    # Twice 3/4 of expert 1 for token 0, of expert 0 for token 1.
    first = [1.5 * (1.5 + 7), 1.5 * 15.0] if bias else [1.5, 15.0]
    assert torch.allclose(out, torch.tensor([[300.0, 3000.0], first], dtype=torch.float64), rtol=1e-14)


def test_activations() -> None:
    import torch
    import torch_moe

    def silu(v: float, steep: float = 1.0) -> float:
        return v / (1 + math.exp(-steep * v))

    def gelu(v: float) -> float:
        return v * (1 + math.erf(v / math.sqrt(2))) / 2

    g, u = 0.7, -1.3
    for kind, want in (
        ("swiglu", silu(g) * u),
        ("geglu", gelu(g) * u),
        ("clamped_swiglu", (1 - 0.9) * silu(0.7, 1.5)),
        ("gelu", gelu(g)),
        ("relu", g),
    ):
        config = config_of(1, 1, expert_activation=kind, swiglu_limit=0.9, swiglu_alpha=1.5)
        rows = [[g, 0.0], [u, 0.0]] if kind in torch_moe.GATED else [[g, 0.0]]
        first = "gate_up_proj" if kind in torch_moe.GATED else "up_proj"
        values = {f"experts.{first}": [rows], "experts.down_proj": [[[1.0], [2.0]]]}
        parameters = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        got = torch_moe.expert(config, parameters, "", 0, torch.tensor([[1.0, 5.0]]).double())
        assert got.tolist()[0] == pytest.approx([want, 2 * want], rel=1e-14)


# --- Losses ---------------------------------------------------------------------------------------


def test_z_loss_and_aux_loss_by_hand() -> None:
    """Two tokens, two experts, one of each: E (1/2 p + 1/2 (1 - p)) = 1; both layers the same."""
    import torch_moe

    logits = [[0.0, 2.0], [2.0, 0.0], [9.0, -9.0]]
    real = [True, True, False]
    config = {
        kind: config_of(2, 1, router_aux_loss=kind, router_aux_loss_coef=0.0, norm_topk_prob=False)
        for kind in ("pooled", "per_layer", "sequence", "global")
    }
    even = routed(config["pooled"], logits, real=real)
    p = math.exp(2) / (1 + math.exp(2))
    assert even.weights.tolist() == [[pytest.approx(p)], [pytest.approx(p)], [0.0]]
    one_sided = routed(config["pooled"], [logits[1], logits[1], logits[2]], real=real)
    for kind in config:
        assert float(torch_moe.aux_loss(config[kind], [even])) == pytest.approx(1)
        assert float(torch_moe.aux_loss(config[kind], [one_sided])) == pytest.approx(2 * p)
    # Counts of both layers 3 and 1 of 4, probability sums 1 + 2p and 3 - 2p: pooled is not the mean.
    pooled = 2 * (3 / 4 * (1 + 2 * p) / 4 + 1 / 4 * (3 - 2 * p) / 4)
    assert float(torch_moe.aux_loss(config["pooled"], [even, one_sided])) == pytest.approx(pooled)
    for kind in ("per_layer", "sequence", "global"):
        got = float(torch_moe.aux_loss(config[kind], [even, one_sided]))
        assert got == pytest.approx((1 + 2 * p) / 2)
    z = math.log(1 + math.exp(2)) ** 2
    assert float(torch_moe.z_loss([even, one_sided])) == pytest.approx(z)


@pytest.mark.parametrize("scores", ["softmax_then_top_k", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_costs_1(scores: str, top_k: int) -> None:
    """Every expert is chosen as often, by tokens that are the same but for their order of experts."""
    import torch_moe

    row = [3.0, 2.0, 0.0, -1.0]
    turned = [row[-n:] + row[:-n] for n in range(4)]
    for kind, balanced in (("pooled", top_k), ("per_layer", top_k), ("sequence", 1), ("global", 1)):
        options = {"router_scores": scores, "router_aux_loss": kind, "router_aux_loss_coef": 0.0}
        config = config_of(4, top_k, **options)
        got = routed(config, turned + turned, length=4)
        assert torch_moe.expert_load(config, [got]).tolist() == [[2 * top_k] * 4]
        assert float(torch_moe.aux_loss(config, [got])) == pytest.approx(balanced)


def test_sequence_loss_looks_at_each_sequence() -> None:
    """Each sequence leans to one expert, both together to none; a sequence of padding does not count."""
    import torch_moe

    kinds = {"router_scores": "sigmoid", "router_aux_loss": "sequence", "router_aux_loss_coef": 0.0}
    config = config_of(2, 1, **kinds)
    left, right = [logit(0.6), logit(0.2)], [logit(0.2), logit(0.6)]  # shares 3/4 and 1/4
    logits = [left, left, left, right, right, left, left, left, left]
    real = [True, True, True, True, True, False, False, False, False]
    got = routed(config, logits, real=real, length=3)
    # 3 of 3 to the left: 2 * 3/4; the same to the right.
    assert float(torch_moe.aux_loss(config, [got])) == pytest.approx(1.5)
    mixed = routed(config, [left, left, right, right, left, left, *logits[6:]], real=real, length=3)
    # 2 of 3 to the left: 2 (2/3 (2 * 3/4 + 1/4) / 3 + 1/3 (2 * 1/4 + 3/4) / 3); the other 1 and 1: 1.
    want = (2 * (2 / 3 * 7 / 12 + 1 / 3 * 5 / 12) + 1) / 2
    assert float(torch_moe.aux_loss(config, [mixed])) == pytest.approx(want)
    nothing = routed(config, logits, real=[False] * 9, length=3)
    assert float(torch_moe.aux_loss(config, [nothing])) == 0


def test_global_loss_counts_what_came_before() -> None:
    import torch
    import torch_moe

    config = config_of(2, 1, router_scores="sigmoid", router_aux_loss="global")
    left = [logit(0.6), logit(0.2)]
    got = routed(config, [left, left, left], real=[True, True, False])
    for before, want in (
        (None, 2 * 3 / 4),
        ([[0, 0]], 2 * 3 / 4),
        ([[0, 2]], 1.0),  # loads 2 and 2 by now
        ([[0, 6]], 2 * (1 / 4 * 3 / 4 + 3 / 4 * 1 / 4)),
    ):
        loads = None if before is None else torch.tensor(before)
        assert float(torch_moe.aux_loss(config, [got], loads)) == pytest.approx(want)
    nothing = routed(config, [left], real=[False])
    assert float(torch_moe.aux_loss(config, [nothing])) == 0
    assert float(torch_moe.aux_loss(config, [nothing], torch.tensor([[0, 6]]))) == 0


def test_losses_count_dropped_tokens() -> None:
    import torch_moe

    for kind in ("pooled", "per_layer", "sequence", "global"):
        options = {"router_aux_loss": kind, "router_aux_loss_coef": 0.0}
        whole = config_of(2, 1, **options)
        cut = replace(whole, dispatch_mode="drop_pad", expert_capacity=1)
        ends = [routed(config, WAITING, real=REAL) for config in (whole, cut)]
        assert ends[0].kept.sum() > ends[1].kept.sum()
        losses = [
            float(torch_moe.aux_loss(config, [r])) for config, r in zip((whole, cut), ends, strict=True)
        ]
        assert losses[0] == losses[1]
