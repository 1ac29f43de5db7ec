"""Checks of training graphs: what they say, and that they find nothing in sound graphs of every kind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import broken_training as broken
import onnx
import onnxruntime
import pytest
from broken_models import copy_of, grad_model, plain_model, step_model, training_graph
from broken_training import layer_eval, layer_graph, layer_step, manifest_of
from golden_cases import tiny_lm
from moe_cases import CONFIGS
from routes import OP_ROUTES

import moe_onnx
from moe_onnx.build.manifest import Manifest
from moe_onnx.rewrite.legalize import legalize
from moe_onnx.rewrite.to_float64 import to_float64
from moe_onnx.validation import families
from moe_onnx.validation.findings import Finding, Report
from moe_onnx.validation.registry import CHECKS
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.flow import flow_of

FAMILY = "training"
ALL_GRAPHS = "step+grad+apply+eval+forward"


def findings(report: Report) -> list[Finding]:
    assert "MO001" not in report.codes, report.findings
    return [finding for finding in report.findings if finding.code.startswith("MO6")]


def one(model: Any, code: str) -> Finding:
    found = [finding for finding in moe_onnx.validate(model) if finding.code == code]
    assert len(found) == 1, found
    return found[0]


def broken_by(base: Any, break_it: Any) -> onnx.ModelProto:
    model = copy_of(base())
    return break_it(model) or model


# --- Sound graphs -----------------------------------------------------------------------------------

SOUND = {
    name: CONFIGS[name]
    for name in (
        "softmax-dropless-combine",
        "sigmoid-active-experts",
        "softmax_after-map_probs-combine",
        "sigmoid_groups-probs-experts",
        "grouped-map_dropless-experts",
    )
}
# Everything that a language model can have, and no experts in its first layer.
SOUND["lm"] = tiny_lm(
    num_experts=2,
    num_experts_per_tok=1,
    mlp_only_layers=(0,),
    attention_bias=True,
    qk_norm="head",
    expert_bias=True,
    noisy_top_k=True,
    router_aux_loss="global",
    shared_expert_intermediate_size=3,
    shared_expert_gate=True,
)
SOUND["one expert"] = moe_onnx.MoeLayerConfig(
    hidden_size=4, num_experts=1, num_experts_per_tok=1, moe_intermediate_size=4, expert_bias=True
)


@pytest.mark.parametrize("name", SOUND)
def test_graphs_of_every_kind_are_clean(name: str) -> None:
    optimizer = moe_onnx.SGD(momentum=0.9, weight_decay=0.1) if "-" in name else moe_onnx.AdamW()
    graph = moe_onnx.build_training_graph(SOUND[name], assembly=ALL_GRAPHS, optimizer=optimizer)
    for assembly, model in graph.models.items():
        report = moe_onnx.validate(model)
        assert not findings(report), (assembly, report.findings)


def test_the_form_for_native_kernels_is_clean(tmp_path: Path) -> None:
    """As it was built, lifted to float64, and as onnxruntime saves it: bodies inlined, constants folded."""
    graph = moe_onnx.build_training_graph(
        SOUND["softmax-dropless-combine"], assembly=ALL_GRAPHS, optimize_for="native"
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    moe_onnx.InferenceSession(graph.models["apply"], options, kernels="body")
    saved = onnx.load(tmp_path / "saved.onnx")
    assert "MoeAdamW" not in {node.op_type for node in saved.graph.node}
    models = [*graph.models.values(), to_float64(graph.models["step"]), saved]
    for model in models:
        report = moe_onnx.validate(model)
        assert not findings(report), report.findings


def test_a_graph_lifted_to_float64_is_clean() -> None:
    assert not findings(moe_onnx.validate(to_float64(layer_step())))


@pytest.mark.parametrize("kernels", ["body", *OP_ROUTES])
def test_what_onnxruntime_saves_is_clean(kernels: str, tmp_path: Path) -> None:
    """Bodies are inlined, nodes are fused and folded: it is still the manifest's graph."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    moe_onnx.InferenceSession(layer_step(), options, kernels=kernels)
    report = moe_onnx.validate(tmp_path / "saved.onnx")
    assert not findings(report), report.findings
    skipped = {check.name: check.skipped for check in report.checks}
    if kernels == "native":  # all nodes are still there
        assert not skipped["training.operators.operators"]
    else:
        assert "bodies have taken the place" in skipped["training.operators.operators"][0]


