"""The two ends of a link over NCCL."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_transfer.cache.host_memory import EndedCopy
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.link import ConsumerChannel, ProducerChannel
from kv_transfer.protocol.messages import Inner, KvMessage, decode, pack
from kv_transfer.settings import INPUT_POLL_S, SEND_CHUNKS
from kv_transfer.transport.nccl.messages import KINDS, Clear, Ended, Offer
from kv_transfer.transport.nccl.staging import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.gpu_memory import DeviceRegion
    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.transport.nccl.binding import Nccl
    from kv_transfer.transport.nccl.communicators import Communicator
    from kv_transfer.transport.nccl.limits import Limits
    from kv_transfer.transport.nccl.staging import Gpu, Staging, StagingSlot

# A tenth of the slowest network worth using.
MIN_BYTES_PER_S = 1e8


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources shared by the links of one direction, and values that the two ends agreed on.
    `direct`: the groups whose blocks are sent without staging. `direct_run`: blocks per offer of
    these groups. `window`: the number of offers that may be unanswered."""

    nccl: Nccl
    gpu: Gpu
    limits: Limits
    staging: Staging
    regions: Mapping[int, DeviceRegion]
    slot_bytes: int
    direct: Set[int]
    direct_run: int
    window: int


@dataclass(slots=True, eq=False)
class _Run:
    """The bytes of one offer in flight. When `events` have fired, the bytes are in place and the
    slot is free. `events` is empty until the operations are posted. `slot` is None while a producer
    joins another communicator."""

    slot: StagingSlot | None
    size: int
    events: Sequence[Any] = ()
    is_over: bool = False
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Offered:
    """A run of blocks that the consumer has not answered; without `region`, the slot's old content.
    `gathered`: an event for each of the parts that are staged."""

    run: _Run
    ids: list[int]
    block_bytes: int
    region: DeviceRegion | None
    is_direct: bool
    parts: Sequence[_MoveBatch] = ()
    gathered: Sequence[Any] = ()


class _Moving:
    """The runs of a chunk, as a BlockCopy. `begin_digests` is called when they have ended."""

    def __init__(
        self, end: _LinkEnd, runs: Sequence[_Run], begin_digests: Callable[[], BlockCopy]
    ) -> None:
        self._end = end
        self._runs = runs
        self._begin_digests = begin_digests
        self._digests: BlockCopy | None = None

    @property
    def has_ended(self) -> bool:
        if not self._end.have_ended(self._runs):
            return False
        return any(run.error for run in self._runs) or self._digesting().has_ended

    def wait(self) -> bytes:
        self._end.wait(self._runs)
        return self._digesting().wait()

    def _digesting(self) -> BlockCopy:
        if self._digests is None:
            self._digests = self._begin_digests()
        return self._digests


