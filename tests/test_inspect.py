"""What ``moe-onnx inspect`` says of a graph is what a hand computation, or PyTorch, says of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
from click.testing import CliRunner

import moe_onnx
from moe_onnx.cli import main
from moe_onnx.inspection.explain import explain
from moe_onnx.inspection.inspection import Inspection
from moe_onnx.inspection.shapes import bind

B, S = 2, 16
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
ONE_LAYER = {"num_hidden_layers": 1}


def lm(**others: Any) -> moe_onnx.MoeLMConfig:
    return moe_onnx.MoeLMConfig(**{**SIZES, **others})


def inspected(config: Any, assembly: str = "step", **sizes: int) -> Inspection:
    graph = moe_onnx.build_training_graph(config, assembly=assembly)
    return moe_onnx.inspect(graph, **{"batch_size": B, "sequence_length": S, **sizes})


def products_of_a_forward_pass(c: moe_onnx.MoeLMConfig, batch: int, sequence: int, rows: int) -> int:
    """Written from the model's definition, term by term."""
    tokens, q, kv = batch * sequence, c.num_attention_heads * c.head_size, c.kv_heads * c.head_size
    attention = 2 * tokens * c.hidden_size * (q + 2 * kv) + 2 * tokens * q * c.hidden_size
    scores = 2 * (2 * batch * c.num_attention_heads * sequence**2 * c.head_size)
    router = 2 * tokens * c.hidden_size * c.num_experts
    experts = 2 * rows * c.hidden_size * (2 * c.moe_intermediate_size + c.moe_intermediate_size)
    layer = attention + scores + router + experts
    return c.num_hidden_layers * layer + 2 * tokens * c.hidden_size * c.vocab_size


@pytest.mark.parametrize(
    ("others", "rows"),
    [
        ({}, B * S * 2),
        ({**ONE_LAYER, "unroll_experts": 0, "qk_norm": "head"}, B * S * 2),
        ({**ONE_LAYER, "dispatch_mode": "drop_pad", "expert_capacity": 9}, 4 * 9),
        ({**ONE_LAYER, "dispatch": "routing_map", "tie_word_embeddings": True}, B * S * 2),
        ({**ONE_LAYER, "dispatch_mode": "active", "active_num": 40}, 40),
    ],
)
def test_products_are_those_of_the_definition(others: dict[str, Any], rows: int) -> None:
    config = lm(**others)
    found = inspected(config, "grad").graphs["grad"]
    expected = products_of_a_forward_pass(config, B, S, rows)
    assert found.cost("forward").matrix == expected
    # A product has a gradient for each of its two factors.
    assert found.cost("backward").matrix == 2 * expected
    assert found.cost("optimizer").matrix == 0


def test_a_layer_alone() -> None:
    config = moe_onnx.MoeLayerConfig(
        hidden_size=6,
        num_experts=3,
        num_experts_per_tok=1,
        moe_intermediate_size=5,
        shared_expert_intermediate_size=7,
    )
    found = inspected(config, "grad", batch_size=3, sequence_length=4)
    assert found.sizes == {"tokens": 12}
    by_hand = 2 * 12 * 6 * 3 + 2 * 12 * 6 * 15 + 2 * 12 * 6 * 21
    assert found.graphs["grad"].cost("forward").matrix == by_hand
    assert found.graphs["grad"].cost("backward").matrix == 2 * by_hand


def test_the_rule_of_thumb() -> None:
    """6 N D, of the active parameters that are multiplied with, is all but the products of attention."""
    config = lm(**ONE_LAYER, hidden_size=256, head_dim=64, moe_intermediate_size=512, vocab_size=1000)
    found = inspected(config, "grad")
    multiplied = found.active - next(g.elements for g in found.groups if g.module == "model.embed_tokens")
    products = sum(found.step[0].cost(phase).matrix for phase in ("forward", "backward"))
    assert 1 <= products / (6 * multiplied * B * S) < 1.01


def test_parameters_by_module_and_active() -> None:
    config = lm(shared_expert_intermediate_size=6, shared_expert_gate=True, mlp_only_layers=(1,))
    found = inspected(config, "forward")
    groups = {group.module: (group.tensors, group.elements, group.active) for group in found.groups}
    assert groups["model.layers.*.mlp.experts"] == (2, 4 * 3 * 24 * 20, 2 * 3 * 24 * 20)
    assert groups["model.layers.*.mlp.shared_expert"] == (4, 3 * 6 * 24 + 24, 3 * 6 * 24 + 24)
    assert groups["model.layers.*.mlp.dense"] == (3, 3 * 24 * 128, 3 * 24 * 128)
    assert groups["model.layers.*.self_attn"][:2] == (8, 2 * 24 * 8 * (4 + 2 + 2 + 4))
    assert groups["lm_head"] == (1, 40 * 24, 40 * 24)
    assert found.parameters == sum(g[1] for g in groups.values())


