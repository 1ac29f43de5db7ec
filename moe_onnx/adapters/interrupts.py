"""Ctrl-C while onnxruntime-extensions calls a Python op: held off, not lost.

An exception that leaves a Python op ends the process, and a KeyboardInterrupt can come up in the first
instruction of the code that onnxruntime-extensions calls ops with, before anything could catch it. So
the handler of SIGINT has to know: it looks whether that code is running, and tries again later if so.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import CodeType, FrameType

# In a tight loop of runs most tries come up inside again: a signal that arrives while onnxruntime works
# is seen at the first instruction of the next op. Many short waits find the moments between two runs.
WAIT_SECONDS = 0.0005
_code: CodeType | None = None  # while it runs, no interrupt may come up
_waiting = 0  # the process whose thread is about to send the signal; a flag would be wrong after a fork


def hold_off_inside(code: CodeType) -> None:
    """Let SIGINT raise KeyboardInterrupt as ever, but only once ``code`` is not running.

    Only Python's own handler is replaced, and only in the main thread: a program that has a handler
    of its own, now or later, keeps it.
    """
    global _code
    _code = code
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def handler(number: int, frame: FrameType | None) -> None:
        # The frame given is of when the signal came; what matters is what runs now.
        if is_held_off(sys._getframe()):
            interrupt_later()
        else:
            signal.default_int_handler(number, frame)

    with suppress(ValueError):  # not the main interpreter
        signal.signal(signal.SIGINT, handler)


def is_held_off(frame: FrameType | None) -> bool:
    """Whether ``frame`` belongs to the code that must not be interrupted, or is called by it."""
    while frame is not None and frame.f_code is not _code:
        frame = frame.f_back
    return frame is not None


def interrupt_later() -> None:
    """Send SIGINT to the main thread as soon as it can be interrupted."""
    global _waiting
    if _waiting == os.getpid():
        return
    _waiting = os.getpid()
    # No threading.Timer: the signal may have come while the main thread holds threading's locks.
    try:
        _thread.start_new_thread(_interrupt, ())
    except RuntimeError:  # no more threads to be had: better to lose the signal than the process
        _waiting = 0


def _interrupt() -> None:
    global _waiting
    main = threading.main_thread().ident or 0
    time.sleep(WAIT_SECONDS)
    while is_held_off(sys._current_frames().get(main)):
        time.sleep(WAIT_SECONDS)
    _waiting = 0  # first, as the signal may come up inside again
    if hasattr(signal, "pthread_kill"):  # also wakes a main thread that sleeps
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()
