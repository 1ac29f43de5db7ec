"""``training_graph_from``: what exporters say of weights and do to them, and files that are broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper
from test_imported import finite_differences, mlp, model_of, normal, scoped

import moe_onnx
from moe_onnx.cli import main

SQUARED = {"loss": "mean-squared-error", "assembly": "grad"}


def said(model: onnx.ModelProto, name: str, key: str, value: str) -> None:
    """Say something of an initializer, as torch.onnx.export(dynamo=True) does."""
    info = next((one for one in model.graph.value_info if one.name == name), None)
    if info is None:
        tensor = next(one for one in model.graph.initializer if one.name == name)
        info = helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        model.graph.value_info.append(info)
        info = model.graph.value_info[-1]
    assert isinstance(info, ValueInfoProto)
    info.metadata_props.add(key=key, value=value)


def kinds(model: onnx.ModelProto, **of: str) -> onnx.ModelProto:
    for name, kind in of.items():
        said(model, name.replace("__", "."), "pkg.torch.export.graph_signature.InputSpec.kind", kind)
    return model


def folded(model: onnx.ModelProto, name: str, *sources: str) -> None:
    said(model, name, "pkg.onnxscript.optimizer.folded_from", repr(sorted(sources)))


def trained(model: onnx.ModelProto, **options: Any) -> moe_onnx.TrainingGraph:
    return moe_onnx.training_graph_from(model, **(SQUARED | options))


def test_parameters_are_those_that_the_exporter_calls_so() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      h = MatMul(x, w)
      s = Mul(h, scale)
      t = Add(s, shift)
      y = Mul(t, table)
    }"""
    model = model_of(text, w=normal(4, 4), scale=np.float32(0.7), shift=normal(4), table=normal(4))
    assert trained(model).manifest.parameter_names == ("w", "shift", "table")  # nothing is said
    kinds(model, w="PARAMETER", scale="PARAMETER", shift="BUFFER", table="CONSTANT_TENSOR")
    graph = trained(model)
    assert graph.manifest.parameter_names == ("w", "scale")
    finite_differences(graph, {"x": normal(3, 4), "target": normal(3, 4)})
    assert trained(model, params=["shift"]).manifest.parameter_names == ("shift",)
    with pytest.raises(moe_onnx.OptionError, match="matches only constants that are no weights: shift"):
        trained(model, params=["sh*"])


def test_a_module_that_is_called_twice_stays_one() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      h = Gemm(x, fc__weight, fc__bias)
      t = Tanh(h)
      y = Gemm(t, fc__weight, fc__bias)
    }"""
    model = model_of(text, fc__weight=normal(4, 4), fc__bias=normal(4))
    for node, name in zip(model.graph.node, ("/fc/Gemm", "/Tanh", "/fc_1/Gemm"), strict=True):
        node.name = name  # as dynamo=False calls the second call of the same module
    graph = trained(model)
    assert graph.manifest.parameter_names == ("fc.weight", "fc.bias")
    assert graph.manifest.config["tied"] == ["fc.weight", "fc.bias"] and not graph.manifest.config["split"]
    finite_differences(graph, {"x": normal(3, 4), "target": normal(3, 4)})


def test_matrices_that_were_folded_and_then_merged_are_split() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      other = Identity(turned)
      h = MatMul(x, turned)
      t = Tanh(h)
      y = MatMul(t, other)
    }"""
    model = model_of(text, turned=normal(4, 4))
    for node in model.graph.node:
        for names in (node.input, node.output):
            known = {"turned": "onnx::MatMul_7", "other": "onnx::MatMul_9"}
            names[:] = [known.get(name, name) for name in names]
    model.graph.initializer[0].name = "onnx::MatMul_7"
    model.graph.node[1].name, model.graph.node[3].name = "/layers.0/fc/MatMul", "/layers.1/fc/MatMul"
    graph = trained(model)
    assert graph.manifest.parameter_names == ("layers.0.fc.weight", "layers.1.fc.weight")
    config = graph.manifest.config
    assert config["tied"] == [] and config["split"] == {"layers.1.fc.weight": "onnx::MatMul_7"}
    finite_differences(graph, {"x": normal(3, 4), "target": normal(3, 4)})


