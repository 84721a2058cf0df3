"""NCCL's communicators: one for each end of a link, and a limit on their memory."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError, LinkClosed
from kv_transfer.protocol.messages import Inner, pack
from kv_transfer.transport.nccl.binding import Result
from kv_transfer.transport.nccl.limits import RECEIVER, SENDER
from kv_transfer.transport.nccl.messages import Ended
from kv_transfer.transport.nccl.staging import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kv_transfer.protocol.link import Link
    from kv_transfer.transport.nccl.binding import Nccl
    from kv_transfer.transport.nccl.limits import Limits
    from kv_transfer.transport.nccl.staging import Gpu, StagingSlot

logger = logging.getLogger(__name__)


class Communicator:
    """A link's communicator of two ranks, at this end. A thread holds `in_use` while it uses, or
    may use, the communicator, and while operations are in flight. `number` counts the communicators
    of this link, to identify messages about an earlier one."""

    def __init__(
        self, rank: int, nccl: Nccl, gpu: Gpu, limits: Limits, pool: Communicators, link: Link
    ) -> None:
        self.rank = rank
        self.in_use = threading.Lock()
        self.number = 0
        self._nccl = nccl
        self._gpu = gpu
        self._limits = limits
        self._pool = pool
        self._link = link
        self._handle = 0  # NCCL's, 0 if closed
        self._joined_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._handle != 0

    def check(self) -> None:
        """Raise LinkClosed if the link is down."""
        if self._link.is_down:
            raise LinkClosed("the link went down")
        if self.rank == SENDER:
            return
        # The receiving thread is the link's reader, so no other thread would detect a lost
        # producer. Peek only, because the producer's next message may have arrived already: its
        # send can complete before our receive.
        with contextlib.suppress(BlockingIOError):
            if not self._link.stream.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise LinkClosed("the producer closed the link inside a chunk")

    def enter(self) -> None:
        """Wait for a place in the budget for this communicator, which is in use. Raises
        KvTransferError."""
        self._pool.enter(self)

    @property
    def is_overdue(self) -> bool:
        """True if another link waits for a place and this one has used its turn. Needed because a
        communicator under load is never idle."""
        is_long = time.monotonic() - self._joined_at > self._limits.keep_s
        return self.is_open and is_long and self._pool.has_waiting(self.rank)

    def touch(self) -> None:
        """Record that the last operation has just ended."""
        self._pool.touch(self)

    def retire(self) -> None:
        """Close the idle communicator and notify the peer, whose end is now useless."""
        if self.is_open:
            self.abort()
            self._link.post(Inner(pack(Ended(self.number))))

    def close(self) -> None:
        """Close the communicator for good, as its link has ended. Idempotent."""
        self.abort()
        self._pool.remove(self)

    def abort(self) -> None:
        """Close the communicator, also in the middle of an operation. Idempotent."""
        handle, self._handle = self._handle, 0
        if handle:
            self._nccl.abort(handle)
        self._pool.leave(self)

    def join(self, number: int, unique_id: bytes, timeout_s: float) -> None:
        """Join on the calling thread's GPU. It may take long: the caller holds no slot."""
        self._pool.add(self)
        result, self._handle = self._nccl.comm_init(unique_id, self.rank, self._limits.max_ctas)
        self.number = number
        self._pool.made += 1
        self._check_result(result)
        until(self.is_taken, timeout_s, "joining a communicator", self.check)
        self._joined_at = time.monotonic()

    def post(
        self,
        slot: StagingSlot,
        moves: list[tuple[int, int]],
        on_posted: Callable[[], None] | None = None,
    ) -> None:
        """Post sends or receives (address, bytes) on the slot's stream, which is current."""
        post = self._nccl.send if self.rank == SENDER else self._nccl.recv
        stream = slot.stream.cuda_stream
        self._check_result(self._nccl.group_start())
        results = [post(self._handle, 1 - self.rank, *move, stream) for move in moves]
        for result in (*results, self._nccl.group_end()):
            self._check_result(result)
        if on_posted is not None:
            on_posted()  # not after NCCL has enqueued: the first time, that needs the peer's post
        # Wait until NCCL has enqueued, so that later work on the stream cannot overtake it.
        until(self.is_taken, self._limits.min_move_s, "posting to NCCL", self.check)

    def is_taken(self) -> bool:
        """Return True if NCCL has completed the last call. Raises KvTransferError."""
        result = self._nccl.async_error(self._handle)
        self._check_result(result)
        return result is Result.SUCCESS

    def _check_result(self, result: Result) -> None:
        if result not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise KvTransferError(f"NCCL: {result.name}: {self._nccl.last_error(self._handle)}")

    def fail(self) -> None:
        """Abort after an error."""
        self._pool.aborted += self.is_open
        self.abort()

    def rest(self, slots: Sequence[StagingSlot]) -> None:
        """Wait until the GPU is idle on slots of an aborted communicator. Raises KvTransferError or
        RuntimeError if it does not become idle in time."""
        streams = (stream for slot in slots for stream in (slot.stream, slot.copies))
        events = [self._gpu.record(stream) for stream in streams]
        # A consumer waits without limit, because its blocks are reused when this returns.
        limit_s = math.inf if self.rank == RECEIVER else self._limits.quarantine_s
        until(lambda: all(map(self._gpu.has_fired, events)), limit_s, "the GPU's rest", _nothing)


