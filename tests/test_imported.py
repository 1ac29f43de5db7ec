"""``training_graph_from``: training graphs of ONNX models that were written by hand."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

import moe_onnx
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.cli import main
from moe_onnx.rewrite.to_float64 import to_float64

ALL = "grad+apply+eval+forward+step"
RNG = np.random.default_rng(7)


def model_of(text: str, *, opset: int = 21, **weights: np.ndarray) -> onnx.ModelProto:
    """A model in onnx's text form; names of weights may have dots, which are written ``__`` in the text."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\n{text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()
    )
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
        node.output[:] = [name.replace("__", ".") for name in node.output]
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("__", ".")
    return model


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def mlp(**more: Any) -> onnx.ModelProto:
    text = """mlp (float[n, 4] x) => (float[n, 3] y) {
      h = MatMul(x, fc1__weight)
      a = Add(h, fc1__bias)
      r = Tanh(a)
      z = MatMul(r, fc2__weight)
      y = Mul(z, scale)
    }"""
    given = {"fc1__weight": normal(4, 8), "fc1__bias": normal(8), "fc2__weight": normal(8, 3)}
    return model_of(text, **(given | {"scale": np.float32(0.5)} | more))


def attention() -> onnx.ModelProto:
    """A lookup, a norm, attention and a tied output."""
    text = """lm (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
        => (float[batch, sequence, 11] logits) {
      e = Gather(embed__weight, input_ids)
      h = LayerNormalization<axis = -1>(e, norm__weight, norm__bias)
      q = MatMul(h, q__weight)
      k = MatMul(h, k__weight)
      kt = Transpose<perm = [0, 2, 1]>(k)
      s = MatMul(q, kt)
      m = Cast<to = 9>(attention_mask)
      axis = Constant<value_ints = [1]>()
      mu = Unsqueeze(m, axis)
      low = Constant<value_float = -1000.0>()
      sm = Where(mu, s, low)
      p = Softmax<axis = -1>(sm)
      o = MatMul(p, h)
      turned = Transpose<perm = [1, 0]>(embed__weight)
      logits = MatMul(o, turned)
    }"""
    return model_of(
        text,
        embed__weight=normal(11, 6),
        norm__weight=1 + 0.1 * normal(6),
        norm__bias=normal(6),
        q__weight=normal(6, 6),
        k__weight=normal(6, 6),
    )


def finite_differences(graph: moe_onnx.TrainingGraph, batch: dict[str, np.ndarray]) -> None:
    """Every gradient is that of the loss, in float64."""
    model, info = to_float64(graph.models["grad"]), graph.manifest.graphs["grad"]
    session = moe_onnx.InferenceSession(model)
    weights = {name: np.array(value, np.float64) for name, value in graph.weights.parameters()}
    batch = {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in batch.items()}
    names = [one.name for one in info.outputs]
    got = dict(zip(names, session.run(names, {**batch, **weights}), strict=True))
    norm = 0.0
    for parameter in graph.manifest.parameters:
        value, gradient = weights[parameter.name], got[parameter.gradient]
        norm += float((gradient**2).sum())
        for index in np.ndindex(*value.shape):
            old, losses = value[index], []
            for step in (1e-5, -1e-5):
                value[index] = old + step
                losses.append(session.run(["loss"], {**batch, **weights})[0])
            value[index] = old
            want = float(losses[0] - losses[1]) / 2e-5
            assert gradient[index] == pytest.approx(want, rel=1e-5, abs=1e-7), (parameter.name, index)
    assert got["grad_norm"] == pytest.approx(norm**0.5)


def cross_entropy(logits: np.ndarray, labels: np.ndarray, ignore: int = -100) -> tuple[float, int]:
    """Token by token."""
    losses = []
    for row, label in zip(logits.reshape(-1, logits.shape[-1]), labels.ravel(), strict=True):
        if label != ignore:
            row = row.astype(np.float64)
            losses.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[label])
    return float(np.mean(losses)) if losses else 0.0, len(losses)


def codes(graph: moe_onnx.TrainingGraph, folder: Path, level: str = "static") -> list[str]:
    graph.save(folder)
    found = []
    for name in graph.models:
        found += [
            f.code for f in moe_onnx.validate(folder / f"{name}.onnx", level=level) if f.severity != "note"
        ]
    return found