def test_adamw_by_slice_is_thirteen_passes() -> None:
    """m and v 7, the change 4, decay 1, the difference 1; large experts by a Scan, slice after slice."""
    config = lm(hidden_size=512, num_hidden_layers=1, moe_intermediate_size=512)
    graph = inspected(config, "apply").graphs["apply"]
    experts = next(part for part in graph.parts if part.part.endswith("experts"))
    assert experts.cost.other == 13 * 4 * 3 * 512 * 512
    assert any(op == "Scan" for _, op in graph.operators)


HAND = """
<ir_version: 10, opset_import: ["" : 21]>
hand (float[n, 4] x, float[4, 5] w, float[5] b) => (float[n, 1] y)
<int64[1] axis = {1}, int64[2] shape = {-1, 5}>
{
    a = Gemm (x, w, b)
    e = Exp (a)
    view = Reshape (e, shape)
    s = Add (view, a)
    p = Softmax (s)
    y = ReduceSum <keepdims = 1> (p, axis)
}
"""


def test_operations_bytes_and_memory_of_a_hand_case() -> None:
    model = onnx.parser.parse_model(HAND)
    found = moe_onnx.inspect(model, sizes={"n": 3}).graphs["model"]
    cost = found.cost()
    assert cost.matrix == 2 * 3 * 4 * 5
    assert cost.other == 15 + 15 + 15 + 5 * 15 + 15  # bias, Exp, Add, Softmax, ReduceSum
    fp32, m = 4, 15
    read = (12 + 20 + 5) + m + 2 * m + m + m  # the view moves nothing
    assert cost.read == fp32 * read + 8  # and the axis
    assert cost.written == fp32 * (m + m + m + m + 3)
    # a and e (which the view looks at) are alive when Add overwrites one of them; y is an output.
    assert found.peak.activations == 2 * m * fp32
    assert (found.peak.outputs, found.peak.inputs) == (3 * fp32, (12 + 20 + 5) * fp32)


def test_memory_of_what_lives_long() -> None:
    """Four values of 8 bytes: the first is read again at the end, so that three are alive at once."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    long (float[2] x, float[2, 2] w) => (float[2] y)
    {
        a = MatMul (x, w)
        b = MatMul (a, w)
        c = MatMul (b, w)
        d = MatMul (c, w)
        y = Add (a, d)
    }
    """)
    found = moe_onnx.inspect(model).graphs["model"].peak
    assert found.activations == 3 * 8 and found.node in ("b", "c", "d")


def test_sizes_that_depend_on_data_are_said() -> None:
    found = inspected(lm()).graphs["step"]
    assert found.balanced == 4  # rows of experts, forward and backward, of two layers
    assert not found.unknown
    bound = bind(
        moe_onnx.build_training_graph(lm(), assembly="forward").model,
        {"batch": B, "sequence": S},
        derived={"tokens": B * S, "rows": 2 * B * S, "slots": 2 * B * S},
    )
    assert not bound.unknown


def test_every_node_has_a_place() -> None:
    """Modules of transformers and nothing unexpected, in every phase of every kind of model."""
    config = lm(
        dispatch="routing_map",
        router_scores="sigmoid",
        router_selection_bias=True,
        router_bias_update_rate=0.1,
        shared_expert_intermediate_size=8,
        attention_bias=True,
        mlp_only_layers=(0,),
    )
    found = inspected(config).graphs["step"]
    inside = ("input_layernorm", "self_attn", "post_attention_layernorm", "residual", "mlp.dense", "mlp.gate")
    inside += ("mlp.dispatch", "mlp.experts", "mlp.combine", "mlp.shared_expert")
    modules = {*(f"model.layers.*.{name}" for name in inside), "model.embed_tokens", "model.norm", "lm_head"}
    assert {part.part for part in found.parts} == modules | {"positions", "loss", "grad_norm"}
    assert sum(part.nodes for part in found.parts) == found.nodes
    of_optimizer = {part.part for part in found.parts if part.phase == "optimizer"}
    assert of_optimizer == {g.module for g in inspected(config, "forward").groups} | {"grad_norm"}


