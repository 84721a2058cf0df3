"""Tenants: what each may ask for, and what it has asked for. The clock is passed in."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, Refusal
from router.admission.promises import GRACE_S, MAX_PROMISES, MAX_RETRY_AFTER_S, Returns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config import TenantConfig
    from router.admission.limits import Bid

# A bucket holds what its rate fills in so long, and at least one request.
BURST_S = 60.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's share and its limits; 0 is none. Rates are a minute's, as users know them."""

    name: str
    weight: float = 1.0
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    max_concurrent_requests: int = 0


@dataclass(slots=True)
class TokenBucket:
    """Fills at `rate` a second up to `size`, from full. A charge larger than the bucket is taken
    from a full one, which is then in debt: large requests are served, and paid for in time.

    Who is told to come again has its charge set aside: nobody else is served from it meanwhile.
    """

    rate: float
    size: float
    level: float = field(init=False)
    at: float | None = None
    aside: OrderedDict[int, tuple[float, float]] = field(default_factory=OrderedDict)
    returns: Returns = field(default_factory=Returns)

    def __post_init__(self) -> None:
        self.level = self.size

    def _fill(self, now: float) -> None:
        if self.at is not None:
            self.level = min(self.size, self.level + max(0.0, now - self.at) * self.rate)
        self.at = now
        while self.aside:
            identity, (due, amount) = next(iter(self.aside.items()))
            if due + GRACE_S >= now:
                return
            del self.aside[identity]
            self.returns.stayed_away()
            self.level = min(self.size, self.level + amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken; 0 where it can be now."""
        self._fill(now)
        return max(0.0, (min(amount, self.size) - self.level) / self.rate)

    def take(self, amount: float) -> None:
        self.level -= amount

    def put_aside(self, identity: int, amount: float, due: float) -> None:
        """Take now what will be asked for again at `due`, by most of those who are told so."""
        if len(self.aside) < MAX_PROMISES:
            kept = amount if self.returns.share > 0.5 else 0.0
            self.take(kept)
            self.aside[identity] = (due, kept)

    def pick_up(self, identity: int, now: float) -> bool:
        """Whether something was put aside for who asks, who may take it now."""
        self._fill(now)
        due, kept = self.aside.get(identity, (math.inf, 0.0))
        if due > now:
            return False
        del self.aside[identity]
        self.returns.came()
        self.level += kept
        return kept > 0.0

    def early_s(self, identity: int, now: float) -> float:
        """Seconds until the time that was told to who asks; 0 for one who was told none."""
        return max(0.0, self.aside.get(identity, (now, 0.0))[0] - now)

    def give_back(self, amount: float, now: float) -> None:
        self._fill(now)
        self.level = min(self.size, self.level + amount)


def _wait_s(bucket: TokenBucket | None, amount: float, identity: int, now: float) -> float:
    """Seconds until a request can be charged, which is then put aside for it; 0 where it is."""
    if bucket is None or bucket.pick_up(identity, now):
        return 0.0
    wait_s = bucket.early_s(identity, now) or float(math.ceil(bucket.wait_s(amount, now)))
    if wait_s > MAX_RETRY_AFTER_S:
        return MAX_RETRY_AFTER_S
    if wait_s > 0.0 and identity not in bucket.aside:
        bucket.put_aside(identity, amount, now + wait_s)
    return wait_s


class _Account:
    """State of one tenant: its buckets, and the requests it has waiting and running."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.requests = _bucket(tenant.requests_per_minute)
        self.tokens = _bucket(tenant.tokens_per_minute)
        self.concurrent = 0
        self.stay_s = 0.0  # a moving mean


def _bucket(per_minute: float) -> TokenBucket | None:
    if not per_minute:
        return None
    return TokenBucket(per_minute / 60.0, max(1.0, per_minute * BURST_S / 60.0))


class Stay:
    """One request of a tenant, from its arrival on; ended once, by `release` or by `refuse`."""

    __slots__ = ("_account", "_came", "_tokens")

    def __init__(self, account: _Account | None, tokens: int, came: float) -> None:
        self._account = account
        self._tokens = tokens
        self._came = came

    @property
    def weight(self) -> float:
        return 1.0 if self._account is None else self._account.tenant.weight

    def release(self, now: float) -> None:
        """It ended, or its client left."""
        account, self._account = self._account, None
        if account is not None:
            account.concurrent -= 1
            account.stay_s += 0.1 * (now - self._came - account.stay_s)

    def refuse(self, now: float) -> None:
        """Nothing was computed for it: it costs the tenant nothing."""
        account, self._account = self._account, None
        if account is None:
            return
        account.concurrent -= 1
        if account.requests is not None:
            account.requests.give_back(1.0, now)
        if account.tokens is not None:
            account.tokens.give_back(self._tokens, now)


OPEN = Stay(None, 0, 0.0)


def tenants_of(configured: Iterable[TenantConfig]) -> Tenants:
    """The tenants that the configuration names."""
    return Tenants(
        Tenant(
            tenant.name,
            tenant.weight,
            tenant.requests_per_minute,
            tenant.tokens_per_minute,
            tenant.max_concurrent_requests,
        )
        for tenant in configured
    )


class Tenants:
    """The accounts of all tenants. Without any, whoever comes is taken."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self._accounts = {tenant.name: _Account(tenant) for tenant in tenants}

    def weight(self, name: str) -> float:
        account = self._accounts.get(name)
        return 1.0 if account is None else account.tenant.weight

    def names(self) -> list[str]:
        return list(self._accounts)

    def concurrent(self, name: str) -> int:
        """Requests that a tenant has waiting or running."""
        return self._accounts[name].concurrent

    def enter(self, bid: Bid, now: float) -> Stay:
        """Count a request in, against its tenant's limits. Raises Overloaded with the reason."""
        if not self._accounts:
            return OPEN
        account = self._accounts[bid.tenant]
        self._check(account, bid, now)
        account.concurrent += 1
        if account.requests is not None:
            account.requests.take(1.0)
        if account.tokens is not None:
            account.tokens.take(bid.work_tokens)
        return Stay(account, bid.work_tokens, now)

    def _check(self, account: _Account, bid: Bid, now: float) -> None:
        tenant = account.tenant
        cap = tenant.max_concurrent_requests
        if cap and account.concurrent >= cap:
            raise _over(
                f"tenant {tenant.name} has {account.concurrent} requests open, and may have {cap}",
                max(1.0, account.stay_s / cap),
                Refusal.TENANT_CONCURRENCY,
            )
        identity = hash(bid.identity)
        if (wait_s := _wait_s(account.requests, 1.0, identity, now)) > 0.0:
            raise _over(
                f"tenant {tenant.name} may send {tenant.requests_per_minute:g} requests a minute",
                wait_s,
                Refusal.TENANT_REQUEST_RATE,
            )
        if (wait_s := _wait_s(account.tokens, bid.work_tokens, identity, now)) > 0.0:
            raise _over(
                f"tenant {tenant.name} may use {tenant.tokens_per_minute:g} tokens a minute, and "
                f"this request is counted as {bid.work_tokens}",
                wait_s,
                Refusal.TENANT_TOKEN_RATE,
            )


def _over(message: str, retry_after_s: float, reason: Refusal) -> Overloaded:
    return Overloaded(
        f"{message}; try again in {retry_after_s:.1f} s",
        retry_after_s=retry_after_s,
        reason=reason,
    )
