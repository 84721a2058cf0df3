"""The lock under which a worker's tables decide, and what happens when it is let go: the engine is
woken, then the links are set going."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.link import Link


def _nobody_waits() -> None:
    """Whoever drives the step looks often enough by itself."""


class Deciding:
    """A lock for `with`, which its holder may take again. What was queued on links under it is set
    going when it is let go, by the same thread and outside of it: a copy or a send must not keep
    the tables. Before that `wake` is called where a step may find that a transfer moved on: the
    engine waits for it, and nobody for an Ack."""

    def __init__(self) -> None:
        self.inner = threading.RLock()
        self.wake: Callable[[], None] = _nobody_waits
        # Of each thread: one that waits on a condition of `inner` is inside, and not the holder.
        self._depth = threading.local()
        # The holder's alone:
        self._wakes = False
        self._links: dict[Link, None] = {}
        self._handed: set[Link] = set()
        self._later: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self.inner.acquire()
        self._depth.value = getattr(self._depth, "value", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._depth.value -= 1
        is_due = self._links or self._handed or self._wakes or self._later
        if self._depth.value or not is_due:
            self.inner.release()
            return
        links, self._links = self._links, {}
        later, self._later = self._later, []
        handed, self._handed = self._handed, set()
        wakes, self._wakes = self._wakes, False
        self.inner.release()
        if wakes:
            self.wake()
        for link in handed:
            link.hand_over()
        for link in links:
            link.flush()
        for work in later:
            work()

    def later(self, work: Callable[[], None]) -> None:
        """To be done by the same thread when the lock is let go, behind what it sets going."""
        self._later.append(work)

    def wakes(self) -> None:
        """Notes that the engine is to look, when the lock is let go."""
        self._wakes = True

    def queued(self, link: Link) -> Link:
        """Notes that something is about to be queued on the link."""
        self._links[link] = None
        return link

    def handed(self, link: Link) -> Link:
        """As `queued`, for what the link's own thread is to set going, and not this one."""
        self._handed.add(link)
        return link
