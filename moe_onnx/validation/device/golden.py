"""Cases to test a device by: inputs of an operator in a mode, and the outputs that the contract expects.

    save_golden("case.npz", "MoeInitRoutingV2Grad", mode="drop_pad", dtype="bfloat16", seed=7)

The same arguments give the same file, byte for byte; only where sums over H or F are made of inexact data
may their last bits be another processor's. The file holds

    input.<name>, output.<name>    tensors; absent ones are not there; bfloat16 as its bits in uint16
    attribute.<name>               int64, also those of default value
    meta                           JSON: operator, mode, seed, sizes, dtypes of all entries, notes
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from moe_onnx.errors import ModelFileError, OptionError
from moe_onnx.operators import BY_NAME
from moe_onnx.validation.device.golden_calls import MAKERS, Call
from moe_onnx.validation.device.golden_data import DTYPES, Array, Draw, Making, Sizes
from moe_onnx.validation.device.golden_meta import (
    GOLDEN_FORMAT,
    GOLDEN_VERSION,
    META,
    golden_entry,
    golden_meta,
)
from moe_onnx.validation.findings import write_beside

_NOTES = {
    "MoeTokenUnpermuteWithRoutingMap": "The device's kernel does not write out_index and permute_token_id "
    "without drop_and_pad; here they are sorted_indices.",
    "MoeTokenUnpermuteWithRoutingMapGrad": "The device's kernel does not write rows of permuted_tokens_grad "
    "that out_index does not name; here they are 0.",
    "MoeTokenPermuteWithRoutingMap": "The device's kernel does not write rows past the last selected "
    "pair; here they are 0.",
}


def golden_modes(op: str) -> tuple[str, ...]:
    """The modes that there are cases of.

    Raises:
        OptionError: If there is no such operator.
    """
    if op not in MAKERS:
        raise OptionError(f"golden: operator must be one of {', '.join(MAKERS)}, got {op!r}.")
    return MAKERS[op][1]


def golden_case(
    op: str,
    *,
    mode: str | None = None,
    seed: int = 0,
    dtype: str = "float32",
    probs_dtype: str | None = None,
    exact: bool = False,
    **sizes: int,
) -> dict[str, Array]:
    """A legal call of an operator and what it gives, by the numpy reference.

    Args:
        op: Name of the operator.
        mode: One of :func:`golden_modes`; by default the first.
        seed: Of the data, >= 0.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``, of the rows.
        probs_dtype: Of probabilities or scales; ``"float32"`` beside bfloat16, by default as the rows.
        exact: Data whose sums and products are exact in every dtype and order, so that results must be
            equal to the bit; otherwise numbers in [-1, 1), equal within the dtype's tolerance.
        sizes: ``tokens``, ``experts``, ``top_k``, ``hidden``, ``capacity``, ``active``, ``width``.

    Returns:
        The entries of the file, see the module; bfloat16 as itself.

    Raises:
        OptionError: If an argument has an illegal value.
    """
    modes = golden_modes(op)
    mode = modes[0] if mode is None else mode
    if mode not in modes:
        raise OptionError(f"golden: mode of {op} must be one of {', '.join(modes)}, got {mode!r}.")
    if seed < 0:
        raise OptionError(f"golden: seed must be >= 0, got {seed}.")
    for name, value in (("dtype", dtype), ("probs_dtype", probs_dtype or dtype)):
        if value not in DTYPES:
            raise OptionError(f"golden: {name} must be one of {', '.join(DTYPES)}, got {value!r}.")
    weights = probs_dtype or dtype
    if weights != dtype and (dtype, weights) != ("bfloat16", "float32"):
        raise OptionError(
            f"golden: probs_dtype must be dtype, or float32 beside bfloat16, got {weights} and {dtype}."
        )
    if dtype not in (takes := BY_NAME[op].inputs[0].dtypes):
        raise OptionError(f"golden: dtype of {op} must be {_of(takes)}, got {dtype!r}.")
    size = _sizes(sizes)
    make = MAKERS[op][0]
    call = make(Making(Draw(seed, exact=exact), size, DTYPES[dtype], DTYPES[weights]), mode)
    return _entries(op, mode, call, {"seed": seed, "exact": exact, "sizes": asdict(size)})


def _of(dtypes: tuple[str, ...]) -> str:
    return " or ".join(name for name in dtypes if name in DTYPES)


def _sizes(given: Mapping[str, int]) -> Sizes:
    known = [field.name for field in fields(Sizes)]
    for name, value in given.items():
        if name not in known:
            raise OptionError(f"golden: sizes are {', '.join(known)}, got {name!r}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"golden: {name} must be an integer > 0, got {value!r}.")
    size = Sizes(**given)
    for small, large in (("top_k", "experts"), ("capacity", "tokens")):
        if getattr(size, small) > getattr(size, large):
            raise OptionError(
                f"golden: {small} must be at most {large}, got {getattr(size, small)} and "
                f"{getattr(size, large)}."
            )
    return size


def _entries(op: str, mode: str, call: Call, settings: dict[str, Any]) -> dict[str, Array]:
    spec = BY_NAME[op]
    attributes = spec.check_attributes(call.attributes)
    given = [call.inputs.get(arg.name) for arg in spec.inputs]
    result = spec.reference(*given, **{k: v for k, v in attributes.items() if v is not None})
    outputs = result if isinstance(result, tuple) else (result,)
    entries = {f"input.{arg.name}": a for arg, a in zip(spec.inputs, given, strict=True) if a is not None}
    entries |= {
        f"output.{arg.name}": a for arg, a in zip(spec.outputs, outputs, strict=True) if a is not None
    }
    dtypes = {name: array.dtype.name for name, array in entries.items()}
    for name, value in attributes.items():
        if value is not None:
            entries[f"attribute.{name}"] = np.array(value, np.int64)
    meta = {
        "format": GOLDEN_FORMAT,
        "format_version": GOLDEN_VERSION,
        "operator": op,
        "mode": mode,
        **settings,
        "inputs": [arg.name for arg in spec.inputs],
        "outputs": [arg.name for arg in spec.outputs],
        "dtypes": dtypes,
        "notes": [_NOTES[op]] if op in _NOTES else [],
    }
    entries[META] = np.array(json.dumps(meta, indent=1))
    return entries


def save_golden(path: str | os.PathLike[str], op: str, **arguments: Any) -> Path:
    """Write :func:`golden_case` of the same arguments to an npz file.

    Raises:
        OptionError: If an argument has an illegal value.
    """
    entries = golden_case(op, **arguments)
    path = Path(path)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, array in entries.items():
            bits = array.view(np.uint16) if array.dtype == DTYPES["bfloat16"] else array
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(bits), version=(1, 0), allow_pickle=False)
            # The day of all days in zip files: numpy would write the time of day.
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            archive.writestr(info, member.getvalue())
    return write_beside(path, data.getvalue())


def load_golden(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors and attributes of a file by entry, bfloat16 as itself, and its meta data.

    Raises:
        ModelFileError: If it is no such file.
    """
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            if (meta := golden_meta(file)) is None:
                raise ValueError(f"it has no entry '{META}' of one")
            entries = {name: golden_entry(file, name, meta) for name in file.files if name != META}
    except (OSError, KeyError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, EOFError) as error:
        raise ModelFileError(f"'{path}' is no case that save_golden wrote: {error}.") from None
    return entries, meta
