"""What follows the end of an attempt, as a state machine without I/O.

    start ─► run ─► ended ─► complete
              ▲      │ failed
              │      ▼
              │    confirm (a worker died; was it this request?) ─► give up
              │      ▼
              ├── place (a pair of workers, then one for both phases) ◄─┐
              │      ▼                                                  │ waited
              └─── ping (a suspect's workers must answer)     wait (nobody is ready)

router/serve.py performs each decision and reports the result, which returns the next decision.

A pair of workers comes first, because a long prefill on a decode worker delays every stream there.
Each step is used once. All steps become available again after `progress_tokens` more tokens, and
after a worker failure; the next attempt avoids that worker. A request that was in flight when a
worker died is a suspect (router/attempt/suspects.py).
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from pdserve.errors import (
    AnswerAborted,
    BudgetExhausted,
    Overloaded,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WeightsChanging,
)
from pdserve.types import FinishReason, StaleKv, StreamDelta
from router.admission import UNAVAILABLE_RETRY_AFTER_S
from router.attempt.answer import deadline_passed
from router.attempt.handoff import MOVED, RETRYABLE, Failed, Finished, Side
from router.attempt.suspects import CLEARED_TOKENS, POLL_S, Death, Suspicion, poison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.config import QueueConfig, RetryConfig
    from pdserve.types import ModelWeights
    from router.fleet.health import Pair

# In receipts: the step of a request that moved with its KV.
LIVE_KV = "live_kv"


class RetryStep(StrEnum):
    """Retry steps, named as in receipts, metrics and logs. AGGREGATED uses one worker for both
    phases, POOLING the only worker of an embedding."""

    PAIR = "pair"
    AGGREGATED = "aggregated"
    POOLING = "pooling"


GENERATE_STEPS = (RetryStep.PAIR, RetryStep.AGGREGATED)


@dataclass(frozen=True, slots=True)
class Constraints:
    """`without`: never use. `avoid`: use only if nothing else fits. `failed`: count as absent when
    the revision is chosen."""

    step: RetryStep
    without: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


class RetryPolicy(Struct):
    """Retry state of one answer: steps left, failed workers, and `done`, the steps taken as
    `step:reason`."""

    max_retries: int = 16
    progress_tokens: int = 16
    steps: tuple[RetryStep, ...] = GENERATE_STEPS
    done: list[str] = []
    _left: tuple[RetryStep, ...] = ()
    _failed: set[str] = set()
    _avoid: set[str] = set()
    _from_tokens: int = 0
    _moves: int = 0  # entries of `done` that no failure caused; they do not count as retries

    def __post_init__(self) -> None:
        self._left = self.steps

    def failed(self, worker_id: str, error: PdserveError, tokens: int) -> None:
        """Record that an attempt failed on `worker_id` after `tokens` of the answer."""
        if tokens - self._from_tokens >= self.progress_tokens:
            self.restart()
        self._avoid.add(worker_id)
        # A failed transfer may be the fault of either worker, and an overload passes. So avoid the
        # worker, but do not exclude it.
        if not isinstance(error, TransferFailed | Overloaded):
            self._failed.add(worker_id)
            self._left = self.steps

    def restart(self) -> None:
        """Make all steps available again."""
        self._left, self._failed, self._avoid = self.steps, set(), set()

    @property
    def is_used_up(self) -> bool:
        return len(self.done) - self._moves >= self.max_retries

    def next(self, *, pair_helps: bool) -> Constraints | None:
        """Use up the next step and return its constraints, or None if no step is left."""
        if not pair_helps:
            self._left = tuple(x for x in self._left if x is not RetryStep.PAIR)
        if self.is_used_up or not self._left:
            return None
        step, *left = self._left
        self._left = tuple(left)
        failed = frozenset(self._failed)
        # The last step only avoids failed workers: one of them may be the only one left.
        without = failed if step is RetryStep.PAIR else frozenset()
        return Constraints(step, without, frozenset(self._avoid), failed)

    def continued(self, step: str, reason: str, tokens: int) -> None:
        """Record that the next attempt starts after `tokens` of the answer."""
        self.done.append(f"{step}:{reason}")
        self._moves += reason == MOVED
        self._from_tokens = tokens


class Facts(NamedTuple):
    """External inputs of a decision. `now`: the loop's time. `tokens`: length of the answer.
    `is_anybody_ready`: the model has a ready worker. `is_crowded`: another suspect occupies
    workers. `can_leave`: nobody is ready, and another region can continue the answer."""

    now: float
    tokens: int
    is_anybody_ready: bool = True
    is_crowded: bool = False
    can_leave: bool = False


class Complete(Struct, frozen=True):
    """The answer is complete."""

    end: Finished


class GiveUp(Struct, frozen=True):
    """The answer fails with this error."""

    error: PdserveError


class RunAttempt(Struct, frozen=True):
    """Run an attempt on the reserved workers."""


class ReserveWorkers(Struct, frozen=True):
    """Reserve workers."""

    constraints: Constraints


class Ping(Struct, frozen=True):
    """Ping the reserved workers: a suspect sent to a dead worker would be blamed for its death."""


class Confirm(Struct, frozen=True):
    """Wait until each death under the request is certain or refuted."""


class Wait(Struct, frozen=True):
    """Wait for a change of capacity, at the latest until the loop time `until`."""

    until: float


ABORTED = Complete(Finished(StreamDelta(0), FinishReason.ABORT))
"""The answer ends with the tokens that it has."""

Decision = Complete | GiveUp | RunAttempt | ReserveWorkers | Ping | Confirm | Wait


class RecoveryLimits(NamedTuple):
    """`queue.timeout_s`: maximum wait for another worker. `retry.max_worker_deaths`: number of
    workers that die under one request before it is refused. `steps`: the retry steps in order.
    `stale_kv`: of requests that do not say."""

    queue: QueueConfig
    retry: RetryConfig
    steps: tuple[RetryStep, ...] = GENERATE_STEPS
    max_retries: int = 16
    stale_kv: StaleKv = StaleKv.RECOMPUTE


class Recovery:
    """Decides what follows each attempt of one answer.

    State: the retry steps used; `reason`, `cause` and deadline of the current search for workers,
    and the workers that did not answer a ping in it; and the length of the answer when it became a
    suspect.
    """

    def __init__(
        self,
        limits: RecoveryLimits,
        suspicion: Suspicion,
        *,
        max_tokens: int,
        resumed: int = 0,
        deadline: float | None = None,
        wanted: str = "",
        stale_kv: StaleKv = StaleKv.RECOMPUTE,
    ) -> None:
        """`suspicion`: the deaths under the request, shared by its answers. `resumed`: tokens that
        the client had before. `deadline`: loop time. `wanted`: model and adapter, for messages."""
        self._ends_with_weights = stale_kv is StaleKv.ABORT
        self._limits, self._suspicion = limits, suspicion
        self._max_tokens, self._wanted = max_tokens, wanted
        self._deadline = math.inf if deadline is None else deadline
        self._policy = RetryPolicy(limits.max_retries, steps=limits.steps)
        # Length of the answer when it became a suspect, None if it is not one. A request that was
        # sent before and met deaths is a suspect from the start.
        self._suspect_at: int | None = resumed if suspicion.count else None
        self.reason = ""
        self._cause: PdserveError = Unavailable("no worker is ready")
        self._refused: Unavailable | None = None
        self._silent: frozenset[str] = frozenset()
        self._give_up_at = math.inf

    @property
    def retries(self) -> list[str]:
        """The retry steps taken, as in receipts."""
        return self._policy.done

    @property
    def cause(self) -> str:
        """Why the answer needs other workers, for logs and `explain`."""
        return self._cause.message

    @property
    def is_planned(self) -> bool:
        """True if an administrator caused the search, not a failure."""
        return isinstance(self._cause, WeightsChanging)

    def is_suspect(self, tokens: int) -> bool:
        """True if a worker died under this answer and it has not advanced enough since then."""
        since = self._suspect_at
        return since is not None and tokens - since < CLEARED_TOKENS

    def start(self, tokens: int) -> Complete | RunAttempt:
        """Begin an answer of `tokens` tokens that has workers."""
        if tokens >= self._max_tokens:
            return Complete(Finished(StreamDelta(0), FinishReason.LENGTH))
        return RunAttempt()

    def start_without_workers(self, facts: Facts) -> Decision:
        """Begin an answer whose workers could not be reserved."""
        if isinstance(done := self.start(facts.tokens), Complete):
            return done
        self._search(Unavailable("no worker is ready"), MOVED, facts)
        return self._next(facts)

    def died(self, death: Death, tokens: int) -> None:
        """Record that a worker died with this answer in flight."""
        if not self.is_suspect(tokens):
            # It advanced after the earlier deaths, so it did not cause them.
            self._suspicion.clear()
        self._suspicion.add(death)
        self._suspect_at = tokens

    def failed(
        self, end: Failed, workers: Sequence[str], pair: Pair | None, facts: Facts
    ) -> Decision:
        """Decide after an attempt that failed on `workers`, in order of their phases."""
        error = end.error
        if isinstance(error, AnswerAborted):
            return ABORTED
        if not isinstance(error, RETRYABLE):
            return GiveUp(error)
        if isinstance(error, WeightsChanging):
            if self._ends_with_weights and facts.tokens:
                return ABORTED
            # Nobody failed. Wait, because the report of the worker may arrive after its refusal.
            self._search(error, MOVED, facts)
            return Wait(min(self._limit(facts), facts.now + POLL_S))
        worker_id = workers[0 if end.side is Side.PREFILL else -1]
        if isinstance(error, TransferCorrupted) and pair and end.side is Side.DECODE:
            # Either worker may have damaged the KV. Avoid the producer: it is easier to replace.
            worker_id, _ = pair
        self._policy.failed(worker_id, error, facts.tokens)
        # Fixed now: a suspect's wait for its turn counts.
        self._search(error, MOVED if end.was_moving else error.code, facts)
        deaths = self._suspicion.count
        if self.is_suspect(facts.tokens) and deaths >= self._limits.retry.max_worker_deaths:
            return Confirm()
        return self._next(facts)

    def before_attempt(
        self, sampled_by: ModelWeights | None, asked: ModelWeights
    ) -> Complete | None:
        """Decide before an attempt at workers with the weights `asked`. `sampled_by`: the weights
        that sampled the last token so far, None if there is none."""
        is_stale = sampled_by is not None and sampled_by.identity != asked.identity
        return ABORTED if is_stale and self._ends_with_weights else None

    def confirmed(self, deaths: int, facts: Facts) -> Decision:
        """Decide after the number of deaths under the request is confirmed."""
        if deaths >= self._limits.retry.max_worker_deaths:
            return GiveUp(poison(deaths, self._limits.retry.max_worker_deaths))
        return self._next(facts)

    def reserved(self, facts: Facts) -> Decision:
        return Ping() if self.is_suspect(facts.tokens) else RunAttempt()

    def refused(self, error: Unavailable, facts: Facts) -> Decision:
        """Decide after a placement that found no workers."""
        if isinstance(error, BudgetExhausted):
            return GiveUp(error)
        self._refused = copy(error)  # its traceback refers to frames
        return self._next(facts)

    def pinged(self, silent: str | None, facts: Facts) -> Decision:
        """Decide after a ping; `silent` is the worker that did not answer."""
        if silent is None:
            return RunAttempt()
        # Nothing was sent, so no retry step is used up. Try all steps without that worker.
        self._refused = Unavailable(f"worker {silent} does not answer")
        self._silent |= {silent}
        self._policy.restart()
        return self._next(facts)

    def waited(self, facts: Facts) -> Decision:
        """Decide after a wait."""
        limit = self._limit(facts)
        if facts.now >= limit:
            if limit == self._deadline:
                return GiveUp(deadline_passed(facts.tokens))
            refused = self._refused or Unavailable(f"no worker is ready for {self._wanted}")
            refused.retry_after_s = refused.retry_after_s or UNAVAILABLE_RETRY_AFTER_S
            return GiveUp(refused)
        self._refused = None
        self._policy.restart()
        return self._next(facts)

    def continued(self, step: str, tokens: int, reason: str = "") -> None:
        """Record that the next attempt starts after `tokens`, on workers found by `step`."""
        self._policy.continued(step, reason or self.reason, tokens)

    def _search(self, cause: PdserveError, reason: str, facts: Facts) -> None:
        self._cause, self.reason = cause, reason
        self._refused, self._silent = None, frozenset()
        self._give_up_at = facts.now + self._limits.queue.timeout_s

    def _next(self, facts: Facts) -> Decision:
        pair_helps = facts.tokens + 1 < self._max_tokens
        constraints = self._policy.next(pair_helps=pair_helps)
        if constraints is not None:
            without = constraints.without | self._silent
            return ReserveWorkers(replace(constraints, without=without))
        is_nobody_ready = self._refused is not None or not facts.is_anybody_ready
        if self._policy.is_used_up or not is_nobody_ready:
            tried = " and ".join(self._policy.done)
            after = f" (after {tried})" if tried else ""
            return GiveUp(type(self._cause)(f"{self._cause.message}{after}"))
        if facts.can_leave:
            return GiveUp(self._refused or self._cause)
        self._silent = frozenset()  # a silent worker may answer by now
        limit = self._limit(facts)
        # No event reports that another suspect has advanced, so poll.
        is_suspect = self.is_suspect(facts.tokens)
        return Wait(min(limit, facts.now + POLL_S) if is_suspect else limit)

    def _limit(self, facts: Facts) -> float:
        """Return the time to give up. Suspects take turns, so a suspect waits for a worker without
        another suspect until its deadline."""
        if facts.is_crowded and self.is_suspect(facts.tokens):
            return self._deadline
        return min(self._deadline, self._give_up_at)
