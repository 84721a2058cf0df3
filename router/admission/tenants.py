"""Tenants: limits and usage of each tenant. Times are arguments; nothing here reads a clock."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from pdserve.config import TenantConfig
from pdserve.errors import Overloaded, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from pdserve.errors import PdserveError

# Estimate for English text in JSON.
BYTES_PER_TOKEN = 4
# An image of so many bytes is about one token of a prompt: a photograph of 1 MiB, about 1,000.
IMAGE_BYTES_PER_TOKEN = 1024
BURST_S = 60.0  # a bucket holds as much as its rate yields in this time


class TokenBucket:
    """Token bucket that fills at `rate` per second up to `size`. A rate of 0 is no limit.

    A charge larger than `size` is possible when the bucket is full, which is then in debt.
    Otherwise large requests would be rejected forever.
    """

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
        """Return the Retry-After of a rejected request. Each request gets a different time, so that
        clients do not all retry at once and are rejected again."""
        retry = max(self._next_retry, now + self.wait_s(amount, now))
        self._next_retry = retry + min(amount, self.size) / self.rate
        return retry - now

    def take(self, amount: float) -> None:
        """Take `amount`. A negative amount is returned to the bucket."""
        self.level = min(self.size, self.level - amount)


class Tenant:
    """Limits of one tenant, and their use by its open requests."""

    def __init__(self, config: TenantConfig) -> None:
        self.weight = config.weight
        self.open_requests = 0
        self._config = config
        self._requests = TokenBucket(config.requests_per_minute)
        self._tokens = TokenBucket(config.tokens_per_minute)
        self._mean_duration_s = 0.0

    def enter(self, tokens: int, now: float, answers: int = 1) -> None:
        """Charge a request with this number of answers. Raises Overloaded, naming the limit that it
        exceeds."""
        name, limit = self._config.name, self._config.max_concurrent_requests
        count = self._count(answers)
        if limit and self.open_requests + count > limit:
            raise _exceeded(
                f"tenant {name} has {self.open_requests} open requests, this one counts as "
                f"{count}, and the limit is {limit}",
                self._mean_duration_s / limit,
                Refusal.TENANT_CONCURRENCY,
            )
        self.charge(tokens, now)
        self.open_requests += count

    def _count(self, answers: int) -> int:
        """Return the number of open requests that a request counts as. Each answer counts as one,
        up to the limit, so that a request with more answers can run alone."""
        return min(answers, self._config.max_concurrent_requests or answers)

    def charge(self, tokens: int, now: float, requests: int = 1) -> None:
        """Charge tokens and requests to the rates, without an open request. Raises Overloaded,
        naming the limit that is exceeded."""
        name = self._config.name
        # Check both limits before taking from either.
        for bucket, amount, unit, reason in (
            (self._requests, requests, "requests", Refusal.TENANT_REQUEST_RATE),
            (self._tokens, tokens, "tokens", Refusal.TENANT_TOKEN_RATE),
        ):
            if bucket.wait_s(amount, now):
                told = f"may use {60 * bucket.rate:g} {unit} a minute"
                raise _exceeded(
                    f"tenant {name} {told}, and this request counts as {amount}",
                    bucket.retry_after_s(amount, now),
                    reason,
                )
        self._requests.take(requests)
        self._tokens.take(tokens)

    def give_back(self, tokens: int) -> None:
        """Return tokens that `charge` took."""
        self._tokens.take(-tokens)

    def leave(self, seconds: float, answers: int = 1) -> None:
        """Record that a request ended, or its client left, after `seconds`."""
        self.open_requests -= self._count(answers)
        # Moving mean: the Retry-After of the concurrency limit.
        self._mean_duration_s += 0.1 * (seconds - self._mean_duration_s)

    def refund(self, tokens: int, answers: int = 1) -> None:
        """Undo `enter` for a rejected request, which costs the tenant nothing."""
        self.open_requests -= self._count(answers)
        # Not the mean duration: a rejected request did not run.
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
        """Return the number of queued and running requests of a tenant. Each answer counts."""
        return self[name].open_requests


_FREE = nullcontext()


class Door:
    """Charges tenants for bodies by size before they are read, so that rejected bodies and bodies
    that are only tokenised are limited too.

    A request for answers gets these tokens back once it is prepared, because admission charges its
    prompt and answer. `refused` is called for each rejected body with the model, "" because it is
    not known yet, the tenant and the error.
    """

    def __init__(
        self,
        tenants: Tenants,
        clock: Callable[[], float],
        refused: Callable[[str, str, PdserveError], None],
    ) -> None:
        self._tenants, self._now, self._refused = tenants, clock, refused
        # Without tenants nobody has a rate, and every request would pay for looking.
        self._charges = bool(tenants.names())

    def charge(
        self, tenant: str, size: int, requests: int = 0, *, images: int = 0
    ) -> AbstractContextManager[object]:
        """Charge a body of `size` bytes, of which `images` are of images. `requests` is 1 for a
        body that admission does not count. Raises Overloaded if a rate of the tenant is used up.
        The context that is returned gives the tokens back if it ends without an error."""
        if not self._charges:
            return _FREE
        tokens = (size - images) // BYTES_PER_TOKEN + images // IMAGE_BYTES_PER_TOKEN
        try:
            self._tenants[tenant].charge(tokens, self._now(), requests)
        except Overloaded as error:
            self._refused("", tenant, error)
            raise
        return self._given_back(tenant, tokens)

    @contextmanager
    def _given_back(self, tenant: str, tokens: int) -> Iterator[None]:
        yield
        self._tenants[tenant].give_back(tokens)


def _exceeded(message: str, wait_s: float, reason: Refusal) -> Overloaded:
    retry_after_s = float(max(1, math.ceil(wait_s)))
    return Overloaded(
        f"{message}; retry in {retry_after_s:.0f} s", retry_after_s=retry_after_s, reason=reason
    )
