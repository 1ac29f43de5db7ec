"""NaN in rows that no index names: it must not matter to anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, helper

from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.full.cuts import line, session_of
from moe_onnx.validation.full.lively import Arrays, is_too_large, lively_feeds
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.drawing import Array
from moe_onnx.validation.run.limits import within_limit
from moe_onnx.validation.subject import Subject

UNWRITTEN = code(
    "MO911",
    "warning",
    "An output depends on rows that a device leaves unwritten",
    why="The kernels of MoeTokenUnpermuteWithRoutingMapGrad and MoeTokenPermuteWithRoutingMap do not write "
    "the rows that no index names; ascend.moe makes them 0, so that such a model is right here and reads "
    "whatever was in memory on a device. Seen by a run in which these rows are NaN.",
    mend="Cut the rows off, or choose zeros for them with Where, before anything sums over rows.",
)
UNMASKED = code(
    "MO912",
    "error",
    "NaN in a row that no index names reaches an output",
    why="Rows without a token are whatever the experts made of padding. Masking them by a product turns NaN "
    "and infinity into NaN for tokens that never chose the row; masking by selection does not. The rows "
    "are poisoned in front of the node, which runs as any onnxruntime runs the model: by the function body "
    "that the model carries.",
    mend="Use this package's function body (moe_onnx.add_function_bodies), or choose with Where in your own.",
)

# Rows that the kernels leave unwritten: outputs, and the index that names rows, an input (< 0: an output).
_OUTPUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "MoeTokenUnpermuteWithRoutingMapGrad": ((0,), 1),
    "MoeTokenPermuteWithRoutingMap": ((0, 1), -3),
}
# Rows that an operator reads by index: inputs, and the index.
_INPUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "MoeInitRoutingV2Grad": ((0,), 1),
    "MoeTokenUnpermuteWithRoutingMap": ((0,), 1),
    "MoeTokenUnpermuteWithRoutingMapGrad": ((4,), 1),
    "MoeTokenPermuteWithRoutingMapGrad": ((0, 1), 2),
    "MoeFinalizeRoutingV2": ((0,), 1),
    "MoeFinalizeRoutingV2Grad": ((2,), 1),
}
_PREFIX = _DOMAIN = "moe_onnx.poison"


@dataclass(frozen=True)
class _Switch:
    """One place that can be poisoned: the input that does it, and the output that counts the rows."""

    name: str
    count: str
    where: str


@check("full", UNWRITTEN, UNMASKED)
def poison(subject: Subject) -> Iterator[Outcome]:
    """Rows of ascend.moe nodes that no index names may be NaN, and nothing changes."""
    if not any(node.domain == DOMAIN for node in subject.main.nodes):
        yield Skipped("the main graph has no ascend.moe nodes")
        return
    if (too_large := is_too_large(subject, 1, "with its weights")) is not None:
        yield too_large
        return
    feed = lively_feeds(subject, np.random.default_rng([subject.options.seed, 911]))
    if isinstance(feed, Skipped):
        yield feed
        return
    model = ModelProto()
    model.CopyFrom(subject.model)
    after, before = _poisoned(model, subject)
    if not after and not before:
        yield Skipped("no ascend.moe node has rows that may be named by no index")
        return
    session = _session(model, subject)
    if isinstance(session, Skipped):
        yield session
        return
    kinds = {arg.name: arg.type for arg in session.get_inputs()}
    feed = {n: v.astype(np.float32) if kinds.get(n) == "tensor(float)" else v for n, v in feed.items()}
    run = _Run(session, feed, [*after, *before], [output.name for output in subject.model.graph.output])
    try:
        clean, counts = run([])
        again, _ = run([])
    except Exception as error:  # onnxruntime's own classes have no common base
        yield Skipped(f"the model does not run: {line(error)}")
        return
    if _changed(clean, again):
        yield Skipped("two runs with the same inputs differ: nothing can be told from a third")
        return
    for kind, all_switches in ((UNWRITTEN, after), (UNMASKED, before)):
        switches = [switch for switch in all_switches if counts[switch.count]]
        if not switches or not _changed(clean, run(switches)[0]):
            continue
        for switch in switches:
            if changed := _changed(clean, run([switch])[0]):
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                yield kind(
                    switch.where,
                    found=f"NaN in its {int(counts[switch.count])} rows that no index names changes output "
                    f"{changed[0]!r}{more}",
                    expected="nothing changes",
                )
    if not any(counts.values()):
        yield Skipped("with the inputs drawn every row was named by an index: there was nothing to poison")


@dataclass(frozen=True)
class _Run:
    session: onnxruntime.InferenceSession
    feed: Arrays
    switches: list[_Switch]
    outputs: list[str]

    def __call__(self, on: list[_Switch]) -> tuple[Arrays, dict[str, Array]]:
        """Outputs, and how many rows no index names at each place."""
        names = [*dict.fromkeys(self.outputs), *(switch.count for switch in self.switches)]
        feed = {**self.feed, **{switch.name: np.array(switch in on) for switch in self.switches}}
        found = within_limit(lambda options: self.session.run(names, feed, options))
        values = dict(zip(names, found, strict=True))
        counts = {switch.count: values.pop(switch.count) for switch in self.switches}
        return values, counts


def _session(model: ModelProto, subject: Subject) -> onnxruntime.InferenceSession | Skipped:
    """With the model's own bodies where it has them all, as any onnxruntime would run it."""
    bodies = {function.name for function in model.functions if function.domain == DOMAIN}
    used = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    try:
        if used <= bodies:
            try:
                return session_of(model, subject, plain=True)
            except Exception:  # such as bodies that need attributes which nodes leave out
                return session_of(model, subject)
        return session_of(model, subject)
    except Exception as error:  # onnxruntime's own classes have no common base
        return Skipped(f"onnxruntime makes no session of the model with poison: {line(error)}")


