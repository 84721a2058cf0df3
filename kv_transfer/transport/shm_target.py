"""The receiving end over shared memory: the source writes into its cache, or it reads in the
source's."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kv_transfer.board import Found, PeerBoard
from kv_transfer.copying import WORDS
from kv_transfer.digest import NO_DIGEST
from kv_transfer.errors import ProtocolError, UnsupportedLayout
from kv_transfer.layout import KvGeometry
from kv_transfer.memory import PeerMemory
from kv_transfer.messages import Count, Message, decode, kinds_of

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion, WriteFence
    from kv_transfer.messages import Chunk

logger = logging.getLogger(__name__)


class CacheAt(Message, frozen=True):
    """Where the source's cache and board are, as the target's own is in its offer."""

    path: str
    inode: Count
    size: Count
    geometry: list[Count]
    board_path: str
    board_inode: Count


KINDS = kinds_of(CacheAt)


class ShmTarget:
    """One link's. Its source's memory is mapped beside everything else, for a large cache takes its
    time; until then, or where it cannot be, all is pushed."""

    name = "shm"

    def __init__(self, local: KvRegion, fence: WriteFence) -> None:
        self._local = local
        self._fence = fence
        self._mapper: threading.Thread | None = None
        # Held during each look and copy: what is read must not be unmapped.
        self._lock = threading.Lock()
        self._is_closed = False
        self._mapped = threading.Event()
        self._memory: PeerMemory | None = None
        self._board: PeerBoard | None = None

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        """See TargetChannel."""
        # The bytes were in place before the message was sent.

    def idle(self) -> bool:
        """See TargetChannel."""
        return self._fence.seal()

    def told(self, body: bytes) -> None:
        """See Talks."""
        where = decode(body, KINDS)
        if not isinstance(where, CacheAt) or self._mapper is not None:
            raise ProtocolError("the source tells twice where its memory is")
        if not WORDS:
            return  # the extension was not built here: all is pushed
        self._mapper = threading.Thread(target=self._map, args=[where], daemon=True, name="kv-map")
        self._mapper.start()

    def _map(self, where: CacheAt) -> None:
        memory: PeerMemory | None = None
        try:
            geometry = KvGeometry.from_list(where.geometry)
            memory = PeerMemory(where.path, where.inode, where.size, geometry, writable=False)
            board = PeerBoard(where.board_path, where.board_inode)
        except (OSError, ValueError, OverflowError, UnsupportedLayout) as error:
            logger.warning("what lies ready at the source is pushed, not taken: %s", error)
            if memory is not None:
                memory.close()
            return
        with self._lock:
            self._memory, self._board = memory, board
        self._mapped.set()

    def wait_mapped(self, timeout_s: float) -> bool:
        """See Takes."""
        return self._mapped.wait(timeout_s)

    def find(self, transfer_id: str) -> Found | None:
        """See Takes."""
        with self._lock:
            if self._is_closed or self._board is None:
                return None
            return self._board.find(transfer_id)

    def take(self, found: Found, source_ids: list[int], own_ids: list[int]) -> int | None:
        """See Takes."""
        with self._lock:
            if self._is_closed or self._board is None or self._memory is None:
                return None
            source, is_due = self._memory.region, found.ready.digest != NO_DIGEST
            mark = self._local.copy_from(source, source_ids, own_ids, is_due)
            return mark if self._board.stands(found) else None

    def close(self) -> None:
        """See TargetChannel."""
        with self._lock:
            self._is_closed = True
        if self._mapper is not None:
            self._mapper.join()
        for mapped in (self._memory, self._board):
            if mapped is not None:
                mapped.close()
