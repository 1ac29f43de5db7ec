"""What the two grouped products share: rows in groups, one group an expert, and their transposition."""

from __future__ import annotations

from moe_onnx.errors import IndexValueError, ShapeError
from moe_onnx.operators._arrays import Array, check_range
from moe_onnx.operators._body import attribute, check, checks, flag_squared, is_outside, rank_of
from moe_onnx.spec import INDICES, Arg, Attr, Axes

TRANSPOSE_WEIGHT = Attr(
    "transpose_weight",
    "bool",
    "1 where the last two axes of the weight are F H, 0 where they are H F",
    "0 or 1",
    lambda v: v in (0, 1),
    0,
)
GROUP_SIZES = Arg("group_sizes", "E", "rows of each expert, in order, >= 0; their sum is N", INDICES, "I")


def check_no_rows_without_groups(op: str, axes: Axes) -> None:
    """Refuse rows where there is no expert that they could be of."""
    rows = axes["N"]
    if axes["E"] == 0 and isinstance(rows, int) and rows:
        raise ShapeError(
            f"{op}: without groups (axis E, experts, is 0 in 'group_sizes') axis N must be 0, got {rows}. "
            "Give the rows a group, or no rows.",
            op=op,
        )


def group_starts(op: str, group_sizes: Array, rows: int) -> list[tuple[int, int]]:
    """First row of each group and first row behind it; refuse sizes that are not a split of the rows."""
    check_range(op, "group_sizes", group_sizes, 0, rows + 1, "rows of one expert")
    bounds, start = [], 0
    for at, size in enumerate(group_sizes.tolist()):
        left = rows - start
        # The first group that takes more rows than are left, or the last one if it leaves some.
        if size > left or (at == len(group_sizes) - 1 and size < left):
            legal = f"in [0, {left + 1})" if size > left else f"{left}"
            total = int(group_sizes.sum(dtype="int64"))
            raise IndexValueError(
                f"{op}: 'group_sizes' must sum to the number of rows N = {rows}, their sum is {total}: with "
                f"the groups before it the value must be {legal}, got {size} at position [{at}]. "
                "Check how the rows were counted.",
                op=op,
                input_name="group_sizes",
                position=(at,),
                value=size,
            )
        bounds.append((start, start + size))
        start += size
    return bounds


# Pieces of the bodies. ``GROUPS`` reads ``passed``, the end of the caller's checks.

ARGUMENTS = (
    attribute("transpose_weight")
    + flag_squared("transpose_weight")
    + """
    n = Shape <end = 1> (x)
    hidden = Shape <start = 1, end = 2> (x)
    num_experts = Shape <end = 1> (group_sizes)
    """
    + rank_of("x_rank", "x")
    + rank_of("sizes_rank", "group_sizes")
)
BAD_TRANSPOSE = ("transpose_weight must be 0 or 1", "transpose_weight_squared", "transpose_weight")
BAD_SIZES_DTYPE = ("group_sizes must be int32", "sizes_dtype", "int32_code")
BAD_SIZES_RANK = ("group_sizes must be 1-D", "sizes_rank", "one")

# The values are looked at only after the shapes, and rows only after the values.
GROUPS = (
    """
    # A sum of many groups is checked after each group was: it cannot overflow then.
    sizes_given = Cast <to = 7> (group_sizes)
    rows_and_one = Add (n, one)
    """
    + is_outside("bad_size", "sizes_given", "zero", "rows_and_one")
    + check("group_sizes must be in range", "bad_size", before="passed", after="passed_size")
    + """
    sizes_in_range = Add (sizes_given, passed_size)
    num_grouped = ReduceSum <keepdims = 1> (sizes_in_range, zero)
    """
    + checks("passed_sum", "passed", ("group_sizes must sum to the number of rows", "num_grouped", "n"))
    + """
    sizes = Add (sizes_in_range, passed_sum)
    groups_axis = Constant <value_int = 0> ()
    ends = CumSum (sizes, groups_axis)
    starts = Sub (ends, sizes)
    """
)
