"""Independent per-token-loop oracles for the MoE routing operators, and index generators.

Written from the formulas of the contract alone: slow, scalar, without input validation.
16-bit and float32 data is widened to float32 and float64 stays (the "accumulate type"); sums over
the K slots run in slot order from +0.0 in that type; each result is rounded once, at the end.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Oracle = TypeVar("Oracle", bound=Callable[..., Any])
_MOST, _BYTES = 4096, 2**25  # answers of each oracle, and what they and their questions hold


def remembered(oracle: Oracle) -> Oracle:
    """Answers are kept: the routes of an operator are asked the same, and scalar loops take long.

    What is handed out are copies.
    """
    answers: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
    held = 0

    @functools.wraps(oracle)
    def answer(*arguments: Any, **named: Any) -> Any:
        nonlocal held
        values = [*arguments, *(value for pair in sorted(named.items()) for value in pair)]
        size = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
        if size > 2**18:
            return oracle(*arguments, **named)
        key = (len(arguments), *map(_key, values))
        if key not in answers:
            answers[key] = oracle(*arguments, **named), size
            held += size
            while len(answers) > _MOST or held > _BYTES:
                held -= answers.popitem(last=False)[1][1]
        return _copy(answers[key][0])

    return answer  # type: ignore[return-value]


def _key(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.name, value.shape, value.tobytes()
    return tuple(value) if isinstance(value, list) else (type(value), value)


def _copy(answer: Any) -> Any:
    if isinstance(answer, tuple):
        return tuple(map(_copy, answer))
    return answer.copy() if isinstance(answer, np.ndarray) else answer


def _acc(a: Array) -> type[np.floating[Any]]:
    """Accumulate type of a tensor."""
    return np.float64 if a.dtype == np.float64 else np.float32


def _given(a: Array | None) -> Array | None:
    """None also for an empty [0, 0] constant, the ONNX form's spelling of an absent input."""
    return None if a is None or a.shape == (0, 0) else a


def _dot(a: Array, b: Array) -> float:
    """Dot product without an order: exact float64 sum (float32 products are exact there)."""
    products = [float(x) * float(y) for x, y in zip(a, b, strict=True)]
    if all(math.isfinite(v) for v in products):
        try:
            return math.fsum(products)
        except OverflowError:  # partial sums past the float64 range: add in order, like the rest
            pass
    total = 0.0  # not sum(): newer Pythons compensate there
    for v in products:
        total += v
    return total


def _experts_of(routing_map: Array, t: int) -> list[int]:
    """Selected experts of token t, ascending; an int8 map selects where it is non-zero."""
    return [e for e, chosen in enumerate(routing_map[t].tolist()) if chosen != 0]


def _expert_major(routing_map: Array) -> list[tuple[int, int]]:
    """Selected (expert, token) pairs, ordered by expert, then token."""
    tokens, experts = routing_map.shape
    selected = routing_map.tolist()  # numpy is slow at single elements
    return [(e, t) for e in range(experts) for t in range(tokens) if selected[t][e] != 0]


@remembered
@np.errstate(all="ignore")
def init_routing_v2_grad(
    grad_expanded_x: Array,
    expanded_row_idx: Array,
    *,
    top_k: int,
    drop_pad_mode: int = 0,
    active_num: int = 0,
) -> Array:
    """grad_x[i] = sum over t < K of X[p], p = expanded_row_idx[i*K + t], dropped p adding 0."""
    hidden = grad_expanded_x.shape[-1]
    rows = math.prod(grad_expanded_x.shape[:-1])  # reshape(-1, H) is undefined for H = 0
    x = grad_expanded_x.reshape(rows, hidden).astype(_acc(grad_expanded_x))
    tokens = len(expanded_row_idx) // top_k
    grad_x = np.zeros((tokens, hidden), grad_expanded_x.dtype)
    for i in range(tokens):
        total = np.zeros(hidden, x.dtype)
        for t in range(top_k):
            p = int(expanded_row_idx[i * top_k + t])
            if drop_pad_mode == 1 and p == -1:
                continue
            if drop_pad_mode == 0 and active_num > 0 and p >= active_num:
                continue  # the forward cuts the rows but not the permutation
            total = total + x[p]
        grad_x[i] = total.astype(grad_x.dtype)
    return grad_x


