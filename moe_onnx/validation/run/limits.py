"""Runs that end: a model may loop for ever, or take longer than anyone waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import onnxruntime

from moe_onnx.validation.findings import NotDone

SECONDS = 60.0  # that a run may take

T = TypeVar("T")


class TooLong(NotDone):
    """A run was ended."""


def within_limit(
    run: Callable[[onnxruntime.RunOptions], T], options: onnxruntime.RunOptions | None = None
) -> T:
    """Run a session, for :data:`SECONDS` at most.

    onnxruntime looks between two nodes, those inside a Loop included, whether it is to end: one kernel
    that takes long is not interrupted.

    Args:
        run: Runs the session with the run options that it is given.
        options: The run options, where the default ones will not do.

    Raises:
        TooLong: If the run was ended.
    """
    options = onnxruntime.RunOptions() if options is None else options
    seconds, over = SECONDS, threading.Event()

    def end() -> None:
        over.set()
        options.terminate = True

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        return run(options)
    except Exception as error:
        if over.is_set():
            raise TooLong(f"a run takes longer than {seconds:g} s, and was ended") from error
        raise
    finally:
        timer.cancel()
