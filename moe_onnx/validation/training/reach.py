"""Parameters and the terms of the loss: each counts, each in its own place."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto

from moe_onnx.build.config import MoeLMConfig
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.flow import Flow
from moe_onnx.validation.training.gradients import gradient_parts, loss_of, prepared
from moe_onnx.validation.training.nodes import is_op
from moe_onnx.validation.training.prepared import Training

UNUSED = code(
    "MO611",
    "error",
    "A parameter does not reach the loss",
    why="Its gradient can only be zero, and it never learns. So it is after an export that merged two "
    "weights into one, that folded a weight into a constant, or that cut off a branch: the node that should "
    "read it reads something else.",
    mend="Let the node of that place read its own parameter; export again with constant folding off.",
)
TIE = code(
    "MO621",
    "error",
    "The embedding and the output are not tied, as the config says",
    why="A tied matrix is read at both ends of the model, and its gradient is the sum of both. Exports that "
    "copy it, or differentiate one use only, train another model under the same name.",
    mend="Let the output projection read 'model.embed_tokens.weight', and sum both gradients.",
)

TERM = code(
    "MO625",
    "error",
    "A term of the loss does not count",
    why="The config gives the term a weight, and the graph reports it, but the loss does not depend on it: "
    "experts are not balanced, logits not held small, while the reported value looks as it should. Trainers "
    "have lost an auxiliary loss so, by dropping the value that carried it.",
    mend="Add the weighted term to the loss before the gradients are made.",
)

TWICE = code(
    "MO627",
    "warning",
    "A parameter is read in more places than its model has",
    why="Each parameter stands in one place of its layer, a tied embedding in two. Read somewhere else as "
    "well, it shares a weight that the config does not share: its gradient is then the sum of both "
    "uses, and a checkpoint of it is another model in other frameworks.",
    mend="Give the second place a parameter of its own, or say in the config that they are tied.",
)


EMBEDDING = "model.embed_tokens.weight"


@check("static", UNUSED, TWICE, TERM, TIE)
def reach(subject: Subject) -> Iterator[Outcome]:
    """Every parameter, and every term, reaches the loss, or the output of a graph without one."""
    found = prepared(subject, ("step", "grad", "eval", "forward"))
    if isinstance(found, str):
        yield Skipped(found)
        return
    training, flow = found
    loss = loss_of(training)
    if loss not in flow.maker:
        yield Skipped("there is no loss and no output")
        return
    before = flow.ancestors([loss])
    noisy = training.assembly in ("step", "grad")
    config = training.config
    tied = isinstance(config, MoeLMConfig) and config.tie_word_embeddings
    shared = () if training.imported is None else training.imported.tied
    used: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for parameter in training.manifest.parameters:
        places = _uses(flow, parameter.name, before)
        if parameter.name in shared:
            continue
        if len(places) > (2 if parameter.name == EMBEDDING else 1):
            said = f"is read in {len(places)} places: {', '.join(places[:3])}"
            used.setdefault(parameter.shape, []).append((parameter.name, said))
    for parameter in training.manifest.parameters:
        name = parameter.name
        # Only training adds noise to a router.
        if name in before or name not in flow.inputs or (not noisy and name.endswith("gate.noise.weight")):
            continue
        # What stands in its place is the same finding.
        other = used[parameter.shape].pop() if used.get(parameter.shape) else None
        instead = f"{other[0]!r} {other[1]}" if other else ""
        readers = "only its update reads it" if name in flow.users else "no node reads it"
        yield UNUSED(
            f"parameter {name!r}",
            found=f"{readers}{'; ' * bool(instead)}{instead}",
            expected=f"a way to {loss!r}",
        )
    for name, said in (one for several in used.values() for one in several):
        yield TWICE(f"parameter {name!r}", found=f"it {said}")
    terms = ("lm_loss", "mse_loss", "aux_loss", "z_loss")
    for name in [one.name for one in training.info.outputs_of("metric") if one.name in terms]:
        # A loss of one term may be the same value, under both names.
        if name in flow.maker and not {name, _source(flow, name)} & {*before, _source(flow, loss)}:
            yield TERM(f"output {name!r}", found="the loss does not depend on it", expected="it does")
    if tied and EMBEDDING in before:
        yield from _tie(training, flow, before)


def _source(flow: Flow, name: str) -> str:
    """What a value is a copy of."""
    while name in flow.maker and flow.nodes[flow.maker[name]].op_type == "Identity":
        name = flow.nodes[flow.maker[name]].input[0]
    return name


def _uses(flow: Flow, name: str, before: set[str]) -> list[str]:
    numbers = flow.users.get(name, ())
    nodes = [flow.nodes[number] for number in numbers]
    return [flow.scope.place(node) for node in nodes if any(out in before for out in node.output)]


def _tie(training: Training, flow: Flow, before: set[str]) -> Iterator[Outcome]:
    nodes = [flow.nodes[number] for number in flow.users.get(EMBEDDING, ())]
    nodes = [node for node in nodes if any(out in before for out in node.output)]
    looks_up = [is_op(node, ("Gather", "GatherND", "GatherElements")) for node in nodes]
    where = f"parameter {EMBEDDING!r}"
    if all(looks_up) or not any(looks_up):
        end = "the output projection" if all(looks_up) else "the lookup of the tokens"
        yield TIE(where, found=f"{end} does not read it", expected="both read it")
    elif training.assembly in ("step", "grad"):
        parts = gradient_parts(training, flow).get(EMBEDDING)
        if parts is not None and len(parts) == 1 and not _adds(flow.node(next(iter(parts)))):
            yield TIE(where, found=f"its gradient is {next(iter(parts))!r} alone", expected="the sum of two")


def _adds(node: NodeProto | None) -> bool:
    """Whether an operator adds a third input to a product, as onnxruntime fuses them."""
    return node is not None and len(node.input) > 2 and node.op_type in ("Gemm", "ScatterElements")
