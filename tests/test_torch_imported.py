"""Exports of torch as training graphs: loss, every gradient and steps of AdamW against torch's own."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from test_torch_fuse_experts import CASES, LAYERS
from torch_exports import (
    ARCHITECTURES,
    OPTIMIZER,
    VOCABULARY,
    adamw_difference,
    export_language_model,
    gradients_of,
    language_model,
    largest_difference,
    logits_difference,
    moe_layers,
    own_name,
    torch_loss,
)

import moe_onnx
from moe_onnx.cli import main

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # torch's exporters warn of themselves
    pytest.mark.timeout(300),
]
README = Path(__file__).parent.parent / "README.md"


def net(name: str) -> tuple[Any, Any]:
    """A module and an example of its input."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)), torch.randn(4, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.layers(x))

    model = Encoder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(4, 5, 8)


@pytest.mark.parametrize("exporter", ["trace", "dynamo", "dynamo unoptimized"])
@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_small_networks(name: str, exporter: str, tmp_path: Path) -> None:
    import torch

    if exporter != "trace":
        pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
    model, x = net(name)
    model.train()  # without dropout; in eval the encoder runs fused kernels, which are not differentiated
    path = tmp_path / "net.onnx"
    kind = {"trace": {"dynamo": False}, "dynamo": {"dynamo": True}}.get(
        exporter, {"dynamo": True, "optimize": False}
    )
    if exporter == "trace":
        kind |= {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    torch.onnx.export(model, (x,), str(path), input_names=["x"], output_names=["y"], verbose=False, **kind)
    graph = moe_onnx.training_graph_from(
        path, loss="mean-squared-error", assembly="grad+apply", optimizer=OPTIMIZER
    )
    batches = []
    for _ in range(3):
        y = torch.randn_like(model(x)).numpy()
        batches.append({"x": torch.randn_like(x).numpy(), "target": y})

    def loss_of(module: Any, batch: dict[str, np.ndarray]) -> Any:
        return torch.nn.functional.mse_loss(
            module(torch.from_numpy(batch["x"])), torch.from_numpy(batch["target"])
        )

    of_loss, of_gradients = largest_difference(graph, model, batches[0], loss_of(model, batches[0]))
    assert of_loss <= 1e-5 and of_gradients <= 1e-5
    assert adamw_difference(graph, model, batches, loss_of) <= 1e-5


@pytest.mark.parametrize("exporter", ["trace", "dynamo", "dynamo unoptimized"])
def test_batch_norms_are_trained_as_the_export_computes_them(exporter: str, tmp_path: Path) -> None:
    """Of a module in train mode, dynamo writes what eval() computes; a trace is refused."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), torch.randn(5, 8)
    with torch.no_grad():
        for one in (*model.parameters(), model[1].running_mean):
            one.normal_()
        model[1].running_var.uniform_(0.3, 2)
    path = tmp_path / "net.onnx"
    kind = {"trace": {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING}}.get(
        exporter, {"dynamo": True, "optimize": exporter == "dynamo"}
    )
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    torch.onnx.export(model.train(), (x,), str(path), input_names=["x"], verbose=False, **kind)
    model.load_state_dict(statistics, strict=False)  # a trace has run it
    options: dict[str, Any] = {"loss": "mean-squared-error", "assembly": "grad"}
    if exporter == "trace":
        with pytest.raises(moe_onnx.GradientError, match="BatchNormalization.*training_mode=1 has no"):
            moe_onnx.training_graph_from(path, **options)
        return
    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
    if exporter == "dynamo":
        told = "2 weights hold a BatchNorm.*: '0.weight', '0.bias'"
    else:
        told = "1 BatchNormalization nodes normalise by running statistics"
    with pytest.warns(UserWarning, match=told):
        graph = moe_onnx.training_graph_from(path, **options)
    batch = {"x": x.numpy(), "target": torch.randn(5, 3).numpy()}
    loss = nn.functional.mse_loss(model.eval()(x), torch.from_numpy(batch["target"]))
    if exporter == "dynamo unoptimized":
        assert max(largest_difference(graph, model, batch, loss)) <= 1e-5
        return
    loss.backward()
    found = gradients_of(graph, batch)
    assert abs(float(found["loss"]) - loss.item()) <= 1e-5 * loss.item()
    gain = model[1].weight / (model[1].running_var + model[1].eps).sqrt()
    # Of the product of a weight and a gain: what torch's weight has, but for the gain.
    wants = {"0.weight": model[0].weight.grad / gain[:, None], "0.bias": model[0].bias.grad / gain}
    wants |= {"2.weight": model[2].weight.grad, "2.bias": model[2].bias.grad}
    assert set(wants) == set(graph.manifest.parameter_names)
    for name, want in wants.items():
        difference = np.abs(found[f"{name}.grad"] - want.detach().numpy()).max()
        assert difference <= 1e-5 * want.abs().max().item(), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_language_models_of_transformers(name: str, tmp_path: Path) -> None:
    """Every MoE layer is fused; logits, loss, every gradient and three steps are torch's.

    So are the logits of onnxruntime's own kernel, which the fused layers become again.
    """
    import torch

    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
    model = language_model(name)
    path = export_language_model(model, tmp_path / "lm.onnx")
    graph = moe_onnx.training_graph_from(
        path, loss="cross-entropy", assembly="grad+apply+forward", optimizer=OPTIMIZER
    )
    config = graph.manifest.config
    assert len(config["fused"]) == moe_layers(model) > 0 and not config["not_fused"]
    ours = Counter(node.op_type for node in graph.models["grad"].graph.node if node.domain == "ascend.moe")
    assert ours["MoeGroupedMatmulWeightGrad"] == 2 * moe_layers(model) == 2 * ours["MoeInitRoutingV2Grad"]
    assert {own_name(one) for one in graph.manifest.parameter_names} == {
        n for n, _ in model.named_parameters()
    }
    rng = np.random.default_rng(1)
    # Other sizes than those of the export.
    batches = [{"input_ids": rng.integers(0, VOCABULARY, shape)} for shape in ((2, 9), (1, 4), (3, 7))]
    wanted = []
    for batch in batches:
        ids = batch["input_ids"]
        assert logits_difference(graph, model, ids) <= 1e-5
        loss = torch_loss(model, ids)
        both = largest_difference(graph, model, {**batch, "labels": ids}, loss, least=1e-30)
        assert max(both) <= 1e-5
        theirs = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
        wanted.append(theirs.detach().numpy())
    assert adamw_difference(graph, model, batches, lambda m, b: torch_loss(m, b["input_ids"])) <= 1e-5
    graph.save(tmp_path / "out")
    assert not [f for f in moe_onnx.validate(tmp_path / "out" / "grad.onnx") if f.severity != "note"]
    served = moe_onnx.rewrite_model(path, ["fold", "fuse", "contrib-moe"])
    served.save(tmp_path / "served.onnx")
    # PhiMoE's ids may name an expert twice, so that its sum stays what it is.
    layers = 0 if name == "PhiMoE" else moe_layers(model)
    assert sum(node.op_type == "MoE" for node in served.model.graph.node) == layers
    session = moe_onnx.InferenceSession(onnx.load(tmp_path / "served.onnx"))
    for batch, want in zip(batches, wanted, strict=True):
        (logits,) = session.run(None, batch)
        assert np.abs(logits - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("name", "dynamo"), CASES)
def test_layers_as_people_write_them(name: str, dynamo: bool, shared_folder: Path) -> None:
    """Loops, dense and permuted experts: fused, trained by torch's gradients, and served by MoE."""
    import torch
    import torch_experts

    module, path = torch_experts.exported(*LAYERS[name], dynamo, shared_folder)
    graph = moe_onnx.training_graph_from(path, loss="mean-squared-error", assembly="grad")
    config = graph.manifest.config
    assert len(config["fused"]) == 1 and not config["not_fused"] and len(config["verified"]) > 3
    torch.manual_seed(1)
    x, target = (torch.randn(13, torch_experts.HIDDEN) for _ in range(2))
    loss = torch.nn.functional.mse_loss(module(x), target)
    loss.backward()
    (given,) = (one.name for one in graph.manifest.graphs["grad"].inputs_of("batch") if one.name != "target")
    found = gradients_of(graph, {given: x.numpy(), "target": target.numpy()})
    assert abs(float(found["loss"]) - loss.item()) <= 1e-5 * loss.item()
    theirs = dict(module.named_parameters())
    assert sum(one.size for one in graph.manifest.parameters) == sum(p.numel() for p in theirs.values())
    named = [one for one in graph.manifest.parameters if one.name in theirs]
    # What the exporter has folded has no name of torch's any more, with fuse or without.
    assert len(named) == len(theirs) or LAYERS[name][1]
    for one in named:
        want = theirs[one.name].grad.numpy()
        assert np.abs(found[one.gradient] - want).max() <= 1e-5 * np.abs(want).max(), one.name
    served = moe_onnx.rewrite_model(path, ["fold", "fuse", "contrib-moe"])
    kinds = [node.op_type for node in served.model.graph.node if node.domain == "com.microsoft"]
    if name.startswith("permute") and not dynamo:  # the tracing exporter computes where it cuts rows in two
        assert not kinds and "Slice is in no activation" in served.report.skipped[0].text
    else:
        assert kinds == ["MoE"]


def test_an_optimized_export_has_its_weights_in_torchs_layout(tmp_path: Path) -> None:
    """Constant folding has turned them and taken their names; those of products come back."""
    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
    model = language_model("Mixtral")
    path = export_language_model(model, tmp_path / "lm.onnx", optimize=True)
    graph = moe_onnx.training_graph_from(path, loss="cross-entropy", assembly="grad")
    ours = {name.removeprefix("lm."): value for name, value in graph.weights.parameters()}
    theirs = {name: value.detach().numpy() for name, value in model.named_parameters()}
    lost = ours.keys() - theirs.keys()
    assert all(re.fullmatch(r"model\.layers\.\d\.mlp\.experts\.weight(_2)?", name) for name in lost)
    for name in ours.keys() - lost:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert len(ours) == len(theirs)


def readme() -> tuple[list[str], list[str]]:
    """Blocks of Python and of a shell in the README's section."""
    section = README.read_text("utf-8").split("## Train any ONNX model")[1].split("\n## ")[0]
    blocks = [
        re.findall(rf"^```{kind}\n(.*?)^```", section, re.MULTILINE | re.DOTALL) for kind in ("py", "sh")
    ]
    return blocks[0], blocks[1]


def test_the_readmes_export_of_a_language_model_trains_by_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
    (export, _), (commands, _) = readme()
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    torch.manual_seed(0)
    exec(export, {})
    told = {}
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        result = CliRunner().invoke(main, words[1:])
        assert words[0] == "moe-onnx" and result.exit_code == 0, result.output
        told[words[1]] = result.output
    assert len(re.findall("^fused ", told["train-graph"], re.MULTILINE)) == 2
    assert "verified random inputs" in told["train-graph"]
    rows = [json.loads(line) for line in Path("lm-run/metrics.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 60 and rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert told["generate"].startswith("The ") or "The " in told["generate"]


def test_the_readmes_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
    (_, code), _ = readme()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["losses"][-1] < 0.5 * names["losses"][0]
