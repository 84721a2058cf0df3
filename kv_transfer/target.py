"""The receiving end of transfers: a state machine without I/O.

    RECEIVING ──done──► reported as received
        │──fail────────► reported as failed
        │──damaged chunk──► asks for it again, once; what comes before it is thrown away
        └──cancel, no progress, damaged again──► CANCELLING ──fail or done──► reported
                     link down ──► FENCING ──the transport is idle──► reported as failed

Blocks stay pinned in every state: the engine frees or uses them only when the transfer is reported,
and that happens only when nothing can be written to them any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from pdserve.errors import InvalidRequest, TransferCorrupted, TransferFailed
from pdserve.types import TransferReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.messages import Chunk, Done, Grant

LinkT = TypeVar("LinkT")


class TargetState(Enum):
    """Where a transfer stands at its receiving end."""

    RECEIVING = "receiving"
    CANCELLING = "cancelling"
    FENCING = "fencing"


@dataclass(frozen=True, slots=True)
class SendGrant(Generic[LinkT]):
    """Tell the source which blocks are reserved."""

    link: LinkT
    grant: Grant


@dataclass(frozen=True, slots=True)
class SendCancel(Generic[LinkT]):
    """Ask the source to stop; it answers Fail behind its last chunk."""

    link: LinkT
    transfer_id: str
    capability: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class SendAgain(Generic[LinkT]):
    """Block `first` of the grant came damaged: ask for it and all behind it once more."""

    link: LinkT
    transfer_id: str
    first: int


@dataclass(frozen=True, slots=True)
class SendAck(Generic[LinkT]):
    """Everything is here."""

    link: LinkT
    transfer_id: str


@dataclass(frozen=True, slots=True)
class DropLink(Generic[LinkT]):
    """The source did not answer a Cancel in time: close the link."""

    link: LinkT


@dataclass(frozen=True, slots=True)
class Received:
    """The request's KV is in place and these tokens follow its prompt."""

    request_id: str
    token_ids: tuple[int, ...]
    report: TransferReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The request's KV will not come, and nothing writes to its blocks any more. `code` is that of
    pdserve's error."""

    request_id: str
    reason: str
    code: str = TransferFailed.code


TargetAction = (
    SendGrant[LinkT] | SendAgain[LinkT] | SendCancel[LinkT] | SendAck[LinkT] | DropLink[LinkT]
)
TargetOutcome = Received | Failed


@dataclass(slots=True)
class TargetTransfer(Generic[LinkT]):
    """One transfer. Only TargetTable changes it."""

    transfer_id: str
    request_id: str
    link: LinkT
    grant: Grant
    progress_at: float
    began_at: float
    state: TargetState = TargetState.RECEIVING
    received_blocks: int = 0
    received_bytes: int = 0
    writing: bool = False  # our own reader thread is putting a chunk in place
    digest_mismatches: int = 0
    awaits_again: bool = False  # until the block that was asked for again comes
    reason: str = ""
    code: str = TransferFailed.code
    cancel_until: float = 0.0


