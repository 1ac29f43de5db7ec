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


_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_SCOPES = "pkg.torch.onnx.name_scopes"


def is_parameter(value: ir.Value) -> bool | None:
    """Whether an initializer is a parameter, a buffer or a constant; None where the exporter does not say."""
    kind = value.metadata_props.get(_KIND)
    return None if kind is None else kind == "PARAMETER"


def computed_from(value: ir.Value, *, all_of_them: bool = False) -> list[str]:
    """The initializers that the exporter has computed one from; without those of made-up names."""
    names = _list(value.metadata_props.get(_FOLDED)) or []
    return [name for name in names if all_of_them or not MADE_UP.match(name)]


def _list(text: str | None) -> list[str] | None:
    try:
        found = ast.literal_eval(text or "")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    is_names = isinstance(found, list) and all(isinstance(one, str) for one in found)
    return found if is_names else None


def says_modules(node: ir.Node) -> bool:
    """Whether a node says of which modules it is, the same for each call of one.

    ``dynamo=False`` puts modules into names of nodes, numbered by call: ``/fc/Gemm``, ``/fc_1/Gemm``.
    """
    return _SCOPES in node.metadata_props


def modules_of(node: ir.Node) -> list[str]:
    """The names of the modules a node is in, outermost first; empty where nothing says so."""
    if says_modules(node):
        scopes = _list(node.metadata_props[_SCOPES]) or []
        return [one for one in scopes[:-1] if one]
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
