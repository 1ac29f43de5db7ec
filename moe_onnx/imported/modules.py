"""What exporters say of the modules that nodes come from, and the names that weights have by it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import onnx_ir as ir

from moe_onnx.rewrite.notes import MARK
from moe_onnx.spec import DOMAIN

MADE_UP = re.compile(r"(onnx::[A-Za-z]+_\d+|val_\d+)$")
# Buffers of the modules people export, which no trainer trains.
BUFFERS = re.compile(
    r"(inv_freq|running_mean|running_var|num_batches_tracked|position_ids|token_type_ids|"
    r"e_score_correction_bias|causal_mask|attn_mask|attention_mask|masked_bias|(cos|sin)_cached)$"
)
_TURNED = ("Cast", "Concat", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_LEGACY = re.compile(r"^/(.+)/[^/]+$")


def modules_of(node: ir.Node) -> list[str]:
    """The names of the modules a node is in, outermost first; empty where nothing says so."""
    text = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if text is not None:
        try:
            scopes = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return []
        if isinstance(scopes, list) and all(isinstance(one, str) for one in scopes):
            return [one for one in scopes[:-1] if one]
        return []
    if MARK in node.metadata_props:
        return []  # a pass has given it its name
    found = _LEGACY.match(node.name or "")
    return [found[1].replace("/", ".")] if found else []


def owns(modules: Sequence[str], name: str) -> bool:
    """Whether a parameter's name is of one of the modules; a wrapper may have put names in front."""
    owner = name.rpartition(".")[0]
    return owner in modules or any(owner.endswith("." + one) for one in modules if "." in one)


def kind_of(node: ir.Node, slot: int, name: str) -> str:
    """What a module calls the parameter that a node reads: by its place, else as the name says."""
    if node.op_type in ("LayerNormalization", "GroupNormalization", "InstanceNormalization"):
        return "bias" if slot == 2 else "weight"
    if node.op_type in ("Gemm", "Conv") and slot == 2:
        return "bias"
    return name.rpartition(".")[2]


def is_experts(value: ir.Value) -> bool:
    """Whether experts' products read a value: as it is, turned, or put together with other experts'."""
    seen, waiting = {value}, [value]
    while waiting:
        for use in waiting.pop().uses():
            node = use.node
            if node.domain == DOMAIN and node.op_type == "MoeGroupedMatmul" and use.idx == 1:
                return True
            out = node.outputs[0] if node.domain == "" and node.op_type in _TURNED else None
            if out is not None and out not in seen:
                seen.add(out)
                waiting.append(out)
    return False
