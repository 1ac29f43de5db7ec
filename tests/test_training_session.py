"""TrainingSession gives the numbers of the graph's mathematics, and never a state between two steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tiny_graph import SHAPES, Numpy, TinyGraph, V, batch

import moe_onnx
from moe_onnx.build import update
from moe_onnx.errors import BatchError, CheckpointError, ModelError, NonFiniteError, OptionError
from moe_onnx.runtime import training_session
from moe_onnx.runtime.training_state import BoundGraph

GRAD_APPLY = ("grad", "apply", "eval", "forward")
STEP = ("step", "eval", "forward")
BOTH = pytest.mark.parametrize("assemblies", [GRAD_APPLY, STEP], ids=["grad+apply", "step"])
IDS = np.array([[1, 2, 3], [4, 5, 6]])


def session(*assemblies: str, **options: object) -> moe_onnx.TrainingSession:
    return moe_onnx.TrainingSession(TinyGraph(*assemblies), **{"lr": 0.3, **options})  # type: ignore[arg-type]


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k], equal_nan=True) for k in one)


@BOTH
def test_steps_are_those_of_numpy(assemblies: tuple[str, ...]) -> None:
    """Also with batches of changing size, padding and left-out labels."""
    train = session(*assemblies)
    rule = Numpy(train.parameters())
    rng = np.random.default_rng(0)
    for number in range(1, 9):
        feed = batch(rng, 2 + number % 3, 4 + number % 2)
        metrics = train.step(feed)
        loss, tokens, norm = rule.step(*feed.values(), 0.3)
        np.testing.assert_allclose((metrics["loss"], metrics["grad_norm"]), (loss, norm), rtol=1e-5)
        assert metrics["num_tokens"] == tokens and metrics["step"] == train.global_step == number
        assert metrics["lr"] == 0.3 and metrics["skipped"] is False
        assert metrics["expert_load"].tolist() == [[tokens, tokens]]
        for name, value in train.parameters().items():
            np.testing.assert_allclose(value, rule.values[name], atol=2e-6)
        evaluated = train.eval(feed)
        np.testing.assert_allclose(evaluated["loss"], rule.gradients(*feed.values())[0], rtol=1e-5)
        assert "grad_norm" not in evaluated
        logits = train.forward({"input_ids": feed["input_ids"]})["logits"]
        want = rule.values["bigram.weight"][feed["input_ids"]] + rule.values["bigram.bias"]
        np.testing.assert_allclose(logits, want, atol=2e-6)


def test_both_assemblies_are_bit_equal() -> None:
    one, other = session(*GRAD_APPLY), session(*STEP)
    rng = np.random.default_rng(1)
    for _ in range(5):
        feed = batch(rng)
        assert one.step(feed)["loss"] == other.step(feed)["loss"]
    assert same(one.state_dict(), other.state_dict())


def test_the_graph_chooses_the_assembly() -> None:
    every = ("step", "grad", "apply")
    assert session(*every).assembly == "grad+apply"
    assert session(*every, assembly="step").assembly == "step"
    assert session("grad", "step").assembly == "step"
    with pytest.raises(OptionError, match="'grad\\+apply', 'step', got 'apply'"):
        session(*every, assembly="apply")
    with pytest.raises(ModelError, match="no 'apply' graph, only: grad, step"):
        session("grad", "step", assembly="grad+apply")


def test_a_graph_that_cannot_step_evaluates() -> None:
    train = session("eval", "forward")
    assert train.eval({"input_ids": IDS})["num_tokens"] == 4
    with pytest.raises(ModelError, match="it has eval, forward"):
        train.step({"input_ids": IDS})
    with pytest.raises(ModelError, match="no 'forward' graph"):
        session("eval").forward({"input_ids": IDS})


def test_learning_rate_by_update() -> None:
    seen = []
    train = session(lr=lambda step: seen.append(step) or 0.1 / step)
    assert [train.step({"input_ids": IDS})["lr"] for _ in range(3)] == [0.1, 0.05, 0.1 / 3]
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf")])
def test_a_learning_rate_that_is_none(lr: float) -> None:
    train = session(lr=lr)
    with pytest.raises(OptionError, match="update 1"):
        train.step({"input_ids": IDS})
    assert train.global_step == 0


def test_defaults_of_a_batch() -> None:
    one, other = session(), session()
    full = {"input_ids": IDS, "labels": IDS, "attention_mask": np.ones_like(IDS)}
    assert one.step({"input_ids": IDS.astype(np.int32)})["loss"] == other.step(full)["loss"]
    assert (
        one.step({"input_ids": IDS.tolist(), "attention_mask": IDS > 0})["loss"] == other.step(full)["loss"]
    )
    assert one.eval({"input_ids": np.asfortranarray(IDS)})["loss"] == other.eval(full)["loss"]


BAD_BATCHES = [
    ({}, "'input_ids' .batch, sequence. is missing"),
    ({"inptu_ids": IDS}, "no batch input 'inptu_ids'. Did you mean 'input_ids'"),
    ({"input_ids": IDS.astype(np.float32)}, "'input_ids' must be int64.*got float32"),
    ({"input_ids": IDS > 2}, "'input_ids' must be int64.*got bool"),
    ({"input_ids": IDS.astype(np.uint64)}, "got uint64"),
    ({"input_ids": [["a"]]}, "'input_ids' must be int64"),
    ({"input_ids": [[1, 2], [3]]}, "'input_ids' is no array"),
    ({"input_ids": IDS[0]}, "must have shape .batch, sequence., got .3."),
    ({"input_ids": IDS[:0]}, "axis 0 of .0, 3. is 0"),
    (
        {"input_ids": IDS, "labels": IDS[:, :2]},
        "'labels': axis 1 .sequence. must be 3, as in input 'input_ids', got 2",
    ),
    ({"input_ids": IDS, "attention_mask": IDS[:1]}, "'attention_mask': axis 0 .batch. must be 2"),
    ({"input_ids": IDS + 1}, r"in \[0, 7\), got 7 at \[1, 2\] \(1 such"),
    ({"input_ids": IDS - 2}, r"in \[0, 7\), got -1 at \[0, 0\]"),
    ({"input_ids": IDS, "labels": -IDS}, r"'labels': .* in \[0, 7\) or -100 .*, got -1 at \[0, 0\] \(6 such"),
    ({"input_ids": IDS, "attention_mask": IDS}, r"'attention_mask': .*1 \(real\) or 0 .*, got 2 at \[0, 1\]"),
    ([1, 2], "must map input names"),
]


@BOTH
@pytest.mark.parametrize(("feed", "message"), BAD_BATCHES)
def test_a_bad_batch_changes_nothing(
    assemblies: tuple[str, ...], feed: dict[str, object], message: str
) -> None:
    train = session(*assemblies)
    before = train.state_dict()
    with pytest.raises(BatchError, match=message):
        train.step(feed)
    with pytest.raises(BatchError, match=message):
        train.eval(feed)
    assert same(train.state_dict(), before)
    train.step({"input_ids": IDS})


@BOTH
def test_ignored_labels_may_be_all(assemblies: tuple[str, ...]) -> None:
    metrics = session(*assemblies).step({"input_ids": IDS, "labels": np.full_like(IDS, -100)})
    assert metrics["loss"] == 0 and metrics["num_tokens"] == 0


@BOTH
def test_what_is_not_finite_is_raised(assemblies: tuple[str, ...]) -> None:
    train = session(*assemblies)
    state = train.state_dict()
    state["bigram.bias"][0] = np.nan
    train.load_state_dict(state)
    with pytest.raises(NonFiniteError, match="Update 1: the loss is nan") as caught:
        train.step({"input_ids": IDS})
    assert np.isnan(caught.value.metrics["loss"]) and caught.value.metrics["num_tokens"] == 4
    assert same(train.state_dict(), state)


@BOTH
def test_or_skipped(assemblies: tuple[str, ...]) -> None:
    train = session(*assemblies, non_finite="skip")
    state = train.state_dict()
    state["bigram.weight"][0] = np.inf  # token 0 only
    train.load_state_dict(state)
    metrics = train.step({"input_ids": np.zeros_like(IDS)})
    assert metrics["skipped"] is True and metrics["step"] == train.global_step == 0
    assert same(train.state_dict(), state)
    metrics = train.step({"input_ids": IDS})
    assert metrics["skipped"] is False and train.global_step == 1


def test_a_gradient_norm_that_is_not_finite() -> None:
    graph = TinyGraph()
    node = next(n for n in graph.models["grad"].graph.node if n.output[0] == "grad_norm")
    node.op_type = "Log"  # of a sum below 1, then of a negative number
    negative = onnx.helper.make_node("Neg", ["ss"], ["minus_ss"])
    graph.models["grad"].graph.node.insert(len(graph.models["grad"].graph.node) - 1, negative)
    node.input[0] = "minus_ss"
    train = moe_onnx.TrainingSession(graph)
    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        train.step({"input_ids": IDS})
    assert train.global_step == 0


def test_non_finite_has_two_values() -> None:
    with pytest.raises(OptionError, match="'raise' or 'skip', got 'ignore'"):
        session(non_finite="ignore")


def test_state_goes_out_and_in_by_copy() -> None:
    train = session()
    train.step({"input_ids": IDS})
    state = train.state_dict()
    assert sorted(state) == sorted([*SHAPES, *(f"{name}.momentum_buffer" for name in SHAPES), "step"])
    assert state["step"] == 1
    saved = {name: value.copy() for name, value in state.items()}
    for value in train.parameters().values():
        value[...] = 7
    train.step({"input_ids": IDS})
    assert same(state, saved)
    other = session(seed=5)
    other.load_state_dict(state)
    state["bigram.bias"][...] = 9
    assert same(other.state_dict(), saved)
    other.step({"input_ids": IDS})
    assert same(other.state_dict(), train.state_dict())


def broken(state: dict[str, np.ndarray], name: str, value: object) -> dict[str, object]:
    return {**state, name: value} if value is not None else {k: v for k, v in state.items() if k != name}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bigram.bias", None, "expected 4 tensors, found 3: 'bigram.bias' missing"),
        ("bigram.bais", np.zeros(V, np.float32), "found 5: 'bigram.bais' unknown"),
        (
            "bigram.bias",
            np.zeros(V + 1, np.float32),
            r"'bigram.bias' expected float32 \[7\], found float32 \[8\]",
        ),
        ("bigram.bias", np.zeros(V), r"expected float32 \[7\], found float64 \[7\]"),
        ("step", None, "'step' must be an integer >= 0, found None"),
        ("step", np.array(1.5), "'step' must be an integer"),
        ("step", -1, "'step' must be an integer >= 0, found -1"),
    ],
)
def test_a_foreign_state_changes_nothing(name: str, value: object, message: str) -> None:
    train = session()
    train.step({"input_ids": IDS})
    before = train.state_dict()
    foreign = {key: np.zeros_like(array) for key, array in before.items()}
    with pytest.raises(CheckpointError, match=message):
        train.load_state_dict(broken(foreign, name, value))
    assert same(train.state_dict(), before)


def test_given_parameters() -> None:
    values = {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}
    train = session(parameters=values)
    assert same(train.parameters(), values)
    values["bigram.bias"][...] = 3
    assert train.parameters()["bigram.bias"][0] == 0.5
    with pytest.raises(CheckpointError, match="parameters: .* 'bigram.bias' missing"):
        session(parameters={"bigram.weight": values["bigram.weight"]})
    assert not same(session(seed=1).parameters(), session(seed=2).parameters())


def test_a_folder_is_as_good_as_a_graph(tmp_path: Path) -> None:
    folder = TinyGraph().save(tmp_path / "model")
    one, other = moe_onnx.TrainingSession(folder, parameters=session().parameters(), lr=0.3), session()
    assert one.step({"input_ids": IDS})["loss"] == other.step({"input_ids": IDS})["loss"]
    assert one.manifest == other.manifest
    with pytest.raises(ModelError, match="manifest.json"):
        moe_onnx.TrainingSession(tmp_path)


def test_options_reach_the_sessions() -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    train = session(sess_options=options, kernels="body")
    assert train.step({"input_ids": IDS})["step"] == 1
    with pytest.raises(OptionError, match="kernels must be one of"):
        session(kernels="fast")


@BOTH
@pytest.mark.parametrize("at", ["before", "after"])
def test_ctrl_c_never_leaves_half_a_step(
    assemblies: tuple[str, ...], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pressed at either side of any run of a graph: the step is done, and the interrupt comes after it."""
    run = BoundGraph.run

    def pressed(self: BoundGraph, feed: dict[str, np.ndarray]) -> None:
        if at == "before":
            os.kill(os.getpid(), signal.SIGINT)
        run(self, feed)
        if at == "after":
            os.kill(os.getpid(), signal.SIGINT)

    train, calm = session(*assemblies), session(*assemblies)
    calm.step({"input_ids": IDS})
    monkeypatch.setattr(training_session.BoundGraph, "run", pressed)
    with pytest.raises(KeyboardInterrupt):
        train.step({"input_ids": IDS})
    monkeypatch.undo()
    assert train.global_step == 1
    assert same(train.state_dict(), calm.state_dict())
    assert train.step({"input_ids": IDS})["loss"] == calm.step({"input_ids": IDS})["loss"]
    with pytest.raises(KeyboardInterrupt):  # the handler is back in its place
        os.kill(os.getpid(), signal.SIGINT)


