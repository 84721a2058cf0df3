"""Limits the work that retries compute again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.errors import BudgetExhausted, Unavailable
from router.admission.tenants import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Iterator

BURST_S = 30.0  # size of the bucket, in seconds of the rate


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

    @contextmanager
    def taking(self, model: str, tokens: int, now: float) -> Iterator[None]:
        """Take `tokens` from the budget of `model`. Return them if the block raises Unavailable,
        because nothing is then computed.

        Raises BudgetExhausted; its Retry-After is the time until the bucket has tokens again.
        """
        bucket = self._buckets.get(model)
        if bucket is None and self._rate:
            bucket = self._buckets[model] = TokenBucket(60.0 * self._rate, self._burst_s)
        if bucket is None:
            yield
            return
        if wait_s := bucket.wait_s(0.0, now):
            raise BudgetExhausted(
                f"retry budget of model {model} is used up ({self._rate:g} tokens/s)",
                retry_after_s=max(1.0, wait_s),
            )
        bucket.take(tokens)
        try:
            yield
        except Unavailable:
            bucket.take(-tokens)
            raise
