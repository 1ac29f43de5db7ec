"""Training graphs and manifests, broken for one reason each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from broken_models import Mutation, copy_of, grad_model, step_model, training_graph
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import moe_onnx
from moe_onnx.build.manifest import METADATA_KEY
from moe_onnx.build.training_graph import TrainingGraph

Change = Callable[[dict[str, Any]], None]
Q0, O0 = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")
Q1, EMBED = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"


@cache
def layer_graph() -> TrainingGraph:
    """One layer with three experts: small, and with every part that a layer has."""
    config = moe_onnx.MoeLayerConfig(
        hidden_size=4, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=4, expert_activation="relu"
    )
    return moe_onnx.build_training_graph(config, assembly="step+grad+apply+eval")


def layer_step() -> ModelProto:
    return layer_graph().models["step"]


def layer_grad() -> ModelProto:
    return layer_graph().models["grad"]


def layer_apply() -> ModelProto:
    return layer_graph().models["apply"]


def lm_apply() -> ModelProto:
    return training_graph().models["apply"]


def layer_eval() -> ModelProto:
    return layer_graph().models["eval"]


@cache
def biased_layer() -> TrainingGraph:
    """A layer whose router has a selection bias, which is not trained."""
    config = moe_onnx.MoeLayerConfig(
        hidden_size=4,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        expert_activation="relu",
        router_selection_bias=True,
        router_bias_update_rate=0.01,
    )
    return moe_onnx.build_training_graph(config)


def biased_step() -> ModelProto:
    return biased_layer().model


# --- Tools ----------------------------------------------------------------------------------------


def manifest_of(model: ModelProto) -> Any:
    return next(entry for entry in model.metadata_props if entry.key == METADATA_KEY)


def with_text(change: Callable[[str], str]) -> Callable[[ModelProto], None]:
    """Break the manifest's text."""

    def break_it(model: ModelProto) -> None:
        entry = manifest_of(model)
        entry.value = change(entry.value)

    return break_it


