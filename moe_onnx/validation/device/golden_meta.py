"""What the file of a golden case says of itself, and how its entries are read by that."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np
from numpy.typing import NDArray

META = "meta"  # the entry that says it
GOLDEN_FORMAT, GOLDEN_VERSION = "moe_onnx.golden", 1


def golden_meta(file: Any) -> dict[str, Any] | None:
    """The meta data of an open npz file, None where it is no golden case.

    Raises:
        ValueError: If it is a case of another version, or does not name dtypes.
    """
    if META not in file.files or (entry := file[META]).dtype.kind != "U":
        return None
    try:
        meta = json.loads(str(entry))
    except ValueError:
        return None
    if not isinstance(meta, dict) or meta.get("format") != GOLDEN_FORMAT:
        return None
    if meta.get("format_version") != GOLDEN_VERSION:
        raise ValueError(f"it is of format {GOLDEN_FORMAT} {meta.get('format_version')}")
    if not isinstance(meta.get("dtypes"), dict):
        raise ValueError(f"its '{META}' names no dtypes")
    return meta


def golden_entry(file: Any, name: str, meta: dict[str, Any] | None) -> NDArray[Any]:
    """An entry by the dtype that the meta data gives it: bfloat16 is saved as its bits."""
    array: NDArray[Any] = file[name]
    is_bits = meta is not None and meta["dtypes"].get(name) == "bfloat16" and array.dtype == np.uint16
    return array.view("bfloat16") if is_bits else array