@dataclass(slots=True)
class TargetTable(Generic[LinkT]):
    """All transfers of a worker's receiving end. `outcomes` is emptied by `take_outcomes`."""

    receive_timeout_s: float
    cancel_timeout_s: float
    _transfers: dict[str, TargetTransfer[LinkT]] = field(default_factory=dict)
    _outcomes: list[TargetOutcome] = field(default_factory=list)
    timeouts: int = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[TargetTransfer[LinkT]]:
        """To look at, under the caller's lock."""
        return iter(self._transfers.values())

    def __repr__(self) -> str:
        parts = [f"{t.transfer_id}:{t.state.value}" for t in self._transfers.values()]
        return f"TargetTable({', '.join(parts)})"

    def take_outcomes(self) -> list[TargetOutcome]:
        """What ended since the last call, each request once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- from the engine

    def start(
        self, link: LinkT, request_id: str, grant: Grant, now: float
    ) -> list[TargetAction[LinkT]]:
        """The engine has reserved the blocks that `grant` names. An id that is in use is refused:
        nothing was granted, so nothing writes to the blocks."""
        if grant.transfer_id in self._transfers:
            self._outcomes.append(Failed(request_id, "the transfer id was used twice"))
            return []
        self._transfers[grant.transfer_id] = TargetTransfer(
            grant.transfer_id, request_id, link, grant, progress_at=now, began_at=now
        )
        return [SendGrant(link, grant)]

    def refuse(self, request_id: str, reason: str) -> None:
        """The load of this request fails before it begins: nothing is asked of anybody."""
        self._outcomes.append(Failed(request_id, reason, InvalidRequest.code))

    def cancel(self, transfer_id: str, reason: str, now: float) -> list[TargetAction[LinkT]]:
        """The request is wanted no longer. Its blocks stay until the source has answered."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state is not TargetState.RECEIVING:
            return []
        transfer.state = TargetState.CANCELLING
        transfer.reason = reason
        transfer.cancel_until = now + self.cancel_timeout_s
        return [SendCancel(transfer.link, transfer_id, transfer.grant.capability)]

    # -- from the source

    def begin_chunk(self, link: LinkT, chunk: Chunk) -> list[int] | None:
        """The block ids to put the chunk into, or None to throw it away. None also ends a transfer
        whose chunk is out of order: it cannot be trusted any more."""
        transfer = self._transfers.get(chunk.transfer_id)
        if transfer is None or transfer.link is not link:
            return None
        if transfer.state is not TargetState.RECEIVING:
            return None
        expected = transfer.received_blocks
        if transfer.awaits_again and chunk.first > expected:
            return None
        end = chunk.first + chunk.count
        if chunk.first != expected or end > len(transfer.grant.block_ids) or not chunk.count:
            transfer.reason = f"chunk {chunk.first}+{chunk.count} where {expected} was due"
            transfer.state = TargetState.CANCELLING
            return None
        transfer.writing = True
        transfer.awaits_again = False
        return transfer.grant.block_ids[chunk.first : end]

    def end_chunk(self, chunk: Chunk, now: float, *, intact: bool) -> list[TargetAction[LinkT]]:
        """The chunk is in place; `intact` is False where its bytes are not those of its digest."""
        transfer = self._transfers.get(chunk.transfer_id)
        if transfer is None or not transfer.writing:
            return []
        transfer.writing = False
        transfer.progress_at = now
        if intact:
            transfer.received_blocks += chunk.count
            transfer.received_bytes += chunk.bytes
            return []
        return self._damaged(transfer, chunk, now)

    def abort_chunk(self, chunk: Chunk) -> None:
        """The chunk broke off half way; its link is going down."""
        transfer = self._transfers.get(chunk.transfer_id)
        if transfer is not None:
            transfer.writing = False

    def alive(self, link: LinkT, transfer_ids: list[str], now: float) -> None:
        """The source still works on these."""
        for transfer_id in transfer_ids:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.link is link:
                transfer.progress_at = now

    def done(self, link: LinkT, done: Done, transport: str) -> list[TargetAction[LinkT]]:
        """The source has sent everything."""
        transfer = self._transfers.get(done.transfer_id)
        if transfer is None or transfer.link is not link:
            return []
        if transfer.awaits_again and transfer.state is TargetState.RECEIVING:
            return []  # said before the source had read that we ask again
        del self._transfers[done.transfer_id]
        missing = len(transfer.grant.block_ids) - transfer.received_blocks
        if transfer.state is not TargetState.RECEIVING or missing or not done.token_ids:
            reason = transfer.reason or (
                f"{missing} blocks did not come" if missing else "no token"
            )
            self._outcomes.append(Failed(transfer.request_id, reason, transfer.code))
        else:
            report = TransferReport(
                done.push_s,
                done.exposed_s,
                transfer.received_bytes,
                transfer.received_blocks,
                transport,
                transfer.digest_mismatches,
            )
            self._outcomes.append(Received(transfer.request_id, tuple(done.token_ids), report))
        return [SendAck(link, done.transfer_id)]

    def fail(self, link: LinkT, transfer_id: str, reason: str) -> None:
        """The source sends nothing more, and said so behind its last chunk."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.link is link:
            del self._transfers[transfer_id]
            self._outcomes.append(
                Failed(transfer.request_id, transfer.reason or reason, transfer.code)
            )

    def link_down(self, link: LinkT, reason: str) -> None:
        """Nobody will answer. The blocks wait until the transport is idle."""
        for transfer in self._transfers.values():
            if transfer.link is link:
                transfer.state = TargetState.FENCING
                transfer.reason = transfer.reason or reason

    def uses(self, link: LinkT) -> bool:
        """Whether any block is still bound to the link."""
        return any(t.link is link for t in self._transfers.values())

    def fencing(self) -> set[LinkT]:
        """Links whose transport must be found idle before their blocks are reported."""
        return {t.link for t in self._transfers.values() if t.state is TargetState.FENCING}

    def fenced(self, link: LinkT) -> None:
        """The transport is idle, for good: report what waited for it."""
        for transfer in [t for t in self._transfers.values() if t.link is link]:
            if transfer.state is TargetState.FENCING and not transfer.writing:
                del self._transfers[transfer.transfer_id]
                self._outcomes.append(Failed(transfer.request_id, transfer.reason, transfer.code))

    # -- from the clock

    def tick(self, now: float) -> list[TargetAction[LinkT]]:
        """Transfers without progress are cancelled; unanswered cancels cost the link."""
        actions: list[TargetAction[LinkT]] = []
        drop: set[LinkT] = set()
        for transfer in list(self._transfers.values()):
            if transfer.state is TargetState.RECEIVING:
                if now - transfer.progress_at >= self.receive_timeout_s:
                    self.timeouts += 1
                    actions += self.cancel(transfer.transfer_id, "no KV came in time", now)
            elif transfer.state is TargetState.CANCELLING:
                if not transfer.cancel_until:  # a chunk out of order brought it here
                    transfer.cancel_until = now + self.cancel_timeout_s
                    grant = transfer.grant
                    actions.append(SendCancel(transfer.link, grant.transfer_id, grant.capability))
                elif now >= transfer.cancel_until:
                    drop.add(transfer.link)
        return actions + [DropLink(link) for link in drop]

    # -- inside

    def _damaged(
        self, transfer: TargetTransfer[LinkT], chunk: Chunk, now: float
    ) -> list[TargetAction[LinkT]]:
        transfer.digest_mismatches += 1
        if transfer.state is not TargetState.RECEIVING:
            return []
        if transfer.digest_mismatches == 1:
            transfer.awaits_again = True
            return [SendAgain(transfer.link, transfer.transfer_id, chunk.first)]
        transfer.code = TransferCorrupted.code
        reason = f"blocks {chunk.first}+{chunk.count} came damaged, and so did what came again"
        return self.cancel(transfer.transfer_id, reason, now)
