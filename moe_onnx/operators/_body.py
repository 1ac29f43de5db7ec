"""Pieces of ONNX text that the function bodies of the operators are put together from.

Conventions of all bodies: every size is a vector of one element (so that ``Concat`` makes shapes of
them); ``passed`` is a vector holding 0 that has gone through all checks so far; names are unique in
the whole body, subgraphs included. Standard ops have no assertion, so a check looks up element 0 of
``passed``, or a later one, which does not exist and fails the run, where the rule is broken. The name
of the node, which the runtime prints, says the rule.

At laptop sizes a node costs more than its arithmetic. So what is known when a model is loaded (dtypes,
ranks, attributes, known sizes) is checked apart from what is not: runtimes fold it to nothing. Sizes
are compared all at once, and -1 stands for "none" in lookups: it is the last element.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# What a dtype makes of these numbers tells which it is. The double survives as far as its precision goes:
# no integer, and no float of 8 bits, keeps what bfloat16 keeps.
_BFLOAT16 = 1.5 + 2**-6
_FLOAT32 = _BFLOAT16 + 2**-9 + 2**-20
_FLOAT64 = _FLOAT32 + 2**-40
# Its low 32 bits are a negative int32, the low 16 and 8 bits others: only int32 makes that of it.
_INTEGER = 0x1_8010_0005
_INT32 = 0x8010_0005 - 2**32

_CONSTANTS = {
    "minus_one": "value_ints = [-1]",
    "zero": "value_ints = [0]",
    "one": "value_ints = [1]",
    "two": "value_ints = [2]",
    "three": "value_ints = [3]",
    "bfloat16_code": f"value = double[1] {{{_BFLOAT16!r}}}",
    "float32_code": f"value = double[1] {{{_FLOAT32!r}}}",
    "float64_code": f"value = double[1] {{{_FLOAT64!r}}}",
    "integer_probe": f"value_ints = [{_INTEGER}]",
    "int32_code": f"value_ints = [{_INT32}]",
    "map_probe": "value_ints = [500]",
    "map_shift": "value_ints = [12]",
}


def body(signature: str, *parts: str) -> str:
    """A whole body in ONNX text: ``Name <attributes> (inputs) => (outputs)`` and its parts."""
    text = "\n".join(parts)
    constants = "".join(
        f"\n    {name} = Constant <{value}> ()"
        for name, value in _CONSTANTS.items()
        if re.search(rf"\b{name}\b", text)
    )
    return f"{signature}\n{{{constants}\n{text}}}\n"


def attribute(name: str, out: str = "") -> str:
    """The integer attribute ``name`` as a size, called ``out`` where that is not its name."""
    out = out or name
    return f"""
    {out}_attr = Constant <value_int: int = @{name}> ()
    {out} = Reshape ({out}_attr, one)"""


def check(rule: str, bad: str, *, before: str, after: str) -> str:
    """Fail if any element of the booleans ``bad`` is true; ``after`` has the shape of ``bad``.

    ``before`` must be a vector of one element, or element 1 would exist.
    """
    return f"""
    {after}_flag = Cast <to = 7> ({bad})""" + lookup(rule, f"{after}_flag", before, after)


def lookup(rule: str, flags: str, before: str, after: str) -> str:
    """Fail if any of the integers ``flags`` is not 0; they must not be negative."""
    return f"""
    {after} = Gather <axis = 0> ({before}, {flags})  # check: {rule}"""


