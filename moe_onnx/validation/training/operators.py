"""The operators that a training graph's dispatch calls for: as often as there are layers, in its modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from onnx import AttributeProto, NodeProto

from moe_onnx.adapters.python_ops import SESSION_DOMAIN
from moe_onnx.build.forward import moe_layers
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.legalize import BODY_DOMAIN
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject
from moe_onnx.validation.training.prepared import Config, Training, training_of

COUNT = code(
    "MO618",
    "error",
    "There are not as many routing operators as layers with experts",
    why="Each layer with experts has one operator that sends tokens to their experts and one that brings "
    "them back, and in a graph with gradients the Grad operator of each. One less is a layer that was lost, "
    "or whose gradient goes another way than the source documents define.",
    mend="Build the graph again, or name in the config what the graph does.",
)
MODE = code(
    "MO619",
    "error",
    "A routing operator is in another mode than the config says",
    why="Mode, capacity, active rows and the place where the weights are applied belong to forward and "
    "backward alike. A backward operator in another mode reads indices by another meaning: the gradient has "
    "the right shape and the wrong rows.",
    mend="Give the operator the attributes and inputs of the config's dispatch.",
)

# Sessions move nodes to domains of their own, and models may be saved so.
OURS = (DOMAIN, SESSION_DOMAIN, BODY_DOMAIN)
_COMBINE, _FINALIZE = "MoeTokenUnpermuteWithRoutingMap", "MoeFinalizeRoutingV2"
_INIT, _PERMUTE = "MoeInitRoutingV2", "MoeTokenPermuteWithRoutingMap"
_PRODUCT, _ACTIVATION, _UPDATE = "MoeGroupedMatmul", "MoeSwiGlu", "MoeAdamW"
_NORM = "MoeSquareSum"  # of one gradient


@check("static", COUNT, MODE)
def operators(subject: Subject) -> Iterator[Outcome]:
    """Dispatch, combine and their Grad operators are there for every layer, in the config's modes."""
    training = training_of(subject)
    if isinstance(training, str):
        yield Skipped(training)
        return
    if training.config is None:
        yield Skipped(training.no_config)
        return
    if training.assembly not in ("step", "grad", "eval", "forward"):
        yield Skipped("there is no model in this graph")
        return
    backward = training.assembly in ("step", "grad")
    found = [(s, n) for s, n in subject.nodes() if n.domain in OURS and s.function is None]
    counts = Counter(node.op_type for _, node in found)
    given = {one.name for one in subject.model.graph.output} - {one.name for one in training.info.outputs}
    inlined, wrong = [], []
    wanted = _wanted(training.config, backward, training.manifest.optimize_for)
    for name, number in wanted.items():
        if counts[name] == 0 and number and (DOMAIN, name) not in subject.functions:
            inlined.append(name)  # as onnxruntime does before it saves an optimised model
        elif given and not backward and counts[name] > number:
            continue  # the graph was differentiated again, or has further outputs of another kind
        elif counts[name] != number:
            wrong.append(name)
    if wrong:
        yield COUNT(
            f"operator {wrong[0]}" + f" and {len(wrong) - 1} more" * (len(wrong) > 1),
            found=", ".join(f"{counts[name]} {name}" for name in wrong),
            expected=", ".join(f"{wanted[name]} {name}" for name in wrong),
            places=[f"operator {name}" for name in wrong],
        )
    if inlined:
        yield Skipped(f"{', '.join(inlined)}: bodies have taken the place of the operators")
    legal = _attributes(training.config)
    for scope, node in found:
        yield from _mode(scope, node, training, legal)


def _wanted(config: Config, backward: bool, optimize_for: str) -> dict[str, int]:
    """How many nodes of each operator there must be; updates and norms are looked at one by one elsewhere."""
    layers = moe_layers(config)
    there = _PERMUTE if config.dispatch == "routing_map" else _INIT
    drops = config.dispatch_mode == "drop_pad" and there == _INIT
    wanted = dict.fromkeys((name for name in BY_NAME if name not in (_UPDATE, _NORM)), 0)
    for name in (there, _FINALIZE if drops else _COMBINE):
        wanted[name] = layers
        wanted[f"{name}Grad"] = layers if backward else 0
    if not config.unrolls(optimize_for):
        wanted[_PRODUCT] = layers * (4 if backward else 2)
        wanted[f"{_PRODUCT}WeightGrad"] = layers * 2 if backward else 0
    if optimize_for == "native" and config.expert_activation == "swiglu":
        each = layers * (config.num_experts if config.unrolls(optimize_for) else 1)
        wanted[_ACTIVATION], wanted[f"{_ACTIVATION}Grad"] = each, each if backward else 0
    return wanted


