"""What a process has open: tasks of its event loop, threads and file descriptors, and whether that
is more than when nothing had happened to it."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

import aiohttp
import psutil

from pdserve.task_metrics import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

_HTTP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Threads and descriptors count those of the processes that it has started too."""

    tasks: int
    threads: int
    fds: int


# How many more are none that leaked: threads of pools that were started, links that were opened
# (a worker's first with each other), connections that are about to close.
ROOM: Final = Figures(tasks=8, threads=24, fds=40)


def grown(calm: Figures, now: Figures) -> str:
    """What is more than there should be; "" where nothing is."""
    names = ("tasks", "threads", "descriptors")
    rows = zip(names, astuple(calm), astuple(now), astuple(ROOM), strict=True)
    return ", ".join(
        f"{now} {name} ({calm} when calm)" for name, calm, now, room in rows if now > calm + room
    )


async def take(session: aiohttp.ClientSession, url: str, pid: int) -> Figures | None:
    """Of the process ``pid`` with its metrics at ``url``; None where it does not answer."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_HTTP_S)) as response:
            tasks = _gauge(await response.text())
        threads = fds = 0
        for process in _tree(pid):
            threads += process.num_threads()
            fds += process.num_fds()
    except (aiohttp.ClientError, OSError, TimeoutError, psutil.NoSuchProcess):
        return None
    return Figures(tasks, threads, fds)


def _tree(pid: int) -> Iterator[psutil.Process]:
    top = psutil.Process(pid)
    yield top
    yield from top.children(recursive=True)


def _gauge(text: str) -> int:
    line = next(x for x in text.splitlines() if x.startswith(f"{TASKS} "))
    return int(float(line.rpartition(" ")[2]))