def checks(prefix: str, before: str, *rules: tuple[str, ...]) -> str:
    """A chain of checks; the last one gives ``{prefix}``.

    A rule is ``(rule, bad)``, broken where a boolean of one element is true, or ``(rule, a, b)``, broken
    where two integers of one element differ. Those of a kind are looked at all at once: a chain costs a node
    a rule then. A difference may be negative, but for -1, which a lookup would take for the last element.
    """
    bads = [rule for rule in rules if len(rule) == 2]
    equal = [rule for rule in rules if len(rule) == 3]
    text = ""
    flags: dict[tuple[str, ...], str] = {}
    if len(bads) > 3:
        flags |= {rule: f"{prefix}_bad_{number}" for number, rule in enumerate(bads, 1)}
        text += f"""
    {prefix}_bad = Concat <axis = 0> ({", ".join(bad for _, bad in bads)})
    {prefix}_bad_long = Cast <to = 7> ({prefix}_bad)"""
        text += _split([flags[rule] for rule in bads], f"{prefix}_bad_long")
    if len(equal) > 1:
        flags |= {rule: f"{prefix}_differ_{number}" for number, rule in enumerate(equal, 1)}
        text += _differences(prefix, equal)
        text += _split([flags[rule] for rule in equal], f"{prefix}_differ")
    elif equal:
        flags[equal[0]] = f"{prefix}_differ"
        text += f"""
    {prefix}_differ = BitwiseXor ({equal[0][1]}, {equal[0][2]})"""
    for number, rule in enumerate(rules, 1):
        after = prefix if number == len(rules) else f"{prefix}_{number}"
        if rule in flags:
            text += lookup(rule[0], flags[rule], before, after)
        else:
            text += check(rule[0], rule[1], before=before, after=after)
        before = after
    return text


def _differences(prefix: str, rules: Sequence[tuple[str, ...]]) -> str:
    """``{prefix}_differ`` is 0 where the two integers of a rule are equal: their exclusive or."""
    left, right = (", ".join(rule[i] for rule in rules) for i in (1, 2))
    return f"""
    {prefix}_left = Concat <axis = 0> ({left})
    {prefix}_right = Concat <axis = 0> ({right})
    {prefix}_differ = BitwiseXor ({prefix}_left, {prefix}_right)"""


def _split(outs: Sequence[str], tensor: str) -> str:
    return f"""
    {", ".join(outs)} = Split <axis = 0, num_outputs = {len(outs)}> ({tensor})"""


def sizes_agree(prefix: str, before: str, *rules: tuple[str, str, str, str]) -> str:
    """A chain of checks ``(rule, a, b, applies)``: sizes ``a`` and ``b`` are equal if ``applies`` is 1.

    ``applies`` is 0 or 1, sizes are not negative: their exclusive or is 0 where they are equal and
    positive where they are not. The last check gives ``{prefix}``.
    """
    applies = ", ".join(rule[3] for rule in rules)
    flags = [f"{prefix}_{number}_differs" for number in range(1, len(rules) + 1)]
    text = (
        _differences(prefix, rules)
        + f"""
    {prefix}_applies = Concat <axis = 0> ({applies})
    {prefix}_broken = Mul ({prefix}_differ, {prefix}_applies)"""
    )
    text += _split(flags, f"{prefix}_broken")
    for number, (rule, flag) in enumerate(zip(rules, flags, strict=True), 1):
        after = prefix if number == len(rules) else f"{prefix}_{number}"
        text += lookup(rule[0], flag, before, after)
        before = after
    return text


def is_there(out: str, *sizes: str) -> str:
    """``out`` is the size 1 if any of ``sizes`` is not 0, otherwise the size 0."""
    return f"""
    {out}_sizes = Max ({", ".join(sizes)})
    {out} = Min ({out}_sizes, one)"""


def rank_of(out: str, tensor: str) -> str:
    """``out`` is the rank of ``tensor``, for the rules of ``checks``."""
    return f"""
    {out}_shape = Shape ({tensor})
    {out} = Shape ({out}_shape)"""


def is_not(out: str, a: str, b: str) -> str:
    """``out`` is true where the sizes ``a`` and ``b`` differ."""
    return f"""
    {out}_equal = Equal ({a}, {b})
    {out} = Not ({out}_equal)"""


def is_outside(out: str, value: str, low: str, high: str) -> str:
    """``out`` is true where ``value`` is not in ``[low, high)``."""
    return f"""
    {out}_below = Less ({value}, {low})
    {out}_above = GreaterOrEqual ({value}, {high})
    {out} = Or ({out}_below, {out}_above)"""


