"""Networks without experts, exported by PyTorch: loss and gradients are PyTorch's own."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx
import pytest
from gradient_tools import run

import moe_onnx

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5  # of the largest value of each gradient, float32


def networks() -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.nn import functional

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 12), nn.SiLU()]
            self.layers = nn.Sequential(*layers, nn.Linear(12, 8), nn.Mish(), nn.Linear(8, 5))

        def forward(self, x: Any, labels: Any) -> Any:
            return functional.cross_entropy(self.layers(x), labels)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            angle = torch.arange(length)[:, None] * 0.3 ** torch.arange(width // 4)
            q, k = (self.turned(t, angle) for t in (q, k))
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(functional.hardswish(self.up(self.norm2(x))))

        def turned(self, t: Any, angle: Any) -> Any:
            """Rotary positions on pairs of neighbours: slices of step 2."""
            a, b = t[..., ::2], t[..., 1::2]
            cos, sin = angle.cos(), angle.sin()
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.blocks, self.norm = nn.ModuleList([Block(8), Block(8)]), nn.LayerNorm(8)

        def forward(self, x: Any, labels: Any) -> Any:
            h = self.embed(x)
            for block in self.blocks:
                h = block(h)
            logits = torch.einsum("blw,vw->blv", self.norm(h), self.embed.weight)
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    tokens = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    return {
        "mlp": (Mlp, x, torch.arange(9) % 5),
        "transformer": (Transformer, tokens, (tokens + 3) % 11),
    }


@pytest.mark.filterwarnings("ignore")  # of exporters, about themselves
@pytest.mark.parametrize("name", ["mlp", "transformer"])
@pytest.mark.parametrize("dynamo", [True, False])
def test_gradients_of_an_exported_network(name: str, dynamo: bool) -> None:
    import torch

    kind, x, labels = networks()[name]
    torch.manual_seed(3)
    network = kind().eval()
    for value in network.parameters():  # those that are equal would be merged
        torch.nn.init.normal_(value, std=0.4)
    if dynamo:
        pytest.importorskip("onnxscript")
        program = torch.onnx.export(network, (x, labels), dynamo=True, opset_version=20, optimize=False)
        model = program.model_proto
    else:
        file = io.BytesIO()  # the exporter of older files
        torch.onnx.export(
            network, (x, labels), file, dynamo=False, opset_version=20, do_constant_folding=False
        )
        model = onnx.load_model_from_string(file.getvalue())
    loss = model.graph.output[0].name
    held = {tensor.name for tensor in model.graph.initializer}
    parameters = {key: value for key, value in network.named_parameters() if key in held}
    assert len(parameters) == len(dict(network.named_parameters()))
    done = moe_onnx.differentiate(model, loss=loss, wrt=list(parameters))
    feed = dict(zip([value.name for value in model.graph.input], (x.numpy(), labels.numpy()), strict=True))
    found = run(done, feed)
    want = network(x, labels)
    want.backward()
    np.testing.assert_allclose(found[0], want.item(), rtol=1e-5)
    for (key, value), got in zip(parameters.items(), found[1:], strict=True):
        scale = float(value.grad.abs().max())
        assert np.abs(got - value.grad.numpy()).max() <= TOLERANCE * scale, key
