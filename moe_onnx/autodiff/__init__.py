"""Reverse-mode differentiation of ONNX graphs: rules by operator, and the walk that uses them."""

from moe_onnx.autodiff.rules import FAMILIES  # whoever differentiates, or adds a rule, has these first

__all__ = ["FAMILIES"]
