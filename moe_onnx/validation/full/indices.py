"""Index inputs of ``ascend.moe`` nodes, as they are at run time, held to the documents' rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from moe_onnx.errors import IndexValueError, MoeOnnxError, RoutingMapError
from moe_onnx.operators import BY_NAME
from moe_onnx.operators._groups import group_starts
from moe_onnx.spec import DOMAIN, FLOATS, INDICES, MAPS, OpSpec
from moe_onnx.validation.findings import Finding, Outcome, Skipped, Table
from moe_onnx.validation.full.cuts import cut, line, reads, session_of
from moe_onnx.validation.full.lively import Arrays, is_too_large, lively_feeds
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.drawing import Array, required_inputs
from moe_onnx.validation.run.feeds import manifest_of
from moe_onnx.validation.run.limits import TooLong, within_limit
from moe_onnx.validation.subject import Subject

_MOST_ELEMENTS = 2**27  # of a node's outputs; rows of zeros are made to ask the reference
_MOST_ROWS = 64  # of the table

VALUE = code(
    "MO921",
    "error",
    "An index is out of its range, or twice where it may be once, at run time",
    why="The source documents give each index input a range and ask that rows are named once; the kernels do "
    "not look: an index outside reads or writes other memory, two slots of one row overwrite each other. "
    "Function bodies check ranges but not uniqueness, so such a model may run here and be silently wrong. "
    "Indices are taken from a run with drawn inputs.",
    mend="Make the indices with the forward operator of the pair, and hand them on as they are.",
)
MAP = code(
    "MO922",
    "error",
    "A routing map selects more experts for a token than there are slots",
    why="Slots are paired with the selected experts of a token in ascending order. With more experts than "
    "slots the kernels misalign this token and all that follow in its chunk.",
    mend="Make the map of the same top-k choice as the indices, and give num_out_tokens as T * K.",
)
ORDER = code(
    "MO923",
    "warning",
    "The slots of a token are not in the order of their experts",
    why="The combine by routing map pairs the k-th slot of a token with the k-th selected expert, ascending. "
    "Slots that come in top-k order, best expert first, get each other's probabilities: the model runs, its "
    "gradients agree with finite differences, and it is another model (measured: loss 21.09, not 18.94).",
    mend="Sort each token's expert ids, and carry the weights along, before MoeInitRoutingV2.",
)
NO_EXPERT = code(
    "MO925",
    "warning",
    "A slot names a row but the routing map has no expert for it",
    why="The k-th slot of a token has the probability of the k-th expert that the map selects for it. A slot "
    "beyond the last one adds nothing, and gets no gradient, whatever row it names: as when an expert is "
    "chosen twice for a token, which a map cannot say.",
    mend="Choose experts that differ for each token, and give slots without an expert the index -1.",
)
REFUSED = code(
    "MO924",
    "warning",
    "An ascend.moe node refuses its inputs at run time",
    why="Sizes that are free in the file have values in a run, and at this node they do not belong together. "
    "It is wrong where the graph makes both sizes; where they are those of graph inputs, the model only does "
    "not say that they must be the same.",
    mend="Derive both sizes from the same value of the graph, or give the axes of the inputs one name.",
)
DRAWN = code(
    "MO926",
    "warning",
    "An index has illegal values for the integers that were drawn",
    why="The index, or routing map, depends on integer or boolean inputs of the graph. Values were drawn for "
    "them, and what is legal for them only the model's author knows: with these the operator would read or "
    "write other rows than it should, or none.",
    mend="If those values are legal, correct how the graph makes indices of them; if not, nothing is wrong.",
)


@dataclass(frozen=True)
class _Watch:
    """A node of the main graph with the names under which its inputs are fetched."""

    node: NodeProto
    spec: OpSpec
    where: str
    fetched: tuple[str, ...]  # "" where the node has no such input

    def is_index(self, at: int) -> bool:
        return self.spec.inputs[at].dtypes in (INDICES, MAPS)


@check("full", VALUE, MAP, ORDER, NO_EXPERT, REFUSED, DRAWN)
def indices(subject: Subject) -> Iterator[Outcome]:
    """Indices and routing maps of ascend.moe nodes have legal values in a run with drawn inputs."""
    elsewhere = sum(1 for scope, node in subject.nodes() if scope is not subject.main and _is_ours(node))
    ours = [node for node in subject.main.nodes if _is_ours(node)]
    if elsewhere:
        yield Skipped(f"{elsewhere} ascend.moe nodes in subgraphs or functions, whose values are not seen")
    if not ours:
        yield Skipped("the main graph has no ascend.moe nodes")
        return
    if (too_large := is_too_large(subject, 1, "with its weights")) is not None:
        yield too_large
        return
    feed = lively_feeds(subject, np.random.default_rng([subject.options.seed, 921]))
    if isinstance(feed, Skipped):
        yield feed
        return
    model, watches = _watched(subject, ours)
    found, count, stopped = _values(model, watches, subject, feed)
    rows: list[tuple[Any, ...]] = []
    free = _by_drawn_integers(subject)
    for watch in watches[:count]:
        of_drawn = any(watch.node.input[at] in free for at in range(len(watch.fetched)) if watch.is_index(at))
        for outcome in _of_node(watch, found, rows):
            if of_drawn and isinstance(outcome, Finding) and outcome.severity == "error":
                yield DRAWN(outcome.where, found=outcome.found, aclnn=outcome.aclnn_status)
            else:
                yield outcome
    if stopped:
        yield Skipped(f"{len(watches) - count} nodes were not reached: {stopped}")
    if rows:
        columns = ("node", "input", "values", "least", "largest", "-1s", "twice")
        yield Table("Indices of ascend.moe nodes in a run", columns, tuple(rows[:_MOST_ROWS]))


def _by_drawn_integers(subject: Subject) -> set[str]:
    """Values of the main graph that depend on integer or boolean inputs which no manifest explains."""
    manifest, types = manifest_of(subject), subject.types(subject.main)
    known = set()
    if manifest is not None:
        known = {info.name for graph in manifest.graphs.values() for info in graph.inputs}
    free = {
        info.name
        for info in required_inputs(subject)
        if info.name not in known and not (info.name in types and types[info.name].dtype in FLOATS)
    }
    for node in subject.main.nodes:
        if not free.isdisjoint(reads(node)):
            free.update(name for name in node.output if name)
    return free


def _is_ours(node: NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type in BY_NAME


def _watched(subject: Subject, nodes: Sequence[NodeProto]) -> tuple[ModelProto, list[_Watch]]:
    """The model with a node for the shape of each float input, and what to fetch for each node."""
    model = ModelProto()
    model.CopyFrom(subject.model)
    shapes: dict[str, str] = {}
    watches = []
    for node in nodes:
        spec, fetched = BY_NAME[node.op_type], []
        for arg, name in zip(spec.inputs, node.input, strict=False):
            if not name or arg.dtypes in (INDICES, MAPS):
                fetched.append(name)
                continue
            if name not in shapes:
                shapes[name] = f"{name}/moe_onnx.shape"
                model.graph.node.append(helper.make_node("Shape", [name], [shapes[name]]))
            fetched.append(shapes[name])
        watches.append(_Watch(node, spec, subject.main.place(node), tuple(fetched)))
    return model, watches


def _values(
    model: ModelProto, watches: list[_Watch], subject: Subject, feed: Arrays
) -> tuple[Arrays, int, str]:
    """Values of as many nodes' inputs, in the file's order, as can be had; how many; what stopped the rest.

    A node whose index is wrong may refuse to run: then the nodes before it can be seen, and its inputs.
    """
    good, bad, found, error = 0, len(watches) + 1, {}, ""
    trial = len(watches)
    while good < bad - 1:
        try:
            found, good = _run(model, watches[:trial], subject, feed), trial
        except TooLong:
            raise  # it would be as long for fewer nodes
        except Exception as exception:  # onnxruntime's own classes have no common base
            bad, error = trial, line(exception)
        trial = (good + bad) // 2
    return found, good, error if good < len(watches) else ""


def _run(model: ModelProto, watches: Sequence[_Watch], subject: Subject, feed: Arrays) -> Arrays:
    names = list(dict.fromkeys(name for watch in watches for name in watch.fetched if name))
    given = {t.name: t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL}
    known = {name: feed[name] for name in names if name in feed}
    known |= {name: numpy_helper.to_array(given[name]) for name in names if name in given}
    made = [name for name in names if name not in known]
    small = cut(model, made)
    session = session_of(small, subject)
    kinds = {arg.name: arg.type for arg in session.get_inputs()}
    fed = {
        n: v.astype(np.float32) if kinds[n] == "tensor(float)" else v for n, v in feed.items() if n in kinds
    }
    ran = within_limit(lambda options: session.run(made, fed, options))
    values = dict(zip(made, ran, strict=True))
    return values | known


def _of_node(watch: _Watch, found: Arrays, rows: list[tuple[Any, ...]]) -> Iterator[Outcome]:
    values: list[Array | None] = []
    for at, name in enumerate(watch.fetched):
        value = found.get(name) if name else None
        if value is not None and not watch.is_index(at):
            value = np.broadcast_to(np.float32(0), tuple(int(size) for size in value))
        elif value is not None and watch.spec.inputs[at].dtypes == INDICES and value.size:
            rows.append((watch.node.name or watch.where, watch.spec.inputs[at].name, *_summary(value)))
        values.append(value)
    if sum(value.size for value in values if value is not None) > _MOST_ELEMENTS:
        yield Skipped(f"{watch.where}: its inputs have more than {_MOST_ELEMENTS:,} elements")
        return
    attributes = {a.name: helper.get_attribute_value(a) for a in watch.node.attribute}
    try:
        if watch.spec.inputs[-1].name == "group_sizes":
            _group_sizes(watch, values)
        else:
            watch.spec.reference(*values, **attributes)
    except IndexValueError as error:
        yield _finding(VALUE, watch, error)
        return
    except RoutingMapError as error:
        yield _finding(MAP, watch, error)
        return
    except MoeOnnxError as error:
        yield _finding(REFUSED, watch, error)
        return
    except TypeError as error:  # an attribute the operator does not have, which is found elsewhere
        yield Skipped(f"{watch.where}: {error}")
        return
    yield from _order(watch, values)


def _summary(index: Array) -> tuple[int, int, int, int, int]:
    named = index[index >= 0]
    twice = int(named.size - np.unique(named).size)
    return int(index.size), int(index.min()), int(index.max()), int((index == -1).sum()), twice


def _group_sizes(watch: _Watch, values: list[Array | None]) -> None:
    """Rows of groups only: the product itself would be dear."""
    rows = values[0]
    sizes = values[-1]
    if rows is not None and sizes is not None and len(sizes):
        group_starts(watch.spec.name, sizes, len(rows))


def _order(watch: _Watch, values: list[Array | None]) -> Iterator[Finding]:
    """Whether the combine's slots name rows that ascend, as rows ordered by expert do."""
    names = [arg.name for arg in watch.spec.inputs]
    given = dict(zip(names, values, strict=False))
    padded = any(a.name == "drop_and_pad" and a.i for a in watch.node.attribute)
    probs = given.get("probs")
    if padded or probs is None or probs.shape == (0, 0) or "Unpermute" not in watch.spec.name:
        return
    index = given.get("out_index", given.get("sorted_indices"))
    token = given.get("permute_token_id")
    tokens = len(probs)
    if (
        index is None
        or not tokens
        or index.size < 2
        or (token is not None and not np.array_equal(index, token))
    ):
        return
    slots = index.reshape(tokens, -1)
    selected = given.get("routing_map")
    if selected is not None and selected.shape == probs.shape:
        spare = (slots >= 0).sum(axis=1) - np.count_nonzero(selected, axis=1)
        if (spare > 0).any():
            at = int(spare.argmax())
            yield NO_EXPERT(
                watch.where,
                found=f"{int((spare > 0).sum())} of {tokens} tokens have more slots with a row than experts, "
                f"first token {int((spare > 0).argmax())}; token {at} has {int(spare[at])} too many",
                expected="one selected expert for each slot with a row",
            )
    for number, slot in enumerate(slots):
        named = slot[slot >= 0]
        if (np.diff(named) < 0).any():
            wrong = int(sum(bool((np.diff(s[s >= 0]) < 0).any()) for s in slots))
            yield ORDER(
                watch.where,
                found=f"the slots of {wrong} of {tokens} tokens, first of token {number}, name rows "
                f"{named.tolist()[:8]}, which do not ascend",
                expected="ascending rows, as rows are ordered by expert",
            )
            return


def _finding(kind: Any, watch: _Watch, error: MoeOnnxError) -> Finding:
    said = str(error).removeprefix(f"{watch.spec.name}: ").rstrip(".")
    finding: Finding = kind(watch.where, found=said, aclnn=error.aclnn_status)
    return finding
