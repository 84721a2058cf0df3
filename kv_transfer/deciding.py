"""The lock under which a worker's tables decide, and what happens when it is let go."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_transfer.link import Link


class Deciding:
    """A lock for `with`, which its holder may take again. What was queued on links under it is set
    going when it is let go, by the same thread and outside of it: a copy or a send must not keep
    the tables."""

    def __init__(self) -> None:
        self.inner = threading.RLock()
        self._depth = threading.local()
        self._links: dict[Link, None] = {}

    def __enter__(self) -> None:
        self.inner.acquire()
        self._depth.value = getattr(self._depth, "value", 0) + 1

    def __exit__(self, *_: object) -> None:
        links: dict[Link, None] = {}
        self._depth.value -= 1
        if not self._depth.value:
            links, self._links = self._links, links
        self.inner.release()
        for link in links:
            link.flush()

    def queued(self, link: Link) -> Link:
        """Notes that something is about to be queued on the link."""
        self._links[link] = None
        return link
