"""The two ends of a link whose chunks travel over NCCL.

A chunk on the link is the Chunk message, then the pair's own messages, then Moved; nothing else
comes between, as nothing comes between a chunk's bytes where a transport sends them on the link. So
the source's `push` writes what the pair has to say while it waits, and the target's `receive` reads
it. Outside of a chunk the pair speaks through the link's queue.

A chunk is cut into parts that fit a slot. While one part is on its way the next is gathered, and
the one before is scattered: at most two slots a link. The target's blocks are written by the
scatter alone, on the link's reader thread; NCCL writes into slots.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kv_transfer.device.staging import LOOK_S, parts
from kv_transfer.device.units import Units, units_of
from kv_transfer.device.waiting import wait_for
from kv_transfer.errors import KvTransferError, LinkClosed, ProtocolError
from kv_transfer.messages import Inner, decode, encode, pack
from kv_transfer.nccl.actions import Op
from kv_transfer.nccl.messages import KINDS, Moved, Offer
from kv_transfer.nccl.pair import RECEIVER, SENDER
from kv_transfer.scattering import send_pieces

if TYPE_CHECKING:
    from kv_transfer.device.base import Device, Event, Mover
    from kv_transfer.device.staging import Staging
    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion
    from kv_transfer.messages import Chunk, Message
    from kv_transfer.nccl.messages import PairMessage
    from kv_transfer.nccl.pool import PairKey
    from kv_transfer.nccl.thread import NcclThread
    from kv_transfer.transport.base import Wire

# How often who waits for bytes looks whether a message has come.
READ_S = 0.001


class Hub(Protocol):
    """What the channels of a process have in common."""

    device: Device
    thread: NcclThread
    # How long an operation may wait and run, with all its retries.
    op_timeout_s: float

    def join(self, end: NcclSource | NcclTarget, rank: int) -> PairKey:
        """From now on what is told to the key's pair, and what ends of it, goes to `end`."""
        ...

    def leave(self, key: PairKey) -> None:
        """The channel is closed and its slots are given back."""
        ...


@dataclass(frozen=True, slots=True)
class Kv:
    """One end's cache, its slots, and how much of a slot both ends use."""

    region: KvRegion
    staging: Staging
    slot_bytes: int


class _End:
    """What both ends have in common: their operations' slots, and how the operations ended."""

    name = "nccl"

    def __init__(self, hub: Hub, kv: Kv, wire: Wire) -> None:
        self._hub = hub
        self._kv = kv
        self._wire = wire
        self._changed = threading.Condition()
        self._slots: dict[str, int] = {}
        self._in_flight: set[str] = set()
        self._endings: dict[str, str] = {}
        self._outgoing: deque[Message] | None = None
        self._keeps_slots = False  # whether a slot is still needed when its operation went well
        self._is_closed = False
        self.key: PairKey

    # -- from the NCCL thread

    def tell(self, message: PairMessage) -> None:
        """Brings the pair's message to the other end."""
        inner = Inner(pack(message))
        with self._changed:
            if self._outgoing is not None:
                self._outgoing.append(inner)
                self._changed.notify_all()
                return
        self._wire.post(inner)

    def ended(self, op: Op, reason: str, *, is_lost: bool) -> None:
        """The operation is over."""
        with self._changed:
            self._in_flight.discard(op.op_id)
            self._endings[op.op_id] = reason
            if is_lost:
                self._kv.staging.lose(self._slots.pop(op.op_id))
            elif reason or not self._keeps_slots:
                self._kv.staging.release(self._slots.pop(op.op_id))
            self._changed.notify_all()
            self._forget()

    # -- from the link

    def told(self, body: bytes) -> None:
        """See Talks."""
        self._deliver(self._decode(body))

    def close(self) -> None:
        """See the channels' protocols. Operations in flight end soon, and then their slots."""
        self._hub.thread.peer_lost(self.key.peer_instance_id, "the link is down")
        with self._changed:
            self._is_closed = True
            self._forget()

    # -- inside

    def _decode(self, body: bytes) -> Message:
        return decode(body, KINDS)

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Moved):
            raise ProtocolError("a chunk ended that had not begun")
        self._hub.thread.deliver(self.key, message)  # type: ignore[arg-type]

    def _submit(self, op_id: str, slot: int, size_bytes: int, after: Event | None = None) -> None:
        with self._changed:
            self._slots[op_id] = slot
            self._in_flight.add(op_id)
        expires_at = time.monotonic() + self._hub.op_timeout_s
        op = Op(op_id, self._kv.staging.address(slot), size_bytes, expires_at)
        self._hub.thread.submit(self.key, op, after)

    def _await(self, op_id: str) -> None:
        """Until the operation has ended; meanwhile what the pair has to say is written. Raises
        KvTransferError where it failed, LinkClosed where the link did."""
        end = time.monotonic() + 2 * self._hub.op_timeout_s
        while True:
            with self._changed:
                if not self._outgoing and op_id not in self._endings:
                    self._changed.wait(LOOK_S)
                messages, reason = self._drain(), self._endings.pop(op_id, None)
            self._write(messages)
            if reason is not None:
                break
            if self._wire.is_down():
                raise LinkClosed("the link went down inside a chunk")
            if time.monotonic() >= end:
                raise KvTransferError("NCCL did not say how a chunk ended")
        if reason:
            raise KvTransferError(f"NCCL moved no chunk: {reason}")

    def _drain(self) -> list[Message]:
        messages = list(self._outgoing or ())
        if self._outgoing:
            self._outgoing.clear()
        return messages

    def _write(self, messages: list[Message]) -> None:
        # On the socket itself: what `send` is given goes when the push is over.
        for message in messages:
            send_pieces(self._wire.sock, [memoryview(encode(message))])

    def _forget(self) -> None:
        if self._is_closed and not self._slots:
            self._hub.leave(self.key)


