"""The receiving end of transfers: a state machine without I/O.

    RECEIVING ──done──► reported as received
        │──fail────────► reported as failed
        │──damaged chunk──► asks for it again, once; what comes before it is thrown away
        └──cancel, no progress, damaged again──► CANCELLING ──fail or done──► reported
                     link down ──► FENCING ──the transport is idle──► reported as failed

Blocks stay pinned in every state: the engine frees or uses them only when the transfer is reported,
and that happens only when nothing can be written to them any more.

Where the source has more tensor-parallel ranks than the target, one transfer comes in several
shares, each from another source rank over a link of its own, into its own heads of the same blocks.
Each share goes through the states above by itself. The first to fail has the others cancelled, and
the transfer is reported when the last has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from pdserve.errors import InvalidRequest, TransferCorrupted, TransferFailed
from pdserve.types import TransferReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kv_transfer.layout import PagePart
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk goes: into these blocks, and there into `part` of each page; None is all."""

    block_ids: list[int]
    part: PagePart | None


@dataclass(slots=True, eq=False)
class Share(Generic[LinkT]):
    """What one source rank sends of a transfer. Only TargetTable changes it."""

    transfer_id: str
    request_id: str
    link: LinkT
    grant: Grant
    part: PagePart | None
    progress_at: float
    began_at: float
    digest_mismatches: int = 0
    state: TargetState = TargetState.RECEIVING
    received_blocks: int = 0
    received_bytes: int = 0
    writing: bool = False  # our own reader thread is putting a chunk in place
    awaits_again: bool = False  # until the block that was asked for again comes
    reason: str = ""
    code: str = TransferFailed.code
    cancel_until: float = 0.0  # 0 while the cancel has not been sent

    def give_up(self, reason: str) -> None:
        """The next tick cancels it."""
        if self.state is TargetState.RECEIVING:
            self.state = TargetState.CANCELLING
            self.reason = reason


