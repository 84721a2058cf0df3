"""KV between two GPUs, sent by NCCL.

Each link has at most one communicator of two ranks: 0 sends, 1 receives. If a block is one long
run of bytes, laid out alike at both ends, the blocks go as they are. Else they go through a slot at
each end, in parts: while one part is sent, the next is gathered and the one before it scattered.
For what fits a slot:

    producer: take a slot ─ Chunk, Offer ──► consumer: take a slot, join if the id is new,
              join if the id is new                    post the receives, scatters behind them
              post the sends           ◄── Clear ─     (after the first receive is posted)
              wait, free the slot                      wait, free the slot

Rules (docs/kv_transfer.md says which failure of vLLM's NCCL connector each one answers):

* Nothing is posted before the other end posts too. A kernel that waits for its peer holds thread
  blocks that the model's own collectives need.
* NCCL has no deadlines, so each wait has one of ours, and looks at the link as it goes. At a
  deadline, an error, or the end of the link, the communicator is aborted and the link closed; the
  router retries the request. The slot is free again when the GPU has come to rest, else lost. A
  consumer's blocks are given away only then.
* All waits poll. Each link's threads make its NCCL calls, so a slow abort stops nobody else.
* Communicators hold memory beside the KV cache. Their number has a limit for each direction, above
  which the longest unused one ends. One in use never does.

The GPU keeps the order of a part's gather, send and scatter, so that the host waits once for all.
The first operation of a communicator takes long (it connects). So a new link moves one byte, while
the prefill computes.

Not run on a GPU yet: tests/unit/kv_transfer/test_nccl.py runs it over a fake NCCL, tests/gpu over a
real one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_transfer.device.gpu import POLL_S, Slot, SlotLost, Staging, until
from kv_transfer.device.region import DeviceRegion
from kv_transfer.errors import KvTransferError, LinkClosed, ProtocolError
from kv_transfer.protocol.link import ConsumerChannel, ProducerChannel
from kv_transfer.protocol.messages import Count, Inner, Message, decode, kinds_of, pack
from kv_transfer.settings import SLOT_BYTES, SLOTS
from kv_transfer.transport.base import Account, Transport, TransportUnavailable
from kv_transfer.transport.nccl_binding import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_transfer.device.gpu import Gpu
    from kv_transfer.layout import PagePart
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv
    from kv_transfer.transport.nccl_binding import Nccl

logger = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1
# NCCL's buffers for one channel (one thread block) between two Hopper GPUs, at each end.
CHANNEL_BYTES = {SENDER: 2 << 20, RECEIVER: 10 << 20}
# How long an aborted communicator's stream may take to come to rest.
QUARANTINE_S = 10.0
# Of a slot, what is gathered, sent and scattered at once.
PART_BYTES = 8 << 20
# Smaller operations use one thread block each, one after the other (NCCL's enqueue.cc).
MIN_DIRECT_BYTES = (64 << 10) + 1
# Operations that NCCL takes as one; larger groups have hung (pytorch#174288).
MAX_GROUP = 256
# A tenth of the slowest wire that is worth using.
MIN_BYTES_PER_S = 1e8
MIN_MOVE_S = 5.0
# Two ranks on one GPU, which NCCL otherwise refuses: docs/userguide/source/env.rst of NCCL 2.30.
ONE_GPU_VERSION = 23003
ONE_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


class Offer(Message, frozen=True):
    """Producer: the next bytes travel over this link's communicator `number`; `unique_id` is its
    NCCL id, empty if the consumer has joined it before. `is_direct`: block by block, from the KV
    cache. Outside of a chunk, bytes to throw away."""

    number: Count
    size_bytes: Count
    unique_id: bytes = b""
    is_direct: bool = False


class Clear(Message, frozen=True):
    """Consumer: the offered bytes are being received."""

    number: Count


class Ended(Message, frozen=True):
    """Either: this end has freed its idle communicator."""

    number: Count


KINDS = kinds_of(Offer, Clear, Ended)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one process. `communicators` and `slots` count for each direction. Times in seconds:
    `init_s` for two ranks to join, `op_s` for a slot, a communicator or the peer's answer."""

    communicators: int = 10
    max_ctas: int = 4
    slots: int = SLOTS
    slot_bytes: int = SLOT_BYTES
    init_s: float = 20.0
    op_s: float = 60.0


