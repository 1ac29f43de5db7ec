"""Hazards: what proves that a scatter is safe, whose word counts for kernels, what a finding says."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
from broken_hazards import ADD_ROWS, DROPS, FOUND, INDEX_ADD, MOE, NARROW, SELECTED, in_a_function
from broken_models import parse

import moe_onnx
from moe_onnx.validation.hazards import values


def codes(model: onnx.ModelProto | str, imports: str = "") -> tuple[str, ...]:
    """The codes of these families that a model, or its text, has."""
    model = parse(model, imports=imports) if isinstance(model, str) else model
    return tuple(code for code in moe_onnx.validate(model).codes if code[:3] in ("MO4", "MO0"))


def adding(index: str, lines: str) -> str:
    """A graph that adds rows, or elements, to ``y`` at the indices ``index``."""
    return f"""
        g (float[t, 4] y, float[n, 4] u, int64[n] rows, float[n] v) => (float[t, 4] z)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] axis = {{1}}, int64[1] first = {{0}},
         int64 n = {{7}}, int64[2] two = {{-1, 1}}, int64[1] k = {{3}}, int64[3, 1] fixed = {{4, 0, 2}}>
        {{
            range = Range (zero, n, one)
            {lines}
            z = ScatterND <reduction = "add"> (y, {index}, u)
        }}
    """


SAFE = {
    "reshaped": adding("i", "i = Reshape (range, two)"),
    "cast twice": adding("i", "a = Cast <to = 6> (range)\n b = Cast <to = 7> (a)\n i = Unsqueeze (b, axis)"),
    "shifted and cut": adding(
        "i", "a = Add (range, one)\n b = Slice (a, first, k)\n i = Unsqueeze (b, axis)"
    ),
    "best of a vector": adding("i", "s, a = TopK (v, k)\n i = Unsqueeze (a, axis)"),
    "unique": adding("i", "a = Unique <sorted = 1> (rows)\n i = Unsqueeze (a, axis)"),
    "found in a vector": adding("i", "a = NonZero (v)\n i = Transpose <perm = [1, 0]> (a)"),
    "transposed row": adding("i", "a = Unsqueeze (range, first)\n i = Transpose (a)"),
    "one row": adding("i", "a = Unsqueeze (n, first)\n i = Unsqueeze (a, axis)"),
    "constant": adding("fixed", ""),
    "constant behind a Cast": adding("i", "a = Cast <to = 6> (fixed)\n i = Cast <to = 7> (a)"),
    "found, in columns": """
        g (float[t, e] y, bool[t, e] map, float[n] u) => (float[t, e] z)
        <int64[2] halves = {1, 1}, int64[1] axis = {0}, int64[1] last = {1}>
        {
            found = NonZero (map)
            token, expert = Split <axis = 0> (found, halves)
            tokens = Squeeze (token, axis)
            experts = Squeeze (expert, axis)
            a = Unsqueeze (tokens, last)
            b = Unsqueeze (experts, last)
            i = Concat <axis = -1> (a, b)
            z = ScatterND <reduction = "add"> (y, i, u)
        }
    """,
}
UNSAFE = {
    "best of each row and of each column": """
        g (float[3, 3] x, float[9, 9] y, float[3, 3] u, int64[1] k) => (float[9, 9] z)
        <int64[1] last = {2}>
        {
            s, a = TopK <axis = 0> (x, k)
            r, b = TopK <axis = 1> (x, k)
            c = Unsqueeze (a, last)
            d = Unsqueeze (b, last)
            i = Concat <axis = -1> (c, d)
            z = ScatterND <reduction = "add"> (y, i, u)
        }
    """,
    "an element of another": adding("i", "a = Gather (rows, range)\n i = Unsqueeze (a, axis)"),
    "one column of what was found": """
        g (float[t, e] y, bool[t, e] map, float[n, e] u) => (float[t, e] z)
        <int64[2] halves = {1, 1}, int64[1] axis = {0}, int64[1] last = {1}>
        {
            found = NonZero (map)
            token, expert = Split <axis = 0> (found, halves)
            tokens = Squeeze (token, axis)
            i = Unsqueeze (tokens, last)
            z = ScatterND <reduction = "add"> (y, i, u)
        }
    """,
    "best of each row": adding("i", "s, a = TopK (y, k)\n i = Reshape (a, two)"),
    "modulo": adding("i", "a = Mod (range, k)\n i = Unsqueeze (a, axis)"),
    "stretched": adding(
        "j", "a = Unsqueeze (range, axis)\n s = Shape (u)\n i = Expand (a, s)\n j = Reshape (i, two)"
    ),
}


@pytest.mark.parametrize("name", SAFE)
def test_indices_that_provably_differ_are_no_finding(name: str) -> None:
    assert codes(SAFE[name]) == ()


@pytest.mark.parametrize("name", UNSAFE)
def test_indices_that_may_repeat_are_one(name: str) -> None:
    assert codes(UNSAFE[name]) == ("MO401",)


def test_a_dispatch_without_drops_is_a_permutation() -> None:
    text = DROPS.replace("safe = Max (row_idx, zero)", "safe = Cast <to = 7> (row_idx)").replace(
        "[take] taken = Gather <axis = 0> (all, safe)",
        'column = Unsqueeze (safe, one)\n taken = ScatterND <reduction = "add"> (all, column, all)',
    )
    # Dropped slots write the last row, and are several.
    assert codes(text, MOE) == ("MO401", "MO407")
    assert (
        codes(
            text.replace("expert_capacity = 2", "expert_capacity = 0").replace("_mode = 1", "_mode = 0"), MOE
        )
        == ()
    )


def test_index_add_as_torch_exports_it() -> None:
    """The two forms of torch's index_add: additive ScatterND, and a scatter into zeros and an Add."""
    by_dynamo = ADD_ROWS.replace("Unsqueeze (range, last)", "Unsqueeze (rows, last)")
    traced = INDEX_ADD.replace(', reduction = "add"', "")
    assert codes(by_dynamo) == ("MO401",)
    assert codes(traced) == ("MO404",)
    rows = np.array([1, 1], np.int64)
    feeds = {"y": np.zeros((2, 4), np.float32), "updates": np.ones((2, 4), np.float32), "rows": rows}
    session = ort.InferenceSession(parse(traced).SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.run(None, feeds)[0][1, 0] == 1  # not 2


def test_many_of_a_kind_are_collapsed() -> None:
    nodes = "\n".join(f'z{i} = ScatterND <reduction = "add"> (y, index, u)' for i in range(40))
    text = f"g (float[t] y, int64[n, 1] index, float[n] u) => (float[t] z0) {{ {nodes} }}"
    found = moe_onnx.validate(parse(text)).of_severity("warning")
    assert [f.code for f in found].count("MO401") == 3
    assert "and 37 more like it" in "".join(f.found for f in found)
    scatters = [f.places for f in found if f.code == "MO401"]
    assert [len(places) for places in scatters] == [1, 1, 38]
    assert "the node of 'z39' (ScatterND)" in scatters[2]


def test_a_finding_names_the_index_and_where_the_mark_comes_from() -> None:
    report = moe_onnx.validate(parse(DROPS.replace("(all, safe)", "(all, row_idx)"), imports=MOE))
    finding = next(f for f in report if f.code == "MO407")
    assert finding.where == "node 'take' (Gather)"
    assert "'row_idx'" in finding.found and "MoeInitRoutingV2" in finding.found and "dropped" in finding.found


def test_a_mark_in_a_table_with_a_row_for_it_is_no_finding() -> None:
    """The function bodies of ascend.moe do so: the last of n + 1 rows is zero."""
    unmasked = SELECTED.replace("y = Where (column, taken, nothing)", "y = Relu (taken)")
    assert codes(unmasked) == ("MO407",)
    padded = unmasked.replace(
        "[take] taken = Gather <axis = 0> (x, marked)",
        "more = Concat <axis = 0> (x, zeros)\n taken = Gather <axis = 0> (more, marked)",
    ).replace("int64[1] one =", "float[1, 4] zeros = {0, 0, 0, 0}, int64[1] one =")
    assert codes(padded) == ()


def test_python_style_negative_indices_are_usual() -> None:
    text = """
        g (float[b, s, 4] x) => (float[b, 4] y, float[b, s, 2] z)
        <int64 last = {-1}, int64[2] ends = {0, -1}>
        { y = Gather <axis = 1> (x, last)
          z = Gather <axis = 2> (x, ends) }
    """
    assert codes(text) == ()


BFLOAT16 = """
    MatMul(x, x); Add(x, x); Mul(x, x); Softmax(x); ReduceSum(x); Sigmoid(x); Exp(x); Sqrt(x); Gemm(x, x)
    Gelu(x); Where(c, x, x); CumSum(x, i); Relu(x); RMSNormalization(x, w); Max(x, x); Greater(x, x); Exp(x)
    Cast<to = 1>(x)
    Identity(x); Transpose(x); Gather(x, i); Reshape(x, k); Concat<axis = 0>(x, x); LayerNormalization(x, w)
    Clip(x); CastLike(x, f); GatherElements(x, ii); ScatterElements<reduction = "add">(x, ii, x); Squeeze(x)
    Shape(x); Expand(x, k); Slice(x, k1, k1)
""".replace("\n", ";").split(";")


@pytest.mark.parametrize("call", [call.strip() for call in BFLOAT16 if call.strip()])
def test_the_verdict_on_bfloat16_is_that_of_onnxruntime(call: str) -> None:
    text = f"""
        g (bfloat16[4, 4] x, bfloat16[4] w, bool[4, 4] c, int64 i, float f, int64[4, 4] ii) => (y)
        <int64[2] k = {{4, 4}}, int64[1] k1 = {{0}}> {{ y = {call} }}
    """
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {text}')
    try:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        loads = True
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        loads = False
    assert (codes(model).count("MO421") == 0) == loads
    for input_ in model.graph.input:
        if input_.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16:
            input_.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16  # Casts are put round these
    assert "MO421" not in codes(model)


def test_a_function_that_is_called_in_bfloat16_has_the_verdict_of_its_inlined_form() -> None:
    model = parse(NARROW)
    in_a_function(model)
    found = [f for f in moe_onnx.validate(model) if f.code == "MO421"]
    assert [f.where for f in found] == [
        "node 'sum' (Add) in function 'local.inner'"
    ]  # once, not for each call
    assert "MO421" in codes(onnx.inliner.inline_local_functions(model))
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    assert codes(model) == ()


def test_forward_losses_are_no_training_operators() -> None:
    text = """
        g (float[n, 4] x, int64[n] labels) => (float z)
        { y = SoftmaxCrossEntropyLoss (x, labels)
          z = com.microsoft.FastGelu (y) }
    """
    assert codes(text, ', "com.microsoft" : 1') == ()


def test_what_a_run_decides_is_not_folded_and_weights_are_not_read() -> None:
    big = "g (float[4096, 4096] w, float[n, 4] x) => (float[a, b] z) <float one = {1}>"
    assert codes(f"{big} {{ s = Shape (w)\n z = Expand (one, s) }}") == ("MO424",)
    assert codes(f"{big} {{ s = Shape (x)\n z = Expand (one, s) }}") == ()
    assert codes(f"{big} {{ s = Shape (w)\n z = RandomNormalLike (w) }}") == ()
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[1 << 20, 1 << 20])
    assert values.read(tensor) is None
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    assert values.read(tensor) is None


def test_a_whole_nonzero_is_distinct_and_deep_chains_end() -> None:
    chain = "\n".join(f"p{i + 1} = Identity (p{i})" for i in range(200))
    text = FOUND.replace("places = NonZero (map)", f"p0 = NonZero (map)\n{chain}\nplaces = Identity (p200)")
    assert codes(FOUND) == ()
    assert codes(text) == ("MO401",)  # farther back than anybody looks
    loop = "g (float[t] y, float[n] u) => (float[t] z) { a = Identity (b)\n b = Identity (a)\n"
    assert "MO401" in codes(f'{loop} z = ScatterND <reduction = "add"> (y, a, u) }}')
