"""MoE layers as people write them in torch, and what torch's two exporters make of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")
F = torch.nn.functional
HIDDEN, INNER, EXPERTS, TOP_K = 8, 6, 4, 2


class Expert(torch.nn.Module):
    """Three products; biases in two of them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1 = torch.nn.Linear(HIDDEN, INNER, bias=bias)
        self.w2 = torch.nn.Linear(INNER, HIDDEN, bias=bias)
        self.w3 = torch.nn.Linear(HIDDEN, INNER, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(torch.nn.Module):
    """A router; experts as modules, or as stacks of weights."""

    def __init__(self, stacked: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        if stacked:
            self.up = torch.nn.Parameter(0.5 * torch.randn(EXPERTS, 2 * INNER, HIDDEN))
            self.down = torch.nn.Parameter(0.5 * torch.randn(EXPERTS, HIDDEN, INNER))
        else:
            self.experts = torch.nn.ModuleList(Expert(bias) for _ in range(EXPERTS))

    def route(self, x: Any) -> tuple[Any, Any]:
        weights, ids = torch.topk(F.softmax(self.gate(x), dim=-1), TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    def expert(self, e: Any, x: Any) -> Any:
        if hasattr(self, "experts"):
            return self.experts[e](x)
        left, right = F.linear(x, self.up[e]).chunk(2, dim=-1)
        return F.linear(F.silu(left) * right, self.down[e])


class Mixtral(Layer):
    """transformers' loop: a mask of choices and tokens, index_add."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            choice, token = torch.where(mask[e])
            rows = x[None, token].reshape(-1, HIDDEN)
            out.index_add_(0, token, (self.expert(e, rows) * weights[token, choice, None]).to(x.dtype))
        return out


class Assign(Layer):
    """Mistral's own loop: what is there is read, added to, and put back."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            out[token] += weights[token, choice, None] * self.expert(e, x[token])
        return out


class Tokens(Layer):
    """Tokens that chose an expert at all, and weights summed over choices."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        out = 0.5 * x
        for e in range(EXPERTS):
            chosen = ids == e
            token = chosen.any(-1).nonzero().squeeze(-1)
            weight = (weights * chosen).sum(-1)
            out = out.index_add(0, token, self.expert(e, x[token]) * weight[token].unsqueeze(-1))
        return out


class Pairs(Layer):
    """DeepSeek's loop: every token K times, rows put by a mask, one sum behind all experts."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        repeated, flat = x.repeat_interleave(TOP_K, dim=0), ids.view(-1)
        y = torch.empty_like(repeated)
        for e in range(EXPERTS):
            y[flat == e] = self.expert(e, repeated[flat == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class Dense(Layer):
    """All experts for all tokens, one after the other, with a gate by scatter."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        gate = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
        out = 0.5 * x
        for e in range(EXPERTS):
            out = out + self.expert(e, x) * gate[:, e, None]
        return out


class DenseStack(Layer):
    """All experts stacked, with a gate by a Softmax of scores of which the others are -inf."""

    def forward(self, x: Any) -> Any:
        scores = self.gate(x)
        best, ids = torch.topk(scores, TOP_K, dim=-1)
        gate = F.softmax(torch.full_like(scores, float("-inf")).scatter(1, ids, best), dim=-1)
        rows = torch.stack([self.expert(e, x) for e in range(EXPERTS)], dim=1)
        return torch.einsum("te,teh->th", gate, rows)


class DenseBatch(Layer):
    """Batched products of stacked weights, with a gate by one_hot."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        gate = (F.one_hot(ids, EXPERTS).to(x.dtype) * weights.unsqueeze(-1)).sum(1)
        left, right = torch.bmm(x.unsqueeze(0).expand(EXPERTS, -1, -1), self.up.transpose(1, 2)).chunk(2, -1)
        rows = torch.bmm(F.silu(left) * right, self.down.transpose(1, 2))
        return (rows * gate.t().unsqueeze(-1)).sum(0)


class DenseEinsum(Layer):
    """The same by einsum, tokens first."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        gate = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
        left, right = torch.einsum("th,efh->tef", x, self.up).chunk(2, dim=-1)
        rows = torch.einsum("tef,ehf->teh", F.silu(left) * right, self.down)
        return torch.einsum("teh,te->th", rows, gate)


class Permute(Layer):
    """Megatron-Core's permute and unpermute by a routing map; experts with gathered weights."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        probs = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
        chosen = torch.zeros(x.shape[0], EXPERTS, dtype=torch.int64).scatter(1, ids, 1).bool()
        token, expert, weight = self.places(chosen, probs)
        rows = x.index_select(0, token)
        left, right = torch.bmm(self.up[expert], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        rows = torch.bmm(self.down[expert], (F.silu(left) * right).unsqueeze(-1)).squeeze(-1)
        out = torch.zeros_like(x)
        return out.scatter_add(0, token.unsqueeze(1).expand(-1, HIDDEN), rows * weight.unsqueeze(-1))

    def places(self, chosen: Any, probs: Any) -> tuple[Any, Any, Any]:
        expert, token = chosen.t().nonzero(as_tuple=True)
        return token, expert, probs[token, expert]


class PermuteSelect(Permute):
    """The same by masked_select, which dynamo does not export."""

    def places(self, chosen: Any, probs: Any) -> tuple[Any, Any, Any]:
        chosen, count = chosen.t().contiguous(), chosen.shape[0]
        token = torch.arange(count).unsqueeze(0).expand(EXPERTS, -1).masked_select(chosen)
        expert = torch.arange(EXPERTS).unsqueeze(1).expand(-1, count).masked_select(chosen)
        return token, expert, probs.t().contiguous().masked_select(chosen)


@torch.jit.script
def in_turns(x, ids, weights, up, down):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, up.shape[0]).permute(2, 1, 0)
    used = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for i in range(used.shape[0]):
        e = used[i, 0]
        choice, token = torch.where(mask[e])
        left, right = F.linear(x[token], up[e]).chunk(2, dim=-1)
        rows = F.linear(F.silu(left) * right, down[e]) * weights[token, choice].unsqueeze(-1)
        out = out.index_add(0, token, rows)
    return out


class ScriptedLoop(Layer):
    """A loop over the experts that were chosen, which TorchScript keeps as a Loop."""

    def forward(self, x: Any) -> Any:
        weights, ids = self.route(x)
        return in_turns(x, ids, weights, self.up, self.down)


class WhileLoop(Layer):
    """A while_loop over all experts with a dense gate, which dynamo keeps as a Loop."""

    def forward(self, x: Any) -> Any:
        from torch._higher_order_ops.while_loop import while_loop

        weights, ids = self.route(x)
        gate = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights)

        def turn(e: Any, out: Any) -> tuple[Any, Any]:
            up, down = (torch.index_select(w, 0, e.reshape(1)).squeeze(0) for w in (self.up, self.down))
            left, right = F.linear(x, up).chunk(2, dim=-1)
            rows = F.linear(F.silu(left) * right, down) * torch.index_select(gate, 1, e.reshape(1))
            return e + 1, out + rows

        if not torch.compiler.is_compiling():  # torch has no gradient of it
            e, out = torch.tensor(0), torch.zeros_like(x)
            while e < EXPERTS:
                e, out = turn(e, out)
            return out
        return while_loop(lambda e, out: e < EXPERTS, turn, (torch.tensor(0), torch.zeros_like(x)))[1]


def exported(kind: str, stacked: bool, bias: bool, dynamo: bool, folder: Path) -> tuple[Any, Path]:
    """The layer of a class, and its export by torch, made once for all tests that share a folder."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = globals()[kind](stacked, bias).eval()
    path = folder / f"{kind}-{stacked}-{bias}-{dynamo}.onnx"
    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")
        _export(module, own, dynamo)
        own.replace(path)  # whole or not there: the other worker may be at it too
    return module, path


def _export(module: Any, path: Path, dynamo: bool) -> None:
    """For any number of tokens, in one file."""
    # Many: where an expert gets one row, TorchScript freezes that number.
    x = torch.randn(64, HIDDEN)
    if dynamo:
        pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
        dims = {"x": {0: torch.export.Dim("t", min=2, max=512)}}
        torch.onnx.export(
            module, (x,), str(path), dynamo=True, verbose=False, dynamic_shapes=dims, external_data=False
        )
    else:
        axes = {"x": {0: "t"}, "y": {0: "t"}}
        torch.onnx.export(
            module, (x,), str(path), dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes=axes,
            opset_version=18,
        )  # fmt: skip


def gradients(module: Any, model: onnx.ModelProto) -> dict[str, Any]:
    """torch's gradients, by the initializers that hold a parameter, a part of it, or its transposed."""
    found: dict[str, Any] = {}
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        for parameter in module.parameters():
            whole, grad = parameter.detach().numpy(), parameter.grad.numpy()
            parts = [(whole, grad)]
            if whole.ndim == 3:
                parts += [*zip(whole, grad, strict=True), (whole.swapaxes(1, 2), grad.swapaxes(1, 2))]
            parts += [(one.T, slope.T) for one, slope in parts if one.ndim == 2]
            for one, slope in parts:
                if one.shape == value.shape and np.array_equal(one, value):
                    found[tensor.name] = slope
    return found
