"""What exporters do to mixtures of experts: parameters merged, experts lost, loops fixed by a trace."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from onnx import NodeProto, TensorProto

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject
from moe_onnx.validation.values import (
    argument,
    attribute,
    back,
    collapsed,
    constant,
    dims,
    foreign_nodes,
    integer,
    integers,
    is_op,
    read,
    source,
)

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
WEIGHT_GATHER = code(
    "MO705",
    "warning",
    "Every token gathers its own copy of expert weights",
    why="The stacked weights of all experts are gathered by the tokens' expert ids: one copy of a whole "
    "expert for each of T x K slots, in place of one product for each expert (transformers' batched_mm, "
    "which is what exports at all; measured 17.1 ms in place of 3.3 at T=256, H=128, F=256).",
    mend="Right, but dear beyond a few tokens. Group the tokens by expert instead: "
    "ascend.moe.MoeInitRoutingV2 with MoeGroupedMatmul, or moe_onnx.build_training_graph.",
)
NOT_ASCENDING = code(
    "MO706",
    "error",
    "Expert ids do not ascend into a combine that pairs by ascending expert",
    why="MoeTokenUnpermuteWithRoutingMap pairs a token's slots with its selected experts in ascending "
    "order, MoeInitRoutingV2 lays the slots out in the order it is given. With TopK's order, by score, a "
    "token's outputs get each other's weights: silently another model (measured: loss 21.09 in place of "
    "18.94), and finite differences cannot see it.",
    mend="Sort the ids of each token first: TopK(largest=0) over the ids, its values (not its indices) "
    "into MoeInitRoutingV2, after a Cast to int32.",
)
TOO_FEW_EXPERTS = code(
    "MO707",
    "error",
    "The router names more experts than the dispatch has",
    why="MoeInitRoutingV2 takes ids from 0 to expert_num - 1; the router's scores have more columns, so "
    "that TopK gives ids beyond.",
    mend="Set expert_num to the number of the router's columns, or cut the scores.",
)
FIXED_SIZE = code(
    "MO708",
    "warning",
    "A size that should vary was fixed by the trace",
    why="The value has a dimension that an input of the model leaves open, and the node gives it a "
    "shape, or parts, of constant size: it runs with the size of the example only (tracing_mode='real', "
    "or Python integers taken from shapes).",
    mend="Export with dynamic shapes, and take sizes from tensors (x.shape) rather than from Python "
    "integers.",
)

_EXPERT = re.compile(r"(?:^|[./])experts?[./](\d+)(?=[./]|$)")
_ROUTER = re.compile(r"(?:^|\.)(gate|router|router\.classifier|gate\.wg|router\.layer)\.weight$")
_MADE_UP = re.compile(r"(onnx::[A-Za-z]+_\d+|val_\d+)$")


@check("static", MERGED)
def merged_parameters(subject: Subject) -> Iterable[Outcome]:
    """No initializer stands for parameters of several modules."""
    yield from collapsed(_merged_parameters(subject))


def _merged_parameters(subject: Subject) -> Iterator[Outcome]:
    scope = subject.main
    merged: dict[str, list[str]] = defaultdict(list)
    seen = False
    for node in scope.nodes:
        if is_op(node, "Identity") and (tensor := scope.initializers.get(argument(node, 0))) is not None:
            # dynamo=False leaves an Identity from the parameter kept to each that is merged into it.
            name = next(iter(node.output), "")
            seen = True
            if "." in name and "." in tensor.name and _may_be_merged(tensor):
                merged[tensor.name].append(f"{name!r}")
        module = _module(node)
        if module is None:
            continue
        seen = True
        for name in dict.fromkeys(node.input):
            tensor = scope.initializers.get(name)
            if tensor is None or "." not in name or not _may_be_merged(tensor):
                continue
            owner = name.rpartition(".")[0]
            # The last part of an owner tells modules apart: a wrapper may have put names in front.
            if owner not in module and not any(owner.endswith("." + one) for one in module if "." in one):
                merged[name].append(f"{_said(module)!r}")
    for name, others in merged.items():
        yield MERGED(
            scope.tensor(name),
            found=f"also used as a parameter of {_some(list(dict.fromkeys(others)))}",
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
    lost = []
    for node in scope.nodes:
        for name in node.input:
            tensor = scope.initializers.get(name)
            if tensor is not None and _MADE_UP.match(name) and _is_weight(tensor):
                module = _module(node)
                said = f"{name!r} {list(tensor.dims)}"
                lost.append(f"{said} of {_said(module)!r}" if module else said)
    if lost:
        lost = list(dict.fromkeys(lost))
        yield RENAMED("graph", found=f"{len(lost)} weights go by made-up names: {_some(lost)}")


@check("static", LOST_EXPERTS)
def experts(subject: Subject) -> Iterable[Outcome]:
    """Every expert of a layer is there."""
    yield from collapsed(_experts(subject))


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
                found=f"experts {_some([str(one) for one in missing], 8)} are nowhere, {len(ids)} others are",
                expected=f"experts 0 to {(width or max(ids) + 1) - 1}"
                + (f", as the router has {width} rows" if width else ""),
            )


@check("static", FIXED_LOOP)
def fixed_loops(subject: Subject) -> Iterable[Outcome]:
    """No node takes the number of places that a NonZero found for fixed."""
    yield from collapsed(_fixed_loops(subject))


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


@check("static", WEIGHT_GATHER)
def weight_gathers(subject: Subject) -> Iterable[Outcome]:
    """No product gathers a copy of expert weights for every token."""
    yield from collapsed(_weight_gathers(subject))


def _weight_gathers(subject: Subject) -> Iterator[Outcome]:
    for scope, node in foreign_nodes(subject):
        if (
            not is_op(node, "Gather", "GatherND")
            or integer(node, "axis", 0)
            or integer(node, "batch_dims", 0)
        ):
            continue
        types = subject.types(scope)
        where, name = back(scope, argument(node, 0), frozenset({"Cast", "Identity", "Transpose"}))
        tensor = where.initializer(name)
        shape = dims(subject.types(where), name)
        is_weight = tensor is not None or (where is subject.main and name in where.inputs)
        if not is_weight or shape is None or len(shape) < 3 or not all(isinstance(d, int) for d in shape):
            continue
        index = dims(types, argument(node, 1))
        if constant(scope, argument(node, 1)) is not None or index is None:
            continue
        if is_op(node, "GatherND"):
            if not index or index[-1] != 1:
                continue
            index = index[:-1]
        count = 1
        for dim in index:
            count = count * dim if isinstance(dim, int) and count else 0  # 0: not known
        experts, each = shape[0], 1
        for dim in shape[1:]:
            each *= dim if isinstance(dim, int) else 1
        # A single expert, or a few for one token, are what a loop or a decoder gathers.
        if not index or (isinstance(experts, int) and 0 < count <= experts) or each < 2:
            continue
        yield WEIGHT_GATHER(
            scope.place(node),
            found=f"copies {each} elements of {name!r} {shape} for each index in {node.input[1]!r}",
            expected=f"{experts} experts, each read once",
        )


@check("static", NOT_ASCENDING, TOO_FEW_EXPERTS)
def expert_ids(subject: Subject) -> Iterable[Outcome]:
    """The ids of a token's experts are ascending and in range where the operators need it."""
    yield from collapsed(_expert_ids(subject))


