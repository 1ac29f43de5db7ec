"""Inputs at which everything in a model happens: parameters that matter, batches that reach all experts."""

from __future__ import annotations

import math

import numpy as np

from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.run.drawing import Array
from moe_onnx.validation.run.feeds import draw_feeds, fed_bytes, free_sizes, manifest_of
from moe_onnx.validation.run.runs import runs_so_far
from moe_onnx.validation.run.sessions import weight_bytes
from moe_onnx.validation.subject import Subject

Arrays = dict[str, Array]

_TOKENS, _MOST_TOKENS, _LENGTH = 12, 2048, 24


def lively_feeds(subject: Subject, rng: np.random.Generator) -> Arrays | Skipped:
    """Inputs for a run, or why there are none. Parameters may be wider than the graph takes them."""
    runs = runs_so_far(subject)
    if runs is not None and runs.too_long:
        return Skipped(runs.too_long)
    drawn = draw_feeds(subject, rng, _sizes(subject))
    if isinstance(drawn, Skipped):
        return drawn
    return {**drawn.values, **_lively_parameters(subject, rng)}


def is_too_large(subject: Subject, times: int, what: str) -> Skipped | None:
    """Why a model is left out whose inputs and weights, so many times, take more than is allowed."""
    limit, size = subject.options.max_bytes, times * (fed_bytes(subject) + weight_bytes(subject))
    if size <= limit:
        return None
    return Skipped(f"{what} the model takes {size:,} bytes, more than {limit:,}")


def _sizes(subject: Subject) -> dict[str, int]:
    """Enough tokens that most experts have some, and more than an active dispatch has rows for."""
    sizes = free_sizes(subject)
    manifest = manifest_of(subject)
    if manifest is None:
        return {}
    experts = _whole(manifest.config.get("num_experts"))
    top_k = max(_whole(manifest.config.get("num_experts_per_tok")), 1)
    active, capacity = (_whole(manifest.dispatch.get(n)) for n in ("active_num", "expert_capacity"))
    # A token's experts are its router's choice: most have some of so many tokens.
    fewest = max(_TOKENS, min(8 * experts, _MOST_TOKENS // 4))
    # Some tokens are padding; of the others some should find no row.
    fewest = max(fewest, min(max(5 * active // 4, capacity * experts) // top_k + 4, _MOST_TOKENS))
    fewest = max(fewest, capacity)  # fewer tokens than an expert has rows are refused
    found: dict[str, int] = {}
    if "sequence" in sizes and "batch" in sizes:  # short sequences: attention is dear
        found["sequence"] = min(_LENGTH, max(6, -(-fewest // 2)))
        found["batch"] = max(2, -(-fewest // found["sequence"]))
        if "tokens" in sizes:
            found["tokens"] = found["sequence"] * found["batch"]
    elif "tokens" in sizes:
        found["tokens"] = max(sizes["tokens"], fewest)
    return found


def _whole(value: object) -> int:
    """A number of the manifest, 0 where it is none."""
    return value if isinstance(value, int) and value > 0 else 0


def _lively_parameters(subject: Subject, rng: np.random.Generator) -> Arrays:
    """Parameters large enough for every part to matter: at their first values routers hardly choose."""
    manifest = manifest_of(subject)
    there = {info.name for info in subject.model.graph.input}
    found = {}
    for info in manifest.parameters if manifest is not None else ():
        if info.name in there:
            value = rng.standard_normal(info.shape)
            if info.init.get("kind") == "ones":
                value = 1 + 0.2 * value
            elif info.init.get("kind") == "zeros":
                value = 0.3 * value
            elif len(info.shape) > 1:
                value = value / math.sqrt(max(info.shape[-1], 1))
            found[info.name] = value
    return found
