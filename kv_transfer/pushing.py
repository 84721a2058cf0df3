"""How a source does what its table decided to send: a chunk, when it is its turn on its link, and
the word behind the last one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kv_transfer.digest import NO_DIGEST
from kv_transfer.errors import KvTransferError
from kv_transfer.messages import Chunk, Done

if TYPE_CHECKING:
    from kv_transfer import source_actions as src
    from kv_transfer.digest import Sampler
    from kv_transfer.link import Link
    from kv_transfer.links import Links
    from kv_transfer.memory import KvRegion


class Pushing:
    """For `links`, on whichever thread has a link's turn; takes the lock of its tables."""

    def __init__(self, links: Links, sampler: Sampler) -> None:
        self._links = links
        self._sampler = sampler

    def push(self, region: KvRegion, chunk: src.PushChunk[Link]) -> None:
        """Nothing, where the chunk is wanted no longer."""
        links, channel = self._links, chunk.link.source
        if channel is None:
            raise KvTransferError("a target was asked to push")
        with links.lock:
            if not links.sources.begin_copy(chunk):
                return
        if chunk.part is not None:
            region = region.narrowed(chunk.part.source_start, chunk.part.size)
        count = len(chunk.target_ids)
        size = region.size_bytes(count, chunk.tokens)
        marked = begun = time.monotonic()
        copied = False
        try:
            mark = self._sampler.mark(chunk, region, in_push=channel.makes_digests)
            if mark != NO_DIGEST:
                begun = time.monotonic()
            message = Chunk(chunk.transfer_id, chunk.first, count, size, mark, chunk.tokens)
            channel.push(message, chunk.source_ids, chunk.target_ids, chunk.part, chunk.skip)
            copied = True
        finally:
            now = time.monotonic()
            seconds = now - begun
            with links.lock:
                links.counters.digest_s += begun - marked
                links.do_source(links.sources.end_copy(chunk, now, seconds, copied=copied))
                links.copies.notify_all()
                if copied:
                    links.counters.pushed_bytes += size
                    links.counters.pushed_blocks += count
                    links.counters.push_s += seconds

    def send_done(self, done: src.SendDone[Link]) -> None:
        """Behind the last chunk."""
        with self._links.lock:
            figures = self._links.sources.done_figures(done, time.monotonic())
        if figures is not None:
            tokens, push_s, exposed_s = figures
            done.link.write(Done(done.transfer_id, tokens, push_s, exposed_s))
