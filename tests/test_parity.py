"""The gradients against PyTorch's autograd of the forwards, written as Megatron writes them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracles
import pytest
from routes import ROUTES, has_route, run

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


def padded_rows(mask: Any, capacity: int) -> tuple[Any, Any]:
    """Token and expert of each padded row, for a map of ``[E, T]``."""
    import torch

    order = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)
    return order[:, :capacity].flatten(), torch.arange(len(mask)).repeat_interleave(capacity)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_dispatch_by_map(route: str, padded: bool, seed: int) -> None:
    """Forward, both gradients, and what the combine makes of the rows, as autograd has it."""
    import torch

    if not has_route("MoeTokenPermuteWithRoutingMap", route):
        return
    rng, tokens, experts, _, hidden, _, routing_map, _ = routing(seed)
    mask = torch.from_numpy(routing_map).T
    x = torch.tensor(rng.standard_normal((tokens, hidden), np.float32), requires_grad=True)
    probs = torch.tensor(rng.random((tokens, experts), np.float32), requires_grad=True)
    if padded:
        token, expert = padded_rows(mask, 20)
    else:
        expert, token = mask.nonzero(as_tuple=True)
    rows, weights = x[token], probs[token, expert]
    g = torch.tensor(rng.standard_normal(rows.shape, np.float32))
    g_probs = torch.tensor(rng.standard_normal(len(weights), np.float32))
    d_x, d_probs = torch.autograd.grad((rows, weights), (x, probs), (g, g_probs))
    attributes = {"num_out_tokens": len(rows), "drop_and_pad": int(padded)}
    inputs = [x.detach().numpy(), routing_map, probs.detach().numpy()]
    got = run("MoeTokenPermuteWithRoutingMap", route, inputs, attributes)
    assert_close(got[0], rows)
    assert_close(got[1], weights)
    attributes = {"num_experts": experts, "tokens_num": tokens, "drop_and_pad": int(padded)}
    back = [g.numpy(), g_probs.numpy(), got[2], routing_map]
    got_grads = run("MoeTokenPermuteWithRoutingMapGrad", route, back, attributes)
    assert_close(got_grads[0], d_x)
    assert_close(got_grads[1], d_probs)
    combined = torch.zeros(tokens, hidden).index_add(0, token, rows * weights.unsqueeze(-1))
    inputs = [got[0], got[2], routing_map, probs.detach().numpy()]
    attributes = {"drop_and_pad": int(padded)}
    assert_close(run("MoeTokenUnpermuteWithRoutingMap", route, inputs, attributes)[0], combined)


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
        token, expert = padded_rows(mask, 20)
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


def per_group(x: Any, second: Any, sizes: Any, transposed: int) -> Any:
    """One PyTorch product an expert: of rows and weight (3-D), or of rows and gradients (2-D)."""
    import torch

    starts = [0, *np.cumsum(sizes).tolist()]
    parts = list(itertools.pairwise(starts))
    if second.ndim == 3:
        right = second.transpose(1, 2) if transposed else second
        return torch.cat([x[a:b] @ right[e] for e, (a, b) in enumerate(parts)])
    stack = torch.stack([x[a:b].T @ second[a:b] for a, b in parts])
    return stack.transpose(1, 2) if transposed else stack


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("transposed", [0, 1])
def test_grouped_products(route: str, transposed: int) -> None:
    """Forward, and both gradients as autograd makes them of the loop over experts."""
    import torch

    if not has_route("MoeGroupedMatmul", route):
        return
    rng = np.random.default_rng(transposed)
    sizes = np.array([17, 0, 40, 7], np.int32)
    x = torch.tensor(rng.standard_normal((64, 24), np.float32), requires_grad=True)
    shape = (4, 16, 24) if transposed else (4, 24, 16)
    weight = torch.tensor(rng.standard_normal(shape, np.float32), requires_grad=True)
    y = per_group(x, weight, sizes, transposed)
    grad = torch.tensor(rng.standard_normal(y.shape, np.float32))
    d_x, d_weight = torch.autograd.grad(y, (x, weight), grad)
    rows, matrices, g = x.detach().numpy(), weight.detach().numpy(), grad.numpy()
    attributes, other = {"transpose_weight": transposed}, {"transpose_weight": 1 - transposed}
    assert_close(run("MoeGroupedMatmul", route, [rows, matrices, sizes], attributes)[0], y)
    assert_close(run("MoeGroupedMatmul", route, [g, matrices, sizes], other)[0], d_x)
    assert_close(run("MoeGroupedMatmulWeightGrad", route, [rows, g, sizes], attributes)[0], d_weight)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gated_activation(route: str, dtype: str) -> None:
    """SiLU of the first half times the second, and autograd's gradient of it; rounded once."""
    import ml_dtypes
    import torch

    if not has_route("MoeSwiGlu", route):
        return
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    gates, up = torch.randn(64, 37) * 4, torch.randn(64, 37)
    x = torch.cat([gates, up], 1).to(kind)
    leaf = x.to(torch.float64).requires_grad_()
    y = torch.nn.functional.silu(leaf[:, :37]) * leaf[:, 37:]
    grad = torch.randn(y.shape).to(kind)
    (d_x,) = torch.autograd.grad(y, leaf, grad.to(torch.float64))
    named = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows, g = (value.to(torch.float32).numpy().astype(named) for value in (x, grad))
    step = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-10}[dtype]
    for got, want in (
        (run("MoeSwiGlu", route, [rows], {}), y),
        (run("MoeSwiGluGrad", route, [g, rows], {}), d_x),
    ):
        a, b = got[0].astype(np.float64), want.detach().numpy()
        assert got[0].dtype == rows.dtype
        assert (np.abs(a - b) <= step * np.abs(b) + 2.0**-21).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("transposed", [0, 1])