def test_a_failed_update_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only way to a state between two steps, and it is refused until a whole one is loaded."""
    train = session()
    good = train.state_dict()
    run = BoundGraph.run

    def fails(self: BoundGraph, feed: dict[str, np.ndarray]) -> None:
        if not feed:
            raise RuntimeError("out of memory")
        run(self, feed)

    monkeypatch.setattr(training_session.BoundGraph, "run", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        train.step({"input_ids": IDS})
    for call in (train.state_dict, train.parameters, lambda: train.step({"input_ids": IDS})):
        with pytest.raises(ModelError, match="Load a checkpoint"):
            call()
    monkeypatch.undo()
    train.load_state_dict(good)
    assert train.step({"input_ids": IDS})["step"] == 1


def sliced_sessions(
    monkeypatch: pytest.MonkeyPatch, long_slice: int | None, **config: int
) -> list[moe_onnx.TrainingSession]:
    """Of a layer: in place, and to a second set of tensors; AdamW by slices from ``long_slice`` on."""
    if long_slice is not None:
        monkeypatch.setattr(update, "LONG_SLICE", long_slice)
    layer = moe_onnx.MoeLayerConfig(**config)
    done = []
    for assembly in ("grad+apply", "step"):
        graph = moe_onnx.build_training_graph(layer, assembly=assembly)
        last = graph.models[assembly.split("+")[-1]]
        onnx.checker.check_model(last, full_check=True)
        scans = [node.op_type for node in last.graph.node].count("Scan")
        assert scans == (0 if long_slice == 2**40 else 2)
        done.append(moe_onnx.TrainingSession(graph, lr=0.1))
    monkeypatch.undo()
    return done


@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "long_slice"),
    [(2, 1, 1, 1), (3, 7, 5, 1), (8, 33, 31, 1), (20, 16, 8, 1), (2, 512, 512, None)],
)
def test_adamw_by_slices_is_adamw(
    experts: int, hidden: int, inner: int, long_slice: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also where every slice is written over the one it is made of."""
    config = {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": inner}
    whole = sliced_sessions(monkeypatch, 2**40, **config)
    slices = sliced_sessions(monkeypatch, long_slice, **config)
    rng = np.random.default_rng(0)
    for _ in range(3):
        feed = {n: rng.standard_normal((24, hidden), np.float32) for n in ("hidden_states", "target")}
        for train in (*whole, *slices):
            train.step(feed)
    states = [train.state_dict() for train in (*slices, *whole)]
    assert all(same(state, states[-1]) for state in states)
    assert any(states[-1]["experts.down_proj.exp_avg_sq"].ravel() > 0)


def test_outputs_of_batches_of_one_shape() -> None:
    """Their memory is used again, what was given is not."""
    train = session()
    for ids in (IDS, 6 - IDS, IDS[:1], IDS):
        fresh = session().forward({"input_ids": ids})["logits"]
        one = train.forward({"input_ids": ids})["logits"]
        train.forward({"input_ids": 6 - ids[::-1]})
        np.testing.assert_array_equal(one, fresh)


def test_updates_are_made_in_place() -> None:
    """grad+apply: the memory of a parameter is the same for the whole training."""
    train = session()
    cells = {name: cell.array.ctypes.data for name, cell in train._state.current.items()}
    for _ in range(3):
        train.step({"input_ids": IDS})
    assert {name: cell.value.data_ptr() for name, cell in train._state.current.items()} == cells


def test_a_step_of_a_real_model_moves_every_parameter() -> None:
    config = moe_onnx.MoeLMConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, num_experts=4)
    graph = moe_onnx.build_training_graph(config, assembly="grad+apply+step+eval+forward")
    one = moe_onnx.TrainingSession(graph, lr=1e-2)
    other = moe_onnx.TrainingSession(graph, lr=1e-2, assembly="step")
    rng = np.random.default_rng(0)
    before = one.parameters()
    losses = []
    for _ in range(4):
        ids = rng.integers(0, 11, (2, 6))
        losses.append(one.step({"input_ids": ids})["loss"])
        np.testing.assert_allclose(other.step({"input_ids": ids})["loss"], losses[-1], rtol=1e-5)
    assert all(np.isfinite(losses))
    moved = {name for name, value in one.parameters().items() if not np.array_equal(value, before[name])}
    assert moved == set(before)
    for name, value in one.parameters().items():
        np.testing.assert_allclose(value, other.parameters()[name], atol=1e-4)
    assert one.forward({"input_ids": ids})["logits"].shape == (2, 6, 11)


