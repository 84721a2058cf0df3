"""What the sending end of transfers asks its caller to do (kv_transfer/source.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kv_transfer.reshard import Span

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart

LinkT = TypeVar("LinkT")


@dataclass(frozen=True, slots=True)
class PushChunk(Generic[LinkT]):
    """Copy `source_ids` to the target's `target_ids`; then say Chunk(first, count). With `suspect`
    it goes with a digest whatever the setting says. `part` of each page, None for all of it. Where
    the two ends' blocks differ in size, so many `tokens` are copied: from the one behind `skip` of
    the first source block on, to the first of the target's blocks on; 0 is whole blocks."""

    link: LinkT
    transfer_id: str
    generation: int
    first: int
    source_ids: list[int]
    target_ids: list[int]
    suspect: bool = False
    part: PagePart | None = None
    tokens: int = 0
    skip: int = 0

    def span(self) -> Span | None:
        """What of the source's blocks moves; None where they move whole."""
        return Span(self.skip, self.skip + self.tokens) if self.tokens else None


@dataclass(frozen=True, slots=True)
class SendDone(Generic[LinkT]):
    """Everything is queued: say Done behind the last chunk."""

    link: LinkT
    transfer_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class SendFail(Generic[LinkT]):
    """Tell the target that nothing more comes."""

    link: LinkT
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SendAlive(Generic[LinkT]):
    """Tell the target that its transfer is still being worked on."""

    link: LinkT
    transfer_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """The engine may free this request's blocks."""

    request_id: str


SourceAction = PushChunk[LinkT] | SendDone[LinkT] | SendFail[LinkT] | SendAlive[LinkT] | Release
