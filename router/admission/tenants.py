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

# Estimate for English text in JSON.
BYTES_PER_TOKEN = 4
# Bytes of an image per prompt token, roughly: a photograph of 1 MiB has about 1,000 tokens.
IMAGE_BYTES_PER_TOKEN = 1024
BURST_S = 60.0  # size of a bucket, in seconds of its rate


class TokenBucket:
    """Token bucket that fills at `rate` per second up to `size`. A rate of 0 is no limit.

    A full bucket accepts a charge larger than `size` and is then in debt. Otherwise large requests
    would be rejected forever.
    """

    def __init__(self, per_minute: float, burst_s: float = BURST_S) -> None:
        self.rate, self._burst_s = per_minute / 60.0, burst_s
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

    def share_left(self, now: float) -> float:
        """Return the part of the size that is left, 0 to 1."""
        self.wait_s(0.0, now)
        return max(0.0, self.level / self.size) if self.rate else 1.0

    def take(self, amount: float) -> None:
        """Take `amount`. A negative amount is returned to the bucket."""
        self.level = min(self.size, self.level - amount)

    def change_rate(self, per_minute: float) -> None:
        """Change the rate. The fill level stays the same share of the size."""
        share = self.level / self.size if self.rate else 1.0
        self.rate = per_minute / 60.0
        self.size = max(1.0, self.rate * self._burst_s)
        self.level = share * self.size


class Tenant:
    """Limits of one tenant, and their use by its open requests."""

    def __init__(self, config: TenantConfig) -> None:
        self.weight = config.weight
        self.open_requests = 0
        self._config = config
        self._requests = TokenBucket(config.requests_per_minute)
        self._tokens = TokenBucket(config.tokens_per_minute)
        self._mean_duration_s = 0.0

    def use(self, config: TenantConfig) -> None:
        """Use other limits from now on."""
        self.weight, self._config = config.weight, config
        self._requests.change_rate(config.requests_per_minute)
        self._tokens.change_rate(config.tokens_per_minute)

    @property
    def allowed_models(self) -> frozenset[str] | None:
        """The models that its requests may use, None for all."""
        return frozenset(self._config.allowed_models) or None

    def budget_left(self, now: float) -> float:
        """Return the share of its rates that is left, 0 to 1."""
        return min(self._requests.share_left(now), self._tokens.share_left(now))

    def enter(self, tokens: int, now: float, answers: int = 1) -> None:
        """Charge a request with `answers` answers. Raises Overloaded, naming the exceeded limit."""
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
        naming the exceeded limit."""
        if not (self._requests.rate or self._tokens.rate):
            return
        name = self._config.name
        # Check both limits before taking from either.
        for bucket, amount, unit, reason in (
            (self._requests, requests, "requests", Refusal.TENANT_REQUEST_RATE),
            (self._tokens, tokens, "tokens", Refusal.TENANT_TOKEN_RATE),
        ):
            if bucket.wait_s(amount, now):
                rate = f"may use {60 * bucket.rate:g} {unit} a minute"
                raise _exceeded(
                    f"tenant {name} {rate}, and this request counts as {amount}",
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
        self._tenants: dict[str, Tenant] = {}
        self._anyone = Tenant(TenantConfig(name="anyone"))
        self.use(tenants)

    def use(self, tenants: Iterable[TenantConfig]) -> None:
        """Use these tenants from now on. A removed tenant stays known for its open requests and
        batches."""
        self._names = []
        for config in tenants:
            self._names.append(config.name)
            self._tenants.setdefault(config.name, Tenant(config)).use(config)
        self._total_weight = sum(self._tenants[name].weight for name in self._names)

    def __getitem__(self, name: str) -> Tenant:
        """Return the tenant with this name; "" is the router itself."""
        return self._tenants[name] if name and self._tenants else self._anyone

    def names(self) -> list[str]:
        return self._names

    def share(self, name: str) -> float:
        """Return the tenant's share of the sum of all weights."""
        return self[name].weight / self._total_weight if self._tenants else 1.0

    def concurrent(self, name: str) -> int:
        """Return the number of queued and running requests of a tenant. Each answer counts."""
        return self[name].open_requests


_FREE = nullcontext()


class Door:
    """Charges tenants for bodies by size before they are read, so that rejected bodies and bodies
    that are only tokenised are limited too. A generation request gets these tokens back once it is
    prepared, because admission charges its prompt and answer. `refused` is called for each rejected
    body with the model ("", not known yet), the tenant, and the error's code and reason.
    """

    def __init__(
        self,
        tenants: Tenants,
        clock: Callable[[], float],
        refused: Callable[[str, str, str, str], None],
    ) -> None:
        self._tenants, self._now, self._refused = tenants, clock, refused
        # Without tenants there are no rates: skip the look-up for every request.
        self._charges = bool(tenants.names())

    def charge(
        self, tenant: str, size: int, requests: int = 0, *, images: int = 0
    ) -> AbstractContextManager[object]:
        """Charge a body of `size` bytes, of which `images` are of images. `requests` is 1 for a
        body that admission does not count. Raises Overloaded if a rate of the tenant is used up.
        The returned context returns the tokens if it ends without an error."""
        if not self._charges:
            return _FREE
        tokens = (size - images) // BYTES_PER_TOKEN + images // IMAGE_BYTES_PER_TOKEN
        try:
            self._tenants[tenant].charge(tokens, self._now(), requests)
        except Overloaded as error:
            self._refused("", tenant, error.code, error.reason)
            raise
        return self._given_back(tenant, tokens)

    def allowed_models(self, tenant: str) -> frozenset[str] | None:
        """Return the models that requests of a tenant may use, None for all."""
        return self._tenants[tenant].allowed_models if self._charges else None

    def budget_left(self, tenant: str) -> float:
        """Return the share of a tenant's rates that is left, 0 to 1."""
        return self._tenants[tenant].budget_left(self._now())

    @contextmanager
    def _given_back(self, tenant: str, tokens: int) -> Iterator[None]:
        yield
        self._tenants[tenant].give_back(tokens)


def _exceeded(message: str, wait_s: float, reason: Refusal) -> Overloaded:
    retry_after_s = float(max(1, math.ceil(wait_s)))
    return Overloaded(
        f"{message}; retry in {retry_after_s:.0f} s", retry_after_s=retry_after_s, reason=reason
    )
