"""Training graphs against runs recorded with PyTorch (``goldens/make.py``): every number, five steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from golden_cases import CASES, STEPS, Arrays, Case, is_trained
from routes import FAST, one_thread

import moe_onnx
from moe_onnx.build.optimizers import state_names

# Of the largest value of a tensor; float32 has 6e-8. Gradients that are zero in exact arithmetic
# (of key biases: softmax does not see them) are compared with the largest gradient of all.
TOLERANCE = 1e-5
CANCELS = ("k_proj.bias",)

Session = moe_onnx.InferenceSession


def run_grad_apply(case: Case, sessions: dict[str, Session]) -> tuple[list[Arrays], Arrays, Arrays]:
    """Metrics of each step, first gradients, last parameters: by the pair of graphs."""
    params, state = case.parameters(), first_state(case)
    metrics, first = [], {}
    for number, batch in enumerate(case.batches(), 1):
        out = run(sessions["grad"], {**batch, **params})
        grads = {name: out[name] for name in (f"{param}.grad" for param in params if is_trained(param))}
        first = first or grads
        metrics.append(out)
        hyper = {"lr": np.float32(case.lr), "step": np.int64(number), "grad_norm": out["grad_norm"]}
        excesses = {name: value for name, value in out.items() if name.endswith(".load_excess")}
        feed = {**params, **state, **grads, **excesses, **hyper}
        params, state = updated(run(sessions["apply"], feed), params, state)
    return metrics, first, params


def run_steps(case: Case, sessions: dict[str, Session]) -> tuple[list[Arrays], Arrays]:
    """Metrics of each step and last parameters: by the one graph."""
    params, state, metrics = case.parameters(), first_state(case), []
    for number, batch in enumerate(case.batches(), 1):
        hyper = {"lr": np.float32(case.lr), "step": np.int64(number)}
        out = run(sessions["step"], {**batch, **params, **state, **hyper})
        metrics.append(out)
        params, state = updated(out, params, state)
    return metrics, params


def first_state(case: Case) -> Arrays:
    names = state_names(case.optimizer)
    params = {name: value for name, value in case.parameters().items() if is_trained(name)}
    return {f"{n}.{s}": np.zeros_like(v) for n, v in params.items() for s in names}


def updated(out: Arrays, *groups: Arrays) -> list[Arrays]:
    """What a step made of parameters and state; a bias of choice that nothing updates stays."""
    return [
        {
            name: value if not is_trained(name) and f"{name}.updated" not in out else out[f"{name}.updated"]
            for name, value in group.items()
        }
        for group in groups
    ]


def run(session: Session, feed: dict[str, Any]) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    inputs = {i.name for i in session.get_inputs()}
    feed = {name: np.asarray(value) for name, value in feed.items() if name in inputs}
    return dict(zip(names, session.run(names, feed), strict=True))


def check_metrics(case: Case, metrics: list[Arrays]) -> None:
    golden = case.golden()
    main = "mse_loss" if "mse_loss" in metrics[0] else "lm_loss"
    names = {"loss": "loss", main: "main_loss", "grad_norm": "grad_norm", "aux_loss": "aux_loss"}
    if case.config.router_z_loss_coef:
        names["z_loss"] = "z_loss"
    for name, key in names.items():
        got = np.array([step[name] for step in metrics])
        np.testing.assert_allclose(got, golden[key], rtol=TOLERANCE, err_msg=f"{case.name} {name}")
    loads = np.array([step["expert_load"] for step in metrics])
    np.testing.assert_array_equal(loads, golden["expert_load"])
    if main == "lm_loss":
        counts = np.array([step["num_tokens"] for step in metrics])
        np.testing.assert_array_equal(counts, golden["num_tokens"])


def check_tensors(case: Case, got: Arrays, kind: str) -> None:
    golden = case.golden()
    largest = max(np.abs(v).max() for n, v in golden.items() if n.startswith(f"{kind}/"))
    for name, value in got.items():
        want = golden[f"{kind}/{name.removesuffix('.grad')}"]
        assert value.shape == want.shape
        assert value.dtype == np.float32
        cancels = name.removesuffix(".grad").endswith(CANCELS)
        scale = largest if cancels else np.abs(want).max()
        # AdamW makes steps of full size of rounding errors: such parameters say nothing afterwards.
        if cancels and kind == "final":
            continue
        gap = np.abs(value - want).max() / scale
        assert gap <= TOLERANCE, f"{case.name}: {kind} of {name} is off by {gap:.1e}"


class Sessions(dict[str, Session]):
    """Sessions by assembly, made when they are asked for: gradients by function bodies where ``bodies``."""

    def __init__(self, models: Mapping[str, onnx.ModelProto], bodies: bool) -> None:
        super().__init__()
        self.models, self.bodies = models, bodies

    def __missing__(self, name: str) -> Session:
        kernels = "body" if self.bodies and name in ("grad", "apply") else FAST
        self[name] = Session(self.models[name], one_thread(), kernels=kernels)
        return self[name]


# Whose graph "step" is run, too: the same nodes in one graph, of every optimizer and kind of dispatch. Their
# pair of graphs runs by the function bodies (and that of "grouped"), whose sessions take long to make.
STEPPED = ("mixtral", "top_k_then_softmax", "layer_relu", "capacity", "deepseek")


# A case's sessions are made once: its tests stay together on one worker (conftest.py).
@pytest.fixture(scope="module", params=CASES)
def built(request: Any) -> tuple[Case, dict[str, Session]]:
    case = CASES[request.param]
    assembly = "grad+apply+eval+forward" + ("+step" if case.name in STEPPED else "")
    graph = moe_onnx.build_training_graph(case.config, assembly=assembly, optimizer=case.optimizer)
    return case, Sessions(graph.models, bodies=case.name in {*STEPPED, "grouped"})


def test_grad_and_apply(built: Any) -> None:
    case, sessions = built
    metrics, gradients, params = run_grad_apply(case, sessions)
    assert len(metrics) == STEPS
    check_metrics(case, metrics)
    assert len(gradients) == sum(map(is_trained, params))
    check_tensors(case, gradients, "grad")
    check_tensors(case, params, "final")
    if case.name in STEPPED:
        metrics, params = run_steps(case, sessions)
        check_metrics(case, metrics)
        check_tensors(case, params, "final")


def test_eval_and_forward(built: Any) -> None:
    case, sessions = built
    golden, batch, params = case.golden(), case.batches()[0], case.parameters()
    out = run(sessions["eval"], {**batch, **params})
    np.testing.assert_allclose(out["loss"], golden["loss"][0], rtol=TOLERANCE)
    assert "grad_norm" not in out
    result = run(sessions["forward"], {**batch, **params})
    if "logits" in golden:
        got, want = result["logits"] * batch["attention_mask"][..., None], golden["logits"]
    else:
        got, want = result["output"], golden["output"]
    np.testing.assert_allclose(got, want, atol=TOLERANCE * np.abs(want).max(), rtol=0)


def test_a_wrong_number_is_seen(built: Any) -> None:
    """The comparison above can fail: one weight a little off is found."""
    case, _ = built
    wrong = {name.removeprefix("grad/"): v.copy() for name, v in case.golden().items() if name[:5] == "grad/"}
    name = next(iter(wrong))
    wrong[name].flat[np.abs(wrong[name]).argmax()] *= 1 + 3e-5
    with pytest.raises(AssertionError, match="is off by"):
        check_tensors(case, wrong, "grad")