def test_what_folding_has_computed_is_named_or_said(recwarn: pytest.WarningsRecorder) -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      h = MatMul(x, val_3)
      p = Mul(h, val_9)
      q = Add(p, cast)
      r = Mul(q, mul_82)
      y = Mul(r, val_5)
    }"""
    weights = {"val_3": normal(4, 4), "val_9": normal(1, 1), "cast": normal(4), "val_5": normal(1)}
    model = model_of(text, **weights, mul_82=normal(4))
    for node in model.graph.node:
        scoped(node, "attention")
    folded(model, "val_3", "attention.in_proj_weight")
    folded(model, "val_9", "act.weight", "val_8")
    folded(model, "cast", "norm.bias")
    folded(model, "val_5", "val_1", "val_2")  # an epsilon
    folded(model, "mul_82", "arange_5", "div", "val_1")  # frequencies of rotary positions
    graph = trained(model)
    assert graph.manifest.parameter_names == ("attention.in_proj_weight", "val_9", "cast")
    assert graph.manifest.config["renamed"] == {"attention.in_proj_weight": "val_3"}
    text = str(recwarn.pop(UserWarning).message)
    assert "'val_9' (computed from act.weight), 'cast' (computed from norm.bias)" in text
    finite_differences(graph, {"x": normal(3, 4), "target": normal(3, 4)})


def test_matrices_that_several_modules_read_may_be_merged() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      h = MatMul(x, val_3)
      t = Tanh(h)
      y = MatMul(t, val_3)
    }"""
    model = model_of(text, val_3=normal(4, 4))
    for node, module in zip(model.graph.node, ("a.fc", "tanh", "b.fc"), strict=True):
        scoped(node, module)
    folded(model, "val_3", "a.fc.weight")
    with pytest.warns(
        UserWarning, match="1 weights are read by several modules: 'a.fc.weight' by a.fc, b.fc"
    ):
        assert trained(model).manifest.parameter_names == ("a.fc.weight",)


def test_batch_norms_go_by_running_statistics_and_may_be_in_weights() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      h = MatMul(x, w)
      y = BatchNormalization <epsilon = 0.01> (h, gain, bias, mean, var)
    }"""
    vectors = {name: normal(4) for name in ("gain", "bias", "mean")} | {"var": np.full(4, 1.5, np.float32)}
    model = model_of(text, w=normal(4, 4), **vectors)
    kinds(model, **dict.fromkeys(("w", "gain", "bias"), "PARAMETER"), mean="BUFFER", var="BUFFER")
    with pytest.warns(
        UserWarning, match="1 BatchNormalization nodes.*leaves as they are: 'y'.*module.eval()"
    ):
        graph = trained(model)
    assert graph.manifest.parameter_names == ("w", "gain", "bias")
    finite_differences(graph, {"x": normal(3, 4), "target": normal(3, 4)})
    model.graph.node[1].attribute.add(name="training_mode", type=onnx.AttributeProto.INT, i=1)
    model.graph.node[1].output.extend(["mean_now", "var_now"])
    with pytest.raises(
        moe_onnx.GradientError, match="BatchNormalization.*training_mode=1 has no gradient rule"
    ):
        trained(model)
    model = model_of(
        "m (float[n, 4] x) => (float[n, 4] y) { y = Gemm(x, w, b) }", w=normal(4, 4), b=normal(4)
    )
    rule = model.graph.node[0].metadata_props.add(key="pkg.onnxscript.rewriter.rule_name")
    rule.value = "FuseBatchNormIntoGemm"
    with pytest.warns(UserWarning, match="2 weights hold a BatchNorm, .*: 'w', 'b'. .*optimize=False"):
        trained(model)


def test_chunks_that_an_export_leaves_as_a_sequence() -> None:
    text = """m (float[n, 4] x) => (float[n, 2] y) {
      h = MatMul(x, w)
      two = Constant<value = int64 {2}>()
      both = SplitToSequence<axis = -1>(h, two)
      zero = Constant<value = int64 {0}>()
      one = Constant<value = int64 {1}>()
      a = SequenceAt(both, zero)
      b = SequenceAt(both, one)
      y = Mul(a, b)
    }"""
    graph = trained(model_of(text, w=normal(4, 4)))
    finite_differences(graph, {"x": normal(3, 4), "target": normal(3, 2)})
    text = text.replace("x) =>", "x, int64 at) =>").replace("y) {", "y, float[n, k] z) {")
    text = text.replace("y = Mul", "z = SequenceAt(both, at)\n      y = Mul")
    trained(model_of(text, w=normal(4, 4)), output="y")  # a sequence that stays is none of tensors' types


def test_layers_of_an_old_opset_are_fused() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      s = MatMul(x, gate)
      p = Softmax<axis = -1>(s)
      k = Constant<value = int64[1] {2}>()
      w, i = TopK(p, k)
      size = Shape(p)
      zeros = ConstantOfShape(size)
      g = ScatterElements<axis = 1>(zeros, i, w)
      ones = Constant<value_ints = [1, 1, 1]>()
      g0, g1, g2 = Split<axis = 1>(g, ones)
      h0 = MatMul(x, w0)
      y0 = Mul(h0, g0)
      h1 = MatMul(x, w1)
      y1 = Mul(h1, g1)
      h2 = MatMul(x, w2)
      y2 = Mul(h2, g2)
      a = Add(y0, y1)
      y = Add(a, y2)
    }"""
    weights = {"gate": normal(4, 3), "w0": normal(4, 4), "w1": normal(4, 4), "w2": normal(4, 4)}
    graph = trained(model_of(text, opset=15, **weights))
    assert list(graph.manifest.config["fused"]) == ["y/before"], graph.manifest.config["not_fused"]
    finite_differences(graph, {"x": normal(5, 4), "target": normal(5, 4)})