def test_an_mlp_is_trained_as_by_numpy(tmp_path: Path) -> None:
    graph = moe_onnx.training_graph_from(
        mlp(), loss="mean-squared-error", assembly=ALL, optimizer=moe_onnx.SGD(max_grad_norm=None)
    )
    assert graph.manifest.parameter_names == ("fc1.weight", "fc1.bias", "fc2.weight")  # not the scale
    batch = {"x": normal(5, 4), "target": normal(5, 3)}
    p = {name: np.array(value, np.float64) for name, value in graph.weights.parameters()}
    losses = []
    for _ in range(3):
        r = np.tanh(batch["x"] @ p["fc1.weight"] + p["fc1.bias"])
        error = 0.5 * (r @ p["fc2.weight"]) - batch["target"]
        losses.append(float((error**2).mean()))
        dz = error / error.size
        da = dz @ p["fc2.weight"].T * (1 - r**2)
        p["fc2.weight"] -= 0.1 * (r.T @ dz)
        p["fc1.weight"] -= 0.1 * (batch["x"].T @ da)
        p["fc1.bias"] -= 0.1 * da.sum(0)
    for assembly in ("grad+apply", "step"):
        session = moe_onnx.TrainingSession(graph, lr=0.1, assembly=assembly)
        assert [session.step(batch)["loss"] for _ in range(3)] == pytest.approx(losses, rel=1e-6)
        for name, value in session.parameters().items():
            np.testing.assert_allclose(value, p[name], rtol=1e-5, atol=1e-6)
    assert session.forward({"x": batch["x"]})["y"].shape == (5, 3)
    assert codes(graph, tmp_path, "run") == []
    session = moe_onnx.TrainingSession(tmp_path, lr=0.1)
    assert session.step(batch)["loss"] == pytest.approx(losses[0])
    session.save_checkpoint(tmp_path / "checkpoint")
    other = moe_onnx.TrainingSession(tmp_path, lr=0.1)
    other.load_checkpoint(tmp_path / "checkpoint")
    assert other.step(batch)["loss"] == pytest.approx(losses[1])


def test_attention_with_a_tied_output(tmp_path: Path) -> None:
    graph = moe_onnx.training_graph_from(
        attention(), loss="cross-entropy", assembly="grad+apply+eval+forward"
    )
    config = graph.manifest.config
    assert config["tied"] == ["embed.weight"] and config["shift"] and config["vocab_size"] == 11
    ids = RNG.integers(0, 11, (2, 5))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    labels = np.where(RNG.random((2, 5)) < 0.2, -100, ids)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    session = moe_onnx.TrainingSession(graph, lr=1e-2)
    logits = session.forward({"input_ids": ids, "attention_mask": mask})["logits"]
    following = np.where(mask[:, 1:] * mask[:, :-1] > 0, labels[:, 1:], -100)
    want, count = cross_entropy(logits[:, :-1], following)
    got = session.eval(batch)
    assert got == {"loss": pytest.approx(want, rel=1e-6), "num_tokens": count}
    finite_differences(graph, batch)
    first = session.step({"input_ids": ids})["loss"]  # labels are the ids, all tokens are real
    assert [session.step({"input_ids": ids})["loss"] for _ in range(20)][-1] < first
    assert codes(graph, tmp_path) == []
    with pytest.raises(moe_onnx.BatchError, match=r"'input_ids': values must be in \[0, 11\), got 11"):
        session.step({"input_ids": np.full((1, 3), 11)})


