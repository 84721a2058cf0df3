"""An engine without a model: requests, blocks and steps as vLLM has them, the real worker half
under it, and in place of KV a pattern that says whose block it is.

A block is in exactly one place: free, at a request, in flight, or leased. A free one holds a mark
that is checked when it is taken again, so a write into blocks that were given back is found out.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_transfer.vllm.step import (
    SourceEnded,
    SourceExpected,
    SourceProgress,
    StepMetadata,
    TargetStart,
    Unneeded,
)
from tests.unit.kv_transfer.rig import BLOCK_SIZE

if TYPE_CHECKING:
    from tests.unit.kv_transfer.rig import Worker


class Broken(AssertionError):
    """What must never be has been."""


def pattern(transfer_id: str, block: int, layer: int, size: int) -> bytes:
    """A page's bytes; `block` counts from the request's first."""
    seed = hashlib.blake2b(f"{transfer_id}/{block}/{layer}".encode(), digest_size=32).digest()
    return (seed * (size // len(seed) + 1))[:size]


def sampled(transfer_id: str) -> tuple[int, ...]:
    """The token that the request's prefill samples."""
    return (int.from_bytes(hashlib.blake2b(transfer_id.encode(), digest_size=3).digest()),)


@dataclass(slots=True)
class Prefill:
    """`preempt_at`: once so many blocks are computed, the engine takes them away, once."""

    transfer_id: str
    tokens: int
    step_blocks: int
    preempt_at: int = 0
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def request_id(self) -> str:
        return f"p-{self.transfer_id}"

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_SIZE)


@dataclass(slots=True)
class Decode:
    """`first`: so many blocks it has already, as a prefix hit gives them."""

    transfer_id: str
    tokens: int
    first: int
    address: str
    instance_id: str
    capability: str
    block_ids: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return f"d-{self.transfer_id}"

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_SIZE) - self.first