def _changed(first: Arrays, second: Arrays) -> list[str]:
    return [name for name, value in first.items() if not _equal(value, second[name])]


def _equal(a: Array, b: Array) -> bool:
    if a.dtype.kind == "f":
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(np.array_equal(a, b))


def _poisoned(model: ModelProto, subject: Subject) -> tuple[list[_Switch], list[_Switch]]:
    """Put switches behind outputs, and in front of inputs, of the model's nodes."""
    graph, types = model.graph, subject.types(subject.main)
    nodes, made = list(graph.node), []
    after: list[_Switch] = []
    before: list[_Switch] = []
    ended = {output.name for output in graph.output}
    for node in nodes:
        ints = {a.name: a.i for a in node.attribute if a.type == AttributeProto.INT}
        is_ours = node.domain == DOMAIN and node.op_type in BY_NAME
        if not is_ours or ints.get("drop_and_pad"):  # padded, every row is named
            made.append(node)
            continue
        # By its own name: a place is known by the intact model.
        where = subject.main.place(node)
        behind: list[NodeProto] = []
        outputs, index = _OUTPUTS.get(node.op_type, ((), 0))
        for at in outputs:
            name = node.output[at] if at < len(node.output) else ""
            named = _name(node.output, -index - 1) if index < 0 else _name(node.input, index)
            if not name or not named or name in ended:
                continue
            node.output[at] = f"{_PREFIX}/{name}"
            switch = _Switch(f"{_PREFIX}/on/{len(after) + len(before)}", f"{name}/{_PREFIX}.rows", where)
            behind.append(_poison(node.output[at], named, name, switch, flat=at == 1))
            after.append(switch)
        inputs, index = _INPUTS.get(node.op_type, ((), 0))
        for at in inputs:
            name, named = _name(node.input, at), _name(node.input, index)
            known = types.get(name)
            if not name or not named or (known is not None and known.shape == (0, 0)):
                continue
            number = len(after) + len(before)
            switch = _Switch(f"{_PREFIX}/on/{number}", f"{name}/{_PREFIX}.rows.{number}", where)
            node.input[at] = f"{name}/{_PREFIX}.{number}"
            made.append(_poison(name, named, node.input[at], switch, flat=at == 1))
            before.append(switch)
        made += [node, *behind]
    del graph.node[:]
    graph.node.extend(made)
    for switch in (*after, *before):
        graph.input.append(helper.make_tensor_value_info(switch.name, TensorProto.BOOL, []))
        graph.output.append(helper.make_tensor_value_info(switch.count, TensorProto.INT64, []))
    opset = max(1, next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), 18))
    model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    model.functions.extend(_function(name, opset) for name in ("Rows", "Values"))
    return after, before


def _name(names: Sequence[str], at: int) -> str:
    return names[at] if at < len(names) else ""


def _poison(rows: str, index: str, result: str, switch: _Switch, *, flat: bool) -> NodeProto:
    """A node that puts NaN in the rows that the index does not name. ``flat``: a row is one value."""
    kind = "Values" if flat else "Rows"
    inputs, outputs = [rows, index, switch.name], [result, switch.count]
    return helper.make_node(kind, inputs, outputs, name=switch.name, domain=_DOMAIN)


def _function(name: str, opset: int) -> FunctionProto:
    end, shape = (
        ("minus_one", "Concat <axis = 0> (leading, one)") if name == "Rows" else ("end", "Identity (leading)")
    )
    return onnx.parser.parse_function(f"""
        <domain: "{_DOMAIN}", opset_import: ["" : {opset}]>
        {name} (rows, index, on) => (result, count)
        {{
            zero = Constant <value = int64[1] {{0}}> ()
            one = Constant <value = int64[1] {{1}}> ()
            minus_one = Constant <value = int64[1] {{-1}}> ()
            end = Constant <value = int64[1] {{9223372036854775807}}> ()
            shape = Shape (rows)
            leading = Slice (shape, zero, {end}, zero)
            num_rows = ReduceProd <keepdims = 1> (leading)
            index_long = Cast <to = 7> (index)
            slots = Reshape (index_long, minus_one)
            below = Less (slots, zero)
            above = GreaterOrEqual (slots, num_rows)
            away = Or (below, above)
            target = Where (away, num_rows, slots)
            places = Add (num_rows, one)
            nobody = Expand (zero, places)
            slots_shape = Shape (slots)
            somebody = Expand (one, slots_shape)
            named_and_away = ScatterElements <axis = 0> (nobody, target, somebody)
            named = Slice (named_and_away, zero, num_rows, zero)
            unnamed = Equal (named, zero)
            unnamed_long = Cast <to = 7> (unnamed)
            count = ReduceSum <keepdims = 0> (unnamed_long)
            poisoned = And (unnamed, on)
            mask_shape = {shape}
            mask = Reshape <allowzero = 1> (poisoned, mask_shape)
            nothing = Constant <value = float {{0}}> ()
            not_a_number = Div (nothing, nothing)
            nan = CastLike (not_a_number, rows)
            result = Where (mask, nan, rows)
        }}""")
