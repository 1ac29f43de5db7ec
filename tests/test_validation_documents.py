"""The rules of the source documents against their own tests, the hand cases and numbers made by hand."""

from __future__ import annotations

from typing import Any

import broken_documents as nodes
import numpy as np
import onnx
import pytest
from broken_models import parse
from onnx import TensorProto, helper, numpy_helper
from routes import ELEMS, all_of, make_model
from test_cases import CASES, arguments

import moe_onnx
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN
from moe_onnx.validation import families
from moe_onnx.validation.documents.ub import expert_limits, hidden_limits
from moe_onnx.validation.findings import Finding, Table
from moe_onnx.validation.registry import CHECKS
from moe_onnx.validation.subject import Options, open_subject

families.load()
OWN = (
    "operators.own_ops.nodes",
    "documents.limits.documented_limits",
    "documents.index_values.constant_indices",
    "documents.routing_maps.constant_maps",
    "documents.modes.modes_agree",
)
Shape = tuple[int, ...]
ELEM = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int64": "int64", "int32": "int32"}


def only(model: onnx.ModelProto) -> Finding:
    """The one finding that there is."""
    findings = judged(model)
    assert len(findings) == 1, findings
    return findings[0]


def judged(model: onnx.ModelProto) -> list[Finding]:
    """What the families of the documents alone say, in a fraction of the time of all."""
    subject = open_subject(model, Options())
    own = [check for check in CHECKS if check.name in OWN]
    assert len(own) == len(OWN)
    return [finding for check in own for finding in check.function(subject) if isinstance(finding, Finding)]


def all_constant(op: str, inputs: list[Any], attributes: dict[str, Any]) -> onnx.ModelProto:
    """A model of one node, all of whose inputs stand in the file."""
    model = make_model(op, inputs, attributes)
    del model.graph.input[:]
    for arg, value in zip(BY_NAME[op].inputs, inputs, strict=False):
        if value is not None:
            model.graph.initializer.append(numpy_helper.from_array(value, arg.name))
    return model


@all_of("op", sorted({op for op, _ in CASES}))
def test_the_hand_cases_are_judged_as_the_operators_judge_them(op: str) -> None:
    """What runs is clean; what is refused at run time is found before, with the same status."""
    for case_op, case in CASES:
        if case_op != op:
            continue
        errors = judged(all_constant(op, *arguments(op, case)))
        if "error" not in case:
            assert not errors, (case["name"], errors)
            continue
        assert len(errors) == 1, (case["name"], errors)
        assert errors[0].aclnn_status == case["error"]["aclnn_status"], case["name"]
        assert "node 'the_node'" in errors[0].where
        if errors[0].code == "MO503" and "value" in case["error"]:  # the case counts in the flat tensor
            argument = errors[0].found.split("'")[1]
            shape = case["inputs"][argument]["shape"]
            position = np.unravel_index(case["error"]["position"][0], shape)
            place = f"has {case['error']['value']} at position {[int(i) for i in position]}"
            assert place in errors[0].found, case["name"]


