"""Models with hazards: scatters, gathers, kernels, sums. Families ``hazards`` and ``kernels``."""

from __future__ import annotations

import onnx
from broken_models import Mutation, copy_of, parse


def edited(
    code: str, name: str, text: str, old: str, new: str, imports: str = "", **more: object
) -> Mutation:
    """The model of ``text``, broken by replacing ``old``, which stands there, by ``new``."""
    assert old in text, (name, old)

    def base() -> onnx.ModelProto:
        return parse(text, imports=imports)

    def break_it(_: object) -> onnx.ModelProto:
        return parse(text.replace(old, new), imports=imports)

    return Mutation(code, name, base, break_it, **more)  # type: ignore[arg-type]


MOE = ', "ascend.moe" : 1'
ADD_ROWS = """
    combine (float[t, 4] y, int64[n] rows, float[n, 4] updates) => (float[t, 4] sums)
    <int64 zero = {0}, int64 one = {1}, int64[1] last = {1}>
    {
        shape = Shape (updates)
        count = Gather (shape, zero)
        range = Range (zero, count, one)
        index = Unsqueeze (range, last)
        [add] sums = ScatterND <reduction = "add"> (y, index, updates)
    }
"""
GRID = """
    grid (float[t, e] y, float[t, k] scores, int64[1] k, float[t, k] updates, int64[t, k] others)
     => (float[t, e] sums)
    <int64 zero = {0}, int64 one = {1}, int64[1] axis = {1}, int64[1] last = {2}>
    {
        best, chosen = TopK (scores, k)
        shape = Shape (chosen)
        count = Gather (shape, zero)
        range = Range (zero, count, one)
        column = Unsqueeze (range, axis)
        token = Expand (column, shape)
        tokens = Unsqueeze (token, last)
        experts = Unsqueeze (chosen, last)
        index = Concat <axis = -1> (tokens, experts)
        [add] sums = ScatterND <reduction = "add"> (y, index, updates)
    }
"""
FOUND = """
    found (float[t, e] y, bool[t, e] map, float[n] updates) => (float[t, e] sums)
    {
        places = NonZero (map)
        index = Transpose <perm = [1, 0]> (places)
        [add] sums = ScatterND <reduction = "add"> (y, index, updates)
    }
"""
FIXED_ROWS = """
    fixed (float[8, 2] y, float[3, 2] updates) => (float[8, 2] sums)
    <int64[3, 1] rows = {0, 5, 2}>
    { [add] sums = ScatterND <reduction = "add"> (y, rows, updates) }
"""
FIXED_ELEMENTS = """
    fixed (float[8, 2] y, float[2, 2] updates) => (float[8, 2] z)
    <int64[2, 2] places = {0, 0, 5, 2}>
    { [put] z = ScatterElements <axis = 0> (y, places, updates) }
"""
INDEX_ADD = """
    index_add (float[t, 4] y, float[n, 4] updates, int64[n] rows) => (float[t, 4] sums)
    <int64[1] axis = {1}>
    {
        shape = Shape (y)
        zeros = ConstantOfShape (shape)
        column = Unsqueeze (rows, axis)
        wide = Shape (updates)
        index = Expand (column, wide)
        [put] all = ScatterElements <axis = 0, reduction = "add"> (zeros, index, updates)
        sums = Add (y, all)
    }
"""
INDEX_PUT = """
    index_put (float[t, e] y, float[n] updates, int64[n, 2] cells) => (float[t, e] sums)
    <float[4, 2] zeros = {0, 0, 0, 0, 0, 0, 0, 0}>
    {
        shape = Shape (zeros)
        all = ScatterElements <axis = 0, reduction = "add"> (zeros, cells, zeros)
        sums = Add (y, all)
    }
"""
TAKE = """
    take (float[t, 4] x, int32[n, 1] rows) => (float[n, 4] y)
    {
        wide = Cast <to = 7> (rows)
        [take] y = GatherND (x, wide)
    }
"""
PUT = """
    put (float[t, 4] x, int64[n, 1] rows, float[n, 4] updates) => (float[t, 4] y)
    { [put] y = ScatterND (x, rows, updates) }
"""
TABLE = """
    table (float[5, 4] x, float[3, 4] u)
     => (float[3, 4] y, float[3, 4] z, float[3] v, float[5, 4] w, float[5, 4] s)
    <int64[3] rows = {0, -5, 4}, int64[3, 4] cells = {0, 1, 2, 3, 1, 2, 3, 0, 4, 4, 4, 4},
     int64[3, 2] pairs = {0, 3, 4, -4, 2, 2}, int64[3, 1] firsts = {0, 1, 2}>
    {
        [rows] y = Gather <axis = 0> (x, rows)
        [cells] z = GatherElements <axis = 0> (x, cells)
        [pairs] v = GatherND (x, pairs)
        [put] w = ScatterND (x, firsts, u)
        [elements] s = ScatterElements <axis = 0> (x, cells, u)
    }
"""
DROPS = """
    drops (float[t, 4] x, int32[t, 2] experts) => (float[n, 4] y)
    <int32 zero = {0}, int64[2] flat = {-1, 4}, float none = {0}, int64[1] one = {1}>
    {
        [dispatch] rows, row_idx, counts, before = ascend.moe.MoeInitRoutingV2 <active_num = 0,
            expert_capacity = 2, expert_num = 4, drop_pad_mode = 1, expert_tokens_count_or_cumsum_flag = 0,
            expert_tokens_before_capacity_flag = 0> (x, experts)
        all = Reshape (rows, flat)
        safe = Max (row_idx, zero)
        [take] taken = Gather <axis = 0> (all, safe)
        y = Identity (taken)
    }
"""
SELECTED = """
    selected (float[t, 4] x, int32[n] rows, bool[n] real) => (float[n, 4] y)
    <int32 none = {-1}, float nothing = {0}, int64[1] one = {1}>
    {
        marked = Where (real, rows, none)
        [take] taken = Gather <axis = 0> (x, marked)
        column = Unsqueeze (real, one)
        y = Where (column, taken, nothing)
    }
"""
PADDED = """
    padded (float[t, 4] x, float[6, 4] u) => (float[6, 4] y, float[t, 4] z)
    <int64[6] rows = {2, 0, 1, 3, 4, 5}, int64[6, 1] same = {2, 0, 1, 3, 4, 5}>
    {
        [take] y = Gather <axis = 0> (x, rows)
        z = ScatterND (x, same, u)
    }
"""
NARROW = """
    narrow (bfloat16[n, 4] x) => (bfloat16[n, 4] y)
    {
        a = Cast <to = 1> (x)
        [double] b = Add (a, a)
        c = Softmax (b)
        y = Cast <to = 16> (c)
    }
"""
UPDATE = """
    update (float r, int64 t, float[4] x, float[4] g, float[4] v) => (float[4] a, float[4] b)
    { a = Add (x, g)
      b = Mul (x, v) }
"""
SUMS = """
    sums (float16[t, 4] y, int64[n, 4] index, float16[n, 4] updates) => (float16[t, 4] z)
    {
        a = Cast <to = 1> (y)
        b = Cast <to = 1> (updates)
        c = ScatterElements <axis = 0, reduction = "add"> (a, index, b)
        z = Cast <to = 10> (c)
    }
"""
ZEROS = """
    zeros (float[4096, 4096] weight, float[n, 4096] x) => (float[n, 4096] y, float[a, b] z)
    {
        shape = Shape (x)
        [fill] z = ConstantOfShape (shape)
        y = Relu (x)
    }
"""
LOSS = """
    loss (float[n, 4] logits, int64[n] labels) => (float value)
    {
        probs = Softmax (logits)
        [loss] value = SoftmaxCrossEntropyLoss <reduction = "mean"> (logits, labels)
    }
"""
BALANCE = """
    balance (float[n, 4] logits) => (float[n, 4] probs)
    {
        wide = Identity (logits)
        [second] probs = Softmax <axis = -1> (wide)
    }
"""


