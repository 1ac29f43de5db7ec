"""Training graphs whose layers route by each other's values, and operators in another mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from broken_models import Mutation, grad_model
from broken_training import attribute
from onnx import ModelProto, NodeProto

import moe_onnx

INIT, PERMUTE = "MoeInitRoutingV2", "MoeTokenPermuteWithRoutingMap"
COMBINE, FINALIZE = "MoeTokenUnpermuteWithRoutingMap", "MoeFinalizeRoutingV2"
SWI_GLU = "MoeSwiGlu"


@cache
def graph_of(**options: Any) -> ModelProto:
    """Two layers of two experts: their gradients."""
    config = moe_onnx.MoeLMConfig(
        vocab_size=5,
        hidden_size=4,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=2,
        expert_activation="relu",
        **options,
    )
    return moe_onnx.build_training_graph(config, assembly="grad").model


def padded() -> ModelProto:
    return graph_of(dispatch_mode="drop_pad", expert_capacity=3)


def active() -> ModelProto:
    return graph_of(dispatch_mode="active", active_num=4)


def by_map() -> ModelProto:
    """The experts weigh their rows, which come with their weights."""
    return graph_of(dispatch="routing_map", router_weights_on="experts")


def grouped() -> ModelProto:
    return graph_of(dispatch="routing_map", unroll_experts=0)


def both_of(model: ModelProto, op: str) -> tuple[NodeProto, NodeProto]:
    """The nodes of an operator in both layers, in the order they run in."""
    early, late = (node for node in model.graph.node if node.op_type == op)
    return early, late


def crossed(op: str, *inputs: int) -> Callable[[ModelProto], None]:
    """The later node of an operator reads what the earlier one does."""

    def break_it(model: ModelProto) -> None:
        early, late = both_of(model, op)
        for index in inputs:
            assert late.input[index] != early.input[index]
            late.input[index] = early.input[index]

    return break_it


def exchanged(op: str, *inputs: int) -> Callable[[ModelProto], None]:
    """Both gradients of an operator read what the other one should of the forward pass."""

    def break_it(model: ModelProto) -> None:
        early, late = both_of(model, op)
        for index in inputs:
            early.input[index], late.input[index] = late.input[index], early.input[index]

    return break_it


@cache
def activated(layers: int, unrolled: bool) -> ModelProto:
    """Gradients in the form for native kernels, whose activations are nodes of their own."""
    config = moe_onnx.MoeLMConfig(
        vocab_size=5,
        hidden_size=4,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=2,
        unroll_experts=8 if unrolled else 0,
    )
    return moe_onnx.build_training_graph(config, assembly="grad", optimize_for="native").model


def activated_by_layer() -> ModelProto:
    return activated(2, False)


def activated_by_expert() -> ModelProto:
    return activated(1, True)


def gradient_for_rows(model: ModelProto) -> None:
    """The two inputs of a gradient change places."""
    early, _ = both_of(model, f"{SWI_GLU}Grad")
    early.input[:] = reversed(early.input)


def without_gradient(model: ModelProto) -> None:
    """An activation hands the gradient of its output on, twice, for those of gate and up."""
    early, _ = both_of(model, f"{SWI_GLU}Grad")
    early.op_type, early.domain = "Concat", ""
    early.input[1] = early.input[0]
    early.attribute.add(name="axis", i=1, type=2)


def by_other_sizes(model: ModelProto) -> None:
    """The products of the later layer take the numbers of rows of the earlier one."""
    first, _, third, fourth = [n for n in model.graph.node if n.op_type == "MoeGroupedMatmul"][:4]
    assert third.input[2] != first.input[2]
    third.input[2] = fourth.input[2] = first.input[2]


def case(
    code: str, name: str, base: Callable[[], ModelProto], break_it: Callable[[Any], Any], *also: str
) -> Mutation:
    return Mutation(code, name, base, break_it, also=also)


_FORWARD = [
    case("MO628", f"{what} of another layer, {op}, {base.__name__}", base, crossed(op, index))
    for op, index, what, base in (
        (INIT, 0, "tokens", grad_model),
        (INIT, 1, "expert ids", grad_model),
        (INIT, 1, "expert ids", active),
        (INIT, 1, "expert ids", padded),
        (COMBINE, 1, "indices", grad_model),
        (COMBINE, 1, "indices", active),
        (COMBINE, 2, "map", grad_model),
        (COMBINE, 3, "probs", grad_model),
        (PERMUTE, 0, "tokens", by_map),
        (PERMUTE, 1, "map", by_map),
        (PERMUTE, 2, "probs", by_map),
        (COMBINE, 1, "indices", by_map),
        (COMBINE, 2, "map", by_map),
        (FINALIZE, 1, "indices", padded),
        (FINALIZE, 5, "scales", padded),
    )
]
_BACKWARD = [
    case("MO629", f"{what} of another layer, {op}Grad", base, crossed(f"{op}Grad", index))
    for op, index, what, base in (
        (INIT, 0, "gradient", grad_model),
        (INIT, 1, "indices", grad_model),
        (COMBINE, 0, "gradient", grad_model),
        (COMBINE, 1, "out_index", grad_model),
        (COMBINE, 2, "token ids", grad_model),
        (COMBINE, 3, "map", grad_model),
        (COMBINE, 4, "rows", grad_model),
        (COMBINE, 5, "probs", grad_model),
        (PERMUTE, 0, "gradient", by_map),
        (PERMUTE, 1, "gradient of weights", by_map),
        (PERMUTE, 2, "indices", by_map),
        (PERMUTE, 3, "map", by_map),
        (FINALIZE, 0, "gradient", padded),
        (FINALIZE, 1, "indices", padded),
        (FINALIZE, 2, "rows", padded),
        (FINALIZE, 3, "scales", padded),
    )
]
# The others are held by the two checks alone, which is quicker.
MORE: list[Mutation] = [
    *(*_FORWARD[2:], *_BACKWARD[2:]),
    case("MO629", "indices exchanged", grad_model, exchanged(f"{INIT}Grad", 1)),
    case("MO629", "all exchanged", grad_model, exchanged(f"{COMBINE}Grad", 1, 2, 3, 4, 5)),
    case("MO629", "all exchanged by map", by_map, exchanged(f"{PERMUTE}Grad", 2, 3)),
    case("MO629", "rows of activations exchanged", activated_by_layer, exchanged(f"{SWI_GLU}Grad", 1)),
]
MUTATIONS: list[Mutation] = [
    *_FORWARD[:2],
    # The experts of the later layer are then read by nothing.
    case("MO628", "rows of another layer", grad_model, crossed(COMBINE, 0), "MO611"),
    case("MO628", "sizes of groups of another layer", grouped, by_other_sizes),
    *_BACKWARD[:2],
    case(
        "MO629", "all of another layer but the gradient", grad_model, crossed(f"{COMBINE}Grad", 1, 2, 3, 4, 5)
    ),
    case("MO629", f"rows of another layer, {SWI_GLU}Grad", activated_by_layer, crossed(f"{SWI_GLU}Grad", 1)),
    case(
        "MO617", f"rows of another expert, {SWI_GLU}Grad", activated_by_expert, crossed(f"{SWI_GLU}Grad", 1)
    ),
    case("MO315", f"{SWI_GLU}Grad: inputs changed places", activated_by_layer, gradient_for_rows),
    case("MO618", f"a {SWI_GLU}Grad is lost", activated_by_layer, without_gradient, "MO206"),
    case(
        "MO619", "running sums for counts", active, attribute(INIT, "expert_tokens_count_or_cumsum_flag", 2)
    ),
    case("MO619", "counts before capacity", padded, attribute(INIT, "expert_tokens_before_capacity_flag", 1)),
    case("MO619", "a number of tokens", by_map, attribute(f"{PERMUTE}Grad", "tokens_num", 1)),
    case("MO619", "active rows backward", padded, attribute(f"{FINALIZE}Grad", "active_num", 1)),
]
