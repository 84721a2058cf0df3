"""What a target takes by itself: a small transfer of whole pages that lies ready at a source on the
same host. Then its step copies, and no message, thread or process is waited for.

All that a source checks of a grant is checked here, with what the source has published; what does
not fit is granted as ever, so that the source may say why.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from kv_transfer.digest import NO_DIGEST
from kv_transfer.errors import KvTransferError
from kv_transfer.messages import Taken
from pdserve.capability import CapabilityRefused, WorkerStart, verify_with
from pdserve.types import TransferReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.board import Ready
    from kv_transfer.link import Link
    from kv_transfer.memory import KvRegion
    from kv_transfer.protocol.plan import Read
    from kv_transfer.vllm.step import TargetStart

logger = logging.getLogger(__name__)

# A step that has copied so much takes no more: half a millisecond.
STEP_BYTES = 4 << 20
# What came damaged is copied once more.
COPIES = 2


class Took(NamedTuple):
    """What came of it, after so many copies that were damaged. `report` is None where they all
    were: what the source has now is not what it had when prefill ended."""

    link: Link
    message: Taken
    size_bytes: int
    mismatches: int
    digest_s: float
    token_ids: tuple[int, ...]
    report: TransferReport | None


class Taker:
    """The target `me`, whose cache is `local`. `clock` is the wall's, for capabilities."""

    def __init__(
        self,
        me: WorkerStart,
        local: KvRegion,
        block_size: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._me = me
        self._local = local
        self._block_size = block_size
        self._clock = clock

    def take(self, link: Link, start: TargetStart, read: Read) -> Took | None:
        """Without a lock: it copies. None where there is nothing to be taken, or no longer, and
        nothing that counts was written."""
        channel = link.takes
        if channel is None or link.is_down or not self._is_whole(read):
            return None
        found = channel.find(start.transfer_id)
        if found is None or not self._fits(found.ready, start):
            return None
        begun = time.monotonic()
        first, own_ids = start.first_block, start.block_ids
        ready, digest_s = found.ready, 0.0
        source_ids = ready.block_ids[first : first + len(own_ids)]
        message = Taken(start.transfer_id, len(own_ids), start.capability)
        size = self._local.size_bytes(len(own_ids))
        for mismatches in range(COPIES):
            try:
                mark = channel.take(found, source_ids, own_ids)
            except KvTransferError as error:
                logger.warning("transfer %s cannot be taken: %s", start.transfer_id, error)
                return None
            if mark is None:
                return None
            copied = time.monotonic()
            due = ready.digest
            if due != NO_DIGEST and len(own_ids) < len(ready.block_ids):
                # Of a part nobody knows the digest: what lies in place is to be what was read.
                due = self._local.digest(own_ids)
                digest_s += time.monotonic() - copied
            if mark == due:
                exposed_s = max(copied - begun, copied - ready.ended_at)
                report = TransferReport(
                    copied - begun, exposed_s, size, len(own_ids), link.transport, mismatches
                )
                tokens = tuple(ready.token_ids)
                return Took(link, message, size, mismatches, digest_s, tokens, report)
            logger.warning(
                "transfer %s: %d blocks were damaged as they were taken from worker %r",
                start.transfer_id,
                len(own_ids),
                link.peer_instance_id,
            )
        return Took(link, message, size, COPIES, digest_s, (), None)

    def _is_whole(self, read: Read) -> bool:
        part, page_bytes = read.part, self._local.geometry.page_bytes
        is_all = (part.source_start, part.target_start, part.size) == (0, 0, page_bytes)
        return is_all and read.readers == 1

    def _fits(self, ready: Ready, start: TargetStart) -> bool:
        blocks = -(-start.num_tokens // self._block_size)
        if (
            ready.block_size != self._block_size
            or start.num_tokens > ready.num_tokens
            or blocks > len(ready.block_ids)
            or len(start.block_ids) != blocks - start.first_block
            or not ready.token_ids
        ):
            return False
        if not ready.signing:
            return True
        try:
            verify_with(
                ready.signing,
                start.capability,
                transfer_id=start.transfer_id,
                source=WorkerStart(ready.source, start.producer_instance_id),
                target=self._me,
                now=self._clock(),
            )
        except CapabilityRefused:
            return False
        return True
