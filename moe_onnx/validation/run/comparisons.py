"""Whether runs agree: those of different routes, those of one session, those with more threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.agreement import ROUTES, THREADS, difference, differing, same_bits
from moe_onnx.validation.run.messages import said
from moe_onnx.validation.run.runs import REPEATS, Runs, first_place, listed, outputs_of, runs_of
from moe_onnx.validation.run.sessions import ERRORS, Outputs, Session, make_session
from moe_onnx.validation.subject import Subject

THREAD_COUNTS = (1, 2)
LOSS = 1e-6  # what a loss may differ by between numbers of threads

ROUTES_DIFFER = code(
    "MO811",
    "error",
    "The routes give different outputs",
    why="The native and Python kernels, the function bodies of this package and the bodies in the file must "
    "mean the same. A body of the same domain and name that means something else is used silently wherever "
    "no kernels are registered, and shadowed where they are (measured with onnxruntime 1.32). Illegal "
    "indices are the other reason: kernels refuse what bodies cannot all check.",
    mend="Export the model again, so that it has this package's bodies; look at the node that is named.",
)
NOT_DETERMINISTIC = code(
    "MO821",
    "error",
    "Runs of one session differ",
    why="The same session, inputs and number of threads gave other bits. Known: `ScatterND` with "
    "reduction `add` and repeated indices loses updates at two threads (hundreds of elements a run, measured "
    "with onnxruntime 1.32), and random operators in a training graph.",
    mend="Replace the node that is named: `ScatterElements` with `add` is correct and deterministic.",
)
THREADS_DIFFER = code(
    "MO822",
    "warning",
    "Outputs depend on the number of threads",
    why="Sums in another order differ in the last bits: 1e-6 in the loss of a training graph, 3e-6 of the "
    "largest value in a product over 100,000 elements, in float32. More means that something amplifies "
    "rounding, or that threads disturb each other.",
    mend="Look at the node that is named; train at a fixed number of threads to have runs repeat.",
)


@check("run", ROUTES_DIFFER)
def routes(subject: Subject) -> Iterator[Outcome]:
    """All routes give the same outputs, within the tolerance of the dtype."""
    runs = runs_of(subject)
    alike = [session for (_, threads), session in runs.sessions.items() if threads == 1]
    if len(alike) < 2 or runs.skipped:
        yield Skipped(runs.skipped or "there is only one route")
        return
    if runs.random_node is not None:
        yield Skipped(f"{subject.main.place(runs.random_node)} gives other values in every run")
        return
    first, results = alike[0], _each(runs, alike)
    expected = results[first.route]
    for session in alike[1:]:
        where = f"routes {first.route!r} and {session.route!r}"
        found = results[session.route]
        if isinstance(expected, Exception) or isinstance(found, Exception):
            if not (isinstance(expected, Exception) and isinstance(found, Exception)):
                yield ROUTES_DIFFER(where, found=f"{_outcome(expected)}; {_outcome(found)}")
            continue
        if wrong := differing(expected, found, ROUTES, _kind):
            node = _first_differing(runs, first, session, wrong, ROUTES)
            said_of = f"{_some(wrong)}; {node}"
            yield ROUTES_DIFFER(where, found=said_of, expected=_limit(ROUTES), places=outputs_of(wrong))


def _each(runs: Runs, sessions: Sequence[Session]) -> dict[str, Outputs | Exception]:
    results: dict[str, Outputs | Exception] = {}
    for session in sessions:
        try:
            results[session.route] = runs.run(session, runs.feeds)
        except ERRORS as error:
            results[session.route] = error
    return results


def _outcome(result: Outputs | Exception) -> str:
    return f"one raises {said(result)}" if isinstance(result, Exception) else "the other one runs"


@check("run", NOT_DETERMINISTIC, THREADS_DIFFER)
def repeats(subject: Subject) -> Iterator[Outcome]:
    """Runs repeat: to the bit with one number of threads, closely with another."""
    runs = runs_of(subject)
    if runs.why_not:
        yield Skipped(runs.why_not)
        return
    node = runs.random_node
    if node is not None and runs.manifest is None:
        yield Skipped(f"{subject.main.place(node)} gives other values in every run, as it should")
        return
    firsts: list[tuple[Session, Outputs]] = []
    for threads in THREAD_COUNTS:
        try:
            session = runs.session(runs.first.route, threads)
            once = runs.run(session, runs.feeds)
            for _ in range(REPEATS - 1):
                again = session.run(runs.feeds.values)
                wrong = [name for name in once if not _same(once, again, name)]
                if wrong:
                    said_of = _first_unsteady(runs, session, wrong)
                    yield NOT_DETERMINISTIC(
                        f"{threads} threads" if threads > 1 else "1 thread",
                        found=f"from run to run {listed(wrong)} changed; {said_of}",
                        places=outputs_of(wrong),
                    )
                    return
        except ERRORS as error:
            yield Skipped(f"with {threads} threads: {said(error)}")
            return
        firsts.append((session, once))
    (one, expected), (two, found) = firsts
    wrong_by = differing(expected, found, THREADS, _kind)
    if runs.manifest is not None and "loss" in expected:
        gap = difference(expected["loss"], found["loss"])
        if gap > LOSS:
            wrong_by["loss"] = gap
    if wrong_by:
        said_of = _first_differing(runs, one, two, wrong_by, THREADS)
        yield THREADS_DIFFER(
            f"{one.threads} and {two.threads} threads",
            found=f"{_some(wrong_by)}; {said_of}",
            expected=_limit(THREADS),
            places=outputs_of(wrong_by),
        )


def _same(one: Outputs, other: Outputs, name: str) -> bool:
    return name in other and same_bits(one[name], other[name])  # a sequence may be shorter


def _kind(name: str) -> str:
    """Gradients are of one kind: what should be 0 in one is noise of the size of the others."""
    return "gradient" if name.endswith(".grad") else name


def _first_differing(
    runs: Runs, one: Session, two: Session, wrong: dict[str, float], tolerance: dict[str, float]
) -> str:
    def bad(names: Sequence[str]) -> set[str]:
        pair = [make_session(runs.subject, s.route, s.threads, names) for s in (one, two)]
        values = [session.run(runs.feeds.values, list(names)) for session in pair]
        return set(differing(values[0], values[1], tolerance, _kind))

    return first_place(runs, list(wrong), bad)


def _first_unsteady(runs: Runs, session: Session, wrong: list[str]) -> str:
    def bad(names: Sequence[str]) -> set[str]:
        probe = make_session(runs.subject, session.route, session.threads, names)
        every = [probe.run(runs.feeds.values, list(names)) for _ in range(4 * REPEATS)]
        return {name for name in every[0] if not all(_same(every[0], other, name) for other in every[1:])}

    return first_place(runs, wrong, bad, always=False)


def _some(wrong: dict[str, float]) -> str:
    name, gap = max(wrong.items(), key=lambda item: item[1])
    more = f", and {len(wrong) - 1} more outputs" if len(wrong) > 1 else ""
    return (
        f"{name!r} differs by {gap:.1e} of its largest value{more}"
        if gap < float("inf")
        else (f"{name!r} differs altogether{more}")
    )


def _limit(tolerance: dict[str, float]) -> str:
    return "at most " + ", ".join(f"{limit:g} in {dtype}" for dtype, limit in tolerance.items())
