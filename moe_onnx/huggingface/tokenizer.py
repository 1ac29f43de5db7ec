"""Text as token ids, by the ``tokenizers`` library, where it is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_onnx.errors import DataError, OptionError
from moe_onnx.huggingface.origin import TOKENIZER_FILES

FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        source: A folder with ``tokenizer.json``, or that file.

    Raises:
        OptionError: If the file is not there or broken, or the library ``tokenizers`` not installed.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        given = Path(source)
        self.path = given / FILE if given.is_dir() else given
        if not self.path.is_file():
            other = given.is_dir() and (given / "tokenizer.model").exists()
            hint = (
                " There is a 'tokenizer.model'; load it in transformers and save_pretrained it, which writes "
                f"'{FILE}'."
                if other
                else " Give the folder of a checkpoint that has it."
            )
            raise OptionError(f"{self.path}: there is no such file.{hint}")
        try:
            import tokenizers
        except ImportError as error:
            raise OptionError(
                "To read text by a tokenizer, install the library for it: pip install 'moe-onnx[tokenizers]'."
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises nothing more precise
            raise OptionError(f"{self.path}: is no tokenizer: {error}.") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def name(self) -> str:
        """What people are told of it."""
        return f"tokens of {self.path}"

    @property
    def vocab_size(self) -> int:
        """One more than the largest id it gives."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def check_fits(self, vocab_size: int) -> None:
        """Refuse a tokenizer that gives ids which a model does not know.

        Raises:
            OptionError: If its largest id is not below ``vocab_size``.
        """
        if self.vocab_size > vocab_size:
            raise OptionError(
                f"{self.path}: its ids go up to {self.vocab_size - 1}, and the model's vocab_size is "
                f"{vocab_size}. Give the tokenizer of the model."
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the tokens that mark a beginning or an end."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids."""
        return str(self._tokenizer.decode([int(token) for token in tokens]))

    def encode_file(self, path: str | os.PathLike[str], vocab_size: int) -> np.ndarray[Any, Any]:
        """All tokens of a text file, uint32 ``[num_tokens]``.

        Args:
            path: UTF-8.
            vocab_size: Of the model; a tokenizer with larger ids is refused, whatever the text.

        Raises:
            OptionError: If the tokenizer is of another model.
            DataError: If the file is empty, or no UTF-8.
        """
        self.check_fits(vocab_size)
        try:
            text = Path(path).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: must be text in UTF-8, found byte {error.object[error.start]:#04x} at "
                f"{error.start}. Convert it, or give token ids (--tokens)."
            ) from error
        if not text:
            raise DataError(f"{path}: is empty.")
        return np.array(self.encode(text), np.uint32)


def carry_tokenizer(tokenizer: Tokenizer, target: Path) -> None:
    """Put a tokenizer's files into a folder, in place of those of another one."""
    source = tokenizer.path.parent
    if source.resolve() == target.resolve():
        return
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
