"""The sending end of transfers: a state machine without I/O.

A transfer is known once the engine expects it (`expect`), may be granted before or after that, is
pushed as its blocks fill (`progress`), and ends when the engine's request ended (`end`) and the
target has acknowledged, cancelled, vanished, or the lease ran out. Every method takes the time and
returns the work to do; the caller holds one lock around them.

    EXPECTED ──grant──► GRANTED ──all pushed──► SENT ──ack──► gone
        │                  ▲ └────── again ──────┘
        └────── cancel, abort, preemption beyond repair, link down, lease end ──────► gone

"Queued" is not "sent": blocks are released only after the last copy returned (`end_copy`).

Where the target has more tensor-parallel ranks than the source, several of its ranks read from one
of the source's, each by a grant of its own over a link of its own, and each grant says how many
they are. The blocks are held until every reader has acknowledged. What one reader gives up, or
loses its link for, is given up for all: their request fails as a whole. For each reader at most one
copy runs, for a link has one writer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic

from kv_transfer.errors import KvTransferError
from kv_transfer.source_actions import (
    LinkT,
    PushChunk,
    Release,
    SendAlive,
    SendDone,
    SendFail,
    SourceAction,
)
from kv_transfer.source_transfer import EarlyGrant, Reader, SourceTransfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kv_transfer.messages import Grant
    from kv_transfer.protocol.plan import Shard

MAX_TOMBSTONES = 4096
MAX_EARLY_GRANTS = 4096
_BEFORE = "the transfer was granted before"
_GONE = "the decode worker went away"


class SourceTable(Generic[LinkT]):
    """All transfers of a worker's sending end."""

    def __init__(
        self,
        *,
        shard: Shard,
        chunk_blocks: int,
        lease_s: float,
        grant_wait_s: float,
        alive_s: float,
        by_token: bool = False,
    ) -> None:
        """`by_token`: single tokens can be taken from the cache, so that the target's blocks may be
        of another size."""
        self._shard = shard
        self._by_token = by_token
        self.block_size = shard.block_size
        self._chunk_blocks = max(1, chunk_blocks)
        self._lease_s = lease_s
        self._grant_wait_s = grant_wait_s
        self._alive_s = alive_s
        self._transfers: dict[str, SourceTransfer[LinkT]] = {}
        self._early: dict[str, list[EarlyGrant[LinkT]]] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self.expired_leases = 0

    def __len__(self) -> int:
        return len(self._transfers) + len(self._early)

    def __iter__(self) -> Iterator[SourceTransfer[LinkT]]:
        """To look at, under the caller's lock."""
        return iter(self._transfers.values())

    def early(self) -> Iterator[EarlyGrant[LinkT]]:
        """Grants that came before the engine's request."""
        for grants in self._early.values():
            yield from grants

    def __repr__(self) -> str:
        parts = [f"{t.transfer_id}:{t.state.value}" for t in self._transfers.values()]
        return f"SourceTable({', '.join(parts)}; early={list(self._early)})"

    # -- from the engine

    def expect(self, transfer_id: str, request_id: str, now: float) -> list[SourceAction[LinkT]]:
        """The engine has taken the request in; a grant may have come before, or the word that none
        will come. An id that is in use serves neither request: their KV could be confused."""
        used = self._transfers.get(transfer_id)
        if used is not None:
            return self._close(used, "the transfer id was used twice")
        transfer = SourceTransfer[LinkT](transfer_id, request_id, began_at=now)
        self._transfers[transfer_id] = transfer
        transfer.is_closed = transfer_id in self._tombstones
        actions: list[SourceAction[LinkT]] = []
        for early in self._early.pop(transfer_id, []):
            actions += self.grant(early.link, early.grant, now)
        return actions

    def progress(
        self, transfer_id: str, block_ids: list[int], ready_tokens: int, now: float
    ) -> list[SourceAction[LinkT]]:
        """A step has computed the KV of the request's first `ready_tokens` tokens, which lies in
        `block_ids`."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return []
        transfer.block_ids = block_ids
        # What lies in no block cannot be sent.
        transfer.ready_tokens = min(ready_tokens, len(block_ids) * self.block_size)
        return self._pump(transfer, now)

    def end(
        self,
        transfer_id: str,
        token_ids: tuple[int, ...],
        now: float,
        *,
        held: bool,
        request_id: str = "",
    ) -> list[SourceAction[LinkT]]:
        """The engine's request ended; `held` says that its blocks wait for our Release."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or request_id not in ("", transfer.request_id):
            return [Release(request_id)] if held and request_id else []
        if transfer.ended_at is not None:
            return []
        transfer.ended_at, transfer.token_ids, transfer.held = now, token_ids, held
        if not held or transfer.is_closed:
            return self._close(transfer, "the prefill was aborted")
        transfer.lease_end = now + self._lease_s
        return self._pump(transfer, now)

    def preempt(self, transfer_id: str) -> None:
        """The engine takes the request's blocks away. What was copied stays copied; what is queued
        is dropped. The caller waits until nothing is `copying_over` before the blocks are written
        to again."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.ready_tokens = 0
            for reader in transfer.readers:
                # A copy that runs will be whole before the blocks are taken.
                reader.go_back(reader.begun_blocks)

    def copying_over(self, transfer_id: str) -> list[LinkT]:
        """The links over which the transfer's blocks are being copied at this moment."""
        transfer = self._transfers.get(transfer_id)
        readers = [] if transfer is None else transfer.readers
        return [reader.link for reader in readers if reader.copying is not None]

    def release(self, transfer_id: str) -> list[SourceAction[LinkT]]:
        """Nobody wants the blocks of a request that ended, whatever its target says."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.ended_at is None:
            return []
        return self._close(transfer, "the request was cancelled")

    # -- from the target

    def grant(self, link: LinkT, grant: Grant, now: float) -> list[SourceAction[LinkT]]:
        """A rank of the target has reserved blocks. It may speak before the engine does."""
        reason = self._tombstones.get(grant.transfer_id)
        if reason is not None:
            return [SendFail(link, grant.transfer_id, reason)]
        transfer = self._transfers.get(grant.transfer_id)
        if transfer is not None:
            return self._grant(transfer, link, grant, now)
        early = self._early.get(grant.transfer_id, [])
        if early and (len(early) >= early[0].grant.readers or _over(link, early)):
            return [SendFail(link, grant.transfer_id, _BEFORE)]
        if sum(map(len, self._early.values())) >= MAX_EARLY_GRANTS:
            return [SendFail(link, grant.transfer_id, "too many transfers are unknown")]
        until = now + self._grant_wait_s
        self._early.setdefault(grant.transfer_id, []).append(EarlyGrant(link, grant, until))
        return []

    def again(
        self, link: LinkT, transfer_id: str, first: int, now: float
    ) -> list[SourceAction[LinkT]]:
        """The target found block `first` damaged: go back to it. Once; a target that finds damage
        twice gives the transfer up."""
        transfer = self._transfers.get(transfer_id)
        reader = self._reader(link, transfer_id)
        if transfer is None or reader is None:
            reason = self._tombstones.get(transfer_id, "unknown transfer")
            return [SendFail(link, transfer_id, reason)]
        if reader.suspect:
            return self._close(transfer, "asked again twice")
        if first >= reader.begun_blocks:
            return self._close(transfer, f"asked again for block {first}, not sent")
        reader.suspect = True
        reader.go_back(first)
        return self._pump(transfer, now)

    def cancel(self, link: LinkT, transfer_id: str) -> list[SourceAction[LinkT]]:
        """The target wants it no longer: answer Fail, behind the last chunk. What was granted over
        other links alone stays: it is not this target's."""
        answer: list[SourceAction[LinkT]] = [SendFail(link, transfer_id, "cancelled")]
        transfer, early = self._transfers.get(transfer_id), self._early.get(transfer_id, [])
        is_granted = early or (transfer is not None and not transfer.is_closed and transfer.readers)
        if is_granted and not self.granted_over(link, transfer_id):
            return answer
        if transfer is None:
            return answer + self._forget(transfer_id, "cancelled", but=link)
        return answer + self._close(transfer, "cancelled", but=link)

    def granted_over(self, link: LinkT, transfer_id: str) -> bool:
        """Whether this link has been given the transfer."""
        is_early = _over(link, self._early.get(transfer_id, []))
        return is_early or self._reader(link, transfer_id) is not None

    def ack(self, link: LinkT, transfer_id: str) -> list[SourceAction[LinkT]]:
        """This reader has every byte. With the last one's word the blocks are free."""
        transfer, reader = self._transfers.get(transfer_id), self._reader(link, transfer_id)
        if transfer is None or reader is None or not reader.done_sent:
            return []
        transfer.readers.remove(reader)
        transfer.acknowledged += 1
        if transfer.acknowledged < transfer.num_readers:
            return []
        return self._close(transfer, "finished")

    def link_down(self, link: LinkT) -> list[SourceAction[LinkT]]:
        """A rank of the target is gone, and with it whoever could want these blocks."""
        actions: list[SourceAction[LinkT]] = []
        for transfer_id in [k for k, early in self._early.items() if _over(link, early)]:
            actions += self._forget(transfer_id, _GONE, but=link)
        for transfer_id in list(self._transfers):
            if self._reader(link, transfer_id) is not None:
                actions += self._close(self._transfers[transfer_id], _GONE, but=link)
        return actions

    # -- from the writer

    def begin_copy(self, chunk: PushChunk[LinkT]) -> bool:
        """True when the chunk may be copied; the caller then owes `end_copy`."""
        reader = self._reader(chunk.link, chunk.transfer_id)
        if reader is None or reader.generation != chunk.generation:
            return False
        reader.copying = chunk
        return True

    def end_copy(
        self, chunk: PushChunk[LinkT], now: float, seconds: float, *, copied: bool
    ) -> list[SourceAction[LinkT]]:
        """A copy returned. A release that waited for it is due now."""
        transfer = self._transfers.get(chunk.transfer_id)
        reader = None if transfer is None else transfer.reader(chunk.link)
        if transfer is None or reader is None or reader.copying != chunk:
            return []
        reader.copying = None
        reader.push_s += seconds
        if transfer.is_closed:
            transfer.readers.remove(reader)
            return self._drop(transfer) if transfer.release_due else []
        if not copied:
            return self._close(transfer, "a copy failed")
        if reader.generation == chunk.generation:
            reader.sent_blocks += len(chunk.target_ids)
        if transfer.lease_end is not None:  # the target takes what is held for it
            transfer.lease_end = now + self._lease_s
        return []

    def done_figures(
        self, done: SendDone[LinkT], now: float
    ) -> tuple[list[int], float, float] | None:
        """(sampled tokens, push_s, exposed_s) for Done, or None when it is of an older
        generation."""
        transfer = self._transfers.get(done.transfer_id)
        reader = self._reader(done.link, done.transfer_id)
        if transfer is None or reader is None or reader.generation != done.generation:
            return None
        reader.done_sent = True
        exposed = 0.0 if transfer.ended_at is None else now - transfer.ended_at
        return list(transfer.token_ids), reader.push_s, exposed

    # -- from the clock

    def tick(self, now: float) -> list[SourceAction[LinkT]]:
        """Leases, early grants and signs of life."""
        actions: list[SourceAction[LinkT]] = []
        for transfer_id, early in list(self._early.items()):
            if now >= early[0].until:
                actions += self._forget(transfer_id, "unknown transfer")
        for transfer in list(self._transfers.values()):
            if transfer.lease_end is not None and now >= transfer.lease_end:
                if not transfer.release_due:
                    self.expired_leases += 1
                actions += self._close(transfer, "the lease ran out")
            elif not transfer.is_closed:
                for reader in transfer.readers:
                    if now - reader.last_alive >= self._alive_s:
                        reader.last_alive = now
                        actions.append(SendAlive(reader.link, transfer.transfer_id))
        return actions

    # -- inside

    def _reader(self, link: LinkT, transfer_id: str) -> Reader[LinkT] | None:
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None or transfer.is_closed else transfer.reader(link)

    def _grant(
        self, transfer: SourceTransfer[LinkT], link: LinkT, grant: Grant, now: float
    ) -> list[SourceAction[LinkT]]:
        known = len(transfer.readers) + transfer.acknowledged
        is_full = transfer.is_closed or known >= transfer.num_readers > 0
        if is_full or transfer.reader(link) is not None:
            return [SendFail(link, grant.transfer_id, _BEFORE)]
        reader = Reader(link, grant, last_alive=now)
        transfer.readers.append(reader)
        transfer.num_readers = transfer.num_readers or grant.readers
        if reason := transfer.misfit(grant, self.block_size, by_token=self._by_token):
            return self._close(transfer, reason)
        try:
            reader.part = self._shard.part_of(grant.heads)
        except KvTransferError as error:
            return self._close(transfer, str(error))
        return self._pump(transfer, now)

    def _pump(self, transfer: SourceTransfer[LinkT], now: float) -> list[SourceAction[LinkT]]:
        actions: list[SourceAction[LinkT]] = []
        for reader in [] if transfer.is_closed else list(transfer.readers):
            if reader.done_queued:
                continue
            queued: list[SourceAction[LinkT]] = []
            queued += transfer.queue(reader, self.block_size, self._chunk_blocks)
            if transfer.ended_at is not None:
                grant = reader.grant
                if reader.queued_blocks < len(grant.block_ids):
                    counts = f"{grant.num_tokens} tokens were granted"
                    reason = f"{counts} and {transfer.ready_tokens} computed"
                    return self._close(transfer, reason)
                reader.done_queued = True
                queued.append(SendDone(reader.link, transfer.transfer_id, reader.generation))
            if queued:
                reader.last_alive = now
            actions += queued
        return actions

    def _close(
        self, transfer: SourceTransfer[LinkT], reason: str, *, but: LinkT | None = None
    ) -> list[SourceAction[LinkT]]:
        """Tells every reader but the one over the link `but`."""
        actions: list[SourceAction[LinkT]] = []
        if not transfer.is_closed:
            actions += [
                SendFail(reader.link, transfer.transfer_id, reason)
                for reader in transfer.readers
                if reader.link is not but
            ]
            self._bury(transfer.transfer_id, reason)
            transfer.close()
        # Until the engine's request has ended there is nothing to free: it is dropped then.
        if transfer.ended_at is None:
            return actions
        transfer.release_due = True
        return actions + self._drop(transfer)

    def _drop(self, transfer: SourceTransfer[LinkT]) -> list[SourceAction[LinkT]]:
        if transfer.is_copying:
            return []
        del self._transfers[transfer.transfer_id]
        return [Release(transfer.request_id)] if transfer.held else []

    def _forget(
        self, transfer_id: str, reason: str, *, but: LinkT | None = None
    ) -> list[SourceAction[LinkT]]:
        """Drops what was granted early."""
        self._bury(transfer_id, reason)
        early = self._early.pop(transfer_id, [])
        return [SendFail(e.link, transfer_id, reason) for e in early if e.link is not but]

    def _bury(self, transfer_id: str, reason: str) -> None:
        self._tombstones[transfer_id] = reason
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


def _over(link: LinkT, early: Iterable[EarlyGrant[LinkT]]) -> bool:
    return any(grant.link is link for grant in early)
