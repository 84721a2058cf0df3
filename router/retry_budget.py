"""How much may be computed again: a token bucket for each model.

When a worker dies, all that it had is computed again elsewhere, and a pool that is overloaded by
that fails more requests, which are computed again. So tokens of prompts and answers that a fallback
computes again are taken from a budget, and where it is used up requests end with a clean error.
The bucket may go below zero by one request, so that a long prompt is not refused for ever.
Pure; the clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import BudgetExhausted


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class RetryBudget:
    """State: one bucket a model that has had fallbacks. A rate of 0 means no bound."""

    def __init__(self, tokens_per_s: float, burst_s: float) -> None:
        self._rate = tokens_per_s
        self._burst = tokens_per_s * burst_s
        self._buckets: dict[str, _Bucket] = {}

    def take(self, model: str, tokens: int, now: float) -> None:
        """Raises BudgetExhausted, with the seconds until there is more, where it is used up."""
        if not self._rate:
            return
        bucket = self._buckets.setdefault(model, _Bucket(self._burst, now))
        self._fill(bucket, now)
        if bucket.tokens <= 0:
            raise BudgetExhausted(
                f"a worker failed, and what may be computed again for model {model} "
                f"({self._rate:g} tokens/s) is used up",
                retry_after_s=max(1.0, -bucket.tokens / self._rate),
            )
        bucket.tokens -= tokens

    def give_back(self, model: str, tokens: int) -> None:
        """Tokens that were taken are not computed after all."""
        if model in self._buckets:
            self._buckets[model].tokens += tokens

    def left(self, model: str, now: float) -> float:
        """Tokens that may be computed again now; below 0 for the time to wait."""
        bucket = self._buckets.get(model)
        if bucket is None:
            return self._burst
        self._fill(bucket, now)
        return bucket.tokens

    def _fill(self, bucket: _Bucket, now: float) -> None:
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._rate)
        bucket.at = now
