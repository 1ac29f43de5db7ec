"""What only a run tells: whether every route can run the model, and to the same, finite outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moe_onnx.validation.findings import Outcome, Skipped, Table
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.agreement import is_float
from moe_onnx.validation.run.feeds import draw_feeds
from moe_onnx.validation.run.fixed_shapes import has_fixed_shapes
from moe_onnx.validation.run.messages import is_about_shapes, said
from moe_onnx.validation.run.runs import Runs, first_place, listed, outputs_of, runs_of
from moe_onnx.validation.run.sessions import (
    ERRORS,
    PLAIN,
    Array,
    is_not_here,
    make_session,
)
from moe_onnx.validation.subject import Subject

NO_SESSION = code(
    "MO801",
    "error",
    "No session can be made of the model",
    why="onnxruntime, by the route that is named, refuses the model when it is loaded. What onnx's checker "
    "lets pass is not all that a runtime refuses: a misspelt custom operator, an initializer of another "
    "shape than its data, a name that is made twice, a constant divisor of 0. A node that lacks a kernel "
    "on this machine is MO802 in models of others. Where the static checks found errors, this is left out: "
    "it mostly says the same again.",
    mend="See what onnxruntime says, and mend what the static checks found first.",
)
NO_KERNEL = code(
    "MO802",
    "warning",
    "onnxruntime has no kernel for a node on this machine",
    why="The model may be right and made for another device: on the CPU many operators lack kernels for 16 "
    "bits (bfloat16: MatMul, Add, Mul, Softmax and more), for float64, or for the old versions of opsets "
    "below 7, and StringNormalizer wants locales, which may not be installed. It cannot be run, so "
    "nothing was checked by running it.",
    mend="Run it on its device, or export it in float32 and with a newer opset to have it checked here.",
)
NOT_PLAIN = code(
    "MO803",
    "warning",
    "Only moe_onnx can load the model",
    why="The model carries function bodies for its `ascend.moe` operators, as if any ONNX runtime could run "
    "it, but a plain `onnxruntime.InferenceSession` refuses it. Seen where a node leaves out optional inputs "
    "or attributes, which bodies do not know, and where custom operators stand inside functions.",
    mend="Save what moe_onnx.add_function_bodies makes of it: there inputs and attributes are written out.",
)
RUN_FAILS = code(
    "MO804",
    "error",
    "The training graph does not run",
    why="A session was made, but running it with parameters and a batch as the manifest describes them "
    "raises an error.",
    mend="Build the graph again; the node that is named stands where it went wrong.",
)
RUN_MAY_FAIL = code(
    "MO805",
    "warning",
    "The model did not run with drawn inputs",
    why="A session was made, but running it raises an error for every size of the free axes that was tried. "
    "What its integers mean is known, or it takes none, so that values are hardly to blame.",
    mend="Run it with inputs of your own; if it works, what the inputs must be is not said in the model.",
)
SHAPES_DIFFER = code(
    "MO806",
    "error",
    "A node refuses the shapes that the model gives it",
    why="A session was made, but running it raises an error about shapes. All inputs have fixed shapes, and "
    "no size comes of what they hold, so that it fails for every input. Shape inference does not see it "
    "where a size is computed by nodes that it cannot follow.",
    mend="Look at the node that onnxruntime names, and at where the sizes that it gets are computed.",
)
NOT_FINITE = code(
    "MO841",
    "error",
    "A training graph gives NaN or infinite outputs",
    why="With freshly drawn parameters and an ordinary batch everything a training graph gives must be "
    "finite; one NaN gradient ruins all parameters in one step.",
    mend="Look at the node that is named: its inputs are finite, its output is not.",
)
MAY_NOT_BE_FINITE = code(
    "MO842",
    "warning",
    "The model gives NaN or infinity for ordinary inputs",
    why="Inputs were standard normal (positive where they go straight into a logarithm or a root). "
    "A NaN then mostly comes of 0/0, of the root of a difference, or of an overflow in 16 bits.",
    mend="Look at the node that is named: its inputs are finite, its output is not.",
)


@check("run", NO_SESSION, NO_KERNEL, NOT_PLAIN)
def sessions(subject: Subject) -> Iterator[Outcome]:
    """A session can be made by every route."""
    runs = runs_of(subject)
    if runs.skipped and not runs.sessions:
        yield Skipped(runs.skipped)
    for route, error in runs.failures.items():
        where = f"session by the route {route!r}"
        if route == PLAIN and runs.sessions:
            yield NOT_PLAIN(where, found=said(error))
        elif runs.manifest is None and is_not_here(error):
            yield NO_KERNEL(where, found=said(error))
        elif subject.errors and not runs.sessions:
            codes = listed(list(subject.errors))
            yield Skipped(f"the static checks found errors first ({codes}); {where}: {said(error)}")
        else:
            yield NO_SESSION(where, found=said(error))


@check("run", RUN_FAILS, RUN_MAY_FAIL, SHAPES_DIFFER)
def first_run(subject: Subject) -> Iterator[Outcome]:
    """The model runs with inputs that it should take."""
    runs = runs_of(subject)
    if runs.skipped or not runs.sessions:
        yield Skipped(runs.why_not)
        return
    yield _drawn(runs)
    if runs.error is None:
        return
    sizes = ", ".join(f"{name} {size}" for name, size in runs.feeds.sizes.items())
    where = f"run of the route {runs.first.route!r}"
    if runs.manifest is not None:
        yield RUN_FAILS(where, found=f"{said(runs.error)} (sizes: {sizes or 'all fixed'})")
    elif runs.feeds.guessed:
        names = listed(runs.feeds.guessed)
        yield Skipped(f"the model does not run with what was drawn for {names}: {said(runs.error)}")
    elif is_about_shapes(runs.error) and has_fixed_shapes(subject):
        yield SHAPES_DIFFER(where, found=said(runs.error))
    else:
        yield RUN_MAY_FAIL(where, found=said(runs.error))


def _drawn(runs: Runs) -> Table:
    """What inputs were drawn as; those drawn alike share a row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, value in runs.feeds.values.items():
        alike.setdefault((runs.feeds.how[name], value.dtype.name), []).append(name)
    rows = tuple(
        (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", dtype, how)
        for (how, dtype), names in alike.items()
    )
    return Table("Inputs of the runs", ("input", "dtype", "drawn as"), rows)


@check("run", NOT_FINITE, MAY_NOT_BE_FINITE)
def finite(subject: Subject) -> Iterator[Outcome]:
    """Outputs are finite."""
    runs = runs_of(subject)
    if runs.why_not or runs.outputs is None:
        yield Skipped(runs.why_not)
        return
    own = runs.manifest is not None
    if runs.feeds.guessed:
        yield Skipped(f"what is legal for {listed(runs.feeds.guessed)} is not known")
        return
    wrong = [name for name, value in runs.outputs.items() if _is_wild(value, own)]
    if not wrong or (not own and not _again(runs, wrong)):
        return

    def bad(names: Sequence[str]) -> set[str]:
        session = make_session(subject, runs.first.route, 1, names)
        values = session.run(runs.feeds.values, list(names))
        return {name for name, value in values.items() if _is_wild(value, own)}

    found = (
        f"{listed(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite; {first_place(runs, wrong, bad)}"
    )
    yield (NOT_FINITE if own else MAY_NOT_BE_FINITE)("outputs", found=found, places=outputs_of(wrong))


def _again(runs: Runs, wrong: list[str]) -> bool:
    """Whether other inputs give the same: one draw may hit a label that a loss leaves out, say."""
    for number in (1, 2, 3):
        rng = np.random.default_rng([runs.subject.options.seed, number])
        feeds = draw_feeds(runs.subject, rng, runs.feeds.sizes)
        if isinstance(feeds, Skipped):
            return False
        try:
            outputs = runs.first.run(feeds.values)
        except ERRORS:
            return False
        if any(name in outputs and _is_wild(outputs[name], False) for name in wrong):
            return True
    return False


def _is_wild(value: Array, own: bool) -> bool:
    """Whether a value is NaN or infinite; -inf is how others mask scores."""
    if not is_float(value):
        return False
    wide = value.astype(np.float64)
    return bool((~np.isfinite(wide) & (own | ~np.isneginf(wide))).any())
