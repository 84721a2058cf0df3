"""How a source says what lies ready in its cache: by the transport that has a place for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kv_transfer.board import Ready
from kv_transfer.digest import Sampler
from kv_transfer.transport.base import Publishes
from pdserve.capability import WorkerStart, transfer_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_transfer import source_actions as src
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, Transport


class Publishing:
    """Of one worker. The caller holds one lock around `publish` and `withdraw`."""

    def __init__(self, settings: KvSettings, epoch: str, transports: Iterable[Transport]) -> None:
        self._key = settings.kv_key if settings.checks_capabilities else None
        self._start = WorkerStart(settings.worker_id, epoch)
        self._by = next((t for t in transports if isinstance(t, Publishes)), None)
        self._sampler = Sampler(settings.digest)

    def max_blocks(self, local: LocalKv) -> int:
        """Transfers of so many blocks can be published; 0 where none can."""
        return 0 if self._by is None else self._by.publish_blocks(local)

    def publish(self, action: src.Publish, block_size: int) -> None:
        """Its prefill has just ended."""
        if self._by is None:
            return
        key, transfer_id = self._key, action.transfer_id
        ready = Ready(
            transfer_id,
            action.num_tokens,
            block_size,
            action.block_ids,
            list(action.token_ids),
            time.monotonic(),
            self._start.worker_id,
            b"" if key is None else transfer_key(key, transfer_id, self._start),
            self._sampler.takes(suspect=False),
        )
        self._by.publish(ready)

    def withdraw(self, transfer_id: str) -> None:
        """At once."""
        if self._by is not None:
            self._by.withdraw(transfer_id)
