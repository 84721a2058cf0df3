"""The connector's half in vLLM's worker process, called before and after each engine step.

A step waits for a peer in one case only: a copy still reads preempted blocks. That wait is limited;
then the copy's link is closed, which ends the copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kv_transfer.errors import UnsupportedLayout
from kv_transfer.protocol.consumer import ReceiveFailed
from kv_transfer.protocol.driver import COPY_END_S
from kv_transfer.protocol.messages import Cancel, GroupBlocks, Send, Subscribe
from kv_transfer.vllm.step import Arrival, ProducerEnded, ProducerProgress, WorkerOutput
from pdserve.types import ErrorInfo

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator

    from kv_transfer.cache.host_memory import StepEnd
    from kv_transfer.protocol.consumer import Received
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.peers import Peers
    from kv_transfer.protocol.plan import CopyPlan, Read
    from kv_transfer.protocol.producer import Action
    from kv_transfer.vllm.step import ConsumerDeclined, ConsumerStart, StepMetadata


# Inputs of the producer state machine. A string releases the transfer of this id.
_ProducerEvent = ProducerProgress | ProducerEnded | str


@dataclass(slots=True, eq=False)
class _EnqueuedStep:
    """An engine step that the GPU may still run. When it has ended, the producer state machine gets
    `progress`, then in `then` the ends and releases of the same transfers, and the loads `starts`
    begin."""

    end: StepEnd
    progress: list[ProducerProgress] = field(default_factory=list)
    then: list[_ProducerEvent] = field(default_factory=list)
    starts: list[ConsumerStart] = field(default_factory=list)


class WorkerHalf:
    """The worker half. Owns `peers`. Released by `close`."""

    def __init__(self, peers: Peers, plan: CopyPlan, *, has_draft_kv: bool = False) -> None:
        self.peers = peers
        self.driver = peers.driver
        self._plan = plan
        self._has_draft_kv = has_draft_kv
        self._output = WorkerOutput()
        self._steps: list[_EnqueuedStep] = []  # oldest first; guarded by the driver's lock
        self._to_watch: SimpleQueue[_EnqueuedStep | None] = SimpleQueue()
        self._watcher: threading.Thread | None = None
        # Every load asks for the route to its producer before it sends anything.
        self._route = lru_cache(maxsize=1024)(self._find_route)

    def before_step(self, metadata: StepMetadata) -> None:
        """Apply a step's metadata before the forward pass, so that messages do not wait for it and
        no copy still reads preempted blocks."""
        self.driver.drive(lambda now: self._apply(metadata, now))
        self.driver.wait_for_copies(metadata.preempted)

    def after_step(self, metadata: StepMetadata) -> None:
        """Announce the step's progress when the enqueued step has run."""
        if metadata.progress:
            self.driver.drive(lambda now: self._after_enqueued(metadata.progress, now))

    def _apply(self, metadata: StepMetadata, now: float) -> Iterator[Action[Link]]:
        producer, consumer = self.driver.producer, self.driver.consumer
        for expected in metadata.expected:
            yield from producer.expect(expected.transfer_id, expected.request_id, now)
        for transfer_id in metadata.preempted:
            for step in self._steps:
                step.progress = [p for p in step.progress if p.transfer_id != transfer_id]
            producer.preempt(transfer_id)
        if metadata.computed:
            yield from self._after_enqueued(metadata.computed, now)
        for ended in metadata.ended:
            yield from self._after_progress(ended.transfer_id, ended, now)
        yield from self._start(metadata.starts, now)
        for request_id, refusal in metadata.refused.items():
            consumer.refuse(request_id, refusal.message, refusal.code)
        for transfer_id in metadata.released:
            yield from self._after_progress(transfer_id, transfer_id, now)
        for step in self._steps:
            for start in [x for x in step.starts if x.transfer_id in metadata.cancels]:
                step.starts.remove(start)
                # The producer learns of the cancel only by a subscription.
                yield from self._subscribe(start, now)
        for transfer_id in metadata.cancels:
            yield from consumer.cancel(transfer_id, "cancelled")
        for declined in metadata.declined:
            ranks = self._plan.notifies(len(declined.producer_addresses))
            yield from self._decline(declined, ranks)

    def _after_enqueued(
        self, progress: list[ProducerProgress], now: float
    ) -> Iterable[Action[Link]]:
        """Report `progress` to the producer when the steps enqueued so far have run.

        Announcing blocks only after their step has two reasons. A copy would otherwise wait on the
        GPU for the step and delay the copies of earlier steps. And a consumer that copies by itself
        must not read blocks before they are computed.
        """
        end = self.driver.local.memory.step_end()
        if end is None:
            return self._report(progress, now)
        self._await(_EnqueuedStep(end, progress))
        return ()

    def _start(self, starts: list[ConsumerStart], now: float) -> Iterator[Action[Link]]:
        """Start loads into reserved blocks.

        With a draft model, start them when the steps enqueued so far have run. vLLM frees the
        blocks of an ended request when its last tokens are sampled. The draft model runs after that
        and may still write to these blocks.
        """
        end = None
        if starts and self._has_draft_kv:
            end = self.driver.local.memory.step_end()
        if end is not None:
            self._await(_EnqueuedStep(end, starts=starts))
            return
        for start in starts:
            yield from self._subscribe(start, now)

    def _await(self, step: _EnqueuedStep) -> None:
        self._steps.append(step)
        self._to_watch.put(step)
        if self._watcher is None:
            self._watcher = self.driver.start_thread("kv-steps", self._watch)

    def _after_progress(
        self, transfer_id: str, event: _ProducerEvent, now: float
    ) -> Iterable[Action[Link]]:
        """Report the transfer's end or release to the producer, after its last progress."""
        for step in reversed(self._steps):
            if any(each.transfer_id == transfer_id for each in step.progress):
                step.then.append(event)
                return ()
        return self._report([event], now)

    def _report(self, events: Iterable[_ProducerEvent], now: float) -> Iterator[Action[Link]]:
        producer = self.driver.producer
        for event in events:
            match event:
                case ProducerProgress(transfer_id, tables, ready_tokens):
                    yield from producer.progress(transfer_id, tables, ready_tokens, now)
                case ProducerEnded(transfer_id, token_ids, held, request_id):
                    yield from producer.end(
                        transfer_id, token_ids, now, held=held, request_id=request_id
                    )
                case str():
                    yield from producer.release(event)

    def _watch(self) -> None:
        """Watcher thread: wait for the end of each step, in order. Raises RuntimeError at an error
        of CUDA."""
        while (step := self._to_watch.get()) is not None:
            step.end.synchronize()
            self.driver.drive(lambda now, step=step: self._step_ended(step, now))  # type: ignore[misc]

    def _step_ended(self, step: _EnqueuedStep, now: float) -> Iterator[Action[Link]]:
        self._steps.remove(step)
        yield from self._report([*step.progress, *step.then], now)
        for start in step.starts:
            yield from self._subscribe(start, now)

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Return three sets of request ids: blocks may be freed, load ended, load failed. The third
        is a subset of the second."""
        received: set[str] = set()
        failed: set[str] = set()
        sent, outcomes = self.driver.take_results()
        for outcome in outcomes:
            received.add(outcome.request_id)
            if isinstance(outcome, ReceiveFailed):
                failed.add(outcome.request_id)
                error = ErrorInfo(outcome.code, outcome.reason)
                self._output.failures[outcome.request_id] = error
            else:
                self._output.arrivals[outcome.request_id] = _arrival_of(outcome)
        return sent, received, failed

    def take_received(self) -> list[Arrival]:
        """Return the loads that have succeeded on this rank since the last call, on any thread.
        `take_results` reports them, too."""
        return [_arrival_of(outcome) for outcome in self.driver.take_received()]

    def _subscribe(self, start: ConsumerStart, now: float) -> Iterator[Action[Link]]:
        """Subscribe at each producer rank from which this rank reads."""
        plan, addresses = self._plan, start.producer_addresses
        try:
            reads, declines = self._route(
                start.producer_instance_id, len(addresses), start.producer_stage_layers
            )
        except UnsupportedLayout as error:
            self.driver.consumer.refuse(start.request_id, str(error))
            return
        subscriptions = [
            (
                self.peers.link_to(addresses[read.producer_rank], start.producer_instance_id),
                Subscribe(
                    start.transfer_id,
                    start.num_tokens,
                    [
                        GroupBlocks(
                            g.part.group,
                            *start.blocks[plan.shards[g.part.group].group.table],
                            list(g.heads),
                            list(g.layers),
                        )
                        for g in read.groups
                    ],
                    read.readers,
                ),
                [g.part for g in read.groups],
            )
            for read in reads
        ]
        yield from self.driver.consumer.subscribe(start.request_id, subscriptions, now)
        yield from self._decline(start, declines)

    def _find_route(
        self, producer_id: str, num_ranks: int, stage_layers: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[Read, ...], tuple[int, ...]]:
        """Return (reads, declines) of this rank at a producer. Raises UnsupportedLayout."""
        ranks = self._plan.ranks_of(num_ranks, stage_layers)
        names = self.peers.instance_id, producer_id
        return self._plan.reads(ranks, names), self._plan.declines(ranks, names)

    def _decline(
        self, of: ConsumerStart | ConsumerDeclined, ranks: Iterable[int]
    ) -> Iterator[Action[Link]]:
        """Notify these producer ranks that no consumer rank will subscribe."""
        for rank in ranks:
            link = self.peers.link_to(of.producer_addresses[rank], of.producer_instance_id)
            yield Send(link, Cancel(of.transfer_id))

    def take_output(self) -> WorkerOutput | None:
        """Return the arrivals and failures of the last `take_results`, once; else None."""
        output, self._output = self._output, WorkerOutput()
        return output if output.arrivals or output.failures else None

    def close(self) -> None:
        """End every link and the listener. vLLM owns and frees the KV cache."""
        self._to_watch.put(None)
        self.peers.close()
        if self._watcher is not None:
            self._watcher.join(COPY_END_S)


def _arrival_of(received: Received) -> Arrival:
    return Arrival(received.request_id, received.token_ids, received.report)
