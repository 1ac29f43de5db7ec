"""Models with operators, attributes, types and functions broken for one reason each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import onnx
from broken_models import Mutation, parse
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, helper

from moe_onnx.adapters.function_body import function_body

Break = Callable[[ModelProto], object]


def plain() -> ModelProto:
    return parse("""
        plain (float[n, 4] x) => (float[n, 3] y)
        <float[4, 3] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3] bias = {1, 2, 3}>
        {
            [project] product = MatMul (x, weight)
            [shift] shifted = Add (product, bias)
            [cast] narrow = Cast <to = 1> (shifted)
            [activate] y = Softmax <axis = -1> (narrow)
        }
    """)


def branches() -> ModelProto:
    """An If whose branches multiply, which onnx's strict inference does not look into."""
    return parse("""
        branches (float[n, 4] x, float[4, 3] w, bool c) => (float[n, 3] y)
        {
            [choose] y = If (c) <
                then_branch = then_graph () => (float[n, 3] a) { [inner] a = MatMul (x, w) },
                else_branch = else_graph () => (float[n, 3] b) {
                    [scaled] s = MatMul (x, w)
                    [negated] b = Neg (s)
                }
            >
        }
    """)


def loop() -> ModelProto:
    """A Loop that carries one value and collects another."""
    return parse("""
        loop (float[n, 3] x, int64 t, bool c) => (float[n, 3] y)
        {
            [repeat] y, all = Loop (t, c, x) <body = b (int64 i, bool k, float[n, 3] q) => (bool g, r, s) {
                g = Identity (k)
                r = Neg (q)
                s = Relu (r)
            }>
        }
    """)


def calls() -> ModelProto:
    """A function with an attribute, called twice, and one that calls it."""
    return parse(
        """
        calls (float[n, 4] x, float[4, 3] w) => (float[n, 3] y)
        {
            [first] h = local.Project <axis = 1> (x, w)
            [second] y = local.Twice (h)
        }
        <domain: "local", opset_import: ["" : 21]>
        Project <axis> (data, weight) => (out)
        {
            [mm] m = MatMul (data, weight)
            [soft] out = Softmax <axis : int = @axis> (m)
        }
        <domain: "local", opset_import: ["" : 21, "local" : 1]>
        Twice (data) => (out)
        {
            [once] m = Neg (data)
            [again] out = local.Flip (m)
        }
        <domain: "local", opset_import: ["" : 21]>
        Flip (data) => (out) { [flip] out = Neg (data) }
        """,
        imports=', "local" : 1',
    )


_GRADS = """
    ascend (float[6, 4] g, int32[6] rows, float[3, 4] dy, bool[3, 2] map, float[6, 4] kept, float[3, 2] probs)
        => (float[3, 4] dx, float[6, 4] drows, float[3, 2] dprobs)
    {
        [init] dx = ascend.moe.MoeInitRoutingV2Grad <top_k = 2, drop_pad_mode = 0, active_num = 0> (g, rows)
        [unpermute] drows, dprobs = ascend.moe.MoeTokenUnpermuteWithRoutingMapGrad <drop_and_pad = 0>
            (dy, rows, rows, map, kept, probs)
    }
"""


@cache
def _with_bodies() -> ModelProto:
    model = parse(_GRADS, imports=', "ascend.moe" : 1')
    model.functions.append(function_body("MoeInitRoutingV2Grad", 21))
    model.functions.append(function_body("MoeTokenUnpermuteWithRoutingMapGrad", 21))
    return model


def ascend() -> ModelProto:
    """Both backward operators with their bodies, in the form every route takes."""
    return _with_bodies()


def _node(model: ModelProto, name: str) -> NodeProto:
    stack = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while stack:
        node = stack.pop()
        if node.name == name:
            return node
        stack += [inner for a in node.attribute if a.type == AttributeProto.GRAPH for inner in a.g.node]
    raise KeyError(name)


