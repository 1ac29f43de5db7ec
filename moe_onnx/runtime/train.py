"""The training loop: batches in, metrics out, checkpoints on the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from moe_onnx.errors import NonFiniteError, OptionError
from moe_onnx.runtime.batch import with_padding
from moe_onnx.runtime.data import TokenDataset
from moe_onnx.runtime.evaluation import Evaluation
from moe_onnx.runtime.interrupts import interrupts_deferred
from moe_onnx.runtime.training_session import TrainingSession

MAX_SKIPPED = 20


def train(
    session: TrainingSession,
    data: TokenDataset,
    steps: int,
    *,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    eval_every: int = 0,
    eval_batches: int = 4,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int = 0,
    gradient_accumulation_steps: int = 1,
) -> list[dict[str, Any]]:
    """Train until the session has made ``steps`` updates in all.

    Drawing a batch, the update and ``on_step`` are one: Ctrl-C comes through between two of them, so
    that session and data order always belong together, and a checkpoint saved then continues to the
    same numbers, bit by bit.

    Args:
        session: What to train.
        data: Where batches come from.
        steps: The value of ``session.global_step`` to stop at.
        on_step: Called with the metrics of each step.
        eval_every: Every so many updates, and at the end, the mean loss of the held-out batches is
            added to the metrics as ``eval_loss``; 0: never.
        eval_batches: How many held-out batches.
        checkpoint: Folder to save to at the end; None: nothing is saved.
        save_every: Also save every so many updates; 0: only at the end.
        gradient_accumulation_steps: Batches drawn for each update, which are the micro-batches of one.

    Returns:
        The metrics of each step.

    Raises:
        NonFiniteError: As in :meth:`TrainingSession.step`; also after 20 skipped batches in a row.
    """
    if save_every and checkpoint is None:
        raise OptionError("save_every needs a checkpoint folder.")
    count = gradient_accumulation_steps
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionError(f"gradient_accumulation_steps must be an integer >= 1, got {count!r}.")
    if eval_every:
        session.manifest.graph("eval")  # better now than after the first steps
    history: list[dict[str, Any]] = []
    skipped = 0
    saved = -1
    while session.global_step < steps:
        with interrupts_deferred():
            before = data.state_dict()
            try:
                batches = [data.next_batch() for _ in range(count)]
                metrics = session.step(batches if count > 1 else batches[0])
            except BaseException:
                data.load_state_dict(before)  # the batch counts as not drawn
                raise
            done = session.global_step
            made = not metrics["skipped"]
            # Each overflow of float16 lowers the loss scale, whose own limit ends a row of them.
            skipped = skipped + 1 if not made and not metrics.get("overflow") else 0
            if eval_every and made and (done % eval_every == 0 or done == steps):
                metrics["eval_loss"] = evaluate(session, data, eval_batches)
            history.append(metrics)
            if on_step is not None:
                on_step(metrics)
            if save_every and made and done % save_every == 0 and checkpoint is not None:
                session.save_checkpoint(checkpoint, data=data.state_dict())
                saved = done
        if skipped >= MAX_SKIPPED:
            raise NonFiniteError(
                f"Update {done + 1}: {skipped} batches in a row had a loss or gradient norm that is "
                "not finite.",
                metrics=metrics,
            )
    if checkpoint is not None and saved != session.global_step:
        session.save_checkpoint(checkpoint, data=data.state_dict())
    return history


def evaluate(session: TrainingSession, data: TokenDataset, batches: int = 4) -> float:
    """Mean loss of the language model over the held-out batches, each token counted once."""
    done = Evaluation()
    for batch in data.eval_batches(batches):
        done.add(session.eval(with_padding(batch, session.manifest, "eval")))
    return done.loss
