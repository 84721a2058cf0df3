"""The two ends of a link whose chunks travel through a ring of slots in the target's GPU memory,
which the source has mapped. Push only: reading over a bus is many times slower than writing.

A chunk on the link is the Chunk message, then Begin, then Landed for each part; credits come the
other way. The source gathers a part into a slot of its own and lets the copy engine write it into
the granted slot of the ring; the target scatters it. While one part is copied the next is gathered,
and the one before is scattered.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kv_transfer.device.staging import LOOK_S, parts
from kv_transfer.device.units import Units, units_of
from kv_transfer.device.waiting import wait_for
from kv_transfer.errors import KvTransferError, LinkClosed, ProtocolError
from kv_transfer.ipc.credits import ChunkCredits
from kv_transfer.ipc.messages import KINDS, Begin, Credit, Landed
from kv_transfer.messages import Inner, decode, encode, pack
from kv_transfer.scattering import send_pieces

if TYPE_CHECKING:
    from kv_transfer.device.base import Event, Mover, SharingDevice
    from kv_transfer.device.staging import Staging
    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion, WriteFence
    from kv_transfer.messages import Chunk, Message
    from kv_transfer.transport.base import Wire


@dataclass(frozen=True, slots=True)
class Kv:
    """One end's cache and its slots: those it sends from, or its ring."""

    region: KvRegion
    staging: Staging


@dataclass(frozen=True, slots=True)
class PeerRing:
    """A target's ring as its source sees it."""

    address: int
    slots: int
    slot_bytes: int
    # Of the fence: the link's number at the target.
    link: int


class Owner(Protocol):
    """What the channels of a process have in common."""

    device: SharingDevice
    # How long a peer may take for its next word, or a slot to become free.
    op_timeout_s: float

    def try_slot(self) -> int | None:
        """A slot of the ring, or None where all are taken."""
        ...

    def quarantine(self, slots: set[int], fence: WriteFence) -> None:
        """These were granted over a link that is down."""
        ...

    def leave(self, ring: PeerRing, *, is_stuck: bool) -> None:
        """A source's channel is closed. `is_stuck`: a copy may still write into the ring, so it
        stays mapped and its fence closed."""
        ...


