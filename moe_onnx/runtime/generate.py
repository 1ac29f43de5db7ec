"""Sampling from a trained language model by its graph ``"forward"``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_onnx.errors import OptionError
from moe_onnx.runtime.batch import with_padding
from moe_onnx.runtime.training_session import TrainingSession


def generate(
    session: TrainingSession,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    context: int = 128,
) -> list[int]:
    """Continue a prompt, token by token; the same seed gives the same tokens.

    Each token costs a whole forward pass over the context: the graph keeps no keys and values. It is
    for looking at what a model has learnt, not for serving it.

    Args:
        session: A session with a graph ``"forward"``.
        prompt: Token ids, at least one.
        num_tokens: How many to add.
        temperature: Logits are divided by it; 0 takes the most likely token.
        seed: Of the draws.
        context: How many of the last tokens the model sees.

    Returns:
        Prompt and continuation.

    Raises:
        OptionError: If the temperature is negative or the prompt is empty.
        BatchError: If a token id is out of range.
    """
    if temperature < 0 or not np.isfinite(temperature):
        raise OptionError(f"temperature must be a finite number >= 0, got {temperature!r}.")
    tokens = [int(token) for token in prompt]
    if not tokens or context < 1:
        raise OptionError("generate needs a prompt of at least one token and a context >= 1.")
    rng = np.random.default_rng(seed)
    fewest = session.manifest.dispatch.get("expert_capacity", 0)
    for _ in range(num_tokens):
        batch = with_padding({"input_ids": np.array([tokens[-context:]])}, fewest)
        logits = session.forward(batch)["logits"][0, -1].astype(np.float64)
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        p = np.exp((logits - logits.max()) / temperature)
        tokens.append(int(rng.choice(len(p), p=p / p.sum())))
    return tokens