def test_a_step_of_a_real_layer() -> None:
    config = moe_onnx.MoeLayerConfig(hidden_size=8, num_experts=4, moe_intermediate_size=6)
    graph = moe_onnx.build_training_graph(
        config, assembly="grad+apply+eval+forward", optimizer=moe_onnx.SGD()
    )
    train = moe_onnx.TrainingSession(graph, lr=0.5)
    rng = np.random.default_rng(0)
    feed = {"hidden_states": rng.standard_normal((16, 8), np.float32), "target": np.ones((16, 8), np.float32)}
    losses = [train.step(feed)["loss"] for _ in range(30)]
    assert losses[-1] < losses[0]
    (output,) = train.forward({"hidden_states": feed["hidden_states"][:5]}).values()
    assert output.shape == (5, 8)
    bad = feed["hidden_states"].copy()
    bad[3, 2] = np.inf
    with pytest.raises(BatchError, match=r"'hidden_states': values must be finite, got inf at \[3, 2\]"):
        train.step({**feed, "hidden_states": bad})
    with pytest.raises(BatchError, match="'target' .tokens, 8. is missing; given: hidden_states"):
        train.step({"hidden_states": feed["hidden_states"]})
    with pytest.raises(BatchError, match="axis 1 must be 8, as in the graph, got 7"):
        train.step({**feed, "target": feed["target"][:, :7]})
    with pytest.raises(BatchError, match="must be float32.*got float64"):
        train.step({**feed, "target": np.ones((16, 8))})


@pytest.mark.parametrize(
    ("assembly", "copies"), [("", 1), ("grad+apply", 3), ("step", 4)], ids=["eval", "grad+apply", "step"]
)
def test_what_the_machine_cannot_hold_is_refused(
    assembly: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one state a parameter. The process would be ended in the middle of filling them."""
    graph = TinyGraph("grad", "apply", "step")
    need = copies * 4 * graph.manifest.num_parameters
    monkeypatch.setattr("moe_onnx.runtime.memory.memory_limit", lambda: need - 1)
    with pytest.raises(moe_onnx.ModelError, match=rf"take {need / 1e9:.1f} GB, and this machine has"):
        moe_onnx.TrainingSession(graph, assembly=assembly)
    monkeypatch.setattr("moe_onnx.runtime.memory.memory_limit", lambda: need)
    moe_onnx.TrainingSession(graph, assembly=assembly)