@remembered
@np.errstate(all="ignore")
def unpermute_grad(
    unpermuted_tokens_grad: Array,
    out_index: Array,
    permute_token_id: Array,
    routing_map: Array | None = None,
    permuted_tokens: Array | None = None,
    probs: Array | None = None,
    *,
    drop_and_pad: bool = False,
) -> tuple[Array, Array | None]:
    """(G, Q): row out_index[i] of G is dY of its token times its prob, Q the row dot products."""
    dy, acc = unpermuted_tokens_grad, _acc(unpermuted_tokens_grad)
    slots, tokens = len(out_index), dy.shape[0]
    g = np.zeros((slots, dy.shape[1]), dy.dtype)
    probs = _given(probs)
    q = None if probs is None else np.zeros(probs.shape, probs.dtype)
    same = [int(v) for v in out_index] == [int(v) for v in permute_token_id]
    slot_form = same and not drop_and_pad
    pairs = [] if probs is None or routing_map is None else _expert_major(routing_map)
    for i in range(slots):
        p = int(out_index[i])
        if p == -1:  # a slot without a row; its token id means nothing
            continue
        t, k = divmod(i, slots // tokens) if slot_form else (int(permute_token_id[i]), 0)
        if probs is None or q is None:
            g[p] = dy[t]  # pure copy
            continue
        assert routing_map is not None and permuted_tokens is not None
        # `cell` is the slot's place in probs and Q. Where there is none the row is exactly 0 by
        # selection, even where dY is NaN.
        if drop_and_pad:
            cell = (t, p // (slots // probs.shape[1]))
        elif slot_form:
            chosen = _experts_of(routing_map, t)
            if k >= len(chosen):
                continue
            cell = (t, chosen[k])
        else:
            if p >= len(pairs):
                continue
            cell = (pairs[p][1], pairs[p][0])  # by position, whether or not that token is t
        g[p] = (dy[t].astype(acc) * probs[cell].astype(acc)).astype(g.dtype)
        # A store, not a sum: of a cell named twice (padded mode) the last slot stays.
        q[cell] = acc(_dot(permuted_tokens[p], dy[t])).astype(q.dtype)
    return g, q


@remembered
@np.errstate(all="ignore")
def init_routing_v2(
    x: Array,
    expert_idx: Array,
    *,
    active_num: int = 0,
    expert_capacity: int = 0,
    expert_num: int = 0,
    drop_pad_mode: int = 0,
    expert_tokens_count_or_cumsum_flag: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
) -> tuple[Array, Array, Array | None, Array | None]:
    """(expanded_x, expanded_row_idx, count_or_cumsum | None, before_capacity | None)."""
    tokens, top_k = expert_idx.shape
    hidden = x.shape[1]
    flat = [int(expert_idx[i, k]) for i in range(tokens) for k in range(top_k)]
    order = sorted(range(len(flat)), key=lambda j: flat[j])  # stable: ties stay token-major
    row_idx = np.full(len(flat), -1, np.int32)
    counts = np.zeros(expert_num, np.int32)
    if drop_pad_mode == 1:
        expanded = np.zeros((expert_num, expert_capacity, hidden), x.dtype)
        for j in order:
            e = flat[j]
            rank = int(counts[e])
            counts[e] += 1  # before capacity: dropped entries count
            if rank < expert_capacity:
                expanded[e, rank] = x[j // top_k]
                row_idx[j] = e * expert_capacity + rank
        return expanded, row_idx, None, counts if expert_tokens_before_capacity_flag else None
    rows = min(active_num, len(flat)) if active_num > 0 else len(flat)
    expanded = np.zeros((rows, hidden), x.dtype)
    for r, j in enumerate(order):
        row_idx[j] = r  # the inverse of the sort, not cut to the active rows
        if r < rows:
            expanded[r] = x[j // top_k]
    if expert_tokens_count_or_cumsum_flag == 0:
        return expanded, row_idx, None, None
    for e in flat:
        counts[e] += 1
    if expert_tokens_count_or_cumsum_flag == 1:
        for e in range(1, expert_num):
            counts[e] += counts[e - 1]
    return expanded, row_idx, counts, None


@remembered
@np.errstate(all="ignore")
def unpermute(
    permuted_tokens: Array,
    sorted_indices: Array,
    routing_map: Array | None = None,
    probs: Array | None = None,
    *,
    drop_and_pad: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """(unpermuted_tokens, out_index, permute_token_id, permute_probs | None)."""
    slots, dtype, acc = len(sorted_indices), permuted_tokens.dtype, _acc(permuted_tokens)
    probs, routing_map = _given(probs), _given(routing_map)
    rows_like = routing_map if probs is None else probs
    if rows_like is not None:
        tokens = rows_like.shape[0]
    else:
        tokens = restore_shape[0] if restore_shape else 0
    totals = np.zeros((tokens, permuted_tokens.shape[1]), acc)
    permute_probs = None if probs is None else np.zeros(slots, probs.dtype)
    if drop_and_pad:
        for i in range(slots):
            t = int(sorted_indices[i])
            row = permuted_tokens[i].astype(acc)
            if probs is not None and permute_probs is not None:
                permute_probs[i] = probs[t, i // (slots // probs.shape[1])]
                row = row * permute_probs[i].astype(acc)  # a zero prob is not skipped here
            totals[t] = totals[t] + row
        return totals.astype(dtype), *_stable_sort(sorted_indices), permute_probs
    for i in range(slots):
        t, k = divmod(i, slots // tokens)
        p = int(sorted_indices[i])
        weight = acc(1)  # times 1 is exact
        if probs is not None and permute_probs is not None:
            assert routing_map is not None
            chosen = _experts_of(routing_map, t)
            if k >= len(chosen):
                continue
            permute_probs[i] = probs[t, chosen[k]]
            weight = permute_probs[i].astype(acc)
        if p != -1 and weight != 0:  # skipped by selection: a NaN in the row stays there
            totals[t] = totals[t] + permuted_tokens[p].astype(acc) * weight
    index = np.array([int(v) for v in sorted_indices], np.int32)
    return totals.astype(dtype), index, index.copy(), permute_probs


@remembered
def permute(
    tokens: Array,
    routing_map: Array,
    probs: Array | None = None,
    *,
    num_out_tokens: int = 0,
    drop_and_pad: bool = False,
) -> tuple[Array, Array | None, Array]:
    """(permute_tokens, permute_probs | None, sorted_indices)."""
    num_tokens, experts = routing_map.shape
    rows: list[tuple[int, int]]  # (token, expert) of each row
    if drop_and_pad:
        capacity = num_out_tokens // experts if experts else 0
        taken = [int(t) for t in padded_slots(routing_map, capacity)[0]]
        rows = [(t, i // capacity) for i, t in enumerate(taken)]
        count, slots = num_out_tokens, taken
    else:
        chosen = [_experts_of(routing_map, t) for t in range(num_tokens)]
        top_k = num_out_tokens // num_tokens if num_out_tokens else max(map(len, chosen), default=0)
        rows = [(t, e) for e, t in _expert_major(routing_map)]
        count, slots = num_tokens * top_k, []
        for t in range(num_tokens):
            own = [rows.index((t, e)) for e in chosen[t]]
            slots += own + [-1] * (top_k - len(own))
    moved = np.zeros((count, tokens.shape[1]), tokens.dtype)
    probs = _given(probs)
    weights = None if probs is None else np.zeros(count, probs.dtype)
    for j, (t, e) in enumerate(rows):
        moved[j] = tokens[t]
        if weights is not None and probs is not None:
            weights[j] = probs[t, e]
    return moved, weights, np.array(slots, np.int32)


@remembered
@np.errstate(all="ignore")
def permute_grad(
    permuted_token_output_grad: Array,
    permuted_probs_output_grad: Array | None,
    sorted_indices: Array,
    routing_map: Array | None = None,
    *,
    num_experts: int = 0,
    tokens_num: int = 0,
    drop_and_pad: bool = False,
) -> tuple[Array, Array | None]:
    """(tokens_grad, probs_grad | None)."""
    g, gp = permuted_token_output_grad, _given(permuted_probs_output_grad)
    tokens, experts = (tokens_num, num_experts) if routing_map is None else routing_map.shape
    totals = np.zeros((tokens, g.shape[1]), _acc(g))
    probs_grad = None if gp is None else np.zeros((tokens, experts), gp.dtype)
    pairs = [] if routing_map is None else _expert_major(routing_map)
    for i, value in enumerate(sorted_indices.tolist()):
        t, p = (value, i) if drop_and_pad else (i // (len(g) // tokens), value)
        if p >= 0:
            totals[t] = totals[t] + g[p].astype(totals.dtype)
        if probs_grad is None or gp is None:
            continue
        if drop_and_pad:
            probs_grad[t, i // (len(g) // experts)] = gp[i]
        elif i < len(pairs):  # by row, whatever the slots say
            probs_grad[pairs[i][1], pairs[i][0]] = gp[i]
    return totals.astype(g.dtype), probs_grad


def _stable_sort(sorted_indices: Array) -> tuple[Array, Array]:
    """(positions, values) of the stable ascending sort: out_index, permute_token_id."""
    order = sorted(range(len(sorted_indices)), key=lambda i: int(sorted_indices[i]))
    values = [int(sorted_indices[i]) for i in order]
    return np.array(order, np.int32), np.array(values, np.int32)


@remembered
@np.errstate(all="ignore")
def grouped_matmul(x: Array, weight: Array, group_sizes: Array, *, transpose_weight: int = 0) -> Array:
    """y[i] = x[i] @ weight[e], row by row and column by column; sums without an order."""
    matrices = [w.T if transpose_weight else w for w in weight]  # each [H, F]
    width = weight.shape[1 if transpose_weight else 2]
    y = np.zeros((len(x), width), x.dtype)
    for i, e in enumerate(_expert_of_rows(group_sizes)):
        for f in range(width):
            y[i, f] = _acc(x)(_dot(x[i], matrices[e][:, f])).astype(x.dtype)
    return y


@remembered
@np.errstate(all="ignore")
def grouped_matmul_weight_grad(
    x: Array, grad_y: Array, group_sizes: Array, *, transpose_weight: int = 0
) -> Array:
    """grad_weight[e, h, f] = sum over the rows i of expert e of x[i, h] * grad_y[i, f]."""
    hidden, width = x.shape[1], grad_y.shape[1]
    grad = np.zeros((len(group_sizes), hidden, width), x.dtype)
    owners = _expert_of_rows(group_sizes)
    for e in range(len(group_sizes)):
        rows = [i for i, owner in enumerate(owners) if owner == e]
        for h in range(hidden):
            for f in range(width):
                grad[e, h, f] = _acc(x)(_dot(x[rows, h], grad_y[rows, f])).astype(x.dtype)
    return grad.transpose(0, 2, 1) if transpose_weight else grad


def square_sum(x: Array) -> Array:
    """The sum of all squares, of fractions, rounded once: infinities and NaNs are added up as such."""
    values = [float(value) for value in x.reshape(-1)]
    if not all(map(math.isfinite, values)):
        return np.asarray(sum(value * value for value in values), x.dtype)
    with np.errstate(over="ignore"):
        return np.asarray(np.float64(sum(Fraction(value) ** 2 for value in values))).astype(x.dtype)


def swi_glu(x: Array) -> Array:
    """y[i, f] = silu(x[i, f]) * x[i, F + f], element by element in double precision, rounded once."""
    width = x.shape[1] // 2
    y = np.empty((len(x), width), x.dtype)
    for i, f in np.ndindex(y.shape):
        gate, up = float(x[i, f]), float(x[i, width + f])
        y[i, f] = _acc(x)(_swish(gate) * up).astype(x.dtype)
    return y


def swi_glu_grad(grad_y: Array, x: Array) -> Array:
    """The derivatives of that by gate and by up, times grad_y."""
    width = x.shape[1] // 2
    grad = np.empty_like(x)
    for i, f in np.ndindex(grad_y.shape):
        gate, up, d = float(x[i, f]), float(x[i, width + f]), float(grad_y[i, f])
        s = _sigmoid(gate)
        # d/dg g s(g) = s + g s (1 - s), and 1 - s(g) = s(-g).
        grad[i, f] = _acc(x)(d * up * (s + gate * s * _sigmoid(-gate))).astype(x.dtype)
        grad[i, width + f] = _acc(x)(d * _swish(gate)).astype(x.dtype)
    return grad


def _sigmoid(x: float) -> float:
    try:
        return 1 / (1 + math.exp(-x))
    except OverflowError:
        return 0.0


def _swish(x: float) -> float:
    return x * _sigmoid(x)


@np.errstate(all="ignore")
def adam_w(parameter: Array, gradient: Array, exp_avg: Array, exp_avg_sq: Array, factors: Array) -> Any:
    """(parameter, exp_avg, exp_avg_sq) after an update, element by element.

    Each operation is made in double precision and rounded to the dtype: of float32 numbers that is what one
    operation in float32 gives, as 53 bits are more than 2 * 24 + 1.
    """

    def rounded(x: Any) -> Any:
        return np.float64(parameter.dtype.type(x))

    beta1, weight1, beta2, weight2, rate, eps, kept = factors.astype(np.float64)
    out = [np.empty(parameter.shape, parameter.dtype) for _ in range(3)]
    for at in np.ndindex(parameter.shape):
        p, g, m, v = (np.float64(a[at]) for a in (parameter, gradient, exp_avg, exp_avg_sq))
        m = rounded(rounded(m * beta1) + rounded(g * weight1))
        v = rounded(rounded(v * beta2) + rounded(rounded(g * g) * weight2))
        change = rounded(rounded(m * rate) / rounded(rounded(np.sqrt(v)) + eps))
        p = rounded(rounded(p * kept) - change)
        for made, value in zip(out, (p, m, v), strict=True):
            made[at] = value
    return tuple(out)


def _expert_of_rows(group_sizes: Array) -> list[int]:
    return [e for e, size in enumerate(group_sizes.tolist()) for _ in range(size)]


@remembered
@np.errstate(all="ignore")
def finalize(
    expanded_x: Array,
    expanded_row_idx: Array,
    x1: Array | None = None,
    x2: Array | None = None,
    bias: Array | None = None,
    scales: Array | None = None,
    expert_idx: Array | None = None,
    *,
    drop_pad_mode: int = 0,
) -> Array:
    """out[i] = x1[i] + x2[i] + sum over k of scales[i, k] * (X[p] + bias[expert_idx[i, k]])."""
    hidden, acc = expanded_x.shape[-1], _acc(expanded_x)
    x = expanded_x.reshape(math.prod(expanded_x.shape[:-1]), hidden)
    x1, x2, bias, scales = (_given(a) for a in (x1, x2, bias, scales))
    tokens, top_k = (len(expanded_row_idx), 1) if scales is None else scales.shape
    out = np.zeros((tokens, hidden), x.dtype)
    for i in range(tokens):
        total = np.zeros(hidden, acc)
        for skip in (x1, x2):
            if skip is not None:
                total = total + skip[i].astype(acc)
        for k in range(top_k):
            p = int(expanded_row_idx[k * tokens + i if drop_pad_mode in (0, 1) else i * top_k + k])
            if p == -1:
                continue  # the whole term, by selection
            row = x[p].astype(acc)
            if bias is not None and expert_idx is not None:
                row = row + bias[int(expert_idx[i, k])].astype(acc)
            total = total + (row if scales is None else scales[i, k].astype(acc) * row)
        out[i] = total.astype(out.dtype)
    return out


@remembered
@np.errstate(all="ignore")
def finalize_grad(
    grad_y: Array,
    expanded_row_idx: Array,
    expanded_x: Array | None = None,
    scales: Array | None = None,
    expert_idx: Array | None = None,
    bias: Array | None = None,
    *,
    drop_pad_mode: int = 0,
    active_num: int = 0,
    expert_num: int = 0,
    expert_capacity: int = 0,
) -> tuple[Array, Array | None]:
    """(grad_expanded_x, grad_scales): grad_y times scale by row, the rows' dot products by slot."""
    hidden, acc = grad_y.shape[1], _acc(grad_y)
    bias, scales = _given(bias), _given(scales)
    leading = (active_num or len(expanded_row_idx),)
    if drop_pad_mode == 1:
        leading = expanded_x.shape[:2] if expanded_x is not None else (expert_num, expert_capacity)
    rows = math.prod(leading)
    grad = np.zeros((rows, hidden), grad_y.dtype)
    grad_scales = None if scales is None else np.zeros(scales.shape, scales.dtype)
    top_k = 1 if scales is None else scales.shape[1]
    for j, p in enumerate(int(v) for v in expanded_row_idx):
        i, k = divmod(j, top_k)
        if p == -1 or p >= rows:
            continue
        if scales is None or grad_scales is None:
            grad[p] = grad_y[i]
            continue
        assert expanded_x is not None
        grad[p] = (scales[i, k].astype(acc) * grad_y[i].astype(acc)).astype(grad.dtype)
        row = expanded_x.reshape(rows, hidden)[p].astype(acc)
        if bias is not None and expert_idx is not None:
            row = row + bias[int(expert_idx[i, k])].astype(acc)
        grad_scales[i, k] = acc(_dot(row, grad_y[i])).astype(scales.dtype)
    return grad.reshape(*leading, hidden), grad_scales


def random_routing(
    rng: np.random.Generator, tokens: int, experts: int, top_k: int
) -> tuple[Array, Array, Array]:
    """(expert_idx [T,K] ascending distinct ids, routing_map bool [T,E], sorted_indices [T*K])."""
    expert_idx = np.zeros((tokens, top_k), np.int32)
    routing_map = np.zeros((tokens, experts), np.bool_)
    for t in range(tokens):
        for k, e in enumerate(sorted(int(v) for v in rng.permutation(experts)[:top_k])):
            expert_idx[t, k] = e
            routing_map[t, e] = True
    position = {pair: j for j, pair in enumerate(_expert_major(routing_map))}
    sorted_indices = np.zeros(tokens * top_k, np.int32)
    for t in range(tokens):
        for k in range(top_k):
            sorted_indices[t * top_k + k] = position[int(expert_idx[t, k]), t]
    return expert_idx, routing_map, sorted_indices


def padded_slots(routing_map: Array, capacity: int) -> tuple[Array, Array, Array]:
    """(sorted_indices [E*C], out_index, permute_token_id) as the padded forward makes them."""
    tokens, experts = routing_map.shape
    taken: list[int] = []
    chosen = routing_map.tolist()
    for e in range(experts):
        # A stable descending sort of the column: selected ascending, then the others ascending.
        selected = [t for t in range(tokens) if chosen[t][e] != 0]
        others = [t for t in range(tokens) if chosen[t][e] == 0]
        taken += (selected + others)[:capacity]
    sorted_indices = np.array(taken, np.int32)
    out_index, token_id = _stable_sort(sorted_indices)
    return sorted_indices, out_index, token_id
