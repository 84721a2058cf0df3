"""Empties a worker: for a drain, or to change its role."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.config import MOVE_S, UNPIN_S
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.types import Role
from workers.control.worker_intake import RoleChangeState
from workers.link.registration import ANNOUNCE_S

if TYPE_CHECKING:
    from workers.control.worker_intake import WorkerIntake
    from workers.link.registration import Registrations
    from workers.service import WorkerService

logger = logging.getLogger(__name__)

# Pause between two reports to routers while a drain moves requests.
_MOVE_PERIOD_S = 0.5
# The engine does not report the end of a hold, so streams and ledger are polled.
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class DrainTiming:
    """Times in seconds. `announce_s`: longest wait for routers to acknowledge a drain. `move_s`:
    time for them to move the remaining streams. `settle_s`: a role change is undone if its router
    has not settled it by then."""

    announce_s: float = ANNOUNCE_S
    move_s: float = MOVE_S
    settle_s: float = 60.0


_TIMING = DrainTiming()


class DrainManager:
    """Changes a worker's intake. State: the role before an unsettled change, and its timer."""

    def __init__(
        self,
        intake: WorkerIntake,
        service: WorkerService,
        routers: Registrations,
        *,
        timing: DrainTiming = _TIMING,
    ) -> None:
        self._intake = intake
        self._service = service
        self._routers = routers
        self._timing = timing
        self._former_role = intake.role
        self._unsettled: asyncio.TimerHandle | None = None

    async def drain(self, timeout_s: float) -> tuple[bool, int]:
        """Refuse new requests and empty the worker: see `_empty`. Return early if `end_drain` is
        called meanwhile."""
        was_open, self._intake.is_drained = not self._intake.is_draining, True
        return await self._empty(timeout_s, "this worker is draining", announce=was_open)

    async def end_drain(self) -> None:
        """Accept new requests again. Return when the routers know, so that another worker can be
        drained next. Raises Unavailable if the engine died or the worker closes."""
        if self._intake.is_closed:
            raise Unavailable("this worker is stopping")
        self._intake.is_drained = False
        await self._routers.renewed()

    async def change_role(self, role: Role, drain_timeout_s: float) -> int:
        """Empty the worker, then register in the other role, in state PROVING. Return the number of
        moved streams. Raises InvalidRequest for a role that the worker cannot have, and Unavailable
        during another change or if blocks stay pinned; the role is then unchanged.
        """
        intake = self._intake
        if intake.role_state is not RoleChangeState.SERVING:
            raise Unavailable(
                f"this worker is {intake.role_state} a change of its role", retry_after_s=1.0
            )
        if role is intake.role or {role, intake.role} != {Role.PREFILL, Role.DECODE}:
            raise InvalidRequest(
                f"a worker cannot change from {intake.role} to {role}, only between prefill and "
                f"decode",
                field="role",
            )
        was_open, intake.role_state = not intake.is_draining, RoleChangeState.DRAINING
        try:
            is_empty, moved = await self._empty(
                drain_timeout_s, "this worker changes its role", announce=was_open
            )
            if not is_empty:
                raise Unavailable(f"blocks are still pinned: {self._service.ledger()}")
        except BaseException:
            intake.role_state = RoleChangeState.SERVING
            self._routers.renew()
            raise
        self._former_role, intake.role_state = intake.role, RoleChangeState.PROVING
        self._take_role(role)
        loop = asyncio.get_running_loop()
        settle_s = self._timing.settle_s
        self._unsettled = loop.call_later(settle_s, lambda: self.settle_role(keep=False))
        return moved

    def settle_role(self, *, keep: bool) -> bool:
        """End PROVING, in the new role or in the former one. Return False if no change is
        unsettled."""
        if self._intake.role_state is not RoleChangeState.PROVING:
            return False
        self.close()
        self._intake.role_state = RoleChangeState.SERVING
        if keep:
            self._routers.renew()
        else:
            self._take_role(self._former_role)
        logger.info("this worker is a %s worker now", self._intake.role)
        return True

    def close(self) -> None:
        """Stop the timer of an unsettled role change. Idempotent."""
        if self._unsettled is not None:
            self._unsettled.cancel()

    def _take_role(self, role: Role) -> None:
        self._intake.role = role
        self._routers.change_role(role)

    async def _empty(self, timeout_s: float, reason: str, *, announce: bool) -> tuple[bool, int]:
        """Empty the worker. Return True if no stream is open and no block is pinned, and the number
        of streams that other workers took over.

        First the drain is announced to routers (if `announce`); requests are still accepted
        meanwhile. Then streams have `timeout_s` to end by themselves. Then routers move the
        remaining streams. The last streams end with an error, and their routers continue them on
        other workers.
        """
        service, now = self._service, asyncio.get_running_loop().time
        before = service.exported_streams
        until = now() + timeout_s
        if announce:
            await self._announce()
        if await self._is_empty_by(until):
            return True, service.exported_streams - before
        moved = service.exported_streams - before + service.open_streams
        until = now() + self._timing.move_s
        self._intake.is_moving = True
        try:
            while self._intake.is_draining and now() < until:
                self._routers.renew()
                if await self._is_empty_by(now() + _MOVE_PERIOD_S):
                    return True, moved
        finally:
            self._intake.is_moving = False
        if not self._intake.is_draining:
            return False, 0
        service.abandon(Unavailable(reason))
        return await self._is_empty_by(now() + UNPIN_S), moved

    async def _announce(self) -> None:
        self._intake.is_announcing = True
        try:
            await self._routers.announce(self._timing.announce_s)
        finally:
            self._intake.is_announcing = False

    async def _is_empty_by(self, until: float) -> bool:
        """Wait until no stream is open and no block is pinned, and return True if so. Return False
        at once when the drain is undone."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self._intake.is_draining and not self._is_empty():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        return self._intake.is_draining and self._is_empty()

    def _is_empty(self) -> bool:
        return not self._service.open_streams and self._service.ledger().is_empty
