"""The families of checks, in the order they run in. A new family is one line here."""

from __future__ import annotations

from importlib import import_module

MODULES: tuple[str, ...] = ("gradients", "updates", "indices", "poison")


def load() -> None:
    """Import every family, which registers its checks."""
    for name in MODULES:
        import_module(f"moe_onnx.validation.{name}")
