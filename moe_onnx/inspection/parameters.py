"""Parameters by module, and how many of them a token meets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from moe_onnx.build.manifest import Manifest
from moe_onnx.inspection.places import folded, module_of


@dataclass(frozen=True)
class Group:
    """Parameters of one module over all layers: how many tensors and elements, how many elements are active.

    Active elements are those that the computation of one token reads: of E experts K.
    """

    module: str
    tensors: int
    elements: int
    active: int


def parameter_groups(manifest: Manifest | None, model: ModelProto) -> list[Group]:
    """The groups in the order of the graph; without a manifest the initializers are one group."""
    if manifest is None:
        sizes = [math.prod(tensor.dims) for tensor in model.graph.initializer]
        return [Group("initializers", len(sizes), sum(sizes), sum(sizes))] if sizes else []
    found: dict[str, list[int]] = {}
    share = _share(manifest.config)
    for parameter in manifest.parameters:
        module = folded(module_of(parameter.name))
        totals = found.setdefault(module, [0, 0, 0])
        active = parameter.size * share[0] // share[1] if _is_expert(parameter.name) else parameter.size
        for at, more in enumerate((1, parameter.size, active)):
            totals[at] += more
    return [Group(module, *totals) for module, totals in found.items()]


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name or name.startswith("experts.")


def _share(config: Mapping[str, Any]) -> tuple[int, int]:
    return int(config.get("num_experts_per_tok", 1)), int(config.get("num_experts", 1))
