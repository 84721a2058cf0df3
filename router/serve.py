"""What happens to a request. Read this file first.

    log ─ trace ─ media ─ guard ─ parse ─ adapters ─ poison ─ forward ─ capsule ─ session ─ admit
                                                         ─ ledger ─ audit ─ account ─► answers

A request walks the steps, outermost first; each is a file in `router/steps/`. At the end each of
its answers is generated in one or more attempts by one loop (`_answer`):

    run an attempt: prefill and decode ─► tokens to the client ─► complete
         ▲                    │
         └─ other workers ◄───┘  a worker failed, drains, or changes its role

An attempt continues after the tokens that were delivered, which never change, with the KV of the
old worker if that is alive. `Recovery` decides what follows an attempt, `Failover` finds workers.
"""

from __future__ import annotations

import asyncio
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

from router.attempt.answer import AnswerDelta, Discard
from router.attempt.attempt import Attempt
from router.attempt.handoff import MOVED, Failed, Finished
from router.attempt.open_answer import open_answers
from router.attempt.recovery import Complete, GiveUp, RunAttempt
from router.attempt.streams import Moved
from router.attempt.suspects import Suspicion
from router.walk import Answered, RequestRecord, Walk, walk_through

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.types import GenerateRequest
    from router.attempt.answer import Out
    from router.attempt.copies import PrefixFetcher
    from router.attempt.failover import Failover, Mover
    from router.attempt.observer import StreamObserver
    from router.attempt.open_answer import OpenAnswer
    from router.attempt.placer import Reservation
    from router.attempt.recovery import Decision, RecoveryLimits
    from router.attempt.specs import SpecsOf
    from router.fleet.worker_link import Links
    from router.steps.account import AccountPoolingStep, AccountStep
    from router.steps.adapters import AdaptersStep
    from router.steps.admit import AdmitStep
    from router.steps.audit import AuditStep
    from router.steps.capsule import CapsuleStep
    from router.steps.forward import ForwardStep
    from router.steps.guard import GuardStep
    from router.steps.ledger import LedgerStep
    from router.steps.log import CountInputsStep, LogStep
    from router.steps.media import MediaStep
    from router.steps.poison import PoisonStep
    from router.steps.session import SessionStep
    from router.steps.trace import TraceStep
    from router.walk import RequestStep


class GenerateSteps(NamedTuple):
    """The steps of a request that generates, outermost first. A new step is a field here.
    A step that has nothing to do in this service is None: `trace` without tracing, `guard` without
    guards, `capsule` if no evidence is kept, `ledger` without a ledger, `audit` without audits."""

    log: LogStep
    trace: TraceStep | None
    media: MediaStep
    guard: GuardStep | None
    parse: RequestStep
    adapters: AdaptersStep
    poison: PoisonStep
    forward: ForwardStep
    capsule: CapsuleStep | None
    session: SessionStep
    admit: AdmitStep
    ledger: LedgerStep | None
    audit: AuditStep | None
    account: AccountStep


class EmbedSteps(NamedTuple):
    """The steps of an embedding. It is one of many inputs of a request, so it has no record in the
    log."""

    outcomes: CountInputsStep
    poison: PoisonStep
    admit: AdmitStep
    ledger: LedgerStep | None
    account: AccountPoolingStep