class Communicators:
    """The communicators of a process. Open ones fit in the budget; above it, the least recently
    used idle one is closed. If each request closed another's communicator, all would wait for
    joins, so a communicator is kept for `keep_s` after its last use. Waiting links get a place in
    order of arrival.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._all: set[Communicator] = set()
        self._open: OrderedDict[Communicator, float] = OrderedDict()  # used at, oldest first
        self._waiting: list[Communicator] = []  # for a place, in order of arrival
        self._lock = threading.Lock()
        self._most_needed = limits.budget_bytes
        self.made = 0
        self.evicted = 0
        self.aborted = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def held_bytes(self) -> int:
        return sum(self._limits.communicator_bytes(each.rank) for each in list(self._open))

    def add(self, member: Communicator) -> None:
        """Count a joining communicator once, and warn if the budget is too small for all."""
        with self._lock:
            self._all.add(member)
            count, needed = len(self._all), self._needed(each.rank for each in self._all)
            is_new = needed > self._most_needed
            self._most_needed = max(self._most_needed, needed)
        if is_new:
            logger.warning(
                "%d NCCL links share the memory of fewer communicators: they take turns, and each"
                " turn costs up to a second. Set worker.kv.nccl_budget_bytes to %d or more, or"
                " lower worker.kv.nccl_max_ctas",
                count,
                needed,
            )

    def remove(self, member: Communicator) -> None:
        with self._lock:
            self._all.discard(member)

    def enter(self, member: Communicator) -> None:
        """Reserve a place for `member`, whose `in_use` the caller holds. Raises KvTransferError if
        all others stay in use until the deadline."""
        asked_at = time.monotonic()
        if self._admit(member, asked_at):
            return
        with self._lock:
            self._waiting.append(member)
        try:
            until(
                lambda: self._admit(member, asked_at),
                self._limits.op_s,
                "room for a communicator",
                member.check,
            )
        finally:
            with self._lock:
                self._waiting.remove(member)

    def has_waiting(self, rank: int) -> bool:
        """Return True if an end of this rank waits for a place."""
        with self._lock:
            return any(each.rank == rank for each in self._waiting)

    def touch(self, member: Communicator) -> None:
        with self._lock:
            if member in self._open:
                self._open[member] = time.monotonic()
                self._open.move_to_end(member)

    def _admit(self, member: Communicator, asked_at: float) -> bool:
        with self._lock:
            ranks = [member.rank, *(each.rank for each in self._open)]
            has_room = self._needed(ranks) <= self._limits.budget_bytes
            first = next((each for each in self._waiting if each.rank == member.rank), member)
            if member in self._open or (has_room and first is member):
                self._open[member] = time.monotonic()
                self._open.move_to_end(member)
                return True
            is_next = first is member and not has_room
            idle = self._take_idle(member.rank, asked_at) if is_next else None
        if idle is not None:
            try:  # without the lock: an abort may be slow
                idle.retire()
                self.evicted += 1
            finally:
                idle.in_use.release()
        return False

    def _needed(self, ranks: Iterable[int]) -> int:
        """Return the memory of these ends. Senders leave a place for one receiver and vice versa.
        Otherwise processes that send and receive could deadlock."""
        counts = Counter(ranks)
        size = self._limits.communicator_bytes
        return sum(max(1, counts[rank]) * size(rank) for rank in (SENDER, RECEIVER))

    def _take_idle(self, rank: int, asked_at: float) -> Communicator | None:
        """Return the communicator to close for one of `rank`; the caller then holds its
        `in_use`."""
        now, others = time.monotonic(), sum(each.rank != rank for each in self._open)
        for each, used_at in self._open.items():
            if now - min(used_at, asked_at) < self._limits.keep_s:
                return None
            if (each.rank == rank or others > 1) and each.in_use.acquire(blocking=False):
                return each
        return None

    def leave(self, member: Communicator) -> None:
        with self._lock:
            self._open.pop(member, None)


def _nothing() -> None:
    pass
