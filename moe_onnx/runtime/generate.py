"""Sampling from a trained language model by its graph ``"forward"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_onnx.errors import NonFiniteError, OptionError
from moe_onnx.runtime.batch import with_padding
from moe_onnx.runtime.training_session import TrainingSession

Array = np.ndarray[Any, Any]


def generate(
    session: TrainingSession,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    context: int = 128,
    on_token: Callable[[int], None] | None = None,
) -> list[int]:
    """Continue a prompt, token by token; the same seed gives the same tokens.

    Each token costs a whole forward pass over the context: the graph keeps no keys and values. It is
    for looking at what a model has learnt, not for serving it.

    Args:
        session: A session with a graph ``"forward"``.
        prompt: Token ids, at least one.
        num_tokens: How many to add.
        temperature: Logits are divided by it; 0 takes the most likely token.
        top_k: Draw from the so many most likely tokens only; None: from all.
        top_p: Draw from the most likely tokens whose probabilities add up to this, of those that ``top_k``
            leaves; the one that reaches it is among them; None: from all.
        seed: Of the draws.
        context: How many of the last tokens the model sees.
        on_token: Called with each token as it is drawn.

    Returns:
        Prompt and continuation.

    Raises:
        OptionError: If an option is out of its range or the prompt is empty.
        BatchError: If a token id is out of range.
        NonFiniteError: If the model gives logits that are not finite.
    """
    if temperature < 0 or not np.isfinite(temperature):
        raise OptionError(f"temperature must be a finite number >= 0, got {temperature!r}.")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise OptionError(f"top_k must be an integer >= 1, got {top_k!r}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise OptionError(f"top_p must be in (0, 1], got {top_p!r}.")
    tokens = [int(token) for token in prompt]
    if not tokens or context < 1:
        raise OptionError("generate needs a prompt of at least one token and a context >= 1.")
    rng = np.random.default_rng(seed)
    outputs = session.manifest.graph("forward").outputs
    logits_name = next((one.name for one in outputs if one.role == "logits"), "logits")
    for _ in range(num_tokens):
        batch = with_padding({"input_ids": np.array([tokens[-context:]])}, session.manifest, "forward")
        logits = session.forward(batch)[logits_name][0, -1].astype(np.float64)
        if not np.isfinite(logits).all():
            raise NonFiniteError(
                f"The logits after {len(tokens)} tokens are not finite. Nothing can be drawn from them; look "
                "at the weights."
            )
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            with np.errstate(over="ignore"):  # of a tiny temperature: only the largest is left
                p = probabilities((logits - logits.max()) / temperature, top_k, top_p)
            tokens.append(int(rng.choice(len(p), p=p)))
        if on_token is not None:
            on_token(tokens[-1])
    return tokens


def probabilities(logits: Array, top_k: int | None = None, top_p: float | None = None) -> Array:
    """What to draw from, float64 ``[vocab]``: 0 for what is left out; of equal logits the lower id stays."""
    order = np.argsort(-logits, kind="stable")
    kept = order[:top_k]
    p = np.exp(logits[kept] - logits[kept[0]])
    p /= p.sum()
    if top_p is not None and top_p < 1:
        # As many as it takes to reach it.
        enough = int(np.searchsorted(np.cumsum(p), top_p)) + 1
        kept, p = kept[:enough], p[:enough] / p[:enough].sum()
    done = np.zeros_like(logits)
    done[kept] = p
    return done