def _attributes(config: Config) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Legal values of every attribute by operator; the first is what is meant."""
    mode, padded = config.dispatch_mode, int(config.dispatch_mode == "drop_pad")
    experts = config.num_experts
    # Slots without a row go to one expert more.
    counts = (experts,) if mode == "dropless" else (experts, experts + 1)
    sizes = {"active_num": (config.active_num,), "drop_pad_mode": (padded,)}
    by_map = {"drop_and_pad": (padded,)}
    return {
        _INIT: {
            **sizes,
            "expert_capacity": (config.capacity,),
            "expert_num": counts,
            "expert_tokens_count_or_cumsum_flag": ({"dropless": 2, "active": 1}.get(mode, 0),),
            "expert_tokens_before_capacity_flag": (0,),
        },
        f"{_INIT}Grad": {**sizes, "top_k": (config.num_experts_per_tok,)},
        _FINALIZE: {"drop_pad_mode": (3,)},
        f"{_FINALIZE}Grad": {
            "drop_pad_mode": (1,),
            "active_num": (0,),
            "expert_num": (experts, 0),
            "expert_capacity": (config.capacity, 0),
        },
        _PERMUTE: {**by_map, "num_out_tokens": (experts * config.capacity,)},
        f"{_PERMUTE}Grad": {**by_map, "num_experts": (0, experts), "tokens_num": (0,)},
        _COMBINE: {**by_map, "restore_shape": ((),)},
        f"{_COMBINE}Grad": {**by_map, "restore_shape": ((),)},
    }


def _mode(
    scope: Scope, node: NodeProto, training: Training, legal: dict[str, dict[str, tuple[Any, ...]]]
) -> Iterator[Outcome]:
    config = training.config
    assert config is not None
    given: dict[str, Any] = {a.name: _value(a) for a in node.attribute}
    spec = BY_NAME.get(node.op_type)
    defaults = {} if spec is None else {a.name: a.default for a in spec.attributes}
    for name, values in legal.get(node.op_type, {}).items():
        value = given.get(name, defaults.get(name))
        if value is not None and value not in values:
            yield MODE(
                scope.place(node),
                found=f"{name} = {value}",
                expected=f"{values[0]}, as the config's dispatch {config.dispatch!r}, "
                f"{config.dispatch_mode!r} has it",
            )
    index = {_COMBINE: 3, f"{_COMBINE}Grad": 5, _PERMUTE: 2}.get(node.op_type)
    if index is None:
        return
    weighs = not _is_absent(scope, node, index)
    meant = config.router_weights_on == ("experts" if node.op_type == _PERMUTE else "combine")
    if weighs != meant:
        words = {True: "weights ('probs') go in", False: "no weights ('probs') go in"}
        yield MODE(
            scope.place(node),
            found=words[weighs],
            expected=f"{words[meant]}, as router_weights_on is {config.router_weights_on!r}",
        )


def _value(attribute: AttributeProto) -> int | tuple[int, ...] | None:
    """An integer or several; None where it is of another type, as lists are on the Python route."""
    if attribute.type == AttributeProto.INTS:
        return tuple(attribute.ints)
    return attribute.i if attribute.type in (AttributeProto.INT, AttributeProto.UNDEFINED) else None


def _is_absent(scope: Scope, node: NodeProto, index: int) -> bool:
    """Whether an optional input is left out, or is the empty tensor that stands for it."""
    if index >= len(node.input) or not node.input[index]:
        return True
    name = node.input[index]
    tensor = scope.initializer(name)
    if tensor is None:
        made = scope.producer(name)
        values = [] if made is None else [a.t for a in made[1].attribute if a.name == "value"]
        tensor = values[0] if values and made is not None and made[1].op_type == "Constant" else None
    return tensor is not None and 0 in tensor.dims
