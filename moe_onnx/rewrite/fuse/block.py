"""What matchers find of a layer whose weights are gathered for each pair."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir


@dataclass
class Product:
    """``squeeze`` ``[T*K, out]`` is ``rows`` times the weight of each row's expert."""

    gather: ir.Node
    weight: ir.Value
    transposed: bool
    rows: ir.Value
    squeeze: ir.Node


@dataclass
class Block:
    """A layer of this form."""

    flat_ids: ir.Value
    ids: ir.Value
    top_k: int
    experts: int
    distinct: bool  # no token has an expert twice
    products: list[Product] = field(default_factory=list)
    biases: list[ir.Node] = field(default_factory=list)
    tokens: ir.Value | None = None  # [T, H]
    repeated: ir.Value | None = None  # [T*K, H]
    weighted: ir.Value | None = None  # the last rows, which are weighted
    weights: ir.Value | None = None  # [T, K] or of as many elements
    end: ir.Node | None = None  # what reads those
    total: ir.Node | None = None  # the sum over K