@dataclass(slots=True)
class TargetTransfer(Generic[LinkT]):
    """One transfer: the shares that are under way, and what came of those that ended."""

    request_id: str
    shares: list[Share[LinkT]]
    token_ids: tuple[int, ...] = ()
    report: TransferReport | None = None
    failure: Failed | None = None

    def share(self, link: LinkT) -> Share[LinkT] | None:
        """What comes over this link."""
        return next((share for share in self.shares if share.link is link), None)


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

    def __contains__(self, transfer_id: object) -> bool:
        return transfer_id in self._transfers

    def __iter__(self) -> Iterator[Share[LinkT]]:
        """Every share under way."""
        for transfer in self._transfers.values():
            yield from transfer.shares

    def __repr__(self) -> str:
        return f"TargetTable({', '.join(f'{s.transfer_id}:{s.state.value}' for s in self)})"

    def take_outcomes(self) -> list[TargetOutcome]:
        """What ended since the last call, each request once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- from the engine

    def start(
        self,
        request_id: str,
        grants: Sequence[tuple[LinkT, Grant, PagePart | None]],
        now: float,
    ) -> list[TargetAction[LinkT]]:
        """The engine has reserved the blocks that the grants of one transfer name, each for another
        source rank. An id that is in use is refused: nothing was granted, so nothing writes to the
        blocks."""
        transfer_id = grants[0][1].transfer_id
        if transfer_id in self._transfers:
            self._outcomes.append(Failed(request_id, "the transfer id was used twice"))
            return []
        shares = [
            Share(transfer_id, request_id, link, grant, part, now, now)
            for link, grant, part in grants
        ]
        self._transfers[transfer_id] = TargetTransfer(request_id, shares)
        return [SendGrant(link, grant) for link, grant, _ in grants]

    def refuse(self, request_id: str, reason: str, code: str = InvalidRequest.code) -> None:
        """The load of this request fails before it begins: nothing is granted to anybody."""
        self._outcomes.append(Failed(request_id, reason, code))

    def cancel(self, transfer_id: str, reason: str, now: float) -> list[TargetAction[LinkT]]:
        """The request is wanted no longer. Its blocks stay until every source rank has answered."""
        transfer = self._transfers.get(transfer_id)
        actions: list[TargetAction[LinkT]] = []
        for share in [] if transfer is None else transfer.shares:
            if share.state is TargetState.RECEIVING:
                share.give_up(reason)
                actions.append(self._cancel(share, now))
        return actions

    # -- from the source

    def begin_chunk(self, link: LinkT, chunk: Chunk) -> Place | None:
        """Where to put the chunk, or None to throw it away. None also ends a transfer whose chunk
        is out of order: it cannot be trusted any more."""
        share = self._share(link, chunk.transfer_id)
        if share is None or share.state is not TargetState.RECEIVING:
            return None
        expected = share.received_blocks
        if share.awaits_again and chunk.first > expected:
            return None
        end = chunk.first + chunk.count
        if chunk.first != expected or end > len(share.grant.block_ids) or not chunk.count:
            share.give_up(f"chunk {chunk.first}+{chunk.count} where {expected} was due")
            return None
        if chunk.tokens not in (0, due := share.grant.tokens_in(chunk.first, chunk.count)):
            share.give_up(
                f"{chunk.tokens} tokens in chunk {chunk.first}+{chunk.count} where {due} was due"
            )
            return None
        share.writing = True
        share.awaits_again = False
        return Place(share.grant.block_ids[chunk.first : end], share.part)

    def end_chunk(
        self, link: LinkT, chunk: Chunk, now: float, *, intact: bool
    ) -> list[TargetAction[LinkT]]:
        """The chunk is in place; `intact` is False where its bytes are not those of its digest."""
        share = self._share(link, chunk.transfer_id)
        if share is None or not share.writing:
            return []
        share.writing = False
        share.progress_at = now
        if intact:
            share.received_blocks += chunk.count
            share.received_bytes += chunk.bytes
            return []
        return self._damaged(share, chunk, now)

    def abort_chunk(self, link: LinkT, chunk: Chunk) -> None:
        """The chunk broke off half way; its link is going down."""
        share = self._share(link, chunk.transfer_id)
        if share is not None:
            share.writing = False

    def alive(self, link: LinkT, transfer_ids: list[str], now: float) -> None:
        """The source still works on these."""
        for transfer_id in transfer_ids:
            share = self._share(link, transfer_id)
            if share is not None:
                share.progress_at = now

    def done(self, link: LinkT, done: Done, transport: str) -> list[TargetAction[LinkT]]:
        """The source rank has sent everything."""
        share = self._share(link, done.transfer_id)
        if share is None:
            return []
        if share.awaits_again and share.state is TargetState.RECEIVING:
            return []  # said before the source had read that we ask again
        missing = len(share.grant.block_ids) - share.received_blocks
        if share.state is not TargetState.RECEIVING or missing or not done.token_ids:
            reason = share.reason or (f"{missing} blocks did not come" if missing else "no token")
            self._ended(share, reason)
        else:
            report = TransferReport(
                done.push_s,
                done.exposed_s,
                share.received_bytes,
                share.received_blocks,
                transport,
                share.digest_mismatches,
            )
            self._arrived(share, tuple(done.token_ids), report)
        return [SendAck(link, done.transfer_id)]

    def fail(self, link: LinkT, transfer_id: str, reason: str) -> None:
        """The source rank sends nothing more, and said so behind its last chunk."""
        share = self._share(link, transfer_id)
        if share is not None:
            self._ended(share, share.reason or reason)

    def link_down(self, link: LinkT, reason: str) -> None:
        """Nobody will answer. The blocks wait until the transport is idle."""
        for share in [share for share in self if share.link is link]:
            share.state = TargetState.FENCING
            share.reason = share.reason or reason
            for other in self._transfers[share.transfer_id].shares:
                other.give_up(share.reason)

    def uses(self, link: LinkT) -> bool:
        """Whether any block is still bound to the link."""
        return any(share.link is link for share in self)

    def fencing(self) -> set[LinkT]:
        """Links whose transport must be found idle before their blocks are reported."""
        return {share.link for share in self if share.state is TargetState.FENCING}

    def fenced(self, link: LinkT) -> None:
        """The transport is idle, for good: report what waited for it."""
        for share in [share for share in self if share.link is link]:
            if share.state is TargetState.FENCING and not share.writing:
                self._ended(share, share.reason)

    # -- from the clock

    def tick(self, now: float) -> list[TargetAction[LinkT]]:
        """Transfers without progress are cancelled; unanswered cancels cost the link."""
        actions: list[TargetAction[LinkT]] = []
        drop: set[LinkT] = set()
        for share in list(self):
            if share.state is TargetState.RECEIVING:
                if now - share.progress_at >= self.receive_timeout_s:
                    self.timeouts += 1
                    actions += self.cancel(share.transfer_id, "no KV came in time", now)
            elif share.state is TargetState.CANCELLING:
                if not share.cancel_until:
                    actions.append(self._cancel(share, now))
                elif now >= share.cancel_until:
                    drop.add(share.link)
        return actions + [DropLink(link) for link in drop]

    # -- inside

    def _share(self, link: LinkT, transfer_id: str) -> Share[LinkT] | None:
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.share(link)

    def _cancel(self, share: Share[LinkT], now: float) -> TargetAction[LinkT]:
        share.cancel_until = now + self.cancel_timeout_s
        return SendCancel(share.link, share.transfer_id)

    def _damaged(self, share: Share[LinkT], chunk: Chunk, now: float) -> list[TargetAction[LinkT]]:
        share.digest_mismatches += 1
        if share.state is not TargetState.RECEIVING:
            return []
        if share.digest_mismatches == 1:
            share.awaits_again = True
            return [SendAgain(share.link, share.transfer_id, chunk.first)]
        share.code = TransferCorrupted.code
        reason = f"blocks {chunk.first}+{chunk.count} came damaged, and so did what came again"
        return self.cancel(share.transfer_id, reason, now)

    def _arrived(
        self, share: Share[LinkT], token_ids: tuple[int, ...], report: TransferReport
    ) -> None:
        transfer = self._transfers[share.transfer_id]
        if transfer.token_ids not in ((), token_ids):
            self._ended(share, "the source's ranks disagree about the tokens")
            return
        both = report if transfer.report is None else transfer.report.beside(report)
        transfer.token_ids, transfer.report = token_ids, both
        self._close(transfer, share)

    def _ended(self, share: Share[LinkT], reason: str) -> None:
        """The share has failed, and nothing writes to its place any more."""
        transfer = self._transfers[share.transfer_id]
        if transfer.failure is None or share.code != TransferFailed.code:
            transfer.failure = Failed(transfer.request_id, reason, share.code)
        for other in transfer.shares:
            other.give_up(reason)
        self._close(transfer, share)

    def _close(self, transfer: TargetTransfer[LinkT], share: Share[LinkT]) -> None:
        transfer.shares.remove(share)
        if transfer.shares:
            return
        del self._transfers[share.transfer_id]
        if transfer.failure is None and transfer.report is not None:
            self._outcomes.append(
                Received(transfer.request_id, transfer.token_ids, transfer.report)
            )
        elif transfer.failure is not None:
            self._outcomes.append(transfer.failure)
