"""Data-parallel groups of `pdserve up`. Their ranks start and end together, because no rank
computes without the others."""

from __future__ import annotations

import asyncio
import errno
import random
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.deploy.local.restarts import SupervisedProcess

_POLL_S = 0.05
_HOST = "127.0.0.1"
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_GIVEN = 32768  # Linux's default
_FIRST_PORT = 10_000  # above the ports of most services


class RankGroup:
    """One group. State: the rendezvous port of its ranks, a new one at each start, because the last
    one may still be in use, and the names of the ranks that have met and not ended."""

    def __init__(self, ranks: Sequence[SupervisedProcess]) -> None:
        self._ranks = ranks
        self._waiting = 0
        self._running: set[str] = set()
        self._meeting: asyncio.Future[None] | None = None
        self.port = 0

    async def meet(self) -> None:
        """Return once every rank is about to start."""
        if self._meeting is None:
            self._meeting = asyncio.get_running_loop().create_future()
        meeting, self._waiting = self._meeting, self._waiting + 1
        if self._waiting == len(self._ranks):
            self.port, self._waiting, self._meeting = free_ports(_HOST), 0, None
            self._running = {rank.name for rank in self._ranks}
            meeting.set_result(None)
        await asyncio.shield(meeting)

    async def end_with(self, ended: SupervisedProcess, grace_s: float) -> None:
        """End the other ranks after `ended` has ended, also ranks whose process is still starting.
        Serving ranks detect it and fail by themselves within `grace_s`."""
        self._running.discard(ended.name)
        kill_at = time.monotonic() + grace_s
        while left := [x for x in self._ranks if x.name in self._running]:
            is_late = time.monotonic() >= kill_at
            for rank in left:
                if is_late or rank.ready_at is None:
                    rank.send(signal.SIGKILL)
            await asyncio.sleep(_POLL_S)


def free_ports(host: str) -> int:
    """Return a free port of an address of this machine; the next port is free, too. It is below
    Linux's ephemeral ports, which another process could take before the ranks listen. Raises
    OSError if this machine has no such address.
    """
    try:
        first_given = int(_GIVEN_PORTS.read_text().split()[0])
    except OSError:  # not Linux
        first_given = _FIRST_GIVEN
    highest = max(first_given, 2 * _FIRST_PORT) - 2
    while True:
        port = random.randint(_FIRST_PORT, highest)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind((host, port))
                second.bind((host, port + 1))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
