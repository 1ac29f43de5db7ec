"""Ctrl-C while onnxruntime-extensions calls a Python op: held off, not lost.

An exception that leaves a Python op ends the process, and a KeyboardInterrupt can come up in the first
instruction of the code that onnxruntime-extensions calls ops with, before anything could catch it. So
the handler of SIGINT has to know: it looks whether that code is running, and tries again later if so.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from contextlib import suppress
from types import CodeType, FrameType

RETRY_SECONDS = 0.05
_due = 0.0  # when the signal that is on its way is sent; a time, as a flag would be wrong after a fork


def hold_off_inside(code: CodeType) -> None:
    """Let SIGINT raise KeyboardInterrupt as ever, but only once ``code`` is not running.

    Only Python's own handler is replaced, and only in the main thread: a program that has a handler
    of its own, now or later, keeps it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def handler(number: int, frame: FrameType | None) -> None:
        # The frame given is of when the signal came; what matters is what runs now.
        running: FrameType | None = sys._getframe()
        while running is not None:
            if running.f_code is code:
                interrupt_later()
                return
            running = running.f_back
        signal.default_int_handler(number, frame)

    with suppress(ValueError):  # not the main interpreter
        signal.signal(signal.SIGINT, handler)


def interrupt_later() -> None:
    """Send SIGINT to the main thread a moment from now."""
    global _due
    if time.monotonic() < _due:
        return
    _due = time.monotonic() + RETRY_SECONDS
    # No threading.Timer: the signal may have come while the main thread holds threading's locks.
    with suppress(RuntimeError):  # no more threads to be had: better to lose the signal than the process
        _thread.start_new_thread(_interrupt, ())


def _interrupt() -> None:
    time.sleep(RETRY_SECONDS)
    if hasattr(signal, "pthread_kill"):  # also wakes a main thread that sleeps
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()