@pytest.mark.parametrize("rank", [2, 3])
def test_cross_entropy_without_shift(rank: int) -> None:
    shape = ["n", "s"][: rank - 1]
    text = f"m (float[{', '.join(shape)}, 4] x) => (float[{', '.join(shape)}, 3] y) {{ y = MatMul(x, w) }}"
    model = model_of(text, w=normal(4, 3))
    graph = moe_onnx.training_graph_from(
        model, loss="cross-entropy", assembly="grad+eval", shift=None if rank == 2 else False, ignore_index=9
    )
    x, labels = normal(*(5, 2)[: rank - 1], 4), RNG.integers(0, 3, (5, 2)[: rank - 1])
    labels.flat[1] = 9
    want, count = cross_entropy(x @ graph.weights.read("w"), labels, 9)
    session = moe_onnx.TrainingSession(graph, assembly="")
    assert session.eval({"x": x, "labels": labels}) == {"loss": pytest.approx(want), "num_tokens": count}
    assert session.eval({"x": x, "labels": np.full_like(labels, 9)}) == {"loss": 0.0, "num_tokens": 0}
    finite_differences(graph, {"x": x, "labels": labels})
    with pytest.raises(moe_onnx.BatchError, match=r"'labels': values must be in \[0, 3\) or 9"):
        session.eval({"x": x, "labels": np.full_like(labels, 3)})


def test_a_loss_of_the_models_own_keeps_its_inputs() -> None:
    text = """m (float[n, 4] x, float[n, 2] target, float[n] unused)
        => (float[n, 2] y, float loss, float[n] z) {
      y = MatMul(x, w)
      d = Sub(y, target)
      s = Mul(d, d)
      loss = ReduceMean<keepdims = 0>(s)
      z = Identity(unused)
    }"""
    graph = moe_onnx.training_graph_from(model_of(text, w=normal(4, 2)), loss="loss", assembly=ALL)
    named = {name: [one.name for one in g.inputs_of("batch")] for name, g in graph.manifest.graphs.items()}
    assert named["grad"] == named["step"] == named["eval"] == ["x", "target"]
    assert named["forward"] == ["x", "unused"]
    assert [one.name for one in graph.manifest.graphs["forward"].outputs] == ["y", "z"]
    batch = {"x": normal(3, 4), "target": normal(3, 2)}
    finite_differences(graph, batch)
    session = moe_onnx.TrainingSession(graph, lr=0.1)
    assert session.step(batch)["loss"] > session.step(batch)["loss"]


@pytest.mark.parametrize(
    ("params", "want"),
    [
        (["fc1.*"], ["fc1.weight", "fc1.bias"]),
        (["!*.bias"], ["fc1.weight", "fc2.weight"]),
        (["*.weight", "!fc1*"], ["fc2.weight"]),
        (["scale", "fc2.weight"], ["fc2.weight", "scale"]),  # by its full name even a scalar
        ("fc1.bias", ["fc1.bias"]),
    ],
)
def test_patterns_choose_and_the_rest_is_frozen(params: Sequence[str], want: list[str]) -> None:
    graph = moe_onnx.training_graph_from(
        mlp(), loss="mean-squared-error", params=params, assembly="grad+apply+forward"
    )
    assert sorted(graph.manifest.parameter_names) == sorted(want)
    batch = {"x": normal(3, 4), "target": normal(3, 3)}
    session = moe_onnx.TrainingSession(graph, lr=0.1)
    before = session.forward({"x": batch["x"]})["y"]
    session.step(batch)
    assert not np.array_equal(before, session.forward({"x": batch["x"]})["y"])
    frozen = {"fc1.weight", "fc1.bias", "fc2.weight", "scale"} - set(want)
    assert {t.name for t in graph.models["grad"].graph.initializer} >= frozen


def scoped(node: onnx.NodeProto, module: str) -> None:
    """Say which module a node is in, as torch.onnx.export(dynamo=True) does."""
    parts = module.split(".")
    scopes = ["", *(".".join(parts[: i + 1]) for i in range(len(parts))), "op"]
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))


def exported() -> onnx.ModelProto:
    """Two norms merged into one, a product's matrix turned, and an output tied to the lookup and turned."""
    table, proj = normal(7, 4), normal(4, 4)
    text = """m (int64[n] ids) => (float[n, 7] logits) {
      e = Gather(embed__weight, ids)
      a = Mul(e, norm1__weight)
      b = MatMul(a, val_3)
      c = Mul(b, norm1__weight)
      d = Add(c, norm1__weight)
      logits = MatMul(d, val_9)
    }"""
    model = model_of(
        text,
        embed__weight=table,
        norm1__weight=np.ones(4, np.float32),
        val_3=proj.T.copy(),
        val_9=table.T.copy(),
    )
    for node, module in zip(
        model.graph.node, ["embed", "norm1", "mlp.proj", "norm2", "norm2", "head"], strict=True
    ):
        scoped(node, module)
    return model


