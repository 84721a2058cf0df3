"""The sleep of the step thread."""

from __future__ import annotations

import contextlib
import os
import select

from pdserve.process.wakeup import Wakeup


class StepSleep:
    """Sleeps until `wake` is called or a watched descriptor is readable. Released by `close`.

    Any thread may call `wake`. The watched descriptors are eventfds.
    """

    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self._poll = select.poll()
        self.watch(self._wakeup.fileno())

    def wake(self) -> None:
        self._wakeup.set()

    def watch(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        for descriptor, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            with contextlib.suppress(BlockingIOError):  # it was cleared meanwhile
                os.eventfd_read(descriptor)

    def close(self) -> None:
        """Idempotent. `wake` then does nothing."""
        self._wakeup.close()
