"""The experts' products: one ``MoeGroupedMatmul`` for all, or a product of each expert's own rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from moe_onnx.rewrite.contrib_moe.dispatched import Dispatch
from moe_onnx.rewrite.fold import unchanged
from moe_onnx.rewrite.fuse.graph import Inserter, NotThis, attribute, is_op, producer, rank, reads, size
from moe_onnx.spec import DOMAIN


@dataclass(frozen=True)
class Linear:
    """One product: ``rows`` times a weight, ``[out, in]`` or, ``turned``, ``[in, out]``, and its bias."""

    node: ir.Node
    rows: ir.Value
    weight: ir.Value
    turned: bool
    bias: ir.Value | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Columns that go out and in.

        Raises:
            NotThis: If they are not known.
        """
        out, into = size(self.weight, -2), size(self.weight, -1)
        if out is None or into is None:
            raise NotThis(self.node, f"the shape of its weight '{self.weight.name}' is not known")
        return (into, out) if self.turned else (out, into)

    @property
    def is_grouped(self) -> bool:
        """Whether it is that of all experts."""
        return self.node.domain == DOMAIN


@dataclass
class Products:
    """The product of all experts, or one of each: all alike."""

    parts: list[Linear] = field(default_factory=list)


def linear_of(value: ir.Value | None) -> Linear | None:
    """The product that gives a value, with the bias added to it."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    if node.domain == DOMAIN and node.op_type == "MoeGroupedMatmul":
        return Linear(node, _in(node, 0), _in(node, 1), not attribute(node, "transpose_weight", 0))
    if is_op(node, "Squeeze", "Transpose") and (same := unchanged(node)) is not None:
        return linear_of(same)
    if is_op(node, "MatMul"):
        weight, turned = _plain(_in(node, 1))
        return Linear(node, _in(node, 0), weight, not turned)
    if is_op(node, "Gemm"):
        scaled = attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1
        if scaled or attribute(node, "transA", 0):
            return None
        if reads(node, 2) is not None and not _is_bias(reads(node, 2)):
            return None
        return Linear(node, _in(node, 0), _in(node, 1), not attribute(node, "transB", 0), reads(node, 2))
    if is_op(node, "Add"):
        for one, other in ((0, 1), (1, 0)):
            made = linear_of(node.inputs[one])
            bias = node.inputs[other]
            if made is None or made.bias is not None or bias is None or linear_of(bias) is not None:
                continue
            if made.is_grouped and producer(bias, "Gather") is None:
                return None
            if not made.is_grouped and not _is_bias(bias):
                return None
            return Linear(made.node, made.rows, made.weight, made.turned, bias)
    return None


def _is_bias(value: ir.Value | None) -> bool:
    """Whether a value has a number for each column, and not one for all, nor for each row."""
    one_row = rank(value) == 1 or (rank(value) == 2 and size(value, 0) == 1)
    return one_row and size(value, -1) not in (None, 1)


def _in(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _plain(weight: ir.Value) -> tuple[ir.Value, bool]:
    node = producer(weight, "Transpose")
    if node is not None and rank(weight) == 2 and node.inputs[0] is not None:
        return node.inputs[0], True
    return weight, False


def check_rows(made: Products, dispatch: Dispatch) -> None:
    """See that products read the rows that were dispatched, each expert its own.

    Raises:
        NotThis: If they read others.
    """
    for i, one in enumerate(made.parts):
        if one.is_grouped or dispatch.experts == 1:
            if one.rows is not dispatch.rows:
                raise NotThis(one.node, "its rows are not those that were dispatched")
            continue
        split = producer(one.rows, "Split")
        if split is None or split.inputs[0] is not dispatch.rows or one.rows is not split.outputs[i]:
            raise NotThis(one.node, f"its rows are not known to be those of expert {i}")
        if attribute(split, "axis", 0) or not dispatch.is_counts(reads(split, 1)):
            raise NotThis(split, "does not split rows by the number that each expert has")


def check_alike(made: Products, dispatch: Dispatch) -> None:
    """See that products are of one form, and have the groups and biases of the rows' experts, or no biases.

    Raises:
        NotThis: If that is not so.
    """
    head = made.parts[0]
    for one in made.parts:
        alike = one.turned == head.turned and one.is_grouped == head.is_grouped and one.sizes == head.sizes
        if not alike or (one.bias is None) != (head.bias is None):
            raise NotThis(one.node, "is another kind of product than expert 0's")
        if not one.is_grouped:
            continue
        if not dispatch.is_counts(one.node.inputs[2]):
            raise NotThis(one.node, "its group_sizes are not the counts of the dispatch")
        if size(one.weight, 0) != dispatch.experts:
            raise NotThis(one.node, f"its weight is not known to be of {dispatch.experts} experts")
        bias = producer(one.bias, "Gather")
        if bias is not None and (
            attribute(bias, "axis", 0)
            or rank(bias.inputs[0]) != 2
            or not dispatch.is_expert_of_row(bias.inputs[1])
        ):
            raise NotThis(bias, "adds rows that are not known to be the biases of the rows' experts")


def first_of(
    e: Inserter, made: list[Products], experts: int, *, halves: bool
) -> tuple[ir.Value, ir.Value | None]:
    """Weight and bias of all experts' first product, in turns of gates and what they gate if need be."""
    weights, biases = [stacked_weight(e, one) for one in made], [stacked_bias(e, one) for one in made]
    width, into = made[0].parts[0].sizes
    if len(made) == 1:
        if halves:
            bias = None if biases[0] is None else _interleaved(e, biases[0], width)
            return _interleaved(e, weights[0], width, into), bias
        return weights[0], biases[0]
    weight = _in_turns(e, weights, 2 * width, into)
    if biases == [None, None]:
        return weight, None
    given = [bias for bias in biases if bias is not None]
    if len(given) == 1:
        none = e.op("Expand", e.constant(0, np.float32), e.constant([experts, width]), name="no_bias")
        given.insert(biases.index(None), none)
    return weight, _in_turns(e, given, 2 * width)