def test_merged_renamed_and_turned_weights_are_themselves_again(tmp_path: Path) -> None:
    model = exported()
    graph = moe_onnx.training_graph_from(model, loss="cross-entropy", assembly="grad+apply+forward")
    config = graph.manifest.config
    shapes = {one.name: one.shape for one in graph.manifest.parameters}
    assert shapes == {
        "embed.weight": (7, 4), "norm1.weight": (4,), "norm2.weight": (4,), "mlp.proj.weight": (4, 4),
    }  # fmt: skip
    assert config["split"] == {"norm2.weight": "norm1.weight"}
    assert config["renamed"] == {"mlp.proj.weight": "val_3"}
    assert config["tied"] == ["embed.weight", "norm2.weight"]
    ids, labels = np.array([1, 3, 6]), np.array([0, 6, 2])
    session = moe_onnx.TrainingSession(graph, lr=0.1)
    reference = moe_onnx.InferenceSession(model).run(None, {"ids": ids})[0]
    np.testing.assert_allclose(session.forward({"ids": ids})["logits"], reference, rtol=1e-6)
    finite_differences(graph, {"ids": ids, "labels": labels})
    assert codes(graph, tmp_path) == []
    session.step({"ids": ids, "labels": labels})
    trained = session.parameters()
    assert not np.array_equal(trained["norm1.weight"], trained["norm2.weight"])
    frozen = moe_onnx.training_graph_from(model, loss="cross-entropy", params="norm?.*", assembly="forward")
    got = moe_onnx.TrainingSession(frozen, assembly="").forward({"ids": ids})["logits"]
    np.testing.assert_allclose(got, reference, rtol=1e-6)


