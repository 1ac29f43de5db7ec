"""``fuse`` on what torch writes of transformers' models with ``"batched_mm"`` experts, beside torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes

pytestmark = [
    pytest.mark.parity,
    # torch's exporter warns of itself and of torch.export's internals.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
# Class, layers, and what it calls its sizes.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mixtral": ("Mixtral", 2, {"num_local_experts": 8}),
    "qwen2_moe": (
        "Qwen2Moe", 1, {"num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8},
    ),
    "qwen3_moe": (
        "Qwen3Moe", 1, {"num_experts": 6, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 8},
    ),
    "olmoe": ("Olmoe", 1, {"num_experts": 6, "pad_token_id": 1, "eos_token_id": 2}),
    "phimoe": ("Phimoe", 1, {"num_local_experts": 6}),
    "gpt_oss": ("GptOss", 1, {"num_local_experts": 6, "head_dim": 8}),
}  # fmt: skip
GRADIENTS = ("mixtral", "qwen3_moe", "olmoe")


def exported(name: str, path: Path) -> tuple[Any, onnx.ModelProto]:
    """The torch model, from ids to logits, and its export for any length."""
    import torch
    import transformers

    pytest.importorskip("onnxscript", reason="torch.onnx.export(dynamo=True) needs onnxscript")
    kind, layers, own = MODELS[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = getattr(transformers, f"{kind}Config")(**SMALL | {"num_hidden_layers": layers} | own)
    config._experts_implementation, config._attn_implementation = "batched_mm", "eager"

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
            with torch.no_grad():
                for parameter in self.parameters():
                    if parameter.ndim == 1:  # equal norms would be merged into one
                        parameter.add_(0.1 * torch.randn_like(parameter))
                    else:
                        parameter.mul_(4)  # far from uniform routers

        def forward(self, ids: Any) -> Any:
            return self.model(input_ids=ids, use_cache=False).logits

    module, dims = Logits(), {"ids": {1: torch.export.Dim("s", min=2, max=64)}}
    ids = torch.randint(0, 32, (1, 5))
    torch.onnx.export(
        module, (ids,), str(path), dynamo=True, verbose=False, dynamic_shapes=dims, external_data=False
    )
    return module, onnx.load(path)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_of_exported_models(name: str, tmp_path: Path) -> None:
    import torch

    module, before = exported(name, tmp_path / "model.onnx")
    done = apply_passes(before, ["fuse"])
    assert not done.report.skipped
    layers = MODELS[name][1]
    assert len(done.report.applied) == layers
    counts = [node.op_type for node in done.model.graph.node if node.domain == "ascend.moe"]
    wanted = ["MoeGroupedMatmul", "MoeGroupedMatmul", "MoeInitRoutingV2"]
    if name != "phimoe":  # whose ids are not of a TopK
        wanted.append("MoeTokenUnpermuteWithRoutingMap")
    assert sorted(counts) == sorted(wanted * layers)
    assert apply_passes(done.model, ["fuse"]).model is done.model
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    sessions = [ort.InferenceSession(m.SerializeToString(), options) for m in (before, done.model)]
    rng = np.random.default_rng(0)
    for ids in (rng.integers(0, 32, (1, 11)), np.full((1, 3), 7), rng.integers(0, 32, (1, 2))):
        with torch.no_grad():
            want = module(torch.tensor(ids)).numpy()
        for session in sessions:
            (got,) = session.run(None, {session.get_inputs()[0].name: ids})
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    if name in GRADIENTS:
        check_gradients(module, done.model, rng.integers(0, 32, (1, 11)))


def check_gradients(module: Any, model: onnx.ModelProto, ids: Any) -> None:
    """Of the sum of logits, for every parameter that is an initializer, as it is or transposed."""
    import torch

    module(torch.tensor(ids)).sum().backward()
    wanted: dict[str, Any] = {}
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        for parameter in module.parameters():
            for turned in (parameter, parameter.T if parameter.ndim == 2 else parameter):
                if tuple(turned.shape) == value.shape and np.array_equal(turned.detach().numpy(), value):
                    grad = parameter.grad if turned is parameter else parameter.grad.T
                    wanted[tensor.name] = grad.numpy()
    experts = [grad for grad in wanted.values() if grad.ndim == 3]
    assert len(experts) == 2 * sum(node.op_type == "MoeInitRoutingV2" for node in model.graph.node)
    assert len(wanted) >= 0.9 * len(list(module.parameters()))
    (output,) = (value.name for value in model.graph.output)
    graph = moe_onnx.differentiate(model, loss=output, wrt=list(wanted))
    session = moe_onnx.InferenceSession(graph)
    got = session.run([f"{name}.grad" for name in wanted], {model.graph.input[0].name: ids})
    for (name, want), value in zip(wanted.items(), got, strict=True):
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=name)