def flag_squared(flag: str) -> str:
    """``{flag}_squared`` for ``checks``: 0 and 1 alone are their own squares, also modulo 2^64."""
    return f"""
    {flag}_squared = Mul ({flag}, {flag})"""


def count_up(out: str, n: str) -> str:
    """``out`` is 0, 1, .. n - 1 for the size ``n``."""
    return f"""
    {out}_start = Constant <value_int = 0> ()
    {out}_step = Constant <value_int = 1> ()
    {out}_stop = Squeeze ({n})
    {out} = Range ({out}_start, {out}_stop, {out}_step)"""


def coordinates(first: str, second: str, mask: str) -> str:
    """Where the 2-D ``mask`` is true, row by row: ``first`` its rows, ``second`` its columns."""
    return f"""
    {first}_pairs = NonZero ({mask})
    {first}_2d = Slice ({first}_pairs, zero, one, zero)
    {second}_2d = Slice ({first}_pairs, one, two, zero)
    {first} = Reshape ({first}_2d, minus_one)
    {second} = Reshape ({second}_2d, minus_one)"""


def in_row_order(out: str, none: str, row: str, values: str, n: str = "n") -> str:
    """``out[p]`` is the one of ``values`` whose ``row`` is p, or ``none``, for p = 0 .. n - 1.

    Reads ``rows_and_none``, n + 1: rows of -1 land on the last element, which is cut off.
    """
    return f"""
    {out}_none = Expand ({none}, rows_and_none)
    {out}_and_none = ScatterElements <axis = 0> ({out}_none, {row}, {values})
    {out} = Slice ({out}_and_none, zero, {n}, zero)"""


# Whether rows are so long that row_dots does better by matrices: has_long_rows.
LONG_ROWS = """
    long_row = Constant <value_ints = [512]> ()
    has_long_rows = GreaterOrEqual (hidden, long_row)
"""


def row_dots(out: str, like: str, at: str, left: str, right: str, pairs: str) -> str:
    """``out`` is the dot product of the rows ``at`` of two tensors, 0 for -1, in the dtype of ``like``.

    For ``per_precision``. As a product of matrices the dots make nothing as large as the rows, but one
    product a row has its price: worth it for long rows (``by_matrices``, which reads ``rows_shape``,
    rows x 1 x H). ``pairs`` is text that makes ``$pairs`` for the others, element by element.
    """
    return f"""
    $dots = If (by_matrices) <
        then_branch = $long () => ($long_dots) {{
            $left = Reshape <allowzero = 1> (${left}, rows_shape)
            $right = Reshape <allowzero = 1> (${right}, rows_shape)
            $turned = Transpose <perm = [0, 2, 1]> ($right)
            $dots_3d = MatMul ($left, $turned)
            $long_dots = Reshape ($dots_3d, minus_one)
        }},
        else_branch = $short () => ($short_dots) {{
{pairs}
            $short_dots = ReduceSum <keepdims = 0> ($pairs, one)
        }}
    >
    $zero_f32 = ConstantOfShape (one)
    $zero_dot = Cast <to = $DTYPE> ($zero_f32)
    $dots_zero = Concat <axis = 0> ($dots, $zero_dot)
    $cells = Gather <axis = 0> ($dots_zero, {at})
    ${out} = CastLike ($cells, {like})
"""


def with_zero_row(out: str, rows: str, like: str) -> str:
    """``out`` is ``rows`` with a row of zeros behind the last; reads ``hidden``, dtype of ``like``."""
    return f"""
    {out}_shape = Concat <axis = 0> (one, hidden)
    {out}_zero_f32 = ConstantOfShape ({out}_shape)
    {out}_zero = CastLike ({out}_zero_f32, {like})
    {out} = Concat <axis = 0> ({rows}, {out}_zero)"""


