"""Workers for the further attempts of an answer, after a failure or a move."""

from __future__ import annotations

import logging
import math
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.errors import BudgetExhausted, PdserveError, TransferCorrupted, Unavailable
from router.admission import UNAVAILABLE_RETRY_AFTER_S
from router.request.attempt import deadline_passed
from router.request.handoff import Side
from router.request.placer import Reservation
from router.request.retry import LIVE_KV, MOVED, RETRYABLE, Constraints, RetryPolicy, RetryStep
from router.request.suspects import CLEARED_TOKENS, POLL_S

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdserve.types import GenerateRequest
    from router.fleet.member import Member
    from router.placement.values import Demand
    from router.request.attempt import Answer, Moved, WorkerStream
    from router.request.handoff import Failed
    from router.request.services import Services
    from router.request.suspects import Suspicion

logger = logging.getLogger(__name__)


class Failover:
    """Reserves workers for each attempt of one answer after the first.

    State: the retry steps used, the revision that the answer stays with, and the worker deaths that
    it may have caused (router/request/suspects.py).
    """

    def __init__(
        self,
        services: Services,
        request: GenerateRequest,
        demand: Demand,
        answer: Answer,
        suspicion: Suspicion,
    ) -> None:
        self.suspicion = suspicion
        self._services, self._request, self._answer = services, request, answer
        self._policy = RetryPolicy()
        self._first_revision: str | None = None
        # Length of the answer when it became a suspect, None if it is not one. A request that was
        # sent before and met deaths is a suspect from the start.
        self._suspect_at: int | None = len(request.resume) if suspicion.count else None
        if extra := demand.children_tokens:
            demand = structs.replace(demand, kv_tokens=demand.kv_tokens - extra, children_tokens=0)
        self._demand = demand

    @property
    def retries(self) -> Sequence[str]:
        """The retry steps taken, as in receipts."""
        return self._policy.done

    def begin(self, reservation: Reservation) -> None:
        """Record that the first attempt uses `reservation`."""
        self._first_revision = reservation.revision
        self._stay_with(reservation.revision)
        if self._suspect_at is not None:
            self._hold(reservation)

    def end(self) -> None:
        """Record that the answer uses no worker any more."""
        self._services.suspects.release(self)

    def moved(self, reservation: Reservation) -> None:
        """Record that the answer leaves its worker and continues with `reservation`."""
        self._continue_on(reservation, MOVED, "the worker drains")

    async def wait_for_workers(self) -> Reservation:
        """Reserve workers for an answer that has none yet."""
        give_up_at = self._services.fleet.now() + self._services.queue_timeout_s
        return await self._reserve_again(Unavailable("no worker is ready"), MOVED, give_up_at)

    async def after(self, end: Failed, reservation: Reservation) -> Reservation:
        """Reserve workers for the attempt after one that failed on `reservation`. Raises the error
        of the failure if there is no next attempt."""
        error, members = end.error, reservation.members
        if not isinstance(error, RETRYABLE):
            raise copy(error)  # its traceback will refer to `end`
        failed = members[0 if end.side is Side.PREFILL else -1].worker_id
        if isinstance(error, TransferCorrupted) and reservation.pair and end.side is Side.DECODE:
            # Either worker may have damaged the KV. Avoid the producer: it is easier to replace.
            failed, _ = reservation.pair
        self._policy.failed(failed, error, len(self._answer.tokens))
        reason, suspects = MOVED if end.was_moving else error.code, self._services.suspects
        give_up_at = self._services.fleet.now() + self._services.queue_timeout_s
        if not self.is_suspect:
            return await self._reserve_again(error, reason, give_up_at)
        await suspects.check(self._request, self.suspicion)
        deadline = self._request.deadline or math.inf
        try:
            async with suspects.turn(self._request.model, deadline):
                return await self._reserve_again(error, reason, give_up_at)
        except TimeoutError:
            raise deadline_passed(self._answer) from None

    @property
    def is_suspect(self) -> bool:
        """True if a worker died under this answer and it has not advanced enough since then."""
        since = self._suspect_at
        return since is not None and len(self._answer.tokens) - since < CLEARED_TOKENS

    def note_death(self, streams: Sequence[WorkerStream], moved: Moved | None) -> None:
        """Become a suspect if a worker of the ended attempt died with the request in flight."""
        suspects = self._services.suspects
        suspects.release(self)
        if moved is not None and moved.producer is not None:
            streams = [*streams, moved.producer]
        died = next((x for x in streams if x.died), None)
        if died is None:
            return
        if not self.is_suspect:
            # It advanced after the earlier deaths, so it did not cause them.
            self.suspicion.clear()
        suspects.note_death(self.suspicion, died.member, said_so=died.engine_died)
        self._suspect_at = len(self._answer.tokens)

    def _hold(self, reservation: Reservation) -> None:
        """Keep other suspects off the workers of `reservation`."""
        workers = [x.worker_id for x in reservation.members]
        self._services.suspects.hold(self, workers)

    async def _reserve_again(
        self, error: PdserveError, reason: str, give_up_at: float
    ) -> Reservation:
        """Reserve workers for the next attempt.

        Waits until the loop time `give_up_at` if no worker is ready. A suspect also waits for a
        worker without another suspect, until its deadline, because suspects take turns.
        """
        fleet = self._services.fleet
        deadline = self._request.deadline or math.inf
        silent: set[str] = set()
        while True:
            found = await self._try_steps(error, silent)
            if isinstance(found, Reservation):
                self._continue_on(found, reason, error.message)
                return found
            nobody_is_ready = found is not None or not fleet.has_ready(self._request.model)
            if self._policy.is_used_up or not nobody_is_ready:
                tried = " and ".join(self._policy.done)
                after = f" (after {tried})" if tried else ""
                raise self._gave_up(type(error)(f"{error.message}{after}"))
            silent.clear()  # a silent worker may answer by now
            limit = min(deadline, give_up_at)
            if self._others_suspects():
                limit = deadline
            # No event reports that another suspect has advanced, so poll.
            until = min(limit, fleet.now() + POLL_S) if self.is_suspect else limit
            await fleet.capacity_change(until=until)
            if fleet.now() >= limit:
                if limit == deadline:
                    raise deadline_passed(self._answer)
                refused = found or Unavailable(f"no worker is ready for {self._demand.wanted}")
                refused.retry_after_s = refused.retry_after_s or UNAVAILABLE_RETRY_AFTER_S
                raise self._gave_up(copy(refused))
            self._policy.restart()

    async def _try_steps(
        self, error: PdserveError, silent: set[str]
    ) -> Reservation | Unavailable | None:
        """Reserve workers by the retry steps that are left.

        Return the last error if no step found workers, None if no step was left. A suspect's
        workers are pinged first; those that do not answer are added to `silent`.
        """
        unavailable: Unavailable | None = None
        pair_helps = len(self._answer.tokens) + 1 < self._answer.max_tokens
        while (step := self._policy.next(pair_helps=pair_helps)) is not None:
            try:
                reservation = self._reserve(step, error.message, silent)
            except BudgetExhausted as exhausted:
                raise self._gave_up(exhausted) from None
            except Unavailable as nowhere:
                unavailable = copy(nowhere)  # its traceback refers to this frame
                continue
            if not self.is_suspect:
                return reservation
            member = await self._services.suspects.first_silent(reservation.members)
            if member is None:
                return reservation
            # Not sent, so no retry step is used up: try all steps without that worker.
            reservation.release()
            unavailable = Unavailable(f"worker {member.worker_id} does not answer")
            silent.add(member.worker_id)
            self._policy.restart()
        return unavailable

    def _gave_up(self, error: PdserveError) -> PdserveError:
        self._services.metrics.count("fallbacks", self._request.model, "error", error.code)
        return error

    def _others_suspects(self) -> frozenset[str]:
        """Return the workers that run another suspect, if this answer is a suspect."""
        return self._services.suspects.occupied(self) if self.is_suspect else frozenset()

    def _barred(self) -> frozenset[str]:
        """Return the workers that run another suspect, and those that end with a rank that died
        under this answer: they may still answer a ping."""
        return self._others_suspects() | self.suspicion.ending()

    def _reserve(
        self, constraints: Constraints, cause: str, silent: Collection[str] = ()
    ) -> Reservation:
        """Take the tokens from the retry budget and reserve workers. Raises BudgetExhausted or
        another Unavailable."""
        without = constraints.without.union(silent, self._barred())
        constraints = replace(constraints, without=without)
        demand, services = self._demand_now(), self._services
        services.budget.take(demand.model, demand.prompt_tokens, services.fleet.now())
        try:
            return services.placer.reserve_again(demand, constraints, cause=cause)
        except Unavailable:
            services.budget.give_back(demand.model, demand.prompt_tokens)
            raise

    def reserve_on(self, member: Member) -> Reservation | None:
        """Reserve an aggregated attempt on `member`. Return None if it is not ready."""
        try:
            return self._services.placer.reserve_on(member, self._demand)
        except Unavailable:
            return None

    def reserve_live(self, worker_id: str, reason: str) -> Reservation:
        """Reserve a decode worker that continues with the KV of `worker_id`. Raises Unavailable."""
        demand, without = self._demand_now(), self._barred()
        return self._services.placer.reserve_live(demand, worker_id, cause=reason, without=without)

    def reserve_elsewhere(self, worker_id: str, reason: str) -> Reservation:
        """Reserve workers without `worker_id`. Raises Unavailable."""
        return self._reserve(Constraints(RetryStep.PAIR, without=frozenset({worker_id})), reason)

    def _demand_now(self) -> Demand:
        """Return the demand of the next attempt. Its prompt includes the tokens delivered."""
        made = tuple(self._answer.tokens[len(self._request.resume) :])
        return structs.replace(
            self._demand,
            prompt_tokens=self._demand.prompt_tokens + len(made),
            prefill_only=False,
            token_ids=(*self._demand.token_ids, *made),
            hashes={},
        )

    def _stay_with(self, revision: str | None) -> None:
        """Use `revision` for later attempts while it has workers."""
        if self._demand.revision != revision:
            self._demand = structs.replace(self._demand, revision=revision)

    def _continue_on(self, reservation: Reservation, reason: str, cause: str) -> None:
        """Record in policy, metrics and log that the next attempt uses `reservation`."""
        prefill, tokens = reservation.prefill, len(self._answer.tokens)
        step, kv_from = RetryStep.PAIR.value, "prefill"
        if reservation.producer is not None:
            step = kv_from = LIVE_KV
        elif prefill is None:
            step = RetryStep.AGGREGATED.value
        self._policy.continued(step, reason, tokens)
        self._answer.cause = reason
        model, metrics = self._request.model, self._services.metrics
        metrics.count("fallbacks", model, step, reason)
        if reason != MOVED:
            # A move says nothing about the quality of a revision.
            metrics.count_revision(model, self._first_revision, "retried")
        self._stay_with(reservation.revision)
        if self.is_suspect:
            self._hold(reservation)
        if tokens:
            metrics.count("continuations", model, kv_from)
        workers = [x.worker_id for x in reservation.members]
        logger.info(
            "request %s: %s on %s after %d tokens: %s",
            self._request.request_id,
            step,
            " and ".join(workers),
            tokens,
            cause,
        )