def stacked_weight(e: Inserter, made: Products) -> ir.Value:
    """All experts' weights, ``[E, out, in]``."""
    head = made.parts[0]
    whole = head.weight if head.is_grouped else _common(e, [one.weight for one in made.parts], 3)
    return e.op("Transpose", whole, name="turned", perm=[0, 2, 1]) if head.turned else whole


def stacked_bias(e: Inserter, made: Products) -> ir.Value | None:
    """All experts' biases, ``[E, out]``, None where there are none."""
    biases = [one.bias for one in made.parts]
    if biases[0] is None:
        return None
    if made.parts[0].is_grouped:
        gather = producer(biases[0], "Gather")
        assert gather is not None
        return gather.inputs[0]
    return _common(e, [bias for bias in biases if bias is not None], 2)


def _in_turns(e: Inserter, both: list[ir.Value], width: int, *rest: int) -> ir.Value:
    """The first of the one, the first of the other, and so on."""
    columns = [e.op("Unsqueeze", one, e.constant([2])) for one in both]
    mixed = e.op("Concat", *columns, name="mixed", axis=2)
    return e.op("Reshape", mixed, e.constant([-1, width, *rest]), name="interleaved")


def _interleaved(e: Inserter, whole: ir.Value, width: int, *rest: int) -> ir.Value:
    """Of rows in two halves: the first of the one, the first of the other, and so on."""
    parts = e.op("Reshape", whole, e.constant([-1, 2, width // 2, *rest]), name="halves")
    mixed = e.op("Transpose", parts, name="mixed", perm=[0, 2, 1, 3][: 3 + len(rest)])
    return e.op("Reshape", mixed, e.constant([-1, width, *rest]), name="interleaved")


def _common(e: Inserter, values: list[ir.Value], axes: int) -> ir.Value:
    """What values are the parts of, in order; else they are put together."""
    sources = []
    for value in values:
        node = producer(value, "Reshape", "Squeeze")
        sources.append(node.inputs[0] if node is not None else value)
    split = producer(sources[0], "Split")
    if split is not None and sources == list(split.outputs) and not attribute(split, "axis", 0):
        whole = split.inputs[0]
        assert whole is not None
        if rank(whole) == axes and size(whole, 0) == len(values):
            return whole
    if len(values) == 1 and rank(sources[0]) == axes and size(sources[0], 0) == 1:
        assert sources[0] is not None
        return sources[0]
    rows = [value if rank(value) == axes else e.op("Unsqueeze", value, e.constant([0])) for value in values]
    return e.op("Concat", *rows, name="stacked", axis=0) if len(rows) > 1 else rows[0]
