"""Finds workers for further attempts of an answer. Performs the decisions of Recovery."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import PdserveError, PoisonRequest, Unavailable
from router.attempt.answer import deadline_passed
from router.attempt.handoff import MOVED, RETRYABLE
from router.attempt.recovery import (
    LIVE_KV,
    Confirm,
    Constraints,
    Facts,
    GiveUp,
    Ping,
    ReserveWorkers,
    RetryStep,
    RunAttempt,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import GenerateRequest
    from router.attempt.open_answer import OpenAnswer
    from router.attempt.placer import Placer, Reservation
    from router.attempt.recovery import Decision
    from router.attempt.retry_budget import RetryBudget
    from router.attempt.streams import Moved, WorkerStream
    from router.attempt.suspects import Suspects
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.placement.values import Demand

logger = logging.getLogger(__name__)

# One engine step and one network round trip.
EXPORT_TIMEOUT_S = 5.0


class PlacesAgain(Protocol):
    """Chooses workers for an admitted request: Placer, or PoolingPlacer for embeddings."""

    def reserve_again(
        self, demand: Demand, constraints: Constraints, *, cause: str
    ) -> Reservation: ...


class Failover:
    """Finds workers for the next attempt of an answer. Without state."""

    def __init__(
        self,
        fleet: Fleet,
        placing: PlacesAgain,
        budget: RetryBudget,
        suspects: Suspects,
        metrics: RouterMetrics,
        can_leave: Callable[[GenerateRequest], bool] = lambda _: False,
    ) -> None:
        """`can_leave`: whether another region can take a request."""
        self._fleet, self._placing, self._budget = fleet, placing, budget
        self._suspects, self._metrics, self._can_leave = suspects, metrics, can_leave

    def facts(self, open_answer: OpenAnswer) -> Facts:
        is_ready = self._fleet.has_ready(open_answer.demand.model, open_answer.demand.regions)
        return Facts(
            self._fleet.now(),
            len(open_answer.answer.tokens),
            is_ready,
            bool(open_answer.is_suspect and self._suspects.occupied(open_answer)),
            not is_ready and open_answer.is_only and self._can_leave(open_answer.request),
        )

    async def find(
        self, open_answer: OpenAnswer, decision: Decision
    ) -> tuple[Reservation | None, Decision]:
        """Perform decisions until the next one is RunAttempt, on reserved workers, or GiveUp."""
        recovery = open_answer.recovery
        deadline, model = open_answer.request.deadline, open_answer.demand.model
        held: Reservation | None = None
        try:
            if isinstance(decision, Confirm):
                # Outside the turn, so that other suspects do not wait for it.
                async with asyncio.timeout_at(deadline):
                    deaths = await self._suspects.confirm(open_answer.suspicion)
                decision = recovery.confirmed(deaths, self.facts(open_answer))
            is_suspect = open_answer.is_suspect
            async with self._suspects.turn(model, deadline) if is_suspect else nullcontext():
                while not isinstance(decision, RunAttempt | GiveUp):
                    held, decision = await self._perform(open_answer, held, decision)
        except TimeoutError:
            decision = GiveUp(deadline_passed(len(open_answer.answer.tokens)))
        if held is not None:
            self.continue_on(open_answer, held, recovery.reason, recovery.cause)
        return held, decision

    async def _perform(
        self, open_answer: OpenAnswer, held: Reservation | None, decision: Decision
    ) -> tuple[Reservation | None, Decision]:
        """Perform one decision. Return the workers then reserved, and the next decision."""
        recovery = open_answer.recovery
        match decision:
            case ReserveWorkers(constraints):
                # Synchronous, so that reading which workers suspects occupy and reserving is
                # atomic.
                try:
                    held = self._reserve(open_answer, constraints, recovery.cause)
                except Unavailable as error:
                    return None, recovery.refused(error, self.facts(open_answer))
                return held, recovery.reserved(self.facts(open_answer))
            case Ping():
                assert held is not None, "workers are pinged once they are reserved"
                try:
                    silent = await self._suspects.first_silent(held.members)
                except BaseException:  # the client has left
                    held.release()
                    raise
                if silent is None:
                    return held, recovery.pinged(None, self.facts(open_answer))
                held.release()
                return None, recovery.pinged(silent.worker_id, self.facts(open_answer))
            case Wait(until):
                await self._fleet.capacity_change(until=until)
                return None, recovery.waited(self.facts(open_answer))
        raise AssertionError(f"{decision} is no step of a search")

    def _reserve(
        self, open_answer: OpenAnswer, constraints: Constraints, cause: str
    ) -> Reservation:
        """Take the tokens from the retry budget and reserve workers. Raises BudgetExhausted or
        another Unavailable."""
        without = constraints.without | self.barred(open_answer)
        demand = open_answer.demand_now()
        taking = self._budget.taking(demand.model, demand.prompt_tokens, self._fleet.now())
        # An update of weights moves all answers at once. The budget is for failures.
        with nullcontext() if open_answer.recovery.is_planned else taking:
            constraints = replace(constraints, without=without)
            return self._placing.reserve_again(demand, constraints, cause=cause)

    def barred(self, open_answer: OpenAnswer) -> frozenset[str]:
        """Return the workers that run another suspect, if this answer is one, and the other ranks
        of groups in which a rank died under it. Such ranks end too, but may still answer a ping."""
        ending = open_answer.suspicion.ending()
        return ending | self._suspects.occupied(open_answer) if open_answer.is_suspect else ending

    def reserve_elsewhere(
        self, open_answer: OpenAnswer, worker_id: str, reason: str
    ) -> Reservation:
        """Reserve workers without `worker_id`. Raises Unavailable."""
        without = Constraints(RetryStep.PAIR, without=frozenset({worker_id}))
        return self._reserve(open_answer, without, reason)

    def begin(self, open_answer: OpenAnswer, reservation: Reservation) -> None:
        """Record that the first attempt uses `reservation`."""
        open_answer.stay_with(reservation.revision)
        self._hold(open_answer, reservation)

    def note_deaths(
        self, open_answer: OpenAnswer, streams: list[WorkerStream], moved: Moved | None
    ) -> None:
        """Make the answer a suspect if a worker of the ended attempt died while running it."""
        self.end(open_answer)
        if moved is not None and moved.producer is not None:
            streams = [*streams, moved.producer]
        if (died := next((x for x in streams if x.died), None)) is not None:
            death = self._suspects.death_of(died.member, said_so=died.engine_died)
            open_answer.recovery.died(death, len(open_answer.answer.tokens))

    def end(self, open_answer: OpenAnswer) -> None:
        """Record that the answer no longer uses any worker."""
        self._suspects.release(open_answer)

    def gave_up(self, open_answer: OpenAnswer, error: PdserveError) -> None:
        """Count an answer that no other worker could continue. Log a request under which workers
        died."""
        if isinstance(error, RETRYABLE):
            model = open_answer.demand.model
            self._metrics.count("fallbacks", model, "error", error.code)
        if isinstance(error, PoisonRequest):
            logger.warning("request %s: %s", open_answer.request.request_id, error.message)

    def continue_on(
        self, open_answer: OpenAnswer, reservation: Reservation, reason: str, cause: str
    ) -> None:
        """Record in policy, metrics and log that the next attempt uses `reservation`."""
        request, answer, tokens = open_answer.request, open_answer.answer, open_answer.answer.tokens
        step, kv_from = open_answer.step_of(reservation), "prefill"
        if reservation.producer is not None:
            kv_from = LIVE_KV
        open_answer.recovery.continued(step, len(tokens), reason)
        answer.cause = reason
        model, metrics = request.model, self._metrics
        metrics.count("fallbacks", model, step, reason)
        if reason != MOVED:
            # A move is no evidence about the quality of a revision.
            metrics.count_revision(model, answer.revision, "retried")
        open_answer.stay_with(reservation.revision)
        self._hold(open_answer, reservation)
        if tokens:
            metrics.count("continuations", model, kv_from)
        workers = " and ".join([x.worker_id for x in reservation.members])
        message = "request %s: %s on %s after %d tokens: %s"
        logger.info(message, request.request_id, step, workers, len(tokens), cause)

    def _hold(self, open_answer: OpenAnswer, reservation: Reservation) -> None:
        """Keep other suspects off the workers of a suspect."""
        if open_answer.is_suspect:
            self._suspects.hold(open_answer, [x.worker_id for x in reservation.members])


class Mover:
    """Moves answers off a worker that drains or changes its role."""

    def __init__(
        self,
        placer: Placer,
        failover: Failover,
        export_timeout_s: float = EXPORT_TIMEOUT_S,
    ) -> None:
        """`export_timeout_s`: deadline for a worker to export a stream."""
        self._placer, self._failover = placer, failover
        self._export_timeout_s = export_timeout_s

    def move_off(
        self, open_answer: OpenAnswer, worker_id: str, reason: str, *, live_only: bool
    ) -> bool:
        """Continue the answer on another worker, with its KV if possible.

        Return False without any change if the answer does not use `worker_id`, is nearly done, or
        no other worker can take it. Reserves first; the attempt then ends as Moved.
        """
        attempt = open_answer.attempt
        if attempt is None:
            return False
        if attempt.can_export(worker_id):
            # If no worker can take the KV, fall through and compute the prompt again.
            with suppress(Unavailable):
                live = self._placer.reserve_live(
                    open_answer.demand_now(),
                    worker_id,
                    cause=reason,
                    without=self._failover.barred(open_answer),
                )
                attempt.export(live, self._export_timeout_s)
                return True
        if live_only or not attempt.uses(worker_id):
            return False
        with suppress(Unavailable):
            attempt.leave(self._failover.reserve_elsewhere(open_answer, worker_id, reason))
            return True
        return False

    def reserve_on(self, open_answer: OpenAnswer, member: Member) -> Reservation | None:
        """Reserve an aggregated attempt on `member`, which has the prompt's KV cached. Return None
        if it is not ready."""
        try:
            return self._placer.reserve_on(member, open_answer.demand)
        except Unavailable:
            return None
