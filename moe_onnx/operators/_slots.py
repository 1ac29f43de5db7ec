"""What the finalize-routing operators share: the slots of ``[T, K]``, their scales, experts and biases."""

from __future__ import annotations

from moe_onnx.operators._arrays import Array, check_range
from moe_onnx.operators._body import check, is_outside, is_there, precision, with_zero_row
from moe_onnx.operators._routing_map import BAD_PROBS_DTYPE, check_probs_dtype
from moe_onnx.spec import INDICES, Arg, Axes, TensorInfo, presence, require_same_dtype

SCALES = Arg(
    "scales",
    "T K",
    "weight of each slot; shape (0, 0) is absent, K is 1 then",
    type_var="TP",
    optional=True,
    differentiable=True,
)
EXPERT_IDX = Arg(
    "expert_idx",
    "T K",
    "expert of each slot, whose bias it has; needed with bias",
    INDICES,
    "I",
    optional=True,
)
BIAS = Arg("bias", "E H", "added to the rows of each expert", optional=True, differentiable=True)


def there(info: TensorInfo | None) -> TensorInfo | None:
    """What is known of an optional input, None where it is absent."""
    return None if presence(info) is False else info


def check_dtypes(
    op: str, name: str, rows: TensorInfo, scales: TensorInfo | None, **others: TensorInfo | None
) -> None:
    """All floats have the dtype of the rows, but for ``scales``, float32 beside bfloat16."""
    for other, info in others.items():
        if (given := there(info)) is not None:
            require_same_dtype(op, name, rows.dtype, other, given.dtype)
    if (given := there(scales)) is not None:
        check_probs_dtype(op, name, rows, given, "scales")


def bind_slots(axes: Axes, scales: TensorInfo | None) -> None:
    """``N = T * K``, and ``K = 1`` without scales."""
    if presence(scales) is False:
        axes.bind("K", 1, "a call without 'scales'")
    top_k = axes["K"]
    if isinstance(top_k, int):
        tokens = axes.divide("N", top_k, "top_k")
        if top_k:  # without slots there may be any number of tokens
            axes.bind("T", tokens, "N / K")
    elif axes["T"] != 0:
        axes.bind("K", axes.divide("N", axes["T"], "the number of tokens"), "N / T")


def check_experts(op: str, expert_idx: Array, experts: int, live: Array) -> None:
    """The expert of each live slot has a bias; what stands at the others is not read."""
    check_range(op, "expert_idx", expert_idx, 0, experts, "an expert of 'bias'", live)


def sizes_of_slots() -> str:
    """ONNX text: num_tokens, k, has_scales, has_expert, has_bias, and what is wrong with the dtypes.

    Reads scales, expert_idx, bias, their number ``n`` and the ``precision`` of the rows.
    """
    return (
        precision("bias_precision", "bias")
        + precision("probs_precision", "scales")
        + BAD_PROBS_DTYPE
        + """
    scales_tokens = Shape <end = 1> (scales)
    scales_k = Shape <start = 1, end = 2> (scales)
    expert_tokens = Shape <end = 1> (expert_idx)
    expert_k = Shape <start = 1, end = 2> (expert_idx)
    num_experts = Shape <end = 1> (bias)
    bias_hidden = Shape <start = 1, end = 2> (bias)
    """
        + is_there("has_scales", "scales_tokens", "scales_k")
        + is_there("has_expert", "expert_tokens", "expert_k")
        + is_there("has_bias", "num_experts", "bias_hidden")
        + """
    is_scaled = Cast <to = 9> (has_scales)
    num_tokens = Where (is_scaled, scales_tokens, n)
    k = Where (is_scaled, scales_k, one)
    num_slots = Mul (num_tokens, k)
    bias_same = Equal (precision, bias_precision)
    bias_other = Not (bias_same)
    bias_dtype = Cast <to = 7> (bias_other)
    scales_dtype = Cast <to = 7> (bad_probs_dtype)
    """
    )


def slot_rules(rows: str) -> tuple[tuple[str, str, str, str], ...]:
    """Rules for ``sizes_agree`` on what ``sizes_of_slots`` made."""
    return (
        ("expert_idx is missing although bias is given", "has_expert", "one", "has_bias"),
        (f"bias must have the dtype of {rows}", "bias_dtype", "zero", "has_bias"),
        (
            f"scales must have the dtype of {rows}, or float32 beside bfloat16",
            "scales_dtype",
            "zero",
            "has_scales",
        ),
        ("expanded_row_idx must have T * K elements", "num_slots", "n", "one"),
        ("expert_idx must be [T, K]", "expert_tokens", "num_tokens", "has_expert"),
        ("expert_idx must have the K of scales, 1 without", "expert_k", "k", "has_expert"),
        (f"bias must have the hidden size of {rows}", "bias_hidden", "hidden", "has_bias"),
    )


def late_sizes(count: str) -> str:
    """ONNX text: sizes that are known at run time only, from ``count``, a vector of one integer.

    Branches hang on them: of a branch that a runtime inlines it forgets the names of the nodes, which
    are the rules. Shapes do where a branch may be dead: known sizes are compared in it all the same.
    """
    return f"""
    late_zero = Mul ({count}, zero)
    has_scales_late = Add (has_scales, late_zero)
    has_scales_now = Cast <to = 9> (has_scales_late)
    has_bias_late = Add (has_bias, late_zero)
    has_bias_now = Cast <to = 9> (has_bias_late)
    tokens_late = Add (num_tokens, late_zero)
    k_late = Add (k, late_zero)
    slots_shape = Concat <axis = 0> (tokens_late, k_late)
    """


def biases(out: str, shape: str, live: str, pick: str) -> str:
    """ONNX text: ``out`` is the bias of each slot, zeros for the others, or ``[1, 1]`` without bias.

    ``live`` says which slots, in the shape ``shape``, are read; ``pick`` makes ``bias_at`` of
    ``slot_expert``, which is -1 where a slot is not.
    """
    return (
        f"""
    {out} = If (has_bias_now) <
        then_branch = biased () => (some_bias) {{
            expert_given = Cast <to = 7> (expert_idx)
            expert_free = Reshape <allowzero = 1> (expert_given, {shape})
    """
        + is_outside("expert_outside", "expert_free", "zero", "num_experts")
        + f"""
            bad_expert = And ({live}, expert_outside)
    """
        + check("expert_idx must be in range", "bad_expert", before="zero", after="passed_expert")
        + f"""
            expert_checked = Add (expert_free, passed_expert)
            slot_expert = Where ({live}, expert_checked, minus_one)
            {pick}
            experts_late = Add (num_experts, late_zero)
            bias_shape = Concat <axis = 0> (experts_late, hidden)
            bias_given = Reshape <allowzero = 1> (bias, bias_shape)
    """
        + with_zero_row("bias_and_zero", "bias_given", "bias")
        + """
            some_bias = Gather <axis = 0> (bias_and_zero, bias_at)
        },
        else_branch = unbiased () => (no_bias) {
            no_bias_shape = Concat <axis = 0> (one, one)
            no_bias_f32 = ConstantOfShape (no_bias_shape)
            no_bias = CastLike (no_bias_f32, bias)
        }
    >
    """
    )
