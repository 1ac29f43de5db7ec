"""MoE layers of an imported model: fused before it is trained, if it does the same then."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import ModelProto

from moe_onnx.errors import ModelError, ModelFileError, VerificationError
from moe_onnx.rewrite.fold import FOLD
from moe_onnx.rewrite.fuse.forms import FUSE
from moe_onnx.rewrite.notes import MAIN, Note, Notes, Pass
from moe_onnx.rewrite.passes import DEFECT
from moe_onnx.validation.rewriting.rewrite import rewrite_model


@dataclass(frozen=True)
class Fused:
    """A model with its MoE layers fused, or as it was.

    Args:
        model: As given, or rewritten.
        folder: Where the external files of a rewritten model are.
        before: What a rewritten model was.
        fused, not_fused, verified: As of :class:`~moe_onnx.build.imported.ImportedModel`.
    """

    model: onnx.ModelProto | str | os.PathLike[str]
    folder: Path | None = None
    fused: dict[str, str] = field(default_factory=dict)
    not_fused: dict[str, str] = field(default_factory=dict)
    verified: tuple[str, ...] = ()
    before: onnx.ModelProto | str | os.PathLike[str] | None = None


def _both(model: ModelProto, notes: Notes) -> ModelProto:
    """Fuse what is seen when sizes are folded; a model without such layers stays as it is."""
    return FUSE.apply(FOLD.apply(model, Notes(FOLD.name)), notes)


_BOTH = Pass(FUSE.name, FUSE.summary, FUSE.needs, FUSE.leaves, _both, FUSE.tolerance)


def fused(model: onnx.ModelProto | str | os.PathLike[str]) -> Fused:
    """Fuse the MoE layers of a model, and see by running that its outputs stay the same.

    Warns:
        UserWarning: If that is not so, or cannot be found out: the model stays as it was.
    """
    try:
        done = rewrite_model(model, [_BOTH])
    except ModelFileError:
        return Fused(model)  # whoever reads it says so
    except VerificationError as error:
        return _left(model, str(error))
    except ModelError as error:
        if DEFECT in str(error):
            return _left(model, str(error))
        return Fused(model, not_fused={"the model": str(error)})
    except Exception as error:
        # A defect of a pass is no reason not to train the model as it is, and none to keep silent.
        text = f"a defect of moe_onnx, {type(error).__name__}: {error}"
        return _left(model, text)
    skipped = _table(done.report.skipped)
    if not done.changed:
        return Fused(model, not_fused=skipped)
    folder = None if done.source is None else done.source.resolve().parent
    lines = tuple(done.report.verified)
    return Fused(done.model, folder, _table(done.report.applied), skipped, lines, model)


def _left(model: ModelProto | str | os.PathLike[str], why: str) -> Fused:
    warnings.warn(f"MoE layers are not fused, and stay as they were: {why}", stacklevel=4)
    return Fused(model, not_fused={"the model": why})


def _table(notes: Sequence[Note]) -> dict[str, str]:
    return {note.node + ("" if note.place == MAIN else f" in {note.place}"): note.text for note in notes}