class IpcSource:
    """The sending end."""

    name = "cuda_ipc"
    unwaited_bytes = 0
    makes_digests = False

    def __init__(self, owner: Owner, kv: Kv, ring: PeerRing, fence: WriteFence, wire: Wire) -> None:
        self._owner = owner
        self._region = kv.region
        self._staging = kv.staging
        self._ring = ring
        self._fence = fence
        self._wire = wire
        self._changed = threading.Condition()
        self._credits: deque[int] = deque()
        self._is_stuck = False
        self._is_closed = False

    def told(self, body: bytes) -> None:
        """See Talks."""
        message = decode(body, KINDS)
        if not isinstance(message, Credit) or not message.slot < self._ring.slots:
            raise ProtocolError(f"a {message.kind} message has no place here")
        with self._changed:
            self._credits.append(message.slot)
            self._changed.notify_all()

    def push(
        self,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        """See SourceChannel."""
        region = self._region
        if part is not None:
            region = region.narrowed(part.source_start, part.size)
        if not region.geometry.has_blocks(source_ids):
            raise KvTransferError("a block id is outside its KV cache")
        mover, units = self._owner.device.mover(region), units_of(region, chunk, source_ids, skip)
        slot_bytes = min(self._ring.slot_bytes, self._staging.limits.slot_bytes)
        runs = list(parts(units.count, units.size_bytes, slot_bytes))
        self._write(chunk, Inner(pack(Begin(len(runs)))))
        gathered: deque[tuple[int, Event, int]] = deque()
        try:
            for run in runs:
                slot = self._staging.try_acquire()
                while slot is None and gathered:
                    self._copy(*gathered.popleft())
                    slot = self._staging.try_acquire()
                if slot is None:
                    slot = self._acquire()
                size = (run.stop - run.start) * units.size_bytes
                gathered.append((slot, self._gather(mover, units, run, slot), size))
                while len(gathered) > 1:
                    self._copy(*gathered.popleft())
            while gathered:
                self._copy(*gathered.popleft())
        finally:
            for slot, event, _ in gathered:
                self._settle(slot, event)

    def close(self) -> None:
        """See SourceChannel."""
        if not self._is_closed:
            self._is_closed = True
            self._owner.leave(self._ring, is_stuck=self._is_stuck)

    def _acquire(self) -> int:
        return self._staging.acquire(self._owner.op_timeout_s, self._wire.is_down)

    def _gather(self, mover: Mover, units: Units, run: slice, slot: int) -> Event:
        try:
            return units.gather(mover, run, self._staging.address(slot))
        except KvTransferError:
            self._staging.release(slot)
            raise

    def _settle(self, slot: int, event: Event) -> None:
        """What was gathered and is not sent gives its slot back when it is at rest."""
        try:
            wait_for(self._owner.device, event)
        except KvTransferError:
            self._staging.lose(slot)
        else:
            self._staging.release(slot)

    def _copy(self, slot: int, gathered: Event, size_bytes: int) -> None:
        device, ring = self._owner.device, self._ring
        try:
            wait_for(device, gathered)
            to = self._credit()
        except BaseException:
            self._settle(slot, gathered)
            raise
        if not self._fence.enter():
            self._staging.release(slot)
            raise LinkClosed("the target has taken its ring back")
        try:
            address = ring.address + to * ring.slot_bytes
            wait_for(device, device.copy(address, self._staging.address(slot), size_bytes))
        except KvTransferError:
            # The fence stays closed: nobody knows whether the copy still writes.
            self._is_stuck = True
            self._staging.lose(slot)
            raise
        self._fence.leave()
        self._staging.release(slot)
        self._write(Inner(pack(Landed(to, size_bytes))))

    def _write(self, *messages: Message) -> None:
        # On the socket itself: what `send` is given goes when the push is over.
        send_pieces(self._wire.sock, [memoryview(encode(message)) for message in messages])

    def _credit(self) -> int:
        end = time.monotonic() + self._owner.op_timeout_s
        with self._changed:
            while not self._credits:
                if self._wire.is_down():
                    raise LinkClosed("the link went down inside a chunk")
                if time.monotonic() >= end:
                    raise KvTransferError("the target granted no slot in time")
                self._changed.wait(LOOK_S)
            return self._credits.popleft()


class IpcTarget:
    """The receiving end."""

    name = "cuda_ipc"

    def __init__(self, owner: Owner, kv: Kv, fence: WriteFence, wire: Wire) -> None:
        self._owner = owner
        self._region = kv.region
        self._staging = kv.staging
        self._fence = fence
        self._wire = wire
        self._scattering: Event | None = None

    def told(self, body: bytes) -> None:
        """See Talks: a source says nothing outside of its chunks."""
        raise ProtocolError(f"a {decode(body, KINDS).kind} message outside of a chunk")

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        """See TargetChannel."""
        region = self._region
        if part is not None:
            region = region.narrowed(part.target_start, part.size)
        mover, units = self._owner.device.mover(region), units_of(region, chunk, block_ids)
        begin = self._read()
        if not isinstance(begin, Begin):
            raise ProtocolError(f"a {begin.kind} message where a chunk begins")
        slots = ChunkCredits(units.count, begin.parts)
        try:
            while not slots.is_whole:
                self._grant(slots)
                landed = self._read()
                if not isinstance(landed, Landed):
                    raise ProtocolError(f"a {landed.kind} message inside a chunk")
                count, rest = divmod(landed.size_bytes, units.size_bytes)
                if rest or landed.size_bytes > self._staging.limits.slot_bytes:
                    raise ProtocolError(f"{landed.size_bytes} bytes lie in a slot")
                run = slots.landed(landed.slot, count)
                self._scatter(mover, None if block_ids is None else units, run, landed.slot)
        finally:
            self._owner.quarantine(slots.granted, self._fence)

    def idle(self) -> bool:
        """See TargetChannel."""
        event = self._scattering
        try:
            return event is None or self._owner.device.query(event)
        except KvTransferError:
            return False

    def close(self) -> None:
        """See TargetChannel."""

    def _read(self) -> Message:
        if not self._wire.can_read(self._owner.op_timeout_s):
            raise KvTransferError("the source stopped inside a chunk")
        message = self._wire.read()
        if not isinstance(message, Inner):
            raise ProtocolError(f"a {message.kind} message inside a chunk")
        return decode(message.body, KINDS)

    def _grant(self, slots: ChunkCredits) -> None:
        """All that the chunk wants now; waits for a slot only while it has none."""
        end = time.monotonic() + self._owner.op_timeout_s
        while slots.wants_slot:
            slot = self._owner.try_slot()
            if slot is not None:
                slots.grant(slot)
                self._wire.post(Inner(pack(Credit(slot))))
            elif slots.granted:
                return
            elif self._wire.is_down():
                raise LinkClosed("the link went down inside a chunk")
            elif time.monotonic() >= end:
                raise KvTransferError("no slot of the ring became free in time")
            else:
                time.sleep(LOOK_S / 10)

    def _scatter(self, mover: Mover, units: Units | None, run: slice, slot: int) -> None:
        at_rest = True
        try:
            if units is not None:
                event = units.scatter(mover, run, self._staging.address(slot))
                self._scattering, at_rest = event, False
                wait_for(self._owner.device, event)
                self._scattering, at_rest = None, True
        finally:
            (self._staging.release if at_rest else self._staging.lose)(slot)
