"""Retries: the constraints of the next attempt after a failure, and the budget for recomputation.

    pair of workers ─► aggregated ─► error

A pair of workers comes first, because a long prefill on a decode worker delays every stream there.
Each step is used once. All steps become available again after `progress_tokens` more tokens, and
after a worker failure; the next attempt avoids that worker. router/request/suspects.py limits the
number of workers that may die under a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pdserve.errors import (
    BudgetExhausted,
    Overloaded,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from router.admission.tenants import TokenBucket

if TYPE_CHECKING:
    from pdserve.errors import PdserveError

# Failures of one worker, or temporary ones. Any other worker would return the other errors too.
RETRYABLE = (WorkerFailed, TransferFailed, Unavailable, Overloaded)

# In receipts: the reason of a request that left a healthy worker, and the step if its KV moved too.
MOVED = "moved"
LIVE_KV = "live_kv"


class RetryStep(StrEnum):
    """Retry steps, named as in receipts, metrics and logs. AGGREGATED uses one worker for both
    phases."""

    PAIR = "pair"
    AGGREGATED = "aggregated"


_STEPS = tuple(RetryStep)


@dataclass(frozen=True, slots=True)
class Constraints:
    """`without`: never use. `avoid`: use only if nothing else fits. `failed`: count as absent when
    the revision is chosen."""

    step: RetryStep
    without: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(slots=True)
class RetryPolicy:
    """Retry state of one answer: steps left, failed workers, and `done`, the steps taken as
    `step:reason`."""

    max_retries: int = 16
    progress_tokens: int = 16
    done: list[str] = field(default_factory=list)
    _left: tuple[RetryStep, ...] = _STEPS
    _failed: set[str] = field(default_factory=set)
    _avoid: set[str] = field(default_factory=set)
    _from_tokens: int = 0
    _moves: int = 0  # entries of `done` that no failure caused; they do not count as retries

    def failed(self, worker_id: str, error: PdserveError, tokens: int) -> None:
        """Record that an attempt failed on `worker_id` after `tokens` of the answer."""
        if tokens - self._from_tokens >= self.progress_tokens:
            self.restart()
        self._avoid.add(worker_id)
        # A failed transfer may be the fault of either worker, and an overload passes. So avoid the
        # worker, but do not exclude it.
        if not isinstance(error, TransferFailed | Overloaded):
            self._failed.add(worker_id)
            self._left = _STEPS

    def restart(self) -> None:
        """Make all steps available again."""
        self._left, self._failed, self._avoid = _STEPS, set(), set()

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


BURST_S = 30.0  # seconds of the retry budget that may be used at once


class RetryBudget:
    """Token bucket for each model: prompt and answer tokens that retries compute again.

    When a worker dies, all its requests are computed again on other workers. The budget prevents
    that from overloading them. One request may take a bucket below zero, so that a long prompt is
    not refused forever. A rate of 0 disables the limit. Times are in seconds on the caller's clock.
    """

    def __init__(self, tokens_per_s: float, burst_s: float = BURST_S) -> None:
        self._rate = tokens_per_s
        self._burst_s = burst_s
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, model: str, tokens: int, now: float) -> None:
        """Take `tokens` from the budget of `model`.

        Raises BudgetExhausted; its Retry-After is the time until the bucket has tokens again.
        """
        if not self._rate:
            return
        bucket = self._buckets.get(model)
        if bucket is None:
            bucket = self._buckets[model] = TokenBucket(60.0 * self._rate, self._burst_s)
        if wait_s := bucket.wait_s(0.0, now):
            raise BudgetExhausted(
                f"retry budget of model {model} is used up ({self._rate:g} tokens/s)",
                retry_after_s=max(1.0, wait_s),
            )
        bucket.take(tokens)

    def give_back(self, model: str, tokens: int) -> None:
        """Return tokens to the budget that were taken but not computed."""
        if model in self._buckets:
            self._buckets[model].take(-tokens)
