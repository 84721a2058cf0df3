"""The lock of the tables: what happens when it is let go, and when not."""

from __future__ import annotations

import threading
import time

from kv_transfer.deciding import Deciding
from tests.patience import WAIT_S


class Noted:
    """Stands for a link and for the engine: notes what happens, and on which thread."""

    def __init__(self, lock: Deciding) -> None:
        self._lock = lock
        self.seen: list[tuple[str, int]] = []
        lock.wake = self.wake

    def flush(self) -> None:
        self._note("flush")

    def hand_over(self) -> None:
        self._note("hand over")

    def wake(self) -> None:
        self._note("wake")

    def _note(self, what: str) -> None:
        self.seen.append((what, threading.get_ident()))

    def decide(self) -> None:
        """Something for the link and for the engine."""
        with self._lock:
            self._lock.queued(self)  # type: ignore[arg-type]
            self._lock.wakes()


def test_the_engine_is_woken_before_the_links_are_set_going_and_once() -> None:
    lock = Deciding()
    noted, here = Noted(lock), threading.get_ident()
    with lock:
        noted.decide()
        noted.decide()
        assert not noted.seen
    assert noted.seen == [("wake", here), ("flush", here)]
    with lock:
        pass
    assert len(noted.seen) == 2


def test_a_thread_that_waits_inside_keeps_nothing_back() -> None:
    lock = Deciding()
    noted = Noted(lock)
    changed = threading.Condition(lock.inner)
    others = threading.Thread(target=noted.decide)
    with lock:
        others.start()
        end = time.monotonic() + WAIT_S
        while len(noted.seen) < 2 and time.monotonic() < end:
            changed.wait(0.01)  # lets go of the lock meanwhile
        assert noted.seen == [("wake", others.ident), ("flush", others.ident)]
    others.join(WAIT_S)
    assert len(noted.seen) == 2


def test_what_is_handed_over_is_not_set_going_by_who_decided() -> None:
    lock = Deciding()
    noted, here = Noted(lock), threading.get_ident()
    with lock:
        lock.handed(noted)  # type: ignore[arg-type]
        lock.wakes()
    assert noted.seen == [("wake", here), ("hand over", here)]
    with lock:
        pass
    assert len(noted.seen) == 2