class _LinkEnd:
    """Common part of both ends. One thread of the link posts and waits. Runs are posted, and end,
    in the order of the offers, at both ends. As many are in flight as there are slots. After an
    error none is: the communicator is aborted, and each run ends with the error when the GPU is
    idle.
    """

    name = "nccl"

    def __init__(self, communicator: Communicator, link: Link, resources: Resources) -> None:
        self.communicator = communicator
        self._link = link
        self._nccl = resources.nccl
        self._gpu = resources.gpu
        self._limits = resources.limits
        self._staging = resources.staging
        self._regions = resources.regions
        self._slot_bytes = resources.slot_bytes
        self._direct = resources.direct
        self._direct_run = resources.direct_run
        self._flying: deque[_Run] = deque()
        self._head_since = 0.0  # time when the oldest run was posted, or its predecessor ended

    def have_ended(self, runs: Sequence[_Run]) -> bool:
        """Return True if the runs have ended, also by an error. Raises KvTransferError after an
        error."""
        if not all(run.is_over for run in runs):
            with self._using():
                self._advance()
        return all(run.is_over for run in runs)

    def wait(self, runs: Sequence[_Run]) -> None:
        """Wait until the runs have ended. Raises KvTransferError after an error."""
        if not all(run.is_over for run in runs):
            with self._using():
                self._wait(runs)
        for run in runs:
            if run.error is not None:
                raise KvTransferError(str(run.error)) from run.error

    def close(self) -> None:
        with self.communicator.in_use:
            self.communicator.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Hold the communicator. It stays held while runs are in flight, so that it is not
        evicted."""
        if not self._flying:
            self.communicator.in_use.acquire()
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            if not self._flying:
                self.communicator.in_use.release()

    def _fail(self, error: BaseException) -> None:
        """Abort, and end all runs. Raises KvTransferError if the GPU does not become idle in time;
        the slots are then lost."""
        self.communicator.fail()
        runs = list(self._flying)
        slots = [run.slot for run in runs if run.slot is not None]
        try:
            self.communicator.rest(slots)
        except (KvTransferError, RuntimeError) as stuck:
            self._staging.lost += len(slots)
            raise KvTransferError(f"{error}; {stuck}") from error
        else:
            for slot in slots:
                self._staging.release(slot)
        finally:
            self._flying.clear()
            for run in runs:
                run.is_over, run.error = True, error

    def _take_slot(self) -> StagingSlot:
        """Wait for a slot. Slots become free, because the communicator is open and the peer blocks
        no run for long."""
        while self._flying and not self._staging.free:
            self._wait([self._flying[0]])
        return self._staging.acquire(self._limits.op_s, self._check)

    def _posted(self, run: _Run, *streams: Any) -> None:
        """Record that all operations of the run are on these streams."""
        run.events = [self._gpu.record(stream) for stream in streams]
        if self._flying[0] is run:
            self._head_since = time.monotonic()

    def _end_runs(self) -> None:
        """Free the slots of ended runs. Raises KvTransferError after an error of NCCL, or at a
        deadline."""
        while self._flying and (run := self._flying[0]).events:
            self.communicator.is_taken()  # raises NCCL's error
            now = time.monotonic()
            if not all(map(self._gpu.has_fired, run.events)):
                seconds = max(self._limits.min_move_s, run.size / MIN_BYTES_PER_S)
                if now - self._head_since >= seconds:
                    raise KvTransferError(
                        f"moving a chunk over NCCL took longer than {seconds:g} s"
                    )
                return
            run.is_over, self._head_since = True, now
            if (slot := self._flying.popleft().slot) is not None:
                self._staging.release(slot)
            if not self._flying:
                self.communicator.touch()

    def _advance(self) -> None:
        """Do what is due, for a thread that waits for runs. Raises KvTransferError."""
        self._end_runs()

    def _check(self) -> None:
        """Do what is due and needs no slot, for a thread that waits for a slot. Raises
        KvTransferError."""
        self._end_runs()
        self.communicator.check()

    def _nap(self, seconds: float) -> None:
        """Sleep between two polls."""
        time.sleep(seconds)

    def _wait(self, runs: Sequence[_Run]) -> None:
        def are_over() -> bool:
            self._advance()
            return all(run.is_over for run in runs)

        until(are_over, math.inf, "", self.communicator.check, self._nap)

    def _settle(self) -> None:
        """Wait for all runs. The communicator may be closed then."""
        self._wait(list(self._flying))


class NcclProducer(_LinkEnd, ProducerChannel):
    """The sending end. Up to `window` offers are unanswered: the consumer answers one while the
    next is on its way. Answers come in the order of the offers."""

    def __init__(self, communicator: Communicator, link: Link, resources: Resources) -> None:
        super().__init__(communicator, link, resources)
        self._window = resources.window
        if self._window > 1:
            self.send_chunks = SEND_CHUNKS
        self._offered: deque[_Offered] = deque()
        self._asked_at = 0.0  # time of the oldest unanswered offer, or of the answer before it
        self._is_refused = False  # the consumer has freed its end, or wants to
        self._answers: deque[KvMessage] = deque()
        self._answered = threading.Condition()

    def open(self) -> None:
        with self._using():
            self._wait([self._offer([0], 1, None)])

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> BlockCopy:
        whole = self._regions[part.group]
        region = whole.narrowed(part.source_layers, part.source_start, part.size)
        is_direct = part.group in self._direct and region is whole
        block_bytes = region.geometry.block_bytes
        self._link.stream.write(chunk)
        most = self._direct_run if is_direct else self._slot_bytes // block_bytes
        with self._using():
            runs = [
                self._offer(ids, block_bytes, region, is_direct=is_direct)
                for ids in _runs(block_ids, most)
            ]
        return _Moving(self, runs, _no_digests)

    def on_inner(self, body: bytes) -> None:
        """Handle a message of the consumer, on the link's reader thread."""
        message = decode(body, KINDS)
        with self._answered:
            self._answers.append(message)
            self._answered.notify()
        if isinstance(message, Ended) and self.communicator.in_use.acquire(blocking=False):
            try:  # idle, so no thread waits for an answer
                if message.number == self.communicator.number:
                    self.communicator.abort()
                self._answers.clear()
            finally:
                self.communicator.in_use.release()

    def _offer(
        self,
        ids: list[int],
        block_bytes: int,
        region: DeviceRegion | None,
        *,
        is_direct: bool = False,
    ) -> _Run:
        """Offer one run of blocks when the window has room; it is sent when the consumer has
        answered."""
        if self.communicator.is_overdue:
            self._end_turn()

        def has_room() -> bool:
            self._advance()
            return len(self._offered) < self._window

        until(has_room, math.inf, "", self.communicator.check, self._nap)
        while True:
            self._join()
            slot = self._take_slot()
            if self.communicator.is_open:
                break
            self._staging.release(slot)  # the consumer freed its end meanwhile
        run = _Run(None, len(ids) * block_bytes)
        self._flying.append(run)
        self._load(_Offered(run, ids, block_bytes, region, is_direct), slot)
        return run

    def _load(self, offered: _Offered, slot: StagingSlot) -> None:
        """Start to gather the blocks into the slot, if they are staged, and offer the run."""
        offered.run.slot, region, is_direct = slot, offered.region, offered.is_direct
        cache = region if is_direct else None
        offered.parts = _batches(
            slot, offered.ids, offered.block_bytes, cache, self._limits, is_direct=is_direct
        )
        gathered = []
        if region is not None and not is_direct:
            with self._gpu.on(slot.copies):
                for part in offered.parts:
                    region.gather(part.ids, slot.memory[part.start :])
                    gathered.append(self._gpu.record(slot.copies))
        offered.gathered = gathered
        if not self._offered:
            self._asked_at = time.monotonic()
        self._offered.append(offered)
        self._write(Offer(self.communicator.number, offered.run.size, b"", is_direct))

    def _advance(self) -> None:
        self._take_answers()
        self._end_runs()
        if self._is_refused:
            self._offer_again()

    def _check(self) -> None:
        self._take_answers()
        super()._check()

    def _nap(self, seconds: float) -> None:
        with self._answered:
            if not self._answers:
                self._answered.wait(seconds)

    def _take_answers(self) -> None:
        """Post the sends that the consumer is ready for. Raises KvTransferError if it does not
        answer in time."""
        while self._answers and not self._is_refused:
            answer = self._answers.popleft()
            if getattr(answer, "number", 0) != self.communicator.number:
                continue
            self._is_refused = isinstance(answer, Ended)
            if isinstance(answer, Clear) and self._offered:
                self._asked_at = time.monotonic()
                self._post(self._offered.popleft())
        waited = time.monotonic() - self._asked_at
        if self._offered and not self._is_refused and waited >= self._limits.op_s:
            raise KvTransferError(f"the consumer posted nothing for {self._limits.op_s:g} s")

    def _post(self, offered: _Offered) -> None:
        slot = offered.run.slot
        assert slot is not None, "what is offered has a slot"
        with self._gpu.on(slot.stream):
            for n, part in enumerate(offered.parts):
                if offered.gathered:
                    self._gpu.wait(slot.stream, offered.gathered[n])
                self.communicator.post(slot, part.moves)
            self._posted(offered.run, slot.stream)

    def _offer_again(self) -> None:
        """Free this end, as the consumer has, and offer what it has not answered over a new
        communicator. Hold no slot while joining (`_join`)."""
        while self._is_refused:
            refused = list(self._offered)
            self._offered.clear()
            for each in refused:
                # The slot's next user is queued behind our gathers.
                if each.run.slot is not None:
                    self._staging.release(each.run.slot)
                    each.run.slot = None
            until(self._have_posted_ended, math.inf, "", self.communicator.check)
            self._is_refused = False
            self.communicator.abort()
            if refused:
                self._join()
            for each in refused:
                self._load(each, self._staging.acquire(self._limits.op_s, self._check))

    def _have_posted_ended(self) -> bool:
        self._end_runs()
        return not any(run.events for run in self._flying)

    def _end_turn(self) -> None:
        """Free both ends, because another link waits for a place. The consumer answers when it has
        all bytes: on a slow network they may still be in NCCL's buffers when the sends have
        ended."""
        self._settle()
        if not self.communicator.is_open:
            return  # the consumer was first

        def is_refused() -> bool:
            self._take_answers()
            return self._is_refused

        self._write(Ended(self.communicator.number))
        what, check = "the consumer's end of a communicator", self.communicator.check
        until(is_refused, self._limits.op_s, what, check, self._nap)
        self._offer_again()

    def _join(self) -> None:
        """Join a new communicator if none is open. Holds no slot, because the consumer may wait
        long for a place and other links need the slots."""
        communicator = self.communicator
        communicator.enter()
        if not communicator.is_open:
            communicator.number += 1
            offer = Offer(communicator.number, 0, self._nccl.unique_id())
            self._write(offer)
            timeout_s = self._limits.op_s + self._limits.init_s
            communicator.join(offer.number, offer.unique_id, timeout_s)

    def _write(self, message: KvMessage) -> None:
        self._link.stream.write(Inner(pack(message)))


