"""What a process under test is told to do wrong, as a file that it reads again and again, and how
often it did it, as a file that grows."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

LOOK_EVERY_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Order:
    """Faults from now on.

    transfers   "drop" breaks the link at each chunk sent, "corrupt" flips a bit of it, "delay"
                holds it for ``delay_s``
    clock_s     is added to the wall clock
    logs        "full": the log's disk has no room
    renewals    "stop": the lease is renewed no more
    """

    transfers: str = ""
    delay_s: float = 0.0
    clock_s: float = 0.0
    logs: str = ""
    renewals: str = ""


def order_path(directory: Path, name: str) -> Path:
    """Where the orders of a process lie."""
    return directory / f"{name}.order"


def hits_path(directory: Path, name: str) -> Path:
    """Has one byte for each time that the process did as told."""
    return directory / f"{name}.hits"


def give(directory: Path, name: str, order: Order) -> None:
    """Tell a process, now or when it starts."""
    path = order_path(directory, name)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(order)), encoding="ascii")
    partial.replace(path)


def hits(directory: Path, name: str) -> int:
    """How often a process did as told, over all of its lives."""
    path = hits_path(directory, name)
    return path.stat().st_size if path.exists() else 0


class Orders:
    """A process's own: ``now`` follows the file. Owns a daemon thread, which ends with it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = order_path(directory, name)
        self._hits = hits_path(directory, name).open("ab", buffering=0)
        self._seen: object = None
        self._wait = threading.Event()
        self.now = Order()
        self._look()
        threading.Thread(target=self._follow, name="chaos-orders", daemon=True).start()

    def did(self) -> None:
        """One hit."""
        self._hits.write(b".")

    def follows(self, order: Order, within_s: float) -> bool:
        """Whether ``order`` is what is to be done, now or in so long."""
        ends_at = time.monotonic() + within_s
        while self.now != order and time.monotonic() < ends_at:
            time.sleep(LOOK_EVERY_S)
        return self.now == order

    def _follow(self) -> None:
        while not self._wait.wait(LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        try:
            seen = self._path.stat()
        except FileNotFoundError:
            return
        if (seen.st_ino, seen.st_mtime_ns) != self._seen:
            self._seen = (seen.st_ino, seen.st_mtime_ns)
            self.now = Order(**json.loads(self._path.read_text(encoding="ascii")))
