"""How much memory a piece of work needs at its peak, where the system tells."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Growth of the process's memory from now on, at its highest."""

    def __init__(self) -> None:
        with suppress(OSError):  # on Linux this lets the high-water mark start anew
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _kilobytes("VmRSS")

    def growth(self) -> float | None:
        """Megabytes, None where the system does not tell."""
        peak = _kilobytes("VmHWM")
        return None if peak is None or self._before is None else max(peak - self._before, 0) / 1024


def _kilobytes(key: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
    except (OSError, ValueError, IndexError):
        return None
