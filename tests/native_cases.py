"""Random calls of every operator in all its modes; ``native_damage`` makes wrong ones of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Rng = np.random.Generator
BF16 = np.dtype(ml_dtypes.bfloat16)
# Of rows and of probabilities.
DTYPES = [(np.float32, np.float32), (np.float16, np.float16), (BF16, BF16), (BF16, np.float32)]
DTYPES += [(np.float64, np.float64)]
TOKENS = (0, 1, 2, 5, 17, 40)
EXPERTS = (1, 2, 3, 4, 7, 16, 65)
HIDDEN = (0, 1, 2, 7, 8, 16, 31, 32, 33, 64, 65, 100, 257)


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


class Maker:
    """Sizes, dtypes and a routing for one call, and what is made of them."""

    def __init__(self, rng: Rng, sizes: tuple[int, int, int, int] | None = None) -> None:
        self.rng = rng
        if sizes is None:
            experts = pick(rng, EXPERTS)
            top_k = int(rng.integers(1, min(experts, 9) + 1))
            sizes = pick(rng, TOKENS), experts, top_k, pick(rng, HIDDEN)
            if self.odds(0.05):  # more than kernels have room for on their stacks
                sizes = (
                    pick(rng, (0, 1, 3)),
                    pick(rng, (3, 600)),
                    pick(rng, (129, 512, 513, 600)),
                    pick(rng, (0, 3, 17)),
                )
        self.tokens, self.experts, self.top_k, self.hidden = sizes
        self.slots = self.tokens * self.top_k
        self.rows_dtype, self.probs_dtype = pick(rng, DTYPES)
        # All tokens have K experts, or some have fewer.
        ranks = np.argsort(rng.random((self.tokens, self.experts)), axis=1)
        fewer = rng.integers(0, self.top_k + 1, (self.tokens, 1)) if self.odds(0.4) else self.top_k
        self.map = np.argsort(ranks, axis=1) < fewer
        self.pairs = np.argwhere(self.map.T)  # expert, token
        row_of = np.full(self.map.shape, -1)
        row_of[self.pairs[:, 1], self.pairs[:, 0]] = np.arange(len(self.pairs))
        self.indices = np.full((self.tokens, self.top_k), -1, np.int32)
        for token in range(self.tokens):
            own = row_of[token][row_of[token] >= 0]
            self.indices[token, : len(own)] = own
        self.indices = self.indices.reshape(-1)
        self.capacity = int(rng.integers(1, self.tokens + 1)) if self.tokens else 0

    def odds(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def floats(self, *shape: int, dtype: Any = None) -> Any:
        """Of a random magnitude; at times with infinities, NaNs, zeros and what is beside them."""
        kind = np.dtype(dtype or self.rows_dtype)
        with np.errstate(over="ignore"):
            values = np.asarray(self.rng.standard_normal(shape) * 10.0 ** self.rng.integers(-3, 3), kind)
            if self.odds(0.25):
                info = ml_dtypes.finfo(kind)
                odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, info.max, -info.max, info.tiny / 4, info.eps]
                places = self.rng.random(shape) < 0.05
                values[places] = self.rng.choice(np.array(odd, kind), int(places.sum()))
        return values

    def probs(self, *shape: int) -> Any:
        values = self.floats(*shape, dtype=self.probs_dtype)
        if self.odds(0.3):
            values[self.rng.random(shape) < 0.2] = 0
        return values

    def a_map(self) -> Any:
        if self.odds(0.6):
            return self.map.copy()
        chosen = self.rng.choice(np.array([1, -1, 2, 127, -128], np.int8), self.map.shape)
        return np.where(self.map, chosen, 0).astype(np.int8)

    def absent(self, dtype: Any = None) -> Any:
        """None, or the empty constant that stands for it."""
        return None if self.odds(0.5) else np.zeros((0, 0), dtype or self.rows_dtype)

    def maybe(self, share: float, value: Callable[[], Any], dtype: Any = None) -> Any:
        return value() if self.odds(share) else self.absent(dtype)

    def named_rows(self, slots: int, rows: int) -> Any:
        """Each slot a row of its own, or -1."""
        values = np.full(slots, -1, np.int32)
        count = min(slots, rows)
        values[self.rng.permutation(slots)[:count]] = self.rng.permutation(rows)[:count]
        if self.odds(0.5):
            values[self.rng.random(slots) < 0.2] = -1
        return values

    def padded_tokens(self) -> Any:
        """The tokens that each expert takes, ``[E*C]``, no token twice by one expert."""
        chosen = np.argsort(self.rng.random((self.experts, self.tokens)), axis=1)
        return chosen[:, : self.capacity].reshape(-1).astype(np.int32)


def init(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    index = m.rng.integers(0, m.experts, (m.tokens, m.top_k)).astype(np.int32)
    mode = int(m.rng.integers(3))
    if mode == 2:
        attributes = {"drop_pad_mode": 1, "expert_num": m.experts, "expert_capacity": max(m.capacity, 1)}
        attributes["expert_tokens_before_capacity_flag"] = int(m.odds(0.5))
    else:
        attributes = {"expert_num": m.experts} if m.odds(0.7) else {}
        if attributes:
            attributes["expert_tokens_count_or_cumsum_flag"] = int(m.rng.integers(3))
        if mode == 1:
            attributes["active_num"] = int(m.rng.integers(1, m.slots + 3))
        if "expert_num" not in attributes and m.odds(0.3):
            index = m.rng.integers(0, 2**31, index.shape).astype(np.int32)
    return [m.floats(m.tokens, m.hidden), index], attributes


def init_grad(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    attributes = {"top_k": m.top_k, "drop_pad_mode": 0}
    mode = int(m.rng.integers(3))
    if mode == 2:
        attributes["drop_pad_mode"] = 1
        index = m.named_rows(m.slots, m.experts * m.capacity)
        return [m.floats(m.experts, m.capacity, m.hidden), index], attributes
    rows = m.slots
    if mode == 1:
        attributes["active_num"] = rows = int(m.rng.integers(1, m.slots + 3))
    return [m.floats(rows, m.hidden), m.rng.permutation(m.slots).astype(np.int32)], attributes


def permute(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    attributes = {"num_out_tokens": m.slots if m.odds(0.7) else 0}
    if m.odds(0.4):
        attributes = {"num_out_tokens": m.experts * m.capacity, "drop_and_pad": 1}
    weights = m.maybe(0.7, lambda: m.probs(m.tokens, m.experts), m.probs_dtype)
    return [m.floats(m.tokens, m.hidden), m.a_map(), weights], attributes


def permute_grad(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    sizes = {"num_experts": m.experts, "tokens_num": m.tokens}
    attributes = {name: value for name, value in sizes.items() if m.odds(0.6)}
    index, rows = m.indices, m.slots
    if m.odds(0.4):
        attributes["drop_and_pad"] = 1
        index, rows = m.padded_tokens(), m.experts * m.capacity
    weights = m.maybe(0.6, lambda: m.probs(rows), m.probs_dtype)
    return [m.floats(rows, m.hidden), weights, index, m.maybe(0.9, m.a_map, np.bool_)], attributes


def unpermute(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    attributes: dict[str, Any] = {"restore_shape": [m.tokens, m.hidden]} if m.odds(0.5) else {}
    index, rows = m.indices, m.slots if m.odds(0.6) else len(m.pairs)
    if m.odds(0.4):
        attributes["drop_and_pad"] = 1
        index, rows = m.padded_tokens(), m.experts * m.capacity
    elif m.odds(0.2):
        index = m.named_rows(m.slots, rows)
    weights = m.maybe(0.7, lambda: m.probs(m.tokens, m.experts), m.probs_dtype)
    return [m.floats(rows, m.hidden), index, m.maybe(0.9, m.a_map, np.int8), weights], attributes


def unpermute_grad(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    attributes: dict[str, Any] = {"drop_and_pad": 0}
    form = int(m.rng.integers(4))
    index, rows = m.indices, m.slots if m.odds(0.7) else len(m.pairs)
    if form == 3:
        attributes["drop_and_pad"] = 1
        rows = m.experts * m.capacity
        token = np.sort(m.padded_tokens())
        index = m.rng.permutation(rows).astype(np.int32)
        if m.odds(0.3):
            attributes["restore_shape"] = [m.tokens, m.hidden]
    elif form == 0:  # row form, as the source documents have it
        token = m.rng.integers(0, max(m.tokens, 1), m.slots).astype(np.int32)
        index = m.named_rows(m.slots, rows) if m.odds(0.3) else index
    else:
        index = m.named_rows(m.slots, rows) if m.odds(0.2) else index
        token = index.copy()
    shape = m.tokens, m.experts
    has_probs = m.odds(0.7)
    beside = 1.0 if has_probs else 0.4
    return [
        m.floats(m.tokens, m.hidden),
        index,
        token,
        m.maybe(beside, m.a_map, np.bool_),
        m.maybe(beside, lambda: m.floats(rows, m.hidden)),
        m.probs(*shape) if has_probs else m.absent(m.probs_dtype),
    ], attributes


def finalize(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    mode = int(m.rng.integers(4))
    scales = m.maybe(0.7, lambda: m.probs(m.tokens, m.top_k), m.probs_dtype)
    top_k = m.top_k if scales is not None and scales.shape != (0, 0) else 1
    slots, capacity = m.tokens * top_k, m.capacity
    shape = (m.experts, capacity) if mode % 2 else (slots,)
    index = m.named_rows(slots, int(np.prod(shape)))
    if mode % 2 == 0:
        index = m.rng.permutation(slots).astype(np.int32)
    x1 = m.maybe(0.6, lambda: m.floats(m.tokens, m.hidden))
    x2 = m.maybe(0.6, lambda: m.floats(m.tokens, m.hidden)) if x1 is not None and x1.size else m.absent()
    bias = m.maybe(0.6, lambda: m.floats(m.experts, m.hidden))
    experts = m.maybe(0.9, lambda: m.rng.integers(0, m.experts, (m.tokens, top_k)).astype(np.int32), np.int32)
    return [m.floats(*shape, m.hidden), index, x1, x2, bias, scales, experts], {"drop_pad_mode": mode}


def finalize_grad(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    scales = m.maybe(0.7, lambda: m.probs(m.tokens, m.top_k), m.probs_dtype)
    has_scales = scales is not None and scales.shape != (0, 0)
    top_k = m.top_k if has_scales else 1
    slots, mode = m.tokens * top_k, int(m.rng.integers(3))
    attributes, shape, index = {"drop_pad_mode": 0}, (slots,), m.rng.permutation(slots).astype(np.int32)
    if mode == 1:
        attributes["active_num"] = int(m.rng.integers(1, slots + 3))
        shape = (attributes["active_num"],)
    elif mode == 2:
        attributes["drop_pad_mode"] = 1
        shape = (m.experts, m.capacity)
        index = m.named_rows(slots, m.experts * m.capacity)
        if m.odds(0.6):
            attributes |= {"expert_num": m.experts, "expert_capacity": m.capacity}
    rows = m.maybe(1.0 if has_scales else 0.5, lambda: m.floats(*shape, m.hidden))
    bias = m.maybe(0.6, lambda: m.floats(m.experts, m.hidden))
    experts = m.maybe(0.9, lambda: m.rng.integers(0, m.experts, (m.tokens, top_k)).astype(np.int32), np.int32)
    return [m.floats(m.tokens, m.hidden), index, rows, scales, experts, bias], attributes


def groups(m: Maker, rows: int) -> Any:
    bounds = np.sort(m.rng.integers(0, rows + 1, m.experts - 1))
    return np.diff(np.concatenate([[0], bounds, [rows]])).astype(np.int32)


def product(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    # Groups of up to 64 rows go another way than larger ones, by tiles of 16 x 256 and parts of 4096 columns.
    transpose, is_large = int(m.odds(0.5)), m.odds(0.2)
    rows = int(m.rng.integers(20, 400)) if is_large else m.slots
    width = int(m.rng.integers(250, 530)) if is_large else pick(m.rng, HIDDEN[:10])
    if m.odds(0.02):
        width = int(m.rng.integers(4090, 4120))
    shape = (width, m.hidden) if transpose else (m.hidden, width)
    weight = m.floats(m.experts, *shape)
    return [m.floats(rows, m.hidden), weight, groups(m, rows)], {"transpose_weight": transpose}


def weight_grad(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    width = pick(m.rng, HIDDEN[:10])
    # Groups of 16 rows and more are turned by the kernel itself, by bands of 16 and blocks of 64 columns.
    rows = int(m.rng.integers(130, 500)) if m.odds(0.2) else m.slots
    inputs = [m.floats(rows, m.hidden), m.floats(rows, width), groups(m, rows)]
    return inputs, {"transpose_weight": int(m.odds(0.5))}


def swi_glu(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    return [m.floats(m.slots, 2 * m.hidden + m.odds(0.05))], {}


def swi_glu_grad(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    return [m.floats(m.slots, m.hidden), m.floats(m.slots, 2 * m.hidden + m.odds(0.05))], {}


def square_sum(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    shape = pick(m.rng, ((), (0,), (m.hidden,), (m.slots, m.hidden), (3, 200, m.hidden), (2, 0, m.hidden)))
    return [m.floats(*shape, dtype=pick(m.rng, (*[np.float32] * 6, np.float64, np.float16)))], {}


def adam_w(m: Maker) -> tuple[list[Any], dict[str, Any]]:
    dtype = pick(m.rng, (np.float32, np.float32, np.float64))
    shape = (m.slots, m.hidden)
    if m.odds(0.4):
        shape = pick(m.rng, ((), (m.hidden,), (m.experts, m.top_k, m.hidden), (1, m.tokens, 1, m.hidden)))
    tensors = [m.floats(*shape, dtype=dtype) for _ in range(4)]
    if m.odds(0.8):  # as it is in training
        tensors[3] = np.asarray(np.abs(tensors[3]))  # numpy makes a number of an array without axes
    factors = m.floats(7, dtype=dtype)
    if m.odds(0.6):
        factors = np.array([0.9, 0.1, 0.999, 0.001, 1e-3, 1e-8, 0.99]).astype(dtype)
    return [*tensors, factors], {}


MAKERS: dict[str, Callable[[Maker], tuple[list[Any], dict[str, Any]]]] = {
    "MoeInitRoutingV2": init,
    "MoeInitRoutingV2Grad": init_grad,
    "MoeTokenPermuteWithRoutingMap": permute,
    "MoeTokenPermuteWithRoutingMapGrad": permute_grad,
    "MoeTokenUnpermuteWithRoutingMap": unpermute,
    "MoeTokenUnpermuteWithRoutingMapGrad": unpermute_grad,
    "MoeFinalizeRoutingV2": finalize,
    "MoeFinalizeRoutingV2Grad": finalize_grad,
    "MoeGroupedMatmul": product,
    "MoeGroupedMatmulWeightGrad": weight_grad,
    "MoeSwiGlu": swi_glu,
    "MoeSwiGluGrad": swi_glu_grad,
    "MoeSquareSum": square_sum,
    "MoeAdamW": adam_w,
}
