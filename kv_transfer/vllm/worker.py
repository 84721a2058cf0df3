"""The connector's half in vLLM's worker process: what vLLM calls around each of its steps.

A step never waits for a peer, except for a copy that still reads preempted blocks, and that for a
limited time: then the copy's link is closed, which ends the copy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.protocol.consumer import Failed
from kv_transfer.protocol.messages import Cancel, Send, Subscribe
from kv_transfer.protocol.peers import Peers
from kv_transfer.vllm.step import Arrival, WorkerOutput
from pdserve.types import ErrorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_transfer.protocol.plan import Shard
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, Transport
    from kv_transfer.vllm.step import (
        ConsumerDeclined,
        ConsumerStart,
        ProducerProgress,
        StepMetadata,
    )


class WorkerHalf:
    """See the top of the file. `close` releases everything."""

    def __init__(
        self, settings: KvSettings, instance_id: str, transports: Sequence[Transport]
    ) -> None:
        self.peers = Peers(settings, instance_id, transports)
        self._shard: Shard | None = None
        self._output = WorkerOutput()
        self._ready_blocks: dict[str, int] = {}  # by transfer: noted as computed
        self.resumed: dict[str, list[int]] = {}

    def register(self, local: LocalKv, compatibility: str, shard: Shard) -> None:
        """Accept links for this KV cache."""
        self._shard = shard
        self.peers.register(local, compatibility, shard)

    def before_step(self, metadata: StepMetadata) -> None:
        """Start a step, before anything is computed: messages must not wait for the forward pass,
        and preempted blocks must not be read any more."""
        now = time.monotonic()
        # Read in this step, by runner V1 alone.
        self.resumed.clear()
        self.resumed.update(metadata.resumed)
        peers = self.peers
        with peers.lock:
            producer, consumer, perform = peers.producer, peers.consumer, peers.perform
            for expected in metadata.expected:
                perform(producer.expect(expected.transfer_id, expected.request_id, now))
            for transfer_id in metadata.preempted:
                self._ready_blocks.pop(transfer_id, None)
                producer.preempt(transfer_id)
            for c in metadata.computed:
                self._note_computed(c)
                peers.progress(c.transfer_id, c.block_ids, c.ready_tokens)
            for e in metadata.ended:
                self._ready_blocks.pop(e.transfer_id, None)
                peers.end(e.transfer_id, e.token_ids, held=e.held, request_id=e.request_id)
            for s in metadata.starts:
                self._subscribe(s, now)
            for request_id, reason in metadata.refused.items():
                consumer.refuse(request_id, reason)
            for transfer_id in metadata.released:
                perform(producer.release(transfer_id))
            for transfer_id in metadata.cancels:
                perform(consumer.cancel(transfer_id, "cancelled"))
            for u in metadata.declined:
                self._decline(u, self._known_shard().told(len(u.producer_addresses)))
            peers.wait_for_copies(metadata.preempted)
        peers.flush()

    def after_step(self, metadata: StepMetadata) -> None:
        """The step has run: what it filled can be sent."""
        peers = self.peers
        with peers.lock:
            for p in metadata.progress:
                self._note_computed(p)
                peers.progress(p.transfer_id, p.block_ids, p.ready_tokens)
        peers.flush()

    def _note_computed(self, progress: ProducerProgress) -> None:
        """Copies of the blocks that this step fills must wait for it, and for no later one."""
        first = self._ready_blocks.get(progress.transfer_id, 0)
        self.peers.local.region.computed(progress.block_ids[first:])
        block_size = self._known_shard().block_size
        self._ready_blocks[progress.transfer_id] = progress.ready_tokens // block_size

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Return requests whose blocks may be freed, requests whose load ended, and those of the
        latter that failed."""
        received: set[str] = set()
        failed: set[str] = set()
        counters = self.peers.counters
        with self.peers.lock:
            self.peers.tick()
            for outcome in self.peers.consumer.take_outcomes():
                received.add(outcome.request_id)
                if isinstance(outcome, Failed):
                    failed.add(outcome.request_id)
                    counters.failures += 1
                    self._output.failures[outcome.request_id] = ErrorInfo(
                        outcome.code, outcome.reason
                    )
                else:
                    counters.received_bytes += outcome.report.bytes
                    self._output.arrivals[outcome.request_id] = Arrival(
                        outcome.request_id, outcome.token_ids, outcome.report
                    )
            sent = self.peers.take_released()
        return sent, received, failed

    def _subscribe(self, start: ConsumerStart, now: float) -> None:
        """Subscribe at each producer rank that holds heads of this rank."""
        peers, shard, addresses = self.peers, self._known_shard(), start.producer_addresses
        try:
            reads = shard.reads(len(addresses), start.transfer_id)
        except UnsupportedLayout as error:
            peers.consumer.refuse(start.request_id, str(error))
            return
        subscriptions = [
            (
                peers.link_to(addresses[read.producer_rank], start.producer_instance_id),
                Subscribe(
                    start.transfer_id,
                    start.first_block,
                    start.num_tokens,
                    start.block_ids,
                    list(read.heads),
                    read.readers,
                ),
                read.part,
            )
            for read in reads
        ]
        peers.subscribe(start.request_id, subscriptions, now)
        self._decline(start, shard.declines(len(addresses), start.transfer_id))

    def _decline(self, of: ConsumerStart | ConsumerDeclined, ranks: Iterable[int]) -> None:
        """Tell these producer ranks that nobody subscribes there."""
        for rank in ranks:
            link = self.peers.link_to(of.producer_addresses[rank], of.producer_instance_id)
            self.peers.perform([Send(link, Cancel(of.transfer_id))])

    def _known_shard(self) -> Shard:
        if self._shard is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._shard

    def take_output(self) -> WorkerOutput | None:
        """Return the arrivals and failures that `take_results` has reported, once."""
        output, self._output = self._output, WorkerOutput()
        return output if output.arrivals or output.failures else None

    def close(self) -> None:
        """End every link and the listener. The KV cache itself is vLLM's."""
        self.peers.close()