class NcclConsumer(_LinkEnd, ConsumerChannel):
    """The receiving end. Only receives posted here write to the KV cache."""

    def __init__(self, communicator: Communicator, link: Link, resources: Resources) -> None:
        super().__init__(communicator, link, resources)
        self._refused = 0  # number of the communicator whose offers are void
        # Messages behind void offers. They are read again when the chunk is complete.
        self._behind: list[KvMessage] = []

    def receive(
        self,
        chunk: ChunkReady,
        block_ids: list[int] | None,
        part: PagePart | None,
        checked: range | None = None,
    ) -> BlockCopy:
        region = None
        if part is not None:
            whole = self._regions[part.group]
            region = whole.narrowed(part.target_layers, part.target_start, part.size)
        is_direct = bool(self._direct) if part is None else part.group in self._direct
        block_bytes = chunk.size // max(1, chunk.count)
        runs: list[_Run] = []
        with self._using():
            done = 0
            while done < chunk.count:
                offer = self._read_offer()
                if offer.unique_id:
                    self._join(offer)
                    continue
                count, rest = divmod(offer.size_bytes, block_bytes)
                if rest or not 0 < count <= chunk.count - done:
                    raise ProtocolError(f"{offer.size_bytes} bytes offered of {chunk.size}")
                ids = None if block_ids is None else block_ids[done : done + count]
                if offer.is_direct and not is_direct:
                    raise ProtocolError(f"cannot receive {offer}")
                if (run := self._take(offer, block_bytes, region, ids)) is not None:
                    runs.append(run)
                    done += count
        behind, self._behind = self._behind, []
        self._link.stream.unread(behind)
        if block_ids is None or region is None:
            return _Moving(self, runs, _no_digests)
        return _Moving(self, runs, functools.partial(region.begin_digests, block_ids, checked))

    def on_inner(self, body: bytes) -> None:
        """Handle a message of the producer outside of a chunk, on the link's reader thread."""
        message = decode(body, KINDS)
        with self._using():
            if isinstance(message, Offer) and message.unique_id:
                self._join(message)
            elif isinstance(message, Offer):
                self._take(message, message.size_bytes, None, None)
                self._settle()
            elif isinstance(message, Ended):
                self._end(message)
            else:
                raise ProtocolError(f"a {type(message).__name__} message outside of a chunk")

    def _take(
        self,
        offer: Offer,
        block_bytes: int,
        region: DeviceRegion | None,
        block_ids: list[int] | None,
    ) -> _Run | None:
        """Post the receive of the offered bytes; without a region, discard them. Return None if the
        offer is void, because its communicator is gone or should go. So are all offers behind it,
        until the producer has offered a new communicator; it then repeats them."""
        communicator = self.communicator
        is_fit = region is None or region.geometry.block_bytes == block_bytes
        most = self._direct_run * block_bytes if offer.is_direct else self._slot_bytes
        if not 0 < offer.size_bytes <= most or not is_fit:
            raise ProtocolError(f"cannot receive {offer}")
        if offer.number == self._refused:
            return None
        if communicator.is_overdue:
            # The producer aborts first, when its sends have ended. All bytes must be here then,
            # because on a slow network they may still be in NCCL's buffers.
            self._settle()
            self._link.post(Inner(pack(Ended(offer.number))))
            self._refused = offer.number
            return None
        if not communicator.is_open or offer.number != communicator.number:
            self._refused = offer.number
            return None
        cache = region if offer.is_direct else None
        ids = list(range(offer.size_bytes // block_bytes)) if block_ids is None else block_ids
        communicator.enter()
        slot = self._take_slot()
        run = _Run(slot, offer.size_bytes)
        self._flying.append(run)
        parts = _batches(slot, ids, block_bytes, cache, self._limits, is_direct=offer.is_direct)
        with self._gpu.on(slot.stream):
            for n, part in enumerate(parts):
                communicator.post(slot, part.moves, None if n else self._clear)
                if region is not None and not offer.is_direct:
                    self._gpu.wait(slot.copies, self._gpu.record(slot.stream))
                    with self._gpu.on(slot.copies):
                        region.scatter(part.ids, slot.memory[part.start :])
            self._posted(run, slot.stream, slot.copies)
        return run

    def _join(self, offer: Offer) -> None:
        """Join the communicator of this offer, which replaces the last one."""
        self._settle()
        self.communicator.abort()
        self.communicator.enter()
        self.communicator.join(offer.number, offer.unique_id, self._limits.init_s)

    def _end(self, message: Ended) -> None:
        """Free this end, because the producer has freed its end or wants to, and answer."""
        if message.number == self.communicator.number:
            self._settle()
            self.communicator.abort()
        self._link.post(Inner(pack(message)))

    def _clear(self) -> None:
        self._link.post(Inner(pack(Clear(self.communicator.number))))

    def _read_offer(self) -> Offer:
        while not isinstance(message := self._read(), Offer):
            if not isinstance(message, Ended):
                raise ProtocolError(f"a {type(message).__name__} message where an offer was due")
            self._end(message)
        return message

    def _read(self) -> KvMessage:
        # Free our slot, because the producer may wait for a slot that another link of ours blocks.
        while self._flying and not self._link.stream.has_input(INPUT_POLL_S):
            self._end_runs()
        with nullcontext() if self._flying else self._idle():
            message = self._link.stream.read()
        if isinstance(message, Inner):
            return decode(message.body, KINDS)
        if self._refused != self.communicator.number:
            raise ProtocolError(f"a {type(message).__name__} message inside a chunk")
        self._behind.append(message)
        return self._read()

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Let another link close the communicator meanwhile. The producer may wait for a place that
        it gets only when that link continues; it repeats an offer that we cannot accept."""
        self.communicator.in_use.release()
        try:
            yield
        finally:
            self.communicator.in_use.acquire()


@dataclass(frozen=True, slots=True)
class _MoveBatch:
    """Blocks that are posted together. `start`: offset in the slot. `moves`: (address, bytes) of
    each operation."""

    ids: list[int]
    start: int
    moves: list[tuple[int, int]]


def _batches(
    slot: StagingSlot,
    ids: list[int],
    block_bytes: int,
    cache: DeviceRegion | None,
    limits: Limits,
    *,
    is_direct: bool,
) -> list[_MoveBatch]:
    """Split a run of blocks in the same way at both ends. `is_direct`: one operation per block,
    from or to the cache. Without a cache, to the slot; these bytes are discarded, because they may
    exceed the slot."""
    made, start = [], 0
    most = limits.max_group if is_direct else max(1, limits.part_bytes // block_bytes)
    for part in _runs(ids, most):
        size = len(part) * block_bytes
        moves = [(slot.address + start, size)]
        if cache is not None:
            moves = [(cache.block_address(block), block_bytes) for block in part]
        elif is_direct:
            room = slot.memory.numel() // block_bytes
            places = (slot.address + n % room * block_bytes for n in range(len(part)))
            moves = [(place, block_bytes) for place in places]
        made.append(_MoveBatch(part, start, moves))
        start += size
    return made


def _no_digests() -> BlockCopy:
    return EndedCopy(b"")


def _runs(ids: list[int], step: int) -> Iterator[list[int]]:
    return (ids[n : n + step] for n in range(0, len(ids), step))
