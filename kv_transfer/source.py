"""The sending end of transfers: a state machine without I/O.

A transfer is known once the engine expects it (`expect`), may be granted before or after that, is
pushed as its blocks fill (`progress`), and ends when the engine's request ended (`end`) and the
target has acknowledged, cancelled, vanished, or the lease ran out. Every method takes the time and
returns the work to do; the caller holds one lock around them.

    EXPECTED ──grant──► GRANTED ──all pushed──► SENT ──ack──► gone
        │                  ▲ └────── again ──────┘
        └────── cancel, abort, preemption beyond repair, link down, lease end ──────► gone

"Queued" is not "sent": blocks are released only after the last copy returned (`end_copy`). At most
one copy of a transfer runs, for it has one link and a link one writer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic

from kv_transfer.source_actions import (
    LinkT,
    PushChunk,
    Release,
    SendAlive,
    SendDone,
    SendFail,
    SourceAction,
)
from kv_transfer.source_transfer import SourceState, SourceTransfer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.messages import Grant

MAX_TOMBSTONES = 4096
MAX_EARLY_GRANTS = 4096
_GONE = "the decode worker went away"


class SourceTable(Generic[LinkT]):
    """All transfers of a worker's sending end."""

    def __init__(
        self,
        *,
        block_size: int,
        chunk_blocks: int,
        lease_s: float,
        grant_wait_s: float,
        alive_s: float,
    ) -> None:
        self._block_size = block_size
        self._chunk_blocks = max(1, chunk_blocks)
        self._lease_s = lease_s
        self._grant_wait_s = grant_wait_s
        self._alive_s = alive_s
        self._transfers: dict[str, SourceTransfer[LinkT]] = {}
        self._early: dict[str, tuple[LinkT, Grant, float]] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self.expired_leases = 0

    def __len__(self) -> int:
        return len(self._transfers) + len(self._early)

    def __iter__(self) -> Iterator[SourceTransfer[LinkT]]:
        """To look at, under the caller's lock."""
        return iter(self._transfers.values())

    def early(self) -> Iterator[tuple[str, LinkT, float]]:
        """(transfer id, link, until when) of grants that came before the engine's request."""
        for transfer_id, (link, _, until) in self._early.items():
            yield transfer_id, link, until

    def __repr__(self) -> str:
        parts = [f"{t.transfer_id}:{t.state.value}" for t in self._transfers.values()]
        return f"SourceTable({', '.join(parts)}; early={list(self._early)})"

    # -- from the engine

    def expect(self, transfer_id: str, request_id: str, now: float) -> list[SourceAction[LinkT]]:
        """The engine has taken the request in; a grant may have come before, or the word that none
        will come. An id that is in use serves neither request: their KV could be confused."""
        used = self._transfers.get(transfer_id)
        if used is not None:
            return self._close(used, "the transfer id was used twice", tell=True)
        transfer = SourceTransfer[LinkT](transfer_id, request_id, began_at=now, last_alive=now)
        self._transfers[transfer_id] = transfer
        early = self._early.pop(transfer_id, None)
        if transfer_id in self._tombstones:
            transfer.state = SourceState.CLOSED
        elif early is not None:
            return self._grant(transfer, early[0], early[1], now)
        return []

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
        transfer.ready_tokens = min(ready_tokens, len(block_ids) * self._block_size)
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
        transfer.ended_at = now
        transfer.token_ids, transfer.held = token_ids, held
        if not held or transfer.state is SourceState.CLOSED:
            return self._close(transfer, "the prefill was aborted", tell=True)
        transfer.lease_end = now + self._lease_s
        return self._pump(transfer, now)

    def preempt(self, transfer_id: str) -> None:
        """The engine takes the request's blocks away. What was copied stays copied; what is queued
        is dropped. The caller waits until nothing is `copying_over` before the blocks are written
        to again."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.ready_tokens = 0
            # A copy that runs will be whole before the blocks are taken.
            transfer.queued_blocks = transfer.sent_blocks = transfer.begun_blocks
            transfer.generation += 1

    def copying_over(self, transfer_id: str) -> LinkT | None:
        """The link over which the transfer's blocks are being copied at this moment."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.copying is None:
            return None
        return transfer.copying.link

    def release(self, transfer_id: str) -> list[SourceAction[LinkT]]:
        """Nobody wants the blocks of a request that ended, whatever its target says."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.ended_at is None:
            return []
        return self._close(transfer, "the request was cancelled", tell=True)

    # -- from the target

    def grant(self, link: LinkT, grant: Grant, now: float) -> list[SourceAction[LinkT]]:
        """The target has reserved blocks. It may speak before the engine does."""
        reason = self._tombstones.get(grant.transfer_id)
        if reason is not None:
            return [SendFail(link, grant.transfer_id, reason)]
        transfer = self._transfers.get(grant.transfer_id)
        known = transfer is not None and transfer.state is not SourceState.EXPECTED
        if known or grant.transfer_id in self._early:
            return [SendFail(link, grant.transfer_id, "the transfer was granted before")]
        if transfer is not None:
            return self._grant(transfer, link, grant, now)
        if len(self._early) >= MAX_EARLY_GRANTS:
            return [SendFail(link, grant.transfer_id, "too many transfers are unknown")]
        self._early[grant.transfer_id] = (link, grant, now + self._grant_wait_s)
        return []

    def again(
        self, link: LinkT, transfer_id: str, first: int, now: float
    ) -> list[SourceAction[LinkT]]:
        """The target found block `first` damaged: go back to it. Once; a target that finds damage
        twice gives the transfer up."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.link is not link:
            reason = self._tombstones.get(transfer_id, "unknown transfer")
            return [SendFail(link, transfer_id, reason)]
        if transfer.suspect:
            return self._close(transfer, "asked again twice", tell=True)
        if first >= transfer.begun_blocks:
            return self._close(transfer, f"asked again for block {first}, not sent", tell=True)
        transfer.suspect = True
        transfer.state, transfer.done_queued = SourceState.GRANTED, False
        transfer.generation += 1
        transfer.queued_blocks = transfer.sent_blocks = first
        return self._pump(transfer, now)

    def cancel(self, link: LinkT, transfer_id: str) -> list[SourceAction[LinkT]]:
        """The target wants it no longer: answer Fail, behind the last chunk. What was granted over
        another link stays: it is not this target's."""
        answer: list[SourceAction[LinkT]] = [SendFail(link, transfer_id, "cancelled")]
        transfer, early = self._transfers.get(transfer_id), self._early.get(transfer_id)
        holder = early[0] if early is not None else transfer.link if transfer is not None else None
        if holder is not None and holder is not link:
            return answer
        self._early.pop(transfer_id, None)
        if transfer is None:
            self._bury(transfer_id, "cancelled")
            return answer
        return answer + self._close(transfer, "cancelled", tell=False)

    def granted_over(self, link: LinkT, transfer_id: str) -> bool:
        """Whether this link has been given the transfer."""
        transfer, early = self._transfers.get(transfer_id), self._early.get(transfer_id)
        holder = early[0] if early is not None else None if transfer is None else transfer.link
        return holder is link

    def ack(self, link: LinkT, transfer_id: str) -> list[SourceAction[LinkT]]:
        """The target has every byte."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state is not SourceState.SENT or transfer.link is not link:
            return []
        return self._close(transfer, "finished", tell=False)

    def link_down(self, link: LinkT) -> list[SourceAction[LinkT]]:
        """The target is gone, and with it whoever could want these blocks."""
        for transfer_id in [k for k, early in self._early.items() if early[0] is link]:
            del self._early[transfer_id]
            self._bury(transfer_id, _GONE)
        actions: list[SourceAction[LinkT]] = []
        for transfer in [t for t in self._transfers.values() if t.link is link]:
            actions += self._close(transfer, _GONE, tell=False)
        return actions

    # -- from the writer

    def begin_copy(self, chunk: PushChunk[LinkT]) -> bool:
        """True when the chunk may be copied; the caller then owes `end_copy`."""
        transfer = self._transfers.get(chunk.transfer_id)
        if transfer is None or transfer.generation != chunk.generation:
            return False
        transfer.copying = chunk
        return True

    def end_copy(
        self, chunk: PushChunk[LinkT], now: float, seconds: float, *, copied: bool
    ) -> list[SourceAction[LinkT]]:
        """A copy returned. A release that waited for it is due now."""
        transfer = self._transfers.get(chunk.transfer_id)
        if transfer is None or transfer.copying != chunk:
            return []
        transfer.copying = None
        transfer.push_s += seconds
        if transfer.release_due:
            return self._drop(transfer)
        if not copied:
            return self._close(transfer, "a copy failed", tell=True)
        if transfer.generation == chunk.generation:
            transfer.sent_blocks += len(chunk.source_ids)
        if transfer.lease_end is not None:  # the target takes what is held for it
            transfer.lease_end = now + self._lease_s
        return []

    def done_figures(
        self, done: SendDone[LinkT], now: float
    ) -> tuple[list[int], float, float] | None:
        """(sampled tokens, push_s, exposed_s) for Done, or None when it is of an older
        generation."""
        transfer = self._transfers.get(done.transfer_id)
        if transfer is None or transfer.generation != done.generation:
            return None
        transfer.state = SourceState.SENT
        exposed = 0.0 if transfer.ended_at is None else now - transfer.ended_at
        return list(transfer.token_ids), transfer.push_s, exposed

    # -- from the clock

    def tick(self, now: float) -> list[SourceAction[LinkT]]:
        """Leases, early grants and signs of life."""
        actions: list[SourceAction[LinkT]] = []
        for transfer_id, (link, _, until) in list(self._early.items()):
            if now >= until:
                del self._early[transfer_id]
                self._bury(transfer_id, "unknown transfer")
                actions.append(SendFail(link, transfer_id, "unknown transfer"))
        for transfer in list(self._transfers.values()):
            if transfer.lease_end is not None and now >= transfer.lease_end:
                if not transfer.release_due:
                    self.expired_leases += 1
                actions += self._close(transfer, "the lease ran out", tell=True)
            elif transfer.link is not None and now - transfer.last_alive >= self._alive_s:
                transfer.last_alive = now
                actions.append(SendAlive(transfer.link, transfer.transfer_id))
        return actions

    # -- inside

    def _grant(
        self, transfer: SourceTransfer[LinkT], link: LinkT, grant: Grant, now: float
    ) -> list[SourceAction[LinkT]]:
        transfer.link, transfer.grant = link, grant
        blocks = -(-grant.num_tokens // self._block_size) - grant.first_block
        if len(grant.block_ids) != blocks:
            reason = f"{len(grant.block_ids)} blocks were granted where {blocks} are due"
            return self._close(transfer, reason, tell=True)
        transfer.state = SourceState.GRANTED
        return self._pump(transfer, now)

    def _pump(self, transfer: SourceTransfer[LinkT], now: float) -> list[SourceAction[LinkT]]:
        grant, link = transfer.grant, transfer.link
        if grant is None or link is None or transfer.done_queued:
            return []
        # The last block may be partial: it goes when the last granted token is in it.
        if transfer.ready_tokens >= grant.num_tokens:
            ready = len(grant.block_ids)
        else:
            ready = max(0, transfer.ready_tokens // self._block_size - grant.first_block)
        actions: list[SourceAction[LinkT]] = []
        while transfer.queued_blocks < ready:
            first = transfer.queued_blocks
            count = min(self._chunk_blocks, ready - first)
            start = grant.first_block + first
            actions.append(
                PushChunk(
                    link,
                    transfer.transfer_id,
                    transfer.generation,
                    first,
                    transfer.block_ids[start : start + count],
                    grant.block_ids[first : first + count],
                    transfer.suspect,
                )
            )
            transfer.queued_blocks += count
        complete = transfer.queued_blocks == len(grant.block_ids)
        if complete and transfer.ended_at is not None:
            transfer.done_queued = True
            actions.append(SendDone(link, transfer.transfer_id, transfer.generation))
        elif transfer.ended_at is not None:
            reason = f"{grant.num_tokens} tokens were granted and {transfer.ready_tokens} computed"
            return self._close(transfer, reason, tell=True)
        if actions:
            transfer.last_alive = now
        return actions

    def _close(
        self, transfer: SourceTransfer[LinkT], reason: str, *, tell: bool
    ) -> list[SourceAction[LinkT]]:
        actions: list[SourceAction[LinkT]] = []
        if tell and transfer.link is not None and transfer.state is not SourceState.CLOSED:
            actions.append(SendFail(transfer.link, transfer.transfer_id, reason))
        if transfer.state is not SourceState.CLOSED:
            self._bury(transfer.transfer_id, reason)
        transfer.state = SourceState.CLOSED
        transfer.generation += 1
        transfer.link = None
        # Until the engine's request has ended there is nothing to free: it is dropped then.
        if transfer.ended_at is None:
            return actions
        transfer.release_due = True
        if transfer.copying is None:
            actions += self._drop(transfer)
        return actions

    def _drop(self, transfer: SourceTransfer[LinkT]) -> list[SourceAction[LinkT]]:
        del self._transfers[transfer.transfer_id]
        return [Release(transfer.request_id)] if transfer.held else []

    def _bury(self, transfer_id: str, reason: str) -> None:
        self._tombstones[transfer_id] = reason
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
