"""MoE layers of an imported model: fused before it is trained, if it does the same then."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto
from onnx_ir.serde import SerdeError

from moe_onnx.errors import ModelError, VerificationError
from moe_onnx.imported.reading import of_known_opset
from moe_onnx.rewrite.fold import FOLD
from moe_onnx.rewrite.fuse.forms import FUSE
from moe_onnx.rewrite.notes import MAIN, Note, Notes, Pass
from moe_onnx.rewrite.passes import DEFECT
from moe_onnx.validation.rewriting.rewrite import rewrite_opened
from moe_onnx.validation.subject import Subject


@dataclass(frozen=True)
class Fused:
    """A model with its MoE layers fused, or as it was.

    Args:
        model: As given, or rewritten.
        folder: Where its external files are; None where nothing says.
        before: What a rewritten model was.
        fused, not_fused, verified: As of :class:`~moe_onnx.build.imported.ImportedModel`.
    """

    model: ModelProto
    folder: Path | None = None
    fused: dict[str, str] = field(default_factory=dict)
    not_fused: dict[str, str] = field(default_factory=dict)
    verified: tuple[str, ...] = ()
    before: ModelProto | None = None


def _both(model: ModelProto, notes: Notes) -> ModelProto:
    """Fuse what is seen when sizes are folded; a model without such layers stays as it is."""
    return FUSE.apply(FOLD.apply(of_known_opset(model), Notes(FOLD.name)), notes)


_BOTH = Pass(FUSE.name, FUSE.summary, FUSE.needs, FUSE.leaves, _both, FUSE.tolerance)


def fused(subject: Subject) -> Fused:
    """Fuse the MoE layers of a model, and see by running that its outputs stay the same.

    Warns:
        UserWarning: If that is not so, or cannot be found out: the model stays as it was.
    """
    try:
        done = rewrite_opened(subject, [_BOTH])
    except VerificationError as error:
        return _left(subject, str(error))
    except ModelError as error:
        if DEFECT in str(error):
            return _left(subject, str(error))
        return Fused(subject.model, subject.folder, not_fused={"the model": str(error)})
    except SerdeError:
        return Fused(subject.model, subject.folder)  # whoever reads it says so
    except Exception as error:
        # A defect of a pass is no reason not to train the model as it is, and none to keep silent.
        text = f"a defect of moe_onnx, {type(error).__name__}: {error}"
        return _left(subject, text)
    skipped = _table(done.report.skipped)
    if not done.changed:
        return Fused(subject.model, subject.folder, not_fused=skipped)
    lines = tuple(done.report.verified)
    return Fused(done.model, subject.folder, _table(done.report.applied), skipped, lines, subject.model)


def _left(subject: Subject, why: str) -> Fused:
    warnings.warn(f"MoE layers are not fused, and stay as they were: {why}", stacklevel=4)
    return Fused(subject.model, subject.folder, not_fused={"the model": why})


def _table(notes: Sequence[Note]) -> dict[str, str]:
    return {note.node + ("" if note.place == MAIN else f" in {note.place}"): note.text for note in notes}
