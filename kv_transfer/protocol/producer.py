"""The sending side of transfers: a state machine without I/O that returns actions (send, digest,
release).

    EXPECTED --Subscribe--> SENDING --all blocks and digests: TransferDone--> SENT --Ack--> gone
        |                      ^------------------- Nack -----------------------|
        `-- abort, Cancel, Fail, link down, end of the hold --> gone

A transfer exists once the engine expects it; a subscription may arrive earlier. The engine's blocks
are released when the transfer is acknowledged or has failed, and no copy reads them.

Blocks of layers that attend to all tokens are sent as they fill. Other blocks are sent when prefill
has ended: until then, blocks may leave their window, and a state changes with each step.

If the consumer has more tensor-parallel ranks than the producer, several of its ranks subscribe at
one producer rank, each over its own link. If one of them gives up, the transfer fails for all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from kv_transfer.cache.host_memory import DIGEST_BYTES, checked_blocks
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.messages import (
    Ack,
    Cancel,
    Fail,
    Heartbeat,
    KvMessage,
    LinkT,
    Nack,
    Send,
    Subscribe,
    TransferDone,
)
from kv_transfer.settings import MAX_IN_FLIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.protocol.plan import CopyPlan

MAX_TOMBSTONES = 4096
# Limits of subscriptions that arrive before their requests: number, and total items (block ids and
# head numbers).
MAX_EARLY = 4096
MAX_EARLY_ITEMS = 1 << 20
_DUPLICATE = "the transfer has been subscribed to before"
_GONE = "the decode worker disconnected"


@dataclass(frozen=True, slots=True, eq=False)
class SendChunk(Generic[LinkT]):
    """Action: send `part` of each page of the blocks `block_ids`, as a ChunkReady for block `first`
    of the subscription. The sender first calls `begin_copy`, which returns False if the chunk is
    obsolete."""

    link: LinkT
    transfer_id: str
    first: int
    block_ids: list[int]
    part: PagePart


@dataclass(frozen=True, slots=True)
class Release:
    """Action: the engine may free this request's blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Action: this transfer has blocks to digest. Call `undigested` until it returns None."""

    transfer_id: str


Action = Send[LinkT] | SendChunk[LinkT] | Release | DigestBlocks


@dataclass(slots=True, eq=False)
class Reader(Generic[LinkT]):
    """A consumer rank that reads a transfer. At most one of its chunks is `queued`. `copying` has
    up to MAX_IN_FLIGHT chunks, with False for a chunk that will be sent again. `parts`: byte range
    in the pages for each group of the subscription. `send_chunks`: a chunk that is sent has up to
    so many times `chunk_blocks`."""

    link: LinkT
    subscription: Subscribe
    expires_at: float  # while the engine does not know the transfer
    send_chunks: int = 1
    parts: tuple[PagePart, ...] = ()
    next_block: int = 0  # first block of the next chunk
    sent_blocks: int = 0
    sent_bytes: int = 0
    queued: SendChunk[LinkT] | None = None
    copying: dict[SendChunk[LinkT], bool] = field(default_factory=dict)
    was_nacked: bool = False
    is_done: bool = False
    spoke_at: float = 0.0
    transfer_s: float = 0.0

    def rewind(self, block: int) -> None:
        """Send `block` and all later blocks again."""
        self.next_block = self.sent_blocks = block
        self.queued = None
        self.copying = dict.fromkeys(self.copying, False)
        self.is_done = False


@dataclass(slots=True)
class Digests:
    """Digests of one part of the pages of a group's blocks, from block `first` on. Blocks before
    `begun` are digested or in progress."""

    first: int
    made: bytes = b""
    begun: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.made) // DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Undigested(Generic[LinkT]):
    """Blocks that need digests: `block_ids` at the positions `checked`; None: all. `first`:
    position of the first block in the sequence."""

    transfer: SendTransfer[LinkT]
    generation: int
    part: PagePart
    first: int
    block_ids: list[int]
    checked: range | None = None


