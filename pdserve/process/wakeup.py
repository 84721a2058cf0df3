"""A flag that any thread sets and one thread waits for with `select` or `poll`."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """An eventfd. `fileno()` is readable while the flag is set. Released by `close`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # so that nothing is written to a reused descriptor

    def fileno(self) -> int:
        """Return the descriptor, or -1 after `close`."""
        return self._fd

    def set(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # it was not set
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