def test_explanation_names_nodes_that_are_there() -> None:
    graph = moe_onnx.build_training_graph(lm(num_hidden_layers=3), assembly="step")
    names = {node.name for node in graph.model.graph.node}
    mapped = {one.parameter: one for one in explain(graph.models, graph.manifest)}
    assert {one.gradient for one in mapped.values()} <= names
    query = mapped["model.layers.*.self_attn.q_proj.weight"]
    assert (query.layers, query.shape, query.forward) == ("0-2", (32, 24), {"Gemm": 1})
    assert query.scope == "model.layers.0/self_attn" and query.states == ("exp_avg", "exp_avg_sq")
    experts = mapped["model.layers.*.mlp.experts.gate_up_proj"]
    assert experts.forward["Gemm"] == experts.backward["Gemm"] == 4
    assert sum(query.optimizer.values()) == 13
    assert set(mapped["model.embed_tokens.weight"].forward) == {"Gather"}


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.output


def test_the_command(tmp_path: Path) -> None:
    config = lm(**ONE_LAYER)
    moe_onnx.build_training_graph(config, assembly="grad+apply").save(tmp_path / "model")
    folder = tmp_path / "model"
    picture, data = tmp_path / "step.svg", tmp_path / "found.json"
    said = run(
        "inspect", folder, "--batch-size", B, "--sequence-length", S, "--graph", picture, "--json", data
    )
    assert "tokens" in said and "optimizer" in said and "MFLOP" in said
    found = json.loads(data.read_text())
    assert found["sizes"] == {"batch": B, "sequence": S} and found["step"] == ["grad", "apply"]
    forward = sum(p["matrix"] for p in found["graphs"]["grad"]["parts"] if p["phase"] == "forward")
    assert forward == products_of_a_forward_pass(config, B, S, B * S * 2)
    drawn = picture.read_bytes()
    texts = [element.text or "" for element in ElementTree.fromstring(drawn).iter() if element.text]
    for name in ("mlp.experts", "self_attn", "1 layer", "MoeInitRoutingV2Grad", "loss"):
        assert name in texts
    assert b"http" not in drawn.replace(b"http://www.w3.org/2000/svg", b"")
    again = tmp_path / "again.svg"
    run("inspect", folder, "--batch-size", B, "--sequence-length", S, "--graph", again)
    assert again.read_bytes() == drawn
    alone = json.loads(run("inspect", folder / "grad.onnx", "--explain", "--json", "-"))
    assert (
        list(alone["graphs"]) == ["grad"] and alone["explain"][0]["parameter"] == "model.embed_tokens.weight"
    )
    assert "self_attn.q_proj.weight" in run("inspect", folder / "apply.onnx", "--explain")


def test_other_models_and_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "hand.onnx"
    onnx.save(onnx.parser.parse_model(HAND), path)
    said = run("inspect", path, "--size", "n=3")
    assert "120 FLOP" in said and "Gemm" in said
    assert "'n'" in run("inspect", path, code=2) and "free" in run("inspect", path, code=2)
    assert "NAME=VALUE" in run("inspect", path, "--size", "n", code=2)
    assert "mixtral-8x7b" in run("inspect", tmp_path / "none", code=2)
    assert "no manifest" in run("inspect", path, "--size", "n=3", "--explain", code=2)
    path.write_bytes(b"PK\x03\x04 no model")
    assert "zip archive" in run("inspect", path, code=2)
    graph = moe_onnx.build_training_graph(lm(dispatch_mode="drop_pad", expert_capacity=40), assembly="eval")
    with pytest.raises(moe_onnx.BatchError, match="32 tokens, fewer than the expert capacity 40"):
        moe_onnx.inspect(graph, batch_size=B, sequence_length=S)
    with pytest.raises(moe_onnx.OptionError, match="size 'batch' must be an integer >= 1, got 0"):
        moe_onnx.inspect(graph, batch_size=0)
    output = run("inspect", "--help")
    assert "Examples:" in output and "moe-onnx inspect" in output


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_products_are_those_that_pytorch_counts(kind: str) -> None:
    """torch.utils.flop_counter, over transformers' model; it sees the angles' outer product as one, too."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    experts = {"num_local_experts": 4, "intermediate_size": 20} if kind == "Mixtral" else {"num_experts": 4}
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts"}
    config = getattr(transformers, f"{kind}Config")(**sizes, **experts, attn_implementation="eager")
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    ids = torch.randint(0, 40, (B, S))
    counts = []
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids).loss
        counts.append(counter.get_total_flops())
        loss.backward()
        counts.append(counter.get_total_flops() - counts[0])
    ours = inspected(lm(qk_norm="head" if kind == "Qwen3Moe" else "none", router_aux_loss_coef=0.0)).graphs[
        "step"
    ]
    angles = 2 * B * S * 4
    assert counts[0] - ours.cost("forward").matrix in (0, angles, angles // B)
    assert counts[1] == ours.cost("backward").matrix
