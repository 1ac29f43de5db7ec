"""Ctrl-C and SIGTERM, held back while they would do harm."""

from __future__ import annotations

# ``signal`` wraps these to make enums of what they give, which for a handler that is a function took longer
# than all else in this file (Python < 3.12: an exception is raised and caught), and a step has six of them.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))
_NOTHING: AbstractContextManager[None] = nullcontext()
_deferring = False  # written by the main thread only


def interrupts_deferred() -> AbstractContextManager[None]:
    """Hold back Ctrl-C and SIGTERM while onnxruntime calls Python ops: raised there, they would abort.

    Inside another such block, as of a training step, the outer one holds them.
    """
    if _deferring or threading.current_thread() is not threading.main_thread():
        return _NOTHING
    return _Deferred()


class _Deferred(AbstractContextManager[None]):
    def __enter__(self) -> None:
        global _deferring
        self._caught: list[tuple[int, Any]] = []
        self._before: dict[int, Any] = {}
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._before[number] = handler
                _signal.signal(number, self._catch)
        _deferring = True

    def _catch(self, number: int, frame: Any) -> None:
        self._caught.append((number, frame))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _deferring
        _deferring = False
        for number, handler in reversed(self._before.items()):  # SIGINT, which raises, comes last
            _signal.signal(number, handler)
        for number, frame in self._caught:
            self._before[number](number, frame)
