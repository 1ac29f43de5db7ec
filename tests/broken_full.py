"""Models whose gradients, updates, indices or unnamed rows are wrong: seen only by running them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
from broken_models import Mutation, gradient_node, parse
from onnx import helper, numpy_helper

import moe_onnx
from moe_onnx.build.training_graph import TrainingGraph

MOE = ', "ascend.moe" : 1'
BIAS = "gate.e_score_correction_bias"


@cache
def layer_graph(optimizer: str = "AdamW") -> TrainingGraph:
    """A single layer with a selection bias: one that AdamW trains, or SGD."""
    config = moe_onnx.MoeLayerConfig(
        hidden_size=4,
        num_experts=3,
        moe_intermediate_size=3,
        router_scores="sigmoid",
        router_selection_bias=True,
        router_bias_update_rate=0.01,
    )
    kinds = {"AdamW": moe_onnx.AdamW(eps=1e-4), "SGD": moe_onnx.SGD(momentum=0.9, weight_decay=0.01)}
    return moe_onnx.build_training_graph(config, assembly="grad+step+apply", optimizer=kinds[optimizer])


def apply_layer() -> onnx.ModelProto:
    return layer_graph().models["apply"]


def sgd_apply_layer() -> onnx.ModelProto:
    return layer_graph("SGD").models["apply"]


@cache
def linear() -> onnx.ModelProto:
    """A linear layer, its weight and bias initializers, differentiated."""
    return moe_onnx.differentiate(
        parse("""
        linear (float[n, 4] x) => (float loss)
        <float[4, 3] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3] bias = {1, 2, 3}>
        {
            product = MatMul (x, weight)
            y = Add (product, bias)
            smooth = Tanh (y)
            loss = ReduceSum <keepdims = 0> (smooth)
        }
        """),
        loss="loss",
        wrt=["weight", "bias", "x"],
    )


def between(model: onnx.ModelProto, output: str, *nodes: tuple[Any, ...], **constants: Any) -> None:
    """Put nodes behind what makes an output: ``(operator, inputs, attributes)``, ``""`` what came before."""
    hidden = f"{output}/intact"
    for node in model.graph.node:
        for names in (node.output, node.input):
            for at, name in enumerate(names):
                if name == output:
                    names[at] = hidden
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    before = hidden
    for number, (op, inputs, attributes) in enumerate(nodes):
        after = output if number == len(nodes) - 1 else f"{output}/{number}"
        made = helper.make_node(op, [name or before for name in inputs], [after], **attributes)
        made.name = f"broken/{output}/{number}"
        model.graph.node.append(made)
        before = after


def scaled(output: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    def break_it(model: onnx.ModelProto) -> None:
        between(model, output, ("Mul", ["", "factor"], {}), factor=np.float32(factor))

    return break_it


def feed_through(model: onnx.ModelProto, name: str, op: str, value: Any) -> None:
    """What reads an input reads the input and a constant, put together, instead."""
    for node in model.graph.node:
        for at, read in enumerate(node.input):
            if read == name:
                node.input[at] = f"{name}/broken"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), "broken"))
    model.graph.node.insert(0, helper.make_node(op, [name, "broken"], [f"{name}/broken"], name="broken/node"))


def unreduced(model: onnx.ModelProto) -> None:
    between(model, "bias.grad", ("Unsqueeze", ["", "axis"], {}), axis=np.array([0]))
    info = next(output for output in model.graph.output if output.name == "bias.grad")
    info.CopyFrom(helper.make_tensor_value_info("bias.grad", onnx.TensorProto.FLOAT, [1, 3]))


def roots(gradient: str) -> Callable[[], onnx.ModelProto]:
    """The square roots of what is positive, and a gradient written by hand."""

    def made() -> onnx.ModelProto:
        model = parse(f"""
            roots (float[8] x) => (float loss, float[8] slope)
            <float half = {{0.5}}, float zero = {{0}}, float one = {{1}}>
            {{
                positive = Relu (x)
                is_positive = Greater (x, zero)
                root = Sqrt (positive)
                loss = ReduceSum <keepdims = 0> (root)
                {gradient}
            }}
        """)
        model.graph.node[-1].output[0] = model.graph.output[1].name = "x.grad"
        return model

    return made


CHOSEN_BEFORE = """
    safe = Where (is_positive, root, one)
    inverse = Div (half, safe)
    slope = Where (is_positive, inverse, zero)
