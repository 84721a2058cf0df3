"""Retries: what the next attempt of a request may use after a failure, and how much may be
computed again.

    pair of workers ─► aggregated ─► error

A pair of workers comes first, because a long prefill on a decode worker delays every stream there.
Each step is used once. All steps are available again after `progress_tokens` more tokens, and after
the failure of a worker, which the next attempt avoids. A request under which `max_worker_failures`
workers failed without that progress is not tried on yet another, because it may be what kills them.
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

# Failures of a worker or of a moment. Other errors would happen again elsewhere.
RETRYABLE = (WorkerFailed, TransferFailed, Unavailable, Overloaded)

# The reason in receipts of a request that left a healthy worker, and the step if its KV came along.
MOVED = "moved"
LIVE_KV = "live_kv"


class RetryStep(StrEnum):
    """Steps under the names that receipts, metrics and logs use. AGGREGATED is one worker for both
    phases."""

    PAIR = "pair"
    AGGREGATED = "aggregated"


_STEPS = tuple(RetryStep)


@dataclass(frozen=True, slots=True)
class Constraints:
    """An attempt may use none of `without`, and none of `avoid` if there are others. `failed` are
    workers that failed the request: their revision may have no other."""

    step: RetryStep
    without: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(slots=True)
class RetryPolicy:
    """State of one answer: the steps left, the workers that failed, and what was done so far."""

    max_retries: int = 16
    progress_tokens: int = 16
    max_worker_failures: int = 3
    done: list[str] = field(default_factory=list)
    _left: tuple[RetryStep, ...] = _STEPS
    _failed: set[str] = field(default_factory=set)
    _avoid: set[str] = field(default_factory=set)
    _worker_failures: int = 0
    _from_tokens: int = 0
    _moves: int = 0  # entries of `done` that followed no failure

    def failed(self, worker_id: str, error: PdserveError, tokens: int) -> None:
        """An attempt failed on `worker_id` after `tokens` of the answer."""
        if tokens - self._from_tokens >= self.progress_tokens:
            self.restart()
        self._avoid.add(worker_id)
        # A failed transfer or an overload is the fault of a pair or of a moment.
        if not isinstance(error, TransferFailed | Overloaded):
            self._failed.add(worker_id)
            self._worker_failures += 1
            if self._worker_failures < self.max_worker_failures:
                self._left = _STEPS

    def restart(self) -> None:
        """Make all steps available again."""
        self._left, self._failed, self._avoid = _STEPS, set(), set()
        self._worker_failures = 0

    @property
    def is_used_up(self) -> bool:
        return len(self.done) - self._moves >= self.max_retries

    def next(self, *, pair_helps: bool) -> Constraints | None:
        """Return the next step, which is then used up, or None if there is none."""
        if not pair_helps:
            self._left = tuple(x for x in self._left if x is not RetryStep.PAIR)
        if self.is_used_up or not self._left:
            return None
        step, *left = self._left
        self._left = tuple(left)
        failed = frozenset(self._failed)
        without = failed if step is RetryStep.PAIR else frozenset()
        return Constraints(step, without, frozenset(self._avoid), failed)

    def continued(self, step: str, reason: str, tokens: int) -> None:
        """The next attempt starts after `tokens` of the answer."""
        self.done.append(f"{step}:{reason}")
        self._moves += reason == MOVED
        self._from_tokens = tokens


BURST_S = 30.0  # of the retry budget, usable at once


class RetryBudget:
    """Token bucket for each model: prompt and answer tokens that retries compute again.

    When a worker dies, all its requests are computed again elsewhere. The budget keeps that from
    overloading the rest. A bucket may go below zero by one request, so that a long prompt is not
    refused forever. A rate of 0 disables the limit. Times are in seconds on the caller's clock.
    """

    def __init__(self, tokens_per_s: float, burst_s: float = BURST_S) -> None:
        self._rate = tokens_per_s
        self._burst_s = burst_s
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, model: str, tokens: int, now: float) -> None:
        """Raises BudgetExhausted with the seconds until there is more."""
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
        """Return tokens that were taken and not computed."""
        if model in self._buckets:
            self._buckets[model].take(-tokens)
