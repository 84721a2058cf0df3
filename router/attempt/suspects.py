"""Suspects: requests that were in flight when a worker died. One may be a query of death.

A request in flight on a worker that dies is a suspect until its answer has advanced by
`CLEARED_TOKENS` on another worker. Two suspects never share a worker, so the next death has one
suspect, and the other requests survive. The ranks of a data-parallel group end together: their
deaths count once, and a suspect on one rank avoids the others. A request under which
`router.retry.max_worker_deaths` workers died is refused. The same request from any client is
refused for `REMEMBER_S` seconds.

A request without deaths costs one look-up in an empty dictionary.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from pdserve.errors import PoisonRequest
from pdserve.model.token_ids import pack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from pdserve.config import RetryConfig
    from pdserve.types import GenerateRequest
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.fleet.worker_link import Links

CLEARED_TOKENS = 16
REMEMBER_S = 600.0
MAX_REMEMBERED = 10_000  # about 200 bytes each
# Seconds between checks of the first suspect in turn whether another suspect has advanced. Polled,
# because suspects are few, and an event for each token would cost every request.
POLL_S = 0.02
CONFIRM_POLL_S = 0.1


class Suspect(Protocol):
    """A running answer that may be a suspect."""

    @property
    def suspicion(self) -> Suspicion: ...
    @property
    def is_suspect(self) -> bool: ...


class Death(NamedTuple):
    """Loss of a worker with the request in flight. `said_so`: the worker reported that its engine
    died; a closed connection alone may be a network fault. `ranks`: the worker and the other ranks
    of its data-parallel group, which end with it."""

    member: Member
    said_so: bool
    ranks: Sequence[Member]

    def is_certain(self, links: Links) -> bool:
        return self.said_so or self.member.lost or links[self.member].is_refused

    @property
    def is_refuted(self) -> bool:
        """True if the same instance of the worker is connected again, or has stopped in order."""
        return (self.member.attached or self.member.has_left) and not self.said_so


class Suspicion(Struct):
    """The deaths of workers that count against one request.

    `earlier` counts the deaths when the same request was sent before. `deaths` has one entry for
    each attempt that ended by a death. Both workers of an attempt count once, because a host that
    fails takes both, and so do all ranks of a data-parallel group. `was_remembered` stays when the
    deaths are cleared.
    """

    earlier: int = 0
    was_remembered: bool = False
    deaths: list[Death] = []

    @property
    def count(self) -> int:
        return self.earlier + len(self.deaths)

    def add(self, death: Death) -> None:
        """Count a death, unless an earlier death counts for its group. A rank whose connection
        alone broke has not died."""
        for place, known in enumerate(self.deaths):
            if death.member in known.ranks and not known.is_refuted:
                if death.said_so:
                    self.deaths[place] = known._replace(said_so=True)
                return
        self.deaths.append(death)

    def ending(self) -> frozenset[str]:
        """Return workers that have died, or end because a rank of their group has died, but may not
        be marked lost yet."""
        ends = (x for x in self.deaths if not x.is_refuted)
        return frozenset(m.worker_id for x in ends for m in x.ranks if not m.lost)

    def clear(self) -> None:
        """Drop all deaths: the request has advanced on another worker, so it did not cause them."""
        self.earlier = 0
        self.deaths.clear()


class Suspects:
    """State of all suspects: the workers that each runs on, one lock per model for their placement,
    and the deaths under requests that have ended."""

    def __init__(self, fleet: Fleet, links: Links, retry: RetryConfig) -> None:
        self._fleet, self._links = fleet, links
        self._max_deaths = retry.max_worker_deaths
        self._running: dict[Suspect, frozenset[str]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._remembered: dict[bytes, tuple[int, float]] = {}

    def begin(self, request: GenerateRequest) -> Suspicion:
        """Return the earlier deaths under an arriving request. Raises PoisonRequest if they exceed
        the limit."""
        if not self._remembered:
            return Suspicion()
        now = self._fleet.now()
        # Insertion order is expiry order, because the lifetime is the same for all.
        while self._remembered and next(iter(self._remembered.values()))[1] <= now:
            del self._remembered[next(iter(self._remembered))]
        deaths, _ = self._remembered.get(_digest(request), (0, 0.0))
        if deaths >= self._max_deaths:
            raise poison(deaths, self._max_deaths)
        return Suspicion(deaths, was_remembered=deaths > 0)

    def end(self, request: GenerateRequest, suspicion: Suspicion, *, answered: bool) -> None:
        """Remember the deaths under an unanswered request; forget them for an answered one."""
        # Requests without deaths skip the digest of their prompt.
        if not (suspicion.count or suspicion.was_remembered):
            return
        digest = _digest(request)
        self._remembered.pop(digest, None)
        if suspicion.count and not answered:
            if len(self._remembered) >= MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[digest] = suspicion.count, self._fleet.now() + REMEMBER_S

    def death_of(self, member: Member, *, said_so: bool) -> Death:
        """Return the death of a worker with a request in flight (see Death)."""
        return Death(member, said_so, self._fleet.ranks_of(member))

    async def confirm(self, suspicion: Suspicion) -> int:
        """Wait until each death is certain or refuted. Return the number of deaths.

        A death is certain if the worker reported it, its port refuses connections, its lease
        expired, or its next instance registered.
        """
        fleet, links = self._fleet, self._links
        # By then the lease of a dead worker has expired, unless this router was blocked.
        give_up_at = fleet.now() + 2 * fleet.lease_s
        while True:
            # A worker that connects again did not die: only its connection broke.
            suspicion.deaths = [x for x in suspicion.deaths if not x.is_refuted]
            if all(x.is_certain(links) for x in suspicion.deaths) or fleet.now() >= give_up_at:
                return suspicion.count
            await fleet.capacity_change(until=fleet.now() + CONFIRM_POLL_S)

    @asynccontextmanager
    async def turn(self, model: str, deadline: float | None) -> AsyncIterator[None]:
        """Wait for this suspect's turn to be placed. Raises TimeoutError at the loop time
        `deadline`.

        Each placement reads where the other suspects run. After the death of a busy worker, placing
        all suspects at once would take all of the router's CPU time.
        """
        lock = self._turns.setdefault(model, asyncio.Lock())
        async with asyncio.timeout_at(deadline):
            await lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def hold(self, suspect: Suspect, workers: Collection[str]) -> None:
        """Record that `suspect` runs on `workers`, and no longer on earlier ones."""
        self._running[suspect] = frozenset(workers)

    def release(self, suspect: Suspect) -> None:
        self._running.pop(suspect, None)

    def occupied(self, suspect: Suspect) -> frozenset[str]:
        """Return the workers that run another suspect. Answers to one request are one suspect."""
        found: set[str] = set()
        for other, workers in list(self._running.items()):
            # Cleared requests are removed here, so that tokens need not report progress.
            if not other.is_suspect:
                del self._running[other]
            elif other.suspicion is not suspect.suspicion:
                found |= workers
        return frozenset(found)

    async def first_silent(self, members: Sequence[Member]) -> Member | None:
        """Return the first of `members` that does not answer a ping, or None.

        Deaths of several workers at once are detected one after another. Without the ping, a
        suspect sent to a worker that is already dead would be blamed for its death.
        """
        for member in members:
            if member.lost or not await self._links[member].answers_ping():
                return member
        return None


def poison(deaths: int, max_deaths: int) -> PoisonRequest:
    """Return the refusal of a request under which `deaths` workers died."""
    return PoisonRequest(
        f"{deaths} workers died while they ran this request (router.retry.max_worker_deaths is "
        f"{max_deaths}); it is refused for {REMEMBER_S / 60:g} minutes"
    )


def _digest(request: GenerateRequest) -> bytes:
    """Return a digest of the input that an engine computes. The seed is left out, because clients
    draw it at random."""
    sampling = replace(request.sampling, seed=None)
    images = [x.hash for x in request.media]
    tokens = bytes(pack(request.prompt_token_ids, len(request.prompt_token_ids)))
    parts = (request.model, request.adapter_key, tokens, images, sampling)
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