HALVES = """
    halves (float[4, 4] x) => (float[2, 4] a, float[2, 4] b)
    { [split] a, b = Split <axis = 0, num_outputs = 2> (x) }
"""


def in_a_function(model: onnx.ModelProto) -> None:
    """Calls a function twice from outside on bfloat16, through another one."""
    local = onnx.parser.parse_function("""
        <domain: "local", opset_import: ["" : 21]>
        inner (x) => (y) { [sum] y = Add (x, x) }
    """)
    outer = onnx.parser.parse_function("""
        <domain: "local", opset_import: ["" : 21, "local" : 1]>
        Layer (x) => (y) { [call] y = local.inner (x) }
    """)
    model.functions.extend([local, outer])
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    del model.graph.node[:]
    model.graph.node.extend(
        [
            onnx.helper.make_node("Layer", ["x"], ["middle"], name="first", domain="local"),
            onnx.helper.make_node("Layer", ["middle"], ["y"], name="second", domain="local"),
        ]
    )


def in_a_branch(model: onnx.ModelProto) -> None:
    """Puts the whole graph of ``FOUND`` into a branch, where its index is an outer input."""
    whole = copy_of(model)
    branch = whole.graph
    for node in branch.node:
        if node.op_type == "Transpose":
            node.op_type = "Identity"
            del node.attribute[:]
            node.input[0] = "given"
    del branch.input[:]
    del branch.node[0]
    given = onnx.helper.make_tensor_value_info("given", onnx.TensorProto.INT64, ["n", 2])
    switch = onnx.helper.make_tensor_value_info("switch", onnx.TensorProto.BOOL, [])
    model.graph.input.extend([given, switch])
    del model.graph.node[:]
    branch.output[0].name = "inner"
    branch.node[-1].output[0] = "inner"
    model.graph.node.append(
        onnx.helper.make_node("If", ["switch"], ["sums"], name="if", then_branch=branch, else_branch=branch)
    )