def rows_or_zeros(out: str, rows: str, index: str, some_none: str) -> str:
    """``out`` is the ``rows`` that ``index`` names; -1, and one past the last, name a row of zeros.

    That row costs a copy of all rows, so it is made only where ``some_none`` says that it is looked up.
    """
    return (
        f"""
    {out} = If ({some_none}) <
        then_branch = {out}_with_zero_row () => ({out}_some) {{
    """
        + with_zero_row(f"{out}_and_zero", rows, rows)
        + f"""
            {out}_some = Gather <axis = 0> ({out}_and_zero, {index})
        }},
        else_branch = {out}_as_they_are () => ({out}_all) {{
            {out}_all = Gather <axis = 0> ({rows}, {index})
        }}
    >"""
    )


def run_time_zero(tensor: str) -> str:
    """ONNX text for late_zero, which is known at run time only: from an element of ``tensor``, of floats.

    Branches hang on it: of a branch that a runtime inlines it forgets the names of the nodes, which are the
    rules. Shapes do where a branch may be dead: known sizes are compared in it all the same when a runtime
    loads it. Indices and maps may be constants, so it is not from them.
    """
    return f"""
    late_elements = Reshape ({tensor}, minus_one)
    late_element = Slice (late_elements, zero, one, zero)
    late_integer = Cast <to = 7> (late_element)
    late_sum = ReduceSum <keepdims = 1> (late_integer)
    late_zero = Mul (late_sum, zero)
"""


def precision(out: str, tensor: str) -> str:
    """A number that stands for the dtype of ``tensor``, growing with its precision.

    bfloat16_code, float32_code and float64_code are those of these; what holds no floats of 16 bits or more
    is below bfloat16_code. Runtimes fold this to a constant when they load the model, and keep one branch of
    an ``If`` on it.
    """
    return _image(out, "float64_code", tensor, 11)


# For per_precision. In the body itself: of a Cast that changes nothing and whose output a branch reads,
# onnxruntime 1.32 removes the output too.
IN_FLOAT64 = """
    in_float64 = Equal (precision, float64_code)"""


def is_not_float(out: str, precision_of_tensor: str) -> str:
    """``out`` is true where a tensor, given by its ``precision``, holds no floats."""
    return f"""
    {out} = Less ({precision_of_tensor}, bfloat16_code)"""


def integer_code(out: str, tensor: str) -> str:
    """A number that stands for the dtype of ``tensor``, int32_code for int32: for the rules of ``checks``."""
    return _image(out, "integer_probe", tensor, 7)


def is_not_map(out: str, tensor: str) -> str:
    """``out`` is 0 where ``tensor`` is int8 (500 wraps to -12) or bool (all is 1), otherwise positive."""
    image = _image(f"{out}_image", "map_probe", tensor, 7)
    return f"""{image}
    {out}_int8 = Add ({out}_image, map_shift)
    {out}_bool = Sub ({out}_image, one)
    {out} = Mul ({out}_int8, {out}_bool)"""


def _image(out: str, probe: str, tensor: str, back: int) -> str:
    return f"""
    {out}_cast = CastLike ({probe}, {tensor})
    {out} = Cast <to = {back}> ({out}_cast)"""


def per_precision(outputs: tuple[str, ...], text: str) -> str:
    """``text`` once in float64 and once in float32, chosen by ``IN_FLOAT64``.

    In ``text``, ``$DTYPE`` is the dtype to widen to and ``$`` before a name makes it the branch's own.
    A cast that changes nothing costs a copy where it makes an output; runtimes drop it before an Identity.
    """
    branches = []
    results = "".join(f"\n    ${out}_result = Identity (${out})" for out in outputs)
    for branch, mark, to in (("then_branch", "d_", 11), ("else_branch", "f_", 1)):
        inner = (text + results).replace("$DTYPE", str(to)).replace("$", mark)
        outs = ", ".join(f"{mark}{out}_result" for out in outputs)
        branches.append(f"{branch} = {mark}sum () => ({outs}) {{ {inner} }}")
    return f"""
    {", ".join(outputs)} = If (in_float64) <{", ".join(branches)}>"""
