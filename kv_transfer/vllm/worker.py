"""The connector's half in vLLM's worker process: what vLLM calls around each of its steps.

A step never waits for a peer, except for a copy that still reads preempted blocks, and that for a
limited time: then the copy's link is closed, which ends the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.protocol.consumer import Failed
from kv_transfer.protocol.messages import Cancel, GroupBlocks, Send, Subscribe
from kv_transfer.protocol.peers import COPY_END_S, Peers
from kv_transfer.vllm.step import Arrival, ProducerEnded, ProducerProgress, WorkerOutput
from pdserve.types import ErrorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_transfer.memory import StepEnd
    from kv_transfer.protocol.plan import Plan
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import LocalKv, Transport
    from kv_transfer.vllm.step import (
        ConsumerDeclined,
        ConsumerStart,
        StepMetadata,
    )

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    """An engine step that the GPU may still run, and what to tell the producer when it has ended:
    its progress, then the ends and releases (transfer ids) of the same transfers."""

    end: StepEnd
    progress: list[ProducerProgress]
    then: list[ProducerEnded | str] = field(default_factory=list)


class WorkerHalf:
    """See the top of the file. `close` releases everything."""

    def __init__(
        self,
        settings: KvSettings,
        instance_id: str,
        transports: Sequence[Transport],
        *,
        has_draft_kv: bool = False,
    ) -> None:
        self._has_draft_kv = has_draft_kv
        self.peers = Peers(settings, instance_id, transports)
        self._plan: Plan | None = None
        self._output = WorkerOutput()
        self._running: list[_Running] = []  # oldest first; guarded by the lock of `peers`
        self._to_follow: SimpleQueue[_Running | None] = SimpleQueue()
        self._follower: threading.Thread | None = None
        self.resumed: dict[str, list[int]] = {}

    def register(self, local: LocalKv, compatibility: str, plan: Plan) -> None:
        """Accept links for this KV cache."""
        self._plan = plan
        self.peers.register(local, compatibility, plan)

    def before_step(self, metadata: StepMetadata) -> None:
        """Start a step, before anything is computed: messages must not wait for the forward pass,
        and preempted blocks must not be read any more."""
        if metadata.starts and self._has_draft_kv:
            # vLLM gives away the blocks of an ended request when its last tokens are there. Its
            # draft runs after that, and may still write to them.
            end = self.peers.local.regions[0].step_end()
            if end is not None:
                end.synchronize()
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
                for step in self._running:
                    step.progress = [p for p in step.progress if p.transfer_id != transfer_id]
                producer.preempt(transfer_id)
            self._enqueued(metadata.computed)
            for e in metadata.ended:
                self._after_progress(e.transfer_id, e)
            for s in metadata.starts:
                self._subscribe(s, now)
            for request_id, reason in metadata.refused.items():
                consumer.refuse(request_id, reason)
            for transfer_id in metadata.released:
                self._after_progress(transfer_id, transfer_id)
            for transfer_id in metadata.cancels:
                perform(consumer.cancel(transfer_id, "cancelled"))
            for u in metadata.declined:
                self._decline(u, self._known_plan().told(len(u.producer_addresses)))
            peers.wait_for_copies(metadata.preempted)
        peers.flush()

    def after_step(self, metadata: StepMetadata) -> None:
        """The step is enqueued: what it fills can be sent when it has run."""
        with self.peers.lock:
            self._enqueued(metadata.progress)
        self.peers.flush()

    def _enqueued(self, progress: list[ProducerProgress]) -> None:
        """Tell the producer when the steps that are enqueued now have run. The caller holds the
        lock.

        Nothing is announced earlier. So no copy waits on the GPU for a step, where it would hold up
        copies of earlier steps, and a consumer that copies by itself reads what was computed.
        """
        if not progress:
            return
        end = self.peers.local.regions[0].step_end()
        if end is None:
            self._tell(progress)
            return
        step = _Running(end, progress)
        self._running.append(step)
        self._to_follow.put(step)
        if self._follower is None:
            self._follower = threading.Thread(target=self._follow, daemon=True, name="kv-steps")
            self._follower.start()

    def _after_progress(self, transfer_id: str, what: ProducerEnded | str) -> None:
        """Tell the producer of the transfer's end or release, behind its last progress."""
        for step in reversed(self._running):
            if any(each.transfer_id == transfer_id for each in step.progress):
                step.then.append(what)
                return
        self._tell([what])

    def _tell(self, what: Iterable[ProducerProgress | ProducerEnded | str]) -> None:
        peers = self.peers
        for each in what:
            if isinstance(each, ProducerProgress):
                peers.progress(each.transfer_id, each.tables, each.ready_tokens)
            elif isinstance(each, ProducerEnded):
                peers.end(
                    each.transfer_id, each.token_ids, held=each.held, request_id=each.request_id
                )
            else:
                peers.perform(peers.producer.release(each))

    def _follow(self) -> None:
        """Wait for the end of each step, in order. A GPU that fails ends the engine, too."""
        self.peers.local.regions[0].enter_thread()
        while (step := self._to_follow.get()) is not None:
            try:
                step.end.synchronize()
            except RuntimeError:  # what torch raises for CUDA's errors
                logger.exception("an engine step failed: its KV is not sent")
                return
            with self.peers.lock:
                self._running.remove(step)
                self._tell([*step.progress, *step.then])
            self.peers.flush()

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
        peers, plan, addresses = self.peers, self._known_plan(), start.producer_addresses
        try:
            reads = plan.reads(len(addresses), start.transfer_id)
        except UnsupportedLayout as error:
            peers.consumer.refuse(start.request_id, str(error))
            return
        subscriptions = [
            (
                peers.link_to(addresses[read.producer_rank], start.producer_instance_id),
                Subscribe(
                    start.transfer_id,
                    start.num_tokens,
                    [
                        GroupBlocks(g.part.group, *start.blocks[g.part.group], list(g.heads))
                        for g in read.groups
                    ],
                    read.readers,
                ),
                [g.part for g in read.groups],
            )
            for read in reads
        ]
        peers.subscribe(start.request_id, subscriptions, now)
        self._decline(start, plan.declines(len(addresses), start.transfer_id))

    def _decline(self, of: ConsumerStart | ConsumerDeclined, ranks: Iterable[int]) -> None:
        """Tell these producer ranks that nobody subscribes there."""
        for rank in ranks:
            link = self.peers.link_to(of.producer_addresses[rank], of.producer_instance_id)
            self.peers.perform([Send(link, Cancel(of.transfer_id))])

    def _known_plan(self) -> Plan:
        if self._plan is None:
            raise KvTransferError("the KV cache is not registered yet")
        return self._plan

    def take_output(self) -> WorkerOutput | None:
        """Return the arrivals and failures that `take_results` has reported, once."""
        output, self._output = self._output, WorkerOutput()
        return output if output.arrivals or output.failures else None

    def close(self) -> None:
        """End every link and the listener. The KV cache itself is vLLM's."""
        self._to_follow.put(None)
        self.peers.close()
        if self._follower is not None:
            self._follower.join(COPY_END_S)