def first(field: str, value: Any) -> Callable[[onnx.ModelProto], None]:
    return lambda model: setattr(model.graph.initializer[0], field, value)


def external(**entries: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)

    return change


def sparse(model: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(2, np.float32), "fc1.weight")
    places = numpy_helper.from_array(np.array([0, 5], np.int64))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4, 8]))
    del model.graph.initializer[0]


def typed(kind: int) -> Callable[[onnx.ModelProto], None]:
    return lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", kind)


# What is changed in a model, and what is said of it.
BROKEN: dict[str, tuple[Callable[[onnx.ModelProto], Any], str]] = {
    "a cycle": (lambda m: m.graph.node[0].input.__setitem__(0, "r"), "not valid ONNX: .*topologically"),
    "no such value": (lambda m: m.graph.node[1].input.__setitem__(0, "nix"), "not valid ONNX: .*'nix'"),
    "a value twice": (lambda m: m.graph.node.append(m.graph.node[0]), "not valid ONNX: .*'h' has been used"),
    "an unknown operator": (lambda m: setattr(m.graph.node[0], "op_type", "MatMull"), "Registered|MatMull"),
    "a missing input": (lambda m: m.graph.node[3].input.__setitem__(1, ""), "not valid ONNX: .*input 1"),
    "an initializer twice": (
        lambda m: m.graph.initializer.append(m.graph.initializer[0]), "not valid ONNX: fc1.weight .*unique",
    ),
    "sizes": (lambda m: m.graph.initializer[0].dims.__setitem__(0, 5), "fc1.weight"),
    "an unknown dtype": (first("data_type", 99), "cannot be read: 99 is not a valid DataType"),
    "a future opset": (
        lambda m: setattr(m.opset_import[0], "version", 99), r"opset that onnx .* knows, up to \d+, got 99",
    ),
    "a sparse tensor": (sparse, "must be dense, got 'fc1.weight'"),
    "a file that is not there": (external(location="w.bin"), "'fc1.weight' cannot be read: .*w.bin"),
    "a file outside": (external(location="../w.bin"), "'fc1.weight' cannot be read: .*w.bin"),
    "an offset of letters": (external(location="w.bin", offset="abc"), "cannot be read: .*moe-onnx validate"),
    "an input of no type": (typed(0), "Input 'x' must have an element type"),
    "types that contradict": (typed(TensorProto.INT64), "warning: Types .* as onnx says: .*inconsistent"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_model_is_refused_by_what_is_wrong(case: str, tmp_path: Path, caplog: Any) -> None:
    change, words = BROKEN[case]
    model = mlp()
    change(model)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    command = ["train-graph", str(tmp_path / "net.onnx"), "--loss", "mean-squared-error"]
    done = CliRunner().invoke(main, [*command, "-o", str(tmp_path / "out")])
    assert done.exit_code == 2 and not (tmp_path / "out").exists(), done.output
    told = " ".join(done.output.split())
    assert re.search(words, told) and "Traceback" not in told and "defect" not in told, told
    assert not caplog.records  # nothing that only developers of onnx-ir read


def test_a_number_that_no_label_can_be_and_outputs_that_are_none_are_refused() -> None:
    with pytest.raises(moe_onnx.ConfigError, match="'ignore_index' must be an integer < 2"):
        moe_onnx.training_graph_from(mlp(), loss="cross-entropy", ignore_index=2**63)
    for name, what in (("x", "an input"), ("fc1.weight", "a weight")):
        with pytest.raises(moe_onnx.OptionError, match=f"got '{name}', which is {what}"):
            trained(mlp(), output=name)
    assert json.loads(json.dumps(trained(mlp(), output="h").manifest.config))["output"] == "h"


def masked(kind: str, vocabulary: int = 11) -> onnx.ModelProto:
    text = f"""lm (int32[batch, sequence] input_ids, {kind}[batch, sequence] attention_mask)
        => (float[batch, sequence, {vocabulary}] logits) {{
      e = Gather(embed__weight, input_ids)
      axis = Constant<value_ints = [2]>()
      one = Unsqueeze(attention_mask, axis)
      real = Cast<to = 1>(one)
      m = Mul(e, real)
      logits = MatMul(m, head__weight)
    }}"""
    return model_of(text, embed__weight=normal(vocabulary, 4), head__weight=normal(4, vocabulary))


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("kind", ["int32", "bool"])
def test_masks_and_ids_of_other_integers_are_fed_by_the_commands(kind: str, tmp_path: Path) -> None:
    onnx.save(masked(kind), tmp_path / "lm.onnx")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 11, 203))
    run("train-graph", tmp_path / "lm.onnx", "--loss", "cross-entropy", "-o", tmp_path / "lm")
    how = ("--tokens", tmp_path / "ids.npy", "--batch-size", 3, "--sequence-length", 9)
    run("train", tmp_path / "lm", *how, "--steps", 2, "--eval-every", 1, "-o", tmp_path / "run")
    told = json.loads(run("eval", tmp_path / "lm", *how, "--json"))
    assert told["tokens"] == 180
    run("generate", tmp_path / "lm", "--prompt-ids", "1,2", "--max-new-tokens", 2)
    session = moe_onnx.TrainingSession(tmp_path / "lm")
    with pytest.raises(
        moe_onnx.BatchError, match="'input_ids' must be int32, or what is exact in it, got int64"
    ):
        session.step({"input_ids": np.array([[1, 2**40]])})