def test_identities_of_the_tracing_exporter_are_split() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      norm2__weight = Identity(norm1__weight)
      a = Mul(x, norm1__weight)
      y = Mul(a, norm2__weight)
    }"""
    model = model_of(text, norm1__weight=np.ones(4, np.float32))
    graph = moe_onnx.training_graph_from(model, loss="mean-squared-error", assembly="grad")
    assert graph.manifest.config["split"] == {"norm2.weight": "norm1.weight"}
    finite_differences(graph, {"x": normal(3, 4), "target": normal(3, 4)})


def test_weights_without_a_name_are_said(recwarn: pytest.WarningsRecorder) -> None:
    text = "m (float[n, 4] x) => (float[n, 2] y) { y = MatMul(x, val_1) }"
    graph = moe_onnx.training_graph_from(model_of(text, val_1=normal(4, 2)), loss="mean-squared-error")
    assert graph.manifest.parameter_names == ("val_1",)
    assert "made-up names" in str(recwarn.pop(UserWarning).message)


def test_experts_lost_in_a_trace_are_said() -> None:
    text = """m (float[n, 4] x) => (float[n, 4] y) {
      a = MatMul(x, experts__0__w)
      b = MatMul(x, experts__2__w)
      y = Add(a, b)
    }"""
    model = model_of(text, experts__0__w=normal(4, 4), experts__2__w=normal(4, 4))
    with pytest.warns(
        UserWarning, match="MO703: experts: experts 1 are nowhere|MO703.*experts 1 are nowhere"
    ):
        moe_onnx.training_graph_from(model, loss="mean-squared-error")


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16", np.float64])
def test_weights_of_other_floats_have_float32_masters(dtype: Any, tmp_path: Path) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    elem = {"float16": 10, "bfloat16": 16, "float64": 11}[kind.name]
    body = f"c = Cast<to = {elem}>(x)\n p = MatMul(c, w)\n y = Cast<to = 1>(p)"
    if dtype == "bfloat16":  # which onnxruntime does not multiply on the CPU
        body = "c = Cast<to = 1>(w)\n y = MatMul(x, c)"
    text = f"m (float[n, 4] x) => (float[n, 2] y) {{\n {body}\n }}"
    model = model_of(text, w=normal(4, 2).astype(kind))
    graph = moe_onnx.training_graph_from(model, loss="mean-squared-error", assembly="grad+apply")
    (info,) = graph.manifest.parameters
    assert info.dtype == "float32" and graph.weights.read("w").dtype == kind
    batch = {"x": normal(3, 4), "target": normal(3, 2)}
    session = moe_onnx.TrainingSession(graph, lr=1e-2)
    losses = [session.step(batch)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
    assert codes(graph, tmp_path) == []
    assert moe_onnx.TrainingSession(tmp_path).parameters()["w"].dtype == np.float32


def test_external_weights_are_read_one_at_a_time(tmp_path: Path) -> None:
    bias = normal(8)
    model = mlp(fc1__bias=bias)
    path = tmp_path / "net.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="net.bin", size_threshold=0)
    graph = moe_onnx.training_graph_from(
        path, loss="mean-squared-error", params=["fc1.*"], assembly="grad+apply+forward"
    )
    for one in graph.models.values():  # the frozen weight was copied, the trained ones are in no graph
        assert all(t.data_location != onnx.TensorProto.EXTERNAL for t in one.graph.initializer)
        assert "fc1.weight" not in [t.name for t in one.graph.initializer]
    graph.save(tmp_path / "out")
    os.remove(tmp_path / "net.bin")
    session = moe_onnx.TrainingSession(tmp_path / "out")
    np.testing.assert_array_equal(session.parameters()["fc1.bias"], bias)
    with pytest.raises(moe_onnx.CheckpointError, match="cannot be read"):
        moe_onnx.training_graph_from(path, loss="mean-squared-error", params=["fc1.*"])


def test_an_old_opset_is_converted_with_its_weights_put_aside() -> None:
    text = """m (float[n, 20] x) => (float[n] y) {
      h = MatMul(x, w)
      s = ReduceSum<axes = [1], keepdims = 0>(h)
      y = Relu(s)
    }"""
    model = model_of(text, opset=11, w=normal(20, 20))
    graph = moe_onnx.training_graph_from(model, loss="mean-squared-error", assembly="grad")
    assert graph.manifest.opset[""] == 21
    finite_differences(graph, {"x": normal(3, 20), "target": normal(3)})


def refusals() -> dict[str, tuple[onnx.ModelProto, dict[str, Any], type[Exception], str]]:
    squared = {"loss": "mean-squared-error"}
    scalar = """m (float[n, 4] x) => (float l) {
      h = MatMul(x, w)
      r = Round(h)
      k = ArgMax<keepdims = 0>(h)
      kf = Cast<to = 1>(k)
      l = ReduceSum<keepdims = 0>(%s)
    }"""
    blocked = "m (float[4, 4] x) => (float y) {\n h = MatMul(x, w)\n y = Det(h)\n}"
    w = normal(4, 4)
    return {
        "no such loss": (mlp(), {"loss": "los"}, moe_onnx.OptionError, "no value 'los'"),
        "close loss": (mlp(), {"loss": "cross-entropi"}, moe_onnx.OptionError, "mean 'cross-entropy'"),
        "no scalar": (mlp(), {"loss": "y"}, moe_onnx.OptionError, r"must be a scalar, got shape \[n, 3\]"),
        "integer loss": (
            model_of("m (int64[n] i) => (int64 l) { l = ReduceSum<keepdims = 0>(i) }"),
            {"loss": "l"},
            moe_onnx.OptionError,
            "'l' must be a float, got",
        ),
        "no match": (mlp(), {**squared, "params": ["fc3.*"]}, moe_onnx.OptionError, "no weight matches 'fc3"),
        "only scalars": (mlp(), {**squared, "params": ["sc*"]}, moe_onnx.OptionError, "no weights: scale"),
        "no frozen match": (mlp(), {**squared, "params": ["!x*"]}, moe_onnx.OptionError, "no weight matches"),
        "no patterns": (mlp(), {**squared, "params": [3]}, moe_onnx.OptionError, "patterns of names"),
        "no path": (
            model_of(scalar % "kf", w=w), {"loss": "l"}, moe_onnx.GradientError, "nothing to train",
        ),
        "no path by name": (
            model_of(scalar % "kf", w=w),
            {"loss": "l", "params": "w"},
            moe_onnx.GradientError,
            "no differentiable path to 'w'",
        ),
        "blocked": (
            model_of(blocked, w=w),
            {"loss": "y"},
            moe_onnx.GradientError,
            r"Det .*Path from the loss: 'y' <- Det",
        ),
        "no such output": (mlp(), {**squared, "output": "z1"}, moe_onnx.OptionError, "no value 'z1'"),
        "output of a loss": (mlp(), {"loss": "y", "output": "y"}, moe_onnx.OptionError, "Leave it out"),
        "rank 1": (
            model_of("m (float[n] x) => (float[n] y) { y = Mul(x, w) }", w=normal(1)),
            {"loss": "cross-entropy"},
            moe_onnx.OptionError,
            "rows of logits",
        ),
        "shift": (mlp(), {"loss": "cross-entropy", "shift": True}, moe_onnx.OptionError, "batch, sequence"),
        "assembly": (mlp(), {**squared, "assembly": "all"}, moe_onnx.ConfigError, "assembly must be"),
        "only a loss": (
            model_of(
                "m (float[n] x) => (float l) {\n y = Mul(x, w)\n l = ReduceSum<keepdims=0>(y)\n}", w=w[0, :1]
            ),
            {"loss": "l", "assembly": "forward"},
            moe_onnx.ModelError,
            "none beside its loss",
        ),
        "lr": (
            model_of("m (float[n, 4] lr) => (float[n, 4] y) { y = MatMul(lr, w) }", w=w),
            squared,
            moe_onnx.ModelError,
            "an input 'lr'",
        ),
        "target taken": (
            model_of(
                "m (int64[n, 4] target) => (float[n, 4] y) {\n c = Cast<to=1>(target)\n y = MatMul(c, w)\n}",
                w=w,
            ),
            squared,
            moe_onnx.ModelError,
            "must be float32 of rank 2",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(refusals()))
def test_what_cannot_be_trained_is_refused_by_words(case: str) -> None:
    model, options, error, words = refusals()[case]
    with pytest.raises(error, match=words):
        moe_onnx.training_graph_from(model, **options)


def test_the_command_writes_all_or_nothing(tmp_path: Path) -> None:
    onnx.save(exported(), tmp_path / "net.onnx")
    run = CliRunner().invoke(
        main,
        ["train-graph", str(tmp_path / "net.onnx"), "--loss", "cross-entropy", "-o", str(tmp_path / "out")],
    )
    assert run.exit_code == 0, run.output
    assert "split    norm2.weight, which the model had merged into norm1.weight" in run.output
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "grad.onnx",
        "apply.onnx",
        "eval.onnx",
        "forward.onnx",
        "manifest.json",
        "model.safetensors",
    }
    session = moe_onnx.TrainingSession(tmp_path / "out")
    assert session.step({"ids": np.array([1, 2]), "labels": np.array([1, 2])})["loss"] > 0
    for loss, params in (("nothing", "*"), ("cross-entropy", "none.*")):
        run = CliRunner().invoke(
            main,
            [
                "train-graph",
                str(tmp_path / "net.onnx"),
                "--loss",
                loss,
                "--params",
                params,
                "-o",
                str(tmp_path / "no"),
            ],
        )
        assert run.exit_code == 2 and not (tmp_path / "no").exists(), run.output
    os.rename(tmp_path / "net.onnx", tmp_path / "forward.onnx")
    run = CliRunner().invoke(
        main, ["train-graph", str(tmp_path / "forward.onnx"), "--loss", "cross-entropy", "-o", str(tmp_path)]
    )
    assert run.exit_code == 2 and "overwritten" in run.output


def unmasked(ids: str = "input_ids", rank: int = 2) -> onnx.ModelProto:
    """A language model that sees its own token alone, and takes no mask."""
    free = ", ".join(("batch", "sequence")[-rank:])
    text = f"""lm (int64[{free}] {ids}) => (float[{free}, 11] scores) {{
      e = Gather(embed__weight, {ids})
      scores = MatMul(e, head__weight)
    }}"""
    return model_of(text, embed__weight=normal(11, 4), head__weight=normal(4, 11))


def test_a_language_model_without_a_mask_by_the_commands(tmp_path: Path) -> None:
    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(words))
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    model, out, tokens = tmp_path / "lm.onnx", str(tmp_path / "out"), tmp_path / "ids.npy"
    onnx.save(unmasked(), model)
    run("train-graph", str(model), "--loss", "cross-entropy", "-o", out)
    ids = np.random.default_rng(0).integers(0, 11, 203)
    np.save(tokens, ids)
    sizes = ("--batch-size", "3", "--sequence-length", "9")
    told = json.loads(run("eval", out, "--tokens", str(tokens), *sizes, "--json"))
    weights = dict(TrainingGraph.load(out).weights.parameters())
    scores = (weights["embed.weight"] @ weights["head.weight"])[ids]
    losses = [  # the last of a sequence predicts nothing
        cross_entropy(scores[i : i + 1], ids[i + 1 : i + 2])[0] for i in range(202) if i % 9 != 8
    ]
    assert told["tokens"] == len(losses) == 180
    assert told["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    run_folder = str(tmp_path / "run")
    run("train", out, "--tokens", str(tokens), *sizes, "--steps", "4", "--eval-every", "2", "-o", run_folder)
    assert "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8")
    told = run("generate", out, "--checkpoint", run_folder, "--prompt-ids", "1,2", "--max-new-tokens", "3")
    assert told.rsplit(" ", 1)[-1].startswith("1,2,") and told.count(",") == 4
    assert "parameters" in run("inspect", out, "--batch-size", "2", "--sequence-length", "4")
    (tmp_path / "text.txt").write_text("abc" * 99)
    told = run("train", out, "--text", str(tmp_path / "text.txt"), "-o", str(tmp_path / "no"), code=2)
    assert "its bytes are the tokens, and the model knows 11 (give its --tokenizer)" in told


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (unmasked("tokens"), "cross-entropy", "and it takes 'tokens'"),
        (unmasked(rank=1), "cross-entropy", "its loss is cross-entropy, not of the next token"),
        (mlp(), "mean-squared-error", "its loss is mean-squared-error, and must be --loss cross-entropy"),
    ],
)
def test_what_a_text_alone_cannot_train_says_what_is_missing(
    model: onnx.ModelProto, loss: str, words: str, tmp_path: Path
) -> None:
    moe_onnx.training_graph_from(model, loss=loss, assembly="grad+apply+eval").save(tmp_path / "out")
    np.save(tmp_path / "ids.npy", np.arange(9))
    for command in (["train", "-o", str(tmp_path / "run")], ["eval"]):
        tokens = ["--tokens", str(tmp_path / "ids.npy")]
        result = CliRunner().invoke(main, [command[0], str(tmp_path / "out"), *tokens, *command[1:]])
        assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output


def test_a_model_that_wants_tokens_is_no_error_of_a_batch_without(tmp_path: Path) -> None:
    text = """m (float[batch, 4] x) => (float[batch, 2] y) {
      zero = Constant<value_int = 0>()
      first = Gather(x, zero)
      d = Sub(x, first)
      y = MatMul(d, w)
    }"""
    model = model_of(text, w=normal(4, 2))
    graph = moe_onnx.training_graph_from(model, loss="mean-squared-error", assembly="grad")
    assert codes(graph, tmp_path, "run") == []


def test_a_manifest_that_does_not_fit_is_found() -> None:
    graph = moe_onnx.training_graph_from(mlp(), loss="mean-squared-error", assembly="grad")
    model = graph.model
    for old, new, code in (
        ('"target": "target"', '"target": "labels"', "MO606"),
        ('"tied": []', '"tied": ["fc9"]', "MO603"),
        ('"shift": false', '"shift": 3', "MO602"),
    ):
        broken = onnx.ModelProto()
        broken.CopyFrom(model)
        text = broken.metadata_props[0].value
        assert old in text
        broken.metadata_props[0].value = text.replace(old, new)
        assert code in moe_onnx.validate(broken).codes


def test_nothing_is_said_of_a_sound_model(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    moe_onnx.training_graph_from(attention(), loss="cross-entropy")
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
