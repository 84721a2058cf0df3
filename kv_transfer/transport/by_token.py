"""What the transports between host memories have in common where single tokens move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kv_transfer.digest import DIGEST_DUE, digest
from kv_transfer.reshard import Span

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion
    from kv_transfer.messages import Chunk


def taken(
    region: KvRegion, chunk: Chunk, source_ids: list[int], part: PagePart | None, skip: int
) -> tuple[Chunk, memoryview]:
    """The chunk's bytes, and the chunk, with its digest where that is due. Raises
    KvTransferError."""
    if part is not None:
        region = region.narrowed(part.source_start, part.size)
    data = region.take(source_ids, Span(skip, skip + chunk.tokens))
    if chunk.digest == DIGEST_DUE:
        chunk = replace(chunk, digest=digest([data]))
    return chunk, data


def placed(target: KvRegion, source: KvRegion, part: PagePart | None) -> KvRegion:
    """The target's cache cut to where the part goes. The source has counted the part in blocks of
    its own size. Raises KvTransferError."""
    if part is None:
        return target
    places = (part.target_start, part.size)
    start, size = (n // source.block_size * target.block_size for n in places)
    return target.narrowed(start, size)
