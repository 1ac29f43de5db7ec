"""Graphs whose updates are MoeAdamW nodes, broken for one reason each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from broken_full import full
from broken_models import Mutation
from broken_training import case, constant, ignore, maker, readers, swap
from onnx import ModelProto, NodeProto

import moe_onnx
from moe_onnx.build.training_graph import TrainingGraph

GATE, UP, DOWN = "gate.weight", "experts.up_proj", "experts.down_proj"
PARAMETER, GRADIENT, AVG, AVG_SQ, FACTORS = range(5)


@cache
def layer() -> TrainingGraph:
    """A layer in the form for native kernels; its experts' weights are of one shape."""
    config = moe_onnx.MoeLayerConfig(
        hidden_size=4, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=4, expert_activation="relu"
    )
    return moe_onnx.build_training_graph(config, assembly="step+apply", optimize_for="native")


def step() -> ModelProto:
    return layer().models["step"]


def apply() -> ModelProto:
    return layer().models["apply"]


def update(model: ModelProto, name: str) -> NodeProto:
    """The node that updates a parameter."""
    node = maker(model, f"{name}.updated")
    assert node.op_type == "MoeAdamW"
    return node


def reads(name: str, input_: int, value: str) -> Callable[[ModelProto], None]:
    """An update reads something else."""

    def break_it(model: ModelProto) -> None:
        update(model, name).input[input_] = value

    return break_it


def factors(*order: int) -> Callable[[ModelProto], None]:
    """All updates get their factors in another order."""

    def break_it(model: ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Concat" and len(node.input) == 7:
                node.input[:] = [node.input[i] for i in order]

    return break_it


def one_gradient(model: ModelProto) -> None:
    update(model, UP).input[GRADIENT] = update(model, DOWN).input[GRADIENT]


def moments_turned(model: ModelProto) -> None:
    outputs = update(model, GATE).output
    outputs[1], outputs[2] = outputs[2], outputs[1]


def no_decay(model: ModelProto) -> None:
    """Decay is a factor of its own: the constant 1 in its place."""
    for node in model.graph.node:
        if node.op_type == "Concat" and len(node.input) == 7:
            made = maker(model, node.input[6])
            made.input[0] = "float32_1"


def weights_turned(model: ModelProto) -> None:
    """The moments' weights change places: both are betas' rests, and both scaled by the clipping."""
    factors(0, 3, 2, 1, 4, 5, 6)(model)


MUTATIONS: list[Mutation] = [
    case("MO614", "MoeAdamW: the first moment is the second", apply, reads(GATE, AVG, f"{GATE}.exp_avg_sq")),
    case("MO614", "MoeAdamW: the second moment is the first", step, reads(GATE, AVG_SQ, f"{GATE}.exp_avg")),
    case("MO614", "MoeAdamW: the gradient is the parameter", apply, reads(GATE, GRADIENT, GATE)),
    case("MO614", "MoeAdamW: the parameter is a moment", apply, reads(GATE, PARAMETER, f"{GATE}.exp_avg")),
    case("MO614", "MoeAdamW: moments come out turned", apply, moments_turned),
    case("MO614", "MoeAdamW: the learning rate is fixed", step, ignore("lr")),
    case("MO614", "MoeAdamW: always the first step", apply, ignore("step")),
    case("MO614", "MoeAdamW: no clipping", apply, ignore("grad_norm")),
    case("MO615", "MoeAdamW: another's first moment", apply, readers(f"{UP}.exp_avg", f"{DOWN}.exp_avg")),
    case("MO615", "MoeAdamW: one moment twice", step, reads(UP, AVG, f"{DOWN}.exp_avg")),
    case("MO615", "MoeAdamW: another's gradient", apply, reads(UP, GRADIENT, f"{DOWN}.grad")),
    case("MO615", "MoeAdamW: parameters changed places", apply, readers(UP, DOWN)),
    case("MO615", "MoeAdamW: updates changed places", apply, swap(f"{UP}.updated", f"{DOWN}.updated")),
    case("MO613", "MoeAdamW: two updates of one gradient", step, one_gradient),
    case("MO626", "MoeAdamW: betas changed places", apply, factors(2, 1, 0, 3, 4, 5, 6)),
    case("MO626", "MoeAdamW: another beta2", step, constant(0.999, 0.99)),
    case("MO626", "MoeAdamW: no decay", apply, no_decay),
    case("MO626", "MoeAdamW: another eps", apply, constant(1e-8, 1e-6)),
    full("MO904", "MoeAdamW: the moments' weights changed places", apply, weights_turned),
    full("MO904", "MoeAdamW: rate and eps changed places", apply, factors(0, 1, 2, 3, 5, 4, 6)),
]
