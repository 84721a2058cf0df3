"""Keeps evidence of requests, and makes incident capsules of it (docs/capsules.md)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdserve.background import background
from pdserve.config import CapsulesConfig
from pdserve.errors import (
    AnswerAborted,
    Cancelled,
    InternalError,
    NotFound,
    Overloaded,
    PdserveError,
    PoisonRequest,
    ServiceError,
)
from pdserve.observe.capsules import DEMAND, FAILURE, seal
from pdserve.security.files import FileTokens
from router.placement.decisions import RecentRequests, is_id_of
from router.placement.values import may_hold
from router.steps.evidence import Evidence, capsule_of, evidence_of
from router.steps.ledger import NO_LEDGER
from router.store.capsules import CapsuleStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from pdserve.config import RouterConfig
    from pdserve.observe.capsules import CapsuleHeader
    from router.placement.decisions import DecisionLog
    from router.steps.ledger import ResidencyLedger
    from router.store.capsules import StoredCapsule
    from router.walk import Answered, Proceed, Walk

logger = logging.getLogger(__name__)

_RECENT_BYTES = 16 << 20
_QUEUED = 64  # evidence that waits for the disk
_SWEEP_S = 60.0
_CLOSE_S = 10.0
# Sections of the configuration that a capsule has. None has a secret.
_SETTINGS = ("policy", "fetch_cached_kv", "lease_s", "health", "queue", "retry", "slo")


class RecentEvidence(RecentRequests[Evidence]):
    """Evidence of the last requests, one entry each, bounded by number and by bytes."""

    def __init__(self, size: int, most_bytes: int = _RECENT_BYTES) -> None:
        super().__init__(size)
        self._bytes, self._most_bytes = 0, most_bytes

    def keep(self, request_id: str, entries: list[Evidence]) -> None:
        if not self.size:
            return
        (new,) = entries
        if (former := self._requests.pop(request_id, None)) is not None:
            self._bytes -= former[0].size
        self._bytes += new.size
        self._requests[request_id] = entries
        while len(self._requests) > self.size or self._bytes > self._most_bytes:
            self._bytes -= self._requests.popitem(last=False)[1][0].size


class _Wanted(NamedTuple):
    """A capsule to make."""

    evidence: Evidence
    reason: str = DEMAND
    expected: Mapping[int, Sequence[int]] | None = None


class Capsules:
    """Makes capsules, and keeps them in its store. State: `recent` requests, of which a capsule can
    be made on demand, and the capsules that are to be written. `count` counts capsules by reason
    and result."""

    def __init__(
        self,
        config: CapsulesConfig,
        store: CapsuleStore | None = None,
        *,
        topology: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        secrets: Callable[[], Sequence[str]] = tuple,
        count: Callable[..., None] = lambda *_: None,
        ledger: ResidencyLedger = NO_LEDGER,
    ) -> None:
        self.recent = RecentEvidence(config.recent)
        self.is_on = bool(config.recent or store is not None)
        self.prompts = config.prompts
        self._store, self._secrets = store, secrets
        self._topology, self._settings = topology or {}, settings or {}
        self._count, self._ledger = count, ledger
        self._queue = asyncio.Queue[_Wanted](_QUEUED)

    def add(self, evidence: Evidence, *, failed: bool = False) -> None:
        """Take the evidence of a request that just ended. If it `failed`, a capsule is kept."""
        if may_hold(evidence.request.storage, self._topology):
            self.recent.keep(evidence.request.request_id, [evidence])
        if failed:
            self.keep(evidence, FAILURE)

    def keep(
        self,
        evidence: Evidence,
        reason: str,
        expected: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Have a capsule written soon. `reason`: a short word for listings and metrics.
        `expected`: by index of the answer, its first right tokens up to one that was wrong. Data
        that may not be stored in this region is not kept."""
        if self._store is None:
            return
        if not may_hold(evidence.request.storage, self._topology):
            self._count("capsules", reason, "elsewhere")
            return
        try:
            self._queue.put_nowait(_Wanted(evidence, reason, expected))
        except asyncio.QueueFull:
            self._count("capsules", reason, "dropped")

    async def listed(self) -> list[StoredCapsule]:
        """Return the stored capsules, newest first."""
        return [] if self._store is None else await asyncio.to_thread(self._store.listed)

    async def get(self, request_id: str) -> tuple[CapsuleHeader, bytes]:
        """Return the newest capsule of a request. If there is none and the request ended lately,
        make one and keep it. Raises NotFound."""
        await self._flush()
        for stored in await self.listed():
            if is_id_of(stored.header.request_id, request_id):
                try:
                    return stored.header, await asyncio.to_thread(stored.path.read_bytes)
                except FileNotFoundError:
                    break  # deleted meanwhile
        if not (found := self.recent.of(request_id)):
            text = f"no capsule of request {request_id} is kept, and it did not end lately"
            raise NotFound(text, field="request_id")
        return await self._write(_Wanted(found[-1]))

    async def run(self) -> None:
        """Write wanted capsules, and delete old ones, until cancelled."""
        while self._store is not None:
            try:
                async with asyncio.timeout(_SWEEP_S):
                    wanted = await self._queue.get()
            except TimeoutError:
                await asyncio.to_thread(self._store.prune)
            else:
                await self._write(wanted)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Write what is still wanted, for a bounded time."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._flush()
        except TimeoutError:
            logger.error("%d capsules were not written in time", self._queue.qsize())

    async def _flush(self) -> None:
        while not self._queue.empty():
            await self._write(self._queue.get_nowait())

    async def _write(self, wanted: _Wanted) -> tuple[CapsuleHeader, bytes]:
        """Make a capsule and keep it, if there is a store. A full disk must not fail requests."""
        header, data, result = await asyncio.to_thread(self._made, wanted)
        if result:
            self._count("capsules", header.reason, result)
        if result == "kept":
            self._ledger.stored(header.tenant, header.request_id, "capsule", len(data))
        return header, data

    def _made(self, wanted: _Wanted) -> tuple[CapsuleHeader, bytes, str]:
        capsule = capsule_of(
            wanted.evidence,
            reason=wanted.reason,
            region=self._topology.get("region", ""),
            settings=self._settings,
            expected=wanted.expected,
        )
        data, result = seal(capsule, self._secrets()), ""
        if self._store is not None:
            try:
                self._store.keep(capsule.header, data)
                result = "kept"
            except OSError as error:
                logger.error("cannot keep a capsule: %s", error)
                result = "failed"
        return capsule.header, data, result