def test_a_graph_that_was_differentiated_again_is_clean() -> None:
    """The manifest stays in its metadata; only its further outputs are noted."""
    again = moe_onnx.differentiate(layer_eval(), loss="loss", wrt=["gate.weight", "hidden_states"])
    assert {finding.code for finding in findings(moe_onnx.validate(again))} <= {"MO609"}


def test_a_legalized_graph_is_clean() -> None:
    for route in ("native", "python", "body"):
        assert not findings(moe_onnx.validate(legalize(layer_step(), route=route).model)), route


def test_constants_as_nodes_are_clean() -> None:
    model = copy_of(layer_step())
    for tensor in model.graph.initializer:
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    assert not findings(moe_onnx.validate(model))


def test_models_without_a_manifest_are_left_alone() -> None:
    report = moe_onnx.validate(plain_model())
    assert not findings(report)
    for check in report.checks:
        if check.name.startswith(FAMILY) and not check.name.startswith("training.folder"):
            assert check.skipped and "no moe_onnx.manifest" in check.skipped[0], check


def test_a_graph_of_another_name_is_known_by_its_inputs_and_outputs() -> None:
    for assembly, model in layer_graph().models.items():
        renamed = copy_of(model)
        renamed.graph.name = "main_graph"
        assert not findings(moe_onnx.validate(renamed)), assembly


# --- Folders ----------------------------------------------------------------------------------------


def test_a_saved_folder_is_clean(tmp_path: Path) -> None:
    folder = layer_graph().save(tmp_path)
    for path in sorted(folder.glob("*.onnx")):
        report = moe_onnx.validate(path)
        assert not findings(report), (path, report.findings)
        assert not [c.skipped for c in report.checks if c.name == "training.folder.folder" and c.skipped]


