"""Each of onnx's own node test models is differentiated, rightly, or refused: none has a wrong gradient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from backend_models import DIFFERENTIATED, NOT_RUN, REFUSED, WRONG, cases, verdict, verdict_of

pytestmark = pytest.mark.parity


@pytest.mark.timeout(400)  # a thousand models, maybe beside a compiler
def test_no_backend_model_has_a_wrong_gradient() -> None:
    kinds: Counter[str] = Counter()
    wrong = []
    for name, model, inputs in cases():
        kind, why = verdict(name, model, inputs)
        kinds[kind] += 1
        if kind == WRONG:
            wrong.append(f"{name}: {why}")
        if kind == REFUSED:
            assert (
                "Path from the loss" in why or "no differentiable path" in why or "convert" in why.lower()
            ), why
    assert not wrong
    assert kinds[DIFFERENTIATED] >= LEAST and kinds[NOT_RUN] <= MOST_NOT_RUN, kinds


# What `python tests/backend_models.py` counts with onnx 1.23, and README says.
LEAST, MOST_NOT_RUN = 516, 6


def test_the_comparison_can_fail() -> None:
    assert verdict_of(np.sin, 1.0, 1.0) is True
    assert verdict_of(np.sin, 1.001, 1.0) is False
    assert verdict_of(abs, 0.5, 1.0) is None  # a kink: any slope between those of both sides would do
