"""Progress of starting processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Smaller I/O is no progress: it may be log lines, or calls to a router that does not answer.
_BYTES = 1 << 20


def bytes_moved(pid: int) -> int:
    """Return the bytes that a process and its children have read and written, or 0 if it has
    ended."""
    total = 0
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            io = each.io_counters()
            total += io.read_chars + io.write_chars + io.read_bytes
    except psutil.Error:
        return 0
    return total


@dataclass(slots=True)
class _Last:
    reports: int
    moved: int
    at: float


class StartProgress:
    """Tracks when each starting process last made progress: a report, or a MiB read or written. A
    start has no other time limit, because large models take long to download, load and compile."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        moved: Callable[[int], int] = bytes_moved,
    ) -> None:
        self._clock, self._moved = clock, moved
        self._last: dict[str, _Last] = {}

    def stuck(self, starting: Mapping[str, tuple[int, int]], limit_s: float) -> list[str]:
        """Return the processes without progress for `limit_s`. `starting`: (pid, number of reports)
        by name; the pid is 0 if the process has not been started."""
        now, found = self._clock(), []
        for name, (pid, reports) in starting.items():
            moved = self._moved(pid) if pid else 0
            last = self._last.get(name)
            if last is None or not pid or reports != last.reports or moved >= last.moved + _BYTES:
                self._last[name] = _Last(reports, moved, now)
            elif now - last.at >= limit_s:
                found.append(name)
        return found
