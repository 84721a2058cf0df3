"""How a worker gets rid of its work.

announce ─► wait ─► ask routers to move what is left ─► end it with an error that sends it on
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from pdserve import deadline
from pdserve.errors import Unavailable
from pdserve.failure_config import MOVE_S, UNPIN_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.types import KvLedger

# A router that answers does so in milliseconds; one that hangs finds this worker closed.
ANNOUNCE_S = 1.0
# The engine tells nobody when a lease ends, so that an empty ledger has to be looked for.
_LEDGER_LOOK_S = 0.02
# How often routers are told what is to go on elsewhere: room comes and goes.
_MOVE_TELL_S = 0.5


class Work(Protocol):
    """What a worker has to get rid of, and whom it tells. `idle` is set while no stream is open,
    and `exported` counts the streams that went on elsewhere with their KV."""

    idle: asyncio.Event
    exported: int
    on_change: Callable[[], None]
    tell_routers: Callable[[], Awaitable[None]]

    @property
    def is_draining(self) -> bool: ...

    @property
    def open_streams(self) -> int: ...

    def ledger(self) -> KvLedger: ...

    def end_streams(self, error: Unavailable) -> None: ...


class Drain:
    """State: whether the routers are being told, and whether what is left should move."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.announces = False
        self.is_moving = False

    async def empty(self, timeout_s: float, why: str, *, announces: bool) -> tuple[bool, int]:
        """(Whether nothing is left, how many streams went on elsewhere.)

        With `announces` the routers are told first; what they send until they know is taken, as it
        was placed in good faith. Then streams may end by themselves, and routers move those that
        another worker can go on with from their KV; then routers are asked to move the others; then
        they are ended with an error that sends them on, and what is held is given up.
        """
        before, until = self._work.exported, deadline.after(timeout_s)
        if announces:
            await self._announce()
        if await self._is_idle_by(until):
            return True, self._work.exported - before
        if not self._work.is_draining:
            return False, 0
        moved = self._work.exported - before + self._work.open_streams
        if await self._is_moved():
            return True, moved
        self._work.end_streams(Unavailable(why))
        return await self._is_idle_by(deadline.after(UNPIN_S)), moved

    async def _announce(self) -> None:
        self.announces = True
        try:
            with suppress(TimeoutError):
                async with deadline.timeout(deadline.after(ANNOUNCE_S)):
                    await self._work.tell_routers()
        finally:
            self.announces = False

    async def _is_moved(self) -> bool:
        self.is_moving = True
        try:
            until = deadline.after(MOVE_S)
            while deadline.remaining(until):
                self._work.on_change()
                if await self._is_idle_by(deadline.after(_MOVE_TELL_S)):
                    return True
        finally:
            self.is_moving = False
        return False

    async def _is_idle_by(self, until: float | None) -> bool:
        """Whether no stream is open and no block is pinned before time runs out."""
        work = self._work
        try:
            async with deadline.timeout(until):
                while not (work.idle.is_set() and work.ledger().is_empty):
                    await work.idle.wait()
                    await asyncio.sleep(_LEDGER_LOOK_S)
        except TimeoutError:
            return not work.open_streams and work.ledger().is_empty
        return True