@pytest.mark.parametrize("text", ['{"name": "a browser extension", "manifest_version": 3}', "", "\xff{"])
def test_the_manifest_of_another_program_is_none_of_our_business(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    onnx.save(layer_eval(), tmp_path / "eval.onnx")
    assert not findings(moe_onnx.validate(tmp_path / "eval.onnx"))


def test_a_folder_is_told_what_differs(tmp_path: Path) -> None:
    path = broken.beside(lambda data: data["config"].update(num_experts_per_tok=1))(tmp_path / "model.onnx")
    found = one(path, "MO622").found
    assert "'config.num_experts_per_tok' is 1, in the graph 2" in found
    data = json.loads((tmp_path / "manifest.json").read_text())
    del data["graphs"]["grad"]
    (tmp_path / "manifest.json").write_text(json.dumps(data | {"config": layer_graph().manifest.config}))
    assert "only the graph has 'graphs.grad'" in one(path, "MO622").found


@pytest.mark.parametrize("name", ["../step", "", "a/b", "y\x00", "z" * 300])
def test_names_of_graphs_do_not_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    model = copy_of(layer_eval())

    def add(data: dict[str, Any]) -> None:
        data["graphs"][name] = {"inputs": [], "outputs": []}

    broken.with_manifest(add)(model)
    (tmp_path / "manifest.json").write_text(manifest_of(model).value)
    onnx.save(model, tmp_path / "eval.onnx")
    assert "MO623" in moe_onnx.validate(tmp_path / "eval.onnx").codes


# --- What findings say ------------------------------------------------------------------------------


def test_merged_weights_are_named_with_the_nodes_that_read_them() -> None:
    """As exports do that deduplicate initializers (the torch exporter and its constant folding)."""
    finding = one(broken_by(grad_model, broken.read_instead(broken.Q1, broken.Q0)), "MO611")
    assert broken.Q1 in finding.where
    assert f"'{broken.Q0}' is read in 2 places" in finding.found
    assert "node 'model.layers.1/self_attn/Gemm' (Gemm)" in finding.found


def test_gradients_in_each_others_place_are_named() -> None:
    model = broken_by(grad_model, broken.swap(f"{broken.Q0}.grad", f"{broken.O0}.grad"))
    found = [finding for finding in moe_onnx.validate(model) if finding.code == "MO613"]
    assert len(found) == 2
    assert broken.Q0 in found[0].where and broken.O0 in found[0].found
    assert broken.O0 in found[1].where and broken.Q0 in found[1].found


def test_queries_and_keys_of_one_input_are_told_apart() -> None:
    """Both are made of the same hidden states: what comes back to each tells them apart."""
    config = tiny_lm(num_hidden_layers=1, num_key_value_heads=4, attention_bias=True)
    graph = moe_onnx.build_training_graph(config, assembly="grad").model
    for kind in ("weight", "bias"):
        names = [f"model.layers.0.self_attn.{name}_proj.{kind}" for name in "qk"]
        assert len({layer.shape for layer in map(_parameter_of(graph), names)}) == 1
        model = copy_of(graph)
        broken.swap(*(f"{name}.grad" for name in names))(model)
        codes = {finding.code for finding in findings(moe_onnx.validate(model))}
        assert codes == {"MO613"}, kind


def _parameter_of(model: onnx.ModelProto) -> Any:
    return Manifest.from_json(manifest_of(model).value).parameter


def test_a_lost_expert_is_named_with_its_number() -> None:
    found = [f for f in moe_onnx.validate(broken_by(layer_eval, broken.lose_branch)) if f.code == "MO616"]
    assert "'experts.up_proj'" in found[0].where
    assert "expert 2 of 3 without a way to 'loss'" in found[0].found


def test_a_frozen_parameter_is_called_so() -> None:
    finding = one(broken_by(layer_eval, broken.freeze), "MO607")
    assert "parameter 'gate.weight'" in finding.found
    assert "became an initializer, which is never trained" in finding.found


def test_many_of_a_kind_are_one_finding() -> None:
    model = copy_of(step_model())
    kept = [value for value in model.graph.output if not value.name.endswith(".updated")]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    finding = one(model, "MO607")
    parameters = len(training_graph().manifest.parameters)
    assert f"and {parameters - 3} more" in finding.found and f"and {2 * parameters - 3} more" in finding.found


def test_the_norm_says_whose_gradients_it_leaves_out() -> None:
    finding = one(broken_by(layer_step, broken.out_of_norm), "MO620")
    assert "1 of 3 gradients are not in it: those of 'experts.up_proj'" in finding.found


def test_both_moments_are_told_apart() -> None:
    """exp_avg and exp_avg_sq of one parameter changed places: its update reads both, its states do not."""
    names = [f"gate.weight.{name}" for name in ("exp_avg", "exp_avg_sq")]
    model = broken_by(broken.layer_apply, broken.readers(*names))
    found = [finding for finding in moe_onnx.validate(model) if finding.code == "MO614"]
    assert [finding.where for finding in found] == [f"output '{name}.updated'" for name in names]


# --- Nothing makes a check fail ----------------------------------------------------------------------


def outcomes(model: onnx.ModelProto) -> list[str]:
    """What the checks of this family yield, and nothing else: an exception fails the test."""
    families.load()
    subject = Subject(model, "model")
    checks = [check for check in CHECKS if check.name.startswith(FAMILY)]
    return [str(outcome) for check in checks for outcome in check.function(subject)]


_JUNK: list[Any] = [None, -1, 10**400, "x", "\ud800", [], {}, [[1]], True, float("nan"), 2**62, ["a"], 0]


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key)
            yield from _places(value, (*path, key))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield (*path, number)
            yield from _places(value, (*path, number))