def limits_from(settings: KvSettings) -> Limits:
    """Raises ValueError if the budget does not allow one communicator in each direction."""
    pair = sum(CHANNEL_BYTES.values()) * settings.nccl_max_ctas
    if settings.nccl_budget_bytes < pair:
        raise ValueError(f"nccl_budget_bytes {settings.nccl_budget_bytes} is less than {pair}")
    return Limits(
        settings.nccl_budget_bytes // pair,
        settings.nccl_max_ctas,
        op_s=settings.receive_timeout_s,
    )


class NcclTransport(Transport):
    """One a process. Memory of a direction is allocated with the first link that needs it."""

    name = "nccl"

    def __init__(self, nccl: Nccl, gpu: Gpu, limits: Limits) -> None:
        self.nccl = nccl
        self.gpu = gpu
        self.limits = limits
        self.communicators = {rank: Communicators(limits) for rank in (SENDER, RECEIVER)}
        self._version = nccl.version()
        self._staging: dict[int, Staging] = {}
        self._lock = threading.Lock()

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        try:
            staging = self.staging(SENDER, local)
        except KvTransferError as error:
            logger.warning("NCCL is not offered: %s", error)
            return None
        return {
            "version": self._version,
            "gpu": self.gpu.uuid,
            "slot_bytes": staging.slot_bytes,
            "blocks": [region.block_layout() for region in _regions_of(local)],
        }

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        version, gpu, slot_bytes = (offer.get(key) for key in ("version", "gpu", "slot_bytes"))
        if type(version) is not int or not isinstance(gpu, str) or type(slot_bytes) is not int:
            raise TransportUnavailable("the offer is not NCCL's")
        if version != self._version:
            # Else they would refuse each other in NCCL, with an error that names neither.
            raise TransportUnavailable(f"NCCL {self._version} here and {version} there")
        is_allowed = self._version >= ONE_GPU_VERSION and os.environ.get(ONE_GPU_VARIABLE) == "1"
        if gpu == self.gpu.uuid and not is_allowed:
            raise TransportUnavailable(f"both workers use GPU {gpu}, and NCCL takes a GPU once")
        try:
            staging = self.staging(RECEIVER, local)
        except KvTransferError as error:
            raise TransportUnavailable(str(error)) from error
        slot_bytes = min(slot_bytes, staging.slot_bytes)
        if slot_bytes < local.block_bytes:
            raise TransportUnavailable(f"a slot of {slot_bytes} bytes holds no block")
        regions, theirs = _regions_of(local), offer.get("blocks")
        if not isinstance(theirs, list) or len(theirs) != len(regions):
            raise TransportUnavailable("the offer is not of this model's KV cache")
        direct = [
            layout is not None
            and layout == region.block_layout()
            and region.geometry.block_bytes >= MIN_DIRECT_BYTES
            for region, layout in zip(regions, theirs, strict=True)
        ]
        details = {"slot_bytes": slot_bytes, "direct": direct}
        return NcclConsumer(self, local, link, slot_bytes, direct), details

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        slot_bytes = details.get("slot_bytes")
        if type(slot_bytes) is not int or slot_bytes < local.block_bytes:
            raise ProtocolError(f"slot_bytes {slot_bytes!r} holds no block")
        direct = details.get("direct")
        if not isinstance(direct, list) or len(direct) != len(local.regions):
            raise ProtocolError(f"direct {direct!r} is not a list with an item a group")
        own = self.staging(SENDER, local).slot_bytes
        return NcclProducer(self, local, link, min(slot_bytes, own), direct)

    def close(self) -> None:
        with self._lock:
            self._staging.clear()

    def staging(self, rank: int, local: LocalKv) -> Staging:
        """Return the slots of one direction. Raises KvTransferError if there is no memory for them,
        or the KV cache is not on this GPU."""
        region, limits = _regions_of(local)[0], self.limits
        if region.views[0].device != self.gpu.device:
            raise KvTransferError(f"the KV cache is not in the memory of {self.gpu.device}")
        with self._lock:
            if rank not in self._staging:
                try:
                    size = max(limits.slot_bytes, local.block_bytes)
                    made = Staging(self.gpu, limits.slots, size)
                except RuntimeError as error:
                    raise KvTransferError(f"no memory for staging slots: {error}") from error
                self._staging[rank] = made
            return self._staging[rank]

    def account(self) -> Account:
        """Return the memory held beside the KV cache, communicators by the budget's reckoning."""
        stagings = tuple(self._staging.values())
        held = sum(staging.held_bytes for staging in stagings)
        totals = {"nccl_made": 0.0, "nccl_evicted": 0.0, "nccl_aborted": 0.0}
        for rank, each in self.communicators.items():
            held += CHANNEL_BYTES[rank] * self.limits.max_ctas * len(each)
            for name in totals:
                totals[name] += getattr(each, name.removeprefix("nccl_"))
        return Account(held, sum(staging.lost for staging in stagings), totals)


