"""Between text and token ids: the one place that decides how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_onnx.errors import OptionError


class Codec(Protocol):
    """Text to token ids and back."""

    @property
    def name(self) -> str:
        """What people are told of it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no text is replaced."""


@dataclass(frozen=True)
class ByteCodec:
    """The bytes of UTF-8 are the tokens, as ``moe-onnx train --text`` takes them."""

    vocab_size: int

    @property
    def name(self) -> str:
        """What people are told of it."""
        return "bytes of UTF-8"

    def encode(self, text: str) -> list[int]:
        """The bytes.

        Raises:
            OptionError: If one is no id of the vocabulary; names it and its position.
        """
        ids = list(text.encode("utf-8", "surrogateescape"))
        for position, value in enumerate(ids):
            if value >= self.vocab_size:
                raise OptionError(
                    f"prompt: its bytes must be token ids in [0, {self.vocab_size}), got {value} at position "
                    f"{position}. Give the tokenizer of the model, or token ids."
                )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of those ids that are bytes; others become a replacement character each."""
        parts, run = [], bytearray()
        for value in ids:
            if value < 256:
                run.append(value)
                continue
            parts += [run.decode("utf-8", "replace"), "\N{REPLACEMENT CHARACTER}"]
            run = bytearray()
        return "".join([*parts, run.decode("utf-8", "replace")])
