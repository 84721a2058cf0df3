"""Tenants: limits and usage of each. The clock is passed in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdserve.config import TenantConfig
from pdserve.errors import Overloaded, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

BURST_S = 60.0  # a bucket holds what its rate fills in this time


class TokenBucket:
    """Fills at `rate` a second up to `size`; a rate of 0 is no limit. A charge larger than `size`
    is taken from a full bucket, which is then in debt."""

    def __init__(self, per_minute: float, burst_s: float = BURST_S) -> None:
        self.rate = per_minute / 60.0
        self.size = max(1.0, self.rate * burst_s)
        self.level = self.size
        self._filled_at: float | None = None
        self._next_retry = 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken."""
        if not self.rate:
            return 0.0
        if self._filled_at is not None:
            passed_s = max(0.0, now - self._filled_at)
            self.level = min(self.size, self.level + passed_s * self.rate)
        self._filled_at = now
        return max(0.0, (min(amount, self.size) - self.level) / self.rate)

    def retry_after_s(self, amount: float, now: float) -> float:
        """Return when to retry after `wait_s`: each rejected request is told another time."""
        retry = max(self._next_retry, now + self.wait_s(amount, now))
        self._next_retry = retry + min(amount, self.size) / self.rate
        return retry - now

    def take(self, amount: float) -> None:
        """Take `amount`, or give it back if it is negative."""
        self.level = min(self.size, self.level - amount)


class Tenant:
    """A tenant's limits, and what its open requests use of them."""

    def __init__(self, config: TenantConfig) -> None:
        self.weight = config.weight
        self.open_requests = 0
        self._config = config
        self._requests = TokenBucket(config.requests_per_minute)
        self._tokens = TokenBucket(config.tokens_per_minute)
        self._mean_duration_s = 0.0

    def enter(self, tokens: int, now: float) -> None:
        """Charge a request. Raises Overloaded, naming the limit it exceeds."""
        name, limit = self._config.name, self._config.max_concurrent_requests
        if limit and self.open_requests >= limit:
            raise _exceeded(
                f"tenant {name} has {self.open_requests} open requests, the limit is {limit}",
                self._mean_duration_s / limit,
                Refusal.TENANT_CONCURRENCY,
            )
        for bucket, amount, unit, reason in (
            (self._requests, 1, "requests", Refusal.TENANT_REQUEST_RATE),
            (self._tokens, tokens, "tokens", Refusal.TENANT_TOKEN_RATE),
        ):
            if bucket.wait_s(amount, now):
                told = f"may use {60 * bucket.rate:g} {unit} a minute"
                raise _exceeded(
                    f"tenant {name} {told}, and this request counts as {amount}",
                    bucket.retry_after_s(amount, now),
                    reason,
                )
        self.open_requests += 1
        self._requests.take(1)
        self._tokens.take(tokens)

    def leave(self, seconds: float) -> None:
        """A request ended, or its client left, after `seconds`."""
        self.open_requests -= 1
        self._mean_duration_s += 0.1 * (seconds - self._mean_duration_s)

    def refund(self, tokens: int) -> None:
        """A request was rejected: it costs the tenant nothing."""
        self.open_requests -= 1
        self._requests.take(-1)
        self._tokens.take(-tokens)


class Tenants:
    """The configured tenants. Without any, every request is accepted."""

    def __init__(self, tenants: Iterable[TenantConfig] = ()) -> None:
        self._tenants = {tenant.name: Tenant(tenant) for tenant in tenants}
        self._anyone = Tenant(TenantConfig(name="anyone"))
        self._total_weight = sum(tenant.weight for tenant in self._tenants.values())

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name] if self._tenants else self._anyone

    def names(self) -> list[str]:
        return list(self._tenants)

    def share(self, name: str) -> float:
        """Return the tenant's weight over that of all tenants."""
        return self[name].weight / self._total_weight if self._tenants else 1.0

    def concurrent(self, name: str) -> int:
        """Return how many requests of a tenant are queued or running."""
        return self[name].open_requests


def _exceeded(message: str, wait_s: float, reason: Refusal) -> Overloaded:
    retry_after_s = float(max(1, math.ceil(wait_s)))
    return Overloaded(
        f"{message}; retry in {retry_after_s:.0f} s", retry_after_s=retry_after_s, reason=reason
    )