def _expert_ids(subject: Subject) -> Iterator[Outcome]:
    unknown = 0
    for scope, node in foreign_nodes(subject):
        if node.domain != DOMAIN:
            continue
        if node.op_type == "MoeInitRoutingV2":
            yield from _enough_experts(subject, scope, node)
        elif node.op_type == "MoeTokenUnpermuteWithRoutingMap" and not integer(node, "drop_and_pad", 0):
            probs = constant(scope, argument(node, 3))
            made = _dispatch(scope, argument(node, 1))
            if not argument(node, 3) or (probs is not None and not probs.size) or made is None:
                continue  # without weights there is nothing to pair
            verdict = _ascends(made[0], argument(made[1], 1))
            unknown += verdict is None
            if verdict:
                yield NOT_ASCENDING(
                    scope.place(node),
                    found=f"pairs the slots of {made[0].place(made[1])}, whose ids are {verdict}",
                    expected="ids that ascend in every token",
                )
    if unknown:
        yield Skipped(f"{unknown} combines whose expert ids come from where their order cannot be told")


@check("static", FIXED_SIZE)
def fixed_sizes(subject: Subject) -> Iterable[Outcome]:
    """No shape of constant size is given to what varies with an input."""
    yield from collapsed(_fixed_sizes(subject))


