"""``moe_onnx.rewrite_model``: passes over a model, proved by running before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import EncodeError
from onnx import ModelProto

from moe_onnx.errors import ModelFileError
from moe_onnx.rewrite.notes import Pass, PassReport
from moe_onnx.rewrite.passes import apply_passes, chosen_passes
from moe_onnx.validation.findings import write_beside
from moe_onnx.validation.rewriting.data import bring_data, check_free, files_of, locations
from moe_onnx.validation.rewriting.verify import verify as verify_by_running
from moe_onnx.validation.subject import Options, Subject, open_subject

NOT_NEEDED = "nothing was rewritten, so nothing was run"


@dataclass
class Rewritten:
    """What :func:`moe_onnx.rewrite_model` gives.

    Attributes:
        model: The rewritten model, external data not loaded; the original where no pass had anything to do.
        report: ``passes``, ``applied``, ``skipped`` (a row for each node, with its place and what was done,
            or why not) and ``verified`` (a line for each set of inputs).
        source: The file it was read from, None for a ``ModelProto``.
        data: The files of its external data.
    """

    model: ModelProto
    report: PassReport
    source: Path | None = None
    data: tuple[Path, ...] = ()
    _folder: Path | None = field(default=None, repr=False)

    @property
    def changed(self) -> bool:
        """Whether any pass did anything."""
        return bool(self.report.applied)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model, beside its place first, so that what was there stays until it is whole.

        External data stays on disk. In the folder of the original the model names the same files as before;
        in another one they are copied to where it names them.

        Raises:
            ModelFileError: If external data is not there or another file has its name, such as the one that
                is to be written, or the model takes more than 2 GB without external data.
        """
        path = Path(path)
        brought = (path.parent / name for name in locations(self.model))
        check_free(path, (*self.data, *brought), "the model's external data")
        try:
            data = self.model.SerializeToString()
        except (EncodeError, ValueError) as error:
            raise ModelFileError(
                f"'{path}' cannot be written: the model takes more than 2 GB. Move its weights to external "
                "data first: onnx.save(..., save_as_external_data=True)."
            ) from error
        bring_data(self.model, self._folder, Path(os.path.abspath(path)).parent)
        return write_beside(path, data)


def rewrite_model(
    model: ModelProto | str | os.PathLike[str],
    passes: Sequence[str | Pass],
    *,
    verify: bool = True,
    inputs: Mapping[str, np.ndarray[Any, Any]] | None = None,
    seed: int = 0,
) -> Rewritten:
    """Rewrite a model by passes, each of which is verified.

    The model is checked by onnx before and after each pass. Then model and rewritten model run on the same
    inputs: random ones, and zeros, ties, large values, one token, empty batches and others. All outputs must
    be the same, to the bit or within the passes' tolerance.

    Args:
        model: A path (external data stays where it is), or a ``ModelProto``, which is not changed.
        passes: Names, such as ``["expand", "strip:functions+docs"]``: ``expand`` inlines ``ascend.moe``
            nodes as standard operators, ``legalize`` makes them Python ops, ``to_float64`` lifts float32,
            ``strip`` takes away what no runtime reads. ``moe-onnx rewrite --help`` lists all.
        verify: Whether to run both. A model that cannot be run then raises an error: what is not verified is
            not said to be.
        inputs: Inputs of the model by name, to run it with instead of drawn ones.
        seed: Of drawn inputs.

    Returns:
        The rewritten model, and what was applied and skipped, with reasons.

    Raises:
        OptionError: If there is no such pass.
        ModelFileError: If there is no such file, or it is no model.
        VerificationError: If the rewritten model does something else, or that could not be found out: says
            which output differs, by how much and with which inputs.
        ModelError: If the model, or one that a pass made, is not valid.
    """
    chosen_passes(passes)
    return rewrite_opened(
        open_subject(model, Options(seed=seed)), passes, verify=verify, inputs=inputs, seed=seed
    )


def rewrite_opened(
    subject: Subject,
    passes: Sequence[str | Pass],
    *,
    verify: bool = True,
    inputs: Mapping[str, np.ndarray[Any, Any]] | None = None,
    seed: int = 0,
) -> Rewritten:
    """As :func:`rewrite_model`, of a model that was read."""
    done = apply_passes(subject.model, passes)
    if verify:
        if done.report.applied:
            done.report.verified = verify_by_running(subject, done, seed=seed, inputs=inputs)
        else:
            done.report.verified = [NOT_NEEDED]
    files = tuple(one for one in files_of(subject) if one != subject.path)
    return Rewritten(done.model, done.report, subject.path, files, subject.folder)
