"""Where a node stands: its phase of the step, and its module by the names of transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from onnx import NodeProto

PHASES = ("forward", "backward", "optimizer")
_LAYER = re.compile(r"(\w+\.layers)\.(\d+)")
_GRAD = re.compile(r"\.grad(_\d+)?$")
_NUMBER = re.compile(r"_\d+$")
_NORMS = ("input_layernorm", "post_attention_layernorm")
SHARED = ("positions", "loss", "grad_norm", "other")  # no modules, but parts of the step


@dataclass(frozen=True)
class Place:
    """Phase, and module, such as ``"model.layers.3.mlp.experts"``; ``part`` has ``*`` for the layer."""

    phase: str
    module: str

    @property
    def part(self) -> str:
        """The module, all layers as one."""
        return folded(self.module)

    @property
    def layer(self) -> int | None:
        """Its layer, or None outside of layers."""
        found = _LAYER.search(self.module)
        return None if found is None else int(found[2])


def folded(name: str) -> str:
    """A name with ``*`` for the number of its layer."""
    return _LAYER.sub(r"\1.*", name)


def module_of(parameter: str) -> str:
    """The module a parameter belongs to, at the height of the tables: projections are attention's."""
    if ".self_attn." in parameter:
        return parameter.partition(".self_attn.")[0] + ".self_attn"
    if ".mlp." in parameter:
        head, _, rest = parameter.partition(".mlp.")
        first = rest.split(".")[0]
        return f"{head}.mlp.{_mlp_part(first)}"
    head = parameter.rsplit(".", 1)[0]
    return head if "." in parameter else _mlp_part(parameter)


def _mlp_part(first: str) -> str:
    if first in ("gate", "experts"):
        return first
    if first.startswith("shared_expert"):
        return "shared_expert"
    return "dense"


def place_of(node: NodeProto, parameters: Collection[str], uses: Mapping[str, str]) -> Place:
    """Where a node of a built graph stands, by its name; nodes of others are all ``forward``, ``other``.

    Args:
        node: Of the main graph.
        parameters: Names of the model's parameters.
        uses: The first parameter that a node takes, by the name of the node, where it takes one.
    """
    name = node.name
    parts = name.split("/")
    if parts[0] == "grad":
        parts = parts[1:] if len(parts) < 3 else parts[1:-1]
        return Place("backward", _module(parts, uses.get("/".join(parts), "")))
    if parts[0] in ("update", "load_excess", "grad_norm"):
        owner = parts[1] if parts[0] == "update" and len(parts) > 2 else ""
        return Place("optimizer", module_of(owner) if owner in parameters else "grad_norm")
    if node.op_type == "Identity" and parts[-1].endswith(".updated"):
        return Place("optimizer", module_of(parts[-1].removesuffix(".updated")))
    if _GRAD.search(parts[-1]):
        stem = _GRAD.sub("", name)
        if stem in parameters:
            return Place("backward", module_of(stem))
        parts = stem.split("/")
        return Place("backward", _module(parts, uses.get(stem, "")))
    return Place("forward", _module(parts, uses.get(name, "")))


def _module(parts: list[str], parameter: str) -> str:
    """The module of a forward node, from the parts of its name."""
    first = parts[0]
    if first in ("router", "experts", "shared_expert") or first.startswith(("dispatch", "combine")):
        return _inside_mlp(parts)  # a layer alone
    if _LAYER.match(first):
        if len(parts) == 1 or parts[1] not in ("self_attn", "mlp"):
            return f"{first}.residual"
        norm = next((part for part in parts[2:3] if part in _NORMS), None)
        if norm is not None:
            return f"{first}.{norm}"
        return f"{first}.self_attn" if parts[1] == "self_attn" else f"{first}.mlp.{_inside_mlp(parts[2:])}"
    if first == "norm":
        return "model.norm"
    if first == "loss" or first.startswith("model.embed_tokens"):
        return "loss" if first == "loss" else "model.embed_tokens"
    if parameter:
        return "lm_head" if "embed_tokens" in parameter or "lm_head" in parameter else module_of(parameter)
    return "positions"


def _inside_mlp(parts: list[str]) -> str:
    first = _NUMBER.sub("", parts[0]) if parts else ""
    if first == "router":
        return "gate"
    if first in ("experts", "shared_expert"):
        return first
    if first == "combine":
        return "combine"
    if first in ("Gemm", "Sigmoid") or (first == "Mul" and len(parts) == 1):
        return "dense"
    return "dispatch"
