"""Which tensors of a checkpoint are which parameters of a graph: checked, and kept for the way back."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_onnx.build.config import MoeLMConfig
from moe_onnx.build.parameters import parameters_of
from moe_onnx.errors import CheckpointError
from moe_onnx.huggingface.architectures.description import Architecture, Source
from moe_onnx.huggingface.shards import Shards
from moe_onnx.storage import FLOATS, Entry

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that old releases of transformers saved; they follow from the config.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.attn\.masked_bias")


@dataclass(frozen=True)
class Laid:
    """A parameter: its dtype (as safetensors calls it) and shape, and the tensors it is made of, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Layout:
    """All parameters of a graph, and tensors that only repeat one (``{tensor: parameter}``)."""

    parameters: tuple[Laid, ...]
    repeated: dict[str, str]

    def places(self) -> Iterator[tuple[str, str, int]]:
        """Name of each tensor, its parameter, and the element of that where it starts."""
        for laid in self.parameters:
            at = 0
            for source in laid.sources:
                yield source.name, laid.name, at
                at += int(np.prod(source.shape, dtype=np.int64))
        for name, parameter in self.repeated.items():
            yield name, parameter, 0


def layout_of(architecture: Architecture, config: MoeLMConfig, shards: Shards) -> Layout:
    """Find every parameter among the tensors, and use every tensor.

    Raises:
        CheckpointError: If a tensor is missing, unexpected or of another shape; names file, tensor, expected
            and found.
    """
    _check_counts(config, shards)
    left = {name for name in shards.file_of if not _BUFFERS.fullmatch(name)}
    done, missing = [], []
    for parameter in parameters_of(config):
        forms = architecture.forms(parameter, config)
        # The form of which most is there, so that one that is incomplete is not taken for another.
        form = max(forms, key=lambda form: sum(source.name in left for source in form))
        entries = []
        for source in form:
            if source.name in left:
                entries.append(_of_shape(shards, source))
                left.discard(source.name)
            else:
                missing.append(source)
        done.append(Laid(parameter.name, _common([e.dtype for e in entries]), parameter.shape, tuple(form)))
    repeated = {}
    if config.tie_word_embeddings and HEAD in left and not missing:
        left.discard(HEAD)
        _check_tied(shards, config)
        repeated[HEAD] = EMBEDDING
    _check_all(architecture, shards, missing, sorted(left))
    return Layout(tuple(done), repeated)


def _check_counts(config: MoeLMConfig, shards: Shards) -> None:
    """Numbers that no such checkpoint has would make endless lists of what is missing."""
    entries = [file.entries[name] for name, file in shards.file_of.items()]
    longest = max((entry.shape[0] for entry in entries if entry.shape), default=0)
    for name, most in (("num_hidden_layers", len(entries)), ("num_experts", max(len(entries), longest))):
        if (count := getattr(config, name)) > most:
            raise CheckpointError(
                f"{shards.folder}: expected {name} {count}, as config.json says, found {len(entries)} "
                "tensors."
            )


def _of_shape(shards: Shards, source: Source) -> Entry:
    file = shards.file_of[source.name]
    entry = file.entries[source.name]
    if entry.shape != source.shape:
        raise CheckpointError(
            f"{file.path}: tensor '{source.name}' expected {list(source.shape)}, as config.json says, found "
            f"{list(entry.shape)}."
        )
    return entry


def _check_all(architecture: Architecture, shards: Shards, missing: list[Source], extra: list[str]) -> None:
    where = shards.files[0].path if shards.index is None else shards.folder
    if missing:
        first = missing[0]
        close = difflib.get_close_matches(first.name, extra, 1)
        hint = f" Did you mean '{close[0]}', which is there and not expected?" if close else ""
        raise CheckpointError(
            f"{where}: tensor '{first.name}' expected {list(first.shape)}, found none"
            f"{f' (nor {len(missing) - 1} others)' if len(missing) > 1 else ''}.{hint}"
        )
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"{shards.file_of[extra[0]].path}: tensor '{extra[0]}'{more} was not expected of "
            f"{architecture.class_name} with this config.json."
        )


def _check_tied(shards: Shards, config: MoeLMConfig) -> None:
    head, embedding = (shards.file_of[name] for name in (HEAD, EMBEDDING))
    _of_shape(shards, Source(HEAD, embedding.entries[EMBEDDING].shape))
    for ours, theirs in zip(head.pieces(HEAD), embedding.pieces(EMBEDDING), strict=True):
        if ours.dtype != theirs.dtype or ours.tobytes() != theirs.tobytes():
            raise CheckpointError(
                f"{head.path}: tensor '{HEAD}' expected equal to '{EMBEDDING}', as config.json ties them, "
                "found another. Set 'tie_word_embeddings' to false if it is meant to be."
            )


def _common(dtypes: list[str]) -> str:
    """The dtype that holds all of them exactly."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "F64" if "F64" in dtypes else "F32"


def pieces(shards: Shards, laid: Laid) -> Iterable[np.ndarray[Any, Any]]:
    """The elements of a parameter, flat, in its dtype, piece by piece."""
    for source in laid.sources:
        for piece in shards.file_of[source.name].pieces(source.name):
            yield piece.astype(FLOATS[laid.dtype], copy=False)