def with_manifest(change: Change) -> Callable[[ModelProto], None]:
    """Break the manifest's data."""

    def change_text(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return with_text(change_text)


def set_at(*path: Any, to: Any) -> Callable[[ModelProto], None]:
    """Set one entry of the manifest."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return with_manifest(change)


def parameter(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in data["parameters"] if one["name"] == name)


def both(*changes: Callable[[ModelProto], Any]) -> Callable[[ModelProto], None]:
    def break_it(model: ModelProto) -> None:
        for change in changes:
            change(model)

    return break_it


def users(model: ModelProto, name: str) -> Iterator[NodeProto]:
    return (node for node in model.graph.node if name in node.input)


def maker(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def rewire(node: NodeProto, old: str, new: str) -> None:
    node.input[list(node.input).index(old)] = new


def first_user(model: ModelProto, name: str, op: str = "") -> NodeProto:
    return next(node for node in users(model, name) if op in ("", node.op_type))


def rename(old: str, new: str) -> Callable[[ModelProto], None]:
    """Another name for a value wherever it stands: what follows it does not notice."""

    def break_it(model: ModelProto) -> None:
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            value.name = new if value.name == old else value.name

    return break_it


def swap(*names: str) -> Callable[[ModelProto], None]:
    """Two values change places in everything that makes or reads them, but not in the interface."""
    a, b = names
    other = {a: b, b: a}

    def break_it(model: ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = [other.get(name, name) for name in node.input]
            node.output[:] = [other.get(name, name) for name in node.output]

    return break_it


def make(model: ModelProto, name: str, op: str, *inputs: str, **attributes: Any) -> None:
    """Make an output by another node; what made it goes on under another name."""
    old = maker(model, name)
    position = list(model.graph.node).index(old)
    hidden = f"{name}.before"
    for node in model.graph.node:
        node.input[:] = [hidden if one == name else one for one in node.input]
    old.output[:] = [hidden if one == name else one for one in old.output]
    inputs = tuple(hidden if one == name else one for one in inputs)
    model.graph.node.insert(position + 1, helper.make_node(op, list(inputs), [name], **attributes))


def remake(name: str, op: str, *inputs: str, **attributes: Any) -> Callable[[ModelProto], None]:
    return lambda model: make(model, name, op, *inputs, **attributes)


def add_constant(model: ModelProto, name: str, shape: tuple[int, ...]) -> str:
    values = np.full(shape, 0.5, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def fold(name: str, *shape: int) -> Callable[[ModelProto], None]:
    """The forward pass reads a constant instead of a parameter."""

    def break_it(model: ModelProto) -> None:
        add_constant(model, "folded", shape)
        rewire(first_user(model, name), name, "folded")

    return break_it


def read_instead(name: str, other: str) -> Callable[[ModelProto], None]:
    return lambda model: rewire(first_user(model, name), name, other)


def zeros(name: str, *shape: int) -> Callable[[ModelProto], None]:
    """A gradient is zeros, whatever the batch."""

    def break_it(model: ModelProto) -> None:
        add_constant(model, "nothing", shape)
        make(model, name, "Identity", "nothing")

    return break_it


def drop_output(name: str) -> Callable[[ModelProto], None]:
    def break_it(model: ModelProto) -> None:
        kept = [value for value in model.graph.output if value.name != name]
        del model.graph.output[:]
        model.graph.output.extend(kept)
        rename(name, f"{name}.gone")(model)

    return break_it


def freeze(model: ModelProto) -> None:
    """The router becomes an initializer, as exports do that take weights for constants."""
    kept = [value for value in model.graph.input if value.name != "gate.weight"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    add_constant(model, "gate.weight", (3, 4))


def value_of(values: Any, name: str) -> Any:
    return next(value for value in values if value.name == name)


def output_type(name: str, elem_type: int, *dims: int) -> Callable[[ModelProto], None]:
    """Cast or reshape an output, and declare it so."""

    def break_it(model: ModelProto) -> None:
        if elem_type != TensorProto.FLOAT:
            make(model, name, "Cast", name, to=elem_type)
        else:
            shape = numpy_helper.from_array(np.array(dims, np.int64), "new_shape")
            model.graph.initializer.append(shape)
            make(model, name, "Reshape", name, "new_shape")
        value_of(model.graph.output, name).type.CopyFrom(helper.make_tensor_type_proto(elem_type, dims))

    return break_it


def extra_input(model: ModelProto) -> None:
    make(model, "loss", "Add", "loss", "loss_scale")
    model.graph.input.append(helper.make_tensor_value_info("loss_scale", TensorProto.FLOAT, []))


def extra_output(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["loss"], ["reward"]))
    model.graph.output.append(helper.make_tensor_value_info("reward", TensorProto.FLOAT, []))


def swap_outputs(model: ModelProto) -> None:
    values = list(model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend([values[1], values[0], *values[2:]])


def fix_tokens(model: ModelProto) -> None:
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "tokens":
                dim.dim_value = 6


def other_graph(model: ModelProto) -> ModelProto:
    body = "g (float[n] x) => (float[n] y) { y = Relu (x) }"
    other = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{body}')
    other.metadata_props.append(manifest_of(model))
    return other


def skip_operand(name: str, op: str, position: int) -> Callable[[ModelProto], None]:
    """What is made of ``name`` by ``op`` is left out: its user reads the other operand."""

    def break_it(model: ModelProto) -> None:
        node = maker(model, name)
        assert node.op_type == op, node.op_type
        node.op_type = "Identity"
        kept = node.input[position]
        del node.input[:]
        node.input.append(kept)

    return break_it


def one_gradient(model: ModelProto) -> None:
    """Two parameters are moved by the gradient of one."""
    a, b = (maker(model, f"{name}.exp_avg.updated").input[1] for name in (Q0, Q1))
    gradients = [maker(model, part).input[0] for part in (a, b)]
    for node in users(model, gradients[0]):
        node.input[:] = [gradients[1] if name == gradients[0] else name for name in node.input]


def map_dispatch() -> list[Callable[[ModelProto], None]]:
    """Config and manifest say that tokens are sent by the routing map."""
    return [
        set_at("config", "dispatch", to="routing_map"),
        set_at("dispatch", "kind", to="routing_map"),
    ]


def ignore(scalar: str) -> Callable[[ModelProto], None]:
    """An update takes a constant where it should take a scalar."""

    def break_it(model: ModelProto) -> None:
        one = numpy_helper.from_array(np.array(1, np.float32), "always_one")
        steps = numpy_helper.from_array(np.array(1, np.int64), "always_first")
        model.graph.initializer.extend([one, steps])
        for node in users(model, scalar):
            rewire(node, scalar, "always_first" if scalar == "step" else "always_one")

    return break_it


def weight_split(model: ModelProto, name: str) -> NodeProto:
    return first_user(model, name, "Split")


def lose_branch(model: ModelProto) -> None:
    """The last join of the forward pass takes expert 1 twice and expert 2 not at all."""
    join = next(n for n in model.graph.node if n.op_type == "Concat" and len(n.input) == 3)
    join.input[2] = join.input[1]


def join_gradient(model: ModelProto) -> NodeProto:
    return maker(model, "experts.down_proj.grad")


def constant_expert(model: ModelProto) -> None:
    """The gradient of expert 1 is a constant."""
    add_constant(model, "no_gradient", (1, 4, 4))
    join_gradient(model).input[1] = "no_gradient"


def double_expert(model: ModelProto) -> None:
    join = join_gradient(model)
    join.input[1] = join.input[2]


def cross_branches(model: ModelProto) -> None:
    """Branch 0 reads the weights of expert 1, and branch 1 those of expert 0."""
    parts = [first_user(model, part).output[0] for part in weight_split(model, "experts.up_proj").output[:2]]
    swap_readers(model, *parts)


def readers(a: str, b: str) -> Callable[[ModelProto], None]:
    """What reads two values reads the other one."""
    return lambda model: swap_readers(model, a, b)


def swap_readers(model: ModelProto, a: str, b: str) -> None:
    other = {a: b, b: a}
    for node in model.graph.node:
        node.input[:] = [other.get(name, name) for name in node.input]


def join_backwards(model: ModelProto) -> None:
    join = join_gradient(model)
    join.input[:] = list(join.input)[::-1]


def without_grad_operator(model: ModelProto) -> None:
    """The gradient of the dispatch is a mean instead of the operator."""
    node = next(n for n in model.graph.node if n.op_type == "MoeInitRoutingV2Grad")
    rows, output = node.input[0], node.output[0]
    position = list(model.graph.node).index(node)
    model.graph.node.remove(node)
    new = [
        helper.make_node("ReduceSum", [rows, "axis_0"], ["mean_row"], keepdims=1),
        helper.make_node("Shape", ["hidden_states"], ["shape_of_tokens"]),
        helper.make_node("Expand", ["mean_row", "shape_of_tokens"], [output]),
    ]
    for number, made in enumerate(new):
        model.graph.node.insert(position + number, made)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "axis_0"))


def attribute(op: str, name: str, value: int) -> Callable[[ModelProto], None]:
    def break_it(model: ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == op)
        next(a for a in node.attribute if a.name == name).i = value

    return break_it


def without_weights(model: ModelProto) -> None:
    """The combine only adds: the router's weights are nowhere."""
    empty = numpy_helper.from_array(np.empty((0, 0), np.float32), "no_probs")
    model.graph.initializer.append(empty)
    node = next(n for n in model.graph.node if n.op_type == "MoeTokenUnpermuteWithRoutingMap")
    node.input[3] = "no_probs"


def out_of_norm(model: ModelProto) -> None:
    total = next(
        n for n in model.graph.node if n.op_type == "Sum" and n.output[0] in maker(model, "grad_norm").input
    )
    del total.input[1]


def untie_head(model: ModelProto) -> None:
    """The output projection is a copy of the embedding, as exports make it."""
    add_constant(model, "lm_head", (19, 8))
    for node in users(model, EMBED):
        if node.op_type == "Gemm":
            rewire(node, EMBED, "lm_head")


def untie_lookup(model: ModelProto) -> None:
    add_constant(model, "table", (19, 8))
    rewire(first_user(model, EMBED, "Gather"), EMBED, "table")


def without_auxiliary_loss(model: ModelProto) -> None:
    """The loss is that of the output alone; the auxiliary one is still an output."""
    total = maker(model, "loss")
    assert total.op_type == "Sum" and total.input[0] == "mse_loss"
    del total.input[1:]


def norm_twice(model: ModelProto) -> None:
    """The last norm reads the weight of the first one as well."""
    node = first_user(model, "model.norm.weight", "Mul")
    first = "model.layers.0.input_layernorm.weight"
    scaled = helper.make_node("Mul", [node.input[0], first], ["scaled_twice"])
    node.input[0] = "scaled_twice"
    model.graph.node.insert(list(model.graph.node).index(node), scaled)


def half_tied_gradient(model: ModelProto) -> None:
    skip_operand(f"{EMBED}.grad", "Add", 0)(model)


def other_graph_in_file(path: Path) -> Path:
    """manifest.json is right, but the file of the graph 'step' holds the graph 'grad'."""
    layer_graph().save(path.parent)
    (path.parent / "step.onnx").write_bytes(layer_grad().SerializeToString())
    return path.parent / "grad.onnx"


def beside(change: Change) -> Callable[[Path], Path]:
    """A folder saved as a whole, whose manifest.json was changed afterwards."""

    def break_it(path: Path) -> Path:
        folder = layer_graph().save(path.parent)
        data = json.loads((folder / "manifest.json").read_text())
        change(data)
        (folder / "manifest.json").write_text(json.dumps(data))
        return folder / "step.onnx"

    return break_it


def without_file(path: Path) -> Path:
    folder = layer_graph().save(path.parent)
    (folder / "grad.onnx").unlink()
    return folder / "step.onnx"


def cut_file(path: Path) -> Path:
    folder = layer_graph().save(path.parent)
    (folder / "grad.onnx").write_bytes((folder / "grad.onnx").read_bytes()[:999])
    return folder / "step.onnx"


def stripped(path: Path) -> Path:
    folder = layer_graph().save(path.parent)
    model = copy_of(layer_step())
    del model.metadata_props[:]
    (folder / "step.onnx").write_bytes(model.SerializeToString())
    return folder / "step.onnx"


# --- Changes of the manifest ----------------------------------------------------------------------


def share_gradient(data: dict[str, Any]) -> None:
    one, two = data["parameters"][1:3]
    two["gradient"] = one["gradient"]


def share_state(data: dict[str, Any]) -> None:
    one, two = data["parameters"][1:3]
    two["state"] = one["state"]


def no_update(data: dict[str, Any]) -> None:
    outputs = data["graphs"]["step"]["outputs"]
    outputs.remove(value_named(outputs, "gate.weight.updated"))


def other_update_shape(data: dict[str, Any]) -> None:
    value_named(data["graphs"]["apply"]["outputs"], "gate.weight.updated")["shape"] = [4, 3]


def value_named(values: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(value for value in values if value["name"] == name)


def without_second_moment(data: dict[str, Any]) -> None:
    """A parameter has no exp_avg_sq, in none of the graphs."""
    gone = parameter(data, "gate.weight")["state"].pop("exp_avg_sq")
    for graph in data["graphs"].values():
        for side in ("inputs", "outputs"):
            graph[side] = [one for one in graph[side] if one["name"] not in gone.values()]


def without_optimizer(data: dict[str, Any]) -> None:
    data["optimizer"] = None


def no_loss(data: dict[str, Any]) -> None:
    value_named(data["graphs"]["eval"]["outputs"], "loss")["role"] = "output"


def loss_of_each_token(data: dict[str, Any]) -> None:
    value_named(data["graphs"]["eval"]["outputs"], "loss")["shape"] = ["tokens"]


def expert_less(data: dict[str, Any]) -> None:
    """The stack of a parameter has an expert less than the config, in the manifest and in its graphs."""
    for one in data["parameters"]:
        if one["name"] == "experts.down_proj":
            one["shape"][0] = 2


def add_manifest(model: ModelProto) -> None:
    model.metadata_props.add(key=METADATA_KEY, value="{}")


def text_of(name: str, new: str) -> Callable[[ModelProto], None]:
    """Another name for a parameter and its companions, consistently in graph and manifest."""

    def break_it(model: ModelProto) -> None:
        with_text(lambda text: text.replace(f'"{name}', f'"{new}'))(model)
        for value in (*model.graph.input, *model.graph.output):
            if value.name.startswith(name):
                rename(value.name, value.name.replace(name, new))(model)

    return break_it


def case(
    code: str,
    name: str,
    base: Callable[[], ModelProto],
    break_it: Callable[[Any], Any],
    *also: str,
) -> Mutation:
    return Mutation(code, name, base, break_it, also=also)


def on_disk(code: str, name: str, break_it: Callable[[Path], Path]) -> Mutation:
    return Mutation(code, name, layer_eval, break_it, on_disk=True)


_MANIFEST = [
    case("MO601", "no JSON", layer_eval, with_text(lambda text: "{not json")),
    case("MO601", "cut off", layer_eval, with_text(lambda text: text[: len(text) // 2])),
    case("MO601", "nested too deeply", layer_eval, with_text(lambda text: "[" * 100_000)),
    case("MO601", "half a character", layer_eval, set_at("config", "kind", to="\ud800")),
    case("MO601", "another version", layer_eval, set_at("format_version", to=2)),
    case("MO601", "another format", layer_eval, set_at("format", to="else")),
    case("MO601", "no graphs", layer_eval, with_manifest(lambda data: data.pop("graphs"))),
    case(
        "MO601", "a role that there is not", layer_eval, set_at("graphs", "eval", "inputs", 0, "role", to="x")
    ),
    case(
        "MO601",
        "two manifests",
        layer_eval,
        add_manifest,
    ),
    case("MO602", "a kind that there is not", layer_eval, set_at("config", "kind", to=["MoeLMConfig"])),
    case("MO602", "an unknown field", layer_eval, set_at("config", "num_expert", to=3)),
    case("MO602", "an illegal value", layer_eval, set_at("config", "num_experts_per_tok", to=4)),
    case("MO602", "an absurd number", layer_eval, set_at("config", "router_z_loss_coef", to=10**400)),
    case("MO602", "an unknown optimizer", layer_eval, set_at("optimizer", "kind", to="Lion")),
    case("MO602", "patterns that are none", layer_eval, set_at("optimizer", "no_decay", to=5)),
    case("MO602", "a billion layers", step_model, set_at("config", "num_hidden_layers", to=10**12)),
    case("MO603", "the config is not tied", grad_model, set_at("config", "tie_word_embeddings", to=False)),
    case("MO603", "a layer is lost", grad_model, set_at("config", "num_hidden_layers", to=3), "MO618"),
    case("MO603", "another name", layer_grad, text_of("gate.weight", "router.weight")),
    case("MO604", "an expert is lost", layer_eval, with_manifest(expert_less), "MO605", "MO608"),
    case("MO604", "the config has more experts", layer_eval, set_at("config", "num_experts", to=4), "MO619"),
    case("MO604", "not trained", layer_eval, set_at("parameters", 0, "trained", to=False), "MO606"),
    case("MO605", "two share a gradient", layer_eval, with_manifest(share_gradient)),
    case("MO605", "two share their states", layer_eval, with_manifest(share_state)),
    case("MO605", "no update", layer_eval, with_manifest(no_update)),
    case("MO605", "an update of another shape", layer_eval, with_manifest(other_update_shape)),
    case("MO606", "no second moment", layer_apply, with_manifest(without_second_moment), "MO607"),
    case("MO606", "SGD has no moments", layer_eval, set_at("optimizer", to={"kind": "SGD"})),
    case("MO606", "decays what does not", layer_eval, set_at("parameters", 0, "weight_decay", to=False)),
    case("MO606", "no optimizer", layer_eval, with_manifest(without_optimizer)),
    case("MO606", "another dispatch", layer_eval, set_at("dispatch", "expert_capacity", to=5)),
    case("MO606", "another batch", layer_apply, set_at("graphs", "eval", "inputs", 1, "name", to="labels")),
    case("MO610", "no metric is the loss", layer_eval, with_manifest(no_loss)),
    case("MO610", "a loss of each token", layer_eval, with_manifest(loss_of_each_token)),
    case("MO610", "a loss with an axis", layer_eval, output_type("loss", TensorProto.FLOAT, 1)),
]

_INTERFACE = [
    case("MO607", "an update is cut off", layer_step, drop_output("gate.weight.updated")),
    case("MO607", "a gradient is cut off", layer_grad, drop_output("gate.weight.grad")),
    case("MO607", "an input has another name", layer_eval, rename("gate.weight", "onnx::Gemm_12")),
    case("MO607", "a parameter is frozen", layer_eval, freeze),
    case("MO607", "an input that nobody feeds", layer_eval, extra_input),
    case("MO607", "none of the graphs", layer_eval, other_graph),
    case("MO608", "a state comes out in double", layer_apply, output_type("gate.weight.exp_avg.updated", 11)),
    case(
        "MO608",
        "a state comes out turned",
        layer_apply,
        output_type("gate.weight.exp_avg.updated", TensorProto.FLOAT, 4, 3),
    ),
    case("MO609", "an output more", layer_eval, extra_output),
    case("MO609", "another order", layer_eval, swap_outputs),
    case("MO609", "a size is fixed", layer_eval, fix_tokens),
]

_GRADIENTS = [
    case("MO611", "a weight is folded", layer_eval, fold("gate.weight", 3, 4)),
    case("MO611", "two weights are merged", grad_model, read_instead(Q1, Q0)),
    case("MO611", "a branch is cut off", layer_eval, fold("experts.up_proj", 3, 4, 4)),
    case("MO612", "zeros", layer_grad, zeros("gate.weight.grad", 3, 4)),
    case("MO613", "two gradients changed places", grad_model, swap(f"{Q0}.grad", f"{Q1}.grad")),
    case("MO613", "of one input, changed places", grad_model, swap(f"{Q0}.grad", f"{O0}.grad")),
    case("MO613", "two gradients are one", grad_model, remake(f"{Q0}.grad", "Identity", f"{Q1}.grad")),
    case("MO625", "the auxiliary loss is only reported", layer_grad, without_auxiliary_loss),
    case("MO627", "a norm twice", grad_model, norm_twice),
    case("MO620", "a gradient is not in the norm", layer_grad, out_of_norm),
    case("MO620", "nor in that of a step", layer_step, out_of_norm),
    case("MO621", "the head is a copy", grad_model, untie_head),
    case("MO621", "the lookup is a copy", grad_model, untie_lookup),
    case("MO621", "the gradient of one end", grad_model, half_tied_gradient),
]

UP, GATE = "experts.up_proj", "gate.weight"
_UPDATES = [
    case("MO614", "the change alone", layer_apply, skip_operand(f"{GATE}.updated", "Sub", 1)),
    case("MO614", "stands still", layer_apply, skip_operand(f"{GATE}.updated", "Sub", 0)),
    case("MO614", "stands still in a step", layer_step, skip_operand(f"{GATE}.updated", "Sub", 0)),
    case("MO614", "a moment starts anew", layer_apply, skip_operand(f"{GATE}.exp_avg.updated", "Add", 1)),
    case("MO614", "a moment without gradient", layer_step, skip_operand(f"{GATE}.exp_avg.updated", "Add", 0)),
    case("MO614", "the learning rate is fixed", layer_step, ignore("lr")),
    case("MO614", "always the first step", layer_apply, ignore("step")),
    case("MO614", "no clipping", layer_apply, ignore("grad_norm")),
    case(
        "MO614",
        "a bias stands still",
        biased_step,
        skip_operand("gate.e_score_correction_bias.updated", "Sub", 0),
    ),
    case("MO615", "moments changed places", lm_apply, readers(f"{Q0}.exp_avg", f"{Q1}.exp_avg")),
    case("MO615", "parameters changed places", lm_apply, readers(Q0, Q1)),
    case("MO615", "gradients changed places", lm_apply, readers(f"{Q0}.grad", f"{Q1}.grad")),
    case("MO615", "moments changed places in a step", step_model, readers(f"{Q0}.exp_avg", f"{Q1}.exp_avg")),
    case("MO615", "updates changed places", lm_apply, swap(f"{Q0}.updated", f"{Q1}.updated")),
    case("MO613", "two updates of one gradient", step_model, one_gradient),
]


def constant(old: float, new: float) -> Callable[[ModelProto], None]:
    """Another value for a constant."""

    def break_it(model: ModelProto) -> None:
        for tensor in model.graph.initializer:
            value = numpy_helper.to_array(tensor)
            if value.shape == () and np.float32(value) == np.float32(old):
                tensor.CopyFrom(numpy_helper.from_array(np.array(new, value.dtype), tensor.name))

    return break_it


_CONSTANTS = [
    case("MO626", "another beta1", layer_apply, constant(0.9, 0.95)),
    case("MO626", "another beta2", layer_step, constant(0.999, 0.99)),
    case("MO626", "another eps", layer_apply, constant(1e-8, 1e-6)),
    case("MO626", "another weight decay", layer_apply, constant(0.01, 0.1)),
    case("MO626", "another rate of balance", biased_step, constant(0.01, 0.1)),
    case("MO626", "another limit", layer_apply, set_at("optimizer", "max_grad_norm", to=0.25)),
]

_EXPERTS = [
    case("MO616", "a branch is lost", layer_eval, lose_branch),
    case("MO616", "a gradient is constant", layer_grad, constant_expert),
    case("MO616", "a gradient twice", layer_grad, double_expert),
    case("MO617", "weights changed places", layer_eval, cross_branches),
    case("MO617", "gradients joined backwards", layer_grad, join_backwards),
]

_INIT, _COMBINE = "MoeInitRoutingV2", "MoeTokenUnpermuteWithRoutingMap"
_OPERATORS = [
    case("MO618", "another gradient of the dispatch", layer_grad, without_grad_operator),
    case("MO618", "another dispatch", layer_eval, both(*map_dispatch())),
    case("MO619", "another number of experts", layer_eval, attribute(_INIT, "expert_num", 4)),
    case("MO619", "another mode backward", layer_grad, attribute(f"{_INIT}Grad", "active_num", 4)),
    case("MO619", "weights nowhere", layer_eval, without_weights),
    case("MO619", "weights in the experts", layer_eval, set_at("config", "router_weights_on", to="experts")),
]

_FOLDER = [
    on_disk("MO622", "another config", beside(lambda data: data["config"].update(num_experts_per_tok=1))),
    on_disk("MO622", "a parameter less", beside(lambda data: data["parameters"].pop())),
    on_disk("MO622", "no manifest", beside(lambda data: data.pop("graphs"))),
    on_disk("MO623", "a graph is missing", without_file),
    on_disk("MO623", "a graph is cut off", cut_file),
    on_disk("MO623", "a graph is another", other_graph_in_file),
    on_disk("MO624", "metadata dropped", stripped),
]

MUTATIONS: list[Mutation] = [
    *(*_MANIFEST, *_INTERFACE, *_GRADIENTS, *_UPDATES, *_CONSTANTS),
    *(*_EXPERTS, *_OPERATORS, *_FOLDER),
]