def dispatch_gradient(
    x: Shape,
    slots: int | Shape,
    top_k: int,
    mode: int,
    active: int,
    dtype: str = "fp32",
    index: str = "int32",
) -> onnx.ModelProto:
    index_shape = (slots,) if isinstance(slots, int) else slots
    graph = helper.make_graph(
        [
            helper.make_node(
                "MoeInitRoutingV2Grad",
                ["g", "index"],
                ["dx"],
                domain=DOMAIN,
                top_k=top_k,
                drop_pad_mode=mode,
                active_num=active,
            )
        ],
        "g",
        [
            helper.make_tensor_value_info("g", ELEMS[ELEM[dtype]], x),
            helper.make_tensor_value_info("index", ELEMS[ELEM[index]], index_shape),
        ],
        [helper.make_tensor_value_info("dx", TensorProto.FLOAT, None)],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


# From the tiling tests of the device's operator: x, slots, top_k, drop_pad_mode, active_num, dtype.
ACCEPTED: list[tuple[Any, ...]] = [
    ((480, 8), 480, 6, 0, 0, "fp32"),
    ((16, 5120), 16, 2, 0, 0, "fp16"),
    ((16, 5120), 16, 2, 0, 0, "bf16"),
    ((40, 512), 640, 64, 0, 40, "fp32"),
    ((40, 512), 640, 64, 0, 40, "bf16"),
    ((40, 512), 80, 1, 0, 40, "fp16"),
    ((10, 8, 512), 640, 8, 1, 40, "fp32"),
    ((10, 8, 512), 640, 8, 1, 40, "fp16"),
    ((640, 512), 640, 64, 0, 0, "bf16"),
    ((10, 8, 512), 5120, 64, 1, 40, "fp32"),
    ((5, 8192), 40, 8, 0, 5, "fp32"),
    ((4, 4, 32768), 128, 8, 1, 0, "fp32"),
    ((24, 16384), 24, 8, 0, 0, "fp32"),
]
REFUSED: list[tuple[Any, ...]] = [
    ("MO312", 561002, ((480, 8), 480, 6, -1, 0)),
    ("MO312", 561002, ((480, 8), 480, 6, 0, -1)),
    ("MO315", 561002, ((40, 512, 1024, 1024), 40, 1, 0, 0)),
    ("MO315", 561002, ((10, 512), 640, 8, 1, 0)),
    ("MO315", 561002, ((196608, 8), 196607, 6, 0, 0)),
    ("MO315", 561002, ((40, 512), 640, 64, 0, 30)),
    ("MO314", 161002, ((640, 512), 640, 64, 0, 0, "fp32", "int64")),
    ("MO314", 161002, ((640, 512), 640, 64, 0, 0, "int64")),
    ("MO312", 561002, ((640, 512), 640, 0, 0, 0)),
    ("MO315", 561002, ((641, 512), 641, 6, 0, 0)),
    # and from those of its shape inference
    ("MO312", 561002, ((16, 16), 16, 6, 2, 0)),
    ("MO315", 561002, ((16, 16), (16, 1), 1, 0, 0)),
    ("MO315", 561002, ((16,), 16, 1, 0, 0)),
]


def test_what_the_devices_tests_accept_is_clean() -> None:
    for call in ACCEPTED:
        assert not judged(dispatch_gradient(*call)), call


def test_what_the_devices_tests_refuse_is_found() -> None:
    for code, status, call in REFUSED:
        finding = only(dispatch_gradient(*call))
        assert (finding.code, finding.aclnn_status) == (code, status), call


def test_limits_of_the_unified_buffer() -> None:
    """Numbers that were worked out from the documents, for 192 KiB less what the system keeps."""
    assert expert_limits(196352, 2, 2)[0] == 64589
    assert expert_limits(196352, 4, 4)[0] == 38648
    assert hidden_limits(196352, 2)[0] == 4_973_056
    assert hidden_limits(196352, 4)[0] == 4_144_128
    # The document rounds experts up to 32; its hidden size is not cut to chunks: 256 * 194272 / 10 and / 12.
    assert expert_limits(196352, 2, 2)[1] == 64576
    assert expert_limits(196352, 4, 4)[1] == 38624
    assert hidden_limits(196352, 2)[1] == 4_973_363
    assert hidden_limits(196352, 4)[1] == 4_144_469
    assert expert_limits(100, 4, 4) == (0, 0)
    assert hidden_limits(100, 4) == (0, 0)


@pytest.mark.parametrize(("t", "p"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("ub", [4000, 8192, 196352, 253952])
def test_limits_are_where_the_formulas_turn(ub: int, t: int, p: int) -> None:
    """As the document and the kernels print them, at the limit and one past it."""

    def document_allows(experts: int) -> bool:
        return (ub - (p + 1) * (-(-experts // 32) * 32) - (t + 8) * 256) / (6 * t + 12) >= 1

    def kernel_refuses(experts: int) -> bool:
        return experts > (ub - 256 * t - 2048 - (6 * t + 12)) / (1 + p)

    kernel, document = expert_limits(ub, t, p)
    assert [document_allows(e) for e in (document, document + 1)] == [True, False]
    assert [kernel_refuses(e) for e in (kernel, kernel + 1)] == [False, True]
    kernel, document = hidden_limits(ub, t)
    assert [h <= 256 * (ub - 2080) / (8 + t) for h in (document, document + 1)] == [True, False]
    assert [h > 512 * ((ub - 32 - 2048) // (2 * (8 + t))) for h in (kernel, kernel + 1)] == [False, True]


def test_the_report_has_both_readings_with_what_is_left() -> None:
    report = moe_onnx.validate(nodes.combine_grad(), target="ascend910b")
    assert report.ok
    table = next(f for f in report.figures if isinstance(f, Table) and "Unified buffer" in f.title)
    assert table.columns == ("limit", "nodes", "found", "document's", "margin", "kernels'", "their margin")
    assert table.rows == (("experts", 1, 3, 38624, "100.0 %", 38648, "100.0 %"),)
    padded = moe_onnx.validate(nodes.combine_grad_padded(), ub_size=2080 + 48)
    table = next(f for f in padded.figures if isinstance(f, Table) and "Unified buffer" in f.title)
    assert table.rows == (("hidden size", 1, 2, 1024, "99.8 %", 1024, "99.8 %"),)
    supported = next(f for f in report.figures if isinstance(f, Table) and "Operators" in f.title)
    assert supported.rows == (("MoeTokenUnpermuteWithRoutingMapGrad", 1, "float32", "yes"),)


def test_sizes_that_are_not_known_are_said_to_be_left_out() -> None:
    model = nodes.combine_grad()
    for value in model.graph.input:
        if value.name in ("map", "probs"):
            value.type.tensor_type.shape.dim[1].dim_param = "experts"
    checks = {c.name: c.skipped for c in moe_onnx.validate(model, target="ascend910_93").checks}
    assert "1 of 1 nodes" in checks["documents.ub.unified_buffer"][0]
    checks = {c.name: c.skipped for c in moe_onnx.validate(model).checks}
    assert checks["documents.ub.unified_buffer"] == (
        "neither a target nor the size of a unified buffer was given",
    )
    assert checks["documents.target_support.target_support"] == ("no target was given",)


def test_findings_name_node_value_and_rule() -> None:
    """Reports A4, A5, A8 and A62: both numbers, position and legal range."""
    model = nodes.grad_active()
    nodes.attribute(active_num=4)(model)
    finding = only(model)
    assert finding.where == "node 'op' (ascend.moe.MoeInitRoutingV2Grad)"
    assert "5" in finding.found and "4" in finding.found and "active_num" in finding.found
    for value in (1032, -2, 2**31 - 1):
        index = np.arange(129 * 8, dtype=np.int32)
        index[77] = value
        finding = only(
            all_constant("MoeInitRoutingV2Grad", [np.zeros((1032, 1), np.float32), index], {"top_k": 8})
        )
        assert (
            finding.found == f"constant 'expanded_row_idx' ('expanded_row_idx') has {value} at position [77]"
        )
        assert finding.expected == "in [0, 1032) (without drop/pad)"
        assert finding.aclnn_status == 561002
    assert "561002" in str(finding)


def test_one_finding_for_the_same_mistake_in_every_layer() -> None:
    body = "\n".join(
        f"[layer{n}] y{n} = ascend.moe.MoeInitRoutingV2Grad <top_k = 3> (g, index)" for n in range(38)
    )
    outputs = ", ".join(f"float[t, h] y{n}" for n in range(38))
    model = parse(f"g (float[8, 2] g, int32[8] index) => ({outputs}) {{ {body} }}", imports=nodes.IMPORT)
    found = only(model)
    assert found.where == "node 'layer0' (ascend.moe.MoeInitRoutingV2Grad) and 37 more"
    assert found.places == tuple(f"node 'layer{n}' (ascend.moe.MoeInitRoutingV2Grad)" for n in range(38))


def test_a_node_that_is_refused_does_not_hide_the_next_one() -> None:
    """Inference goes on: the second node's sizes come through the first one's neighbours."""
    model = parse(
        """g (float[8, 2] g, int32[8] index) => (float[t, h] y, float[u, v] z) {
            [first] y = ascend.moe.MoeInitRoutingV2Grad <top_k = 3> (g, index)
            doubled = Add (g, g)
            [second] z = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, active_num = 5> (doubled, index)
        }""",
        imports=nodes.IMPORT,
    )
    first, second = judged(model)
    assert ("'first'" in first.where, "'second'" in second.where) == (True, True)


def test_nodes_inside_branches_are_checked_and_templates_are_not() -> None:
    branch = """g (bool go, float[8, 2] g, int32[8] index) => (float[t, h] y) {
        y = If (go) <
            then_branch = yes () => (float[t, h] a) {
                [inner] a = ascend.moe.MoeInitRoutingV2Grad <top_k = 3> (g, index) },
            else_branch = no () => (float[t2, h] b) { b = Identity (g) }
        >
    }"""
    finding = only(parse(branch, imports=nodes.IMPORT))
    assert "'inner'" in finding.where and "then_branch" in finding.where
    # In a function whose attribute it is, top_k may be anything.
    function = onnx.parser.parse_function(
        '<domain: "local", opset_import: ["" : 21, "ascend.moe" : 1]> f <top_k> (g, index) => (y)'
        " { y = ascend.moe.MoeInitRoutingV2Grad <top_k: int = @top_k> (g, index) }"
    )
    model = parse(
        "g (float[8, 2] g, int32[8] index) => (float[t, h] y) { y = local.f <top_k = 2> (g, index) }",
        imports=nodes.IMPORT + ', "local" : 1',
    )
    model.functions.append(function)
    assert not judged(model)


def test_orders_and_modes_that_cannot_be_told_apart_are_no_finding() -> None:
    """With one expert a token, reading by row and by column is the same; an unknown K may be 1."""
    for experts in ("4, 1", "1, 4", "4, k"):
        signature = f"(float[a, 2] x, int32[{experts}] experts) => (float[t, h] y)"
        node = (
            "rows, index = ascend.moe.MoeInitRoutingV2 <expert_num = 3> (x, experts) "
            "[op] y = ascend.moe.MoeFinalizeRoutingV2 <drop_pad_mode = 0> (rows, index)"
        )
        assert not judged(nodes.text(signature, node)()), experts


def test_indices_that_are_computed_or_elsewhere_are_not_looked_at() -> None:
    model = nodes.grad()
    model.graph.input.pop()
    tensor = onnx.TensorProto(name="index", data_type=TensorProto.INT32, dims=[8])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="no_such_file")
    model.graph.initializer.append(tensor)
    assert not judged(model)
