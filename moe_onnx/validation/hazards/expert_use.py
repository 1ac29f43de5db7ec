"""How graphs use experts: copies of weights, ids and their order, sizes of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import NodeProto

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.collapse import first_few
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.hazards.values import (
    argument,
    back,
    constant,
    dims,
    foreign_nodes,
    integer,
    integers,
    is_op,
    source,
)
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Scope, Subject

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


@check("static", WEIGHT_GATHER)
def weight_gathers(subject: Subject) -> Iterable[Outcome]:
    """No product gathers a copy of expert weights for every token."""
    yield from first_few(_weight_gathers(subject))


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
    yield from first_few(_expert_ids(subject))


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
    yield from first_few(_fixed_sizes(subject))


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
