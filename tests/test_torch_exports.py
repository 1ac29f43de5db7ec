"""Real exports of torch: what the foreign and hazard checks find in them, and that sound ones are clean.

``dynamo=True`` needs onnxscript, which no lane installs; those tests say so where it is missing. The same
shapes stand by hand in ``broken_foreign.py`` and ``broken_hazards.py``, for the default lane.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import moe_onnx

pytestmark = [
    pytest.mark.parity,
    # torch's exporters warn of themselves (deprecated, constant folding), torch.export of its own internals.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


def export(module: Any, arguments: tuple[Any, ...], path: Path, *, dynamo: bool = False, **more: Any) -> str:
    import torch

    torch.set_num_threads(1)
    if dynamo:
        pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
        torch.onnx.export(module.eval(), arguments, str(path), dynamo=True, verbose=False, **more)
    else:
        torch.onnx.export(module.eval(), arguments, str(path), dynamo=False, **more)
    return str(path)


def warned(path: str) -> list[str]:
    """The codes of errors and warnings."""
    report = moe_onnx.validate(path)
    return sorted({finding.code for finding in report if finding.severity != "note"})


def sound_modules() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Modules whose exports are right: module, example inputs, dynamic axes."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
            nn.init.normal_(self.norm.weight)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            scores = (q @ k.transpose(-1, -2)).masked_fill(
                torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9
            )
            return x + self.out(scores.softmax(-1) @ v)

    class Dense(nn.Module):
        """Every expert on all tokens, weighted by a mask: what exports right from eager PyTorch."""

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            top, chosen = self.gate(x).softmax(-1).topk(2)
            weights = torch.zeros(x.shape[0], 4).scatter(1, chosen, top)
            return sum(expert(x) * weights[:, i : i + 1] for i, expert in enumerate(self.experts))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.embedding(ids))

    conv = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    ids = torch.randint(0, 11, (2, 5))
    return {
        "mlp": (
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)),
            (torch.randn(2, 8),),
            {"x": {0: "n"}},
        ),
        "conv": (conv, (torch.randn(2, 3, 8, 8),), {"x": {0: "n"}}),
        "attention": (Attention(), (torch.randn(2, 5, 8),), {"x": {0: "n"}}),
        "lstm": (nn.LSTM(8, 4, batch_first=True), (torch.randn(2, 5, 8),), {"x": {1: "s"}}),
        "tied": (Tied(), (ids,), {"x": {0: "n", 1: "s"}}),
        "dense experts": (Dense(), (torch.randn(6, 8),), {"x": {0: "n"}}),
    }


@pytest.mark.parametrize("dynamo", [False, True], ids=["trace", "dynamo"])
@pytest.mark.parametrize("name", ["mlp", "conv", "attention", "lstm", "tied", "dense experts"])
def test_sound_exports_have_no_error_and_no_warning(name: str, dynamo: bool, tmp_path: Path) -> None:
    module, arguments, axes = sound_modules()[name]
    more: dict[str, Any] = {"input_names": ["x"]}
    if not dynamo:
        more["dynamic_axes"] = axes
    assert warned(export(module, arguments, tmp_path / "model.onnx", dynamo=dynamo, **more)) == []


@pytest.mark.parametrize(("dynamo", "code"), [(False, "MO404"), (True, "MO401")], ids=["trace", "dynamo"])
def test_index_add_is_found_in_both_exporters_forms(dynamo: bool, code: str, tmp_path: Path) -> None:
    import torch

    class Combine(torch.nn.Module):
        def forward(self, y: Any, rows: Any, updates: Any) -> Any:
            return y.index_add(0, rows, updates)

    rows = torch.tensor([1, 1, 0])
    arguments = (torch.zeros(4, 3), rows, torch.ones(3, 3))
    names = ["y", "rows", "updates"]
    path = export(Combine(), arguments, tmp_path / "model.onnx", dynamo=dynamo, input_names=names)
    assert code in warned(path)
    if not dynamo:
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        feeds = {name: tensor.numpy() for name, tensor in zip(names, arguments, strict=True)}
        assert session.run(None, feeds)[0][1, 0] == 1 != Combine()(*arguments)[1, 0]


def test_a_trace_loses_experts_without_tokens_and_merges_fresh_norms(tmp_path: Path) -> None:
    import torch
    from torch import nn

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Any, chosen: Any) -> Any:
            y, out = self.norm2(torch.relu(self.norm1(x))), torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                here = (chosen == i).any(-1)
                if here.any():
                    out = out + torch.where(here[:, None], expert(y), 0.0)
            return out

    arguments = (torch.randn(2, 4), torch.tensor([[0, 3], [3, 2]]))
    path = export(Skips(), arguments, tmp_path / "model.onnx", input_names=["x", "chosen"])
    report = moe_onnx.validate(path)
    assert {"MO701", "MO703"} <= set(report.codes)
    assert "experts 1 are nowhere" in next(f.found for f in report if f.code == "MO703")
    merged = " ".join(f.where + f.found for f in report if f.code == "MO701")
    assert all(name in merged for name in ("norm1.weight", "norm2.weight", "norm1.bias", "norm2.bias"))


def mixtral(experts: str) -> Any:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    config._experts_implementation = experts
    config._attn_implementation = "eager"
    return MixtralForCausalLM(config).eval()


def test_a_traced_loop_over_experts_is_fixed(tmp_path: Path) -> None:
    import torch

    block = mixtral("eager").model.layers[0].mlp
    path = export(
        block,
        (torch.randn(1, 5, 16),),
        tmp_path / "model.onnx",
        input_names=["x"],
        dynamic_axes={"x": {1: "s"}},
    )
    found = [f for f in moe_onnx.validate(path) if f.code == "MO704"]
    assert [f.where for f in found] == ["node '/experts/Split' (Split)"]
    # It does fail, or is wrong, for tokens that hit another number of experts.
    one = np.zeros((1, 1, 16), np.float32)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="Split"):
        session.run(None, {"x": one})


def test_transformers_batched_experts_gather_weights_and_fresh_norms_are_merged(tmp_path: Path) -> None:
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mixtral("batched_mm")

        def forward(self, ids: Any) -> Any:
            return self.model(input_ids=ids, use_cache=False).logits

    ids = torch.randint(0, 32, (1, 5))
    dims = {"ids": {1: torch.export.Dim("s", min=2, max=64)}}
    path = export(Logits(), (ids,), tmp_path / "model.onnx", dynamo=True, dynamic_shapes=dims)
    report = moe_onnx.validate(path)
    assert {"MO701", "MO702", "MO705"} <= set(report.codes)
    (merged,) = (f for f in report if f.code == "MO701")
    assert merged.where == "'model.model.layers.0.input_layernorm.weight'" and "model.norm" in merged.found
    assert onnx.load(path).producer_name == "pytorch"
