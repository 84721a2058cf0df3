"""The receiving side of transfers: a state machine without I/O that returns messages to send.

    RECEIVING --TransferDone from every producer rank, digests match--> Received
        |-- TransferDone, a digest does not match --> Nack, once
        `-- Fail, Cancel, timeout, second mismatch, link down --> ReceiveFailed

Only this worker writes into its blocks: the reader thread of a link writes a chunk between
`begin_chunk` and `end_chunk`. Several chunks may be in progress; they end in order. If a transfer
fails during such a write, the failure is reported when the write has ended, because the engine
reuses the blocks then. Other failures are reported at once.
Later chunks of a failed transfer are discarded.

If the producer has more tensor-parallel ranks than the consumer, a transfer has several parts. Each
part comes from another producer rank over its own link and fills other heads of the same blocks.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from kv_transfer.cache.host_memory import DIGEST_BYTES, checked_blocks
from kv_transfer.errors import ProtocolError
from kv_transfer.protocol.messages import (
    Ack,
    Cancel,
    ChunkReady,
    Fail,
    Heartbeat,
    KvMessage,
    LinkT,
    Nack,
    Send,
    Subscribe,
    TransferDone,
)
from pdserve.errors import InvalidRequest, TransferCorrupted, TransferFailed
from pdserve.types import TransferReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kv_transfer.cache.geometry import PagePart

logger = logging.getLogger(__name__)

_MAX_UNREAD = 1024  # under `vllm serve`, nobody reads the arrivals before the outcomes


@dataclass(frozen=True, slots=True)
class Received:
    """Outcome: the KV of a request is in place. `token_ids` follow its prompt."""

    request_id: str
    token_ids: tuple[int, ...]
    report: TransferReport


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """Outcome: the transfer failed. `code` is an error code of pdserve.errors."""

    request_id: str
    reason: str
    code: str = TransferFailed.code


@dataclass(frozen=True, slots=True)
class Place:
    """Destination of a chunk: these blocks, and this part of each page. `checked`: positions of the
    blocks that need digests; None: all."""

    block_ids: list[int]
    part: PagePart
    checked: range | None = None


@dataclass(slots=True, eq=False)
class ReceivePart(Generic[LinkT]):
    """The part of a transfer that one producer rank sends. `page_parts` has one entry for each
    group of the subscription."""

    link: LinkT
    subscription: Subscribe
    page_parts: Sequence[PagePart]
    began_at: float
    progress_at: float
    begun_blocks: int = 0
    received_blocks: int = 0
    received_bytes: int = 0
    receive_s: float = 0.0
    last_receive_s: float = 0.0
    digests: bytearray = field(default_factory=bytearray)  # of received blocks
    was_nacked: bool = False
    writing: int = 0  # chunks in progress
    is_done: bool = False

    @property
    def transfer_id(self) -> str:
        return self.subscription.transfer_id


@dataclass(slots=True)
class ReceiveTransfer(Generic[LinkT]):
    request_id: str
    parts: list[ReceivePart[LinkT]]
    token_ids: tuple[int, ...] = ()
    report: TransferReport | None = None
    failure: ReceiveFailed | None = None

    @property
    def state(self) -> str:
        return "receiving" if self.failure is None else "failing"


@dataclass(slots=True)
class Consumer(Generic[LinkT]):
    """All transfers that a worker receives. The caller holds one lock around each call."""

    receive_timeout_s: float
    digest_one_in: int = 1
    timeouts: int = 0
    digest_mismatches: int = 0
    _transfers: dict[str, ReceiveTransfer[LinkT]] = field(default_factory=dict)
    _outcomes: list[Received | ReceiveFailed] = field(default_factory=list)
    _received: deque[Received] = field(default_factory=lambda: deque(maxlen=_MAX_UNREAD))

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[tuple[ReceiveTransfer[LinkT], ReceivePart[LinkT]]]:
        for transfer in self._transfers.values():
            for part in transfer.parts:
                yield transfer, part

    @property
    def has_outcomes(self) -> bool:
        return bool(self._outcomes)

    def take_outcomes(self) -> list[Received | ReceiveFailed]:
        """Return the outcomes since the last call, each once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_received(self) -> list[Received]:
        """Return the successes since the last call. Each is among the outcomes, too."""
        received = list(self._received)
        self._received.clear()
        return received

    # -- from the engine

    def subscribe(
        self,
        request_id: str,
        subscriptions: Sequence[tuple[LinkT, Subscribe, Sequence[PagePart]]],
        now: float,
    ) -> list[Send[LinkT]]:
        """Start a transfer into reserved blocks, with one subscription per producer rank.

        If the transfer id is in use, this request fails and the other one continues.
        """
        transfer_id = subscriptions[0][1].transfer_id
        if transfer_id in self._transfers:
            self.refuse(request_id, f"transfer id {transfer_id} is in use", TransferFailed.code)
            return []
        self._transfers[transfer_id] = ReceiveTransfer(
            request_id,
            [
                ReceivePart(link, subscription, parts, now, now)
                for link, subscription, parts in subscriptions
            ],
        )
        return [Send(link, subscription) for link, subscription, _ in subscriptions]

    def refuse(self, request_id: str, reason: str, code: str = InvalidRequest.code) -> None:
        """Fail a request whose transfer was not started."""
        self._outcomes.append(ReceiveFailed(request_id, reason, code))

    def cancel(self, transfer_id: str, reason: str) -> list[Send[LinkT]]:
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else self._fail(transfer, reason)

    # -- from the producer

    def on_message(
        self, link: LinkT, message: KvMessage, now: float, transport: str, *, is_pull: bool
    ) -> list[Send[LinkT]]:
        """Handle a producer's message other than ChunkReady. Raises ProtocolError if a producer may
        not send it."""
        match message:
            case TransferDone():
                return self.done(link, message, transport, is_pull=is_pull)
            case Fail(transfer_id, reason):
                return self.fail(link, transfer_id, reason)
            case Heartbeat(transfer_id):
                self.heartbeat(link, transfer_id, now)
                return []
        raise ProtocolError(f"unexpected {type(message).__name__} from a producer")

    def begin_chunk(self, link: LinkT, chunk: ChunkReady) -> Place | None:
        """Return where to write the chunk, or None to discard it.

        A producer starts again at an earlier block after a preemption or a Nack. Raises
        ProtocolError if the chunk starts after the expected block.
        """
        transfer, part = self._find(link, chunk.transfer_id)
        if transfer is None or part is None or transfer.failure is not None or part.is_done:
            return None
        block_ids: list[int] = []
        if chunk.first < part.subscription.num_blocks:
            place, start = part.subscription.locate(chunk.first)
            block_ids = part.subscription.groups[place].block_ids[start : start + chunk.count]
        is_valid = chunk.count and len(block_ids) == chunk.count
        if not is_valid or chunk.first > part.begun_blocks:
            end = chunk.first + chunk.count
            raise ProtocolError(
                f"chunk of blocks {chunk.first}-{end - 1}, expected block {part.begun_blocks}"
            )
        part.begun_blocks = chunk.first + chunk.count
        part.writing += 1
        at = part.subscription.groups[place].first_block + start
        checked = checked_blocks(at, chunk.count, self.digest_one_in)
        return Place(block_ids, part.page_parts[place], checked)

    def end_chunk(
        self, link: LinkT, chunk: ChunkReady, now: float, seconds: float, digests: bytes
    ) -> list[Send[LinkT]]:
        """Record that the chunk was written. `digests`: of the bytes read."""
        transfer, part = self._find(link, chunk.transfer_id)
        if transfer is None or part is None or not part.writing:
            return []
        part.writing -= 1
        part.progress_at = now
        part.receive_s += seconds
        part.last_receive_s = seconds
        if transfer.failure is not None:
            return self._fail(transfer, transfer.failure.reason)
        del part.digests[DIGEST_BYTES * chunk.first :]
        part.digests += digests
        part.received_blocks = chunk.first + chunk.count
        part.received_bytes += chunk.size
        return []

    def abort_chunk(self, link: LinkT, chunk: ChunkReady, reason: str) -> list[Send[LinkT]]:
        """Record that writing the chunk failed."""
        transfer, part = self._find(link, chunk.transfer_id)
        if transfer is None or part is None:
            return []
        part.writing -= 1
        return self._fail(transfer, reason)

    def heartbeat(self, link: LinkT, transfer_id: str, now: float) -> None:
        _, part = self._find(link, transfer_id)
        if part is not None:
            part.progress_at = now

    def done(
        self, link: LinkT, done: TransferDone, transport: str, *, is_pull: bool
    ) -> list[Send[LinkT]]:
        """Record that a producer rank has sent everything, and compare the digests.

        If this worker copies from the producer's memory (`is_pull`), the producer does not know the
        duration of the last chunk.
        """
        transfer, part = self._find(link, done.transfer_id)
        if transfer is None or part is None or transfer.failure is not None:
            return []
        missing = part.subscription.num_blocks - part.received_blocks
        if missing:
            return self._fail(transfer, f"{missing} blocks are missing at the end", but=link)
        if not done.token_ids:
            return self._fail(transfer, "the producer sampled no token", but=link)
        if transfer.token_ids not in ((), tuple(done.token_ids)):
            return self._fail(transfer, "the producer's ranks sampled different tokens", but=link)
        # Compare the blocks that both workers digested, because their settings may differ.
        one_in = math.lcm(self.digest_one_in, 1 + done.undigested)
        if damaged := _differing(part.subscription, part.digests, done.digests, one_in):
            return self._repeat(transfer, part, damaged)
        part.is_done = True
        report = TransferReport(
            max(done.transfer_s, part.receive_s),
            done.exposed_s + (part.last_receive_s if is_pull else 0.0),
            part.received_bytes,
            part.received_blocks,
            transport,
            int(part.was_nacked),
        )
        transfer.token_ids = tuple(done.token_ids)
        transfer.report = report if transfer.report is None else transfer.report.merged_with(report)
        if all(each.is_done for each in transfer.parts):
            del self._transfers[done.transfer_id]
            outcome = Received(transfer.request_id, transfer.token_ids, transfer.report)
            self._outcomes.append(outcome)
            self._received.append(outcome)
        return [Send(link, Ack(done.transfer_id))]

    def fail(self, link: LinkT, transfer_id: str, reason: str) -> list[Send[LinkT]]:
        transfer, part = self._find(link, transfer_id)
        if transfer is None or part is None:
            return []
        return self._fail(transfer, reason, but=link)

    def link_down(self, link: LinkT, reason: str) -> list[Send[LinkT]]:
        sends: list[Send[LinkT]] = []
        for transfer in list(self._transfers.values()):
            if any(part.link is link and not part.is_done for part in transfer.parts):
                sends += self._fail(transfer, reason, but=link)
        return sends

    # -- from the clock

    def tick(self, now: float) -> list[Send[LinkT]]:
        """Fail transfers without progress."""
        sends: list[Send[LinkT]] = []
        for transfer in list(self._transfers.values()):
            if transfer.failure is not None:
                sends += self._fail(transfer, transfer.failure.reason)
            elif any(
                not part.is_done and now - part.progress_at >= self.receive_timeout_s
                for part in transfer.parts
            ):
                self.timeouts += 1
                sends += self._fail(transfer, f"no KV received for {self.receive_timeout_s:g} s")
        return sends

    def stuck_links(self, now: float) -> set[LinkT]:
        """Return the links on which writing one chunk has taken `receive_timeout_s`, also for a
        failed transfer. Its blocks cannot be released before the link is closed."""
        return {
            part.link
            for _, part in self
            if part.writing and now - part.progress_at >= self.receive_timeout_s
        }

    # -- inside

    def _find(
        self, link: LinkT, transfer_id: str
    ) -> tuple[ReceiveTransfer[LinkT] | None, ReceivePart[LinkT] | None]:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return None, None
        return transfer, next((part for part in transfer.parts if part.link is link), None)

    def _repeat(
        self, transfer: ReceiveTransfer[LinkT], part: ReceivePart[LinkT], damaged: list[int]
    ) -> list[Send[LinkT]]:
        """Request damaged blocks once more; fail the transfer the second time."""
        self.digest_mismatches += 1
        reason = f"KV digest mismatch in blocks {damaged[0]}-{damaged[-1]}"
        if part.was_nacked:
            # Not a copy error: the producer's memory has changed since its digest.
            reason += ", also after one retry"
            return self._fail(transfer, reason, code=TransferCorrupted.code)
        logger.warning("transfer %s: %s", part.transfer_id, reason)
        part.was_nacked = True
        return [Send(part.link, Nack(part.transfer_id, damaged[0]))]

    def _fail(
        self,
        transfer: ReceiveTransfer[LinkT],
        reason: str,
        *,
        code: str = TransferFailed.code,
        but: LinkT | None = None,
    ) -> list[Send[LinkT]]:
        """Cancel the unfinished parts, except on link `but`. Report the failure when no chunk is
        being written."""
        if transfer.failure is None or code != TransferFailed.code:
            transfer.failure = ReceiveFailed(transfer.request_id, reason, code)
        sends = []
        transfer_id = transfer.parts[0].transfer_id
        for part in transfer.parts:
            if not part.is_done and part.link is not but:
                sends.append(Send(part.link, Cancel(transfer_id)))
            part.is_done = True
        if not any(part.writing for part in transfer.parts):
            del self._transfers[transfer_id]
            self._outcomes.append(transfer.failure)
        return sends


def _differing(
    subscription: Subscribe, ours: bytes | bytearray, theirs: bytes, one_in: int
) -> list[int]:
    """Return the blocks whose digests differ, among every `one_in`-th block of a sequence."""
    if ours == theirs:
        return []
    found, before, size = [], 0, DIGEST_BYTES
    for each in subscription.groups:
        count = len(each.block_ids)
        checked = checked_blocks(each.first_block, count, one_in)
        for n in range(count) if checked is None else checked:
            at = size * (before + n)
            if ours[at : at + size] != theirs[at : at + size]:
                found.append(before + n)
        before += count
    return found
