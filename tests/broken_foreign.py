"""Models as exporters write them, small, and what they lose. Family ``foreign``."""

from __future__ import annotations

import onnx
from broken_hazards import MOE, edited
from broken_models import Mutation, parse

# As torch.onnx.export(dynamo=True) writes two norms: the module of a node is in its metadata.
NORMS = """
    norms (float[n, 4] x) => (float[n, 4] y)
    <float[4] model__norm1__weight = {1, 1, 1, 1}, float[4] model__norm2__weight = {1, 1, 1, 1},
     float[4, 4] model__embed__weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
    {
        [mul_1] a = Mul (model__norm1__weight, x)
        [head] b = MatMul (a, model__embed__weight)
        [mul_2] y = Mul (model__norm2__weight, b)
    }
"""
SCOPES = {
    "mul_1": "['', 'model', 'model.norm1', 'mul_1']",
    "head": "['', 'lm_head', 'linear']",
    "mul_2": "['', 'model', 'model.norm2', 'mul_2']",
}
EXPERTS = """
    experts (float[n, 4] x) => (float[n, 4] y)
    <float[4, 4] layers__0__mlp__gate__weight = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     float[4, 2] layers__0__mlp__experts__0__w1__weight = {1, 1, 1, 1, 1, 1, 1, 1},
     float[4, 2] layers__0__mlp__experts__1__w1__weight = {1, 1, 1, 1, 1, 1, 1, 1},
     float[4, 2] layers__0__mlp__experts__2__w1__weight = {1, 1, 1, 1, 1, 1, 1, 1},
     float[4, 2] layers__0__mlp__experts__3__w1__weight = {1, 1, 1, 1, 1, 1, 1, 1}>
    {
        g = MatMul (x, layers__0__mlp__gate__weight)
        a = MatMul (x, layers__0__mlp__experts__0__w1__weight)
        b = MatMul (x, layers__0__mlp__experts__1__w1__weight)
        c = MatMul (x, layers__0__mlp__experts__2__w1__weight)
        d = MatMul (x, layers__0__mlp__experts__3__w1__weight)
        y = Identity (a)
    }
"""
# As dynamo=False writes a loop over the experts that were hit.
HITS = """
    hits (bool[4] hit, bool[4, n] both) => (int64[a, b] first, int64[c, d] second)
    {
        found = NonZero (hit)
        turns = Transpose <perm = [1, 0]> (found)
        places = NonZero (both)
        pairs = Transpose <perm = [1, 0]> (places)
        [columns] first, second = Split <axis = 1, num_outputs = 2> (pairs)
    }
"""
BATCHED = """
    batched (float[n, 4] x, int64[n, 2] chosen, float[8, 4, 6] weights) => (float[slots, 4, 6] w)
    <int64[1] flat = {-1}, int64 third = {3}, int64 axis = {0}, int64[2] flat2 = {-1, 1}>
    {
        ids = Reshape (chosen, flat)
        column = Reshape (chosen, flat2)
        [expert] w = Gather <axis = 0> (weights, third)
    }
"""
ROUTED = """
    routed (float[t, 4] x, float[t, 4] scores, bool[t, 4] map) => (float[t, 4] y)
    <int64[1] k = {2}>
    {
        best, chosen = TopK <axis = -1> (scores, k)
        [sort] ids, order = TopK <axis = -1, largest = 0> (chosen, k)
        experts = Cast <to = 6> (ids)
        [dispatch] rows, row_idx, counts, before = ascend.moe.MoeInitRoutingV2 <active_num = 0,
            expert_capacity = 0, expert_num = 4, drop_pad_mode = 0, expert_tokens_count_or_cumsum_flag = 1,
            expert_tokens_before_capacity_flag = 0> (x, experts)
        [combine] y, a, b, c = ascend.moe.MoeTokenUnpermuteWithRoutingMap <drop_and_pad = 0>
            (rows, row_idx, map, scores)
    }
"""
SIZES = """
    sizes (float[n, 4] x) => (float[a, b] y, float[c, 4] z, float[d, 4] r)
    <int64[2] shape = {-1, 8}, int64[2] parts = {2, 2}>
    {
        [flat] y = Reshape (x, shape)
        [cut] z, r = Split <axis = 1> (x, parts)
    }
"""


def dotted(text: str) -> onnx.ModelProto:
    """A model from text in which two underscores stand for a dot: the parser knows no `layers.0`."""
    model = parse(text)
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("__", ".")
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    return model


def norms() -> onnx.ModelProto:
    model = dotted(NORMS)
    model.producer_name = "pytorch"
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=SCOPES[node.name])
    return model


