"""What a training session keeps in memory, against what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from moe_onnx.build.manifest import Manifest
from moe_onnx.errors import ModelError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def state_bytes(manifest: Manifest, assembly: str) -> int:
    """Bytes of what training with an assembly keeps from step to step; activations come on top.

    Parameters alone for a session that only evaluates (``""``); with ``"grad+apply"`` optimizer state and
    gradients, with ``"step"`` a second set of parameters and state in their place.
    """
    total = 0
    for p in manifest.parameters:
        size = math.prod(p.shape) * np.dtype(p.dtype).itemsize
        copies = {"": 1, "step": 2 * (1 + len(p.state))}.get(assembly, 2 + len(p.state))
        total += copies * size
    return total


def memory_limit() -> int | None:
    """Bytes of memory that this process can have at most; None where the system does not say."""
    found = []
    try:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return None  # Windows
    for path in _LIMITS:
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(found)


def check_memory(manifest: Manifest, assembly: str) -> None:
    """Refuse what the machine cannot hold, as the system would end the process in the middle of it.

    Raises:
        ModelError: If the state alone is more than all memory; names both.
    """
    need, limit = state_bytes(manifest, assembly), memory_limit()
    if limit is not None and need > limit:
        what = "parameters" if not assembly else "parameters, gradients and optimizer state"
        raise ModelError(
            f"TrainingSession: {what} of this model take {need / 1e9:.1f} GB, and this machine has "
            f"{limit / 1e9:.1f} GB of memory. Train a smaller model, or the graphs on a larger machine."
        )