NO_CAPSULES = Capsules(CapsulesConfig(recent=0))
"""Keeps nothing."""


@asynccontextmanager
async def open_capsules(
    config: RouterConfig, count: Callable[..., None], ledger: ResidencyLedger
) -> AsyncIterator[Capsules]:
    """Open the capsules for the context, and write them meanwhile. Raises ConfigError."""
    own = config.capsules
    store = await asyncio.to_thread(CapsuleStore, own) if own.directory else None
    secrets: Callable[[], Sequence[str]] = tuple
    if own.key_file:
        secrets = FileTokens(own.key_file, "router.capsules.key_file").now
    capsules = Capsules(
        own,
        store,
        topology=config.topology.labels,
        settings={name: msgspec.to_builtins(getattr(config, name)) for name in _SETTINGS},
        secrets=secrets,
        count=count,
        ledger=ledger,
    )
    async with background("capsules", capsules.run):
        yield capsules
    await capsules.close()


class CapsuleStep:
    """Takes the evidence of each request that was admitted here, once its receipt is known. It
    stands within the step forward, so that the region that served a request keeps its capsule."""

    def __init__(
        self, capsules: Capsules, decisions: DecisionLog, now: Callable[[], float]
    ) -> None:
        self._capsules, self._decisions, self._now = capsules, decisions, now

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        try:
            done = await proceed(walk)
        except BaseException as error:
            if walk.record.admitted:
                self._add(walk, error)
            raise
        self._add(walk)
        return done

    def _add(self, walk: Walk, error: BaseException | None = None) -> None:
        known = None if error is None else _known(error)
        self._capsules.add(self.evidence(walk, known), failed=_is_failure(known))

    def evidence(self, walk: Walk, error: PdserveError | None = None) -> Evidence:
        """Return what is known of a request whose receipt is known."""
        return evidence_of(
            walk.request,
            walk.record,
            self._decisions.entries(walk.request.request_id),
            self._now(),
            error,
            with_prompt=self._capsules.prompts,
        )


def _known(error: BaseException) -> PdserveError:
    if isinstance(error, PdserveError):
        return error
    return InternalError(repr(error)) if isinstance(error, Exception) else Cancelled(str(error))


def _is_failure(error: PdserveError | None) -> bool:
    """Return True for errors that are the service's fault, and not just a lack of room."""
    if isinstance(error, Overloaded | AnswerAborted):
        return False
    return isinstance(error, ServiceError | PoisonRequest)
