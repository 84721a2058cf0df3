"""The two ends of a link over NCCL."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_transfer.cache.host_memory import EndedCopy
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.link import ConsumerChannel, ProducerChannel
from kv_transfer.protocol.messages import Inner, KvMessage, decode, pack
from kv_transfer.transport.nccl.messages import KINDS, Clear, Ended, Offer
from kv_transfer.transport.nccl.staging import POLL_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set
    from contextlib import AbstractContextManager

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.gpu_memory import DeviceRegion
    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.transport.nccl.binding import Nccl
    from kv_transfer.transport.nccl.communicators import Communicator
    from kv_transfer.transport.nccl.limits import Limits
    from kv_transfer.transport.nccl.staging import Gpu, Staging, StagingSlot


@dataclass(frozen=True, slots=True)
class Resources:
    """What an end of a link shares with the other links of its direction, and what the two ends
    agreed on. `direct`: the groups whose blocks are sent without staging, `direct_run` of them with
    one offer."""

    nccl: Nccl
    gpu: Gpu
    limits: Limits
    staging: Staging
    regions: Mapping[int, DeviceRegion]
    slot_bytes: int
    direct: Set[int]
    direct_run: int


class _LinkEnd:
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

    def close(self) -> None:
        with self.communicator.in_use:
            self.communicator.close()

    def _slot(self) -> AbstractContextManager[StagingSlot]:
        self.communicator.enter()  # may wait, and must hold no slot then
        return self._staging.slot(self._limits.op_s, self.communicator.check)


class NcclProducer(_LinkEnd, ProducerChannel):
    """The sending end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._answers: list[KvMessage] = []
        self._answered = threading.Condition()

    def open(self) -> None:
        with self.communicator.in_use, self._slot() as slot:
            self._send_run(slot, 1, [_MoveBatch([], 0, [(slot.address, 1)])], None)

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> None:
        whole = self._regions[part.group]
        region = whole.narrowed(part.source_layers, part.source_start, part.size)
        is_direct = part.group in self._direct and region is whole
        block_bytes = region.geometry.block_bytes
        self._link.write(chunk)
        run = self._direct_run if is_direct else self._slot_bytes // block_bytes
        with self.communicator.in_use:
            for ids in _runs(block_ids, run):
                with self._slot() as slot:
                    cache = region if is_direct else None
                    parts = _batches(
                        slot, ids, block_bytes, cache, self._limits, is_direct=is_direct
                    )
                    size = len(ids) * block_bytes
                    gathered = None if is_direct else region
                    self._send_run(slot, size, parts, gathered, is_direct=is_direct)

    def _send_run(
        self,
        slot: StagingSlot,
        size: int,
        parts: list[_MoveBatch],
        gathered: DeviceRegion | None,
        *,
        is_direct: bool = False,
    ) -> None:
        """Send the bytes of one slot. `gathered` is the cache to copy into the slot first."""
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
                    self.communicator.post(slot, part.moves)
                self.communicator.wait_until_moved(slot, size)
        except BaseException as error:
            self.communicator.fail(slot, error)
            raise

    def on_inner(self, body: bytes) -> None:
        """Handle a message of the consumer, on the link's reader thread."""
        message = decode(body, KINDS)
        with self._answered:
            self._answers.append(message)
            self._answered.notify()
        if isinstance(message, Ended) and self.communicator.in_use.acquire(blocking=False):
            try:  # idle: no thread waits for an answer
                if message.number == self.communicator.number:
                    self.communicator.abort()
                with self._answered:
                    self._answers.clear()
            finally:
                self.communicator.in_use.release()

    def _agree(self, slot: StagingSlot, size: int, *, is_direct: bool) -> None:
        """Offer the bytes until the consumer has posted the receive."""
        communicator = self.communicator
        while True:
            communicator.enter()
            unique_id = b""
            if not communicator.is_open:
                unique_id = self._nccl.unique_id()
                communicator.number += 1
            offer = Offer(communicator.number, size, unique_id, is_direct)
            self._link.write(Inner(pack(offer)))
            if unique_id:
                # Before it joins, the consumer may wait for a slot and for room, up to `op_s`.
                timeout_s = self._limits.op_s + self._limits.init_s
                communicator.join(communicator.number, unique_id, slot, timeout_s)
            if self._is_cleared():
                return
            # The consumer freed its idle end before it read the offer: offer a new communicator.
            communicator.abort()

    def _is_cleared(self) -> bool:
        """Wait for the consumer's answer. Return False if the consumer has freed its end. Raises
        KvTransferError."""
        end = time.monotonic() + self._limits.op_s
        with self._answered:
            while True:
                while self._answers:
                    answer = self._answers.pop(0)
                    number: int = getattr(answer, "number", 0)
                    if number == self.communicator.number and isinstance(answer, Clear | Ended):
                        return isinstance(answer, Clear)
                self.communicator.check()
                if time.monotonic() >= end:
                    raise KvTransferError(
                        f"the consumer posted nothing for {self._limits.op_s:g} s"
                    )
                self.communicator.is_taken()
                self._answered.wait(0.02)


