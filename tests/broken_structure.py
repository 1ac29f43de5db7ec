"""Models that are no graphs: names twice or nowhere, nodes out of order, what nothing needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx
from broken_models import Mutation, parse, plain_model
from onnx import ModelProto, NodeProto

Edit = Callable[[ModelProto], None]


def nested_model() -> ModelProto:
    """Branches that read the graph around them, one of them with a loop inside."""
    return parse("""
        nested (float[2] x, bool c, int64 n) => (float[2] y) {
            [minus] b = Neg (x)
            [either] y = If (c) <
                then_branch = then () => (float[2] p) {
                    [keep] go = Identity (c)
                    [repeat] p = Loop (n, go, x) <
                        body = body (int64 i, bool k, float[2] v) => (bool k2, float[2] v2) {
                            [on] k2 = Identity (k)
                            [step] v2 = Add (v, b)
                        }
                    >
                },
                else_branch = else () => (float[2] q) {
                    [first] r = Relu (x)
                    [second] q = Mul (r, b)
                }
            >
        }
    """)


def function_model() -> ModelProto:
    """A function of three nodes, called once."""
    return parse(
        """
        calls (float[2] x) => (float[2] y) { [call] y = local.Gate (x) }
        <domain: "local", opset_import: ["" : 21]>
        Gate (a) => (b) { [first] c = Sigmoid (a) [second] d = Mul (a, c) [third] b = Relu (d) }
        """,
        imports=', "local" : 1',
    )


def node(model: ModelProto, name: str) -> NodeProto:
    """A node of the main graph, a branch or a function by its name."""
    waiting = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    for one in waiting:  # grows
        if one.name == name:
            return one
        waiting += [n for attribute in one.attribute for n in attribute.g.node]
    raise KeyError(name)


def reads(name: str, *inputs: str) -> Edit:
    """Have a node read other values."""
    return lambda model: node(model, name).input.__setitem__(slice(None), inputs)


def makes(name: str, output: str) -> Edit:
    """Have a node make a value of another name, without those that read it."""
    return lambda model: node(model, name).output.__setitem__(0, output)


def add(op: str, inputs: list[str], output: str, *, at: int = -1, name: str = "") -> Edit:
    def change(model: ModelProto) -> None:
        made = onnx.helper.make_node(op, inputs, [output], name=name)
        nodes = list(model.graph.node)
        nodes.insert(len(nodes) if at < 0 else at, made)
        model.graph.ClearField("node")
        model.graph.node.extend(nodes)

    return change


def without(name: str) -> Edit:
    """Take a node of the main graph away."""
    return lambda model: model.graph.node.remove(node(model, name))


def output(name: str) -> Edit:
    """One more output of the main graph."""

    def change(model: ModelProto) -> None:
        model.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info(name, 1, None))

    return change


def reverse(model: ModelProto) -> None:
    nodes = list(model.graph.node)[::-1]
    model.graph.ClearField("node")
    model.graph.node.extend(nodes)


def _function_reversed(model: ModelProto) -> None:
    nodes = list(model.functions[0].node)[::-1]
    model.functions[0].ClearField("node")
    model.functions[0].node.extend(nodes)


def _same_initializer(model: ModelProto) -> None:
    model.graph.initializer.add().CopyFrom(model.graph.initializer[0])


def _same_input(model: ModelProto) -> None:
    model.graph.input.add().CopyFrom(model.graph.input[0])


def _named_like_the_input(model: ModelProto) -> None:
    model.graph.node[1].output[0] = "x"
    model.graph.node[2].input[0] = "x"


def _function_twice(model: ModelProto) -> None:
    model.functions.add().CopyFrom(model.functions[0])


def _branch(model: ModelProto, number: int) -> onnx.GraphProto:
    return node(model, "either").attribute[number].g


def _branch_gives_outer(model: ModelProto) -> None:
    _branch(model, 1).output[0].name = "b"
    del _branch(model, 1).node[:]


def _branch_hides(model: ModelProto) -> None:
    graph = _branch(model, 1)
    graph.initializer.add(name="b", data_type=1, dims=[2], float_data=[7, 7])


def _loop_hides(model: ModelProto) -> None:
    body = node(model, "repeat").attribute[0].g
    body.input[2].name = "b"
    reads("step", "b", "b")(model)


def _sibling_shares(model: ModelProto) -> None:
    """Reads what the other branch makes."""
    node(model, "second").input[0] = "go"


def _no_type(part: str) -> Edit:
    return lambda model: getattr(model.graph, part)[0].ClearField("type")


def _no_name(part: str) -> Edit:
    return lambda model: setattr(getattr(model.graph, part)[0], "name", "")


def _nameless_initializer(model: ModelProto) -> None:
    model.graph.initializer.add(data_type=1, dims=[1], float_data=[1])


def _outputs(*names: str) -> Edit:
    return lambda model: model.functions[0].output.__setitem__(slice(None), names)


def _unread(model: ModelProto) -> None:
    model.graph.initializer.add(name="lost", data_type=1, dims=[5], float_data=[1] * 5)


def _unread_of_branch(model: ModelProto) -> None:
    _branch(model, 1).initializer.add(name="lost", data_type=1, dims=[5], float_data=[1] * 5)


def _input(model: ModelProto) -> None:
    model.graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info("mask", 1, [2]))


def _uncalled(model: ModelProto) -> None:
    node(model, "call").op_type, node(model, "call").domain = "Relu", ""


_plain = partial(Mutation, base=plain_model)
_nested = partial(Mutation, base=nested_model)
_function = partial(Mutation, base=function_model)

MUTATIONS = [
    _plain("MO201", "two nodes make one value", break_it=add("Neg", ["x"], "product")),
    _plain("MO201", "a node makes an input", break_it=_named_like_the_input, also=("MO204",)),
    _plain(
        "MO201",
        "a node makes an initializer",
        break_it=add("Neg", ["bias"], "weight", at=0),
        also=("MO204", "MO321"),
    ),
    _plain("MO201", "one initializer twice", break_it=_same_initializer),
    _plain("MO201", "one input twice", break_it=_same_input),
    _nested(
        "MO201", "a branch makes a value of outside", break_it=makes("first", "b"), also=("MO202", "MO204")
    ),
    _nested("MO201", "two nodes of a branch make one value", break_it=makes("first", "q"), also=("MO202",)),
    _function(
        "MO201", "two nodes of a function make one value", break_it=makes("second", "c"), also=("MO202",)
    ),
    _function("MO201", "a function's output twice", break_it=_outputs("b", "b"), also=("MO321",)),
    _plain("MO202", "a misspelt input", break_it=reads("shift", "produkt", "bias")),
    _plain("MO202", "a node taken away", break_it=without("project")),
    _nested("MO202", "a misspelt input in a branch", break_it=reads("second", "r", "bb")),
    _nested("MO202", "a misspelt input in a loop in a branch", break_it=reads("step", "w", "b")),
    _nested("MO202", "a value of the other branch", break_it=_sibling_shares),
    _function("MO202", "a value of the function's caller", break_it=reads("second", "a", "x")),
    _plain("MO203", "nodes in reverse", break_it=reverse),
    _nested("MO203", "a branch before what it reads", break_it=reverse),
    _function("MO203", "nodes of a function in reverse", break_it=_function_reversed),
    _plain("MO204", "a node reads itself", break_it=reads("shift", "shifted", "bias")),
    _plain("MO204", "two nodes read each other", break_it=reads("project", "shifted", "weight")),
    _nested("MO204", "a branch reads its own If", break_it=reads("second", "r", "y")),
    _function("MO204", "a circle in a function", break_it=reads("first", "b")),
    _plain("MO205", "an output that nothing makes", break_it=output("loss")),
    _nested("MO205", "a branch gives a value of outside", break_it=_branch_gives_outer),
    _nested("MO205", "a branch's output is misspelt", break_it=makes("second", "qq")),
    _function("MO205", "a function's output is misspelt", break_it=_outputs("bb")),
    _function("MO205", "a function's output is its input", break_it=_outputs("a")),
    _plain("MO206", "a node that nothing needs", break_it=add("Exp", ["product"], "aside")),
    _nested("MO206", "a node of a branch that nothing needs", break_it=reads("second", "x", "b")),
    _function("MO206", "nodes of a function that nothing needs", break_it=reads("third", "a")),
    _plain("MO207", "a weight that nothing reads", break_it=_unread),
    _plain("MO207", "a weight cut off", break_it=reads("shift", "product", "product")),
    _nested("MO207", "a weight of a branch that nothing reads", break_it=_unread_of_branch),
    _plain("MO208", "an input that nothing reads", break_it=_input),
    _function("MO209", "a function that nothing calls", break_it=_uncalled),
    _plain("MO210", "two nodes of one name", break_it=add("Exp", ["product"], "aside", name="shift")),
    _nested(
        "MO210",
        "two nodes of one name in a branch",
        break_it=lambda m: setattr(node(m, "first"), "name", "second"),
    ),
    _function(
        "MO210",
        "two nodes of one name in a function",
        break_it=lambda m: setattr(node(m, "first"), "name", "third"),
    ),
    _function("MO211", "two functions of one name", break_it=_function_twice),
    _nested("MO212", "an initializer hides a value", break_it=_branch_hides),
    _nested("MO212", "a loop's variable hides a value", break_it=_loop_hides),
    _plain("MO213", "an input without a type", break_it=_no_type("input")),
    _plain("MO213", "an output without a type", break_it=_no_type("output")),
    _plain("MO213", "an input without a name", break_it=_no_name("input"), also=("MO202",)),
    _plain("MO213", "an output without a name", break_it=_no_name("output")),
    _plain("MO213", "an initializer without a name", break_it=_nameless_initializer),
    _plain("MO214", "no outputs", break_it=lambda model: model.graph.ClearField("output")),
]
