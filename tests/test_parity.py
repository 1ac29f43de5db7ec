"""The gradients against PyTorch's autograd of the forwards, written as Megatron writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from routes import ROUTES, run

pytestmark = pytest.mark.parity


def routing(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    tokens, experts, top_k, hidden = 64, 8, 3, 16
    expert_idx, routing_map, indices = oracles.random_routing(rng, tokens, experts, top_k)
    return rng, tokens, experts, top_k, hidden, expert_idx, routing_map, indices


def assert_close(got: Any, want: Any) -> None:
    """max |difference| / max |reference| within a few ulps of float32."""
    want = want.detach().numpy()
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("seed", range(3))
def test_dispatch_gradient(route: str, seed: int) -> None:
    import torch

    rng, tokens, _, top_k, hidden, expert_idx, _, _ = routing(seed)
    x = torch.tensor(rng.standard_normal((tokens, hidden), np.float32), requires_grad=True)
    order = torch.sort(torch.from_numpy(expert_idx).flatten(), stable=True).indices
    rows = x[order // top_k]
    grad = torch.tensor(rng.standard_normal((tokens * top_k, hidden), np.float32))
    (want,) = torch.autograd.grad(rows, x, grad)
    index = torch.argsort(order).to(torch.int32).numpy()
    got = run("MoeInitRoutingV2Grad", route, [grad.numpy(), index], {"top_k": top_k})
    assert_close(got[0], want)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_combine_gradient(route: str, padded: bool, seed: int) -> None:
    import torch

    rng, tokens, experts, _, hidden, _, routing_map, indices = routing(seed)
    mask = torch.from_numpy(routing_map).T
    probs = torch.tensor(rng.random((tokens, experts), np.float32), requires_grad=True)
    index = token_id = indices
    if padded:
        capacity = 20
        token = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)[
            :, :capacity
        ].flatten()
        expert = torch.arange(experts).repeat_interleave(capacity)
        weight = probs[token, expert]
        token_id, index = (v.to(torch.int32).numpy() for v in torch.sort(token, stable=True))
    else:
        token = torch.arange(tokens).expand(experts, tokens).masked_select(mask)
        weight = probs.T.masked_select(mask)
    rows = torch.tensor(rng.standard_normal((len(token), hidden), np.float32), requires_grad=True)
    out = torch.zeros(tokens, hidden).index_add(0, token, rows * weight.unsqueeze(-1))
    dy = torch.tensor(rng.standard_normal((tokens, hidden), np.float32))
    d_rows, d_probs = torch.autograd.grad(out, (rows, probs), dy)
    got = run(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        route,
        [dy.numpy(), index, token_id, routing_map, rows.detach().numpy(), probs.detach().numpy()],
        {"drop_and_pad": int(padded)},
    )
    assert_close(got[0], d_rows)
    assert_close(got[1], d_probs)
