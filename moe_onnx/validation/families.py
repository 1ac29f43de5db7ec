"""The families of checks, in the order they run in. A new family is one line here."""

from __future__ import annotations

from importlib import import_module

MODULES: tuple[str, ...] = (
    # The file
    "external",
    "versions",
    "structure",
    "unused",
    "tensors",
    # Operators, types, functions
    "known_ops",
    "own_ops",
    "functions",
    "inference",
    # What is legal, and wrong or dear all the same
    "hazards",
    "pads",
    "kernels",
    "costs",
    # The source documents, and devices
    "documents",
    "index_values",
    "routing_maps",
    "modes",
    "target_support",
    "ub",
    # Training graphs
    "training",
    "training_interface",
    "training_manifest",
    "training_companions",
    "training_reach",
    "training_gradients",
    "training_updates",
    "training_experts",
    "training_operators",
    "training_folder",
    # What exporters lose
    "foreign",
    "expert_use",
    # Level "run"
    # Level "full"
)


def load() -> None:
    """Import every family, which registers its checks."""
    for name in MODULES:
        import_module(f"moe_onnx.validation.{name}")
