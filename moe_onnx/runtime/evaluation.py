"""Evaluating a language model on a whole text by its graph ``"eval"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_onnx.errors import DataError, OptionError
from moe_onnx.runtime.batch import with_padding
from moe_onnx.runtime.training_session import TrainingSession

Array = np.ndarray[Any, Any]


@dataclass
class Evaluation:
    """Sums over batches.

    Attributes:
        tokens: How many tokens were predicted.
        batches: How many batches there were.
        loads: ``expert_load`` of each batch, int64 ``[layers, E]``; empty where there are no experts.
        dropped: Pairs of token and expert without a row, in each layer where that may happen.
    """

    tokens: int = 0
    batches: int = 0
    loads: list[Array] = field(default_factory=list)
    dropped: Array | None = None
    _nats: float = 0.0
    _others: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token in nats, each token counted once; NaN without tokens."""
        return self._nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return math.exp(self.loss) if self.loss < 700 else math.inf if self.loss >= 700 else math.nan

    @property
    def other_losses(self) -> dict[str, float]:
        """Auxiliary losses by name, unweighted, as means over batches."""
        return {name: total / self.batches for name, total in self._others.items()}

    @property
    def expert_load(self) -> Array | None:
        """Choices of each expert over all batches, int64 ``[layers, E]``."""
        return np.sum(self.loads, axis=0) if self.loads else None

    def add(self, metrics: dict[str, Any]) -> None:
        """Take in the metrics of a batch."""
        count = int(metrics["num_tokens"])
        if count:  # the mean over nothing is 0, and says nothing
            self._nats += float(metrics.get("lm_loss", metrics["loss"])) * count
        self.tokens += count
        self.batches += 1
        for name in ("aux_loss", "z_loss"):
            if name in metrics:
                self._others[name] = self._others.get(name, 0.0) + float(metrics[name])
        if "expert_load" in metrics:
            self.loads.append(metrics["expert_load"])
        if "dropped" in metrics:
            self.dropped = metrics["dropped"] if self.dropped is None else self.dropped + metrics["dropped"]


def evaluate_tokens(
    session: TrainingSession,
    tokens: Array,
    *,
    batch_size: int = 8,
    sequence_length: int = 128,
    batches: int | None = None,
    on_batch: Callable[[Evaluation, int], None] | None = None,
) -> Evaluation:
    """The loss of a text, cut into sequences that follow each other.

    The model sees no token of the sequence before, and predicts all but the first of each sequence. The last
    sequence is filled up with padding, which counts nowhere.

    Args:
        session: A session with a graph ``"eval"`` of a language model.
        tokens: Integers in one dimension, at least two.
        batch_size: Sequences at a time.
        sequence_length: Tokens of a sequence, at least two.
        batches: So many batches of those there are, evenly spread; None: all.
        on_batch: Called after each batch with the sums so far and the number of batches in all.

    Raises:
        OptionError: If a number is too small.
        DataError: If there are fewer than two tokens.
        BatchError: If a token id is out of range.
    """
    limits = (("batch_size", batch_size, 1), ("sequence_length", sequence_length, 2), ("batches", batches, 1))
    for name, value, low in limits:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise OptionError(f"{name} must be an integer >= {low}, got {value!r}.")
    if len(tokens) < 2:
        raise DataError(f"tokens: there must be at least 2 to predict one, got {len(tokens)}.")
    done = Evaluation()
    total, parts = _parts(tokens, batch_size, sequence_length, batches)
    for batch in parts:
        done.add(session.eval(with_padding(batch, session.manifest, "eval")))
        if on_batch is not None:
            on_batch(done, total)
    return done


def _parts(
    tokens: Array, batch_size: int, length: int, batches: int | None
) -> tuple[int, Iterator[dict[str, Array]]]:
    starts = np.arange(0, max(len(tokens) - 1, 1), length)  # a last token alone predicts nothing
    firsts = np.arange(0, len(starts), batch_size)
    if batches is not None and batches < len(firsts):
        firsts = firsts[np.linspace(0, len(firsts) - 1, batches).astype(np.int64)]

    def cut() -> Iterator[dict[str, Array]]:
        for first in firsts:
            pieces = [tokens[start : start + length] for start in starts[first : first + batch_size]]
            width = max(len(piece) for piece in pieces)
            ids = np.stack([np.pad(np.asarray(piece, np.int64), (0, width - len(piece))) for piece in pieces])
            mask = np.stack([np.arange(width) < len(piece) for piece in pieces]).astype(np.int64)
            yield {"input_ids": ids, "attention_mask": mask}

    return len(firsts), cut()
