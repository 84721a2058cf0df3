"""Pairs of workers that are kept apart: a circuit breaker for each (router/breaker.py).

KV that came damaged, and again when it was sent again, tells all; transfers that failed count, in a
row. Either may lie with one worker or between the two. Pure; the clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.breaker import Breaker, BreakerLimits, BreakerState

Pair = tuple[str, str]
"""The ids of a prefill and a decode worker. One that starts anew is on the same hardware."""


@dataclass(frozen=True, slots=True)
class QuarantinedPair:
    """For people: with no seconds left the pair is half open."""

    prefill: str
    decode: str
    remaining_s: float
    strikes: int
    reason: str = ""


class Quarantine:
    """State: the pairs that failed and were not found whole since. 0 seconds turn it off."""

    def __init__(self, seconds: float, failures: int = 3) -> None:
        self._limits = BreakerLimits(failures, seconds, seconds)
        self._breakers: dict[Pair, Breaker] = {}

    def strike(self, pair: Pair, now: float, reason: str = "") -> None:
        """KV came damaged between the two, and so did what came again."""
        if self._limits.open_s:
            self._forget(now)
            self._breakers.setdefault(pair, Breaker(self._limits)).trip(now, reason)

    def failed(self, pair: Pair, now: float, reason: str) -> bool:
        """A transfer between the two failed. True where they are kept apart for it."""
        if not self._limits.open_s:
            return False
        self._forget(now)
        return self._breakers.setdefault(pair, Breaker(self._limits)).failure(now, reason)

    def barred(self, now: float) -> frozenset[Pair]:
        """The pairs that no request may use now."""
        if not self._breakers:
            return frozenset()
        return frozenset(p for p, x in self._breakers.items() if x.state(now) is BreakerState.OPEN)

    def half_open(self, now: float) -> list[Pair]:
        """Those that may be tried."""
        return [p for p, x in self._breakers.items() if x.state(now) is BreakerState.HALF_OPEN]

    def tries(self, pair: Pair, now: float) -> bool:
        """A request was placed on the pair. True where it is the one that tries a half-open pair:
        its caller tells `whole` if all goes well."""
        breaker = self._breakers.get(pair)
        return breaker is not None and breaker.tries(now)

    def whole(self, pair: Pair) -> None:
        """The request that tried the pair has got its KV undamaged."""
        self._breakers.pop(pair, None)

    def came(self, pair: Pair, now: float) -> None:
        """KV came, for a request that was no trial: what failed before was not in a row."""
        breaker = self._breakers.get(pair)
        if breaker is not None and breaker.state(now) is BreakerState.CLOSED:
            del self._breakers[pair]

    def listed(self, now: float) -> list[QuarantinedPair]:
        """Those open and half open, in the order in which they failed first."""
        self._forget(now)
        return [
            QuarantinedPair(*pair, x.remaining_s(now), x.failures, x.reason)
            for pair, x in self._breakers.items()
            if x.state(now) is not BreakerState.CLOSED
        ]

    def _forget(self, now: float) -> None:
        # Half open for as long as it was open, and nobody came to try: its workers may be gone.
        gone = [p for p, x in self._breakers.items() if x.until and now >= x.until + x.seconds]
        for pair in gone:
            del self._breakers[pair]
