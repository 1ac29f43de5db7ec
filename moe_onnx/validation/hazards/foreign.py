"""What exporters do to mixtures of experts: parameters merged, experts lost, loops fixed by a trace."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from onnx import NodeProto, TensorProto

from moe_onnx.validation.collapse import few, first_few
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.hazards.values import (
    argument,
    attribute,
    dims,
    foreign_nodes,
    integer,
    integers,
    is_op,
    read,
    source,
)
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

MERGED = code(
    "MO701",
    "warning",
    "One initializer stands for several parameters",
    why="torch.onnx.export merges parameters of equal values: in a fresh model all norm weights (ones) "
    "and all biases (zeros) become one tensor, under the name of the first (measured: a fresh tiny "
    "Mixtral keeps 3 of 12 parameters by name). The model computes the same, but training it trains one "
    "parameter in place of many, whose gradient is the sum of theirs; and a checkpoint does not find the "
    "others.",
    mend="Export with optimize=False (dynamo=True) or with parameters as inputs, or load trained weights "
    "first; or build the training graph by moe_onnx.build_training_graph and load the checkpoint into it.",
)


RENAMED = code(
    "MO702",
    "note",
    "Weights have lost their parameters' names",
    why="torch.onnx.export folds the transpose in front of a matrix product, and stacks, into new "
    "constants with made-up names (`val_107`, `onnx::MatMul_489`). Inference is the same; for training, "
    "the names, the layout and any tie to another use of the parameter are gone.",
    mend="Nothing for inference. For training keep the names: export with optimize=False or parameters "
    "as inputs, or use moe_onnx.build_training_graph.",
)


LOST_EXPERTS = code(
    "MO703",
    "error",
    "Experts are missing",
    why="A trace records what ran: an expert that got no token of the example input is not in the graph, "
    "its weights are dropped as unused, and nothing says so (YOLO-Master #42: 7 of 11 convolutions; "
    "measured with torch.onnx.export(dynamo=False) on `if mask.any()` in a loop over experts). Tokens "
    "routed to it are left out of the sum.",
    mend="Export without branches on the data: transformers' experts_implementation='batched_mm', or "
    "every expert on all tokens with a mask; or build the graph by moe_onnx.",
)


FIXED_LOOP = code(
    "MO704",
    "warning",
    "A loop over what was found has as many turns as in the trace",
    why="NonZero finds as many places as the data has, and this node takes that number for fixed: the "
    "loop over the experts that were hit was unrolled by torch.onnx.export(dynamo=False) (transformers' "
    "Mixtral, experts_implementation='eager'). Another number of experts hit fails (`Split ... "
    "NumOutputs=2`), and the same number of others runs by chance.",
    mend="Export with dynamo=True and experts_implementation='batched_mm', or build the graph by moe_onnx.",
)


_EXPERT = re.compile(r"(?:^|[./])experts?[./](\d+)(?=[./]|$)")


_ROUTER = re.compile(r"(?:^|\.)(gate|router|router\.classifier|gate\.wg|router\.layer)\.weight$")


_MADE_UP = re.compile(r"(onnx::[A-Za-z]+_\d+|val_\d+)$")


@check("static", MERGED)
def merged_parameters(subject: Subject) -> Iterable[Outcome]:
    """No initializer stands for parameters of several modules."""
    yield from first_few(_merged_parameters(subject))


def _merged_parameters(subject: Subject) -> Iterator[Outcome]:
    scope = subject.main
    merged: dict[str, list[str]] = defaultdict(list)
    modules: dict[str, set[str]] = defaultdict(set)
    seen = False
    for node in scope.nodes:
        if is_op(node, "Identity") and (tensor := scope.initializers.get(argument(node, 0))) is not None:
            # dynamo=False leaves an Identity from the parameter kept to each that is merged into it.
            name = next(iter(node.output), "")
            seen = True
            if "." in name and "." in tensor.name and _may_be_merged(tensor):
                merged[tensor.name].append(f"{name!r}")
                modules[tensor.name] |= {name, tensor.name}
        module = _module(node)
        if module is None:
            continue
        seen = True
        for name in dict.fromkeys(node.input):
            tensor = scope.initializers.get(name)
            if tensor is None or "." not in name or not _may_be_merged(tensor):
                continue
            owner = name.rpartition(".")[0]
            modules[name].add(_said(module))
            # The last part of an owner tells modules apart: a wrapper may have put names in front.
            if owner not in module and not any(owner.endswith("." + one) for one in module if "." in one):
                merged[name].append(f"{_said(module)!r}")
    for name, others in merged.items():
        if len(modules[name]) < 2:
            continue  # one use: a node that was fused from those of two modules
        yield MERGED(
            scope.tensor(name),
            found=f"also used as a parameter of {few(dict.fromkeys(others), 4)}",
            expected="one initializer for each parameter",
        )
    if not seen:
        yield Skipped(
            "no node says which module it comes from, so that parameters that were merged cannot be told"
        )


@check("static", RENAMED)
def renamed_parameters(subject: Subject) -> Iterable[Outcome]:
    """Weights go by the names of parameters."""
    if subject.model.producer_name != "pytorch":
        return
    scope = subject.main
    lost: dict[str, str] = {}  # the first use of each
    for node in scope.nodes:
        for name in node.input:
            tensor = scope.initializers.get(name)
            if tensor is not None and _MADE_UP.match(name) and _is_weight(tensor):
                module = _module(node)
                said = f"{name!r} {list(tensor.dims)}"
                lost.setdefault(name, f"{said} of {_said(module)!r}" if module else said)
    if lost:
        yield RENAMED(
            "graph",
            found=f"{len(lost)} weights go by made-up names: {few(lost.values(), 4)}",
            places=map(scope.tensor, lost),
        )


@check("static", LOST_EXPERTS)
def experts(subject: Subject) -> Iterable[Outcome]:
    """Every expert of a layer is there."""
    yield from first_few(_experts(subject))


def _experts(subject: Subject) -> Iterator[Outcome]:
    found: dict[str, set[int]] = defaultdict(set)
    weighty: set[str] = set()  # layers of which at least one expert shows a whole weight
    widths: dict[str, int] = {}
    scope = subject.main
    values = [(tensor.name, list(tensor.dims)) for tensor in scope.initializers.values()]
    types = subject.types(scope)
    values += [(name, [d for d in dims(types, name) or [] if isinstance(d, int)]) for name in scope.inputs]
    for name, shape in values:
        if (match := _EXPERT.search(name)) is not None and len(shape) >= 2:
            layer = _layer(name, match)
            found[layer].add(int(match[1]))
            weighty.add(layer)
        elif _ROUTER.search(name) is not None and len(shape) == 2:
            widths[name[: _ROUTER.search(name).start()]] = shape[0]  # type: ignore[union-attr]
    for node in scope.nodes:
        for path in _paths(node):
            if (match := _EXPERT.search(path)) is not None:
                found[_layer(path, match)].add(int(match[1]))
    most = max((max(ids) for layer, ids in found.items() if layer in weighty), default=0) + 1
    for layer, ids in sorted(found.items()):
        if len(ids) < 2 and layer not in weighty:
            continue
        width = widths.get(layer, 0)
        has_gap = len(ids) <= max(ids) - min(ids)
        missing = sorted(set(range(width or max(ids) + 1)) - ids)
        # Experts from another number than 0 on are a shard of an expert-parallel model.
        if missing and (has_gap or (width and min(ids) == 0 and width <= max(most, 1 << 12))):
            yield LOST_EXPERTS(
                f"{layer or 'graph'}",
                found=f"experts {few(map(str, missing), 8)} are nowhere, {len(ids)} others are",
                expected=f"experts 0 to {(width or max(ids) + 1) - 1}"
                + (f", as the router has {width} rows" if width else ""),
            )


@check("static", FIXED_LOOP)
def fixed_loops(subject: Subject) -> Iterable[Outcome]:
    """No node takes the number of places that a NonZero found for fixed."""
    yield from first_few(_fixed_loops(subject))


def _fixed_loops(subject: Subject) -> Iterator[Outcome]:
    for scope, node in foreign_nodes(subject):
        if not is_op(node, "Split") or len(node.output) < 2:
            continue
        made = source(scope, argument(node, 0), frozenset({"Cast", "Identity"}))
        axis = integer(node, "axis", 0)
        if made is not None and is_op(made[1], "Transpose"):
            order = attribute(made[1], "perm", [1, 0])
            if order == [1, 0]:
                axis = {0: 1, 1: 0, -1: 0, -2: 1}.get(axis, 0)
            made = source(made[0], argument(made[1], 0), frozenset({"Cast", "Identity"}))
        if made is None or not is_op(made[1], "NonZero") or axis not in (1, -1):
            continue
        parts = integers(scope, argument(node, 1))
        if argument(node, 1) and parts is None:
            continue  # sizes that are computed
        yield FIXED_LOOP(
            scope.place(node),
            found=f"takes what {made[0].place(made[1])} finds to be {len(node.output)} places",
            expected="as many as the data has",
        )


def _module(node: NodeProto) -> list[str] | None:
    """The names of the modules that a torch export says a node is in, outermost first."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return None
            if isinstance(scopes, list) and all(isinstance(one, str) for one in scopes):
                return scopes[:-1] or None  # the last is the node itself
            return None
    return None


def _said(module: list[str]) -> str:
    return next((one for one in reversed(module) if one), "the model")


def _paths(node: NodeProto) -> Iterator[str]:
    """What says where in the model a node comes from."""
    if node.name.startswith("/"):
        yield node.name.rpartition("/")[0]
    module = _module(node)
    if module:
        yield _said(module)


def _layer(name: str, match: re.Match[str]) -> str:
    """The layer that experts belong to, of a parameter's name or a node's path."""
    return name[: match.start()].strip("/").replace("/", ".")


def _is_weight(tensor: TensorProto) -> bool:
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    return tensor.data_type in floats and len(tensor.dims) >= 2 and min(tensor.dims) > 1


def _may_be_merged(tensor: TensorProto) -> bool:
    """Vectors, and what is the same everywhere. A matrix of two uses is tied: an embedding and its head."""
    size = 1
    for dim in tensor.dims:
        size *= dim
    if size < 2:
        return False
    if len(tensor.dims) == 1:
        return True
    value = read(tensor)
    return value is not None and value.size > 0 and bool((value == value.reshape(-1)[0]).all())