def test_grouped_products_in_bfloat16(route: str, transposed: int) -> None:
    """PyTorch's own grouped product: both round a float32 sum once, so one bfloat16 step apart at most."""
    import ml_dtypes
    import torch

    call = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if call is None:
        pytest.skip("this PyTorch has no grouped product")
    if not has_route("MoeGroupedMatmul", route):
        return
    rng = np.random.default_rng(transposed)
    sizes = np.array([16, 0, 40, 8], np.int32)  # PyTorch wants strides of 16 bytes
    bf16 = np.dtype(ml_dtypes.bfloat16)
    x, g = rng.standard_normal((64, 24)).astype(bf16), rng.standard_normal((64, 16)).astype(bf16)
    weight = rng.standard_normal((4, 16, 24) if transposed else (4, 24, 16)).astype(bf16)
    t_x, t_g, t_w = (torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for v in (x, g, weight))
    ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32))
    y = call(t_x, t_w.transpose(1, 2) if transposed else t_w, offs=ends)
    d_w = call(t_g.T, t_x, offs=ends) if transposed else call(t_x.T, t_g, offs=ends)
    attributes = {"transpose_weight": transposed}
    got_y = run("MoeGroupedMatmul", route, [x, weight, sizes], attributes)[0]
    got_w = run("MoeGroupedMatmulWeightGrad", route, [x, g, sizes], attributes)[0]
    empty = sizes == 0  # PyTorch leaves the gradient of an empty group unwritten in some versions
    for got, want, keep in ((got_y, y, slice(None)), (got_w, d_w, ~empty)):
        a, b = got.astype(np.float64)[keep], want.to(torch.float64).numpy()[keep]
        # Sums near 0 cancel: there float32's own error counts, not the step.
        assert (np.abs(a - b) <= np.abs(b) * 2.0**-7 + 40 * 16 * 2.0**-23).all()
    assert not got_w[empty].astype(np.float64).any()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates(route: str, decay: float) -> None:
    """Five steps of torch.optim.AdamW on clipped gradients: all its options are in seven factors."""
    import torch

    if not has_route("MoeAdamW", route):
        pytest.skip("no kernel of its own")
    rng, (beta1, beta2), eps, lr = np.random.default_rng(3), (0.8, 0.95), 1e-6, 3e-2
    shape = (3, 5, 7)
    weight = torch.nn.Parameter(torch.tensor(rng.standard_normal(shape, np.float32)))
    optimizer = torch.optim.AdamW([weight], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    state = [weight.detach().numpy().copy(), np.zeros(shape, np.float32), np.zeros(shape, np.float32)]
    for step in range(1, 6):
        gradient = rng.standard_normal(shape, np.float32)
        weight.grad = torch.tensor(gradient)
        norm = float(torch.nn.utils.clip_grad_norm_([weight], 1.5))
        optimizer.step()
        clip, root = min(1.0, 1.5 / (norm + 1e-6)), (1 - beta2**step) ** 0.5
        rate, kept = lr * root / (1 - beta1**step), 1 - lr * decay
        factors = [beta1, (1 - beta1) * clip, beta2, (1 - beta2) * clip**2, rate, eps * root, kept]
        inputs = [state[0], gradient, *state[1:], np.array(factors, np.float32)]
        state = run("MoeAdamW", route, inputs, {})
        moments = optimizer.state[weight]
        for got, want in zip(state, (weight, moments["exp_avg"], moments["exp_avg_sq"]), strict=True):
            assert_close(got, want)
