"""What may go into a graph as a batch: checked here, before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_onnx.build.forward import LOAD_BEFORE, ROUTER_NOISE
from moe_onnx.build.manifest import Manifest, TensorInfo
from moe_onnx.errors import BatchError

Array = np.ndarray[Any, Any]


def checked_batch(
    batch: Mapping[str, Any],
    inputs: Sequence[TensorInfo],
    config: Mapping[str, Any],
    *,
    capacity: int = 0,
    draw: tuple[int, ...] = (0,),
) -> dict[str, Array]:
    """The batch as contiguous arrays of the graph's dtypes, absent ones filled in.

    An absent ``attention_mask`` is all ones, absent ``labels`` are the ``input_ids``, absent
    ``expert_load_before`` is 0, and absent ``router_noise`` is drawn from the seed of the config and the
    number of the update, so that training that goes on draws the same. Integers and floats are widened
    where that loses nothing; nothing else is converted.

    Args:
        batch: Arrays (or lists) by input name.
        inputs: The graph's inputs of role ``"batch"``.
        config: The manifest's config: ``vocab_size`` and ``ignore_index`` say which ids are legal, of a
            model that was imported ``limits`` for each input.
        capacity: Rows of each expert; a batch must have as many tokens.
        draw: Number of the update, and of the micro-batch where that is not the first.

    Raises:
        BatchError: Name, dtype, shape or value does not fit; names input, position, value and rule.
    """
    names = [info.name for info in inputs]
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"A batch must map input names to arrays ({', '.join(names)}), got {type(batch).__name__}."
        )
    for name in batch:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1)
            hint = f"Did you mean '{close[0]}'? " if close else ""
            raise BatchError(f"The graph has no batch input '{name}'. {hint}It has: {', '.join(names)}.")
    done: dict[str, Array] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for info in inputs:
        if info.name in batch:
            array = _converted(batch[info.name], info)
            _check_shape(array, info, sizes)
            _check_values(array, info.name, config)
            done[info.name] = array
            if "batch" in sizes and "sequence" in sizes:
                count = sizes["batch"][0] * sizes["sequence"][0]
                sizes.setdefault("tokens", (count, f"input '{info.name}', batch * sequence"))
    if "tokens" in sizes and (tokens := sizes["tokens"][0]) < capacity:
        raise BatchError(
            f"The batch has T = {tokens} tokens (padding included), fewer than the expert capacity "
            f"C = {capacity}, which every expert has rows for. Fill it up with padding "
            "(attention_mask 0), or build the graph with a smaller capacity."
        )
    for info in inputs:
        if info.name not in batch:
            done[info.name] = _default(info, done, sizes, (config.get("router_noise_seed", 0), *draw))
    return done


def with_padding(batch: Mapping[str, Any], manifest: Manifest, assembly: str) -> dict[str, Any]:
    """The batch as a graph of a language model takes it, filled up with padding, which counts nowhere.

    A graph without ``attention_mask``, as of imported models, gets labels that are left out at padding.

    Args:
        batch: Integers ``[batch, sequence]`` by input name.
        manifest: How many tokens the graph wants, padding included.
        assembly: Which graph.
    """
    ids, fewest = batch["input_ids"], manifest.dispatch.get("expert_capacity", 0)
    full = {**batch, "attention_mask": batch.get("attention_mask", np.ones_like(ids))}
    missing = max(-(-fewest // ids.shape[1]) - len(ids), 0)
    full = {name: np.pad(value, ((0, missing), (0, 0))) for name, value in full.items()}
    taken = {info.name for info in manifest.graph(assembly).inputs_of("batch")}
    if "attention_mask" not in taken:
        mask = full.pop("attention_mask")
        if "labels" in taken and not mask.all():
            ignored = manifest.config.get("ignore_index", -100)
            full["labels"] = np.where(mask > 0, full.get("labels", full["input_ids"]), ignored)
    return full


def _default(
    info: TensorInfo, done: Mapping[str, Array], sizes: Mapping[str, tuple[int, str]], seed: tuple[int, ...]
) -> Array:
    ids = done.get("input_ids")
    if info.name == LOAD_BEFORE:
        return np.zeros(tuple(int(dim) for dim in info.shape), info.dtype)
    if info.name == ROUTER_NOISE and "tokens" in sizes:
        shape = [sizes["tokens"][0] if dim == "tokens" else int(dim) for dim in info.shape]
        return np.random.default_rng(seed).standard_normal(shape, np.float32)
    if ids is not None and ids.ndim == len(info.shape):
        if info.name == "labels" and np.can_cast(ids.dtype, info.dtype, "safe"):
            return ids.astype(info.dtype, copy=False)
        if info.name == "attention_mask":
            return np.ones(ids.shape, info.dtype)
    given = ", ".join(done) or "none"
    raise BatchError(f"Batch input '{info.name}' {_shape(info.shape)} is missing; given: {given}.")


def _converted(value: Any, info: TensorInfo) -> Array:
    wanted = np.dtype(info.dtype)
    if type(value) is np.ndarray and value.dtype == wanted and value.flags.c_contiguous:
        return value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise BatchError(f"Batch input '{info.name}' is no array: {error}.") from error
    exact = np.can_cast(array.dtype, wanted, "safe") and (
        array.dtype != bool or info.name == "attention_mask"
    )
    exact = exact and (array.dtype.kind in "iub") == (wanted.kind in "iub")
    exact = exact or _fits(array, wanted, is_mask=info.name == "attention_mask")
    if not hasattr(value, "dtype") and wanted.kind == "f" and array.dtype.kind in "iuf":
        exact = True  # Python's own numbers have no precision to lose on purpose
    if not exact:
        raise BatchError(
            f"Batch input '{info.name}' must be {wanted}, or what is exact in it, got {array.dtype}. "
            "Convert it with .astype if that is what you mean."
        )
    return np.ascontiguousarray(array, wanted).reshape(array.shape)


def _fits(array: Array, wanted: np.dtype[Any], *, is_mask: bool) -> bool:
    """Whether signed integers are the same ones in a narrower type; of a mask, also as truths."""
    if array.dtype.kind != "i" or not array.size:
        return False
    least, most = int(array.min()), int(array.max())
    if wanted.kind == "b":
        return is_mask and least >= 0 and most <= 1
    return wanted.kind == "i" and np.iinfo(wanted).min <= least and most <= np.iinfo(wanted).max


def _check_shape(array: Array, info: TensorInfo, sizes: dict[str, tuple[int, str]]) -> None:
    if array.ndim != len(info.shape):
        raise BatchError(
            f"Batch input '{info.name}' must have shape {_shape(info.shape)}, got {_shape(array.shape)}."
        )
    for axis, (size, dim) in enumerate(zip(array.shape, info.shape, strict=True)):
        if not size:
            raise BatchError(
                f"Batch input '{info.name}' is empty: axis {axis} of {_shape(array.shape)} is 0."
            )
        if isinstance(dim, int):
            want, whose = dim, "the graph"
        else:
            want, whose = sizes.setdefault(dim, (size, f"input '{info.name}'"))
        if size != want:
            name = f" ({dim})" if isinstance(dim, str) else ""
            raise BatchError(
                f"Batch input '{info.name}': axis {axis}{name} must be {want}, as in {whose}, got {size} "
                f"(shape {_shape(array.shape)}, expected {_shape(info.shape)})."
            )


def _check_values(array: Array, name: str, config: Mapping[str, Any]) -> None:
    vocab = config.get("limits", {}).get(name, config.get("vocab_size"))
    if name in config.get("limits", {}) and name not in ("input_ids", "labels"):
        if int(array.min()) < -vocab or int(array.max()) >= vocab:
            raise _bad_value(array, (array < -vocab) | (array >= vocab), name, f"in [-{vocab}, {vocab})")
    elif name == "attention_mask" and array.dtype.kind in "iub":
        if int(array.min()) < 0 or int(array.max()) > 1:
            raise _bad_value(array, (array < 0) | (array > 1), name, "1 (real) or 0 (padding)")
    elif name == "input_ids" and vocab is not None:
        if int(array.min()) < 0 or int(array.max()) >= vocab:
            raise _bad_value(array, (array < 0) | (array >= vocab), name, f"in [0, {vocab})")
    elif name == "labels" and vocab is not None:
        if int(array.min()) < 0 or int(array.max()) >= vocab:
            ignore = config.get("ignore_index", -100)
            bad = ((array < 0) | (array >= vocab)) & (array != ignore)
            if bad.any():
                raise _bad_value(array, bad, name, f"in [0, {vocab}) or {ignore} (left out)")
    elif name == LOAD_BEFORE and (array < 0).any():
        raise _bad_value(array, array < 0, name, ">= 0")
    elif array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _bad_value(array, ~np.isfinite(array), name, "finite")


def _bad_value(array: Array, bad: Array, name: str, rule: str) -> BatchError:
    position = tuple(int(i) for i in np.argwhere(bad)[0])
    return BatchError(
        f"Batch input '{name}': values must be {rule}, got {array[position].item()} at {list(position)} "
        f"({int(bad.sum())} such values)."
    )


def _shape(dims: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, dims))}]"
