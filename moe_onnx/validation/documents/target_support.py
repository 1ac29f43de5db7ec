"""What the target has: every operator of the package, and for which dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moe_onnx.errors import ACLNN_ERR_PARAM_INVALID
from moe_onnx.spec import is_absent
from moe_onnx.validation.collapse import collapsed
from moe_onnx.validation.documents.moe_nodes import MoeNode, moe_nodes
from moe_onnx.validation.documents.targets import DEVICES, MIXES, SINCE
from moe_onnx.validation.findings import Finding, Outcome, Skipped, Table
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

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


@check("static", NO_OPERATOR, RECENT, NO_DTYPE, NO_MIX, RECENT_MIX)
def target_support(subject: Subject) -> Iterator[Outcome]:
    """The target has every operator of the package, for these dtypes."""
    name = subject.options.target
    if name not in DEVICES:
        yield Skipped("no target was given")
        return
    nodes = moe_nodes(subject)
    yield from collapsed(
        finding for node in nodes for rule in (_operator, _dtypes) for finding in rule(node, name)
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
