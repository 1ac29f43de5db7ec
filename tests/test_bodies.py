"""Function bodies under a plain onnxruntime with nothing registered: they fail, they do not abort."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper

import moe_onnx
from moe_onnx.operators import ALL
from moe_onnx.operators._body import _CONSTANTS, IN_FLOAT64, body, integer_code, is_not_map, precision
from moe_onnx.runtime.ort_values import to_ort_value

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


FLOATS = ["bfloat16", "float16", "float", "double"]
OTHERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_one_number_tells_each_dtype(level: str) -> None:
    """A rule looks up element 0 by the exclusive or, and -1 would be element 0 as well."""
    codes = body(
        "Codes (x) => (precision, in_float64, integer, int32_differs, map_dtype)",
        precision("precision", "x"),
        IN_FLOAT64,
        integer_code("integer", "x"),
        "    int32_differs = BitwiseXor (integer, int32_code)",
        is_not_map("map_dtype", "x"),
    )
    function = onnx.parser.parse_function(f'<domain: "test", opset_import: ["" : 21]>\n{codes}')
    types = {name: getattr(TensorProto, name.upper()) for name in (*FLOATS, *OTHERS)}
    kinds = {"precision": "double", "in_float64": "bool", "integer": "int64"}
    kinds |= {"int32_differs": "int64", "map_dtype": "int64"}
    nodes, outputs = [], []
    for name in types:
        made = [f"{name}_{kind}" for kind in kinds]
        nodes.append(helper.make_node("Codes", [name], made, domain="test"))
        outputs += [
            helper.make_tensor_value_info(one, types[kind], [1])
            for one, kind in zip(made, kinds.values(), strict=True)
        ]
    inputs = [helper.make_tensor_value_info(name, type_, ["N"]) for name, type_ in types.items()]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("test", 1)]
    graph = helper.make_graph(nodes, "codes", inputs, outputs)
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model.SerializeToString(), options)
    feed = {
        name: to_ort_value(np.zeros(2, helper.tensor_dtype_to_np_dtype(type_)))
        for name, type_ in types.items()
    }
    values = session.run_with_ort_values(None, feed)
    found = {
        output.name: value.numpy()[0] for output, value in zip(session.get_outputs(), values, strict=True)
    }
    assert [name for name in types if found[f"{name}_int32_differs"] == 0] == ["int32"]
    assert all(found[f"{name}_int32_differs"] != -1 for name in types)
    assert [name for name in types if found[f"{name}_map_dtype"] == 0] == ["bool", "int8"]
    assert all(found[f"{name}_map_dtype"] >= 0 for name in types)
    assert [name for name in types if found[f"{name}_in_float64"]] == ["double"]
    grows = [found[f"{name}_precision"] for name in FLOATS]
    assert grows == sorted(set(grows))
    assert all(found[f"{name}_precision"] < grows[0] for name in OTHERS)
    named = {
        name: float(_CONSTANTS[f"{name}_code"].split("{")[1][:-1])
        for name in ("bfloat16", "float32", "float64")
    }
    assert list(named.values()) == [grows[0], grows[2], grows[3]]