class Communicators:
    """The ends of links that have a communicator, of one direction; the longest unused first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ends: OrderedDict[_End, None] = OrderedDict()
        self._lock = threading.Lock()
        self.made = 0
        self.evicted = 0
        self.aborted = 0

    def __len__(self) -> int:
        return len(self._ends)

    def enter(self, end: _End) -> None:
        """Make room for the end's communicator. The caller holds `end.in_use`. Raises
        KvTransferError if all others stay in use for too long."""
        until(lambda: self._admit(end), self._limits.op_s, "room for a communicator", end.check)

    def _admit(self, end: _End) -> bool:
        with self._lock:
            if end in self._ends or len(self._ends) < self._limits.communicators:
                self._ends[end] = None
                self._ends.move_to_end(end)
                return True
            idle = next((e for e in self._ends if e.in_use.acquire(blocking=False)), None)
        if idle is not None:
            try:  # without the lock: an abort may take its time
                idle.retire()
                self.evicted += 1
            finally:
                idle.in_use.release()
        return False

    def leave(self, end: _End) -> None:
        with self._lock:
            self._ends.pop(end, None)


class _End:
    """One end of a link. `in_use` is held while the communicator is, or may be, in use."""

    name = "nccl"
    rank: int

    def __init__(
        self,
        transport: NcclTransport,
        local: LocalKv,
        link: Link,
        slot_bytes: int,
        direct: Sequence[bool],
    ) -> None:
        """`direct`: for each group, whether its blocks go as they are."""
        self._transport = transport
        self._nccl = transport.nccl
        self._gpu = transport.gpu
        self._limits = transport.limits
        self._all = transport.communicators[self.rank]
        self._staging = transport.staging(self.rank, local)
        self._regions = _regions_of(local)
        self._link = link
        self._slot_bytes = slot_bytes
        self._direct = direct
        self.in_use = threading.Lock()
        self._comm = 0  # NCCL's handle
        self._number = 0  # of the communicator that `_comm` is, or was

    def check(self) -> None:
        """Raise if the link is down."""
        if self._link.is_down:
            raise LinkClosed("the link went down")

    def retire(self) -> None:
        """Free the idle communicator and tell the peer, whose end is of no use any more."""
        if self._comm:
            self._abort()
            self._link.post(Inner(pack(Ended(self._number))))

    def close(self) -> None:
        with self.in_use:
            self._abort()

    def _slot(self) -> Any:
        return self._staging.slot(self._limits.op_s, self.check)

    def _join(self, number: int, unique_id: bytes, slot: Slot, timeout_s: float) -> None:
        with self._gpu.on(slot.stream):
            result, self._comm = self._nccl.comm_init(unique_id, self.rank, self._limits.max_ctas)
            self._number = number
            self._all.made += 1
            self._check_result(result)
            until(self._is_taken, timeout_s, "joining a communicator", self.check)

    def _post(
        self, slot: Slot, moves: list[tuple[int, int]], on_posted: Callable[[], None] | None = None
    ) -> None:
        """Post sends or receives (address, bytes) on the slot's stream, which is current."""
        post = self._nccl.send if self.rank == SENDER else self._nccl.recv
        stream = slot.stream.cuda_stream
        self._check_result(self._nccl.group_start())
        results = [post(self._comm, 1 - self.rank, *move, stream) for move in moves]
        for result in (*results, self._nccl.group_end()):
            self._check_result(result)
        if on_posted is not None:
            on_posted()  # before NCCL has enqueued: the first time, that needs the peer's post
        # What comes behind it on the stream must not overtake it.
        until(self._is_taken, MIN_MOVE_S, "posting to NCCL", self.check)

    def _until_moved(self, slot: Slot, size: int) -> None:
        event = self._gpu.record(slot.stream)
        seconds = max(MIN_MOVE_S, size / MIN_BYTES_PER_S)
        until(lambda: self._has_moved(event), seconds, "moving a chunk over NCCL", self.check)

    def _has_moved(self, event: Any) -> bool:
        self._is_taken()
        return self._gpu.has_fired(event)

    def _is_taken(self) -> bool:
        """Return True if NCCL has done what it was last asked. Raises KvTransferError."""
        result = self._nccl.async_error(self._comm)
        self._check_result(result)
        return result is Result.SUCCESS

    def _check_result(self, result: Result) -> None:
        if result not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise KvTransferError(f"NCCL: {result.name}: {self._nccl.last_error(self._comm)}")

    def _abort(self) -> None:
        """Free the communicator, whatever it does."""
        comm, self._comm = self._comm, 0
        if comm:
            self._nccl.abort(comm)
        self._all.leave(self)

    def _fail(self, slot: Slot, error: BaseException) -> None:
        """Abort after an error. Raises SlotLost if the GPU does not come to rest."""
        self._all.aborted += bool(self._comm)
        self._abort()
        try:
            events = [self._gpu.record(stream) for stream in (slot.stream, slot.copies)]
            # A consumer's blocks are given away when this returns.
            limit_s = QUARANTINE_S if self.rank == SENDER else math.inf
            for event in events:
                until(lambda e=event: self._gpu.has_fired(e), limit_s, "the GPU's rest", _nothing)  # type: ignore[misc]
        except (KvTransferError, RuntimeError) as stuck:
            raise SlotLost(f"{error}; {stuck}") from error


