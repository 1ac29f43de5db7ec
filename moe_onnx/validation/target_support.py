"""What the target has: every operator of the package, its dtypes, and what it must be told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from moe_onnx.errors import (
    ACLNN_ERR_INNER_TILING_ERROR,
    ACLNN_ERR_PARAM_INVALID,
    ACLNN_ERR_PARAM_NULLPTR,
)
from moe_onnx.spec import MAX_TOP_K, is_absent
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.findings import Finding, Outcome, Skipped, Table
from moe_onnx.validation.moe_nodes import MoeNode, moe_nodes
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.targets import DEVICES, MIXES, SINCE

NO_OPERATOR = code(
    "MO531",
    "warning",
    "The device has no operator of this name",
    why="Operators of this package that no source document describes run on a device by their function "
    "body, one standard operator after the other, or are mapped by hand to an operator such as "
    "aclnnGroupedMatmul, which takes its group list in another form.",
    mend="Map the node to the device's own operator where the model is converted.",
)
RECENT = code(
    "MO532",
    "note",
    "The device has this operator since a recent release only",
    why="The documents' table of products changed: an operator that is on Ascend 950 in the newest "
    "documents was not there in those of the end of 2025. With an older toolkit the call ends with "
    "561003, no kernel found.",
    mend="See which release of CANN the device has.",
)
NO_DTYPE = code(
    "MO533",
    "error",
    "The device has no kernel for this dtype",
    why="The documents list float16, bfloat16 and float32. float64 is of this package, to hold gradients "
    "against finite differences; the device returns 161002.",
    mend="Build the model in float32, float16 or bfloat16.",
)
NO_MIX = code(
    "MO534",
    "error",
    "The device does not take these dtypes together",
    why="The gradient of the combine by index takes float32 scales beside bfloat16 rows on Ascend 950 "
    "alone; on A2 and A3 the scales have the dtype of the rows, and another one is 161002.",
    mend="Cast the scales to the dtype of the rows.",
)
RECENT_MIX = code(
    "MO535",
    "note",
    "The device takes these dtypes together since a recent release only",
    why="float32 probabilities beside bfloat16 tokens came to the routing-map operators on 2026-01-23. "
    "Before, all floats have one dtype; and torch_npu makes the gradient of the probabilities in the "
    "dtype of the tokens even where the kernel writes float32.",
    mend="See which release of CANN the device has, or cast the probabilities.",
)
WRITTEN_OUT = code(
    "MO536",
    "note",
    "The device must be told a size that stands in the shapes here",
    why="So that one graph serves batches of any size, `num_out_tokens`, `tokens_num`, `num_experts` and "
    "`restore_shape` may be 0 or absent in this package, and are then read from the shapes. The device "
    "takes 0 at its word: no rows, or an error.",
    mend="Fill in the size when the operator is called, or where the model is converted.",
)
EMPTY = code(
    "MO537",
    "warning",
    "The device refuses an empty tensor here",
    why="The documents allow empty tensors in places where the kernels' tiling refuses any size of 0 "
    "(561002); MoeInitRoutingV2Grad returns at once since 2026-05 where its result is empty. Here they "
    "are defined: no rows in, no rows or zeros out.",
    mend="Skip the operator for empty batches on the device.",
)
AT_THE_LIMIT = code(
    "MO538",
    "warning",
    "The number of experts per token is 512, which not every document allows",
    why="The kernels refuse more than 512 and let 512 pass; the documents of the dispatch and the combine "
    "by map ask for less than 512 in one place and at most 512 in another.",
    mend="Choose fewer experts a token.",
)


@check("static", NO_OPERATOR, RECENT, NO_DTYPE, NO_MIX, RECENT_MIX, WRITTEN_OUT, EMPTY, AT_THE_LIMIT)
def target_support(subject: Subject) -> Iterator[Outcome]:
    """The target has every operator of the package, for these dtypes and modes."""
    name = subject.options.target
    if name not in DEVICES:
        yield Skipped("no target was given")
        return
    nodes = moe_nodes(subject)
    yield from collapsed(
        finding
        for node in nodes
        for rule in (_operator, _dtypes, _sizes_to_write_out, _empty, _at_the_limit)
        for finding in rule(node, name)
    )
    if nodes:
        yield _table(nodes, name)


def _table(nodes: list[MoeNode], target: str) -> Table:
    counts = Counter((node.spec.name, _dtype(node)) for node in nodes)
    rows = tuple(
        (op, number, dtype or "unknown", _support(op, target))
        for (op, dtype), number in sorted(counts.items())
    )
    title = f"Operators on {target} ({DEVICES[target].products})"
    return Table(title, ("operator", "nodes", "dtype", "documented"), rows)


def _support(op: str, target: str) -> str:
    if op not in SINCE:
        return "no"
    return f"yes, since {SINCE[op]}" if target == "ascend950" and SINCE[op] else "yes"


def _dtype(node: MoeNode) -> str:
    return node.inputs[0].dtype if node.inputs[0] is not None else ""


def _operator(node: MoeNode, target: str) -> Iterator[Finding]:
    if node.spec.name not in SINCE:
        yield NO_OPERATOR(node.place, found=f"{node.spec.name} is of this package alone")
    elif target == "ascend950" and (since := SINCE[node.spec.name]):
        yield RECENT(node.place, found=f"{node.spec.name} is on {target} since {since}")


def _dtypes(node: MoeNode, target: str) -> Iterator[Finding]:
    for arg, info in zip(node.spec.inputs, node.inputs, strict=True):
        if info is not None and info.dtype == "float64" and not is_absent(arg, info):
            yield NO_DTYPE(
                node.place,
                found=f"'{arg.name}' is float64",
                expected="float16, bfloat16 or float32",
                aclnn=ACLNN_ERR_PARAM_INVALID,
            )
            return
    weights, since = MIXES.get(node.spec.name, ("", ""))
    info = node.info(weights) if weights else None
    if info is None or (_dtype(node), info.dtype) != ("bfloat16", "float32"):
        return
    found = f"'{weights}' is float32 beside bfloat16"
    if since:
        yield RECENT_MIX(node.place, found=f"{found}, documented since {since}")
    elif node.spec.name == "MoeFinalizeRoutingV2Grad" and target != "ascend950":
        yield NO_MIX(node.place, found=found, expected="bfloat16", aclnn=ACLNN_ERR_PARAM_INVALID)


def _sizes_to_write_out(node: MoeNode, target: str) -> Iterator[Finding]:
    legal, op = node.legal, node.spec.name
    if legal is None:
        return
    wanted: list[tuple[str, str, int]] = []
    if op == "MoeTokenPermuteWithRoutingMap" and not legal["num_out_tokens"]:
        wanted.append(("num_out_tokens", "T*K", ACLNN_ERR_PARAM_INVALID))
    elif op == "MoeTokenPermuteWithRoutingMapGrad":
        sizes = (("tokens_num", "T"), ("num_experts", "E"))
        wanted += [(name, size, ACLNN_ERR_PARAM_INVALID) for name, size in sizes if not legal[name]]
    elif op == "MoeTokenUnpermuteWithRoutingMap" and not legal["restore_shape"]:
        if node.info("probs") is None:
            wanted.append(("restore_shape", "[T, H]", ACLNN_ERR_PARAM_NULLPTR))
    elif op == "MoeFinalizeRoutingV2Grad" and legal["drop_pad_mode"] == 1:
        sizes = (("expert_num", "E"), ("expert_capacity", "C"))
        wanted += [(name, size, ACLNN_ERR_INNER_TILING_ERROR) for name, size in sizes if not legal[name]]
    for name, size, status in wanted:
        said = "absent" if name == "restore_shape" else "0"
        yield WRITTEN_OUT(node.place, found=f"'{name}' is {said}", expected=f"{name} = {size}", aclnn=status)


def _empty(node: MoeNode, target: str) -> Iterator[Finding]:
    if node.spec.name not in _NOT_EMPTY or node.legal is None:
        return
    for argument in _NOT_EMPTY[node.spec.name](node):
        shape = node.shape(argument)
        if shape is not None and 0 in shape:
            yield EMPTY(
                node.place,
                found=f"'{argument}' has shape {list(shape)}",
                expected="no size of 0",
                aclnn=ACLNN_ERR_INNER_TILING_ERROR,
            )
            return


def _dispatch_grad(node: MoeNode) -> tuple[str, ...]:
    # In drop/pad there may be no rows at all: every index is -1 then.
    padded = node.legal is not None and node.legal["drop_pad_mode"] == 1
    return ("expanded_row_idx",) if padded else ("expanded_row_idx", "grad_expanded_x")


_NOT_EMPTY: dict[str, Callable[[MoeNode], tuple[str, ...]]] = {
    "MoeInitRoutingV2Grad": _dispatch_grad,
    "MoeTokenPermuteWithRoutingMapGrad": lambda node: ("permuted_token_output_grad",),
    "MoeTokenUnpermuteWithRoutingMapGrad": lambda node: (
        ("unpermuted_tokens_grad",)
        if node.info("probs") is not None and not node.attributes.get("drop_and_pad")
        else ()
    ),
    "MoeFinalizeRoutingV2": lambda node: ("expanded_x", "expanded_row_idx"),
    "MoeFinalizeRoutingV2Grad": lambda node: ("grad_y", "expanded_row_idx"),
}


def _at_the_limit(node: MoeNode, target: str) -> Iterator[Finding]:
    """512 experts a token, without drop/pad, where the documents do not agree on it."""
    rows: int | None = None
    if node.legal is None or node.legal.get("drop_and_pad"):
        return
    if node.spec.name == "MoeTokenPermuteWithRoutingMap":
        rows = node.legal["num_out_tokens"]
    elif node.spec.name == "MoeTokenUnpermuteWithRoutingMap":
        rows = node.dim("sorted_indices", 0)
    tokens = node.dim("routing_map", 0) if rows else None
    if rows and tokens and rows == MAX_TOP_K * tokens:
        yield AT_THE_LIMIT(node.place, found=f"{rows} rows for {tokens} tokens", expected="fewer than 512")
