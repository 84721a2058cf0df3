"""Pairs of workers between which KV came damaged: not paired for a while, then tried once.

    open ──strike──► closed ──time──► half open ──whole──► open
                       ▲                  │  one request tries; meanwhile, and where its trial says
                       └──────────────────┘  nothing, the pair is closed for the same time again

A circuit breaker by pair, for damage can lie with either worker or between them. Pure; the clock is
the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[str, str]
"""The ids of a prefill and a decode worker. One that starts anew is on the same hardware."""


@dataclass(slots=True)
class _Entry:
    until: float
    strikes: int


@dataclass(frozen=True, slots=True)
class QuarantinedPair:
    """For people: with no seconds left the pair is half open."""

    prefill: str
    decode: str
    remaining_s: float
    strikes: int


class Quarantine:
    """State: the pairs struck and not found whole since. 0 seconds turn it off."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: dict[Pair, _Entry] = {}

    def strike(self, pair: Pair, now: float) -> None:
        """KV came damaged between the two, and so did what came again."""
        if not self._seconds:
            return
        self._forget(now)
        entry = self._entries.setdefault(pair, _Entry(now, 0))
        entry.until = now + self._seconds
        entry.strikes += 1

    def closed(self, now: float) -> frozenset[Pair]:
        """The pairs that no request may use now."""
        return frozenset(pair for pair, entry in self._entries.items() if now < entry.until)

    def tries(self, pair: Pair, now: float) -> bool:
        """A request was placed on the pair. True where it is the one that tries a half-open pair:
        its caller tells `whole` if all goes well."""
        entry = self._entries.get(pair)
        if entry is None or now < entry.until:
            return False
        entry.until = now + self._seconds
        return True

    def whole(self, pair: Pair) -> None:
        """The request that tried the pair has got its KV undamaged."""
        self._entries.pop(pair, None)

    def listed(self, now: float) -> list[QuarantinedPair]:
        """Those closed and half open, in the order in which they were struck first."""
        self._forget(now)
        return [
            QuarantinedPair(*pair, max(0.0, entry.until - now), entry.strikes)
            for pair, entry in self._entries.items()
        ]

    def _forget(self, now: float) -> None:
        # Half open for as long as it was closed, and nobody came to try: its workers may be gone.
        for pair in [p for p, e in self._entries.items() if now >= e.until + self._seconds]:
            del self._entries[pair]
