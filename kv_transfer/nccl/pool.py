"""A process's pairs: made on demand, kept within a memory budget and a number in flight. Decides
only; `kv_transfer/nccl/thread.py` does the work.

A communicator holds buffers outside the KV cache's share for as long as it exists, so the budget is
reserved before one is begun and given back after it was freed. Where it is spent, the pair that was
used longest ago is ended in order; one that somebody waits for is never touched, and who comes too
late waits. The number in flight is bounded because every operation holds processors while it runs.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.nccl.actions import AbortComm, Finished, PairTimeouts
from kv_transfer.nccl.binding import CommConfig
from kv_transfer.nccl.messages import Identify
from kv_transfer.nccl.pair import RECEIVER, SENDER, Pair, PairState

if TYPE_CHECKING:
    from kv_transfer.nccl.actions import Op, PairAction
    from kv_transfer.nccl.messages import PairMessage

MAX_IDS = 4096
# NCCL's buffers for one channel between two Hopper GPUs, by its buffer sizes.
CHANNEL_BYTES = {SENDER: 2 << 20, RECEIVER: 10 << 20}
_WITHOUT = frozenset({PairState.ABSENT, PairState.GONE})


@dataclass(frozen=True, slots=True)
class PairKey:
    """The other end's worker instance id and GPU, and which end we are."""

    peer_instance_id: str
    peer_gpu: int
    rank: int


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a process may use; checked at birth."""

    budget_bytes: int = 512 << 20
    max_busy: int = 4
    config: CommConfig = field(default_factory=CommConfig)
    timeouts: PairTimeouts = field(default_factory=PairTimeouts)

    def __post_init__(self) -> None:
        least = max(self.comm_bytes(rank) for rank in (SENDER, RECEIVER))
        if self.budget_bytes < least:
            raise ValueError(f"budget_bytes {self.budget_bytes}: a communicator needs {least}")
        if self.max_busy < 1:
            raise ValueError(f"max_busy {self.max_busy}")

    def comm_bytes(self, rank: int) -> int:
        """What one communicator is taken to hold at this end."""
        return CHANNEL_BYTES[rank] * self.config.max_ctas


@dataclass(frozen=True, slots=True)
class PoolStats:
    """For the status page."""

    communicators: int
    reserved_bytes: int
    budget_bytes: int
    busy: int
    waiting: int
    made: int
    evicted: int
    aborted: int
    stale_messages: int


class _Generations:
    """Numbers of our communicators, and the last one heard of each peer's; the ids that were used.
    They outlive the pairs."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._ids: OrderedDict[bytes, None] = OrderedDict()
        self._last: OrderedDict[PairKey, int] = OrderedDict()

    def next(self) -> int:
        return next(self._numbers)

    def last(self, key: PairKey) -> int:
        """Of the key's communicators, the one heard of last; 0 is none."""
        return self._last.get(key, 0)

    def heard(self, key: PairKey, generation: int) -> None:
        """Remembers it beyond the pair's life, of so many keys."""
        self._last[key] = generation
        self._last.move_to_end(key)
        if len(self._last) > MAX_IDS:
            self._last.popitem(last=False)

    def take(self, unique_id: bytes) -> bool:
        """True, once, for an id that was not used before."""
        if unique_id in self._ids:
            return False
        self._ids[unique_id] = None
        if len(self._ids) > MAX_IDS:
            self._ids.popitem(last=False)
        return True


Work = list[tuple[PairKey, "PairAction"]]


