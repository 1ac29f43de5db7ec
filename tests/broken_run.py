"""Models that go wrong only when they are run."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
from broken_models import Mutation, parse, plain_model
from onnx import helper, numpy_helper

import moe_onnx
from moe_onnx.build.training_graph import TrainingGraph

MOE = ', "ascend.moe" : 1'


@cache
def dense_graph() -> TrainingGraph:
    """A language model without experts: standard operators only, whose sessions cost little."""
    config = moe_onnx.MoeLMConfig(
        vocab_size=7,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=4,
        mlp_only_layers=(0,),
        tie_word_embeddings=True,
    )
    return moe_onnx.build_training_graph(config, assembly="step+apply+eval", optimizer=moe_onnx.AdamW())


def eval_model() -> onnx.ModelProto:
    return dense_graph().models["eval"]


def apply_model() -> onnx.ModelProto:
    return dense_graph().models["apply"]


def maker(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    """The node that makes a value."""
    return next(node for node in model.graph.node if name in node.output)


def reworked(model: onnx.ModelProto, output: str, text: str) -> None:
    """Put nodes before an output: ``text`` makes ``after`` out of ``before``."""
    name = f"{output}/before"
    maker(model, output).output[:] = [name]
    for node in model.graph.node:
        node.input[:] = [name if i == output else i for i in node.input]
    added = parse(f"g (float before) => (float after) {{ {text} }}").graph.node
    for node in added:
        node.input[:] = [name if i == "before" else i for i in node.input]
        node.output[:] = [output if i == "after" else i for i in node.output]
    model.graph.node.extend(added)


def change(output: str, text: str) -> Any:
    return lambda model: reworked(model, output, text)


# ---- sessions

DOUBLE = "w = Cast <to = 11> (before) odd = Erf (w) n = Cast <to = 1> (odd) after = Add (before, n)"


def lacking_a_kernel(model: onnx.ModelProto) -> None:
    """onnxruntime has no Erf of float64."""
    reworked(model, model.graph.output[0].name, DOUBLE)


def unpermute_model() -> onnx.ModelProto:
    model = parse(
        """
        g (float[4, 3] x) => (float[2, 3] y)
        <int32[4] rows = {2, 0, 1, 3}, bool[2, 2] map = {1, 1, 1, 1}>
        { [combine] y = ascend.moe.MoeTokenUnpermuteWithRoutingMap (x, rows, map) }
        """,
        imports=MOE,
    )
    return moe_onnx.add_function_bodies(model)


def without_the_optional_input(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type.startswith("Moe"))
    del node.input[3:]


def one_node_model() -> onnx.ModelProto:
    return parse("g (int64[2] x) => (int64[2] y) <int64[2] by = {1, 2}> { y = Div (x, by) }")


def by_zero(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([0, 1]), "by"))


def picture_model() -> onnx.ModelProto:
    return parse("""
        g (float[1, 1, 4, 4] x, float[1, 1, 3, 3] w) => (float[1, 1, 4, 4] y)
        { y = Conv <auto_pad = "SAME_UPPER"> (x, w) }
    """)


def misspelt_padding(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute[0].s = b"SAME"


# ---- runs


def other_channels(model: onnx.ModelProto) -> None:
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_value = 2


def products_of_rows() -> onnx.ModelProto:
    return parse("""
        g (float[2, 3] x, float[3, 5] w) => (float[2, 5] y) { y = Einsum <equation = "ij,jk->ik"> (x, w) }
    """)


def a_longer_row(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4


def added_rows() -> onnx.ModelProto:
    return parse("""
        g (float[4, 3] x, int64[2, 1] at, float[2, 3] rows) => (float[4, 3] y) { y = ScatterND (x, at, rows) }
    """)


def wider_rows(model: onnx.ModelProto) -> None:
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_value = 5


def out_of_reach(model: onnx.ModelProto) -> None:
    """A row that is looked up by a value: nothing but a run tells that it is not there."""
    text = """
        million = Constant <value = float {1000000}> ()
        flat_shape = Constant <value = int64[1] {-1}> ()
        flat = Reshape (before, flat_shape)
        largest = ReduceMax <keepdims = 1> (flat)
        far = Add (largest, million)
        index = Cast <to = 7> (far)
        found = Gather (flat, index)
        total = ReduceSum <keepdims = 0> (found)
        after = Add (before, total)
    """
    reworked(model, model.graph.output[0].name, text)


def grad_model() -> onnx.ModelProto:
    """The rows of 4 slots, from an index that is computed."""
    return parse(
        """
        g (float[4, 3] x) => (float[2, 3] y)
        <int32[4] order = {2, 0, 1, 3}>
        {
            axis = Constant <value = int64[1] {1}> ()
            zero = Constant <value = float {0}> ()
            sums = ReduceSum <keepdims = 0> (x, axis)
            zeros = Mul (sums, zero)
            whole = Cast <to = 6> (zeros)
            [index] rows = Add (whole, order)
            [give_back] y = ascend.moe.MoeInitRoutingV2Grad <top_k = 2> (x, rows)
        }
        """,
        imports=MOE,
    )


def all_slots_in_one_row(model: onnx.ModelProto) -> None:
    """The Python kernel refuses repeated rows, the body does not see them."""
    maker(model, "rows").op_type = "Mul"


# ---- repeats


def products_model() -> onnx.ModelProto:
    """Long sums, of inputs: onnxruntime adds them up in another order with two threads."""
    return parse("""
        products (float[2, 100000] x, float[100000, 2] w, float[33, 257] z, float[257, 65] v) => (float[n] s)
        {
            p = MatMul (x, w)
            q = MatMul (z, v)
            flat = Constant <value = int64[1] {-1}> ()
            a = Reshape (p, flat)
            b = Reshape (q, flat)
            s = Concat <axis = 0> (a, b)
        }
    """)


AMPLIFIED = (
    "million = Constant <value = float {1000000}> () large = Mul (before, million) after = Sin (large)"
)
RANDOM = "noise = RandomUniformLike (before) after = Add (before, noise)"

# ---- values

ZERO_BY_ZERO = "none = Sub (before, before) [odd] bad = Div (none, none) after = Add (before, bad)"
ROOT = "size = Abs (before) less = Neg (size) [odd] bad = Sqrt (less) after = Add (before, bad)"

# ---- batches


def fixed_in_the_trace(model: onnx.ModelProto) -> None:
    """The size that the example input had, once in a Reshape."""
    shape = helper.make_tensor("traced", onnx.TensorProto.INT64, [2], [4, 4])
    node = maker(model, "product")
    model.graph.initializer.append(shape)
    model.graph.node.insert(0, helper.make_node("Reshape", [node.input[0], "traced"], ["fixed"], name="bake"))
    node.input[0] = "fixed"


def fixed_in_training(model: onnx.ModelProto) -> None:
    """Ten tokens, as many as the first batch has."""
    shape = helper.make_tensor("traced", onnx.TensorProto.INT64, [1], [10])
    model.graph.initializer.append(shape)
    node = next(n for n in model.graph.node if n.op_type == "Reshape" and n.input[0] == "input_ids")
    node.input[1] = "traced"


def reshaped_model() -> onnx.ModelProto:
    return parse("""
        g (float[n, 4] x) => (float[n, 4] y)
        <int64[2] sizes = {-1, 4}>
        { size = Abs (sizes) sign = Sign (sizes) real = Mul (size, sign) y = Reshape (x, real) }
    """)


def other_columns(model: onnx.ModelProto) -> None:
    """Two columns where four are declared: a size that inference cannot follow."""
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([-1, 2]), "sizes"))


def a_mean_over_nothing(model: onnx.ModelProto) -> None:
    """The count of tokens, without the bound that keeps it from 0."""
    node = maker(model, "loss/Max")
    node.input[1] = node.input[0]


def a_spread(model: onnx.ModelProto) -> None:
    """Divides by how far tokens are apart."""
    text = """
        float_ids = Cast <to = 1> (input_ids)
        top = ReduceMax <keepdims = 0> (float_ids)
        bottom = ReduceMin <keepdims = 0> (float_ids)
        apart = Sub (top, bottom)
        share = Div (before, apart)
        after = Add (before, share)
    """
    reworked(model, "loss", text)


MUTATIONS = [
    Mutation("MO801", "a node without kernel in a training graph", apply_model, lacking_a_kernel, "run"),
    Mutation(
        "MO325", "integers divided by a constant 0, run", one_node_model, by_zero, "run", also=("MO801",)
    ),
    Mutation("MO318", "a padding that does not exist, run", picture_model, misspelt_padding, "run"),
    Mutation("MO802", "a node without kernel", plain_model, lacking_a_kernel, "run"),
    Mutation("MO803", "an optional input left out", unpermute_model, without_the_optional_input, "run"),
    Mutation("MO804", "a row that is not there", apply_model, out_of_reach, "run"),
    Mutation("MO805", "a row that is not there", plain_model, out_of_reach, "run"),
    Mutation(
        "MO806", "other channels than the filter has", picture_model, other_channels, "run", also=("MO321",)
    ),
    Mutation("MO806", "rows longer than the columns", products_of_rows, a_longer_row, "run"),
    Mutation("MO806", "rows of another width", added_rows, wider_rows, "run"),
    Mutation("MO811", "repeated rows", grad_model, all_slots_in_one_row, "run"),
    Mutation("MO821", "noise in an update", apply_model, lambda m: _first(m, RANDOM), "run"),
    Mutation("MO822", "rounding made large", products_model, change("s", AMPLIFIED), "run"),
    Mutation("MO831", "the first batch's size", eval_model, fixed_in_training, "run"),
    Mutation("MO832", "the example's size", plain_model, fixed_in_the_trace, "run"),
    Mutation("MO833", "other columns than declared", reshaped_model, other_columns, "run"),
    Mutation("MO841", "zero by zero", apply_model, lambda m: _first(m, ZERO_BY_ZERO), "run"),
    Mutation("MO842", "the root of what is negative", plain_model, change("y", ROOT), "run"),
    Mutation("MO842", "zero by zero", plain_model, change("y", ZERO_BY_ZERO), "run"),
    Mutation("MO851", "a mean over nothing", eval_model, a_mean_over_nothing, "run"),
    Mutation("MO852", "a share of the spread", eval_model, a_spread, "run", also=("MO851",)),
]


def _first(model: onnx.ModelProto, text: str) -> None:
    reworked(model, model.graph.output[0].name, text)
