"""The families of checks, in the order they run in. A new family is one line here."""

from __future__ import annotations

from importlib import import_module

MODULES: tuple[str, ...] = (
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
)


def load() -> None:
    """Import every family, which registers its checks."""
    for name in MODULES:
        import_module(f"moe_onnx.validation.{name}")