@pytest.mark.parametrize("seed", range(3))
def test_no_manifest_makes_a_check_fail(seed: int) -> None:
    rng = random.Random(seed)
    model = [layer_eval, layer_step, broken.layer_apply][seed]()
    places = list(_places(json.loads(manifest_of(model).value)))
    own = [place for place in places if place[0] not in ("graphs", "parameters")]
    for number in range(30):
        worse = copy_of(model)
        chosen = rng.sample(own if number % 2 else places, rng.choice([1, 1, 2]))

        def change(data: Any, chosen: Any = chosen) -> None:
            for *path, last in chosen:
                inside = data
                for key in path:
                    inside = inside[key]
                inside[last] = rng.choice(_JUNK)

        try:
            broken.with_manifest(change)(worse)
        except (KeyError, IndexError, TypeError):
            continue  # the second place was inside the first
        for text in outcomes(worse):
            text.encode("utf-8")  # it goes into files and onto consoles


@pytest.mark.parametrize("seed", range(2))
def test_no_graph_makes_a_check_fail(seed: int) -> None:
    """Nodes taken out, wired at random, in cycles."""
    rng = random.Random(seed)
    for _ in range(8):
        model = copy_of(layer_step())
        names = [name for node in model.graph.node for name in (*node.input, *node.output)]
        for node in rng.sample(list(model.graph.node), 8):
            kind = rng.randrange(4)
            if kind == 0:
                model.graph.node.remove(node)
            elif kind == 1 and node.input:
                node.input[rng.randrange(len(node.input))] = rng.choice([*names, ""])
            elif kind == 2 and node.output:
                node.output[rng.randrange(len(node.output))] = rng.choice([*names, ""])
            else:
                node.op_type = rng.choice(["Split", "Concat", "Identity", "Reshape", "ReduceSum", "Nothing"])
        outcomes(model)


def test_the_dependences_of_a_graph_are_those_of_its_values() -> None:
    """Through subgraphs, but not through sizes, and in any order of the nodes."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[n] a, float[n] b, float[n] c, bool which) => (float[n] y, float[n] z) {
            y = Add (inside, sized)
            shape = Shape (a)
            sized = Expand (zero, shape)
            zero = Constant <value_float = 0.0> ()
            inside = If (which) <
                then_branch = t () => (float[n] then) { then = Neg (b) },
                else_branch = e () => (float[n] else) { own = Neg (c) else = Identity (own) }>
            z = Neg (a)
        }
    """)
    flow = flow_of(Subject(model, "g"))
    assert len(flow.order) == len(flow.nodes)
    depends = flow.dependence(["a", "b", "c"])
    assert depends["y"] == 0b110 and depends["z"] == 0b001
    assert "a" not in flow.ancestors(["y"]) and {"b", "c", "which"} <= flow.ancestors(["y"])
    assert flow.spread("z").inputs == {"a"}
    assert flow.order.index(flow.maker["y"]) > flow.order.index(flow.maker["inside"])


def test_updates_by_slices_are_looked_into() -> None:
    """Large stacked weights are updated by a Scan: the checks see through it."""
    config = moe_onnx.MoeLayerConfig(
        hidden_size=512, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=512
    )
    graph = moe_onnx.build_training_graph(config, assembly="apply", optimizer=moe_onnx.AdamW())
    model = graph.models["apply"]
    scans = [node for node in model.graph.node if node.op_type == "Scan"]
    assert len(scans) >= 2 and not findings(moe_onnx.validate(model))
    broken = copy_of(model)
    scan = next(node for node in broken.graph.node if node.op_type == "Scan")
    scan.input[1] = scan.input[0]  # the parameter in the gradient's place
    assert "MO614" in moe_onnx.validate(broken).codes
    broken = copy_of(model)
    first, second, *_ = (node for node in broken.graph.node if node.op_type == "Scan")
    first.input[2] = second.input[2]  # another parameter's moment
    assert "MO615" in moe_onnx.validate(broken).codes
    scan.ClearField("output")
    assert "MO001" not in moe_onnx.validate(broken).codes
