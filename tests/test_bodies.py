"""Function bodies under a plain onnxruntime with nothing registered: they fail, they do not abort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

CODE = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np, onnxruntime as ort, moe_onnx
from onnx import helper
from routes import make_model, feed_of
inputs = [np.ones((3, 2), np.float32), np.zeros((3, 1), np.int32)]
options = ort.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = ort.GraphOptimizationLevel({level})
for attributes in {attributes!r}:
    print("trying", attributes, flush=True)
    model = make_model("MoeInitRoutingV2", inputs, attributes)
    model.functions.append(moe_onnx.function_body("MoeInitRoutingV2", 21))
    for name in ("active_num", "expert_capacity", "expert_num", "drop_pad_mode"):
        if name not in attributes:
            model.graph.node[0].attribute.append(helper.make_attribute(name, 0))
    try:
        feed = feed_of("MoeInitRoutingV2", inputs)
        ort.InferenceSession(model.SerializeToString(), options).run(None, feed)
    except Exception as error:
        print("refused: MoeInitRoutingV2" if "MoeInitRoutingV2: " in str(error) else error, flush=True)
"""

IMPOSSIBLE = [
    {"drop_pad_mode": 1, "expert_num": -1, "expert_capacity": 2},
    {"drop_pad_mode": 1, "expert_num": 2, "expert_capacity": -1},
    {"drop_pad_mode": 1, "expert_num": 2**31 - 1, "expert_capacity": 2},
    {"drop_pad_mode": 1, "expert_num": -(2**63), "expert_capacity": -(2**63)},
    {"drop_pad_mode": 1, "expert_num": 2, "expert_capacity": 2**62},
    {"active_num": -1},
    {"active_num": -(2**63)},
]


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_sizes_that_cannot_be_are_refused(level: str) -> None:
    """A runtime makes tensors of folded sizes while it loads a model, before any check has run."""
    number = int(getattr(ort.GraphOptimizationLevel, level))
    code = CODE.format(tests=str(Path(__file__).parent), attributes=IMPOSSIBLE, level=number)
    run: Any = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout, run.stderr)
    expected = [line for one in IMPOSSIBLE for line in (f"trying {one}", "refused: MoeInitRoutingV2")]
    assert run.stdout.splitlines() == expected
