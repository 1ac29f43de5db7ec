"""``fuse`` on torch's exports of MoE layers that are no ``"batched_mm"``, beside torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from test_fuse import ASCEND, ours

import moe_onnx
from moe_onnx.rewrite.passes import apply_passes

pytestmark = [
    pytest.mark.parity,
    # torch's exporters warn of themselves and of torch.export's internals.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

# Class, weights as stacks, biases.
LAYERS: dict[str, tuple[str, bool, bool]] = {
    "mixtral": ("Mixtral", False, False),
    "mixtral, biases": ("Mixtral", False, True),
    "mixtral, stacked": ("Mixtral", True, False),
    "assign": ("Assign", False, False),
    "tokens": ("Tokens", True, False),
    "pairs": ("Pairs", False, True),
    "dense": ("Dense", False, True),
    "dense stack": ("DenseStack", False, False),
    "dense batch": ("DenseBatch", True, False),
    "dense einsum": ("DenseEinsum", True, False),
    "permute": ("Permute", True, False),
    "permute by masked_select": ("PermuteSelect", True, False),
    "scripted loop": ("ScriptedLoop", True, False),
    "while loop": ("WhileLoop", True, False),
}
PERMUTED = {"MoeTokenPermuteWithRoutingMap", "MoeGroupedMatmul", "MoeTokenUnpermuteWithRoutingMap"}
# What only one of the exporters takes: by dynamo?
ONLY = {"scripted loop": False, "while loop": True, "permute by masked_select": False}
CASES = [(name, dynamo) for name in LAYERS for dynamo in (True, False) if ONLY.get(name, dynamo) == dynamo]


@pytest.mark.parametrize(("name", "dynamo"), CASES)
def test_exports_give_the_values_and_gradients_of_torch(name: str, dynamo: bool, shared_folder: Path) -> None:
    import torch_experts

    module, path = torch_experts.exported(*LAYERS[name], dynamo, shared_folder)
    before = onnx.load(path)
    done = apply_passes(before, ["fuse"])
    assert not done.report.skipped
    assert len(done.report.applied) == 1
    kinds = ours(done.model)
    assert set(kinds) == (PERMUTED if name.startswith("permute") else set(ASCEND))
    assert not {"NonZero", "Loop"} & {node.op_type for node in done.model.graph.node}
    assert apply_passes(done.model, ["fuse"]).model is done.model
    check(module, before, done.model)


def check(module: Any, before: Any, after: Any) -> None:
    """Values of both models, and gradients of all parameters by the second."""
    import torch
    import torch_experts

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    sessions = [ort.InferenceSession(m.SerializeToString(), options) for m in (before, after)]
    torch.manual_seed(1)
    for tokens in (11, 2, 64):
        x = torch.randn(tokens, torch_experts.HIDDEN)
        want = module(x).detach().numpy()
        for session in sessions:
            (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    module(x).sum().backward()
    wanted = torch_experts.gradients(module, after)
    assert sum(grad.size for grad in wanted.values()) == sum(p.numel() for p in module.parameters())
    graph = moe_onnx.differentiate(after, loss=after.graph.output[0].name, wrt=list(wanted))
    session = moe_onnx.InferenceSession(graph)
    got = session.run([f"{name}.grad" for name in wanted], {after.graph.input[0].name: x.numpy()})
    for (name, want), value in zip(wanted.items(), got, strict=True):
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=name)