"""
MASKED_AFTER = """
    inverse = Div (half, root)
    mask = Cast <to = 1> (is_positive)
    slope = Mul (inverse, mask)
"""


def other_optimizer(**options: Any) -> Callable[[onnx.ModelProto], None]:
    def break_it(model: onnx.ModelProto) -> None:
        prop = next(p for p in model.metadata_props if p.key == "moe_onnx.manifest")
        manifest = json.loads(prop.value)
        manifest["optimizer"] |= options
        prop.value = json.dumps(manifest)

    return break_it


def sum_of_rows() -> onnx.ModelProto:
    """The gradient of a combine in which two slots are dropped; only rows that are named are summed."""
    return parse(
        """
        sum_of_rows (float[2, 3] dy, float[4] scores) => (float[3] total)
        <int64[2] kept = {0, 1}, int64[1] axis = {0}, int64[1] four = {4}, int32 two = {2}, int32 none = {-1}>
        {
            values, order = TopK <axis = 0> (scores, four)
            slots = Cast <to = 6> (order)
            is_kept = Less (slots, two)
            index = Where (is_kept, slots, none)
            [combine] rows = ascend.moe.MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad = 0>
                (dy, index, index)
            named = Gather <axis = 0> (rows, kept)
            total = ReduceSum <keepdims = 0> (named, axis)
        }
        """,
        imports=MOE,
    )


def sum_of_permuted() -> onnx.ModelProto:
    """A dispatch of three pairs to four rows."""
    return parse(
        """
        permuted (float[2, 3] x, float[2, 2] p) => (float[3] total)
        <int64[1] first = {0}, int64[1] last = {3}, int64[1] axis = {0}>
        {
            map = Constant <value = bool[2, 2] {1, 1, 0, 1}> ()
            [dispatch] rows, weights, index = ascend.moe.MoeTokenPermuteWithRoutingMap
                <num_out_tokens = 4, drop_and_pad = 0> (x, map, p)
            named = Slice (rows, first, last, axis)
            total = ReduceSum <keepdims = 0> (named, axis)
        }
        """,
        imports=MOE,
    )


def all_rows(model: onnx.ModelProto) -> None:
    node = gradient_node(model, "ReduceSum")
    node.input[0] = "rows"


@cache
def summed() -> onnx.ModelProto:
    """The gradient of a dispatch with dropped slots, with its function body; row 0 has no token."""
    return moe_onnx.add_function_bodies(
        parse(
            """
            summed (float[3, 2, 4] g) => (float[2, 4] dx)
            {
                index = Constant <value = int32[4] {2, -1, 4, 5}> ()
                [gather] dx = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, drop_pad_mode = 1> (g, index)
            }
            """,
            imports=MOE,
        )
    )


def masked_by_product(model: onnx.ModelProto) -> None:
    function = onnx.parser.parse_function("""
        <domain: "ascend.moe", opset_import: ["" : 21]>
        MoeInitRoutingV2Grad <top_k, drop_pad_mode: int = 0, active_num: int = 0>
            (grad_expanded_x, expanded_row_idx) => (grad_x)
        {
            zero = Constant <value = int64 {0}> ()
            axis = Constant <value = int64[1] {1}> ()
            minus_one = Constant <value = int64[1] {-1}> ()
            k = Constant <value_int: int = @top_k> ()
            k_1 = Reshape (k, minus_one)
            hidden = Shape <start = -1> (grad_expanded_x)
            flat_shape = Concat <axis = 0> (minus_one, hidden)
            flat = Reshape (grad_expanded_x, flat_shape)
            index = Cast <to = 7> (expanded_row_idx)
            is_named = GreaterOrEqual (index, zero)
            some = Max (index, zero)
            rows = Gather <axis = 0> (flat, some)
            mask = CastLike (is_named, rows)
            mask_2d = Unsqueeze (mask, axis)
            masked = Mul (rows, mask_2d)
            slots_shape = Concat <axis = 0> (minus_one, k_1, hidden)
            slots = Reshape (masked, slots_shape)
            grad_x = ReduceSum <keepdims = 0> (slots, axis)
        }
    """)
    del model.functions[:]
    model.functions.append(function)


def ranked(change: str, inputs: str = "") -> Callable[[], onnx.ModelProto]:
    """The gradient of a dispatch, its index the ranks of four scores; ``change`` makes index of rank."""

    def made() -> onnx.ModelProto:
        return parse(
            f"""
            ranked (float[4, 3] g, float[4] scores{inputs}) => (float[2, 3] dx)
            <int64[1] four = {{4}}, int32 one = {{1}}, int32 two = {{2}}>
            {{
                values, order = TopK <axis = 0> (scores, four)
                rank = Cast <to = 6> (order)
                index = {change}
                [gather] dx = ascend.moe.MoeInitRoutingV2Grad
                    <top_k = 2, drop_pad_mode = 0, active_num = 0> (g, index)
            }}
            """,
            imports=MOE,
        )

    return made


def routed(order: str = "ascending", chosen: str = "one_hot", gradient: bool = False) -> Any:
    """A router and a combine: rows by expert, expert ids in the given order, the combine by the given map."""
    combine = (
        "[combine] y, dp = ascend.moe.MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad = 0> "
        "(dy, idx, idx, map, rows, scores)"
        if gradient
        else "[combine] y, out_index, token_id, weights = ascend.moe.MoeTokenUnpermuteWithRoutingMap "
        "<drop_and_pad = 0> (rows, idx, map, scores)"
    )
    gradients, size = (", float[5, 3] dy", 10) if gradient else ("", 5)

    def made() -> onnx.ModelProto:
        return parse(
            f"""
            routed (float[10, 3] rows, float[5, 4] scores{gradients}) => (float[{size}, 3] y)
            <int64[1] two = {{2}}, int64[1] ten = {{10}}, int64[1] flat = {{-1}}, float low = {{-100}},
             float[1] none = {{0}}, float[1] some = {{1}}>
            {{
                values, best = TopK <axis = 1> (scores, two)
                as_chosen = Cast <to = 1> (best)
                ascending, places = TopK <axis = 1, largest = 0> (as_chosen, two)
                expert, slot = Split <axis = 1, num_outputs = 2> (ascending)
                twice = Concat <axis = 1> (expert, expert)
                ids = Identity ({order})
                ids_flat = Reshape (ids, flat)
                sorted_ids, slot_of_row = TopK <axis = 0, largest = 0> (ids_flat, ten)
                slot_of_row_f = Cast <to = 1> (slot_of_row)
                sorted_slots, row_of_slot = TopK <axis = 0, largest = 0> (slot_of_row_f, ten)
                idx = Cast <to = 6> (row_of_slot)
                ids_long = Cast <to = 7> (ids)
                shape = Shape (scores)
                nobody = Expand (none, shape)
                chosen_shape = Shape (ids)
                somebody = Expand (some, chosen_shape)
                marks = ScatterElements <axis = 1> (nobody, ids_long, somebody)
                one_hot = Cast <to = 9> (marks)
                everybody = Greater (scores, low)
                map = Identity ({chosen})
                {combine}
            }}
            """,
            imports=MOE,
        )

    return made


def replaced(made: Callable[[], onnx.ModelProto]) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    return lambda intact: made()


def twice_the_rows(model: onnx.ModelProto) -> None:
    node = gradient_node(model, "MoeInitRoutingV2Grad")
    model.graph.node.insert(
        0, helper.make_node("Concat", ["g", "g"], ["double"], axis=0, name="broken/twice")
    )
    node.input[0] = "double"


def free_rows() -> onnx.ModelProto:
    """Rows whose number nothing says before a run."""
    return parse(
        """
        free_rows (float[n, 3] g, float[n] scores) => (float[m, 3] dx)
        {
            number = Shape (scores)
            values, order = TopK <axis = 0> (scores, number)
            index = Cast <to = 6> (order)
            [gather] dx = ascend.moe.MoeInitRoutingV2Grad
                <top_k = 2, drop_pad_mode = 0, active_num = 0> (g, index)
        }
        """,
        imports=MOE,
    )


def full(code: str, name: str, base: Any, break_it: Any, *also: str) -> Mutation:
    return Mutation(code, name, base, break_it, level="full", also=also)


# A run of a wrong index is refused at its node.
REFUSED = ("MO801", "MO804", "MO811")
MUTATIONS: list[Mutation] = [
    full("MO901", "a gradient of the other sign", linear, scaled("weight.grad", -1)),
    full("MO901", "a gradient of an input a thousandth too large", linear, scaled("x.grad", 1.001)),
    full("MO901", "a loss that was scaled after differentiation", linear, scaled("loss", 2)),
    full("MO902", "a bias gradient with an axis too many", linear, unreduced, "MO852"),
    full("MO903", "a mask multiplied behind a division by zero", roots(CHOSEN_BEFORE),
         replaced(roots(MASKED_AFTER)), "MO852"),
    full("MO904", "twice the learning rate", apply_layer,
         lambda model: feed_through(model, "lr", "Mul", np.float32(2))),
    full("MO904", "a step number from zero", apply_layer,
         lambda model: feed_through(model, "step", "Add", np.int64(1))),
    full("MO904", "a second moment a hundredth too large", apply_layer,
         scaled("experts.down_proj.exp_avg_sq.updated", 1.01)),
    full("MO904", "a manifest with another decay", apply_layer, other_optimizer(weight_decay=0.5), "MO626"),
    full("MO904", "a manifest with another momentum", sgd_apply_layer, other_optimizer(momentum=0.8),
         "MO626"),
    full("MO904", "a selection bias pushed the wrong way", apply_layer,
         lambda model: feed_through(model, f"{BIAS}.load_excess", "Mul", np.float32(-1))),
    full("MO911", "a sum over rows that no slot names", sum_of_rows, all_rows),
    full("MO911", "a sum over rows behind the last pair", sum_of_permuted, all_rows),
    full("MO912", "a body that masks by a product", summed, masked_by_product),
    full("MO921", "a row twice", ranked("Identity (rank)"), replaced(ranked("Min (rank, two)")), *REFUSED),
    full("MO921", "a row past the last", ranked("Identity (rank)"), replaced(ranked("Add (rank, one)")),
         *REFUSED),
    full("MO921", "a row before the first", ranked("Identity (rank)"), replaced(ranked("Sub (rank, one)")),
         *REFUSED),
    full("MO922", "a combine by a map of all experts", routed(), replaced(routed(chosen="everybody")),
         *REFUSED),
    full("MO923", "experts of a token in top-k order", routed(), replaced(routed(order="as_chosen")),
         "MO706", "MO511"),
    full("MO925", "experts chosen twice for a token", routed(),
         replaced(routed(order="twice"))),
    full("MO926", "ranks shifted by an input", ranked("Identity (rank)"),
         replaced(ranked("Add (rank, shift)", ", int32 shift"))),
    full("MO924", "twice as many rows as slots", free_rows, twice_the_rows, *REFUSED),
]  # fmt: skip
