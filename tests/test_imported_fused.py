"""``training_graph_from`` fuses MoE layers first, and ``fold`` lets it see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from fuse_forms import BATCHED, changed, feeds, model_of, weights
from test_fuse import microsoft
from test_imported import codes, finite_differences

import moe_onnx
from moe_onnx.cli import main
from moe_onnx.rewrite.fuse import batched
from moe_onnx.rewrite.passes import apply_passes

SQUARED = {"loss": "mean-squared-error", "output": "y"}
TRAINED = {**SQUARED, "assembly": "grad+apply+forward", "optimizer": moe_onnx.SGD(max_grad_norm=None)}
# What torch.onnx.export(optimize=False) writes round the same nodes.
COMPUTED = changed(
    BATCHED,
    ("ids_flat = Reshape (ids, last)",
     "ids_plain = Reshape (ids, last)\n    top_id = Max (ids_plain)\n    like = Shape <start = 0> (top_id)\n"
     "    ids_flat = Expand (ids_plain, like)"),
    ("ids_2d = Unsqueeze (ids_flat, last)",
     "ids_3d = Unsqueeze (ids_flat, last)\n    ids_2d = Concat <axis = -1> (ids_3d)"),
    ("ups = GatherND (up, ids_2d)",
     "up_same = Transpose <perm = [0, 1, 2]> (up)\n    ups_same = GatherND (up_same, ids_2d)\n"
     "    ups = Transpose <perm = [0, 1, 2]> (ups_same)"),
    ("rows = Reshape (x_twice, flat)",
     "none = Shape <start = 0, end = 0> (x)\n    width = Shape <start = 1> (x)\n"
     "    flat_too = Concat <axis = 0> (none, last, width)\n    rows = Reshape (x_twice, flat_too)"),
    ("left, right = Split <axis = 1, num_outputs = 2> (raised)",
     "halves = Constant <value_ints = [3, 3]> ()\n    zeroth = Constant <value_int = 0> ()\n"
     "    first = Constant <value_int = 1> ()\n"
     "    both = SplitToSequence <axis = 1> (raised, halves)\n    left = SequenceAt (both, zeroth)\n"
     "    right = SequenceAt (both, first)"),
    ("by_token = Reshape (weighted, pairs)",
     "tokens = Shape <end = 1> (x)\n    inner = Constant <value_ints = [2, 4]> ()\n"
     "    by = Concat <axis = 0> (tokens, inner)\n    by_token = Reshape (weighted, by)"),
)  # fmt: skip


@pytest.fixture
def graph(tmp_path: Path) -> moe_onnx.TrainingGraph:
    """Of the layer as torch writes it, its weights in a file beside it."""
    path = tmp_path / "layer.onnx"
    onnx.save(
        model_of(COMPUTED, weights()), path, save_as_external_data=True, location="w", size_threshold=128
    )
    return moe_onnx.training_graph_from(path, **TRAINED)


def ours(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node if node.domain == "ascend.moe"}


def test_a_fused_layer_trains_by_its_own_parameters(graph: moe_onnx.TrainingGraph, tmp_path: Path) -> None:
    config = graph.manifest.config
    assert len(config["fused"]) == 1 and not config["not_fused"] and len(config["verified"]) >= 6
    assert graph.manifest.parameter_names == ("gate", "up", "down")
    assert ours(graph.models["grad"]) >= {"MoeGroupedMatmulWeightGrad", "MoeTokenUnpermuteWithRoutingMapGrad"}
    x = feeds(weights())["random"]
    finite_differences(graph, {"x": x, "target": np.ones_like(x)})
    assert codes(graph, tmp_path / "out") == []
    plain = moe_onnx.training_graph_from(tmp_path / "layer.onnx", **TRAINED, fuse=False)
    assert not ours(plain.models["grad"]) and not plain.manifest.config["fused"]
    sessions = [moe_onnx.TrainingSession(one, seed=0, lr=0.1) for one in (graph, plain)]
    for _ in range(2):
        first, second = (one.step({"x": x, "target": np.ones_like(x)})["loss"] for one in sessions)
        assert first == pytest.approx(second, rel=1e-5)
    for name, value in sessions[0].parameters().items():
        np.testing.assert_allclose(value, sessions[1].parameters()[name], rtol=1e-4, atol=1e-5)


def test_the_command_says_what_was_fused_and_takes_what_rewrite_wrote(
    graph: moe_onnx.TrainingGraph, tmp_path: Path
) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(main, [*words])
        assert result.exit_code == 0, result.output
        return result.output

    model, other = str(tmp_path / "layer.onnx"), tmp_path / "elsewhere"
    other.mkdir()
    how = ("--loss", "mean-squared-error", "--output", "y", "--assembly", "grad+apply")
    told = run("train-graph", model, *how, "-o", str(tmp_path / "one"))
    assert (
        "fused    y" in told
        and ": 6 experts, 2 a token" in told
        and "verified random inputs, seed 0: 1 output" in told
    )
    run("rewrite", model, "--passes", "fold,fuse", "-o", str(other / "fused.onnx"))
    told = run("train-graph", str(other / "fused.onnx"), *how, "-o", str(tmp_path / "two"))
    assert "fused    y" not in told
    told = run("train-graph", model, *how, "--no-fuse", "-o", str(tmp_path / "three"))
    assert "fused    y" not in told
    x = feeds(weights())["random"]
    batch = {"x": x, "target": np.zeros_like(x)}
    losses = [moe_onnx.TrainingSession(tmp_path / n).step(batch)["loss"] for n in ("one", "two", "three")]
    assert losses == [pytest.approx(losses[0], rel=1e-5)] * 3


def test_a_fuse_that_does_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = batched.combine

    def wrong(e, pairs, rows, index):  # type: ignore[no-untyped-def]
        return e.op("Neg", combine(e, pairs, rows, index))

    monkeypatch.setattr(batched, "combine", wrong)
    with pytest.warns(UserWarning, match="MoE layers are not fused.*output 'y' differs by"):
        graph = moe_onnx.training_graph_from(model_of(BATCHED, weights()), **SQUARED, assembly="grad")
    config = graph.manifest.config
    assert "output 'y' differs" in config["not_fused"]["the model"] and not config["fused"]
    assert not ours(graph.model)


def test_a_defect_of_a_pass_is_said_and_trains_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise KeyError("a value")

    monkeypatch.setattr(batched, "combine", wrong)
    with pytest.warns(UserWarning, match="not fused.*a defect of moe_onnx, KeyError: 'a value'"):
        graph = moe_onnx.training_graph_from(model_of(BATCHED, weights()), **SQUARED, assembly="grad")
    assert "KeyError" in graph.manifest.config["not_fused"]["the model"] and not ours(graph.model)


def test_weights_that_folding_has_named_are_called_as_without_fuse() -> None:
    model = model_of(BATCHED, weights())
    for old, new in (("up", "onnx::MatMul_7"), ("down", "val_8")):
        next(tensor for tensor in model.graph.initializer if tensor.name == old).name = new
        reader = next(node for node in model.graph.node if node.input[:1] == [old])
        reader.input[0], reader.name = new, f"/layers.0/experts/{old}/GatherND"
    names = [
        moe_onnx.training_graph_from(model, **SQUARED, assembly="grad", fuse=fuse).manifest.parameter_names
        for fuse in (True, False)
    ]
    assert names[0] == names[1] == ("gate", "layers.0.experts.up.weight", "layers.0.experts.down.weight")


def test_near_misses_are_said() -> None:
    text = changed(BATCHED, ("silu = Mul (left, sigmoid)", "silu = CumSum (left, axis)"),
                   ("int64[1] last", "int64 axis = {0}, int64[1] last"))  # fmt: skip
    graph = moe_onnx.training_graph_from(model_of(text, weights()), **SQUARED, assembly="grad")
    assert graph.manifest.config["not_fused"] == {"silu": "CumSum is not known to work row by row"}
    with pytest.raises(moe_onnx.OptionError, match="fuse must be True or False, got 'yes'"):
        moe_onnx.training_graph_from(model_of(text, weights()), **SQUARED, fuse="yes")  # type: ignore[arg-type]


def test_a_node_of_onnxruntime_trains_or_says_what_is_no_rule_of_its_kernel() -> None:
    graph = moe_onnx.training_graph_from(
        microsoft("silu", bias=True), loss="mean-squared-error", assembly="grad"
    )
    assert graph.manifest.parameter_names == ("up", "down", "ub", "db")
    rng = np.random.default_rng(0)
    x, logits, target = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (6, 5), (6, 4)))
    finite_differences(graph, {"x": x, "logits": logits, "target": target})
    with pytest.raises(
        moe_onnx.GradientError, match="MoE layers that were not fused: 'moe': use_sparse_mixer=1"
    ):
        moe_onnx.training_graph_from(microsoft("relu", use_sparse_mixer=1), loss="mean-squared-error")


def test_fold_keeps_every_bit_and_finds_nothing_twice() -> None:
    before = model_of(COMPUTED, weights())
    taken = ["by_token/shape", "left/start", "none/computed"]  # by values of the model already
    for old, new in zip(["silu", "sigmoid", "probs"], taken, strict=True):
        for node in before.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
    done = moe_onnx.rewrite_model(before, ["fold"])
    assert all(line.endswith("the same to the bit") for line in done.report.verified)
    assert len(done.report.verified) > 5
    assert {note.operator for note in done.report.applied} == {
        "Concat", "Expand", "Max", "Reshape", "SequenceAt", "Shape", "Transpose",
    }  # fmt: skip
    assert not {"SequenceAt", "SplitToSequence", "Transpose"} & {n.op_type for n in done.model.graph.node}
    assert not moe_onnx.rewrite_model(done.model, ["fold"]).changed
    assert not apply_passes(before, ["fuse"]).report.applied
    assert apply_passes(done.model, ["fuse"]).report.applied


def test_fold_in_functions_and_branches_and_what_it_leaves() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    m (float[n, 4] x, bool c) => (float[n, 4] y, float[n, 4] out, float[4, n] z, float[a, b] w) {
      y = local.Same(x)
      z = Transpose<perm = [1, 0]>(x)
      out = Transpose<perm = [0, 1]>(x)
      w = If(c) <
        then_branch = t () => (float[a, b] p) { s = Shape<start = 1>(x) one = Constant<value_ints = [-1]>()
            to = Concat<axis = 0>(one, s) q = Reshape(x, to) p = Neg(q) },
        else_branch = e () => (float[a, b] p) { s = Shape(x) p = Expand(x, s) } >
    }
    <domain: "local", opset_import: ["" : 21]> Same (x) => (y) { a = Max(x) y = Neg(a) }
    """
    model = onnx.parser.parse_model(text)
    done = moe_onnx.rewrite_model(model, ["fold"])
    assert {(n.operator, n.place.split(" ")[0]) for n in done.report.applied} == {
        ("Max", "function"), ("Shape", "then_branch"), ("Concat", "then_branch"),
    }  # fmt: skip
    options = ort.SessionOptions()
    options.log_severity_level = 4
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for c in (True, False):
        runs = [
            ort.InferenceSession(m.SerializeToString(), options).run(None, {"x": x, "c": np.array(c)})
            for m in (model, done.model)
        ]
        for one, two in zip(*runs, strict=True):
            np.testing.assert_array_equal(one, two)