class SoakEngine:
    """State: the free blocks, and every request with its own. Used from one thread. `say` gets each
    event that the driver is told."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._geometry = worker.cache.region.geometry
        self._total = self._geometry.num_blocks
        self._free = deque(range(self._total))
        self._waiting: deque[Prefill | Decode] = deque()
        self._prefills: dict[str, Prefill] = {}
        self._leased: dict[str, Prefill] = {}
        self._decodes: dict[str, Decode] = {}
        self._next = StepMetadata()
        self._taken_away: list[int] = []  # from running prefills: free from the next step on
        self.events: list[dict[str, Any]] = []
        for block in self._free:
            self._mark(block)

    # -- what the driver asks

    def prefill(self, work: Prefill) -> None:
        """Computes, and holds the blocks for the target."""
        self._waiting.append(work)
        self._next.expected.append(SourceExpected(work.transfer_id, work.request_id))

    def decode(self, work: Decode) -> None:
        """Reserves blocks and grants them to the source."""
        self._waiting.append(work)

    def abort_prefill(self, transfer_id: str) -> None:
        """Wherever it stands; the blocks of one that runs are free at once, as vLLM's are."""
        request_id = f"p-{transfer_id}"
        work = self._drop_waiting(request_id) or self._prefills.pop(request_id, None)
        if isinstance(work, Prefill):
            self._next.ended.append(SourceEnded(transfer_id, (), False, request_id))
            self._taken_away += work.block_ids
            self._say("freed", transfer_id)
        elif request_id in self._leased:
            self._next.released.append(transfer_id)

    def abort_decode(self, transfer_id: str) -> None:
        """Wherever it stands; blocks in flight stay until the worker half gives them back."""
        dropped = self._drop_waiting(f"d-{transfer_id}")
        if isinstance(dropped, Decode):
            unneeded = Unneeded(
                transfer_id, (dropped.address,), dropped.instance_id, dropped.capability
            )
            self._next.unneeded.append(unneeded)
            self._say("failed", transfer_id, reason="never started")
        elif f"d-{transfer_id}" in self._decodes:
            self._next.cancels.append(transfer_id)

    @property
    def is_busy(self) -> bool:
        """Whether a step could change something."""
        mine = (self._waiting, self._prefills, self._leased, self._decodes, self._taken_away)
        return any(mine) or self._next != StepMetadata() or not self.worker.is_empty

    def ledger(self) -> dict[str, int]:
        """As SchedulerHalf keeps it, and the blocks beside."""
        return {
            "in_flight": sum(len(x.block_ids) for x in self._decodes.values()),
            "leased": sum(len(x.block_ids) for x in self._leased.values()),
            "running": sum(len(x.block_ids) for x in self._prefills.values()),
            "free": len(self._free),
            "total": self._total,
        }

    def check_free_blocks(self) -> None:
        """Raises Broken where one was written to since it was given back."""
        for block in self._free:
            self._expect(block, "free", block)

    # -- the step

    def step(self) -> None:
        """One engine step, as vLLM makes it: schedule, tell the worker half, compute, collect."""
        self._admit()
        metadata, self._next = self._next, StepMetadata()
        fills = [
            x for work in list(self._prefills.values()) for x in self._schedule(work, metadata)
        ]
        half = self.worker.half
        half.before_step(metadata)
        self._free_all(self._taken_away)
        self._taken_away.clear()
        for work, first, end in fills:
            for i in range(first, end):
                self._write(work.block_ids[i], work.transfer_id, i)
        half.after_step(metadata)
        self.worker.collect()
        self._settle()
        self._check()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0].blocks <= len(self._free):
            work = self._waiting.popleft()
            work.block_ids = [self._take() for _ in range(work.blocks)]
            if isinstance(work, Prefill):
                self._prefills[work.request_id] = work
                continue
            self._decodes[work.request_id] = work
            self._next.starts.append(
                TargetStart(
                    work.transfer_id,
                    work.request_id,
                    (work.address,),
                    work.instance_id,
                    work.first,
                    work.tokens,
                    work.block_ids,
                    work.capability,
                )
            )

    def _schedule(self, work: Prefill, metadata: StepMetadata) -> list[tuple[Prefill, int, int]]:
        """What of a running prefill this step fills."""
        if work.computed == work.blocks:
            del self._prefills[work.request_id]
            self._leased[work.request_id] = work
            tokens = sampled(work.transfer_id)
            metadata.ended.append(SourceEnded(work.transfer_id, tokens, True, work.request_id))
            return []
        if work.preempt_at and work.computed >= work.preempt_at:
            metadata.preempted.append(work.transfer_id)
            work.preempt_at = work.computed = 0
            self._taken_away += work.block_ids
            work.block_ids = []
            self._waiting.appendleft(self._prefills.pop(work.request_id))
            return []
        first, work.computed = work.computed, min(work.blocks, work.computed + work.step_blocks)
        ready = min(work.tokens, work.computed * BLOCK_SIZE)
        ids = work.block_ids[: work.computed]
        metadata.progress.append(SourceProgress(work.transfer_id, ids, ready))
        return [(work, first, work.computed)]

    def _settle(self) -> None:
        worker = self.worker
        for request_id in worker.sent:
            work = self._leased.pop(request_id, None)
            if work is None:
                raise Broken(f"{request_id} was released and held nothing")
            self._give_back(work)
            self._say("freed", work.transfer_id)
        for request_id in worker.ended:
            work = self._decodes.pop(request_id, None)
            if work is None:
                raise Broken(f"{request_id} ended and was not in flight")
            if request_id in worker.failed:
                self._say("failed", work.transfer_id, reason=worker.failures[request_id])
            else:
                self._verify(work)
                transport = worker.arrivals[request_id].report.transport
                self._say("received", work.transfer_id, transport=transport)
            self._give_back(work)
        for kept in (worker.sent, worker.ended, worker.failed):
            kept.clear()
        for told in (worker.failures, worker.arrivals, worker.codes):
            told.clear()

    # -- blocks

    def _write(self, block: int, transfer_id: str, nth: int) -> None:
        size = self._geometry.page_bytes
        pages = [pattern(transfer_id, nth, x, size) for x in range(self._geometry.num_layers)]
        self.worker.cache.fill(block, pages)

    def _verify(self, work: Decode) -> None:
        arrival = self.worker.arrivals[work.request_id]
        if tuple(arrival.token_ids) != sampled(work.transfer_id):
            raise Broken(f"{work.transfer_id}: tokens {arrival.token_ids}")
        for i, block in enumerate(work.block_ids, work.first):
            self._expect(block, work.transfer_id, i)

    def _expect(self, block: int, transfer_id: str, nth: int) -> None:
        size = self._geometry.page_bytes
        for layer, page in enumerate(self.worker.cache.block(block)):
            if page != pattern(transfer_id, nth, layer, size):
                raise Broken(f"block {block} is not {transfer_id}'s block {nth} in layer {layer}")

    def _mark(self, block: int) -> None:
        self._write(block, "free", block)

    def _take(self) -> int:
        block = self._free.popleft()
        self._expect(block, "free", block)
        return block

    def _give_back(self, work: Prefill | Decode) -> None:
        self._free_all(work.block_ids)
        work.block_ids = []

    def _free_all(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self._mark(block)
        self._free.extend(block_ids)

    def _drop_waiting(self, request_id: str) -> Prefill | Decode | None:
        for work in self._waiting:
            if work.request_id == request_id:
                self._waiting.remove(work)
                return work
        return None

    def _check(self) -> None:
        """Nothing is in two places, and the worker half knows of everything that is pinned."""
        at_requests = [*self._prefills.values(), *self._leased.values(), *self._decodes.values()]
        ids = [*self._free, *(x for work in at_requests for x in work.block_ids)]
        if len(ids) != self._total or len(set(ids)) != self._total:
            raise Broken(f"{len(ids)} blocks, {len(set(ids))} of them different, of {self._total}")
        links = self.worker.half.links
        with links.lock:
            sources = {x.request_id for x in links.sources} | links._released
            targets = {x.request_id for x in links.targets}
            targets |= {x.request_id for x in links.targets._outcomes}
        if lost := self._leased.keys() - sources:
            raise Broken(f"held and forgotten by the worker half: {sorted(lost)}")
        if lost := self._decodes.keys() ^ targets:
            raise Broken(f"in flight on one side only: {sorted(lost)}")

    def _say(self, event: str, transfer_id: str, **more: Any) -> None:
        self.events.append({"event": event, "id": transfer_id, **more})
