"""Tenants: limits and usage of each. The clock is passed in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config import TenantConfig

BURST_S = 60.0  # a bucket holds what its rate fills in this time


class TokenBucket:
    """Fills at `rate` a second up to `size`. A charge larger than `size` is taken from a full
    bucket, which is then in debt."""

    def __init__(self, per_minute: float, burst_s: float = BURST_S) -> None:
        self.rate = per_minute / 60.0
        self.size = max(1.0, self.rate * burst_s)
        self.level = self.size
        self._filled_at: float | None = None
        self._next_retry = 0.0

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken."""
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


class _Account:
    """`buckets` are of requests and of tokens, with what a request over their rate is told."""

    def __init__(self, tenant: TenantConfig) -> None:
        self.tenant = tenant
        self.concurrent = 0
        self.mean_duration_s = 0.0
        limits = (
            (tenant.requests_per_minute, "send {:g} requests", Refusal.TENANT_REQUEST_RATE),
            (tenant.tokens_per_minute, "use {:g} tokens", Refusal.TENANT_TOKEN_RATE),
        )
        self.buckets = [
            (TokenBucket(rate) if rate else None, told.format(rate), reason)
            for rate, told, reason in limits
        ]

    def take(self, *amounts: float) -> None:
        for (bucket, _, _), amount in zip(self.buckets, amounts, strict=True):
            if bucket is not None:
                bucket.take(amount)


class TenantUsage:
    """What one request takes of its tenant's limits, until `release` or `refund`."""

    __slots__ = ("_account", "_arrived", "_tokens")

    def __init__(self, account: _Account | None, tokens: int, arrived: float) -> None:
        self._account = account
        self._tokens = tokens
        self._arrived = arrived

    def release(self, now: float) -> None:
        """The request ended, or its client left. Releasing again does nothing."""
        account, self._account = self._account, None
        if account is not None:
            account.concurrent -= 1
            account.mean_duration_s += 0.1 * (now - self._arrived - account.mean_duration_s)

    def refund(self) -> None:
        """The request was rejected: it costs the tenant nothing."""
        account, self._account = self._account, None
        if account is not None:
            account.concurrent -= 1
            account.take(-1, -self._tokens)


class Tenants:
    """Accounts of the configured tenants. Without any, every request is accepted."""

    def __init__(self, tenants: Iterable[TenantConfig] = ()) -> None:
        self._accounts = {tenant.name: _Account(tenant) for tenant in tenants}
        self._total_weight = sum(a.tenant.weight for a in self._accounts.values())

    def names(self) -> list[str]:
        return list(self._accounts)

    def weight(self, name: str) -> float:
        account = self._accounts.get(name)
        return 1.0 if account is None else account.tenant.weight

    def share(self, name: str) -> float:
        """Return the tenant's weight over that of all tenants."""
        return self.weight(name) / self._total_weight if name in self._accounts else 1.0

    def concurrent(self, name: str) -> int:
        """Return how many requests of a tenant are queued or running."""
        return self._accounts[name].concurrent

    def enter(self, name: str, tokens: int, now: float) -> TenantUsage:
        """Charge a request to its tenant. Raises Overloaded, naming the limit it exceeds."""
        if not self._accounts:
            return TenantUsage(None, 0, now)
        account = self._accounts[name]
        tenant = account.tenant
        limit = tenant.max_concurrent_requests
        if limit and account.concurrent >= limit:
            raise _exceeded(
                f"tenant {name} has {account.concurrent} open requests, the limit is {limit}",
                account.mean_duration_s / limit,
                Refusal.TENANT_CONCURRENCY,
            )
        for (bucket, told, reason), amount in zip(account.buckets, (1, tokens), strict=True):
            if bucket is not None and bucket.wait_s(amount, now):
                raise _exceeded(
                    f"tenant {name} may {told} a minute, and this request counts as {amount}",
                    bucket.retry_after_s(amount, now),
                    reason,
                )
        account.concurrent += 1
        account.take(1, tokens)
        return TenantUsage(account, tokens, now)


def _exceeded(message: str, wait_s: float, reason: Refusal) -> Overloaded:
    retry_after_s = float(max(1, math.ceil(wait_s)))
    return Overloaded(
        f"{message}; retry in {retry_after_s:.0f} s", retry_after_s=retry_after_s, reason=reason
    )