@pytest.mark.parity
def test_an_imported_model_by_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "c": 2, "[UNK]": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "book.txt").write_text("a b c " * 60)
    onnx.save(masked("int64"), tmp_path / "lm.onnx")
    lm, run_folder = tmp_path / "lm", tmp_path / "run"
    run("train-graph", tmp_path / "lm.onnx", "--loss", "cross-entropy", "-o", lm)
    how = ("--text", tmp_path / "book.txt", "--batch-size", 3, "--sequence-length", 9)
    train = ("train", lm, *how, "--lr", 0.1, "--eval-every", 20, "-o", run_folder)
    told = run(*train, "--steps", 40, "--tokenizer", tmp_path / "words")
    assert "180 tokens by" in told
    assert "180 tokens by" in run(*train, "--steps", 60, "--resume")  # the run's own
    assert float(json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])["loss"]) < 0.5
    told = run("eval", lm, "--checkpoint", run_folder, *how)
    assert "180 tokens by" in told and "bits per byte" not in told
    words = ("generate", lm, "--checkpoint", run_folder, "--prompt", "a b", "--max-new-tokens", 4)
    assert run(*words, "--temperature", 0).endswith("a b c a b c")
    told = run("generate", lm, "--prompt", "a b", code=2)  # nothing says of which tokenizer it is
    assert "Give the tokenizer of the model, or token ids" in told


def test_tables_of_16_bits_are_trained() -> None:
    text = """lm (int64[batch, sequence] input_ids) => (float16[batch, sequence, 7] logits) {
      e = Gather(embed__weight, input_ids)
      turned = Transpose<perm = [1, 0]>(embed__weight)
      logits = MatMul(e, turned)
    }"""
    table = normal(7, 4).astype(np.float16)
    graph = moe_onnx.training_graph_from(
        model_of(text, embed__weight=table), loss="cross-entropy", assembly="grad+apply"
    )
    ids = np.array([[0, 3, 3, 6], [1, 3, 0, 2]])
    session = moe_onnx.InferenceSession(graph.models["grad"])
    batch = {"input_ids": ids, "labels": ids, "loss_scale": np.array(1, np.float32)}
    loss, found = session.run(
        ["loss", "embed.weight.grad"], {**batch, "embed.weight": table.astype(np.float32)}
    )

    def loss_of(value: np.ndarray) -> float:
        logits = (value[ids] @ value.T)[:, :-1].reshape(-1, 7)
        return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(6), ids[:, 1:].ravel()]))

    value = table.astype(np.float64)
    assert loss == pytest.approx(loss_of(value), rel=2e-3)
    for index in np.ndindex(7, 4):
        steps = []
        for step in (1e-5, -1e-5):
            moved = value.copy()
            moved[index] += step
            steps.append(loss_of(moved))
        assert found[index] == pytest.approx((steps[0] - steps[1]) / 2e-5, abs=4e-3), index
    assert moe_onnx.TrainingSession(graph, lr=1e-2).step({"input_ids": ids})["loss"] > 0


def test_bfloat16_is_said_to_need_a_device() -> None:
    text = "m (bfloat16[n, 4] x) => (bfloat16[n, 2] y) { y = MatMul(x, w) }"
    with pytest.warns(UserWarning, match="no products of it for a CPU"):
        trained(model_of(text, w=normal(4, 2).astype(ml_dtypes.bfloat16)))