def merge(model: onnx.ModelProto) -> None:
    """The second norm takes the first one's weight."""
    model.graph.node[2].input[0] = "model.norm1.weight"
    del model.graph.initializer[1]


def merge_by_identity(model: onnx.ModelProto) -> None:
    """As dynamo=False does it."""
    del model.graph.initializer[1]
    node = onnx.helper.make_node(
        "Identity", ["model.norm1.weight"], ["model.norm2.weight"], name="Identity_29"
    )
    for other in model.graph.node:
        del other.metadata_props[:]
    model.graph.node.insert(0, node)


def merge_zeros(model: onnx.ModelProto) -> None:
    """A matrix of one value throughout, used by two modules. Of other values, it would be tied."""
    look_up = onnx.helper.make_node("Gather", ["model.embed.weight", "ids"], ["looked_up"], name="look_up")
    look_up.metadata_props.add(
        key="pkg.torch.onnx.name_scopes", value="['', 'model', 'model.embed', 'gather']"
    )
    model.graph.node.append(look_up)
    model.graph.input.append(onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"]))
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("looked_up", onnx.TensorProto.FLOAT, ["n", 4])
    )
    model.graph.initializer[2].CopyFrom(
        onnx.helper.make_tensor("model.embed.weight", onnx.TensorProto.FLOAT, [4, 4], [0.0] * 16)
    )


def rename(model: onnx.ModelProto, name: str) -> None:
    model.graph.initializer[2].name = model.graph.node[1].input[1] = name


def lose(model: onnx.ModelProto, *experts: int) -> None:
    names = [f"layers.0.mlp.experts.{expert}.w1.weight" for expert in experts]
    for tensor in [t for t in model.graph.initializer if t.name in names]:
        model.graph.initializer.remove(tensor)
    for node in [n for n in model.graph.node if set(n.input) & set(names)]:
        model.graph.node.remove(node)


def lose_by_path(model: onnx.ModelProto) -> None:
    """Weights have lost their names too, as dynamo=False does: only the nodes' paths tell."""
    lose(model, 2)
    for number, tensor in enumerate(model.graph.initializer):
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                if name == tensor.name:
                    node.input[place] = f"onnx::MatMul_{number}"
                    if ".experts." in name:
                        expert = name.split(".experts.")[1].split(".")[0]
                        node.name = f"/layers.0/mlp/experts.{expert}/w1/MatMul"
        tensor.name = f"onnx::MatMul_{number}"


MUTATIONS = [
    Mutation("MO701", "norms merged", norms, merge),
    Mutation("MO701", "norms merged by Identity", norms, merge_by_identity),
    Mutation("MO701", "zeros merged", norms, merge_zeros),
    Mutation("MO702", "by dynamo", norms, lambda model: rename(model, "val_107")),
    Mutation("MO702", "by a trace", norms, lambda model: rename(model, "onnx::MatMul_489")),
    Mutation("MO703", "in the middle", lambda: dotted(EXPERTS), lambda model: lose(model, 1)),
    Mutation("MO703", "the last ones", lambda: dotted(EXPERTS), lambda model: lose(model, 2, 3)),
    Mutation("MO703", "known by paths only", lambda: dotted(EXPERTS), lose_by_path),
    edited(
        "MO704",
        "turns",
        HITS,
        "[columns] first, second = Split <axis = 1, num_outputs = 2> (pairs)",
        "[loop] first, second = Split <axis = 0, num_outputs = 2> (turns)",
    ),
    edited(
        "MO704",
        "turns not transposed",
        HITS,
        "[columns] first, second = Split <axis = 1, num_outputs = 2> (pairs)",
        "[loop] first, second = Split <axis = 1, num_outputs = 2> (found)",
    ),
    edited("MO705", "Gather", BATCHED, "(weights, third)", "(weights, ids)"),
    edited(
        "MO705",
        "GatherND",
        BATCHED,
        "[expert] w = Gather <axis = 0> (weights, third)",
        "[expert] w = GatherND (weights, column)",
    ),
    edited("MO706", "order of scores", ROUTED, "Cast <to = 6> (ids)", "Cast <to = 6> (chosen)", MOE),
    edited("MO706", "descending", ROUTED, "axis = -1, largest = 0", "axis = -1, largest = 1", MOE),
    edited("MO707", "fewer than scores", ROUTED, "expert_num = 4", "expert_num = 3", MOE),
    edited("MO708", "Reshape", SIZES, "{-1, 8}", "{3, 8}"),
    edited("MO708", "Split", SIZES, "Split <axis = 1> (x, parts)", "Split <axis = 0> (x, parts)"),
]