class NcclSource(_End):
    """The sending end."""

    unwaited_bytes = 0
    makes_digests = False

    def __init__(self, hub: Hub, kv: Kv, wire: Wire) -> None:
        super().__init__(hub, kv, wire)
        self._numbers = itertools.count(1)
        self.key = hub.join(self, SENDER)

    def push(
        self,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        """See SourceChannel. Where it fails, a gather may still be reading the blocks: into a slot
        that nobody sends."""
        region = self._kv.region
        if part is not None:
            region = region.narrowed(part.source_start, part.size)
        if not region.geometry.has_blocks(source_ids):
            raise KvTransferError("a block id is outside its KV cache")
        mover, units = self._hub.device.mover(region), units_of(region, chunk, source_ids, skip)
        self._write([chunk])
        moving: deque[str] = deque()
        with self._changed:
            self._outgoing = deque()
        try:
            for run in parts(units.count, units.size_bytes, self._kv.slot_bytes):
                slot = self._slot(moving)
                moving.append(self._send(mover, units, run, slot))
            while moving:
                self._await(moving.popleft())
        finally:
            with self._changed:
                rest, self._outgoing = self._drain(), None
        self._write([*rest, Inner(pack(Moved()))])

    def _slot(self, moving: deque[str]) -> int:
        """A free one, for which what is on its way may have to end."""
        staging, slot = self._kv.staging, None
        while moving and (len(moving) > 1 or (slot := staging.try_acquire()) is None):
            self._await(moving.popleft())
        if slot is None:
            slot = staging.acquire(self._hub.op_timeout_s, self._wire.is_down)
        return slot

    def _send(self, mover: Mover, units: Units, run: slice, slot: int) -> str:
        staging = self._kv.staging
        try:
            gathered = units.gather(mover, run, staging.address(slot))
        except KvTransferError:
            staging.release(slot)
            raise
        op_id = str(next(self._numbers))
        self._submit(op_id, slot, (run.stop - run.start) * units.size_bytes, gathered)
        return op_id


@dataclass(frozen=True, slots=True)
class _Part:
    """What an operation brings: these units of the chunk."""

    op_id: str
    slot: int
    run: slice


@dataclass(slots=True)
class _Inbound:
    """The chunk that is being received."""

    mover: Mover
    units: Units
    is_kept: bool  # else it is thrown away
    taken: int = 0  # units that came or were let come
    known: set[str] = field(default_factory=set)
    waiting: deque[_Part] = field(default_factory=deque)  # let come, and not yet in place


class NcclTarget(_End):
    """The receiving end."""

    def __init__(self, hub: Hub, kv: Kv, wire: Wire) -> None:
        super().__init__(hub, kv, wire)
        self._scattering: tuple[Event, int] | None = None  # with its slot
        self.key = hub.join(self, RECEIVER)

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        """See TargetChannel."""
        region = self._kv.region
        if part is not None:
            region = region.narrowed(part.target_start, part.size)
        mover, units = self._hub.device.mover(region), units_of(region, chunk, block_ids)
        inbound = _Inbound(mover, units, block_ids is not None)
        with self._changed:
            self._keeps_slots = True
        try:
            while not isinstance(message := self._read(), Moved):
                if isinstance(message, Offer) and message.op_id not in inbound.known:
                    self._take(message, inbound)
                self._deliver(message)
                while len(inbound.waiting) > 1 and self._comes(inbound.waiting[0]):
                    self._land(inbound)
            while inbound.waiting:
                self._land(inbound)
        finally:
            self._give_back()
        if inbound.taken != units.count:
            raise ProtocolError(f"{inbound.taken} units came of a chunk of {units.count}")

    def idle(self) -> bool:
        """See TargetChannel."""
        with self._changed:
            scattering = self._scattering
        try:
            return scattering is None or self._hub.device.query(scattering[0])
        except KvTransferError:
            return False

    def _read(self) -> Message:
        message = self._wire.read()
        if not isinstance(message, Inner):
            raise ProtocolError(f"a {message.kind} message inside a chunk")
        return self._decode(message.body)

    def _take(self, offer: Offer, inbound: _Inbound) -> None:
        """Lets the part come."""
        staging, left = self._kv.staging, inbound.units.count - inbound.taken
        count, rest = divmod(offer.size_bytes, inbound.units.size_bytes)
        if rest or not 0 < count <= left or offer.size_bytes > self._kv.slot_bytes:
            raise ProtocolError(f"{offer.size_bytes} bytes were offered with {left} units to come")
        while (slot := staging.try_acquire()) is None and inbound.waiting:
            self._land(inbound)
        if slot is None:
            slot = staging.acquire(self._hub.op_timeout_s, self._wire.is_down)
        run = slice(inbound.taken, inbound.taken + count)
        inbound.waiting.append(_Part(offer.op_id, slot, run))
        inbound.known.add(offer.op_id)
        inbound.taken += count
        self._submit(offer.op_id, slot, offer.size_bytes)

    def _comes(self, part: _Part) -> bool:
        """True once the part is here, and False when there is a message to be read first: a retry
        of the part begins with one."""
        while True:
            with self._changed:
                if part.op_id in self._endings:
                    return True
                self._changed.wait(READ_S)
            if self._wire.can_read(0.0):
                return False

    def _land(self, inbound: _Inbound) -> None:
        """Puts the oldest part in place once it is here, and gives its slot back."""
        part = inbound.waiting.popleft()
        self._await(part.op_id)
        if inbound.is_kept:
            address = self._kv.staging.address(part.slot)
            event = inbound.units.scatter(inbound.mover, part.run, address)
            with self._changed:
                self._scattering = event, part.slot
            wait_for(self._hub.device, event)
            with self._changed:
                self._scattering = None
        with self._changed:
            self._kv.staging.release(self._slots.pop(part.op_id))

    def _give_back(self) -> None:
        """The chunk is over, well or not: slots whose bytes came are free, but for one that is
        still being read; those in flight will be free as they end."""
        staging = self._kv.staging
        with self._changed:
            self._keeps_slots = False
            self._endings.clear()
            read = None if self._scattering is None else self._scattering[1]
            for op_id in [op_id for op_id in self._slots if op_id not in self._in_flight]:
                slot = self._slots.pop(op_id)
                (staging.lose if slot == read else staging.release)(slot)
