"""The sessions, inputs and outputs that the checks of level ``run`` share, made once for a subject."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from moe_onnx.build.manifest import Manifest
from moe_onnx.validation.collapse import few
from moe_onnx.validation.findings import Skipped
from moe_onnx.validation.hazards.equations import unreadable_equation
from moe_onnx.validation.run.bisection import Bad, first_bad_node
from moe_onnx.validation.run.feeds import Feeds, draw_feeds, fed_bytes, free_sizes, manifest_of
from moe_onnx.validation.run.limits import TooLong
from moe_onnx.validation.run.sessions import ERRORS, Outputs, Session, make_session, routes, weight_bytes
from moe_onnx.validation.subject import Subject

REPEATS = 3
# Sizes tried for the free axes of a model whose author nobody can ask.
_TRIED = (0, 1, 2, 3, 8, 16)  # 0: those of free_sizes

# Operators that give other values in every run.
_RANDOM = frozenset(
    ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
)


@dataclass
class Runs:
    """What running the model gave.

    Attributes:
        subject: The model.
        manifest: Its manifest, None where it is not a training graph of this package.
        skipped: Why nothing was run, or ``""``.
        sessions: By route and number of threads.
        failures: Why a route has no session.
        feeds: The inputs that the model ran with, or was last tried with.
        outputs: Of the first route, None where it did not run.
        error: Why it did not run.
        seconds: What the first run of each session took.
        fixed: Whether it was found that free axes are not free.
        too_long: Why the first run was ended, or ``""``.
    """

    subject: Subject
    manifest: Manifest | None
    skipped: str = ""
    sessions: dict[tuple[str, int], Session] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    feeds: Feeds = field(default_factory=Feeds)
    outputs: Outputs | None = None
    error: Exception | None = None
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    fixed: bool = False
    too_long: str = ""

    @property
    def first(self) -> Session:
        """The session that checks use which need only one."""
        return next(iter(self.sessions.values()))

    def session(self, route: str, threads: int) -> Session:
        """The session of a route and a number of threads; raises one of ERRORS where there can be none."""
        if (route, threads) not in self.sessions:
            self.sessions[route, threads] = make_session(self.subject, route, threads)
        return self.sessions[route, threads]

    def run(self, session: Session, feeds: Feeds) -> Outputs:
        """Run a session, and remember how long the first time took."""
        start = time.perf_counter()
        outputs = session.run(feeds.values)
        self.seconds.setdefault((session.route, session.threads), time.perf_counter() - start)
        return outputs

    @property
    def why_not(self) -> str:
        """Why there are no outputs to look at, or ``""``."""
        if self.skipped:
            return self.skipped
        if not self.sessions:
            return "no session can be made of the model"
        return "" if self.outputs is not None else "the model did not run"

    @property
    def random_node(self) -> NodeProto | None:
        """A node that gives other values in every run, where there is one."""
        for _, node in self.subject.nodes():
            if node.op_type in _RANDOM or (node.op_type == "Dropout" and len(node.input) > 2):
                return node
        return None


def runs_of(subject: Subject) -> Runs:
    """Make sessions by every route, draw inputs, and run: the first time this is called."""
    return subject.once(_runs)


def runs_so_far(subject: Subject) -> Runs | None:
    """What :func:`runs_of` has made by now; None where nothing has asked for it."""
    return subject.made(_runs)


def _runs(subject: Subject) -> Runs:
    runs = Runs(subject, manifest_of(subject))
    if place := unreadable_equation(subject):
        runs.skipped = f"onnxruntime does not come to an end with the equation of {place}"
        return runs
    size, most = weight_bytes(subject) + fed_bytes(subject), subject.options.max_bytes
    if size > most:
        held, limit = (f"{number / 2**20:,.0f} MB" for number in (size, most))
        runs.skipped = f"weights and inputs of {held} are more than the {limit} for runs"
        return runs
    for route in routes(subject):
        try:
            runs.session(route, 1)
        except ERRORS as error:
            runs.failures[route] = error
    if runs.sessions:
        _first_run(runs)
    return runs


def _first_run(runs: Runs) -> None:
    free = free_sizes(runs.subject)
    tried = _TRIED if free and runs.manifest is None else _TRIED[:1]
    for size in tried:
        feeds = draw(runs.subject, dict.fromkeys(free, size) if size else free)
        if isinstance(feeds, Skipped):
            runs.skipped = feeds.reason
            return
        runs.feeds = feeds
        try:
            runs.outputs = runs.run(runs.first, feeds)
        except TooLong as error:
            runs.skipped = runs.too_long = str(error)
            return
        except ERRORS as error:
            runs.error = runs.error or error
        else:
            runs.error = None
            return


def draw(subject: Subject, sizes: dict[str, int]) -> Feeds | Skipped:
    """Inputs by the seed that was asked for: the same for the same sizes."""
    return draw_feeds(subject, np.random.default_rng(subject.options.seed), sizes)


def first_place(runs: Runs, outputs: list[str], bad: Bad, *, always: bool = True) -> str:
    """Where bad outputs begin, as the end of a sentence."""
    node = first_bad_node(runs.subject, outputs, bad, always=always)
    if node is None:
        return "where it begins could not be seen from intermediate values"
    return f"it {'begins' if always else 'seems to begin'} at {runs.subject.main.place(node)}"


def listed(names: list[str]) -> str:
    """Names for a message, the first three of them."""
    return few(map(repr, names))


def outputs_of(names: Iterable[str]) -> list[str]:
    """Names of outputs as the places of a finding."""
    return [f"output {name!r}" for name in names]