class Answering:
    """Generates answers at the end of the walk. State: the answers that are being generated."""

    def __init__(
        self,
        links: Links,
        observer: StreamObserver,
        failover: Failover,
        limits: RecoveryLimits,
        specs_of: SpecsOf,
        fetcher: PrefixFetcher | None = None,
        mover: Mover | None = None,
    ) -> None:
        """`specs_of` returns the streams of an attempt, `fetcher` copies cached KV before a prompt
        is computed, `mover` finds workers that continue with the KV of another one. Embeddings need
        neither fetcher nor mover.
        """
        self._links, self._observer = links, observer
        self._failover, self._limits, self._specs_of = failover, limits, specs_of
        self._fetcher, self._mover = fetcher, mover
        self.open: set[OpenAnswer] = set()

    async def answers(self, walk: Walk) -> Answered:
        """Generate and write all answers except the last delta, which is returned."""
        assert walk.demand is not None, "the step admit comes before"
        opened = open_answers(walk.request, walk.out, walk.demand, walk.suspicion, self._limits)
        walk.record.answers = [x.answer for x in opened]
        self.open.update(opened)
        try:
            last = await self._all(walk, opened)
        finally:
            self.open.difference_update(opened)
        return Answered(walk.record.answers, last)

    async def _all(self, walk: Walk, opened: Sequence[OpenAnswer]) -> AnswerDelta:
        """Generate all answers. Return the last delta of the one that ends last."""
        parent, *children = opened
        reservation, unfinished = walk.reservation, len(opened)
        assert reservation is not None, "the step admit comes before"
        held_back = AnswerDelta()

        async def complete(one: OpenAnswer, held: Reservation | None) -> None:
            nonlocal unfinished, held_back
            held_back = one.last_delta(await self._answer(one, held))
            unfinished -= 1
            if unfinished:
                walk.out.write(held_back)

        if (kv_worker := parent.answer.kv_worker) is None:
            await complete(parent, reservation)
            return held_back
        # Parallel sampling: one prefill and one transfer for the first answer. The others start on
        # its decode worker after that, because it then has the prompt's KV in its prefix cache.
        assert self._mover is not None, "only generated answers have children"
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(complete(parent, reservation))
                member = await kv_worker
                reservation.release_children()
                for child in children:
                    group.create_task(complete(child, self._mover.reserve_on(child, member)))
            return held_back
        except BaseExceptionGroup as errors:
            # Callers handle one PdserveError. The first failure cancelled the other answers.
            raise errors.exceptions[0] from None

    async def _answer(self, one: OpenAnswer, held: Reservation | None) -> Finished:
        """Run attempts until the answer is complete, the first on the workers `held`. The caller
        writes the last delta, which is returned. Raises PdserveError."""
        failover, recovery, moved = self._failover, one.recovery, None
        decision: Decision
        if held is None:
            decision = recovery.start_without_workers(failover.facts(one))
        else:
            one.answer.prediction, one.answer.revision = held.prediction, held.revision
            failover.begin(one, held)
            decision = recovery.start(len(one.answer.tokens))
        try:
            while True:
                match decision:
                    case Complete(end):
                        return end
                    case GiveUp(error):
                        failover.gave_up(one, error)
                        # A copy, because an error must not keep frames until a garbage collection.
                        raise copy(error) from None
                    case RunAttempt():
                        assert held is not None, "Run follows a reservation"
                        held, moved, decision = await self._attempt(one, held, moved)
                    case _:
                        held, decision = await failover.find(one, decision)
        finally:
            failover.end(one)

    async def _attempt(
        self, one: OpenAnswer, held: Reservation, moved: Moved | None
    ) -> tuple[Reservation | None, Moved | None, Decision]:
        """Run one attempt on `held`, which it releases. Return the next reservation and the end of
        the attempt, if the answer moves, and the next decision."""
        failover, recovery = self._failover, one.recovery
        asked = held.members[-1].reported.weights
        if (end_here := recovery.before_attempt(one.sampled_by, asked)) and moved is None:
            held.release()
            return None, None, end_here
        opened, copied = len(one.answer.streams), len(one.answer.copies)
        if held.fetch is not None and self._fetcher is not None and not one.is_suspect:
            await self._fetcher.fetch(one.request, one.answer, held)
        specs = self._specs_of(one.request, held, moved)
        one.attempt = Attempt(self._links, self._observer, one.request, held, one.answer, specs)
        match end := await one.attempt.run():
            case Finished():
                return None, None, Complete(end)
            case Moved():
                failover.continue_on(one, end.reservation, MOVED, "the worker drains")
                return end.reservation, end, RunAttempt()
            case Failed():
                streams = one.answer.streams[opened:] + one.answer.copies[copied:]
                failover.note_deaths(one, streams, moved)
                workers = [x.worker_id for x in held.members]
                facts = failover.facts(one)
                return None, None, recovery.failed(end, workers, held.pair, facts)

    def move_off(self, worker_id: str, reason: str, *, live_only: bool = False) -> int:
        """Move the answers of a worker to other workers, with their KV where possible. Return the
        number that move. `live_only`: answers whose KV cannot move end on this worker."""
        if (mover := self._mover) is None:
            return 0
        moving = [mover.move_off(x, worker_id, reason, live_only=live_only) for x in [*self.open]]
        return sum(moving)


class EmbeddingServer:
    """Computes embeddings. `now`: the event loop's clock."""

    def __init__(self, steps: EmbedSteps, answering: Answering, now: Callable[[], float]) -> None:
        self._walk, self._now = walk_through(steps, answering.answers), now

    async def embed(self, request: GenerateRequest) -> bytes:
        """Return the embedding of the prompt, float32 and little-endian.

        A worker failure is retried on another worker. Raises Overloaded, Unavailable,
        DeadlineExceeded, and the errors of the engine.
        """
        done = await self._walk(_begin(request, Discard(), self._now()))
        return done.answers[0].embedding


class RequestServer:
    """Serves requests that generate. `now`: the event loop's clock."""

    def __init__(
        self, steps: GenerateSteps, answering: Answering, now: Callable[[], float]
    ) -> None:
        self._walk, self._now = walk_through(steps, answering.answers), now

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        """Write the answer to `request` to `out`.

        Raises ModelNotFound, ContextLengthExceeded, Overloaded and Unavailable, mostly before the
        first write. Raises DeadlineExceeded, WorkerFailed and its subclasses, the errors of the
        engine, and Cancelled if the client does not read, at any time.
        """
        await self._walk(_begin(request, out, self._now()))


def _begin(request: GenerateRequest, out: Out, now: float) -> Walk:
    record = RequestRecord(
        request_id=request.request_id,
        model=request.model,
        tenant=request.tenant,
        service_class=request.service_class,
        session=request.session,
        prompt_tokens=len(request.prompt_token_ids),
        arrived=now,
    )
    return Walk(request, out, record, Suspicion())