class NcclConsumer(_LinkEnd, ConsumerChannel):
    """The receiving end. Only receives posted here write to the KV cache."""

    def receive(
        self, chunk: ChunkReady, block_ids: list[int] | None, part: PagePart | None
    ) -> BlockCopy:
        region = None
        if part is not None:
            whole = self._regions[part.group]
            region = whole.narrowed(part.target_layers, part.target_start, part.size)
        is_direct = bool(self._direct) if part is None else part.group in self._direct
        block_bytes = chunk.size // max(1, chunk.count)
        with self.communicator.in_use:
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
        if block_ids is None or region is None:
            return EndedCopy(b"")
        return region.begin_digests(block_ids)

    def on_inner(self, body: bytes) -> None:
        """Handle a message of the producer outside of a chunk, on the link's reader thread."""
        message = decode(body, KINDS)
        with self.communicator.in_use:
            if isinstance(message, Offer):
                self._take(message, message.size_bytes, None, None)
            elif not isinstance(message, Ended):
                raise ProtocolError(f"a {type(message).__name__} message outside of a chunk")
            elif message.number == self.communicator.number:
                self.communicator.abort()

    def _take(
        self,
        offer: Offer,
        block_bytes: int,
        region: DeviceRegion | None,
        block_ids: list[int] | None,
    ) -> bool:
        """Receive the offered bytes; without a region, discard them. Return False if the offer's
        communicator is gone: the producer then offers a new one."""
        communicator = self.communicator
        is_fit = region is None or region.geometry.block_bytes == block_bytes
        most = self._direct_run * block_bytes if offer.is_direct else self._slot_bytes
        if not 0 < offer.size_bytes <= most or not is_fit:
            raise ProtocolError(f"cannot receive {offer}")
        if not offer.unique_id and (
            not communicator.is_open or offer.number != communicator.number
        ):
            return False
        cache = region if offer.is_direct else None
        ids = list(range(offer.size_bytes // block_bytes)) if block_ids is None else block_ids
        with self._slot() as slot:
            try:
                if offer.unique_id:
                    communicator.abort()
                communicator.enter()
                if offer.unique_id:
                    communicator.join(offer.number, offer.unique_id, slot, self._limits.init_s)
                parts = _batches(
                    slot, ids, block_bytes, cache, self._limits, is_direct=offer.is_direct
                )
                with self._gpu.on(slot.stream):
                    for n, part in enumerate(parts):
                        communicator.post(slot, part.moves, None if n else self._clear)
                        if region is not None and not offer.is_direct:
                            self._gpu.wait(slot.copies, self._gpu.record(slot.stream))
                            with self._gpu.on(slot.copies):
                                region.scatter(part.ids, slot.memory[part.start :])
                    communicator.wait_until_moved(slot, offer.size_bytes)
                    scattered = self._gpu.record(slot.copies)
                # No deadline, because the blocks are reused when this returns.
                while not self._gpu.has_fired(scattered):
                    time.sleep(POLL_S)
            except BaseException as error:
                communicator.fail(slot, error)
                raise
        return True

    def _clear(self) -> None:
        self._link.post(Inner(pack(Clear(self.communicator.number))))

    def _read_offer(self) -> Offer:
        while not isinstance(message := self._read(), Offer):
            if not isinstance(message, Ended):
                raise ProtocolError(f"a {type(message).__name__} message where an offer was due")
        return message

    def _read(self) -> KvMessage:
        message = self._link.read()
        if not isinstance(message, Inner):
            raise ProtocolError(f"a {type(message).__name__} message inside a chunk")
        return decode(message.body, KINDS)


@dataclass(frozen=True, slots=True)
class _MoveBatch:
    """Blocks that are posted together. `start` is their offset in the slot, `moves` has (address,
    bytes) of each operation."""

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
    from or to the cache if given, else to the slot. These bytes are discarded: they may be more
    than the slot holds."""
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


def _runs(ids: list[int], step: int) -> Iterator[list[int]]:
    return (ids[n : n + step] for n in range(0, len(ids), step))
