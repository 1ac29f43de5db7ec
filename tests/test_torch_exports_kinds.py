"""Exports of torch as people write them: each parameter is itself, with torch's gradient."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_exports import largest_difference

import moe_onnx

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # torch's exporters warn of themselves
    pytest.mark.timeout(300),
]
WAYS = ("optimized", "unoptimized", "trace")


def net(name: str) -> Any:
    """A module, all of whose parameters have gradients."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Called(nn.Module):
        """A module that is called three times."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            for _ in range(3):
                x = torch.tanh(self.fc(x)) + x
            return self.out(x)

    class Copied(nn.Module):
        """Layers of the same values, which exporters merge."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.layers[2].load_state_dict(self.layers[0].state_dict())
            self.out = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            x = x[:, None]  # products of more than two axes: MatMul and not Gemm
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.out(x[:, 0])

    class Kinds(nn.Module):
        """A scalar, a buffer that no name tells, chunks."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.register_buffer("table", torch.randn(8))

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(F.silu(q * self.table) * k * self.scale + v)

    torch.manual_seed(0)
    return {"called": Called, "copied": Copied, "kinds": Kinds}[name]()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["called", "copied", "kinds"])
def test_parameters_are_themselves(name: str, way: str, tmp_path: Path) -> None:
    import torch

    model, x, path = net(name), torch.randn(6, 8), tmp_path / "net.onnx"
    if way == "trace":
        more: dict[str, Any] = {"dynamo": False, "dynamic_axes": {"x": {0: "n"}}}
    else:
        pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
        more = {
            "dynamo": True,
            "optimize": way == "optimized",
            "dynamic_shapes": [{0: torch.export.Dim("n")}],
        }
    torch.onnx.export(model, (x,), str(path), input_names=["x"], output_names=["y"], verbose=False, **more)
    options: dict[str, Any] = {"loss": "mean-squared-error", "assembly": "grad"}
    if (name, way) == ("copied", "optimized"):  # nothing in the file says so
        with pytest.warns(
            UserWarning, match="read by several modules: 'layers.0.weight' by layers.0, layers.2"
        ):
            moe_onnx.training_graph_from(path, **options)
        return
    if (name, way) == (
        "kinds",
        "trace",
    ):  # nothing says what is a buffer, and scalars are taken for constants
        options["params"] = ["!table", "scale", "qkv*", "out*"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        graph = moe_onnx.training_graph_from(path, **options)
    x = torch.randn(9, 8)
    target = torch.randn(9, 3)
    loss = torch.nn.functional.mse_loss(model(x), target)
    batch = {"x": np.asarray(x), "target": np.asarray(target)}
    of_loss, of_gradients = largest_difference(graph, model, batch, loss)
    assert of_loss <= 1e-5 and of_gradients <= 1e-5
