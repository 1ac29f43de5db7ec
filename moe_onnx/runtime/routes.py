"""Which kernels can run the operators here, and which do."""

from __future__ import annotations

import logging

from moe_onnx.adapters import python_ops
from moe_onnx.errors import ModelError, OptionError
from moe_onnx.kernels import native

KERNELS = ("auto", "native", "python", "body")
_LOG = logging.getLogger("moe_onnx")
_told: list[str] = []  # once in a process


def check_kernels(kernels: str, legal: tuple[str, ...] = KERNELS) -> None:
    """Refuse what is no route, and a route that is asked for by name and cannot be had.

    Raises:
        OptionError: If ``kernels`` is none of ``legal``.
        ModelError: If that route is not available here; says why.
    """
    if kernels not in legal:
        raise OptionError(f"kernels must be one of {', '.join(map(repr, legal))}, got {kernels!r}.")
    if kernels == "native":
        native.native_library_path()
    if kernels == "python":
        python_ops.library_path()


def why_not() -> dict[str, str]:
    """Why each route cannot be had here; an empty text for those that can."""
    return {"native": native.unavailable(), "python": python_ops.UNAVAILABLE, "body": ""}


def form_for(kernels: str) -> str:
    """The form of graphs, ``optimize_for`` of ``build_training_graph``, for a training session of a route."""
    native_there = kernels in ("auto", "native") and not native.unavailable()
    return "native" if native_there else "body"


def best(*routes: str) -> str:
    """The first of these that is available; if that is not ``"native"``, the reason is logged once.

    Raises:
        ModelError: If none is.
    """
    reason = why_not()
    found = next((route for route in routes if not reason[route]), None)
    if found is None:
        reasons = " ".join(f"{route}: {reason[route].rstrip('.')}." for route in routes)
        raise ModelError(f"No kernels are available. {reasons}")
    if found != "native" and "native" in routes and not _told:
        _told.append(found)
        level = logging.INFO if native.is_switched_off() else logging.WARNING
        _LOG.log(level, "kernels='auto' is %r: no native kernels, %s", found, reason["native"])
    return found
