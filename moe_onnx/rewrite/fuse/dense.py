"""Every expert computed for all tokens, and summed by a gate that is 0 for experts that are not chosen.

    gate = 0 but at the K experts that a TopK chose      [T, E]
    y = sum over e of gate[:, e] * expert_e(x)           [T, H]

As a chain of Adds, or of a stack of all experts by ReduceSum, Einsum or MatMul. The gate is proved from how
it is made: by ScatterElements, masks, or a Softmax of scores of which all others are -inf.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import (
    Inserter,
    NotThis,
    attribute,
    ints,
    is_op,
    only_user,
    producer,
    put,
    rank,
    reads,
    terms,
)
from moe_onnx.rewrite.fuse.layer import Layer, Weighted, build, check_experts, check_tokens, told
from moe_onnx.rewrite.fuse.meaning import Expert, Lost, Meaning
from moe_onnx.rewrite.fuse.reading import Reader
from moe_onnx.rewrite.fuse.row_counts import same_rows
from moe_onnx.rewrite.fuse.shapes import is_filled
from moe_onnx.rewrite.fuse.stacked import build_stacked


@dataclass
class Sum:
    """A weighted sum over experts.

    ``terms``: rows, gate and the node that weighs them, of each expert; or ``stack`` of all of them, whose
    experts are along ``axis``. ``others``: what else is added.
    """

    out: ir.Value
    node: ir.Node
    gate: Meaning
    terms: list[tuple[Weighted, Expert]] = field(default_factory=list)
    others: list[ir.Value] = field(default_factory=list)
    stack: ir.Value | None = None
    axis: int = 0
    inner: set[ir.Node] = field(default_factory=set)


def sums(graph: ir.Graph, reader: Reader) -> tuple[list[Sum], list[NotThis]]:
    """All weighted sums of a graph, and what is almost one."""
    found: dict[ir.Value, Sum] = {}
    misses: dict[ir.Value, NotThis] = {}
    for node in graph:
        one = _of_stack(reader, node)
        if one is not None:
            found[one.out] = one
        elif is_op(node, "Mul") and _number(reader, node) is not None:
            root = _root(node)
            if root not in found and root.producer() is not node:
                found[root] = _of_terms(reader, root, node)
        elif is_op(node, "Mul") and (gate := _column(reader, node)) is not None:
            why = f"weights '{gate.name}' are not known to be 0 but at the K experts that a TopK chose"
            lost = reader.read(gate)
            if isinstance(lost, Lost):
                why += f": at '{lost.node.name or lost.node.outputs[0].name}', {lost.reason}"
            misses.setdefault(gate, NotThis(node, why))
    return list(found.values()), list(misses.values())


def _column(reader: Reader, node: ir.Node) -> ir.Value | None:
    """A matrix, by whose columns expert after expert is weighted, or whose columns a stack of them is."""
    for i in (0, 1):
        lifted = producer(node.inputs[i], "Unsqueeze")
        if lifted is None or producer(node.inputs[1 - i], "MatMul", "Gemm", "Add", "Concat") is None:
            continue
        matrix = lifted.inputs[0]
        cut = producer(matrix, "Gather")
        if cut is not None and attribute(cut, "axis", 0) in (1, -1) and ints(reads(cut, 1)) is not None:
            matrix = cut.inputs[0]
        elif producer(node.inputs[1 - i], "Concat") is None or rank(node.outputs[0]) != 3:
            continue
        if rank(matrix) == 2 and reader.meaning(matrix, "gate") is None:
            root = None if cut is None else _root(node).producer()
            if root is None or root is not node:
                return matrix
    return None


def rewrite(graph: ir.Graph, one: Sum, reader: Reader, names: set[str]) -> str:
    """Put ``ascend.moe`` nodes for a sum; what was done, in words.

    Raises:
        NotThis: With the first condition that does not hold; the graph is as it was.
    """
    with Inserter(one.node, names) as e:
        return _rewrite(graph, one, reader, e)


def _rewrite(graph: ir.Graph, one: Sum, reader: Reader, e: Inserter) -> str:
    choice = one.gate.choice
    if one.stack is not None and not (terms := _parts(one, reader)):
        y, text, old = build_stacked(e, reader, one.gate, one.stack, one.axis, one.node)
        _check_unread(old, {one.node, *one.inner})
    else:
        if one.stack is not None:
            one.terms = terms
        numbers = [number for _, number in one.terms]
        count = check_experts(numbers, choice, [term.node for term, _ in one.terms])
        ends = [term for term, _ in sorted(one.terms, key=lambda pair: int(pair[1]))]  # type: ignore[arg-type]
        tokens = _common(reader, ends, choice.ids, one.node)
        check_tokens(tokens, choice, one.node)
        layer = Layer(choice, count, tokens, list(range(count)), ends, lambda lane, value: value is tokens)
        y, lanes = build(e, reader, layer, one.node)
        lanes.check_unread({one.node, *one.inner, *(end.node for end in ends)})
        text = told(layer, lanes, "sum over all experts")
    for other in one.others:
        y = e.op("Add", other, y, name="sum")
    maker = one.out.producer()
    assert maker is not None
    put(graph, e, maker, [(one.out, y)], [maker])
    reader.moved(one.out, y)
    return text


def _check_unread(old: set[ir.Node], ends: set[ir.Node]) -> None:
    for node in old:
        for out in node.outputs:
            if out.is_graph_output():
                raise NotThis(node, f"rows '{out.name}' are an output of the graph")
            for use in out.uses():
                if use.node not in old | ends and not is_op(use.node, "Shape"):
                    raise NotThis(use.node, f"reads rows '{out.name}' beside the layer")


def term_of(reader: Reader, node: ir.Node) -> tuple[Weighted, Expert, Meaning] | None:
    """``rows * gate[:, e]``."""
    for i in (0, 1):
        gate, rows = reader.meaning(node.inputs[1 - i], "gate"), node.inputs[i]
        if gate is None or gate.axes != ("T", "1") or gate.expert is None:
            continue
        if rows is not None and rank(rows) == 2 and gate.source is not None:
            return Weighted(rows, gate.source, gate.cast, node), gate.expert, gate
    return None


def _number(reader: Reader, node: ir.Node) -> int | None:
    """The expert whose rows a node weighs, if that is a number."""
    term = term_of(reader, node)
    return term[1] if term is not None and isinstance(term[1], int) else None


def _root(node: ir.Node) -> ir.Value:
    """The sum of all that a term is a part of."""
    value = node.outputs[0]
    while (user := only_user(value)) is not None and is_op(user, "Add", "Sum"):
        value = user.outputs[0]
    return value


def _of_terms(reader: Reader, root: ir.Value, first: ir.Node) -> Sum:
    found = term_of(reader, first)
    maker = root.producer()
    assert found is not None and maker is not None
    made = Sum(root, maker, found[2])
    waiting = [root]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        term = None if node is None or not is_op(node, "Mul") else term_of(reader, node)
        if term is not None and term[2].choice == made.gate.choice:
            made.terms.append(term[:2])
        elif (
            node is not None and is_op(node, "Add", "Sum") and (value is root or only_user(value) is not None)
        ):
            made.inner.add(node)
            waiting += [one for one in node.inputs if one is not None]
        else:
            made.others.append(value)
    # Zeros go, but not where they might make more of the sum by their shape.
    ids = made.gate.choice.ids
    made.others = [
        value
        for value in made.others[::-1]
        if not (is_filled(value, 0) and (rank(value) == 0 or (rank(value) == 2 and same_rows(value, ids))))
    ]
    return made


def _of_stack(reader: Reader, node: ir.Node) -> Sum | None:
    """A sum over the axis of experts of ``[T, E, H]`` or ``[E, T, H]``."""
    if is_op(node, "ReduceSum"):
        product, axes = producer(node.inputs[0], "Mul"), ints(reads(node, 1))
        if product is None or axes is None or len(axes) != 1 or attribute(node, "keepdims", 1):
            return None
        for i in (0, 1):
            gate, stack = reader.meaning(product.inputs[1 - i], "gate"), product.inputs[i]
            if gate is None or gate.expert is not None or sorted(gate.axes) != ["1", "E", "T"]:
                continue
            axis = gate.axes.index("E")
            if gate.axes[2] == "1" and rank(stack) == 3 and axes[0] % 3 == axis:
                return Sum(node.outputs[0], node, gate, stack=stack, axis=axis, inner={product})
        return None
    if is_op(node, "Einsum") and len(node.inputs) == 2:
        if (found := terms(node)) is None:
            return None
        letters, out = found
        for i in (0, 1):
            gate, stack = reader.meaning(node.inputs[1 - i], "gate"), node.inputs[i]
            if gate is None or sorted(gate.axes) != ["E", "T"] or rank(stack) != 3 or gate.expert is not None:
                continue
            t, e = (letters[1 - i][gate.axes.index(axis)] for axis in ("T", "E"))
            if out[0] == t and len(out) == 2 and letters[i] in (f"{t}{e}{out[1]}", f"{e}{t}{out[1]}"):
                return Sum(node.outputs[0], node, gate, stack=stack, axis=letters[i].index(e))
        return None
    if is_op(node, "MatMul"):
        gate, stack = reader.meaning(node.inputs[0], "gate"), node.inputs[1]
        if gate is None or gate.axes != ("T", "1", "E") or gate.expert is not None or rank(stack) != 3:
            return None
        user = only_user(node.outputs[0])
        if user is not None and is_op(user, "Squeeze") and ints(reads(user, 1)) in ([1], [-2]):
            return Sum(user.outputs[0], node, gate, stack=stack, axis=1, inner={user})
    return None


def _parts(one: Sum, reader: Reader) -> list[tuple[Weighted, Expert]]:
    """The experts that a stack is made of one by one."""
    node = producer(one.stack, "Concat")
    if node is None or one.gate.source is None:
        return []
    if attribute(node, "axis", 0) % 3 != one.axis:
        return []
    found: list[tuple[Weighted, Expert]] = []
    for number, part in enumerate(node.inputs):
        lifted = producer(part, "Unsqueeze")
        if (
            lifted is None
            or lifted.inputs[0] is None
            or [n % 3 for n in ints(reads(lifted, 1)) or []] != [one.axis]
        ):
            return []
        one.inner |= {lifted, node}
        found.append((Weighted(lifted.inputs[0], one.gate.source, one.gate.cast, one.node), number))
    return found


def _common(reader: Reader, ends: list[Weighted], ids: ir.Value, at: ir.Node) -> ir.Value:
    """The tokens that the first two experts both read."""
    found: dict[ir.Value, None] = {}
    seen: set[tuple[ir.Value, ir.Value]] = set()
    waiting = [(ends[0].rows, ends[-1].rows)]
    while waiting:
        pair = waiting.pop()
        one, other = pair
        if pair in seen:
            continue
        seen.add(pair)
        if one is other:
            if rank(one) == 2 and not one.is_initializer() and same_rows(one, ids):
                found[one] = None
            continue
        left, right = one.producer(), other.producer()
        if (
            left is None
            or right is None
            or (left.op_type, len(left.inputs)) != (right.op_type, len(right.inputs))
        ):
            continue
        waiting += [
            (a, b) for a, b in zip(left.inputs, right.inputs, strict=True) if a is not None and b is not None
        ]
    if not found:
        raise NotThis(at, "its experts are not known to read the same tokens, as many as the ids")
    if len(found) > 1:
        names = " and ".join(f"'{value.name}'" for value in list(found)[:2])
        raise NotThis(at, f"its experts read two tensors of tokens, {names}")
    return next(iter(found))
