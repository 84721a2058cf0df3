"""How a source says what lies ready in its cache: by the transport that has a place for it, and
with the digest of what lies there now."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kv_transfer.board import Ready
from kv_transfer.digest import NO_DIGEST, Sampler
from kv_transfer.transport.base import Publishes
from pdserve.capability import WorkerStart, transfer_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kv_transfer import source_actions as src
    from kv_transfer.links import Links
    from kv_transfer.memory import KvRegion
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, Transport


class Publishing:
    """Of one worker, for its `links`, whose lock is held around `due` and `withdraw`."""

    def __init__(
        self, links: Links, settings: KvSettings, instance_id: str, transports: Iterable[Transport]
    ) -> None:
        self._links = links
        self._key = settings.kv_key if settings.checks_capabilities else None
        self._start = WorkerStart(settings.worker_id, instance_id)
        self._by = next((t for t in transports if isinstance(t, Publishes)), None)
        self._sampler = Sampler(settings.digest)
        self._due: set[str] = set()

    def max_blocks(self, local: LocalKv) -> int:
        """Transfers of so many blocks can be published; 0 where none can."""
        return 0 if self._by is None else self._by.publish_blocks(local)

    def due(self, action: src.Publish, region: KvRegion) -> Callable[[], None]:
        """Its prefill has just ended. What is left to do without the lock: to read all its blocks
        must not keep the tables."""
        self._due.add(action.transfer_id)
        return partial(self._publish, action, region, time.monotonic())

    def _publish(self, action: src.Publish, region: KvRegion, ended_at: float) -> None:
        """On the engine's own thread, which alone could give the blocks away."""
        key, transfer_id = self._key, action.transfer_id
        begun = time.monotonic()
        is_taken = self._sampler.takes(suspect=False)
        mark = region.digest(action.block_ids) if is_taken else NO_DIGEST
        digest_s = time.monotonic() - begun
        ready = Ready(
            transfer_id,
            action.num_tokens,
            self._links.sources.block_size,
            action.block_ids,
            list(action.token_ids),
            ended_at,
            self._start.worker_id,
            b"" if key is None else transfer_key(key, transfer_id, self._start),
            mark,
        )
        with self._links.lock:
            self._links.counters.digest_s += digest_s if is_taken else 0.0
            if self._by is not None and transfer_id in self._due:
                self._due.remove(transfer_id)
                self._by.publish(ready)

    def withdraw(self, transfer_id: str) -> None:
        """At once."""
        self._due.discard(transfer_id)
        if self._by is not None:
            self._by.withdraw(transfer_id)