def _fixed_sizes(subject: Subject) -> Iterator[Outcome]:
    scope = subject.main
    types = subject.types(scope)
    given = scope.graph.input if scope.graph is not None else []
    open_dims = {
        dim.dim_param for value in given for dim in value.type.tensor_type.shape.dim if dim.dim_param
    }
    if not open_dims:
        return
    for node in scope.nodes:
        if not is_op(node, "Reshape", "Split"):
            continue
        shape = dims(types, argument(node, 0)) or []
        target = integers(scope, argument(node, 1))
        if target is None:
            continue
        if is_op(node, "Split"):
            axis = integer(node, "axis", 0)
            varies = [shape[axis]] if -len(shape) <= axis < len(shape) else []
        else:
            varies = shape if all(size > 0 for size in target) else []
        fixed = [dim for dim in varies if isinstance(dim, str) and dim in open_dims]
        if fixed:
            yield FIXED_SIZE(
                scope.place(node),
                found=f"{node.input[0]!r} {shape} becomes {target}",
                expected=f"a size that follows {fixed[0]!r}",
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


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _dispatch(scope: Scope, name: str) -> tuple[Scope, NodeProto] | None:
    """The MoeInitRoutingV2 whose rows an index names, through views and a Where that drops some."""
    for _ in range(4):
        made = source(scope, name)
        if made is None:
            return None
        scope, node, output = made
        if node.domain == DOMAIN:
            return (scope, node) if (node.op_type, output) == ("MoeInitRoutingV2", 1) else None
        if not is_op(node, "Where"):
            return None
        name = argument(node, 1) if constant(scope, argument(node, 1)) is None else argument(node, 2)
    return None


def _ascends(scope: Scope, name: str) -> str | None:
    """``""`` where the ids of a token ascend, what they are where they do not, None where nobody knows."""
    for _ in range(4):
        made = source(scope, name)
        if made is None:
            return None
        scope, node, output = made
        if is_op(node, "Where"):  # the ids of padding tokens replaced
            name = argument(node, 1) if constant(scope, argument(node, 1)) is None else argument(node, 2)
            continue
        if not is_op(node, "TopK"):
            return None
        count = integers(scope, argument(node, 1))
        if count == [1]:
            return ""
        if output == 0:
            is_sorted = integer(node, "sorted", 1) and not integer(node, "largest", 1)
            return "" if is_sorted else f"sorted by {scope.place(node)} the other way, or not at all"
        return None if count is None else f"the places {scope.place(node)} gives, in the order of its scores"
    return None


def _enough_experts(subject: Subject, scope: Scope, node: NodeProto) -> Iterator[Outcome]:
    made = source(scope, argument(node, 1))
    if made is not None and is_op(made[1], "TopK") and made[2] == 0:
        made = source(made[0], argument(made[1], 0))  # ids that were sorted
    if made is None or not is_op(made[1], "TopK") or made[2] != 1:
        return
    shape = dims(subject.types(made[0]), argument(made[1], 0))
    columns = shape[-1] if shape and integer(made[1], "axis", -1) in (-1, len(shape) - 1) else None
    experts = integer(node, "expert_num", 0)
    if isinstance(columns, int) and experts > 0 and columns > experts:
        yield TOO_FEW_EXPERTS(
            scope.place(node),
            found=f"expert_num {experts}; {made[0].place(made[1])} chooses among {columns} scores",
            expected=f"expert_num {columns}",
        )
