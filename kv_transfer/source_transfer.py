"""One transfer at its sending end, as the table of them (kv_transfer/source.py) keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Generic

from kv_transfer.source_actions import LinkT

if TYPE_CHECKING:
    from kv_transfer.messages import Grant
    from kv_transfer.source_actions import PushChunk


class SourceState(Enum):
    """Where a transfer stands at its sending end."""

    EXPECTED = "expected"
    GRANTED = "granted"
    SENT = "sent"
    CLOSED = "closed"


@dataclass(slots=True)
class SourceTransfer(Generic[LinkT]):
    """One transfer. Only SourceTable changes it."""

    transfer_id: str
    request_id: str
    began_at: float = 0.0
    state: SourceState = SourceState.EXPECTED
    block_ids: list[int] = field(default_factory=list)
    ready_tokens: int = 0
    link: LinkT | None = None
    grant: Grant | None = None
    queued_blocks: int = 0  # of the grant, handed to the writer
    sent_blocks: int = 0  # of the grant, copied
    copying: PushChunk[LinkT] | None = None
    generation: int = 0  # work of an older generation is dropped by the writer
    suspect: bool = False  # the target has found a chunk damaged
    done_queued: bool = False
    ended_at: float | None = None
    token_ids: tuple[int, ...] = ()
    held: bool = False
    lease_end: float | None = None
    last_alive: float = 0.0
    push_s: float = 0.0
    release_due: bool = False

    @property
    def begun_blocks(self) -> int:
        """Of the grant, copied or being copied: a target may have a chunk before its copy ended."""
        running = self.copying
        counts = running is not None and running.generation == self.generation
        return self.sent_blocks + (len(running.source_ids) if running and counts else 0)