@dataclass(slots=True)
class SendTransfer(Generic[LinkT]):
    """One transfer. `tables` are the engine's block tables. `generation` counts preemptions, so
    that digests from before a preemption are dropped."""

    transfer_id: str
    request_id: str
    began_at: float
    tables: Sequence[list[int]] = ()
    ready_tokens: int = 0
    generation: int = 0
    digests: dict[PagePart, Digests] = field(default_factory=dict)
    readers: list[Reader[LinkT]] = field(default_factory=list)
    num_readers: int = 0  # from the first subscription; 0 before it
    acknowledged: int = 0
    ended_at: float | None = None
    token_ids: tuple[int, ...] = ()
    is_held: bool = False  # the engine waits for our Release
    hold_end: float | None = None
    is_closed: bool = False  # failed or acknowledged; kept while the engine or a copy needs it

    @property
    def state(self) -> str:
        """State of the slowest reader."""
        if self.is_closed:
            return "closed"
        if not self.num_readers:
            return "expected"
        is_complete = len(self.readers) + self.acknowledged == self.num_readers
        return "sent" if is_complete and all(r.is_done for r in self.readers) else "sending"

    def reader(self, link: LinkT) -> Reader[LinkT] | None:
        return next((reader for reader in self.readers if reader.link is link), None)


