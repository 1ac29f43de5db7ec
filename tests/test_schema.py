"""The ONNX schemas: right models are accepted and get shapes, wrong ones are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import moe_onnx
from moe_onnx.adapters.schema import ELEM_TYPES
from moe_onnx.operators import ALL, BY_NAME
from moe_onnx.spec import DOMAIN

Values = dict[str, tuple[str, list[Any] | None]]
INIT_GRAD: Values = {"grad_expanded_x": ("float32", ["A", 16]), "expanded_row_idx": ("int32", [12])}
UN_GRAD: Values = {
    "unpermuted_tokens_grad": ("float32", ["T", 16]),
    "out_index": ("int32", ["N"]),
    "permute_token_id": ("int32", ["N"]),
    "routing_map": ("bool", ["T", 8]),
    "permuted_tokens": ("float32", ["N", 16]),
    "probs": ("float32", ["T", 8]),
}
INIT: Values = {"x": ("float32", [6, 16]), "expert_idx": ("int32", [6, 2])}
GMM: Values = {"x": ("float32", ["N", 16]), "weight": ("float32", [8, 16, 32]), "group_sizes": ("int32", [8])}
GMM_GRAD: Values = {
    "x": ("bfloat16", [12, 16]),
    "grad_y": ("bfloat16", [None, 32]),
    "group_sizes": ("int32", ["E"]),
}
PERMUTE: Values = {
    "tokens": ("bfloat16", [6, 16]),
    "routing_map": ("int8", [6, 4]),
    "probs": ("float32", [6, 4]),
}
PERMUTE_GRAD: Values = {
    "permuted_token_output_grad": ("float32", ["N", 16]),
    "permuted_probs_output_grad": ("float32", ["N"]),
    "sorted_indices": ("int32", ["N"]),
    "routing_map": ("bool", ["T", 8]),
}
ADAM_W: Values = {
    "parameter": ("float32", ["E", 16, 8]),
    "gradient": ("float32", [None, 16, 8]),
    "exp_avg": ("float32", [4, 16, None]),
    "exp_avg_sq": ("float32", [None, None, None]),
    "factors": ("float32", [7]),
}
UN: Values = {
    "permuted_tokens": ("bfloat16", [12, 16]),
    "sorted_indices": ("int32", [12]),
    "routing_map": ("int8", [6, 4]),
    "probs": ("float32", [6, 4]),
}


def model_of(op: str, values: Values, *, typed: bool = True, **attributes: Any) -> onnx.ModelProto:
    """A model of one node. The checker wants outputs with types, inference should find them."""
    spec = BY_NAME[op]
    outputs = spec.outputs if "probs" in values or "Unpermute" not in op else spec.outputs[:-1]
    node = helper.make_node(op, list(values), [a.name for a in outputs], "node", domain=DOMAIN, **attributes)
    elems = {**ELEM_TYPES, "int64": TensorProto.INT64}
    inputs = [
        helper.make_tensor_value_info(name, elems[dtype], shape)
        for name, (dtype, shape) in values.items()
        if name
    ]
    types = {arg.type_var: elems[values[arg.name][0]] for arg in spec.inputs if arg.name in values}
    types.setdefault("I", TensorProto.INT32)
    types.setdefault("TP", types["T"])
    results = [
        helper.make_tensor_value_info(arg.name, types[arg.type_var], [None] * rank)
        if typed
        else helper.make_empty_tensor_value_info(arg.name)
        for arg in outputs
        for rank in [_rank(op, arg, attributes)]
    ]
    graph = helper.make_graph([node], "graph", inputs, results)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _rank(op: str, arg: Any, attributes: dict[str, Any]) -> int:
    if op == "MoeAdamW":
        return 3  # of any rank; of this one in these tests
    padded = attributes.get("drop_pad_mode") and arg.name in ("expanded_x", "grad_expanded_x")
    return 3 if padded else len(arg.axes.split("|")[0].split())


def inferred(op: str, values: Values, **attributes: Any) -> list[tuple[str, list[Any] | None]]:
    """Dtypes and shapes that strict inference gives the outputs."""
    if all(shape is not None for _, shape in values.values()):  # the checker wants ranks of inputs
        onnx.checker.check_model(model_of(op, values, **attributes), full_check=True)
    model = model_of(op, values, typed=False, **attributes)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True, check_type=True)
    result = []
    for value in model.graph.output:
        tensor = value.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]
        dims = [None if str(d).startswith("unk__") or d == "" else d for d in dims]  # onnx's own names
        result.append(
            (TensorProto.DataType.Name(tensor.elem_type), dims if tensor.HasField("shape") else None)
        )
    return result


def test_shapes_of_the_gradients() -> None:
    assert inferred("MoeInitRoutingV2Grad", INIT_GRAD, top_k=2) == [("FLOAT", [6, 16])]
    assert inferred("MoeTokenUnpermuteWithRoutingMapGrad", UN_GRAD) == [
        ("FLOAT", ["N", 16]),
        ("FLOAT", ["T", 8]),
    ]


def test_shapes_of_the_forwards() -> None:
    assert inferred("MoeInitRoutingV2", INIT) == [
        ("FLOAT", [12, 16]),
        ("INT32", [12]),
        ("INT32", [0]),
        ("INT32", [0]),
    ]
    padded = {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 3}
    assert inferred("MoeInitRoutingV2", INIT, **padded, expert_tokens_before_capacity_flag=1) == [
        ("FLOAT", [4, 3, 16]),
        ("INT32", [12]),
        ("INT32", [0]),
        ("INT32", [4]),
    ]
    assert inferred("MoeInitRoutingV2", INIT, active_num=5)[0] == ("FLOAT", [5, 16])
    assert inferred("MoeTokenUnpermuteWithRoutingMap", UN) == [
        ("BFLOAT16", [6, 16]),
        ("INT32", [12]),
        ("INT32", [12]),
        ("FLOAT", [12]),
    ]


def test_shapes_of_the_dispatch_by_map() -> None:
    name = "MoeTokenPermuteWithRoutingMap"
    index = ("INT32", [12])
    assert inferred(name, PERMUTE, num_out_tokens=12) == [("BFLOAT16", [12, 16]), ("FLOAT", [12]), index]
    padded = {"num_out_tokens": 12, "drop_and_pad": 1}
    assert inferred(name, PERMUTE, **padded) == [("BFLOAT16", [12, 16]), ("FLOAT", [12]), index]
    # The map's values tell how many rows there are.
    assert inferred(name, PERMUTE) == [("BFLOAT16", [None, 16]), ("FLOAT", [None]), ("INT32", [None])]
    nobody: Values = {"tokens": ("float32", [0, 16]), "routing_map": ("bool", [0, "E"])}
    assert inferred(name, nobody) == [("FLOAT", [0, 16]), ("FLOAT", [0]), ("INT32", [0])]
    free: Values = {"tokens": ("float32", ["T", 16]), "routing_map": ("bool", ["T", 8])}
    assert inferred(name, free, num_out_tokens=12)[0] == ("FLOAT", [12, 16])
    unknown: Values = {"tokens": ("float32", None), "routing_map": ("bool", None), "probs": ("float32", None)}
    assert inferred(name, unknown, num_out_tokens=12) == [
        ("FLOAT", [12, None]),
        ("FLOAT", [None]),
        index,
    ]


def test_shapes_of_the_gradient_of_the_dispatch_by_map() -> None:
    name = "MoeTokenPermuteWithRoutingMapGrad"
    assert inferred(name, PERMUTE_GRAD) == [("FLOAT", ["T", 16]), ("FLOAT", ["T", 8])]
    assert inferred(name, PERMUTE_GRAD, tokens_num=6)[0] == ("FLOAT", [6, 16])
    mixed: Values = {**PERMUTE_GRAD, "permuted_token_output_grad": ("bfloat16", ["N", 16])}
    assert inferred(name, mixed) == [("BFLOAT16", ["T", 16]), ("FLOAT", ["T", 8])]
    absent: Values = {**PERMUTE_GRAD, "permuted_probs_output_grad": ("float32", [0, 0])}
    assert inferred(name, absent) == [("FLOAT", ["T", 16]), ("FLOAT", [0, 0])]
    # Of two sizes that are not known it may be absent yet: nothing is refused.
    perhaps: Values = {**PERMUTE_GRAD, "permuted_probs_output_grad": ("float32", [None, None])}
    assert inferred(name, perhaps) == [("FLOAT", ["T", 16]), ("FLOAT", [None, None])]
    no_map: Values = {**perhaps, "routing_map": ("bool", [0, 0])}
    sizes = {"tokens_num": 6, "num_experts": 8, "drop_and_pad": 1}
    assert inferred(name, no_map, **sizes) == [("FLOAT", [6, 16]), ("FLOAT", [None, None])]
    maybe_map: Values = {**PERMUTE_GRAD, "routing_map": ("bool", [0, None])}
    assert inferred(name, maybe_map, **sizes) == [("FLOAT", [6, 16]), ("FLOAT", [6, 8])]
    unknown: Values = {key: (dtype, None) for key, (dtype, _) in PERMUTE_GRAD.items()}
    assert inferred(name, unknown) == [("FLOAT", [None, None])] * 2


def test_shapes_of_the_sum_of_squares() -> None:
    assert inferred("MoeSquareSum", {"x": ("float32", [3, None])}) == [("FLOAT", [])]
    assert inferred("MoeSquareSum", {"x": ("float64", None)}) == [("DOUBLE", [])]


def test_shapes_of_the_activation() -> None:
    rows: Values = {"x": ("float16", ["N", 32])}
    assert inferred("MoeSwiGlu", rows) == [("FLOAT16", ["N", 16])]
    assert inferred("MoeSwiGlu", {"x": ("float16", [3, "G"])}) == [("FLOAT16", [3, None])]
    assert inferred("MoeSwiGluGrad", {"grad_y": ("float16", [None, 16]), **rows}) == [("FLOAT16", ["N", 32])]
    untold: Values = {"grad_y": ("float32", [5, 16]), "x": ("float32", None)}
    assert inferred("MoeSwiGluGrad", untold) == [("FLOAT", [5, 32])]


def test_shapes_of_the_grouped_products() -> None:
    assert inferred("MoeGroupedMatmul", GMM) == [("FLOAT", ["N", 32])]
    swapped: Values = {**GMM, "weight": ("float32", [8, 32, 16])}
    assert inferred("MoeGroupedMatmul", swapped, transpose_weight=1) == [("FLOAT", ["N", 32])]
    assert inferred("MoeGroupedMatmulWeightGrad", GMM_GRAD) == [("BFLOAT16", ["E", 16, 32])]
    assert inferred("MoeGroupedMatmulWeightGrad", GMM_GRAD, transpose_weight=1) == [
        ("BFLOAT16", ["E", 32, 16])
    ]
    unknown: Values = {**GMM, "weight": ("float32", None)}
    assert inferred("MoeGroupedMatmul", unknown) == [("FLOAT", ["N", None])]
    untold: Values = {**GMM_GRAD, "group_sizes": ("int32", None), "x": ("bfloat16", None)}
    assert inferred("MoeGroupedMatmulWeightGrad", untold) == [("BFLOAT16", [None, None, 32])]


def test_shapes_of_an_update() -> None:
    """What any of the tensors says of the shape; nothing where nobody knows even its rank."""
    assert inferred("MoeAdamW", ADAM_W) == [("FLOAT", [4, 16, 8])] * 3
    unknown: Values = dict.fromkeys(ADAM_W, ("float64", None))
    assert inferred("MoeAdamW", unknown) == [("DOUBLE", None)] * 3
    one: Values = {**unknown, "exp_avg_sq": ("float64", ["n", 3])}
    assert inferred("MoeAdamW", one) == [("DOUBLE", ["n", 3])] * 3
    scalar: Values = {**unknown, "gradient": ("float64", [])}
    assert inferred("MoeAdamW", scalar) == [("DOUBLE", [])] * 3


def test_unknown_sizes_and_ranks_stay_unknown() -> None:
    values: Values = {"grad_expanded_x": ("float16", None), "expanded_row_idx": ("int32", ["N"])}
    assert inferred("MoeInitRoutingV2Grad", values, top_k=2) == [("FLOAT16", [None, None])]
    unknown: Values = {name: (dtype, None) for name, (dtype, _) in UN_GRAD.items()}
    rows, probs = inferred("MoeTokenUnpermuteWithRoutingMapGrad", unknown)
    assert (rows, probs) == (("FLOAT", [None, None]), ("FLOAT", None))


def test_optional_inputs_may_be_left_out_or_empty() -> None:
    short = dict(list(UN_GRAD.items())[:3])
    assert inferred("MoeTokenUnpermuteWithRoutingMapGrad", short)[0] == ("FLOAT", ["N", 16])
    empty = {**short, "routing_map": ("bool", [0, 0]), "permuted_tokens": ("float32", [0, 0])}
    empty["probs"] = ("float32", [0, 0])
    got = inferred("MoeTokenUnpermuteWithRoutingMapGrad", empty)
    assert got == [("FLOAT", ["N", 16]), ("FLOAT", [0, 0])]


def test_one_expert_per_token_keeps_the_size() -> None:
    values: Values = {"grad_expanded_x": ("float32", ["N", 4]), "expanded_row_idx": ("int32", ["N"])}
    assert inferred("MoeInitRoutingV2Grad", values, top_k=1) == [("FLOAT", ["N", 4])]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_all_float_types_are_accepted(dtype: str) -> None:
    values: Values = {**INIT_GRAD, "grad_expanded_x": (dtype, ["A", 16])}
    assert inferred("MoeInitRoutingV2Grad", values, top_k=2)[0][1] == [6, 16]


REFUSED = [
    ("misspelt attribute", "MoeInitRoutingV2Grad", INIT_GRAD, {"topk": 2}, "topk"),
    ("unknown attribute", "MoeInitRoutingV2Grad", INIT_GRAD, {"top_k": 2, "foo": 1}, "foo"),
    ("missing attribute", "MoeInitRoutingV2Grad", INIT_GRAD, {}, "top_k"),
    ("float attribute", "MoeInitRoutingV2Grad", INIT_GRAD, {"top_k": 2.0}, "top_k"),
    ("top_k 0", "MoeInitRoutingV2Grad", INIT_GRAD, {"top_k": 0}, "got 0"),
    ("mode 2", "MoeInitRoutingV2Grad", INIT_GRAD, {"top_k": 2, "drop_pad_mode": 2}, "got 2"),
    ("negative active_num", "MoeInitRoutingV2Grad", INIT_GRAD, {"top_k": 2, "active_num": -1}, "got -1"),
    ("indivisible", "MoeInitRoutingV2Grad", INIT_GRAD, {"top_k": 5}, "12 and 5"),
    ("2-D when padded", "MoeInitRoutingV2Grad", INIT_GRAD, {"top_k": 2, "drop_pad_mode": 1}, "3-D"),
    (
        "int64 index",
        "MoeInitRoutingV2Grad",
        {**INIT_GRAD, "expanded_row_idx": ("int64", [12])},
        {"top_k": 2},
        "int64",
    ),
    (
        "3-D rows",
        "MoeInitRoutingV2Grad",
        {**INIT_GRAD, "grad_expanded_x": ("float32", [2, 6, 16])},
        {"top_k": 2},
        "got 3-D",
    ),
    ("drop_and_pad 2", "MoeTokenUnpermuteWithRoutingMapGrad", UN_GRAD, {"drop_and_pad": 2}, "got 2"),
    (
        "map of floats",
        "MoeTokenUnpermuteWithRoutingMapGrad",
        {**UN_GRAD, "routing_map": ("float32", ["T", 8])},
        {},
        "routing_map",
    ),
    (
        "mixed rows",
        "MoeTokenUnpermuteWithRoutingMapGrad",
        {**UN_GRAD, "permuted_tokens": ("float16", ["N", 16])},
        {},
        "float16|FLOAT16|T",
    ),
    (
        "mixed probs",
        "MoeTokenUnpermuteWithRoutingMapGrad",
        {**UN_GRAD, "probs": ("float16", ["T", 8])},
        {},
        "probs",
    ),
    (
        "hidden sizes",
        "MoeTokenUnpermuteWithRoutingMapGrad",
        {**UN_GRAD, "permuted_tokens": ("float32", ["N", 17])},
        {},
        "17",
    ),
    (
        "expert counts",
        "MoeTokenUnpermuteWithRoutingMapGrad",
        {**UN_GRAD, "probs": ("float32", ["T", 9])},
        {},
        "9",
    ),
    ("capacity", "MoeInitRoutingV2", INIT, {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 7}, "7"),
    ("transpose_weight 2", "MoeGroupedMatmul", GMM, {"transpose_weight": 2}, "got 2"),
    ("misspelt transpose", "MoeGroupedMatmul", GMM, {"transpose_weights": 1}, "transpose_weight"),
    ("float transpose", "MoeGroupedMatmul", GMM, {"transpose_weight": 1.0}, "transpose_weight"),
    ("hidden sizes of a weight", "MoeGroupedMatmul", GMM, {"transpose_weight": 1}, "axis H.*16.*32"),
    ("experts of a weight", "MoeGroupedMatmul", {**GMM, "group_sizes": ("int32", [9])}, {}, "axis E.*8.*9"),
    ("2-D weight", "MoeGroupedMatmul", {**GMM, "weight": ("float32", [16, 32])}, {}, "3-D"),
    (
        "mixed weight",
        "MoeGroupedMatmul",
        {**GMM, "weight": ("float16", [8, 16, 32])},
        {},
        "float16|FLOAT16|T",
    ),
    ("int64 sizes", "MoeGroupedMatmul", {**GMM, "group_sizes": ("int64", [8])}, {}, "int64"),
    (
        "rows without experts",
        "MoeGroupedMatmulWeightGrad",
        {**GMM_GRAD, "group_sizes": ("int32", [0])},
        {},
        "axis N.*got 12",
    ),
    (
        "rows of a gradient",
        "MoeGroupedMatmulWeightGrad",
        {**GMM_GRAD, "grad_y": ("bfloat16", [13, 32])},
        {},
        "axis N.*12.*13",
    ),
    ("N of tokens", "MoeTokenPermuteWithRoutingMap", PERMUTE, {"num_out_tokens": 13}, "13 and 6"),
    (
        "N of experts",
        "MoeTokenPermuteWithRoutingMap",
        PERMUTE,
        {"num_out_tokens": 6, "drop_and_pad": 1},
        "6 and 4",
    ),
    ("more than T * E", "MoeTokenPermuteWithRoutingMap", PERMUTE, {"num_out_tokens": 30}, "24, got 30"),
    ("no capacity", "MoeTokenPermuteWithRoutingMap", PERMUTE, {"drop_and_pad": 1}, "num_out_tokens"),
    (
        "probs of other tokens",
        "MoeTokenPermuteWithRoutingMap",
        {**PERMUTE, "probs": ("float32", [5, 4])},
        {},
        "axis T.*6.*5",
    ),
    (
        "mixed probs of a dispatch",
        "MoeTokenPermuteWithRoutingMap",
        {**PERMUTE, "probs": ("float16", [6, 4])},
        {},
        "probs",
    ),
    (
        "a map is needed",
        "MoeTokenPermuteWithRoutingMapGrad",
        {**PERMUTE_GRAD, "routing_map": ("bool", [0, 0])},
        {"tokens_num": 6, "num_experts": 8},
        "routing_map.*missing",
    ),
    (
        "tokens are needed",
        "MoeTokenPermuteWithRoutingMapGrad",
        {
            **PERMUTE_GRAD,
            "permuted_probs_output_grad": ("float32", [0, 0]),
            "routing_map": ("bool", [0, 0]),
        },
        {},
        "Give tokens_num",
    ),
    (
        "tokens_num beside a map",
        "MoeTokenPermuteWithRoutingMapGrad",
        {**PERMUTE_GRAD, "routing_map": ("bool", [4, 8])},
        {"tokens_num": 5},
        "axis T.*4.*5",
    ),
    (
        "weights of a gradient",
        "MoeTokenPermuteWithRoutingMapGrad",
        {**PERMUTE_GRAD, "permuted_probs_output_grad": ("float32", ["N", 1])},
        {},
        "1-D",
    ),
    ("16-bit update", "MoeAdamW", {**ADAM_W, "parameter": ("float16", ["E", 16, 8])}, {}, "float16|FLOAT16"),
    ("rank of a moment", "MoeAdamW", {**ADAM_W, "exp_avg": ("float32", [512])}, {}, "exp_avg.*1-D"),
    ("size of a gradient", "MoeAdamW", {**ADAM_W, "gradient": ("float32", [5, 16, 8])}, {}, "axis 0.*5.*4"),
    ("six factors", "MoeAdamW", {**ADAM_W, "factors": ("float32", [6])}, {}, "axis S.*7.*6"),
    ("an attribute", "MoeAdamW", ADAM_W, {"beta1": 1}, "beta1"),
    ("no restore_shape", "MoeTokenUnpermuteWithRoutingMap", dict(list(UN.items())[:2]), {}, "restore_shape"),
]


@pytest.mark.parametrize(
    ("op", "values", "attributes", "match"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_wrong_models_are_refused(op: str, values: Values, attributes: dict[str, Any], match: str) -> None:
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError), match=match):
        onnx.checker.check_model(model_of(op, values, **attributes), full_check=True)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_schemas_are_documented(spec: Any) -> None:
    schema = onnx.defs.get_schema(spec.name, 1, DOMAIN)
    assert spec.formula in schema.doc
    assert [p.name for p in schema.inputs] == [a.name for a in spec.inputs]
    assert all(p.description for p in (*schema.inputs, *schema.outputs))
    assert set(schema.attributes) == {a.name for a in spec.attributes}
    differentiable = {p.name for p in schema.inputs if p.differentiation_category.name == "Differentiable"}
    assert differentiable == {a.name for a in spec.inputs if a.differentiable}


def test_operator_names_are_unique_over_all_domains() -> None:
    """onnx.reference looks operators up by name alone when it is imported."""
    foreign = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain != DOMAIN}
    assert not foreign & set(BY_NAME)
    assert all(name.startswith("Moe") for name in BY_NAME)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_names_in_a_body_are_unique(spec: Any) -> None:
    """onnx's checker does not look into subgraphs of functions; a name twice is a wrong value."""
    seen: list[str] = []

    def walk(nodes: Any) -> None:
        for node in nodes:
            seen.extend(node.output)
            for attr in node.attribute:
                walk(attr.g.node)

    function = moe_onnx.function_body(spec.name)
    seen.extend(function.input)
    walk(function.node)
    assert len(seen) == len(set(seen)), sorted(name for name in set(seen) if seen.count(name) > 1)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_bodies_keep_to_what_is_safe(spec: Any) -> None:
    """Standard ops only, and not ScatterND: its additions get lost between threads."""
    ops: set[tuple[str, str]] = set()

    def walk(nodes: Any) -> None:
        for node in nodes:
            ops.add((node.domain, node.op_type))
            for attr in node.attribute:
                walk(attr.g.node)

    walk(moe_onnx.function_body(spec.name).node)
    assert {domain for domain, _ in ops} == {""}
    assert not {op for _, op in ops} & {"ScatterND", "GatherND"}


def test_function_body_says_what_it_cannot_do() -> None:
    with pytest.raises(moe_onnx.OptionError, match="MoeInitRoutingV2Grad"):
        moe_onnx.function_body("MoeInitRouting")
    with pytest.raises(moe_onnx.ModelError, match="opset >= 18, the model imports 17"):
        moe_onnx.function_body("MoeInitRoutingV2Grad", 17)


def test_a_process_with_schemas_ends() -> None:
    """A Python callback left in onnx's registry made onnx 1.19 wait for ever at exit."""
    subprocess.run([sys.executable, "-c", "import moe_onnx"], check=True, timeout=60)