class Pool:
    """See the top of the file. Mutable; one thread calls it."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.pairs: OrderedDict[PairKey, Pair] = OrderedDict()  # longest unused first
        self._generations = _Generations()
        self._made = 0
        self._evicted = 0
        self._aborted = 0
        self._stale = 0

    @property
    def reserved_bytes(self) -> int:
        """What the communicators hold, those that are ending too."""
        held = (key.rank for key, pair in self.pairs.items() if pair.state not in _WITHOUT)
        return sum(self.limits.comm_bytes(rank) for rank in held)

    @property
    def busy(self) -> int:
        """Operations in flight, and those that may still run."""
        return sum(pair.op is not None for pair in self.pairs.values())

    def stats(self) -> PoolStats:
        """A snapshot."""
        pairs = self.pairs.values()
        return PoolStats(
            communicators=sum(pair.state not in _WITHOUT for pair in pairs),
            reserved_bytes=self.reserved_bytes,
            budget_bytes=self.limits.budget_bytes,
            busy=self.busy,
            waiting=sum(pair.wants_open for pair in pairs),
            made=self._made,
            evicted=self._evicted,
            aborted=self._aborted,
            stale_messages=self._stale,
        )

    def submit(self, key: PairKey, op: Op) -> Work:
        """Asks for an operation; its end is a Finished or Lost."""
        pair = self._pair(key)
        self.pairs.move_to_end(key)
        return self._note(key, pair.submit(op))

    def told(self, key: PairKey, message: PairMessage, now: float) -> Work:
        """A message of the pair's other end. Of a pair that we do not have, only the sender's first
        word means something."""
        pair = self.pairs.get(key)
        if pair is None:
            if key.rank != RECEIVER or not isinstance(message, Identify):
                self._stale += 1
                return []
            pair = self._pair(key)
        return self.act(key, pair.told(message, now))

    def peer_lost(self, peer_instance_id: str, reason: str, now: float) -> Work:
        """The worker is gone, and no later message is of it."""
        work: Work = []
        for key in [key for key in self.pairs if key.peer_instance_id == peer_instance_id]:
            work += self.act(key, self.pairs[key].peer_lost(reason, now))
        return work

    def abandon(self, reason: str, now: float) -> Work:
        """Ends every pair at once."""
        return [
            step
            for key in list(self.pairs)
            for step in self.act(key, self.pairs[key].peer_lost(reason, now))
        ]

    def close(self, now: float) -> Work:
        """Ends in order what nobody waits for."""
        return [
            step for key in list(self.pairs) for step in self.act(key, self.pairs[key].close(now))
        ]

    def pump(self, now: float) -> Work:
        """What the clock, the budget and the number in flight allow."""
        work: Work = []
        for key, pair in list(self.pairs.items()):
            work += self.act(key, pair.tick(now))
        for key, pair in list(self.pairs.items()):
            if pair.wants_open and self._make_room(key, now, work):
                self._made += 1
                work += self.act(key, pair.open(now))
        for key, pair in list(self.pairs.items()):
            if self.busy < self.limits.max_busy and pair.wants_start:
                self.pairs.move_to_end(key)
                work += self.act(key, pair.start(now))
        return work

    def act(self, key: PairKey, actions: list[PairAction]) -> Work:
        """Counts what a pair answered, and forgets one that is gone."""
        work = self._note(key, actions)
        pair = self.pairs.get(key)
        if pair is not None:
            self._generations.heard(key, pair.generation)
            if pair.state is PairState.GONE:
                del self.pairs[key]
        return work

    def _note(self, key: PairKey, actions: list[PairAction]) -> Work:
        self._aborted += sum(isinstance(action, AbortComm) for action in actions)
        if any(isinstance(action, Finished) for action in actions) and key in self.pairs:
            self.pairs.move_to_end(key)
        return [(key, action) for action in actions]

    def _pair(self, key: PairKey) -> Pair:
        if key not in self.pairs:
            known = self._generations
            self.pairs[key] = Pair(
                key.rank,
                self.limits.timeouts,
                known.next,
                known.take,
                generation=known.last(key),
            )
        return self.pairs[key]

    def _make_room(self, key: PairKey, now: float, work: Work) -> bool:
        """Whether a communicator for `key` fits. If not, one that is not used begins to end, unless
        what is ending already will do."""
        budget, needed = self.limits.budget_bytes, self.limits.comm_bytes(key.rank)
        if self.reserved_bytes + needed <= budget:
            return True
        ending = sum(
            self.limits.comm_bytes(other.rank)
            for other, pair in self.pairs.items()
            if pair.state is PairState.FINALISING
        )
        for other, pair in list(self.pairs.items()):
            if self.reserved_bytes - ending + needed <= budget:
                break
            if pair.state is PairState.READY and not pair.is_used:
                self._evicted += 1
                ending += self.limits.comm_bytes(other.rank)
                work += self.act(other, pair.close(now))
        return False
