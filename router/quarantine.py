"""Pairs of workers that are kept apart: a circuit breaker for each (router/breaker.py).

KV that came damaged, and again when it was sent again, tells all; transfers that failed count, in a
row. Either may lie with one worker or between the two. Pure; the clock is the caller's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

from router.breaker import Breaker, BreakerLimits, BreakerState

# Pairs; beyond that it is forgotten when KV came between any of them.
_MAX_NOTED = 65536
_CANARY_COMES_S = 600.0

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
    """State: the pairs that failed and were not found whole since, when KV last came between any
    two, and what canaries found. 0 seconds turn it off. With `by_canary` no request tries a
    half-open pair: canaries do (router/canaries.py)."""

    def __init__(self, seconds: float, failures: int = 3) -> None:
        self.by_canary = False
        self.canaries = Counter[str]()
        self._limits = BreakerLimits(failures, seconds, seconds)
        self._breakers: dict[Pair, Breaker] = {}
        self._came_at: dict[Pair, float] = {}

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
        free = {BreakerState.CLOSED}
        if not self.by_canary:
            free.add(BreakerState.HALF_OPEN)
        return frozenset(p for p, x in self._breakers.items() if x.state(now) not in free)

    def half_open(self, now: float) -> list[Pair]:
        """Those that may be tried."""
        return [p for p, x in self._breakers.items() if x.state(now) is BreakerState.HALF_OPEN]

    def tries(self, pair: Pair, now: float) -> bool:
        """A request was placed on the pair. True where it is the one that tries a half-open pair:
        its caller tells `whole` if all goes well."""
        breaker = self._breakers.get(pair)
        return breaker is not None and breaker.tries(now)

    def whole(self, pair: Pair, now: float) -> None:
        """The request that tried the pair has got its KV undamaged."""
        self._note(pair, now)
        self._breakers.pop(pair, None)

    def unused_s(self, pair: Pair, now: float) -> float:
        """How long no KV has come between the two; without end where none ever did."""
        return now - self._came_at.get(pair, -inf)

    def _note(self, pair: Pair, now: float) -> None:
        if len(self._came_at) >= _MAX_NOTED and pair not in self._came_at:
            self._came_at.clear()
        self._came_at[pair] = now

    def came(self, pair: Pair, now: float) -> None:
        """KV came, for a request that was no trial: what failed before was not in a row."""
        self._note(pair, now)
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
        # Half open for as long as it was open, and nobody came to try: its workers may be gone. A
        # canary comes as soon as both are ready.
        least_s = _CANARY_COMES_S if self.by_canary else 0.0
        gone = [
            p
            for p, x in self._breakers.items()
            if x.until and now >= x.until + max(x.seconds, least_s)
        ]
        for pair in gone:
            del self._breakers[pair]