def operator(name: str, op: str = "", domain: str | None = None) -> Break:
    def break_it(model: ModelProto) -> None:
        node = _node(model, name)
        if op:
            node.op_type = op
        if domain is not None:
            node.domain = domain
            holder = next((f for f in model.functions if node in f.node), model)
            for place in (holder, model):
                imported = {entry.domain for entry in place.opset_import}
                if domain not in imported | {"ai.onnx"}:
                    place.opset_import.append(helper.make_opsetid(domain, 1))

    return break_it


def attribute(name: str, **values: object) -> Break:
    """Set attributes; None removes one."""

    def break_it(model: ModelProto) -> None:
        node = _node(model, name)
        kept = [a for a in node.attribute if a.name not in values]
        made = [helper.make_attribute(key, value) for key, value in values.items() if value is not None]
        del node.attribute[:]
        node.attribute.extend([*kept, *made])

    return break_it


def kind(name: str, attr: str, number: int) -> Break:
    def break_it(model: ModelProto) -> None:
        next(a for a in _node(model, name).attribute if a.name == attr).type = number

    return break_it


def inputs(name: str, *names: str) -> Break:
    def break_it(model: ModelProto) -> None:
        node = _node(model, name)
        del node.input[:]
        node.input.extend(names)

    return break_it


def outputs(name: str, *names: str) -> Break:
    def break_it(model: ModelProto) -> None:
        node = _node(model, name)
        del node.output[:]
        node.output.extend(names)

    return break_it


def typed(name: str, elem: int, *shape: int | str) -> Break:
    """Give a graph input, output or inner value another type."""

    def break_it(model: ModelProto) -> None:
        made = helper.make_tensor_type_proto(elem, shape)
        values = [*model.graph.input, *model.graph.output]
        found = [value for value in values if value.name == name]
        value = found[0] if found else model.graph.value_info.add(name=name)
        value.type.CopyFrom(made)

    return break_it


def function(change: Callable[[FunctionProto], object], number: int = 0) -> Break:
    return lambda model: change(model.functions[number])


def _again(model: ModelProto, name: str, attr: str) -> None:
    node = _node(model, name)
    node.attribute.append(next(a for a in node.attribute if a.name == attr))


def _opset(model: ModelProto, version: int, domain: str = "") -> None:
    next(entry for entry in model.opset_import if entry.domain == domain).version = version


def added(text: str) -> Break:
    """One more function, of the opset that the models here import."""
    domain, text = text.split("::", 1)
    header = f'<domain: "{domain}", opset_import: ["" : 21]>'
    return lambda model: model.functions.extend([onnx.parser.parse_function(header + text)])


def _undo_bodies(model: ModelProto) -> None:
    del model.functions[:]


def _custom_inside(model: ModelProto) -> None:
    flip = model.functions[2]
    node = flip.node[0]
    node.op_type, node.domain = "MoeInitRoutingV2Grad", "ascend.moe"
    node.attribute.append(helper.make_attribute("top_k", 1))
    node.input.append("rows")
    node.input[0] = "data"
    node.output[0] = "out"
    constant = helper.make_node("Constant", [], ["rows"], value=helper.make_tensor("", 6, [1], [0]))
    flip.node.insert(0, constant)
    flip.opset_import.append(helper.make_opsetid("ascend.moe", 1))


def _elem(number: int) -> Break:
    def break_it(model: ModelProto) -> None:
        model.graph.input[0].type.tensor_type.elem_type = number

    return break_it


def _ref(model: ModelProto, name: str, attr: str, ref: str) -> None:
    node = _node(model, name)
    kept = [a for a in node.attribute if a.name != attr]
    del node.attribute[:]
    node.attribute.extend([*kept, AttributeProto(name=attr, type=AttributeProto.INT, ref_attr_name=ref)])


def _sequence(model: ModelProto) -> None:
    elem = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    model.graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(elem))


