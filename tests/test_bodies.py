"""Function bodies under a plain onnxruntime with nothing registered: they fail, they do not abort."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import NodeProto

import moe_onnx
from moe_onnx.operators import ALL

CODE = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np, onnxruntime as ort, moe_onnx
from onnx import helper
from routes import make_model, feed_of
op, inputs = {op!r}, [np.ones((3, 2), np.float32), np.zeros((3, 1), np.int32)]
if op == "MoeFinalizeRoutingV2Grad":
    inputs[1] = np.array([0, 1, 2], np.int32)
    inputs += [np.zeros((0, 0), np.float32)] * 2 + [np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)]
options = ort.SessionOptions()
options.log_severity_level = 4
for level, attributes in [(level, one) for level in {levels!r} for one in {attributes!r}]:
    print("trying", level, attributes, flush=True)
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    model = make_model(op, inputs, attributes)
    model.functions.append(moe_onnx.function_body(op, 21))
    for name in ("active_num", "expert_capacity", "expert_num", "drop_pad_mode"):
        if name not in attributes:
            model.graph.node[0].attribute.append(helper.make_attribute(name, 0))
    try:
        feed = feed_of(op, inputs)
        ort.InferenceSession(model.SerializeToString(), options).run(None, feed)
    except Exception as error:
        print("refused" if op + ": " in str(error) else error, flush=True)
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

LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"]

# For the gradient of the combine by index active_num alone says how many rows it makes.
IMPOSSIBLE_ROWS = [*IMPOSSIBLE, {"active_num": 2**31}, {"active_num": 2**62}]


@pytest.mark.parametrize("op", ["MoeInitRoutingV2", "MoeFinalizeRoutingV2Grad"])
def test_sizes_that_cannot_be_are_refused(op: str) -> None:
    """A runtime makes tensors of folded sizes while it loads a model, before any check has run.

    In one process at all levels of optimisation: where it aborts, its last line says at which.
    """
    attributes = IMPOSSIBLE if op == "MoeInitRoutingV2" else IMPOSSIBLE_ROWS
    code = CODE.format(tests=str(Path(__file__).parent), attributes=attributes, levels=LEVELS, op=op)
    run: Any = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout, run.stderr)
    tried = [f"trying {level} {one}" for level in LEVELS for one in attributes]
    expected = [line for one in tried for line in (one, "refused")]
    assert run.stdout.splitlines() == expected


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g.node)


@pytest.mark.parametrize("op", [spec.name for spec in ALL])
def test_no_body_has_a_node_that_nothing_reads(op: str) -> None:
    """Each costs its time in a runtime that takes the body as it is, and is a finding in every model."""
    body = moe_onnx.function_body(op, 21)
    nodes = list(_nodes(body.node))
    read = {*body.output, *(name for node in nodes for name in node.input)}
    read |= {output.name for node in nodes for a in node.attribute for output in a.g.output}
    assert [node.name for node in nodes if not read.intersection(node.output)] == []