class NcclProducer(_End, ProducerChannel):
    """The sending end."""

    rank = SENDER

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._answers: list[Message] = []
        self._answered = threading.Condition()

    def open(self) -> None:
        with self.in_use, self._slot() as slot:
            self._send_run(slot, 1, [_Part([], 0, [(slot.address, 1)])], None)

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> None:
        whole = self._regions[part.group]
        region = whole.narrowed(part.source_start, part.size)
        is_direct = self._direct[part.group] and part.size == whole.geometry.page_bytes
        block_bytes = region.geometry.block_bytes
        self._link.write(chunk)
        with self.in_use:
            for ids in _runs(block_ids, self._slot_bytes // block_bytes):
                with self._slot() as slot:
                    cache = region if is_direct else None
                    parts = _parts(slot, ids, block_bytes, cache, is_direct=is_direct)
                    size = len(ids) * block_bytes
                    gathered = None if is_direct else region
                    self._send_run(slot, size, parts, gathered, is_direct=is_direct)

    def _send_run(
        self,
        slot: Slot,
        size: int,
        parts: list[_Part],
        gathered: DeviceRegion | None,
        *,
        is_direct: bool = False,
    ) -> None:
        """Send what fits the slot. `gathered` is the cache that is copied into the slot first."""
        try:
            ready = []
            if gathered is not None:
                with self._gpu.on(slot.copies):
                    for part in parts:
                        gathered.gather(part.ids, slot.memory[part.start :])
                        ready.append(self._gpu.record(slot.copies))
            self._agree(slot, size, is_direct=is_direct)
            with self._gpu.on(slot.stream):
                for n, part in enumerate(parts):
                    if ready:
                        self._gpu.wait(slot.stream, ready[n])
                    self._post(slot, part.moves)
                self._until_moved(slot, size)
        except BaseException as error:
            self._fail(slot, error)
            raise

    def told(self, body: bytes) -> None:
        """Take a message of the consumer; on the link's reader thread."""
        message = decode(body, KINDS)
        with self._answered:
            self._answers.append(message)
            self._answered.notify()
        if isinstance(message, Ended) and self.in_use.acquire(blocking=False):
            try:  # idle: nobody waits for the answer
                if message.number == self._number:
                    self._abort()
                with self._answered:
                    self._answers.clear()
            finally:
                self.in_use.release()

    def _agree(self, slot: Slot, size: int, *, is_direct: bool) -> None:
        """Offer the bytes until the consumer receives them."""
        while True:
            self._all.enter(self)
            unique_id = b""
            if not self._comm:
                unique_id = self._nccl.unique_id()
                self._number += 1
            offer = Offer(self._number, size, unique_id, is_direct)
            self._link.write(Inner(pack(offer)))
            if unique_id:
                # The consumer may have to wait for a slot and for room before it joins.
                self._join(self._number, unique_id, slot, self._limits.op_s + self._limits.init_s)
            if self._is_cleared():
                return
            # The consumer had freed its idle end before it read the offer.
            self._abort()

    def _is_cleared(self) -> bool:
        """Wait for the consumer's answer. Return False if it has freed its end. Raises
        KvTransferError."""
        end = time.monotonic() + self._limits.op_s
        with self._answered:
            while True:
                while self._answers:
                    answer = self._answers.pop(0)
                    number: int = getattr(answer, "number", 0)
                    if number == self._number and isinstance(answer, Clear | Ended):
                        return isinstance(answer, Clear)
                self.check()
                if time.monotonic() >= end:
                    raise KvTransferError(
                        f"the consumer posted nothing for {self._limits.op_s:g} s"
                    )
                self._is_taken()
                self._answered.wait(0.02)


class NcclConsumer(_End, ConsumerChannel):
    """The receiving end. Only what it posts writes to the KV cache."""

    rank = RECEIVER

    def receive(
        self, chunk: ChunkReady, block_ids: list[int] | None, part: PagePart | None
    ) -> bytes:
        region = None
        if part is not None:
            region = self._regions[part.group].narrowed(part.target_start, part.size)
        is_direct = any(self._direct) if part is None else self._direct[part.group]
        block_bytes = chunk.size // max(1, chunk.count)
        with self.in_use:
            done = 0
            while done < chunk.count:
                offer = self._read_offer()
                count, rest = divmod(offer.size_bytes, block_bytes)
                if rest or not 0 < count <= chunk.count - done:
                    raise ProtocolError(f"{offer.size_bytes} bytes offered of {chunk.size}")
                ids = None if block_ids is None else block_ids[done : done + count]
                if offer.is_direct and not is_direct:
                    raise ProtocolError(f"cannot receive {offer}")
                if self._take(offer, block_bytes, region, ids):
                    done += count
        return b"" if block_ids is None or region is None else region.digests(block_ids)

    def told(self, body: bytes) -> None:
        """Take a message of the producer outside of a chunk; on the link's reader thread."""
        message = decode(body, KINDS)
        with self.in_use:
            if isinstance(message, Offer):
                self._take(message, message.size_bytes, None, None)
            elif not isinstance(message, Ended):
                raise ProtocolError(f"a {type(message).__name__} message outside of a chunk")
            elif message.number == self._number:
                self._abort()

    def check(self) -> None:
        super().check()
        # This thread is the link's reader, so nobody else sees that the producer is gone. What the
        # producer writes next may be here already: it sees the end of its send before we see ours.
        with contextlib.suppress(BlockingIOError):
            if not self._link.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise LinkClosed("the producer closed the link inside a chunk")

    def _take(
        self,
        offer: Offer,
        block_bytes: int,
        region: DeviceRegion | None,
        block_ids: list[int] | None,
    ) -> bool:
        """Receive what is offered, to throw it away without a region. Return False if its
        communicator is gone: it is offered anew."""
        is_fit = region is None or region.geometry.block_bytes == block_bytes
        if not 0 < offer.size_bytes <= self._slot_bytes or not is_fit:
            raise ProtocolError(f"cannot receive {offer}")
        if not offer.unique_id and (not self._comm or offer.number != self._number):
            return False
        cache = region if offer.is_direct else None
        ids = list(range(offer.size_bytes // block_bytes)) if block_ids is None else block_ids
        with self._slot() as slot:
            try:
                if offer.unique_id:
                    self._abort()
                self._all.enter(self)
                if offer.unique_id:
                    self._join(offer.number, offer.unique_id, slot, self._limits.init_s)
                parts = _parts(slot, ids, block_bytes, cache, is_direct=offer.is_direct)
                with self._gpu.on(slot.stream):
                    for n, part in enumerate(parts):
                        self._post(slot, part.moves, None if n else self._clear)
                        if region is not None and not offer.is_direct:
                            self._gpu.wait(slot.copies, self._gpu.record(slot.stream))
                            with self._gpu.on(slot.copies):
                                region.scatter(part.ids, slot.memory[part.start :])
                    self._until_moved(slot, offer.size_bytes)
                    scattered = self._gpu.record(slot.copies)
                # No deadline: the blocks are given away when this returns.
                while not self._gpu.has_fired(scattered):
                    time.sleep(POLL_S)
            except BaseException as error:
                self._fail(slot, error)
                raise
        return True

    def _clear(self) -> None:
        self._link.post(Inner(pack(Clear(self._number))))

    def _read_offer(self) -> Offer:
        while not isinstance(message := self._read(), Offer):
            if not isinstance(message, Ended):
                raise ProtocolError(f"a {type(message).__name__} message where an offer was due")
        return message

    def _read(self) -> Message:
        message = self._link.read()
        if not isinstance(message, Inner):
            raise ProtocolError(f"a {type(message).__name__} message inside a chunk")
        return decode(message.body, KINDS)


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks that are posted at once: where they lie in the slot, and (address, bytes) of each
    operation."""

    ids: list[int]
    start: int
    moves: list[tuple[int, int]]


def _parts(
    slot: Slot,
    ids: list[int],
    block_bytes: int,
    cache: DeviceRegion | None,
    *,
    is_direct: bool,
) -> list[_Part]:
    """Split a run of blocks, at both ends alike. `is_direct`: each block is an operation, from or
    to the cache if it is given, else the slot."""
    made, start = [], 0
    for part in _runs(ids, MAX_GROUP if is_direct else max(1, PART_BYTES // block_bytes)):
        size = len(part) * block_bytes
        moves = [(slot.address + start, size)]
        if cache is not None:
            moves = [(cache.block_address(block), block_bytes) for block in part]
        elif is_direct:
            places = range(slot.address + start, slot.address + start + size, block_bytes)
            moves = [(place, block_bytes) for place in places]
        made.append(_Part(part, start, moves))
        start += size
    return made


def _runs(ids: list[int], step: int) -> Iterator[list[int]]:
    return (ids[n : n + step] for n in range(0, len(ids), step))


def _regions_of(local: LocalKv) -> list[DeviceRegion]:
    """Raises KvTransferError if the cache is in host memory."""
    regions = [region for region in local.regions if isinstance(region, DeviceRegion)]
    if not regions:
        raise KvTransferError("the KV cache is not in GPU memory")
    return regions


def _nothing() -> None:
    pass