LOCAL = ', "local" : 1'
PRODUCT = """
    einsum (float[2, 3] x, float[3, 4] y) => (float[2, 4] z) {
        [product] z = Einsum <equation = "ij, jk -> ik"> (x, y)
    }
"""
EINSUM_CALL = """
    einsum (float[2, 3] x) => (float[2] z) { [call] z = local.Sum <eq = "ij->i"> (x) }
    <opset_import: ["" : 21], domain: "local">
    Sum <eq> (a) => (b) { [sum] b = Einsum <equation: string = @eq> (a) }
"""


MUTATIONS = [
    edited("MO410", "a dot", PRODUCT, "ij, jk", "i.j, jk"),
    edited("MO410", "an arrow of Unicode", PRODUCT, "->", "\u2192"),
    edited("MO410", "half an arrow", PRODUCT, "-> ik", "-"),
    edited("MO410", "a digit", PRODUCT, "ij, jk", "i1, 1k"),
    edited("MO410", "by the call of a function", EINSUM_CALL, "ij->i", "i_j", LOCAL),
    edited("MO410", "no session of it", PRODUCT, "ij, jk", "i....j, jk", level="run"),
    edited("MO409", "more outputs", HALVES, "a, b =", "a, b, more =", also=("MO321",)),
    edited("MO409", "fewer outputs", HALVES, "num_outputs = 2", "num_outputs = 3", also=("MO321",)),
    edited("MO409", "huge number", HALVES, "num_outputs = 2", "num_outputs = 1000000000000", also=("MO321",)),
    edited("MO401", "rows are an input", ADD_ROWS, "Unsqueeze (range, last)", "Unsqueeze (rows, last)"),
    edited(
        "MO401",
        "multiplies",
        ADD_ROWS,
        'Unsqueeze (range, last)\n        [add] sums = ScatterND <reduction = "add">',
        'Unsqueeze (rows, last)\n        [add] sums = ScatterND <reduction = "mul">',
    ),
    edited(
        "MO401",
        "range divided",
        ADD_ROWS,
        "range = Range (zero, count, one)",
        "all = Range (zero, count, one)\n        range = Div (all, count)",
    ),
    edited(
        "MO401",
        "experts of any token",
        GRID,
        "Concat <axis = -1> (tokens, experts)",
        "Concat <axis = -1> (experts, experts)",
    ),
    edited(
        "MO401", "columns that are an input", GRID, "Unsqueeze (chosen, last)", "Unsqueeze (others, last)"
    ),
    edited(
        "MO401",
        "half of a NonZero",
        FOUND,
        "index = Transpose <perm = [1, 0]> (places)",
        "cut, rest = Split <axis = 0, num_outputs = 2> (places)\n"
        "        index = Transpose <perm = [1, 0]> (cut)",
    ),
    Mutation("MO401", "in a branch", lambda: parse(FOUND), in_a_branch),
    edited("MO402", "constant row twice", FIXED_ROWS, "{0, 5, 2}", "{5, 0, 5}"),
    edited(
        "MO403",
        "constant row twice",
        FIXED_ROWS.replace('<reduction = "add"> ', ""),
        "{0, 5, 2}",
        "{5, 0, 5}",
    ),
    edited("MO403", "constant element twice", FIXED_ELEMENTS, "{0, 0, 5, 2}", "{0, 1, 5, 1}"),
    edited("MO404", "no reduction", INDEX_ADD, ', reduction = "add"', ""),
    edited(
        "MO404",
        "by ScatterND into constant zeros",
        INDEX_PUT,
        'ScatterElements <axis = 0, reduction = "add"> (zeros, cells, zeros)',
        "ScatterND (zeros, cells, updates)",
    ),
    edited("MO405", "int32 into GatherND", TAKE, "GatherND (x, wide)", "GatherND (x, rows)", also=("MO321",)),
    edited("MO405", "int32 into ScatterND", PUT, "int64[n, 1] rows", "int32[n, 1] rows", also=("MO321",)),
    edited("MO405", "uint8 into ScatterND", PUT, "int64[n, 1] rows", "uint8[n, 1] rows", also=("MO321",)),
    edited("MO406", "row behind the last", TABLE, "{0, -5, 4}", "{0, 5, 4}"),
    edited("MO406", "row before the first", TABLE, "{0, -5, 4}", "{0, -6, 4}"),
    edited(
        "MO406", "cell", TABLE, "{0, 1, 2, 3, 1, 2, 3, 0, 4, 4, 4, 4}", "{0, 1, 2, 3, 1, 2, 3, 0, 4, 4, 4, 5}"
    ),
    edited("MO406", "pair", TABLE, "{0, 3, 4, -4, 2, 2}", "{0, 3, 4, -5, 2, 2}"),
    edited("MO406", "written row", TABLE, "firsts = {0, 1, 2}", "firsts = {0, 1, 7}"),
    edited("MO407", "dropped slots read the last row", DROPS, "(all, safe)", "(all, row_idx)", MOE),
    edited(
        "MO407",
        "dropped slots through views",
        DROPS,
        "safe = Max (row_idx, zero)",
        "long = Cast <to = 7> (row_idx)\n"
        "        column = Unsqueeze (long, one)\n"
        "        safe = Squeeze (column)",
        MOE,
    ),
    edited(
        "MO407",
        "masked by a product",
        SELECTED,
        "y = Where (column, taken, nothing)",
        "number = Cast <to = 1> (column)\n        y = Mul (number, taken)",
    ),
    edited("MO407", "constant pads", PADDED, "rows = {2, 0, 1, 3, 4, 5}", "rows = {2, -1, 0, 1, -1, -1}"),
    edited(
        "MO407", "constant pads written", PADDED, "same = {2, 0, 1, 3, 4, 5}", "same = {2, -1, 0, 1, -1, -1}"
    ),
    edited("MO408", "absolute value of marks", DROPS, "Max (row_idx, zero)", "Abs (row_idx)", MOE),
    edited(
        "MO421", "Add", NARROW, "[double] b = Add (a, a)", "d = Add (x, x)\n        b = Cast <to = 1> (d)"
    ),
    edited(
        "MO421",
        "Softmax which is a function",
        NARROW,
        "c = Softmax (b)",
        "d = Cast <to = 16> (b)\n        c = Softmax (d)",
    ),
    Mutation("MO421", "inside functions", lambda: parse(NARROW), in_a_function),
    edited(
        "MO422",
        "Adagrad",
        UPDATE,
        "a = Add (x, g)\n      b = Mul (x, v)",
        "a, b = ai.onnx.preview.training.Adagrad (r, t, x, g, v)",
        ', "ai.onnx.preview.training" : 1',
        also=("MO301", "MO302"),
    ),
    edited(
        "MO422",
        "ReluGrad",
        UPDATE,
        "a = Add (x, g)",
        "a = com.microsoft.ReluGrad (g, x)",
        ', "com.microsoft" : 1',
        also=("MO301", "MO302"),
    ),
    edited(
        "MO422",
        "AdamWOptimizer",
        UPDATE,
        "a = Add (x, g)",
        "a = com.microsoft.AdamWOptimizer (r, t, x, g)",
        ', "com.microsoft" : 1',
        also=("MO301", "MO302"),
    ),
    edited(
        "MO423",
        "float16",
        SUMS,
        "a = Cast <to = 1> (y)\n        b = Cast <to = 1> (updates)",
        "a = Identity (y)\n        b = Identity (updates)",
    ),
    edited("MO424", "zeros like a weight", ZEROS, "Shape (x)", "Shape (weight)"),
    edited("MO425", "loss of probabilities", LOSS, "(logits, labels)\n    }", "(probs, labels)\n    }"),
    edited("MO425", "softmax of softmax", BALANCE, "Identity (logits)", "Softmax <axis = -1> (logits)"),
]
