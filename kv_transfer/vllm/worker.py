"""The connector's half in vLLM's worker process: what vLLM calls around each of its steps.

Threads: vLLM's own alone; the links (links.py) have theirs. The step never waits for a peer, except
for a copy that still reads blocks which the engine wants back (`preempt`), and that wait has a
bound: then the copy's link is closed, which ends the copy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kv_transfer import target as tgt
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.links import Links
from kv_transfer.messages import Grant
from kv_transfer.vllm.step import Arrival, WorkerOutput
from pdserve.types import ErrorInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kv_transfer.counters import TransferCounters
    from kv_transfer.handshake import Identity
    from kv_transfer.memory import KvRegion
    from kv_transfer.protocol.plan import Shard
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, Transport
    from kv_transfer.vllm.step import SourceProgress, StepMetadata, TargetStart, Unneeded


class WorkerHalf:
    """See the top of the file. `close` releases everything."""

    def __init__(
        self, settings: KvSettings, instance_id: str, transports: Sequence[Transport]
    ) -> None:
        self.links = Links(settings, instance_id, transports)
        self._shard: Shard | None = None
        self._output = WorkerOutput()
        self._region: KvRegion | None = None
        self._ready_blocks: dict[str, int] = {}  # by transfer: noted as computed
        self.resumed: dict[str, list[int]] = {}

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when the next step may find that a transfer moved on."""
        self.links.lock.wake = wake

    @property
    def address(self) -> str:
        """host:port that a target dials."""
        return self.links.address

    @property
    def counters(self) -> TransferCounters:
        return self.links.counters

    def register(self, local: LocalKv, identity: Identity, shard: Shard) -> None:
        """The KV cache exists: take connections from now on."""
        self._shard, self._region = shard, local.region
        self.links.register(local, identity, shard)

    def before_step(self, metadata: StepMetadata) -> None:
        """Start of a step, before anything is computed: control traffic must not wait for the
        forward pass, and blocks that were taken away must not be read any more."""
        now = time.monotonic()
        # Read in this very step, by runner V1 alone: what is left over is nobody's.
        self.resumed.clear()
        self.resumed.update(metadata.resumed)
        links = self.links
        with links.lock:
            sources, targets = links.sources, links.targets
            for expected in metadata.expected:
                links.do_source(sources.expect(expected.transfer_id, expected.request_id, now))
            for transfer_id in metadata.preempted:
                self._ready_blocks.pop(transfer_id, None)
                sources.preempt(transfer_id)
            for c in metadata.computed:
                self._note_computed(c)
                links.do_source(sources.progress(c.transfer_id, c.block_ids, c.ready_tokens, now))
            for e in metadata.ended:
                self._ready_blocks.pop(e.transfer_id, None)
                links.do_source(
                    sources.end(
                        e.transfer_id, e.token_ids, now, held=e.held, request_id=e.request_id
                    )
                )
            for s in metadata.starts:
                self._start(s, now)
            for request_id, reason in metadata.refused.items():
                targets.refuse(request_id, reason)
            for transfer_id in metadata.released:
                links.do_source(sources.release(transfer_id))
            for transfer_id in metadata.cancels:
                links.do_target(targets.cancel(transfer_id, "cancelled", now))
            for u in metadata.unneeded:
                self._decline(u, self._known_shard().told(len(u.producer_addresses)))
            links.wait_for_copies(metadata.preempted)

    def after_step(self, metadata: StepMetadata) -> None:
        """The step has run: what it filled can be pushed."""
        now = time.monotonic()
        with self.links.lock:
            for p in metadata.progress:
                self._note_computed(p)
                actions = self.links.sources.progress(
                    p.transfer_id, p.block_ids, p.ready_tokens, now
                )
                self.links.do_source(actions)

    def _note_computed(self, progress: SourceProgress) -> None:
        """Copies of the blocks that this step fills must wait for it, and for no later one."""
        assert self._region is not None
        first = self._ready_blocks.get(progress.transfer_id, 0)
        self._region.computed(progress.block_ids[first:])
        block_size = self._known_shard().block_size
        self._ready_blocks[progress.transfer_id] = progress.ready_tokens // block_size

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """(requests whose blocks may be freed, requests whose load ended, those of them that
        failed)."""
        received: set[str] = set()
        failed: set[str] = set()
        with self.links.lock:
            self.links.tick(time.monotonic())
            for outcome in self.links.targets.take_outcomes():
                received.add(outcome.request_id)
                if isinstance(outcome, tgt.Failed):
                    failed.add(outcome.request_id)
                    self.counters.failures += 1
                    self._output.failures[outcome.request_id] = ErrorInfo(
                        outcome.code, outcome.reason
                    )
                else:
                    self.counters.received_bytes += outcome.report.bytes
                    self._output.arrivals[outcome.request_id] = Arrival(
                        outcome.request_id, outcome.token_ids, outcome.report
                    )
            sent = self.links.take_released()
        return sent, received, failed

    def _start(self, start: TargetStart, now: float) -> None:
        """Grants the blocks to each rank of the source that holds heads of this rank."""
        links, shard, addresses = self.links, self._known_shard(), start.producer_addresses
        try:
            reads = shard.reads(len(addresses), start.transfer_id)
        except UnsupportedLayout as error:
            links.targets.refuse(start.request_id, str(error))
            return
        grants = [
            (
                links.link_to(addresses[read.producer_rank], start.producer_instance_id),
                Grant(
                    start.transfer_id,
                    start.first_block,
                    start.num_tokens,
                    start.block_ids,
                    list(read.heads),
                    read.readers,
                    shard.block_size,
                ),
                read.part,
            )
            for read in reads
        ]
        links.start(start.request_id, grants, now)
        self._decline(start, shard.declines(len(addresses), start.transfer_id))

    def _decline(self, of: TargetStart | Unneeded, ranks: Iterable[int]) -> None:
        """Tells these ranks of the source that nothing will be asked of them."""
        for rank in ranks:
            link = self.links.link_to(of.producer_addresses[rank], of.producer_instance_id)
            cancel = tgt.SendCancel(link, of.transfer_id)
            self.links.do_target([cancel])

    def _known_shard(self) -> Shard:
        if self._shard is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._shard

    def take_output(self) -> WorkerOutput | None:
        """Arrivals and failures that `take_results` has reported, once."""
        output, self._output = self._output, WorkerOutput()
        return output if output.arrivals or output.failures else None

    def close(self) -> None:
        """Ends every link and the listener. The KV cache itself is vLLM's."""
        self.links.close()
