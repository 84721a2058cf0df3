"""Tries workers and pairs by canaries, so that no client's request is the one that finds out.

A worker is tried that is half open, or else a pair that is, or else a pair drawn at random through
which no KV has come for a while. One canary at a time: what they cost does not grow with the pool.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Self

from pdserve.errors import PdserveError, TransferCorrupted, TransferFailed
from pdserve.kv_pairs import exchange, kind_of
from pdserve.types import Role
from router.background import Background
from router.breaker import BreakerState
from router.canary import prove, prove_alone
from router.member import MemberState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from router.fleet import Fleet
    from router.member import Member
    from router.metrics import RouterMetrics
    from router.quarantine import Quarantine

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
CANARY_S = 30.0
# Of so many looks one is for a pair that was not used.
IDLE_EVERY = 5


def half_open_worker(members: Mapping[str, Member], now: float) -> Member | None:
    """One that may be tried, and can be reached."""
    for member in members.values():
        if member.is_suspect and member.breaker.state(now) is BreakerState.HALF_OPEN:
            return member
    return None


def half_open_pair(
    members: Mapping[str, Member], quarantine: Quarantine, now: float
) -> tuple[Member, Member] | None:
    """One that may be tried, whose workers are ready."""
    for pair in quarantine.half_open(now):
        prefill, decode = (members.get(worker_id) for worker_id in pair)
        if prefill is not None and decode is not None and _can_pair(prefill, decode):
            return prefill, decode
    return None


def unused_pair(
    members: Mapping[str, Member],
    quarantine: Quarantine,
    now: float,
    *,
    idle_s: float,
    draw: random.Random,
) -> tuple[Member, Member] | None:
    """One drawn at random; None where it is in use, kept apart, or no pair."""
    ready = [m for m in members.values() if m.state is MemberState.READY]
    prefills = [m for m in ready if m.info.role is Role.PREFILL]
    decodes = [m for m in ready if m.info.role is Role.DECODE]
    if not prefills or not decodes:
        return None
    prefill, decode = draw.choice(prefills), draw.choice(decodes)
    pair = prefill.worker_id, decode.worker_id
    if quarantine.unused_s(pair, now) < idle_s or pair in quarantine.barred(now):
        return None
    return (prefill, decode) if _can_pair(prefill, decode) else None


def _can_pair(prefill: Member, decode: Member) -> bool:
    return (
        (prefill.info.role, decode.info.role) == (Role.PREFILL, Role.DECODE)
        and prefill.state is decode.state is MemberState.READY
        and exchange(kind_of(prefill.info), kind_of(decode.info))
    )


class Canaries:
    """Owns a task. An async context manager: leaving ends it, and a canary under way. While it is
    there, no client's request is the first on what is half open."""

    def __init__(
        self, fleet: Fleet, metrics: RouterMetrics, *, idle_s: float, period_s: float = PERIOD_S
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._idle_s = idle_s
        self._period_s = period_s
        self._draw = random.Random()
        self._task = Background("canaries", self._run)

    async def __aenter__(self) -> Self:
        self._fleet.quarantine.by_canary = self._fleet.pool.by_canary = True
        await self._task.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fleet.quarantine.by_canary = self._fleet.pool.by_canary = False
        await self._task.__aexit__(kind, error, trace)

    async def _run(self) -> None:
        fleet, looks, began = self._fleet, 0, self._fleet.now()
        while True:
            await asyncio.sleep(self._period_s)
            members, now = fleet.pool.members, fleet.now()
            worker = half_open_worker(members, now)
            if worker is not None:
                await self._try_worker(worker)
                continue
            pair = half_open_pair(members, fleet.quarantine, now)
            looks += 1
            is_due = looks % IDLE_EVERY == 0 and now - began >= self._idle_s
            if pair is None and is_due:
                pair = unused_pair(
                    members, fleet.quarantine, now, idle_s=self._idle_s, draw=self._draw
                )
            if pair is not None:
                await self._try(*pair)

    async def _try_worker(self, member: Member) -> None:
        """Any whole answer will do: what it says is looked at with its partners."""
        fleet, outcome = self._fleet, "whole"
        fleet.pool.placed(member, fleet.now())
        try:
            await prove_alone(fleet, member, timeout_s=CANARY_S)
        except PdserveError as error:
            outcome = "failed"
            logger.warning("canary on worker %s: %s", member.worker_id, error.message)
            fleet.failed(member, error.message)
        else:
            fleet.succeeded(member)
        self._metrics.worker_canary(member.info.model.name, outcome)

    async def _try(self, prefill: Member, decode: Member) -> None:
        """Failures of a worker say nothing of the pair: then it is tried again later."""
        fleet, quarantine = self._fleet, self._fleet.quarantine
        pair = prefill.worker_id, decode.worker_id
        is_trial, outcome = quarantine.tries(pair, fleet.now()), "whole"
        try:
            await prove(fleet, prefill, decode, timeout_s=CANARY_S)
        except PdserveError as error:
            outcome = "failed"
            logger.warning("canary from worker %s to %s: %s", *pair, error.message)
            if isinstance(error, TransferCorrupted):
                quarantine.strike(pair, fleet.now(), error.message)
            elif isinstance(error, TransferFailed):
                quarantine.failed(pair, fleet.now(), error.message)
        except Exception:
            outcome = "failed"
            logger.exception("canary from worker %s to %s", *pair)
        else:
            (quarantine.whole if is_trial else quarantine.came)(pair, fleet.now())
            if is_trial:
                logger.info("KV from worker %s to %s comes whole again", *pair)
        quarantine.canaries[outcome] += 1
        self._metrics.canary(prefill.info.model.name, outcome)
