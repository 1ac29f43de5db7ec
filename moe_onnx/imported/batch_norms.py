"""What becomes of BatchNorms: exporters write them as in evaluation, or fold them into weights."""

from __future__ import annotations

import warnings

import onnx_ir as ir

_LISTED = 4
_RULE = "pkg.onnxscript.rewriter.rule_name"
_CLASSES = "pkg.torch.onnx.class_hierarchy"


def warn_of_batch_norms(graph: ir.Graph) -> None:
    """Say what a user of torch would not expect of a BatchNorm in a graph that is trained.

    ``training_mode=1`` has no gradient rule and is refused by it; ``torch.onnx.export(dynamo=True)`` does
    not write it even of a module in train mode.
    """
    norms = [n for n in graph if n.op_type == "BatchNormalization" and not n.domain and not _by_batch(n)]
    if norms:
        warnings.warn(
            f"{len(norms)} BatchNormalization nodes normalise by running statistics, which training leaves "
            f"as they are: {_names([str(n.name or n.outputs[0].name) for n in norms])}. They compute what "
            "module.eval() does, as torch.onnx.export(dynamo=True) writes them of a module in train mode, "
            "too; statistics of the batch have no gradient rule.",
            stacklevel=5,
        )
    folded = [str(v.name) for n in graph if _has_norm(n) for v in n.inputs[1:] if v is not None]
    if folded:
        warnings.warn(
            f"{len(folded)} weights hold a BatchNorm, which the exporter has multiplied into them: "
            f"{_names(folded)}. They are trained so, and are not what the module calls by these names. "
            "Export with optimize=False to keep BatchNorms apart.",
            stacklevel=5,
        )


def _by_batch(node: ir.Node) -> bool:
    found = node.attributes.get("training_mode")
    return found is not None and found.value != 0


def _has_norm(node: ir.Node) -> bool:
    """Whether a product is what an exporter's optimizer made of a product and a BatchNorm."""
    if node.op_type not in ("Gemm", "Conv", "ConvTranspose") or node.domain:
        return False
    said = node.metadata_props
    return "FuseBatchNorm" in said.get(_RULE, "") or "batch_norm" in said.get(_CLASSES, "").lower()


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:_LISTED]) + more
