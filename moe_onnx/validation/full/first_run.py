"""The run in double precision that the checks of gradients and of updates share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.full.claims import LOSS, claims_of
from moe_onnx.validation.full.cuts import line
from moe_onnx.validation.full.double import Lifted, lift
from moe_onnx.validation.full.lively import Arrays
from moe_onnx.validation.subject import Subject


@dataclass
class FirstRun:
    """The lifted model, all its outputs, and the generator that drew its inputs."""

    lifted: Lifted
    found: Arrays
    rng: np.random.Generator


def first_run(subject: Subject) -> FirstRun | Skipped:
    """Lift the model and run it, the first time this is called; or why that cannot be done."""
    return subject.once(_first_run)


def _first_run(subject: Subject) -> FirstRun | Skipped:
    claims = claims_of(subject)
    moved = [] if isinstance(claims, Skipped) else [claim.of for claim in claims]
    rng = np.random.default_rng([subject.options.seed, 901])
    lifted = lift(subject, moved, rng)
    if isinstance(lifted, Skipped):
        return lifted
    loss = [LOSS] if moved else []
    try:
        found = lifted.run(list(dict.fromkeys([*loss, *lifted.outputs])))
    except Exception as error:  # onnxruntime's own classes have no common base
        return Skipped(f"the model does not run in double precision: {line(error)}")
    return FirstRun(lifted, found, rng)
