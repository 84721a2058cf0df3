"""One transfer at its sending end, as the table of them (kv_transfer/source.py) keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Generic

from kv_transfer.source_actions import LinkT, PushChunk

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart
    from kv_transfer.messages import Grant


class SourceState(Enum):
    """Where a transfer stands at its sending end."""

    EXPECTED = "expected"
    GRANTED = "granted"
    SENT = "sent"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EarlyGrant(Generic[LinkT]):
    """A grant of a transfer that the engine has not taken in yet; kept until `until`."""

    link: LinkT
    grant: Grant
    until: float


@dataclass(slots=True, eq=False)
class Reader(Generic[LinkT]):
    """A target rank that takes KV of one transfer from here, over a link of its own. It is
    forgotten once it has acknowledged."""

    link: LinkT
    grant: Grant
    part: PagePart | None = None
    queued_blocks: int = 0  # of the grant, handed to the writer
    sent_blocks: int = 0  # of the grant, copied
    copying: PushChunk[LinkT] | None = None
    generation: int = 0  # work of an older generation is dropped by the writer
    suspect: bool = False  # the target has found a chunk damaged
    done_queued: bool = False
    done_sent: bool = False
    last_alive: float = 0.0
    push_s: float = 0.0

    @property
    def begun_blocks(self) -> int:
        """Of the grant, copied or being copied: a target may have a chunk before its copy ended."""
        running = self.copying
        counts = running is not None and running.generation == self.generation
        return self.sent_blocks + (len(running.target_ids) if running and counts else 0)

    def go_back(self, block: int) -> None:
        """What is queued from `block` of the grant on will be queued again."""
        self.queued_blocks = self.sent_blocks = block
        self.generation += 1
        self.done_queued = self.done_sent = False


@dataclass(slots=True)
class SourceTransfer(Generic[LinkT]):
    """One transfer. Only SourceTable changes it."""

    transfer_id: str
    request_id: str
    began_at: float = 0.0
    is_closed: bool = False
    block_ids: list[int] = field(default_factory=list)
    ready_tokens: int = 0
    # Once closed, those alone whose copy still runs.
    readers: list[Reader[LinkT]] = field(default_factory=list)
    num_readers: int = 0  # that there will be, by their grants; 0 before the first
    acknowledged: int = 0  # readers that are done
    ended_at: float | None = None
    token_ids: tuple[int, ...] = ()
    held: bool = False
    lease_end: float | None = None
    release_due: bool = False

    @property
    def state(self) -> SourceState:
        """Of its readers, the one that is furthest behind."""
        if self.is_closed:
            return SourceState.CLOSED
        if not self.num_readers:
            return SourceState.EXPECTED
        all_here = len(self.readers) + self.acknowledged == self.num_readers
        if all_here and all(reader.done_sent for reader in self.readers):
            return SourceState.SENT
        return SourceState.GRANTED

    @property
    def is_copying(self) -> bool:
        return any(reader.copying is not None for reader in self.readers)

    def reader(self, link: LinkT) -> Reader[LinkT] | None:
        """Who takes the transfer over this link."""
        return next((reader for reader in self.readers if reader.link is link), None)

    def misfit(self, grant: Grant, block_size: int, *, by_token: bool) -> str:
        """Why the grant cannot be served from blocks of `block_size` tokens; "" where it can."""
        theirs = grant.block_size or block_size
        if theirs != block_size and not by_token:
            return f"blocks of {theirs} tokens were granted, where {block_size} move"
        blocks = -(-grant.num_tokens // theirs) - grant.first_block
        if len(grant.block_ids) != blocks:
            return f"{len(grant.block_ids)} blocks were granted where {blocks} are due"
        if grant.readers != self.num_readers or not grant.readers:
            return f"{grant.readers} readers, and {self.num_readers} before"
        return ""

    def queue(
        self, reader: Reader[LinkT], block_size: int, chunk_blocks: int
    ) -> list[PushChunk[LinkT]]:
        """What can be pushed to the reader now, in chunks of so many of our blocks at most. They
        are counted in blocks of the target's, whose size the grant says."""
        grant = reader.grant
        theirs = grant.block_size or block_size
        chunk_blocks = max(1, chunk_blocks * block_size // theirs)
        # The last block may be partial: it goes when the last granted token is in it.
        if self.ready_tokens >= grant.num_tokens:
            ready = len(grant.block_ids)
        else:
            ready = max(0, self.ready_tokens // theirs - grant.first_block)
        chunks = []
        while reader.queued_blocks < ready:
            first = reader.queued_blocks
            count = min(chunk_blocks, ready - first)
            start = (grant.first_block + first) * theirs
            end = min(start + count * theirs, grant.num_tokens)
            chunks.append(
                PushChunk(
                    reader.link,
                    self.transfer_id,
                    reader.generation,
                    first,
                    self.block_ids[start // block_size : -(-end // block_size)],
                    grant.block_ids[first : first + count],
                    reader.suspect,
                    reader.part,
                    *((end - start, start % block_size) if theirs != block_size else ()),
                )
            )
            reader.queued_blocks += count
        return chunks

    def close(self) -> None:
        """Nothing more is copied than what is being copied now."""
        self.is_closed = True
        self.readers = [reader for reader in self.readers if reader.copying is not None]
        for reader in self.readers:
            reader.generation += 1
