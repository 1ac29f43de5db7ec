"""The families of checks, in the order they run in. A new family is one line here."""

from __future__ import annotations

from importlib import import_module

MODULES: tuple[str, ...] = (
    # The file
    "file.external",
    "file.versions",
    "file.structure",
    "file.unused",
    "file.tensors",
    # Operators, types, functions
    "operators.known_ops",
    "operators.own_ops",
    "operators.values",
    "operators.functions",
    "operators.inference",
    # What is legal, and wrong or dear all the same
    "hazards.scatters",
    "hazards.pads",
    "hazards.kernels",
    "hazards.costs",
    "hazards.equations",
    # The source documents, and devices
    "documents.limits",
    "documents.index_values",
    "documents.routing_maps",
    "documents.modes",
    "documents.target_support",
    "documents.target_sizes",
    "documents.ub",
    # Training graphs
    "training.prepared",
    "training.interface",
    "training.manifest",
    "training.companions",
    "training.reach",
    "training.gradients",
    "training.updates",
    "training.experts",
    "training.operators",
    "training.routing",
    "training.routing_gradients",
    "training.folder",
    # What exporters lose
    "hazards.foreign",
    "hazards.expert_use",
    # Level "run"
    "run.routes",
    "run.comparisons",
    "run.free_axes",
    "run.batches",
    "run.cost",
    # Level "full"
    "full.gradients",
    "full.updates",
    "full.indices",
    "full.poison",
)


def load() -> None:
    """Import every family, which registers its checks."""
    for name in MODULES:
        import_module(f"moe_onnx.validation.{name}")