class Producer(Generic[LinkT]):
    """All transfers that a worker sends. The caller holds one lock around each call."""

    def __init__(
        self,
        *,
        plan: CopyPlan,
        chunk_blocks: Mapping[int, int],
        hold_s: float,
        heartbeat_s: float,
        digest_one_in: int = 1,
    ) -> None:
        """`chunk_blocks`: for each group held here, the blocks that are digested together.
        `digest_one_in`: digest every N-th block of a sequence."""
        self._plan = plan
        self.chunk_blocks = chunk_blocks
        self._hold_s = hold_s
        self._heartbeat_s = heartbeat_s
        self._digest_one_in = digest_one_in
        self._transfers: dict[str, SendTransfer[LinkT]] = {}
        self._early: dict[str, list[Reader[LinkT]]] = {}
        self._early_items = 0
        # Transfer id -> reason, for ended transfers that may still get a subscription.
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self.expired_holds = 0
        self.refused_subscriptions = 0

    def __len__(self) -> int:
        return len(self._transfers) + len(self._early)

    def __iter__(self) -> Iterator[SendTransfer[LinkT]]:
        return iter(self._transfers.values())

    def early(self) -> Iterator[Reader[LinkT]]:
        """Iterate over subscriptions whose transfers the engine does not expect yet."""
        for readers in self._early.values():
            yield from readers

    # -- from the engine

    def expect(self, transfer_id: str, request_id: str, now: float) -> list[Action[LinkT]]:
        """Record that the engine has accepted a request. If the transfer id is in use, both
        requests fail, because their KV could be confused."""
        used = self._transfers.get(transfer_id)
        if used is not None:
            return self._close(used, f"transfer id {transfer_id} was used twice")
        transfer = SendTransfer[LinkT](transfer_id, request_id, now)
        transfer.is_closed = transfer_id in self._tombstones
        self._transfers[transfer_id] = transfer
        actions: list[Action[LinkT]] = []
        for early in self._take_early(transfer_id):
            actions += self.subscribe(early.link, early.subscription, now, early.send_chunks)
        return actions

    def progress(
        self, transfer_id: str, tables: Sequence[list[int]], ready_tokens: int, now: float
    ) -> list[Action[LinkT]]:
        """Record that a step has computed the KV of the request's first `ready_tokens`, in the
        blocks of the engine's block `tables`."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return []
        groups = [shard.group for shard in self._plan.shards]
        held = min(len(tables[group.table]) * group.block_size for group in groups)
        transfer.tables, transfer.ready_tokens = tables, min(ready_tokens, held)
        return [*self._pump(transfer, now), *self._digest(transfer_id)]

    def end(
        self,
        transfer_id: str,
        token_ids: tuple[int, ...],
        now: float,
        *,
        held: bool,
        request_id: str = "",
    ) -> list[Action[LinkT]]:
        """Record that the engine's request ended. `held`: the engine keeps its blocks until our
        Release."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or request_id not in ("", transfer.request_id):
            return [Release(request_id)] if held and request_id else []
        if transfer.ended_at is not None:
            return []
        transfer.ended_at, transfer.token_ids, transfer.is_held = now, token_ids, held
        if not held or transfer.is_closed:
            return self._close(transfer, "the prefill was aborted")
        transfer.hold_end = now + self._hold_s
        return [*self._pump(transfer, now), *self._digest(transfer_id)]

    def _digest(self, transfer_id: str) -> list[Action[LinkT]]:
        """Return an action only if there is something to digest, because it wakes a thread."""
        return [DigestBlocks(transfer_id)] if self.undigested(transfer_id) is not None else []

    def undigested(self, transfer_id: str) -> Undigested[LinkT] | None:
        """Return at most one chunk of final blocks without digests, or None. Use whole pages until
        a consumer has subscribed."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.is_closed:
            return None
        for part, start in self._wanted_digests(transfer):
            group = self._plan.shards[part.group].group
            stop = group.needed(transfer.ready_tokens).stop
            if transfer.ended_at is None:
                stop = transfer.ready_tokens // group.block_size if group.is_streamed else 0
            digests = transfer.digests.setdefault(part, Digests(start))
            first = max(digests.end, digests.begun)
            if first < stop:
                stop = min(stop, first + self.chunk_blocks[part.group])
                block_ids = transfer.tables[group.table][first:stop]
                checked = checked_blocks(first, len(block_ids), self._digest_one_in)
                return Undigested(transfer, transfer.generation, part, first, block_ids, checked)
        return None

    def begin_digests(self, of: Undigested[LinkT]) -> None:
        """Record that these digests are being computed, so that `undigested` returns later
        blocks."""
        made = of.transfer.digests.get(of.part)
        if made is not None and of.generation == of.transfer.generation:
            made.begun = of.first + len(of.block_ids)

    def _wanted_digests(self, transfer: SendTransfer[LinkT]) -> list[tuple[PagePart, int]]:
        """Return the page parts that need digests, each with its first block."""
        if transfer.num_readers:
            return [
                (part, blocks.first_block)
                for reader in transfer.readers
                for part, blocks in zip(reader.parts, reader.subscription.groups, strict=True)
            ]
        has_ended, ready = transfer.ended_at is not None, transfer.ready_tokens
        groups = {n: self._plan.shards[n].group for n in self._plan.held}
        return [
            (self._plan.whole(n), group.needed(ready).start)
            for n, group in groups.items()
            if ready and (has_ended or group.is_streamed)
        ]

    def digested(self, of: Undigested[LinkT], digests: bytes, now: float) -> list[Action[LinkT]]:
        """Record computed digests; empty `digests` mean that they could not be computed."""
        if not digests:
            return self._close(of.transfer, "the digests cannot be made")
        made = of.transfer.digests.get(of.part)
        if made is None or of.generation != of.transfer.generation or made.end != of.first:
            return []
        made.made += digests
        return self._pump(of.transfer, now)

    def preempt(self, transfer_id: str) -> None:
        """Record that the engine has taken the request's blocks and will compute them again. The
        caller must wait until `copying` is empty before the blocks are written."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.ready_tokens = 0
            transfer.generation += 1
            transfer.digests.clear()
            for reader in transfer.readers:
                reader.rewind(0)

    def copying(self, transfer_id: str) -> list[LinkT]:
        """Return the links over which the transfer's blocks are being copied."""
        transfer = self._transfers.get(transfer_id)
        readers = [] if transfer is None else transfer.readers
        return [reader.link for reader in readers if reader.copying]

    def release(self, transfer_id: str) -> list[Action[LinkT]]:
        """Close the transfer of an ended request, to release its blocks."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.ended_at is None:
            return []
        return self._close(transfer, "the request was cancelled")

    # -- from the consumer

    def on_message(
        self, link: LinkT, message: KvMessage, now: float, send_chunks: int = 1
    ) -> list[Action[LinkT]]:
        """Handle a consumer's message. `send_chunks`: see Reader. Raises ProtocolError if a
        consumer may not send it."""
        match message:
            case Subscribe():
                return self.subscribe(link, message, now, send_chunks)
            case Nack(transfer_id, first):
                return self.nack(link, transfer_id, first, now)
            case Cancel(transfer_id):
                return self.cancel(link, transfer_id)
            case Ack(transfer_id):
                return self.ack(link, transfer_id)
        raise ProtocolError(f"unexpected {type(message).__name__} from a consumer")

    def subscribe(
        self, link: LinkT, subscription: Subscribe, now: float, send_chunks: int = 1
    ) -> list[Action[LinkT]]:
        """Record a consumer rank's subscription, perhaps before the engine expects the
        transfer."""
        transfer_id = subscription.transfer_id
        if transfer_id in self._tombstones:
            return self._refuse(link, transfer_id, self._tombstones[transfer_id])
        reader = Reader(link, subscription, now + self._hold_s, send_chunks, spoke_at=now)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            early = self._early.get(transfer_id, [])
            if any(each.link is link for each in early) or (
                early and len(early) >= early[0].subscription.readers
            ):
                return self._refuse(link, transfer_id, _DUPLICATE)
            items = self._early_items + subscription.num_items
            if len(self._early) >= MAX_EARLY or items > MAX_EARLY_ITEMS:
                return self._refuse(link, transfer_id, "too many transfers are unknown here")
            self._early_items = items
            self._early.setdefault(transfer_id, []).append(reader)
            return []
        is_full = len(transfer.readers) + transfer.acknowledged >= transfer.num_readers > 0
        if transfer.is_closed or is_full or transfer.reader(link) is not None:
            return self._refuse(link, transfer_id, _DUPLICATE)
        transfer.num_readers = transfer.num_readers or subscription.readers
        transfer.readers.append(reader)
        try:
            self._check(transfer, subscription)
            parts = [self._plan.part_of(g.group, g.heads, g.layers) for g in subscription.groups]
        except KvTransferError as error:
            self.refused_subscriptions += 1
            return self._close(transfer, str(error))
        # So equal parts of different consumers share digests.
        reader.parts = tuple(part.at_source() for part in parts)
        return [*self._pump(transfer, now), *self._digest(transfer_id)]

    def nack(self, link: LinkT, transfer_id: str, first: int, now: float) -> list[Action[LinkT]]:
        """Send block `first`, which arrived damaged, and all later blocks once more."""
        transfer, reader = self._find(link, transfer_id)
        if transfer is None or reader is None:
            reason = self._tombstones.get(transfer_id, "unknown transfer")
            return [Send(link, Fail(transfer_id, reason))]
        if reader.was_nacked:
            return self._close(transfer, "two chunks were damaged")
        reader.was_nacked = True
        if first < reader.next_block:  # else a preemption has rewound it already
            reader.rewind(first)
        return self._pump(transfer, now)

    def cancel(self, link: LinkT, transfer_id: str) -> list[Action[LinkT]]:
        """End a transfer at the consumer's request. Ignored if other links have subscribed and this
        one has not."""
        transfer = self._transfers.get(transfer_id)
        early = self._early.get(transfer_id, [])
        if transfer is None:
            is_allowed = not early or any(reader.link is link for reader in early)
            return self._forget(transfer_id, "cancelled", but=link) if is_allowed else []
        if transfer.readers and transfer.reader(link) is None:
            return []
        return self._close(transfer, "cancelled", but=link)

    def ack(self, link: LinkT, transfer_id: str) -> list[Action[LinkT]]:
        """Record that a consumer rank has all its blocks. The last acknowledgement releases the
        engine's blocks."""
        transfer, reader = self._find(link, transfer_id)
        if transfer is None or reader is None or not reader.is_done:
            return []
        transfer.readers.remove(reader)
        transfer.acknowledged += 1
        is_last = transfer.acknowledged >= transfer.num_readers
        return self._close(transfer, "finished") if is_last else []

    def link_down(self, link: LinkT) -> list[Action[LinkT]]:
        actions: list[Action[LinkT]] = []
        for transfer_id, early in list(self._early.items()):
            if any(reader.link is link for reader in early):
                actions += self._forget(transfer_id, _GONE, but=link)
        for transfer in list(self._transfers.values()):
            if not transfer.is_closed and transfer.reader(link) is not None:
                actions += self._close(transfer, _GONE, but=link)
        return actions

    # -- from the link's writer thread

    def begin_copy(self, chunk: SendChunk[LinkT]) -> bool:
        """Return True if the chunk is still needed; the caller must then call `end_copy`."""
        _, reader = self._find(chunk.link, chunk.transfer_id)
        if reader is None or reader.queued is not chunk:
            return False
        reader.queued, reader.copying[chunk] = None, True
        return True

    def next_chunk(self, chunk: SendChunk[LinkT], now: float) -> list[Action[LinkT]]:
        """Return the chunk after one whose copy continues asynchronously."""
        transfer, _ = self._find(chunk.link, chunk.transfer_id)
        return [] if transfer is None else self._pump(transfer, now)

    def end_copy(
        self, chunk: SendChunk[LinkT], now: float, seconds: float, sent_bytes: int
    ) -> list[Action[LinkT]]:
        """Record the end of a copy: its blocks may be overwritten or released. The copy failed if
        `sent_bytes` is 0."""
        transfer = self._transfers.get(chunk.transfer_id)
        reader = None if transfer is None else transfer.reader(chunk.link)
        if transfer is None or reader is None or chunk not in reader.copying:
            return []
        is_current = reader.copying.pop(chunk)
        if transfer.is_closed:
            if not reader.copying:
                transfer.readers.remove(reader)
            return self._drop(transfer)
        if not sent_bytes:
            return self._close(transfer, "a copy failed")
        reader.transfer_s += seconds
        reader.sent_bytes += sent_bytes
        reader.spoke_at = now
        if is_current:
            reader.sent_blocks += len(chunk.block_ids)
        if transfer.hold_end is not None:
            transfer.hold_end = now + self._hold_s
        return self._pump(transfer, now)

    # -- from the clock

    def tick(self, now: float) -> list[Action[LinkT]]:
        """End holds and early subscriptions; send heartbeats."""
        actions: list[Action[LinkT]] = []
        for transfer_id, early in list(self._early.items()):
            if now >= early[0].expires_at:
                actions += self._forget(transfer_id, "unknown transfer")
        for transfer in list(self._transfers.values()):
            if transfer.is_closed:
                continue
            if transfer.hold_end is not None and now >= transfer.hold_end:
                self.expired_holds += 1
                actions += self._close(transfer, "the hold ended")
                continue
            for reader in transfer.readers:
                if now - reader.spoke_at >= self._heartbeat_s:
                    reader.spoke_at = now
                    actions.append(Send(reader.link, Heartbeat(transfer.transfer_id)))
        return actions

    # -- inside

    def _find(
        self, link: LinkT, transfer_id: str
    ) -> tuple[SendTransfer[LinkT] | None, Reader[LinkT] | None]:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.is_closed:
            return None, None
        return transfer, transfer.reader(link)

    def _refuse(self, link: LinkT, transfer_id: str, reason: str) -> list[Action[LinkT]]:
        self.refused_subscriptions += 1
        return [Send(link, Fail(transfer_id, reason))]

    def _check(self, transfer: SendTransfer[LinkT], subscription: Subscribe) -> None:
        """Raise KvTransferError if the subscription does not fit the transfer."""
        if not subscription.groups or not subscription.num_tokens:
            raise KvTransferError("no blocks were subscribed")
        for g in subscription.groups:
            if g.group >= len(self._plan.shards):
                raise KvTransferError(f"group {g.group} was subscribed, which the model has not")
            needed = self._plan.shards[g.group].group.needed(subscription.num_tokens)
            end = g.first_block + len(g.block_ids)
            # A stage that has only layers with a window may need no block.
            is_empty = needed and not g.block_ids
            if g.first_block < needed.start or end != needed.stop or is_empty:
                raise KvTransferError(
                    f"blocks {g.first_block} to {end} of group {g.group} were subscribed,"
                    f" expected {needed.start} to {needed.stop}"
                )
        if subscription.readers != transfer.num_readers or not subscription.readers:
            raise KvTransferError(
                f"{subscription.readers} readers subscribed, expected {transfer.num_readers}"
            )

    def _is_other(self, transfer: SendTransfer[LinkT], subscription: Subscribe) -> bool:
        """Return True if the number of computed tokens does not match the subscription. More tokens
        than subscribed are fine if every block is final once it is full."""
        computed, wanted = transfer.ready_tokens, subscription.num_tokens
        is_streamed = all(shard.group.is_streamed for shard in self._plan.shards)
        return computed < wanted or (computed > wanted and not is_streamed)

    def _next_chunk(
        self, transfer: SendTransfer[LinkT], reader: Reader[LinkT]
    ) -> SendChunk[LinkT] | None:
        """Return the next chunk of final blocks of one group, or None if there are none."""
        subscription, first = reader.subscription, reader.next_block
        place, done = subscription.locate(first)
        blocks, part = subscription.groups[place], reader.parts[place]
        group = self._plan.shards[part.group].group
        # A partial last block is final only when the subscribed tokens are all computed.
        ready = len(blocks.block_ids)
        if transfer.ended_at is None and not group.is_streamed:
            return None
        if transfer.ready_tokens < subscription.num_tokens:
            ready = transfer.ready_tokens // group.block_size - blocks.first_block
        end = min(ready, done + self.chunk_blocks[part.group] * reader.send_chunks)
        if end <= done:
            return None
        table = transfer.tables[group.table]
        block_ids = table[blocks.first_block + done : blocks.first_block + end]
        reader.next_block += end - done
        return SendChunk(reader.link, transfer.transfer_id, first, block_ids, part)

    def _pump(self, transfer: SendTransfer[LinkT], now: float) -> list[Action[LinkT]]:
        """Return the next chunk of each reader, and TransferDone after its last chunk."""
        actions: list[Action[LinkT]] = []
        for reader in [] if transfer.is_closed else transfer.readers:
            subscription = reader.subscription
            total = subscription.num_blocks
            if transfer.ended_at is not None and self._is_other(transfer, subscription):
                reason = (
                    f"{subscription.num_tokens} tokens were subscribed,"
                    f" {transfer.ready_tokens} were computed"
                )
                return self._close(transfer, reason)
            is_full = reader.queued is not None or len(reader.copying) >= MAX_IN_FLIGHT
            if is_full or reader.is_done:
                continue
            if reader.next_block < total:
                reader.queued = self._next_chunk(transfer, reader)
                if reader.queued is not None:
                    actions.append(reader.queued)
            elif reader.sent_blocks == total and transfer.ended_at is not None:
                digests = _digests_of(transfer, reader)
                if len(digests) < DIGEST_BYTES * total:
                    continue
                reader.is_done = True
                done = TransferDone(
                    transfer.transfer_id,
                    list(transfer.token_ids),
                    digests,
                    reader.transfer_s,
                    max(0.0, now - transfer.ended_at),
                    self._digest_one_in - 1,
                )
                actions.append(Send(reader.link, done))
        return actions

    def _close(
        self, transfer: SendTransfer[LinkT], reason: str, *, but: LinkT | None = None
    ) -> list[Action[LinkT]]:
        """End the transfer and send Fail to every reader, except on link `but`."""
        actions: list[Action[LinkT]] = []
        if not transfer.is_closed:
            actions += [
                Send(reader.link, Fail(transfer.transfer_id, reason))
                for reader in transfer.readers
                if reader.link is not but
            ]
            self._bury(transfer.transfer_id, reason)
            transfer.is_closed = True
            transfer.readers = [reader for reader in transfer.readers if reader.copying]
        return actions + self._drop(transfer)

    def _drop(self, transfer: SendTransfer[LinkT]) -> list[Action[LinkT]]:
        """Delete a closed transfer if the engine's request has ended and no copy runs."""
        if transfer.ended_at is None or transfer.readers:
            return []
        del self._transfers[transfer.transfer_id]
        return [Release(transfer.request_id)] if transfer.is_held else []

    def _forget(
        self, transfer_id: str, reason: str, *, but: LinkT | None = None
    ) -> list[Action[LinkT]]:
        """Refuse early and later subscriptions to this transfer."""
        self._bury(transfer_id, reason)
        early = self._take_early(transfer_id)
        return [Send(r.link, Fail(transfer_id, reason)) for r in early if r.link is not but]

    def _take_early(self, transfer_id: str) -> list[Reader[LinkT]]:
        early = self._early.pop(transfer_id, [])
        self._early_items -= sum(reader.subscription.num_items for reader in early)
        return early

    def _bury(self, transfer_id: str, reason: str) -> None:
        self._tombstones[transfer_id] = reason
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


def _digests_of(transfer: SendTransfer[LinkT], reader: Reader[LinkT]) -> bytes:
    """Return the digests computed so far for the reader's blocks."""
    digests = b""
    for part, blocks in zip(reader.parts, reader.subscription.groups, strict=True):
        made = transfer.digests.get(part)
        if made is not None:
            start = DIGEST_BYTES * (blocks.first_block - made.first)
            digests += made.made[start : start + DIGEST_BYTES * len(blocks.block_ids)]
    return digests
