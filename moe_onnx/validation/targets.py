"""The devices a model may be validated for, and what the source documents say of them."""

from __future__ import annotations

TARGETS = ("ascend910b", "ascend910_93", "ascend950")
