"""Parameters, loss and gradients: each parameter counts, each gradient is that of its own parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx import NodeProto

from moe_onnx.build.config import MoeLMConfig
from moe_onnx.build.manifest import ParameterInfo
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training import Training, few, training_of
from moe_onnx.validation.training_flow import MOVES, Flow, flow_of, int_attribute, is_op

UNUSED = code(
    "MO611",
    "error",
    "A parameter does not reach the loss",
    why="Its gradient can only be zero, and it never learns. So it is after an export that merged two "
    "weights into one, that folded a weight into a constant, or that cut off a branch: the node that should "
    "read it reads something else.",
    mend="Let the node of that place read its own parameter; export again with constant folding off.",
)
GRADIENT_LOST = code(
    "MO612",
    "error",
    "A gradient does not depend on its parameter",
    why="The gradient of a loss depends on what the loss depends on. One that does not is a constant, mostly "
    "zeros, or belongs to something else: the parameter stands still, or is moved only by weight decay.",
    mend="Differentiate again with `moe_onnx.differentiate` or `build_training_graph`.",
)
GRADIENT_CROSSED = code(
    "MO613",
    "error",
    "A gradient is that of another parameter",
    why="Two outputs of the same shape that changed places go unnoticed by every shape check: training "
    "runs, the loss even falls for a while. A gradient is made of what its parameter is multiplied with "
    "and of what comes back there; here it is made of another parameter's.",
    mend="Bind each gradient to the parameter it is named after; level 'full' measures all of them.",
)
NORM = code(
    "MO620",
    "error",
    "The gradient norm leaves a gradient out",
    why="Clipping scales all gradients by one factor made from the norm over all of them. Without some "
    "of them it is too small, and what should be clipped is not: spikes of the loss that nobody else has.",
    mend="Sum the squares of all trained parameters' gradients, each once.",
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
GRAD_NORM = "grad_norm"
_MOST_BITS = 2**33  # of the table of dependences: 1 GB
_SPREADS = MOVES | {"Expand"}
_WIDELY_USED = 64


def usable(training: Training | str, assemblies: Sequence[str], flow: Flow) -> str:
    """Why a check of the graph itself does not apply, or ``""``."""
    if isinstance(training, str):
        return training
    if training.assembly not in assemblies:
        return f"the graph {training.assembly!r} has none of what is looked at here"
    if len(flow.order) < len(flow.nodes):
        return "nodes stand in a cycle"
    if len(flow.nodes) * len(training.manifest.parameters) > _MOST_BITS:
        return "nodes and parameters are too many"
    return ""


def loss_of(training: Training) -> str:
    """The output that parameters are for: the loss, or what a graph without one gives."""
    if training.assembly != "forward":
        return "loss"
    return next((one.name for one in training.info.outputs if one.role in ("logits", "output")), "")


def gradient_parts(training: Training, flow: Flow) -> dict[str, frozenset[str]]:
    """By trained parameter, the values that its gradient is the elementwise sum of."""
    found = {}
    for parameter in training.manifest.parameters:
        name = parameter.gradient if training.assembly == "grad" else parameter.updated
        if parameter.trained and name in flow.maker:
            leaves = flow.spread(name, stop={GRAD_NORM}).leaves
            found[parameter.name] = frozenset(leaf for leaf in leaves if not _is_total(flow, leaf))
    return found


def _is_total(flow: Flow, name: str) -> bool:
    """Whether a value is a sum over all of a tensor: a number, which the norm is made of."""
    node = flow.node(name)
    if node is None or not node.op_type.startswith("Reduce"):
        return False
    has_axes = (len(node.input) > 1 and bool(node.input[1])) or any(a.name == "axes" for a in node.attribute)
    return not has_axes and int_attribute(node, "keepdims", 1) == 0


@check("static", UNUSED, TWICE, TERM, TIE)
def reach(subject: Subject) -> Iterator[Outcome]:
    """Every parameter, and every term, reaches the loss, or the output of a graph without one."""
    training, flow = training_of(subject), flow_of(subject)
    if why := usable(training, ("step", "grad", "eval", "forward"), flow):
        yield Skipped(why)
        return
    assert isinstance(training, Training)
    loss = loss_of(training)
    if loss not in flow.maker:
        yield Skipped("there is no loss and no output")
        return
    before = flow.ancestors([loss])
    noisy = training.assembly in ("step", "grad")
    config = training.config
    tied = isinstance(config, MoeLMConfig) and config.tie_word_embeddings
    used: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for parameter in training.manifest.parameters:
        places = _uses(flow, parameter.name, before)
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
        if name in flow.maker and name not in before:
            yield TERM(f"output {name!r}", found="the loss does not depend on it", expected="it does")
    if tied and EMBEDDING in before:
        yield from _tie(training, flow, before)


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


@check("static", GRADIENT_LOST, GRADIENT_CROSSED, NORM)
def gradients(subject: Subject) -> Iterator[Outcome]:
    """Every gradient depends on its parameter, is its own, and counts in the norm."""
    training, flow = training_of(subject), flow_of(subject)
    if why := usable(training, ("step", "grad"), flow):
        yield Skipped(why)
        return
    assert isinstance(training, Training)
    parts = gradient_parts(training, flow)
    depends = flow.dependence([p.name for p in training.manifest.parameters])
    bits = {p.name: 1 << number for number, p in enumerate(training.manifest.parameters)}
    before = flow.ancestors(["loss"])
    counted = flow.ancestors([GRAD_NORM]) if GRAD_NORM in flow.maker else None
    sound, uncounted = [], []
    for parameter in training.manifest.parameters:
        own = parts.get(parameter.name)
        # A parameter that the loss does not see is another finding, as is an update without gradient.
        if own is None or parameter.name not in before or (training.assembly == "step" and not own):
            continue
        if not any(depends.get(name, 0) & bits[parameter.name] for name in own):
            where = f"gradient {parameter.gradient!r}" if training.assembly == "grad" else "gradient"
            made = f"{few(own)} depends on nothing of it" if own else "it is a constant, or an input"
            yield GRADIENT_LOST(f"{where} of parameter {parameter.name!r}", found=made)
            continue
        sound.append(parameter)
        if counted is not None and not all(name in counted for name in own):
            uncounted.append(parameter.name)
    yield from _crossed(flow, sound, parts)
    if uncounted:
        yield NORM(
            f"output {GRAD_NORM!r}",
            found=f"{len(uncounted)} of {len(parts)} gradients are not in it: those of {few(uncounted)}",
            expected="all",
        )


def _crossed(
    flow: Flow, parameters: Sequence[ParameterInfo], parts: Mapping[str, frozenset[str]]
) -> Iterator[Outcome]:
    same: dict[frozenset[str], list[str]] = {}
    for parameter in parameters:
        same.setdefault(parts[parameter.name], []).append(parameter.name)
    for part, names in same.items():
        if len(names) > 1:
            where = f"gradients of parameters {few(names)}"
            yield GRADIENT_CROSSED(where, found=f"all are {few(part)}", expected="one gradient for each")
    shared = {name for names in same.values() if len(names) > 1 for name in names}
    uses = _companions(flow, [parameter.name for parameter in parameters])
    owners: dict[str, list[str]] = {}
    for name, values in uses.items():
        for value in values:
            owners.setdefault(value, []).append(name)
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    for parameter in parameters:
        if parameter.name in shared:
            continue
        agree: Counter[str] = Counter()
        for value in _operands(flow, parts[parameter.name]):
            if len(owners.get(value, ())) <= _WIDELY_USED:
                agree.update(owners.get(value, ()))
        others = [name for name in agree if shapes[name] == parameter.shape]
        best = max(others, key=lambda name: agree[name], default=parameter.name)
        if agree[best] > agree[parameter.name]:
            yield GRADIENT_CROSSED(
                f"gradient of parameter {parameter.name!r}",
                found=f"it is made of what {best!r} is multiplied with: {few(parts[parameter.name])}",
                expected="of what its own parameter is multiplied with",
            )


def _companions(flow: Flow, names: Sequence[str]) -> dict[str, set[str]]:
    """For every parameter, the values that it is multiplied with, forward and backward."""
    parameters = set(names)
    found: dict[str, set[str]] = {}
    beside: dict[str, set[str]] = {}
    for name in names:
        values: set[str] = set()
        left, seen = [name], {name}
        while left:
            value = left.pop()
            for number in flow.users.get(value, ()):
                node = flow.nodes[number]
                if is_op(node, _SPREADS) or is_op(node, ("Split",)):
                    left += [out for out in node.output if out and out not in seen]
                    seen.update(node.output)
                else:
                    values.update(flow.source(one) for one in node.input if one and one != value)
        found[name] = {value for value in values - parameters if _varies(flow, value)}
        beside[name] = values & parameters
    # A bias stands beside the matrix of its product.
    return {name: found[name].union(*(found[one] for one in beside[name])) for name in names}


def _operands(flow: Flow, parts: Iterable[str]) -> set[str]:
    """The values that a gradient is the product of."""
    found: set[str] = set()
    left = list(parts)
    while left:
        value = left.pop()
        if value in found:
            continue
        found.add(value)
        node = flow.node(value)
        if node is None:
            continue
        if is_op(node, _SPREADS) or is_op(node, ("ReduceSum", "Slice", "Pad")):
            left += list(node.input[:1])
        elif is_op(node, ("Concat",)):
            left += list(node.input)
        else:
            found.update(flow.source(name) for name in node.input if name)
    return {value for value in found if value in flow.maker or value in flow.inputs}


def _varies(flow: Flow, value: str) -> bool:
    return value in flow.maker or value in flow.inputs