GRAD, UNPERMUTE = "MoeInitRoutingV2Grad", "MoeTokenUnpermuteWithRoutingMapGrad"
FLOAT, INT64, INT32, FLOAT16 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT16


def shaped() -> ModelProto:
    """What onnx's inference lets pass: sizes, channels, the words of attributes, divisors."""
    return parse("""
        shaped (float[2, 6] x, float[1, 4, 5, 5] image, int64[n] sizes)
            => (float[3, 4] y, float[1, 6, 5, 5] z, int64[n] q)
        <int64[2] shape = {3, 4}, int64[1] by = {2}, float[6, 2, 1, 1] weight = {
            1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>
        {
            [reshape] y = Reshape (x, shape)
            [conv] z = Conv <group = 2, auto_pad = "VALID"> (image, weight)
            [divide] d = Div (sizes, by)
            [modulo] q = Mod (d, by)
        }
    """)


def _constant(number: int, *values: int) -> Break:
    """Other values in an initializer of integers."""

    def break_it(model: ModelProto) -> None:
        name = model.graph.initializer[number].name
        made = helper.make_tensor(name, INT64, [len(values)], values)
        model.graph.initializer[number].CopyFrom(made)

    return break_it


MUTATIONS: list[Mutation] = [
    Mutation("MO318", "padding of another framework", shaped, attribute("conv", auto_pad="SAME")),
    Mutation("MO318", "padding in lower case", shaped, attribute("conv", auto_pad="valid")),
    Mutation("MO318", "no text", shaped, attribute("conv", auto_pad=b"\xff")),
    Mutation("MO321", "reshape to more elements", shaped, _constant(0, 3, 5)),
    Mutation("MO321", "reshape by a size that is not there", shaped, _constant(0, 3, -1, 0)),
    Mutation("MO321", "channels of one group", shaped, attribute("conv", group=1)),
    Mutation("MO321", "more groups than outputs", shaped, attribute("conv", group=4)),
    Mutation("MO325", "a divisor of 0", shaped, _constant(1, 0)),
    # MO301: no operator of this name
    Mutation("MO301", "misspelt standard operator", plain, operator("activate", "Sofmax")),
    Mutation("MO301", "misspelt operator in lower case", plain, operator("project", "matmul")),
    Mutation("MO301", "no op type", plain, lambda m: _node(m, "shift").ClearField("op_type")),
    Mutation("MO301", "misspelt ascend moe operator", ascend, operator("init", "MoeInitRoutingV2Gard")),
    Mutation("MO301", "an older operator of the family", ascend, operator("init", "MoeInitRoutingGrad")),
    Mutation(
        "MO301",
        "onnxruntime training operator",
        plain,
        operator("activate", "SoftmaxGrad", "com.microsoft"),
        also=("MO422",),
    ),
    Mutation(
        "MO301", "misspelt contrib operator", plain, operator("project", "FusedMatMull", "com.microsoft")
    ),
    Mutation("MO301", "misspelt in a branch", branches, operator("inner", "MatMull")),
    Mutation("MO301", "misspelt in a function", calls, operator("soft", "SoftMaxx")),
    Mutation("MO301", "misspelt call of a function", calls, operator("first", "Projct")),
    Mutation(
        "MO301", "unknown operator of the extensions", plain, operator("activate", "Nope", "ai.onnx.contrib")
    ),
    Mutation("MO301", "unknown overload", calls, lambda m: setattr(_node(m, "first"), "overload", "other")),
    # MO302: in the wrong domain
    Mutation("MO302", "ascend moe operator without domain", ascend, operator("init", domain="")),
    Mutation("MO302", "ascend moe operator in ai.onnx", ascend, operator("init", domain="ai.onnx")),
    Mutation(
        "MO302",
        "ascend moe operator in com.microsoft",
        ascend,
        operator("init", domain="com.microsoft"),
        also=("MO422",),
    ),
    Mutation("MO302", "misspelt domain", ascend, operator("init", domain="ascend_moe")),
    Mutation("MO302", "domain in capitals", ascend, operator("init", domain="Ascend.MoE")),
    Mutation(
        "MO302", "misspelt operator without domain", ascend, operator("init", "MoeInitRoutingV2Gradd", "")
    ),
    Mutation("MO302", "standard operator in ascend.moe", ascend, operator("init", "Relu")),
    Mutation("MO302", "contrib operator without domain", plain, operator("project", "FusedMatMul")),
    Mutation(
        "MO302", "standard operator in com.microsoft", plain, operator("project", "MatMul", "com.microsoft")
    ),
    Mutation("MO302", "function called without domain", calls, operator("first", domain="")),
    # MO303: nothing provides it
    Mutation("MO303", "operator of a library", plain, operator("activate", "Activate", "my.library")),
    Mutation("MO303", "standard name in a foreign domain", plain, operator("activate", domain="my.library")),
    Mutation("MO303", "in a branch", branches, operator("inner", "Product", "my.library")),
    Mutation("MO303", "in a function", calls, operator("flip", "Turn", "my.library")),
    # MO304: not in this opset
    Mutation("MO304", "operator of a newer opset", plain, operator("activate", "RMSNormalization")),
    Mutation("MO304", "withdrawn operator", plain, operator("activate", "Upsample")),
    Mutation("MO304", "operator withdrawn for another", plain, operator("activate", "Scatter")),
    Mutation(
        "MO304",
        "newer in a function",
        calls,
        lambda m: (operator("soft", "Gelu")(m), _opset(m, 19), [_opset(f, 19) for f in m.functions])[0],
    ),
    # MO305, MO306: inputs and outputs
    Mutation("MO305", "one input too many", plain, inputs("activate", "narrow", "narrow")),
    Mutation("MO305", "an input too few", plain, inputs("shift", "product")),
    Mutation("MO305", "required input left empty", plain, inputs("shift", "product", "")),
    Mutation("MO305", "too many for a function", calls, inputs("second", "h", "h")),
    Mutation(
        "MO305",
        "contrib operator without inputs",
        plain,
        lambda m: (
            operator("activate", "QuickGelu", "com.microsoft")(m),
            attribute("activate", axis=None)(m),
            inputs("activate", "narrow", "narrow")(m),
        )[0],
    ),
    Mutation("MO305", "ascend moe operator lacks an input", ascend, inputs("init", "g")),
    Mutation(
        "MO305", "ascend moe operator with a required input left empty", ascend, inputs("init", "", "rows")
    ),
    Mutation("MO305", "ascend moe operator with one too many", ascend, inputs("init", "g", "rows", "rows")),
    Mutation("MO306", "one output too many", plain, outputs("shift", "shifted", "extra")),
    Mutation("MO306", "too many of a function", calls, outputs("first", "h", "extra")),
    Mutation("MO306", "ascend moe operator with one too many", ascend, outputs("init", "dx", "extra")),
    Mutation("MO306", "an output of a loop too few", loop, outputs("repeat", "y")),
    # MO307-MO311: attributes
    Mutation("MO307", "unknown attribute", plain, attribute("shift", axis=1)),
    Mutation("MO307", "misspelt attribute", plain, attribute("activate", axes=1)),
    Mutation("MO307", "attribute of an older opset", plain, attribute("cast", axis=1)),
    Mutation(
        "MO307", "misspelt ascend moe attribute", ascend, attribute("init", droppadmode=1, drop_pad_mode=None)
    ),
    Mutation(
        "MO307", "foreign name of an ascend moe attribute", ascend, attribute("unpermute", paddedMode=0)
    ),
    Mutation("MO308", "no target of a cast", plain, attribute("cast", to=None)),
    Mutation("MO308", "no top_k", ascend, attribute("init", top_k=None)),
    Mutation("MO309", "float for an int", plain, attribute("activate", axis=1.0)),
    Mutation("MO309", "list for an int", plain, attribute("activate", axis=[1])),
    Mutation("MO309", "top_k as float", ascend, attribute("init", top_k=2.0)),
    Mutation("MO309", "top_k as string", ascend, attribute("init", top_k="2")),
    Mutation("MO309", "top_k as list", ascend, attribute("init", top_k=[2])),
    Mutation("MO309", "no kind", plain, kind("activate", "axis", AttributeProto.UNDEFINED)),
    Mutation("MO309", "kind and value differ", ascend, kind("init", "top_k", AttributeProto.FLOAT)),
    Mutation(
        "MO309",
        "a kind that says int and holds a list",
        plain,
        lambda m: (attribute("activate", axis=[1])(m), kind("activate", "axis", AttributeProto.INT)(m))[0],
    ),
    Mutation("MO310", "the same attribute twice", plain, lambda m: _again(m, "activate", "axis")),
    Mutation("MO310", "top_k twice", ascend, lambda m: _again(m, "init", "top_k")),
    Mutation("MO311", "attribute that a function does not have", calls, attribute("second", axis=1)),
    # MO312-MO315: this package's operators
    Mutation("MO312", "top_k of 0", ascend, attribute("init", top_k=0)),
    Mutation("MO312", "drop_pad_mode of 2", ascend, attribute("init", drop_pad_mode=2)),
    Mutation("MO312", "negative active_num", ascend, attribute("init", active_num=-1)),
    Mutation("MO312", "drop_and_pad of 2", ascend, attribute("unpermute", drop_and_pad=2)),
    Mutation(
        "MO313",
        "probs without routing map",
        ascend,
        inputs("unpermute", "dy", "rows", "rows", "", "kept", "probs"),
    ),
    Mutation(
        "MO313",
        "probs without permuted tokens",
        ascend,
        inputs("unpermute", "dy", "rows", "rows", "map", "", "probs"),
    ),
    Mutation("MO314", "int64 indices", ascend, typed("rows", INT64, 6)),
    Mutation(
        "MO314",
        "integer gradient",
        ascend,
        lambda m: (typed("g", INT32, 6, 4)(m), typed("dx", INT32, 3, 4)(m))[0],
    ),
    Mutation("MO314", "permuted tokens of another dtype", ascend, typed("kept", FLOAT16, 6, 4)),
    Mutation("MO314", "dtype that does not exist", ascend, typed("g", 99, 6, 4), also=("MO324",)),
    Mutation("MO315", "3-D gradient in mode 0", ascend, typed("g", FLOAT, 2, 3, 4)),
    Mutation("MO315", "gradient with fewer rows than indices", ascend, typed("g", FLOAT, 5, 4)),
    Mutation("MO315", "top_k does not divide the indices", ascend, attribute("init", top_k=4)),
    Mutation("MO315", "2-D indices", ascend, typed("rows", INT32, 3, 2)),
    Mutation("MO315", "routing map of other experts", ascend, typed("map", TensorProto.BOOL, 3, 3)),
    Mutation("MO315", "fewer permuted tokens", ascend, typed("kept", FLOAT, 5, 3)),
    # MO316, MO317: form
    Mutation("MO316", "defaults not written out", ascend, attribute("init", active_num=None)),
    Mutation(
        "MO316",
        "optional inputs not there",
        ascend,
        lambda m: (
            inputs("unpermute", "dy", "rows", "rows")(m),
            outputs("unpermute", "drows")(m),
            m.graph.output.pop(),
        )[0],
    ),
    Mutation("MO317", "no bodies", ascend, _undo_bodies),
    Mutation("MO317", "one body missing", ascend, lambda m: m.functions.pop() and None),
    # MO321-MO324: types
    Mutation("MO321", "sizes that do not match", plain, typed("x", FLOAT, "n", 5)),
    Mutation("MO321", "two dtypes in one product", plain, typed("x", FLOAT16, "n", 4)),
    Mutation("MO321", "dtype that the operator does not take", plain, typed("x", TensorProto.BOOL, "n", 4)),
    Mutation("MO321", "wrong rank in a branch", branches, typed("w", FLOAT)),
    Mutation("MO321", "sizes that do not match in a branch", branches, typed("w", FLOAT, 5, 3)),
    Mutation("MO321", "sizes that do not match in a function", calls, typed("w", FLOAT, 5, 3)),
    Mutation("MO321", "axis out of range in a function", calls, attribute("first", axis=3)),
    Mutation(
        "MO321",
        "branches of two dtypes",
        branches,
        lambda m: (
            operator("negated", "Cast")(m),
            attribute("negated", to=INT64)(m),
            setattr(_node(m, "choose").attribute[1].g.output[0].type.tensor_type, "elem_type", INT64),
        )[0],
    ),
    Mutation("MO322", "output declared as int64", plain, typed("y", INT64, "n", 3)),
    Mutation("MO322", "inner value declared as float16", plain, typed("shifted", FLOAT16, "n", 3)),
    Mutation("MO322", "output declared as sequence", plain, _sequence),
    Mutation("MO322", "own operator declared as float16", ascend, typed("dx", FLOAT16, 3, 4)),
    Mutation(
        "MO322",
        "output of a branch declared as int64",
        branches,
        lambda m: setattr(_node(m, "choose").attribute[1].g.output[0].type.tensor_type, "elem_type", INT64),
        also=("MO321",),
    ),
    Mutation("MO323", "output declared longer", plain, typed("y", FLOAT, "n", 4)),
    Mutation("MO323", "inner value declared shorter", plain, typed("product", FLOAT, "n", 2)),
    Mutation("MO323", "output declared with another rank", plain, typed("y", FLOAT, "n")),
    Mutation("MO323", "own operator declared longer", ascend, typed("dx", FLOAT, 4, 4)),
    Mutation("MO324", "input without an element type", plain, _elem(0)),
    Mutation("MO324", "input of an element type that does not exist", plain, _elem(99)),
    # MO341-MO349: functions
    Mutation(
        "MO341",
        "another body under an operator's name",
        ascend,
        function(lambda f: f.node.pop() and None),
        also=("MO205",),
    ),
    Mutation(
        "MO341",
        "a constant of the body changed",
        ascend,
        function(lambda f: setattr(next(a for n in f.node for a in n.attribute if a.name == "end"), "i", 2)),
    ),
    Mutation(
        "MO341", "body without nodes", ascend, function(lambda f: f.ClearField("node")), also=("MO205",)
    ),
    Mutation(
        "MO342",
        "function called Softmax",
        plain,
        added("::Softmax <axis> (a) => (b) {b = Neg (a)}"),
    ),
    Mutation(
        "MO342",
        "function called MatMul in ai.onnx",
        plain,
        added("ai.onnx::MatMul (a, b) => (c) {c = Add (a, b)}"),
    ),
    Mutation(
        "MO342",
        "function called as a contrib operator",
        plain,
        added("com.microsoft::QuickGelu (a) => (b) {b = Neg (a)}"),
    ),
    Mutation("MO343", "function that calls itself", calls, operator("flip", "Flip", "local")),
    Mutation("MO343", "two functions that call each other", calls, operator("flip", "Twice", "local")),
    Mutation("MO346", "ascend moe operator in a function", calls, _custom_inside),
    Mutation(
        "MO347",
        "attribute passed on that is not declared",
        calls,
        function(lambda f: f.ClearField("attribute")),
    ),
    Mutation("MO347", "attribute passed on in a graph", plain, lambda m: _ref(m, "activate", "axis", "axis")),
    Mutation("MO349", "input of a function without a name", calls, function(lambda f: f.input.append(""))),
]
